"""Temporary folders for an engine's input files. A folder is removed when its context ends; folders
of killed processes are removed at the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "lockstep_scratch_"
# Its creator locked it long before.
_SECONDS_TO_LOCK = 60


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Its owner holds a lock on it, which the process releases however it ends."""
    path = tempfile.mkdtemp(prefix=_PREFIX)
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _SECONDS_TO_LOCK:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)
