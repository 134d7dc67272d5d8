"""bandwidth_gate.py FILE: the rows of lockstep_gpu_benchmarks (--benchmark_out=FILE) against
bandwidth_limits.txt. Exit status: 0 every limit is kept, 1 a row is slower, 2 a file or a row is
missing or is not what this program reads.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

LIMITS = Path(__file__).with_name("bandwidth_limits.txt")


def stop(why: str) -> None:
    print(f"bandwidth_gate: {why}", file=sys.stderr)
    sys.exit(2)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file that --benchmark_out wrote, by their names: medians where there are."""
    return {
        (row.get("run_name") or row["name"]).removesuffix("/manual_time"): row
        for row in json.loads(path.read_text())["benchmarks"]
        if row.get("aggregate_name", "median") == "median"
    }


def shares(path: str) -> dict[str, float]:
    """Each row's share of the copy."""
    try:
        rows = rows_of(Path(path))
        return {name: row["of_copy"] for name, row in rows.items() if "of_copy" in row}
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"{path}: wants the file of --benchmark_out ({error!r})")


def limits() -> dict[str, float]:
    lines = [line.split() for line in LIMITS.read_text().splitlines() if line[:1] != "#"]
    return {name: float(least) for name, least in lines}


def main() -> None:
    if len(sys.argv) != 2:
        stop("wants one file of lockstep_gpu_benchmarks --benchmark_out")
    found, slower = shares(sys.argv[1]), 0
    for pattern, least in limits().items():
        rows = fnmatch.filter(found, pattern)
        if not rows:
            stop(f"{sys.argv[1]} has no row {pattern}; run all of lockstep_gpu_benchmarks")
        for row in rows:
            if found[row] < least:
                slower += 1
                print(f"{row}: {found[row]:.4f} of a copy, the limit is {least:.4f}")
    if slower:
        sys.exit(1)
    print(f"{len(limits())} rows are within their limits")


if __name__ == "__main__":
    main()
