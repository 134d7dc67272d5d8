"""Planted defects: a few words of a module's source are replaced while it is imported. No file
changes.

Planted defects measure what a harness finds. This module works for any engine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any


class PlantError(Exception):
    """A defect cannot be planted in this release; the text says where it was to go."""


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
        # Triton reads a kernel's text by the file's name: it is given the changed one.
        lines = self._source.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self._source), None, lines, self.path)
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


def _source_of(module: str) -> str:
    """The text of a module that is not imported yet, nor are its packages."""
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
    """Has the modules that they touch imported with the defects. To be called before they are."""
    sources: dict[str, str] = {}
    for defect in defects:
        sources |= sources_with(defect, sources)
    if early := sorted(sources.keys() & sys.modules.keys()):
        raise PlantError(f"found {', '.join(early)} imported already")
    sys.meta_path.insert(0, _Finder(sources))
