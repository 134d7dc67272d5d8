"""From what the engine calls, in the order in which it calls it, to the lines of a recording.

One line is one schedule(): what came before it, what it decided, the queues behind it. With the
model's output come the line's own tokens, and what they ended. Asynchronous scheduling decides
step n + 1 before the tokens of step n are there, so a line is written once two things are known:
its own tokens, and everything that happened until the next schedule().

1. Lines are written in the order of their steps; at most the steps in flight, and one, wait.
2. Whatever the engine changes later (it trims token lists in place) is copied when it is seen.
3. A step that scheduled nothing has no tokens and is never in flight.
4. Several outputs may arrive after one step (paused with steps in flight, pipelines): the line
   names the last of them, and `during` the positions of the others among the clients' events.
"""

from collections import deque
from typing import Any, Protocol

from lockstep_recorder.decisions import Decisions, held_drafts_of, tables_of
from lockstep_recorder.errors import EndOfRecording
from lockstep_recorder.recording_file import encode_json
from lockstep_recorder.releases import Release
from lockstep_recorder.requests import add_event


class LineFile(Protocol):
    """RecordingFile, or what takes its place."""

    def write_line(self, line: bytes) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Counter(Protocol):
    """CacheCounter, or what takes its place."""

    def watch(self) -> None: ...

    def take(self) -> tuple[int, int]: ...

    def seen(self) -> tuple[int, int]: ...

    def forget_since(self, counts: tuple[int, int]) -> None: ...


class _Line:
    """One step on its way to the file."""

    def __init__(self, step: int, head: bytes, output: Any, is_empty: bool) -> None:
        self.step = step
        self.head = head  # encoded up to the state behind the decision, without the last brace
        self.output = output  # vLLM's SchedulerOutput, compared by identity only
        self.has_passed = False  # the next schedule() has begun
        self.sampled: dict[str, list[int]] | None = {} if is_empty else None
        self.output_of_step: int | None = None  # the last output that arrived after it
        # Its requests, and how often each had been preempted; where late output is recorded.
        self.requests: dict[str, tuple[Any, int]] = {}
        self.tail: dict[str, Any] = {}  # what follows `sampled`

    def encode(self) -> bytes:
        during = self.tail.pop("during", None)
        rest = {"during": during} if during else {}
        rest["sampled"] = self.sampled or {}
        rest |= self.tail
        return self.head + b"," + encode_json(rest)[1:]


