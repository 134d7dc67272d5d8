"""A Python that has imported an engine already: each of its commands is a fork. Tests of engines
start hundreds of processes, and most of their time is imports.

    python warm_python.py ENGINE DIR FOLDER         # makes FOLDER/python; ends with FOLDER
    FOLDER/python -m lockstep_engines vllm DIR ...  # as the interpreter that runs the server

FOLDER/python passes its command to an image, a server (lockstep_engines/warm.py) that has imported
what such a command imports, the engine included. The images `packages` and `worker` have imported
no module of the engine: they serve all other commands, and defects that need a module that is not
imported yet.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import weakref
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1]
sys.path.insert(0, str(PACKAGES))

from lockstep_engines import plants, warm

THIRD_PARTY = "torch transformers numba fastapi openai".split()
# These import Triton, which a worker needs with its interpreter.
WITH_TRITON = "torch._dynamo compressed_tensors".split()
_IDLE_SECONDS = 3600  # an image outlives the pauses between its commands


def _import(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _with_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    _import(WITH_TRITON)


def _scheduler() -> None:
    _import(["lockstep_engines.vllm.engine", "lockstep_engines.vllm.adapter"])


def _worker(runner: str) -> None:
    from lockstep_engines.worker import device

    device.take_the_place_of_cuda(runner)
    _import(["lockstep_engines.worker.adapter"])
    for name in OF_WORKERS:
        with contextlib.suppress(ImportError):  # not of each release
            importlib.import_module(name)


IMAGES: dict[str, dict[str, Any]] = {
    "vllm": {
        "packages": lambda: None,
        "worker": _with_triton,
        "scheduler": _scheduler,
        "worker-v1": lambda: _worker("v1"),
        "worker-v2": lambda: _worker("v2"),
    },
    "sglang": {
        "packages": lambda: None,
        "scheduler": lambda: _import(["lockstep_engines.sglang.adapter"]),
    },
    "none": {"packages": lambda: None},  # of warm_python_test.py
}
# Imported by a worker when it starts.
OF_WORKERS = (
    "compressed_tensors vllm.model_executor.layers.quantization.online.base "
    "vllm.v1.attention.backends.gdn_attn vllm.v1.attention.backends.short_conv_attn "
    "vllm.v1.core.kv_cache_planning vllm.v1.executor.abstract vllm.v1.worker.gpu_model_runner "
    "vllm.v1.worker.gpu.model_states.default vllm.v1.worker.gpu_ubatch_wrapper".split()
)
# Tests that import vLLM's scheduler as `lockstep_engines ENGINE` does.
OF_SCHEDULER = frozenset(
    "vllm_reads vllm_calls vllm vllm_served vllm_connector vllm_hisparse vllm_shares sglang".split()
)


def images_of(arguments: list[str]) -> list[str]:
    """The images for a command, in order: the next one if the first is warm.TOO_WARM for it."""
    file, runner = Path(arguments[0]).stem.removesuffix("_test"), "v1"
    if file in OF_SCHEDULER:
        return ["scheduler"]
    if arguments[1:2] == ["serve"]:  # the engine process of a test file
        return ["scheduler" if file == "live_check" else f"worker-{arguments[2]}", "packages"]
    if any("vllm_kernels.py:" in one for one in arguments):  # a class on vLLM's kernels
        return ["worker-v1"]
    if arguments[:2] != ["-m", "lockstep_engines"] or {"--plants", "--layers"} & {*arguments}:
        return ["packages"]
    if not {"--worker", "--kernels", "--models"} & {*arguments}:
        return ["scheduler", "packages"]
    if "--runner" in arguments:
        runner = arguments[arguments.index("--runner") + 1]
    return [f"worker-{'v2' if '--kernels' in arguments else runner}", "worker"]


def ask(folder: str, arguments: list[str]) -> int:
    """Runs a command in a fork of its image; the exit status. FOLDER/python calls it."""
    os.environ["PYTHONHASHSEED"] = "0"  # as the image's
    status: int | None = None
    for image in images_of(arguments):
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(f"{folder}/{image}")
            status = warm.ask(server, arguments, None)
        if status != warm.TOO_WARM:
            break
    return 1 if status is None else status


def serve(engine: str, directory: str, folder: Path) -> None:
    """Images in FOLDER, each a child of this process, which has imported third-party packages."""
    interpreter, sys.executable = sys.executable, str(folder / "python")
    sys.path[:0] = [directory, str(PACKAGES)]
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if engine != "none":
        _import(THIRD_PARTY)
    for name, imports in IMAGES[engine].items():
        # A command waits until the image has imported.
        image = warm.Server(f"{folder}/{name}", _IDLE_SECONDS, is_warm=True)
        if os.fork() == 0:
            imports()
            count = len(os.listdir("/proc/self/task"))
            assert count == 1, f"the image {name} has {count} threads"
            plants.index_functions()
            for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                one.atexit = False  # torch's take 0.2 s at the exit of each fork
            gc.collect()
            gc.freeze()
            image.serve()
            os._exit(0)
        image.close()
    made = folder / "python"
    made.write_text(
        f"#!{interpreter} -SE\nimport sys\nsys.path[:] = [{str(HERE)!r}, *sys.path]\n"
        f"import warm_python\nsys.exit(warm_python.ask({str(folder)!r}, sys.argv[1:]))\n"
    )
    made.chmod(0o755)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
