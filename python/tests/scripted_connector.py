"""A KV connector with scripted answers: the caller sets them for each step."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from lockstep_engines.vllm.connector import AskingConnector


class ScriptedConnector(AskingConnector):
    """An answer is an entry of `connector` in a recording."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.client = self
        self._answers: deque[dict[str, Any]] = deque()
        self._held: set[str] = set()

    def expect(self, answers: Iterable[dict[str, Any]], held: Iterable[str]) -> None:
        """Sets the answers of the next step, in query order, and the requests that keep their
        blocks when they finish. AssertionError if the previous step made fewer queries than
        expected."""
        assert not self._answers, f"vLLM did not ask for {list(self._answers)}"
        self._answers.extend(answers)
        self._held = set(held)

    def matched_tokens(self, name: str, local: int) -> tuple[int | None, bool]:
        assert self._answers, f"vLLM asked for {name}, which was not expected"
        answer = self._answers.popleft()
        asked = {"id": name, "local": local}
        assert asked == {key: answer[key] for key in asked}, f"{asked} is not {answer}"
        return answer["external"], answer["async"]

    def finished(self, name: str, _: Any) -> bool:
        return name in self._held

    def allocated(self, *_: Any) -> None:
        pass
