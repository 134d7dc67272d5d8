"""What the scheduler protocol costs over vLLM itself, in CPU time of the adapter's process.

    python vllm_adapter_speed.py [--vllm DIR] [--cases 300] [FILE...] [--runs 3]

First small cases (20 steps of 3 to 6 requests), so many a second and core, and what share of that
time is spent inside vLLM. Then each FILE (a benchmark file, docs/formats.md): request-steps a
second through the protocol, beside those of vLLM driven directly (vllm_scheduler_speed.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python" / "tests")]

from adapter_client import Adapter, Line

TICKS = os.sysconf("SC_CLK_TCK")
STEPS = 20


def cpu_seconds_of(process: subprocess.Popen) -> float:
    """CPU time of a process so far, user and system."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def small_case(seed: int) -> Line:
    return {
        "config": {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 96,
            "block_size": 16,
            "enable_prefix_caching": True,
            "scheduler_reserve_full_isl": False,
        },
        "groups": [
            {
                "layers": ["layers.0"],
                "spec": {
                    "type": "full",
                    "block_size": 16,
                    "num_kv_heads": 2,
                    "head_size": 64,
                    "dtype": "bf16",
                },
            }
        ],
        "num_blocks": 12,
        "seed": seed,
    }


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


def measure_small_cases(adapter: Adapter, num_cases: int) -> None:
    for seed in range(20):
        decide(adapter, seed)
    begin = cpu_seconds_of(adapter.process)
    for seed in range(num_cases):
        decide(adapter, seed)
    seconds = cpu_seconds_of(adapter.process) - begin
    print(f"small cases: {num_cases / seconds:,.0f} a second and core", flush=True)


_INSIDE = """
import sys, time
sys.path[:0] = sys.argv[1].split("|")
from vllm_adapter_speed import decide
from lockstep_engines import protocol, vllm_adapter
from lockstep_engines.vllm_engine import AsyncScheduler, Request, Scheduler
inside = 0.0
depth = 0
def timed(cls, name):
    method = getattr(cls, name)
    def call(*args, **kwargs):
        global inside, depth
        depth += 1
        begin = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                inside += time.process_time() - begin
    setattr(cls, name, call)
for name in ("__init__", "schedule", "update_from_output", "add_request", "reset_prefix_cache"):
    timed(Scheduler, name)
timed(Request, "__init__")
class InProcess:
    def __init__(self):
        self.session = protocol._Session(vllm_adapter.VllmAdapter(), protocol.Client(None, None))
    def send(self, message):
        reply = self.session.reply_to(protocol.encode(message))
        return protocol.decode(protocol.encode(reply))
adapter = InProcess()
for seed in range(20):
    decide(adapter, seed)
inside = 0.0
begin = time.process_time()
for seed in range(int(sys.argv[2])):
    decide(adapter, seed)
print(inside / (time.process_time() - begin))
"""


def share_inside(folder: str | None, num_cases: int) -> float:
    """The share of the time that is vLLM's own, with both sides of the protocol in one process: a
    lower bound of what it is of the adapter's time."""
    paths = [str(HERE), str(HERE.parents[1] / "python")] + ([folder] if folder else [])
    done = subprocess.run(
        [sys.executable, "-c", _INSIDE, "|".join(paths), str(num_cases)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    return float(done.stdout.split()[-1])


def serve(adapter: Adapter, lines: list[Line]) -> tuple[float, Line]:
    """Serves a benchmark's requests. CPU seconds of the adapter in its steps, and totals."""
    header, events = lines[0], lines[1:]
    case = {key: header[key] for key in ("config", "groups", "num_blocks")} | {"seed": 0}
    opened = adapter.send({"open": case})
    assert "opened" in opened, opened
    num_tokens = {}
    for event in events:
        prompt = event["prompt"]
        tokens = prompt["tokens"] if isinstance(prompt, dict) else prompt
        num_tokens[event["add"]] = (
            len(tokens) if isinstance(prompt, dict) else sum(count for _, count in prompt)
        )
        reply = adapter.send(event | {"arrival": event.get("arrival", 0.0)})
        assert reply == {}, reply
    token = [header["sampled_token"]]
    totals = {"steps": 0, "scheduled_tokens": 0, "request_steps": 0}
    left = len(events)
    begin = cpu_seconds_of(adapter.process)
    while left:
        rows = adapter.send({"schedule": totals["steps"]})["scheduled"]
        sampled = {
            row["id"]: token
            for row in rows
            if row["computed"] + row["tokens"] >= num_tokens[row["id"]]
        }
        reply = adapter.send({"update": totals["steps"], "sampled": sampled})
        num_tokens |= reply["num_tokens"]
        left -= len(reply.get("stopped", ()))
        totals["steps"] += 1
        totals["scheduled_tokens"] += sum(row["tokens"] for row in rows)
        totals["request_steps"] += len(rows)
    return cpu_seconds_of(adapter.process) - begin, totals


def measure_file(adapter: Adapter, path: Path, folder: str | None, runs: int) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    through = []
    for _ in range(runs):
        seconds, totals = serve(adapter, lines)
        through.append(seconds)
    environment = dict(os.environ)
    if folder:
        before = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_scheduler_speed.py"), str(path), "--json",
         "--runs", str(runs)],
        stdout=subprocess.PIPE, text=True, check=True, env=environment,
    )  # fmt: skip
    report = json.loads(done.stdout.splitlines()[-1])
    if report["totals"] != totals:
        raise SystemExit(f"{path}: served {totals}; directly {report['totals']}")
    mine, direct = statistics.median(through), statistics.median(report["seconds"])
    steps = totals["request_steps"]
    print(
        f"{lines[0]['benchmark']} (vLLM {report['version']}): {steps / mine:,.0f} request-steps/s "
        f"through the protocol, {steps / direct:,.0f} directly: {100 * direct / mine:.0f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--vllm", metavar="DIR", help="sources of vLLM; else the installed one")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    adapter = Adapter("vllm", *([arguments.vllm] if arguments.vllm else []))
    engine = adapter.hello()["engine"]
    print(f"{engine['name']} {engine['version']}")
    if arguments.cases:
        measure_small_cases(adapter, arguments.cases)
        share = share_inside(arguments.vllm, arguments.cases)
        print(f"    of that time {100 * share:.0f} % inside vLLM, at least")
    for path in arguments.files:
        measure_file(adapter, path, arguments.vllm, arguments.runs)
    adapter.close()


if __name__ == "__main__":
    main()
