"""`lockstep audit -` next to an engine: lines of a recording go in, findings come out.

1. The process may take `memory_mb` of address space and no more.
2. A separate thread reports findings, each line once.
3. The lines that went in are kept in FOLDER/live-pidPID.jsonl.partial, up to `spool_mb`. Recordings
   of findings start with them. The file is removed at the end; an engine that is killed leaves it,
   and Lockstep reads it up to the last whole step.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import IO

from lockstep_live.settings import Settings


class AuditProcess:
    """Fed by one thread."""

    def __init__(self, settings: Settings, tell: Callable[[str], None]) -> None:
        limit = settings.memory_mb << 20

        def bounded() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

        self._process = subprocess.Popen(
            [settings.command, "audit", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=bounded,
            start_new_session=True,  # an interrupt is the engine's, not the audit's
        )
        self._owns_folder = not os.path.isdir(settings.folder)
        self._spool_path, self._spool = _open_spool(settings.folder)
        self._spool_max = settings.spool_mb << 20
        self.is_spooling = True
        self.last_words = ""
        self._tell = tell
        self._reader = threading.Thread(target=self._read, name="lockstep-findings", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        words = []
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            if line.startswith("audit."):
                self._tell(line)
            elif line:
                words.append(line)
        self.last_words = "; ".join(words[-3:])

    def write_line(self, line: bytes, is_needed: bool = True) -> None:
        """Raises OSError when the process has ended, unless the line is not needed. Waits while the
        audit is behind."""
        assert self._process.stdin is not None
        self._keep(line)
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError:
            if is_needed:
                raise

    def _keep(self, line: bytes) -> None:
        if not self.is_spooling:
            return
        if self._spool.tell() + len(line) > self._spool_max:
            self.forget()
            return
        try:
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[self._spool.write(rest) :]
        except OSError:  # of the disk, not of the audit
            self.forget()

    def forget(self) -> None:
        """No recording is written from here on."""
        self.is_spooling = False
        with contextlib.suppress(OSError):
            self._spool.close()
        if self._spool_path:
            with contextlib.suppress(OSError):
                os.unlink(self._spool_path)
                if self._owns_folder:
                    os.rmdir(os.path.dirname(self._spool_path))  # unless it holds recordings

    def copy_spool(self, path: str) -> None:
        """Writes all lines so far to `path`, which must not be there. Raises OSError."""
        end = self._spool.tell()
        self._spool.seek(0)
        with open(path, "xb") as file:
            shutil.copyfileobj(self._spool, file, 1 << 20)
        self._spool.seek(end)

    def close(self, wait_s: float) -> int | None:
        """Ends the input and waits for all findings. The exit code; None: it did not end in time
        and was stopped."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            status: int | None = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = None
        self._reader.join(wait_s)
        return status


def _open_spool(folder: str) -> tuple[str, IO[bytes]]:
    """("", a file without a name) in a folder that cannot be written."""
    with contextlib.suppress(OSError):
        path = free_name(folder, f"live-pid{os.getpid()}", ".jsonl.partial")
        return path, open(path, "x+b", buffering=0)
    return "", tempfile.TemporaryFile(buffering=0)


def free_name(folder: str, stem: str, end: str = ".jsonl") -> str:
    """A path that does not exist yet."""
    os.makedirs(folder, exist_ok=True)
    path, number = os.path.join(folder, stem + end), 1
    while os.path.exists(path):
        path = os.path.join(folder, f"{stem}-{number}{end}")
        number += 1
    return path


def write_narrative(command: str, recording: str) -> str:
    """Starts a process of low priority that writes the smallest case of a recording, if there is
    one, and what happens in it. The path of that text."""
    stem = recording.removesuffix(".jsonl")
    smallest, text = f"{stem}.min.case.jsonl", f"{stem}.explain.txt"
    script = (
        'nice -n 19 "$0" shrink "$1" --output "$2" --shrink-seconds 20 || true\n'
        'if [ -e "$2" ]; then shown=$2; else shown=$1; fi\n'
        'echo; echo "\\$ lockstep explain $shown"; nice -n 19 "$0" explain "$shown" || true\n'
    )
    with open(text, "wb") as out:
        subprocess.Popen(
            ["/bin/sh", "-c", script, command, recording, smallest],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it may end after the engine
        )
    return text
