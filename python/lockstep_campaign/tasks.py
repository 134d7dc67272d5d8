"""A task: one run of the `lockstep` command on a worker, with the files that it reads and leaves.

A task is idempotent: any worker runs it, any number of times, with the same result. Ray sends this
module to machines that lack the package: it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "{folder}"  # in words: the folder of the task
_PR_SET_PDEATHSIG = 1


class CannotRun(Exception):
    """The worker lacks what the task needs."""


@dataclass(frozen=True)
class Task:
    name: str
    words: tuple[str, ...]  # after `lockstep`
    files: Mapping[str, bytes] = field(default_factory=dict)  # in the folder before the start
    in_folder: bool = False  # relative paths in words start there


@dataclass(frozen=True)
class Done:
    task: Task
    worker: str
    status: int  # negative: the signal that ended it
    out: str
    err: str
    files: Mapping[str, bytes]  # that it left in the folder
    seconds: float


@dataclass(frozen=True)
class Program:
    path: str
    digest: str
    folder: str  # that relative paths in words start from, where the worker has it
    environ: Mapping[str, str]


def digest_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _path_of(program: Program) -> str:
    """The command on this worker. Raises CannotRun unless it is the same build."""
    path = program.path if os.path.exists(program.path) else shutil.which("lockstep")
    if path is None:
        raise CannotRun(f"{socket.gethostname()} has no lockstep; install the same wheel there")
    if digest_of(path) != program.digest:
        raise CannotRun(f"{socket.gethostname()} has another build of lockstep, {path}; install "
                        "the same wheel there")  # fmt: skip
    return path


def run_task(program: Program, task: Task) -> Done:
    started = time.monotonic()
    path = _path_of(program)
    dies_with_worker = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    with tempfile.TemporaryDirectory(prefix="lockstep-task-") as name:
        folder = Path(name)
        for file, content in task.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        done = subprocess.run(
            [path, *(word.replace(FOLDER, name) for word in task.words)],
            cwd=name if task.in_folder or not os.path.isdir(program.folder) else program.folder,
            env=os.environ | program.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's SIGINT stops the campaign, not a task
            preexec_fn=dies_with_worker,
        )
        left = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.relative_to(folder).as_posix() not in task.files
        }
    worker = f"{socket.gethostname()}:{threading.get_native_id()}"
    seconds = time.monotonic() - started
    return Done(task, worker, done.returncode, done.stdout, done.stderr, left, seconds)
