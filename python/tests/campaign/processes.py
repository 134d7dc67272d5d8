"""The processes of this machine, for tests that kill some."""

from pathlib import Path


def processes() -> dict[int, tuple[int, str]]:
    """Parent and command line, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        found[int(folder.name)] = int(fields[1]), words
    return found
