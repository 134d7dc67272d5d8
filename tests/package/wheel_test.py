"""The wheel, packed from the build that is there, in an empty environment and without a network:
the demonstration runs in it, from any folder, and so do the Python packages."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

import support

sys.path.insert(0, str(support.ROOT / "cmake"))
import pack_wheel

DEMO_SECONDS = 10  # of CPU time, whatever else runs on the machine


def make_environment(folder: Path, wheel: Path) -> None:
    """An environment with the wheel and nothing else. Skipped where none can be made."""
    made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, text=True)
    if made.returncode:  # Debian's python3 without python3-venv
        support.skip(f"no environment can be made: {made.stdout.strip()[:200]}")
    support.run(folder / "bin" / "python", "-m", "pip", "install", "--no-index", "--no-deps",
                "--disable-pip-version-check", wheel)  # fmt: skip


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        if "-fsanitize" in support.build_flags():
            support.skip("this build has sanitizers, which no wheel carries")
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.folder = Path(holder.name)
        try:
            cls.wheel = pack_wheel.pack(support.BUILD, cls.folder / "dist")
        except pack_wheel.CannotPack as reason:
            support.skip(f"this build becomes no wheel: {reason}")
        cls.environment = cls.folder / "environment"
        make_environment(cls.environment, cls.wheel)

    def in_environment(self, *words: object, expect: int | None = 0) -> str:
        """Of a program of the environment, with nothing of this one but a bare PATH."""
        program, *arguments = words
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        done = support.run(
            self.environment / "bin" / str(program),
            *arguments,
            expect=expect,
            cwd=elsewhere,
            env={"PATH": "/usr/bin:/bin", "HOME": str(elsewhere)},
        )
        return done.stdout

    def test_the_demonstration_agrees_finds_shrinks_and_explains_in_seconds(self) -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        text = self.in_environment("lockstep", "demo", "--save", "kept")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"demo: {seconds:.1f} s of processor time; wheel: "
              f"{self.wheel.stat().st_size / 2**20:.1f} MiB, {self.wheel.name}")  # fmt: skip
        for part in ("Agreed. Every step compared equal.", "divergence in step 0, page_written",
                     "the case is minimal", "Here it fails: page_written"):  # fmt: skip
            self.assertIn(part, text)
        self.assertLess(seconds, DEMO_SECONDS)
        # And what it keeps is a case like any other.
        said = self.in_environment("lockstep", "replay", "kept/demo.min.case.jsonl", expect=1)
        self.assertIn("The case is reproduced.", said)

    def test_samples_are_found_by_their_names_from_anywhere(self) -> None:
        said = self.in_environment("lockstep", "replay", "shared_prefixes.jsonl", "--limit", "9",
                                   "--backend", "none")  # fmt: skip
        self.assertIn("Verdict: done.", said)

    def test_the_wheel_and_an_installation_have_every_module_of_the_tree(self) -> None:
        python = support.ROOT / "python"
        listed = {path.name for path in python.glob("lockstep_*") if path.is_dir()}
        self.assertEqual({path.name for path in pack_wheel.packages()}, listed)
        with zipfile.ZipFile(self.wheel) as archive:
            packed = {name for name in archive.namelist() if name.endswith(".py")}
        sources = {path.relative_to(python).as_posix()
                   for path in python.glob("lockstep_*/**/*.py")}  # fmt: skip
        # Once for imports, and once for the interpreter of an engine, which may be another.
        shared = re.compile(r"lockstep_kv-[\d.]+\.data/data/share/lockstep/python/")
        self.assertEqual({name for name in packed if not shared.match(name)}, sources)
        self.assertEqual({shared.sub("", name) for name in packed if shared.match(name)}, sources)
        for package in ("vllm", "sglang", "worker", "kernels"):
            self.assertIn(f"lockstep_engines/{package}/__init__.py", packed)
        prefix = self.folder / "prefix"
        support.run("cmake", "--install", support.BUILD, "--component", "python",
                    "--prefix", prefix)  # fmt: skip
        installed = {path.relative_to(prefix / "share/lockstep/python").as_posix()
                     for path in prefix.rglob("*.py")}  # fmt: skip
        self.assertEqual(installed, sources)

    def test_the_python_packages_and_the_plugin_are_there(self) -> None:
        code = (
            "import lockstep_recorder, lockstep_engines, lockstep_live, lockstep_pytest\n"
            "from importlib.metadata import entry_points, version\n"
            "print(version('lockstep-kv'), *entry_points(group='pytest11'))\n"
            "print(*entry_points(group='vllm.general_plugins'))"
        )
        said = self.in_environment("python", "-c", code)
        self.assertRegex(said, r"0\.1\.0 .*lockstep_pytest\.plugin")
        self.assertIn("lockstep_live.plugin:register", said)

    def test_a_campaign_runs_and_draws_its_page(self) -> None:
        out = self.folder / "campaign"
        words = ("lockstep", "campaign", "--out", out, "fuzz", "--backend", "none", "--runs", "9")
        self.assertIn("Verdict: agreed.", self.in_environment(*words))
        self.assertIn("</html>", (out / "page.html").read_text())
        said = self.in_environment("lockstep", "campaign", "--ray", "fuzz", "--runs", "9", expect=2)
        self.assertIn("has no Ray; run `", said)

    def test_engines_are_driven_by_the_interpreter_of_the_environment(self) -> None:
        words = ("lockstep", "fuzz", "--runs", "1", "--decisions", "vllm")
        said = self.in_environment(*words, expect=2)
        # Its adapter has started in this environment, which has no package but the wheel.
        self.assertEqual(said.count("\n"), 1, said)
        self.assertRegex(said, r"^lockstep: --decisions: vllm needs \w+ and \d+ more packages ")
        own = self.environment / "bin" / "python"
        self.assertIn(f"{own}", said)
        # The command that fixes it is there, and refuses what it does not take.
        command = re.search(r"run `(\S+) vllm 0\.33\.0 engines`", said)
        assert command is not None, said
        self.assertEqual(command[1], str(own.with_name("lockstep-set-up-engine")))
        refused = self.in_environment("lockstep-set-up-engine", "other", "1", "x", expect=2)
        self.assertIn("invalid choice: 'other'", refused)

    def test_an_engine_is_set_up_once_and_completed_later(self) -> None:
        """With a pip that has one release of vLLM and notes what it is asked for: a release that
        imports is left alone, so no package index is needed."""
        folder = self.folder / "engines with a space"
        python = folder / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        release = self.folder / "vllm-0.33.0-py3-none-any.whl"
        with zipfile.ZipFile(release, "w") as archive:
            archive.writestr("vllm/__init__.py", "")
            archive.writestr("vllm/_C.so", "")
            archive.writestr(
                "vllm-0.33.0.dist-info/METADATA",
                "Name: vllm\nRequires-Dist: torch==9.9\nRequires-Dist: numpy\n"
                "Requires-Dist: ray; extra == 'ray'\nRequires-Dist: cupy\n",
            )
        log, lacks = self.folder / "pip.log", self.folder / "lacks a package"
        python.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >> "{log}"\n'
            f'case "$*" in *"pip download"*) cp "{release}" "$8" ;; *"import torch"*) exit 1 ;; '
            f'*"pip install"*) rm -f "{lacks}" ;; '
            f'*"import lockstep_engines"*) [ ! -e "{lacks}" ] || exit 1 ;; esac\n'
        )
        python.chmod(0o755)
        for downloads, is_complete in ((1, False), (0, True), (0, False)):
            log.write_text("")
            if not is_complete:
                lacks.touch()
            said = self.in_environment("lockstep-set-up-engine", "vllm", "0.33.0", folder)
            ready = f"ready: lockstep fuzz --decisions 'vllm:{folder}/vllm-0.33.0' "
            self.assertIn(f"{ready}--engine-python '{python}'", said)
            asked = log.read_text()
            self.assertEqual(asked.count("pip download"), downloads, asked)
            install = r"pip install --quiet torch==9\.9 numpy uvloop triton"
            self.assertEqual(len(re.findall(install, asked)), 0 if is_complete else 1, asked)
            self.assertIn("import lockstep_engines.vllm.adapter", asked)
        self.assertTrue((folder / "vllm-0.33.0/vllm/__init__.py").is_file())
        self.assertFalse((folder / "vllm-0.33.0/vllm/_C.so").exists())

    def test_another_interpreter_gets_the_adapters_of_the_wheel(self) -> None:
        words = ("lockstep", "fuzz", "--runs", "1", "--decisions", "vllm", "--engine-python")
        said = self.in_environment(*words, sys.executable, expect=None)
        self.assertNotIn("the adapters are not in", said)
        self.assertNotIn("lockstep_engines'", said)
        code = "import lockstep_engines.set_up as found; print(found.__file__)"
        share = self.environment / "share/lockstep/python"
        where = support.run(sys.executable, "-c", code, env={"PYTHONPATH": str(share)}).stdout
        self.assertEqual(where.strip(), str(share / "lockstep_engines/set_up.py"))

    def test_an_engine_that_is_set_up_decides(self) -> None:
        """Where LOCKSTEP_VLLM and LOCKSTEP_PYTHON name one: from the wheel, by its interpreter."""
        folder = os.environ.get("LOCKSTEP_VLLM", "").split(os.pathsep)[0]
        python = os.environ.get("LOCKSTEP_PYTHON", "")
        if not (folder and python):
            self.skipTest("LOCKSTEP_VLLM and LOCKSTEP_PYTHON name no engine")
        said = self.in_environment("lockstep", "fuzz", "--runs", "3", "--decisions",
                                   f"vllm:{folder}", "--engine-python", python)  # fmt: skip
        self.assertIn("vllm-", said)

    def test_it_brings_the_headers_of_plugins(self) -> None:
        for name in ("plugin.h", "plain_plugin.h", "recorder.h"):
            self.assertTrue((self.environment / "include" / "lockstep" / name).is_file(), name)

    def test_the_same_build_gives_the_same_bytes(self) -> None:
        again = pack_wheel.pack(support.BUILD, self.folder / "again")
        self.assertEqual(self.wheel.read_bytes(), again.read_bytes())

    def test_the_tag_says_which_glibc_it_needs(self) -> None:
        tag = re.search(r"manylinux_2_(\d+)_", self.wheel.name)
        assert tag is not None, self.wheel.name
        self.assertGreaterEqual(int(tag[1]), 17)
        own = os.confstr("CS_GNU_LIBC_VERSION").split()[1]
        self.assertLessEqual(int(tag[1]), int(own.split(".")[1]))

    def test_a_library_that_not_everybody_has_is_refused(self) -> None:
        with zipfile.ZipFile(self.wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith("scripts/lockstep"))
            path = Path(archive.extract(name, self.folder))
        needs = pack_wheel.needs_of(path)
        self.assertIn("libc.so.6", needs)
        with self.assertRaisesRegex(pack_wheel.CannotPack, "needs libmpi.so.40, which the wheel"):
            pack_wheel.check_needs("lockstep", [*needs, "libmpi.so.40"], carried=set(needs))


if __name__ == "__main__":
    unittest.main()
