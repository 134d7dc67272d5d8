"""How the recorder handles more than steps and clients, in the installed vLLM: pauses, outputs in
sequence, calls and changes that a recording cannot express.

Skipped, with exit status 77, where vLLM cannot be imported.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import scenarios
from installed_vllm import Line, lines_of, vllm_engine
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from lockstep_recorder.calls import end_on_others
from lockstep_recorder.scheduler import Recorded, RecordingScheduler


class LaterScheduler(Scheduler):
    """Of an unread release."""

    def forget_everything(self) -> None:
        self.requests.clear()


@end_on_others(Recorded)
class LaterRecordingScheduler(Recorded, LaterScheduler):
    """That one with a recorder."""


def request(name: str, max_tokens: int = 8) -> Line:
    prompt = {"tokens": [1, 2, 3]}
    return {"add": name, "prompt": prompt, "max_tokens": max_tokens, "arrival": 0.0}


class CallsTest(unittest.TestCase):
    def start(self, is_async: bool = False, scheduler_cls: type = RecordingScheduler) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.path = Path(holder.name) / "run.jsonl"
        os.environ["LOCKSTEP_RECORDING"] = str(self.path)
        header = scenarios.make_header("full_prefix_cache", 0)
        header["config"]["async_scheduling"] = is_async
        self.engine = vllm_engine.make_engine(header, scheduler_cls)
        self.scheduler = self.engine.scheduler

    def lines(self) -> list[Line]:
        self.scheduler.recorder.finish()
        return lines_of(self.path)

    def ended_by(self, cause: Any) -> str:
        """Why the recording ends after one whole step and `cause`."""
        self.engine.add(request("a"))
        self.engine.schedule()
        self.engine.update(self.engine.model_output({"a": [7]}))
        with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
            cause()
        end = self.lines()[-1]
        self.assertEqual((end["steps"], end["unfinished"]), (1, ["a"]))
        return end["x_stopped_because"]

    def test_a_pause_that_keeps_requests_takes_what_is_in_flight(self) -> None:
        self.start(is_async=True)
        self.engine.add(request("a"))
        self.engine.add(request("b", max_tokens=2))
        self.engine.schedule()
        self.engine.schedule()
        self.engine.update(self.engine.model_output({"a": [7], "b": [7]}))
        self.engine.pause("PAUSED_ALL")
        self.engine.abort(["a"])
        self.engine.update(self.engine.model_output({"a": [8], "b": [8]}))
        self.engine.pause("UNPAUSED")
        self.engine.schedule()
        _, first, second, third, end = self.lines()
        self.assertNotIn("output_of_step", first)
        self.assertEqual(
            second["during"], [{"output_of_step": 0}, {"pause_state": "PAUSED_ALL"}, {"abort": "a"}]
        )
        self.assertEqual((second["output_of_step"], second["stopped"]), (1, [["b", "length"]]))
        self.assertEqual(third["before"], [{"pause_state": "UNPAUSED"}])
        self.assertEqual(end["unfinished"], [])
        self.assertNotIn("steps_in_flight", end)

    def test_a_reset_with_nothing_running_is_one_like_any_other(self) -> None:
        self.start()
        self.engine.add(request("a"))
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.engine.schedule()
        _, step, end = self.lines()
        self.assertEqual(step["before"][1], {"reset_prefix_cache": True})
        self.assertNotIn("x_stopped_because", end)

    def test_a_reset_that_preempts_and_fails_is_recorded(self) -> None:
        """vLLM raises. The engine returns that to its client and continues."""
        self.start()
        self.engine.add(request("a"))
        self.engine.schedule()
        self.engine.update(self.engine.model_output({"a": [7]}))
        with (
            patch.object(KVCacheManager, "reset_prefix_cache", return_value=False),
            self.assertRaises(RuntimeError),
        ):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.engine.schedule()
        _, _, second, end = self.lines()
        self.assertEqual(second["before"], [{"reset_prefix_cache": False, "running": True}])
        self.assertTrue(second["scheduled"][0]["resumed"])
        self.assertNotIn("x_stopped_because", end)

    def test_a_reset_that_preempts_drops_what_is_in_flight(self) -> None:
        """As a pause that keeps requests asks for it."""
        self.start(is_async=True)
        self.engine.add(request("a"))
        self.engine.schedule()
        self.engine.schedule()
        self.engine.pause("PAUSED_ALL")
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.engine.update(self.engine.model_output({"a": [7]}))
        self.engine.update(self.engine.model_output({"a": [8]}))
        self.engine.pause("UNPAUSED")
        self.engine.schedule()
        self.engine.update(self.engine.model_output({"a": [9]}))
        _, _, second, third, end = self.lines()
        self.assertEqual(
            second["during"][:2],
            [{"pause_state": "PAUSED_ALL"}, {"reset_prefix_cache": True, "running": True}],
        )
        self.assertTrue(second["cleared"])
        self.assertEqual(
            [(row["id"], row["computed"], row.get("resumed")) for row in third["scheduled"]],
            [("a", 0, True)],
        )
        self.assertEqual(end["unfinished"], ["a"])
        self.assertNotIn("x_stopped_because", end)

    def test_a_method_that_nobody_has_read_ends_the_recording(self) -> None:
        self.start(scheduler_cls=LaterRecordingScheduler)
        self.assertEqual(
            self.ended_by(self.scheduler.forget_everything),
            "found a call of forget_everything(), which is not recorded",
        )

    def test_what_is_set_from_outside_ends_the_recording(self) -> None:
        self.start()
        self.scheduler.use_v2_model_runner = True  # decides nothing
        self.assertEqual(
            self.ended_by(lambda: setattr(self.scheduler, "max_num_running_reqs", 1)),
            "found a change of max_num_running_reqs, which is not recorded",
        )

    def test_blocks_taken_from_outside_end_the_recording(self) -> None:
        self.start()

        def take() -> None:
            self.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
            self.engine.schedule()

        self.assertEqual(
            self.ended_by(take),
            "found a change of the scheduler from outside before schedule()",
        )

    def test_a_step_that_throttles_prefills_ends_the_recording(self) -> None:
        if "throttle_prefills" not in inspect.signature(Scheduler.schedule).parameters:
            self.skipTest("this release throttles none")
        self.start()
        self.assertEqual(
            self.ended_by(lambda: self.scheduler.schedule(throttle_prefills=True)),
            "found a step that throttles prefills, which is not recorded",
        )

    def test_an_engine_that_dies_of_an_output_ends_the_recording_before_it(self) -> None:
        self.start()
        self.engine.add(request("a"))
        self.engine.schedule()
        output = self.engine.model_output({"a": [7]})
        output.req_id_to_index.clear()
        with (
            self.assertLogs("vllm.lockstep_recorder", "ERROR"),
            self.assertRaises(KeyError),
        ):
            self.engine.update(output)
        _, step, end = self.lines()
        self.assertEqual((step["sampled"], end["steps_in_flight"]), ({}, 1))
        self.assertEqual(end["x_stopped_because"], "update_from_output() raised KeyError")


if __name__ == "__main__":
    unittest.main()
