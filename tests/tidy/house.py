"""Counts what the house must not outgrow, and compares the counts with their limits.

    python3 tests/tidy/house.py            print every count, its limit and the aim
    python3 tests/tidy/house.py --check    exit 1 where a count is worse than its limit
    python3 tests/tidy/house.py --words    list each line that matches a pattern of words.txt

house_limits.txt has the limits, one per line: name, limit, aim, reason. Raising a limit needs a
reason in the same commit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("base", "reference", "traces", "sim", "cuda_backend", "properties", "cli")
CODE = (".cpp", ".h", ".cu", ".cuh")
CHECKED = ("reference/", "sim/step/", "cuda_backend/pool/", "cuda_backend/streams/",
           "cuda_backend/step/")  # fmt: skip
PLANNING = re.compile(
    r"^reference/(plan|placement)/|^sim/check/(layout|placement|plan)_prover|"
    r"^reference/memory/(model_placement|placed_layout|memory_plan)|^reference/types/(kv_cache|layer)_spec|"
    r"^sim/report/(plan|placement)_|^traces/formats/(layout|placement|plan)_record|"
    r"^sim/conform/(conform_layouts|placement_record|plan_record)|^sim/setup/planned_cache"
)
WRITTEN_BY_HAND = re.compile(r"^docs/[a-z_0-9]+\.md$")
_LITERAL_OR_COMMENT = re.compile(
    r'R"(?P<tag>[^(\s]*)\((?:.|\n)*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*(?:.|\n)*?\*/'
)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


@dataclass
class Source:
    """A C++ file as its code alone, its comments alone, and its long string literals alone."""

    path: str
    text: str
    code: str = ""
    comments: str = ""
    strings: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        code, comments, end = [], [], 0
        for match in _LITERAL_OR_COMMENT.finditer(self.text):
            between = self.text[end : match.start()]
            is_comment = match[0].startswith(("//", "/*"))
            code += [between, _blank(match[0]) if is_comment else match[0]]
            comments += [_blank(between), match[0] if is_comment else _blank(match[0])]
            if not is_comment and " " in match[0] and len(match[0]) > 14:
                line = self.text.count("\n", 0, match.start()) + 1
                self.strings += [(line + n, part) for n, part in enumerate(match[0].split("\n"))]
            end = match.end()
        self.code = "".join(code) + self.text[end:]
        self.comments = "".join(comments) + _blank(self.text[end:])

    def comment_lines(self) -> int:
        pairs = zip(self.code.split("\n"), self.comments.split("\n"), strict=False)
        return sum(1 for code, comment in pairs if comment.strip() and not code.strip())


def _filled(text: str) -> int:
    return sum(1 for line in text.split("\n") if line.strip())


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True)  # fmt: skip
    return sorted({name for name in listed.stdout.split("\n") if (ROOT / name).is_file()})


def _bodies(source: Source) -> list[tuple[str, str, str]]:
    """(kind, name, body) of every class and struct, nested ones included."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', source.code)
    found = []
    head = r"\b(class|struct)\s+(?:alignas\([^)]*\)\s*)?([A-Z][\w:]*)[^;{}()]*\{"
    for match in re.finditer(head, text):
        if text[: match.start()].rstrip().endswith("enum"):
            continue
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        found.append((match[1], match[2], text[match.end() : at - 1]))
    return found


def _members(body: str) -> int:
    """Data members: declarations at the body's own level that are not functions or types."""
    flat, depth = [], 0
    for character in body:
        if character == "}":
            depth -= 1
            flat.append(";" if depth == 0 else "")
        elif depth == 0 and character != "{":
            flat.append(character)
        depth += character == "{"
    count = 0
    for statement in re.sub(r"\b(public|private|protected):", ";", "".join(flat)).split(";"):
        statement = " ".join(statement.split())
        words = r"(using|friend|static|enum|struct|class|template|typedef|explicit)\b"
        if re.match(words, statement):
            continue
        if statement and re.match(r"[\w:<>,*&\s\[\]().]+\s[\w\[\]]+(\s*=.*)?$", statement):
            arguments = r"<[^<>]*(<[^<>]*(<[^<>]*>)?[^<>]*>)?[^<>]*>"
            count += "(" not in re.sub(arguments, "", statement).split("=")[0]
    return count


def _methods(body: str) -> int:
    """Member functions that a class defines or declares at its own level."""
    flat, depth = [], 0
    for character in body:
        flat.append(character if depth == 0 else "")
        depth += {"{": 1, "}": -1}.get(character, 0)
    return len(re.findall(r"\w\([^;{}]*\)(?: const)?(?: override)?\s*[;{]", "".join(flat)))


def _is_stateful(source: Source) -> bool:
    """A header that defines a class with data members that its methods change."""
    return source.path.endswith(".h") and any(
        kind == "class" and re.search(r"private:[^}]*\b\w+_( = [^;]+|\{[^;]*)?;", body)
        for kind, _, body in _bodies(source)
    )


