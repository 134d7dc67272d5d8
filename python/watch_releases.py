"""What two releases of an engine without a profile have in common: sections of `lockstep watch`.

SGLang decides by no profile, so the page compares it with itself: the same workloads recorded with
both releases, the tests of sglang_test.py in both, and the options that the sources read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]
# What decides, below the folder sglang/srt.
_DECIDES = ("managers/schedule*.py", "managers/scheduler_components/*.py", "mem_cache/**/*.py")
_ADAPTER = Path(__file__).resolve().parent / "lockstep_engines" / "sglang"


def first_difference(one: Any, other: Any, path: str = "") -> str:
    """Where two JSON values part, and both values there; empty: they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        steps = [(f".{key}", one.get(key), other.get(key)) for key in [*one, *other]]
    elif isinstance(one, list) and isinstance(other, list):
        steps = [(f"[{i}]", *both) for i, both in enumerate(zip(one, other, strict=False))]
        steps.append((" has entries", len(one), len(other)))
    else:
        return "" if one == other else f"{path.lstrip('.')}: {_short(one)}, here {_short(other)}"
    found = (first_difference(first, second, path + step) for step, first, second in steps)
    return next((text for text in found if text), "")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lines(path: Path) -> list[Line]:
    """A recording without the name of its engine."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0].pop("engine")
    return lines


def _parts_in(last: Path, here: Path) -> str:
    lines = zip(_lines(last), _lines(here), strict=False)
    for number, (one, other) in enumerate(lines):
        if text := first_difference(one, other):
            return f"step {number - 1}, {text}" if number else f"header, {text}"
    return ""


def decisions(last: Path, here: Path) -> tuple[str, list[str]]:
    """Recordings of the same workloads in two folders: how many are the same in every step, and a
    line per family that has others."""
    files = sorted(path.relative_to(here) for path in here.glob("*/*.jsonl"))
    both = [path for path in files if (last / path).exists()]
    parts = {path: text for path in both if (text := _parts_in(last / path, here / path))}
    lines = []
    for family in dict.fromkeys(path.parent.name for path in both):
        paths = [path for path in both if path.parent.name == family]
        differ = [path for path in paths if path in parts]
        if differ:
            first = f"first {differ[0]}, {parts[differ[0]]}"
            lines.append(f"- {family}: {len(differ)} of {len(paths)} differ; {first}")
    return f"{len(both) - len(parts)} of {len(both)} recordings the same in every step", lines


def failed_tests(said: str) -> set[str]:
    """Names of the tests that a run of unittest reports."""
    return set(re.findall(r"^(?:FAIL|ERROR): (\w+)", said, re.M))


def _reads(tree: ast.AST) -> Iterator[str]:
    """server_args.X, envs.X, and X of the parts of SGLang's runtime context."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        value = node.value
        owner = value.func if isinstance(value, ast.Call) else value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if isinstance(value, ast.Call):
            if re.fullmatch(r"get_(schedule|memory|spec|disagg|parallel|model|server_args)", name):
                yield f"{name}().{node.attr}"
        elif name in ("server_args", "envs"):
            yield f"{name}.{node.attr}"


def options_read(sources: Path) -> dict[str, str]:
    """Options that scheduling code reads, and the first file that does."""
    root = sources / "sglang" / "srt"
    found: dict[str, str] = {}
    for path in sorted({path for glob in _DECIDES for path in root.glob(glob)}):
        for name in _reads(ast.parse(path.read_text())):
            found.setdefault(name, str(path.relative_to(root)))
    return found


def options(last: Path, here: Path) -> tuple[str, list[str], bool]:
    """In words, in lines, and whether an option is new that the adapter does not name."""
    before, now = options_read(last), options_read(here)
    adapter = " ".join(path.read_text() for path in sorted(_ADAPTER.glob("*.py")))
    named = {name for name in now if name.rpartition(".")[2] in adapter}
    new, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
    lines = [
        f"- new: {name} ({now[name]}){', which the adapter names' if name in named else ''}"
        for name in new
    ] + [f"- gone: {name} ({before[name]})" for name in gone]
    words = f"{len(now)} read, {len(named)} of them by name in the adapter"
    return f"{words}; {len(new)} new, {len(gone)} gone", lines, bool({*new} - named)
