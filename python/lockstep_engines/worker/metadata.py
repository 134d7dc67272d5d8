"""The attention metadata that vLLM's runner makes for a step, compared with the decision: what its
builders receive for each group, what they make of it for each kind of layer, and what the call of
the attention kernel passes on.

Nothing attends here, so a wrong length or window changes no byte of the cache; it is compared field
by field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep_engines.worker.expected import Row, in_kernel_blocks
from lockstep_engines.worker.layers import ModelLayer, checkpoint_of

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0


def difference(
    what: str, found: Sequence[Any], expected: Sequence[Any], names: Sequence[str] = ()
) -> Iterator[str]:
    """The first entry that differs; `names`: the request of each entry."""
    for i, wanted in enumerate(expected):
        if i >= len(found):
            yield f"{what} has {len(found)} entries; expected {len(expected)}"
            return
        if found[i] != wanted:
            whose = f" ({names[i]})" if i < len(names) else " (padding)" if names else ""
            yield f"{what}, entry {i}{whose} is {found[i]}; expected {wanted}"
            return


class _Group:
    """What the rows of a step mean in one group, whose blocks have `parts` kernel blocks each."""

    def __init__(
        self, index: int, spec: dict[str, Any], rows: list[Row], nulls: bool, parts: int
    ) -> None:
        self.index, self.spec, self.rows, self.parts = index, spec, rows, parts
        self.block_size = spec["block_size"]
        self.names = [row.request.name for row in rows]
        self.starts = [0]
        for row in rows:
            self.starts.append(self.starts[-1] + row.num_tokens)
        self.lengths = [row.end for row in rows]
        # vLLM's tables treat a window of one token as full attention.
        self.nulls = nulls and spec.get("sliding_window", 1) > 1

    def table(self, row: Row) -> list[int]:
        """In kernel blocks. Runner V2 replaces blocks that no token of the step can see by the null
        block."""
        table = row.request.tables[self.index]
        if self.nulls:
            seen = max(0, row.first - self.spec["sliding_window"] + 1) // self.block_size
            table = [NULL_BLOCK_ID] * min(seen, len(table)) + table[seen:]
        return in_kernel_blocks(table, self.parts)

    def slots(self) -> list[int]:
        slots = []
        for row in self.rows:
            table, size = row.request.tables[self.index], self.block_size
            for position in range(row.first, row.end):
                slots.append(table[position // size] * size + position % size)
        return slots

    def padded(self, values: list[int], size: int, padding: int) -> list[int]:
        return values + [padding] * (size - len(values))

    def tables_differ(self, what: str, found: torch.Tensor, rows: list[Row]) -> Iterator[str]:
        """Rows of `found`, and parts of the null block in all that follow."""
        given = found.tolist()
        if len(given) < len(rows):
            yield f"{what} has {len(given)} rows; expected {len(rows)}"
            return
        for i, row in enumerate(rows):
            table = self.table(row)
            if given[i][: len(table)] != table:
                where = f"{what}, row {i} ({row.request.name})"
                yield from difference(where, given[i], table)
                return
        for i in range(len(rows), len(given)):
            entry = next((e for e, block in enumerate(given[i]) if block // self.parts), None)
            if entry is not None:
                yield f"{what}, row {i} (padding), entry {entry} is {given[i][entry]}; expected 0"
                return


class MetadataCheck:
    """Invariants:
    1. `_common` has what the builders of the current step received, by group.
    2. A wrapped builder gets and returns what vLLM's would.
    """

    def __init__(
        self,
        runner: Any,
        kinds: list[ModelLayer],
        groups: list[dict[str, Any]],
        parts: list[int],
        nulls_windows: bool,
        has_drafts_in_flight: bool,
    ) -> None:
        self._groups, self._kinds, self._parts = groups, kinds, parts
        self._nulls, self._in_flight = nulls_windows, has_drafts_in_flight
        self._common: list[tuple[int, Any]] = []
        for g, attn_groups in enumerate(runner.attn_groups):
            for attn_group in attn_groups:
                self._watch(g, attn_group.get_metadata_builder(0))

    def _watch(self, g: int, builder: Any) -> None:
        build = builder.build

        def watched(common_prefix_len: int, common_attn_metadata: Any, **options: Any) -> Any:
            self._common.append((g, common_attn_metadata))
            return build(
                common_prefix_len=common_prefix_len,
                common_attn_metadata=common_attn_metadata,
                **options,
            )

        builder.build = watched

    def begin(self) -> None:
        self._common.clear()

    def agrees(self, rows: list[Row], facts: list[dict[str, Any]]) -> bool:
        """True if the tables and slots that the worker reports are those of the decision."""
        for g, found in enumerate(facts):
            group = _Group(g, self._groups[g]["spec"], rows, False, 1)
            if found["slots"] and found["slots"] != group.slots():
                return False
            if found["tables"] != [row.request.tables[g] for row in rows]:
                return False
        return True

    def of_step(self, rows: list[Row], metadata: dict[str, Any]) -> list[str]:
        """What differs, at most one line per group and layer; `rows` in the worker's order."""
        if not rows:
            return []
        found: list[str] = []
        for g, common in self._common:
            group = _Group(g, self._groups[g]["spec"], rows, self._nulls, self._parts[g])
            found += self._first(f"group {g}", self._of_builder(group, common))
        for kind in self._kinds:
            spec, made = kind.layer.spec, metadata.get(kind.layer.name)
            g = kind.layer.group
            group = _Group(g, spec, rows, self._nulls, self._parts[g])
            check = _CHECKS.get(spec["type"])
            if made is None:
                found.append(f"metadata: {kind.layer.name} receives none")
            elif check is not None:
                found += self._first(f"{kind.layer.name}", check(group, kind, made))
        return found

    @staticmethod
    def _first(of: str, differences: Iterator[str]) -> list[str]:
        first = next(differences, None)
        if first is None:
            return []
        return [first if first.startswith("finding ") else f"metadata of {of}: {first}"]

    def _of_builder(self, group: _Group, common: Any) -> Iterator[str]:
        names, count = group.names, len(group.rows)
        total, num_reqs = group.starts[-1], common.num_reqs
        if num_reqs < count:
            yield f"num_reqs is {num_reqs}; expected {count}"
        starts = group.padded(group.starts, num_reqs + 1, total)
        for what in ("query_start_loc", "query_start_loc_cpu"):
            yield from difference(what, getattr(common, what).tolist(), starts, names)
        lengths = group.padded(group.lengths, num_reqs, 0)
        yield from difference("seq_lens", common.seq_lens.tolist(), lengths, names)
        if common.seq_lens_cpu_upper_bound is not None:
            yield from self._bounds_differ(group, common.seq_lens_cpu_upper_bound.tolist())
        if common.num_actual_tokens < total:
            yield f"num_actual_tokens is {common.num_actual_tokens}; expected {total} or more"
        longest = max(row.num_tokens for row in group.rows)
        if common.max_query_len < longest or common.max_query_len > longest and num_reqs == count:
            yield f"max_query_len is {common.max_query_len}; expected {longest}"
        if common.max_seq_len < max(group.lengths):
            yield f"max_seq_len is {common.max_seq_len}; expected {max(group.lengths)} or more"
        yield from group.tables_differ("block_table", common.block_table_tensor, group.rows)
        if group.spec["type"] != "mamba":
            slots = group.padded(group.slots(), common.num_actual_tokens, PAD_SLOT_ID)
            yield from difference("slot_mapping", common.slot_mapping.tolist(), slots)

    def _bounds_differ(self, group: _Group, bounds: list[int]) -> Iterator[str]:
        """The host's lengths: exact, except for rows whose drafts in flight count as accepted."""
        for i, row in enumerate(group.rows):
            is_prefill = row.end <= row.request.num_prompt
            if bounds[i] < row.end or bounds[i] > row.end and (is_prefill or not self._in_flight):
                yield (
                    f"seq_lens_cpu_upper_bound, entry {i} ({group.names[i]}) is {bounds[i]}; "
                    f"expected {row.end}"
                )


