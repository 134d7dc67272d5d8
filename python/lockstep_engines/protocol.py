"""The scheduler protocol (docs/protocols.md), the engine's side of it, for any engine.

serve() reads messages, calls an Adapter and writes one reply to each. An exception of the engine is
a reply, `failed`. Nothing here knows an engine.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

try:
    import msgspec

    decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode
    encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
    DecodeError: type[Exception] = msgspec.DecodeError
except ImportError:  # an engine that does not bring it
    import json

    decode, DecodeError = json.loads, json.JSONDecodeError

    def encode(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":")).encode()


VERSION = 1
_TRACE_CHARS_MAX = 16_000

Object = dict[str, Any]


class Refused(Exception):
    """The engine does not take a case or a request; the text says why."""


class ProtocolError(Exception):
    """A message that the protocol does not have."""


class _EndOfInput(BaseException):
    """Lockstep has gone in the middle of a question."""


class Client:
    """What a connector of the engine asks Lockstep, and tells it, in the middle of a call."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink

    def send(self, line: Object) -> None:
        self._sink.write(encode(line) + b"\n")
        self._sink.flush()

    def _ask(self, question: Object, keys: tuple[str, ...]) -> Object:
        self.send(question)
        text = self._source.readline()
        if not text:
            raise _EndOfInput
        answer = object_of(text)
        check_keys(f"an answer to {question['ask']}", answer, keys, ())
        return answer

    def matched_tokens(self, name: str, local: int) -> tuple[int | None, bool]:
        """How many tokens behind `local` can be loaded, None: ask again; and whether the load takes
        longer than the step."""
        question = {"ask": "matched_tokens", "id": name, "local": local}
        answer = self._ask(question, ("external", "async"))
        return answer["external"], answer["async"]

    def finished(self, name: str) -> bool:
        """Whether the blocks of a request that ends are kept until they are sent."""
        return bool(self._ask({"ask": "finished", "id": name}, ("keeps",))["keeps"])

    def allocated(self, name: str, external: int, blocks: Any) -> None:
        """A request has got its blocks, per group, and so many tokens of them are to be loaded."""
        self.send({"tell": "allocated", "id": name, "external": external, "blocks": blocks})


class Adapter(Protocol):
    """An engine that is driven. Whatever a method raises is the engine's own failure, but Refused
    (of open and add) and ProtocolError."""

    def hello(self) -> Object:
        """`engine` and `features`."""

    def open(self, case: Object, client: Client | None) -> Object:
        """Begins a case; the reply's `opened`."""

    def close(self) -> None:
        """Forgets the case, if one is open."""

    def add(self, event: Object) -> None: ...

    def abort(self, name: str) -> None: ...

    def pause(self, state: str) -> None: ...

    def reset(self, running: bool) -> Object: ...

    def schedule(self, step: int, with_tables: bool) -> Object: ...

    def update(self, message: Object) -> Object: ...


# The first key of a message -> the keys that it must and may have besides.
_MESSAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hello": ((), ()),
    "open": ((), ()),
    "add": (
        ("prompt", "max_tokens", "arrival"),
        (
            "priority",
            "cache_salt",
            "lora",
            "mm",
            "embeds",
            "eos",
            "stop_token_ids",
            "min_tokens",
            "repetition_detection",
            "skip_reading_prefix_cache",
            "parent",
        ),
    ),
    "abort": ((), ()),
    "pause_state": ((), ()),
    "reset_prefix_cache": ((), ()),
    "schedule": ((), ("tables",)),
    "update": (("sampled",), ("drafts", "worker")),
    "close": ((), ()),
}
_CASE_KEYS = (("config", "groups", "num_blocks"), ("connector", "seed"))


