"""The `lockstep` command: where it is, and what it says."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_campaign.loop import last_line

AGREED, DISAGREED, REFUSED, STUCK = 0, 1, 2, 3

# Where pytest was started: paths on its command line, and in what it prints, begin there. A test
# may change the current folder.
folder = Path()


class LockstepError(Exception):
    """An input or an option that the command refuses, or a command that is not there."""


@dataclass(frozen=True)
class Said:
    """How a command ended, what it printed, and what it wrote as JSON (None: nothing)."""

    arguments: list[str]
    status: int
    out: str
    err: str
    json: Any = None

    @property
    def reason(self) -> str:
        """Of a refusal: its sentence."""
        if not self.err.strip():
            return f"exit status {self.status}"
        return last_line(self.err).removeprefix("lockstep: ")


def find_command() -> str:
    named = os.environ.get("LOCKSTEP", "")
    if named:
        return named
    beside = Path(sys.executable).with_name("lockstep")
    found = str(beside) if beside.exists() else shutil.which("lockstep")
    if found is None:
        raise LockstepError(
            "found no `lockstep` next to this Python or on the PATH; install the wheel "
            "lockstep-kv or set LOCKSTEP to the command"
        )
    return found


def run(*arguments: str | Path, may_refuse: bool = False) -> Said:
    """Runs `lockstep ARGUMENTS --json FILE`. Raises LockstepError where it refuses; `may_refuse`:
    only where it wrote no report of its cases either."""
    words = [str(word) for word in arguments]
    with tempfile.TemporaryDirectory(prefix="lockstep-") as holder:
        path = Path(holder) / "said.json"
        done = subprocess.run(
            [find_command(), *words, "--json", str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
        )
        written = json.loads(path.read_text()) if path.exists() else None
    said = Said(words, done.returncode, done.stdout, done.stderr, written)
    if said.status == REFUSED and not (may_refuse and written):
        raise LockstepError(said.reason)
    return said


@dataclass(frozen=True)
class Narrative:
    """A file that says what happens in a case, and how the case fails."""

    path: Path
    check: str  # empty: it does not fail
    what: str


def narrative(case: Path, save: Path, *judging: str) -> Narrative | None:
    """Writes it into a folder; None: the case cannot be explained."""
    text = save / (case.name.removesuffix(".jsonl").removesuffix(".case") + ".explain.txt")
    try:
        said = run("explain", case, *judging)
    except LockstepError:
        return None
    (folder / save).mkdir(parents=True, exist_ok=True)
    (folder / text).write_text(f"$ {line_to_repeat('explain', case, *judging)}\n{said.out}")
    explained = said.json or {}
    return Narrative(text, explained.get("check", ""), explained.get("what", ""))


def line_to_repeat(*arguments: str | Path) -> str:
    """For a shell."""
    return " ".join(shlex.quote(str(word)) for word in ("lockstep", *arguments))
