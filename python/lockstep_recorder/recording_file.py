"""A recording on its way to its name.

1. Lines go to PATH.partial-PID; finish() flushes them to the disk and gives them the name PATH.
2. A device or a FIFO is written directly. A symbolic link is followed.
3. PATH is never overwritten, and never half a recording.
4. A line is in the file when write_line() returns. A process that is killed leaves the partial file
   with every line but at most the last, torn one, and Lockstep reads it up to there.
"""

import json
import os
from typing import Any

from lockstep_recorder.errors import RecorderError

try:
    import msgspec
except ImportError:  # vLLM always brings it; the tests of this package need not have it
    msgspec = None


def _encode_with_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


# encode_json(value) -> bytes: compact JSON, keys in the order of the dict.
encode_json = msgspec.json.Encoder().encode if msgspec else _encode_with_json


class RecordingFile:
    """Lines of one recording, each a JSON object."""

    def __init__(self, path: str) -> None:
        """Raises RecorderError when `path` exists already or its folder cannot be written."""
        self.path = os.path.realpath(path)
        self.partial_path = f"{self.path}.partial-{os.getpid()}"
        if os.path.isfile(self.path):
            raise RecorderError(f"{self.path} exists already; choose another name or remove it")
        if os.path.exists(self.path):  # not a regular file
            self.partial_path = self.path
        try:
            self._file = open(self.partial_path, "wb", buffering=0)
        except OSError as error:
            raise RecorderError(f"cannot write {self.partial_path}: {error.strerror}") from error

    def write_line(self, line: bytes) -> None:
        """Appends `line`, given without its newline."""
        rest = memoryview(line + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        """Makes the file durable under its name. Nothing may be written after it."""
        if self.partial_path == self.path:
            self._file.close()
            return
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self.partial_path, self.path)
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self) -> None:
        """Closes the file and leaves what was written under its partial name."""
        self._file.close()
