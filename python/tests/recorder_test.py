"""The recorder against objects that only look like vLLM's: every line, every refusal.

Runs without vLLM; vllm_test.py is the same with the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

LOCKSTEP = os.environ.get("LOCKSTEP", "")

import fakes

from lockstep_recorder.errors import RecorderError
from lockstep_recorder.recorder import Recorder, late_keys, recording_path_of, tables_every
from lockstep_recorder.recording_file import RecordingFile, _encode_with_json, encode_json


class Folder(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)


class RecordingFileTest(Folder):
    def test_the_file_has_its_name_only_when_it_is_whole(self) -> None:
        path = self.folder / "run.jsonl"
        file = RecordingFile(str(path))
        file.write_line(b'{"a":1}')
        self.assertFalse(path.exists())
        file.finish()
        self.assertEqual(path.read_bytes(), b'{"a":1}\n')
        self.assertEqual(list(self.folder.iterdir()), [path])

    def test_an_abandoned_file_stays_under_its_partial_name(self) -> None:
        file = RecordingFile(str(self.folder / "run.jsonl"))
        file.write_line(b"{}")
        file.abandon()
        self.assertEqual(
            [p.name for p in self.folder.iterdir()], [f"run.jsonl.partial-{os.getpid()}"]
        )

    def test_a_file_that_is_there_is_not_overwritten(self) -> None:
        path = self.folder / "run.jsonl"
        path.write_text("precious")
        with self.assertRaisesRegex(RecorderError, "exists already; choose another name"):
            RecordingFile(str(path))
        self.assertEqual(path.read_text(), "precious")

    def test_a_device_is_written_and_not_replaced(self) -> None:
        file = RecordingFile("/dev/null")
        file.write_line(b"{}")
        file.finish()
        self.assertTrue(Path("/dev/null").is_char_device())

    def test_a_symbolic_link_is_followed(self) -> None:
        link = self.folder / "link.jsonl"
        link.symlink_to(self.folder / "run.jsonl")
        file = RecordingFile(str(link))
        file.write_line(b"{}")
        file.finish()
        self.assertTrue(link.is_symlink())
        self.assertEqual((self.folder / "run.jsonl").read_bytes(), b"{}\n")

    def test_a_folder_that_is_not_there_is_refused(self) -> None:
        with self.assertRaisesRegex(RecorderError, "cannot write .*: No such file or directory"):
            RecordingFile(str(self.folder / "nowhere" / "run.jsonl"))

    def test_a_line_is_in_the_file_once_it_is_written(self) -> None:
        file = RecordingFile(str(self.folder / "run.jsonl"))
        file.write_line(b"{}")
        self.assertEqual(Path(file.partial_path).read_bytes(), b"{}\n")
        file.abandon()

    def test_both_encoders_write_the_same_bytes(self) -> None:
        value = {"id": 'r-\u00e9"', "blocks": ([1, 2], []), "none": None, "t": True, "f": 1.5e9}
        self.assertEqual(encode_json(value), _encode_with_json(value))


class EnvironmentTest(unittest.TestCase):
    def test_an_unset_variable_is_refused(self) -> None:
        with self.assertRaisesRegex(RecorderError, "set LOCKSTEP_RECORDING to the file"):
            recording_path_of(fakes.config(), {})

    def test_each_data_parallel_engine_has_its_own_file(self) -> None:
        environment = {"LOCKSTEP_RECORDING": "/a/run.jsonl"}
        self.assertEqual(recording_path_of(fakes.config(), environment), "/a/run.jsonl")
        third = fakes.config(data_parallel_size=8, data_parallel_index=3)
        self.assertEqual(recording_path_of(third, environment), "/a/run.dp3.jsonl")

    def test_how_often_tables_are_shown_is_a_number_of_steps(self) -> None:
        self.assertEqual(tables_every({}), 64)
        self.assertEqual(tables_every({"LOCKSTEP_RECORDING_TABLES": "0"}), 0)
        for text in ("-1", "often", ""):
            with self.assertRaisesRegex(RecorderError, "expected a number of steps"):
                tables_every({"LOCKSTEP_RECORDING_TABLES": text})


class StepTest(Folder):
    """Calls in the order in which the engine makes them, and the lines that come of it."""

    def start(self, **changes: Any) -> None:
        is_async = changes.get("async_scheduling", False)
        made = fakes.AsyncScheduler if is_async else fakes.Scheduler
        self.scheduler = made(fakes.config(**changes))
        self.path = self.folder / "run.jsonl"
        self.recorder = self.begin("0.22.1")

    def begin(self, version: str, tables: str = "8") -> Recorder:
        environment = {
            "LOCKSTEP_RECORDING": str(self.path),
            "LOCKSTEP_RECORDING_TABLES": tables,
        }
        return Recorder.start(self.scheduler, version, 16, environment)

    def schedule(self, output: Any, running: tuple[str, ...] = (), stored: int = 0) -> Any:
        self.recorder.scheduling()
        table = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        for i in range(stored):
            table.insert(f"{id(output)} {i}", i)
        self.scheduler.running = [SimpleNamespace(request_id=name) for name in running]
        self.scheduler.tables |= {name: ([1],) for name in running}
        self.recorder.scheduled(self.scheduler, output)
        return output

    def update(self, output: Any, tokens: dict[str, list[int]], stopped: Any = ()) -> None:
        self.recorder.output_begins(self.scheduler, output)
        sampled = self.recorder.tokens_of(output, fakes.model_output(tokens))
        for row in tokens.values():
            del row[1:]  # as vLLM trims what comes after the end of a request
        self.recorder.updated(output, sampled, fakes.engine_outputs(dict(stopped)))

    def lines(self, because: str | None = None) -> list[dict[str, Any]]:
        self.recorder.finish(because)
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def test_a_step_shows_its_events_decision_tokens_and_counts(self) -> None:
        self.start()
        self.recorder.added(fakes.request("a"), is_known=False)
        self.recorder.reset(True, num_preempted=0)
        first = self.schedule(
            fakes.output({"a": 3}, new={"a": (0, ([1],))}, new_block_ids_to_zero=[1]),
            ("a",),
            stored=2,
        )
        self.update(first, {"a": [5]}, {"a": "length"})
        header, step, end = self.lines()
        self.assertEqual(header["schedule_recording"], 1)
        self.assertEqual(list(step), [
            "step", "before", "scheduled", "common_prefix_blocks", "zero", "running", "waiting",
            "free_blocks", "sampled", "stopped", "stored", "cleared"])  # fmt: skip
        self.assertEqual(
            [list(event)[0] for event in step["before"]], ["add", "reset_prefix_cache"]
        )
        self.assertEqual(step["scheduled"], [
            {"id": "a", "tokens": 3, "new": True, "computed": 0, "blocks": [[1]]}])  # fmt: skip
        self.assertEqual((step["sampled"], step["stopped"]), ({"a": [5]}, [["a", "length"]]))
        self.assertEqual((step["stored"], step["cleared"]), (2, True))
        self.assertEqual(end, {"end": True, "steps": 1, "unfinished": []})

    def test_counts_belong_to_the_step_in_which_they_happened(self) -> None:
        self.start()
        first = self.schedule(fakes.output({"a": 1}, new={"a": (0, ([1],))}), ("a",), stored=1)
        self.update(first, {"a": [5]})
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block.insert("late", 1)  # while the output is processed
        self.schedule(fakes.output({}), stored=3)
        pool.cached_block_hash_to_block.pop("late", 1)
        steps = self.lines()[1:-1]
        self.assertEqual([step.get("stored") for step in steps], [2, 3])
        self.assertEqual([step.get("evicted") for step in steps], [None, 1])

    def test_hashes_that_only_move_are_not_counted(self) -> None:
        self.scheduler = fakes.Scheduler()
        self.path = self.folder / "run.jsonl"
        self.recorder = self.begin("0.33.0")
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block.insert("h", 1)
        pool.move_block_hashes("h", 2)
        self.schedule(fakes.output({}))
        pool.reset_prefix_cache()
        self.recorder.reset(True, num_preempted=0)
        self.schedule(fakes.output({}), stored=2)  # the table of after the reset is watched too
        steps = self.lines()[1:-1]
        self.assertEqual([step.get("stored") for step in steps], [1, 2])
        self.assertEqual([step.get("evicted") for step in steps], [None, None])

    def test_a_resumed_request_is_new_and_resumed(self) -> None:
        self.start()
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.update(first, {"a": [5]})
        self.schedule(fakes.output({}, preempted_req_ids={"a"}))
        by_cached = fakes.output({"a": 4}, cached={"a": (0, ([2],))}, resumed=["a"])
        self.update(self.schedule(by_cached, ("a",)), {"a": [6]})
        steps = self.lines()[1:-1]
        self.assertEqual(steps[1]["preempted"], ["a"])
        row = steps[2]["scheduled"][0]
        self.assertEqual((row["new"], row["resumed"], row["blocks"]), (True, True, [[2]]))

    def test_what_a_worker_would_misread_ends_the_recording(self) -> None:
        drafts = {"scheduled_spec_decode_tokens": {"b": [-1]}}
        for output, because in (
            (fakes.output({"a": 4}, new={"a": (0, ([2],))}), "found resumed request a in sch"),
            (fakes.output({}, **drafts), "found drafts of request b, which has no row"),
            (fakes.output({}, total_num_scheduled_tokens=1), "found a step of 0 tokens; the wor"),
        ):
            with self.subTest(because):
                self.start()
                first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
                self.update(first, {"a": [5]})
                self.schedule(output, ("a",))
                *steps, end = self.lines()
                self.assertEqual(len(steps), 2)
                self.assertIn(because, json.dumps(end))
                self.path.unlink()

    def test_a_resumed_request_of_runner_v2_is_new_to_its_worker(self) -> None:
        self.start()
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.update(first, {"a": [5]})
        again = fakes.output({"a": 4}, new={"a": (0, ([2],))})
        again.scheduled_new_reqs[0].prefill_token_ids = [1, 2, 3, 5]
        self.schedule(again, ("a",))
        self.assertIs(self.lines()[2]["scheduled"][0]["resumed"], True)

    def test_tokens_are_what_the_model_returned_not_what_was_kept(self) -> None:
        self.start()
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.update(first, {"a": [5, 6, 7], "b": []})
        self.assertEqual(self.lines()[1]["sampled"], {"a": [5, 6, 7]})

    def test_with_a_step_in_flight_tokens_go_to_their_own_line(self) -> None:
        self.start(async_scheduling=True)
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        second = self.schedule(fakes.output({"a": 1}, cached={"a": (3, None)}), ("a",))
        self.update(first, {"a": [5]})
        self.schedule(fakes.output({}))
        self.update(second, {"a": [6]}, {"a": "stop"})
        steps = self.lines()[1:-1]
        self.assertEqual([step["sampled"] for step in steps], [{"a": [5]}, {"a": [6]}, {}])
        self.assertEqual([step.get("output_of_step") for step in steps], [None, 0, 1])
        self.assertEqual([step.get("stopped") for step in steps], [None, None, [["a", "stop"]]])
        self.assertIsNone(steps[1]["scheduled"][0]["blocks"])

    def test_a_step_whose_tokens_never_came_is_written_without_them(self) -> None:
        self.start(async_scheduling=True)
        self.recorder.added(fakes.request("a"), is_known=False)
        self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        _, step, end = self.lines()
        self.assertEqual((step["sampled"], end["unfinished"]), ({}, ["a"]))
        self.assertEqual(end["steps_in_flight"], 1)

    def test_steps_that_scheduled_nothing_are_never_in_flight(self) -> None:
        self.start(async_scheduling=True)
        self.schedule(fakes.output({}))
        self.assertNotIn("steps_in_flight", self.lines()[-1])

    def test_outputs_of_several_steps_behind_one_are_told_apart(self) -> None:
        self.start(async_scheduling=True)
        for name in ("a", "b", "c"):
            self.recorder.added(fakes.request(name), is_known=False)
        new = {name: (0, ([1],)) for name in ("a", "b", "c")}
        first = self.schedule(fakes.output({"a": 3, "b": 3, "c": 3}, new=new), ("a", "b", "c"))
        old = {"b": (3, None), "c": (3, None)}
        second = self.schedule(fakes.output({"b": 1, "c": 1}, cached=old))
        self.recorder.finished_by_client([("c", 0)])
        self.update(first, {"a": [5], "b": [5]}, {"a": "length"})
        self.recorder.paused(SimpleNamespace(name="PAUSED_ALL"))
        self.update(second, {"b": [6]}, {"b": "stop"})
        steps = self.lines()[1:-1]
        self.assertEqual(
            steps[1]["during"],
            [{"abort": "c"}, {"output_of_step": 0}, {"pause_state": "PAUSED_ALL"}],
        )
        self.assertEqual(steps[1]["output_of_step"], 1)
        self.assertEqual(steps[1]["stopped"], [["a", "length"], ["b", "stop"]])
        self.assertEqual([step["sampled"] for step in steps], [{"a": [5], "b": [5]}, {"b": [6]}])

    def test_a_pipeline_says_whose_output_came_in(self) -> None:
        self.start(pipeline_parallel_size=2)
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        second = self.schedule(fakes.output({"b": 3}, new={"b": (0, ([2],))}), ("a", "b"))
        self.update(first, {"a": [5]})
        self.update(second, {"b": [6]})
        steps = self.lines()[1:-1]
        self.assertEqual([step.get("output_of_step") for step in steps], [None, 1])

    def test_a_step_that_no_engine_decides_yet_ends_the_recording_before_it(self) -> None:
        self.start()
        self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
            self.schedule(fakes.output({"b": 3}, new={"b": (0, ([2],))}), ("a", "b"))
        end = self.lines()[-1]
        self.assertEqual((end["steps"], end["steps_in_flight"]), (1, 1))
        self.assertIn("found a step before the output of the last", end["x_stopped_because"])

    def test_an_output_of_a_step_that_was_not_seen_ends_the_recording_there(self) -> None:
        self.start()
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.update(first, {"a": [5]})
        with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
            self.update(fakes.output({"a": 1}), {"a": [6]})
        *_, step, end = self.lines()
        self.assertEqual(step["sampled"], {"a": [5]})
        self.assertEqual(
            end["x_stopped_because"], "found an output of a step that was not recorded"
        )

    def test_pauses_stand_among_what_clients_do(self) -> None:
        self.start()
        self.recorder.added(fakes.request("a"), is_known=False)
        self.recorder.paused(SimpleNamespace(name="PAUSED_NEW"))
        self.schedule(fakes.output({}))
        self.recorder.paused(SimpleNamespace(name="UNPAUSED"))
        self.schedule(fakes.output({}))
        one, two = self.lines()[1:-1]
        self.assertEqual(one["before"][1], {"pause_state": "PAUSED_NEW"})
        self.assertEqual(two["before"], [{"pause_state": "UNPAUSED"}])

    def test_a_name_that_is_used_again_at_once_belongs_to_a_new_request(self) -> None:
        for ends_by_itself in (True, False):
            self.start()
            self.recorder.added(fakes.request("a"), is_known=False)
            first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
            self.update(first, {"a": [5]}, {"a": "length"} if ends_by_itself else {})
            if not ends_by_itself:
                self.recorder.finished_by_client([("a", 0)])
            self.recorder.added(fakes.request("a"), is_known=False)
            again = fakes.output({"a": 3}, new={"a": (0, ([2],))}, finished_req_ids={"a"})
            self.update(self.schedule(again, ("a",)), {"a": [6]})
            self.schedule(fakes.output({}, preempted_req_ids={"a"}))
            back = fakes.output({"a": 4}, cached={"a": (0, ([3],))}, resumed=["a"])
            self.update(self.schedule(back, ("a",)), {"a": [7]})
            steps = self.lines()[1:-1]
            self.path.unlink()
            rows = [step["scheduled"][0] for step in steps if step["scheduled"]]
            self.assertEqual([row.get("resumed") for row in rows], [None, None, True])

    def test_blocks_that_the_worker_copies_are_shown(self) -> None:
        self.start()
        copy = SimpleNamespace(src_block_id=4, dst_block_id=7)
        self.schedule(fakes.output({}, kv_cache_block_copies=[copy]))
        self.schedule(fakes.output({}, kv_cache_block_copies=None))
        one, two = self.lines()[1:-1]
        self.assertEqual(one["copies"], [[4, 7]])
        self.assertNotIn("copies", two)

    def test_an_output_that_the_engine_does_not_survive_counts_for_nothing(self) -> None:
        self.start()
        output = fakes.output({"a": 3}, new={"a": (0, ([1],))})
        self.schedule(output, ("a",), stored=1)
        self.recorder.tokens_of(output, fakes.model_output({"a": [5]}))
        table = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        table.insert("halfway", 1)
        with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
            self.recorder.failed("update_from_output", AssertionError())
        _, step, end = self.lines()
        self.assertEqual((step["stored"], step["sampled"]), (1, {}))
        self.assertEqual(
            (end["steps_in_flight"], end["x_stopped_because"]),
            (1, "update_from_output() raised AssertionError"),
        )

    def test_a_change_from_outside_ends_the_recording_before_the_next_call(self) -> None:
        for change in (
            lambda: self.scheduler.requests.clear(),
            lambda: self.scheduler.running.append(None),
            lambda: self.scheduler.waiting.append(None),
            lambda: setattr(self.scheduler.kv_cache_manager.block_pool, "free", 3),
        ):
            self.start()
            self.scheduler.requests["a"] = None
            self.recorder.ends(self.scheduler)
            self.recorder.begins("schedule", self.scheduler)
            self.schedule(fakes.output({}))
            self.recorder.ends(self.scheduler)
            self.recorder.begins("schedule", self.scheduler)  # as it was left
            self.assertFalse(self.path.exists())
            change()
            with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
                self.recorder.begins("schedule", self.scheduler)
            self.assertEqual(
                self.lines()[-1]["x_stopped_because"],
                "found a change of the scheduler from outside before schedule()",
            )
            self.path.unlink()

    def test_who_leaves_while_the_model_runs_leaves_before_its_output(self) -> None:
        self.start()
        for name in ("a", "b"):
            self.recorder.added(fakes.request(name), is_known=False)
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.recorder.finished_by_client([("a", 0)])
        self.update(first, {"a": [5]})
        self.recorder.finished_by_client([("b", 0)])
        self.schedule(fakes.output({}, finished_req_ids={"b", "a"}))
        _, one, two, end = self.lines()
        self.assertEqual(one["during"], [{"abort": "a"}])
        self.assertEqual((two["before"], two["finished"]), ([{"abort": "b"}], ["a", "b"]))
        self.assertEqual(end["unfinished"], [])

    def test_drafts_belong_to_the_step_that_proposed_them(self) -> None:
        self.start()
        first = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.update(first, {"a": [5]})
        self.recorder.drafted(SimpleNamespace(req_ids=["a"], draft_token_ids=[[8, 9]]))
        verify = fakes.output({"a": 3}, cached={"a": (3, None)},
                              scheduled_spec_decode_tokens={"a": [8, 9]})  # fmt: skip
        self.update(self.schedule(verify, ("a",)), {"a": [8, 4]})
        steps = self.lines()[1:-1]
        self.assertEqual(steps[0]["drafts"], {"a": [8, 9]})
        self.assertEqual(steps[1]["scheduled"][0]["spec"], [8, 9])

    def test_drafts_that_are_not_scheduled_are_told_where_there_can_be_any(self) -> None:
        self.start(speculative_config=fakes.drafts("ngram"))
        for name in ("b", "a"):
            self.scheduler.requests[name] = fakes.request(name, spec_token_ids=[8, 9])
        self.schedule(fakes.output({"b": 1}, new={"b": (0, ([1],))}), ("b", "a"))
        header, step, _ = self.lines()
        self.assertEqual((header["held_drafts"], step["held_drafts"]), (1, {"a": [8, 9]}))

    def test_output_of_who_was_preempted_since_says_how_much_of_it_was_taken(self) -> None:
        self.start(async_scheduling=True)
        before, after = fakes.request("a"), fakes.request("a")
        self.scheduler.requests |= {"a": before, "b": fakes.request("b")}
        rows = {"a": 3, "b": 3}
        first = self.schedule(fakes.output(rows, new={n: (0, ([1],)) for n in rows}), ("a", "b"))
        second = self.schedule(fakes.output({"b": 1}, cached={"b": (3, None)}), ("b",))
        before.num_preemptions = 1
        self.update(first, {"a": [5], "b": [6]})
        # Another request has the name now, and is given what was not sampled for it.
        third = self.schedule(fakes.output({"b": 1}, cached={"b": (4, None)}), ("b",))
        self.scheduler.requests["b"] = after
        self.recorder.output_begins(self.scheduler, second)
        sampled = self.recorder.tokens_of(second, fakes.model_output({"b": [7]}))
        after.num_output_tokens = 1
        self.recorder.updated(second, sampled, fakes.engine_outputs({}))
        self.update(third, {"b": [8]})
        header, _, two, three, _ = self.lines()
        self.assertEqual(header["stale_outputs"], 1)
        self.assertEqual(two["stale_outputs"], [{"id": "a", "of_step": 0, "taken": 0}])
        self.assertEqual(three["stale_outputs"], [{"id": "b", "of_step": 1, "taken": 1}])

    def test_nothing_late_is_told_where_it_is_not_wanted(self) -> None:
        header = {"config": {"num_spec_tokens": 2, "async_scheduling": True}}
        self.assertEqual(late_keys(header, {}), {"held_drafts": 1, "stale_outputs": 1})
        self.assertEqual(late_keys(header, {"LOCKSTEP_RECORDING_LATE": "0"}), {})
        with self.assertRaisesRegex(RecorderError, "expected 0 or 1"):
            late_keys(header, {"LOCKSTEP_RECORDING_LATE": "yes"})

    def test_tables_are_shown_as_often_as_asked(self) -> None:
        self.scheduler = fakes.Scheduler()
        for tables, expected in (("8", [7, 15]), ("5", [4, 9, 14]), ("0", [])):
            self.path = self.folder / f"{tables}.jsonl"
            self.recorder = self.begin("0.22.1", tables)
            for _ in range(16):
                self.schedule(fakes.output({}), ("a",))
            steps = self.lines()[1:-1]
            self.assertEqual([step["step"] for step in steps if "tables" in step], expected)
            for step in expected:
                self.assertEqual(steps[step]["tables"], {"a": [[1]]})

    def test_a_request_that_cannot_be_recorded_ends_the_recording_where_it_is_right(self) -> None:
        self.start()
        self.schedule(fakes.output({}))
        with self.assertLogs("vllm.lockstep_recorder", "ERROR") as logs:
            self.recorder.added(fakes.request("x", pooling_params=object()), is_known=False)
        self.assertIn("request x: found a pooling request", logs.output[0])
        self.schedule(fakes.output({}))  # the engine serves on
        end = self.lines()[-1]
        self.assertEqual(
            (end["steps"], end["x_stopped_because"]), (1, "request x: found a pooling request")
        )

    def test_a_name_twice_ends_it_too(self) -> None:
        self.start()
        with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
            self.recorder.added(fakes.request("x"), is_known=True)
        self.assertIn("x_stopped_because", self.lines()[-1])

    def test_a_name_that_a_step_in_flight_has_ends_it(self) -> None:
        """vLLM takes the step's tokens for the new bearer's."""
        self.start()
        self.recorder.added(fakes.request("a"), is_known=False)
        output = self.schedule(fakes.output({"a": 3}, new={"a": (0, ([1],))}), ("a",))
        self.recorder.finished_by_client([("a", 0)])
        with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
            self.recorder.added(fakes.request("a"), is_known=False)
        self.update(output, {"a": [5]})
        end = self.lines()[-1]
        because = "request a: found a name that a request of a step in flight has had"
        self.assertEqual((end["steps"], end["x_stopped_because"]), (1, because))
        self.assertEqual((end["unfinished"], end["steps_in_flight"]), (["a"], 1))

    def test_a_reset_that_preempts_says_so(self) -> None:
        self.start()
        self.recorder.reset(True, num_preempted=1)
        self.schedule(fakes.output({}))
        self.assertEqual(self.lines()[1]["before"], [{"reset_prefix_cache": True, "running": True}])

    @unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no `lockstep` command")
    def test_of_a_recorder_that_is_killed_in_a_step_every_step_before_it_is_judged(self) -> None:
        child = os.fork()
        if child == 0:
            try:
                self.serve_and_kill_itself(num_steps=40)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        self.assertTrue(os.WIFSIGNALED(status))
        (left,) = self.folder.iterdir()
        self.assertEqual(left.name, f"run.jsonl.partial-{child}")
        found = self.folder / "found.json"
        done = subprocess.run(
            [LOCKSTEP, "audit", left, "--json", found], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn(f"{left} is cut off after step 39", done.stdout)
        whole = json.loads(found.read_text())
        self.assertEqual(whole["steps"], 40)
        self.assertEqual(whole["cut_off"], [{"file": str(left), "what": "cut off after step 39"}])
        # Only the defect of the last whole step is found, and nothing of the cut.
        self.assertEqual({finding["step"] for finding in whole["findings"]}, {39})
        self.assertEqual(whole["findings"][0]["rule"], "computed_again")

    def serve_and_kill_itself(self, num_steps: int) -> None:
        """One request decodes; the last whole step computes a token again; its successor has no
        output."""
        self.scheduler = fakes.Scheduler(fakes.config(max_model_len=256))
        self.path = self.folder / "run.jsonl"
        self.recorder = self.begin("0.22.1", tables="0")
        pool = self.scheduler.kv_cache_manager.block_pool
        self.recorder.added(fakes.request("a", max_tokens=100), is_known=False)
        for step in range(num_steps + 1):
            pool.free = 8 - (step + 2) // 16 - 1
            if step == 0:
                output = fakes.output({"a": 3}, new={"a": (0, ([1],))})
            else:
                opens = (step + 2) % 16 == 0
                blocks = ([(step + 2) // 16 + 1],) if opens else None
                computed = step + 2 - (step == num_steps - 1)
                output = fakes.output({"a": 1}, cached={"a": (computed, blocks)})
            self.schedule(output, ("a",))
            if step == num_steps:
                os.kill(os.getpid(), signal.SIGKILL)
            self.update(output, {"a": [5]})

    def test_a_failure_of_the_recorder_is_said_once_and_leaves_the_engine_alone(self) -> None:
        self.start()
        with self.assertLogs("vllm.lockstep_recorder", "ERROR") as logs:
            self.recorder.scheduled(self.scheduler, object())
            self.recorder.scheduled(self.scheduler, object())
        self.assertEqual(len(logs.output), 1)
        self.recorder.finish()
        self.assertFalse(self.path.exists())


@unittest.skipUnless(LOCKSTEP, "LOCKSTEP names no `lockstep` command")
class BundledRecordingsTest(unittest.TestCase):
    def test_the_recordings_of_these_tests_are_what_their_engine_decides(self) -> None:
        """Some were cut by hand: one that the model does not follow proves nothing of a worker."""
        files = sorted(file for file in HERE.glob("*.jsonl") if ".case." not in file.name)
        self.assertGreaterEqual(len(files), 6)
        done = subprocess.run([LOCKSTEP, "conform", *files], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
