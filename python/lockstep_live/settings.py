"""What the environment says of the live check."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

MODES = ("off", "log", "raise")


class SettingsError(Exception):
    """A variable that cannot be; the text names it."""


@dataclass(frozen=True)
class Settings:
    mode: str  # "log", "raise"
    command: str  # the lockstep command
    folder: str  # of the evidence: recordings, smallest cases, narratives
    queue_steps: int  # that may wait for the audit
    spool_mb: int  # of steps that are kept for a recording
    memory_mb: int  # of the audit's process
    drain_s: int  # that shutdown waits for the audit


def mode_of(environment: dict[str, str]) -> str:
    """Raises SettingsError. The path of a command, which tests put there, is no mode: off."""
    mode = environment.get("LOCKSTEP", "") or "off"
    if mode in MODES:
        return mode
    if os.path.isfile(mode):
        return "off"
    raise SettingsError(f"found LOCKSTEP={mode}; expected one of {', '.join(MODES)}")


def _number(environment: dict[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise SettingsError(f"found {name}={text}; expected a number, 1 or more")
    return int(text)


def num_pages_of(environment: dict[str, str]) -> int:
    """Pages that a worker samples before a step. Raises SettingsError."""
    return _number(environment, "LOCKSTEP_PAGES", 8)


def _command(environment: dict[str, str]) -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "lockstep")
    found = environment.get("LOCKSTEP_COMMAND") or shutil.which("lockstep")
    found = found or (beside if os.access(beside, os.X_OK) else None)
    if not found or not os.access(found, os.X_OK):
        raise SettingsError(
            "found no lockstep command that can be run; put it on PATH, or name it in "
            "LOCKSTEP_COMMAND"
        )
    return found


def settings_of(environment: dict[str, str]) -> Settings:
    """Raises SettingsError."""
    return Settings(
        mode=mode_of(environment),
        command=_command(environment),
        folder=environment.get("LOCKSTEP_DIR", ".lockstep"),
        queue_steps=_number(environment, "LOCKSTEP_QUEUE_STEPS", 1000),
        spool_mb=_number(environment, "LOCKSTEP_SPOOL_MB", 1024),
        memory_mb=_number(environment, "LOCKSTEP_MEMORY_MB", 4096),
        drain_s=_number(environment, "LOCKSTEP_DRAIN_S", 10),
    )
