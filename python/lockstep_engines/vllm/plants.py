"""Defects to plant in vLLM's scheduling code (plants.py), by class.

Each is a plausible slip in a change: an index one off, a case forgotten, a line
moved. For 0.33.0 and, where the text exists, other releases.
"""

from __future__ import annotations

from lockstep_engines.plants import Edit, Plant

_POOL = "vllm.v1.core.block_pool"
_HASHES = "vllm.v1.core.kv_cache_utils"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler"


def _one(module: str, find: str, put: str, within: str = "") -> tuple[Edit, ...]:
    return (Edit(module, find, put, within),)


_LIMIT_IS_NOT_CHECKED = (
    Edit(_SCHEDULER, "assert total_num_scheduled_tokens <= ", "assert 0 <= "),
    Edit(_SCHEDULER, "assert token_budget >= 0", "assert True"),
)
_SEATS_ARE_NOT_CHECKED = Edit(_SCHEDULER, "assert len(self.running) <= ", "assert 0 <= ")

PLANTS = (
    Plant(
        "window-off-by-one",
        "memory",
        "A sliding window gives its oldest block back one token too early.",
        (_one(_MANAGERS, "tokens - self.sliding_window + 1", "tokens - self.sliding_window + 2"),),
    ),
    Plant(
        "chunk-off-by-one",
        "memory",
        "Chunked local attention gives a chunk back while its last token is to come.",
        (
            _one(
                _MANAGERS,
                "num_computed_tokens // self.attention_chunk_size",
                "(num_computed_tokens + 1) // self.attention_chunk_size",
            ),
        ),
    ),
    Plant(
        "sharer-not-counted",
        "memory",
        "A hit on a block in use does not count: the first request to end frees it.",
        (_one(_POOL, "block.ref_cnt += 1", "block.ref_cnt += block.ref_cnt == 0", "def touch("),),
    ),
    Plant(
        "shared-block-freed",
        "memory",
        "A block is free as soon as one user is left.",
        (_one(_POOL, "block.ref_cnt == 0", "block.ref_cnt <= 1", "def free_blocks("),),
    ),
    Plant(
        "hash-of-reused-block",
        "memory",
        "A block that is allocated again stays in the prefix cache under its old hash.",
        (
            _one(
                _POOL,
                "self._maybe_evict_cached_block(block)",
                "block.reset_hash()",
                "def get_new_blocks(",
            ),
        ),
    ),
    Plant(
        "salt-not-hashed",
        "memory",
        "Requests of different cache salts share blocks.",
        (_one(_HASHES, "(start_token_idx == 0 and request.cache_salt)", "False"),),
    ),
    Plant(
        "parent-not-hashed",
        "memory",
        "A block's hash covers its own tokens and not those before it.",
        (_one(_HASHES, "hash_function((parent_block_hash, ", "hash_function((NONE_HASH, "),),
    ),
    Plant(
        "group-not-in-key",
        "memory",
        "Groups share one table of hashes: a hit takes the block of another group.",
        (_one(_HASHES, "group_id.to_bytes(", "(0).to_bytes("),),
    ),
    Plant(
        "hit-of-whole-prompt",
        "memory",
        "A prompt may be hit to its last token, with none left to compute.",
        (
            _one(
                _MANAGER,
                "max_cache_hit_length = request.num_tokens - 1",
                "max_cache_hit_length = request.num_tokens",
                "def get_computed_blocks(",
            ),
        ),
    ),
    Plant(
        "window-hit-too-short",
        "memory",
        "A window is hit with one block less than it reaches back.",
        (
            _one(
                _MANAGERS,
                "cdiv(window_size - 1, block_size)",
                "max(1, cdiv(window_size - 1, block_size) - 1)",
            ),
            _one(
                _MANAGERS,
                "kv_cache_spec.sliding_window - 1, kv_cache_spec.block_size",
                "max(1, kv_cache_spec.sliding_window - 1 - kv_cache_spec.block_size), "
                "kv_cache_spec.block_size",
            ),
        ),
    ),
    Plant(
        "state-freed-early",
        "states",
        "In mode align the state that the next step copies from is freed before.",
        (_one(_MANAGERS, "< cdiv(", "<= cdiv("),),
    ),
    Plant(
        "state-of-this-step-freed",
        "states",
        "The block with the state of the last computed token counts as done with.",
        (_one(_MANAGERS, "return num_computed_tokens - 1", "return num_computed_tokens"),),
    ),
    Plant(
        "rejected-counts-as-computed",
        "drafts",
        "Of the rejected drafts one stays in the number of computed tokens.",
        (
            _one(
                _SCHEDULER,
                "request.num_computed_tokens -= num_rejected",
                "request.num_computed_tokens -= max(num_rejected - 1, 0)",
            ),
        ),
    ),
    Plant(
        "no-slots-for-drafts",
        "drafts",
        "Nothing is reserved for the tokens that the drafter writes.",
        (
            _one(
                _MANAGER,
                "+ num_lookahead_tokens,",
                "+ 0 * num_lookahead_tokens,",
                "def allocate_slots(",
            ),
        ),
    ),
    Plant(
        "placeholder-of-rejected",
        "async",
        "A rejected draft's placeholder stays.",
        (
            _one(
                _SCHEDULER,
                "request.num_output_placeholders -= num_rejected",
                "request.num_output_placeholders -= max(num_rejected - 1, 0)",
            ),
        ),
    ),
    Plant(
        "unsampled-tokens-cached",
        "async",
        "Blocks are cached up to tokens whose step has not returned.",
        (
            _one(
                _SCHEDULER,
                "request.num_computed_tokens - request.num_in_flight_tokens,",
                "request.num_computed_tokens,",
            ),
            _one(
                _ASYNC,
                "request.num_computed_tokens - request.num_output_placeholders",
                "request.num_computed_tokens",
            ),
        ),
    ),
    Plant(
        "preempted-keeps-computed",
        "preemption",
        "A preempted request resumes as if its first block were computed.",
        (
            _one(
                _SCHEDULER,
                "request.num_computed_tokens = 0",
                "request.num_computed_tokens = min(request.num_computed_tokens, self.block_size)",
                "def _preempt_request(",
            ),
        ),
    ),
    Plant(
        "preempts-most-important",
        "preemption",
        "The request of the highest priority is preempted, not of the lowest.",
        (
            _one(
                _SCHEDULER,
                "key=lambda r: (r.priority, r.arrival_time)",
                "key=lambda r: (-r.priority, r.arrival_time)",
            ),
        ),
    ),
    Plant(
        "preempted-is-lost",
        "starvation",
        "A preempted request is in no queue.",
        (
            _one(
                _SCHEDULER,
                "self.waiting.prepend_request(request)",
                "len(self.waiting)",
                "def _preempt_request(",
            ),
        ),
    ),
    Plant(
        "abort-keeps-blocks",
        "leak",
        "The blocks of a request that is aborted are never freed.",
        (
            _one(
                _SCHEDULER,
                "delay_free_blocks=delay_free_blocks)",
                "delay_free_blocks=True)",
                "def finish_requests(",
            ),
        ),
    ),
    Plant(
        "aborted-runs-on",
        "aborts",
        "A request that is aborted while it runs stays among the running requests.",
        (
            _one(
                _SCHEDULER,
                "remove_all(self.running, running_requests_to_remove)",
                "self.running",
                "def finish_requests(",
            ),
        ),
    ),
    Plant(
        "end-not-reported",
        "leak",
        "Workers are never notified of ended requests.",
        (
            _one(
                _SCHEDULER,
                "self.finished_req_ids.add(request_id)",
                "self.finished_req_ids.discard(request_id)",
                "def _free_request(",
            ),
        ),
    ),
    Plant(
        "budget-per-request",
        "budget",
        "Every request that begins may take all tokens of a step.",
        (
            (
                Edit(
                    _SCHEDULER,
                    "num_new_tokens = min(num_new_tokens, request_token_budget)",
                    "num_new_tokens = min(num_new_tokens, self.max_num_scheduled_tokens)",
                ),
                *_LIMIT_IS_NOT_CHECKED,
            ),
            (
                Edit(
                    _SCHEDULER,
                    "                    num_new_tokens = min(num_new_tokens, token_budget)",
                    "                    num_new_tokens = "
                    "min(num_new_tokens, self.max_num_scheduled_tokens)",
                ),
                *_LIMIT_IS_NOT_CHECKED,
            ),
        ),
    ),
    Plant(
        "one-seat-too-many",
        "budget",
        "One request more runs than max_num_seqs.",
        (
            (
                Edit(
                    _SCHEDULER,
                    "if num_running >= self.max_num_active_reqs:",
                    "if num_running > self.max_num_active_reqs:",
                ),
                _SEATS_ARE_NOT_CHECKED,
            ),
            (
                Edit(
                    _SCHEDULER,
                    "if num_running >= self.max_num_running_reqs:",
                    "if num_running > self.max_num_running_reqs:",
                ),
                _SEATS_ARE_NOT_CHECKED,
            ),
            (
                Edit(
                    _SCHEDULER,
                    "if len(self.running) == self.max_num_running_reqs:",
                    "if len(self.running) > self.max_num_running_reqs:",
                ),
                _SEATS_ARE_NOT_CHECKED,
            ),
        ),
    ),
    Plant(
        "full-block-not-cached",
        "hits",
        "The last full block of each step never gets its hash: hits are lost.",
        (
            _one(
                _MANAGERS,
                "            num_full_blocks=num_full_blocks,",
                "            num_full_blocks=num_full_blocks - (block_mask is None),",
            ),
        ),
    ),
    Plant(
        "blocks-freed-while-sent",
        "connectors",
        "Blocks that a connector keeps until they are sent are freed when the request ends.",
        (
            _one(
                _SCHEDULER,
                "delay_free_blocks |= connector_delay_free_blocks",
                "delay_free_blocks |= False",
            ),
        ),
    ),
    Plant(
        "loading-is-not-apart",
        "connectors",
        "A request whose load is in flight waits among those that can run.",
        (
            _one(
                _SCHEDULER,
                "return (\n            request.num_computed_tokens > 0",
                "return False and (\n            request.num_computed_tokens > 0",
                "def _holds_kv_blocks(",
            ),
            _one(
                _SCHEDULER,
                "self.skipped_waiting.prepend_requests(step_skipped_waiting)",
                "self.waiting.prepend_requests(step_skipped_waiting)",
            ),
        ),
    ),
)


def named(name: str) -> Plant:
    """The defect of this name; KeyError."""
    return {plant.name: plant for plant in PLANTS}[name]
