"""The Python classes of docs/examples, in an interpreter that has torch and vLLM: they agree, and
each planted defect is found by its check, shrunk and explained. Exit status 77: torch is missing.

$LOCKSTEP is the `lockstep` command, $LOCKSTEP_VLLM unpacked sources of vLLM."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKSTEP = os.environ.get("LOCKSTEP", ROOT / "build/release/lockstep")
SKIPPED = 77
VLLM = os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep)[0]
TRACE = "shared_prefixes.jsonl"
SDPA = "docs/examples/torch_kernels.py:Sdpa"
FLASHINFER = "docs/examples/flashinfer_kernels.py:FlashInfer"
STATES = "docs/examples/state_kernels.py:States"
SMALL_STATES = ("--model", "tests/engines/small_states.json", "--num-blocks", "200")
VLLM_TRITON = "docs/examples/vllm_kernels.py:VllmTriton"


class Example(unittest.TestCase):
    def lockstep(self, *arguments: str, expect: int = 0) -> str:
        path = [one for one in (VLLM, os.environ.get("PYTHONPATH")) if one]
        python = os.environ.get("LOCKSTEP_PYTHON", sys.executable)
        done = subprocess.run(
            [LOCKSTEP, *arguments, "--engine-python", python],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done.stdout

    def replay(self, kernels: str, *options: str, expect: int = 0) -> str:
        limit = () if "--limit" in options else ("--limit", "8")
        return self.lockstep("replay", TRACE, "--kernels", kernels, *limit, *options, expect=expect)

    def find(self, name: str, check: str, *options: str) -> str:
        """The outputs of the replay that finds the defect, and of the smallest case explained."""
        with tempfile.TemporaryDirectory() as folder:
            kernels = f"tests/engines/{name}"
            save = ("--save", folder, "--shrink")
            found = self.replay(kernels, *save, *options, expect=1)
            self.assertRegex(found, rf"divergence in step \d+, {check}\n")
            self.assertRegex(found, r"requests +\d+ +1\n")
            (smallest,) = Path(folder).glob("*.min.case.jsonl")
            told = self.lockstep("explain", str(smallest), expect=1)
        self.assertIn(f"Here it fails: {check} (divergence)", told)
        return found + told

    def guide(self) -> str:
        return (ROOT / "docs/check_your_kernels.md").read_text()

    def rounded(self, text: str) -> str:
        """Releases of torch differ after the sixth decimal."""
        return re.sub(r"(\.\d{6})\d+", r"\1", text)


class TorchTest(Example):
    def test_scaled_dot_product_attention_agrees_in_generated_cases(self) -> None:
        said = self.lockstep("fuzz", "--seed", "100", "--runs", "12", "--kernels", SDPA)
        self.assertIn("12 of 12 cases", said)

    def test_rows_are_quantised_in_real_numbers(self) -> None:
        for dtype in ("bf16", "fp8_e4m3", "fp8_e5m2"):
            said = self.replay(SDPA, "--numbers", "real", "--dtype", dtype)
            self.assertNotRegex(said, r"\battend\b.* by the executor")
            self.assertRegex(said, r"\d,\d+ +attention outputs|\d{3,} +attention outputs")

    def test_attention_in_bf16_agrees_within_its_rounding(self) -> None:
        said = self.replay("tests/engines/wrong_kernels.py:InBf16")
        self.assertIn("Verdict: agreed", said)
        self.find("wrong_kernels.py:ForgetsTheNewestInBf16", "attention_output")

    def test_a_wrong_scale_is_found_in_the_page(self) -> None:
        self.find("wrong_kernels.py:IgnoresTheScale", "page_written", "--numbers", "real",
                  "--dtype", "fp8_e4m3")  # fmt: skip

    def test_quantisation_is_wrong_where_it_does_not_saturate_or_keep_small_numbers(self) -> None:
        options = ("--numbers", "real", "--dtype", "fp8_e4m3", "--limit", "2")
        for name in ("ClampsAt127", "NanAbove448", "DropsSmallNumbers"):
            self.find(f"wrong_kernels.py:{name}", "page_written", *options)

    def test_a_softmax_that_overflows_is_found(self) -> None:
        options = ("--numbers", "real", "--limit", "3")
        self.find("wrong_kernels.py:SubtractsNoMaximum", "attention_output", *options)

    def test_a_changed_block_table_is_found(self) -> None:
        said = self.replay("tests/engines/wrong_kernels.py:ChangesTheTable", expect=1)
        self.assertIn("attend of layer 0: it changed the block table", said)

    def test_each_planted_defect_is_found_by_its_check(self) -> None:
        self.find("wrong_kernels.py:WritesPadding", "page_untouched")
        self.find("wrong_kernels.py:CopiesTheCache", "page_written")

    def test_the_transcripts_in_the_guide_are_the_output(self) -> None:
        for name in ("SeesTheWholeChunk", "FullPagesAreEmpty"):
            said = self.rounded(self.find(f"wrong_kernels.py:{name}", "attention_output"))
            shown = self.rounded(self.guide()).partition(f"wrong_kernels.py:{name}\n")[2]
            lines = [line for line in shown.partition("```")[0].splitlines() if line[:1] != "$"]
            self.assertEqual(len(lines), 8)
            for line in lines:
                self.assertIn(f"{line}\n", said)

    def test_pages_of_one_list_agree_in_each_layout(self) -> None:
        for layout in ((), ("--layout", "HND"), ("--block-size", "96")):
            said = self.replay(FLASHINFER, "--attention-backend", "flashinfer", *layout)
            self.assertNotRegex(said, r"\b(write|attend)\b.* by the executor")
        said = self.lockstep("fuzz", "--seed", "300", "--runs", "6", "--kernels", FLASHINFER)
        self.assertIn("6 of 6 cases", said)

    def test_rows_with_their_own_scales_agree_and_another_heads_are_found(self) -> None:
        kernels = "tests/engines/quantised_kernels.py:RowScales"
        few = ("--numbers", "real", "--limit", "3", "--layers", "2")
        for dtype in ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4"):
            said = self.replay(kernels, "--dtype", dtype, *few)
            self.assertNotRegex(said, "executor's own kernel")
        self.find("quantised_kernels.py:ScalesOfTheFirstHead", "page_written", "--dtype",
                  "int8_per_token_head", *few)  # fmt: skip

    def test_generated_cases_have_real_numbers(self) -> None:
        said = self.lockstep("fuzz", "--seed", "400", "--runs", "12", "--kernels", STATES)
        self.assertRegex(said, "(ssm|delta) by the executor's own kernel: states narrower than")
        rows = "tests/engines/quantised_kernels.py:RowScales"
        said = self.lockstep("fuzz", "--seed", "400", "--runs", "12", "--kernels", rows)
        self.assertIn("write by the executor's own kernel: the class declines the layer", said)

    def test_recurrent_states_agree_and_lost_ones_are_found(self) -> None:
        few = (*SMALL_STATES, "--limit", "4", "--numbers", "real")
        for mode in ((), ("--engine", "vllm-0.22.1", "--mamba-cache-mode", "all")):
            said = self.replay(STATES, *few, *mode)
            self.assertNotRegex(said, "(conv|ssm|delta)[^:]*: ")
            self.assertRegex(said, r"\d{3} +state numbers; [1-9]")
        self.find("wrong_kernels.py:KeepsTheChunkAlone", "page_written", *few)
        self.find("wrong_kernels.py:StartsFromZeros", "state_output", *few)
        self.find("wrong_kernels.py:OnlyTheLastOutput", "state_output", *few)

    def test_blocks_are_zeroed_and_copied_by_the_class(self) -> None:
        states = (*SMALL_STATES, "--limit", "2")
        said = self.replay("tests/engines/wrong_kernels.py:MovesBlocks", *states)
        self.assertNotRegex(said, "zero_blocks.* by the executor")
        self.find("wrong_kernels.py:ZeroesNothing", "page_written", *states)


@unittest.skipUnless(importlib.util.find_spec("vllm") or VLLM, "vLLM is not installed")
class VllmTest(Example):
    FEW = ("--dtype", "fp32", "--layers", "1", "--limit", "2")

    def test_its_triton_kernels_agree(self) -> None:
        said = self.replay(VLLM_TRITON, *self.FEW)
        self.assertIn("Verdict: agreed", said)

    def test_swapped_parts_are_found(self) -> None:
        self.find("wrong_vllm_kernels.py:SwapsKeyAndValue", "page_written", *self.FEW)


class GuideTest(Example):
    def test_the_guide_shows_the_code_and_its_number_of_lines(self) -> None:
        (block,) = re.findall(r"```python\n(.*?)```", self.guide(), re.DOTALL)
        self.assertIn(block, (ROOT / "docs/examples/torch_kernels.py").read_text())
        for name in ("torch_kernels.py", "vllm_kernels.py", "flashinfer_kernels.py"):
            code = (ROOT / "docs/examples" / name).read_text().split('"""')[2]
            lines = sum(bool(line.strip()) for line in code.splitlines())
            self.assertIn(f"(examples/{name}), {lines} lines of code", self.guide())
            self.assertLessEqual(lines, 26)


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print(f"SKIPPED: torch is not installed for {sys.executable}")
        sys.exit(SKIPPED)
    unittest.main()
