"""Lockstep's decisions and vLLM's, timed side by side on the same workloads.

    python side_by_side.py --vllm PYTHON[=PYTHONPATH]... [--lockstep build/release/lockstep]
                           [--runs 3] [FILE...]

PYTHON: an interpreter that can import vLLM, or can with PYTHONPATH; once for each release that is
to be timed. FILE: benchmark files (docs/formats.md); by default the three of traces/samples. Runs
of both take turns, and the least of each counts: what else the machine does can only add to it.
Lockstep runs with the release's name, and must serve the steps, tokens and request-steps that vLLM
served just before. Prints a Markdown table; ends with 1 where the totals differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPEED = Path(__file__).with_name("vllm_scheduler_speed.py")
SAMPLES = ROOT / "traces" / "samples" / "recordings" / "vllm-0.22.1" / "benchmarks"


def time_vllm(interpreter: str, path: Path) -> dict[str, Any]:
    """One run of vLLM's scheduler: its version, totals and seconds."""
    python, _, folder = interpreter.partition("=")
    environment = dict(os.environ, VLLM_NO_USAGE_STATS="1")
    if folder:
        environment["PYTHONPATH"] = folder
    command = [python, str(SPEED), "--json", "--runs", "1", str(path)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"benchmark"')]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{' '.join(command)}: ended with {done.returncode}")
    return json.loads(lines[-1])


def for_release(path: Path, report: dict[str, Any], folder: str) -> Path:
    """The benchmark file as that release would have written it."""
    first, _, rest = path.read_text().partition("\n")
    header = json.loads(first)
    header["engine"]["version"] = report["version"]
    header["totals"] = report["totals"]
    copy = Path(folder) / f"{report['version']}-{path.name}"
    copy.write_text(json.dumps(header) + "\n" + rest)
    return copy


def time_lockstep(lockstep: Path, path: Path, folder: str) -> float:
    """One run of the model: its seconds, when it served what vLLM served."""
    result = Path(folder) / "run.json"
    command = [str(lockstep), "replay", str(path), "--backend", "none", "--json", str(result)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: ended with {done.returncode}\n{done.stdout}")
    report = json.loads(result.read_text())
    if not report["recorded_totals"]["met"]:
        raise SystemExit(f"{path.name}: Lockstep did not serve {report['recorded_totals']}")
    return report["schedule_s"]


def compare(interpreter: str, path: Path, lockstep: Path, runs: int) -> str:
    """One line of the table."""
    theirs, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            report = time_vllm(interpreter, path)
            theirs += report["seconds"]
            copy = for_release(path, report, folder)
            ours += [time_lockstep(lockstep, copy, folder) for _ in range(3)]
    work = report["totals"]["request_steps"]
    return (
        f"| {report['benchmark']} | {report['version']} | {work / min(theirs):,.0f} "
        f"| {work / min(ours):,.0f} | {min(theirs) / min(ours):.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--vllm", action="append", required=True, metavar="PYTHON[=PYTHONPATH]")
    parser.add_argument("--lockstep", type=Path, default=ROOT / "build" / "release" / "lockstep")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs: expected at least 1")
    files = arguments.files or [SAMPLES / f"{n}.jsonl" for n in ("full", "full_sw", "mamba_align")]
    print("| workload | vLLM | its request-steps/s | Lockstep's | ratio |\n|---|---|---|---|---|")
    for interpreter in arguments.vllm:
        for path in files:
            print(compare(interpreter, path, arguments.lockstep, arguments.runs), flush=True)


if __name__ == "__main__":
    sys.exit(main())
