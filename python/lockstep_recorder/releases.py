"""What differs between releases of vLLM, in one table; everything else stands once.

Engines under test are driven with every row. Recordings of serving are made of the releases whose
options have all been read too (_RECORDED). To add one: read its scheduler against the table below,
add a row, run the tests of this package with that release installed (docs/recorder.md).
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    # Told apart by keys of their own: header.py.
    "SinkFullAttentionSpec": "full",
    "RSWASpec": "full",
    "EncoderOnlyAttentionSpec": "encoder_only",
}


@dataclass(frozen=True)
class Release:
    """How one release names the things that are written down."""

    version: str
    # Attributes of the scheduler that hold waiting requests, in the order in which it serves them.
    waiting_queues: tuple[str, ...]
    # Methods of the block pool that move hashes from one block to another: the cache is
    # the same afterwards, so nothing was stored or evicted.
    hash_movers: tuple[str, ...]
    # The differences between the engines that the model decides as: one policy per field. Common
    # behaviour is in the scheduler and the managers; no other code checks the release.
    #
    # Each field names its file of vLLM (paths below vllm/; values in the order of the releases).
    # policies.h has the table of policies: words, history, effect; releases.h the releases.
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
    # A draft model's slots reduce a step's token budget as requests are scheduled; before,
    # for as many requests as there can be, when the configuration is made.
    counts_draft_slots_by_step: bool = True


_COMPRESSED_WINDOWS: dict[str, Any] = dict(
    kinds=_KINDS | {"SlidingWindowMLASpec": "sliding_window"},
    row_tokens_attribute="compress_ratio",
    mla_rows=("SlidingWindowMLASpec",),
    page_keys=("cache_dtype_str", "model_version", "alignment"),
)

# Each begins with the version named first; the others decide and name things the same way.
_0_20 = Release(
    version="0.20.0",
    waiting_queues=("skipped_waiting", "waiting"),
    hash_movers=(),
    finished_id=lambda element: element[0],
    counts_draft_slots_by_step=False,
    **_COMPRESSED_WINDOWS,
)
_0_26 = replace(
    _0_20,
    version="0.26.0",
    hash_movers=("move_block_hashes",),
    finished_id=lambda element: element.request_id,
)
_0_28 = replace(_0_26, version="0.28.0", counts_draft_slots_by_step=True)
_0_29 = replace(
    _0_28,
    version="0.29.0",
    kinds=_KINDS
    | {
        "SlidingWindowMLASpec": "sliding_window_mla",
        "CircularBufferSpec": "circular_buffer",
    },
    row_tokens_attribute="tokens_per_state",
    mla_rows=(),
    page_keys=(),
)
_0_31 = replace(_0_29, version="0.31.0", waiting_queues=("kv_holding_waiting", "waiting"))

_RELEASES = {
    version: replace(row, version=version)
    for row, versions in (
        (_0_20, "0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1"),
        (_0_26, "0.26.0 0.27.0 0.27.1"),
        (_0_28, "0.28.0"),
        (_0_29, "0.29.0 0.30.0"),
        (_0_31, "0.31.0 0.32.0 0.33.0"),
    )
    for version in versions.split()
}


_RECORDED = ("0.22.1", "0.33.0")


def release_of(version: str) -> Release:
    """The release with this version, to record it; a build's local part ("+cu130") does not count.

    Raises RecorderError for a release with unknown options. With LOCKSTEP_RECORD_AS_NEAREST=1 it is
    recorded as the nearest one, and what its unknown options change is missing from the recording.
    """
    public = version.split("+", 1)[0]
    if public in _RECORDED:
        return _RELEASES[public]
    if os.environ.get("LOCKSTEP_RECORD_AS_NEAREST") == "1":
        return nearest_release(public)
    raise RecorderError(
        f"found vLLM {version}; this recorder knows {', '.join(_RECORDED)} "
        f"(docs/recorder.md: adding a release)"
    )


def version_key(version: str) -> tuple[int, ...]:
    """A version as numbers, to compare; a checkout that has none ("dev") is the newest."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    found = tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
    return found if found > (0, 1) else (1 << 30,)


def nearest_release(version: str) -> Release:
    """The newest release that is not newer than `version`, for unknown engines:
    checkouts between releases and after the last one."""
    key = version_key(version)
    older = [release for release in _RELEASES.values() if version_key(release.version) <= key]
    nearest = older[-1] if older else next(iter(_RELEASES.values()))
    return replace(nearest, version=version.split("+", 1)[0])
