"""What the scheduler protocol costs over vLLM itself, in CPU time.

    python vllm_adapter_speed.py [--vllm DIR] [--cases 300] [FILE...] [--runs 3]

First small cases (20 steps of 3 to 6 requests), so many a second and core, and what share of that
time is spent inside vLLM. Then each FILE (a benchmark file, docs/formats.md): request-steps a
second, and their share of the speed that vLLM has alone: the time inside vLLM over all time, both
of the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python" / "tests")]

from adapter_client import Adapter, Line, full_attention_case

CLOCK = time.process_time
TICKS = os.sysconf("SC_CLK_TCK")
STEPS = 20


def cpu_seconds_of(process: subprocess.Popen) -> float:
    """CPU time of a process so far, user and system."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def small_case(seed: int) -> Line:
    options = {"max_model_len": 96, "scheduler_reserve_full_isl": False}
    return full_attention_case(12, seed, max_num_batched_tokens=32, **options)


def decide(adapter: Any, seed: int) -> None:
    """One small case; `adapter`: whatever has send()."""
    rng = random.Random(seed)
    adapter.send({"open": small_case(seed)})
    prefilled: dict[str, int] = {}
    for i in range(rng.randint(3, 6)):
        name, prompt = f"r{i}", rng.randint(1, 60)
        prefilled[name] = prompt
        adapter.send(
            {
                "add": name,
                "prompt": [[rng.randint(1, 3), prompt]],
                "max_tokens": rng.randint(2, 20),
                "arrival": float(i),
            }
        )
    for step in range(STEPS):
        rows = adapter.send({"schedule": step})["scheduled"]
        if rows:
            sampled = {
                row["id"]: [rng.randrange(100)]
                for row in rows
                if row["computed"] + row["tokens"] >= prefilled[row["id"]]
            }
            adapter.send({"update": step, "sampled": sampled})
    adapter.send({"close": True})


def measure_small_cases(folder: str | None, num_cases: int) -> None:
    """In a process of its own, as Lockstep has it."""
    adapter = Adapter("vllm", *([folder] if folder else []))
    for seed in range(20):
        decide(adapter, seed)
    begin = cpu_seconds_of(adapter.process)
    for seed in range(num_cases):
        decide(adapter, seed)
    seconds = cpu_seconds_of(adapter.process) - begin
    print(f"small cases: {num_cases / seconds:,.0f} a second and core", flush=True)
    adapter.close()


def measure_share(inside: InProcess, num_cases: int) -> None:
    for seed in range(20):
        decide(inside, seed)
    inside.seconds = inside.inside = 0.0
    for seed in range(num_cases):
        decide(inside, seed)
    share = 100 * inside.inside / inside.seconds
    print(f"    without the pipe {num_cases / inside.seconds:,.0f}; {share:.0f} % of it is vLLM's")


class InProcess:
    """The adapter in this process. Counts the CPU seconds from the line of a message to the line
    of its reply, and of these the seconds inside vLLM."""

    def __init__(self) -> None:
        from lockstep_engines import protocol
        from lockstep_engines.vllm import adapter as vllm_adapter
        from lockstep_engines.vllm.engine import Request, Scheduler

        self._protocol = protocol
        self._session = protocol.Session(protocol.SCHEDULER, vllm_adapter.VllmAdapter())
        self.seconds = self.inside = 0.0
        self._depth = 0
        for method in ("__init__", "schedule", "update_from_output", "add_request"):
            self._count_inside(Scheduler, method)
        self._count_inside(Request, "__init__")

    def _count_inside(self, cls: type, name: str) -> None:
        method = getattr(cls, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = CLOCK()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.inside += CLOCK() - begin

        setattr(cls, name, counted)

    def send(self, message: Line) -> Line:
        line = self._protocol.encode(message)
        begin = CLOCK()
        reply = self._protocol.encode(self._session.reply_to(line))
        self.seconds += CLOCK() - begin
        return self._protocol.decode(reply)


def serve(adapter: InProcess, lines: list[Line]) -> Line:
    """Serves a benchmark's requests, whose steps are what `adapter` has counted then. Totals."""
    header, events = lines[0], lines[1:]
    case = {key: header[key] for key in ("config", "groups", "num_blocks")} | {"seed": 0}
    opened = adapter.send({"open": case})
    assert "opened" in opened, opened
    num_tokens = {}
    for event in events:
        num_tokens[event["add"]] = len(event["prompt"]["tokens"])
        reply = adapter.send(event | {"arrival": 0.0})
        assert reply == {}, reply
    token = [header["sampled_token"]]
    totals = {"steps": 0, "scheduled_tokens": 0, "request_steps": 0}
    left = len(events)
    adapter.seconds = adapter.inside = 0.0
    while left:
        step = totals["steps"]
        rows = adapter.send({"schedule": step})["scheduled"]
        sampled = {
            row["id"]: token
            for row in rows
            if row["computed"] + row["tokens"] >= num_tokens[row["id"]]
        }
        reply = adapter.send({"update": step, "sampled": sampled})
        num_tokens |= reply["num_tokens"]
        left -= len(reply.get("stopped", ()))
        totals["steps"] += 1
        totals["scheduled_tokens"] += sum(row["tokens"] for row in rows)
        totals["request_steps"] += len(rows)
    return totals


def measure_file(adapter: InProcess, path: Path, runs: int) -> None:
    from vllm_scheduler_speed import load

    header, events = load(path)
    rates, shares = [], []
    for _ in range(runs):
        totals = serve(adapter, [header, *events])
        rates.append(totals["request_steps"] / adapter.seconds)
        shares.append(adapter.inside / adapter.seconds)
    if totals != header["totals"]:
        print(f"    (served {totals}; the file has {header['totals']})")
    print(
        f"{header['benchmark']}: {statistics.median(rates):,.0f} request-steps/s, "
        f"{100 * statistics.median(shares):.0f} % of vLLM's own speed (median of {runs})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--vllm", metavar="DIR", help="sources of vLLM; else the installed one")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.vllm:
        sys.path.insert(0, arguments.vllm)
    if arguments.cases:
        measure_small_cases(arguments.vllm, arguments.cases)
    adapter = InProcess()
    if arguments.cases:
        measure_share(adapter, arguments.cases)
    for path in arguments.files:
        measure_file(adapter, path, arguments.runs)


if __name__ == "__main__":
    main()
