"""Gives vLLM the inputs of a recording and records it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from installed_vllm import Line, lines_of, vllm_engine

from lockstep_engines.prompts import expand
from lockstep_recorder.scheduler import RecordingScheduler


def with_tokens(step: Line) -> Line:
    """The step with every prompt as tokens."""
    events = [
        event | {"prompt": expand(event["prompt"])} if "add" in event else event
        for event in step.get("before", ())
    ]
    return step | {"before": events} if events else step


def _apply(engine: Any, event: Line) -> None:
    if "add" in event:
        engine.add(event)
    elif "abort" in event:
        engine.abort([event["abort"]])
    elif "pause_state" in event:
        engine.pause(event["pause_state"])
    else:
        engine.scheduler.reset_prefix_cache(reset_running_requests=event.get("running", False))


def repeat(recorded: list[Line], path: Path, tables_every: int = 8) -> list[Line]:
    """The lines of what vLLM decides, recorded to `path`, with tables as often as the recording."""
    os.environ["LOCKSTEP_RECORDING"] = str(path)
    os.environ["LOCKSTEP_RECORDING_TABLES"] = str(tables_every)
    # What is given does not tell of them.
    os.environ["LOCKSTEP_RECORDING_LATE"] = str(int("stale_outputs" in recorded[0]))
    engine = vllm_engine.make_engine(recorded[0], RecordingScheduler)
    step_of: dict[int, Line] = {}

    def take_outputs(last: int) -> None:
        """Those of the steps up to `last` that have not come in."""
        while engine.in_flight and (step := step_of[id(engine.in_flight[0])])["step"] <= last:
            engine.update(engine.model_output(step["sampled"]), step.get("drafts"))

    for step in recorded[1:-1]:
        for event in step.get("before", ()):
            _apply(engine, event)
        step_of[id(engine.schedule())] = step  # kept alive by the queue until its output is there
        for event in step.get("during", ()):
            if "output_of_step" in event:
                take_outputs(event["output_of_step"])
            else:
                _apply(engine, event)
        take_outputs(step.get("output_of_step", -1) if engine.is_async else step["step"])
    engine.scheduler.recorder.finish()
    return lines_of(path)
