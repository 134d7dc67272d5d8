"""Sets up an engine for `lockstep ... --decisions` from the package index that pip uses.

    lockstep-set-up-engine vllm 0.33.0 FOLDER        # of the wheel
    python3 python/lockstep_engines/set_up.py vllm 0.33.0 FOLDER

Makes FOLDER/venv, with what the imports of vLLM's scheduler and worker need, and
FOLDER/vllm-0.33.0, with vLLM's Python sources: no compiled code, no GPU, no model. What exists
stays. Run again with another release for one more folder; the environment is made once. Settings of
pip (its configuration, PIP_... variables) hold. docs/engines.md says more.
"""

from __future__ import annotations

import argparse
import email
import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

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
# and of torch, whose builds for a CPU do without. The worker runs Triton's kernels interpreted.
_BY_OTHERS = ("uvloop", "triton")
_CHECKS = (
    "import lockstep_engines.vllm.adapter",
    "from lockstep_engines.worker import device; device.take_the_place_of_cuda('v1'); "
    "import lockstep_engines.worker.adapter, numba; from vllm import triton_utils; "
    "assert triton_utils.HAS_TRITON, 'vLLM does without Triton'",
)


def needed() -> frozenset[str]:
    """Packages that the imports of vLLM need."""
    return _NEEDED.union(_BY_OTHERS)


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command])
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}")


def _make_environment(folder: Path) -> Path:
    """The interpreter of the virtual environment in `folder`, which is made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python


def requirements_in(metadata: str) -> list[str]:
    """What of a package's requirements is needed, without extras, as pip takes them."""
    found = []
    for line in email.message_from_string(metadata).get_all("Requires-Dist", []):
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and name[0] in _NEEDED and "extra ==" not in line:
            found.append(re.sub(r"\[.*?\]", "", line, count=1))
    return found


def unpack(wheel: Path, folder: Path) -> list[str]:
    """Puts the Python sources of a wheel into `folder`, and its metadata: without its version vLLM
    turns Triton off. Returns what it requires of what is needed."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sources = [name for name in names if name.startswith("vllm/") and name.endswith(".py")]
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        archive.extractall(folder, [*sources, metadata])
        return requirements_in(archive.read(metadata).decode())


def _requirements_of(sources: Path) -> list[str]:
    """Of sources that were unpacked before; none: they were not."""
    metadata = next(sources.glob("*.dist-info/METADATA"), None)
    return requirements_in(metadata.read_text()) if metadata else []


def _download(python: Path, release: str, sources: Path) -> list[str]:
    """Unpacks the release; its requirements."""
    if sources.exists():
        sys.exit(f"found {sources}, which this script did not make; name another folder")
    with tempfile.TemporaryDirectory(dir=sources.parent) as holder:
        _run(python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest",
             holder, f"vllm=={release}")  # fmt: skip
        return unpack(next(Path(holder).glob("*.whl")), sources)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Set up vLLM's sources and an environment for them"
    )
    parser.add_argument("engine", choices=("vllm",))
    parser.add_argument("release", help="0.20.0 to 0.33.0")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sources = arguments.folder.absolute() / f"vllm-{arguments.release}"
    python = _make_environment(arguments.folder.absolute() / "venv")
    requirements = _requirements_of(sources) or _download(python, arguments.release, sources)
    # One environment serves all releases: the versions of the first that was set up stay.
    bare = [re.split(r"[ <>=!;~]", requirement)[0] for requirement in requirements]
    has_torch = not subprocess.run([python, "-c", "import torch"], capture_output=True).returncode
    wanted = bare if has_torch else requirements
    _run(python, "-m", "pip", "install", "--quiet", *wanted, *_BY_OTHERS)
    package = Path(__file__).resolve().parents[1]
    for check in _CHECKS:
        code = f"import sys; sys.path[:0] = [{str(sources)!r}, {str(package)!r}]; {check}"
        _run(python, "-c", code)
    options = shlex.join(("--decisions", f"vllm:{sources}", "--engine-python", str(python)))
    print(f"ready: lockstep fuzz {options}")


if __name__ == "__main__":
    main()
