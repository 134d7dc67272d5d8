"""Shared by the tests inside an installed vLLM: the folders of recordings, and vLLM itself. If vLLM
cannot be imported, importing this module ends the process with exit status 77 (skipped).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
SAMPLES = HERE.parents[1] / "traces" / "samples" / "recordings"
REGRESSIONS = HERE.parents[1] / "tests" / "regressions"
SKIPPED = 77

try:
    from lockstep_engines.vllm import engine as vllm_engine
except ImportError as error:
    print(f"SKIPPED: vLLM cannot be imported ({error}); nothing was run inside it")
    sys.exit(SKIPPED)

__all__ = ["REGRESSIONS", "SAMPLES", "Line", "lines_of", "vllm_engine"]

Line = dict[str, Any]


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]
