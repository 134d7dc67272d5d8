"""SGLang's own scheduler behind the scheduler protocol: no GPU, no model, one process.

SGLang decides slots of tokens; they are shown as blocks (docs/engines.md#sglang): a page is a
block, page 0, into which padding is written, is the null block. The pools of full attention, of
sliding windows and of states have their own indices in SGLang; here they are consecutive ranges of
one pool of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from lockstep_engines.prompts import expand
from lockstep_engines.protocol import Client, EngineFault, Object, ProtocolError, Refused
from lockstep_engines.sglang import engine as sglang_engine
from lockstep_engines.sglang.engine import Engine, Inputs, Options, Req

# Options of a case that mean something here, with the format's defaults.
_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 32768,
    "block_size": 16,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "async_scheduling": False,
    "policy": "fcfs",
}
# Options without a counterpart in SGLang must have these values.
_WITHOUT_LIKE: dict[str, Any] = {
    "long_prefill_token_threshold": 0,
    "mamba_cache_mode": "none",
    "num_spec_tokens": 0,
    "spec_method": "none",
    "dcp": 1,
    "pcp": 1,
    "num_hash_lookahead_tokens": -1,
    "prefix_cache_retention_interval": -1,
    "num_prefill_lookahead_tokens": 1,
    "prefix_match_unit": 0,
}
# Options of vLLM that SGLang decides in its own way.
_WITHOUT_EFFECT = ("engine", "mamba_block_size", "scheduler_reserve_full_isl", "hash_algorithm")
_OWN_DEFAULTS: dict[str, Any] = {
    "schedule_policy": "fcfs",
    "mixed_chunk": False,
    "tree_core": None,  # SGLang's own choice
    "swa_eviction_interval": 1,  # SGLang's 128 is longer than a small case
    "new_token_ratio": 0.1,  # SGLang's 0.7 decays to this in 600 steps
    "pools": {},
}
_ATTENTION = ("full", "mla")
Tables = list[list[int]]


def _config_of(case: Object) -> Object:
    found = dict(_DEFAULTS)
    for key, value in case["config"].items():
        if key in _DEFAULTS:
            found[key] = value
        elif not key.startswith("x_") and key not in _WITHOUT_EFFECT:
            if key not in _WITHOUT_LIKE or value != _WITHOUT_LIKE[key]:
                raise Refused(f"option {key} = {value} is not driven in SGLang")
    return found


def _kinds_of(case: Object, page_size: int) -> list[str]:
    """The kind of each group."""
    kinds = []
    for group in case["groups"]:
        spec = group["spec"]
        kind = "full" if spec["type"] in _ATTENTION else spec["type"]
        if kind not in ("full", "sliding_window", "mamba"):
            raise Refused(f"a group of kind {spec['type']} is not driven")
        if kind != "mamba" and spec["block_size"] != page_size:
            raise Refused(
                f"a group's block_size is {spec['block_size']} and the page size {page_size}"
            )
        if kind == "mamba" and spec.get("mamba_cache_mode", "none") != "none":
            raise Refused("a request has one state in SGLang: mamba_cache_mode must be none")
        if kind in kinds:
            raise Refused(f"two groups of kind {kind}: SGLang's share one pool of slots")
        kinds.append(kind)
    if "full" not in kinds:
        raise Refused("no group of full attention: SGLang's tree is indexed by its slots")
    return kinds


def _pool_sizes(case: Object, kinds: list[str], given: Object, max_num_seqs: int) -> Object:
    """The blocks of each pool."""
    total = case["num_blocks"] - 1
    if not given:
        given = {"full": total}
        if "mamba" in kinds:
            given["mamba"] = min(total // 2, 4 * max_num_seqs)  # SGLang wants 3 at least
            given["full"] -= given["mamba"]
        if "sliding_window" in kinds:
            given["sliding_window"] = given["full"] * 4 // 9  # SGLang's 0.8 of the full ones
            given["full"] -= given["sliding_window"]
    if sorted(given) != sorted(kinds) or sum(given.values()) != total:
        raise Refused(f"pools {given}: expected one for each of {kinds}, {total} blocks in all")
    if min(given.values()) < 1:
        raise Refused(f"{total} blocks are too few for {' and '.join(kinds)}")
    return given


def _check_states(options: Options) -> None:
    """SGLang admits as many requests as there are states (KVCacheConfigurator)."""
    per_request = 3 if options.enable_prefix_caching else 1
    if 0 < options.mamba_slots < per_request * options.max_running_requests:
        raise Refused(
            f"{options.mamba_slots} states; SGLang wants {per_request} for each of "
            f"{options.max_running_requests} requests"
        )


def _options_of(case: Object) -> tuple[Options, list[str]]:
    config = _config_of(case)
    own = _OWN_DEFAULTS | case["config"].get("x_sglang", {})
    if unknown := own.keys() - _OWN_DEFAULTS.keys():
        raise Refused(f"x_sglang has {sorted(unknown)}; expected {sorted(_OWN_DEFAULTS)}")
    page_size = config["block_size"]
    kinds = _kinds_of(case, page_size)
    if "mamba" in kinds and page_size != 1:
        raise Refused("states with pages of more than one token are exported by kernels")
    if "mamba" in kinds and config["async_scheduling"]:
        raise Refused(
            "SGLang: no_buffer do not support overlap schedule (validate_mamba_no_buffer)"
        )
    chunk = config["max_num_batched_tokens"] // page_size * page_size
    if chunk == 0:
        raise Refused(f"a chunk of {config['max_num_batched_tokens']} tokens is less than a page")
    pools = _pool_sizes(case, kinds, own["pools"], config["max_num_seqs"])
    windows = [
        group["spec"]["sliding_window"]
        for group in case["groups"]
        if group["spec"]["type"] == "sliding_window"
    ]
    options = Options(
        page_size=page_size,
        max_running_requests=config["max_num_seqs"],
        context_length=config["max_model_len"] + 2,  # SGLang keeps two tokens free
        chunked_prefill_size=chunk if config["enable_chunked_prefill"] else -1,
        max_prefill_tokens=chunk,
        full_pages=pools["full"],
        swa_pages=pools.get("sliding_window", 0),
        mamba_slots=pools.get("mamba", 0),
        sliding_window=windows[0] if windows else None,
        enable_prefix_caching=config["enable_prefix_caching"],
        by_priority=config["policy"] == "priority",
        schedule_policy=own["schedule_policy"],
        mixed_chunk=own["mixed_chunk"],
        tree_core=own["tree_core"],
        overlap=config["async_scheduling"],
        swa_eviction_interval=own["swa_eviction_interval"],
        new_token_ratio=own["new_token_ratio"],
    )
    _check_states(options)
    return options, kinds


class _Blocks:
    """SGLang's slots as blocks."""

    def __init__(self, engine: Engine, kinds: list[str]) -> None:
        self._engine, self._kinds = engine, kinds
        options = engine.options
        self._page_size = options.page_size
        self._first_swa = options.full_pages
        self._first_state = options.full_pages + options.swa_pages

    def state_block(self, slot: Any) -> int:
        return self._first_state + int(slot)

    def _swa_pages(self, slots: torch.Tensor) -> list[int]:
        """Of slots of full attention, those of windows; 0: freed."""
        mapped = self._engine.allocator.full_to_swa_index_mapping[slots.long()] // self._page_size
        return torch.where(mapped > 0, mapped + self._first_swa, 0).tolist()

    def table_of(self, request: Req) -> Tables:
        """The block table of a request that holds slots, per group."""
        kv = request.kv
        row = self._engine.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
        slots = row[:: self._page_size]
        places = torch.arange(len(row))
        pages = (slots // self._page_size * self._page_size)[places // self._page_size]
        if not torch.equal(row, (pages + places % self._page_size).to(row.dtype)):
            raise EngineFault(f"request {request.rid} has slots {row.tolist()}: not whole pages")
        tables: Tables = []
        for kind in self._kinds:
            if kind == "full":
                tables.append((slots // self._page_size).tolist())
            elif kind == "sliding_window":
                tables.append(self._swa_pages(slots))
            else:
                held = [self.state_block(kv.mamba_pool_idx)] if kv.holds_mamba else []
                tables.append(held)
        return tables

    def in_tree(self) -> set[int]:
        """Blocks that the prefix cache holds."""
        slots = self._engine.tree.all_values_flatten()
        found: set[int] = set((slots // self._page_size).tolist())
        if "sliding_window" in self._kinds:
            found |= set(self._swa_pages(slots)) - {0}
        if "mamba" in self._kinds:
            states = self._engine.tree.all_mamba_values_flatten()
            found |= {self.state_block(slot) for slot in states.tolist()}
        return found

    def num_free(self) -> int:
        """Blocks that no request holds, by the allocators."""
        allocator, page = self._engine.allocator, self._page_size
        if "sliding_window" in self._kinds:
            total = allocator.full_available_size() // page + allocator.swa_available_size() // page
        else:
            total = allocator.available_size() // page
        if "mamba" in self._kinds:
            total += self._engine.rows.mamba_allocator.available_size()
        return total


def _is_replaced(shown: Tables, now: Tables) -> bool:
    """True if a table changed other than by blocks appended to it or freed before a window."""
    for old, new in zip(shown, now, strict=True):
        if len(new) < len(old) or any(a != b and a and b for a, b in zip(old, new, strict=False)):
            return True
    return False


class _Case:
    """One case: a scheduler from its first request to its last."""

    def __init__(self, case: Object) -> None:
        options, self._kinds = _options_of(case)
        try:
            self.engine = Engine(options)
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise Refused(f"SGLang: {error}") from None
        self._blocks = _Blocks(self.engine, self._kinds)
        self._requests: dict[str, Req] = {}
        self._names: dict[str, str] = {}  # by SGLang's request id
        self._num_added = self._num_steps = 0
        self._retractions: dict[str, int] = {}  # so often, when last looked at
        self._shown: dict[str, Tables] = {}  # the tables of requests with rows, as shown
        self._started: set[str] = set()
        self._left: list[str] = []  # since the last decision
        self._batch: Any = None  # the ScheduleBatch decided last
        self._to_come: deque[tuple[int, list[tuple[str, Req]]]] = deque()  # outputs, by step
        # Between a decision and the output that is to come before the next one.
        self._is_mid_turn = False
        self._to_abort: list[str] = []
        self._tree_blocks: set[int] = set()
        self._copies: list[list[int]] = []
        if "mamba" in self._kinds:
            self._watch_states()

    def _watch_states(self) -> None:
        """Records copies of states as they are made."""
        pool = self.engine.rows.mamba_pool
        copy_from = pool.copy_from

        def noted(src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
            self._note_copies(src_indices, dst_indices)
            copy_from(src_indices, dst_indices)

        pool.copy_from = noted

    def _note_copies(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for pair in zip(sources.view(-1).tolist(), targets.view(-1).tolist(), strict=True):
            self._copies.append([self._blocks.state_block(slot) for slot in pair])

    def add(self, event: Object) -> None:
        name = event["add"]
        if name in self._requests:
            raise Refused(f"request {name} already exists")
        for key in ("min_tokens", "repetition_detection", "skip_reading_prefix_cache"):
            if event.get(key):
                raise Refused(f"{key} is not driven")
        stop = [*event.get("stop_token_ids", ())]
        if event.get("eos") is not None:
            stop.append(event["eos"])
        # An abort ends all requests whose ids start with its id, so no id is a prefix of another.
        rid = f"{self._num_added}:{name}"
        self._num_added += 1
        try:
            request = self.engine.add(
                rid,
                expand(event["prompt"]),
                event["max_tokens"],
                stop,
                event.get("priority", 0),
                event.get("cache_salt"),
            )
        except ValueError as error:
            raise Refused(f"SGLang: {error}") from None
        self._requests[name], self._names[rid] = request, name

    def abort(self, name: str) -> None:
        if self._is_mid_turn:  # the event loop reads its mail between two turns
            self._to_abort.append(name)
        elif name in self._requests:
            self.engine.abort(self._requests[name].rid)
            self._take_ends()

    def reset(self, running: bool) -> Object:
        if self._is_mid_turn:
            raise ProtocolError("found a reset between a decision and its output")
        if running and self._to_come:
            raise ProtocolError("SGLang processes the pending output before it retracts all")
        done = self.engine.reset(running)
        if done:
            self._tree_blocks = set()
            self._copies.clear()  # of states to the tree, which is now empty
        reply: Object = {"reset_prefix_cache": done} | self._state()
        return reply | ({"cleared": True} if done else {})

    def _forget(self, name: str) -> None:
        request = self._requests.pop(name)
        del self._names[request.rid]
        self._retractions.pop(name, None)
        self._shown.pop(name, None)
        self._started.discard(name)
        self._left.append(name)

    def _take_ends(self) -> None:
        """Requests that ended without a result."""
        for request in self.engine.ended:
            if request.rid in self._names:
                self._forget(self._names[request.rid])
        self.engine.ended.clear()

    def _name(self, request: Req) -> str:
        return self._names[request.rid]

    def _running(self) -> list[Req]:
        running = self.engine.running(self._batch)
        # A request that will end with a pending output is no longer in a batch.
        for _, rows in self._to_come:
            for _, request in rows:
                if request.kv.holds_kv and not request.finished() and request not in running:
                    running.append(request)
        return [request for request in running if request.rid in self._names]

    def _row(self, request: Req, computed: int, tokens: int, tables: Tables) -> Object:
        name = self._name(request)
        row: Object = {"id": name, "tokens": tokens}
        shown = self._shown.get(name)
        if shown is None:
            row["new"] = True
            if name in self._started:
                row["resumed"] = True
            added: Any = tables
        else:
            added = [new[len(old) :] for old, new in zip(shown, tables, strict=True)]
            if not any(added):
                added = None
        self._started.add(name)
        self._shown[name] = tables
        return row | {"computed": computed, "blocks": added}

    def _places(self) -> list[tuple[Req, int, int]]:
        """The rows of the batch: request, first position, tokens."""
        batch = self._batch
        if batch is None:
            return []
        places: Iterable[tuple[int, int]]
        if batch.forward_mode.is_extend():
            places = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        else:
            places = ((length - 1, 1) for length in batch.seq_lens_cpu.tolist())
        return [(request, *place) for request, place in zip(batch.reqs, places, strict=True)]

    def _sent_back(self, running: Iterable[Req], tables: dict[str, Tables]) -> Object:
        """Requests that were retracted, and requests whose tables must be sent again because the
        tree has replaced their slots with its own."""
        retracted = []
        for name, request in self._requests.items():
            if request.retraction_count != self._retractions.get(name, 0):
                self._retractions[name] = request.retraction_count
                retracted.append(name)
        replaced = []
        for request in running:
            name = self._name(request)
            shown = self._shown.get(name)
            if name not in retracted and shown and _is_replaced(shown, tables[name]):
                replaced.append(name)
        for name in retracted + replaced:
            self._shown.pop(name, None)
        reply: Object = {}
        if retracted or replaced:
            reply["preempted"] = sorted(retracted + replaced)
        if replaced:
            reply["x_replaced"] = sorted(replaced)
        return reply

    def _keep_freed(self, tables: dict[str, Tables]) -> None:
        """A slot before the window stays freed for its request: the tree may map it again when
        another request computes the prefix."""
        for name, now in tables.items():
            for old, new in zip(self._shown.get(name, ()), now, strict=False):
                kept = [block and mine for block, mine in zip(old, new, strict=False)]
                new[:] = kept + new[len(old) :]

    def schedule(self, step: int, with_tables: bool) -> Object:
        if step != self._num_steps:
            raise ProtocolError(f"found step {step}; expected {self._num_steps}")
        if self._is_mid_turn or len(self._to_come) > self.engine.options.overlap:
            raise ProtocolError(f"found step {step} before the output of the previous step")
        self._num_steps += 1
        self._batch = self.engine.next_batch()
        self._is_mid_turn = bool(self._to_come)
        self._take_ends()
        running = self._running()
        tables = {self._name(r): self._blocks.table_of(r) for r in running if r.kv.holds_kv}
        sent_back = self._sent_back(running, tables)
        self._keep_freed(tables)
        rows = [self._row(*place, tables[self._name(place[0])]) for place in self._places()]
        reply: Object = {"scheduled": rows} | sent_back
        if self._left:
            reply["finished"], self._left = sorted(self._left), []
        copies, self._copies = self._copies, []
        if copies or (self._batch is not None and self._deferred_copies()):
            reply["copies"] = copies + self._deferred_copies()
        if with_tables:
            reply["tables"] = tables
        if self._batch is not None:
            of_rows = [(self._name(request), request) for request in self._batch.reqs]
            self._to_come.append((step, of_rows))
            if not self.engine.options.overlap:
                self._is_mid_turn = True
            elif len(self._to_come) == 1:
                self._launch({})
        return reply | self._state()

    def _launch(self, sampled: dict[str, int]) -> None:
        """Starts a forward pass, in the order of event_loop_overlap. `sampled`: of the previous
        step, whose result is processed afterwards."""
        expected = self._inputs(sampled)
        self._check_inputs(self.engine.launch(self._batch), expected)
        if not sampled:
            self.engine.scheduler.last_batch = self._batch

    def _check_inputs(self, given: Inputs, expected: Inputs) -> None:
        for does, found, wanted in zip(
            ("reads tokens", "writes slots"), given, expected, strict=True
        ):
            if found != wanted:
                raise EngineFault(f"step {self._num_steps - 1} {does} {found}, not {wanted}")

    def _deferred_copies(self) -> list[list[int]]:
        """Of states of hits, which the step's forward makes first."""
        sources = getattr(self._batch, "mamba_cow_src_indices", None)
        if sources is None or not self._batch.forward_mode.is_extend():
            return []
        pairs = zip(sources.tolist(), self._batch.mamba_cow_dst_indices.tolist(), strict=True)
        return [[self._blocks.state_block(slot) for slot in pair] for pair in pairs]

    def update(self, message: Object) -> Object:
        step = message["update"]
        if not self._to_come or self._to_come[0][0] != step:
            raise ProtocolError(f"found an output of step {step}, which has none")
        _, rows = self._to_come.popleft()
        # Requests of the step may have ended, and other requests may have their names.
        requests: dict[str, Any] = {
            name: request for name, request in rows if request is self._requests.get(name)
        }
        before = {name: len(_tokens(request)) for name, request in requests.items()}
        sampled = {name: tokens[0] for name, tokens in message["sampled"].items() if tokens}
        self._take_in([sampled.get(name, 0) for name, _ in rows], sampled)
        self._is_mid_turn = False
        reply: Object = {"num_tokens": {}}
        stopped = []
        for name, request in requests.items():
            reply["num_tokens"][name] = len(_tokens(request))
            if len(_tokens(request)) > before[name] and name not in sampled:
                raise ProtocolError(f"request {name} has a row that samples, but no token")
            if request.finished():
                stopped.append([name, request.finished_reason.to_json()["type"]])
                self._forget(name)
        if stopped:
            reply["stopped"] = stopped
        to_abort, self._to_abort = self._to_abort, []
        for name in to_abort:
            self.abort(name)
        self._take_ends()
        return reply | self._state()

    def _take_in(self, tokens: list[int], sampled: dict[str, int]) -> None:
        """`tokens`: one per row, whether it samples or not."""
        if not self.engine.options.overlap:
            expected = self._inputs({})
            given = self.engine.take_in(self._batch, tokens)
            self._batch = None
            self._check_inputs(given, expected)
            return
        self.engine.sampled(tokens)
        if self._to_come:
            self._launch(sampled)
        self.engine.process_first(self._batch)

    def _inputs(self, sampled: dict[str, int]) -> Inputs:
        """The tokens of the rows of the batch, and the slots that their requests have for them;
        `sampled` are not among the requests' tokens yet."""
        expected: Inputs = [], []
        for request, first, num in self._places():
            known = _tokens(request)
            if first + num > len(known):
                known.append(sampled[self._name(request)])
            expected[0].extend(known[first : first + num])
            row = self.engine.rows.req_to_token[request.kv.req_pool_idx]
            expected[1].extend(row[first : first + num].tolist())
        return expected

    def _state(self) -> Object:
        running = self._running()
        held: set[int] = set()
        for request in running:
            if request.kv.holds_kv:
                tables = self._blocks.table_of(request)
                self._keep_freed({self._name(request): tables})
                held.update(*tables)
        tree = self._blocks.in_tree()
        state: Object = {
            "running": [self._name(request) for request in running],
            "waiting": [
                self._name(r) for r in self.engine.scheduler.waiting_queue if r.rid in self._names
            ],
            "free_blocks": self._blocks.num_free() + len(tree - held),
        }
        for key, blocks in (
            ("stored", tree - self._tree_blocks),
            ("evicted", self._tree_blocks - tree),
        ):
            if blocks:
                state[key] = len(blocks)
        self._tree_blocks = tree
        return state


def _tokens(request: Req) -> list[int]:
    return [*request.origin_input_ids, *request.output_ids_through_stop]


class SglangAdapter:
    """The engine's side of the protocol."""

    def __init__(self) -> None:
        self._case: _Case | None = None

    def hello(self) -> Object:
        features = ["full", "mla", "sliding_window", "mamba", "async_scheduling", "priority"]
        features += ["no_chunked_prefill"]
        features += ["no_prefix_caching", "cache_salt", "reset_prefix_cache"]
        features += ["one_pool_per_kind", "mamba_cache_mode:none"]
        features += ["lacks:long_prefill_threshold", "lacks:sparse_retention"]
        version = f"{sglang_engine.VERSION} ({sglang_engine.own_tree_core()} tree)"
        engine = {"name": "sglang", "version": version}
        return {"engine": engine, "features": features}

    def open(self, case: Object, client: Client | None) -> Object:
        if case.get("connector"):
            raise Refused("a KV connector: SGLang's storage backends need a device")
        self._case = _Case(case)
        page_size = self._case.engine.options.page_size
        return {"scheduler_block_size": page_size, "hash_block_size": page_size}

    def close(self) -> None:
        self._case = None

    @property
    def _open_case(self) -> _Case:
        if self._case is None:
            raise ProtocolError("no case is open")
        return self._case

    def add(self, event: Object) -> None:
        self._open_case.add(event)

    def abort(self, name: str) -> None:
        self._open_case.abort(name)

    def pause(self, state: str) -> None:
        if state != "UNPAUSED":
            raise ProtocolError(f"found pause_state {state!r}; hello did not offer it")

    def reset(self, running: bool) -> Object:
        return self._open_case.reset(running)

    def schedule(self, step: int, with_tables: bool) -> Object:
        return self._open_case.schedule(step, with_tables)

    def update(self, message: Object) -> Object:
        return self._open_case.update(message)
