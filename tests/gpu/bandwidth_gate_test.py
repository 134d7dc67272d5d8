"""The bandwidth gate accepts what keeps the limits, and names the row that does not."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

GATE = Path(__file__).with_name("bandwidth_gate.py")
sys.path.insert(0, str(GATE.parent))
from bandwidth_gate import limits  # noqa: E402


def rows(factor: float = 1.0, slow: str = "") -> dict:
    return {
        "benchmarks": [
            {
                "run_name": name.replace("*", "73") + "/manual_time",
                "aggregate_name": aggregate,
                "of_copy": least * (factor if name == slow or not slow else 1.0),
            }
            for name, least in limits().items()
            for aggregate in ("median", "cv")
        ]
    }


def run(document: object) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bandwidth.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        command = [sys.executable, str(GATE), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


class BandwidthGate(unittest.TestCase):
    def test_rows_at_their_limits_pass(self) -> None:
        self.assertEqual(run(rows())[0], 0)

    def test_one_slower_row_is_named(self) -> None:
        for name in limits():
            status, said = run(rows(0.99, name))
            self.assertEqual(status, 1)
            self.assertIn(name.replace("*", "73"), said)
            self.assertEqual(len(said.splitlines()), 1)

    def test_a_missing_row_is_no_pass(self) -> None:
        document = rows()
        document["benchmarks"] = document["benchmarks"][2:]
        status, said = run(document)
        self.assertEqual(status, 2)
        self.assertIn("has no row", said)

    def test_another_file_is_refused(self) -> None:
        for text in ("", "{}", "[]", '{"benchmarks": 3}'):
            self.assertEqual(run(text)[0], 2)


if __name__ == "__main__":
    unittest.main()
