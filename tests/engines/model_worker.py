"""A worker behind the worker protocol (docs/worker_protocol.md) with no engine and nothing but the
standard library, for tests of what drives one: full attention and sliding windows.

    model_worker.py [--defect NAME]

Tensors lie one after the other, each shared by the layers that have the same place in their groups,
K of a block before its V.
"""

import argparse
import json
import mmap
import os
import sys

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
        kinds = {group["spec"]["type"] for group in self.groups} - {"full", "sliding_window"}
        if kinds or self.defect == "refuse":
            return {"refused": f"layers of kind {', '.join(sorted(kinds)) or 'full'}"}
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
            spec = group["spec"]
            head = spec["head_size"] * SIZES[spec["dtype"]]
            token = head * spec["num_kv_heads"]
            for place, name in enumerate(group["layers"]):
                shape = [self.num_blocks, spec["block_size"], spec["num_kv_heads"], head]
                stride = [pages[place], token, head]
                if self.defect == "view":
                    stride[2] = token
                first = self.offsets[place]
                values = first + token * spec["block_size"]
                self.layers.append(
                    {
                        "name": name,
                        "page_offset": first,
                        "page_stride": pages[place],
                        "parts": [
                            {"offset": offset, "shape": shape, "stride": stride}
                            for offset in (first, values)
                        ],
                    }
                )
        self.tables = {}
        return {"opened": {"bytes": total, "order": "", "layers": self.layers}}

    @staticmethod
    def _page(spec):
        row_bytes = spec["num_kv_heads"] * spec["head_size"] * SIZES[spec["dtype"]]
        return spec.get("page_size_padded") or 2 * spec["block_size"] * row_bytes

    def execute(self, step):
        for name in step["finished"] + step["preempted"]:
            self.tables.pop(name, None)
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
            for table, blocks in zip(self.tables[name], scheduled["blocks"]):
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
            for l, _ in enumerate(self.groups[g]["layers"]):
                self._write_rows(self.layers[before + l], before + l, block, slot, content, spec)
        return slots

    def _write_rows(self, layer, index, block, slot, content, spec):
        for part, view in enumerate(layer["parts"]):
            for head in range(spec["num_kv_heads"]):
                place = (block, slot, head)
                at = view["offset"] + sum(s * i for s, i in zip(view["stride"], place))
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
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
