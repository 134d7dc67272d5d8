"""The engine's side of both protocols (docs/protocols.md), for any engine.

serve() reads messages, calls an Adapter or a Worker and writes one reply per message. An exception
is a reply, `failed`, which says whose code raised: the engine's or Lockstep's (is_of_harness()).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeVar

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


_TRACE_CHARS_MAX = 16_000
_ENGINES = ("vllm", "sglang")  # packages
_OWN = __name__.partition(".")[0]

Object = dict[str, Any]


class Refused(Exception):
    """The engine refuses a case or a request; the text gives the reason."""


class ProtocolError(Exception):
    """A message that the protocol does not have."""


class EngineFault(Exception):
    """A stand-in rejects what the engine passes to it: an engine failure."""


class _EndOfInput(BaseException):
    """The input ends before the answer to a query."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_passing: set[Any] = set()  # code of wrappers


def passes_on(function: _Function) -> _Function:
    """Marks a wrapper that only calls what it wraps: an exception there is its caller's."""
    _passing.add(function.__code__)
    return function


def is_of_harness(error: BaseException) -> bool:
    """True if code of Lockstep raised. The innermost frame that belongs to the engine or to
    Lockstep decides; libraries and wrappers belong to neither, and this server calls both."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, EngineFault):
        return False
    codes = [(frame.f_code, frame.f_globals) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for code, scope in reversed(codes):
        module = scope.get("__name__", "")
        package = module.partition(".")[0]
        if package in _ENGINES:
            return False
        if package == _OWN and module != __name__ and code not in _passing:
            return True
    return codes[-1][1].get("__name__") == __name__  # else an adapter from another package


class Client:
    """The queries and reports that an engine's connector sends to Lockstep during a call."""

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
        """How many tokens after `local` can be loaded (None: query again), and whether the load
        takes longer than the step."""
        question = {"ask": "matched_tokens", "id": name, "local": local}
        answer = self._ask(question, ("external", "async"))
        return answer["external"], answer["async"]

    def finished(self, name: str, blocks: Any) -> bool:
        """Whether the blocks of a request that ends, per group, are kept until they are sent."""
        question = {"ask": "finished", "id": name, "blocks": blocks}
        return bool(self._ask(question, ("keeps",))["keeps"])

    def allocated(self, name: str, external: int, blocks: Any) -> None:
        """A request received its blocks, per group; `external` tokens of them are to be loaded."""
        self.send({"tell": "allocated", "id": name, "external": external, "blocks": blocks})


class Adapter(Protocol):
    """Drives an engine's scheduler. Raises Refused from open() and add(); ProtocolError."""

    def hello(self) -> Object:
        """`engine` and `features`."""

    def open(self, case: Object, client: Client | None) -> Object:
        """Starts a case; the reply's `opened`."""

    def close(self) -> None:
        """Forgets the case, if one is open."""

    def add(self, event: Object) -> None: ...

    def abort(self, name: str) -> None: ...

    def pause(self, state: str) -> None: ...

    def reset(self, running: bool) -> Object: ...

    def schedule(self, step: int, with_tables: bool) -> Object: ...

    def update(self, message: Object) -> Object: ...


class Worker(Protocol):
    """Drives an engine's worker. Raises Refused from open()."""

    def hello(self) -> Object:
        """`engine` and `features`."""

    def open(self, case: Object, client: Client | None) -> Object:
        """Starts a case on the memory that it names; the reply's `opened`."""

    def sample(self, sampled: Object) -> Object:
        """Processes the tokens of the previous step, by request; the reply's `sampled`."""

    def execute(self, step: Object) -> Object:
        """Runs a step; the reply's `executed`."""

    def extract(self, requests: list[Object]) -> Object:
        """Saves hidden states of finished requests; the reply's `extracted`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Message:
    """`needed`, `optional`: keys besides the first, which names the message."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    run: Callable[[Any, Object], Object | None]  # target, message; None: an empty reply


@dataclass(frozen=True)
class Language:
    """One of the protocols: its messages besides hello, open and close."""

    name: str
    version: int
    case_keys: tuple[tuple[str, ...], tuple[str, ...]]  # needed, optional
    messages: Mapping[str, _Message]


def _reset(adapter: Adapter, message: Object) -> Object:
    asked = message["reset_prefix_cache"]
    if not isinstance(asked, dict):
        raise ProtocolError('found a reset that is not {"running":b}')
    check_keys("a reset", asked, (), ("running",))
    return adapter.reset(bool(asked.get("running")))


_OF_REQUEST = (
    "priority cache_salt lora mm embeds eos stop_token_ids min_tokens repetition_detection "
    "skip_reading_prefix_cache parent"
)
_SEED = ("connector", "seed")

