"""lockstep watch ENGINE==RELEASE: one page about a new release of an engine.

Sets the release up and the one it is compared with, records the scenarios of python/tests, and puts
together what Lockstep's commands say of it: which policies it follows and which are new (`fit`),
which findings are gone or have come (`findings`), what the audit finds in the recordings (`audit`),
which options and fields Lockstep does not know, and whether generated cases agree (`fuzz`).

A profile of the release, and of every later one, is left out: the page is the same before it is
added and after. An engine without profiles (SGLang) is compared with its previous release
(watch_releases.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parent
sys.path.insert(0, str(PYTHON))

import watch_releases  # noqa: E402
from lockstep_campaign.fuzz_run import count  # noqa: E402
from lockstep_campaign.loop import Refused  # noqa: E402
from lockstep_campaign.outputs import check_output, write_output  # noqa: E402
from lockstep_engines import set_up  # noqa: E402

LOCKSTEP = os.environ.get("LOCKSTEP", "lockstep")
_RECORDERS = (("scenarios", "record_scenarios.py", ()),
              ("served", "record_scenarios.py", ("--served",)),
              ("connectors", "record_connectors.py", ()),
              ("hisparse", "record_hisparse.py", ()))  # fmt: skip
# Of each kind of generated cases. A case of the worker costs a second of CPU time, minutes if its
# requests preempt each other without end.
_FUZZ_SECONDS = 1200
_TABLES = ("vllm_reads_test.py", "vllm_calls_test.py")


@dataclass
class Section:
    title: str
    words: str  # the result in a few words, for the table
    text: str = ""
    todo: str = ""  # empty: nothing


@dataclass
class Watched:
    engine: str
    release: str
    folder: Path
    seeds: int
    runs: int
    sources: Path = field(init=False)
    python: Path = field(init=False)
    last: str = ""  # the release it is compared with

    def __post_init__(self) -> None:
        engines = set_up.default_folder()
        self.sources = engines / f"{self.engine}-{self.release}"
        self.python = engines / "venv" / "bin" / "python"

    def sources_of(self, release: str) -> Path:
        return self.sources.with_name(f"{self.engine}-{release}")

    def lockstep(self, *words: str | Path) -> tuple[int, str, Any]:
        """Status, standard output, and the JSON result."""
        path = self.folder / f"{words[0]}.json"
        path.unlink(missing_ok=True)
        command = [LOCKSTEP, *map(str, words), "--json", str(path)]
        print("+", *command, flush=True)
        done = subprocess.run(command, env=self.environ(), capture_output=True, text=True)
        if not path.exists():
            said = done.stderr.strip()
            print(f"lockstep watch: `{' '.join(command)}` gave no result: {said}", file=sys.stderr)
            sys.exit(2)
        return done.returncode, done.stdout, json.loads(path.read_text())

    def environ(self) -> dict[str, str]:
        return os.environ | {
            "LOCKSTEP": LOCKSTEP,
            "LOCKSTEP_PYTHON": str(self.python),
            "LOCKSTEP_WARM_ENGINES": str(self.folder / "warm"),
            "VLLM_CONFIGURE_LOGGING": "0",
        }

    def script(
        self, name: str, *words: str | Path, release: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """A script of python/tests in the environment of a release, by default the watched one."""
        command = [str(self.python), str(PYTHON / "tests" / name), *map(str, words)]
        print("+", *command, flush=True)
        environ = self.environ() | {
            "LOCKSTEP_RECORD_AS_NEAREST": "1",
            "PYTHONPATH": f"{PYTHON}:{self.sources_of(release or self.release)}",
        }
        return subprocess.run(command, env=environ, capture_output=True, text=True)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _profiles(watched: Watched) -> tuple[list[str], list[str]]:
    """Profiles of earlier releases, oldest first, and of this and later ones."""
    names = [one["name"] for one in watched.lockstep("engines")[2]["releases"]]
    own = [name for name in names if name.startswith(f"{watched.engine}-")]
    limit = _number(watched.release)
    return [n for n in own if _number(n) < limit], [n for n in own if _number(n) >= limit]


def _previous(engine: str, release: str) -> str:
    """The newest release of the package index before this one; empty: it names none."""
    command = [sys.executable, "-m", "pip", "index", "versions", engine]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    listed = re.search(r"^Available versions: (.*)$", said, re.M)
    names = listed[1].split(", ") if listed else []
    return max((n for n in names if _number(n) < _number(release)), key=_number, default="")


def record(watched: Watched) -> Section:
    """With SGLang, of both releases."""
    refused, counts, total = [], [], 0
    runs = [(*run, watched.release) for run in _RECORDERS]
    if watched.engine == "sglang":
        runs = [(r, "sglang_workloads.py", (), r) for r in (watched.last, watched.release)]
    for name, script, options, release in runs:
        out = watched.folder / "recordings" / name
        shutil.rmtree(out, ignore_errors=True)
        words = ("--seeds", f"0:{watched.seeds}", "--keep-going", *options)
        done = watched.script(script, out, *words, release=release)
        lines = done.stdout.splitlines()
        refused += [f"- {name}: {line}" for line in lines if "not recorded" in line]
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            refused.append(f"- {name}: not recorded: {last}")
        count = len(list(out.glob("**/*.jsonl")))
        total += count
        counts.append(f"{count} of {name}")
    if not total:
        print("lockstep watch: nothing could be recorded:", *refused, sep="\n", file=sys.stderr)
        sys.exit(2)
    todo = "each family that is not recorded: does the release refuse it, or the recorder?"
    return Section("Recordings", ", ".join(counts), "\n".join(refused), todo if refused else "")


def _with_alternatives(word: str, found: Any) -> str:
    """A policy, NAME=VALUE, with the values and policies that agree with all recordings too."""
    name = word.partition("=")[0]
    policy = next((one for one in found["policies"] if one["name"] == name), {})
    others = [f"{name}={value}" for value in policy.get("or", [])]
    others += [f"{one['name']}={one['value']}" for one in policy.get("instead", [])]
    return f"{word} (or {' or '.join(others)})" if others else word


def decisions(watched: Watched, later: list[str]) -> Section:
    status, text, found = watched.lockstep(
        "fit",
        watched.folder / "recordings" / "scenarios",
        *(["--leave-out", *later] if later else []),
    )
    shown = text.split("\nNot determined")[0].strip()
    nearest = found.get("nearest", "")
    if status:
        todo = "a rule is new: find it with the first step that parts, and add a policy"
        return Section("Decisions", "no known policies explain them", _block(shown), todo)
    changed = [_with_alternatives(word, found) for word in found["engine"].split(",")[1:]]
    words = f"as {nearest}, with {', '.join(changed)}" if changed else f"as {nearest}"
    todo = f"add the release to reference/profiles/releases.cpp with {', '.join(changed) or 'that'}"
    return Section("Decisions", words, _block(shown), todo)


def compared_decisions(watched: Watched) -> Section:
    folders = [watched.folder / "recordings" / r for r in (watched.last, watched.release)]
    words, lines = watch_releases.decisions(*folders)
    todo = "read the source of the first difference of each family" if lines else ""
    return Section("Decisions", words, "\n".join(lines), todo)


def compared_tests(watched: Watched) -> Section:
    """What sglang_test.py, with the findings of docs/engines.md, says of both releases."""
    failed = [
        watch_releases.failed_tests(watched.script("sglang_test.py", release=release).stderr)
        for release in (watched.last, watched.release)
    ]
    lines = [f"- {name}: fails here" for name in sorted(failed[1] - failed[0])]
    lines += [f"- {name}: failed, passes here" for name in sorted(failed[0] - failed[1])]
    lines += [f"- {name}: fails in both" for name in sorted(failed[0] & failed[1])]
    words = f"{len(failed[1])} tests of the adapter and its findings fail, {len(failed[0])} before"
    todo = "a test that fails: a finding that is gone, or an adapter to correct"
    return Section("Tests and findings", words, "\n".join(lines), todo if failed[1] else "")


def compared_options(watched: Watched) -> Section:
    folders = [watched.sources_of(release) for release in (watched.last, watched.release)]
    words, lines, is_new = watch_releases.options(*folders)
    todo = "read what each new one does, and set it in lockstep_engines/sglang" if is_new else ""
    return Section("Options read", words, "\n".join(lines), todo)


def findings(watched: Watched) -> Section:
    engines = [f"vllm:{watched.sources_of(r)}" for r in (watched.last, watched.release)]
    _, _, found = watched.lockstep("findings", *(w for e in engines for w in ("--engine", e)))
    gone, come, shown = [], [], 0
    for one in found["findings"]:
        verdicts = [engine["verdict"] for engine in one["engines"]]
        shown += verdicts[-1] == "shows"
        line = f"- {one['number']}: {one['title']} ({' to '.join(verdicts)})"
        if verdicts[0] != verdicts[-1]:
            (come if verdicts[-1] == "shows" else gone).append(line)
    text = "\n".join([*(["Gone or changed:", *gone] if gone else []),
                      *(["New here:", *come] if come else [])])  # fmt: skip
    todo = "run `lockstep findings --merge`, and correct docs/findings/" if gone or come else ""
    return Section("Findings", f"{shown} show, {len(gone)} gone, {len(come)} new", text, todo)


def audit(watched: Watched) -> Section:
    recordings = watched.folder / "recordings"
    if watched.engine == "sglang":
        recordings /= watched.release
    _, _, found = watched.lockstep("audit", recordings)
    lines = [f"- {one.get('line') or one.get('what')}" for one in found["findings"][:20]]
    words = f"{found['clean']} of {found['files']} recordings clean"
    todo = "compare with docs/findings.md: what is not there is new" if lines else ""
    return Section("Audit", words, "\n".join(lines), todo)


def unknown(watched: Watched) -> Section:
    """Options, methods and fields that no table of the recorder has."""
    lines = []
    for script in _TABLES:
        done = watched.script(script)
        if done.returncode == 0:
            continue
        failed = re.findall(r"^(?:FAIL|ERROR): (.*)$", done.stderr, re.M)
        reasons = re.findall(r"^(AssertionError: .*|\w+Error: .*)$", done.stderr, re.M)
        lines += [
            f"- {name}: {reason[:400]}" for name, reason in zip(failed, reasons, strict=False)
        ]
    words = f"{len(lines)} tables lack something" if lines else "none"
    todo = "read what each one does, and add it to python/lockstep_recorder" if lines else ""
    return Section("Unknown options and fields", words, "\n".join(lines), todo)


def gauge(watched: Watched) -> Section:
    """The unmodified release under generated cases: what fails is a finding or a false alarm."""
    engine = f"{watched.engine}:{watched.sources}"
    rows, shown, not_driven, failed = [], [], [], 0
    runs = [("scheduler", ["--decisions", engine])]
    if watched.engine == "vllm":
        worker = ["--backend", engine, "--decisions", engine, "--runner"]
        runs += [(f"worker {runner}", [*worker, runner]) for runner in ("v1", "v2")]
    else:  # no profile knows its findings: what is new is what the previous release does not show
        last = f"{watched.engine}:{watched.sources_of(watched.last)}"
        runs.insert(0, (f"scheduler of {watched.last}", ["--decisions", last]))
    for name, options in runs:
        _, text, found = watched.lockstep(
            "fuzz", *options, "--runs", str(watched.runs), "--seconds", str(_FUZZ_SECONDS),
            "--no-shrink", "--save", watched.folder / "found" / name.replace(" ", "_"))  # fmt: skip
        cases, agreed, refused = found["cases"], found["agreed"], found["refused"]
        bad = len(found["failures"])
        if bad and all(one["check"] == "harness" for one in found["failures"]):
            why = " ".join(found["failures"][0]["what"].split())[:160]
            rows.append(f"| {name} | {cases} | not driven: {why} | {refused} | | |")
            not_driven.append(name)
            continue
        known = cases - agreed - refused - bad
        failed += bad if name != f"scheduler of {watched.last}" else 0
        rows.append(f"| {name} | {cases} | {agreed} | {refused} | {known} | {bad} |")
        if bad:
            shown.append(_block("\n".join(text.splitlines()[:12])))
    head = ["| what | cases | agreed | refused | known findings | failed |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    todo = "judge each failure: a finding of the release, or a false alarm" if failed else ""
    if not_driven and not failed:
        todo = f"Lockstep does not drive this release's {' and '.join(not_driven)}"
    return Section(
        "Generated cases",
        f"{failed} failed, {len(not_driven)} not driven",
        "\n".join([*head, *rows, "", *shown]),
        todo,
    )


def _block(text: str) -> str:
    return f"```\n{text}\n```"


def page(watched: Watched, sections: list[Section]) -> str:
    lines = [f"# {watched.engine} {watched.release}, compared with {watched.last}", "",
             "| | |", "|---|---|"]  # fmt: skip
    lines += [f"| {one.title} | {one.words} |" for one in sections]
    todo = [f"- {one.title}: {one.todo}" for one in sections if one.todo]
    lines += ["", "## To do", *(todo or ["Nothing."])]
    for one in sections:
        if one.text:
            lines += ["", f"## {one.title}", one.text]
    return "\n".join(lines).replace(f"{watched.folder}/", "") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="lockstep watch", description=__doc__.split("\n\n")[0])
    parser.add_argument("release", metavar="ENGINE==RELEASE", help="of vllm or sglang")
    parser.add_argument("--out", type=Path, help="folder of the page and recordings")
    parser.add_argument("--seeds", type=count, default=20, help="scenarios of each family (20)")
    parser.add_argument("--runs", type=count, default=300,
                        help="generated cases of each kind (300), in at most 20 minutes")
    earlier_one = "the newest earlier one (with a profile, if the engine has any)"
    parser.add_argument("--compared-with", metavar="RELEASE", default="", help=earlier_one)
    parser.add_argument("--json", metavar="FILE", help="the result as JSON")
    arguments = parser.parse_args()
    wanted = re.fullmatch(r"(vllm|sglang)==(\d+(?:\.\w+)+)", arguments.release)
    if not wanted:
        parser.error(f"found {arguments.release}; expected ENGINE==RELEASE, as in vllm==0.33.0 or "
                     "sglang==0.5.23")  # fmt: skip
    engine, release = wanted.groups()
    folder = (arguments.out or Path(f"{engine}-{release}")).absolute()
    try:
        check_output("--json", arguments.json)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"--out: {folder}: {error.strerror}")
    except Refused as refused:
        parser.error(str(refused))
    result = sys.stdout
    if arguments.json == "-":  # the progress of all commands goes to standard error
        result = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    watched = Watched(engine, release, folder, arguments.seeds, arguments.runs)
    has_profiles = engine == "vllm"
    earlier, later = _profiles(watched) if has_profiles else ([], [])
    watched.last = arguments.compared_with
    if has_profiles and not earlier:
        parser.error(f"no release before {release} has a profile")
    if not watched.last:
        watched.last = earlier[-1].partition("-")[2] if earlier else _previous(engine, release)
    if not watched.last:
        parser.error(f"no package index names a release of {engine} before {release}; name one "
                     "with --compared-with")  # fmt: skip
    for one in (release, watched.last):
        set_up.set_up(engine, one, set_up.default_folder())
    sections = [record(watched)]
    if has_profiles:
        sections += [decisions(watched, later), findings(watched), audit(watched), unknown(watched)]
    else:
        sections += [compared_decisions(watched), compared_tests(watched), audit(watched),
                     compared_options(watched)]  # fmt: skip
    sections.append(gauge(watched))
    (folder / "page.md").write_text(page(watched, sections))
    for one in sections:
        print(f"{one.title}: {one.words}")
    print(f"The page: {folder / 'page.md'}")
    text = json.dumps({"engine": engine, "release": release, "compared_with": watched.last,
                       "sections": [vars(one) for one in sections]}, indent=2) + "\n"  # fmt: skip
    try:
        if arguments.json == "-":
            result.write(text)
            result.flush()
        elif arguments.json:
            write_output(arguments.json, text)
    except (OSError, Refused) as error:
        parser.error(f"--json: {error}")
    sys.exit(1 if any(one.todo for one in sections) else 0)


if __name__ == "__main__":
    main()
