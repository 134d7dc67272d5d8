"""Packs a wheel from a build tree with only Python: no compiler, no network.

    python3 pack_wheel.py BUILD OUT     # OUT/lockstep_kv-VERSION-py3-none-PLATFORM.whl

BUILD: a folder that CMake configured and `lockstep` was built in. pyproject.toml has the name of
the wheel and its packages. PLATFORM is manylinux of the oldest glibc that has every symbol that is
asked for. Refused: a command that needs a library which neither every Linux has nor the wheel can
carry.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of a wheel for manylinux (PEP 599 and 600), those that the command may ask for.
_EVERYWHERE = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s))\.so\.\d+")
# The glibc of the first distribution that has so new a libstdc++ (auditwheel's policies).
_GLIBC_WITH = {"3.4.29": (2, 34), "3.4.30": (2, 35), "3.4.31": (2, 38), "3.4.32": (2, 38)}


class CannotPack(Exception):
    """Why a build cannot become a wheel."""


def project() -> dict[str, str]:
    """name, version, ... of pyproject.toml: Python 3.10 has no reader of TOML."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project]\n")[1].split("\n[")[0]
    return dict(re.findall(r'^([a-z-]+) = "(.*)"$', section, re.MULTILINE))


def packages() -> list[Path]:
    """The folders of the packages, as scikit-build-core and `cmake --install` read them."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("\nwheel.packages = [")[1].split("]")[0]
    return [ROOT / name for name in re.findall(r'"(.+?)"', section)]


def entry_points() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    text = text.replace("[project.scripts]", "[project.entry-points.console_scripts]")
    table = r'^\[project\.entry-points\."?([\w.]+)"?\]\n((?:.+\n)*)'
    tables = re.findall(table, text, re.MULTILINE)
    return "\n".join(f"[{group}]\n" + lines.replace('"', "") for group, lines in tables)


def extras() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    return "".join(
        f'Provides-Extra: {name}\nRequires-Dist: {needed}; extra == "{name}"\n'
        for name, needed in re.findall(r'^(\w+) = \["(.+)"\]$', section, re.MULTILINE)
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _readelf(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["readelf", "--wide", *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        raise CannotPack(f"readelf: {done.stderr.strip()}")
    return done.stdout


def glibc_of(programs: list[Path]) -> tuple[int, ...]:
    """The oldest glibc (2, n) that has all that the programs ask it and libstdc++ for."""
    needed = (2, 17)
    for program in programs:
        text = _readelf("--version-info", program)
        for version in re.findall(r"\bName: GLIBC_([\d.]+)", text):
            needed = max(needed, _numbers(version)[:2])
        for version in re.findall(r"\bName: GLIBCXX_([\d.]+)", text):
            if version in _GLIBC_WITH:
                needed = max(needed, _GLIBC_WITH[version])
            elif _numbers(version) > max(map(_numbers, _GLIBC_WITH)):
                raise CannotPack(f"{program.name} asks for GLIBCXX_{version}, of no manylinux yet")
    return needed


def needs_of(program: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", program))


def check_needs(program: str, needs: list[str], carried: set[str]) -> None:
    for name in needs:
        if not _EVERYWHERE.fullmatch(name) and name not in carried:
            raise CannotPack(f"{program} needs {name}, which the wheel does not carry")


def stage(build: Path, folder: Path) -> None:
    for component in ("command", "python", "libraries", "headers"):
        command = ["cmake", "--install", build, "--component", component, "--prefix", folder]
        if component == "command":
            command.append("--strip")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotPack(f"cmake --install: {done.stderr.strip()}")


def _hash_of(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


class Wheel:
    """A wheel that is written; the same files give the same bytes."""

    def __init__(self, path: Path, info: str) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6)
        self._info, self._record = info, ""

    def add(self, name: str, data: bytes, is_program: bool = False) -> None:
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100755 if is_program else 0o100644) << 16
        self._zip.writestr(entry, data)
        self._record += f"{name},{_hash_of(data)},{len(data)}\n"

    def close(self) -> None:
        name = f"{self._info}/RECORD"
        self._record += f"{name},,\n"
        self._zip.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), self._record)
        self._zip.close()


def metadata(of: dict[str, str]) -> str:
    head = (
        f"Metadata-Version: 2.4\nName: {of['name']}\nVersion: {of['version']}\n"
        f"License-Expression: {of['license']}\nLicense-File: LICENSE\n"
        f"Summary: {of['description']}\nRequires-Python: {of['requires-python']}\n"
        f"{extras()}"
        "Description-Content-Type: text/markdown\n\n"
    )
    return head + (ROOT / of["readme"]).read_text()


def pack(build: Path, out: Path) -> Path:
    of = project()
    stem = f"{of['name'].replace('-', '_')}-{of['version']}"
    with tempfile.TemporaryDirectory() as holder:
        staged = Path(holder)
        stage(build, staged)
        programs = [staged / "bin" / "lockstep", *sorted((staged / "lib/lockstep").glob("*.so*"))]
        for program in programs:
            check_needs(program.name, needs_of(program), {path.name for path in programs})
        glibc = "_".join(map(str, glibc_of(programs)))
        tag = f"py3-none-manylinux_{glibc}_{platform.machine()}"
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{stem}-{tag}.whl"
        partial = path.with_suffix(f".partial-{os.getpid()}")
        wheel = Wheel(partial, f"{stem}.dist-info")
        for package in packages():
            for source in sorted([*package.rglob("*.py"), *package.rglob("*.html")]):
                wheel.add(source.relative_to(package.parent).as_posix(), source.read_bytes())
        for file in sorted(path for path in staged.rglob("*") if path.is_file()):
            relative = file.relative_to(staged)
            inside = relative.relative_to("bin") if relative.parts[0] == "bin" else relative
            folder = "scripts" if relative.parts[0] == "bin" else "data"
            wheel.add(f"{stem}.data/{folder}/{inside.as_posix()}", file.read_bytes(),
                      is_program=folder == "scripts")  # fmt: skip
        wheel.add(f"{stem}.dist-info/METADATA", metadata(of).encode())
        wheel.add(f"{stem}.dist-info/licenses/LICENSE", (ROOT / "LICENSE").read_bytes())
        wheel.add(f"{stem}.dist-info/WHEEL",
                  f"Wheel-Version: 1.0\nGenerator: pack_wheel\nRoot-Is-Purelib: false\n"
                  f"Tag: {tag}\n".encode())  # fmt: skip
        wheel.add(f"{stem}.dist-info/entry_points.txt", entry_points().encode())
        wheel.close()
        for old in out.glob(f"{stem}-*.whl"):
            old.unlink()
        partial.rename(path)
    return path


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        path = pack(Path(sys.argv[1]), Path(sys.argv[2]))
    except CannotPack as error:
        sys.exit(f"pack_wheel: {error}")
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
