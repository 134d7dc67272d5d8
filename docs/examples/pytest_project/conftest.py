"""A project of three files whose kernel and scheduler are tested by lockstep in pytest: this one,
kernels.cpp (of ../cmake_project) and paged_engine.py (of ..).

    pytest                    # the kernel in six layouts, the scheduler on forty generated cases
    pytest --bug=kernel       # with a planted defect each: both are found
    pytest --bug=scheduler
"""

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = Path(sysconfig.get_path("data")) / "include"  # the wheel's <lockstep/plugin.h>


def pytest_addoption(parser):
    parser.addoption("--bug", choices=("kernel", "scheduler"), help="plant a defect")
    parser.addoption("--include", default=str(INCLUDE), help="where lockstep/plugin.h is")


def pytest_configure(config):
    option = config.option
    library = HERE / "kernels.so"
    planted = ["-DMY_BUG"] if option.bug == "kernel" else []
    subprocess.run(["c++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{option.include}", *planted,
                    str(HERE / "kernels.cpp"), "-o", str(library)], check=True)  # fmt: skip
    engine = [sys.executable, str(HERE / "paged_engine.py")]
    engine += ["--bug", "lost"] if option.bug == "scheduler" else []
    option.lockstep_layouts, option.lockstep_backend = "0:6", str(library)
    option.lockstep_seeds, option.lockstep_decisions = "1:41", shlex.join(engine)
