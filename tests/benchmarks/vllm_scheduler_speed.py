"""How fast vLLM's own scheduler is on this machine, and what the recorder costs.

    python vllm_scheduler_speed.py FILE... [--runs 3] [--recorder] [--json]

FILE: benchmark files (docs/formats.md), of the release that is installed or another. Takes the
time of schedule() and update_from_output() alone, with a free model, in seconds of this thread's
CPU; for the release installed, the totals must be the file's own. With --recorder every run is
repeated with the recording scheduler, which writes to a temporary folder; the garbage collector is
off in both, as its pauses fall anywhere.

With --json a line for each file instead: its name, vLLM's version, the totals, seconds of each run.
`side_by_side.py` runs this and Lockstep on the same files and prints the ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECORDER = Path(__file__).resolve().parents[2] / "python"
sys.path[:0] = [str(RECORDER / "tests"), str(RECORDER)]


def load(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header of a benchmark file and its requests, prompts as tokens."""
    from lockstep_engines.prompts import expand

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for event in lines[1:]:
        event["prompt"] = {"tokens": expand(event["prompt"])}
    return lines[0], lines[1:]


def run_once(
    header: dict[str, Any], requests: list[dict[str, Any]], scheduler_cls: type | None
) -> tuple[float, dict[str, int]]:
    """Serves all requests. Returns CPU seconds in the scheduler, and the totals."""
    from lockstep_engines.vllm import engine as vllm_engine

    engine = vllm_engine.make_engine(header, scheduler_cls)
    for event in requests:
        engine.add(event)
    token = [header["sampled_token"]]
    totals = {"steps": 0, "scheduled_tokens": 0, "request_steps": 0}
    seconds = 0.0
    clock = time.thread_time
    gc.collect()
    gc.disable()
    while engine.scheduler.has_unfinished_requests():
        begin = clock()
        output = engine.schedule()
        seconds += clock() - begin
        requests_now = engine.scheduler.requests
        sampled = {
            name: token
            for name in output.num_scheduled_tokens
            if not requests_now[name].is_prefill_chunk
        }
        model_output = engine.model_output(sampled)
        begin = clock()
        engine.update(model_output)
        seconds += clock() - begin
        totals["steps"] += 1
        totals["scheduled_tokens"] += output.total_num_scheduled_tokens
        totals["request_steps"] += len(output.num_scheduled_tokens)
    gc.enable()
    recorder = getattr(engine.scheduler, "recorder", None)
    if recorder is not None:
        recorder.finish()
    return seconds, totals


def measure(path: Path, runs: int, with_recorder: bool, as_json: bool) -> None:
    """Prints one line for the plain scheduler and, when asked, one for the recording one."""
    from lockstep_engines.vllm import engine as vllm_engine

    header, requests = load(path)
    plain = []
    recorded = []
    for _ in range(runs):
        seconds, totals = run_once(header, requests, None)
        plain.append(seconds)
        if header["engine"]["version"] == vllm_engine.VERSION and totals != header["totals"]:
            raise SystemExit(f"{path}: served {totals}; expected {header['totals']}")
        if with_recorder:
            from lockstep_recorder.scheduler import RecordingScheduler

            with tempfile.TemporaryDirectory() as folder:
                os.environ["LOCKSTEP_RECORDING"] = f"{folder}/run.jsonl"
                recorded.append(run_once(header, requests, RecordingScheduler)[0])
    if as_json:
        report = {
            "benchmark": header["benchmark"],
            "version": vllm_engine.VERSION,
            "totals": totals,
            "seconds": plain,
        }
        print(json.dumps(report), flush=True)
        return
    median = statistics.median(plain)
    rate = totals["request_steps"] / median
    print(
        f"vLLM {vllm_engine.VERSION} {header['benchmark']}: {rate:,.0f} request-steps/s, "
        f"{1e6 * median / totals['steps']:,.0f} us a step (median of {runs}: "
        f"{', '.join(f'{s:.2f}' for s in plain)} s for {totals['request_steps']:,} request-steps)",
        flush=True,
    )
    if recorded:
        extra = statistics.median(recorded) - median
        print(
            f"    recording: {1e6 * extra / totals['steps']:,.0f} us a step more "
            f"({100 * extra / median:.1f} %), {1e9 * extra / totals['request_steps']:,.0f} ns a "
            f"request-step",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--recorder", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for path in arguments.files:
        measure(path, arguments.runs, arguments.recorder, arguments.json)


if __name__ == "__main__":
    main()
