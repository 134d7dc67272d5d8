"""Memory plans of generated layers: vLLM 0.33.0's own planner and `lockstep conform` agree.

Needs vLLM 0.33.0 (installed, or in a folder of $PYTHONPATH) and $LOCKSTEP, the command; otherwise
exit status 77 says skipped. $LOCKSTEP_PLAN_SEEDS: number of generated plans (150).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from installed_vllm import SKIPPED, vllm_engine

if vllm_engine.VERSION != "0.33.0":
    print(f"SKIPPED: plans are generated for vLLM 0.33.0, not {vllm_engine.VERSION}")
    sys.exit(SKIPPED)
if not os.access(os.environ.get("LOCKSTEP", ""), os.X_OK):
    print("SKIPPED: no `lockstep` command at $LOCKSTEP; plans were not compared")
    sys.exit(SKIPPED)

import record_plans

COUNT = int(os.environ.get("LOCKSTEP_PLAN_SEEDS", "150"))


class PlansTest(unittest.TestCase):
    def compare(self, lines: list[str]) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plans.jsonl"
            path.write_text("\n".join(lines) + "\n")
            return subprocess.run([os.environ["LOCKSTEP"], "conform", str(path)],
                                  capture_output=True, text=True)  # fmt: skip

    def test_a_generated_plan_is_the_planners_own(self) -> None:
        lines = [json.dumps(record_plans.record(seed)) for seed in range(COUNT)]
        planned = sum('"plan"' in line for line in lines)
        self.assertGreater(planned, COUNT // 3, "most generated plans are refused")
        self.assertLess(planned, COUNT, "no generated plan is refused")
        done = self.compare(lines)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_plan_with_one_figure_changed_does_not_agree(self) -> None:
        for seed in range(COUNT):
            line = record_plans.record(seed)
            if line.get("plan", {}).get("tensors"):
                break
        line["plan"]["tensors"][-1]["offset"] += 1
        done = self.compare([json.dumps(line)])
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn(".offset", done.stdout)


if __name__ == "__main__":
    unittest.main()
