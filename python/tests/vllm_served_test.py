"""The recorder in an engine with a server's options.

With $LOCKSTEP_DATA (a folder with `recordings_more/vllm-RELEASE/schedules_served`) recordings of
such an engine are repeated. Our scenarios are compared with Lockstep's reference with
$LOCKSTEP, the `lockstep` command. Skipped, with exit status 77, where vLLM cannot be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import record_scenarios
from installed_vllm import Line, lines_of, vllm_engine
from repeat import repeat, with_tokens

DATA = Path(os.environ.get("LOCKSTEP_DATA", "")) / "recordings_more"
FOLDER = DATA / f"vllm-{vllm_engine.VERSION}" / "schedules_served"
# What 0.33.0 does wrong in these scenarios: findings 5 and 16 of docs/findings.md.
KNOWN = {("jamba-mini", "standstill"), ("qwen3.5-27b-mtp", "state_read")}
SEEDS = [int(seed) for seed in os.environ.get("LOCKSTEP_SERVED_SEEDS", "0").split(",")]


def as_written(step: Line) -> Line:
    """The step as the recorder writes it: prompts in tokens, counts only when there are any."""
    return {key: value for key, value in with_tokens(step).items() if value != 0 or key == "step"}


def without_names(config: Line) -> Line:
    """The options without what decides nothing."""
    return {key: value for key, value in config.items() if not key.startswith("x_model")}


class ServedTest(unittest.TestCase):
    maxDiff = 2000

    def test_the_inputs_of_a_recording_give_the_recording(self) -> None:
        if not FOLDER.is_dir():
            data = os.environ.get("LOCKSTEP_DATA", "")
            self.skipTest(f"no recordings of a server at LOCKSTEP_DATA={data!r}")
        paths = [FOLDER / family.name / f"{seed:04}.jsonl"
                 for family in sorted(FOLDER.iterdir()) for seed in SEEDS]  # fmt: skip
        self.assertGreaterEqual(len(paths), 30)
        for path in paths:
            with self.subTest(path=path.name, family=path.parent.name):
                with tempfile.TemporaryDirectory() as folder:
                    recorded = lines_of(path)
                    again = repeat(recorded, Path(folder) / "again.jsonl", tables_every=16)
                self.compare(again, recorded)

    def compare(self, again: list[Line], recorded: list[Line]) -> None:
        header, known = again[0], recorded[0]
        self.assertEqual(header["engine"], known["engine"])
        for key in ("groups", "num_blocks", "scheduler_block_size", "hash_block_size"):
            self.assertEqual(header[key], known[key])
        mine, theirs = without_names(header["config"]), without_names(known["config"])
        self.assertEqual(mine, {"dcp": 1, "pcp": 1} | theirs)
        self.assertEqual(len(again), len(recorded))
        for mine, theirs in zip(again[1:-1], recorded[1:-1], strict=True):
            mine.pop("common_prefix_blocks")
            self.assertEqual(as_written(mine), as_written(theirs))
        self.assertEqual(again[-1], recorded[-1])


class ScenariosTest(unittest.TestCase):
    def test_models_as_served_agree_with_the_reference(self) -> None:
        if vllm_engine.VERSION != "0.33.0":
            self.skipTest(f"models are described as 0.33.0 serves them, not {vllm_engine.VERSION}")
        import served_models

        lockstep = os.environ.get("LOCKSTEP", "")
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for family in served_models.MODELS:
                path = Path(folder) / f"{family}.jsonl"
                record_scenarios.record(family, 0, path, requests=12, served=True)
                paths.append(str(path))
                header, end = lines_of(path)[0], lines_of(path)[-1]
                self.assertNotIn("x_beyond_format", header)
                self.assertNotIn("x_stopped_because", end)
            if not os.access(lockstep, os.X_OK):
                self.skipTest(f"no `lockstep` command at LOCKSTEP={lockstep!r}: only recorded")
            done = subprocess.run([lockstep, "conform", *paths], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            report = Path(folder) / "audit.json"
            done = subprocess.run([lockstep, "audit", *paths, "--json", report],
                                  capture_output=True, text=True)  # fmt: skip
            found = {(Path(one["file"]).stem, one["rule"])
                     for one in json.loads(report.read_text())["findings"]}  # fmt: skip
        self.assertEqual(found, KNOWN, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
