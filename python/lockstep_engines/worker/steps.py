"""The steps of a case in vLLM's terms: requests as the model knows them, and a SchedulerOutput per
step."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from lockstep_engines.protocol import EngineFault
from lockstep_engines.vllm.engine import VERSION
from lockstep_engines.worker import case as worker_case
from lockstep_engines.worker import model as worker_model
from lockstep_engines.worker.expected import Expected, Request

_OUTPUT_FIELDS = frozenset(entry.name for entry in dataclasses.fields(SchedulerOutput))


def _token(token: int) -> int:
    """The token in the model's vocabulary."""
    return token % 65521 % worker_case.VOCABULARY


def frequency_penalty(name: str) -> float:
    """A request's own: different requests rarely share one."""
    return 1e-6 * (1 + zlib.crc32(name.encode()) % 1000)


def _sampled_tokens(tokens: list[int], drafts: list[int]) -> list[int]:
    """The tokens in the model's vocabulary. All but the last are accepted drafts; the last differs
    from the draft at its position, whatever an engine recorded there."""
    own = [_token(token) for token in tokens]
    for i, draft in enumerate(drafts[: len(own)]):
        if i < len(own) - 1:
            own[i] = _token(draft)
        elif own[i] == _token(draft):
            own[i] = (own[i] + 1) % worker_case.VOCABULARY
    return own


