"""What `lockstep export` writes is taken by the tools that it is for: vLLM's loader of timed
traces, AIPerf's of Mooncake rows.

$LOCKSTEP names the command. vLLM is the installed one or what $LOCKSTEP_VLLM names (several: as in
PATH); AIPerf is that of $LOCKSTEP_AIPERF_PYTHON, an interpreter, or the installed one. Each is
skipped where it is not there; exit status 77 when both are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("LOCKSTEP", "")
SKIPPED = 77
FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
AIPERF = os.environ.get("LOCKSTEP_AIPERF_PYTHON", sys.executable)

# A trace, and a saved case with priorities.
FILES = {
    "trace": ROOT / "traces/samples/foreign/bailian.jsonl",
    "case": ROOT / "tests/regressions/more_memory_finishes_later.case.jsonl",
}

LOAD_TIMED_TRACE = """
import json, sys
from vllm.benchmarks.datasets.datasets import TimedTrace
class Tokenizer:
    all_special_ids = [0]
    def get_vocab(self):
        return {str(i): i for i in range(5000)}
found = {}
for path, block in json.loads(sys.argv[1]):
    trace = TimedTrace(
        dataset_path=path, random_seed=0, timed_trace_chunk_hash_size=block,
        timed_trace_sec_multiplier=1, timed_trace_label_timestamp="timestamp",
        timed_trace_label_input_length="input_length",
        timed_trace_label_output_length="output_length", timed_trace_label_hash_ids="hash_ids")
    found[path] = [[s.timestamp, s.prompt_len, s.expected_output_len, s.prompt]
                   for s in trace.sample(Tokenizer(), 1000, no_oversample=True)]
print(json.dumps(found))
"""

LOAD_AIPERF = """
import json, sys
from types import SimpleNamespace
from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader as Loader
# What the loader asks of a run; text for the tokens is made later, and wants a tokenizer.
config = SimpleNamespace(get_default_dataset=SimpleNamespace, phases=[], tokenizer=None,
                         get_model_names=list)
words = SimpleNamespace(tokenizer=SimpleNamespace(resolved_name="words"), _cache={},
                        _hash_id_corpus_rng=SimpleNamespace(set_trace_id=lambda _: None))
found = {}
for path, block in json.loads(sys.argv[1]):
    assert all(Loader.can_load(json.loads(line)) for line in open(path)), path
    run = SimpleNamespace(cfg=config, random_seed=0)
    loader = Loader(filename=path, prompt_generator=words, run=run, default_block_size=block)
    rows = [row for session in loader.load_dataset().values() for row in session]
    found[path] = [row.model_dump(mode="json") for row in rows]
print(json.dumps(found))
"""


def run(python: str, code: str, argument: object, folder: str | None = None) -> object | None:
    """What the program prints; None: what it imports is not there."""
    environment = dict(os.environ)
    if folder:
        environment["PYTHONPATH"] = os.pathsep.join([folder, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, "-c", code, json.dumps(argument)], env=environment, capture_output=True, text=True
    )
    last = (done.stderr.splitlines() or [""])[-1]
    if done.returncode and last.startswith(("ModuleNotFoundError: ", "ImportError: ")):
        return None
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


class ExportedFilesTest(unittest.TestCase):
    def export(self, form: str) -> dict[str, tuple[str, int, list[dict]]]:
        """Per file: where the export lies, tokens of an id, the rows."""
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        exported = {}
        for name, path in FILES.items():
            out = str(Path(holder.name) / f"{name}.jsonl")
            done = subprocess.run(
                [COMMAND, "export", str(path), "--as", form, "--lossy", "--out", out],
                capture_output=True, text=True,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            block = int(done.stdout.split("ids of ")[1].split()[0])
            rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
            exported[name] = out, block, rows
        return exported

    def test_vllms_loader_takes_a_timed_trace(self) -> None:
        exported = self.export("timed_trace")
        files = [[out, block] for out, block, _ in exported.values()]
        found = run(sys.executable, LOAD_TIMED_TRACE, files, FOLDERS[0] if FOLDERS else None)
        if found is None:
            self.skipTest("no vLLM here has the dataset timed_trace (0.22.1 has none)")
        for out, block, rows in exported.values():
            self.assertEqual(
                [request[:3] for request in found[out]],
                [[row["timestamp"], row["input_length"], row["output_length"]] for row in rows],
            )
            for mine, a in zip(rows, found[out], strict=True):
                for theirs, b in zip(rows, found[out], strict=True):
                    ids = zip(mine["hash_ids"], theirs["hash_ids"], strict=False)
                    same = next((i for i, (x, y) in enumerate(ids) if x != y), None)
                    if same is not None:  # as many tokens as the ids say, and no more
                        self.assertEqual(a[3][: same * block], b[3][: same * block])
                        self.assertNotEqual(a[3][same * block :], b[3][same * block :])

    def test_aiperf_takes_its_rows(self) -> None:
        exported = self.export("aiperf")
        found = run(AIPERF, LOAD_AIPERF, [[out, block] for out, block, _ in exported.values()])
        if found is None:
            self.skipTest("AIPerf cannot be imported; LOCKSTEP_AIPERF_PYTHON names an interpreter")
        for out, block, rows in exported.values():
            for row, read in zip(rows, found[out], strict=True):
                self.assertEqual(row, {key: read[key] for key in row})
                self.assertEqual(len(row["hash_ids"]), -(-row["input_length"] // block))


if __name__ == "__main__":
    if not os.access(COMMAND, os.X_OK):
        print(f"SKIPPED: no `lockstep` command at LOCKSTEP={COMMAND!r}")
        sys.exit(SKIPPED)
    program = unittest.main(exit=False)
    if not program.result.wasSuccessful():
        sys.exit(1)
    if len(program.result.skipped) == program.result.testsRun:
        print("SKIPPED: " + "; ".join(reason for _, reason in program.result.skipped))
        sys.exit(SKIPPED)
