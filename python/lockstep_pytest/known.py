"""Known failures: the file of `lockstep fuzz --known`, as pytest sees it.

    {"lockstep_known":1,"known":[
      {"id":"ENG-42","check":"audit.handed_out","text":"block 7","until":"2027-01-31",
       "test":"recording[*two_half_loaded*]"}]}

`test`, a pattern of test names, may be left out. A failure that an entry's check and text fit is an
expected failure, by the entry's id. A test that an entry names must fail like that: where it
passes, the test fails, for the entry is to be taken out.
"""

from __future__ import annotations

import datetime
import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class KnownFileError(Exception):
    """A file that is none, with its name."""


@dataclass(frozen=True)
class Known:
    id: str
    check: str
    text: str = ""
    until: str = ""  # the last day on which it is ignored
    test: str = ""  # a pattern; empty: any

    def fits(self, test: str, check: str, line: str) -> bool:
        return check == self.check and self.text in line and (not self.test or self.names(test))

    def names(self, test: str) -> bool:
        """By its pattern; brackets stand for themselves."""
        pattern = self.test.replace("[", "[[]") if self.test else ""
        return bool(pattern) and fnmatch.fnmatchcase(test, pattern)


def _known(entry: dict[str, Any], others: set[str]) -> Known:
    """What traces/formats/saved_case.cpp reads and refuses. Raises ValueError."""
    known = Known(**{key: value for key, value in entry.items() if not key.startswith("x_")})
    for key, value in vars(known).items():
        if not isinstance(value, str) or (key in entry and not value):
            raise ValueError(f"{key}: expected a text, found {json.dumps(value)}")
    if known.id in others:
        raise ValueError(f"two entries have the id {known.id}")
    others.add(known.id)
    if "until" in entry and not re.fullmatch(r"\d{4}-\d\d-\d\d", known.until, re.ASCII):
        raise ValueError(f'until: expected a date, as in "2027-01-31", found "{known.until}"')
    datetime.date.fromisoformat(known.until or "2027-01-31")
    return known


def read_known(path: Path, today: datetime.date) -> list[Known]:
    try:
        whole = json.loads(path.read_text())
        if whole.get("lockstep_known") != 1:
            raise ValueError('expected {"lockstep_known":1,...}')
        for key in whole:
            if key not in ("lockstep_known", "known") and not key.startswith("x_"):
                raise ValueError(f"unknown key {key}")
        ids: set[str] = set()
        found = [_known(entry, ids) for entry in whole["known"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KnownFileError(f"{path}: not a file of known failures: {error}") from None
    return [one for one in found if not one.until or one.until >= today.isoformat()]
