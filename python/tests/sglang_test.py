"""SGLang's own scheduler through its adapter: recordings of generated workloads, audited. Skipped
(exit status 77) if SGLang cannot be imported; the audit is skipped if LOCKSTEP names no command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
SKIPPED = 77

try:
    from lockstep_engines.protocol import EngineFault
    from lockstep_engines.sglang import engine as sglang_engine
except ImportError as error:
    print(f"SKIPPED: SGLang cannot be imported ({error}); nothing was run inside it")
    sys.exit(SKIPPED)

import sglang_workloads
import torch
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.allocator import paged, token
from sglang_workloads import FAMILIES, Clients, Line, Served, sender, serve, write

LOCKSTEP = os.environ.get("LOCKSTEP")
ENGINE = sglang_workloads.engine()
SEEDS = range(int(os.environ.get("LOCKSTEP_SGLANG_SEEDS", "2")))


def _audit(folder: Path, statuses: tuple[int, ...] = (0, 1)) -> list[Line]:
    """What the audit finds in the recordings of a folder. `statuses`: of the command; 2: some are
    no recordings."""
    report = folder / "report.json"
    done = subprocess.run(
        [LOCKSTEP, "audit", "--json", str(report), *map(str, sorted(folder.glob("*.jsonl")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in statuses, done.stdout + done.stderr
    return json.loads(report.read_text())["findings"]


def _attention(kind: str, page_size: int, **more: int) -> Line:
    spec = {"type": kind, "block_size": page_size, "num_kv_heads": 1, "head_size": 8}
    return {"layers": [kind], "spec": spec | {"dtype": "fp32"} | more}


def _two_windows_header(swa_tokens: int, *, chunked: bool, chunk: int) -> Line:
    """Windows of 9 tokens (SGLang's sliding_window_size 8), and a pool of few more slots."""
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": chunk,
        "max_model_len": 40,
        "block_size": 1,
        "enable_chunked_prefill": chunked,
        "x_sglang": {"pools": {"full": 64, "sliding_window": swa_tokens}},
    }
    groups = [_attention("full", 1), _attention("sliding_window", 1, sliding_window=9)]
    return {"config": config, "groups": groups, "num_blocks": 65 + swa_tokens}


class _Script:
    """Requests one after the other: (name, tokens of one prompt, output)."""

    def __init__(self, *requests: tuple[str, int, int]) -> None:
        self._requests = list(requests)
        self.left = len(requests)
        self.live: list[str] = []

    def events(self) -> list[Line]:
        if self.live or not self._requests:
            return []
        name, length, output = self._requests.pop(0)
        self.left -= 1
        add = {"add": name, "prompt": [[1, length]], "max_tokens": output, "arrival": 0.0}
        return [add]

    def token(self) -> int:
        return 7


def _scripted(head: Line, *requests: tuple[str, int, int]) -> list[Line]:
    return Served(sender(), head, _Script(*requests), ENGINE).run(steps_max=60)


class Workloads(unittest.TestCase):
    def test_sglang_serves_every_request_and_keeps_its_own_invariants(self) -> None:
        """SGLang checks its pools after every step and when idle; it raises what it finds."""
        retracted = replaced = hits = 0
        for family in FAMILIES:
            for seed in SEEDS:
                served = serve(family, seed)
                self.assertEqual(served.lines[-1]["unfinished"], [], f"{family} {seed}")
                retracted += served.num_retracted
                replaced += served.num_replaced
                hits += served.num_hit_tokens
        for count, what in ((retracted, "retracted"), (replaced, "replaced"), (hits, "hit")):
            self.assertGreater(count, 0, f"nothing was {what}: the workloads show too little")

    @unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no command")
    def test_the_audit_accuses_sglang_of_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for family in FAMILIES:
                for seed in SEEDS:
                    write(
                        Path(name, f"{family}-{seed}.jsonl"),
                        serve(family, seed).lines,
                    )
            self.assertEqual(_audit(Path(name)), [])

    def test_two_runs_of_one_seed_decide_the_same(self) -> None:
        for family in ("paged", "window_paged", "states"):
            self.assertEqual(serve(family, 3).lines, serve(family, 3).lines, family)


