"""What differs between the releases of vLLM that can be recorded; everything else stands once.

To add a release: read its scheduler against the table below, add a row, run the tests of this
package with that release installed (docs/recorder.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep_recorder.errors import RecorderError


@dataclass(frozen=True)
class Release:
    """How one release names the things that are written down."""

    version: str
    # Attributes of the scheduler that hold waiting requests, in the order in which it serves them.
    waiting_queues: tuple[str, ...]
    # Methods of the block pool that take hashes off one block and put them on another: the cache is
    # the same afterwards, so nothing was stored or evicted.
    hash_movers: tuple[str, ...]
    # The id in an element of the list that finish_requests() returns.
    finished_id: Callable[[Any], str]
    # Where the spec of a compressed attention layer says how many tokens share a stored row.
    compress_ratio_attribute: str
    # (what, holds(vllm_config)): choices that change decisions and have no key in the format.
    beyond_format: tuple[tuple[str, Callable[[Any], bool]], ...]


def _token_limit_is_chosen(config: Any) -> bool:
    """Whether the limit is other than what the release derives from what the format does say."""
    scheduler, speculative = config.scheduler_config, config.speculative_config
    slots = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    derived = (
        scheduler.max_num_batched_tokens,
        scheduler.max_num_batched_tokens - (slots * scheduler.max_num_seqs),
    )
    limit = scheduler.max_num_scheduled_tokens
    return limit is not None and limit not in derived


_BEYOND_EVERY_FORMAT: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("max_num_scheduled_tokens", _token_limit_is_chosen),
    ("pipeline_parallel_size", lambda c: c.parallel_config.pipeline_parallel_size > 1),
)

_RELEASES = (
    Release(
        version="0.22.1",
        waiting_queues=("skipped_waiting", "waiting"),
        hash_movers=(),
        finished_id=lambda element: element[0],
        compress_ratio_attribute="compress_ratio",
        beyond_format=_BEYOND_EVERY_FORMAT,
    ),
    Release(
        version="0.33.0",
        waiting_queues=("kv_holding_waiting", "waiting"),
        hash_movers=("move_block_hashes",),
        finished_id=lambda element: element.request_id,
        compress_ratio_attribute="tokens_per_state",
        beyond_format=(
            *_BEYOND_EVERY_FORMAT,
            ("max_num_active_seqs", lambda c: c.scheduler_config.max_num_active_seqs is not None),
            (
                "long_prefill_token_threshold_adaptive",
                lambda c: c.scheduler_config.long_prefill_token_threshold_adaptive,
            ),
            ("watermark", lambda c: c.scheduler_config.watermark > 0),
            (
                "prefill_schedule_interval",
                lambda c: c.scheduler_config.prefill_schedule_interval > 1,
            ),
            (
                "num_speculative_tokens_per_batch_size",
                lambda c: bool(
                    getattr(c.speculative_config, "num_speculative_tokens_per_batch_size", None)
                ),
            ),
            (
                "enable_mamba_shared_prefix_checkpoint",
                lambda c: c.cache_config.enable_mamba_shared_prefix_checkpoint,
            ),
        ),
    ),
)


def release_of(version: str) -> Release:
    """The release with this version; a build's local part ("+cu130") does not count.

    Raises RecorderError for a release that nobody has read yet.
    """
    public = version.split("+", 1)[0]
    for release in _RELEASES:
        if release.version == public:
            return release
    known = ", ".join(release.version for release in _RELEASES)
    raise RecorderError(
        f"found vLLM {version}; this recorder knows {known} (docs/recorder.md: adding a release)"
    )
