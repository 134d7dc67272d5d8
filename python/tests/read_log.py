"""Which attributes of vLLM's configuration, specs and requests its scheduling code reads.

read_by_source() finds them in the text of the installed release; a ReadLog sees them read while
scenarios run. Both name them OWNER.ATTRIBUTE, as lockstep_recorder/options.py does.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import vllm
from vllm import config
from vllm.v1 import kv_cache_interface

CORE = Path(vllm.__file__).parent / "v1" / "core"
# What decides while serving. Planning happens before, and its results are recorded.
SOURCES = (
    "sched/async_scheduler.py",
    "sched/output.py",
    "sched/request_queue.py",
    "sched/scheduler.py",
    "sched/utils.py",
    "block_pool.py",
    "encoder_cache_manager.py",
    "kv_cache_coordinator.py",
    "kv_cache_manager.py",
    "kv_cache_utils.py",
    "single_type_kv_cache_manager.py",
)

# The other files, and why they need not be looked at.
NOT_LOOKED_AT = {
    "sched/diffusion_scheduler.py": "of diffusion models, which are refused",
    "sched/interface.py": "names methods",
    "kv_cache_config_builder.py": "plans",
    "kv_cache_planning.py": "plans",
    "kv_cache_metrics.py": "reports",
}

# The last name of an expression -> what it may stand for.
_OWNERS_OF_NAME = {
    "envs": ("envs",),
    "spec": ("spec", "speculative_config"),
    "spec_config": ("speculative_config",),
    "kv_cache_spec": ("spec",),
    "first_spec": ("spec",),
    "full_attn_spec": ("spec",),
    "other_spec": ("spec",),
    "layer_spec": ("spec",),
    "group": ("group",),
    "g": ("group",),
    "kv_cache_group": ("group",),
    "request": ("request",),
    "req": ("request",),
    "r": ("request",),
    "session": ("request",),
    "preempted_req": ("request",),
    "sampling_params": ("sampling_params",),
    "params": ("sampling_params",),
}


def _spec_classes() -> list[type]:
    classes = vars(kv_cache_interface).values()
    base = kv_cache_interface.KVCacheSpec
    return [cls for cls in classes if isinstance(cls, type) and issubclass(cls, base)]


_CLASSES_OF_OWNER = {
    "spec": _spec_classes(),
    "group": [kv_cache_interface.KVCacheGroupSpec],
    "kv_cache_config": [kv_cache_interface.KVCacheConfig],
    "vllm_config": [config.VllmConfig],
    "scheduler_config": [config.SchedulerConfig],
    "cache_config": [config.CacheConfig],
    "parallel_config": [config.ParallelConfig],
    "model_config": [config.ModelConfig],
    "speculative_config": [config.SpeculativeConfig],
}


def _has(owner: str, attribute: str) -> bool:
    """Whether what `owner` stands for can have the attribute; True where no class defines it."""
    classes = _CLASSES_OF_OWNER.get(owner)
    return classes is None or any(
        hasattr(cls, attribute) or attribute in getattr(cls, "__dataclass_fields__", ())
        for cls in classes
    )


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(last name of the expression, attribute) of what is read, by getattr() too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield _last_name(node.value), node.attr
        elif (
            isinstance(node, ast.Call)
            and _last_name(node.func) in ("getattr", "hasattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            yield _last_name(node.args[0]), node.args[1].value


def files_of_core() -> set[str]:
    """What there is of scheduling code."""
    files = (str(path.relative_to(CORE)) for path in CORE.rglob("*.py"))
    return {file for file in files if not file.endswith("__init__.py")}


def read_by_source() -> dict[tuple[str, ...], str]:
    """What may be read (one of several owners where a name is ambiguous) -> where."""
    found: dict[tuple[str, ...], str] = {}
    for source in set(SOURCES) & files_of_core():
        for name, attribute in _reads(ast.parse((CORE / source).read_text())):
            owners = _OWNERS_OF_NAME.get(name, (name,) if name.endswith("_config") else ())
            names = tuple(f"{owner}.{attribute}" for owner in owners if _has(owner, attribute))
            if names:
                found.setdefault(names, source)
    return found


def _decides(code: CodeType) -> bool:
    """Whether a function is one of those that decide while serving."""
    file = code.co_filename
    if not file.startswith(str(CORE)) or code.co_name.startswith("resolve_"):
        return False
    return file[len(str(CORE)) + 1 :] in SOURCES


class ReadLog:
    """Sees every attribute of the watched classes that the scheduling code reads."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextmanager
    def watching(self, owners: dict[type, str]) -> Iterator[None]:
        """`owners`: classes and what their objects are called."""
        plain = {cls: cls.__getattribute__ for cls in owners}
        try:
            for cls, owner in owners.items():
                cls.__getattribute__ = self._logged(owner, plain[cls])
            yield
        finally:
            for cls, method in plain.items():
                cls.__getattribute__ = method

    def _logged(self, owner: str, plain: Any) -> Any:
        def logged(watched: Any, name: str) -> Any:
            if not name.startswith("__") and _decides(sys._getframe(1).f_code):
                self.names.add(f"{owner}.{name}")
            return plain(watched, name)

        return logged
