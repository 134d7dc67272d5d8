"""The worker's view of a step, read from its runner and from the metadata that it built."""

from __future__ import annotations

from typing import Any

from lockstep_engines.protocol import EngineFault
from lockstep_engines.vllm.engine import VERSION
from lockstep_engines.worker.expected import in_blocks
from lockstep_engines.worker.model import Batch, ContentModel
from lockstep_recorder.releases import version_key


def clears_moved_rows() -> bool:
    """True where tables have null blocks after the end of every row (V1) and after the rows of a
    step (V2); earlier releases leave the entries of a row that has moved or was used before."""
    return version_key(VERSION) >= (0, 33)


def nulls_windows(is_v2: bool) -> bool:
    """True where the tables of a step have null blocks before the window of its first token."""
    return is_v2 and clears_moved_rows()


def kept_parts(tables: Any, g: int = 0) -> int:
    """Kernel blocks per block in the tables that a runner keeps: a table of V1, or group `g` of
    V2's. 0.33.0 keeps blocks, and splits them for each builder of metadata."""
    parts = getattr(tables, "blocks_per_kv_block", 1)
    return parts[g] if isinstance(parts, list) else parts


def kernel_block_sizes(runner: Any) -> list[int]:
    """Of each group, as vLLM has selected them."""
    for holder, name in (
        (runner, "_kernel_block_sizes"),
        (runner, "kernel_block_sizes"),
        (getattr(runner, "block_tables", None), "kernel_block_sizes"),
    ):
        if (sizes := getattr(holder, name, None)) is not None:
            return list(sizes)
    raise RuntimeError("the runner has no kernel block sizes")


class Facts:
    """The facts of a case's steps; `groups`: the case's; `parts`: kernel blocks per block, by
    group. Tables are reported in blocks."""

    def __init__(
        self,
        runner: Any,
        model: ContentModel,
        groups: list[dict[str, Any]],
        parts: list[int],
        is_v2: bool,
    ) -> None:
        self._runner, self._model, self._groups, self._is_v2 = runner, model, groups, is_v2
        self._parts = parts

    def of_step(self, drafts: dict[str, list[int]], faults: list[str]) -> dict[str, Any]:
        """The reply `executed`."""
        batch = self._model.batch
        groups = [self._of_group(g, batch) for g in range(len(self._groups))]
        return {
            "rows": batch.names,
            "num_tokens": batch.num_tokens,
            "positions": batch.positions,
            "groups": groups if batch.names else [],
            "faults": self._known_defects(batch, drafts) + batch.faults + faults,
        }

    def name_exception(self, error: Exception) -> None:
        """Raises the finding of docs/findings.md that the exception is, if any, by its cause:
        runner V2 clears the padded rows of every group by the width of the first group's table."""
        if not self._is_v2 or "_gather_block_tables_kernel writes" not in str(error):
            return
        widths = [table.shape[1] for table in self._runner.block_tables.input_block_tables]
        if version_key(VERSION) < (0, 23) and len({*widths}) > 1:
            raise EngineFault(f"finding 27: tables have {widths} entries; {error}") from error

    def _known_defects(self, batch: Batch, drafts: dict[str, list[int]]) -> list[str]:
        """Findings that this step shows, by their cause: a slot -1 of a padded hidden state, which
        is the last one of the last block; runner V1 passes no counts of accepted drafts in the
        metadata of a layer with recurrent states; a gated delta layer decodes a first token."""
        if version_key(VERSION) < (0, 25) and batch.slot_mappings:
            for kind in self._model.kinds:
                name, is_hidden = kind.layer.name, kind.layer.spec["type"] == "hidden_state"
                padded = batch.slot_mappings[name][len(batch.positions) :] if is_hidden else ()
                if len(padded):
                    return [f"finding 28: {name} has {len(padded)} padded tokens with slot -1"]
        if self._is_v2 or version_key(VERSION) >= (0, 33):
            return []
        accepted = self._runner.num_accepted_tokens.np
        for kind in self._model.kinds:
            layer, metadata = kind.layer, batch.metadata.get(kind.layer.name)
            if layer.state_type == "gdn" and metadata is not None:
                for i, name in enumerate(batch.names[: metadata.num_decodes]):
                    if self._model.step.first[name] == 0:
                        block = int(metadata.non_spec_state_indices_tensor[i])
                        return [
                            f"finding 49: {layer.name} continues the state of block {block}, and "
                            f"nothing of {name} is computed yet"
                        ]
            if not layer.spec.get("num_speculative_blocks") or metadata is None:
                continue
            has_counts = metadata.num_accepted_tokens is not None
            if has_counts and layer.state_type != "gdn":
                continue
            is_short = layer.state_type == "short_conv"
            for i, name in enumerate(batch.names):
                if has_counts and drafts.get(name):
                    continue  # gated delta passes counts of the rows that verify drafts only
                if accepted[i] > 1 or is_short and drafts.get(name):
                    number = 26 if is_short else 48
                    return [
                        f"finding {number}: the metadata of {layer.name} has no counts of accepted "
                        f"drafts; {name} has {accepted[i]} and {len(drafts.get(name, ()))} "
                        "to verify"
                    ]
        return []

    def _of_group(self, g: int, batch: Batch) -> dict[str, Any]:
        if not batch.names:
            return {}
        tables = [self._row_of_table(g, name) for name in batch.names]
        kind = self._groups[g]["spec"]["type"]
        if kind == "mamba":
            return {"tables": tables, "slots": []}
        name = self._groups[g]["layers"][0]
        metadata = batch.metadata[name]
        slots = batch.slot_mappings[name] if batch.slot_mappings else metadata.slot_mapping
        facts = {"tables": tables, "slots": slots[: len(batch.positions)].tolist()}
        if kind not in ("chunked_local", "hidden_state"):  # cut into chunks; not attended to
            reads = self._reads(metadata, tables, self._parts[g])
            if any(mine != row[: len(mine)] for mine, row in zip(reads, tables, strict=True)):
                facts["reads"] = reads
        return facts

    @staticmethod
    def _reads(metadata: Any, tables: list[list[int]], parts: int) -> list[list[int]]:
        """The table rows that attention receives, each as long as the request's own."""
        if hasattr(metadata, "block_table"):
            given = metadata.block_table[: len(tables)].tolist()
        else:  # MLA has decodes and prefills apart
            of = (metadata.decode, metadata.prefill)
            given = [row for part in of if part for row in part.block_table.tolist()]
        given = given[: len(tables)]  # padding follows
        return [in_blocks(mine, parts)[: len(row)] for mine, row in zip(given, tables, strict=True)]

    def _row_of_table(self, g: int, name: str) -> list[int]:
        """A request's table."""
        if not self._is_v2:
            table = self._runner.input_batch.block_table[g]
            index = self._runner.input_batch.req_id_to_index[name]
            count = int(table.num_blocks_per_row[index])
            kept = table.block_table.np[index, :count].tolist()
            return in_blocks(kept, kept_parts(table))
        tables = self._runner.block_tables
        index = self._runner.req_states.req_id_to_index[name]
        count = int(tables.num_blocks.np[g, index])
        kept = tables.block_tables[g].gpu[index, :count].tolist()
        return in_blocks(kept, kept_parts(tables, g))
