"""Configurations and requests of objects that only look like vLLM's, in the terms of the format.

Runs without vLLM; vllm_reads_test.py compares the tables of options with the real one.
"""

from __future__ import annotations

import hashlib
import sys
import unittest
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fakes

from lockstep_recorder.errors import RecorderError
from lockstep_recorder.header import beyond_format, config_of, groups_of, header_of, spec_of
from lockstep_recorder.options import FLAGS, tables
from lockstep_recorder.recording_file import encode_json
from lockstep_recorder.releases import nearest_release, release_of
from lockstep_recorder.requests import add_event, why_not_recordable

RELEASE = release_of("0.22.1")


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

    def test_what_a_scheduler_does_counts_not_what_it_was_configured_to_do(self) -> None:
        for made, is_async in ((fakes.Scheduler, False), (fakes.AsyncScheduler, True)):
            for configured in (False, True):
                header = self.header(made(fakes.config(async_scheduling=configured)))
                self.assertIs(header["config"]["async_scheduling"], is_async)
                named = ["async_scheduling"] if configured != is_async else None
                self.assertEqual(header.get("x_beyond_format"), named)

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

    def test_what_no_recording_can_hold_is_refused(self) -> None:
        for changes, what in (
            ({"kv_transfer_config": object()}, "found a KV connector"),
            ({"ec_transfer_config": object()}, "found an encoder connector"),
            ({"is_encoder_decoder": True}, "found an encoder-decoder model"),
            ({"is_mm_encoder_only": True}, "found an engine for encoders alone"),
            ({"is_diffusion": True}, "found a diffusion model"),
            ({"runner_type": "pooling"}, "found a pooling model"),
        ):
            with self.assertRaisesRegex(RecorderError, what):
                self.header(fakes.Scheduler(fakes.config(**changes)))

    def test_a_group_of_uniform_type_lists_the_spec_of_every_layer(self) -> None:
        specs = {"a": fakes.spec(), "b": fakes.spec(head_size=128)}
        uniform = fakes.spec("UniformTypeKVCacheSpecs", kv_cache_specs=specs)
        header = self.header(fakes.Scheduler(groups=[fakes.group(uniform, "a", "b")]))
        self.assertEqual([s["head_size"] for s in header["groups"][0]["layer_specs"]], [64, 128])
        self.assertEqual(header["groups"][0]["spec"]["head_size"], 64)

    def test_what_a_hash_covers_behind_its_block_is_stated_for_drafts_like_eagles(self) -> None:
        def stated(method: str, **changes: Any) -> Any:
            config = fakes.config(speculative_config=fakes.drafts(method), **changes)
            return config_of(config, fakes.cache([])).get("num_hash_lookahead_tokens")

        for tokens in (1, 0):  # 0: hashed without, by an option of the engine's user
            self.assertEqual(stated("eagle", num_hash_lookahead_tokens=tokens), tokens)
        self.assertIsNone(stated("ngram", num_hash_lookahead_tokens=0))
        self.assertIsNone(stated("eagle"))  # a release without it

    def test_options_that_are_not_the_default_are_stated(self) -> None:
        def stated(cache: Any = None, **changes: Any) -> dict[str, Any]:
            return config_of(fakes.config(**changes), cache or fakes.cache([]))

        plain = stated()
        for name, value in (
            ("mamba_block_size", 64),
            ("prefix_match_unit", 8),
        ):
            self.assertNotIn(name, plain)
            self.assertEqual(stated(**{name: value}), plain | {name: value})
        self.assertEqual(
            stated(prefix_caching_hash_algo="sha256_cbor"),
            plain | {"hash_algorithm": "sha256_cbor"},
        )
        for interval in (0, 64):
            cache = fakes.cache([], prefix_cache_retention_interval=interval)
            self.assertEqual(stated(cache), plain | {"prefix_cache_retention_interval": interval})

    def test_a_drafter_of_several_modules_states_what_it_reads_ahead(self) -> None:
        def stated(method: str, tokens: int) -> Any:
            config = fakes.config(
                speculative_config=fakes.drafts(method), num_prefill_lookahead_tokens=tokens
            )
            return config_of(config, fakes.cache([])).get("num_prefill_lookahead_tokens")

        self.assertEqual(stated("eagle", 3), 3)
        self.assertIsNone(stated("eagle", 1))
        self.assertIsNone(stated("ngram", 0))

    def test_the_groups_of_a_drafter_are_marked_where_that_decides(self) -> None:
        def marks(flags: tuple[bool, ...], lookahead: int) -> list[int]:
            groups = [fakes.group(fakes.spec(), is_eagle_group=flag) for flag in flags]
            found = groups_of(groups, lookahead, release_of("0.33.0"))
            return [i for i, group in enumerate(found) if group.get("is_eagle_group")]

        self.assertEqual(marks((True, False), 0), [0])
        self.assertEqual(marks((True, False), 1), [])  # no block is dropped
        self.assertEqual(marks((True, True), 0), [])  # all drop, as if none was marked

    def test_a_spec_of_0_33_0_says_what_its_manager_reads(self) -> None:
        release = release_of("0.33.0")
        window = fakes.spec(
            "SlidingWindowMLASpec",
            sliding_window=128,
            tokens_per_state=4,
            bounded_replay=True,
            extra_retained_tokens=2,
        )
        found = spec_of(window, release)
        self.assertEqual(found["type"], "sliding_window_mla")
        for key, value in (
            ("tokens_per_state", 4), ("bounded_replay", True), ("extra_retained_tokens", 2),
        ):  # fmt: skip
            self.assertEqual(found[key], value)
        pooled = fakes.spec("SlidingWindowSpec", sliding_window=8, tokens_per_state=Fraction(1, 4))
        self.assertEqual(spec_of(pooled, release)["tokens_per_state"], "1/4")
        ring = spec_of(fakes.spec("CircularBufferSpec", head_size_v=0, dcp_sharded=False), release)
        self.assertEqual((ring["type"], ring["head_size_v"]), ("circular_buffer", 0))
        self.assertIs(ring["dcp_sharded"], False)
        self.assertNotIn("dcp_sharded", spec_of(fakes.spec(dcp_sharded=True), release))
        state = fakes.spec(
            "MambaSpec",
            shapes=((4,),),
            dtypes=("torch.bfloat16",),
            mamba_cache_mode="align",
            num_speculative_blocks=0,
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=16,
        )
        found = spec_of(state, release)
        self.assertEqual(found["num_prefill_checkpoint_blocks"], 1)
        self.assertEqual(found["prefill_checkpoint_alignment"], 16)

    def test_a_release_that_nobody_has_read_is_refused(self) -> None:
        self.assertEqual(release_of("0.33.0+cu130").version, "0.33.0")
        with self.assertRaisesRegex(RecorderError, "found vLLM 0.25.0; this recorder knows 0.22.1"):
            release_of("0.25.0")

    def test_a_checkout_is_read_like_the_release_before_it(self) -> None:
        for version, release in (
            ("0.33.1.dev7+gabc", "0.33.0"),
            ("0.26.3", "0.26.0"),
            ("0.19.0", "0.20.0"),
            ("0.9.2", "0.20.0"),
            ("dev", "0.33.0"),
        ):
            nearest = nearest_release(version)
            self.assertEqual(replace(nearest, version=release), nearest_release(release))
        self.assertEqual(nearest_release("0.33.1.dev7+gabc").version, "0.33.1.dev7")
        self.assertEqual(nearest_release("0.33.0"), release_of("0.33.0"))

    def test_releases_name_queues_and_what_ends_a_request_each_in_its_way(self) -> None:
        for version, queue, movers in (
            ("0.20.2", "skipped_waiting", ()),
            ("0.25.1", "skipped_waiting", ()),
            ("0.26.0", "skipped_waiting", ("move_block_hashes",)),
            ("0.30.0", "skipped_waiting", ("move_block_hashes",)),
            ("0.31.0", "kv_holding_waiting", ("move_block_hashes",)),
        ):
            release = nearest_release(version)
            self.assertEqual((release.waiting_queues[0], release.hash_movers), (queue, movers))
        self.assertEqual(nearest_release("0.25.1").finished_id(("r0", 0)), "r0")
        request = SimpleNamespace(request_id="r0")
        self.assertEqual(nearest_release("0.26.0").finished_id(request), "r0")