def _of_attention(group: _Group, kind: Any, made: Any) -> Iterator[str]:
    """The call of the attention kernel: full attention and windows."""
    call = kind.attended
    if call is None:
        yield "attention is not called"
        return
    count, total = len(group.rows), group.starts[-1]
    starts, lengths = call["cu_seqlens_q"].tolist(), call["seqused_k"].tolist()
    padded = len(lengths)
    expected = group.padded(group.starts, padded + 1, total)
    yield from difference("cu_seqlens_q", starts, expected, group.names)
    expected = group.padded(group.lengths, padded, 0)
    yield from difference("seqused_k", lengths, expected, group.names)
    yield from group.tables_differ("block_table", call["block_table"], group.rows)
    yield from _scalars_differ(group, kind, call, padded == count)
    slots = group.padded(group.slots(), made.num_actual_tokens, PAD_SLOT_ID)
    yield from difference("slot_mapping", made.slot_mapping.tolist(), slots)


def _scalars_differ(group: _Group, kind: Any, call: dict[str, Any], exact: bool) -> Iterator[str]:
    longest = max(row.num_tokens for row in group.rows)
    if call["max_seqlen_q"] < longest or exact and call["max_seqlen_q"] != longest:
        yield f"max_seqlen_q is {call['max_seqlen_q']}; expected {longest}"
    if call["max_seqlen_k"] < max(group.lengths):
        yield f"max_seqlen_k is {call['max_seqlen_k']}; expected {max(group.lengths)} or more"
    yield from _views_differ(group, kind, call)


