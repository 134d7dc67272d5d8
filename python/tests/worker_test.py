"""vLLM's own worker behind the worker protocol: what can be tested without vLLM; and its worker run
with both runners, of the installed vLLM or of the unpacked sources that $LOCKSTEP_VLLM names
(several: as in PATH). Without either, or without torch, exit status 77 says skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "engines"), str(Path(__file__).parent)]

import model_worker
from adapter_client import Adapter, full_attention_case

from lockstep_engines import plants, protocol, scratch
from lockstep_engines.protocol import ProtocolError, Refused
from lockstep_engines.worker import plants as worker_plants

FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
LOCKSTEP = os.environ.get("LOCKSTEP", "")
SKIPPED = 77


class Recorder:
    """A worker that takes only a case called `taken`."""

    def hello(self) -> dict[str, Any]:
        return {"engine": {"name": "none", "version": "0"}, "features": []}

    def open(self, case: dict[str, Any], _: Any) -> dict[str, Any]:
        if case["memory"] != "taken":
            raise Refused("this memory")
        return {"bytes": 1}

    def sample(self, sampled: dict[str, Any]) -> dict[str, Any]:
        return {"faults": [f"{name} is unknown" for name in sampled]}

    def execute(self, step: dict[str, Any]) -> dict[str, Any]:
        return {"rows": [row["id"] for row in step["scheduled"]]}

    def close(self) -> None: ...


class ProtocolTest(unittest.TestCase):
    def setUp(self) -> None:
        self.session = protocol.Session(protocol.WORKER, Recorder())

    def test_a_case_is_opened_refused_and_run(self) -> None:
        case = b'{"open":{"config":{},"groups":[],"num_blocks":2,"memory":"%s"}}'
        step = (
            b'{"execute":0,"sampled":{},"scheduled":[{"id":"a"}],"finished":[],"preempted":[],'
            b'"zero":[],"copies":[]}'
        )
        self.assertEqual(self.session.reply_to(case % b"other"), {"refused": "this memory"})
        with self.assertRaises(ProtocolError):
            self.session.reply_to(step)
        self.assertEqual(self.session.reply_to(case % b"taken"), {"opened": {"bytes": 1}})
        sampled = self.session.reply_to(b'{"sample":{"b":[1]}}')
        self.assertEqual(sampled, {"sampled": {"faults": ["b is unknown"]}})
        self.assertEqual(self.session.reply_to(step), {"executed": {"rows": ["a"]}})
        self.assertEqual(self.session.reply_to(b'{"close":true}'), {})

    def test_what_the_protocol_does_not_have_is_refused(self) -> None:
        for text in (b'{"dance":1}', b'{"hello":{"worker_protocol":2}}', b"[]", b"{"):
            with self.assertRaises(ProtocolError):
                self.session.reply_to(text)


@unittest.skipUnless(importlib.util.find_spec("numpy"), "no numpy")
class ContentsTest(unittest.TestCase):
    def test_rows_are_those_of_another_derivation(self) -> None:
        import numpy

        from lockstep_engines.worker import contents as worker_contents

        contents = numpy.array([1, 0xFEDCBA9876543210, (1 << 64) - 1], dtype=numpy.uint64)
        shapes = (("bf16", 0, 0, 128), ("fp32", 3, 1, 20), ("fp16", 7, 1, 8))
        for dtype, layer, part, size in shapes:
            made = worker_contents.rows(contents, layer, part, 3, size, dtype)
            for i, content in enumerate(contents.tolist()):
                for head in range(3):
                    expected = model_worker.row(content, layer, part, head, size, dtype)
                    self.assertEqual(made[i, head].tobytes(), expected)

    def test_states_are_those_of_another_derivation(self) -> None:
        import numpy

        from lockstep_engines.worker import contents as worker_contents

        words, expected = numpy.zeros(5, dtype=numpy.uint64), [0] * 5
        for content in (1, 0xFEDCBA9876543210, (1 << 64) - 1):
            words = worker_contents.next_state(words, content, 3, 1)
            expected = model_worker.state_after(expected, content, 3, 1)
            self.assertEqual(words.tolist(), expected)


class PlantsTest(unittest.TestCase):
    @unittest.skipUnless(
        any((Path(folder) / "vllm/v1/core/kv_cache_planning.py").is_file() for folder in FOLDERS),
        "$LOCKSTEP_VLLM names no vLLM 0.33.0, which some defects need",
    )
    def test_every_defect_fits_in_some_release(self) -> None:
        missing = {plant.name for plant in worker_plants.PLANTS}
        for folder in FOLDERS:
            sys.path.insert(0, folder)
            self.addCleanup(sys.path.remove, folder)
            importlib.invalidate_caches()
            for plant in worker_plants.PLANTS:
                try:
                    plants.sources_with(plant)
                    missing.discard(plant.name)
                except plants.PlantError:
                    pass
            sys.path.remove(folder)
            sys.path.append(folder)
        self.assertEqual(missing, set())

    def test_names_are_taken_once(self) -> None:
        names = [plant.name for plant in worker_plants.PLANTS]
        self.assertEqual(len(names), len(set(names)))
        self.assertGreaterEqual(len(names), 40)


class TableTest(unittest.TestCase):
    def test_files_of_a_column_add_up(self) -> None:
        def family(name: str, steps: int, **more: Any) -> dict[str, Any]:
            made = {"family": name, "files": 2, "steps": steps, "diverged": 0, "refused": {}}
            return made | more

        files = (
            [family("full", 1200), family("ranks", 0, refused={"no ranks": 2})],
            [family("full", 30, diverged=1, refused={"too long": 1})],
            [family("full", 7, found=[{"file": "a.jsonl", "what": "step 3"}])],
        )
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, f"{i}.json") for i in range(len(files))]
            for path, families in zip(paths, files, strict=True):
                path.write_text(json.dumps(families))
            columns = [f"{c}={path}" for c, path in zip(("v1", "v1", "v2"), paths, strict=True)]
            script = str(ROOT / "python" / "worker_table.py")
            run = [sys.executable, script, *columns]
            out = subprocess.run(run, capture_output=True, check=True, text=True).stdout
        self.assertEqual(
            out.splitlines(),
            [
                "| family | v1 | v2 |",
                "|---|---|---|",
                "| `full` | 1,230, 1 of 3 diverged, 1 refused | 7 |",
                "| `ranks` | refused |  |",
                "| all | 1,230 | 7 |",
                "refused, 2 files: no ranks",
                "refused, 1 files: too long",
                "v2, a.jsonl: step 3",
            ],
        )


class ScratchTest(unittest.TestCase):
    def setUp(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.addCleanup(self.place.cleanup)
        patch = mock.patch.object(tempfile, "tempdir", self.place.name)
        patch.start()
        self.addCleanup(patch.stop)

    def age(self, path: str) -> None:
        os.utime(path, (time.time() - 1000, time.time() - 1000))

    def test_a_folder_goes_when_it_is_left(self) -> None:
        with scratch.folder() as path:
            Path(path, "config.json").write_text("{}")
        self.assertFalse(os.path.exists(path))

    def test_one_of_a_killed_process_goes_with_the_next_and_one_in_use_stays(self) -> None:
        code = "import os, signal; from lockstep_engines import scratch\n"
        code += "with scratch.folder() as path:\n"
        code += " print(path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
        environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "TMPDIR": self.place.name}
        killed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, env=environment, text=True
        ).stdout.strip()
        self.assertTrue(os.path.isdir(killed))
        with scratch.folder() as mine:
            scratch.remove_abandoned()  # young ones may be about to be locked
            self.assertTrue(os.path.isdir(killed))
            self.age(killed)
            self.age(mine)
            scratch.remove_abandoned()
            self.assertFalse(os.path.exists(killed))
            self.assertTrue(os.path.isdir(mine))


class WorkerTest(unittest.TestCase):
    """`folder`: of the sources, None for the installed vLLM."""

    folder: ClassVar[str | None] = None

    def run_steps(self, runner: str) -> list[Any]:
        arguments = ["vllm", *([self.folder] if self.folder else []), "--worker"]
        worker = Adapter(*arguments, "--runner", runner)
        self.addCleanup(worker.close)
        hello = worker.send({"hello": {"worker_protocol": 1}})["hello"]
        self.assertIn(f"runner:{runner}", hello["features"])
        before = set(os.listdir(tempfile.gettempdir()))
        with tempfile.NamedTemporaryFile() as memory:
            case = full_attention_case(9, max_num_batched_tokens=64, max_model_len=64)
            case = {key: case[key] for key in ("config", "groups", "num_blocks")}
            opened = worker.send({"open": case | {"memory": memory.name}})["opened"]
            self.assertEqual(opened["bytes"], 9 * 8192)
            left = set(os.listdir(tempfile.gettempdir())) - before
            self.assertFalse([name for name in left if name.startswith("lockstep_scratch_")], left)
            first = {
                "id": "a",
                "tokens": 20,
                "computed": 0,
                "known": 20,
                "new": True,
                "max_tokens": 4,
                "prompt": list(range(20)),
                "blocks": [[1, 2]],
                "contents": list(range(20)),
            }
            step = {"execute": 0, "sampled": {}, "scheduled": [first], "finished": []}
            step |= {"preempted": [], "zero": [], "copies": []}
            replies = [worker.send(step)]
            later = {"id": "a", "tokens": 1, "computed": 20, "known": 21, "blocks": [[]]}
            later["contents"] = [77]
            step |= {"execute": 1, "sampled": {"a": [5]}, "scheduled": [later]}
            replies.append(worker.send(step))
            part = opened["layers"][0]["parts"][1]
            with open(memory.name, "rb") as file:
                file.seek(part["offset"] + 2 * part["stride"][0] + 4 * part["stride"][1])
                row = file.read(part["shape"][3])
            self.assertEqual(row, model_worker.row(77, 0, 1, 0, len(row), "bf16"))
        return [reply["executed"] for reply in replies]

    def check(self, runner: str) -> None:
        first, second = self.run_steps(runner)
        self.assertEqual(first["positions"], list(range(20)))
        self.assertEqual(first["groups"][0]["slots"], list(range(16, 36)))
        self.assertEqual(second["groups"][0], {"tables": [[1, 2]], "slots": [36]})
        self.assertEqual(first["faults"] + second["faults"], [])

    def test_the_first_runner_runs_two_steps(self) -> None:
        self.check("v1")

    def test_the_second_runner_runs_two_steps(self) -> None:
        self.check("v2")


class CommandTest(unittest.TestCase):
    """`lockstep` with the worker below it."""

    folder: ClassVar[str | None] = None

    def lockstep(self, *arguments: str, status: int = 0) -> str:
        paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {"LOCKSTEP_PYTHON": sys.executable} | os.environ
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [LOCKSTEP, *arguments]
        run = subprocess.run(command, capture_output=True, env=environment, text=True)
        self.assertEqual(run.returncode, status, run.stdout + run.stderr)
        return run.stdout

    def setUp(self) -> None:
        self.engine = f"vllm:{self.folder}" if self.folder else "vllm"
        release = "0.22.1" if "0.22" in (self.folder or "") else "0.33.0"
        self.recordings = ROOT / "traces" / "samples" / "recordings" / f"vllm-{release}"

    def worker(self, runner: str, *options: str) -> str:
        """The worker's process with options that `lockstep` does not have."""
        folder = [self.folder] if self.folder else []
        command = [sys.executable, "-m", "lockstep_engines", "vllm", *folder, "--worker"]
        return "worker:" + shlex.join([*command, "--runner", runner, *options])

    def test_cases_are_fuzzed_with_its_scheduler_and_its_worker(self) -> None:
        both = ("--decisions", self.engine, "--backend", self.engine)
        out = self.lockstep("fuzz", *both, "--runs", "6")
        self.assertRegex(out, r"cache +vllm-.*runner v1")
        self.assertRegex(out, r"[4-6] agreed, \d refused, \d of known findings, 0 failed")

    def test_what_it_did_is_audited_without_it(self) -> None:
        with tempfile.TemporaryDirectory() as facts:
            files = (str(self.recordings / "full_attention"), "--files", "1", "--runner", "v2")
            self.lockstep("worker", self.engine, *files, "--save-facts", facts)
            self.assertIn("1 clean", self.lockstep("audit", facts))

    def test_padding_idle_batches_and_warm_up_leave_the_cache_alone(self) -> None:
        families = [("v1", "full_attention"), ("v2", "full_attention")]
        if "0.22" not in (self.folder or ""):  # finding 28; and 0.22.1 pads states in graphs alone
            families += [("v1", "mamba_align"), ("v1", "hidden_state_group")]
            families += [("v2", "hidden_state_group")]
        for runner, family in families:
            with self.subTest(runner=runner, family=family):
                options = ["--pad", "--idle", "--warm-up"]
                if runner == "v2" and family == "hidden_state_group":
                    options.remove("--pad")  # states too
                engine = self.worker(runner, *options)
                out = self.lockstep("worker", engine, str(self.recordings / family), "--files", "1")
                self.assertRegex(out, family + r" +1 +1 +0 +0")

    def test_hidden_states_of_padding_go_to_the_last_block(self) -> None:
        if "0.22" not in (self.folder or ""):
            self.skipTest("of 0.20.2 to 0.24.0: finding 28")
        file = min((self.recordings / "hidden_state_group").glob("*.jsonl"))
        out = self.lockstep("worker", self.worker("v1", "--pad"), str(file), status=1)
        self.assertIn("finding 28: ", out)

    def test_padded_rows_are_cleared_by_the_width_of_the_first_table(self) -> None:
        if "0.22" not in (self.folder or ""):
            self.skipTest("of 0.20.0 to 0.22.1: finding 27")
        file = str(self.recordings / "different_block_sizes" / "0006.jsonl")
        out = self.lockstep("worker", self.worker("v2", "--pad"), file, status=1)
        self.assertIn("finding 27: ", out)

    def test_a_decisions_defect_is_named_where_a_page_shows_it(self) -> None:
        if "0.22" in (self.folder or ""):
            self.skipTest("0.22.1 pads no prompts")
        file = str(Path(__file__).with_name("padded_prompt_states.jsonl"))
        engine = f"vllm:{self.folder}" if self.folder else "vllm"
        both = ("--decisions", engine, "--backend", engine, "--states", "mamba2", "--runner", "v2")
        with tempfile.TemporaryDirectory() as folder:
            out = self.lockstep("shrink", file, *both, "-o", f"{folder}/min.case.jsonl", status=1)
        self.assertIn("This is finding 19 of docs/findings.md", out)

    def test_rejected_drafts_are_taken_off_what_the_scheduler_counts(self) -> None:
        file = str(Path(__file__).with_name("drafts_in_flight.jsonl"))
        for runner in ("v1", "v2"):
            with self.subTest(runner):
                out = self.lockstep("worker", self.engine, file, "--runner", runner)
                self.assertRegex(out, r"tests +1 +1 +0 +0")
        if "0.22" not in (self.folder or ""):
            for runner, name in (("v1", "in-flight"), ("v2", "computed")):
                planted = self.worker(runner, "--plant", f"rejected-drafts-{name}")
                out = self.lockstep("worker", planted, file, status=1)
                self.assertIn("row r0 feeds the model", out)

    def test_drafts_that_pad_a_prompt_are_of_any_token(self) -> None:
        if "0.22" in (self.folder or ""):
            self.skipTest("0.22.1 pads no prompts")
        file = str(Path(__file__).with_name("padded_prompt.jsonl"))
        out = self.lockstep("worker", self.engine, file, "--runner", "v2")
        self.assertRegex(out, r"tests +1 +1 +0 +0")

    def test_defects_of_a_release_are_named_by_their_cause(self) -> None:
        has_them = "0.22" in (self.folder or "")
        for name, finding, states in (
            ("short_convolution_drafts", 26, "short_conv"),
            ("step_without_drafts", 48, "mamba2"),
            ("prompt_of_one_token", 49, "gdn"),
            ("rejected_drafts_as_context", 50, ""),
            ("rejected_drafts_of_a_longer_row", 50, ""),
            ("table_without_blocks_of_drafts", 51, "mamba2"),
            ("accepted_drafts_of_a_moved_row", 52, "mamba2"),
            ("accepted_drafts_of_a_row_left_out", 53, "mamba2"),
            ("known_tokens_as_drafts", 54, "mamba2"),
        ):
            file = str(Path(__file__).with_name(f"{name}.jsonl"))
            words = ("--states", states) if states else ()
            shows = has_them or finding >= 52 or name.endswith("longer_row")
            out = self.lockstep("worker", self.engine, file, *words, status=int(shows))
            self.assertEqual(f"finding {finding}: " in out, shows, out)

    def test_a_step_may_zero_a_block_of_a_request_that_it_preempts(self) -> None:
        if "0.22" not in (self.folder or ""):
            self.skipTest("decided by 0.22.1")
        cases = Path(__file__).parents[2] / "tests" / "regressions"
        file = str(cases / "vllm_0_22_1_zeroed_block_of_a_victim.jsonl")
        out = self.lockstep("worker", self.engine, file, "--states", "short_conv")
        self.assertRegex(out, r"regressions +1 +1 +0 +0")

    def test_two_blocks_are_taken_for_keys_and_values(self) -> None:
        if "0.22" not in (self.folder or ""):
            self.skipTest("of 0.21.0 to 0.22.1")
        file = str(Path(__file__).with_name("two_block_pool.jsonl"))
        refused = self.lockstep("worker", self.engine, file, "--runner", "v2", status=2)
        self.assertIn("hybrid/mamba models", refused)
        engine = self.worker("v2", "--lift-refusals")
        self.assertIn("view of layers.1", self.lockstep("worker", engine, file, status=1))


