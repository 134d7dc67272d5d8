"""The check of pages (lockstep_live/pages.py): on tensors of the host, and beside vLLM's own worker
while `lockstep replay` drives it. $LOCKSTEP_VLLM names unpacked sources of vLLM (else the installed
one), $LOCKSTEP_COMMAND or $LOCKSTEP the `lockstep` command.

Skipped, with exit status 77, without either, and of releases before 0.26.0.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]
COMMAND = os.environ.get("LOCKSTEP_COMMAND") or os.environ.get("LOCKSTEP", "")
FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
RECORDINGS = ROOT / "traces" / "samples" / "recordings" / "vllm-0.33.0"
SKIPPED = 77


def serve(runner: str, plant: str, report: str) -> None:
    """Child process: the worker protocol over vLLM's worker with the check. What was found goes
    into the file `report`."""
    from lockstep_engines import plants, protocol
    from lockstep_engines.worker import device as worker_device
    from lockstep_engines.worker import plants as worker_plants

    source, sink = protocol.own_pipe()
    if plant:
        plants.plant(next(p for p in worker_plants.PLANTS if p.name == plant))
    worker_device.take_the_place_of_cuda(runner)
    from lockstep_engines.worker.adapter import Options, Worker
    from lockstep_engines.worker.host import HostWorker
    from lockstep_live.worker import PageChecks

    checks: list[Any] = []
    lines: list[str] = []

    class Checked(PageChecks, HostWorker):
        """Lockstep poisons pages between steps: what a step leaves is compared at its end."""

        def execute_model(self, scheduler_output: Any) -> Any:
            result = super().execute_model(scheduler_output)
            checks[:] = [self.page_check]
            self.page_check.finish()
            return result

        def _report_page(self, line: str) -> None:
            super()._report_page(line)
            lines.append(line)

    worker = Worker(Options(runner), Checked)
    protocol.serve(protocol.WORKER, worker, source, sink)
    check = checks[0]
    counts = {"steps": check.steps, "compared": check.compared}
    Path(report).write_text(json.dumps({"found": lines} | counts))


def step(**what: Any) -> Any:
    none = {
        "finished_req_ids": set(),
        "preempted_req_ids": None,
        "scheduled_new_reqs": [],
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
        "num_scheduled_tokens": {},
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        ),
    }
    return SimpleNamespace(**(none | what))


def cached(name: str, computed: int, *more: list[int], resumed: bool = False) -> Any:
    return SimpleNamespace(
        req_ids=[name],
        resumed_req_ids={name} if resumed else set(),
        new_block_ids=[more or None],
        num_computed_tokens=[computed],
    )


def new(name: str, computed: int, *blocks: list[int]) -> Any:
    return SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks)


class OnTensors(unittest.TestCase):
    def setUp(self) -> None:
        import torch

        from lockstep_live import pages

        self.torch, self.pages = torch, pages

    def views(self) -> dict[str, Any]:
        """[blocks, heads, tokens, elements] in the orders of a cache, and parts of a block."""
        blocks, heads, tokens, elements = 4, 2, 3, 2
        shape = (blocks, heads, tokens, elements)
        memory = lambda: self.torch.zeros(2 * blocks * heads * tokens * elements)  # noqa: E731
        by_block = heads * tokens * elements
        strides = {
            "LBHNC": (by_block, tokens * elements, elements, 1),
            "LBNHC": (by_block, elements, heads * elements, 1),
            "LHBNC": (tokens * elements, blocks * tokens * elements, elements, 1),
            "BLHNC": (2 * by_block, tokens * elements, elements, 1),
        }
        made = {
            name: memory().as_strided(shape, each, storage_offset=0)
            for name, each in strides.items()
        }
        made["split"] = memory().as_strided((2 * blocks, 3, 2), (6, 2, 1))
        return made

    def test_a_changed_word_changes_the_sum_of_its_block_and_no_other(self) -> None:
        for name, view in self.views().items():
            pages = self.pages.Pages([("layer", view)], 4)
            per_block = view[0].numel() * view.shape[0] // 4 * view.element_size()
            self.assertEqual(sum(run.size for run in pages.runs), per_block, name)
            before = pages.sums([0, 1, 2, 3])
            parts = view.shape[0] // 4
            for index in self.torch.cartesian_prod(*(self.torch.arange(n) for n in view.shape)):
                view[tuple(index)] += 1
                changed = (pages.sums([0, 1, 2, 3]) != before).any(0).tolist()
                view[tuple(index)] -= 1
                self.assertEqual(changed, [b == int(index[0]) // parts for b in range(4)], name)

    def test_rows_of_odd_bytes_and_unlike_blocks_are_refused(self) -> None:
        odd = self.torch.zeros((4, 3), dtype=self.torch.int8)
        for view, words in ((odd, "whole words"), (self.torch.zeros(5, 4), "5 blocks")):
            with self.assertRaisesRegex(self.pages.PageCheckError, words):
                self.pages.Pages([("layer", view)], 4)
        with self.assertRaisesRegex(self.pages.PageCheckError, "no cache"):
            self.pages.Pages([], 4)

    def tables(self, drafts: int = 0, ahead: int = 0, by_slot: bool = True) -> Any:
        groups = [self.pages.Group(4, True), self.pages.Group(8, by_slot)]
        return self.pages.Tables(groups, drafts, ahead)

    def test_a_step_writes_the_blocks_of_its_tokens(self) -> None:
        tables = self.tables()
        begin = step(scheduled_new_reqs=[new("a", 0, [3, 4, 5], [6, 7])],
                     num_scheduled_tokens={"a": 7})  # fmt: skip
        self.assertEqual(tables.written_by(begin), {0, 3, 4, 6})
        more = step(scheduled_cached_reqs=cached("a", 7, [8], []),
                    num_scheduled_tokens={"a": 6}, new_block_ids_to_zero=[9],
                    kv_cache_block_copies=[(3, 2)])  # fmt: skip
        self.assertEqual(tables.written_by(more), {0, 2, 4, 5, 6, 7, 8, 9})
        self.assertEqual(tables.holders(8), "held by a")
        back = step(scheduled_cached_reqs=cached("a", 0, [1], [2], resumed=True),
                    num_scheduled_tokens={"a": 1}, preempted_req_ids={"a"})  # fmt: skip
        self.assertEqual(tables.written_by(back), {0, 1, 2})
        tables.written_by(step(finished_req_ids={"a"}))
        self.assertEqual(tables.holders(1), "held by no request")

    def test_drafts_and_states_reach_further(self) -> None:
        begin = step(scheduled_new_reqs=[new("a", 8, [1, 2, 3, 4], [5, 6])],
                     num_scheduled_tokens={"a": 1})  # fmt: skip
        self.assertEqual(self.tables().written_by(begin), {0, 3, 6})
        self.assertEqual(self.tables(drafts=4).written_by(begin), {0, 3, 4, 6})
        self.assertEqual(self.tables(ahead=1).written_by(begin), {0, 2, 3, 5, 6})
        self.assertEqual(self.tables(by_slot=False).written_by(begin), {0, 3, 5, 6})

    def test_a_stray_write_is_told_once_with_its_holder(self) -> None:
        view = self.views()["LBHNC"]
        found: list[str] = []
        pages = self.pages.Pages([("layer", view)], 4)
        tables = self.pages.Tables([self.pages.Group(3, True)], 0, 0)
        check = self.pages.PageCheck(pages, tables, 4, 8, found.append)
        check.before_step(step(scheduled_new_reqs=[new("a", 0, [1]), new("b", 0, [2])],
                               num_scheduled_tokens={"a": 2, "b": 2}))  # fmt: skip
        view[1:3] = 1
        check.before_step(step(scheduled_cached_reqs=cached("a", 2),
                               num_scheduled_tokens={"a": 1}))  # fmt: skip
        view[1:3, 0, 0, 0] = 2  # the step was to leave b alone
        check.before_step(step())
        view[3] = 7
        check.finish()
        self.assertEqual(
            found,
            ["page_changed step 1 block 2 layer layer: changed, and no token of the step lies "
             "there; held by b",
             "page_changed step 2 block 3 layer layer: changed, and no token of the step lies "
             "there; held by no request"],
        )  # fmt: skip
        self.assertEqual((check.steps, check.compared), (3, 6))


class BesideTheWorker(unittest.TestCase):
    """In a process of its own, driven by `lockstep replay`."""

    def replay(self, family: str, runner: str, plant: str = "") -> tuple[int, Any]:
        recording = next((RECORDINGS / family).glob("*.jsonl"))
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            child = f"{sys.executable} {Path(__file__)} serve {runner} '{plant}' {report}"
            done = subprocess.run(
                [COMMAND, "replay", recording, "--backend", f"worker:{child}"],
                capture_output=True, text=True, timeout=500,
                env=os.environ | {"LOCKSTEP": "log", "LOCKSTEP_PAGES": "1000",
                                  "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            )  # fmt: skip
            self.assertIn(done.returncode, (0, 1), done.stdout + done.stderr)
            return done.returncode, json.loads(report.read_text())

    def test_an_unchanged_vllm_changes_no_other_page(self) -> None:
        for family in ("full_prefix_cache", "full_and_sliding_window", "async_scheduling"):
            for runner in ("v1", "v2"):
                with self.subTest(family=family, runner=runner):
                    status, report = self.replay(family, runner)
                    self.assertEqual((status, report["found"]), (0, []))
                    self.assertGreater(report["steps"], 20)
                    self.assertGreater(report["compared"], 5 * report["steps"])

    def test_a_write_into_another_page_is_found(self) -> None:
        for runner in ("v1", "v2"):
            with self.subTest(runner=runner):
                status, report = self.replay("full_prefix_cache", runner, "values-in-next-block")
                self.assertEqual(status, 1)
                self.assertRegex(report["found"][0], r"^page_changed step \d+ block \d+ layer ")


def main() -> int:
    folder = os.environ.get("LOCKSTEP_PAGE_CHECK_VLLM", "")
    if folder:
        sys.path.insert(0, folder)
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return 0
    if not folder and FOLDERS:
        statuses = set()
        for each in FOLDERS:
            if not (Path(each) / "vllm/v1/core/kv_cache_planning.py").is_file():
                print(f"skipped: {each} gives groups memory of their own")
                continue
            environment = os.environ | {"LOCKSTEP_PAGE_CHECK_VLLM": each}
            statuses.add(subprocess.run([sys.executable, __file__], env=environment).returncode)
        return max(statuses - {SKIPPED}, default=SKIPPED)
    if not COMMAND or not all(map(importlib.util.find_spec, ("vllm", "torch", "triton"))):
        print("skipped: no lockstep command, or no vLLM with torch and triton")
        return SKIPPED
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda("v2")
    ended = unittest.main(exit=False)
    return 0 if ended.result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
