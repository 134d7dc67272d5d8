"""What the tests of the package share: where things are, how they run, how one is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build" / "release"))
LOCKSTEP = os.environ.get("LOCKSTEP", str(BUILD / "lockstep"))
SAMPLES = ROOT / "traces" / "samples"
REGRESSIONS = ROOT / "tests" / "regressions"
SKIPPED = 77


def skip(reason: str) -> None:
    """Ends the test: there is something here that it needs and that is missing."""
    print(f"SKIPPED: {reason}")
    sys.exit(SKIPPED)


def run(*words: object, expect: int | None = 0, **options: object) -> subprocess.CompletedProcess:
    """Runs a command; its output, both kinds in one. Fails when it ends otherwise than expected."""
    done = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **options,
    )
    if expect is not None and done.returncode != expect:
        shown = " ".join(str(word) for word in words)
        raise AssertionError(f"{shown}: status {done.returncode}\n{done.stdout[-6000:]}")
    return done


def build_flags() -> str:
    """CMAKE_CXX_FLAGS of the build, sanitizers for one: what is linked with it wants the same."""
    for line in (BUILD / "CMakeCache.txt").read_text().splitlines():
        if line.startswith("CMAKE_CXX_FLAGS:"):
            return line.partition("=")[2]
    return ""


def python_with(module: str) -> str | None:
    """An interpreter that can import it."""
    for name in (sys.executable, "/usr/bin/python3", shutil.which("python3") or ""):
        if not name or not Path(name).exists():
            continue
        if not subprocess.run([name, "-c", f"import {module}"], capture_output=True).returncode:
            return name
    return None


class InFolder(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
