"""vLLM's configuration and groups for a case."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from lockstep_engines.protocol import Refused
from lockstep_engines.vllm import engine as vllm_engine
from lockstep_engines.worker import case as worker_case
from lockstep_engines.worker import layers as worker_layers


def has_drafts_in_flight(config: dict[str, Any]) -> bool:
    """True if a step is scheduled before the drafts of the previous step are verified."""
    return bool(config.get("num_spec_tokens", 0) and config.get("async_scheduling", False))


def make_config(case: dict[str, Any], folder: str, is_v2: bool) -> Any:
    """The VllmConfig; `folder` has the model's config.json. Raises Refused as vLLM refuses it."""
    config = case["config"]
    rows = [group["spec"] for group in case["groups"] if group["spec"]["type"] != "mamba"]
    first = rows[0] if rows else {"block_size": config["block_size"], "dtype": "bf16"}
    drafts: dict[str, Any] = {}
    if config.get("num_spec_tokens"):
        drafts["speculative_config"] = _speculative(config, folder, is_v2)
    most = max(config["max_num_batched_tokens"], config["max_num_seqs"])
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=max(most, config["max_model_len"])
        if not config.get("enable_chunked_prefill", True)
        else most,
        block_size=first["block_size"],
        num_gpu_blocks_override=case["num_blocks"],
        dtype=worker_case.DTYPES[first["dtype"]],
        disable_log_stats=True,
        seed=0,
        async_scheduling=config.get("async_scheduling", False),
        enable_prefix_caching=config["enable_prefix_caching"],
        **drafts,
    )
    states = [group["spec"] for group in case["groups"] if group["spec"]["type"] == "mamba"]
    if states:
        arguments.mamba_cache_mode = states[0].get("mamba_cache_mode", "none")
    try:
        made = arguments.create_engine_config()
        for spec in states:
            _set_states(spec, made.cache_config)
        _set_hashes(config, made)
        return made
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
        reason = next((line for line in lines if line.startswith("Value error")), lines[0])
        raise Refused(f"the configuration: {reason.partition(' [type=')[0]}") from None


def _speculative(config: dict[str, Any], folder: str, is_v2: bool) -> dict[str, Any]:
    """Any speculator: the worker verifies the drafts of all of them the same way, and
    worker/speculator.py replaces what it proposes."""
    named = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    has_ngrams = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram")
    if has_drafts_in_flight(config) if not is_v2 else not has_ngrams:
        named = {"method": "eagle", "model": folder}
    return named | {"num_speculative_tokens": config["num_spec_tokens"]}


def _set_states(spec: dict[str, Any], cache_config: Any) -> None:
    """Sets what vLLM's executor computes between making a model and its cache."""
    asked, mode = spec.get("mamba_cache_mode", "none"), cache_config.mamba_cache_mode
    if asked != mode:
        raise Refused(f"states in cache mode {asked}: vLLM's configuration makes it {mode}")
    cache_config.mamba_block_size = spec["block_size"]
    cache_config.mamba_page_size_padded = spec.get("page_size_padded")


def _set_hashes(config: dict[str, Any], made: Any) -> None:
    """Sets what a prefill's export follows from: the unit of hashes, and whether the speculator of
    the case, in whose place any other runs, drops the last block."""
    if config.get("prefix_match_unit"):
        made.cache_config.prefix_match_unit = config["prefix_match_unit"]
    drafts = made.speculative_config
    if drafts is None:
        return
    drops = config.get("spec_method") == "eagle"
    object.__setattr__(drafts, "use_eagle_block_drop", lambda: drops)
    if hasattr(drafts, "disable_lookahead_block_hashes"):
        drafts.disable_lookahead_block_hashes = config.get("num_hash_lookahead_tokens", -1) == 0


def make_groups(case: dict[str, Any], state_type: str) -> list[Any]:
    """vLLM's KVCacheGroupSpecs. Raises Refused where the release lacks a field."""
    try:
        groups = vllm_engine.make_groups(case)
    except vllm_engine.NotInThisRelease as error:
        raise Refused(str(error)) from None
    for group, told in zip(groups, case["groups"], strict=True):
        if told["spec"]["type"] == "mamba":
            kind = worker_case.state_type_of(told["spec"], state_type)
            group.kv_cache_spec = dataclasses.replace(
                group.kv_cache_spec, mamba_type=worker_layers.STATE_TYPES[kind]
            )
    return groups
