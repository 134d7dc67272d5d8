"""From a find to its smallest case, with defects planted in vLLM's own scheduler and worker: `fuzz`
finds each, and every command that follows names the same check, with the engine and without.

Prints two tables (docs/fuzzing.md). $LOCKSTEP_ENGINE is vllm:DIR of 0.33.0, $LOCKSTEP the
`lockstep` command, $LOCKSTEP_PYTHON the engine's interpreter. Skipped, with exit status 77, without
them or with another release. A few minutes for each table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
ENGINE, COMMAND = os.environ.get("LOCKSTEP_ENGINE", ""), os.environ.get("LOCKSTEP", "")
SKIPPED = 77
IN_SCHEDULER = (
    "window-off-by-one",
    "shared-block-freed",
    "hash-of-reused-block",
    "salt-not-hashed",
    "hit-of-whole-prompt",
    "state-freed-early",
    "rejected-counts-as-computed",
    "no-slots-for-drafts",
    "preempted-keeps-computed",
    "preempted-is-lost",
)
IN_WORKER = {  # by runner
    "slot-off-by-one": "v1",
    "append-replaces-last": "v1",
    "resumed-keeps-old-blocks": "v1",
    "state-left-behind": "v1",
    "placeholder-of-another-row": "v1",
    "window-one-short": "v1",
    "second-slot-off-by-one": "v2",
    "gather-stops-early": "v2",
    "second-state-in-attention-blocks": "v2",
    "rejected-drafts-computed": "v2",
    "slots-by-other-blocks": "v1",
    "split-table-not-expanded": "v2",
}
RUNS, SHRINK_SECONDS = "600", "20"


@dataclass
class Found:
    """What `fuzz` saved of a defect's first failure. `sizes`: requests and tokens of the case and
    of the smallest case."""

    case: Path
    check: str
    step: int
    seconds: float
    sizes: tuple[str, str]

    @property
    def smallest(self) -> Path:
        return self.case.with_name(self.case.name.replace(".case.", ".min.case."))

    @property
    def recording(self) -> Path:
        return self.case.with_name(self.case.name.replace(".case.", ".recording."))


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    command = [COMMAND, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def names(done: subprocess.CompletedProcess[str], check: str, status: int) -> str:
    """ "yes", or the exit status and the last line of a command that reports something else."""
    words = "forever|liveness" if check == "liveness" else re.escape(check)
    if done.returncode == status and re.search(words, done.stdout):
        return "yes"
    lines = (done.stdout + done.stderr).split("\n\nNot checked")[0].splitlines() or [""]
    return f"no ({done.returncode}: {lines[-1][:60]})"


def find(folder: Path, *words: str) -> Found:
    start = time.monotonic()
    options = ("--runs", RUNS, "--failures", "1", "--shrink-seconds", SHRINK_SECONDS)
    done = run("fuzz", *words, *options, "--save", folder)
    seconds = time.monotonic() - start
    if done.returncode not in (1, 3):
        raise AssertionError(done.stdout[-1500:] + done.stderr[-1500:])
    saved = re.findall(r"(\S*seed-\d+\S*)\.case\.jsonl +(.*)", done.stdout)
    sizes = {Path(path).name: size.partition(";")[0] for path, size in saved}
    whole = next(name for name in sizes if not name.endswith(".min"))
    case = folder / f"{whole}.case.jsonl"
    expected = json.loads(case.read_text().splitlines()[0])["expected"]
    check = expected.get("check", "liveness")
    return Found(case, check, expected["step"], seconds, (sizes[whole], sizes[f"{whole}.min"]))


def row(name: str, found: Found, *cells: str) -> tuple[str, ...]:
    whole, smallest = (size.rpartition(",")[0] for size in found.sizes)  # without blocks
    return (name, f"`{found.check}`", str(found.step), f"{found.seconds:.0f} s", whole, smallest,
            *cells)  # fmt: skip


def replay_recording(recording: Path) -> subprocess.CompletedProcess[str]:
    """On kernels, where the recording suffices for a plan of the memory."""
    done = run("replay", recording)
    return run("replay", recording, "--backend", "none") if "needs no plan" in done.stderr else done


def of_scheduler(name: str, folder: Path) -> tuple[str, ...]:
    python, sources = os.environ["LOCKSTEP_PYTHON"], ENGINE.partition(":")[2]
    planted = f"{python} -m lockstep_engines vllm {sources} --plant {name}"
    found = find(folder, "--decisions", planted)
    check, status = found.check, 3 if found.check == "liveness" else 1
    recording = found.recording
    without = [
        names(run("audit", recording), check, 1),
        names(replay_recording(recording), check, status),
        names(run("explain", recording), check, status),
        names(run("shrink", recording, "-o", folder / "shrunk.case.jsonl"), check, status),
    ]
    engine = [
        names(run("replay", found.case, "--decisions", planted), check, status),
        names(run("replay", found.smallest, "--decisions", planted), check, status),
        names(run("explain", found.smallest, "--decisions", planted), check, status),
    ]
    mended = run("replay", found.case, "--decisions", ENGINE)
    return row(name, found, all_of(without), all_of(engine), str(mended.returncode))


def of_worker(name: str, folder: Path) -> tuple[str, ...]:
    found = find(folder, "--backend", ENGINE, "--runner", IN_WORKER[name], "--plant", name)
    engine = [
        names(run("replay", found.case), found.check, 1),
        names(run("replay", found.smallest), found.check, 1),
        names(run("explain", found.smallest), found.check, 1),
        names(run("shrink", found.smallest, "-o", folder / "s.case.jsonl"), found.check, 1),
    ]
    first, *rest = found.case.read_text().splitlines()
    case = json.loads(first)
    del case["worked_by"]["plant"]
    unplanted = folder / "unplanted.case.jsonl"
    unplanted.write_text("\n".join([json.dumps(case), *rest]) + "\n")
    mended = run("replay", unplanted)
    audit = run("audit", found.recording)
    rules = re.findall(r"^audit\.(worker_\w+)", audit.stdout, re.MULTILINE)
    told = f"`{rules[0]}`" if rules else f"{audit.returncode}"
    return row(name, found, told, all_of(engine), str(mended.returncode))


def all_of(cells: list[str]) -> str:
    return "yes" if {*cells} == {"yes"} else "; ".join(cells)


class ChainTest(unittest.TestCase):
    def test_defects_of_the_scheduler(self) -> None:
        self.tabulate(IN_SCHEDULER, of_scheduler, "without the engine")

    def test_defects_of_the_worker(self) -> None:
        self.tabulate((*IN_WORKER,), of_worker, "audit without the engine")

    def tabulate(
        self, defects: tuple[str, ...], judge: Callable[[str, Path], tuple[str, ...]], audit: str
    ) -> None:
        chosen = [name for name in defects if name in os.environ.get("PLANTED", name).split()]
        with tempfile.TemporaryDirectory() as holder, ThreadPoolExecutor(2) as threads:
            rows = [*threads.map(lambda name: judge(name, Path(holder, name)), chosen)]
        head = ("defect", "check", "step", "found in", "case", "smallest", audit,
                "with the engine", "unmodified")  # fmt: skip
        print()
        for cells in (head, ("---",) * len(head), *rows):
            print("| " + " | ".join(cells) + " |", flush=True)
        for cells in rows:
            with self.subTest(cells[0]):
                self.assertEqual(cells[-1], "4", "the unmodified engine reproduces it")
                self.assertEqual(cells[-2], "yes")
                if judge is of_scheduler:
                    self.assertEqual(cells[-3], "yes")


if __name__ == "__main__":
    is_newest = Path(ENGINE.partition(":")[2], "vllm/v1/core/kv_cache_planning.py").is_file()
    if not is_newest or not COMMAND or "LOCKSTEP_PYTHON" not in os.environ:
        print("SKIPPED: LOCKSTEP_ENGINE is not vLLM 0.33.0, or there is no command or interpreter")
        sys.exit(SKIPPED)
    unittest.main()
