"""The engine's side of the scheduler protocol, with a fake engine: no vLLM needed."""

from __future__ import annotations

import io
import subprocess
import sys
import unittest
from typing import Any

from adapter_client import PACKAGES, decode, encode

from lockstep_engines.protocol import SCHEDULER, WORKER, Client, ProtocolError, Refused, serve

HELLO = {"hello": {"scheduler_protocol": 1}}
OPEN = {"open": {"config": {}, "groups": [], "num_blocks": 9, "seed": 0}}
ADD = {"add": "a", "prompt": [[1, 20]], "max_tokens": 2, "arrival": 0.0}


class MadeUp:
    """Accepts one request, queries for it as a connector does, and fails on demand."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.client: Any = None

    def hello(self) -> dict[str, Any]:
        return {"engine": {"name": "made-up", "version": "1"}, "features": ["full"]}

    def open(self, case: dict[str, Any], client: Client) -> dict[str, Any]:
        if case["num_blocks"] < 2:
            raise Refused("found 1 block; expected 2")
        self.client = client
        self.calls.append("open")
        return {"scheduler_block_size": 16, "hash_block_size": 16}

    def close(self) -> None:
        self.calls.append("close")

    def add(self, event: dict[str, Any]) -> None:
        if event["max_tokens"] < 1:
            raise Refused("nothing to sample")
        self.calls.append(event)

    def abort(self, name: str) -> None:
        assert name != "c"
        raise KeyError(name)

    def pause(self, state: str) -> None:
        raise ProtocolError(f"found pause_state {state}")

    def reset(self, running: bool) -> dict[str, Any]:
        return {"reset_prefix_cache": running}

    def schedule(self, step: int, with_tables: bool) -> dict[str, Any]:
        print("an engine prints", flush=True)
        external, is_async = self.client.matched_tokens("a", 16)
        self.client.allocated("a", external, [[1, 2]])
        return {"scheduled": [], "external": external, "async": is_async, "tables": with_tables}

    def update(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"num_tokens": {}, "keeps": self.client.finished("a", [[1]])}


def replies_to(*messages: Any, adapter: MadeUp | None = None) -> list[Any]:
    """The replies to these lines, queries included."""
    lines = [line if isinstance(line, bytes) else encode(line) for line in messages]
    sink = io.BytesIO()
    sink.close = lambda: None  # type: ignore[method-assign]
    serve(SCHEDULER, adapter or MadeUp(), io.BytesIO(b"\n".join(lines) + b"\n"), sink)
    return [decode(line) for line in sink.getvalue().splitlines()]


class ProtocolTest(unittest.TestCase):
    def assert_failed(self, reply: Any, what: str) -> None:
        self.assertEqual(list(reply), ["failed"], reply)
        self.assertRegex(reply["failed"]["what"], what)

    def test_a_case_from_hello_to_close(self) -> None:
        adapter = MadeUp()
        replies = replies_to(HELLO, OPEN, ADD, {"close": True}, adapter=adapter)
        self.assertEqual(
            replies,
            [
                {"hello": {"scheduler_protocol": 1} | adapter.hello()},
                {"opened": {"scheduler_block_size": 16, "hash_block_size": 16}},
                {},
                {},
            ],
        )
        self.assertEqual(adapter.calls, ["close", "open", ADD, "close"])

    def test_questions_come_between_a_message_and_its_reply(self) -> None:
        replies = replies_to(
            OPEN,
            {"schedule": 0, "tables": True},
            {"external": 4, "async": True},
            {"update": 0, "sampled": {}},
            {"keeps": True},
        )[1:]
        self.assertEqual(
            replies,
            [
                {"ask": "matched_tokens", "id": "a", "local": 16},
                {"tell": "allocated", "id": "a", "external": 4, "blocks": [[1, 2]]},
                {"scheduled": [], "external": 4, "async": True, "tables": True},
                {"ask": "finished", "id": "a", "blocks": [[1]]},
                {"num_tokens": {}, "keeps": True},
            ],
        )

    def test_refusals_are_replies_and_the_case_goes_on(self) -> None:
        small = {"open": OPEN["open"] | {"num_blocks": 1}}
        replies = replies_to(small, OPEN, ADD | {"max_tokens": 0}, ADD)
        self.assertEqual(replies[0], {"refused": "found 1 block; expected 2"})
        self.assertEqual(replies[2:], [{"refused": "nothing to sample"}, {}])

    def test_what_the_engine_raises_is_a_reply_and_only_close_or_open_follow(self) -> None:
        replies = replies_to(OPEN, {"abort": "b"}, ADD, {"close": True}, OPEN, ADD)
        self.assert_failed(replies[1], "^KeyError: 'b'$")
        self.assertIn("in abort\n    raise KeyError(name)", replies[1]["failed"]["trace"])
        self.assert_failed(replies[2], "while no case is open")
        self.assertEqual(replies[3], {})
        self.assertEqual(replies[5], {})

    def test_an_assertion_without_words_is_named_by_its_line(self) -> None:
        reply = replies_to(OPEN, {"abort": "c"})[1]
        self.assertEqual(reply["failed"]["what"], 'AssertionError: assert name != "c" (in abort)')

    def test_what_the_protocol_does_not_have_is_named(self) -> None:
        for line, what in (
            (b"{", "not JSON"),
            (b"[1]", "not an object"),
            ({"step": 0}, "found message 'step'"),
            ({"hello": {"scheduler_protocol": 2}}, "expected scheduler_protocol 1"),
            ({"open": OPEN["open"] | {"family": "x"}}, "'family' in a case"),
            ({"open": {"config": {}, "groups": []}}, "without key 'num_blocks'"),
            ({"schedule": 0}, "while no case is open"),
        ):
            with self.subTest(line=line):
                self.assert_failed(replies_to(line)[0], what)
        for message, what in (
            (ADD | {"colour": 1}, "'colour' in message 'add'"),
            ({"add": "a", "prompt": []}, "without key 'max_tokens'"),
            ({"reset_prefix_cache": True}, "reset that is not"),
            ({"update": 0, "sampled": {}, "tokens": {}}, "'tokens' in message 'update'"),
            ({"pause_state": "ASLEEP"}, "ASLEEP"),
        ):
            with self.subTest(message=message):
                self.assert_failed(replies_to(OPEN, message)[1], what)

    def test_keys_that_begin_with_x_pass(self) -> None:
        self.assertEqual(replies_to(OPEN, ADD | {"x_colour": 1})[1], {})

    def test_an_answer_is_read_as_strictly(self) -> None:
        replies = replies_to(OPEN, {"schedule": 0}, {"external": 4})
        self.assert_failed(replies[2], "an answer to matched_tokens without key 'async'")

    def test_input_that_ends_in_a_question_ends_the_process(self) -> None:
        self.assertEqual(len(replies_to(OPEN, {"schedule": 0})), 2)

    def test_what_an_engine_prints_goes_to_standard_error_and_it_reads_no_message(self) -> None:
        script = (
            "import os, sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
            "from lockstep_engines import protocol; from adapter_protocol_test import MadeUp\n"
            "source, sink = protocol.own_pipe()\n"
            "os.write(1, b'so does C code\\n')\n"
            "assert os.read(0, 1) == b'' and sys.stdin.read() == ''\n"
            "protocol.serve(protocol.SCHEDULER, MadeUp(), source, sink)\n"
        )
        lines = (OPEN, {"schedule": 0}, {"external": 4, "async": False})
        done = subprocess.run(
            [sys.executable, "-c", script, str(PACKAGES), str(PACKAGES / "tests")],
            input=b"".join(encode(line) + b"\n" for line in lines),
            capture_output=True,
        )
        self.assertEqual(len([decode(line) for line in done.stdout.splitlines()]), 4)
        self.assertEqual(done.stderr, b"so does C code\nan engine prints\n")
        self.assertEqual(done.returncode, 0)


# Two sides that call each other: Lockstep's package and an engine's.
SIDES = {
    "lockstep_engines.stand_in": """
