"""`lockstep replay --perfetto`: the wire format, field by field, by a reader of protocol buffers of
a few lines. perfetto_processor_test.py has Perfetto's own readers."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Iterator

import support

REQUESTS = 40


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message; every byte belongs to a field."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            assert key & 7 == 2, f"wire type {key & 7}"
            size, at = varint(data, at)
            assert at + size <= len(data)
            yield key >> 3, data[at : at + size]
            at += size


class PerfettoTest(support.InFolder):
    def trace(self, *options: str, expect: int = 0) -> bytes:
        path = self.folder / "run.perfetto-trace"
        support.run(support.LOCKSTEP, "replay", support.SAMPLES / "shared_prefixes.jsonl",
                    "--limit", REQUESTS, "--backend", "none", "--perfetto", path, *options,
                    expect=expect)  # fmt: skip
        return path.read_bytes()

    def test_tracks_slices_and_counters_are_those_of_the_run(self) -> None:
        names: dict[int, str] = {}
        opened: Counter[int] = Counter()
        closed: Counter[int] = Counter()
        counted: Counter[int] = Counter()
        last: dict[int, int] = {}
        for number, packet in fields(self.trace()):
            self.assertEqual(number, 1)
            of = dict(fields(packet))
            if 60 in of:
                track = dict(fields(of[60]))
                names[track[1]] = track[2].decode()
                continue
            event = dict(fields(of[11]))
            self.assertIn(event[11], names)
            # A track's events come in the order of time.
            self.assertGreaterEqual(of[8], last.get(event[11], 0))
            last[event[11]] = of[8]
            {1: opened, 2: closed, 4: counted}.get(event[9], Counter())[event[11]] += 1
        self.assertEqual(opened, closed)
        by_name = {name: uuid for uuid, name in names.items()}
        steps = opened[by_name["steps"]]
        self.assertGreater(steps, 100)
        for counter in ("blocks used", "tokens hit per step", "hashes evicted per step"):
            self.assertEqual(counted[by_name[counter]], steps, counter)
        requests = [uuid for uuid in names if uuid >= 1024]
        self.assertEqual(len(requests), REQUESTS)
        self.assertTrue(all(opened[uuid] for uuid in requests))


if __name__ == "__main__":
    unittest.main()
