"""Sets up an engine for `lockstep ... --decisions` from the package index that pip uses.

    python3 set_up_engine.py vllm 0.33.0 FOLDER

Makes FOLDER/venv, with what the imports of vLLM's scheduler and worker need, and
FOLDER/vllm-0.33.0, with vLLM's Python sources: no compiled code, no GPU, no model. Run again with
another release for one more folder; the environment is made once. Settings of pip (its
configuration, PIP_... variables) hold. docs/engines.md says more.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=("vllm",))
    parser.add_argument("release", help="0.20.0 to 0.33.0")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sources = arguments.folder / f"vllm-{arguments.release}"
    if sources.exists():
        sys.exit(f"found {sources}; remove it to set it up again")
    python = _make_environment(arguments.folder / "venv")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as holder:
        _run(python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest",
             holder, f"vllm=={arguments.release}")  # fmt: skip
        requirements = unpack(next(Path(holder).glob("*.whl")), sources)
    # One environment serves all releases: the versions of the first that was set up stay.
    bare = [re.split(r"[ <>=!;~]", requirement)[0] for requirement in requirements]
    has_torch = not subprocess.run([python, "-c", "import torch"], capture_output=True).returncode
    wanted = bare if has_torch else requirements
    _run(python, "-m", "pip", "install", "--quiet", *wanted, *_BY_OTHERS)
    package = Path(__file__).resolve().parent
    for check in _CHECKS:
        code = f"import sys; sys.path[:0] = [{str(sources)!r}, {str(package)!r}]; {check}"
        _run(python, "-c", code)
    print(f"ready: PYTHONPATH={package} {python} -m lockstep_engines vllm {sources}")


if __name__ == "__main__":
    main()