def object_of(text: bytes) -> Object:
    try:
        found = decode(text)
    except DecodeError as error:
        raise ProtocolError(f"found a line that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ProtocolError("found a line that is not an object")
    return found


def check_keys(
    what: str, found: Object, needed: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    for key in found:
        if key not in needed and key not in optional and not key.startswith("x_"):
            raise ProtocolError(f"found key {key!r} in {what}; the protocol has no such key")
    for key in needed:
        if key not in found:
            raise ProtocolError(f"found {what} without key {key!r}")


def check_hello(message: Object, protocol: str, version: int) -> None:
    asked = message["hello"]
    if not isinstance(asked, dict) or asked.get(protocol) != version:
        raise ProtocolError(f"found hello {asked}; expected {protocol} {version}")


def case_of(message: Object, needed: tuple[str, ...], optional: tuple[str, ...]) -> Object:
    """What an `open` begins."""
    case = message["open"]
    if not isinstance(case, dict):
        raise ProtocolError("found a case that is not an object")
    check_keys("a case", case, needed, optional)
    return case


class Session:
    """Messages to replies."""

    def __init__(self, adapter: Adapter, client: Client | None) -> None:
        self._adapter, self._client = adapter, client
        self._is_open = False

    def reply_to(self, text: bytes) -> Object:
        message = object_of(text)
        kind = next(iter(message), "")
        if kind not in _MESSAGES:
            raise ProtocolError(f"found message {kind!r}; expected one of {', '.join(_MESSAGES)}")
        needed, optional = _MESSAGES[kind]
        check_keys(f"message {kind!r}", message, (kind, *needed), optional)
        if not self._is_open and kind not in ("hello", "open", "close"):
            raise ProtocolError(f"found message {kind!r} while no case is open")
        return getattr(self, f"_{kind}")(message)

    def fail(self) -> None:
        """The case cannot go on."""
        self._is_open = False

    def _hello(self, message: Object) -> Object:
        check_hello(message, "scheduler_protocol", VERSION)
        return {"hello": {"scheduler_protocol": VERSION} | self._adapter.hello()}

    def _open(self, message: Object) -> Object:
        case = case_of(message, *_CASE_KEYS)
        self._adapter.close()
        self._is_open = False
        try:
            opened = self._adapter.open(case, self._client)
        except Refused as refusal:
            return {"refused": str(refusal)}
        self._is_open = True
        return {"opened": opened}

    def _close(self, _: Object) -> Object:
        self._is_open = False
        self._adapter.close()
        return {}

    def _add(self, message: Object) -> Object:
        try:
            self._adapter.add(message)
        except Refused as refusal:
            return {"refused": str(refusal)}
        return {}

    def _abort(self, message: Object) -> Object:
        self._adapter.abort(message["abort"])
        return {}

    def _pause_state(self, message: Object) -> Object:
        self._adapter.pause(message["pause_state"])
        return {}

    def _reset_prefix_cache(self, message: Object) -> Object:
        asked = message["reset_prefix_cache"]
        if not isinstance(asked, dict):
            raise ProtocolError('found a reset that is not {"running":b}')
        check_keys("a reset", asked, (), ("running",))
        return self._adapter.reset(bool(asked.get("running")))

    def _schedule(self, message: Object) -> Object:
        return self._adapter.schedule(message["schedule"], bool(message.get("tables")))

    def _update(self, message: Object) -> Object:
        return self._adapter.update(message)


def failure(error: Exception) -> Object:
    last = traceback.extract_tb(error.__traceback__)[-1]
    # Many an assertion says nothing: then its line does.
    what = f"{type(error).__name__}: {str(error) or f'{last.line} (in {last.name})'}"
    trace = "".join(traceback.format_exception(error))
    return {"failed": {"what": what, "trace": trace[-_TRACE_CHARS_MAX:]}}


def own_pipe() -> tuple[BinaryIO, BinaryIO]:
    """Standard input, and standard output as a file of its own: from here on what anybody else
    prints there, C code included, goes to standard error."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return sys.stdin.buffer, sink


class Answering(Protocol):
    """A side of a protocol: replies to messages until one fails its case."""

    def reply_to(self, text: bytes) -> Object: ...
    def fail(self) -> None: ...


def answer(session: Answering, client: Client, source: BinaryIO) -> None:
    """Until the input ends."""
    try:
        while text := source.readline():
            try:
                reply = session.reply_to(text)
            except Exception as error:
                session.fail()
                reply = failure(error)
            client.send(reply)
    except (_EndOfInput, BrokenPipeError):
        pass


def serve(adapter: Adapter, source: BinaryIO, sink: BinaryIO) -> None:
    """Answers until the input ends."""
    client = Client(source, sink)
    answer(Session(adapter, client), client, source)
