"""`lockstep replay --perfetto`: what readers make of the file. Always: the wire format, field by
field, by a reader of protocol buffers of a few lines. Where PyPI's `perfetto` is installed: its
schema, and, where its trace processor can be started (it fetches a program once), that."""

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
        for counter in ("blocks used", "tokens hit", "preemptions", "hashes evicted"):
            self.assertEqual(counted[by_name[counter]], steps, counter)
        requests = [uuid for uuid in names if uuid >= 1024]
        self.assertEqual(len(requests), REQUESTS)
        self.assertTrue(all(opened[uuid] for uuid in requests))

    def test_perfettos_own_schema_takes_every_field(self) -> None:
        try:
            from google.protobuf.unknown_fields import UnknownFieldSet
            from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
        except ImportError:
            self.skipTest("PyPI's package perfetto is not installed")
        data = self.trace()
        trace = Trace.FromString(data)
        self.assertEqual(len(trace.SerializeToString()), len(data))
        for packet in trace.packet:
            event = packet.track_event
            for message in (packet, event, packet.track_descriptor, *event.debug_annotations):
                self.assertEqual(len(UnknownFieldSet(message)), 0)
        kinds = Counter(packet.track_event.type for packet in trace.packet)
        self.assertGreater(kinds[1], 100)

    def test_the_trace_processor_opens_it(self) -> None:
        try:
            from perfetto.trace_processor import TraceProcessor
        except ImportError:
            self.skipTest("PyPI's package perfetto is not installed")
        path = self.folder / "run.perfetto-trace"
        self.trace()
        try:
            processor = TraceProcessor(trace=str(path))
        except Exception as error:  # it could not fetch or start its program
            self.skipTest(f"Perfetto's trace processor does not start: {str(error)[:120]}")
        with processor:
            rows = processor.query("select count(*) as n from slice where name glob 'step *'")
            self.assertGreater(next(iter(rows)).n, 100)
            rows = processor.query("select count(distinct track_id) as n from counter")
            self.assertEqual(next(iter(rows)).n, 10)
            rows = processor.query("select count(*) as n from track where name glob 'r[0-9]*'")
            self.assertEqual(next(iter(rows)).n, REQUESTS)
            rows = processor.query(
                "select name, value from stats where severity = 'error' and value > 0"
            )
            self.assertEqual([row.name for row in rows], [])


if __name__ == "__main__":
    unittest.main()
