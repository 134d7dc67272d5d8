"""Planted defects: a few words of a module's source are replaced while it is imported. In a module
that is imported already, the code of its functions is replaced. No file changes.

Planted defects measure what a harness finds. This module works for any engine.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import inspect
import linecache
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


class PlantError(Exception):
    """A defect cannot be planted in this release; the text says where it was to go."""


class ImportedAlready(PlantError):
    """A defect changes more than functions of a module that is imported already. It needs a process
    that has not imported the module."""


@dataclass(frozen=True)
class Edit:
    """One replacement; `find` occurs once."""

    module: str
    find: str
    put: str
    within: str = ""  # the line that begins the function, without its indentation; else anywhere

    def apply(self, source: str) -> str:
        """The source with the replacement. Raises PlantError."""
        begin, end = self._function_in(source) if self.within else (0, len(source))
        count = source.count(self.find, begin, end)
        if count != 1:
            where = f"{self.within} of {self.module}" if self.within else self.module
            raise PlantError(f"found {self.find!r} {count} times in {where}; expected once")
        return source[:begin] + source[begin:end].replace(self.find, self.put) + source[end:]

    def _function_in(self, source: str) -> tuple[int, int]:
        begin = source.find(self.within)
        if begin < 0:
            raise PlantError(f"found no {self.within!r} in {self.module}")
        indentation = source[source.rfind("\n", 0, begin) + 1 : begin]
        ends = [source.find(f"\n{indentation}{word}", begin) for word in ("def ", "@", "class ")]
        return begin, min([end for end in ends if end >= 0], default=len(source))


@dataclass(frozen=True)
class Plant:
    """One defect. `ways`: the edits in several releases; the first way that fits is used."""

    name: str
    kind: str  # what it is about
    what: str  # its effect
    ways: tuple[tuple[Edit, ...], ...]


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module from a source that has been changed; never from or to a cache."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        _show(self._source, self.path)
        return self.source_to_code(self._source.encode(), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in self._sources:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._sources[fullname])
        return spec


def _show(source: str, path: str) -> None:
    """Triton reads the source of a kernel by file name: it gets the changed one."""
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)


def _runs_once(code: CodeType) -> bool:
    """True for a module and the body of a class."""
    return not code.co_flags & inspect.CO_OPTIMIZED


def _parts(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _facts(code: CodeType, function: Any = lambda code: code.co_name) -> Any:
    """A code object without its line numbers. `function` represents the functions in it."""
    constants = [
        (_facts if _runs_once(one) else function)(one) if isinstance(one, CodeType) else repr(one)
        for one in code.co_consts
    ]
    return code.co_name, code.co_code, code.co_names, code.co_varnames, constants


def _does(code: CodeType) -> Any:
    return _facts(code, _does)


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType, bool]]:
    """Functions and their replacements, nested ones included. True for a nested one, which its
    function creates at each call."""
    for before, after in zip(_parts(old), _parts(new), strict=False):
        if before.co_name == after.co_name:
            if not _runs_once(before):
                yield before, after, not _runs_once(old)
            yield from _pairs(before, after)


_functions: dict[str, list[FunctionType]] = defaultdict(list)  # of each file


def index_functions() -> None:
    """Indexes the functions of all imported modules. A process does it once before it forks."""
    _functions.clear()
    for one in gc.get_objects():
        if type(one) is FunctionType:
            _functions[one.__code__.co_filename].append(one)


def _change_functions(name: str, source: str) -> None:
    """Gives the functions of an imported module their code from its changed source. Raises
    ImportedAlready where more than functions differ."""
    path = sys.modules[name].__file__ or ""
    old = compile(_source_of(name), path, "exec", dont_inherit=True)
    new = compile(source, path, "exec", dont_inherit=True)
    if _facts(old) != _facts(new):
        raise ImportedAlready(f"{name} is imported already; more than a function of it differs")
    if path not in _functions:
        index_functions()
    live: dict[CodeType, list[FunctionType]] = defaultdict(list)
    for one in _functions[path]:
        live[one.__code__].append(one)
    for before, after, is_nested in _pairs(old, new):
        if not live[before] and not is_nested and _does(before) != _does(after):
            raise ImportedAlready(f"{name} is imported already, without {before.co_name}")
        for function in live[before]:
            try:
                function.__code__ = after
            except ValueError as error:  # another number of free variables
                raise ImportedAlready(f"{name} is imported already; {error}") from error
    _show(source, path)


def _source_of(module: str) -> str:
    """The source of a module, without importing its packages."""
    path: Sequence[str] | None = None
    spec = None
    for i in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: i + 1])
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            raise PlantError(f"found no module {name}")
        path = spec.submodule_search_locations
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def sources_with(plant: Plant, planted: dict[str, str] | None = None) -> dict[str, str]:
    """The changed text of each module that a defect touches, on top of texts with others
    (`planted`). Raises PlantError where it fits in none of the ways."""
    errors = []
    for edits in plant.ways:
        sources: dict[str, str] = {}
        try:
            for edit in edits:
                found = ((planted or {}) | sources).get(edit.module)
                found = found or _source_of(edit.module)
                sources[edit.module] = edit.apply(found)
            return sources
        except PlantError as error:
            errors.append(str(error))
    raise PlantError(f"{plant.name} cannot be planted: {'; '.join(errors)}")


def plant(*defects: Plant) -> None:
    """Changes the modules that the defects touch, now or when they are imported; what a function
    did during its module's import stays. Raises PlantError, after which the process may have some
    of the changes."""
    sources: dict[str, str] = {}
    for defect in defects:
        sources |= sources_with(defect, sources)
    for name in sources.keys() & sys.modules.keys():
        _change_functions(name, sources[name])
    sys.meta_path.insert(0, _Finder(sources))
