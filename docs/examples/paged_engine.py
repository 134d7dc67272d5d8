"""A small engine behind the scheduler protocol (docs/protocols.md).

    lockstep fuzz --decisions 'python3 docs/examples/paged_engine.py'

First come, first served; chunked prefill; one table of blocks a request; the youngest is preempted
when the pool is empty. No prefix cache, no drafts. `--bug NAME` plants a mistake to be found:
shared (a block is given to two), lost (one never comes back), raise, hang, reply.
"""

import json
import sys
import time

# A message by its first key: what else it must and may have, but keys that begin with x_.
KEYS = {
    "hello": ((), ()),
    "open": ((), ()),
    "add": (("prompt", "max_tokens", "arrival"), ("eos", "stop_token_ids", "priority", "parent")),
    "abort": ((), ()),
    "schedule": ((), ("tables",)),
    "update": (("sampled",), ()),
    "close": ((), ()),
}
CASE_KEYS = {"config", "groups", "num_blocks", "seed"}
# Options that are followed, and some that change nothing in an engine as small as this.
OPTIONS = set(
    """max_num_seqs max_num_batched_tokens max_model_len block_size enable_prefix_caching
    enable_chunked_prefill async_scheduling scheduler_reserve_full_isl policy mamba_cache_mode
    mamba_block_size long_prefill_token_threshold dcp pcp hash_algorithm num_spec_tokens
    num_hash_lookahead_tokens prefix_cache_retention_interval""".split()
)
BUG = sys.argv[sys.argv.index("--bug") + 1] if "--bug" in sys.argv else ""


class Engine:
    is_open = False

    def open(self, case):
        self.is_open = False
        if odd := sorted((set(case) - CASE_KEYS) | (set(case["config"]) - OPTIONS)):
            return {"refused": f"found {odd[0]}, which is not known here"}
        if len(case["groups"]) != 1:
            return {"refused": "found several groups; expected one"}
        self.config, self.num_blocks = case["config"], case["num_blocks"]
        self.block_size = case["groups"][0]["spec"]["block_size"]
        self.free = list(range(1, self.num_blocks))
        self.requests, self.running, self.waiting, self.finished = {}, [], [], []
        self.is_open = True
        sizes = ("scheduler_block_size", "hash_block_size")
        return {"opened": dict.fromkeys(sizes, self.block_size)}

    def add(self, event):
        prompt = event["prompt"]
        size = len(prompt["tokens"]) if isinstance(prompt, dict) else sum(n for *_, n in prompt)
        room = self.config["max_model_len"] - size
        if room < 1:
            return {"refused": "the prompt is longer than max_model_len allows"}
        ends = {event.get("eos"), *event.get("stop_token_ids", ())}
        self.requests[event["add"]] = {
            "tokens": size, "last": size + min(event["max_tokens"], room), "ends": ends,
            "computed": 0, "table": [], "seen": False,
        }  # fmt: skip
        self.waiting.append(event["add"])
        return {}

    def leave(self, name):
        if name not in self.requests:
            return
        table = self.requests.pop(name)["table"]
        self.free += table[1:] if BUG == "lost" else table
        for queue in (self.running, self.waiting):
            if name in queue:
                queue.remove(name)
        self.finished.append(name)

    def give(self, name, tokens, preempted):
        """Blocks for `tokens`; None: there are none, and no younger request to preempt."""
        request = self.requests[name]
        missing = -(-tokens // self.block_size) - len(request["table"])
        while len(self.free) < missing:
            victim = self.running[-1] if self.running else name
            if victim == name or name not in self.running:
                return None
            self.running.remove(victim)
            self.waiting.insert(0, victim)
            preempted.append(victim)
            self.free += self.requests[victim]["table"]
            self.requests[victim].update(table=[], computed=0)
        blocks = self.free[:missing]
        del self.free[: missing - (1 if BUG == "shared" and missing else 0)]
        request["table"] += blocks
        return blocks

    def schedule(self, tables):
        rows, preempted, budget = [], [], self.config["max_num_batched_tokens"]
        finished, self.finished = self.finished, []
        for name in [*self.running, *self.waiting]:
            is_new = name in self.waiting
            if name in preempted or (is_new and preempted):
                continue
            if is_new and len(self.running) == self.config["max_num_seqs"]:
                break
            request = self.requests[name]
            tokens = min(request["tokens"] - request["computed"], budget)
            if not tokens:
                break
            blocks = self.give(name, request["computed"] + tokens, preempted)
            if blocks is None:
                break
            computed = request["computed"]
            row = {"id": name, "tokens": tokens, "computed": computed, "blocks": [blocks]}
            if is_new:
                row["new"] = True
                if request["seen"]:
                    row["resumed"] = True
                self.waiting.remove(name)
                self.running.append(name)
            request["seen"], request["computed"] = True, request["computed"] + tokens
            budget -= tokens
            rows.append(row)
        reply = {"scheduled": rows}
        if preempted:
            reply["preempted"] = preempted
        if finished:
            reply["finished"] = finished
        if tables:
            reply["tables"] = {name: [self.requests[name]["table"]] for name in self.running}
        return reply | self.state()

    def update(self, sampled):
        stopped, known = [], {}
        for name, tokens in sampled.items():
            if name in self.requests:
                request = self.requests[name]
                request["tokens"] += len(tokens)
                known[name] = request["tokens"]
                if tokens[-1] in request["ends"]:
                    stopped.append([name, "stop"])
                elif request["tokens"] == request["last"]:
                    stopped.append([name, "length"])
        for name, _ in stopped:
            self.leave(name)
        return {"num_tokens": known} | ({"stopped": stopped} if stopped else {}) | self.state()

    def state(self):
        queues = {"running": self.running, "waiting": self.waiting}
        return queues | {"free_blocks": len(self.free)}

    def handle(self, message):
        kind = next(iter(message))
        needed, optional = KEYS[kind]
        for key in needed:
            if key not in message:
                raise KeyError(key)
        for key in message:
            if key not in (kind, *needed, *optional) and not key.startswith("x_"):
                raise KeyError(f"found {key} in {kind}")
        if not self.is_open and kind not in ("hello", "open", "close"):
            raise RuntimeError(f"found {kind} while no case is open")
        if "hello" in message:
            features = ["full", "mla", "no_prefix_caching"]
            engine = {"name": "paged", "version": "1.0"}
            return {"hello": {"scheduler_protocol": 1, "engine": engine, "features": features}}
        if "open" in message:
            return self.open(message["open"])
        if "add" in message:
            return self.add(message)
        if "abort" in message:
            self.leave(message["abort"])
        if "schedule" in message:
            if BUG == "raise" and message["schedule"] == 5:
                raise AssertionError("step 5")
            if BUG == "hang" and message["schedule"] == 5:
                time.sleep(3600)
            if BUG == "reply" and message["schedule"] == 5:
                return {"scheduled": [{"id": "nobody", "tokens": -1}]}
            return self.schedule(message.get("tables", False))
        if "update" in message:
            return self.update(message["sampled"])
        if "close" in message:
            self.is_open = False
        return {}


def main():
    engine = Engine()
    for line in sys.stdin:
        try:
            reply = engine.handle(json.loads(line))
        except Exception as error:
            engine.is_open = False
            reply = {"failed": {"what": f"{type(error).__name__}: {error}"}}
        print(json.dumps(reply, separators=(",", ":")), flush=True)


main()
