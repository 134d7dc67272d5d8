"""A Python that has imported an engine already: each of its commands is a fork. Tests of engines
start hundreds of processes, and most of their time is imports.

    python warm_python.py ENGINE DIR FOLDER         # makes FOLDER/python; ends with FOLDER
    FOLDER/python -m lockstep_engines vllm DIR ...  # as the interpreter that runs the server

FOLDER/python passes its command to an image, a server (lockstep_engines/warm.py) that has imported
what such a command imports, the engine too. The images `packages` and `worker` have imported no
module of the engine: for commands that plant a defect in one, and for those that no other image
serves.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1]
sys.path.insert(0, str(PACKAGES))

from lockstep_engines import warm

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
# Tests that import vLLM's scheduler as `lockstep_engines ENGINE` does.
OF_SCHEDULER = frozenset(
    "vllm_reads vllm_calls vllm vllm_served vllm_connector vllm_hisparse vllm_shares sglang".split()
)


def image_of(arguments: list[str]) -> str:
    """The image for a command's arguments."""
    if Path(arguments[0]).stem.removesuffix("_test") in OF_SCHEDULER:
        return "scheduler"
    if arguments[:2] != ["-m", "lockstep_engines"] or {"--plants", "--layers"} & {*arguments}:
        return "packages"
    if {"--kernels", "--models"} & {*arguments} or {"--worker", "--plant"} <= {*arguments}:
        return "worker"
    if "--worker" in arguments:
        runner = arguments[arguments.index("--runner") + 1] if "--runner" in arguments else "v1"
        return f"worker-{runner}"
    return "packages" if "--plant" in arguments else "scheduler"


def ask(folder: str, arguments: list[str]) -> int:
    """Runs a command in a fork of its image; the exit status. FOLDER/python calls it."""
    os.environ["PYTHONHASHSEED"] = "0"  # as the image's
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}/{image_of(arguments)}")
        status = warm.ask(server, arguments, None)
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
