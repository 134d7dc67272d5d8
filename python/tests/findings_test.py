"""`lockstep findings` with vLLM itself: each release shows what
docs/reference/findings_by_release.md says.

Of the sources that $LOCKSTEP_VLLM names (several: as in PATH). Skipped, with exit status 77, where
it names none, and where the built command ($LOCKSTEP) is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "findings_by_release.md"
FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
COMMAND = os.environ.get("LOCKSTEP", "")
CELLS = {"absent": "", "shows": "x", "stops": "!", "other": "?", "unbuilt": "-"}
SKIPPED = 77


def page_cells() -> dict[str, dict[int, str]]:
    """The table of the page: by release, by finding."""
    text = PAGE.read_text()
    releases = text.partition("Releases: ")[2].partition("\n\n")[0].replace(",", " ").split()
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {
        release: {int(row[0]): row[i] for row in rows if row[0].isdigit()}
        for i, release in enumerate(releases, 1)
    }


class FindingsTest(unittest.TestCase):
    folder: ClassVar[str]

    def test_a_release_shows_what_the_page_says(self) -> None:
        with tempfile.TemporaryDirectory() as holder:
            path = Path(holder) / "findings.json"
            done = subprocess.run(
                [COMMAND, "findings", "--engine", f"vllm:{self.folder}", "--json", str(path)],
                capture_output=True,
                text=True,
                env=os.environ | {"LOCKSTEP_PYTHON": sys.executable},
            )
            self.assertEqual(done.returncode, 1, done.stderr)
            found = json.loads(path.read_text())["findings"]
        release = found[0]["engines"][0]["engine"].removeprefix("vllm-")
        of_page = page_cells()
        if release not in of_page:
            self.skipTest(f"{PAGE.name} has no vLLM {release}")
        mine = {row["number"]: CELLS[row["engines"][0]["verdict"]] for row in found}
        self.assertEqual(mine, of_page[release])

    def test_a_reset_that_fails_leaves_the_engine_running(self) -> None:
        """vLLM raises, because a step in flight holds blocks. Its core tells the client."""
        case = ROOT / "tests" / "regressions" / "reset_refused_in_flight.case.jsonl"
        done = subprocess.run(
            [COMMAND, "replay", case, "--decisions", f"vllm:{self.folder}"],
            capture_output=True,
            text=True,
            env=os.environ | {"LOCKSTEP_PYTHON": sys.executable},
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


def load_tests(loader: unittest.TestLoader, *_: object) -> unittest.TestSuite:
    """Runs the test once per available vLLM."""
    suite = unittest.TestSuite()
    for folder in FOLDERS:
        of_folder = type(f"FindingsTest of {folder}", (FindingsTest,), {"folder": folder})
        suite.addTests(loader.loadTestsFromTestCase(of_folder))
    return suite


if __name__ == "__main__":
    if not FOLDERS or not COMMAND:
        print("SKIPPED: LOCKSTEP_VLLM names no sources, or LOCKSTEP no built command")
        sys.exit(SKIPPED)
    unittest.main()