def _views_differ(group: _Group, kind: Any, call: dict[str, Any]) -> Iterator[str]:
    """What a call of attention passes whatever its rows: window, causality, views of the cache."""
    window = group.spec["sliding_window"] - 1 if group.spec["type"] == "sliding_window" else -1
    expected = (window, 0 if window >= 0 else -1)
    if tuple(call["window_size"]) != expected:
        yield f"window_size is {tuple(call['window_size'])}; expected {expected}"
    if call["causal"] is not True:
        yield f"causal is {call['causal']}; expected True"
    for name, part in zip("kv", kind.written_parts, strict=False):
        given = call[name]
        if given.data_ptr() != part.data_ptr() or given.stride() != part.stride():
            yield f"{name} is another view of the cache than the view that the layer writes"


def _of_chunks(group: _Group, kind: Any, made: Any) -> Iterator[str]:
    """Chunked attention: each row is cut where a chunk ends, and each piece sees its chunk only."""
    call, chunk = kind.attended, group.spec["attention_chunk_size"]
    size = group.block_size // group.parts
    if call is None:
        yield "attention is not called"
        return
    names: list[str] = []
    starts, lengths, tables = [0], [], []
    for row in group.rows:
        table = in_kernel_blocks(row.request.tables[group.index], group.parts)
        for first in range(row.first - row.first % chunk, row.end, chunk):
            end = min(first + chunk, row.end)
            names.append(row.request.name)
            starts.append(starts[-1] + end - max(first, row.first))
            lengths.append(end - first)
            tables.append(table[first // size : -(-end // size)])
    count = len(names)
    found = call["cu_seqlens_q"].tolist()
    yield from difference("cu_seqlens_q", found[: count + 1], starts, names)
    yield from difference("seqused_k", call["seqused_k"].tolist()[:count], lengths, names)
    given = call["block_table"].tolist()
    for i, table in enumerate(tables):
        where = f"block_table, piece {i} ({names[i]})"
        yield from difference(where, given[i], table)
    if call["max_seqlen_k"] < max(lengths):
        yield f"max_seqlen_k is {call['max_seqlen_k']}; expected {max(lengths)} or more"
    yield from _views_differ(group, kind, call)


def _of_mla(group: _Group, kind: Any, made: Any) -> Iterator[str]:
    """Decodes come first, then prefills."""
    count = made.num_decodes + made.num_prefills
    if count < len(group.rows):
        yield f"num_decodes + num_prefills is {count}; expected {len(group.rows)}"
    decodes, prefills = group.rows[: made.num_decodes], group.rows[made.num_decodes :]
    if made.decode is not None:
        yield from group.tables_differ("decode.block_table", made.decode.block_table, decodes)
        lengths = [row.end for row in decodes]
        lengths = group.padded(lengths, len(made.decode.seq_lens), 0)
        found = made.decode.seq_lens.tolist()
        yield from difference("decode.seq_lens", found, lengths, group.names)
    if made.prefill is None:
        if prefills:
            yield f"{len(prefills)} prefills have no metadata"
        return
    names = group.names[made.num_decodes :]
    yield from group.tables_differ("prefill.block_table", made.prefill.block_table, prefills)
    starts = [start - group.starts[made.num_decodes] for start in group.starts[made.num_decodes :]]
    found = made.prefill.query_start_loc.tolist()
    yield from difference("prefill.query_start_loc", found, starts, names)
    layer, context = kind.layer.name, made.prefill.chunked_context
    yield from _context_differs(layer, group, context, prefills)
    slots = group.padded(group.slots(), len(made.slot_mapping), PAD_SLOT_ID)
    yield from difference("slot_mapping", made.slot_mapping.tolist(), slots)


def _context_differs(layer: str, group: _Group, context: Any, prefills: list[Row]) -> Iterator[str]:
    """The tokens that prefills read out of the cache. Rows that verify drafts count as prefills
    where the kernel takes one token per row; the host's count of their context includes rejected
    drafts in flight."""
    if context is None:
        if any(row.first for row in prefills):
            yield "prefills have no context; expected some"
        return
    lengths = [row.first for row in prefills]
    names = [row.request.name for row in prefills]
    if hasattr(context, "context_lens_list"):
        found = list(context.context_lens_list)
    else:  # chunks by requests: what all chunks have of each
        found = context.seq_lens.sum(dim=0).tolist()
    for row, length in zip(prefills, found, strict=False):
        if row.first < length == row.request.counted:
            name = row.request.name
            yield f"finding 50: {layer} reads {length} tokens of {name} as context, of {row.first}"
    yield from difference("prefill context lengths", found, lengths, names)


def _of_states(group: _Group, kind: Any, made: Any) -> Iterator[str]:
    """Mamba2, short convolutions, gated delta: rows, and whether they continue a state. Which
    states they are is compared by what is in them."""
    if kind.layer.state_type == "gdn":
        yield from _of_gated_delta(group, made)
        return
    yield from _known_tokens_as_drafts(kind.layer.name, group.rows[: made.num_decodes], made)
    count = made.num_decodes + made.num_prefills
    if count < len(group.rows):
        yield f"num_decodes + num_prefills is {count}; expected {len(group.rows)}"
    prefills = group.rows[made.num_decodes :]
    if not prefills:
        return
    names = [row.request.name for row in prefills]
    expected = [row.first > 0 for row in prefills]
    yield from difference(
        "has_initial_states_p", made.has_initial_states_p.tolist(), expected, names
    )
    starts = [start - group.starts[made.num_decodes] for start in group.starts[made.num_decodes :]]
    yield from difference("query_start_loc_p", made.query_start_loc_p.tolist(), starts, names)
    if getattr(made, "cu_chunk_seqlen_p", None) is not None:
        yield from _chunks_differ(made, prefills)


def _known_tokens_as_drafts(layer: str, decodes: list[Row], made: Any) -> Iterator[str]:
    """A decode with drafts keeps a state after each token, of which the next step takes the state
    after those that were accepted. Nothing is accepted of tokens that are known."""
    for row in decodes if made.num_accepted_tokens is not None else ():
        if row.num_tokens > 1 and row.end <= row.num_known:
            yield (
                f"finding 54: {layer} verifies {row.num_tokens} tokens of {row.request.name}, "
                "none of which is a draft"
            )


def _of_gated_delta(group: _Group, made: Any) -> Iterator[str]:
    count = made.num_decodes + made.num_prefills + made.num_spec_decodes
    if count < len(group.rows):
        yield f"it has {count} rows; expected {len(group.rows)}"


def _chunks_differ(made: Any, prefills: list[Row]) -> Iterator[str]:
    """Mamba2 scans a prefill in pieces that end where positions are multiples of its chunk."""
    ends, rows, last = [0], [], []
    checkpoint, first_row = checkpoint_of(made)
    for i, row in enumerate(prefills):
        exported = int(checkpoint.checkpoint_offsets[first_row + i]) if checkpoint else 0
        cut = row.first + exported if exported else row.end
        position = row.first
        while position < row.end:
            # A prefill that exports its state ends a piece there.
            end = min(row.end, (position // made.chunk_size + 1) * made.chunk_size)
            if position < cut:
                end = min(end, cut)
            ends.append(ends[-1] + end - position)
            rows.append(i)
            position = end
        last.append(len(rows) - 1)
    yield from difference("cu_chunk_seqlen_p", made.cu_chunk_seqlen_p.tolist(), ends)
    yield from difference("last_chunk_indices_p", made.last_chunk_indices_p.tolist(), last)
    if made.seq_idx_p is not None:
        yield from difference("seq_idx_p", made.seq_idx_p.tolist(), rows)


def _of_hidden_states(group: _Group, kind: Any, made: Any) -> Iterator[str]:
    slots = group.padded(group.slots(), len(made.slot_mapping), PAD_SLOT_ID)
    yield from difference("slot_mapping", made.slot_mapping.tolist(), slots)


_CHECKS = {
    "full": _of_attention,
    "sliding_window": _of_attention,
    "chunked_local": _of_chunks,
    "mla": _of_mla,
    "mamba": _of_states,
    "hidden_state": _of_hidden_states,
}
