"""Files that the user names, written as all commands write them (base/output_file.h).

1. A regular file is replaced atomically: the bytes go to TARGET.partial-PID, which is renamed.
   Links are followed; mode and owner are kept.
2. A device or a FIFO is written directly. "-" is standard output, and so is a path to its file.
3. A regular file is rewritten in place if its folder accepts no new file, or its owner cannot be
   kept.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import TextIO

from lockstep_campaign.loop import Refused


def check_output(option: str, path: str | Path | None) -> None:
    """Refuses a file that cannot be written, before the run that it would lose."""
    if path is None or str(path) == "-":
        return
    file = Path(path)
    folder = file.resolve().parent
    if file.is_dir():
        raise Refused(f"{option}: {path}: is a folder; give the name of a file")
    if not folder.is_dir():
        raise Refused(f"{option}: {path}: no folder {folder}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise Refused(f"{option}: {path}: cannot be written")


def _open_already(path: str | Path) -> TextIO | None:
    """Standard output or error, if it writes this file: opening it again would truncate it."""
    if str(path) == "-":
        return sys.stdout
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(number)):
                return stream
    return None


def _partial(target: str, replaced: os.stat_result | None) -> str | None:
    """A new file in the target's folder with its mode and owner; None: that is not permitted."""
    path = f"{target}.partial-{os.getpid()}"
    try:
        Path(path).touch()
        if replaced is not None:
            os.chown(path, replaced.st_uid, replaced.st_gid)
            os.chmod(path, stat.S_IMODE(replaced.st_mode))
    except PermissionError:
        if replaced is None:
            raise
        Path(path).unlink(missing_ok=True)
        return None
    return path


def write_output(path: str | Path, text: str) -> None:
    """Until it succeeds, a regular file keeps its old bytes."""
    if (stream := _open_already(path)) is not None:
        stream.write(text)
        stream.flush()
        return
    replaced = os.stat(path) if os.path.exists(path) else None
    target = os.path.realpath(path)
    is_direct = replaced is not None and not stat.S_ISREG(replaced.st_mode)
    partial = None if is_direct else _partial(target, replaced)
    try:
        with open(partial or path, "w", encoding="utf-8") as file:
            file.write(text)
            if not is_direct:
                file.flush()
                os.fsync(file.fileno())
        if partial is not None:
            os.replace(partial, target)
    except OSError as error:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        raise Refused(f"{path}: cannot be written: {error.strerror}") from None
