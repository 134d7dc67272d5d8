"""vLLM's worker beyond plain attention (MLA, states, hidden states, drafts): unmodified, it agrees
with both runners; each defect planted in it, in its metadata or in its batch is found by the check
that docs/real_worker.md names, in a recording that has what it breaks.

Of vLLM 0.33.0 and 0.22.1, whose sources $LOCKSTEP_VLLM names (several: as in PATH). Skipped, with
exit status 77, where it names none, and where the built command ($LOCKSTEP) or torch is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import unittest
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from lockstep_engines.plants import PlantError
from lockstep_engines.worker.plant import WorkerPlant
from lockstep_engines.worker.plants_of_batches import PLANTS_OF_BATCHES
from lockstep_engines.worker.plants_of_kinds import PLANTS_OF_KINDS

FOLDERS = [folder for folder in os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep) if folder]
COMMAND = os.environ.get("LOCKSTEP", "")
SKIPPED = 77
# A short recording of each family.
RECORDINGS = {
    "full_attention": "0001",
    "sliding_window": "0005",
    "full_and_chunked_local": "0006",
    "preemption": "0002",
    "async_scheduling": "0000",
    "mla": "0014",
    "mamba_align": "0012",
    "mamba_none": "0022",
    "mamba_all": "0018",
    "hidden_state_group": "0019",
    "spec_decode_mamba": "0016",
    "spec_decode_eagle": "0005",
}
# The family that shows a defect, and the check that finds it.
FOUND = {
    "mla-row-of-another-stride": ("mla", ", memory_check"),
    "mla-slots-one-token-late": ("mla", ", page_written"),
    "mla-prefill-reads-first-rows": ("mla", "metadata of layers.0: prefill.block_table"),
    "state-left-behind": ("mamba_align", ", page_written"),
    "state-from-wrong-column": ("mamba_align", ", page_written"),
    "second-state-from-wrong-column": ("mamba_align", ", page_written"),
    "second-state-in-attention-blocks": (
        "state_column_of_attention_blocks.case.jsonl",
        "OutOfBounds",
    ),
    "state-copied-in-part": ("mamba_align", ", page_written"),
    "state-in-next-block": ("mamba_align", ", memory_check"),
    "state-restarts": ("mamba_align", "has_initial_states_p, entry"),
    "state-of-first-group": ("mamba_align", ", page_written"),
    "accepted-drafts-not-counted": ("spec_decode_mamba", ", page_written"),
    "zeroed-too-late": ("mamba_align", ", page_written"),
    "second-zeroed-too-late": ("mamba_align", ", page_written"),
    "hidden-heads-swapped": ("hidden_state_group", ", page_written"),
    "hidden-row-in-next-slot": ("hidden_state_group", ", page_written"),
    "padding-written": ("mamba_align", ", page_written"),
    "window-one-short": ("sliding_window", "window_size is"),
    "lengths-without-new-tokens": ("full_attention", "metadata of group 0: seq_lens"),
    "second-lengths-one-short": ("full_attention", "metadata of group 0: seq_lens"),
    "whole-chunk-has-no-length": ("full_and_chunked_local", "seqused_k, entry"),
    "cleared-row-keeps-its-first-block": ("preemption", "batch: after clear_row"),
    "moved-row-stays": ("preemption", "batch: after move_row"),
    "rows-of-a-larger-batch-stay": ("preemption", "batch: row"),
    "placeholder-of-another-row": ("async_scheduling", "batch: sampler, row"),
    "token-before-a-placeholder-replaced": ("async_scheduling", "batch: sampler, row"),
    "saved-through-blocks-of-first-group": ("hidden_state_group", ", extraction"),
    "saved-one-token-late": ("hidden_state_group", ", extraction"),
    "rejected-drafts-computed": ("spec_decode_eagle", ", memory_check"),
    "split-block-zeroed-in-part": ("mamba_align", "allocated to be zeroed, but not zeroed"),
    "split-blocks-overlap": ("full_attention", "metadata of group 0: block_table, row 0"),
    "split-views-of-too-few-blocks": ("full_attention", "view of layers.0: part 0 is"),
    "split-table-not-expanded": ("full_attention", "metadata of group 0: block_table, row 0"),
    "slots-by-other-blocks": ("full_attention", ", slot_mapping"),
    "second-slots-by-other-blocks": ("full_attention", ", slot_mapping"),
}
# Blocks are split into kernel blocks of 4 tokens.
IN_KERNEL_BLOCKS = {plant.name for plant in PLANTS_OF_KINDS if plant.kind == "kernel blocks"}
# Of both runners. 0.22.1 keeps its tables in kernel blocks, and torch refuses its views.
OF_BOTH = {
    "split-blocks-overlap": ", block_table",
    "split-table-not-expanded": ", block_table",
    "split-views-of-too-few-blocks": "is invalid for input of size",
}


# 0.22.1: other recordings, and defects without an effect: its tables keep the entries of a cleared
# row, which nothing reads.
RECORDINGS_OF_0_22_1 = {"spec_decode_mamba": "0000", "spec_decode_eagle": "0020"}
HARMLESS_IN_0_22_1 = {"cleared-row-keeps-its-first-block"}


CASES = ROOT / "tests" / "regressions"


def has_states(file: Path) -> bool:
    with file.open() as lines:
        return '"mamba"' in lines.readline()


def fits(plant: WorkerPlant, folder: str) -> bool:
    """True if the release has the words that the defect replaces, on a runner that takes them."""
    for way in plant.ways:
        try:
            for edit in way:
                path = Path(folder, *edit.module.split("."))
                edit.apply(path.with_suffix(".py").read_text())
        except (PlantError, FileNotFoundError):
            continue
        return True
    return False


class KindsTest(unittest.TestCase):
    folder: ClassVar[str]
    release: ClassVar[str]

    @property
    def is_newest(self) -> bool:
        return self.release == "vllm-0.33.0"

    def recording(self, family: str) -> Path:
        if family.endswith(".jsonl"):
            return CASES / family
        folder = ROOT / "traces" / "samples" / "recordings" / self.release
        names = RECORDINGS if self.is_newest else RECORDINGS | RECORDINGS_OF_0_22_1
        return folder / family / f"{names[family]}.jsonl"

    def takes(self, family: str, runner: str, states: str) -> bool:
        """0.22.1 has no states on runner V2, and finding 48 with gated delta; only Mamba2 has mode
        all, which 0.33.0 lacks."""
        file = self.recording(family)
        if family == "spec_decode_mamba" and states == "gdn" and not self.is_newest:
            return False
        if family == "mamba_all" and states != "mamba2":
            return False
        if not self.is_newest and runner == "v2" and file.exists() and has_states(file):
            return False
        return file.exists()

    def test_the_unchanged_worker_agrees(self) -> None:
        has_numba = importlib.util.find_spec("numba") is not None
        for runner, states in (("v1", "mamba2"), ("v1", "gdn"), ("v2", "mamba2")):
            files = [
                str(self.recording(family))
                for family in RECORDINGS
                if (runner == "v2" or has_numba or "spec_decode" not in family)
                and self.takes(family, runner, states)
            ]
            with self.subTest(runner=runner, states=states):
                done = self.run_command(
                    ["worker", f"vllm:{self.folder}", *files, "--states", states], runner
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertNotIn("refused, ", done.stdout)

    def test_the_unchanged_worker_agrees_in_cases_that_once_accused_it(self) -> None:
        self.need_newest()
        for name in ("copied_block_has_its_sources_padding", "state_column_of_attention_blocks"):
            for runner in ("v1", "v2"):
                with self.subTest(name, runner=runner):
                    case = str(CASES / f"{name}.case.jsonl")
                    done = self.run_command(
                        ["replay", case, "--backend", f"vllm:{self.folder}"], runner
                    )
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_unchanged_worker_agrees_in_kernel_blocks(self) -> None:
        families = ["full_attention", "sliding_window", "full_and_chunked_local", "preemption",
                    "async_scheduling", "mla", "mamba_align", "hidden_state_group"]  # fmt: skip
        for runner in ("v1", "v2"):
            files = [str(self.recording(f)) for f in families if self.takes(f, runner, "mamba2")]
            with self.subTest(runner=runner):
                done = self.run_command(["worker", self.in_kernel_blocks(runner), *files], runner)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertNotIn("refused, ", done.stdout)

    def test_the_unchanged_worker_agrees_with_k_and_v_apart(self) -> None:
        """As FlashAttention of 0.22.1 has them, in kernel blocks of 4 tokens too."""
        if self.is_newest:
            self.skipTest("of 0.22.1")
        files = [str(self.recording(f)) for f in ("full_attention", "full_and_chunked_local")]
        for runner in ("v1", "v2"):
            for split in ("0", "4"):
                with self.subTest(runner=runner, split=split):
                    to = self.in_kernel_blocks(runner, split) + " --pairs-apart"
                    done = self.run_command(["worker", to, *files], runner)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertNotIn("refused, ", done.stdout)

    def test_each_is_found_by_its_check(self) -> None:
        plants = (*PLANTS_OF_KINDS, *PLANTS_OF_BATCHES)
        self.assertEqual(FOUND.keys(), {plant.name for plant in plants})
        if self.is_newest:
            self.assertEqual([p.name for p in plants if not fits(p, self.folder)], [])
        for plant in plants:
            family, check = FOUND[plant.name]
            if not self.is_newest:
                check = OF_BOTH.get(plant.name, check)
            with self.subTest(plant.name):
                if not fits(plant, self.folder):
                    continue
                if not self.is_newest and plant.name in HARMLESS_IN_0_22_1:
                    continue
                if "spec_decode" in family and not importlib.util.find_spec("numba"):
                    self.skipTest("no numba: runner V1's drafter needs it")
                self.check(plant.name, plant.runner, self.recording(family), check)

    @unittest.skipUnless(importlib.util.find_spec("numba"), "no numba")
    def test_gated_delta_forgets_accepted_drafts_of_a_row_without_drafts(self) -> None:
        """Finding 48, in a step in which other rows verify drafts."""
        file = str(self.recording("spec_decode_mamba"))
        to = ["worker", f"vllm:{self.folder}", file, "--states", "gdn"]
        done = self.run_command(to, "v1")
        self.assertEqual(done.returncode, int(not self.is_newest), done.stdout + done.stderr)
        self.assertEqual("step 29, memory_check: input: finding 48:" in done.stdout,
                         not self.is_newest, done.stdout)  # fmt: skip

    @unittest.skipUnless(importlib.util.find_spec("numba"), "no numba")
    def test_short_convolutions_forget_rejected_drafts(self) -> None:
        self.need_newest()
        file = str(Path(__file__).with_name("short_convolution_drafts.jsonl"))
        done = self.run_command(["replay", file, "--backend", f"vllm:{self.folder}"], "v1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_prompt_of_one_token_takes_its_padding_into_its_state(self) -> None:
        """Finding 19."""
        self.need_newest()
        file = str(Path(__file__).with_name("padded_prompt_states.jsonl"))
        for runner in ("v1", "v2"):
            for states in ("mamba2", "gdn", "short_conv"):
                with self.subTest(runner=runner, states=states):
                    if runner == "v1" and not importlib.util.find_spec("numba"):
                        self.skipTest("no numba: runner V1's drafter needs it")
                    to = ["--backend", f"vllm:{self.folder}", "--states", states]
                    done = self.run_command(["replay", file, *to], runner)
                    self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                    stale = runner == "v1" and states == "gdn"  # its row reads the block first
                    lies = "unknown content" if stale else "the state of one after 2 tokens"
                    self.assertRegex(done.stdout, f"block 5, one's token 1: .*{lies}")

    def need_newest(self) -> None:
        if not self.is_newest:
            self.skipTest("of 0.33.0")

    def check(self, name: str, runner: str, file: Path, check: str) -> None:
        for each in ("v1", "v2") if name in OF_BOTH else (runner.replace("both", "v1"),):
            to = [f"vllm:{self.folder}", "--plant", name]
            if name in IN_KERNEL_BLOCKS:
                to = [self.in_kernel_blocks(each) + f" --plant {name}"]
            done = self.run_command(["replay", str(file), "--backend", *to], each)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn(check, done.stdout)

    def in_kernel_blocks(self, runner: str, largest: str = "4") -> str:
        """The worker, whose attention takes blocks of 4 tokens."""
        command = [sys.executable, "-m", "lockstep_engines", "vllm", self.folder, "--worker"]
        return "worker:" + shlex.join([*command, "--runner", runner, "--kernel-blocks", largest])

    @staticmethod
    def run_command(arguments: list[str], runner: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *arguments, "--runner", runner],
            capture_output=True,
            text=True,
            env=os.environ | {"LOCKSTEP_PYTHON": sys.executable},
        )


def load_tests(loader: unittest.TestLoader, *_: object) -> unittest.TestSuite:
    """Runs the tests once per available vLLM."""
    suite = unittest.TestSuite()
    for folder in FOLDERS:
        is_newest = (Path(folder) / "vllm/v1/core/kv_cache_planning.py").is_file()
        named = {"folder": folder, "release": "vllm-0.33.0" if is_newest else "vllm-0.22.1"}
        of_folder = type(f"KindsTest of {folder}", (KindsTest,), named)
        suite.addTests(loader.loadTestsFromTestCase(of_folder))
    return suite


if __name__ == "__main__":
    if not FOLDERS or not COMMAND or not importlib.util.find_spec("torch"):
        print("SKIPPED: LOCKSTEP_VLLM names no sources, or LOCKSTEP no built command, or no torch")
        sys.exit(SKIPPED)
    unittest.main()
