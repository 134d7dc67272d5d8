"""Lockstep's side of the scheduler protocol, as far as tests need it: an adapter's process receives
the inputs of a recording, and its decisions are compared with the recorded ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PACKAGES)]

from lockstep_engines.protocol import decode, encode

Line = dict[str, Any]
CASE_KEYS = ("config", "groups", "num_blocks", "connector")
# Fields of a step that are given to the engine; the others are what it decides.
GIVEN = ("step", "before", "during", "connector", "worker", "sampled", "drafts", "output_of_step")
STATE = ("running", "waiting", "skipped", "free_blocks")


def full_attention_case(num_blocks: int, seed: int = 0, **config: Any) -> Line:
    """One layer of full attention, blocks of 16 tokens; `config`: further options."""
    spec = {"type": "full", "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bf16"}
    return {
        "config": {"max_num_seqs": 4, "block_size": 16, "enable_prefix_caching": True} | config,
        "groups": [{"layers": ["layers.0"], "spec": spec}],
        "num_blocks": num_blocks,
        "seed": seed,
    }


class Adapter:
    """An adapter's process."""

    def __init__(self, *arguments: str, command: list[str] | None = None) -> None:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        paths = [str(PACKAGES), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "lockstep_engines", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.answer: Any = None  # what a question of the engine is answered with: a function

    def send(self, message: Line) -> Line:
        """The reply to a message; queries before it are answered."""
        self.write(encode(message))
        while True:
            line = self.read()
            if "ask" in line:
                self.write(encode(self.answer(line)))
            elif "tell" not in line:
                return line

    def write(self, text: bytes) -> None:
        self.process.stdin.write(text + b"\n")
        self.process.stdin.flush()

    def read(self) -> Line:
        text = self.process.stdout.readline()
        if not text:
            raise EOFError(f"the adapter has ended with {self.process.wait()}")
        return decode(text)

    def hello(self) -> Line:
        return self.send({"hello": {"scheduler_protocol": 1}})["hello"]

    def close(self) -> int:
        """Ends the process; its exit status."""
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def failing_checks(engine: str, folder: str | None) -> str | None:
    """What `lockstep check-adapter` finds wrong with an adapter; None: no command is built."""
    command = os.environ.get("LOCKSTEP")
    if not command:
        return None
    name = f"{engine}:{folder}" if folder else engine
    variables = {"LOCKSTEP_PYTHON": sys.executable, "LOCKSTEP_PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(
        [command, "check-adapter", name],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )
    lines = (done.stdout + done.stderr).splitlines()
    wrong = [
        f"{line}\n{after}"
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if "FAILS" in line
    ]
    return "" if done.returncode == 0 else "\n".join(wrong or lines)


def case_of(header: Line) -> Line:
    """The header of a recording as a message `open`."""
    return {"open": {key: header[key] for key in CASE_KEYS if key in header} | {"seed": 0}}


class Repeat:
    """The steps of a recording, decided again."""

    def __init__(self, adapter: Adapter, recorded: list[Line]) -> None:
        self._adapter, self._steps = adapter, recorded[1:-1]
        self._header = recorded[0]
        self._is_async = self._header["config"].get("async_scheduling", False)
        self._has_connector = "connector" in self._header
        self._answers: deque[Line] = deque()
        self._surprises: list[str] = []
        self._held: set[str] = set()
        self._in_flight: deque[Line] = deque()
        self._received: set[str] = set()  # loads that workers reported in outputs in flight
        adapter.answer = self._answer

    def _answer(self, question: Line) -> Line:
        if question["ask"] == "finished":
            return {"keeps": question["id"] in self._held}
        expected = self._answers.popleft() if self._answers else {}
        asked = {"id": question["id"], "local": question["local"]}
        if asked != {key: expected.get(key) for key in asked}:
            self._surprises.append(f"was asked for {asked}; recorded {expected}")
        answer = {"external": 0, "async": False} | expected
        return {"external": answer["external"], "async": answer["async"]}

    def _send(self, message: Line) -> Line:
        reply = self._adapter.send(message)
        assert "failed" not in reply, reply["failed"].get("trace", reply)
        assert "refused" not in reply, reply["refused"]
        return reply

    def _happen(self, events: list[Line], line: Line) -> None:
        for event in events:
            if "add" in event or "abort" in event:
                self._send(event)
            elif "reset_prefix_cache" in event:
                asked = {"running": event.get("running", False)}
                reply = self._send({"reset_prefix_cache": asked})
                assert reply["reset_prefix_cache"] == event["reset_prefix_cache"], event
                self._count(reply, line)
            else:
                self._send({"pause_state": event.get("pause_state", event.get("pause"))})

    def _count(self, reply: Line, line: Line) -> None:
        for key in ("stored", "evicted"):
            if key in reply:
                line[key] = line.get(key, 0) + reply[key]
        if "cleared" in reply:
            line["cleared"] = True

    def _come_in(self, last: int, line: Line) -> None:
        while self._in_flight and self._in_flight[0]["step"] <= last:
            step = self._in_flight.popleft()
            message = {"update": step["step"], "sampled": step["sampled"]}
            message |= {key: step[key] for key in ("drafts", "worker") if key in step}
            reply = self._send(message)
            self._received.difference_update(step.get("worker", {}).get("received", ()))
            for key in ("stopped", "held"):
                if key in reply:
                    line[key] = line.get(key, []) + reply[key]
            self._count(reply, line)

    def lines(self) -> Iterator[tuple[Line, Line]]:
        """Each recorded step, and its fields as the adapter decides them."""
        opened = self._send(case_of(self._header))["opened"]
        yield (
            {key: self._header[key] for key in ("scheduler_block_size", "hash_block_size")},
            opened,
        )
        for step in self._steps:
            self._answers.extend(step.get("connector", ()))
            self._held = set(step.get("held", ()))
            line: Line = {}
            self._happen(step.get("before", []), line)
            message: Line = {"schedule": step["step"]}
            if "tables" in step:
                message["tables"] = True
            reply = self._send(message)
            self._count(reply, line)
            line |= {key: reply[key] for key in reply if key not in ("stored", "evicted")}
            # A recording does not list a load that its worker has reported.
            loading = line.pop("loading", {})
            if loading := {name: loading[name] for name in loading if name not in self._received}:
                line["loading"] = loading
            self._received.update(step.get("worker", {}).get("received", ()))
            if reply["scheduled"] or self._has_connector:
                self._in_flight.append(step)
            for event in step.get("during", ()):
                if "output_of_step" in event:
                    self._come_in(event["output_of_step"], line)
                else:
                    self._happen([event], line)
            last = step.get("output_of_step", -1) if self._is_async else step["step"]
            self._come_in(last, line)
            assert not self._surprises, self._surprises
            assert not self._answers, f"not asked for {list(self._answers)}"
            yield {key: value for key, value in step.items() if key not in GIVEN}, line
        self._send({"close": True})


def differences(adapter: Adapter, recorded: list[Line]) -> list[str]:
    """The first difference, in words, or nothing."""
    for step, (theirs, mine) in enumerate(Repeat(adapter, recorded).lines()):
        if "common_prefix_blocks" not in theirs:
            mine.pop("common_prefix_blocks", None)  # which a recording may leave out
        if mine != theirs:
            return [
                f"step {step - 1}: {key} is {mine.get(key)}; recorded {theirs.get(key)}"
                for key in theirs | mine
                if theirs.get(key) != mine.get(key)
            ]
    return []
