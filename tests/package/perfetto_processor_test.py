"""`lockstep replay --perfetto` as Perfetto itself reads it: by the schema of PyPI's `perfetto`, and
by its trace processor, which it fetches once. Skipped where one of them is not there."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import support

REQUESTS = 40


def expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        sys.exit(f"FAILED: {what}: found {found}, expected {expected}")


def check_schema(data: bytes) -> None:
    from google.protobuf.unknown_fields import UnknownFieldSet
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace.FromString(data)
    expect("bytes that the schema writes again", len(trace.SerializeToString()), len(data))
    for packet in trace.packet:
        event = packet.track_event
        for message in (packet, event, packet.track_descriptor, *event.debug_annotations):
            expect("fields that the schema does not have", len(UnknownFieldSet(message)), 0)
    check_rules(trace)


def check_rules(trace: object) -> None:
    """What the comments of the schema ask of a writer beyond types, and an importer relies on."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    described: dict[int, bool] = {}  # a track: whether it is a counter
    depth: Counter[int] = Counter()
    last: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            expect("a track twice, or with uuid 0", track.uuid in (0, *described), False)
            expect("a parent that comes later", track.parent_uuid in (0, *described), True)
            expect("a track without a name", bool(track.name), True)
            described[track.uuid] = track.HasField("counter")
            continue
        event = packet.track_event
        expect("packets of no sequence", packet.trusted_packet_sequence_id > 0, True)
        expect("events without a time", packet.HasField("timestamp"), True)
        expect("events of unknown tracks", event.track_uuid in described, True)
        is_counter = event.type == TrackEvent.TYPE_COUNTER
        expect("counters on tracks of slices", described[event.track_uuid], is_counter)
        expect("counters without a value", event.HasField("counter_value"), is_counter)
        expect("time runs back on a track", packet.timestamp >= last.get(event.track_uuid, 0), True)
        last[event.track_uuid] = packet.timestamp
        depth[event.track_uuid] += {TrackEvent.TYPE_SLICE_BEGIN: 1,
                                    TrackEvent.TYPE_SLICE_END: -1}.get(event.type, 0)  # fmt: skip
        expect("an end without a begin", depth[event.track_uuid] >= 0, True)
    expect("slices that are open at the end", sum(depth.values()), 0)
    expect("counters", sum(described.values()), 10)


def check_in_processor(path: Path) -> None:
    from perfetto.trace_processor import TraceProcessor

    try:
        processor = TraceProcessor(trace=str(path))
    except Exception as error:  # it could not fetch or start its program
        support.skip(f"Perfetto's trace processor does not start: {str(error)[:160]}")
    with processor:

        def number(query: str) -> int:
            return next(iter(processor.query(query))).n

        steps = number("select count(*) as n from slice where name glob 'step *'")
        expect("more than a hundred steps", steps > 100, True)
        expect("counters", number("select count(distinct track_id) as n from counter"), 10)
        requests = "select count(*) as n from track where name glob 'r[0-9]*'"
        expect("tracks of requests", number(requests), REQUESTS)
        errors = "select count(*) as n from stats where severity = 'error' and value > 0"
        expect("errors of the import", number(errors), 0)


def main() -> None:
    try:
        import perfetto  # noqa: F401
    except ImportError:
        support.skip("PyPI's package perfetto is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.perfetto-trace"
        support.run(support.LOCKSTEP, "replay", support.SAMPLES / "shared_prefixes.jsonl",
                    "--limit", REQUESTS, "--backend", "none", "--perfetto", path)  # fmt: skip
        check_schema(path.read_bytes())
        print("the schema takes every field, and what it asks of a writer holds")
        check_in_processor(path)


if __name__ == "__main__":
    main()
