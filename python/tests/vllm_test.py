"""The recorder inside the vLLM that is installed: what it writes down is what vLLM decided.

Skipped, with exit status 77, where vLLM cannot be imported. With $LOCKSTEP (the `lockstep` command)
what was recorded is also compared with Lockstep's reference.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import record_scenarios
from installed_vllm import REGRESSIONS, SAMPLES, Line, lines_of, vllm_engine
from repeat import repeat, with_tokens
from vllm.config import SchedulerConfig

from lockstep_recorder.errors import RecorderError
from lockstep_recorder.scheduler import AsyncRecordingScheduler, RecordingScheduler


class VllmTest(unittest.TestCase):
    maxDiff = 2000

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    def bundled(self) -> list[Path]:
        folder = SAMPLES / f"vllm-{vllm_engine.VERSION}"
        left_out = ("benchmarks", "connectors")
        return [p for p in sorted(folder.glob("**/*.jsonl")) if not set(left_out) & set(p.parts)
                and p.parent != folder]  # fmt: skip

    def test_the_inputs_of_a_recording_give_the_recording(self) -> None:
        paths = self.bundled()
        self.assertGreaterEqual(len(paths), 20)
        for i, path in enumerate(paths):
            with self.subTest(path=str(path)):
                recorded = lines_of(path)
                again = repeat(recorded, self.folder / f"{i}.jsonl")
                for key in (
                    "engine",
                    "groups",
                    "num_blocks",
                    "scheduler_block_size",
                    "hash_block_size",
                ):
                    self.assertEqual(again[0][key], recorded[0][key])
                self.assertEqual(again[0]["config"] | recorded[0]["config"], again[0]["config"])
                for mine, theirs in zip(again[1:], recorded[1:], strict=True):
                    self.assertEqual(list(mine), list(theirs))  # the order of the keys
                    self.assertEqual(with_tokens(mine), with_tokens(theirs))

    def test_served_scenarios_agree_with_the_reference(self) -> None:
        lockstep = os.environ.get("LOCKSTEP", "")
        families = record_scenarios.families_of(vllm_engine.VERSION)
        paths = []
        for family in families:
            path = self.folder / f"{family}.jsonl"
            record_scenarios.record(family, 1, path)
            paths.append(str(path))
            end = lines_of(path)[-1]
            self.assertTrue(end["end"])
            self.assertNotIn("x_stopped_because", end)
        if not os.access(lockstep, os.X_OK):
            self.skipTest(
                f"no `lockstep` command at LOCKSTEP={lockstep!r}: recorded, not compared with"
            )
        done = subprocess.run([lockstep, "conform", *paths], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_sinks_and_reference_windows_agree_with_the_reference(self) -> None:
        lockstep = os.environ.get("LOCKSTEP", "")
        family = "sinks" if vllm_engine.VERSION == "0.22.1" else "reference_windows"
        paths = []
        for seed in range(4):
            path = self.folder / f"{family}-{seed}.jsonl"
            record_scenarios.record(family, seed, path)
            paths.append(str(path))
        served = SAMPLES.parent / "served" / f"vllm-{vllm_engine.VERSION}" / family / "0009.jsonl"
        recorded = lines_of(served)
        again = repeat(recorded, self.folder / "again.jsonl")
        self.assertEqual([with_tokens(line) for line in again[1:]],
                         [with_tokens(line) for line in recorded[1:]])  # fmt: skip
        if not os.access(lockstep, os.X_OK):
            self.skipTest(f"no `lockstep` command at LOCKSTEP={lockstep!r}: recorded alone")
        done = subprocess.run([lockstep, "conform", *paths], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_sinks_do_not_start_in_0_33_0(self) -> None:
        """docs/findings.md, 38."""
        if vllm_engine.VERSION != "0.33.0":
            self.skipTest("of 0.33.0")
        with self.assertRaisesRegex(TypeError, "SinkFullAttentionManager.*needs_kv_cache_zeroing"):
            record_scenarios.record("sinks", 0, self.folder / "sinks.jsonl")

    def finding(self, name: str) -> list[Line]:
        """The recording of a finding (docs/findings.md), of the release that is installed."""
        release = vllm_engine.VERSION.replace(".", "_")
        return lines_of(REGRESSIONS / f"vllm_{release}_{name}.jsonl")

    def test_rejected_drafts_at_a_block_boundary_stop_0_22_1(self) -> None:
        recorded = self.finding("fewer_drafts")
        engine = vllm_engine.make_engine(recorded[0])
        engine.add(recorded[1]["before"][0])
        for drafts in ([9, 9], []):
            engine.schedule()
            engine.update(engine.model_output({"r": [7]}), {"r": drafts})
        if vllm_engine.VERSION == "0.22.1":
            with self.assertRaisesRegex(AssertionError, "num_required_blocks 3 < len.* 4"):
                engine.schedule()
        else:
            self.assertEqual(engine.schedule().num_scheduled_tokens, {"r": 1})

    def test_requests_of_one_priority_and_arrival_never_end(self) -> None:
        recorded = self.finding("equal_arrivals")
        engine = vllm_engine.make_engine(recorded[0])
        for event in recorded[1]["before"]:
            engine.add(event)
        for _ in range(900):
            output = engine.schedule()
            if output.num_scheduled_tokens:
                engine.update(engine.model_output({}))
            for request in engine.scheduler.requests.values():
                self.assertLess(request.num_computed_tokens, request.num_tokens)

    def test_vllm_finds_the_class_by_the_name_that_users_give(self) -> None:
        for is_async, expected in ((False, RecordingScheduler), (True, AsyncRecordingScheduler)):
            config = SchedulerConfig(
                max_model_len=64, is_encoder_decoder=False, async_scheduling=is_async,
                scheduler_cls="lockstep_recorder.RecordingScheduler",
            )  # fmt: skip
            self.assertIs(config.get_scheduler_cls(), RecordingScheduler)
            header = record_scenarios.scenarios.make_header("full_prefix_cache", 0)
            header["config"]["async_scheduling"] = is_async
            path = self.folder / f"{is_async}.jsonl"
            os.environ["LOCKSTEP_RECORDING"] = str(path)
            engine = vllm_engine.make_engine(header, config.get_scheduler_cls())
            self.assertIs(type(engine.scheduler), expected)
            engine.scheduler.recorder.finish()

    def test_without_the_variable_the_engine_does_not_start(self) -> None:
        del os.environ["LOCKSTEP_RECORDING"]
        header = record_scenarios.scenarios.make_header("full_prefix_cache", 0)
        with self.assertRaisesRegex(RecorderError, "set LOCKSTEP_RECORDING"):
            vllm_engine.make_engine(header, RecordingScheduler)

    def test_shutdown_finishes_the_recording(self) -> None:
        path = self.folder / "run.jsonl"
        os.environ["LOCKSTEP_RECORDING"] = str(path)
        header = record_scenarios.scenarios.make_header("full_prefix_cache", 0)
        engine = vllm_engine.make_engine(header, RecordingScheduler)
        engine.schedule()
        self.assertFalse(path.exists())
        engine.scheduler.shutdown()
        self.assertEqual(lines_of(path)[-1], {"end": True, "steps": 1, "unfinished": []})


if __name__ == "__main__":
    os.environ.setdefault("LOCKSTEP_RECORDING", "unused")
    unittest.main()
