"""The arguments of `lockstep` for `run:` of action.yml, quoted for bash: those of the text, read as
a shell reads them, and those that leave results in the folder of the command line."""

from __future__ import annotations

import gzip
import os
import shlex
import sys
import zlib
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

from lockstep_campaign.list_run import command_at  # noqa: E402

# Commands that judge nothing, or have only JSON: without --junit, --annotations and --summary.
_WITHOUT = ("capacity", "demo", "engines", "export", "layout", "model", "watch", "worker")


def refuse(why: str) -> NoReturn:
    print(f"lockstep action: {why}", file=sys.stderr)
    sys.exit(2)


def is_saved_case(word: str) -> bool:
    try:
        with Path(word).open("rb") as content:
            is_gzip = content.read(2) == b"\x1f\x8b"
            content.seek(0)
            line = (gzip.GzipFile(fileobj=content) if is_gzip else content).readline()
    except (OSError, EOFError, zlib.error):  # the command refuses it
        return False
    return b'"lockstep_case"' in line


def words_of(text: str, results: str) -> list[str]:
    text = text.replace("\\\n", " ").strip()
    if "\n" in text:
        refuse("run has several lines; expected one command: use a step for each, or end lines "
               "with a backslash")  # fmt: skip
    try:
        words = shlex.split(text)
    except ValueError as error:
        refuse(f"run: {error}: {text}")
    if not words:
        refuse("run is empty; expected a command, as in `audit recordings`")
    distributes = words[command_at(words) :][:1] if words[0] == "campaign" else ["fuzz"]
    if words[0] in _WITHOUT or distributes != ["fuzz"]:
        return words
    more = {"--junit": f"{results}/{words[0]}.xml", "--annotations": "github",
            "--summary": os.environ["GITHUB_STEP_SUMMARY"]}  # fmt: skip
    if words[0] == "replay":
        more["--perfetto"] = f"{results}/run.perfetto-trace"
    # A saved case is kept already, and a merge runs no case.
    given = {word.partition("=")[0] for word in words}
    saves = {"replay": not any(map(is_saved_case, words)), "fuzz": "--merge" not in given}
    if saves.get(words[0]):
        more["--save"] = f"{results}/cases"
        if words[0] == "replay" and "--shrink" not in given:
            words.append("--shrink")
    return words + [word for name, value in more.items() if name not in given
                    for word in (name, value)]  # fmt: skip


print(shlex.join(words_of(os.environ["LOCKSTEP_RUN"], sys.argv[1])))
