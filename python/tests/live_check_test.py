"""The live check of vLLM's own scheduler while it serves. $LOCKSTEP_VLLM names unpacked sources
of vLLM (else the installed one), $LOCKSTEP_COMMAND or $LOCKSTEP the `lockstep` command.

Skipped, with exit status 77, without either.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
COMMAND = os.environ.get("LOCKSTEP_COMMAND") or os.environ.get("LOCKSTEP", "")
FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
SKIPPED = 77
# A defect, the scenario that it shows in, blocks of the pool (0: the scenario's).
PLANTS = (
    ("hash-of-reused-block", "full_prefix_cache", 0),
    ("preempted-keeps-computed", "full_prefix_cache", 30),
)

from lockstep_live.settings import SettingsError, mode_of, settings_of


def serve(plant: str, family: str, num_blocks: int) -> None:
    """Child process: plants, registers the plugin, and serves. Prints what was found."""
    if plant:
        from lockstep_engines import plants
        from lockstep_engines.vllm import plants as vllm_plants

        plants.plant(next(p for p in vllm_plants.PLANTS if p.name == plant))
    from lockstep_live import plugin

    plugin.register()
    plugin.register()  # as vLLM may
    import scenarios

    from lockstep_engines.vllm import engine as vllm_engine
    from lockstep_live.scheduler import LockstepViolation

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("vllm.lockstep_live").setLevel(logging.INFO)
    header = scenarios.make_header(family, 1)
    header["num_blocks"] = num_blocks or header["num_blocks"]
    config = vllm_engine.make_config(header, "")
    scheduler_cls = config.scheduler_config.get_scheduler_cls()
    engine = vllm_engine.make_engine(header, scheduler_cls)
    log = engine.scheduler.recorder.live_log
    rng = random.Random(5)
    report: dict[str, Any] = {"class": scheduler_cls.__name__, "raised": ""}
    steps = 0
    try:
        for number in range(60):
            shared = rng.randint(0, 3)
            length = rng.randint(20, min(120, header["config"]["max_model_len"] - 40))
            prompt = [[shared, length // 2], [100 + number, length // 2]][: rng.randint(1, 2)]
            event = {"add": f"r{number}", "prompt": prompt, "max_tokens": rng.randint(1, 30)}
            engine.add(event | {"arrival": float(number)})
            for _ in range(rng.randint(1, 12)):
                steps += step(engine, rng)
        while engine.scheduler.has_unfinished_requests():
            steps += step(engine, rng)
        engine.scheduler.recorder.finish()
    except (LockstepViolation, AssertionError) as error:  # vLLM notices some of it itself
        report["raised"] = f"{type(error).__name__}: {error}"
    engine.scheduler.recorder.finish()
    if closing := getattr(engine.scheduler.recorder, "closing", None):
        closing.join()
    report |= {"steps": steps, "dropped": log.dropped, "findings": log.findings}
    print(json.dumps(report))


def step(engine: Any, rng: random.Random) -> int:
    output = engine.schedule()
    requests = engine.scheduler.requests
    # A request whose known tokens are all computed by this step gets one.
    output.test_sampled = {
        name: [rng.randrange(100)]
        for name in output.num_scheduled_tokens
        if requests[name].num_computed_tokens >= requests[name].num_tokens
    }
    if os.environ["LOCKSTEP"] == "raise":
        time.sleep(0.02)  # as while a model runs: the audit reports before the end
    if engine.wants_output(output) and engine.in_flight:
        engine.update(engine.model_output(engine.in_flight[0].test_sampled))
    return 1


class LiveTest(unittest.TestCase):
    def setUp(self) -> None:
        # The process that shrinks and explains may outlive the engine, and the test.
        holder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    def served(
        self, plant: str, family: str, num_blocks: int = 0, mode: str = "log", **more: str
    ) -> dict[str, Any]:
        path = os.pathsep.join([*FOLDERS[:1], os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "LOCKSTEP": mode, "LOCKSTEP_COMMAND": COMMAND, "LOCKSTEP_DIR": str(self.folder),
            "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "0",
        } | more  # fmt: skip
        done = subprocess.run(
            [sys.executable, __file__, "serve", plant, family, str(num_blocks)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.said = done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def test_vllms_own_decisions_are_clean_and_none_is_dropped(self) -> None:
        for family, name in (
            ("full_prefix_cache", "LiveScheduler"),
            ("async_scheduling", "LiveAsyncScheduler"),
        ):
            with self.subTest(family=family):
                served = self.served("", family)
                self.assertEqual(served["class"], name)
                self.assertEqual((served["findings"], served["dropped"]), ([], 0))
                self.assertRegex(
                    self.said,
                    rf"lockstep: vllm \d+\.\d+\.\d+ decided; {served['steps']} steps audited, "
                    "0 dropped, 0 findings",
                )
                self.assertEqual(list(self.folder.iterdir()), [])

    def check_planted(
        self, plant: str, family: str, num_blocks: int, explains: bool = True, **more: str
    ) -> None:
        served = self.served(plant, family, num_blocks, **more)
        self.assertTrue(served["findings"], self.said)
        self.assertRegex("\n".join(served["findings"]), "(?m)^audit.attention_read step ")
        saved = sorted(set(self.folder.glob("*.jsonl")) - set(self.folder.glob("*.case.jsonl")))
        # One for each rule that was broken, named by it and the step.
        rules = {line.split(" ")[0] for line in served["findings"]}
        self.assertEqual(len(saved), len(rules), self.said)
        first = served["findings"][0].split(" ")
        stem = f"{first[0].removeprefix('audit.')}-step{first[2]}-pid"
        self.assertTrue(any(path.name.startswith(stem) for path in saved), saved)
        self.assertFalse(list(self.folder.glob("*.partial")), "the lines that were kept")
        told = subprocess.run([COMMAND, "audit", str(saved[0])], capture_output=True, text=True)
        self.assertEqual(told.returncode, 1, told.stdout + told.stderr)
        self.assertIn(served["findings"][0], told.stdout)
        for path in saved if explains else ():
            self.check_narrative(path)
        for path in self.folder.glob("*.jsonl"):
            path.unlink()

    def check_narrative(self, recording: Path) -> None:
        """A process that outlives the engine writes it."""
        text = recording.with_suffix(".explain.txt")
        self.assertIn(str(text), self.said)
        end = time.monotonic() + 120
        while not (told := text.read_text()).count("\nStep ") and time.monotonic() < end:
            time.sleep(0.2)
        self.assertIn("$ lockstep explain ", told)
        self.assertIn("\nStep ", told)

    def test_an_engine_that_is_killed_leaves_its_steps(self) -> None:
        path = os.pathsep.join([*FOLDERS[:1], os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "LOCKSTEP": "raise", "LOCKSTEP_COMMAND": COMMAND, "LOCKSTEP_DIR": str(self.folder),
            "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "0",
        }  # fmt: skip
        serving = subprocess.Popen(
            [sys.executable, __file__, "serve", "", "full_prefix_cache", "0"], env=environment
        )
        end = time.monotonic() + 120
        kept: list[Path] = []
        while not (kept and kept[0].stat().st_size > 20_000) and time.monotonic() < end:
            time.sleep(0.05)
            kept = list(self.folder.glob("live-pid*.jsonl.partial"))
        serving.kill()
        serving.wait()
        done = subprocess.run([COMMAND, "audit", kept[0]], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"is cut off after step \d+")

    def test_a_planted_defect_is_told_in_a_line_and_its_recording_repeats_it(self) -> None:
        for plant in PLANTS:
            with self.subTest(plant=plant[0]):
                self.check_planted(*plant)

    def test_what_comes_in_after_the_engines_last_step_is_saved_too(self) -> None:
        slow = self.folder / "slow"
        slow.write_text(f"#!/bin/sh\nsleep 2\nexec {COMMAND} audit -\n")
        slow.chmod(0o755)
        self.check_planted(*PLANTS[0], explains=False, LOCKSTEP_COMMAND=str(slow))

    def test_a_folder_that_takes_no_recording_does_not_end_the_check(self) -> None:
        (self.folder / "file").write_text("")
        served = self.served(*PLANTS[0], LOCKSTEP_DIR=str(self.folder / "file" / "below"))
        self.assertTrue(served["findings"])
        self.assertIn("lockstep: no recording: ", self.said)
        self.assertIn(f"{served['steps']} steps audited, 0 dropped", self.said)

    def test_raise_stops_the_engine_on_the_line(self) -> None:
        served = self.served(*PLANTS[1], mode="raise")
        self.assertEqual(served["raised"], "LockstepViolation: " + served["findings"][0])

    def test_an_audit_that_is_too_slow_is_left_behind_and_counted(self) -> None:
        slow = self.folder / "slow"
        slow.write_text(f"#!/bin/sh\nsleep 3\nexec {COMMAND} audit -\n")
        slow.chmod(0o755)
        served = self.served(
            "", "full_prefix_cache", LOCKSTEP_COMMAND=str(slow), LOCKSTEP_QUEUE_STEPS="1"
        )
        self.assertGreater(served["dropped"], 0)
        self.assertIn("steps wait for the audit, which is too slow", self.said)
        self.assertRegex(self.said, rf"{served['dropped']} dropped, 0 findings")

    def test_a_command_that_is_no_audit_does_not_take_the_engine_down(self) -> None:
        served = self.served("", "full_prefix_cache", LOCKSTEP_COMMAND="/bin/false")
        self.assertEqual(served["findings"], [])
        self.assertIn("the audit has ended", self.said)


class SettingsTest(unittest.TestCase):
    def test_modes(self) -> None:
        self.assertEqual(mode_of({}), "off")
        self.assertEqual(mode_of({"LOCKSTEP": "raise"}), "raise")
        self.assertEqual(mode_of({"LOCKSTEP": sys.executable}), "off")
        with self.assertRaisesRegex(SettingsError, "found LOCKSTEP=on; expected one of off, log"):
            mode_of({"LOCKSTEP": "on"})

    def test_numbers(self) -> None:
        for value in ("0", "x", "-1"):
            with self.assertRaisesRegex(SettingsError, f"LOCKSTEP_SPOOL_MB={value}"):
                settings_of({"LOCKSTEP_COMMAND": sys.executable, "LOCKSTEP_SPOOL_MB": value})
        with self.assertRaisesRegex(SettingsError, "no lockstep command"):
            settings_of({"LOCKSTEP_COMMAND": "/nowhere/lockstep"})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        sys.exit()
    import importlib.util

    if not os.access(COMMAND, os.X_OK):
        print(f"SKIPPED: no `lockstep` command at LOCKSTEP_COMMAND={COMMAND!r}")
        sys.exit(SKIPPED)
    if not FOLDERS and importlib.util.find_spec("vllm") is None:
        print("SKIPPED: vLLM is not installed, and LOCKSTEP_VLLM names no sources")
        sys.exit(SKIPPED)
    unittest.main()
