"""--junit, --summary and --annotations: every command that judges has them, they say the same of
each item, and no name or text breaks their formats."""

from __future__ import annotations

import json
import shutil
import unittest
from xml.etree import ElementTree

import support

FINDING = support.REGRESSIONS / "vllm_0_22_1_two_half_loaded.jsonl"
STUCK = support.REGRESSIONS / "states_in_flight_never_end.case.jsonl"
SOUND = support.SAMPLES / "recordings/vllm-0.33.0/mla/0014.jsonl"
TRACE = support.SAMPLES / "shared_prefixes.jsonl"
REPLAY = ("replay", TRACE, "--limit", "4", "--backend")

# Each with its exit status, and the items that passed, failed, were skipped or refused.
COMMANDS = {
    "replay": ((*REPLAY, "simt"), 0, (1, 0, 0, 0)),
    "replay that compares nothing": ((*REPLAY, "none"), 0, (0, 0, 1, 0)),
    "replay of a defect": ((*REPLAY, "simt", "--mutant", "drop-slot"), 1, (0, 1, 0, 0)),
    "audit": (("audit", SOUND, FINDING), 1, (1, 1, 0, 0)),
    "conform": (("conform", SOUND), 0, (1, 0, 0, 0)),
    "explain": (("explain", SOUND), 0, (1, 0, 0, 0)),
    "shrink": (("shrink", SOUND), 0, (1, 0, 0, 0)),
    "fuzz": (("fuzz", "--runs", "9", "--backend", "none"), 0, (1, 0, 0, 0)),
    "fuzz of a defect": (("fuzz", "--seed", "1", "--mutant", "drop-slot"), 1, (0, 1, 0, 0)),
    "mutants": (("mutants", "slot-past-row", "drop-slot"), 0, (2, 0, 0, 0)),
    "relations": (("relations", "batch mates", "--runs", "2", "--backend", "none"), 0, None),
    "bisect": (("bisect", STUCK, "vllm-0.25.1..vllm-0.26.0", "--backend", "none"), 1, (0, 1, 0, 0)),
    "diff-engines": (("diff-engines", TRACE, "--limit", "9"), None, None),
    "pair": (("pair", TRACE, "--limit", "9"), 0, (1, 0, 0, 0)),
    "an input that is none": (("audit", support.ROOT / "run"), 2, None),
    "a file that is not there": (("replay", "nowhere.jsonl"), 2, (0, 0, 0, 1)),
}


class ReportsTest(support.InFolder):
    def leave(self, words: tuple, status: int | None) -> tuple[ElementTree.Element, str, str]:
        """JUnit's suite, the summary, the annotations."""
        junit, summary = self.folder / "junit.xml", self.folder / "summary.md"
        summary.unlink(missing_ok=True)
        done = support.run(support.LOCKSTEP, *words, "--junit", junit, "--summary", summary,
                           "--annotations", "github", expect=status, cwd=self.folder)  # fmt: skip
        annotations = [line for line in done.stdout.splitlines() if line.startswith("::")]
        suite = ElementTree.parse(junit).getroot()
        return suite, summary.read_text(), "\n".join(annotations)

    def test_every_command_says_the_same_in_all_of_them(self) -> None:
        for name, (words, status, counts) in COMMANDS.items():
            with self.subTest(name):
                suite, summary, annotations = self.leave(words, status)
                kinds = [int(suite.get(key, "")) for key in ("failures", "skipped", "errors")]
                passed = int(suite.get("tests", "")) - sum(kinds)
                if counts is not None:
                    self.assertEqual((passed, *kinds), counts)
                cases = list(suite.iter("testcase"))
                self.assertEqual(len(cases), passed + sum(kinds))
                self.assertGreater(len(cases), 0)
                bad = kinds[0] + kinds[2]
                self.assertEqual(annotations.count("::error "), bad)
                self.assertEqual(status in (None, 0), bad == 0 or status is None)
                self.assertTrue(summary.startswith(f"### lockstep {words[0]}: "), summary)
                for case in cases:
                    for failure in (*case.iter("failure"), *case.iter("error")):
                        line = failure.get("message", "")
                        self.assertIn(line.split("\n")[0][:60], annotations.replace("%25", "%"))

    def test_what_the_memory_checker_finds_is_told_in_the_sanitizers_words_too(self) -> None:
        for mutant, first in (
            ("uninitialised-read", "Uninitialized __global__ memory read of size 16 bytes"),
            ("race", "Error: Potential WAW hazard detected at __global__ 0x"),
        ):
            said = self.folder / "said.json"
            words = (*REPLAY, "simt", "--check", "check", "--mutant", mutant, "--json", said)
            suite, _, _ = self.leave(words, 1)
            text = next(suite.iter("failure")).text or ""
            self.assertIn(f"\n========= {first}", text)
            lines = json.loads(said.read_text())["divergence"]["sanitizer_words"].splitlines()
            self.assertGreaterEqual(len(lines), 3)
            for line in lines:
                self.assertTrue(line.startswith("========= "), line)
                self.assertIn(line, text)

    def test_a_name_breaks_no_format(self) -> None:
        odd = self.folder / 'a <b> & "c" | 100%, d:e.jsonl'
        shutil.copy(FINDING, odd)
        suite, summary, annotations = self.leave(("audit", odd), 1)
        self.assertEqual(next(suite.iter("testcase")).get("name"), str(odd))
        row = summary.splitlines()[4]
        self.assertIn("&lt;b&gt; &amp; &quot;c&quot; \\| 100%", row)
        self.assertEqual(row.replace("\\|", "").count("|"), 4)
        self.assertIn("100%25%2C d%3Ae.jsonl,title=", annotations)
        self.assertEqual(annotations.count("\n"), 0)

    def test_bytes_that_are_no_text_are_replaced(self) -> None:
        odd = self.folder / "x"
        odd.mkdir()
        name = bytes(odd) + b"/\xff\x01.jsonl"
        with open(name, "wb") as file:
            file.write(FINDING.read_bytes())
        suite, _, _ = self.leave(("audit", odd), 1)
        self.assertIn("\ufffd?.jsonl", next(suite.iter("testcase")).get("name", ""))

    def test_a_summary_is_appended_to(self) -> None:
        summary = self.folder / "all.md"
        for file in (SOUND, FINDING):
            support.run(support.LOCKSTEP, "audit", file, "--summary", summary, expect=None)
        text = summary.read_text()
        self.assertIn("### lockstep audit: 1 item agreed\n", text)
        self.assertIn("### lockstep audit: 1 of 1 item failed\n", text)
        self.assertIn("<code>lockstep audit ", text)

    def test_a_folder_that_is_not_there_is_refused_before_the_run(self) -> None:
        for option in ("--json", "--junit", "--summary"):
            done = support.run(support.LOCKSTEP, "audit", SOUND, option, "nowhere/file", expect=2,
                               cwd=self.folder)  # fmt: skip
            self.assertIn("nowhere/file: no folder ", done.stdout)


if __name__ == "__main__":
    unittest.main()
