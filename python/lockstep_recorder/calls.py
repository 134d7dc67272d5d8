"""What becomes of every method that the engine can call on a scheduler.

Recorded are those that scheduler.py overrides. Of the others each public one is listed here as
without effect, or ends the recording when it is called.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

_ASKS = "changes nothing"
_REPORTS = "counters of what is reported"

WITHOUT_EFFECT = {
    "get_ec_connector": _ASKS,
    "get_grammar_bitmask": "of structured output, which ends the recording",
    "get_kv_cache_usage": _ASKS,
    "get_kv_connector": _ASKS,
    "get_kv_event_publisher_config": _ASKS,
    "get_num_unfinished_requests": _ASKS,
    "get_request_counts": _ASKS,
    "has_finished_requests": _ASKS,
    "has_request": _ASKS,
    "has_requests": _ASKS,
    "has_unfinished_requests": _ASKS,
    "make_spec_decoding_stats": _REPORTS,
    "make_stats": _REPORTS,
    "pause_state": _ASKS,
    "reset_connector_cache": "of connectors, which are refused",
    "reset_encoder_cache": "of multimodal inputs, which end the recording",
}


def methods_of(cls: type) -> list[str]:
    """The public methods and properties of a scheduler."""
    return sorted(
        name
        for name in dir(cls)
        if not name.startswith("_")
        and (callable(getattr(cls, name)) or isinstance(getattr(cls, name), property))
    )


def _ending(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.calls_open:
            self.recorder.unrecorded(f"a call of {name}()")
        return method(self, *args, **kwargs)

    return ends


def end_on_others(recorded: type) -> Callable[[type], type]:
    """Makes every method of a class end the recording that neither `recorded` overrides nor
    WITHOUT_EFFECT lists."""

    def guarded(cls: type) -> type:
        for name in methods_of(cls):
            method = getattr(cls, name)
            if callable(method) and name not in vars(recorded) and name not in WITHOUT_EFFECT:
                setattr(cls, name, _ending(name, method))
        return cls

    return guarded
