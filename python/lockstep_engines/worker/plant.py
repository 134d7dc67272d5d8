"""A defect to plant in vLLM's worker, and the runner that has it."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_engines.plants import Edit, Plant


@dataclass(frozen=True)
class WorkerPlant(Plant):
    runner: str = "both"


def plant_of(
    runner: str, name: str, kind: str, what: str, module: str, *texts: str, within: str = ""
) -> WorkerPlant:
    """`texts`: the text and its replacement, for each way."""
    ways = tuple(
        (Edit(module, find, put, within),)
        for find, put in zip(texts[::2], texts[1::2], strict=True)
    )
    return WorkerPlant(name, kind, what, ways, runner)
