"""lockstep watch ENGINE==RELEASE: one page about a new release of an engine.

Sets the release up and the one it is compared with, records the scenarios of python/tests, and puts
together what Lockstep's commands say of it: which policies it follows and which are new (`fit`),
which findings are gone or have come (`findings`), what the audit finds in the recordings (`audit`),
which options and fields Lockstep does not know, and whether generated cases agree (`fuzz`).

A profile of the release, and of every later one, is left out: the page is the same before it is
added and after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parent
sys.path.insert(0, str(PYTHON))

from lockstep_engines import set_up  # noqa: E402

LOCKSTEP = os.environ.get("LOCKSTEP", "lockstep")
_RECORDERS = (("scenarios", "record_scenarios.py", ()),
              ("served", "record_scenarios.py", ("--served",)),
              ("connectors", "record_connectors.py", ()),
              ("hisparse", "record_hisparse.py", ()))  # fmt: skip
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
    last: str = ""  # the release it is compared with; empty: there is none

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

    def script(self, name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """A script of python/tests in the release's environment."""
        command = [str(self.python), str(PYTHON / "tests" / name), *map(str, words)]
        print("+", *command, flush=True)
        environ = self.environ() | {
            "LOCKSTEP_RECORD_AS_NEAREST": "1",
            "PYTHONPATH": f"{PYTHON}:{self.sources}",
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


def record(watched: Watched) -> Section:
    refused, counts, total = [], [], 0
    for name, script, options in _RECORDERS:
        out = watched.folder / "recordings" / name
        shutil.rmtree(out, ignore_errors=True)
        words = ("--seeds", f"0:{watched.seeds}", "--keep-going", *options)
        done = watched.script(script, out, *words)
        refused += [f"- {line}" for line in done.stdout.splitlines() if "not recorded" in line]
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
    changed = found["engine"].split(",")[1:]
    words = f"as {nearest}, with {', '.join(changed)}" if changed else f"as {nearest}"
    todo = f"add the release to reference/profiles/releases.cpp with {', '.join(changed) or 'that'}"
    return Section("Decisions", words, _block(shown), todo)


def findings(watched: Watched) -> Section:
    engines = [f"vllm:{watched.sources_of(r)}" for r in (watched.last, watched.release) if r]
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
    _, _, found = watched.lockstep("audit", watched.folder / "recordings")
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
    engine = f"vllm:{watched.sources}"
    rows, shown, not_driven, failed = [], [], [], 0
    runs = [("scheduler", ["--decisions", engine])]
    runs += [(f"worker {runner}", ["--backend", engine, "--decisions", engine, "--runner", runner])
             for runner in ("v1", "v2")]  # fmt: skip
    for name, options in runs:
        _, text, found = watched.lockstep(
            "fuzz", *options, "--runs", str(watched.runs), "--no-shrink",
            "--save", watched.folder / "found" / name.replace(" ", "_"))  # fmt: skip
        cases, agreed, refused = found["cases"], found["agreed"], found["refused"]
        bad = len(found["failures"])
        if bad and all(one["check"] == "harness" for one in found["failures"]):
            why = " ".join(found["failures"][0]["what"].split())[:160]
            rows.append(f"| {name} | {cases} | not driven: {why} | {refused} | | |")
            not_driven.append(name)
            continue
        known = cases - agreed - refused - bad
        failed += bad
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
    lines = [f"# {watched.engine} {watched.release}, compared with {watched.last or 'nothing'}", "",
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
    parser.add_argument("release", metavar="vllm==RELEASE")
    parser.add_argument("--out", type=Path, help="folder of the page and recordings")
    parser.add_argument("--seeds", type=int, default=20, help="scenarios of each family (20)")
    parser.add_argument("--runs", type=int, default=300, help="generated cases of each kind (300)")
    parser.add_argument("--json", type=Path, help="the result as JSON")
    arguments = parser.parse_args()
    engine, equals, release = arguments.release.partition("==")
    if engine != "vllm" or not equals or not re.fullmatch(r"\d+(\.\w+)+", release):
        parser.error(f"found {arguments.release}; expected vllm==RELEASE, as in vllm==0.33.0")
    folder = (arguments.out or Path(f"{engine}-{release}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    watched = Watched(engine, release, folder, arguments.seeds, arguments.runs)
    earlier, later = _profiles(watched)
    if not earlier:
        parser.error(f"no release before {release} has a profile")
    watched.last = earlier[-1].partition("-")[2]
    for one in (release, watched.last):
        set_up.set_up(engine, one, set_up.default_folder())
    sections = [record(watched), decisions(watched, later), findings(watched), audit(watched),
                unknown(watched), gauge(watched)]  # fmt: skip
    (folder / "page.md").write_text(page(watched, sections))
    if arguments.json:
        arguments.json.write_text(json.dumps(
            {"engine": engine, "release": release, "compared_with": watched.last,
             "sections": [vars(one) for one in sections]}, indent=2) + "\n")  # fmt: skip
    for one in sections:
        print(f"{one.title}: {one.words}")
    print(f"The page: {folder / 'page.md'}")
    sys.exit(1 if any(one.todo for one in sections) else 0)


if __name__ == "__main__":
    main()
