"""vLLM's own kernels one by one (python -m lockstep_engines vllm --kernels), of the installed vLLM
or of the unpacked sources that $LOCKSTEP_VLLM names (several: as in PATH); and the checks that need
no vLLM. Without either, or without torch, exit status 77 says skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from lockstep_engines.kernels.plants import FINDERS, PLANTS_OF_KERNELS

FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
SKIPPED = 77

FINDING_37 = "attention, ahead in windows"
ALL_TELL = "attends-one-ahead"
# A defect, the line of the table that names it, and what it says there.
FOUND = (
    ("row-in-next-slot", "reshape_and_cache", "differ"),
    ("second-padding-behind-slots", "runner V2: slots", "past the end of slot_mappings_ptr"),
    ("gathered-by-place-in-batch", "runner V2: tables gathered", "differ"),
)


class BoundsTest(unittest.TestCase):
    """Addresses compared with the memory of a kernel's arguments."""

    def setUp(self) -> None:
        import torch

        from lockstep_engines.worker import bounds as worker_bounds

        self.bounds = worker_bounds
        self.memory = bytearray(64)  # the first half is a buffer of the cache
        self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8, count=32)
        self.base = self.buffer.data_ptr()

    def check(self, *offsets: int, mask: Any = None) -> str:
        import numpy

        addresses = numpy.array([self.base + offset for offset in offsets], dtype=numpy.uint64)
        is_active = numpy.ones(len(offsets), dtype=bool) if mask is None else numpy.array(mask)
        try:
            self.bounds.check("reads", addresses, is_active, 4)
        except self.bounds.OutOfBounds as error:
            return str(error)
        return ""

    def test_the_storage_of_an_argument_is_its_memory(self) -> None:
        self.bounds.begin("kernel", {"rows": self.buffer[8:16], "count": 3})
        self.bounds.begin("kernel", {"rows": self.buffer[8:16]})
        self.assertEqual(self.check(0, 28), "")
        expected = "kernel reads 4 bytes 4 bytes past the end of rows"
        self.assertEqual(self.check(28, 36), expected)
        self.assertEqual(self.check(28, 36, mask=[True, False]), "")
        self.assertEqual(self.check(28, 36, mask=[1, 0]), "")
        self.assertEqual(self.check(28, 36, mask=[0, 1]), expected)

    def test_an_access_that_begins_inside_and_ends_outside_is_told(self) -> None:
        self.bounds.begin("kernel", {"rows": self.buffer[:1]})
        self.assertIn("past the end", self.check(30))

    def test_tables_of_addresses_lead_to_tensors_that_are_alive(self) -> None:
        import torch

        other = torch.zeros(16, dtype=torch.uint8)
        self.bounds.begin("kernel", {"table": torch.tensor([other.data_ptr()])})
        self.assertEqual(self.check(other.data_ptr() - self.base), "")
        self.assertIn("kernel reads", self.check(-self.base + 64))


class KernelsTest(unittest.TestCase):
    """`folder`: of the sources, None for the installed vLLM."""

    folder: ClassVar[str | None] = None

    def run_kernels(self, num_shapes: int, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lockstep_engines", "vllm"]
        command += [*([self.folder] if self.folder else []), "--kernels", str(num_shapes)]
        paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def differing(self, done: subprocess.CompletedProcess[str]) -> dict[str, str]:
        """The report of each kernel that differs, by its name."""
        made: dict[str, str] = {}
        name = ""
        for line in done.stdout.splitlines():
            if line.startswith("      "):
                made[name] += line
            elif "agreed" not in line and "not in this" not in line:
                name = line.strip().split("  ")[0]
                made[name] = ""
        return made

    def test_kernels_agree_with_loops_over_their_shapes(self) -> None:
        done = self.run_kernels(12)
        unlike = self.differing(done)
        known = {FINDING_37}
        if "0.22" in (self.folder or ""):  # findings 28 and 27
            known |= {"hidden states", "runner V2: tables gathered"}
            end = "kernel writes 4 bytes 0 bytes past the end of a tensor"
            self.assertIn(end, unlike["runner V2: tables gathered"])
        self.assertEqual(set(unlike), known, done.stdout + done.stderr)
        self.assertEqual(done.returncode, 0, done.stdout)  # each is named by its number
        self.assertGreaterEqual(len(done.stdout.splitlines()), 37)

    def test_planted_defects_are_found_by_their_kernel(self) -> None:
        for name, kernel, what in FOUND:
            with self.subTest(name):
                done = self.run_kernels(6, "--plant", name, "--only", kernel)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertIn(what, self.differing(done)[kernel])

    def test_defects_of_numbers_and_copies_are_found_by_their_kernels(self) -> None:
        """Plants all at once, except the defect that every attention kernel would show."""
        self.assertEqual(set(FINDERS), {plant.name for plant in PLANTS_OF_KERNELS})
        planted = {name: kernel for name, kernel in FINDERS.items() if name != ALL_TELL}
        if "0.22" in (self.folder or ""):
            self.skipTest("planted in 0.33.0")
        options = [word for name in planted for word in ("--plant", name)]
        done = self.run_kernels(8, *options)
        self.assertEqual(
            set(self.differing(done)), {*planted.values(), FINDING_37}, done.stdout + done.stderr
        )
        alone = self.run_kernels(4, "--plant", ALL_TELL, "--only", FINDERS[ALL_TELL])
        self.assertEqual(set(self.differing(alone)), {FINDERS[ALL_TELL]}, alone.stdout)


def load_tests(loader: unittest.TestLoader, *_: Any) -> unittest.TestSuite:
    suite = unittest.TestSuite()
    suite.addTests(loader.loadTestsFromTestCase(BoundsTest))
    for folder in FOLDERS or [None]:
        of_folder = type(f"KernelsTest({folder})", (KernelsTest,), {"folder": folder})
        suite.addTests(loader.loadTestsFromTestCase(of_folder))
    return suite


if __name__ == "__main__":
    if not importlib.util.find_spec("torch"):
        print("SKIPPED: no torch here; vLLM's kernels were not run")
        sys.exit(SKIPPED)
    if not FOLDERS and not importlib.util.find_spec("vllm"):
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(BoundsTest)
        if not unittest.TextTestRunner().run(suite).wasSuccessful():
            sys.exit(1)
        print("SKIPPED: no vLLM here; its kernels were not run")
        sys.exit(SKIPPED)
    unittest.main()
