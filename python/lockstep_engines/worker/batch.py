"""The persistent batch of vLLM's runner, compared with the decisions: which row each request has,
and the blocks, lengths and tokens of every row, of requests in the step or not.

Runner V1 moves rows, so its tables are also compared after each operation on them, with lists that
perform the same operation: a row that is cleared or moved wrongly shows before a later request uses
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
from vllm.v1.worker import mamba_utils

from lockstep_engines.worker.expected import Expected, Request, Row, in_kernel_blocks
from lockstep_engines.worker.facts import kept_parts
from lockstep_engines.worker.metadata import difference
from lockstep_engines.worker.steps import frequency_penalty


class TableShadow:
    """One BlockTable of runner V1, and lists that do what is done to it.

    Invariants:
    1. `rows` has the entries of each row, without the null blocks that follow.
    2. After an operation the rows that it names hold `rows`; `faults` has the first that do not.
    """

    def __init__(self, g: int, table: Any, clears_moved_rows: bool, faults: list[str]) -> None:
        self._g, self._table, self._clears_moved_rows = g, table, clears_moved_rows
        self._faults = faults
        self.rows: list[list[int]] = [[] for _ in table.num_blocks_per_row]
        self._parts = kept_parts(table)
        self._is_nested = False
        for name in ("append_row", "add_row", "clear_row", "move_row", "swap_row"):
            setattr(table, name, self._watched(name, getattr(table, name), getattr(self, name)))

    def _watched(
        self, name: str, of_table: Callable[..., None], of_lists: Callable[..., tuple[int, ...]]
    ) -> Callable[..., None]:
        def watched(*args: Any) -> None:
            if self._is_nested:  # add_row appends
                of_table(*args)
                return
            self._is_nested = True
            try:
                of_table(*args)
            finally:
                self._is_nested = False
            for row in of_lists(*args):
                self._faults += self.differs(row, f"after {name}")

        return watched

    def append_row(self, block_ids: Any, row: int) -> tuple[int, ...]:
        self.rows[row] += in_kernel_blocks([int(block) for block in block_ids], self._parts)
        return (row,)

    def add_row(self, block_ids: Any, row: int) -> tuple[int, ...]:
        self.rows[row] = []
        return self.append_row(block_ids, row)

    def clear_row(self, row: int) -> tuple[int, ...]:
        self.rows[row] = []
        return (row,)

    def move_row(self, src: int, tgt: int) -> tuple[int, ...]:
        self.rows[tgt] = self.rows[src][:]
        if not self._clears_moved_rows:
            return (tgt,)
        self.rows[src] = []
        return (src, tgt)

    def swap_row(self, src: int, tgt: int) -> tuple[int, ...]:
        self.rows[src], self.rows[tgt] = self.rows[tgt], self.rows[src]
        return (src, tgt)

    def differs(self, row: int, when: str) -> list[str]:
        """A line if the row holds something else."""
        expected, count = self.rows[row], int(self._table.num_blocks_per_row[row])
        entries = self._table.block_table.np[row]
        where = f"batch: {when}, row {row} of the table of group {self._g}"
        if count != len(expected):
            return [f"{where} has {count} entries; expected {len(expected)}"]
        if count > len(entries):
            # Before 0.33.0 a table keeps its first width where only blocks of drafts are added.
            finding = "" if self._clears_moved_rows else "finding 51: "
            return [f"{finding}{where} has {count} entries, and room for {len(entries)}"]
        for e, block in enumerate(expected):
            if entries[e] != block:
                return [f"{where}, entry {e} is {entries[e]}; expected {block}"]
        if self._clears_moved_rows and entries[count:].any():
            e = count + int(numpy.flatnonzero(entries[count:])[0])
            return [f"{where}, entry {e} is {entries[e]}; expected 0: it is past the end"]
        return []


class FirstBatch:
    """Runner V1: `input_batch`, whose rows are the requests of the step."""

    def __init__(self, runner: Any, clears_moved_rows: bool, has_drafts_in_flight: bool) -> None:
        self._runner, self._has_drafts_in_flight = runner, has_drafts_in_flight
        self.faults: list[str] = []
        self._clears_moved_rows = clears_moved_rows
        self._shadows: list[TableShadow] = []
        self._watched: Any = None
        self._expected = Expected()
        self._of_sampler: list[str] = []

    def begin(self) -> None:
        """Watches the tables; vLLM makes others where it learns the sizes of blocks."""
        self.faults.clear()
        tables = self._runner.input_batch.block_table.block_tables
        if self._watched is tables:
            return
        self._watched = tables
        self._shadows = [
            TableShadow(g, table, self._clears_moved_rows, self.faults)
            for g, table in enumerate(tables)
        ]
        batch = self._runner.input_batch
        update = batch.update_async_output_token_ids

        def watched() -> None:
            """The sampler runs next: the output tokens of every row have replaced placeholders."""
            update()
            self._of_sampler = self._first(self._sampler_differs(batch))

        batch.update_async_output_token_ids = watched

    def while_sampling(self) -> list[str]:
        """What differed when the sampler last ran; it is reported once."""
        found, self._of_sampler = self._of_sampler, []
        return found

    def _sampler_differs(self, batch: Any) -> Iterator[str]:
        """What the sampler uses of each row."""
        metadata = batch.sampling_metadata
        if metadata.no_penalties:
            return
        names = list(batch.req_ids)
        for i, name in enumerate(names):
            row = self._expected.rows[name]
            request, where = row.request, f"sampler, row {i} ({name})"
            outputs = request.tokens[request.num_prompt : row.num_known]
            found = metadata.output_token_ids[i]
            if len(found) != len(outputs):
                yield f"{where} has {len(found)} output tokens; expected {len(outputs)}"
            yield from difference(f"{where}, output tokens", found, outputs)
            prompt = metadata.prompt_token_ids[i, : request.num_prompt].tolist()
            yield from difference(f"{where}, prompt", prompt, request.tokens[: request.num_prompt])
            penalty = float(metadata.frequency_penalties[i])
            if abs(penalty - frequency_penalty(name)) > 1e-9:
                yield f"{where} has a penalty of {penalty}; expected {frequency_penalty(name)}"

    def of_step(self, expected: Expected) -> list[str]:
        self._expected = expected
        batch = self._runner.input_batch
        return [*self.faults[:1], *self._first(self._differs(batch, expected))]

    @staticmethod
    def _first(differences: Iterator[str]) -> list[str]:
        first = next(differences, None)
        return [] if first is None else [f"batch: {first}"]

    def _differs(self, batch: Any, expected: Expected) -> Iterator[str]:
        names = list(batch.req_ids)
        if sorted(map(str, names)) != sorted(expected.rows):
            yield f"rows are {names}; expected {sorted(expected.rows)}"
            return
        for i, name in enumerate(names):
            if batch.req_id_to_index.get(name) != i:
                yield f"row of {name} is {batch.req_id_to_index.get(name)}; expected {i}"
                return
            yield from self._row_differs(batch, i, expected.rows[name])
        for shadow in self._shadows:
            for i in range(len(shadow.rows)):
                if self._clears_moved_rows or i < len(names):
                    for line in shadow.differs(i, "in the step"):
                        yield line.removeprefix("batch: ")

    def _row_differs(self, batch: Any, i: int, row: Row) -> Iterator[str]:
        request = row.request
        where = f"row {i} ({request.name})"
        for g, table in enumerate(request.tables):
            own = batch.block_table[g]
            count = int(own.num_blocks_per_row[i])
            blocks = in_kernel_blocks(table, kept_parts(own))
            if count != len(blocks):
                yield f"{where} has {count} blocks in group {g}; expected {len(blocks)}"
            found = own.block_table.np[i, :count].tolist()
            yield from difference(f"{where}, table of group {g}", found, blocks)
        # The forward pass may have subtracted rejected drafts already.
        computed = int(batch.num_computed_tokens_cpu[i])
        if computed not in (row.first, request.counted):
            yield f"{where} has {computed} computed tokens; expected {request.counted}"
        if batch.num_prompt_tokens[i] != request.num_prompt:
            found = int(batch.num_prompt_tokens[i])
            yield f"{where} has a prompt of {found} tokens; expected {request.num_prompt}"
        yield from self._tokens_differ(batch, i, request)

    def _tokens_differ(self, batch: Any, i: int, request: Request) -> Iterator[str]:
        """Tokens of the row; a placeholder stands for a token that is sampled on the device. With
        drafts in flight outputs are on the device only."""
        where, count = f"row {i} ({request.name})", int(batch.num_tokens_no_spec[i])
        known = request.tokens
        if self._has_drafts_in_flight:
            known = known[: request.num_prompt]
        elif count != len(known):
            yield f"{where} has {count} tokens; expected {len(known)}"
        found = batch.token_ids_cpu[i, : min(count, len(known))]
        for at in numpy.flatnonzero(found != known[: len(found)]):
            if found[at] != -1 or at < request.num_prompt:
                yield f"{where}, token {at} is {found[at]}; expected {known[at]}"
                return


class AcceptedCounts:
    """The accepted drafts of each request, as runner V1 counts them after sampling and as it looks
    them up for the states of the next step. With asynchronous scheduling it looks them up by the
    rows of the step that sampled; where the counts are on the host before rows move, they have
    moved already (finding 52). A running request that a step leaves out loses its row, and its
    count with it (finding 53)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sampled: dict[str, int] = {}
        self._last_rows: set[str] = set()  # requests of the step that sampled last
        self.faults: list[str] = []
        self._preprocess = preprocess = mamba_utils.preprocess_mamba

        def watched(scheduled: Any, *args: Any, **options: Any) -> Any:
            self._look_up(scheduled)
            return preprocess(scheduled, *args, **options)

        mamba_utils.preprocess_mamba = watched

    def stop(self) -> None:
        mamba_utils.preprocess_mamba = self._preprocess

    def after_sampling(self) -> None:
        counts = self._counts()
        self._sampled |= counts
        self._last_rows = set(counts)

    def _counts(self) -> dict[str, int]:
        batch = self._runner.input_batch
        return {name: int(batch.num_accepted_tokens_cpu[i]) for i, name in enumerate(batch.req_ids)}

    def _look_up(self, scheduled: Any) -> None:
        ended = scheduled.finished_req_ids | scheduled.scheduled_cached_reqs.resumed_req_ids
        for name in ended | {request.req_id for request in scheduled.scheduled_new_reqs}:
            self._sampled.pop(name, None)
        self.faults = []
        for name, found in self._counts().items():
            accepted = self._sampled.get(name, found)
            if found != accepted:
                kept = name in self._last_rows
                self.faults.append(
                    f"finding {52 if kept else 53}: {name} continues from the state after {found} "
                    f"accepted tokens; {accepted} were accepted before "
                    f"{'its row moved' if kept else 'a step left it out'}"
                )


