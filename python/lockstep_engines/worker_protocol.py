"""The worker protocol (docs/protocols.md), the worker's side of it, for any worker.

serve() reads messages and writes one reply to each. An exception is a reply, `failed`.
"""

from __future__ import annotations

from typing import BinaryIO, Protocol

from lockstep_engines.protocol import (
    Client,
    Object,
    ProtocolError,
    Refused,
    answer,
    case_of,
    check_hello,
    check_keys,
    object_of,
)

VERSION = 1


class Worker(Protocol):
    """Raises Refused from open() for a case that it does not take."""

    def hello(self) -> Object:
        """`engine` and `features`."""

    def open(self, case: Object) -> Object:
        """Begins a case on the memory that it names; the reply's `opened`."""

    def sample(self, sampled: Object) -> Object:
        """Takes in what the step before sampled, by request; the reply's `sampled`."""

    def execute(self, step: Object) -> Object:
        """Runs a step; the reply's `executed`."""

    def close(self) -> None: ...


_STEP_KEYS = ("execute", "sampled", "scheduled", "finished", "preempted", "zero", "copies")
_MESSAGES = ("hello", "open", "sample", "execute", "close")
_CASE_KEYS = ("config", "groups", "num_blocks", "memory")


class Session:
    """Messages to replies."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_open = False

    def reply_to(self, text: bytes) -> Object:
        message = object_of(text)
        kind = next(iter(message), "")
        if kind not in _MESSAGES:
            raise ProtocolError(f"found message {kind!r}; expected one of {', '.join(_MESSAGES)}")
        return getattr(self, f"_{kind}")(message)

    def fail(self) -> None:
        """The case cannot go on."""
        self._is_open = False

    def _hello(self, message: Object) -> Object:
        check_hello(message, "worker_protocol", VERSION)
        return {"hello": {"worker_protocol": VERSION} | self._worker.hello()}

    def _open(self, message: Object) -> Object:
        case = case_of(message, _CASE_KEYS, ("connector", "seed"))
        self._is_open = False
        try:
            opened = self._worker.open(case)
        except Refused as refusal:
            return {"refused": str(refusal)}
        self._is_open = True
        return {"opened": opened}

    def _sample(self, message: Object) -> Object:
        check_keys("what was sampled", message, ("sample",), ())
        if not self._is_open:
            raise ProtocolError("found what was sampled while no case is open")
        return {"sampled": self._worker.sample(message["sample"])}

    def _execute(self, message: Object) -> Object:
        check_keys("a step", message, _STEP_KEYS, ())
        if not self._is_open:
            raise ProtocolError("found a step while no case is open")
        return {"executed": self._worker.execute(message)}

    def _close(self, _: Object) -> Object:
        self._is_open = False
        self._worker.close()
        return {}


def serve(worker: Worker, source: BinaryIO, sink: BinaryIO) -> None:
    """Answers until the input ends."""
    answer(Session(worker), Client(source, sink), source)
