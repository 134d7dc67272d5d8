"""python -m lockstep_engines ENGINE [DIR]: an engine's scheduler that decides for Lockstep.

DIR: a checkout or an unpacked source tree of the engine; without it, the installed one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lockstep_engines import plants, protocol, vllm_plants


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_engines", description=__doc__.split("\n")[0]
    )
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("folder", nargs="?", metavar="DIR", help="contains ENGINE/")
    parser.add_argument("--plant", metavar="NAME", help="plants a defect in the engine")
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


def _list_plants() -> None:
    for defect in vllm_plants.PLANTS:
        print(f"{defect.name:28} {defect.kind:12} {defect.what}")


def _plant(name: str) -> None:
    try:
        plants.plant(vllm_plants.named(name))
    except KeyError:
        sys.exit(f"found no defect {name}; --plants lists them")
    except plants.PlantError as error:
        sys.exit(str(error))


def main() -> None:
    arguments = _parse()
    if arguments.plants:
        return _list_plants()
    _fix_hash_seed()
    source, sink = protocol.own_pipe()
    if arguments.folder is not None:
        _put_first(Path(arguments.folder).resolve(), arguments.engine)
    if arguments.plant is not None:
        _plant(arguments.plant)
    protocol.serve(_adapter_of(arguments.engine), source, sink)


def _adapter_of(engine: str) -> Any:
    """Imports the engine."""
    if engine == "sglang":
        from lockstep_engines.sglang_adapter import SglangAdapter

        return SglangAdapter()
    from lockstep_engines.vllm_adapter import VllmAdapter

    return VllmAdapter()


if __name__ == "__main__":
    main()