def _functions(source: Source) -> int:
    """Lines of the longest function: from an unindented head to its closing brace."""
    longest, start = 0, None
    for number, line in enumerate(source.text.split("\n")):
        opens = re.match(r"[A-Za-z~].*[({,&|]$|[A-Za-z].*\) (const )?\{$", line)
        if opens and "namespace" not in line:
            start = number if start is None else start
        if re.match(r"(class|struct|enum|union|namespace|template|constexpr|const)\b", line):
            start = None
        if line == "}" and start is not None:
            longest, start = max(longest, number - start + 1), None
        if line.startswith("}") and line != "}":
            start = None
    return longest


def _prose(name: str, source: Source | None, text: str) -> list[tuple[int, str]]:
    """The lines of a file that people read: documents, comments, messages."""
    if name.endswith(".md"):  # without names in backticks: they are not prose
        return [(n, re.sub(r"`[^` ]+`", "``", line))
                for n, line in enumerate(text.split("\n"), 1)]  # fmt: skip
    if source:
        comments = [(n, x) for n, x in enumerate(source.comments.split("\n"), 1) if x.strip()]
        return comments + source.strings
    found = re.finditer(r'#[^\n]*|"""(?:.|\n)*?"""|"[^"\n]{12,}"', text)
    lines = []
    for match in found:
        first = text.count("\n", 0, match.start()) + 1
        lines += [(first + n, part) for n, part in enumerate(match[0].split("\n"))]
    return lines


def words() -> list[str]:
    patterns = []
    for line in (ROOT / "tests/tidy/words.txt").read_text(encoding="utf-8").splitlines():
        parts = line.split(" => ")
        patterns.append((re.compile(parts[0], re.IGNORECASE), parts[1]))
    hits = []
    for name in _files():
        if not name.endswith((".md", ".py", *CODE)) or name.startswith("docs/upstream/"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        source = Source(name, text) if name.endswith(CODE) else None
        for number, line in _prose(name, source, text):
            for pattern, instead in patterns:
                match = pattern.search(line)
                if match:
                    hits.append(f"{name}:{number}: {match[0]}: {instead}")
                    break
    return hits


def counts() -> dict[str, float]:
    names = _files()
    product = [
        Source(name, (ROOT / name).read_text(encoding="utf-8"))
        for name in names
        if name.endswith(CODE) and name.split("/")[0] in PRODUCT
    ]
    code = sum(_filled(s.code) for s in product)
    comments = sum(s.comment_lines() for s in product)
    kinds = {s.path: s.code.count("CacheKind::") for s in product}
    checked = [s for s in product if s.path.startswith(CHECKED)]
    stateful = [s for s in product if _is_stateful(s)]
    folders: dict[str, int] = {}
    for source in product:
        folder = source.path.rsplit("/", 1)[0]
        folders[folder] = folders.get(folder, 0) + 1
    return {
        "product_code_lines": code,
        "comment_share_percent": round(100 * comments / (code + comments), 1),
        "product_files": len(product),
        "cache_kind_uses": sum(kinds.values()),
        "cache_kind_files": sum(1 for n in kinds.values() if n),
        "hisparse_files": sum(1 for s in product if "hisparse" in (s.path + s.text).lower()),
        "planning_lines": sum(
            s.text.count("\n") for s in product if PLANNING.search(s.path)
        ),
        "cuda_backend_lines": sum(  # all lines, comments and blank ones too
            s.text.count("\n") for s in product if s.path.startswith("cuda_backend/")
        ),
        "largest_class_members": max(
            _members(b) for s in product for _, _, b in _bodies(s) if _methods(b) >= 10),
        "longest_function_lines": max(_functions(s) for s in product),
        "files_in_a_folder": max(folders.values()),
        "words_hits": len(words()),
        "stateful_headers_without_invariants": sum(
            1 for s in stateful if not re.search(r"invariant", s.comments, re.IGNORECASE)
        ),
        "checks_per_1000_lines": round(
            1000 * sum(s.code.count("LS_CHECK(") for s in checked)
            / sum(_filled(s.code) for s in checked), 1),
        "pages_by_hand": sum(1 for n in names if WRITTEN_BY_HAND.match(n)),
    }  # fmt: skip


AT_LEAST = {"comment_share_percent", "checks_per_1000_lines"}


def main() -> int:
    if "--words" in sys.argv:
        print("\n".join(words()))
        return 0
    limits = {}
    for line in (ROOT / "tests/tidy/house_limits.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, limit, aim, _reason = line.split(maxsplit=3)
            limits[name] = (float(limit), aim)
    found = counts()
    if set(found) != set(limits):
        sys.exit(f"house_limits.txt and house.py name different counts: {set(found) ^ set(limits)}")
    worse = []
    print(f"{'count':38}{'now':>10}{'limit':>10}{'aim':>10}")
    for name, value in found.items():
        limit, aim = limits[name]
        print(f"{name:38}{value:>10,}{limit:>10,.10g}{aim:>10}")
        if value < limit if name in AT_LEAST else value > limit:
            worse.append(name)
    if worse:
        print("Worse than tests/tidy/house_limits.txt allows:", ", ".join(worse))
        print("Reduce the count, or raise the limit and give the reason in the same commit.")
    return 1 if worse and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
