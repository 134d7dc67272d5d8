"""Engines that are forks of one process: lockstep_engines/warm.py under a small package."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
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
        shutil.rmtree(self.folder)  # the servers end

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
        for expected in (2, 2, 2):  # the first engine and the server
            self.assertEqual(self.run_one("exit", "0")[0], 0)
            for _ in range(200):
                if self.imports() >= expected:
                    break
                time.sleep(0.05)
            self.assertEqual(self.imports(), expected)

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
        for _ in range(200):
            if not is_alive(engine):
                return
            time.sleep(0.05)
        self.fail("the engine outlives its client")

    def test_without_a_server_an_engine_starts_by_itself(self) -> None:
        status, out, _ = self.run_one("exit", "3", LOCKSTEP_WARM_ENGINES="/proc/nowhere")
        self.assertEqual((status, out.split()[3]), (3, "hello"))


if __name__ == "__main__":
    unittest.main()
