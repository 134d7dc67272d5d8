"""Engines that are forks of one process: lockstep_engines/warm.py under a small package."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lockstep_engines"

# An engine: it imports a library, and does what its first argument says.
ENGINE = """
import os, sys, time
from lockstep_engines import warm
warm.hand_over()
import library
warm.list_imports()
print(os.getpid(), os.environ.get("WORD"), os.getcwd(), sys.stdin.readline().strip(), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
if sys.argv[1] == "die":
    os.kill(os.getpid(), 11)
sys.exit("a reason" if sys.argv[1] == "refuse" else int(sys.argv[2]))
"""
LIBRARY = """
import os
with open(os.environ["LOG"], "a") as log:
    log.write(f"{os.getpid()}\\n")
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


class WarmEngines(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        package = self.folder / "lockstep_engines"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(ENGINE)
        (self.folder / "library.py").write_text(LIBRARY)
        for name in ("warm.py", "plants.py"):
            shutil.copy(PACKAGE / name, package)
        self.log = self.folder / "log"
        self.environ = os.environ | {
            "PYTHONPATH": str(self.folder),
            "LOG": str(self.log),
            "LOCKSTEP_WARM_ENGINES": str(self.folder / "warm"),
        }

    def tearDown(self) -> None:
        shutil.rmtree(self.folder / "warm", ignore_errors=True)
        # A server that still imports the library writes its bytecode and the log.
        self.wait_until(lambda: not self.servers(), "a server outlives its socket")
        shutil.rmtree(self.folder)

    def servers(self) -> list[Path]:
        """Processes that name the folder in their command line."""
        lines = []
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                if str(self.folder / "warm").encode() in line.read_bytes():
                    lines.append(line)
        return lines

    def wait_until(self, is_true: Callable[[], bool], otherwise: str) -> None:
        for _ in range(200):
            if is_true():
                return
            time.sleep(0.05)
        self.fail(otherwise)

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep_engines", *words],
            env=self.environ | environ,
            cwd=self.folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run_one(self, *words: str, **environ: str) -> tuple[int, str, str]:
        process = self.start(*words, **environ)
        out, err = process.communicate("hello\n", timeout=60)
        return process.returncode, out, err

    def imports(self) -> int:
        return len(self.log.read_text().splitlines())

    def test_streams_directory_environment_and_status_are_the_clients(self) -> None:
        for _ in range(3):
            status, out, err = self.run_one("exit", "7", WORD="one")
            self.assertEqual((status, out.split()[1:], err), (7, ["one", str(self.folder), "hello"],
                                                              ""))  # fmt: skip
        status, _, err = self.run_one("refuse", WORD="one")
        self.assertEqual((status, err), (1, "a reason\n"))
        self.assertEqual(self.run_one("die", WORD="one")[0], 128 + signal.SIGSEGV)

    def test_later_engines_do_not_import_what_the_first_imported(self) -> None:
        for _ in range(3):  # only the first engine and the server import
            self.assertEqual(self.run_one("exit", "0")[0], 0)
            self.wait_until(lambda: self.imports() >= 2, "the server does not import")
            self.assertEqual(self.imports(), 2)

    def test_another_environment_has_another_server(self) -> None:
        self.run_one("exit", "0", WORD="one")
        self.run_one("exit", "0", WORD="two")
        self.assertEqual(len(list((self.folder / "warm").glob("*.lock"))), 2)

    def test_an_engine_ends_with_its_client(self) -> None:
        process = self.start("wait")
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        engine = int(process.stdout.readline().split()[0])
        self.assertNotEqual(engine, process.pid)
        self.assertTrue(is_alive(engine))
        process.kill()
        process.communicate()
        self.wait_until(lambda: not is_alive(engine), "the engine outlives its client")

    def test_without_a_server_an_engine_starts_by_itself(self) -> None:
        status, out, _ = self.run_one("exit", "3", LOCKSTEP_WARM_ENGINES="/proc/nowhere")
        self.assertEqual((status, out.split()[3]), (3, "hello"))


if __name__ == "__main__":
    unittest.main()
