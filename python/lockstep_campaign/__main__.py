"""lockstep campaign: a fuzz run spread over processes or a Ray cluster.

    lockstep campaign --budget 10m fuzz --backend none      new seeds, on all cores
    lockstep campaign --ray auto fuzz --runs 900000         on a Ray cluster
    lockstep campaign audit PATH... [OPTION...]             conform and mutants too: the merged JSON

The options after `fuzz` are those of `lockstep fuzz`. The report is that of one process, byte for
byte. DIR holds report.json, report.txt, page.html, history.json and found/; the next campaign first
replays what failed in it. Exit status: that of fuzz; 1 also if a case of an earlier campaign still
fails, or if the canary, a planted defect, is not found.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from lockstep_campaign.campaign import Campaign, Found
from lockstep_campaign.executors import Executor, Local, OnRay, Run, check_address
from lockstep_campaign.figures import figures_of, page, prometheus
from lockstep_campaign.fuzz_run import REPORT, FuzzRun, classes_reached, count, report_of
from lockstep_campaign.history import History, Night, lock
from lockstep_campaign.list_run import COMMANDS, ListRun
from lockstep_campaign.loop import Ended, Loop, Refused, check_output, say
from lockstep_campaign.tasks import CannotRun, Done, Program, digest_of, run_task

# A word after one of these is its value, although it may be a command's name.
_VALUED = ("--budget", "--workers", "--shard-cases", "--canary", "--out", "--metrics")


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: expected a number and s, m or h, as in 10m")
    if not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: expected more than 0")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lockstep campaign", description=__doc__, allow_abbrev=False,
        usage="lockstep campaign [OPTION...] [fuzz [OPTION...]]\n"
        "       lockstep campaign [OPTION...] audit|conform|mutants [PATH or NAME...] [OPTION...]",
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--budget", type=_duration, metavar="TIME",
                        help="run new seeds for 90s, 10m, 2h; the date is the first seed")
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS",
                        help="run on Ray: auto, HOST:PORT, ray://...; alone: start Ray here")
    parser.add_argument("--workers", type=count, default=os.cpu_count(), metavar="N",
                        help="processes without --ray (number of cores)")
    parser.add_argument("--shard-cases", type=count, metavar="N",
                        help="cases per shard (as many as take 10 seconds)")
    parser.add_argument("--canary", type=_shell_words, metavar="WORDS",
                        help="options that plant a defect, which must be found; '': none")
    parser.add_argument("--out", type=Path, default=Path(".lockstep/campaign"), metavar="DIR",
                        help="folder of the report and what was found (.lockstep/campaign)")
    parser.add_argument("--metrics", metavar="FILE|-",
                        help="the figures of the page as text for Prometheus")
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
        check_address(arguments.ray)
        return OnRay(run, arguments.ray or None)
    except ImportError:
        raise Refused(f"--ray: {sys.executable} has no Ray; run `{sys.executable} -m pip install "
                      "ray`, or leave out --ray") from None  # fmt: skip
    except (OSError, ValueError) as error:
        raise Refused(f"--ray {arguments.ray}: {error}") from None


def _stop_at_signals(loop: Loop, stopped: list[int]) -> None:
    """The first signal ends the campaign after the tasks that run, the second at once."""

    def stop(number: int, _: object) -> None:
        if stopped:
            os._exit(128 + number)
        stopped.append(number)
        loop.interrupted = True
        say("stopping after the tasks that run; the next signal stops at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _commit_of(program: str) -> str:
    """The commit of the clone that built the command; else the start of its hash."""
    command = ["git", "-C", str(Path(program).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"build {digest_of(program)[:12]}"


def _write_report(done: Done, out: Path, outputs: Mapping[str, str | None]) -> None:
    (out / "report.txt").write_text(done.out)
    (out / REPORT).write_bytes(done.files[REPORT])
    json_path = outputs["--json"]
    if json_path == "-":
        sys.stdout.write((out / REPORT).read_text())
    elif json_path:
        shutil.copyfile(out / REPORT, json_path)
    if "-" in (json_path, outputs["--metrics"]):
        sys.stderr.write(done.out)
        return
    sys.stdout.write(done.out)
    sys.stdout.flush()
    sys.stderr.write(done.err)


def _write_metrics(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    elif Path(path).exists() and not Path(path).is_file():  # a device, a FIFO
        Path(path).write_text(text)
    else:
        partial = Path(path).with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)


def _verdict(status: int, ended: Ended, found: Found, canary: str) -> int:
    """The exit status, with what the report does not say."""
    still = [name for name, fails in found.still_fail.items() if fails]
    if still:
        say(f"Verdict: FAILED. {len(still)} of {len(found.still_fail)} cases of earlier campaigns "
            f"still fail: {', '.join(still[:5])}")  # fmt: skip
    if found.canary == "missed":
        say(f"Verdict: FAILED. the canary is not found: all cases with {canary} agree")
    if ended.given_up:
        say(f"Verdict: FAILED. {ended.given_up}")
        return 2
    return status or int(bool(still) or found.canary == "missed")


def _interrupted(number: int, so: str) -> int:
    say(f"Interrupted by {signal.Signals(number).name}: {so}.")
    return 128 + number


def _run_list(arguments: argparse.Namespace, words: list[str]) -> int:
    """audit, conform, mutants: the JSON of one process, and no text."""
    run_here = functools.partial(run_task, _program())
    executor = _executor(arguments, run_here)
    loop = ListRun(executor, words, run_here)
    stopped: list[int] = []
    _stop_at_signals(loop, stopped)
    loop.work()
    executor.close()
    if loop.ended.given_up:
        raise Refused(loop.ended.given_up)
    report = loop.report(interrupted=bool(stopped))
    if loop.json_path in (None, "-"):
        sys.stdout.write(report)
    else:
        Path(str(loop.json_path)).write_text(report)
    return _interrupted(stopped[0], "the rest was not checked") if stopped else loop.status()


def run(words: list[str]) -> int:
    at = next((i for i, word in enumerate(words) if word in ("fuzz", *COMMANDS)
               and words[max(i - 1, 0)] not in _VALUED), len(words))  # fmt: skip
    arguments = _parser().parse_args(words[:at])
    if {"-h", "--help"} & set(words[at:]):
        _parser().print_help()
        print(f"\nOptions of {words[at]}: lockstep {words[at]} --help")
        return 0
    if words[at:] and words[at] != "fuzz":
        return _run_list(arguments, words[at:])
    fuzz_run = FuzzRun(words[at + 1 :], arguments.budget, arguments.shard_cases)
    program = _program()
    run_here = functools.partial(run_task, program)
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise Refused(f"--out: {out}: {error.strerror}") from None
    outputs = fuzz_run.outputs | {"--metrics": arguments.metrics}
    options: dict[str | None, str] = {}
    for option, path in outputs.items():
        check_output(option, path)
        if path and options.setdefault(path, option) != option:
            raise Refused(f"{option}: {path} is also given as {options[path]}; use another file")
    lock(out)
    history, commit = History.read(out), _commit_of(program.path)
    canary = fuzz_run.canary() if arguments.canary is None else arguments.canary
    stopped: list[int] = []
    began = time.time()
    executor = _executor(arguments, run_here)
    shards = out / "shards"  # outlives a report that cannot be made, as on a full disk
    shutil.rmtree(shards, ignore_errors=True)
    shards.mkdir()
    campaign = Campaign(fuzz_run, executor, shards)
    ended, found = campaign.ended, campaign.found
    _stop_at_signals(campaign, stopped)
    for case in history.failing(out):
        campaign.replay(case)
    if canary:
        campaign.plant_canary(canary)
    campaign.work()
    if not (parts := campaign.parts()):
        if stopped and not ended.given_up:
            return _interrupted(stopped[0], "no shard ended, so there is no report")
        raise Refused(ended.given_up or "--budget ended before the first shard; give more time")
    try:
        done = fuzz_run.merge(parts, run_here, stopped)
        report = report_of(done)
        _write_report(done, out, outputs)
    except (Refused, CannotRun, OSError) as error:
        again = f"lockstep fuzz --merge {shlex.quote(str(shards))}/*.json"
        raise Refused(f"{error}\nWhat the shards found is kept: {again}") from None
    shutil.rmtree(shards)
    history.take_replays(found.still_fail, commit)
    history.take_report(report, commit)
    if not stopped:
        campaign.shrink(history.unsaved(), out / "found")
    executor.close()
    history.take_saved(out)
    night = Night(began, round(ended.seconds, 1), commit, report["cases"], report["steps"],
                  classes_reached(report["tally"]), len(report["failures"]), found.canary,
                  "interrupted" in report)
    history.nights.append(night)
    history.write(out)
    command = shlex.join(["lockstep", "campaign", *words])
    figures = figures_of(report, ended, found, history, night, shlex.join(canary), command)
    (out / "page.html").write_text(page(figures))
    if arguments.metrics:
        _write_metrics(arguments.metrics, prometheus(figures))
    say(f"Page: {out / 'page.html'}")
    return 128 + stopped[0] if stopped else _verdict(done.status, ended, found, shlex.join(canary))


def main() -> NoReturn:
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(_interrupted(signal.SIGINT, "nothing was checked"))
    except (Refused, CannotRun, OSError) as refused:
        say(f"lockstep: campaign: {refused}")
        sys.exit(2)


if __name__ == "__main__":
    main()
