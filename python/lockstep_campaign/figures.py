"""The figures of a campaign: the data of its page, and the same as text for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep_campaign.campaign import Found
from lockstep_campaign.history import History, Night
from lockstep_campaign.loop import Ended

Figures = dict[str, Any]
_PREFIX = "lockstep_campaign_"


def figures_of(report: Mapping[str, Any], ended: Ended, found: Found, history: History,
               night: Night, canary: str, command: str) -> Figures:  # fmt: skip
    minutes = max(night.seconds, 0.001) / 60
    cases_now = {one["bucket"]: one["cases"] for one in report["buckets"]}
    decided_by = report.get("decided_by") or f"the model, {report['engine'] or 'all profiles'}"
    return {
        "commit": night.commit,
        "command": command,
        "engine": decided_by,
        "backend": report.get("worked_by") or report["backend"],
        "first_seed": str(report["first_seed"]),  # exceeds the integers of a browser
        "began": night.began,
        "seconds": night.seconds,
        "interrupted": night.interrupted,
        "cases": report["cases"],
        "agreed": report["agreed"],
        "refused": report["refused"],
        "failures": len(report["failures"]),
        "steps": report["steps"],
        "cases_per_minute": round(report["cases"] / minutes),
        "steps_per_minute": round(report["steps"] / minutes),
        "classes": night.classes,
        "all_classes": len(report["tally"]),
        "never_reached": [name for name, count in report["tally"].items() if not count],
        "workers": len(ended.workers),
        "lost": ended.lost,
        "canary": {"words": canary, "result": found.canary},
        "known": {name: one["cases"] for name, one in report["known"].items()},
        "points": [asdict(point) for point in found.points],
        "buckets": [asdict(one) | {"seed": str(one.seed), "cases_now": cases_now.get(one.name, 0)}
                    for one in history.buckets.values()],
        "nights": [asdict(one) for one in history.nights],
    }  # fmt: skip


def page(figures: Figures) -> str:
    template = (Path(__file__).parent / "page.html").read_text()
    return template.replace("%DATA%", json.dumps(figures).replace("<", "\\u003c"))


def _sample(name: str, value: float, **labels: str) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{key}="{quoted(label)}"' for key, label in labels.items())
    return f"{_PREFIX}{name}{{{inside}}} {value}" if labels else f"{_PREFIX}{name} {value}"


def _family(name: str, help_text: str, samples: Iterable[str]) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {help_text}", f"# TYPE {_PREFIX}{name} gauge", *samples]


def prometheus(figures: Figures) -> str:
    """The text format of Prometheus, as its node exporter reads it from a file."""
    canary = figures["canary"]["result"]
    buckets = [one | {"fails": int(one["state"] == "fails")} for one in figures["buckets"]]
    lines = _family("info", "commit, engine and backend under test",
                    [_sample("info", 1, **{key: figures[key] for key in
                                           ("commit", "engine", "backend")})])  # fmt: skip
    for name, help_text in (
        ("cases", "cases of this campaign"),
        ("steps", "steps of its cases"),
        ("failures", "cases that failed and are not known"),
        ("refused", "cases that were refused"),
        ("cases_per_minute", "cases per minute, all workers"),
        ("steps_per_minute", "steps per minute, all workers"),
        ("classes", "classes of cases and events that were reached"),
        ("seconds", "duration in seconds"),
        ("workers", "workers that finished a task"),
        ("began", "start, in seconds since 1970"),
    ):
        lines += _family(name, help_text, [_sample(name, figures[name])])
    lines += _family("retries", "tasks that ran again", [_sample("retries", len(figures["lost"]))])
    if canary != "none":
        lines += _family("canary_found", "1 if the planted defect was found",
                         [_sample("canary_found", int(canary == "found"))])  # fmt: skip
    for name, key, help_text in (
        ("bucket_cases", "cases", "cases of a bucket, all campaigns"),
        ("bucket_first_seen", "first_seen", "first seen, in seconds since 1970"),
        ("bucket_last_seen", "last_seen", "last seen, in seconds since 1970"),
        ("bucket_fails", "fails", "1 until its smallest case no longer fails"),
    ):
        samples = [_sample(name, one[key], bucket=one["name"]) for one in buckets]
        lines += _family(name, help_text, samples)
    return "\n".join(lines) + "\n"