class StepLog:
    """Writes the steps of one scheduler to one file."""

    def __init__(
        self,
        file: LineFile,
        header: dict[str, Any],
        release: Release,
        counter: Counter,
        tables_every: int,
        beside_connector: bool = False,
    ) -> None:
        """`tables_every`: steps from one showing of all block tables to the next; 0: none."""
        self._tables_every = tables_every
        self._file = file
        self._counter = counter
        config = header["config"]
        self._hash_block_size = header["hash_block_size"]
        self._with_priority = config["policy"] == "priority"
        pipelined = "pipeline_parallel_size" in header.get("x_beyond_format", ())
        self._may_run_ahead = config["async_scheduling"] or pipelined
        self._num_steps = 0
        self._events: list[dict[str, Any]] = []  # since the last schedule() or output
        self._lines: deque[_Line] = deque()  # not written yet; the last one is of the last step
        self._decisions = Decisions(release, beside_connector)
        self._live: set[str] = set()  # requests of the steps so far that have not ended
        self._counts = counter.seen()  # when the last output started to arrive
        self._tells_held_drafts = "held_drafts" in header
        self._tells_stale_outputs = "stale_outputs" in header
        # Of the arriving output: requests that have changed since it was decided, the request
        # that has the name now, and how many tokens that one had received.
        self._late: list[tuple[str, bool, Any, int]] = []
        file.write_line(encode_json(header))

    # What happens between steps.

    def add(self, request: Any) -> None:
        """A request has been added."""
        self._events.append(add_event(request, self._with_priority, self._hash_block_size))

    def is_in_flight(self, name: str) -> bool:
        """A step that waits for its output has a request of this name."""
        return any(
            line.sampled is None and name in line.output.num_scheduled_tokens
            for line in self._lines
        )

    def abort(self, names: list[str]) -> None:
        """Live requests have been aborted, in this order."""
        for name in names:
            self._events.append({"abort": name})
        self._decisions.ended(names)

    def pause(self, state: str) -> None:
        """The engine was paused or resumed: vLLM's name of the state."""
        self._events.append({"pause_state": state})

    def reset(self, succeeded: bool, preempted: bool = False) -> None:
        """The prefix cache was reset; `preempted`: with all running requests preempted."""
        event: dict[str, Any] = {"reset_prefix_cache": succeeded}
        if preempted:
            event["running"] = True
        self._events.append(event)
        if succeeded:
            self._counter.watch()

    # A step.

    def scheduling(self) -> None:
        """schedule() is about to decide: what is counted from here on is the next step's."""
        self._close_line()

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """schedule() has returned `output`, a SchedulerOutput."""
        if not self._may_run_ahead and any(line.sampled is None for line in self._lines):
            raise EndOfRecording(
                "found a step before the output of the last, which no engine waits for"
            )
        line: dict[str, Any] = {"step": self._num_steps}
        events, self._events = self._events, []
        if events:
            line["before"] = events
            self._note_live(events)
        line |= self._decisions.of_step(output)
        self._add_state(line, scheduler)
        is_empty = not output.num_scheduled_tokens
        self._lines.append(_Line(self._num_steps, encode_json(line)[:-1], output, is_empty))
        if self._tells_stale_outputs:
            requests = scheduler.requests
            self._lines[-1].requests = {
                name: (request, request.num_preemptions)
                for name in output.num_scheduled_tokens
                if (request := requests.get(name)) is not None
            }
        if any(event.get("reset_prefix_cache") for event in events):
            self._lines[-1].tail["cleared"] = True
        self._num_steps += 1

    def updated(
        self,
        output: Any,
        sampled: dict[str, list[int]],
        stopped: list[tuple[str, str]],
        is_async: bool,
    ) -> None:
        """The engine has processed the tokens of the step of `output`, which ended the requests
        `stopped`."""
        if not output.num_scheduled_tokens:
            return
        own = next((line for line in self._lines if line.output is output), None)
        if own is None:
            raise EndOfRecording("found an output of a step that was not recorded")
        own.sampled, own.output = sampled, None
        own.requests = {}
        last = self._lines[-1]
        if self._events:
            during = last.tail.setdefault("during", [])
            if last.output_of_step is not None:
                during.append({"output_of_step": last.output_of_step})
            during += self._events
            if any(event.get("reset_prefix_cache") for event in self._events):
                last.tail["cleared"] = True
            self._note_live(self._events)
            self._events = []
        is_plain = own is last and last.output_of_step is None and not is_async
        last.output_of_step = own.step
        if not is_plain:
            last.tail["output_of_step"] = own.step
        late, self._late = self._late, []
        for name, is_same, request, num_before in late:
            taken = request.num_output_tokens - num_before
            # Unused tokens of an ended request are not recorded.
            if taken or (is_same and name in sampled):
                entry = {"id": name, "of_step": own.step, "taken": taken}
                last.tail.setdefault("stale_outputs", []).append(entry)
        if stopped:
            last.tail.setdefault("stopped", []).extend(stopped)
            names = [name for name, _ in stopped]
            self._live.difference_update(names)
            self._decisions.ended(names)

    def drafted(self, drafts: dict[str, list[int]]) -> None:
        """The model has proposed `drafts` for the next step."""
        self._lines[-1].tail.setdefault("drafts", {}).update(drafts)

    def output_begins(self) -> None:
        """An output is about to be processed."""
        self._counts = self._counter.seen()

    def note_late(self, output: Any, requests: dict[str, Any]) -> None:
        """The output of the step `output` is about to be processed by an engine with these
        requests: notes which of its own were preempted or have ended since."""
        own = next((line for line in self._lines if line.output is output), None)
        self._late = []
        for name, (request, num_preemptions) in (own.requests if own else {}).items():
            now: Any = requests.get(name)
            if now is request and request.num_preemptions == num_preemptions:
                continue
            heir = request if now is None else now
            self._late.append((name, now is request, heir, heir.num_output_tokens))

    def output_failed(self) -> None:
        """The engine failed while processing it: drops what it stored until then."""
        self._counter.forget_since(self._counts)

    def finish(self, stopped_because: str | None = None) -> None:
        """Writes what is known and the end line; the file gets its name."""
        self._close_line()
        in_flight = sum(line.sampled is None for line in self._lines)
        while self._lines:
            self._file.write_line(self._lines.popleft().encode())
        end: dict[str, Any] = {
            "end": True,
            "steps": self._num_steps,
            "unfinished": sorted(self._live),
        }
        if in_flight:
            end["steps_in_flight"] = in_flight
        if stopped_because is not None:
            end["x_stopped_because"] = stopped_because
        self._file.write_line(encode_json(end))
        self._file.finish()

    def abandon(self) -> None:
        """Gives up: the partial file stays under its partial name."""
        self._file.abandon()

    def _note_live(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if "add" in event:
                self._live.add(event["add"])
            elif "abort" in event:
                self._live.discard(event["abort"])

    def _close_line(self) -> None:
        """Closes the last line: its counters are final."""
        if not self._lines:
            return
        last = self._lines[-1]
        if not last.has_passed:
            last.has_passed = True
            stored, evicted = self._counter.take()
            cleared = last.tail.pop("cleared", False)
            if stored:
                last.tail["stored"] = stored
            if evicted:
                last.tail["evicted"] = evicted
            if cleared:
                last.tail["cleared"] = True
        while self._lines and self._lines[0].has_passed and self._lines[0].sampled is not None:
            self._file.write_line(self._lines.popleft().encode())

    def _add_state(self, line: dict[str, Any], scheduler: Any) -> None:
        """The queues and the pool as the decision left them, and whole tables when it is time."""
        line |= self._decisions.state_of(scheduler)
        if self._tells_held_drafts and (held := held_drafts_of(scheduler, line)):
            line["held_drafts"] = held
        if self._tables_every and (self._num_steps + 1) % self._tables_every == 0:
            line["tables"] = tables_of(scheduler)
