"""What fuzzing finds in vLLM's own scheduler: tables in Markdown, for docs/fuzzing.md.

    python fuzz_vllm.py findings DIR --lockstep build/release/lockstep --runs 20000
    python fuzz_vllm.py planted DIR --lockstep build/release/lockstep --runs 1000 [--plant NAME...]

`findings`: from scratch, of the findings of docs/findings.md, the case that first ran into each,
the CPU time until then, and what the case shrinks to with the engine in the loop. `planted`: of
each defect of lockstep_engines.vllm.plants the same, by the first failure that is no known finding.
DIR has sources of vLLM; this interpreter drives it. CPU time is that of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[2] / "python"
sys.path[:0] = [str(PACKAGES)]

from lockstep_engines.vllm.plants import PLANTS

_SMALLEST = re.compile(r"(\S+)\.min\.case\.jsonl  (\d+) requests?, (\d+) tokens?, (\d+) blocks?")


def cpu_seconds() -> float:
    """Of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Lockstep:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._command = arguments.lockstep
        self._engine_folder = str(Path(arguments.dir).resolve())
        self._folder = folder

    def engine(self, plant: str = "") -> str:
        """The adapter's command."""
        paths = [str(PACKAGES), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(entry for entry in paths if entry)
        command = [sys.executable, "-m", "lockstep_engines", "vllm", self._engine_folder]
        command += ["--plant", plant] if plant else []
        return f"PYTHONPATH={shlex.quote(path)} {shlex.join(command)}"

    def run(self, command: str, *arguments: str, plant: str = "") -> tuple[Any, str, float]:
        """Its JSON, its text, and the CPU seconds that it took."""
        report = self._folder / "report.json"
        report.unlink(missing_ok=True)
        begin = cpu_seconds()
        done = subprocess.run(
            [self._command, command, *arguments, "--decisions", self.engine(plant)]
            + ["--json", str(report)],
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise SystemExit(f"lockstep {command} ended with {done.returncode}: {done.stderr}")
        return json.loads(report.read_text()), done.stdout, cpu_seconds() - begin


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def find_findings(lockstep: Lockstep, folder: Path, arguments: argparse.Namespace) -> None:
    cases = folder / "cases"
    options = ["--runs", str(arguments.runs), "--jobs", str(arguments.jobs)]
    options += ["--save", str(cases), "--save-findings", "--no-shrink"]
    report, _, seconds = lockstep.run("fuzz", *options)
    failed = len(report["failures"])
    print(f"{report['decided_by']}: {report['cases']:,} cases, {seconds:,.0f} s of CPU time; "
          f"{report['refused']} refused, {failed} failed otherwise\n")  # fmt: skip
    row("finding", "cases with it", "first case", "CPU s", "requests", "blocks", "steps", "check")
    print("|---" * 8 + "|", flush=True)
    named = [(int(name.partition(".")[0]), known) for name, known in report["known"].items()]
    for number, known in sorted(named):
        small, _, _ = lockstep.run(
            "shrink", str(cases / f"finding-{number}.case.jsonl"), *arguments.shrinking
        )
        after, first = small["after"], known["first_seed"]
        assert small["finding"] == number, small
        row(
            number,
            f"{known['cases']:,}",
            f"{first:,}",
            f"{seconds * first / report['cases']:,.0f}",
            after["requests"],
            after["blocks"],
            after["steps"],
            f"`{small['check']}`",
        )
    for failure in report["failures"][:10]:
        print(f"\nseed {failure['seed']}: {failure['check']}: {failure['what']}")


def find_planted(lockstep: Lockstep, folder: Path, arguments: argparse.Namespace) -> None:
    row("defect", "found", "by", "case", "requests", "tokens", "blocks")
    print("|---" * 7 + "|", flush=True)
    found = 0
    plants = [plant.name for plant in PLANTS]
    begin = cpu_seconds()
    for plant in arguments.plant or plants:
        options = ["--runs", str(arguments.runs), "--failures", "1", *arguments.shrinking]
        options += ["--save", str(folder / plant)]
        report, text, _ = lockstep.run("fuzz", *options, plant=plant)
        if not report["failures"]:
            row(f"`{plant}`", "no", "", f"none of {report['cases']:,}", "", "", "")
            continue
        found += 1
        failure = report["failures"][0]
        size = _SMALLEST.search(text)
        row(f"`{plant}`", "yes", f"`{failure['check']}`", failure["seed"], *size.groups()[1:])
    total = len(arguments.plant or plants)
    print(f"\n{found} of {total} found, {cpu_seconds() - begin:,.0f} s of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("findings", "planted"))
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument("--lockstep", default="lockstep", help="the built command")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2, help="of `findings`")
    parser.add_argument("--shrink-seconds", default="60", help="for one case")
    parser.add_argument("--plant", nargs="*", help="some defects")
    parser.add_argument("--keep", metavar="FOLDER", help="where cases stay")
    arguments = parser.parse_args()
    arguments.shrinking = ["--shrink-seconds", arguments.shrink_seconds]
    with tempfile.TemporaryDirectory() as holder:
        folder = Path(arguments.keep or holder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        what = find_findings if arguments.what == "findings" else find_planted
        what(Lockstep(arguments, folder), folder, arguments)


if __name__ == "__main__":
    main()
