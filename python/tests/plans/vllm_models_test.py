"""`lockstep model`: the model files that vLLM 0.33.0's own model classes give for configurations.

$LOCKSTEP_DATA names a folder with `recordings_more/vllm-0.33.0/models`: each configuration has the
plan that the engine made (its README.md). The planned model file must give the same groups, blocks,
tensors and capacity. $LOCKSTEP_MODELS: `all`, or names with commas (a few). Skipped, with exit
status 77, without vLLM 0.33.0, the data or $LOCKSTEP, the command.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
SKIPPED = 77
sys.path[:0] = [str(TESTS.parent)]
DATA = Path(os.environ.get("LOCKSTEP_DATA", TESTS.parents[2] / "shared"))
FOLDER = DATA / "recordings_more" / "vllm-0.33.0" / "models"
LOCKSTEP = os.environ.get("LOCKSTEP", "")
FEW = "gemma2,mimo_v2_flash,deepseek_v32,deepseek_v4,nemotron_h,qwen3_next,glm5_next,llama4,bert"
# What a model file cannot express, and the release refuses.
REFUSED = {"qwen2--windowed": "Sliding window for some but all layers"}
MEMORY_MAX = 8 << 30  # bytes of a child: a model that is built with its weights ends there

for missing, reason in (
    (not FOLDER.is_dir(), f"no recorded models at LOCKSTEP_DATA={str(DATA)!r}"),
    (not os.access(LOCKSTEP, os.X_OK), f"no `lockstep` command at LOCKSTEP={LOCKSTEP!r}"),
):
    if missing:
        print(f"SKIPPED: {reason}; no model file was compared")
        sys.exit(SKIPPED)

from lockstep_engines.vllm import model_layers  # noqa: E402

try:
    model_layers.take_the_place_of_a_gpu()  # before any other module of vLLM is imported
except ImportError as error:
    print(f"SKIPPED: vLLM cannot be imported ({error}); no model file was compared")
    sys.exit(SKIPPED)
import vllm  # noqa: E402
import vllm.engine.arg_utils  # noqa: E402
import vllm.model_executor.model_loader.utils  # noqa: E402
import vllm.v1.worker.gpu.attn_utils  # noqa: E402

if vllm.__version__.split("+")[0] != "0.33.0":
    print(f"SKIPPED: the recorded models are of vLLM 0.33.0, not {vllm.__version__}")
    sys.exit(SKIPPED)


def described(name: str, path: Path) -> dict[str, Any]:
    """By a fork of this process: a model class leaves its layers in global tables."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MAX, MEMORY_MAX))
        try:
            path.write_text(json.dumps(model_layers.described(str(FOLDER / name))) + "\n")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads(path.read_text()) if path.exists() else {"refused": "the process crashed"}


def figures(spec: dict[str, Any]) -> list[Any]:
    return [spec[key] for key in ("block_size", "page_size_bytes", "hnc")]


def recorded_figures(recorded: dict[str, Any]) -> dict[str, Any]:
    plan = recorded["plans"][0]
    kept = [n for n, index in enumerate(plan["layer_specs"]) if index is not None]
    groups = []
    for group in plan["groups"]:
        spec = group["spec"]
        spec = plan["specs"][spec] if isinstance(spec, int) else spec
        if "parts" in spec:
            first = spec["parts"][0]["spec"]
            spec = plan["specs"][first] if isinstance(first, int) else first
        groups.append([[kept.index(n) for n in group["layers"]], figures(spec)])
    tensors = [[len(t["layers"]) if isinstance(t["layers"], list) else t["layers"],
                t["layer_stride"], t["block_stride"], t["offset"]]
               for t in plan["tensors"]]  # fmt: skip
    return {"groups": groups, "num_blocks": plan["num_blocks"], "tensors": tensors,
            "tokens": plan["capacity"]["tokens"]}  # fmt: skip


def planned_figures(path: Path, options: dict[str, Any], folder: Path) -> dict[str, Any] | str:
    report = folder / "layout.json"
    command = [LOCKSTEP, "layout", "--model", str(path), "--engine", "vllm-0.33.0", "--json",
               str(report), "--max-model-len", str(options["max_model_len"]), "--memory",
               str(options["memory_bytes"]), "--layout", "NHD"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return done.stderr
    worker = json.loads(report.read_text())["workers"][0]
    names = {name: n for n, name in enumerate(
        name for entry in _expanded(json.loads(path.read_text())) for name in [entry])}  # fmt: skip
    groups = [[[names[name] for name in g["layers"]], figures(g)] for g in worker["groups"]]
    tensors = [[len(t["layers"]), t["layer_stride"], t["block_stride"], t["offset"]]
               for t in worker["tensors"]]  # fmt: skip
    return {"groups": groups, "num_blocks": worker["num_blocks"], "tensors": tensors,
            "tokens": worker["capacity"]["capacity_tokens"]}  # fmt: skip


def _expanded(model: dict[str, Any]) -> list[str]:
    """Names of the file's layers, in order."""
    layers: list[Any] = []
    for entry in model["layers"]:
        layers += entry["of"] * entry["repeat"] if isinstance(entry, dict) else [entry]
    names: list[str] = []
    for n, words in enumerate(layers):
        caches = [words] if isinstance(words, str) else words
        for at, word in enumerate(caches):
            again = caches[:at].count(word)
            names.append(f"layers.{n}.{word}" + (f".{again}" if again else ""))
    return names


class ModelsTest(unittest.TestCase):
    maxDiff = 1500

    def test_a_built_model_is_planned_as_the_engine_plans_it(self) -> None:
        names = os.environ.get("LOCKSTEP_MODELS", FEW)
        every = sorted(path.parent.name for path in FOLDER.glob("*/layers.json"))
        for name in every if names == "all" else names.split(","):
            with self.subTest(name), tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / "model.json"
                recorded = json.loads((FOLDER / name / "layers.json").read_text())
                model = described(name, path)
                if name in REFUSED or recorded["plans"][0].get("no_cache"):
                    expected = REFUSED.get(name, "no layer keeps a cache")
                    self.assertIn(expected, model.get("refused", "a model file"))
                    continue
                self.assertNotIn("refused", model)
                options = recorded["plans"][0]["options"]
                planned = planned_figures(path, options, Path(temporary))
                self.assertEqual(planned, recorded_figures(recorded))

    def test_an_unknown_architecture_is_refused_in_one_sentence(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = {"model_type": "llama", "architectures": ["NoSuchForCausalLM"]}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            environment = os.environ | {"LOCKSTEP_PYTHON": sys.executable}
            done = subprocess.run(
                [LOCKSTEP, "model", folder, "--from", f"vllm:{Path(vllm.__file__).parents[1]}",
                 "--out", f"{folder}/model.json"],
                capture_output=True, text=True, env=environment)  # fmt: skip
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn("NoSuchForCausalLM", done.stderr)
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
