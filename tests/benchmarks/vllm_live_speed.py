"""What the live check costs beside vLLM's own scheduler, in one run.

    LOCKSTEP_COMMAND=build/release/lockstep python vllm_live_speed.py FILE... [--runs 3]
        [--model-ms 20]

FILE: benchmark files (docs/formats.md). Every workload is served alone and with the live check, in
turns. Taken are schedule() and update_from_output(): CPU seconds of the engine's thread, and wall
seconds, in which the check's thread may hold the interpreter. Between two steps nothing happens for
--model-ms, as while a model runs; the check works then. The garbage collector is off in both.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]


def serve(header: Any, requests: Any, scheduler_cls: type | None, model_s: float) -> Any:
    """(CPU seconds, wall seconds, steps, the live check's log)"""
    from lockstep_engines.vllm import engine as vllm_engine

    engine = vllm_engine.make_engine(header, scheduler_cls)
    for event in requests:
        engine.add(event)
    token = [header["sampled_token"]]
    cpu = wall = 0.0
    steps = 0
    gc.collect()
    gc.disable()
    while engine.scheduler.has_unfinished_requests():
        begin, begin_wall = time.thread_time(), time.perf_counter()
        output = engine.schedule()
        cpu += time.thread_time() - begin
        wall += time.perf_counter() - begin_wall
        now = engine.scheduler.requests
        sampled = {
            name: token for name in output.num_scheduled_tokens if not now[name].is_prefill_chunk
        }
        model_output = engine.model_output(sampled)
        time.sleep(model_s)
        begin, begin_wall = time.thread_time(), time.perf_counter()
        engine.update(model_output)
        cpu += time.thread_time() - begin
        wall += time.perf_counter() - begin_wall
        steps += 1
    gc.enable()
    recorder = getattr(engine.scheduler, "recorder", None)
    if recorder is None:
        return cpu, wall, steps, None
    recorder.finish()
    return cpu, wall, steps, recorder.live_log


def measure(path: Path, runs: int, model_s: float, max_requests: int) -> None:
    from vllm_scheduler_speed import load

    from lockstep_live.scheduler import LiveScheduler

    header, requests = load(path)
    requests = requests[:max_requests]
    alone, checked = [], []
    for _ in range(runs):
        alone.append(serve(header, requests, None, model_s))
        checked.append(serve(header, requests, LiveScheduler, model_s))
    steps = alone[0][2]
    text = f"{header['benchmark']}: {steps:,} steps"
    for place, what in ((0, "CPU of the engine's thread"), (1, "wall")):
        first = statistics.median(run[place] for run in alone)
        more = statistics.median(run[place] for run in checked) - first
        text += (
            f"; {what} {1e6 * first / steps:,.0f} us a step, {1e6 * more / steps:+,.0f} "
            f"({100 * more / first:+.1f} %)"
        )
    dropped = sum(run[3].dropped for run in checked)
    findings = sum(len(run[3].findings) for run in checked)
    print(f"{text}; {dropped} dropped, {findings} findings (median of {runs})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model-ms", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each file, the first")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LOCKSTEP": "log", "LOCKSTEP_DIR": folder}
        os.environ.setdefault("LOCKSTEP_DRAIN_S", "600")
        for path in arguments.files:
            measure(path, arguments.runs, arguments.model_ms / 1000, arguments.requests)


if __name__ == "__main__":
    main()
