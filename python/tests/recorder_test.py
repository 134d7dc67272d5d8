"""The recorder against objects that only look like vLLM's: every line, every refusal.

Runs without vLLM; vllm_test.py is the same with the real one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fakes

from lockstep_recorder.errors import RecorderError
from lockstep_recorder.header import beyond_format, config_of, header_of, spec_of
from lockstep_recorder.recorder import Recorder, recording_path_of, tables_every
from lockstep_recorder.recording_file import RecordingFile, _encode_with_json, encode_json
from lockstep_recorder.releases import release_of
from lockstep_recorder.requests import add_event, why_not_recordable

RELEASE = release_of("0.22.1")


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

    def test_a_folder_that_is_not_there_is_refused(self) -> None:
        with self.assertRaisesRegex(RecorderError, "cannot write .*: No such file or directory"):
            RecordingFile(str(self.folder / "nowhere" / "run.jsonl"))

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


class HeaderTest(unittest.TestCase):
    def header(self, scheduler: Any) -> dict[str, Any]:
        return header_of(scheduler, RELEASE, hash_block_size=16, family="f", seed=7)

    def test_a_header_has_what_the_format_asks_for(self) -> None:
        header = self.header(fakes.Scheduler())
        self.assertEqual(header["engine"], {"name": "vllm", "version": "0.22.1"})
        self.assertEqual((header["family"], header["seed"], header["num_blocks"]), ("f", 7, 9))
        self.assertEqual(header["config"]["max_model_len"], 128)
        self.assertEqual(
            header["groups"],
            [{"layers": ["layers.0"], "spec": {"type": "full", "block_size": 16,
              "num_kv_heads": 2, "head_size": 64, "dtype": "bf16"}}],
        )  # fmt: skip
        self.assertNotIn("x_beyond_format", header)

    def test_every_kind_of_cache_has_its_word(self) -> None:
        window = spec_of(fakes.spec("SlidingWindowSpec", sliding_window=64), RELEASE)
        self.assertEqual((window["type"], window["sliding_window"]), ("sliding_window", 64))
        chunk = spec_of(fakes.spec("ChunkedLocalAttentionSpec", attention_chunk_size=32), RELEASE)
        self.assertEqual((chunk["type"], chunk["attention_chunk_size"]), ("chunked_local", 32))
        mla = spec_of(
            fakes.spec("SlidingWindowMLASpec", sliding_window=8, compress_ratio=4), RELEASE
        )
        self.assertEqual((mla["mla_rows"], mla["compress_ratio"]), (True, 4))
        hidden = spec_of(fakes.spec("HiddenStateCacheSpec", page_size_padded=8192), RELEASE)
        self.assertEqual((hidden["type"], hidden["page_size_padded"]), ("hidden_state", 8192))
        state = fakes.spec(
            "MambaSpec",
            shapes=((3, 256), (4,)),
            dtypes=("torch.bfloat16", "torch.float32"),
            mamba_cache_mode="align",
            num_speculative_blocks=1,
        )
        self.assertEqual(
            spec_of(state, RELEASE),
            {"type": "mamba", "block_size": 16, "shapes": [[3, 256], [4]],
             "dtypes": ["bf16", "fp32"], "mamba_cache_mode": "align", "num_speculative_blocks": 1},
        )  # fmt: skip

    def test_a_kind_or_type_without_a_word_is_refused(self) -> None:
        for spec in (fakes.spec("TQFullAttentionSpec"), fakes.spec(dtype="torch.int4")):
            with self.assertRaisesRegex(RecorderError, "found .*; the format has a word for"):
                spec_of(spec, RELEASE)

    def test_connectors_and_encoders_are_refused(self) -> None:
        scheduler = fakes.Scheduler()
        scheduler.connector = object()
        with self.assertRaisesRegex(RecorderError, "found a KV or encoder connector"):
            self.header(scheduler)
        scheduler = fakes.Scheduler()
        scheduler.is_encoder_decoder = True
        with self.assertRaisesRegex(RecorderError, "found an encoder-decoder model"):
            self.header(scheduler)

    def test_a_group_of_uniform_type_lists_the_spec_of_every_layer(self) -> None:
        specs = {"a": fakes.spec(), "b": fakes.spec(head_size=128)}
        uniform = fakes.spec("UniformTypeKVCacheSpecs", kv_cache_specs=specs)
        header = self.header(fakes.Scheduler(groups=[fakes.group(uniform, "a", "b")]))
        self.assertEqual([s["head_size"] for s in header["groups"][0]["layer_specs"]], [64, 128])
        self.assertEqual(header["groups"][0]["spec"]["head_size"], 64)

    def test_what_a_hash_covers_behind_its_block_is_stated_for_drafts_like_eagles(self) -> None:
        def drafts(method: str) -> Any:
            return SimpleNamespace(
                num_speculative_tokens=2,
                use_eagle=lambda: method == "eagle",
                uses_draft_model=lambda: method == "draft_model",
            )

        def stated(method: str, **changes: Any) -> Any:
            config = fakes.config(speculative_config=drafts(method), **changes)
            return config_of(config).get("num_hash_lookahead_tokens")

        for tokens in (1, 0):  # 0: hashed without, by an option of the engine's user
            self.assertEqual(stated("eagle", num_hash_lookahead_tokens=tokens), tokens)
        self.assertIsNone(stated("ngram", num_hash_lookahead_tokens=0))
        self.assertIsNone(stated("eagle"))  # a release that knows no such thing

    def test_choices_that_the_format_cannot_say_are_named(self) -> None:
        chosen = fakes.Scheduler(fakes.config(watermark=0.1, max_num_scheduled_tokens=60))
        self.assertEqual(
            beyond_format(chosen, release_of("0.33.0")), ["max_num_scheduled_tokens", "watermark"]
        )
        self.assertEqual(beyond_format(fakes.Scheduler(), release_of("0.33.0")), [])
        groups = [fakes.group(fakes.spec(), is_eagle_group=flag) for flag in (True, False)]
        self.assertEqual(beyond_format(fakes.Scheduler(groups=groups), RELEASE), ["is_eagle_group"])

    def test_a_release_that_nobody_has_read_is_refused(self) -> None:
        self.assertEqual(release_of("0.33.0+cu130").version, "0.33.0")
        with self.assertRaisesRegex(RecorderError, "found vLLM 0.25.0; this recorder knows 0.22.1"):
            release_of("0.25.0")


class RequestTest(unittest.TestCase):
    def test_an_event_has_what_decides(self) -> None:
        request = fakes.request(
            "r", eos_token_id=9, stop_token_ids={12, 11}, cache_salt="s", priority=2
        )
        self.assertEqual(
            add_event(request, with_priority=True),
            {"add": "r", "prompt": {"tokens": [1, 2, 3]}, "max_tokens": 4, "arrival": 0.5,
             "priority": 2, "cache_salt": "s", "eos": 9, "stop_token_ids": [11, 12]},
        )  # fmt: skip
        self.assertNotIn("priority", add_event(request, with_priority=False))

    def test_arrivals_have_nine_digits_and_no_exponent(self) -> None:
        for time, expected in ((1763712000.1234567, 1763712000.1234567), (1e-5, 0.0)):
            event = add_event(fakes.request("r", arrival_time=time), with_priority=False)
            self.assertEqual(event["arrival"], expected)
            self.assertNotIn(b"e-", encode_json(event["arrival"]))

    def test_what_reaches_hashes_or_queues_by_other_ways_is_named(self) -> None:
        self.assertIsNone(why_not_recordable(fakes.request("r")))
        for change, reason in (
            ({"prompt_token_ids": None}, "a prompt without token ids"),
            ({"mm_features": [object()]}, "multimodal inputs"),
            ({"lora_request": object()}, "a LoRA adapter"),
            ({"pooling_params": object()}, "a pooling request"),
            ({"structured_output_request": object()}, "structured output"),
            ({"resumable": True}, "streaming input"),
            ({"repetition_detection": object()}, "repetition detection"),
        ):
            self.assertEqual(why_not_recordable(fakes.request("r", **change)), reason)


class StepTest(Folder):
    """Calls in the order in which the engine makes them, and the lines that come of it."""

    def start(self, **changes: Any) -> None:
        self.scheduler = fakes.Scheduler(fakes.config(**changes))
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
        self.recorder.reset(True, preempted_running=False)
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
        pool.cached_block_hash_to_block.insert("late", 1)  # while the output is taken in
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
        self.recorder.reset(True, preempted_running=False)
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
            self.recorder.added(fakes.request("x", lora_request=object()), is_known=False)
        self.assertIn("request x: found a LoRA adapter", logs.output[0])
        self.schedule(fakes.output({}))  # the engine serves on
        end = self.lines()[-1]
        self.assertEqual(
            (end["steps"], end["x_stopped_because"]), (1, "request x: found a LoRA adapter")
        )

    def test_a_name_twice_and_a_forced_reset_end_it_too(self) -> None:
        for cause in (
            lambda: self.recorder.added(fakes.request("x"), is_known=True),
            lambda: self.recorder.reset(True, preempted_running=True),
        ):
            self.start()
            with self.assertLogs("vllm.lockstep_recorder", "ERROR"):
                cause()
            self.assertIn("x_stopped_because", self.lines()[-1])
            self.path.unlink()

    def test_a_failure_of_the_recorder_is_said_once_and_leaves_the_engine_alone(self) -> None:
        self.start()
        with self.assertLogs("vllm.lockstep_recorder", "ERROR") as logs:
            self.recorder.scheduled(self.scheduler, object())
            self.recorder.scheduled(self.scheduler, object())
        self.assertEqual(len(logs.output), 1)
        self.recorder.finish()
        self.assertFalse(self.path.exists())


if __name__ == "__main__":
    unittest.main()
