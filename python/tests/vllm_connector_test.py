"""vLLM's scheduler with a KV connector: the claims of docs/findings.md, driven in vLLM itself.

The connector's answers, the worker's reports and the sampled tokens are read from a recording; what
vLLM decides is compared with the rest of it. vLLM frees blocks in the order of sets of names, so
the interpreter's hash seed has to be the one of the recordings. Skipped, with exit status 77, where
vLLM cannot be imported.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from installed_vllm import REGRESSIONS, SAMPLES, Line, lines_of, vllm_engine
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from lockstep_recorder.cache_counter import CacheCounter
from lockstep_recorder.releases import release_of

NULL_BLOCK = 0
# Keys of a step that are given to vLLM; the others are what it decides.
GIVEN = {"step", "before", "during", "connector", "worker", "held", "sampled", "output_of_step"}
GIVEN |= {"stale_outputs"}  # of the model that made the recording


def finding(name: str) -> list[Line]:
    """The recording of a finding: Lockstep's reference made it, with the profile of 0.22.1."""
    return lines_of(REGRESSIONS / f"vllm_0_22_1_{name}.jsonl")


class Driven:
    """vLLM's scheduler, given the inputs of a recording step by step."""

    def __init__(self, header: Line) -> None:
        self.engine = vllm_engine.make_engine(
            header, connector="scripted_connector.ScriptedConnector"
        )
        self.scheduler = self.engine.scheduler
        self.manager = self.scheduler.kv_cache_manager
        movers = release_of(vllm_engine.VERSION).hash_movers
        self.counter = CacheCounter(self.manager.block_pool, movers)
        self.handed: dict[str, list[list[int]]] = {}  # block tables as the worker received them
        self.loading: set[str] = set()  # until the worker says that it has received them
        self.in_flight: deque[tuple[Line, Any]] = deque()  # steps and what was decided

    def begin(self, step: Line) -> Any:
        """Applies the events before a step; then vLLM decides it."""
        self.scheduler.connector.expect(step.get("connector", ()), step.get("held", ()))
        self.happen(step.get("before", ()))
        return self.scheduler.schedule()

    def happen(self, events: Iterable[Line]) -> None:
        """Events of clients and operators."""
        for event in events:
            if "add" in event:
                self.engine.add(event)
            elif "abort" in event:
                self.engine.abort([event["abort"]])
            else:
                done = self.scheduler.reset_prefix_cache()
                assert done == event["reset_prefix_cache"], event
                self.counter.watch()

    def end(self, step: Line, output: Any) -> list[list[str]]:
        """What the worker returned; the requests that it stopped, and why."""
        names = list(output.num_scheduled_tokens)
        reported = None
        if worker := step.get("worker"):
            self.loading.difference_update(worker["received"])
            reported = KVConnectorOutput(
                finished_sending=set(worker["sent"]),
                finished_recving=set(worker["received"]),
                invalid_block_ids=set(worker["invalid_blocks"]),
            )
        outputs = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[list(step["sampled"].get(name, ())) for name in names],
                kv_connector_output=reported,
            ),
        )
        rows = [row for of_client in outputs.values() for row in of_client.outputs]
        return [[row.request_id, str(row.finish_reason)] for row in rows if row.finished]

    def rows(self, output: Any) -> list[Line]:
        """What the worker receives about the requests of a step, in the words of a recording."""
        cached = output.scheduled_cached_reqs
        places = zip(cached.num_computed_tokens, cached.new_block_ids, strict=True)
        told = dict(zip(cached.req_ids, places, strict=True))
        entering = set(cached.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            told[new.req_id] = new.num_computed_tokens, new.block_ids
            entering.add(new.req_id)
        rows = []
        for name, tokens in output.num_scheduled_tokens.items():
            computed, blocks = told[name]
            groups = None if blocks is None else [list(group) for group in blocks]
            row: Line = {"id": name, "tokens": tokens, "computed": computed, "blocks": groups}
            if name in entering:
                row["new"] = True
                self.handed[name] = []
            if name in cached.resumed_req_ids:
                row["resumed"] = True
            if spec := output.scheduled_spec_decode_tokens.get(name):
                row["spec"] = spec
            if groups:
                before = self.handed[name] or [[] for _ in groups]
                self.handed[name] = [a + b for a, b in zip(before, groups, strict=True)]
            rows.append(row)
        return rows

    def decided(self, output: Any) -> Line:
        """The decision of a step, and how it left queues and pool."""
        scheduler = self.scheduler
        skipped = list(scheduler.skipped_waiting)
        self.loading.update(
            request.request_id
            for request in skipped
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.request_id not in scheduler.finished_recving_kv_req_ids
        )
        line = {
            "scheduled": self.rows(output),
            "common_prefix_blocks": list(output.num_common_prefix_blocks),
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "skipped": [[request.request_id, request.status.name] for request in skipped],
            "free_blocks": self.manager.block_pool.get_num_free_blocks(),
        }
        # The workers of steps in flight have said it, and the scheduler has not heard.
        reports = [step["worker"] for step, _ in self.in_flight if "worker" in step]
        unheard = {name for report in reports for name in report["received"]}
        maybe_empty = {
            "preempted": sorted(output.preempted_req_ids or ()),
            "finished": sorted(output.finished_req_ids),
            "loading": {
                name: list(self.manager.get_block_ids(name))
                for name in sorted(self.loading - unheard)
            },
        }
        return line | {key: value for key, value in maybe_empty.items() if value}

    def come_in(self, last: int) -> list[list[str]]:
        """The outputs of the steps up to this one; the requests that they stopped, and why."""
        stopped = []
        while self.in_flight and self.in_flight[0][0]["step"] <= last:
            stopped += self.end(*self.in_flight.popleft())
        return stopped

    def repeat(self, steps: list[Line]) -> Iterator[Line]:
        """The steps again, as vLLM decides them. With asynchronous scheduling each names the step
        whose output arrived; otherwise it is the step itself."""
        for step in steps:
            output = self.begin(step)
            line = {key: step[key] for key in step if key in GIVEN} | self.decided(output)
            if "tables" in step:
                running = [request.request_id for request in self.scheduler.running]
                line["tables"] = {name: list(self.manager.get_block_ids(name)) for name in running}
            if "zero" in step:
                line["zero"] = output.new_block_ids_to_zero
            if any(event.get("reset_prefix_cache") for event in step.get("before", ())):
                line["cleared"] = True
            self.in_flight.append((step, output))
            self.happen(step.get("during", ()))
            last = step.get("output_of_step", -1) if self.engine.is_async else step["step"]
            if stopped := self.come_in(last):
                line["stopped"] = stopped
            for key, count in zip(("stored", "evicted"), self.counter.take(), strict=True):
                if count:
                    line[key] = count
            yield line


def in_null_blocks(table: list[int], row: Line, first_token: Callable[[int], int]) -> set[int]:
    """The tokens that attention of a row reads, or writes, where the table has the null block;
    `first_token(i)` is the first one that token i attends to. Blocks are of 4 tokens."""
    queries = range(row["computed"], row["computed"] + row["tokens"])
    used = {token for query in queries for token in range(first_token(query), query + 1)}
    return {token for token in used if table[token // 4] == NULL_BLOCK}


def window_of_5(token: int) -> int:
    return max(token - 4, 0)


def chunk_of_8(token: int) -> int:
    return token // 8 * 8


def chunked(header: Line) -> Line:
    """The header with chunks of 8 tokens instead of a window."""
    (group,) = header["groups"]
    spec = {key: value for key, value in group["spec"].items() if key != "sliding_window"}
    spec |= {"type": "chunked_local", "attention_chunk_size": 8}
    return header | {"groups": [group | {"spec": spec}]}


def step(
    prompt: int = 0, loads: int = 0, is_async: bool = True, local: int = 0,
    received: bool = False, invalid: tuple[int, ...] = (),
) -> Line:  # fmt: skip
    """A step of a request `r`: it comes with `prompt` tokens, of which the connector loads `loads`
    (none: it has come before), and what the worker reports."""
    line: Line = {"sampled": {"r": [7]}}
    if prompt:
        line["before"] = [{"add": "r", "prompt": [[1, prompt]], "max_tokens": 1}]
        answer = {"id": "r", "local": local, "external": loads, "async": is_async}
        line["connector"] = [answer]
    if received or invalid:
        names = ["r"] if received else []
        line["worker"] = {"received": names, "sent": [], "invalid_blocks": list(invalid)}
    return line


class VllmConnectorTest(unittest.TestCase):
    maxDiff = 2000

    def repeats(self, recorded: list[Line]) -> None:
        steps = recorded[1:-1]
        for mine, kept in zip(Driven(recorded[0]).repeat(steps), steps, strict=True):
            self.assertEqual(mine, kept)

    @unittest.skipUnless(vllm_engine.VERSION == "0.22.1", "they are of 0.22.1")
    def test_the_inputs_of_a_recording_give_the_recording(self) -> None:
        paths = sorted((SAMPLES / "vllm-0.22.1" / "connectors").glob("*/*.jsonl"))
        self.assertGreaterEqual(len(paths), 7)
        for path in paths:
            with self.subTest(path=str(path)):
                self.repeats(lines_of(path))

    @unittest.skipUnless(vllm_engine.VERSION == "0.22.1", "they are of 0.22.1")
    def test_vllm_decides_what_the_reference_decided_in_the_findings(self) -> None:
        for name in (
            "loaded_behind_large", "two_half_loaded", "lost_block_left_alone",
            "load_evicts_hit", "window_of_last_token", "back_without_window", "hit_of_void_row",
            "in_flight_behind_lost_block", "preempted_before_loss_is_known",
            "lost_block_left_behind",
        ):  # fmt: skip
            with self.subTest(name=name):
                self.repeats(finding(name))

    def handed_at_the_end(self, header: Line, steps: list[Line]) -> tuple[Line, list[list[int]]]:
        """Of the last step: what the worker receives about its request, and the table it then
        has."""
        driven = Driven(header)
        for line in steps:
            output = driven.begin(line)
            rows = driven.rows(output)
            driven.end(line, output)
        (row,) = rows
        return row, driven.handed[row["id"]]

    def test_who_counts_on_another_to_compute_a_lost_block_is_left_alone_with_it(self) -> None:
        recorded = finding("lost_block_left_alone")
        row, (table,) = self.handed_at_the_end(recorded[0], recorded[1:-1])
        self.assertEqual((row["id"], row["computed"], table), ("second", 8, [1, 2, 4]))
        self.assertEqual(recorded[1]["worker"]["invalid_blocks"], [2])

    def test_what_is_in_flight_behind_a_lost_block_is_kept(self) -> None:
        header, *steps, _ = finding("in_flight_behind_lost_block")
        for step, token in zip(steps, (1000, 1001, 1002), strict=False):
            step["sampled"] = {"loaded": [token]}
        driven = Driven(header)
        request, seen = None, []
        for step in steps:
            output = driven.begin(step)
            request = request or driven.scheduler.requests["loaded"]
            driven.in_flight.append((step, output))
            driven.come_in(step.get("output_of_step", -1))
            seen.append((list(request.output_token_ids), request.num_output_placeholders))
        # 1000 is void. 1001 was sampled behind it, and one placeholder is never taken away.
        self.assertEqual(seen, [([], 1), ([], 2), ([1001], 2), ([1001, 1002], 1)])

    def test_the_blocks_of_a_load_evict_what_another_group_has_hit_in_0_22_1(self) -> None:
        recorded = finding("load_evicts_hit")
        row, (full, window) = self.handed_at_the_end(recorded[0], recorded[1:-1])
        self.assertEqual((row["computed"], row["tokens"]), (11, 1))
        twice = set(full) & set(window)
        self.assertEqual(twice, {4} if vllm_engine.VERSION == "0.22.1" else set())

    def test_a_prompt_that_is_loaded_whole_lacks_the_window_of_its_last_token(self) -> None:
        header = finding("window_of_last_token")[0]
        for prompt, lost in ((7, set()), (8, {3}), (9, set()), (12, {7})):
            with self.subTest(prompt=prompt):
                steps = [step(prompt, loads=prompt, received=True), step()]
                row, (table,) = self.handed_at_the_end(header, steps)
                self.assertEqual((row["computed"], row["tokens"]), (prompt - 1, 1))
                self.assertEqual(in_null_blocks(table, row, window_of_5), lost)

    def test_a_prompt_that_is_loaded_whole_lacks_the_chunk_of_its_last_token(self) -> None:
        header = chunked(finding("window_of_last_token")[0])
        steps = [step(8, loads=8, received=True), step()]
        row, (table,) = self.handed_at_the_end(header, steps)
        self.assertEqual((row["computed"], row["tokens"], table), (7, 1, [0, 0]))
        self.assertEqual(in_null_blocks(table, row, chunk_of_8), set(range(8)))

    def test_who_goes_back_to_a_lost_block_has_let_go_of_the_window_before_it(self) -> None:
        header = finding("back_without_window")[0]
        for is_async in (False, True):
            with self.subTest(is_async=is_async):
                first = step(9, loads=8, is_async=is_async, received=is_async, invalid=(1,))
                row, (table,) = self.handed_at_the_end(header, [first, step()])
                self.assertEqual((row["computed"], row["tokens"], table), (4, 5, [0, 1, 2]))
                self.assertEqual(in_null_blocks(table, row, window_of_5), {0, 1, 2, 3})

    def test_who_goes_back_to_a_lost_block_stays_in_its_chunk(self) -> None:
        header = chunked(finding("back_without_window")[0])
        first = step(13, loads=4, is_async=False, local=8, invalid=(1,))  # 8: two null blocks
        row, (table,) = self.handed_at_the_end(header, [first, step()])
        self.assertEqual((row["computed"], row["tokens"], table), (8, 5, [0, 0, 1, 2]))
        self.assertEqual(in_null_blocks(table, row, chunk_of_8), set())


if __name__ == "__main__":
    if sys.flags.hash_randomization:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    unittest.main()
