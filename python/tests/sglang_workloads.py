"""Small workloads from a seed, and an adapter that serves them: what SGLang's tests record.

    python sglang_workloads.py OUT_FOLDER [--seeds FIRST:LAST] [--families NAME ...] [--requests N]

Writes OUT_FOLDER/FAMILY/SEED.jsonl, for `lockstep audit`.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record_scenarios

from lockstep_engines import protocol

Line = dict[str, Any]
EOS = 50001

# Families: kinds of groups, page sizes.
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "token": (("full",), (1,)),
    "paged": (("full",), (4, 16)),
    "window_token": (("full", "sliding_window"), (1,)),
    "window_paged": (("full", "sliding_window"), (4, 16)),
    "states": (("full", "mamba"), (1,)),
    "states_windows": (("full", "sliding_window", "mamba"), (1,)),
}


def _spec(kind: str, page_size: int, rng: random.Random) -> Line:
    if kind == "mamba":
        return {
            "type": "mamba",
            "block_size": 4096,
            "shapes": [[1, 4], [1, 4, 4]],
            "dtypes": ["fp32", "fp32"],
            "mamba_cache_mode": "none",
            "num_speculative_blocks": 0,
        }
    spec = {
        "type": kind,
        "block_size": page_size,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "fp32",
    }
    if kind == "sliding_window":
        spec["sliding_window"] = rng.choice((2, 5, page_size + 1, 2 * page_size + 1, 24))
    return spec


def header(family: str, seed: int) -> Line:
    """A recording's header without the engine's own entries."""
    rng = random.Random(f"{family} {seed}")
    kinds, page_sizes = FAMILIES[family]
    page_size = rng.choice(page_sizes)
    max_model_len = rng.choice((64, 100, 160))
    own: Line = {"schedule_policy": rng.choice(("fcfs", "lpm"))}
    config: Line = {
        "max_num_seqs": rng.choice((2, 4, 8)),
        "max_num_batched_tokens": page_size * max(1, rng.choice((8, 24, 64)) // page_size),
        "max_model_len": max_model_len,
        "block_size": page_size,
        "enable_prefix_caching": rng.random() < 0.9,
        "enable_chunked_prefill": rng.random() < 0.85,
    }
    if rng.random() < 0.2:
        config["policy"] = "priority"
        own["schedule_policy"] = "fcfs"
    if "mamba" not in kinds:
        config["async_scheduling"] = rng.random() < 0.5
    own["mixed_chunk"] = config["enable_chunked_prefill"] and rng.random() < 0.4
    own["tree_core"] = rng.choice(("rust", "python"))
    own["swa_eviction_interval"] = rng.choice((1, 1, 8))
    full = rng.choice((max_model_len, 2 * max_model_len, 4 * max_model_len)) // page_size + 2
    pools = {"full": full}
    specs = [_spec(kind, page_size, rng) for kind in kinds]
    if "sliding_window" in kinds:
        # Less than two windows, or than a prompt that is prefilled whole, and requests may wait
        # forever (docs/engines.md#sglang): sglang_test.py has those on their own.
        window = specs[kinds.index("sliding_window")]["sliding_window"]
        needed = 2 * window // page_size + 3
        if not config["enable_chunked_prefill"]:
            needed += max_model_len // page_size
        pools["sliding_window"] = max(needed, full * rng.choice((5, 8, 10)) // 10)
    if "mamba" in kinds:
        pools["mamba"] = rng.choice((3, 4, 6)) * config["max_num_seqs"]
    own["pools"] = pools
    return {
        "config": config | {"x_sglang": own},
        "groups": [{"layers": [f"layers.{i}"], "spec": spec} for i, spec in enumerate(specs)],
        "num_blocks": sum(pools.values()) + 1,
    }


class Clients:
    """The requests that arrive and finish, and the tokens that the model samples."""

    def __init__(self, header: Line, seed: int, num_requests: int = 14) -> None:
        self.rng = random.Random(f"clients {seed}")
        self._config = header["config"]
        self.left = num_requests
        self._num = 0
        self._arrival_rate = self.rng.choice((0.2, 0.5, 1.0))
        self.live: list[str] = []

    def _prompt(self) -> list[list[int]]:
        """Segments: few seeds, so that prompts share what they begin with."""
        rng, length_max = self.rng, self._config["max_model_len"] - 14
        segments, total = [], 0
        for depth in range(rng.randint(1, 4)):
            count = rng.choice((3, 8, 16, 17, 31))
            if total + count > length_max:
                break
            segments.append([10 * depth + rng.randrange(2), count])
            total += count
        if rng.random() < 0.5 and total < length_max:
            segments.append([1000 + self._num, rng.randint(1, min(9, length_max - total))])
        return segments or [[7, 5]]

    def _arrival(self) -> Line:
        rng, name = self.rng, f"r{self._num}"
        self._num += 1
        self.left -= 1
        event: Line = {
            "add": name,
            "prompt": self._prompt(),
            "max_tokens": rng.choice((1, 2, 6, 12, 40)),
            "arrival": 0.0,
            "eos": EOS,
        }
        if self._config.get("policy") == "priority":
            event["priority"] = rng.randrange(3)
        if rng.random() < 0.1:
            event["cache_salt"] = rng.choice(("a", "b"))
        return event

    def events(self) -> list[Line]:
        """Before a decision."""
        rng, found = self.rng, []
        while self.left and rng.random() < self._arrival_rate * 0.6:
            found.append(self._arrival())
        if self.live and rng.random() < 0.05:
            found.append({"abort": rng.choice(self.live)})
        if rng.random() < 0.03:
            running = rng.random() < 0.5 and not self._config.get("async_scheduling")
            found.append({"reset_prefix_cache": {"running": running}})
        return found

    def token(self) -> int:
        """Few different ones: outputs share beginnings too."""
        return EOS if self.rng.random() < 0.03 else self.rng.randrange(3)


class Served:
    """A workload served by an adapter; `lines` is its recording."""

    def __init__(self, send: Any, head: Line, clients: Clients, engine: Line) -> None:
        self._send, self._clients = send, clients
        self._known: dict[str, list[int]] = {}  # by request: tokens, those computed
        self._is_async = head["config"].get("async_scheduling", False)
        self._to_come: list[Line] = []  # decided steps whose output is to come
        self.num_refused = self.num_retracted = self.num_replaced = self.num_hit_tokens = 0
        opened = self._send({"open": head | {"seed": 0}})
        self.refused = opened.get("refused")
        self.lines: list[Line] = [
            {"schedule_recording": 1, "engine": engine, "family": "sglang", "seed": 0}
            | head
            | opened.get("opened", {})
        ]

    def _happen(self, line: Line) -> None:
        before = []
        for event in self._clients.events():
            reply = self._send(event)
            if "refused" in reply:
                self.num_refused += 1
                continue
            if "add" in event:
                self._clients.live.append(event["add"])
                length = sum(segment[-1] for segment in event["prompt"])
                self._known[event["add"]] = [length, 0]
            if "reset_prefix_cache" in event:
                running = event["reset_prefix_cache"]["running"]
                event = {"reset_prefix_cache": reply["reset_prefix_cache"]}
                if running:
                    event["running"] = True
                self._count(reply, line)
            before.append(event)
        if before:
            line["before"] = before

    @staticmethod
    def _count(reply: Line, line: Line) -> None:
        for key in ("stored", "evicted"):
            if key in reply:
                line[key] = line.get(key, 0) + reply[key]
        if "cleared" in reply:
            line["cleared"] = True

    def _sampled(self, rows: list[Line]) -> dict[str, list[int]]:
        sampled = {}
        for row in rows:
            known = self._known[row["id"]]
            if row["computed"] + row["tokens"] >= known[0]:
                sampled[row["id"]] = [self._clients.token()]
        return sampled

    def _leave(self, names: list[str]) -> None:
        for name in names:
            if name in self._clients.live:
                self._clients.live.remove(name)

    def _come_in(self, line: Line, count: int) -> None:
        """Outputs, processed in the step of `line`."""
        for _ in range(count):
            step = self._to_come.pop(0)
            outcome = self._send({"update": step["step"], "sampled": step["sampled"]})
            if self._is_async:
                line["output_of_step"] = step["step"]
            self._count(outcome, line)
            taken = {}
            for name, num_tokens in outcome["num_tokens"].items():
                if num_tokens > self._known[name][0]:
                    taken[name] = step["sampled"][name]
                self._known[name][0] = num_tokens
            # What the engine does not take of a request that it has ended or retracted meanwhile.
            step["sampled"] = taken
            if "stopped" in outcome:
                line["stopped"] = line.get("stopped", []) + outcome["stopped"]
                self._leave([name for name, _ in outcome["stopped"]])

    def step(self) -> bool:
        """Whether work is left."""
        line: Line = {"step": len(self.lines) - 1}
        self._happen(line)
        reply = self._send({"schedule": line["step"], "tables": True})
        self._count(reply, line)
        line |= {key: value for key, value in reply.items() if key not in ("stored", "evicted")}
        self._leave(reply.get("finished", []))
        replaced = len(reply.get("x_replaced", ()))
        self.num_replaced += replaced
        self.num_retracted += len(reply.get("preempted", ())) - replaced
        self.num_hit_tokens += sum(
            row["computed"] for row in reply["scheduled"] if row.get("new") and "resumed" not in row
        )
        line["sampled"] = self._sampled(reply["scheduled"])
        self.lines.append(line)
        if self._is_async:
            self._come_in(line, len(self._to_come))
        if reply["scheduled"]:
            self._to_come.append(line)
        if not self._is_async:
            self._come_in(line, len(self._to_come))
        return bool(self._clients.left or self._clients.live)

    def run(self, steps_max: int = 500) -> list[Line]:
        while len(self.lines) <= steps_max and self.step():
            pass
        # Ends of the last step are reported with the next one.
        for _ in range(2 if not self._clients.live else 0):
            line = {"step": len(self.lines) - 1}
            reply = self._send({"schedule": line["step"], "tables": True})
            self._count(reply, line)
            line |= {k: v for k, v in reply.items() if k not in ("stored", "evicted")}
            self.lines.append(line | {"sampled": {}})
            self._come_in(self.lines[-1], len(self._to_come))
        num_steps = len(self.lines) - 1
        unfinished = sorted(self._clients.live)
        self.lines.append({"end": True, "steps": num_steps, "unfinished": unfinished})
        return self.lines


def engine() -> Line:
    from lockstep_engines.sglang.adapter import SglangAdapter

    found: Line = SglangAdapter().hello()["engine"]
    return found


def sender() -> Callable[[Line], Line]:
    """Messages as lines to an adapter in this process; an exception of SGLang stays one."""
    from lockstep_engines.sglang.adapter import SglangAdapter

    session = protocol.Session(protocol.SCHEDULER, SglangAdapter())
    return lambda message: protocol.decode(
        protocol.encode(session.reply_to(protocol.encode(message)))
    )


def serve(family: str, seed: int, requests: int = 14) -> Served:
    head = header(family, seed)
    served = Served(sender(), head, Clients(head, seed, requests), engine())
    if served.refused is not None:
        raise RuntimeError(f"{family} {seed}: {served.refused}")
    served.run()
    return served


def write(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def record(family: str, seed: int, path: Path, requests: int) -> int:
    """Records one workload to `path`. Returns its steps."""
    lines = serve(family, seed, requests).lines
    write(path, lines)
    return len(lines) - 2


def main() -> None:
    parser = record_scenarios.parser_of(__doc__, FAMILIES)
    parser.set_defaults(requests=14)
    arguments = parser.parse_args()
    record_one = functools.partial(record, requests=arguments.requests)
    record_scenarios.record_families(arguments, record_one)


if __name__ == "__main__":
    main()
