"""The tests that need a real engine, in forks of one process that has imported it (warm_python.py).

    python3 run_engine_tests.py vllm-0.33.0|vllm-0.22.1|sglang-0.5.23 [FILE...]

The engine is that of `./run engines` ($LOCKSTEP_ENGINES moves its folder); without it, exit status
77 says skipped. $LOCKSTEP is the `lockstep` command, $LOCKSTEP_DATA the folder of further
recordings. Lines that begin with "not checked:" name the tests that were skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(TESTS.parent))

from lockstep_engines import set_up

SKIPPED = 77
FILES = {
    "vllm": "vllm vllm_reads vllm_calls vllm_served vllm_connector vllm_hisparse vllm_shares "
    "vllm_offload engines/vllm_ranks plans/vllm_plans plans/vllm_models adapter planted_defects "
    "live_check page_check findings engines/programs engines/gauge worker worker_kinds "
    "worker_kernels worker_models ../../tests/upstream/cases "
    "../../tests/engines/example_kernels ../../tests/engines/kernels_on_gpu",
    "sglang": "sglang engines/gauge",
}


@contextmanager
def warm_python(
    python: Path, engine: str, sources: Path, environment: dict[str, str]
) -> Iterator[Path]:
    """The interpreter whose commands are forks."""
    with tempfile.TemporaryDirectory(prefix="lockstep_warm_") as folder:
        said = Path(folder) / "errors"
        with said.open("w") as errors:
            command = [python, HERE / "warm_python.py", engine, sources, folder]
            made = subprocess.run(command, stderr=errors, env=environment)
        try:
            if made.returncode:
                sys.exit(f"{python} does not import what {engine} needs")
            yield Path(folder) / "python"
        finally:  # an image that could not import is named
            text = said.read_text()
            print(text[text.index("Traceback") :] if "Traceback" in text else "", end="")


def environment_of(python: Path, sources: Path) -> dict[str, str]:
    data = Path(os.environ.get("LOCKSTEP_DATA") or ROOT.parent / "shared")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    removed = ("VIRTUAL_ENV", "LOCKSTEP_PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return kept | {
        "LOCKSTEP": os.path.abspath(os.environ.get("LOCKSTEP", "lockstep")),
        "LOCKSTEP_DATA": str(data) if data.is_dir() else "",
        "LOCKSTEP_ENGINE": f"{sources.name.partition('-')[0]}:{sources}",
        "LOCKSTEP_PYTHON": str(python),
        "LOCKSTEP_VLLM": str(sources) if sources.name.startswith("vllm") else "",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": f"{TESTS.parent}:{sources}",
        "PYTHONPYCACHEPREFIX": str(Path(cache) / "lockstep_engines" / "pycache"),
        "VLLM_CONFIGURE_LOGGING": "0",
    }


def run_file(python: Path, name: str, environment: dict[str, str]) -> bool:
    """Runs one file of tests; true if it passed, or said that it was skipped."""
    start = time.monotonic()
    done = subprocess.run(
        [python, f"{name}_test.py", "-v"],
        cwd=TESTS,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    word = {0: "passed", SKIPPED: "skipped"}.get(done.returncode, "FAILED")
    count = sum(map(int, re.findall(r"^Ran (\d+) tests?", done.stdout, re.MULTILINE)))
    print(f"{word} {name}: {count} tests, {time.monotonic() - start:.0f} s", flush=True)
    print(*re.findall(r"^\|.*\|$", done.stdout, re.MULTILINE), sep="\n", flush=True)
    if word == "FAILED":
        print(done.stdout, flush=True)
    for skipped in re.findall(r"^(test_\w+ .*?) \.\.\. skipped (.*)$", done.stdout, re.MULTILINE):
        print(f"not checked: {name}: {skipped[0].split()[0]} ({skipped[1].strip(chr(39))})")
    if word == "skipped":
        reason = re.search(r"^SKIPPED: (.*)$|^(skipped: .*)$", done.stdout, re.MULTILINE)
        print(f"not checked: {name}: {reason[0] if reason else done.stdout.strip()[-200:]}")
    return word != "FAILED"


def main() -> int:
    name, *files = sys.argv[1:]
    engine = name.partition("-")[0]
    folder = set_up.default_folder()
    sources, python = folder / name, folder / "venv" / "bin" / "python"
    if not (sources.is_dir() and python.exists()):
        print(f"SKIPPED: {folder} has no {name}; `./run engines` sets it up")
        return SKIPPED
    environment = environment_of(python, sources)
    if not os.access(environment["LOCKSTEP"], os.X_OK):
        sys.exit(f"$LOCKSTEP names no command: {environment['LOCKSTEP']}")
    failed = []
    with warm_python(python, engine, sources, environment) as warm:
        environment["LOCKSTEP_PYTHON"] = str(warm)
        for file in files or FILES[engine].split():
            if not run_file(warm, file, environment):
                failed.append(file)
    if failed:
        print(f"{name}: FAILED in {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
