"""vLLM's own models, tiny, behind its whole engine (python -m lockstep_engines vllm --models), of
the installed vLLM or of the unpacked sources that $LOCKSTEP_VLLM names (several: as in PATH).
Without either, or without torch, exit status 77 says skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
SKIPPED = 77


class ModelsTest(unittest.TestCase):
    """`folder`: of the sources, None for the installed vLLM."""

    folder: ClassVar[str | None] = None

    def run_models(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lockstep_engines", "vllm"]
        command += [*([self.folder] if self.folder else []), *options]
        paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def test_a_model_computes_the_same_in_shared_memory_and_alone(self) -> None:
        for runner in ("v1", "v2"):
            with self.subTest(runner):
                done = self.run_models("--runner", runner, "--models", "llama")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-2000:])
                self.assertRegex(
                    done.stdout,
                    r"llama +agreed: \d+ tokens in \d+ steps, [1-9]\d* later chunks, "
                    r"[1-9]\d* tokens hit, [1-9]\d* preemptions",
                )

    def test_a_slot_that_is_one_off_makes_it_compute_something_else(self) -> None:
        done = self.run_models("--models", "llama", "--plant", "slot-of-first-block")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr[-2000:])
        self.assertIn("differs: r", done.stdout)

    def test_models_that_are_not_there_are_told(self) -> None:
        done = self.run_models("--models", "gpt")
        self.assertIn("found no model gpt", done.stderr)


def load_tests(loader: unittest.TestLoader, *_: Any) -> unittest.TestSuite:
    suite = unittest.TestSuite()
    for folder in FOLDERS or [None]:
        of_folder = type(f"ModelsTest({folder})", (ModelsTest,), {"folder": folder})
        suite.addTests(loader.loadTestsFromTestCase(of_folder))
    return suite


if __name__ == "__main__":
    if not importlib.util.find_spec("torch"):
        print("SKIPPED: no torch here; vLLM's models were not run")
        sys.exit(SKIPPED)
    if not FOLDERS and not importlib.util.find_spec("vllm"):
        print("SKIPPED: no vLLM here; its models were not run")
        sys.exit(SKIPPED)
    unittest.main()