class RequestTest(unittest.TestCase):
    def test_an_event_has_what_decides(self) -> None:
        request = fakes.request(
            "r", eos_token_id=9, stop_token_ids={12, 11, -1, 1 << 31}, cache_salt="s", priority=2
        )
        self.assertEqual(
            add_event(request, with_priority=True),
            {"add": "r", "prompt": {"tokens": [1, 2, 3]}, "max_tokens": 4, "arrival": 0.5,
             "priority": 2, "cache_salt": "s", "eos": 9, "stop_token_ids": [11, 12]},
        )  # fmt: skip
        self.assertNotIn("priority", add_event(request, with_priority=False))

    def test_what_ends_a_request_or_keeps_it_from_the_cache_is_stated(self) -> None:
        repetition = SimpleNamespace(max_pattern_size=8, min_pattern_size=2, min_count=3)
        event = add_event(
            fakes.request(
                "r",
                min_tokens=5,
                repetition_detection=repetition,
                skip_reading_prefix_cache=True,
            ),
            with_priority=False,
        )
        self.assertEqual(event["min_tokens"], 5)
        self.assertEqual(event["repetition_detection"], vars(repetition))
        self.assertIs(event["skip_reading_prefix_cache"], True)
        plain = add_event(fakes.request("r", stop_token_ids={-1}), with_priority=False)
        self.assertEqual(set(plain), {"add", "prompt", "max_tokens", "arrival"})

    def test_what_hashes_cover_beside_tokens_is_stated(self) -> None:
        adapter = SimpleNamespace(lora_name="sql", lora_int_id=3, lora_path="/adapters/sql")
        place = SimpleNamespace(offset=1, length=4, is_embed=[True, True, False, True])
        image = SimpleNamespace(identifier="cat", modality="image", mm_position=place)
        event = add_event(
            fakes.request("r", cache_salt="s", lora_request=adapter, mm_features=[image]),
            with_priority=False,
        )
        self.assertEqual(
            {key: event[key] for key in ("cache_salt", "lora", "mm")},
            {"cache_salt": "s",
             "lora": {"name": "sql", "id": 3, "path": "/adapters/sql"},
             "mm": [{"id": "cat", "kind": "image", "at": 1, "n": 4,
                     "embed": [[0, 2], [3, 1]]}]},
        )  # fmt: skip

    def test_embeddings_are_digests_of_hash_blocks_the_engine_s_own_where_it_has_them(self) -> None:
        rows = fakes.Embeddings([10, 20, 30])
        request = fakes.request(
            "r",
            prompt_token_ids=None,
            prompt_embeds=rows,
            _prompt_embeds_per_block_hashes={(0, 2): b"\x01\xab"},
        )
        event = add_event(request, with_priority=False, hash_block_size=2)
        self.assertEqual(event["prompt"], {"tokens": [0, 0, 0]})
        tail = hashlib.sha256(bytes([30])).hexdigest()
        self.assertEqual(event["embeds"], {"digest_tokens": 2, "digests": ["01ab", tail]})
        header = {"config": {"enable_prefix_caching": False}, "hash_block_size": 2}
        self.assertIsNone(why_not_recordable(request, header))

    def test_arrivals_have_nine_digits_and_no_exponent(self) -> None:
        for time, expected in ((1763712000.1234567, 1763712000.1234567), (1e-5, 0.0)):
            event = add_event(fakes.request("r", arrival_time=time), with_priority=False)
            self.assertEqual(event["arrival"], expected)
            self.assertNotIn(b"e-", encode_json(event["arrival"]))

    def test_what_reaches_hashes_or_queues_by_other_ways_is_named(self) -> None:
        header = {
            "config": {"enable_prefix_caching": True, "num_hash_lookahead_tokens": 1},
            "hash_block_size": 2,
        }
        hashed = {"block_hashes": [b"h"]}  # of three tokens, with one after a block
        self.assertIsNone(why_not_recordable(fakes.request("r", **hashed), header))
        for hashes in ([], [b"h", b"i"]):
            self.assertEqual(
                why_not_recordable(fakes.request("r", block_hashes=hashes), header),
                "block hashes that are not the engine core's",
            )
        header["config"]["enable_prefix_caching"] = False
        self.assertIsNone(why_not_recordable(fakes.request("r", **hashed), header))
        for change, reason in (
            ({"prompt_token_ids": None}, "a prompt without token ids"),
            ({"pooling_params": object()}, "a pooling request"),
            ({"structured_output_request": object()}, "structured output"),
            ({"resumable": True}, "streaming input"),
            ({"num_computed_tokens": 2}, "tokens that were computed before it came"),
        ):
            self.assertEqual(why_not_recordable(fakes.request("r", **change), header), reason)


