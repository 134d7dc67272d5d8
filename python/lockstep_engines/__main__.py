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

from lockstep_engines import missing, plants, protocol, warm
from lockstep_engines.vllm import plants as vllm_plants
from lockstep_engines.worker import plants as worker_plants


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_engines", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("engine", choices=("vllm", "sglang"))
    add("folder", nargs="?", metavar="DIR", help="folder that contains ENGINE/ (installed one)")
    worker = "drive vLLM's worker on a CPU instead of its scheduler"
    add("--worker", action="store_true", help=worker)
    kernels = "run the worker's cache kernels one by one, each on N generated shapes"
    add("--kernels", type=int, metavar="N", help=kernels)
    models = "run tiny versions of vLLM's own models, with shared memory and alone (all models)"
    add("--models", nargs="*", metavar="NAME", help=models)
    layers = "write the model file of FOLDER/config.json to standard output"
    add("--layers", metavar="FOLDER", help=layers)
    add("--only", metavar="WORDS", help="with --kernels: only kernels with WORDS in their names")
    add("--runner", choices=("v1", "v2"), default="v1", help="worker: its model runner (v1)")
    add(
        "--states",
        choices=("mamba2", "short_conv", "gdn"),
        default="",
        help="worker: vLLM's kind of layer for a case's recurrent states (short_conv for one "
        "state, else mamba2)",
    )
    padding = "worker: pad batches to sizes of captured graphs, without graphs"
    add("--pad", action="store_true", help=padding)
    idle = "worker: run a dummy batch before each step, as an idle data parallel rank does"
    add("--idle", action="store_true", help=idle)
    warm_up = "worker: profile and warm up before the first step, as a server does"
    add("--warm-up", action="store_true", help=warm_up)
    kernel_blocks = "worker: largest block of attention (no limit); larger blocks are split"
    add("--kernel-blocks", type=int, default=0, metavar="TOKENS", help=kernel_blocks)
    apart = "worker: store K of all blocks before V in a tensor, as FlashAttention of 0.22.1 does"
    add("--pairs-apart", action="store_true", help=apart)
    lift = "worker: run what vLLM's configuration refuses on model runner V2"
    add("--lift-refusals", action="store_true", help=lift)
    add("--plant", metavar="NAME", action="append", help="plant a defect in the engine; repeatable")
    add("--plants", action="store_true", help="list the defects")
    return parser.parse_args()


def _fix_hash_seed() -> None:
    """Restarts with a fixed seed: the order of sets must not differ between runs."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _put_first(folder: Path, package: str) -> None:
    """Has `package` imported from `folder` without writing there: compiled modules, which save two
    thirds of the start, go to the user's cache."""
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
        sys.exit(f"found no defect {unknown[0]}; --plants lists the defects")
    try:
        plants.plant(*(named[name] for name in names))
    except plants.ImportedAlready:
        raise  # the client retries with a colder process (warm.TOO_WARM)
    except plants.PlantError as error:
        sys.exit(str(error))


def main() -> None:
    arguments = _parse()
    try:
        _run(arguments)
    except ImportError as error:
        folder = None if arguments.folder is None else str(arguments.folder)
        print(missing.reason(arguments.engine, folder, error), file=sys.stderr)
        sys.exit(missing.EXIT_STATUS)


def _run(arguments: argparse.Namespace) -> None:
    is_of_worker = arguments.worker or arguments.kernels or arguments.models is not None
    defects = worker_plants.PLANTS if is_of_worker else vllm_plants.PLANTS
    if arguments.plants:
        return _list_plants(defects)
    _fix_hash_seed()
    warm.hand_over()
    if arguments.folder is not None:
        _put_first(Path(arguments.folder).resolve(), arguments.engine)
    if arguments.plant is not None:
        _plant(arguments.plant, defects)
    if arguments.kernels:
        return _check_kernels(arguments)
    if arguments.models is not None:
        return _check_models(arguments)
    source, sink = protocol.own_pipe()
    if arguments.layers is not None:
        return _write_layers(arguments.layers, sink)
    if arguments.worker:
        return _serve_worker(arguments, source, sink)
    adapter = _adapter_of(arguments.engine)
    warm.list_imports()
    protocol.serve(protocol.SCHEDULER, adapter, source, sink)


def _check_kernels(arguments: argparse.Namespace) -> None:
    if arguments.engine != "vllm":
        sys.exit(f"found no kernels of {arguments.engine}; --kernels runs those of vllm")
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda("v2")
    logging.disable(logging.WARNING)  # vLLM warns of slow kernels
    from lockstep_engines.kernels import (
        attention,
        check,
        copies,
        offload,
        recurrences,
        rows,
        tables,
    )
    from lockstep_engines.vllm.engine import VERSION
    from lockstep_recorder.releases import version_key

    modules = (rows, tables, copies, offload, attention, recurrences)
    checks = [one for module in modules for one in module.CHECKS]
    if arguments.only is not None:
        checks = [one for one in checks if arguments.only in one.name]
        if not checks:
            sys.exit(f"found no kernel with {arguments.only!r} in its name")
    has_failed = False
    for result in check.run(checks, arguments.kernels, version_key(VERSION)):
        print(result.text(), end="", flush=True)
        has_failed |= bool(result.faults) and not result.finding
    sys.exit(1 if has_failed else 0)


def _write_layers(folder: str, sink: Any) -> None:
    """One line: the model file, or {"refused": why}."""
    from lockstep_engines.vllm import model_layers

    sink.write(json.dumps(model_layers.described(folder)).encode() + b"\n")
    sink.flush()


def _check_models(arguments: argparse.Namespace) -> None:
    if arguments.engine != "vllm":
        sys.exit(f"found no models of {arguments.engine}; --models runs those of vllm")
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda(arguments.runner)
    logging.disable(logging.WARNING)
    from lockstep_engines.worker import tiny_models
    from lockstep_engines.worker.tiny_model_zoo import ZOO

    if unknown := [name for name in arguments.models if name not in ZOO]:
        sys.exit(f"found no model {unknown[0]}; expected one of {', '.join(ZOO)}")
    has_failed = False
    for result in tiny_models.run(arguments.models, arguments.runner):
        print(f"  {result.name:<12}{result.text}", flush=True)
        has_failed |= result.has_failed
    sys.exit(1 if has_failed else 0)


def _serve_worker(arguments: argparse.Namespace, source: Any, sink: Any) -> None:
    if arguments.engine != "vllm":
        sys.exit(f"found no worker of {arguments.engine}; --worker drives that of vllm")
    from lockstep_engines.worker import device as worker_device

    worker_device.take_the_place_of_cuda(arguments.runner)
    from lockstep_engines.worker.adapter import Options, Worker

    options = Options(
        arguments.runner,
        arguments.states,
        arguments.pad,
        arguments.kernel_blocks,
        arguments.pairs_apart,
        arguments.idle,
        arguments.warm_up,
        arguments.lift_refusals,
    )
    worker = Worker(options)
    warm.list_imports()
    protocol.serve(protocol.WORKER, worker, source, sink)


def _adapter_of(engine: str) -> Any:
    """Imports the engine."""
    if engine == "sglang":
        from lockstep_engines.sglang.adapter import SglangAdapter

        return SglangAdapter()
    from lockstep_engines.vllm.adapter import VllmAdapter

    return VllmAdapter()


if __name__ == "__main__":
    main()
