"""One line for an engine that cannot be imported: what is missing, and the command for it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from lockstep_engines import set_up

EXIT_STATUS = 78  # EX_CONFIG; docs/protocols.md
_PIP_MAX = 6  # packages; an environment that lacks more is no environment for the engine

# Packages that are imported by another name than they are installed by.
_IMPORTED_AS = {
    "apache-tvm-ffi": "tvm_ffi",
    "opentelemetry-api": "opentelemetry",
    "oss-harmony": "openai_harmony",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
    "py-cpuinfo": "cpuinfo",
    "python-json-logger": "pythonjsonlogger",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}


def _module_of(package: str) -> str:
    return _IMPORTED_AS.get(package, package.replace("-", "_"))


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except (ImportError, ValueError):  # a parent that is missing; a module that is half imported
        return True


def _missing_packages(engine: str, module: str) -> list[str]:
    """With that of `module`, which was not found, all others that vLLM needs."""
    if engine != "vllm":
        return [module]
    found = [name for name in sorted(set_up.needed()) if _is_missing(_module_of(name))]
    return found if any(_module_of(name) == module for name in found) else [module, *found]


def _set_up_command(engine: str, folder: str | None) -> tuple[str, str]:
    """The command that makes an environment, and the interpreter of that."""
    release = re.fullmatch(rf"{engine}-(\d+\.\d+\.\d+)", Path(folder or "").name)
    at = str(Path(folder or "").resolve().parent) if release else "engines"
    beside = Path(sys.executable).with_name(set_up.COMMAND)
    found = str(beside) if beside.exists() else shutil.which(set_up.COMMAND)
    words = [found] if found else [sys.executable, set_up.__file__]
    words += [engine, release[1] if release else set_up.NEWEST, at]
    return shlex.join(words), shlex.quote(f"{at}/venv/bin/python")


def reason(engine: str, folder: str | None, error: ImportError) -> str:
    """Of an import of the engine from `folder` (None: the installed one) that failed."""
    python = shlex.quote(sys.executable)
    module = (error.name or "").partition(".")[0]
    is_absent = isinstance(error, ModuleNotFoundError) and _is_missing(module)
    pip = f"{python} -m pip install"
    if is_absent and module == engine:
        return (
            f"{engine} is not installed for {python}; run `{pip} {engine}`, or name its sources "
            f"({engine}:DIR) or another interpreter (--engine-python)"
        )
    packages = _missing_packages(engine, module) if is_absent else []
    what = f"needs {', '.join(packages)}, which {python} does not have"
    if not is_absent:
        what = f"cannot be imported by {python} ({str(error).splitlines()[0]})"
    elif len(packages) > _PIP_MAX:
        what = f"needs {module} and {len(packages) - 1} more packages that {python} does not have"
    if is_absent and (len(packages) <= _PIP_MAX or engine != "vllm"):
        return f"{engine} {what}; run `{pip} {shlex.join(packages)}`"
    command, interpreter = _set_up_command(engine, folder)
    if Path(interpreter.strip("'")).exists():
        return f"{engine} {what}; add `--engine-python {interpreter}`"
    return f"{engine} {what}; run `{command}` and add `--engine-python {interpreter}`"
