"""One request as the format writes it, and what the format cannot write."""

import hashlib
from typing import Any


def num_hashes(num_tokens: int, config: dict[str, Any], hash_block_size: int) -> int:
    """How many hashes a prompt has in an engine with this header's `config`."""
    if not config["enable_prefix_caching"]:
        return 0
    lookahead = config.get("num_hash_lookahead_tokens", 0)
    return max(0, num_tokens - lookahead) // hash_block_size


def why_not_recordable(request: Any, header: dict[str, Any]) -> str | None:
    """Why a recording with this header cannot continue with this request; None when it can.

    What is refused here reaches block hashes or the queues by ways that a recording does not carry.
    """
    config, hash_block_size = header["config"], header["hash_block_size"]
    params = request.sampling_params
    refusals = (
        (
            request.prompt_token_ids is None and request.prompt_embeds is None,
            "a prompt without token ids",
        ),
        (request.pooling_params is not None or params is None, "a pooling request"),
        (request.structured_output_request is not None, "structured output"),
        (request.resumable, "streaming input"),
        (request.num_computed_tokens > 0, "tokens that were computed before it came"),
        (
            config["enable_prefix_caching"]
            and len(request.block_hashes)
            != num_hashes(len(_prompt_of(request)), config, hash_block_size),
            "block hashes that are not the engine core's",
        ),
    )
    return next((reason for holds, reason in refusals if holds), None)


def _prompt_of(request: Any) -> list[int]:
    """Its token ids; of embeddings the zeros that vLLM has in their place."""
    tokens, is_token = request.prompt_token_ids, getattr(request, "prompt_is_token_ids", None)
    if tokens is None:
        return [0] * len(request.prompt_embeds)
    if is_token is None:
        return list(tokens)
    return [token if real else 0 for token, real in zip(tokens, is_token, strict=False)]


def _embeddings_of(request: Any, hash_block_size: int) -> dict[str, Any]:
    """A digest of each hash block of the prompt, and of what is left behind the last."""
    embeds, digests = request.prompt_embeds, []
    hashed = getattr(request, "_prompt_embeds_per_block_hashes", {})
    for first in range(0, len(embeds), hash_block_size):
        part = embeds[first : first + hash_block_size]
        digest = hashed.get((first, first + len(part)))
        if digest is None:  # the engine hashes no part of a block
            digest = hashlib.sha256(part.cpu().float().numpy().tobytes()).digest()
        digests.append(digest.hex())
    return {"digest_tokens": hash_block_size, "digests": digests}


def _item_of(feature: Any) -> dict[str, Any]:
    """An image or a clip, with the runs of its tokens that get a row of the encoder."""
    place = feature.mm_position
    item = {
        "id": feature.identifier,
        "kind": feature.modality,
        "at": place.offset,
        "n": place.length,
    }
    if getattr(place, "is_embed", None) is not None:
        item["embed"] = _runs_of([bool(has_row) for has_row in place.is_embed])
    return item


def _runs_of(flags: list[bool]) -> list[list[int]]:
    """[first, count] of each run of true ones."""
    runs: list[list[int]] = []
    for i, flag in enumerate(flags):
        if flag and i > 0 and flags[i - 1]:
            runs[-1][1] += 1
        elif flag:
            runs.append([i, 1])
    return runs


def keys_of(request: Any, hash_block_size: int) -> dict[str, Any]:
    """What its block hashes cover in addition to its tokens."""
    keys: dict[str, Any] = {}
    if request.cache_salt:
        keys["cache_salt"] = request.cache_salt
    if (lora := request.lora_request) is not None:
        keys["lora"] = {
            "name": lora.lora_name,
            "id": lora.lora_int_id,
            "path": lora.lora_path or "",
        }
    if request.mm_features:
        keys["mm"] = [_item_of(feature) for feature in request.mm_features]
    if request.prompt_embeds is not None:
        keys["embeds"] = _embeddings_of(request, hash_block_size)
    return keys


def _seconds(time: float) -> float:
    """`time` with the nine digits of the format, more than a double of today's seconds has, so the
    order of arrivals stays; and without an exponent, which Python writes below 1e-4."""
    rounded = round(time, 9)
    return rounded if abs(rounded) >= 1e-4 else 0.0


def add_event(request: Any, with_priority: bool, hash_block_size: int = 16) -> dict[str, Any]:
    """The `add` entry of `before`: arrival in seconds as the engine counts them."""
    params = request.sampling_params
    event: dict[str, Any] = {
        "add": request.request_id,
        "prompt": {"tokens": _prompt_of(request)},
        "max_tokens": request.max_tokens,
        "arrival": _seconds(request.arrival_time),
    }
    if with_priority:
        event["priority"] = request.priority
    event |= keys_of(request, hash_block_size)
    if params.eos_token_id is not None:
        event["eos"] = params.eos_token_id
    # vLLM 0.22.1 does not refuse ids that no token has.
    if stops := sorted(token for token in params.stop_token_ids or () if 0 <= token < 1 << 31):
        event["stop_token_ids"] = stops
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
