"""Sets up an engine for `lockstep ... --decisions` from the package index that pip uses.

    lockstep-set-up-engine vllm 0.33.0 FOLDER        # of the wheel
    python3 python/lockstep_engines/set_up.py vllm 0.33.0 FOLDER

Makes FOLDER/venv, with the packages that the imports of the engine need, and FOLDER/vllm-0.33.0,
with vLLM's Python sources, or FOLDER/sglang-0.5.23, with SGLang and the packages that only SGLang
imports: no GPU, no model, no compiled code of vLLM. The folder of a release appears last, so a
folder that exists is complete. Existing folders stay. The environment is made once; run again with
another release for one more folder. Settings of pip (its configuration, PIP_... variables) apply.
docs/engines.md says more.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import NoReturn

COMMAND = "lockstep-set-up-engine"
NEWEST = "0.33.0"
# Of the packages that a release requires, those that are imported on the way to its scheduler and
# its worker (numba: drafts).
_NEEDED = frozenset(
    """aiohttp apache-tvm-ffi blake3 cachetools cbor2 cloudpickle compressed-tensors depyf einops
    fastapi filelock gguf huggingface_hub ijson jsonschema lark llguidance msgspec numba numpy
    openai openai-harmony opentelemetry-api orjson oss-harmony partial-json-parser pillow
    prometheus_client protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq
    regex requests safetensors setproctitle setuptools six starlette tiktoken tokenizers torch tqdm
    transformers typing_extensions xgrammar""".split()
)
# Imported too, and required by way of others: of an extra (fastapi[standard]), which is left out,
# and of torch, whose builds for a CPU do without. The worker runs Triton's kernels interpreted;
# the cases of docs/upstream run under pytest.
_BY_OTHERS = ("uvloop", "triton", "pytest")
# SGLang imports these too; vLLM's environment stays without them.
_OF_SGLANG = ("ipython", "sentencepiece", "torchvision==0.29.*", "traitlets", "uvicorn")
_CHECKS = {
    "vllm": (
        "import lockstep_engines.vllm.adapter",
        "from lockstep_engines.worker import device; device.take_the_place_of_cuda('v1'); "
        "import lockstep_engines.worker.adapter, numba; from vllm import triton_utils; "
        "assert triton_utils.HAS_TRITON, 'vLLM does without Triton'",
    ),
    "sglang": ("import lockstep_engines.sglang.adapter",),
}


def needed() -> frozenset[str]:
    """Packages that the imports of vLLM need."""
    return _NEEDED.union(_BY_OTHERS)


def default_folder() -> Path:
    """The folder that `./run engines` fills and `./run test` searches."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LOCKSTEP_ENGINES") or Path(cache) / "lockstep" / "engines")


def _fail(reason: str) -> NoReturn:
    print(f"lockstep: {reason}", file=sys.stderr)
    sys.exit(2)


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command])
    if done.returncode:
        _fail(f"{command[0]} ended with status {done.returncode}; its output is above")


def _pip(python: Path, *words: str | Path, wanted: str) -> None:
    """Runs pip; two attempts of half a minute each decide whether an index is reachable."""
    command = [python, "-m", "pip", *words, "--retries", "1", "--timeout", "30"]
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        last = said[-1].removeprefix("ERROR: ") if said else f"status {done.returncode}"
        _fail(
            f"cannot set up {wanted}, because pip found no package index that has it ({last}); "
            "set PIP_INDEX_URL to one, or LOCKSTEP_ENGINES to a folder that is set up"
        )


def _make_environment(folder: Path) -> Path:
    """The interpreter of the virtual environment in `folder`, which is made if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            _fail(f"cannot make the environment {folder} ({error}); install python3-venv")
    return python


def _plain(name: str) -> str:
    """A package's name, normalised as an index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_in(metadata: str) -> list[str]:
    """The needed requirements of a package, without extras, as arguments of pip."""
    needed_names = {_plain(name) for name in _NEEDED}
    found = []
    for line in email.message_from_string(metadata).get_all("Requires-Dist", []):
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and _plain(name[0]) in needed_names and "extra ==" not in line:
            found.append(re.sub(r"\[.*?\]", "", line, count=1))
    return found


