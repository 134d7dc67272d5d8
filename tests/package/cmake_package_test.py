"""The CMake package in a project outside the tree (docs/examples/cmake_project): installed and
found, and as a part of the project (FetchContent); and the same kernel in pytest, with a scheduler
in Python (docs/examples/pytest_project). Each finds its planted defects in its own test run."""

from __future__ import annotations

import os
import shutil
import subprocess
import unittest
from pathlib import Path
from xml.etree import ElementTree

import support

CMAKE = os.environ.get("CMAKE_COMMAND", "cmake")
CXX = os.environ.get("CXX", "c++")
EXAMPLES = support.ROOT / "docs" / "examples"
ENGINE = EXAMPLES / "paged_engine.py"


class OutsideProject(support.InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.project = self.folder / "project"
        shutil.copytree(EXAMPLES / "cmake_project", self.project)

    def install(self) -> Path:
        prefix = self.folder / "prefix"
        for component in ("command", "headers", "development", "python"):
            support.run(CMAKE, "--install", support.BUILD, "--component", component, "--prefix",
                        prefix)  # fmt: skip
        return prefix

    def build(self, *options: str, targets: tuple[str, ...] = ()) -> Path:
        build = self.folder / "build"
        support.run(CMAKE, "-S", self.project, "-B", build, f"-DCMAKE_CXX_COMPILER={CXX}",
                    f"-DCMAKE_CXX_FLAGS={support.build_flags()}", *options)  # fmt: skip
        support.run(CMAKE, "--build", build, "-j2", *(["--target", *targets] if targets else []))
        return build

    def outcomes(self, build: Path) -> dict[str, bool]:
        """Of each test of the project: whether it passed."""
        junit = self.folder / "ctest.xml"
        subprocess.run(
            [Path(CMAKE).with_name("ctest") if Path(CMAKE).is_absolute() else "ctest",
             "--test-dir", build, "--output-junit", junit, "-j2"], capture_output=True,
        )  # fmt: skip
        cases = ElementTree.parse(junit).getroot().iter("testcase")
        return {case.get("name", ""): case.get("status") == "run" for case in cases}

    def check(self, build: Path) -> None:
        self.assertEqual(
            self.outcomes(build),
            dict.fromkeys(
                ("kernels", "kernels_of_any_layout", "kernels_bug_is_found", "serve", "scheduler",
                 "serve_bug", "scheduler_bug_is_found"), True,
            ),
        )  # fmt: skip
        # The smallest case of the planted defect, and a report for pages of CI.
        saved = list((build / "lockstep_cases" / "kernels_bug_is_found").glob("*.min.case.jsonl"))
        self.assertEqual(len(saved), 1)
        report = ElementTree.parse(build / "lockstep_cases" / "kernels_bug_is_found.xml").getroot()
        self.assertEqual(report.get("failures"), "1")

    def test_it_is_found_and_tests_kernels_and_a_scheduler(self) -> None:
        prefix = self.install()
        build = self.build(f"-DCMAKE_PREFIX_PATH={prefix}")
        self.check(build)
        # Without its planted defect the test that looks for it fails: it can.
        lists = self.project / "CMakeLists.txt"
        lists.write_text(lists.read_text().replace("PRIVATE MY_BUG", "PRIVATE NO_BUG"))
        support.run(CMAKE, "--build", build, "-j2")
        self.assertFalse(self.outcomes(build)["kernels_bug_is_found"])

    def test_as_a_part_of_the_project_only_what_it_links_is_compiled(self) -> None:
        lists = self.project / "CMakeLists.txt"
        text = lists.read_text()
        found = next(line for line in text.splitlines() if line.startswith("find_package(lockstep"))
        fetched = (
            "include(FetchContent)\n"
            f"FetchContent_Declare(lockstep SOURCE_DIR {support.ROOT})\n"
            "FetchContent_MakeAvailable(lockstep)"
        )
        lists.write_text(text.replace(found, fetched))
        build = self.build(f"-DLOCKSTEP_COMMAND={support.LOCKSTEP}", "-DLOCKSTEP_CUDA=OFF",
                           "-DLOCKSTEP_MPI=OFF")  # fmt: skip
        self.check(build)
        compiled = {path.name for path in build.rglob("*.o")}
        self.assertLessEqual(len(compiled), 4, compiled)

    def test_files_may_be_in_the_source_folder_and_names_may_have_slashes(self) -> None:
        plugin = support.BUILD / "plugins" / "plain_plugin.so"
        if not plugin.is_file():
            self.skipTest("tests/plugins are not built")
        data = self.project / "data;1"
        data.mkdir()
        shutil.copy(plugin, data)
        shutil.copy(support.SAMPLES / "recordings/vllm-0.33.0/mla/0014.jsonl", data)
        (self.project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.22)\n"
            "project(tests NONE)\n"
            "enable_testing()\n"
            f"include({support.ROOT}/cmake/lockstepTesting.cmake)\n"
            'lockstep_add_audit_test(audits/one "data;1/0014.jsonl")\n'
            'lockstep_add_audit_test(audits/folder "data;1")\n'
            'lockstep_add_replay_test(a/b shared_prefixes.jsonl BACKEND "data;1/plain_plugin.so"\n'
            "  ARGS --limit 2)\n"
            "lockstep_add_fuzz_test(typo SEEDS 102:105 BACKEND data/typo.so)\n"
            "file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/known.json\n"
            '  [[{"lockstep_known":1,"known":[]}]])\n'
            f'lockstep_add_fuzz_test(scheduler SEEDS 010:012 DECISIONS "true; python3 {ENGINE}"\n'
            "  KNOWN known.json)\n"
            "set_tests_properties(a/b PROPERTIES FIXTURES_SETUP own)\n"
            'lockstep_add_audit_test(after "${CMAKE_CURRENT_SOURCE_DIR}/data;1" AFTER a/b)\n'
        )
        command = os.path.relpath(support.LOCKSTEP, self.folder)
        support.run(CMAKE, "-S", self.project, "-B", "build", f"-DLOCKSTEP_COMMAND={command}",
                    cwd=self.folder)  # fmt: skip
        tests = dict.fromkeys(("audits/one", "audits/folder", "a/b", "scheduler", "after"), True)
        self.assertEqual(self.outcomes(self.folder / "build"), tests | {"typo": False})
        written = (self.folder / "build/CTestTestfile.cmake").read_text()
        self.assertIn('FIXTURES_SETUP "own;lockstep_a/b"', written)

    def test_a_wrong_argument_is_refused(self) -> None:
        prefix = self.install()
        lists = self.project / "CMakeLists.txt"
        text = lists.read_text()
        for right, wrong, says in (
            ("SEEDS 0:20", "SEEDS some", "SEEDS some; expected first:last"),
            ("SEEDS 0:20", "SEEDS 5:5", "SEEDS 5:5 has no seed"),
            ("SEEDS 0:20", "SEEDS 0:20 DECISION x", "unknown argument DECISION;x"),
            ("SEEDS 0:20", "SEEDS 0:20 KNOWN", "no value for KNOWN"),
            ("AFTER serve)", "AFTR serve)", "lockstep_add_audit_test: unknown argument AFTR"),
        ):
            lists.write_text(text.replace(right, wrong))
            done = support.run(CMAKE, "-S", self.project, "-B", self.folder / "build",
                               f"-DCMAKE_PREFIX_PATH={prefix}", expect=1)  # fmt: skip
            self.assertIn(says, " ".join(done.stdout.split()))