def load_tests(loader: unittest.TestLoader, *_: Any) -> unittest.TestSuite:
    suite = unittest.TestSuite()
    for case in (ProtocolTest, ContentsTest, PlantsTest, TableTest, ScratchTest):
        suite.addTests(loader.loadTestsFromTestCase(case))
    for folder in FOLDERS or [None]:
        name = f"WorkerTest({folder})"
        suite.addTests(loader.loadTestsFromTestCase(type(name, (WorkerTest,), {"folder": folder})))
        if LOCKSTEP:
            of_command = type(f"CommandTest({folder})", (CommandTest,), {"folder": folder})
            suite.addTests(loader.loadTestsFromTestCase(of_command))
    return suite


if __name__ == "__main__":
    is_there = importlib.util.find_spec("torch") and (FOLDERS or importlib.util.find_spec("vllm"))
    if not is_there:
        loader, suite = unittest.defaultTestLoader, unittest.TestSuite()
        for case in (ProtocolTest, ContentsTest, PlantsTest, TableTest, ScratchTest):
            suite.addTests(loader.loadTestsFromTestCase(case))
        if not unittest.TextTestRunner().run(suite).wasSuccessful():
            sys.exit(1)
        print("SKIPPED: no vLLM or no torch here; its worker was not run")
        sys.exit(SKIPPED)
    unittest.main()
