"""lockstep campaign: a fuzz run spread over processes or a Ray cluster.

    lockstep campaign --budget 10m fuzz --backend none      new seeds, on all cores
    lockstep campaign --ray auto fuzz --runs 900000         on a Ray cluster

The options after `fuzz` are those of `lockstep fuzz`. The report is that of one process, byte for
byte. Exit status: that of fuzz; 1 also if the canary, a planted defect, is not found.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from lockstep_campaign.campaign import Campaign, say
from lockstep_campaign.executors import Executor, Local, OnRay, Run
from lockstep_campaign.fuzz_run import REPORT, FuzzRun, Refused
from lockstep_campaign.tasks import Program, digest_of, run_task


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: expected a number and s, m or h, as in 10m")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lockstep campaign", description=__doc__, allow_abbrev=False,
        usage="lockstep campaign [OPTION...] [fuzz [OPTION...]]",
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--budget",
        type=_duration,
        metavar="TIME",
        help="run new seeds for 90s, 10m, 2h; the date is the first seed",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on Ray: auto, HOST:PORT, ray://...; alone: start Ray here",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes without --ray (number of cores)",
    )
    parser.add_argument(
        "--shard-cases", type=int, metavar="N", help="cases per shard (as many as take 10 seconds)"
    )
    parser.add_argument(
        "--canary",
        metavar="WORDS",
        help="options that plant a defect, which must be found; '': none",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".lockstep/campaign"),
        metavar="DIR",
        help="folder of the report and what was found (.lockstep/campaign)",
    )
    return parser


def _program() -> Program:
    # Engines read $LOCKSTEP as the switch of their live check.
    path = os.environ.pop("LOCKSTEP", None) or shutil.which("lockstep")
    if path is None:
        raise Refused("there is no command lockstep; set LOCKSTEP to its path")
    names = ("PYTHONPATH", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items()
               if name.startswith("LOCKSTEP_") or name in names}  # fmt: skip
    return Program(path, digest_of(path), os.getcwd(), environ)


def _executor(arguments: argparse.Namespace, run: Run) -> Executor:
    if arguments.ray is None:
        return Local(run, arguments.workers)
    try:
        return OnRay(run, arguments.ray or None)
    except ImportError:
        raise Refused(f"--ray: {sys.executable} has no Ray; run `{sys.executable} -m pip install "
                      "ray`, or leave out --ray") from None  # fmt: skip
    except (ConnectionError, ValueError) as error:
        raise Refused(f"--ray {arguments.ray}: {error}") from None


def _stop_at_signals(campaign: Campaign, stopped: list[int]) -> None:
    """The first signal ends the campaign after the shards that run, the second at once."""

    def stop(number: int, _: object) -> None:
        if stopped:
            os._exit(128 + number)
        stopped.append(number)
        campaign.stops = True
        say("stopping after the shards that run; the next signal stops at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def run(words: list[str]) -> int:
    at = words.index("fuzz") if "fuzz" in words else len(words)
    arguments = _parser().parse_args(words[:at])
    fuzz_run = FuzzRun(words[at + 1 :], arguments.budget, arguments.shard_cases)
    program_run = functools.partial(run_task, _program())
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    stopped: list[int] = []
    executor = _executor(arguments, program_run)
    with tempfile.TemporaryDirectory(prefix="lockstep-campaign-") as folder:
        campaign = Campaign(fuzz_run, executor, Path(folder))
        _stop_at_signals(campaign, stopped)
        canary = fuzz_run.canary() if arguments.canary is None else arguments.canary.split()
        if canary:
            campaign.plant_canary(canary)
        campaign.work()
        done = fuzz_run.merge(campaign.ended.parts, program_run)
        executor.close()
    (out / "report.txt").write_text(done.out)
    (out / REPORT).write_bytes(done.files[REPORT])
    if fuzz_run.json_path and fuzz_run.json_path != "-":
        shutil.copyfile(out / REPORT, fuzz_run.json_path)
    sys.stdout.write((out / REPORT).read_text() if fuzz_run.json_path == "-" else done.out)
    sys.stderr.write(done.out if fuzz_run.json_path == "-" else done.err)
    if campaign.ended.canary == "missed":
        say(f"Verdict: FAILED. the canary is not found: all cases with {' '.join(canary)} agree")
        return done.status or 1
    return 128 + stopped[0] if stopped else done.status


def main() -> NoReturn:
    try:
        sys.exit(run(sys.argv[1:]))
    except Refused as refused:
        say(f"lockstep: campaign: {refused}")
        sys.exit(2)


if __name__ == "__main__":
    main()