def unpack(engine: str, wheel: Path, folder: Path) -> list[str]:
    """Unpacks a wheel's sources and metadata into `folder`: without its version vLLM turns Triton
    off. Returns its needed requirements."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        is_whole = engine != "vllm"
        sources = [name for name in names if name.startswith(f"{engine}/")
                   and (is_whole or name.endswith(".py"))]  # fmt: skip
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        archive.extractall(folder, [*sources, metadata])
        return requirements_in(archive.read(metadata).decode())


def _requirements_of(sources: Path, engine: str) -> list[str]:
    """The needed requirements of sources that are already unpacked; empty: they are not."""
    metadata = next(sources.glob(f"{engine}-*.dist-info/METADATA"), None)
    return requirements_in(metadata.read_text()) if metadata else []


def _install(python: Path, requirements: list[str], wanted: str) -> None:
    """One environment serves all releases: it keeps the versions of the first one that was set
    up."""
    bare = [re.split(r"[ <>=!;~]", requirement)[0] for requirement in requirements]
    has_torch = not subprocess.run([python, "-c", "import torch"], capture_output=True).returncode
    chosen = bare if has_torch else requirements
    _pip(python, "install", "--quiet", *chosen, *_BY_OTHERS, wanted=wanted)


def _checks(engine: str, sources: Path) -> list[str]:
    """The code that an interpreter can run only if the engine is set up."""
    paths = [str(sources), str(Path(__file__).resolve().parents[1])]
    return [f"import sys; sys.path[:0] = {paths!r}; {check}" for check in _CHECKS[engine]]


def _check(python: Path, engine: str, sources: Path) -> None:
    for code in _checks(engine, sources):
        _run(python, "-c", code)


def _is_set_up(python: Path, engine: str, sources: Path) -> bool:
    return sources.exists() and all(
        subprocess.run([python, "-c", code], capture_output=True).returncode == 0
        for code in _checks(engine, sources)
    )


def _add_release(python: Path, engine: str, release: str, sources: Path) -> None:
    """Downloads the release next to its folder, completes the environment, and moves it there."""
    wanted = f"{engine} {release}"
    with tempfile.TemporaryDirectory(dir=sources.parent) as holder:
        _pip(python, "download", "--no-deps", "--only-binary", ":all:", "--dest", holder,
             f"{engine}=={release}", wanted=wanted)  # fmt: skip
        unpacked = Path(holder) / "sources"
        requirements = unpack(engine, next(Path(holder).glob("*.whl")), unpacked)
        _install(python, requirements, wanted)
        if engine == "sglang":
            _pip(python, "install", "--quiet", "--no-deps", "--target", unpacked, *_OF_SGLANG,
                 wanted=wanted)  # fmt: skip
        _check(python, engine, unpacked)
        unpacked.rename(sources)


def set_up(engine: str, release: str, folder: Path) -> None:
    sources = folder.absolute() / f"{engine}-{release}"
    if sources.exists() and not _requirements_of(sources, engine):
        _fail(f"found {sources}, which this script did not make; name another folder")
    python = _make_environment(folder.absolute() / "venv")
    if _is_set_up(python, engine, sources):
        pass  # nothing to download: no package index is needed
    elif sources.exists():
        _install(python, _requirements_of(sources, engine), f"{engine} {release}")
        _check(python, engine, sources)
    else:
        _add_release(python, engine, release, sources)
    options = shlex.join(("--decisions", f"{engine}:{sources}", "--engine-python", str(python)))
    print(f"ready: lockstep fuzz {options}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Set up an engine's sources and an environment for them"
    )
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("release", help="of vllm: 0.20.0 to 0.33.0; of sglang: 0.5.23")
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder(),
                        help="LOCKSTEP_ENGINES, else ~/.cache/lockstep/engines")  # fmt: skip
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # removes what is unpacked in part
    set_up(arguments.engine, arguments.release, arguments.folder)


if __name__ == "__main__":
    main()
