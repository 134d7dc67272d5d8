"""What campaigns have found, in OUT/history.json: buckets with their counts, dates and cases.

A bucket whose case no longer fails stays, with the state "gone". Dates are those of the machine
that runs the campaign; no report depends on them.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep_campaign.loop import Refused
from lockstep_campaign.outputs import write_output

_VERSION = 1
_CAMPAIGNS_KEPT = 60


@dataclass
class Bucket:
    name: str
    check: str
    what: str
    again: str
    seed: int  # of the smallest case
    steps: int  # of it
    cases: int
    first_seen: float  # seconds since 1970
    last_seen: float
    commit: str  # that it was last seen at
    state: str = "fails"  # "gone": its case no longer does
    case: str = ""  # the smallest case, relative to OUT; empty: not saved


@dataclass
class Night:
    """One campaign."""

    began: float
    seconds: float
    commit: str
    cases: int
    steps: int
    classes: int
    failures: int
    canary: str
    interrupted: bool = False


def lock(out: Path) -> None:
    """Until this process ends: of two campaigns in one folder the second would lose the first's
    history and replace its report. Does nothing on a file system without locks."""
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f"another campaign runs in {out}; give --out another folder") from None
    except OSError:
        os.close(folder)


@dataclass
class History:
    buckets: dict[str, Bucket] = field(default_factory=dict)
    nights: list[Night] = field(default_factory=list)

    @staticmethod
    def read(out: Path) -> History:
        path = out / "history.json"
        if not path.exists():
            return History()
        try:
            stored = json.loads(path.read_text())
            if stored.get("lockstep_campaign") != _VERSION:
                raise Refused(f"{path}: not of this release; move it away")
            buckets = {one["name"]: Bucket(**one) for one in stored["buckets"]}
            return History(buckets, [Night(**one) for one in stored["nights"]])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Refused(f"{path}: damaged; move it away") from None

    def write(self, out: Path) -> None:
        stored = {
            "lockstep_campaign": _VERSION,
            "buckets": [asdict(one) for one in self.buckets.values()],
            "nights": [asdict(one) for one in self.nights[-_CAMPAIGNS_KEPT:]],
        }
        write_output(out / "history.json", json.dumps(stored, indent=1) + "\n")

    def failing(self, out: Path) -> list[Path]:
        """The cases of buckets that failed last."""
        cases = [out / one.case for one in self.buckets.values() if one.state == "fails"]
        return [case for case in cases if case.is_file()]

    def take_replays(self, still_fail: Mapping[str, bool], commit: str) -> None:
        for bucket in self.buckets.values():
            fails = still_fail.get(Path(bucket.case).name)
            if fails is None:
                continue
            bucket.state = "fails" if fails else "gone"
            if fails:
                bucket.last_seen, bucket.commit = time.time(), commit

    def take_report(self, report: Mapping[str, Any], commit: str) -> None:
        failures = {one["seed"]: one for one in report["failures"]}
        for found in report["buckets"]:
            smallest = failures[found["smallest_seed"]]
            now = time.time()
            bucket = self.buckets.setdefault(found["bucket"], Bucket(
                found["bucket"], smallest["check"], smallest["what"],
                f"{report.get('again', 'lockstep fuzz')} --seed {smallest['seed']}",
                smallest["seed"], smallest["steps"], 0, now, now, commit))  # fmt: skip
            bucket.cases += found["cases"]
            bucket.last_seen, bucket.commit, bucket.state = now, commit, "fails"

    def unsaved(self) -> list[int]:
        """Seeds whose cases are not saved."""
        return [one.seed for one in self.buckets.values() if not one.case]

    def take_saved(self, out: Path) -> None:
        for bucket in self.buckets.values():
            names = (f"seed-{bucket.seed}.min.case.jsonl", f"seed-{bucket.seed}.case.jsonl")
            for name in names if not bucket.case else ():
                if (out / "found" / name).is_file():
                    bucket.case = f"found/{name}"
                    break