class Steps:
    """Invariants:
    1. `drafts` and `scheduled` are the current step's, `_ends` the previous step's.
    2. A request's tokens are those that the model has fed or sampled, drafts excluded.
    """

    def __init__(self, num_groups: int, is_v2: bool, has_drafts_in_flight: bool) -> None:
        self._num_groups = num_groups
        self._is_v2 = is_v2
        self._has_drafts_in_flight = has_drafts_in_flight
        self.expected = Expected()
        self._requests = self.expected.requests
        self._ends: dict[str, int] = {}  # where each row ends, drafts included
        self.drafts: dict[str, list[int]] = {}
        self.scheduled: dict[str, int] = {}  # tokens by request

    def sampled(self, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
        """Appends the tokens of the current step, by request; returns them in the model's
        vocabulary."""
        own = {
            name: _sampled_tokens(sampled, self.drafts.get(name, []))
            for name, sampled in tokens.items()
        }
        for name, added in own.items():
            self._requests[name].tokens += added
        return own

    def begin(
        self, message: dict[str, Any], step: worker_model.Step, rows_of_runner: dict[str, int]
    ) -> SchedulerOutput:
        """vLLM's decision for the message `execute`; what the model should compute goes into
        `step`. `rows_of_runner`: runner V1's rows of the previous step, with drafts in flight."""
        self.scheduled = {}
        self.drafts = {}
        new, cached = [], CachedRequestData.make_empty()
        counted: dict[str, int] = {}
        ends: dict[str, int] = {}
        for row in message["scheduled"]:
            name, computed = row["id"], row["computed"]
            self.scheduled[name] = row["tokens"]
            known = self._known(name, row)
            if row.get("spec"):
                self.drafts[name] = [_token(token) for token in row["spec"]]
            step.first[name] = computed
            step.contents[name] = numpy.array(row["contents"], dtype=numpy.uint64)
            step.tokens[name] = known.tokens + [
                _token(token) if token >= 0 else worker_model.ANY_TOKEN
                for token in row.get("spec") or ()
            ]
            row = self._counted(row)
            counted[name] = row["computed"]
            if row.get("new") and (self._is_v2 or not row.get("resumed")):
                new.append(self._new_request(name, row, known))
            else:
                self._cached_request(name, row, known, cached)
            ends[name] = computed + row["tokens"]
        self._ends = ends
        drafts = self.drafts
        if self._has_drafts_in_flight:
            drafts = self._as_scheduled(rows_of_runner)
        self.expected.begin(message, counted)
        return self._output(message, new, cached, drafts)

    def _known(self, name: str, row: dict[str, Any]) -> Request:
        if "prompt" in row:
            prompt = [_token(token) for token in row["prompt"]]
            self._requests[name] = Request(name, prompt, len(prompt))
        known = self._requests[name]
        del known.tokens[row["known"] :]
        return known

    def _output(
        self, message: dict[str, Any], new: list[NewRequestData], cached: Any, drafts: Any
    ) -> SchedulerOutput:
        fields = {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": cached,
            "num_scheduled_tokens": dict(self.scheduled),
            "total_num_scheduled_tokens": sum(self.scheduled.values()),
            "scheduled_spec_decode_tokens": drafts,
            "scheduled_encoder_inputs": {},
            "finished_req_ids": set(message["finished"]),
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": set(message["preempted"]),
            "new_block_ids_to_zero": message["zero"] or None,
            "num_common_prefix_blocks": [0] * self._num_groups,
        }
        if message["copies"]:
            if "kv_cache_block_copies" not in _OUTPUT_FIELDS:
                raise EngineFault(f"found copies of blocks; vLLM {VERSION} has none")
            fields["kv_cache_block_copies"] = [
                kv_cache_utils.KVCacheBlockCopy(*copy) for copy in message["copies"]
            ]
        return SchedulerOutput(**{k: v for k, v in fields.items() if k in _OUTPUT_FIELDS})

    def _as_scheduled(self, rows_of_runner: dict[str, int]) -> dict[str, list[int]]:
        """The drafts as a scheduler passes them: -1, since they are in flight. Runner V1 keeps
        drafts by the rows of the previous step and would reject those of a request without such a
        row: their tokens are passed."""
        kept = self.drafts.keys() if self._is_v2 else rows_of_runner.keys()
        return {
            name: [-1] * len(tokens) if name in kept else tokens
            for name, tokens in self.drafts.items()
        }

    def _counted(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with `computed` as the scheduler counts it. Lockstep sends the verified position.
        A scheduler with drafts in flight decides before it receives them, and counts them all."""
        if not self._has_drafts_in_flight or row.get("resumed") or row.get("new"):
            return row
        return row | {"computed": self._ends.get(row["id"], row["computed"])}

    def _new_request(self, name: str, row: dict[str, Any], known: Request) -> NewRequestData:
        more = {"prefill_token_ids": list(known.tokens)} if self._is_v2 else {}
        return NewRequestData(
            req_id=name,
            prompt_token_ids=known.tokens[: known.num_prompt],
            mm_features=[],
            sampling_params=self._sampling_params(name, row["max_tokens"]),
            pooling_params=None,
            block_ids=tuple(row["blocks"]),
            num_computed_tokens=row["computed"],
            lora_request=None,
            **more,
        )

    def _sampling_params(self, name: str, max_tokens: int) -> SamplingParams:
        """Runner V1 receives a penalty of each request, so that its sampler uses the output tokens
        of every row. It is too small to change a token. Drafts in flight have none: their tokens
        are known to the speculator only."""
        penalty = 0.0
        if not self._is_v2 and not self._has_drafts_in_flight:
            penalty = frequency_penalty(name)
        return SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, frequency_penalty=penalty
        )

    def _cached_request(self, name: str, row: dict[str, Any], known: Request, cached: Any) -> None:
        if row.get("resumed"):
            cached.resumed_req_ids.add(name)
        if row.get("resumed") or name not in self._ends:  # was not in the previous step
            cached.all_token_ids[name] = list(known.tokens)
        blocks = tuple(row["blocks"])
        cached.req_ids.append(name)
        cached.new_block_ids.append(blocks if row.get("resumed") or any(blocks) else None)
        cached.num_computed_tokens.append(row["computed"])
        num_output = len(known.tokens) - known.num_prompt
        if self._has_drafts_in_flight and num_output:  # as the scheduler counts: all accepted
            num_output = max(num_output, row["computed"] + 1 - known.num_prompt)
        cached.num_output_tokens.append(num_output)
