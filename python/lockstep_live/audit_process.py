"""`lockstep audit -` next to an engine: lines of a recording go in, findings come out.

1. The process may take `memory_mb` of address space and no more.
2. A separate thread reports findings, each line once.
3. The lines that went in are kept in a file without a name, up to `spool_mb`: what is needed to
   write a recording of what was found, also of what the audit tells after the last line.
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
        self._spool = tempfile.TemporaryFile()
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
            self._spool.write(line + b"\n")
        except OSError:  # of the disk, not of the audit
            self.forget()

    def forget(self) -> None:
        """No recording is written from here on."""
        self.is_spooling = False
        with contextlib.suppress(OSError):
            self._spool.close()

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


def free_name(folder: str, stem: str) -> str:
    """A path that is not there yet."""
    os.makedirs(folder, exist_ok=True)
    number = 0
    while os.path.exists(path := os.path.join(folder, f"{stem}-{number}.jsonl")):
        number += 1
    return path