class Findings(unittest.TestCase):
    """Requests that SGLang accepts but never serves, on an idle engine."""

    def test_a_cached_prefix_keeps_a_request_out_of_a_pool_of_two_windows(self) -> None:
        head = _two_windows_header(17, chunked=True, chunk=16)
        lines = _scripted(head, ("a", 8, 1), ("b", 17, 1))
        self.assertEqual(lines[-1]["unfinished"], ["b"])
        self.assertEqual(_scripted(head, ("b", 17, 1))[-1]["unfinished"], [], "without the hit")
        head = _two_windows_header(19, chunked=True, chunk=16)
        lines = _scripted(head, ("a", 8, 1), ("b", 17, 1))
        self.assertEqual(lines[-1]["unfinished"], [], "with more room")

    def test_a_whole_prefill_that_windows_have_no_room_for_is_taken(self) -> None:
        head = _two_windows_header(20, chunked=False, chunk=40)
        self.assertEqual(_scripted(head, ("a", 21, 1))[-1]["unfinished"], ["a"])
        self.assertEqual(_scripted(head, ("a", 18, 1))[-1]["unfinished"], [])

    @unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no command")
    def test_the_audit_tells_of_both(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            head = _two_windows_header(17, chunked=True, chunk=16)
            write(Path(name, "cached.jsonl"), _scripted(head, ("a", 8, 1), ("b", 17, 1)))
            head = _two_windows_header(20, chunked=False, chunk=40)
            write(Path(name, "whole.jsonl"), _scripted(head, ("a", 21, 1)))
            rules = [finding["rule"] for finding in _audit(Path(name))]
            self.assertEqual(rules, ["standstill", "standstill"])


@contextmanager
def _salt_ignored() -> Iterator[None]:
    made = unified_radix_cache.RadixKey.__init__

    def without_salt(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options | {"cache_salt": None})

    with mock.patch.object(unified_radix_cache.RadixKey, "__init__", without_salt):
        yield


@contextmanager
def _window_shorter() -> Iterator[None]:
    """The tree keeps half of a window."""
    real = sglang_engine.CacheInitParams

    def shorter(**options: Any) -> Any:
        if options["sliding_window_size"] is not None:
            options["sliding_window_size"] = (options["sliding_window_size"] + 1) // 2
        return real(**options)

    with mock.patch.object(sglang_engine, "CacheInitParams", shorter):
        yield


@contextmanager
def _state_of_another() -> Iterator[None]:
    """A hit starts from the state of the slot after the right one."""
    real = sglang_engine.ScheduleBatch._collect_deferred_mamba_cow_and_clear

    def wrong(self: Any, reqs: Any) -> None:
        real(self, reqs)
        if self.mamba_cow_src_indices is not None:
            size = self.req_to_token_pool.mamba_pool.size
            self.mamba_cow_src_indices = self.mamba_cow_src_indices % size + 1

    with mock.patch.object(
        sglang_engine.ScheduleBatch, "_collect_deferred_mamba_cow_and_clear", wrong
    ):
        yield


@contextmanager
def _slots_stay_free() -> Iterator[None]:
    """The allocator returns a slot and keeps it on its list."""
    real = token.TokenToKVPoolAllocator.alloc

    def again(self: Any, need_size: int) -> Any:
        slots = real(self, need_size)
        if slots is not None and len(slots) > 2:
            self.free_pages = torch.cat((slots[-1:], self.free_pages))
        return slots

    with (
        mock.patch.object(token.TokenToKVPoolAllocator, "alloc", again),
        _own_checks_off(),
    ):
        yield


@contextmanager
def _pages_lost() -> Iterator[None]:
    """Freeing forgets a page in two."""
    real = paged.PagedTokenToKVPoolAllocator._release_page_ids

    def half(self: Any, *page_ids: torch.Tensor) -> None:
        real(self, *[ids[: (len(ids) + 1) // 2] for ids in page_ids])

    with (
        mock.patch.object(paged.PagedTokenToKVPoolAllocator, "_release_page_ids", half),
        _own_checks_off(),
    ):
        yield


@contextmanager
def _own_checks_off() -> Iterator[None]:
    checker = "sglang.srt.managers.scheduler_components.invariant_checker"
    name = f"{checker}.SchedulerInvariantChecker"
    with (
        mock.patch(f"{name}.self_check_during_busy", lambda self: None),
        mock.patch(f"{name}._report_leak", lambda self, pool, message: None),
    ):
        yield


# Planted defect: families that have what it breaks, rules that accuse.
PLANTED: dict[str, tuple[Callable[[], Any], tuple[str, ...], set[str]]] = {
    "cache salts are ignored": (_salt_ignored, ("token", "paged"), {"attention_read"}),
    "windows are half as long": (_window_shorter, ("window_token",), {"attention_read"}),
    "a hit has another one's state": (_state_of_another, ("states",), {"state_read"}),
    "slots are allocated twice": (
        _slots_stay_free,
        ("token",),
        {"handed_out", "attention_read", "token_write", "conservation"},
    ),
    "freed pages are lost": (_pages_lost, ("paged",), {"conservation"}),
}


@unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no command")
class Planted(unittest.TestCase):
    def test_the_audit_finds_defects_planted_in_sglang(self) -> None:
        for what, (defect, families, expected) in PLANTED.items():
            with self.subTest(what), tempfile.TemporaryDirectory() as name:
                crashed = 0
                for family in families:
                    for seed in range(3):
                        try:
                            with defect():
                                lines = serve(family, seed).lines
                        except (AssertionError, RuntimeError, ValueError):
                            crashed += 1
                            continue
                        write(Path(name, f"{family}-{seed}.jsonl"), lines)
                # More free blocks than there are is what no recording says.
                rules = {finding["rule"] for finding in _audit(Path(name), (0, 1, 2))}
                self.assertTrue(rules & expected, f"{what}: {rules}, {crashed} runs crashed")


class Refusals(unittest.TestCase):
    def test_what_sglang_would_not_serve_as_it_is_is_refused(self) -> None:
        send = sender()
        head = sglang_workloads.header("paged", 1)
        self.assertIn("opened", send({"open": head | {"seed": 0}}))
        length = head["config"]["max_model_len"]
        long = {"add": "a", "prompt": [[1, length + 5]], "max_tokens": 1, "arrival": 0.0}
        self.assertIn("Input length", send(long)["refused"])
        short = {"add": "b", "prompt": [[1, 4]], "max_tokens": 1, "arrival": 0.0}
        self.assertEqual(send(short), {})
        self.assertIn("already exists", send(short)["refused"])
        self.assertIn("min_tokens", send(short | {"add": "c", "min_tokens": 2})["refused"])

    def test_cases_that_it_has_no_like_of_are_refused(self) -> None:
        send = sender()
        head = sglang_workloads.header("paged", 1)
        for option, value in (("dcp", 2), ("spec_method", "eagle"), ("prefix_match_unit", 4)):
            config = head["config"] | {option: value}
            reply = send({"open": head | {"config": config, "seed": 0}})
            self.assertIn("refused", reply, option)
        states = sglang_workloads.header("states", 0)
        config = states["config"] | {"async_scheduling": True}
        self.assertIn("refused", send({"open": states | {"config": config, "seed": 0}}))
        groups = [_attention("chunked_local", head["config"]["block_size"])]
        self.assertIn("refused", send({"open": head | {"groups": groups, "seed": 0}}))

    def test_a_request_follows_another_that_filled_the_batch(self) -> None:
        """0.5.22 decides nothing in the turn in which the batch ends."""
        head, send = sglang_workloads.header("paged", 1), sender()
        config = head["config"] | {"max_num_seqs": 1, "async_scheduling": False}
        send({"open": head | {"config": config, "seed": 0}})
        for name in "ab":
            send({"add": name, "prompt": [[1, 4]], "max_tokens": 2, "arrival": 0.0})
        for step, name in enumerate("aabb"):
            rows = send({"schedule": step})["scheduled"]
            self.assertEqual([row["id"] for row in rows], [name], step)
            send({"update": step, "sampled": {name: [7]}})

    def test_an_idle_turn_with_a_pending_result_retracts_nothing(self) -> None:
        """The pool is full, and the pending result ends `a`: `b` decodes in the next step."""
        config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 40}
        config |= {"block_size": 1, "enable_prefix_caching": False, "async_scheduling": True}
        send = sender()
        send({"open": {"config": config, "groups": [_attention("full", 1)], "num_blocks": 11}})
        for name, output in (("a", 5), ("b", 6), ("c", 3)):
            prompt = [[ord(name), 1]]
            send({"add": name, "prompt": prompt, "max_tokens": output, "arrival": 0.0})
        decided = [send({"schedule": 0})]
        for step in range(1, 8):
            decided.append(send({"schedule": step}))
            if rows := decided[-2]["scheduled"]:
                send({"update": step - 1, "sampled": {row["id"]: [7] for row in rows}})
        rows = [[row["id"] for row in step["scheduled"]] for step in decided]
        self.assertEqual(rows[5:], [["a", "b"], [], ["b"]])
        self.assertFalse([step for step in decided if "preempted" in step])

    def test_an_abort_ends_no_request_whose_name_begins_alike(self) -> None:
        send = sender()
        send({"open": sglang_workloads.header("paged", 1) | {"seed": 0}})
        for name in ("r1", "r10"):
            send({"add": name, "prompt": [[1, 4]], "max_tokens": 1, "arrival": 0.0})
        self.assertEqual(send({"abort": "r1"}), {})
        self.assertEqual(send({"schedule": 0})["running"], ["r10"])


class Slots(unittest.TestCase):
    """What a kernel would write or copy, unlike the tables."""

    def _served_with(self, defect: Callable[[Any, Any], None]) -> None:
        """`defect`: of an engine and the batch that it has decided."""
        real = sglang_engine.Engine.next_batch

        def wrong(engine: Any) -> Any:
            batch = real(engine)
            if batch:
                defect(engine, batch)
            return batch

        send = sender()
        send({"open": sglang_workloads.header("paged", 1) | {"seed": 0}})
        send({"add": "a", "prompt": [[1, 4]], "max_tokens": 2, "arrival": 0.0})
        with mock.patch.object(sglang_engine.Engine, "next_batch", wrong):
            send({"schedule": 0})
            send({"update": 0, "sampled": {"a": [7]}})

    def test_slots_that_the_tables_do_not_have_are_a_fault(self) -> None:
        def written_elsewhere(_: Any, batch: Any) -> None:
            batch.out_cache_loc = batch.out_cache_loc + 1

        with self.assertRaisesRegex(EngineFault, "writes slots"):
            self._served_with(written_elsewhere)

        def part_of_a_page(engine: Any, batch: Any) -> None:
            engine.rows.req_to_token[batch.req_pool_indices, 1] += 1

        with self.assertRaisesRegex(EngineFault, "not whole pages"):
            self._served_with(part_of_a_page)

    @unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no command")
    def test_a_reset_drops_copies_of_states_to_the_tree(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name, "states.jsonl"), serve("states", 67, 30).lines)
            self.assertEqual(_audit(Path(name)), [])


@unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no command")
class Runs(unittest.TestCase):
    def test_a_pending_token_of_a_retracted_request_is_dropped(self) -> None:
        """Lockstep's loop samples its position again, and the pages compare equal."""
        case, engine = HERE / "sglang_dropped_token.case.jsonl", os.environ["LOCKSTEP_ENGINE"]
        with tempfile.TemporaryDirectory() as name:
            report = Path(name, "report.json")
            command = [LOCKSTEP, "replay", case, "--decisions", engine, "--json", report]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertRegex(done.stdout, r"preemptions +1\n")


class Process(unittest.TestCase):
    def test_a_process_speaks_the_protocol(self) -> None:
        from adapter_client import Adapter

        adapter = Adapter("sglang")
        self.assertEqual(adapter.hello()["engine"], ENGINE)
        self.assertRegex(ENGINE["version"], r"^0\S+ \((rust|python) tree\)$")
        head = sglang_workloads.header("paged", 2)
        lines = Served(adapter.send, head, Clients(head, 2), ENGINE).run()
        self.assertEqual(adapter.close(), 0)
        self.assertEqual(lines, serve("paged", 2).lines)

    def test_it_speaks_the_protocol_as_its_page_says(self) -> None:
        from adapter_client import failing_checks

        wrong = failing_checks("sglang", None)
        if wrong is None:
            self.skipTest("LOCKSTEP names no built command")
        self.assertEqual(wrong, "")


if __name__ == "__main__":
    unittest.main(verbosity=2)
