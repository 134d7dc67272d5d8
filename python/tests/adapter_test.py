"""vLLM under the scheduler protocol repeats its recorded decisions. It is the installed vLLM, or
the unpacked sources that $LOCKSTEP_VLLM names (several: as in PATH). Without either the test is
skipped with exit status 77.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any, ClassVar

from adapter_client import (
    Adapter,
    Line,
    Repeat,
    case_of,
    differences,
    encode,
    failing_checks,
    full_attention_case,
)

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "traces" / "samples" / "recordings"
REGRESSIONS = ROOT / "tests" / "regressions"
FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
SKIPPED = 77

CASE = full_attention_case(9, max_num_batched_tokens=64, max_model_len=64)


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(name: str, num_tokens: int, **keys: Any) -> Line:
    return {"add": name, "prompt": [[1, num_tokens]], "max_tokens": 8, "arrival": 0.0} | keys


class AdapterTest(unittest.TestCase):
    """`folder`: of the sources, None for the installed vLLM."""

    folder: ClassVar[str | None] = None
    adapter: ClassVar[Adapter]
    hello: ClassVar[Line]

    @classmethod
    def setUpClass(cls) -> None:
        cls.adapter = cls.started()
        cls.hello = cls.adapter.hello()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.adapter.close()

    @classmethod
    def started(cls, *arguments: str) -> Adapter:
        return Adapter("vllm", *([cls.folder] if cls.folder else []), *arguments)

    def recordings(self) -> list[Path]:
        folder = SAMPLES / f"vllm-{self.hello['engine']['version']}"
        return [
            path
            for path in sorted(folder.glob("*/**/*.jsonl"))
            if "benchmarks" not in path.parts and "schedule_recording" in path.read_text()[:30]
        ]

    def opened(self, **changes: Any) -> Line:
        case = CASE | changes | {"config": CASE["config"] | changes.get("config", {})}
        return self.adapter.send({"open": case})

    def send(self, **message: Any) -> Line:
        return self.adapter.send(message)

    def test_the_inputs_of_a_recording_give_the_recording(self) -> None:
        paths = self.recordings()
        if not paths:
            self.skipTest(f"no recording of vLLM {self.hello['engine']['version']} is bundled")
        for path in paths:
            with self.subTest(path=str(path.relative_to(SAMPLES))):
                self.assertEqual(differences(self.adapter, lines_of(path)), [])

    def test_the_first_and_the_fiftieth_case_of_a_process_are_decided_alike(self) -> None:
        paths = self.recordings()
        if not paths:
            self.skipTest(f"no recording of vLLM {self.hello['engine']['version']} is bundled")
        others = [lines_of(path) for path in paths[:49]]
        first, later = self.started(), self.started()
        try:
            for recorded in others:
                differences(later, recorded)
            for recorded in (others[0], others[-1]):
                mine = [encode(list(pair)) for pair in Repeat(first, recorded).lines()]
                again = [encode(list(pair)) for pair in Repeat(later, recorded).lines()]
                self.assertEqual(mine, again)
        finally:
            first.close()
            later.close()

    def test_an_output_says_how_many_tokens_a_request_has(self) -> None:
        self.opened()
        self.send(**add("a", 20))
        self.send(**add("b", 20, max_tokens=1))
        reply = self.send(schedule=0, tables=True)
        self.assertEqual(reply["running"], ["a", "b"])
        self.assertEqual(list(reply["tables"]), ["a", "b"])
        self.send(abort="c")
        reply = self.send(update=0, sampled={"a": [7], "b": [8]})
        self.assertEqual(reply["stopped"], [["b", "length"]])
        self.assertEqual(reply["num_tokens"], {"a": 21, "b": 21})
        self.assertEqual(reply["running"], ["a"])

    def test_a_reset_preempts_who_runs(self) -> None:
        self.opened()
        self.send(**add("a", 20))
        self.send(schedule=0)
        self.send(update=0, sampled={"a": [7]})
        reset = {"running": False}
        self.assertFalse(self.send(reset_prefix_cache=reset)["reset_prefix_cache"])
        reply = self.send(reset_prefix_cache={"running": True})
        self.assertTrue(reply["reset_prefix_cache"] and reply["cleared"])
        self.assertEqual((reply["running"], reply["waiting"]), ([], ["a"]))
        self.assertEqual(reply["free_blocks"], CASE["num_blocks"] - 1)
        row = self.send(schedule=1)["scheduled"][0]
        self.assertEqual((row["tokens"], row["resumed"]), (21, True))

    def test_a_paused_engine_takes_nobody_new(self) -> None:
        self.opened()
        self.send(**add("a", 20))
        self.send(pause_state="PAUSED_NEW")
        self.assertEqual(self.send(schedule=0)["scheduled"], [])
        self.send(pause_state="UNPAUSED")
        self.assertEqual(self.send(schedule=1)["scheduled"][0]["id"], "a")
        self.assertIn("ASLEEP", self.send(pause_state="ASLEEP")["failed"]["what"])

    def test_what_the_front_end_refuses_is_refused(self) -> None:
        self.opened()
        for event, why in (
            (add("a", 0), "empty"),
            (add("a", 64), "no more than 63"),
            (add("a", 20, min_tokens=9), "min_tokens"),
            (add("a", 20, max_tokens=0), "max_tokens"),
        ):
            with self.subTest(event=event):
                self.assertRegex(self.send(**event).get("refused", "taken"), why)
        self.assertEqual(self.send(**add("a", 63)), {})
        self.assertRegex(self.send(**add("a", 20))["refused"], "already exists")

    def test_what_the_release_cannot_build_is_refused_by_name(self) -> None:
        group = CASE["groups"][0]
        for changes, why in (
            ({"config": {"watermark": 0.1}}, "option watermark"),
            ({"config": {"max_num_batched_tokens": 2, "max_num_seqs": 4}}, "max_num_seqs"),
            ({"connector": {"colour": 1}}, "connector colour = 1"),
            ({"num_blocks": 0}, "`assert num_gpu_blocks is not None and num_gpu_blocks > 0`"),
            ({"groups": [group | {"role": "encoder"}]}, "group role = encoder"),
            ({"groups": [group | {"spec": group["spec"] | {"type": "rope"}}]}, "kind rope"),
            ({"groups": [group | {"spec": group["spec"] | {"colour": 1}}]}, "colour = 1"),
        ):
            with self.subTest(changes=changes):
                self.assertRegex(self.opened(**changes).get("refused", "opened"), why)
        self.assertIn("opened", self.opened(groups=[group | {"role": "default"}]))

    def test_options_that_are_left_out_have_vllms_defaults(self) -> None:
        reply = self.adapter.send({"open": CASE | {"config": {}}})
        self.assertEqual(reply["opened"], {"scheduler_block_size": 16, "hash_block_size": 16})

    def test_the_engine_core_takes_the_block_size_of_the_only_group(self) -> None:
        """Seed 7079 of 0.33.0; before 0.23.0 it decides nothing."""
        group = CASE["groups"][0]
        smaller = group | {"spec": group["spec"] | {"block_size": 8}}
        reply = self.opened(config={"enable_prefix_caching": False}, groups=[smaller])
        size = 16 if self.hello["engine"]["version"] == "0.22.1" else 8
        self.assertEqual(reply["opened"], {"scheduler_block_size": size, "hash_block_size": size})

    def test_an_exception_is_told_and_the_next_case_is_as_new(self) -> None:
        """Drafts that are rejected at a block's boundary stop vLLM 0.22.1 (docs/findings.md)."""
        recorded = lines_of(REGRESSIONS / "vllm_0_22_1_fewer_drafts.jsonl")
        self.adapter.send(case_of(recorded[0]))
        self.adapter.send(recorded[1]["before"][0])
        for step, drafts in enumerate(([9, 9], [])):
            self.send(schedule=step)
            self.send(update=step, sampled={"r": [7]}, drafts={"r": drafts})
        reply = self.send(schedule=2)
        if self.hello["engine"]["version"] == "0.22.1":
            self.assertRegex(reply["failed"]["what"], "^AssertionError: num_required_blocks 3")
            self.assertIn("single_type_kv_cache_manager.py", reply["failed"]["trace"])
            self.assertRegex(self.send(schedule=3)["failed"]["what"], "no case is open")
        else:
            self.assertEqual(reply["scheduled"][0]["tokens"], 1)
        self.assertIn("opened", self.opened())

    def test_it_speaks_the_protocol_as_its_page_says(self) -> None:
        wrong = failing_checks("vllm", self.folder)
        if wrong is None:
            self.skipTest("LOCKSTEP names no built command")
        self.assertEqual(wrong, "")

    def test_messages_out_of_order_are_named(self) -> None:
        self.opened()
        self.assertIn("expected 0", self.send(schedule=1)["failed"]["what"])
        self.opened()
        self.assertIn("step 0", self.send(update=0, sampled={})["failed"]["what"])

    def test_a_planted_defect_changes_what_is_decided(self) -> None:
        with_defect = self.started("--plant", "end-not-reported")
        try:
            told = []
            for adapter in (self.adapter, with_defect):
                adapter.send({"open": CASE})
                adapter.send(add("a", 20, max_tokens=1))
                adapter.send({"schedule": 0})
                adapter.send({"update": 0, "sampled": {"a": [7]}})
                told.append(adapter.send({"schedule": 1}).get("finished"))
            self.assertEqual(told, [["a"], None])
        finally:
            with_defect.close()


def load_tests(loader: unittest.TestLoader, *_: Any) -> unittest.TestSuite:
    """Runs the tests once per available vLLM."""
    suite = unittest.TestSuite()
    for folder in FOLDERS or [None]:
        name = f"AdapterTest of {folder}" if folder else "AdapterTest"
        of_folder = type(name, (AdapterTest,), {"folder": folder})
        suite.addTests(loader.loadTestsFromTestCase(of_folder))
    return suite


if __name__ == "__main__":
    if not FOLDERS and importlib.util.find_spec("vllm") is None:
        print("SKIPPED: vLLM is not installed, and LOCKSTEP_VLLM names no sources")
        sys.exit(SKIPPED)
    unittest.main()