class OptionsTest(unittest.TestCase):
    def test_an_option_stands_in_one_table(self) -> None:
        counts = Counter(name for names in tables().values() for name in names)
        self.assertEqual([name for name, count in counts.items() if count > 1], [])

    def test_each_choice_that_the_format_cannot_say_is_named(self) -> None:
        self.assertEqual(self.named(), [])
        chosen = {
            "max_num_scheduled_tokens": dict(max_num_scheduled_tokens=60),
            "pipeline_parallel_size": dict(pipeline_parallel_size=2),
            "max_num_active_seqs": dict(max_num_active_seqs=2),
            "long_prefill_token_threshold_adaptive": dict(
                long_prefill_token_threshold_adaptive=True
            ),
            "watermark": dict(watermark=0.1),
            "prefill_schedule_interval": dict(prefill_schedule_interval=2),
            "num_speculative_tokens_per_batch_size": dict(
                speculative_config=fakes.drafts(
                    "ngram", num_speculative_tokens_per_batch_size=[(1, 4, 2)]
                )
            ),
            "max_num_new_slots_for_drafting": dict(
                speculative_config=fakes.drafts("eagle", max_num_new_slots_for_drafting=1)
            ),
            "num_lookahead_tokens": dict(
                speculative_config=fakes.drafts("eagle"), num_lookahead_tokens=3
            ),
            "use_eagle_block_drop": dict(
                speculative_config=fakes.drafts("eagle", use_eagle_block_drop=lambda: False)
            ),
            "enable_mamba_shared_prefix_checkpoint": dict(
                enable_mamba_shared_prefix_checkpoint=True
            ),
            "aux_output": dict(aux_output_config=SimpleNamespace(enabled=True)),
            "hisparse": dict(groups=[fakes.group(fakes.spec(), host_resident=True)]),
        }
        self.assertEqual(list(chosen), [flag.name for flag in FLAGS])
        for name, changes in chosen.items():
            self.assertEqual(self.named(**changes), [name])

    def named(self, groups: Any = (), **changes: Any) -> list[str]:
        return beyond_format(fakes.config(**changes), fakes.cache(list(groups)))

    def test_drafters_that_the_format_knows_are_not_named(self) -> None:
        for method, lookahead in (("eagle", 2), ("draft_model", 2), ("ngram", 0)):
            config = dict(speculative_config=fakes.drafts(method), num_lookahead_tokens=lookahead)
            self.assertEqual(self.named(**config), [])


if __name__ == "__main__":
    unittest.main()
