"""One request as the format writes it, and what the format cannot write."""

from typing import Any


def num_hashes(num_tokens: int, config: dict[str, Any], hash_block_size: int) -> int:
    """How many hashes a prompt has in an engine with this header's `config`."""
    if not config["enable_prefix_caching"]:
        return 0
    lookahead = config.get("num_hash_lookahead_tokens", 0)
    return max(0, num_tokens - lookahead) // hash_block_size


def why_not_recordable(request: Any, header: dict[str, Any]) -> str | None:
    """Why a recording with this header cannot go on with this request; None when it can.

    What is refused here reaches block hashes or the queues by ways that a recording does not carry.
    """
    config, hash_block_size = header["config"], header["hash_block_size"]
    params = request.sampling_params
    refusals = (
        (request.prompt_token_ids is None, "a prompt without token ids"),
        (request.prompt_embeds is not None, "prompt embeddings"),
        (bool(request.mm_features), "multimodal inputs"),
        (request.lora_request is not None, "a LoRA adapter"),
        (request.pooling_params is not None or params is None, "a pooling request"),
        (request.structured_output_request is not None, "structured output"),
        (request.resumable, "streaming input"),
        (request.num_computed_tokens > 0, "tokens that were computed before it came"),
        (
            config["enable_prefix_caching"]
            and len(request.block_hashes)
            != num_hashes(len(request.prompt_token_ids or ()), config, hash_block_size),
            "block hashes that are not the engine core's",
        ),
    )
    return next((reason for holds, reason in refusals if holds), None)


def _seconds(time: float) -> float:
    """`time` with the nine digits of the format, more than a double of today's seconds has, so the
    order of arrivals stays; and without an exponent, which Python writes below 1e-4."""
    rounded = round(time, 9)
    return rounded if abs(rounded) >= 1e-4 else 0.0


def add_event(request: Any, with_priority: bool) -> dict[str, Any]:
    """The `add` entry of `before`: arrival in seconds as the engine counts them."""
    params = request.sampling_params
    event: dict[str, Any] = {
        "add": request.request_id,
        "prompt": {"tokens": list(request.prompt_token_ids)},
        "max_tokens": request.max_tokens,
        "arrival": _seconds(request.arrival_time),
    }
    if with_priority:
        event["priority"] = request.priority
    if request.cache_salt:
        event["cache_salt"] = request.cache_salt
    if params.eos_token_id is not None:
        event["eos"] = params.eos_token_id
    if params.stop_token_ids:
        event["stop_token_ids"] = sorted(params.stop_token_ids)
    if params.min_tokens:
        event["min_tokens"] = params.min_tokens
    if (repetition := getattr(params, "repetition_detection", None)) is not None:
        event["repetition_detection"] = {
            name: getattr(repetition, name)
            for name in ("max_pattern_size", "min_pattern_size", "min_count")
        }
    if request.skip_reading_prefix_cache:
        event["skip_reading_prefix_cache"] = True
    return event
