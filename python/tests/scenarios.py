"""Configurations and workloads from a seed: what the recorder's tests let vLLM serve.

A family is a function of a random generator that returns the header of a recording (without what
vLLM derives); a Workload says what clients and the model do, step by step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

EOS = 50001
STOP_TOKENS = [50002, 50003]  # further tokens that end a request, as many models have


def full(block_size: int = 16) -> dict[str, Any]:
    return {
        "type": "full",
        "block_size": block_size,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bf16",
    }


def sliding(block_size: int, window: int) -> dict[str, Any]:
    return full(block_size) | {"type": "sliding_window", "sliding_window": window}


def chunked(block_size: int, chunk: int) -> dict[str, Any]:
    return full(block_size) | {"type": "chunked_local", "attention_chunk_size": chunk}


def mla(block_size: int) -> dict[str, Any]:
    return full(block_size) | {"type": "mla", "num_kv_heads": 1, "head_size": 576}


def hidden(block_size: int) -> dict[str, Any]:
    return full(block_size) | {"type": "hidden_state", "num_kv_heads": 3, "head_size": 128}


def behind_sinks(block_size: int) -> dict[str, Any]:
    return full(block_size) | {"sink_len": 2 * block_size}


def reference_window(block_size: int) -> dict[str, Any]:
    return full(block_size) | {"rswa_window": block_size + 3}


def mamba(block_size: int, mode: str, num_speculative_blocks: int = 0) -> dict[str, Any]:
    return {
        "type": "mamba",
        "block_size": block_size,
        "shapes": [[3, 256], [4, 32, 32]],
        "dtypes": ["bf16", "fp32"],
        "mamba_cache_mode": mode,
        "num_speculative_blocks": num_speculative_blocks,
    }


Parts = tuple[list[dict[str, Any]], dict[str, Any]]  # specs of the groups, options


def _one_of(*choices: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(choices)


def _hybrid(
    make: Callable[[random.Random, int], dict[str, Any]],
) -> Callable[[random.Random], Parts]:
    def parts(rng: random.Random) -> Parts:
        block_size = rng.choice((8, 16, 32))
        others = [make(rng, block_size)] * rng.randint(1, 3)
        specs = [full(block_size), *others]
        if rng.random() < 0.3:
            specs.reverse()
        return specs, {"block_size": block_size}

    return parts


def _mamba_hybrid(mode: str, num_spec: int = 0) -> Callable[[random.Random], Parts]:
    def parts(rng: random.Random) -> Parts:
        block_size = rng.choice((16, 32, 48))
        # Mode none keeps one state for the whole request: its block is as long as a request can be.
        state_block_size = 192 if mode == "none" else block_size
        states = [mamba(state_block_size, mode, num_spec)] * rng.randint(1, 3)
        options = {
            "block_size": block_size,
            "mamba_cache_mode": mode,
            "enable_prefix_caching": mode != "none",
            "max_model_len": 192,
        }
        if mode == "all":
            options["mamba_block_size"] = block_size
        if num_spec:
            options |= {"num_spec_tokens": num_spec, "spec_method": "eagle"}
        return [full(block_size), *states], options

    return parts


def _alone(
    spec: Callable[[int], dict[str, Any]], **options: Any
) -> Callable[[random.Random], Parts]:
    """One group; an option that is a function is called with the generator."""

    def parts(rng: random.Random) -> Parts:
        block_size = rng.choice((4, 16, 32))
        drawn = {key: value(rng) if callable(value) else value for key, value in options.items()}
        return [spec(block_size)], {"block_size": block_size} | drawn

    return parts


def _different_block_sizes(rng: random.Random) -> Parts:
    window = rng.choice((20, 64, 100))
    return [full(8), sliding(32, window)], {"block_size": 8}


def _context_parallel(rng: random.Random) -> Parts:
    dcp, pcp = rng.choice(((2, 1), (4, 1), (1, 2), (2, 2)))
    return [full(16)], {"block_size": 16, "dcp": dcp, "pcp": pcp, "max_model_len": 512}


def _whole_caches(rng: random.Random) -> Parts:
    """Caches that ranks shard and caches that every rank replicates: rows and windows."""
    options: dict[str, Any] = {"block_size": 16, "dcp": rng.choice((2, 2, 4)), "max_model_len": 512}
    whole = {"dcp_sharded": False}
    beside = [full(16) | whole, full(32) | whole, _window(rng, 16) | whole, _window(rng, 8) | whole]
    specs = [full(16), *rng.sample(beside, rng.choice((1, 1, 2)))]
    if rng.random() < 0.5:
        options |= {"num_spec_tokens": rng.choice((1, 3)), "spec_method": "eagle"}
    options["async_scheduling"] = rng.random() < 0.5
    return specs, options


def _window(rng: random.Random, block_size: int) -> dict[str, Any]:
    return sliding(block_size, rng.choice((8, 20, 64)))


def _chunk(rng: random.Random, block_size: int) -> dict[str, Any]:
    return chunked(block_size, block_size * rng.choice((1, 2, 4)))


def _mixed(rng: random.Random) -> Parts:
    """Mixed options: combinations that have no family of their own."""
    parts = rng.choice(
        (
            _hybrid(_window),
            _hybrid(_chunk),
            _mamba_hybrid("align"),
            _mamba_hybrid("none"),
            _alone(full),
            _alone(mla),
            _different_block_sizes,
        )
    )
    specs, options = parts(rng)
    for key, values in (
        ("async_scheduling", (False, True)),
        ("policy", ("fcfs", "priority")),
        ("long_prefill_token_threshold", (0, 0, 8, 32)),
    ):
        options[key] = rng.choice(values)
    num_spec = rng.choice((0, 0, 1, 3))
    if num_spec:
        # vLLM drafts with ngram only when a step waits for the previous one.
        methods = ["draft_model"] if options["async_scheduling"] else ["ngram", "draft_model"]
        if all(spec["type"] != "chunked_local" for spec in specs):  # vLLM refuses the two together
            methods.append("eagle")
        options |= {"num_spec_tokens": num_spec, "spec_method": rng.choice(methods)}
        specs = [
            spec | {"num_speculative_blocks": num_spec} if spec["type"] == "mamba" else spec
            for spec in specs
        ]
    return specs, options


FAMILIES: dict[str, Callable[[random.Random], Parts]] = {
    "full_attention": _alone(full, enable_prefix_caching=False),
    "full_prefix_cache": _alone(full),
    "mla": _alone(mla),
    "sliding_window": lambda rng: ([_window(rng, 16)], {"block_size": 16}),
    "full_and_sliding_window": _hybrid(_window),
    "full_and_chunked_local": _hybrid(_chunk),
    "different_block_sizes": _different_block_sizes,
    "hidden_state_group": lambda rng: ([full(16), hidden(rng.choice((16, 32)))],
                                       {"block_size": 16, "enable_prefix_caching": False}),
    "mamba_none": _mamba_hybrid("none"),
    "mamba_align": _mamba_hybrid("align"),
    "mamba_all": _mamba_hybrid("all"),
    "context_parallel": _context_parallel,
    "priority": _alone(full, policy="priority"),
    "long_prefill_threshold": _alone(full, long_prefill_token_threshold=_one_of(4, 8, 32)),
    "no_chunked_prefill": _alone(full, enable_chunked_prefill=False, max_num_batched_tokens=256),
    "async_scheduling": _alone(full, async_scheduling=True),
    "async_sliding_window": lambda rng: ([full(16), _window(rng, 16)],
                                         {"block_size": 16, "async_scheduling": True}),
    "async_spec_decode": _alone(full, async_scheduling=True, num_spec_tokens=_one_of(1, 2, 3),
                                spec_method="eagle"),
    "spec_decode_ngram": _alone(full, num_spec_tokens=_one_of(1, 2, 5), spec_method="ngram"),
    "spec_decode_draft_model": _alone(full, num_spec_tokens=_one_of(1, 3),
                                      spec_method="draft_model"),
    "spec_decode_eagle": _alone(full, num_spec_tokens=_one_of(1, 3), spec_method="eagle"),
    "spec_decode_eagle_sliding_window": lambda rng: (
        [full(16), _window(rng, 16)],
        {"block_size": 16, "num_spec_tokens": rng.choice((1, 3)), "spec_method": "eagle"}),
    "spec_decode_mamba": _mamba_hybrid("align", num_spec=2),
    "mixed": _mixed,
}  # fmt: skip

# Families beyond those of the format as it was; recorded when they are asked for.
LATER_FAMILIES: dict[str, Callable[[random.Random], Parts]] = {
    "pauses": _alone(full),
    "async_pauses": _alone(full, async_scheduling=True),
    "async_spec_decode_pauses": _alone(full, async_scheduling=True, num_spec_tokens=_one_of(1, 2),
                                       spec_method="eagle"),
    "rare_parameters": _alone(full, async_scheduling=_one_of(False, True)),
    "sinks": _alone(behind_sinks, async_scheduling=_one_of(False, True)),
    "reference_windows": _alone(reference_window, async_scheduling=_one_of(False, True),
                                enable_prefix_caching=_one_of(False, True)),
    "whole_caches": _whole_caches,
}  # fmt: skip
PAUSING = {"pauses", "async_pauses", "async_spec_decode_pauses"}
WITH_ALL_PARAMETERS = {"rare_parameters"}

# What a release refuses to configure.
REFUSED = {"0.33.0": {"mamba_all"}}


def make_header(family: str, seed: int) -> dict[str, Any]:
    """The configuration of one scenario: config, groups, num_blocks."""
    rng = random.Random(f"{family} {seed}")
    specs, options = (FAMILIES | LATER_FAMILIES)[family](rng)
    config = {
        "max_num_seqs": rng.choice((2, 4, 8, 16)),
        "max_num_batched_tokens": rng.choice((16, 32, 64, 128, 256)),
        "max_model_len": rng.choice((96, 128, 192, 256)),
        "enable_prefix_caching": True,
        "scheduler_reserve_full_isl": rng.random() < 0.5,
    } | options
    if config.get("spec_method") == "draft_model":  # each request may take a slot of the budget
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], 64)
    # From a pool that holds one request to one that never runs out.
    needs = [-(-config["max_model_len"] // spec["block_size"]) + 4 for spec in specs]
    num_blocks = 2 + int(sum(needs) * rng.choice((1.0, 1.3, 2.0, 6.0)))
    groups = [{"layers": [f"layers.{i}"], "spec": spec} for i, spec in enumerate(specs)]
    return {"family": family, "seed": seed, "config": config, "groups": groups,
            "num_blocks": num_blocks}  # fmt: skip


class Workload:
    """The clients' requests and the model's outputs, all generated from one seed."""

    def __init__(self, header: dict[str, Any], num_requests: int = 24) -> None:
        self.rng = random.Random(f"workload {header['family']} {header['seed']}")
        self.header_family = header["family"]
        self.config = header["config"]
        self.left = num_requests
        self.made = 0
        self.pauses = header["family"] in PAUSING
        self.prefixes = [self._tokens(self.config["max_model_len"]) for _ in range(3)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(50000) for _ in range(count)]

    def request(self) -> dict[str, Any]:
        """An `add` entry: a prompt that may share its head with others, and how it may end."""
        rng, longest = self.rng, self.config["max_model_len"] - 2
        head = rng.choice(self.prefixes)[: rng.randint(1, longest)]
        prompt = (head + self._tokens(rng.choice((0, 1, 7, 40))))[:longest]
        event: dict[str, Any] = {
            "add": f"r{self.made}",
            "prompt": {"tokens": prompt},
            "max_tokens": rng.choice((1, 2, 5, 16, 40)),
            "arrival": float(self.made),
        }
        if self.config.get("policy") == "priority":
            event["priority"] = rng.randrange(3)
        if rng.random() < 0.1:
            event["cache_salt"] = rng.choice("ab")
        if rng.random() < 0.4:
            event["eos"] = EOS
        if rng.random() < 0.3:
            event["stop_token_ids"] = STOP_TOKENS
        if self.header_family in WITH_ALL_PARAMETERS:
            event |= self._rare_parameters(event["max_tokens"])
        self.made += 1
        self.left -= 1
        return event

    def _rare_parameters(self, max_tokens: int) -> dict[str, Any]:
        """Parameters of few requests; token() generates frequent repetitions for them."""
        rng = self.rng
        rare: dict[str, Any] = {}
        if rng.random() < 0.4:
            rare["min_tokens"] = min(rng.choice((1, 4, 12)), max_tokens)
        if rng.random() < 0.3:
            rare["skip_reading_prefix_cache"] = True
        if rng.random() < 0.5:
            smallest = rng.choice((1, 2))
            rare["repetition_detection"] = {
                "max_pattern_size": smallest + rng.randrange(3),
                "min_pattern_size": smallest,
                "min_count": rng.choice((2, 3)),
            }
        return rare

    def answered(self, name: str, tokens: list[int]) -> None:
        """The model's tokens for one request, for workloads that continue from outputs."""

    def arrivals(self) -> list[dict[str, Any]]:
        """Requests that arrive before the next step."""
        count = self.rng.choice((0, 0, 0, 1, 1, 2, 4))
        return [self.request() for _ in range(min(count, self.left))]

    def token(self) -> int:
        """One sampled token; sometimes one of the request's end or stop tokens."""
        if self.rng.random() < 0.06:
            return self.rng.choice((EOS, *STOP_TOKENS))
        if self.header_family in WITH_ALL_PARAMETERS:
            return self.rng.randrange(3)
        return self.rng.randrange(50000)

    def sample(self, drafts: list[int]) -> list[int]:
        """The model's tokens for one request: the accepted head of its drafts, and one more."""
        accepted = self.rng.randint(0, len(drafts))
        head = [self.token() if draft < 0 else draft for draft in drafts[:accepted]]
        return [*head, self.token()]

    def drafts(self) -> list[int]:
        """Drafts for one request: the configured number, or with ngram as many as were found."""
        count = self.config["num_spec_tokens"]
        if self.config["spec_method"] == "ngram":
            count = self.rng.randint(0, count)
        return self._tokens(count)
