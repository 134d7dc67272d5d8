"""Planting defects: the mechanism on a package that is made up, and every defect for vLLM in the
sources that are there (installed, or named by $LOCKSTEP_VLLM; several: as in PATH)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from adapter_client import PACKAGES

from lockstep_engines import plants
from lockstep_engines.plants import Edit, ImportedAlready, Plant, PlantError
from lockstep_engines.vllm import plants as vllm_plants

SOURCE = """
def first():
    count = 1
    return count

def second():
    count = 1
    return count

LIMIT = 5

class Pool:
    size = 6

    @property
    def blocks(self):
        count = 2
        return sorted(range(count), key=lambda block: -block)

    def counter(self):
        count = 3
        return lambda: count

    del counter
"""


def made_up(*ways: tuple[Edit, ...]) -> Plant:
    return Plant("made-up", "memory", "A count is one off.", ways)


class PlantsTest(unittest.TestCase):
    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        (Path(holder.name) / "made_up_engine.py").write_text(SOURCE)
        sys.path.insert(0, holder.name)
        self.addCleanup(sys.path.remove, holder.name)
        self.addCleanup(sys.modules.pop, "made_up_engine", None)
        finders = list(sys.meta_path)
        self.addCleanup(lambda: sys.meta_path.__setitem__(slice(None), finders))
        importlib.invalidate_caches()

    def test_a_defect_is_imported_and_not_written(self) -> None:
        edit = Edit("made_up_engine", "count = 1", "count = 2", "def second(")
        plants.plant(made_up((edit,)))
        engine = importlib.import_module("made_up_engine")
        self.assertEqual((engine.first(), engine.second()), (1, 2))
        self.assertEqual(Path(engine.__file__).read_text(), SOURCE)

    def test_the_first_way_that_fits_is_taken(self) -> None:
        edits = [Edit("made_up_engine", find, "pass", "def first(") for find in ("x", "count = 1")]
        ways = [(edit,) for edit in edits]
        self.assertEqual(plants.sources_with(made_up(*ways))["made_up_engine"].count("pass"), 1)

    def test_text_that_is_not_there_once_is_refused(self) -> None:
        for edit, why in (
            (Edit("made_up_engine", "count = 1", ""), "'count = 1' 2 times in made_up_engine"),
            (Edit("made_up_engine", "total", ""), "'total' 0 times"),
            (Edit("made_up_engine", "count", "", "def third("), "no 'def third\\('"),
            (Edit("no_such_engine", "count", ""), "no module no_such_engine"),
        ):
            with self.subTest(edit=edit), self.assertRaisesRegex(PlantError, why):
                plants.plant(made_up((edit,)))

    def test_functions_of_a_module_that_is_imported_already_change(self) -> None:
        engine = importlib.import_module("made_up_engine")
        second, pool = engine.second, engine.Pool()
        with_comment = "count = 2\n    # a line more"
        edits = (
            Edit("made_up_engine", "count = 1", with_comment, "def second("),
            Edit("made_up_engine", "count = 2", "count = 3", "def blocks("),
        )
        plants.plant(made_up(edits))
        self.assertEqual((engine.first(), second(), pool.blocks), (1, 2, [2, 1, 0]))
        self.assertIn("a line more", inspect.getsource(second))
        self.assertTrue(inspect.getsource(engine.Pool.blocks.fget).strip().endswith("-block)"))

    def test_what_a_module_has_done_by_then_is_refused(self) -> None:
        engine = importlib.import_module("made_up_engine")
        for find, put in (
            ("LIMIT = 5", "LIMIT = 6"),
            ("size = 6", "size = 7"),
            ("def first()", "def first(count=1)"),
            ("@property", "@staticmethod"),
            ("count = 3", "count = 4"),  # no such function is left
            ("key=lambda block: -block", "key=lambda block: -block + LIMIT * 0 + __class__"),
        ):
            with self.subTest(find), self.assertRaisesRegex(ImportedAlready, "imported already"):
                plants.plant(made_up((Edit("made_up_engine", find, put),)))
        self.assertEqual((engine.first(), engine.Pool().blocks), (1, [1, 0]))


class VllmPlantsTest(unittest.TestCase):
    def test_names_are_unique_and_there_are_twenty_at_least(self) -> None:
        names = {plant.name for plant in vllm_plants.PLANTS}
        self.assertEqual(len(names), len(vllm_plants.PLANTS))
        self.assertGreaterEqual(len(names), 20)

    def test_each_fits_the_sources_that_are_there(self) -> None:
        folders = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep)
                   if folder]  # fmt: skip
        if not folders and importlib.util.find_spec("vllm") is None:
            self.skipTest("vLLM is not installed, and LOCKSTEP_VLLM names no sources")
        for folder in folders or [""]:
            sys.path.insert(0, folder)
            for plant in vllm_plants.PLANTS:
                with self.subTest(folder=folder, plant=plant.name):
                    for module, source in plants.sources_with(plant).items():
                        compile(source, module, "exec")
            sys.path.remove(folder)

    def test_a_name_that_is_no_defect_ends_the_adapter_with_words(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep_engines", "vllm", "--plant", "nothing"],
            cwd=PACKAGES,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("found no defect nothing; --plants lists the defects", done.stderr)


if __name__ == "__main__":
    unittest.main()
