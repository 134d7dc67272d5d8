"""What differs between the releases of vLLM that can be recorded; everything else stands once.

To add a release: read its scheduler against the table below, add a row, run the tests of this
package with that release installed (docs/recorder.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep_recorder.errors import RecorderError

# vLLM's class of a layer's spec -> the word of the format. Subclasses do not count as their base:
# an unknown class may lay out or keep its blocks differently.
_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "HiddenStateCacheSpec": "hidden_state",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "mamba",
    "CrossAttentionSpec": "cross_attention",
    "EncoderOnlyAttentionSpec": "encoder_only",
}


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
    # The format's word for a class of spec.
    kinds: dict[str, str]
    # Where the spec of a compressed attention layer says how many tokens share a stored row; the
    # format has it under the same name.
    row_tokens_attribute: str
    # Classes of windows that keep rows of MLA and have no word of their own.
    mla_rows: tuple[str, ...] = ()
    # Attributes of a spec from which its page's bytes follow; later releases say them outright.
    page_keys: tuple[str, ...] = ()


_RELEASES = (
    Release(
        version="0.22.1",
        waiting_queues=("skipped_waiting", "waiting"),
        hash_movers=(),
        finished_id=lambda element: element[0],
        kinds=_KINDS | {"SlidingWindowMLASpec": "sliding_window"},
        row_tokens_attribute="compress_ratio",
        mla_rows=("SlidingWindowMLASpec",),
        page_keys=("cache_dtype_str", "model_version", "alignment"),
    ),
    Release(
        version="0.33.0",
        waiting_queues=("kv_holding_waiting", "waiting"),
        hash_movers=("move_block_hashes",),
        finished_id=lambda element: element.request_id,
        kinds=_KINDS
        | {
            "SlidingWindowMLASpec": "sliding_window_mla",
            "CircularBufferSpec": "circular_buffer",
        },
        row_tokens_attribute="tokens_per_state",
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