class SecondBatch:
    """Runner V2: a row for each request that has not finished and was not preempted, in the step or
    not. `clears_rows`: the tables of a step have null blocks after its rows."""

    def __init__(self, runner: Any, clears_rows: bool) -> None:
        self._runner, self._clears_rows = runner, clears_rows

    def begin(self) -> None: ...

    def while_sampling(self) -> list[str]:
        return []

    def of_step(self, expected: Expected) -> list[str]:
        first = next(self._differs(expected), None)
        return [] if first is None else [f"batch: {first}"]

    def _differs(self, expected: Expected) -> Iterator[str]:
        states, tables = self._runner.req_states, self._runner.block_tables
        resident = {r.name: r for r in expected.requests.values() if r.is_resident and r.tables}
        if states.req_id_to_index.keys() != resident.keys():
            yield f"requests are {sorted(states.req_id_to_index)}; expected {sorted(resident)}"
            return
        used = sorted(states.req_id_to_index.values())
        if len(set(used)) < len(used) or set(used) & set(states.free_indices):
            yield f"requests have rows {used}; free rows are {sorted(states.free_indices)}"
        for name, row in states.req_id_to_index.items():
            request, where = resident[name], f"row {row} ({name})"
            for what, found, wanted in (
                ("a prompt", int(states.prompt_len.np[row]), request.num_prompt),
                ("a prefill", int(states.prefill_len.np[row]), request.num_prefill),
            ):
                if found != wanted:
                    yield f"{where} has {what} of {found} tokens; expected {wanted}"
            for g, table in enumerate(request.tables):
                count = int(tables.num_blocks.np[g, row])
                blocks = in_kernel_blocks(table, kept_parts(tables, g))
                if count != len(blocks):
                    yield f"{where} has {count} blocks in group {g}; expected {len(blocks)}"
                entries = tables.block_tables[g].gpu[row, : len(blocks)].tolist()
                yield from difference(f"{where}, table of group {g}", entries, blocks)
            if name in expected.rows:
                found = int(states.num_computed_tokens.gpu[row])
                wanted = expected.rows[name].first
                if found != wanted:
                    yield f"{where} has {found} computed tokens; expected {wanted}"
            yield from self._tokens_differ(states, row, request)
        if self._clears_rows and expected.rows:
            yield from self._rows_left(tables.input_block_tables, len(expected.rows))

    @staticmethod
    def _rows_left(tables: list[Any], num_rows: int) -> Iterator[str]:
        """Blocks of an earlier batch after the rows of the step."""
        for g, table in enumerate(tables):
            if bool(table[num_rows:].any()):
                i, e = (int(at) for at in table[num_rows:].nonzero()[0])
                found = int(table[num_rows + i, e])
                yield (
                    f"row {num_rows + i} of the step's table of group {g}, entry {e} is {found}; "
                    f"expected 0: the step has {num_rows} rows"
                )

    @staticmethod
    def _tokens_differ(states: Any, row: int, request: Request) -> Iterator[str]:
        count = int(states.total_len.gpu[row])
        known = request.tokens
        if count != len(known):
            yield f"row {row} ({request.name}) has {count} tokens; expected {len(known)}"
        found = states.all_token_ids.gpu[row, : min(count, len(known))].tolist()
        yield from difference(f"row {row} ({request.name}), tokens", found, known)
