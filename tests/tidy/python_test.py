"""The Python packages: they pass the type checker (mypy, [tool.mypy] in pyproject.toml), and
importing one of their modules patches nothing. Exit status 77: mypy is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77
CHECKERS = ([sys.executable, "-m", "mypy"], ["mypy"])


def checker() -> list[str] | None:
    """The command of mypy."""
    for command in CHECKERS:
        try:
            done = subprocess.run([*command, "--version"], capture_output=True)
        except OSError:
            continue
        if not done.returncode:
            return command
    return None


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements and expressions that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield child
        yield from run_at_import(child)


def patches_in(source: str) -> list[str]:
    """The assignments to attributes of other objects that importing a module makes."""
    found = []
    for node in run_at_import(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            found.append(ast.unparse(node))
        found += [ast.unparse(one) for one in targets if isinstance(one, ast.Attribute)]
    return found


class ImportTest(unittest.TestCase):
    def test_a_patch_at_import_is_found(self) -> None:
        for source in ("import a\na.b = 1", "import a\nif a:\n  a.b.c += 1", "setattr(a, 'b', 1)",
                       "class C:\n  a.b = 1"):  # fmt: skip
            self.assertEqual(len(patches_in(source)), 1, source)
        for source in ("a = 1", "def f():\n  a.b = 1", "class C:\n  a: int = 1", "f = lambda: 1"):
            self.assertEqual(patches_in(source), [], source)

    def test_importing_a_module_patches_nothing(self) -> None:
        files = sorted((ROOT / "python").glob("lockstep_*/**/*.py"))
        self.assertGreater(len(files), 60)
        found = {str(file): patches_in(file.read_text(encoding="utf-8")) for file in files}
        self.assertEqual({file: patches for file, patches in found.items() if patches}, {})


class TypesTest(unittest.TestCase):
    def run_checker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = checker()
        if command is None:
            self.skipTest("no mypy")
        return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)

    def test_the_packages_pass_the_type_checker(self) -> None:
        done = self.run_checker()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_type_checker_reads_the_packages_and_finds_a_wrong_type(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "wrong.py"
            file.write_text("from lockstep_engines.prompts import expand\n"
                            "tokens: list[str] = expand([])\n")  # fmt: skip
            done = self.run_checker(str(file))
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("Incompatible types in assignment", done.stdout)


if __name__ == "__main__":
    ended = unittest.main(exit=False)
    if not ended.result.wasSuccessful():
        sys.exit(1)
    if checker() is None:
        print("SKIPPED: no mypy here (pip install mypy, Debian: mypy); types were not checked")
        sys.exit(SKIPPED)
