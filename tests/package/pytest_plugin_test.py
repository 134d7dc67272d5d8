"""The pytest plugin, in sessions of pytest of its own: run with an interpreter that has pytest,
where one is here. The tests themselves are in plugin_sessions.py."""

from __future__ import annotations

import os
import subprocess
import sys

import support

HERE = support.ROOT / "tests" / "package"


def main() -> None:
    python = support.python_with("pytest")
    if python is None:
        support.skip("no python3 here can import pytest")
    path = [support.ROOT / "python", support.ROOT / "python" / "tests", HERE]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytester",
         "-p", "lockstep_pytest.plugin", HERE / "plugin_sessions.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)),
                          "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
