"""`lockstep campaign` over processes of this machine; over Ray: ray_test.py."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests" / "campaign")]

from processes import processes

from lockstep_campaign import campaign, executors, fuzz_run, loop, tasks

LOCKSTEP = os.environ.get("LOCKSTEP", "")
SKIPPED = 77


def lockstep(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [LOCKSTEP, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


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
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

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
            for pid, (parent, words) in processes().items():
                if "--seed 403 --runs 400" in words and parent == process.pid:
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

    def bucket(self) -> dict[str, object]:
        buckets: list[dict[str, object]] = json.loads(
            (self.out / "history.json").read_text())["buckets"]  # fmt: skip
        self.assertEqual(len(buckets), 1)
        return buckets[0]

    def test_a_bucket_is_replayed_first_until_its_case_no_longer_fails(self) -> None:
        failing = ("fuzz", "--backend", "none", "--runs", "1", "--seed", "20")
        status, _, err = self.campaign(*failing, "--mutant", "hash-stale", "--no-shrink")
        self.assertEqual(status, 1, err)
        case = self.out / str(self.bucket()["case"])
        self.assertEqual(case.name, "seed-20.case.jsonl")
        agrees = ("fuzz", "--backend", "none", "--runs", "30")
        status, out, err = self.campaign(*agrees)
        self.assertEqual((status, self.bucket()["state"]), (1, "fails"), err)
        self.assertIn("Verdict: agreed.", out)
        self.assertIn(f"1 of 1 cases of earlier campaigns still fail: {case.name}", err)
        case.write_text(case.read_text().replace('["hash-stale"]', "[]"))
        status, _, err = self.campaign(*agrees)
        self.assertEqual((status, self.bucket()["state"]), (0, "gone"), err)
        self.assertEqual(self.bucket()["cases"], 1)

    def test_the_page_and_the_metrics_have_the_figures_of_the_report(self) -> None:
        metrics = self.folder / "metrics.prom"
        words = ("fuzz", "--backend", "none", "--runs", "40", "--mutant", "hash-stale")
        status, _, err = self.campaign("--metrics", str(metrics), *words, "--no-shrink")
        self.assertEqual(status, 1, err)
        report = json.loads((self.out / "report.json").read_text())
        page = (self.out / "page.html").read_text()
        data = json.loads(page.split('id="data">')[1].split("</script>")[0])
        self.assertEqual(data["cases"], 40)
        self.assertEqual(data["failures"], len(report["failures"]))
        self.assertEqual([one["cases"] for one in data["buckets"]],
                         [one["cases"] for one in report["buckets"]])  # fmt: skip
        self.assertEqual(data["points"][-1]["steps"], report["steps"])
        samples = dict(line.rsplit(" ", 1) for line in metrics.read_text().splitlines()
                       if not line.startswith("#"))  # fmt: skip
        for name in samples:
            self.assertRegex(name, r'^lockstep_campaign_\w+(\{\w+=".*"\})?$')
        self.assertEqual(samples["lockstep_campaign_cases"], "40")
        self.assertEqual(samples["lockstep_campaign_steps"], str(report["steps"]))
        fails = sum(name.startswith("lockstep_campaign_bucket_fails{") for name in samples)
        self.assertEqual(fails, len(report["buckets"]))

    def test_metrics_on_standard_output_leave_the_text_to_standard_error(self) -> None:
        words = ("--metrics", "-", "--canary", "", "fuzz", "--backend", "none", "--runs", "3")
        status, out, err = self.campaign(*words)
        self.assertEqual((status, out[:26]), (0, "# HELP lockstep_campaign_i"), err)
        self.assertIn("Verdict: agreed.", err)
        status, _, err = self.campaign(*words, "--json", "-")
        self.assertEqual(status, 2)
        self.assertIn("--metrics: - is also given as --json; use another file", err)

    def test_the_nightly_workflow_runs_a_campaign_that_exists(self) -> None:
        text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
        (command,) = re.findall(r"\./run (campaign .*(?:\n {10}.*)*)", text)
        command = command.replace('"$BUDGET"', "1s")
        command = command.replace('"$GITHUB_STEP_SUMMARY"', str(self.folder / "summary.md"))
        searches = re.findall(r"words: (.*)}", text)
        self.assertEqual(len(searches), 3)
        for words in searches:
            if "simt" in words:  # the same words with another backend
                continue
            line = command.replace("${{ matrix.words }}", words)
            done = lockstep(*shlex.split(line.replace("build/campaign", str(self.out))))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue((self.out / "page.html").exists())
            self.assertIn("agreed", (self.folder / "summary.md").read_text())
        self.assertTrue((self.out / "corpus.jsonl").read_text().startswith('{"base":'))

    def test_a_shard_that_always_crashes_ends_the_campaign_before_its_seeds(self) -> None:
        class Crashes:
            """One worker; the shard from seed 11 on ends by SIGABRT, others are lost twice."""

            def __init__(self) -> None:
                self.running: list[tasks.Task] = []
                self.started: list[str] = []

            def size(self) -> int:
                return 1

            def start(self, task: tasks.Task) -> None:
                self.running.append(task)
                self.started.append(task.name)

            def wait(self, seconds: float) -> tasks.Done | executors.Lost | None:
                task = self.running.pop()
                seed = int(task.words[task.words.index("--seed") + 1])
                if seed == 11:
                    return tasks.Done(task, "w", -signal.SIGABRT, "", "stopped", {}, 1)
                if self.started.count(task.name) < 3:
                    return executors.Lost(task, "the machine left")
                report = {"first_seed": seed, "cases": 5, "steps": 9, "tally": {}, "failures": [],
                          "buckets": []}  # fmt: skip
                files = {"report.json": json.dumps(report).encode()}
                return tasks.Done(task, "w", 0, "", "", files, 1)

            def close(self) -> None: ...

        executor = Crashes()
        run = fuzz_run.FuzzRun(["--runs", "20"], None, 5)
        spread = campaign.Campaign(run, executor, self.folder)
        spread.work()
        self.assertEqual([path.name for path in spread.parts()], ["1.json", "6.json"])
        self.assertEqual(len(spread.ended.lost), 5)
        why = "seeds 11 to 15, given up after 2 tries: ended by signal 6: stopped"
        self.assertEqual(spread.ended.given_up, why)
        self.assertNotIn("seeds 16 to 20", executor.started)

    def test_recordings_and_defects_are_judged_in_parts(self) -> None:
        whole, parts = self.folder / "whole.json", self.folder / "parts.json"
        for words in (("audit", "traces/samples/recordings"),
                      ("conform", "traces/samples/recordings"),
                      ("audit", "tests/regressions", "--policy", "off")):  # fmt: skip
            one = lockstep(*words, "--json", whole)
            status, out, err = self.campaign("--workers", "3", *words, f"--json={parts}")
            self.assertEqual((status, out), (one.returncode, ""), err)
            self.assertEqual(parts.read_text(), whole.read_text())
        # Files of another path in one part must not hide that a folder has no recording.
        with tempfile.TemporaryDirectory(dir=ROOT) as empty:
            folder = Path(empty).name
            words = ("audit", folder, "traces/samples/recordings/vllm-0.22.1/preemption")
            for content in (None, "no recording\n"):
                if content:
                    (Path(empty) / "README").write_text(content)
                one = lockstep(*words, "--json", whole)
                self.assertEqual(one.returncode, 2)
                status, _, err = self.campaign("--workers", "1", *words, "--json", str(parts))
                self.assertEqual(status, 2, err)
                refusals = [json.loads(path.read_text())["refusals"] for path in (whole, parts)]
                reason = f"{folder}: contains no recording"
                self.assertEqual(refusals, [[{"file": folder, "reason": reason}]] * 2)
        status, out, err = self.campaign("mutants", "hash-stale", "drop-slot", "--shrink", "1")
        self.assertEqual(status, 0, err)
        report = json.loads(out)
        self.assertEqual([one["id"] for one in report["mutants"]], ["hash-stale", "drop-slot"])
        self.assertEqual((report["caught"], report["of"]), (2, 2))
        status, _, err = self.campaign("audit", "/tmp")
        self.assertEqual(status, 2)
        self.assertIn("expected a path below this folder", err)

    def test_a_part_without_a_verdict_does_not_refuse_the_whole(self) -> None:
        samples = ROOT / "traces/samples/recordings/vllm-0.22.1"
        with tempfile.TemporaryDirectory(dir=ROOT) as name:
            folder = Path(name)
            skipped = (samples / "spec_decode_mamba/0016.jsonl").read_text()
            skipped = skipped.replace('"block_size":', '"async_scheduling":true,"block_size":', 1)
            good = (samples / "full_attention/0001.jsonl").read_text()
            for file, text, expected in (("a", skipped, 2), ("b", good, 0), ("c", "", 2)):
                (folder / f"{file}.jsonl").write_text(text)
                one = lockstep("audit", folder.name, "--json", "-")
                status, out, err = self.campaign("audit", folder.name)
                self.assertEqual((one.returncode, status), (expected, expected), err)
                self.assertEqual(out, one.stdout)

    def test_the_hit_share_is_that_of_all_parts(self) -> None:
        samples = "traces/samples/recordings/vllm-0.22.1"
        # 33.9 % and 90.0 % in two parts, 56.6 % together.
        words = ("audit", f"{samples}/different_block_sizes", f"{samples}/full_and_sliding_window")
        for share, expected in (("50", 0), ("60.5", 1)):
            one = lockstep(*words, "--min-hit-share", share, "--json", "-")
            status, out, err = self.campaign(*words, "--min-hit-share", share)
            self.assertEqual((status, out), (one.returncode, one.stdout), err)
            self.assertEqual((status, err), (expected, "".join(
                re.findall("Hit rate.*\n", one.stderr))))  # fmt: skip

    def test_shards_get_the_corpus_and_the_report_writes_it(self) -> None:
        corpus = self.folder / "corpus.jsonl"
        for content in (None, b"a case"):
            if content:
                corpus.write_bytes(content)
            run = fuzz_run.FuzzRun(["--corpus", str(corpus), "--runs", "3"], None, None)
            shard = run.next_shard()
            assert shard is not None
            self.assertEqual(shard.words[1:3], ("--corpus", f"{tasks.FOLDER}/corpus.jsonl"))
            self.assertEqual(shard.files, {"corpus.jsonl": content} if content else {})
            self.assertEqual(run.of_report, ["--corpus", str(corpus)])

    def test_a_budget_ends_a_campaign_of_new_seeds(self) -> None:
        status, out, err = self.campaign("--budget", "1s", "fuzz", "--backend", "none")
        self.assertEqual(status, 0, err)
        self.assertIn(f'"first_seed":{time.strftime("%Y%m%d")}00000000,',
                      (self.out / "report.json").read_text())  # fmt: skip

    def test_refused_seeds_are_reported_as_by_one_process(self) -> None:
        engine = f"{sys.executable} docs/examples/paged_engine.py"
        runs = ("fuzz", "--decisions", engine, "--runs", "20")
        whole = self.folder / "whole.json"
        lockstep(*runs, "--json", whole)
        status, _, err = self.campaign("--shard-cases", "7", *runs)
        self.assertEqual(status, 0, err)
        self.assertEqual((self.out / "report.json").read_bytes(), whole.read_bytes())
        ((_, refused),) = json.loads(whole.read_text())["refusals"].items()
        self.assertEqual(refused["seeds"], [3, 4, 8, 11, 15, 16, 20])

    def test_an_interrupted_campaign_says_so_and_locks_its_folder(self) -> None:
        junit = self.folder / "junit.xml"
        words = ("--canary", "", "--shard-cases", "50", "fuzz", "--backend", "none")
        process = self.start("--budget", "60s", *words, "--junit", str(junit))
        while not any("--seed" in line and parent == process.pid
                      for parent, line in processes().values()):  # fmt: skip
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        status, _, err = self.campaign(*words, "--runs", "3")
        self.assertEqual(status, 2, err)
        self.assertIn(f"another campaign runs in {self.out}", err)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, err)
        self.assertIn("Interrupted by SIGTERM: the rest was not checked.", out)
        self.assertIn("interrupted by SIGTERM", junit.read_text())
        self.assertTrue(json.loads((self.out / "report.json").read_text())["interrupted"])
        self.assertIn('"interrupted": true', (self.out / "page.html").read_text())
        status, _, err = self.campaign(*words, "--runs", "3")
        self.assertEqual(status, 0, err)
        nights = json.loads((self.out / "history.json").read_text())["nights"]
        self.assertEqual([one["interrupted"] for one in nights], [True, False])

    def test_an_interrupted_queue_starts_no_further_task(self) -> None:
        executor = unittest.mock.Mock(**{"size.return_value": 1})
        spread = loop.Loop(executor)
        first, second = tasks.Task("first", ()), tasks.Task("second", ())

        def wait(seconds: float) -> tasks.Done:
            spread.interrupted = True
            return tasks.Done(executor.start.call_args.args[0], "w", 0, "", "", {}, 1)

        executor.wait = wait
        spread.add(first, lambda done: None)
        spread.add(second, lambda done: None)
        spread.work()
        executor.start.assert_called_once_with(first)

    def test_an_interrupted_audit_writes_what_it_has(self) -> None:
        path = self.folder / "audit.json"
        process = self.start("--workers", "1", "audit", "traces/samples/recordings",
                             "tests/regressions", "--json", str(path))  # fmt: skip
        while not any("lockstep-task-" in line and parent == process.pid
                      for parent, line in processes().values()):  # fmt: skip
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        self.assertEqual(process.returncode, 128 + signal.SIGINT, err)
        self.assertIn("Interrupted by SIGINT: the rest was not checked.", err)
        report = json.loads(path.read_text())
        self.assertTrue(report["interrupted"])
        self.assertIn(report["files"], range(1, 85))
        self.assertEqual(report["refusals"], [])

    def test_help_is_help_wherever_it_is(self) -> None:
        for words in (("--help",), ("fuzz", "--help"), ("audit", "-h")):
            status, out, err = self.campaign(*words)
            self.assertEqual((status, err), (0, ""))
            self.assertIn("usage: lockstep campaign", out)

    def test_a_value_may_be_the_name_of_a_command(self) -> None:
        words = ("--out", "audit", "fuzz", "--backend", "none", "--runs", "3")
        done = subprocess.run([LOCKSTEP, "campaign", *words], cwd=self.folder, capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((self.folder / "audit" / "report.json").exists())

    def test_a_folder_of_pythonpath_may_have_a_space(self) -> None:
        folder = self.folder / "two words"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"open({str(self.folder / 'seen')!r}, 'w')")
        path = self.folder / "other words"
        path.symlink_to(ROOT / "python")
        environment = os.environ | {"PYTHONPATH": str(folder), "LOCKSTEP_PYTHONPATH": str(path)}
        words = ("campaign", "--out", str(self.out), "fuzz", "--backend", "none", "--runs", "20")
        done = subprocess.run([LOCKSTEP, *words], capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((self.folder / "seen").exists())

    def test_an_output_that_cannot_be_written_is_refused_before_the_first_task(self) -> None:
        for option in ("--json", "--junit", "--summary", "--metrics"):
            for path, why in ((self.folder, "is a folder"), ("/none/x", "no folder /none"),
                              ("/proc/none/x", "no folder")):  # fmt: skip
                own, of_fuzz = ([option, str(path)], []) if option == "--metrics" else (
                    [], [option, str(path)])  # fmt: skip
                status, out, err = self.campaign(*own, "fuzz", "--runs", "9", *of_fuzz)
                self.assertEqual((status, out), (2, ""), err)
                self.assertRegex(err, f"^lockstep: campaign: {option}: {path}: {why}.*\n$")
        status, _, err = self.campaign("audit", "traces", "--json", "/none/x")
        self.assertEqual((status, "--json: /none/x: no folder" in err), (2, True), err)
        for out_folder, why in (("/dev/null", "File exists"), ("/dev/null/x", "Not a directory"),
                                ("/proc", "")):  # fmt: skip
            status, _, err = self.campaign("--out", out_folder, "fuzz", "--runs", "9")
            self.assertEqual(status, 2, err)
            self.assertRegex(err, f"^lockstep: campaign: --out: {out_folder}: {why}.*\n$")

    def test_a_report_that_cannot_be_written_leaves_what_the_shards_found(self) -> None:
        (self.out / "report.json").mkdir(parents=True)
        runs = ("fuzz", "--backend", "none", "--runs", "30", "--mutant", "hash-stale")
        status, _, err = self.campaign("--canary", "", "--shard-cases", "10", *runs)
        self.assertEqual(status, 2, err)
        (again,) = re.findall("What the shards found is kept: lockstep (.*)\n", err)
        merged = subprocess.run(f"{LOCKSTEP} {again}", shell=True, capture_output=True, text=True)
        self.assertEqual(merged.stdout, without_time(lockstep(*runs).stdout))

    def test_a_merge_without_a_report_is_refused(self) -> None:
        run = fuzz_run.FuzzRun(["--runs", "3"], None, None)
        done = run.merge([], lambda task: tasks.Done(task, "w", 2, "", "disk full\n", {}, 1), [])
        with self.assertRaisesRegex(loop.Refused, "the report: disk full"):
            fuzz_run.report_of(done)

    def test_what_a_campaign_cannot_run_is_refused(self) -> None:
        for words, why in (
            (("fuzz",), "either --budget TIME or --runs N"),
            (("--budget", "1s", "fuzz", "--runs", "3"), "either --budget TIME or --runs N"),
            (("--budget", "soon"), "as in 10m"),
            (("--ray", "no-host.invalid:6379", "fuzz", "--runs", "3"), "no-host.invalid:6379: ["),
            (("--ray", "localhost:1", "fuzz", "--runs", "3"), "--ray localhost:1: ["),
            (("--ray", "ray://[::1]:1", "fuzz", "--runs", "3"), "--ray ray://[::1]:1: ["),
            (("--budget", "0s", "fuzz"), "--budget: 0s: expected more than 0"),
            (("--budget", "0.001s", "fuzz", "--backend", "none"), "--budget ended before the fi"),
            (("--workers", "0", "fuzz", "--runs", "3"), "--workers: 0: expected a number of at le"),
            (("--workers=-1", "fuzz", "--runs", "3"), "--workers: -1: expected a number of at le"),
            (("--shard-cases=0", "fuzz", "--runs", "3"), "--shard-cases: 0: expected a number"),
            (("--shard-cases=-3", "fuzz", "--runs", "3"), "--shard-cases: -3: expected a number"),
            (("--canary", "--mutant 'x", "fuzz", "--runs", "3"), "--canary: --mutant 'x: No clos"),
            (("fuzz", "--runs", "0"), "--runs: 0: expected a number of at least 1"),
            (("fuzz", "--runs", "-5"), "--runs: -5: expected a number of at least 1"),
            (("fuzz", "--runs", "3", "--seed", "-5"), "--seed: -5: expected a number"),
            (("fuzz", "--runs", "3", "--shard", "0/2"), "--shard does not suit a campaign"),
            (("fuzz", "--runs", "3", "--backend", "no-such"), "no-such"),
            (("fuzz", "--runs", "3", "--known", "no-such-file"), "no-such-file"),
            (("fuzz", "--runs", "3", "--annotations", "gitlab"), "choose from"),
            (("mutants", "hash-stale", "--junit", "x"), "--junit does not suit"),
            (("audit", "traces", "--summary=x"), "--summary does not suit a campaign of audit"),
            (("audit", "traces", "--json"), "--json: expected one argument"),
            (("audit", "traces", "--min-hit-share", "101"), "101 is not in range 0 to 100"),
        ):
            status, _, err = self.campaign(*words)
            self.assertEqual(status, 2, err)
            self.assertIn(why, err)

    def test_a_damaged_history_is_refused(self) -> None:
        self.out.mkdir()
        path = self.out / "history.json"
        for text in ("{", "[]", '{"lockstep_campaign":1}', "\0",
                     '{"lockstep_campaign":1,"buckets":[],"nights":[{"moon":1}]}'):  # fmt: skip
            path.write_text(text)
            status, _, err = self.campaign("fuzz", "--runs", "3")
            self.assertEqual((status, err.count("\n")), (2, 1), err)
            self.assertIn(f"{path}: damaged; move it away", err)


if __name__ == "__main__":
    if not LOCKSTEP:
        print("SKIPPED: $LOCKSTEP names no command")
        sys.exit(SKIPPED)
    unittest.main()
