#!/usr/bin/env python3
"""The table of docs/real_worker.md out of what `lockstep worker ... --json FILE` wrote:

    python3 python/worker_table.py '0.33.0 v1=a.json' '0.33.0 v1=b.json' '0.33.0 v2=c.json' ...

A cell says how many steps agreed. What diverged and why files were refused follows the table.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cell:
    files: int = 0
    steps: int = 0
    diverged: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, family: dict[str, Any]) -> None:
        self.files += family["files"]
        self.steps += family["steps"]
        self.diverged += family["diverged"]
        self.refused.update(family["refused"])

    def text(self) -> str:
        judged = self.files - sum(self.refused.values())
        words = [f"{self.steps:,}"] if judged else []
        if self.diverged:
            words.append(f"{self.diverged} of {judged} diverged")
        if self.refused:
            words.append("refused" if not judged else f"{sum(self.refused.values())} refused")
        return ", ".join(words)


def table_of(columns: dict[str, dict[str, Cell]]) -> str:
    families = sorted({family for cells in columns.values() for family in cells})
    lines = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for family in families:
        cells = [cells[family].text() if family in cells else "" for cells in columns.values()]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    sums = [f"{sum(cell.steps for cell in cells.values()):,}" for cells in columns.values()]
    return "\n".join([*lines, "| all | " + " | ".join(sums) + " |"])


def main() -> None:
    columns: dict[str, dict[str, Cell]] = {}
    found: list[str] = []
    for argument in sys.argv[1:]:
        name, is_named, path = argument.partition("=")
        if not is_named:
            sys.exit(f"{argument}: expected COLUMN=FILE")
        with open(path) as file:
            for family in json.load(file):
                columns.setdefault(name, {}).setdefault(family["family"], Cell()).add(family)
                for one in family.get("found", []):
                    found.append(f"{name}, {one['file']}: {one['what']}")
    if not columns:
        sys.exit("expected COLUMN=FILE, of what `lockstep worker --json FILE` wrote")
    print(table_of(columns))
    refused: Counter[str] = Counter()
    for cells in columns.values():
        for cell in cells.values():
            refused.update(cell.refused)
    for reason, count in sorted(refused.items()):
        print(f"refused, {count} files: {reason}")
    for line in found:
        print(line)


if __name__ == "__main__":
    main()
