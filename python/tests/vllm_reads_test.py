"""Holds the recorder's tables against what the installed vLLM reads, calls and hands over.

A new option, method or field of a new release fails here, before a user's recording lacks it.
Skipped, with exit status 77, where vLLM cannot be imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
import unittest
from pathlib import Path

import record_scenarios
from installed_vllm import vllm_engine
from read_log import NOT_LOOKED_AT, SOURCES, ReadLog, files_of_core, read_by_source
from vllm import config
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched import output
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from lockstep_recorder import calls
from lockstep_recorder.options import tables
from lockstep_recorder.scheduler import Recorded

WATCHED = {
    config.VllmConfig: "vllm_config",
    config.SchedulerConfig: "scheduler_config",
    config.CacheConfig: "cache_config",
    config.ParallelConfig: "parallel_config",
    config.ModelConfig: "model_config",
    config.SpeculativeConfig: "speculative_config",
    vllm_engine.ModelStandIn: "model_config",
    vllm_engine.Speculative: "speculative_config",
    kv_cache_interface.KVCacheConfig: "kv_cache_config",
    kv_cache_interface.KVCacheGroupSpec: "group",
    kv_cache_interface.KVCacheSpec: "spec",
    Request: "request",
}


def known() -> set[str]:
    return {name for names in tables().values() for name in names}


class ReadsTest(unittest.TestCase):
    def test_every_file_of_the_scheduling_code_is_looked_at_or_left_out_for_a_reason(self) -> None:
        self.assertEqual(files_of_core() - {*SOURCES, *NOT_LOOKED_AT}, set())

    def test_every_option_in_the_text_of_the_scheduler_stands_in_a_table(self) -> None:
        read = read_by_source()
        self.assertGreater(len(read), 100)
        unknown = [f"{' or '.join(n)} ({where})" for n, where in read.items() if not {*n} & known()]
        self.assertEqual(unknown, [])

    def test_every_option_read_while_scenarios_run_stands_in_a_table(self) -> None:
        log = ReadLog()
        with tempfile.TemporaryDirectory() as folder, log.watching(WATCHED):
            for family in record_scenarios.families_of(vllm_engine.VERSION):
                record_scenarios.record(family, 3, Path(folder) / f"{family}.jsonl")
        self.assertGreater(len(log.names), 60)
        self.assertEqual(sorted(log.names - known()), [])
        for name in ("scheduler_config.policy", "cache_config.enable_prefix_caching",
                     "spec.sliding_window", "group.is_eagle_group",
                     "request.block_hashes"):  # fmt: skip
            self.assertIn(name, log.names)

    def test_a_read_of_an_unknown_option_is_seen(self) -> None:
        log = ReadLog()
        code = compile("found = options.policy", str(read_log_source()), "exec")
        with log.watching({config.SchedulerConfig: "scheduler_config"}):
            exec(code, {"options": object.__new__(config.SchedulerConfig)})
        self.assertEqual(log.names, {"scheduler_config.policy"})

    def test_everything_that_a_request_is_made_of_stands_in_a_table(self) -> None:
        parameters = [f"request.{name}" for name in inspect.signature(Request).parameters]
        self.assertGreater(len(parameters), 10)
        self.assertEqual([name for name in parameters if name not in known()], [])


class CallsTest(unittest.TestCase):
    def test_every_method_of_a_scheduler_is_recorded_or_without_effect(self) -> None:
        unknown = [name for name in calls.methods_of(AsyncScheduler)
                   if name not in vars(Recorded) and name not in calls.WITHOUT_EFFECT
                   and name not in calls.ENDS_THE_RECORDING]  # fmt: skip
        self.assertEqual(unknown, [])

    def test_every_field_that_a_scheduler_hands_over_is_written_or_without_effect(self) -> None:
        for cls, fields in (
            (output.SchedulerOutput, calls.FIELDS_OF_A_STEP),
            (output.NewRequestData, calls.FIELDS_OF_A_NEW_REQUEST),
            (output.CachedRequestData, calls.FIELDS_OF_THE_OTHERS),
            (ModelRunnerOutput, calls.FIELDS_OF_AN_OUTPUT),
        ):
            names = {field.name for field in dataclasses.fields(cls)}
            self.assertEqual(names - fields.keys(), set(), cls.__name__)


def read_log_source() -> Path:
    import read_log

    return read_log.CORE / read_log.SOURCES[0]


if __name__ == "__main__":
    unittest.main()