import json
from lockstep_engines.protocol import EngineFault, passes_on
def raises(): raise RuntimeError("planted in Lockstep")
def reads_badly(): json.loads("{")
def rejects(): raise EngineFault("the engine passes a wrong block")
def calls(function): function()
@passes_on
def wraps(function): function()
""",
    "vllm.v1.worker": """
import json
def raises(): raise RuntimeError("planted in the engine")
def reads_badly(): json.loads("{")
def calls(function): function()
def calls_and_tells(function):
    try: function()
    except Exception as error: raise ValueError("a kernel raised") from error
""",
}


class Sides:
    """A scheduler and a worker that do `run` in a step."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def open(self, case: Any, client: Any) -> Any:
        return {}

    def close(self) -> None: ...

    def schedule(self, step: int, with_tables: bool) -> Any:
        self.run()

    def execute(self, step: Any) -> Any:
        self.run()


class WhoRaisedTest(unittest.TestCase):
    def test_the_innermost_frame_of_either_side_decides_in_both_servers(self) -> None:
        scopes: dict[str, Any] = {name: {"__name__": name} for name in SIDES}
        for name, text in SIDES.items():
            exec(text, scopes[name])
        ours, engine = scopes["lockstep_engines.stand_in"], scopes["vllm.v1.worker"]
        cases = {
            "our code": (lambda: ours["raises"](), True),
            "a library that we call": (lambda: ours["reads_badly"](), True),
            "the engine": (lambda: engine["raises"](), False),
            "the engine, called by us": (lambda: ours["calls"](engine["raises"]), False),
            "a library that it calls": (lambda: ours["calls"](engine["reads_badly"]), False),
            "our stand-in": (lambda: engine["calls"](ours["raises"]), True),
            "a stand-in that checks": (lambda: engine["calls"](ours["rejects"]), False),
            "our wrapper": (lambda: engine["calls"](lambda: ours["wraps"](1)), False),
            "our cause": (lambda: engine["calls_and_tells"](ours["raises"]), True),
            "a cause of its own": (lambda: engine["calls_and_tells"](ours["rejects"]), False),
        }
        step = {"execute": 0, "sampled": {}, "scheduled": []}
        step |= {key: [] for key in ("finished", "preempted", "zero", "copies")}
        languages = (
            (SCHEDULER, OPEN, {"schedule": 0}),
            (WORKER, {"open": OPEN["open"] | {"memory": ""}}, step),
        )
        for name, (run, is_harness) in cases.items():
            for language, begin, message in languages:
                with self.subTest(raised_by=name, server=language.name):
                    sink = io.BytesIO()
                    lines = encode(begin) + b"\n" + encode(message) + b"\n"
                    serve(language, Sides(run), io.BytesIO(lines), sink)
                    reply = decode(sink.getvalue().splitlines()[1])
                    self.assertEqual(reply["failed"].get("harness", False), is_harness, reply)

    def test_a_message_that_the_protocol_does_not_have_is_lockstep_s_own_error(self) -> None:
        self.assertTrue(replies_to({"step": 0})[0]["failed"]["harness"])


if __name__ == "__main__":
    unittest.main()
