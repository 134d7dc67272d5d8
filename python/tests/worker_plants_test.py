"""Defects planted in vLLM's worker for what is not plain attention: each is found by the check that
docs/real_worker.md names, in a recording that has what it breaks.

Of vLLM 0.33.0, whose sources $LOCKSTEP_VLLM names (several: as in PATH). Skipped, with exit status
77, where it names none, and where the built command ($LOCKSTEP) or torch is missing. $LOCKSTEP_DATA
names the folder with all recordings; without it those that come with the sources are taken.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from lockstep_engines.worker_plants_of_kinds import PLANTS_OF_KINDS

FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
COMMAND = os.environ.get("LOCKSTEP", "")
SKIPPED = 77
# A short recording of each family, and one that comes with the sources.
RECORDINGS = {
    "mla": ("0001", "0014"),
    "mamba_align": ("0008", "0012"),
    "mamba_none": ("0005", "0022"),
    "hidden_state_group": ("0021", "0019"),
    "spec_decode_mamba": ("0022", "0016"),
    "spec_decode_eagle": ("0014", "0005"),
}
# The family that shows a defect, and the check that finds it.
FOUND = {
    "mla-row-of-another-stride": ("mla", ", memory_check"),
    "mla-slots-one-token-late": ("mla", ", page_written"),
    "mla-prefill-reads-first-rows": ("mla", ", attention_digest"),
    "state-left-behind": ("mamba_align", ", page_written"),
    "state-from-wrong-column": ("mamba_align", ", page_written"),
    "second-state-from-wrong-column": ("mamba_align", ", page_written"),
    "state-copied-in-part": ("mamba_align", ", page_written"),
    "state-in-next-block": ("mamba_align", ", memory_check"),
    "state-starts-anew": ("mamba_align", ", page_written"),
    "state-of-first-group": ("mamba_none", ", page_written"),
    "accepted-drafts-not-counted": ("spec_decode_mamba", ", page_written"),
    "zeroed-too-late": ("mamba_align", ", attention_digest"),
    "second-zeroed-too-late": ("mamba_align", ", attention_digest"),
    "hidden-heads-swapped": ("hidden_state_group", ", page_written"),
    "hidden-row-in-next-slot": ("hidden_state_group", ", page_written"),
    "padding-written": ("mamba_align", ", page_written"),
    "rejected-drafts-computed": ("spec_decode_eagle", ", memory_check"),
}


def recording(family: str) -> Path:
    short, bundled = RECORDINGS[family]
    data = os.environ.get("LOCKSTEP_DATA", "")
    found = Path(data) / "recordings" / "vllm-0.33.0" / "schedules" / family / f"{short}.jsonl"
    if data and found.is_file():
        return found
    return ROOT / "traces/samples/recordings/vllm-0.33.0" / family / f"{bundled}.jsonl"


class PlantsTest(unittest.TestCase):
    folder: ClassVar[str]

    def test_each_is_found_by_its_check(self) -> None:
        self.assertEqual(FOUND.keys(), {plant.name for plant in PLANTS_OF_KINDS})
        for plant in PLANTS_OF_KINDS:
            family, check = FOUND[plant.name]
            with self.subTest(plant.name):
                if "spec_decode" in family and not importlib.util.find_spec("numba"):
                    self.skipTest("no numba: the first runner's drafter needs it")
                self.check(plant.name, plant.runner, recording(family), check)

    def check(self, name: str, runner: str, file: Path, check: str) -> None:
        arguments = [COMMAND, "replay", str(file), "--backend", f"vllm:{self.folder}"]
        arguments += ["--runner", "v1" if runner == "both" else runner, "--plant", name]
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            env=os.environ | {"LOCKSTEP_PYTHON": sys.executable},
        )
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn(check, done.stdout)


def load_tests(loader: unittest.TestLoader, *_: object) -> unittest.TestSuite:
    """The test for vLLM 0.33.0, wherever it is there."""
    suite = unittest.TestSuite()
    for folder in FOLDERS:
        if not (Path(folder) / "vllm/v1/core/kv_cache_planning.py").is_file():
            continue
        of_folder = type(f"PlantsTest of {folder}", (PlantsTest,), {"folder": folder})
        suite.addTests(loader.loadTestsFromTestCase(of_folder))
    return suite


if __name__ == "__main__":
    if not FOLDERS or not COMMAND or not importlib.util.find_spec("torch"):
        print("SKIPPED: LOCKSTEP_VLLM names no sources, or LOCKSTEP no built command, or no torch")
        sys.exit(SKIPPED)
    unittest.main()
