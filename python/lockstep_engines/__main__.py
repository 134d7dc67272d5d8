"""python -m lockstep_engines ENGINE [DIR]: an engine's scheduler that decides for Lockstep.

DIR: a checkout or an unpacked source tree of the engine; without it, the installed one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_engines", description=__doc__.split("\n")[0]
    )
    parser.add_argument("engine", choices=("vllm",))
    parser.add_argument("folder", nargs="?", metavar="DIR", help="contains vllm/")
    return parser.parse_args()


def _fix_hash_seed() -> None:
    """Sets of names decide the order of some things: runs must not differ by it."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> None:
    arguments = _parse()
    _fix_hash_seed()
    from lockstep_engines import protocol

    source, sink = protocol.own_pipe()
    if arguments.folder is not None:
        folder = Path(arguments.folder).resolve()
        if not (folder / arguments.engine / "__init__.py").is_file():
            sys.exit(f"found no {arguments.engine}/__init__.py in {folder}")
        sys.path.insert(0, str(folder))
    from lockstep_engines.vllm_adapter import VllmAdapter

    protocol.serve(VllmAdapter(), source, sink)


if __name__ == "__main__":
    main()
