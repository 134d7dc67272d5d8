"""A worker behind the worker protocol (docs/protocols.md) with no engine and only the
standard library, for tests of what drives one: rows of every kind, and states without drafts.

    model_worker.py [--defect NAME]

Tensors are contiguous, each shared by the layers that have the same place in their groups,
K of a block before its V.
"""

import argparse
import json
import math
import mmap
import os
import struct
import sys
import tempfile

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
SHAPES = {"bf16": (0x807F, 0x3F00), "fp16": (0x83FF, 0x3800), "fp32": (0x807FFFFF, 0x3F000000)}


def mix(x):
    x = (x + STEP) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def row(content, layer, part, head, size, dtype):
    key = mix(content ^ mix((layer << 32) | (part << 16) | head))
    bits = 8 * SIZES[dtype]
    repeat = sum(1 << bits * i for i in range(64 // bits))
    kept, given = (mask * repeat for mask in SHAPES[dtype])
    words = (mix((key + (i + 1) * STEP) & MASK) for i in range((size + 7) // 8))
    return b"".join(((word & kept) | given).to_bytes(8, "little") for word in words)[:size]


def state_after(words, content, layer, state):
    """Rule (2) of sim/protocol/backend.h."""
    key = content ^ mix((layer << 32) | ((16 + state) << 16))
    return [(w * 0xD1342543DE82EF95 + mix(key ^ i)) & MASK for i, w in enumerate(words)]


KINDS = {"full": 2, "sliding_window": 2, "mla": 1, "hidden_state": 1, "mamba": 0}  # rows of a token


class Worker:
    def __init__(self, defect):
        self.defect = defect

    def hello(self, _):
        engine = {"name": "model", "version": "0.22.1"}
        features = ["full", "sliding_window", "padded_pages", "async_scheduling", "drafts"]
        features += [*(f"dtype:{name}" for name in SIZES), "several_dtypes", "runner:only"]
        return {"hello": {"worker_protocol": 1, "engine": engine, "features": features}}

    def open(self, case):
        self.groups, self.num_blocks = case["groups"], case["num_blocks"]
        self.saved = tempfile.TemporaryDirectory()
        kinds = {group["spec"]["type"] for group in self.groups} - KINDS.keys()
        if kinds or self.defect == "refuse":
            return {"refused": f"layers of kind {', '.join(sorted(kinds)) or 'full'}"}
        if any(group["spec"].get("num_speculative_blocks") for group in self.groups):
            return {"refused": "states of drafts"}
        if self.defect == "plan":
            raise RuntimeError("cannot determine a layout for this plan")
        pages = {}
        for group in self.groups:
            for place, _ in enumerate(group["layers"]):
                pages[place] = max(pages.get(place, 0), self._page(group["spec"]))
        self.offsets, total = {}, 0
        for place in sorted(pages):
            self.offsets[place] = total
            total += pages[place] * self.num_blocks
        with open(case["memory"], "r+b") as file:
            file.truncate(total)
            self.memory = mmap.mmap(file.fileno(), total)
        self.layers = []
        for group in self.groups:
            for place, name in enumerate(group["layers"]):
                layer = {"name": name, "page_offset": self.offsets[place]}
                layer["page_stride"] = pages[place]
                layer["parts"] = self._parts(group["spec"], layer)
                if group["spec"]["type"] == "mamba":
                    layer["states"] = self._states(group["spec"], layer)
                self.layers.append(layer)
        self.tables, self.entries = {}, {}
        return {"opened": {"bytes": total, "order": "", "layers": self.layers}}

    @staticmethod
    def _row(spec):
        return spec["num_kv_heads"] * spec["head_size"] * SIZES[spec["dtype"]]

    def _page(self, spec):
        if spec.get("page_size_padded"):
            return spec["page_size_padded"]
        if spec["type"] == "mamba":
            return sum(self._state_sizes(spec))
        return KINDS[spec["type"]] * spec["block_size"] * self._row(spec)

    @staticmethod
    def _state_sizes(spec):
        states = zip(spec["shapes"], spec["dtypes"], strict=False)
        return [math.prod(shape) * SIZES[dtype] for shape, dtype in states]

    def _parts(self, spec, layer):
        """K of a block before its V."""
        if spec["type"] == "mamba":
            return []
        row, head = self._row(spec), spec["head_size"] * SIZES[spec["dtype"]]
        shape = [self.num_blocks, spec["block_size"], spec["num_kv_heads"], head]
        stride = [layer["page_stride"], row, row if self.defect == "view" else head]
        size = row * spec["block_size"]
        return [
            {"offset": layer["page_offset"] + part * size, "shape": shape, "stride": stride}
            for part in range(KINDS[spec["type"]])
        ]

    def _states(self, spec, layer):
        states, offset = [], layer["page_offset"] + 8 * (self.defect == "state view")
        for size in self._state_sizes(spec):
            shape = [self.num_blocks, size]
            states.append({"offset": offset, "shape": shape, "stride": layer["page_stride"]})
            offset += size
        return states

    def sample(self, _):
        return {"sampled": {"faults": []}}

    def extract(self, wanted):
        """Files of safetensors with the rows of finished requests."""
        if self.defect == "connector":
            raise RuntimeError("the connector raises")
        files = []
        for states in wanted:
            index = next(i for i, la in enumerate(self.layers) if la["name"] == states["layer"])
            view, group = self.layers[index]["parts"][0], self._group_of(index)
            table, size = self.tables[states["id"]][group], self.groups[group]["spec"]["block_size"]
            rows = b""
            for position in range(states["tokens"]):
                position *= self.defect != "extraction"
                at = view["offset"] + table[position // size] * view["stride"][0]
                at += position % size * view["stride"][1]
                rows += self.memory[at : at + view["shape"][2] * view["shape"][3]]
            header = {"dtype": "U8", "shape": [len(rows)], "data_offsets": [0, len(rows)]}
            header = json.dumps({"hidden_states": header}).encode()
            header += b" " * (-len(header) % 8)
            files.append(f"{self.saved.name}/{len(files)}")
            with open(files[-1], "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header + rows)
        return {"extracted": {"files": files}}

    def _group_of(self, layer):
        for g, group in enumerate(self.groups):
            layer -= len(group["layers"])
            if layer < 0:
                return g

    def execute(self, step):
        for name in step["finished"] + step["preempted"]:
            self.tables.pop(name, None)
            self.entries.pop(name, None)
        self._zero(step["zero"])
        self._copy(step["copies"])
        if self.defect == "harness" and step["execute"] == 2:
            raise AssertionError("the host of the worker raises in step 2")
        if self.defect == "raise" and step["execute"] == 2:
            raise RuntimeError("the worker raises in step 2")
        if self.defect == "crash" and step["execute"] == 2:
            os._exit(3)
        rows, positions = [], []
        groups = [{"tables": [], "slots": []} for _ in self.groups]
        for scheduled in reversed(step["scheduled"]):  # in an order of its own
            name = scheduled["id"]
            if scheduled.get("new"):
                self.tables[name] = [[] for _ in self.groups]
                self.entries.pop(name, None)
            for table, blocks in zip(self.tables[name], scheduled["blocks"], strict=False):
                table += blocks
            rows.append(name)
            first = scheduled["computed"] + (self.defect == "position")
            positions += range(first, first + scheduled["tokens"])
            for g, facts in enumerate(groups):
                facts["tables"].append(self._table(name, g))
                facts["slots"] += self._write(name, g, scheduled)
        if self.defect == "stray" and step["execute"] == 3:
            self.memory[len(self.memory) - 1] ^= 1
        return {
            "executed": {
                "rows": rows,
                "num_tokens": [r["tokens"] for r in reversed(step["scheduled"])],
                "positions": positions,
                "groups": groups if rows else [],
                "faults": [],
            }
        }

    def _table(self, name, g):
        table = list(self.tables[name][g])
        if self.defect == "table" and len(table) > 1:
            table[1] = table[0]
        return table

    def _write(self, name, g, scheduled):
        spec = self.groups[g]["spec"]
        if spec["type"] == "mamba":
            return self._advance(name, g, scheduled)
        size = spec["block_size"]
        before = sum(len(group["layers"]) for group in self.groups[:g])
        slots = []
        for i, content in enumerate(scheduled["contents"]):
            position = scheduled["computed"] + i
            slot = position % size
            if self.defect == "slot" and position == 5:
                slot = (slot + 1) % size
            block = self.tables[name][g][position // size]
            slots.append(block * size + slot)
            if self.defect == "write" and position == 5:
                slot = (slot + 1) % size
            for layer in range(before, before + len(self.groups[g]["layers"])):
                self._write_rows(self.layers[layer], layer, block, slot, content, spec)
        return slots

    def _zero(self, blocks):
        for layer in self.layers:
            for view in layer["parts"]:
                size = view["shape"][1] * view["shape"][2] * view["shape"][3]
                for block in blocks:
                    at = view["offset"] + block * view["stride"][0]
                    self.memory[at : at + size] = bytes(size)

    def _copy(self, copies):
        """Whole blocks, padding included."""
        for layer in self.layers:
            first, size = layer["page_offset"], layer["page_stride"]
            for source, target in copies:
                at, of = first + target * size, first + source * size
                self.memory[at : at + size] = self.memory[of : of + size]
                if self.defect == "padding":
                    self.memory[at + size - 1] ^= 1

    def _advance(self, name, g, scheduled):
        """Moves the state to the block of the last token and updates it there."""
        spec, table = self.groups[g]["spec"], self.tables[name][g]
        first = scheduled["computed"]
        end = first + scheduled["tokens"]
        is_aligned = spec["mamba_cache_mode"] == "align"
        entry = (end - 1) // spec["block_size"] if is_aligned else 0
        came_from = (first - 1) // spec["block_size"] if is_aligned else 0
        source = self.entries.setdefault(name, {}).get(g, came_from)
        if self.defect == "column" and source > 0:
            source -= 1
        self.entries[name][g] = entry
        before = sum(len(group["layers"]) for group in self.groups[:g])
        for layer in range(before, before + len(self.groups[g]["layers"])):
            for s, view in enumerate(self.layers[layer]["states"]):
                size = view["shape"][1]
                words = [0] * (size // 8)
                if first > 0:
                    at = view["offset"] + table[source] * view["stride"]
                    words = struct.unpack(f"<{size // 8}Q", self.memory[at : at + size])
                for content in scheduled["contents"]:
                    words = state_after(words, content, layer, s)
                at = view["offset"] + table[entry] * view["stride"]
                self.memory[at : at + size] = struct.pack(f"<{size // 8}Q", *words)
        return []

    def _write_rows(self, layer, index, block, slot, content, spec):
        for part, view in enumerate(layer["parts"]):
            for head in range(spec["num_kv_heads"]):
                place = (block, slot, head)
                strides = zip(view["stride"], place, strict=False)
                at = view["offset"] + sum(stride * i for stride, i in strides)
                size = view["shape"][3]
                made = row(content, index, part, head, size, spec["dtype"])
                self.memory[at : at + size] = made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--defect", default="")
    worker = Worker(parser.parse_args().defect)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "execute" in message:
                reply = worker.execute(message)
            elif "close" in message:
                reply = {}
            else:
                kind = next(iter(message))
                reply = getattr(worker, kind)(message[kind])
        except RuntimeError as error:
            reply = {"failed": {"what": str(error)}}
        except AssertionError as error:
            reply = {"failed": {"what": str(error), "trace": "in model_worker.py", "harness": True}}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
