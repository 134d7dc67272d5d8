"""`lockstep watch` with commands and scripts that answer as the real ones do."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import watch

ANSWERS: dict[str, tuple[int, str, Any]] = {
    "engines": (0, "", {"releases": [{"name": f"vllm-0.{n}.0"} for n in (31, 32, 33)]}),
    "fit": (
        0,
        "All 2 recordings agree\nprompt_ends = before_last_token\nNot determined: ...",
        {
            "nearest": "vllm-0.31.0",
            "engine": "vllm-0.31.0,prompt_ends=before_last_token",
            "policies": [],
        },
    ),
    "findings": (
        1,
        "",
        {
            "findings": [
                {
                    "number": number,
                    "title": title,
                    "engines": [{"verdict": before}, {"verdict": after}],
                }
                for number, title, before, after in (
                    (7, "gone", "shows", "absent"),
                    (8, "kept", "shows", "shows"),
                    (9, "new", "absent", "shows"),
                )
            ]
        },
    ),
    "audit": (0, "", {"files": 2, "clean": 2, "findings": []}),
    "fuzz": (
        0,
        "",
        {"cases": 40, "agreed": 30, "refused": 8, "known": {}, "failures": []},
    ),
}


class Watch(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.asked: list[tuple[str, ...]] = []
        self.answers = dict(ANSWERS)
        self.recorded = True
        self.set_up: list[str] = []

    def lockstep(self, watched: watch.Watched, *words: str | Path) -> tuple[int, str, Any]:
        self.asked.append(tuple(map(str, words)))
        return self.answers[str(words[0])]

    def script(self, watched: watch.Watched, name: str, *words: Any, release: str = "") -> Any:
        done = subprocess.CompletedProcess([name], 0, "", "")
        if name in watch._TABLES:
            done.returncode = 1
            done.stderr = "FAIL: test_options (x)\nAssertionError: ['new_option'] != []\n"
        elif name == "sglang_test.py":
            done.stderr = "FAIL: test_both (x)\n"
            done.stderr += "ERROR: test_here (x)\n" if release == "0.5.23" else ""
        elif name == "sglang_workloads.py":
            self.record_two_steps(words[0] / "paged", 5 if release == "0.5.22" else 6)
        elif self.recorded:
            words[0].mkdir(parents=True)
            (words[0] / "0000.jsonl").touch()
            done.stdout = "lora: not recorded: no adapter\n"
        else:
            done.returncode, done.stderr = 1, "ModuleNotFoundError: no vllm\n"
        return done

    def record_two_steps(self, folder: Path, tokens: int) -> None:
        folder.mkdir(parents=True)
        row = {"id": "r0", "tokens": tokens}
        lines: list[Any] = [{"engine": tokens, "num_blocks": 4}]
        lines += [{"step": 0, "scheduled": []}, {"step": 1, "scheduled": [row]}]
        (folder / "0000.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (folder / "0001.jsonl").write_text(json.dumps({"engine": tokens}))

    def run_watch(self, *words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(watch.Watched, "lockstep", self.lockstep_of()),
            mock.patch.object(watch.Watched, "script", self.script_of()),
            mock.patch.object(watch.set_up, "set_up", lambda *a: self.set_up.append(a[1])),
            mock.patch.object(sys, "argv", ["watch", *words, "--out", str(self.folder)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            self.assertRaises(SystemExit) as end,
        ):
            watch.main()
        return int(end.exception.code or 0), out.getvalue(), err.getvalue()

    def lockstep_of(self) -> Any:
        return lambda watched, *words: self.lockstep(watched, *words)

    def script_of(self) -> Any:
        return lambda watched, *words, **more: self.script(watched, *words, **more)

    def test_the_page_has_what_changed_and_what_to_do(self) -> None:
        path = self.folder / "page.json"
        status, out, _ = self.run_watch("vllm==0.32.0", "--json", str(path))
        self.assertEqual(status, 1)
        self.assertEqual(self.set_up, ["0.32.0", "0.31.0"])
        page = (self.folder / "page.md").read_text()
        for part in (
            "# vllm 0.32.0, compared with 0.31.0",
            "as vllm-0.31.0, with prompt_ends=before_last_token",
            "2 show, 1 gone, 1 new",
            "- 7: gone (shows to absent)",
            "- 9: new (absent to shows)",
            "- scenarios: lora: not recorded: no adapter",
            "['new_option'] != []",
            "| worker v2 | 40 | 30 | 8 | 2 | 0 |",
            "- Decisions: add the release",
        ):
            self.assertIn(part, page)
        self.assertNotIn("Not determined", page)
        self.assertEqual(json.loads(path.read_text())["compared_with"], "0.31.0")
        self.assertIn(str(self.folder / "page.md"), out)

    def test_its_own_profile_and_later_ones_are_left_out(self) -> None:
        self.run_watch("vllm==0.32.0")
        fuzz = [words for words in self.asked if words[0] == "fuzz"]
        self.assertEqual([words[words.index("--seconds") + 1] for words in fuzz], ["1200"] * 3)
        fit = next(words for words in self.asked if words[0] == "fit")
        self.assertEqual(fit[-3:], ("--leave-out", "vllm-0.32.0", "vllm-0.33.0"))

    def test_a_policy_that_is_not_determined_has_its_alternatives(self) -> None:
        status, text, found = self.answers["fit"]
        policy = {"name": "prompt_ends", "determined": False, "or": ["last_token"],
                  "instead": [{"name": "drafts", "value": "no"}]}  # fmt: skip
        self.answers["fit"] = (status, text, found | {"policies": [policy]})
        self.run_watch("vllm==0.32.0")
        page = (self.folder / "page.md").read_text()
        words = "prompt_ends=before_last_token (or prompt_ends=last_token or drafts=no)"
        self.assertIn(f"reference/profiles/releases.cpp with {words}\n", page)

    def test_outputs_are_checked_before_the_stages(self) -> None:
        (self.folder / "afile").touch()
        for words, why in ((("--json", "/nonexist/w.json"), "--json: /nonexist/w.json: no folder"),
                           (("--json", str(self.folder)), "is a folder"),
                           (("--seeds", "-5"), "--seeds: -5: expected a number of at least 1"),
                           (("--runs", "0"), "--runs: 0: expected a number of at least 1")):
            status, _, err = self.run_watch("vllm==0.32.0", *words)  # fmt: skip
            self.assertEqual((status, self.asked, self.set_up), (2, [], []))
            self.assertIn(why, err)
        self.folder /= "afile"
        status, _, err = self.run_watch("vllm==0.32.0")
        self.assertEqual((status, self.asked), (2, []))
        self.assertIn(f"--out: {self.folder}: ", err)

    def test_the_result_on_standard_output_is_alone_there(self) -> None:
        script = f"""if True:
            import sys
            sys.path.insert(0, {str(Path(watch.__file__).parent)!r})
            import watch
            stages = "record", "decisions", "findings", "audit", "unknown", "gauge"
            for name in stages:
                setattr(watch, name, lambda *more: watch.Section("a", "b"))
            watch._profiles = lambda watched: (["vllm-0.31.0"], [])
            watch.set_up.set_up = lambda *more: watch.subprocess.run(["echo", "setting up"])
            watch.main()"""
        command = [sys.executable, "-c", script, "vllm==0.32.0", "--json", "-", "--out", "out"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["sections"][5]["words"], "b")
        self.assertEqual(done.stderr.splitlines()[:3], ["setting up", "setting up", "a: b"])

    def test_recordings_that_no_policies_explain_are_work(self) -> None:
        self.answers["fit"] = (1, "first step that parts: 3", {"agrees": False})
        self.run_watch("vllm==0.34.0")
        page = (self.folder / "page.md").read_text()
        self.assertIn("first step that parts: 3", page)
        self.assertIn("- Decisions: a rule is new", page)

    def test_a_release_that_cannot_be_recorded_is_refused(self) -> None:
        self.recorded = False
        status, _, err = self.run_watch("vllm==0.32.0")
        self.assertEqual(status, 2)
        self.assertIn("nothing could be recorded", err)
        self.assertIn("no vllm", err)

    def test_an_engine_without_profiles_is_compared_with_its_previous_release(self) -> None:
        reads = "def f(server_args, envs):\n    return server_args.page_size, get_memory().pools"
        for release, more in (("0.5.22", ", envs.OLD"), ("0.5.23", ", envs.NEW")):
            file = self.folder / f"sglang-{release}" / "sglang/srt/managers/scheduler.py"
            file.parent.mkdir(parents=True)
            file.write_text(reads + more)
        with (
            mock.patch.dict("os.environ", {"LOCKSTEP_ENGINES": str(self.folder)}),
            mock.patch.object(watch, "_previous", lambda engine, release: "0.5.22"),
        ):
            status, _, err = self.run_watch("sglang==0.5.23")
        self.assertEqual(status, 1, err)
        page = (self.folder / "page.md").read_text()
        for part in (
            "# sglang 0.5.23, compared with 0.5.22",
            "1 of 2 recordings the same in every step",
            "- paged: 1 of 2 differ; first paged/0000.jsonl, step 1, scheduled[0].tokens: 5, "
            "here 6",
            "- test_here: fails here",
            "- test_both: fails in both",
            "- new: envs.NEW (managers/scheduler.py)",
            "- gone: envs.OLD (managers/scheduler.py)",
            "| scheduler of 0.5.22 | 40 | 30 | 8 | 2 | 0 |",
            "| scheduler | 40 | 30 | 8 | 2 | 0 |",
        ):
            self.assertIn(part, page)
        audited = next(words for words in self.asked if words[0] == "audit")
        self.assertTrue(audited[1].endswith("recordings/0.5.23"), audited)
        self.assertNotIn("fit", [words[0] for words in self.asked])

    def test_without_a_package_index_the_release_to_compare_with_is_named(self) -> None:
        with mock.patch.object(watch, "_previous", lambda engine, release: ""):
            status, _, err = self.run_watch("sglang==0.5.23")
        self.assertEqual(status, 2)
        self.assertIn("name one with --compared-with", err)

    def test_words_that_are_no_release_are_refused(self) -> None:
        for word in ("vllm", "tgi==0.5.23", "vllm==new", "vllm==0.20.0"):
            status, _, err = self.run_watch(word)
            self.assertEqual(status, 2, word)
            self.assertTrue("expected ENGINE==" in err or "no release before" in err, err)


if __name__ == "__main__":
    unittest.main()