class PytestProject(support.InFolder):
    def outcomes(self, *options: str) -> tuple[int, str]:
        python = support.python_with("pytest")
        if python is None:
            self.skipTest("no python3 here can import pytest")
        for file in (EXAMPLES / "pytest_project/conftest.py", EXAMPLES / "paged_engine.py",
                     EXAMPLES / "cmake_project/kernels.cpp"):  # fmt: skip
            shutil.copy(file, self.folder)
        done = support.run(
            python, "-m", "pytest", "-q", "-p", "lockstep_pytest.plugin",
            f"--include={support.BUILD / 'include'}", *options,
            expect=None, cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(support.ROOT / "python"),
                              "LOCKSTEP": support.LOCKSTEP},
        )  # fmt: skip
        return done.returncode, done.stdout

    def test_a_sound_kernel_and_scheduler_pass(self) -> None:
        status, text = self.outcomes()
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"3\d passed, 1\d skipped")

    def test_a_defect_of_the_kernel_is_found(self) -> None:
        status, text = self.outcomes("--bug=kernel", "-k", "layout")
        self.assertEqual(status, 1, text)
        self.assertIn("page_written step 0 request r0", text)
        self.assertIn("Again: lockstep explain .lockstep/", text)

    def test_a_defect_of_the_scheduler_is_found(self) -> None:
        status, text = self.outcomes("--bug=scheduler", "-k", "seed")
        self.assertEqual(status, 1, text)
        self.assertIn("audit.conservation step", text)
        self.assertIn(".min.case.jsonl", text)


if __name__ == "__main__":
    unittest.main()
