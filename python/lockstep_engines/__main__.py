"""python -m lockstep_engines ENGINE [DIR]: an engine's scheduler that decides for Lockstep.

DIR: a checkout or an unpacked source tree of the engine; without it, the installed one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from lockstep_engines import plants, protocol
from lockstep_engines.vllm import plants as vllm_plants
from lockstep_engines.worker import plants as worker_plants


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_engines", description=__doc__.split("\n")[0]
    )
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("folder", nargs="?", metavar="DIR", help="contains ENGINE/")
    parser.add_argument(
        "--worker", action="store_true", help="its worker, on a CPU, in place of its scheduler"
    )
    parser.add_argument(
        "--kernels",
        type=int,
        metavar="N",
        help="runs the worker's kernels for the cache one by one, on N drawn shapes each, and ends",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help="runs vLLM's own models, tiny, in shared memory and alone, and ends; none named: all",
    )
    parser.add_argument(
        "--layers",
        metavar="FOLDER",
        help="writes the model file of the folder's config.json to standard output, and ends",
    )
    parser.add_argument("--only", metavar="WORDS", help="of --kernels: those whose name has them")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1", help="of the worker")
    parser.add_argument(
        "--states",
        choices=("mamba2", "short_conv", "gdn"),
        default="",
        help="of the worker: vLLM's kind of layer that keeps a case's states; left out: short_conv "
        "where there is one, else mamba2",
    )
    parser.add_argument(
        "--pad",
        action="store_true",
        help="of the worker: batches are padded to sizes of captured graphs, and run without them",
    )
    parser.add_argument(
        "--idle",
        action="store_true",
        help="of the worker: a dummy batch before each step, as of an idle data parallel rank",
    )
    parser.add_argument(
        "--warm-up",
        action="store_true",
        help="of the worker: profiles and warms up before the first step, as before it serves",
    )
    parser.add_argument(
        "--lift-refusals",
        action="store_true",
        help="of the worker: runs what vLLM's configuration says its runner V2 does not take",
    )
    parser.add_argument(
        "--plant", metavar="NAME", action="append", help="plants a defect in the engine; any number"
    )
    parser.add_argument("--plants", action="store_true", help="lists the defects and ends")
    return parser.parse_args()


def _fix_hash_seed() -> None:
    """Sets of names decide the order of some things: runs must not differ by it."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _put_first(folder: Path, package: str) -> None:
    """Has `package` imported from `folder`, in which nothing is written: compiled modules, which
    make up two thirds of the start, are kept in the user's cache."""
    if not (folder / package / "__init__.py").is_file():
        sys.exit(f"found no {package}/__init__.py in {folder}")
    sys.path.insert(0, str(folder))
    if sys.pycache_prefix is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        sys.pycache_prefix = str(Path(cache) / "lockstep_engines" / "pycache")
        sys.dont_write_bytecode = False


def _list_plants(defects: Any) -> None:
    for defect in defects:
        print(f"{defect.name:28} {defect.kind:12} {defect.what}")


def _plant(names: list[str], defects: Any) -> None:
    named = {defect.name: defect for defect in defects}
    if unknown := [name for name in names if name not in named]:
        sys.exit(f"found no defect {unknown[0]}; --plants lists them")
    try:
        plants.plant(*(named[name] for name in names))
    except plants.PlantError as error:
        sys.exit(str(error))


def main() -> None:
    arguments = _parse()
    ends = bool(arguments.kernels) or arguments.models is not None
    is_of_worker = arguments.worker or ends
    defects = worker_plants.PLANTS if is_of_worker else vllm_plants.PLANTS
    if arguments.plants:
        return _list_plants(defects)
    _fix_hash_seed()
    source, sink = (None, None) if ends else protocol.own_pipe()
    if arguments.folder is not None:
        _put_first(Path(arguments.folder).resolve(), arguments.engine)
    if arguments.plant is not None:
        _plant(arguments.plant, defects)
    if arguments.layers is not None:
        return _write_layers(arguments.layers, sink)
    if arguments.kernels:
        return _check_kernels(arguments)
    if arguments.models is not None:
        return _check_models(arguments)
    if arguments.worker:
        return _serve_worker(arguments, source, sink)
    protocol.serve(protocol.SCHEDULER, _adapter_of(arguments.engine), source, sink)


def _check_kernels(arguments: argparse.Namespace) -> None:
    if arguments.engine != "vllm":
        sys.exit(f"found no kernels of {arguments.engine}; there are some of vllm")
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda("v2")
    logging.disable(logging.WARNING)  # of what would be slow
    from lockstep_engines.kernels import attention as kernels_of_attention
    from lockstep_engines.kernels import check as kernel_check
    from lockstep_engines.kernels import copies as kernels_of_copies
    from lockstep_engines.kernels import recurrences as kernels_of_recurrences
    from lockstep_engines.kernels import rows as kernels_of_rows
    from lockstep_engines.kernels import tables as kernels_of_tables

    rooms = (
        kernels_of_rows,
        kernels_of_tables,
        kernels_of_copies,
        kernels_of_attention,
        kernels_of_recurrences,
    )
    checks = [check for room in rooms for check in room.CHECKS]
    if arguments.only is not None:
        checks = [check for check in checks if arguments.only in check.name]
        if not checks:
            sys.exit(f"found no kernel whose name has {arguments.only!r}")
    has_failed = False
    for result in kernel_check.run(checks, arguments.kernels):
        print(result.text(), end="", flush=True)
        has_failed |= bool(result.faults)
    sys.exit(1 if has_failed else 0)


def _write_layers(folder: str, sink: Any) -> None:
    """One line: the model file, or {"refused": why}."""
    from lockstep_engines.vllm import model_layers

    sink.write(json.dumps(model_layers.described(folder)).encode() + b"\n")
    sink.flush()


def _check_models(arguments: argparse.Namespace) -> None:
    if arguments.engine != "vllm":
        sys.exit(f"found no models of {arguments.engine}; there are some of vllm")
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda(arguments.runner)
    logging.disable(logging.WARNING)
    from lockstep_engines.worker import tiny_model_zoo as worker_model_zoo
    from lockstep_engines.worker import tiny_models as worker_models

    if unknown := [name for name in arguments.models if name not in worker_model_zoo.ZOO]:
        sys.exit(f"found no model {unknown[0]}; there are {', '.join(worker_model_zoo.ZOO)}")
    has_failed = False
    for result in worker_models.run(arguments.models, arguments.runner):
        print(f"  {result.name:<12}{result.text}", flush=True)
        has_failed |= result.has_failed
    sys.exit(1 if has_failed else 0)


def _serve_worker(arguments: argparse.Namespace, source: Any, sink: Any) -> None:
    if arguments.engine != "vllm":
        sys.exit(f"found no worker of {arguments.engine}; there is one of vllm")
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda(arguments.runner)
    from lockstep_engines.worker.adapter import Options, Worker

    options = Options(
        arguments.runner,
        arguments.states,
        arguments.pad,
        arguments.idle,
        arguments.warm_up,
        arguments.lift_refusals,
    )
    protocol.serve(protocol.WORKER, Worker(options), source, sink)


def _adapter_of(engine: str) -> Any:
    """Imports the engine."""
    if engine == "sglang":
        from lockstep_engines.sglang.adapter import SglangAdapter

        return SglangAdapter()
    from lockstep_engines.vllm.adapter import VllmAdapter

    return VllmAdapter()


if __name__ == "__main__":
    main()
