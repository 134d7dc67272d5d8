"""Instructions and registers of kernels for an H100 (sm_90), by nvcc and cuobjdump, within the
budgets below. Exit status 77: one of the two programs is missing. The second is in PATH, in the
package nvidia-cuda-cuobjdump, or named by $CUOBJDUMP.

A budget is what the compiler of CUDA 13.0 makes, and a tenth more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77
# Kernel: instructions of its longest loop with the widest loads, of all, and registers. Template
# arguments are lanes of a row, elements at once and DTypes (0: bf16, 3: e4m3, 5: int8), or Scaling
# of latent rows, or columns of a lane.
BUDGETS = {
    "page_fingerprint_kernel": (227, 1_150, 70),
    "quantise_rows_kernel<16, 8, 0, 3>": (162, 1_090, 44),
    "quantise_rows_kernel<16, 8, 0, 5>": (227, 1_160, 44),
    "write_groups_kernel<8, 0>": (712, 945, 43),
    "write_int4_rows_kernel<16, 8, true>": (152, 910, 38),
    "write_latent_rows_kernel<5, true>": (52, 800, 36),
    "write_latent_rows_kernel<6, true>": (52, 950, 41),
    "write_latent_rows_kernel<7, true>": (17, 850, 35),
    "write_parts_kernel<8, 0, 0, true>": (465, 735, 36),
    "write_parts_kernel<8, 0, 3, false>": (470, 735, 36),
    "split_attention_kernel<8, 1, 0, 4>": (1_755, 3_805, 106),
    "split_attention_kernel<8, 1, 3, 4>": (1_970, 4_025, 104),
    "split_attention_kernel<8, 2, 0, 4>": (1_885, 4_075, 128),
    "selective_state_kernel<4>": (1_075, 1_990, 88),
    "gated_delta_kernel<4>": (715, 1_620, 80),
    "hot_reads_kernel": (266, 800, 36),
}
COLUMNS = ("loop", "all", "registers")


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(SKIPPED)


def longest_loop(instructions: list[tuple[int, str]]) -> int:
    """Instructions of the longest loop with the widest loads; 0: no loop loads or stores."""
    longest = (0, 0)
    for address, text in instructions:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            body = [one for at, one in instructions if int(target[1], 16) <= at <= address]
            moves = [one for one in body if re.search(r"\b(LD|LDG|ST|STG)\.", one)]
            if moves:
                longest = max(longest, (any(".128" in one for one in moves), len(body)))
    return longest[1]


def measured(cubin: Path, cuobjdump: str) -> dict[str, tuple[int, int, int]]:
    def say(option: str) -> str:
        command = [cuobjdump, option, cubin]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout + done.stderr

    registers = dict(re.findall(r"Function (\w+):\s+REG:(\d+)", say("-res-usage")))
    found = {}
    for part in say("-sass").split("Function : ")[1:]:
        name = part.split()[0]
        rows = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S.*?);", part, re.MULTILINE)
        instructions = [(int(address, 16), text) for address, text in rows]
        found[name] = (longest_loop(instructions), len(instructions), int(registers[name]))
    return found


def readable(mangled: str) -> str:
    """The kernel and its template arguments, as BUDGETS names it."""
    name = re.search(r"simt_cuda(\d+)(\w+)", mangled)
    kernel = name[2][: int(name[1])]
    arguments = [
        {"b": {"0": "false", "1": "true"}}.get(kind, {}).get(value, value)
        for kind, value in re.findall(r"L(i|b|NS\d_\d+ScalingE)(n?\d+)E", name[2][int(name[1]) :])
    ]
    return f"{kernel}<{', '.join(arguments)}>" if arguments else kernel


def main() -> None:
    nvcc = shutil.which("nvcc") or skip("nvcc is not in PATH")
    packages = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/cuobjdump")
    cuobjdump = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump") or next(packages, None)
    if not cuobjdump:
        skip("cuobjdump is not in PATH; python3 -m pip install nvidia-cuda-cuobjdump has it")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        subprocess.run(
            [nvcc, "-std=c++20", "-O3", "-arch=sm_90", "-cubin", "-x", "cu", "-fmad=false",
             "-I", ROOT, ROOT / "cuda_backend/launch/launchers.cpp", "-o", cubin],
            check=True,
        )  # fmt: skip
        found = {readable(k): v for k, v in measured(cubin, cuobjdump).items()}
    failed = False
    for kernel, budget in BUDGETS.items():
        if kernel not in found:
            sys.exit(f"found no kernel {kernel}; known are {', '.join(sorted(found))}")
        for column, is_now, at_most in zip(COLUMNS, found[kernel], budget, strict=True):
            failed |= is_now > at_most
            print(f"{kernel:38}{column:>10}{is_now:>7} of {at_most}")
    sys.exit("a kernel exceeds its budget" if failed else 0)


if __name__ == "__main__":
    main()
