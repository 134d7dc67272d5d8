"""Commands of a warm Python (warm_python.py) are processes like any other; no engine needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import run_engine_tests


class WarmPythonTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        environment = dict(os.environ, PYTHONHASHSEED="0")
        started = run_engine_tests.warm_python(Path(sys.executable), "none", Path(), environment)
        cls.python = started.__enter__()
        cls.addClassCleanup(started.__exit__, None, None, None)

    def run_code(
        self, code: str, *arguments: str, **options: object
    ) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore

    def test_a_command_has_its_arguments_environment_folder_and_streams(self) -> None:
        code = "import os, sys; print(sys.argv[1:], os.environ['A'], os.getcwd(), input())"
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_code(code, "x", env={"A": "b"}, cwd=folder, input="read\n")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(done.stdout, f"['x'] b {os.path.realpath(folder)} read\n")

    def test_a_command_ends_with_the_status_of_its_fork(self) -> None:
        self.assertEqual(self.run_code("import sys; sys.exit(3)").returncode, 3)
        self.assertEqual(self.run_code("import os; os.kill(os.getpid(), 9)").returncode, 137)
        for code, said in (
            ("import sys; sys.exit('why')", "why\n"),
            ("1 / 0", "ZeroDivisionError"),
        ):
            done = self.run_code(code)
            self.assertEqual(done.returncode, 1)
            self.assertIn(said, done.stderr)

    def test_what_one_command_changes_another_does_not_see(self) -> None:
        self.run_code("import os, sys; os.chdir('/'); os.environ['A'] = '1'; sys.path.append('x')")
        done = self.run_code("import os, sys; print(os.environ.get('A'), 'x' in sys.path)")
        self.assertEqual(done.stdout, "None False\n")

    def test_the_fork_of_a_killed_command_ends(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
            words = [self.python, "-c", code]
            command = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=folder)
            assert command.stdout is not None
            fork = int(command.stdout.readline())
            command.send_signal(signal.SIGKILL)
            self.assertEqual(command.stdout.read(), b"")  # its end is the fork's end
            command.stdout.close()
            command.wait()
            end = time.monotonic() + 10
            while Path(f"/proc/{fork}").exists() and time.monotonic() < end:
                time.sleep(0.01)
            self.assertFalse(Path(f"/proc/{fork}").exists())


if __name__ == "__main__":
    unittest.main()
