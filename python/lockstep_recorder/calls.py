"""The handling of every method that the engine can call on a scheduler, and of every field that
goes through its hands.

scheduler.py overrides the recorded methods. Every other public method is listed here as without
effect, or ends the recording when it is called. A test inside vLLM compares the tables
against the installed release (python/tests/vllm_reads_test.py).
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
    "reset_encoder_cache": "of images: decides for the requests that have them",
}


# May be set from outside.
ATTRIBUTES_WITHOUT_EFFECT = {
    "calls_open": "the recorder's own",
    "can_skip_drafts": "the worker's: what it then drafts is written",
    "log_stats": _REPORTS,
    "return_sampling_mask": _REPORTS,
    "use_v2_model_runner": "how resumed requests are passed: written the same way",
}

# Called on the way of requests that have ended the recording before.
ENDS_THE_RECORDING = {
    "update_draft_token_ids_in_output": "of structured output",
}

_WRITTEN = "written"
_IMAGES = "of requests with images, which are written"
_REFUSED = "of requests that end the recording"
_CONNECTORS = "of connectors, which are refused"
_GRAMMAR = "of structured output, which ends the recording"
_DERIVED = "follows from what is written"
_KNOWN = "written where the request was added"

FIELDS_OF_A_STEP = {  # SchedulerOutput
    "scheduled_new_reqs": _WRITTEN,
    "scheduled_cached_reqs": _WRITTEN,
    "num_scheduled_tokens": _WRITTEN,
    "scheduled_spec_decode_tokens": _WRITTEN,
    "num_common_prefix_blocks": _WRITTEN,
    "finished_req_ids": _WRITTEN,
    "preempted_req_ids": _WRITTEN,
    "new_block_ids_to_zero": _WRITTEN,
    "kv_cache_block_copies": _WRITTEN,
    "total_num_scheduled_tokens": _DERIVED,
    "num_spec_tokens_to_schedule": _DERIVED,
    "skip_drafts": "the worker's: what it then drafts is written",
    "scheduled_encoder_inputs": _IMAGES,
    "scheduled_encoder_input_stats": _IMAGES,
    "encoder_input_updates": _IMAGES,
    "free_encoder_mm_hashes": _IMAGES,
    "ec_manager_metadata": _IMAGES,
    "has_structured_output_requests": _GRAMMAR,
    "pending_structured_output_tokens": _GRAMMAR,
    "num_invalid_spec_tokens": _GRAMMAR,
    "kv_connector_metadata": _CONNECTORS,
    "kv_connector_block_state": _CONNECTORS,
    "has_sync_kv_loads": _CONNECTORS,
    "ec_connector_metadata": _CONNECTORS,
    "aux_output_connector_metadata": "of auxiliary outputs, which are flagged",
}

FIELDS_OF_A_NEW_REQUEST = {  # NewRequestData
    "req_id": _WRITTEN,
    "block_ids": _WRITTEN,
    "num_computed_tokens": _WRITTEN,
    "replay_start": _DERIVED,
    "prompt_token_ids": _KNOWN,
    "prefill_token_ids": _KNOWN,
    "sampling_params": _KNOWN,
    "mm_features": _KNOWN,
    "pooling_params": _REFUSED,
    "lora_request": _KNOWN,
    "prompt_embeds": _KNOWN,
    "prompt_is_token_ids": _KNOWN,
}

FIELDS_OF_THE_OTHERS = {  # CachedRequestData
    "req_ids": _WRITTEN,
    "resumed_req_ids": _WRITTEN,
    "new_block_ids": _WRITTEN,
    "num_computed_tokens": _WRITTEN,
    "new_token_ids": _DERIVED,
    "all_token_ids": _DERIVED,
    "num_output_tokens": _DERIVED,
}

FIELDS_OF_AN_OUTPUT = {  # ModelRunnerOutput
    "req_ids": _WRITTEN,
    "req_id_to_index": _WRITTEN,
    "sampled_token_ids": _WRITTEN,
    "logprobs": _REPORTS,
    "prompt_logprobs_dict": _REPORTS,
    "prompt_token_id_logprobs_dict": _REPORTS,
    "num_nans_in_logits": _REPORTS,
    "cudagraph_stats": _REPORTS,
    "routed_experts": _REPORTS,
    "sampling_masks": _REPORTS,
    "pooler_output": _REFUSED,
    "kv_connector_output": _CONNECTORS,
    "ec_connector_output": _CONNECTORS,
    "aux_output_connector_output": "of auxiliary outputs, which are flagged",
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


def is_refused_reset(error: RuntimeError) -> bool:
    """reset_prefix_cache() raises after it has preempted all running requests, if a load or a step
    in flight still holds blocks. EngineCore returns the error to the client and continues."""
    return "Failed to reset KV cache" in str(error)


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
