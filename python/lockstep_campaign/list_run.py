"""Parts of a list as tasks: recordings for `audit` and `conform`, defects for `mutants`.

A part's files lie in the folder of its task under their own names, so that the merged JSON is that
of one process. Recordings may be in any store that fsspec reads (s3://..., gs://...).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_campaign.executors import Executor
from lockstep_campaign.fuzz_run import REPORT, Parser, options_of, report_of
from lockstep_campaign.loop import Loop, Refused, say
from lockstep_campaign.outputs import check_output
from lockstep_campaign.tasks import FOLDER, Done, Task

_COMMANDS = ("audit", "conform", "mutants")
# A word after one of these is its value, although it may be a command's name.
_VALUED = ("--budget", "--workers", "--shard-cases", "--canary", "--out", "--metrics")
_REFUSED = ("--junit", "--summary", "--annotations")  # each part would write its own
_PARTS_PER_WORKER = 4
_ITEMS_MAX = 200
# A part of a folder may hold none, or only those of memory plans, which `audit` does not read.
_NO_RECORDING = "contains no recording"
_NO_SCHEDULES = "nothing to audit: no recordings of schedules found"
_COUNTED = ("not_checked", "not_looked_at")  # lines with counts, or the same in every part
_BY_FILE = ("findings", "mismatches", "skipped", "cut_off", "stuck_in", "refusals")


@dataclass(frozen=True)
class _Item:
    name: str  # as the command reads it
    read: Callable[[], bytes] | None = None  # absent: not a file


def command_at(words: Sequence[str]) -> int:
    """The index of the command that a campaign distributes; the number of words: none is named."""
    return next((i for i, word in enumerate(words) if word in ("fuzz", *_COMMANDS)
                 and words[max(i - 1, 0)] not in _VALUED), len(words))  # fmt: skip


def _files_of(word: str) -> tuple[str, list[_Item]]:
    """A path as tasks read it, and its files, in the order of the commands."""
    if "://" in word:
        try:
            import fsspec
        except ImportError:
            raise Refused(f"{word}: reading it needs fsspec; run `pip install fsspec` and the "
                          "package of its store") from None  # fmt: skip
        store, root = fsspec.core.url_to_fs(word)
        above = len(root.rpartition("/")[0]) + 1
        return root[above:], [_Item(name[above:], functools.partial(store.cat_file, name))
                              for name in sorted(store.find(root))]  # fmt: skip
    path = Path(word)
    if path.is_absolute() or ".." in path.parts or not path.exists():
        raise Refused(f"{word}: expected a path below this folder, or a URL")
    inside = [] if path.is_file() else sorted(path.rglob("*"))
    for one in inside:  # as the commands: a dead link or a device is not left out silently
        if one.name.endswith((".jsonl", ".jsonl.gz")) and not one.is_file() and not one.is_dir():
            raise Refused(f"{one}: not a regular file")
    files = [path] if path.is_file() else [one for one in inside if one.is_file()]
    return word, [_Item(str(file), file.read_bytes) for file in files]


class ListRun(Loop):
    def __init__(self, executor: Executor, words: Sequence[str],
                 run_here: Callable[[Task], Done]) -> None:  # fmt: skip
        super().__init__(executor)
        self._command, *rest = words
        at = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
        self._paths = rest[:at]
        parser = Parser(self._command, add_help=False, allow_abbrev=False)
        parser.add_argument("--json")
        if self._command == "audit":
            parser.add_argument("--min-hit-share", type=float, default=0.0)
        own, self._options = parser.parse_known_args(rest[at:])
        for name in options_of(self._options):
            if name in _REFUSED:
                raise Refused(f"{name} does not suit a campaign of {self._command}, whose only "
                              "output is --json")  # fmt: skip
        check_output("--json", own.json)
        self.json_path: str | None = own.json
        self._min_hit_share: float = getattr(own, "min_hit_share", 0.0)
        if not 0 <= self._min_hit_share <= 100:
            raise Refused(f"--min-hit-share: {self._min_hit_share:g} is not in range 0 to 100")
        if self._command == "mutants":
            listed = ("mutants", *self._paths, "--list", "--json", f"{FOLDER}/{REPORT}")
            done = run_here(Task("the list", listed))
            lists = {"": [_Item(one["id"]) for one in report_of(done)["mutants"]]}
        elif not self._paths:
            raise Refused(f"{self._command}: give paths of recordings first")
        else:
            lists = dict(_files_of(word) for word in self._paths)
        # A file that several paths hold belongs to the first.
        path_of = {item.name: path for path in reversed(lists) for item in lists[path]}
        size = math.ceil(len(path_of) / (_PARTS_PER_WORKER * executor.size()))
        size = max(1, min(size, _ITEMS_MAX))
        self._parts: list[tuple[str, list[_Item]]] = []
        for path, of_path in lists.items():
            items = [item for item in of_path if path_of[item.name] == path]
            self._parts += [(path, items[at : at + size]) for at in range(0, len(items), size)]
        # Paths without a report yet, except those whose files belong to others.
        owners = set(path_of.values())
        self._empty = [path for path in lists if path in owners or not lists[path]]
        # Links to folders, which are not followed; and files that are not recordings, of parts with
        # only such files.
        self._others = sum(one.is_symlink() and one.is_dir()
                           for word in self._paths if "://" not in word
                           for one in Path(word).rglob("*"))  # fmt: skip
        self._next = 0
        self._reports: dict[int, dict[str, Any]] = {}
        self.statuses = {0}

    def more(self) -> Task | None:
        if self._next == len(self._parts):
            return None
        number, self._next = self._next, self._next + 1
        path, part = self._parts[number]
        files = {item.name: item.read() for item in part if item.read is not None}
        named = [path] if files else [item.name for item in part]
        words = (self._command, *named, *self._options, "--json", f"{FOLDER}/{REPORT}")
        task = Task(f"{self._command}, part {number + 1} of {len(self._parts)}", words, files,
                    in_folder=bool(files))  # fmt: skip

        def take(done: Done) -> None:
            has_plans = _NO_SCHEDULES in done.err
            if REPORT not in done.files and (has_plans or _NO_RECORDING in done.err):
                self._others += len(part)
                if has_plans:
                    self._empty = [one for one in self._empty if one != path]
                return
            report = self._reports[number] = report_of(done)
            if (refusal := _no_recording(path)) in report.get("refusals", []):
                report["refusals"].remove(refusal)
                report["refused"] -= 1
            else:
                self._empty = [one for one in self._empty if one != path]
            self.statuses.add(0 if _is_skipped(report) else done.status)

        self.handlers[task.name] = take
        return task

    def report(self, interrupted: bool) -> str:
        if not self._reports and not interrupted:
            none = f"{', '.join(self._empty)}: {_NO_RECORDING}"
            raise Refused(none if self._empty else _NO_SCHEDULES)
        parts = [report for _, report in sorted(self._reports.items())]
        if self._others and parts:
            parts.append(_others(self._command, self._others))
        if self._empty and parts and not interrupted:
            refusals = [_no_recording(path) for path in self._empty]
            parts.append({"refused": len(refusals), "refusals": refusals})
            self.statuses.add(2)
        whole = merged(parts) or {}
        if self._command != "mutants" and whole:
            whole["not_checked"].sort()
        if interrupted:
            return _text({"interrupted": True} | whole)
        if _is_skipped(whole):
            say(f"lockstep: no recording was audited: {whole['skipped'][0]['why']}")
            self.statuses.add(2)
        # Of all parts: the share of a part of them may be lower.
        if self._min_hit_share and (share := whole["hits"]["share_percent"]) < self._min_hit_share:
            say(f"Hit rate too low: {share:.1f} % of the cached tokens; --min-hit-share requires "
                f"{self._min_hit_share:.15g} %.")  # fmt: skip
            self.statuses.add(1)
        return _text(whole)

    def status(self) -> int:
        return next(status for status in (2, 1, 3, *self.statuses) if status in self.statuses)


def _others(command: str, count: int) -> dict[str, Any]:
    """What a report states about files that are not recordings."""
    if command == "conform":
        line = f"{count} file{'s' if count > 1 else ''} that conform does not read"
        return {"not_looked_at": [line]}
    what = "files of folders that are not recordings, and links to folders"
    return {"not_recordings": count, "not_checked": [what]}


def _no_recording(path: str) -> dict[str, str]:
    return {"file": path, "reason": f"{path}: {_NO_RECORDING}"}


def _is_skipped(report: dict[str, Any]) -> bool:
    """Every recording is: status 2 of an audit, but not of its parts."""
    return bool(report.get("not_audited")) and report["not_audited"] == report["files"] and not (
        report["findings"] or report["refused"])  # fmt: skip


def _text(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def merged(parts: list[Any], key: str = "") -> Any:
    """Adds counts, joins lists in the order of files or parts; shares follow from their counts."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if isinstance(parts[0], dict):
        keys = dict.fromkeys(name for part in parts for name in part)
        whole = {name: merged([part.get(name) for part in parts], name) for name in keys}
        if key == "judged_as":
            return dict(sorted(whole.items()))
        if "share_percent" in whole:
            pool = whole["in_pool"]
            whole["share_percent"] = 100.0 * whole["hit"] / pool if pool else 100.0
        return whole
    if isinstance(parts[0], list):
        joined = [item for part in parts for item in part]
        if key in _BY_FILE:
            joined.sort(key=lambda item: item["file"])
        return _counted_lines(joined) if key in _COUNTED else joined
    if isinstance(parts[0], (bool, str)):
        return max(parts)
    return sum(parts)


def _counted_lines(lines: Iterable[str]) -> list[str]:
    """Lines without repetitions; "12 files ..." and "1 file ..." become "13 files ..."."""
    counts: dict[tuple[str, str], int] = {}  # by noun and rest
    for line in lines:
        found = re.match(r"(\d+) (\w+?)s?( .*)", line)
        name = (found[2], found[3]) if found else ("", line)
        counts[name] = counts.get(name, 0) + (int(found[1]) if found else 0)
    return [f"{count} {noun}{'s' if count > 1 else ''}{rest}" if noun else rest
            for (noun, rest), count in counts.items()]  # fmt: skip
