"""`lockstep campaign` over processes of this machine; over Ray: ray_test.py."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PYTHON))

LOCKSTEP = os.environ.get("LOCKSTEP", "")
SKIPPED = 77


def children_of(parent: int) -> list[tuple[int, str]]:
    """Its processes, and theirs, with their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append((int(folder.name), words))
            found += children_of(int(folder.name))
    return found


def lockstep(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LOCKSTEP, *map(str, words)], capture_output=True, text=True)


def without_time(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("  time "))


class Campaign(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out = self.folder / "out"

    def start(self, *words: str) -> "subprocess.Popen[str]":
        command = [LOCKSTEP, "campaign", "--out", str(self.out), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def campaign(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate()
        return process.returncode, out, err

    def test_a_campaign_that_loses_a_worker_reports_as_one_process(self) -> None:
        runs = ("fuzz", "--backend", "none", "--runs", "1600", "--seed", "3")
        whole = self.folder / "whole.json"
        one = lockstep(*runs, "--json", whole)
        process = self.start("--workers", "2", "--shard-cases", "400", "--canary", "", *runs)
        killed = ""
        while process.poll() is None and not killed:
            for pid, words in children_of(process.pid):
                if "--seed 403 --runs 400" in words and "campaign" not in words:
                    os.kill(pid, signal.SIGKILL)
                    killed = words
            time.sleep(0.005)
        out, err = process.communicate()
        self.assertTrue(killed)
        self.assertIn("seeds 403 to 802 runs again: ended by signal 9", err)
        self.assertEqual((process.returncode, out), (one.returncode, without_time(one.stdout)))
        self.assertEqual((self.out / "report.json").read_bytes(), whole.read_bytes())
        self.assertEqual((self.out / "report.txt").read_text(), out)

    def test_failures_are_reported_as_by_one_process(self) -> None:
        runs = ("fuzz", "--backend", "none", "--runs", "90", "--mutant", "hash-stale")
        whole = self.folder / "whole.json"
        one = lockstep(*runs, "--json", whole)
        status, out, err = self.campaign("--shard-cases", "20", *runs)
        self.assertEqual((status, out), (1, without_time(one.stdout)), err)
        self.assertEqual((self.out / "report.json").read_bytes(), whole.read_bytes())
        self.assertIn("new bucket: audit.attention_read", err)

    def test_a_canary_that_is_not_found_fails_the_campaign(self) -> None:
        runs = ("fuzz", "--backend", "none", "--runs", "20")
        status, _, err = self.campaign("--canary", "--check fast", *runs)
        self.assertEqual(status, 1)
        self.assertIn("the canary is not found", err)
        status, _, err = self.campaign("--canary", "--mutant no-such-defect", *runs)
        self.assertEqual(status, 2)
        self.assertIn("no-such-defect", err)

    def test_a_budget_ends_a_campaign_of_new_seeds(self) -> None:
        status, out, err = self.campaign("--budget", "1s", "fuzz", "--backend", "none")
        self.assertEqual(status, 0, err)
        self.assertIn(f'"first_seed":{time.strftime("%Y%m%d")}00000000,',
                      (self.out / "report.json").read_text())  # fmt: skip

    def test_what_a_campaign_cannot_run_is_refused(self) -> None:
        for words, why in (
            (("fuzz",), "either --budget TIME or --runs N"),
            (("--budget", "1s", "fuzz", "--runs", "3"), "either --budget TIME or --runs N"),
            (("--budget", "soon"), "as in 10m"),
            (("fuzz", "--runs", "3", "--shard", "0/2"), "--shard does not suit a campaign"),
            (("fuzz", "--runs", "3", "--backend", "no-such"), "no-such"),
        ):
            status, _, err = self.campaign(*words)
            self.assertEqual(status, 2, err)
            self.assertIn(why, err)


if __name__ == "__main__":
    if not LOCKSTEP:
        print("SKIPPED: $LOCKSTEP names no command")
        sys.exit(SKIPPED)
    unittest.main()
