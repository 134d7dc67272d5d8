"""Records what vLLM's scheduler decides while it serves.

    LOCKSTEP_RECORDING=run.jsonl vllm serve MODEL \\
        --scheduler-cls lockstep_recorder.RecordingScheduler

The names below load vLLM; every other module of the package does without it.
"""

from typing import Any

from lockstep_recorder.errors import RecorderError

__all__ = ["AsyncRecordingScheduler", "RecorderError", "RecordingScheduler"]


def __getattr__(name: str) -> Any:
    if name in ("AsyncRecordingScheduler", "RecordingScheduler"):
        from lockstep_recorder import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
