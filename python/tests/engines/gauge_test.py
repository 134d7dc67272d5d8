"""An unmodified engine has only numbered findings (docs/findings.md).

Prints one row per command: cases, agreed, refused, known findings, failures. $LOCKSTEP_ENGINE is
the engine as options name it (vllm:DIR, sglang:DIR), $LOCKSTEP the `lockstep` command,
$LOCKSTEP_GAUGE_RUNS the cases per row (a few). Skipped, with exit status 77, without the first two.
docs/measured.md has a table of 10,000 cases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

TESTS = Path(__file__).resolve().parents[1]
ENGINE, COMMAND = os.environ.get("LOCKSTEP_ENGINE", ""), os.environ.get("LOCKSTEP", "")
RUNS = int(os.environ.get("LOCKSTEP_GAUGE_RUNS", "0"))
SKIPPED = 77
SCHEDULER_RUNS = max(RUNS, 120)
WORKER_RUNS = RUNS or 10  # a case of a worker takes 50 times as long
RECORDINGS = TESTS.parents[1] / "traces" / "samples" / "recordings" / "vllm-0.33.0"
KERNEL_SHAPES = min(RUNS or 6, 100)
STATES = ("", "mamba2", "short_conv", "gdn")
# Findings that show in the recorded scenarios: by family and rule of the audit.
IN_SCENARIOS = {("spec_decode_mamba", "attention_read"): 1}


@dataclass
class Row:
    runner: str
    command: str
    cases: int
    agreed: int
    refused: int
    known: int
    failures: int


class GaugeTest(unittest.TestCase):
    rows: ClassVar[list[Row]] = []

    @classmethod
    def tearDownClass(cls) -> None:
        name = ENGINE.rpartition("/")[2]
        print(f"\n| engine | runner | command | {' | '.join(list(Row.__annotations__)[2:])} |")
        print("|---" * 8 + "|")
        for row in cls.rows:
            print(f"| {name} | " + " | ".join(map(str, astuple(row))) + " |")

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    @cached_property
    def is_vllm(self) -> bool:
        return ENGINE.startswith("vllm")

    def add(self, row: Row, said: str = "") -> None:
        self.rows.append(row)
        self.assertEqual(row.failures, 0, said)
        self.assertGreater(row.agreed, 0, said)
        self.assertEqual(row.cases, row.agreed + row.refused + row.known + row.failures, said)

    def run_command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, env=os.environ | variables, cwd=TESTS
        )

    def fuzz(self, runner: str, command: str, *words: str) -> None:
        report = self.folder / "fuzz.json"
        report.unlink(missing_ok=True)
        done = self.run_command(COMMAND, "fuzz", *words, "--json", str(report))
        self.assertIn(done.returncode, (0, 1), done.stdout[-2000:] + done.stderr[-2000:])
        counts: dict[str, Any] = json.loads(report.read_text())
        known = sum(one["cases"] for one in counts["known"].values())
        failures = counts["cases"] - counts["agreed"] - counts["refused"] - known
        self.add(
            Row(runner, command, counts["cases"], counts["agreed"], counts["refused"], known,
                failures),
            done.stdout[:4000],
        )  # fmt: skip

    def test_fuzzing_its_scheduler(self) -> None:
        self.fuzz("", "fuzz --decisions", "--decisions", ENGINE, "--seed", "1", "--runs",
                  str(SCHEDULER_RUNS))  # fmt: skip

    def test_fuzzing_its_scheduler_against_the_model(self) -> None:
        if not self.is_vllm:
            self.skipTest("SGLang has no profile to conform to")
        self.fuzz("", "fuzz --decisions --conform", "--decisions", ENGINE, "--conform", "--seed",
                  "1", "--runs", str(SCHEDULER_RUNS))  # fmt: skip

    def test_fuzzing_its_scheduler_and_its_worker(self) -> None:
        if not self.is_vllm:
            self.skipTest("SGLang's worker is not driven")
        rows = [(runner, states) for runner in ("v1", "v2") for states in STATES]
        for seed, (runner, states) in enumerate(rows):
            words = ["--backend", ENGINE, "--decisions", ENGINE, "--runner", runner]
            words += ["--states", states] if states else []
            words += ["--seed", str(1 + seed * WORKER_RUNS), "--runs", str(WORKER_RUNS)]
            command = "fuzz --backend --decisions" + (f" --states {states}" if states else "")
            with self.subTest(runner=runner, states=states):
                self.fuzz(runner, command, *words)

    def test_auditing_its_recordings(self) -> None:
        paths = list(self.recorded())
        report = self.folder / "audit.json"
        done = self.run_command(COMMAND, "audit", *map(str, paths), "--json", str(report))
        found = json.loads(report.read_text())
        named = {
            (one["file"], (Path(one["file"]).parent.name, one["rule"]) in IN_SCENARIOS)
            for one in found["findings"]
        }
        failures = {file for file, is_known in named if not is_known}
        known = {file for file, is_known in named if is_known} - failures
        self.add(
            Row("", "audit of fresh recordings", found["files"], found["clean"],
                found["not_audited"], len(known), len(failures)),
            done.stdout[-4000:],
        )  # fmt: skip

    def recorded(self) -> list[Path]:
        """Fresh recordings of each family of scenarios."""
        script, seeds = ("record_scenarios", "2:3") if self.is_vllm else ("sglang_workloads", "7:8")
        words = (f"{script}.py", str(self.folder), "--seeds", seeds)
        done = self.run_command(sys.executable, *words)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return sorted(self.folder.glob("*/*.jsonl"))

    def test_checking_it_live(self) -> None:
        if not self.is_vllm:
            self.skipTest("the live check is of vLLM")
        families = ("full_prefix_cache", "async_scheduling", "mamba_align")
        failures, said = 0, ""
        for family in families:
            done = self.run_command(
                sys.executable, "live_check_test.py", "serve", "", family, "0",
                LOCKSTEP="log", LOCKSTEP_COMMAND=COMMAND, LOCKSTEP_DIR=str(self.folder),
                VLLM_LOGGING_LEVEL="ERROR",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr[-2000:])
            report = json.loads(done.stdout.splitlines()[-1])
            failures += bool(report["findings"] or report["dropped"] or report["raised"])
            said += done.stdout
        count = len(families)
        self.add(Row("", "live check", count, count - failures, 0, 0, failures), said)

    def test_checking_its_pages(self) -> None:
        folder = Path(ENGINE.partition(":")[2])
        if not (folder / "vllm" / "v1" / "core" / "kv_cache_planning.py").is_file():
            self.skipTest("the check of pages is of vLLM 0.26.0 and later")
        families = ("full_prefix_cache", "async_scheduling")
        for runner in ("v1", "v2"):
            failures, said = 0, ""
            for family in families:
                recording = next((RECORDINGS / family).glob("*.jsonl"))
                report = self.folder / "pages.json"
                child = f"{sys.executable} {TESTS}/page_check_test.py serve {runner} '' {report}"
                done = self.run_command(
                    COMMAND, "replay", str(recording), "--backend", f"worker:{child}",
                    LOCKSTEP="log", LOCKSTEP_PAGES="1000", LOCKSTEP_PAGE_CHECK_VLLM=str(folder),
                )  # fmt: skip
                said += done.stdout + done.stderr[-1000:]
                failures += done.returncode != 0 or json.loads(report.read_text())["found"] != []
            count = len(families)
            with self.subTest(runner=runner):
                self.add(Row(runner, "page check", count, count - failures, 0, 0, failures), said)

    def test_running_its_models(self) -> None:
        if not self.is_vllm:
            self.skipTest("SGLang's models are not driven")
        names = ("all",) if RUNS > 100 else ("llama",)
        for runner in ("v1", "v2"):
            with self.subTest(runner=runner):
                done = self.run_engine("--models", *(n for n in names if n != "all"), "--runner",
                                       runner)  # fmt: skip
                lines = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()]
                agreed = sum(line.startswith("agreed") for line in lines)
                failures = sum(line.startswith("differs") for line in lines)
                refused = len(lines) - agreed - failures
                self.add(Row(runner, "--models", len(lines), agreed, refused, 0, failures),
                         done.stdout + done.stderr[-2000:])  # fmt: skip

    def test_running_its_kernels(self) -> None:
        if not self.is_vllm:
            self.skipTest("SGLang's kernels are not driven")
        done = self.run_engine("--kernels", str(KERNEL_SHAPES))
        lines = [line for line in done.stdout.splitlines() if not line.startswith("      ")]
        refused = sum("not in this release" in line for line in lines)
        known = sum("differ by finding" in line for line in lines)
        failures = sum("differ" in line for line in lines) - known
        agreed = len(lines) - refused - known - failures
        command = f"--kernels {KERNEL_SHAPES}"
        self.add(Row("", command, len(lines), agreed, refused, known, failures),
                 done.stdout + done.stderr[-2000:])  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)

    def run_engine(self, *words: str) -> subprocess.CompletedProcess[str]:
        name, _, folder = ENGINE.partition(":")
        return self.run_command(sys.executable, "-m", "lockstep_engines", name, folder, *words)

    def test_a_planted_defect_is_a_failure(self) -> None:
        """Else the zeros of the table are worth nothing."""
        if not self.is_vllm:
            self.skipTest("no defect is planted in SGLang")
        python = os.environ["LOCKSTEP_PYTHON"]
        folder = ENGINE.partition(":")[2]
        decided = f"{python} -m lockstep_engines vllm {folder} --plant hash-of-reused-block"
        done = self.run_command(COMMAND, "fuzz", "--decisions", decided, "--runs", "12",
                                PYTHONPATH=str(TESTS.parent))  # fmt: skip
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stdout, re.compile("audit.attention_read"))


if __name__ == "__main__":
    if not ENGINE or not COMMAND:
        print("SKIPPED: LOCKSTEP_ENGINE names no engine, or LOCKSTEP no built command")
        sys.exit(SKIPPED)
    unittest.main()