SCHEDULER = Language(
    "scheduler_protocol",
    1,
    (("config", "groups", "num_blocks"), _SEED),
    {
        "add": _Message(
            ("prompt", "max_tokens", "arrival"), (*_OF_REQUEST.split(),), lambda a, m: a.add(m)
        ),
        "abort": _Message((), (), lambda a, m: a.abort(m["abort"])),
        "pause_state": _Message((), (), lambda a, m: a.pause(m["pause_state"])),
        "reset_prefix_cache": _Message((), (), _reset),
        "schedule": _Message(
            (), ("tables",), lambda a, m: a.schedule(m["schedule"], bool(m.get("tables")))
        ),
        "update": _Message(("sampled",), ("drafts", "worker"), lambda a, m: a.update(m)),
    },
)
WORKER = Language(
    "worker_protocol",
    1,
    (("config", "groups", "num_blocks", "memory"), (*_SEED, "kernel_block_sizes")),
    {
        "sample": _Message((), (), lambda w, m: {"sampled": w.sample(m["sample"])}),
        "execute": _Message(
            ("sampled", "scheduled", "finished", "preempted", "zero", "copies"),
            (),
            lambda w, m: {"executed": w.execute(m)},
        ),
        "extract": _Message((), (), lambda w, m: {"extracted": w.extract(m["extract"])}),
    },
)
KERNELS = Language(
    "kernel_protocol",
    1,
    (("memory", "layers"), ()),
    {
        "run": _Message(
            ("layer", "group", "scale", "tensors", "integers"), ("memory",), lambda k, m: k.run(m)
        )
    },
)


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


class Session:
    """Messages to replies."""

    def __init__(self, language: Language, target: Any, client: Client | None = None) -> None:
        self._language, self._target, self._client = language, target, client
        self._is_open = False

    def reply_to(self, text: bytes) -> Object:
        message = object_of(text)
        kind = next(iter(message), "")
        if kind == "hello":
            return self._hello(message)
        if kind == "open":
            return self._open(message)
        if kind == "close":
            return self._close(message)
        found = self._language.messages.get(kind)
        if found is None:
            known = ", ".join(("hello", "open", *self._language.messages, "close"))
            raise ProtocolError(f"found message {kind!r}; expected one of {known}")
        check_keys(f"message {kind!r}", message, (kind, *found.needed), found.optional)
        if not self._is_open:
            raise ProtocolError(f"found message {kind!r} while no case is open")
        try:
            return found.run(self._target, message) or {}
        except Refused as refusal:
            return {"refused": str(refusal)}

    def fail(self) -> None:
        """Ends the case: only close or open follows."""
        self._is_open = False

    def _hello(self, message: Object) -> Object:
        check_keys("message 'hello'", message, ("hello",), ())
        asked, language = message["hello"], self._language
        if not isinstance(asked, dict) or asked.get(language.name) != language.version:
            raise ProtocolError(f"found hello {asked}; expected {language.name} {language.version}")
        return {"hello": {language.name: language.version} | self._target.hello()}

    def _open(self, message: Object) -> Object:
        check_keys("message 'open'", message, ("open",), ())
        case = message["open"]
        if not isinstance(case, dict):
            raise ProtocolError("found a case that is not an object")
        check_keys("a case", case, *self._language.case_keys)
        self._close({"close": True})
        try:
            opened = self._target.open(case, self._client)
        except Refused as refusal:
            return {"refused": encodable(str(refusal))}
        self._is_open = True
        return {"opened": opened}

    def _close(self, message: Object) -> Object:
        check_keys("message 'close'", message, ("close",), ())
        self._is_open = False
        self._target.close()
        return {}


def encodable(text: str) -> str:
    """The text with lone surrogates escaped: a message that has one has no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def failure(error: Exception) -> Object:
    """The reply `failed`; `harness` is left out if the engine raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # An assertion without a message is named by its line.
    what = f"{type(error).__name__}: {str(error) or f'{last.line} (in {last.name})'}"
    trace = "".join(traceback.format_exception(error))[-_TRACE_CHARS_MAX:]
    side = {"harness": True} if is_of_harness(error) else {}
    return {"failed": {"what": encodable(what), "trace": encodable(trace)} | side}


def own_pipe() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and standard output as separate files. All other output, also that of C code,
    goes to standard error; other code that reads standard input (a debugger) finds its end, instead
    of taking messages and waiting for more."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return source, sink


def serve(language: Language, target: Any, source: BinaryIO, sink: BinaryIO) -> None:
    """Replies until the input ends."""
    client = Client(source, sink)
    session = Session(language, target, client)
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
