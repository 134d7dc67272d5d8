"""Runs vLLM's own tests of its scheduler with the recorder around every scheduler that they make.

    python record_vllm_tests.py SOURCE OUT [--lockstep COMMAND] [--tests PATH ...] [--reuse]

SOURCE: the unpacked source distribution of the vLLM that is installed. Runs each test without the
recorder and with it, and compares the two results. With COMMAND (the
`lockstep` command) `conform` and `audit` judge every recording.

Exit status 1: a test came out otherwise with the recorder, the recorder gave up, or a recording
disagrees that neither flags an option nor is of a test that is listed below. Recordings that the
reader refuses are listed with its reason. Tests that need a model from the network fail both ways.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = ("tests/v1/core", "tests/v1/kv_connector/unit")

# Tests that set state which no engine sets, and leave lengths and attributes as they were; and the
# state: what a recording says of them is not what an engine would have done.
REACHES_INTO_PRIVATE_STATE = {
    "test_no_spec_decode_padding_up_to_max_model_len":
        "a request comes with computed tokens that were never computed",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request":
        "allocate_slots() of the cache manager answers None, once",
}  # fmt: skip

# What ModelConfig asks of the model that most tests name.
_MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "t2",
    "eos_token": "t2",
    "pad_token": "t1",
    "unk_token": "t3",
}


def make_model(folder: Path) -> None:
    """A stand-in for facebook/opt-125m under the folder that tests run in: sizes, no weights."""
    from tokenizers import Tokenizer, models

    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MODEL))
    (model / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
    words = {f"t{i}": i for i in range(64)}
    Tokenizer(models.WordLevel(words, unk_token="t3")).save(str(model / "tokenizer.json"))


def run_tests(source: Path, tests: list[str], home: Path, outcomes: Path, out: Path | None) -> None:
    """Runs the tests in `home`, recording to `out` when it is given."""
    outcomes.unlink(missing_ok=True)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "LOCKSTEP_VLLM_OUTCOMES": str(outcomes),
        "LOCKSTEP_VLLM_TESTS": str(out) if out else "",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parent),
                                       str(HERE), str(source)]),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    # A test that waits for what this machine lacks must not keep the others.
    timeout = ["--timeout", "120"] if find_spec("pytest_timeout") else []
    command = [sys.executable, "-m", "pytest", *timeout, "-q", "--tb=no", "-p", "no:cacheprovider",
               "-p", "vllm_tests_plugin", f"--confcutdir={source / 'tests' / 'v1'}",
               "--continue-on-collection-errors", "-k", "not e2e",
               *(str(source / test) for test in tests)]  # fmt: skip
    with open(outcomes.with_suffix(".log"), "w") as log:
        subprocess.run(command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT)


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["test"]: line for line in lines}


@dataclass
class Judgement:
    """The outcome of one recording."""

    test: str
    file: str
    verdict: str  # refused, gave up, recorded (no step, or not judged), not read, differs, finding
    ended: str = ""  # why the recording ends before the test
    beyond: list[str] = field(default_factory=list)
    steps: int = 0
    what: str = ""


def _run(lockstep: str, command: str, path: Path) -> tuple[int, str]:
    done = subprocess.run([lockstep, command, str(path)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def judge(lockstep: str, out: Path, test: str, noted: dict[str, Any]) -> Judgement:
    """`noted`: what the plugin wrote down of one recording."""
    found = Judgement(test, noted["file"], "recorded")
    if "refused" in noted:
        found.verdict, found.what = "refused", noted["refused"]
        return found
    if "gave_up" in noted:
        found.verdict = "gave up"
        return found
    path = out / noted["file"]
    lines = path.read_text().splitlines()
    end = json.loads(lines[-1])
    found.steps, found.ended = end["steps"], end.get("x_stopped_because", "")
    found.beyond = json.loads(lines[0]).get("x_beyond_format", [])
    if not lockstep or not found.steps:
        return found
    for command, verdict in (("conform", "differs"), ("audit", "finding")):
        status, text = _run(lockstep, command, path)
        if status:
            found.verdict = verdict if status == 1 else "not read"
            found.what = " | ".join(line.strip() for line in text.splitlines() if line)[-300:]
            if status != 1:  # the last line: FILE:LINE: what
                found.what = found.what.rsplit(".jsonl:", 1)[-1]
            return found
    found.verdict = "agrees"
    return found


def _plain(reason: str) -> str:
    """A reason without the names of requests."""
    return re.sub(r"^request \S+: ", "", reason)


def report(judged: list[Judgement], out: Path) -> list[Judgement]:
    """Prints the figures. Returns the unexplained differences."""
    print(f"{len(judged)} schedulers, {sum(j.steps for j in judged)} steps recorded")
    for verdict, count in Counter(j.verdict for j in judged).most_common():
        print(f"  {verdict}: {count}")
    for title, reasons in (
        ("refused", Counter(j.what for j in judged if j.verdict == "refused")),
        ("not read", Counter(j.what for j in judged if j.verdict == "not read")),
        ("ended early", Counter(_plain(j.ended) for j in judged if j.ended)),
        ("flagged", Counter(name for j in judged for name in j.beyond)),
    ):
        print(f"{title}: {sum(reasons.values())}")
        for reason, count in reasons.most_common():
            print(f"  {count:5} {reason}")
    unexplained = []
    for j in judged:
        if j.verdict not in ("differs", "finding", "gave up"):
            continue
        name = j.test.split("::", 1)[-1].split("[")[0]
        why = REACHES_INTO_PRIVATE_STATE.get(name) or ", ".join(j.beyond)
        if not why:
            unexplained.append(j)
        print(f"{j.verdict}: {j.test} ({why or 'unexplained'})\n    {out / j.file}\n    {j.what}")
    return unexplained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lockstep", default="")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--reuse", action="store_true", help="judge what OUT holds already")
    arguments = parser.parse_args()
    out, source = arguments.out.resolve(), arguments.source.resolve()
    recordings = out / "recordings"
    plain, recorded = out / "plain.jsonl", out / "recorded.jsonl"
    if not arguments.reuse:
        recordings.mkdir(parents=True)
        make_model(out / "home")
        run_tests(source, arguments.tests, out / "home", recorded, recordings)
        run_tests(source, arguments.tests, out / "home", plain, None)
    with_recorder, without = read_outcomes(recorded), read_outcomes(plain)
    print(f"{len(without)} tests: {dict(Counter(t['outcome'] for t in without.values()))}")
    other = [name for name in with_recorder.keys() | without.keys()
             if with_recorder.get(name, {}).get("outcome")
             != without.get(name, {}).get("outcome")]  # fmt: skip
    print(f"{len(other)} came out otherwise with the recorder")
    for name in sorted(other):
        print(f"  {name}")
    judged = [judge(arguments.lockstep, recordings, name, noted)
              for name, test in with_recorder.items()
              for noted in test["recordings"]]  # fmt: skip
    unexplained = report(judged, recordings)
    return int(bool(other or unexplained))


if __name__ == "__main__":
    sys.exit(main())
