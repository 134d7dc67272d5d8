"""What pytest calls: options, the tests that they add, the fixture."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep_pytest import command, items
from lockstep_pytest.known import KnownFileError, read_known
from lockstep_pytest.record import Watch, recorded_schedulers
from lockstep_pytest.summary import Summary, note

_SETTINGS = pytest.StashKey[items.Settings]()

# Each as --lockstep-NAME and as an ini value lockstep_NAME.
_OPTIONS = {
    "cases": ("DIR", "a test for each saved case, recording and request trace in a folder"),
    "seeds": ("A:B", "a test for each generated case of the seeds A to B - 1 (lockstep fuzz)"),
    "layouts": ("A:B", "a test per memory layout of the seeds A to B - 1"),
    "backend": ("NAME", "backend under test: simt, cuda, none, or your kernels, FILE.so"),
    "decisions": ("ENGINE", "deciding engine: vllm:DIR, or a command (docs/protocols.md)"),
    "engine": ("PROFILE", "the release whose options generated cases have"),
    "trace": ("FILE", "trace for layouts (a bundled trace)"),
    "known": ("FILE", "failures to ignore, by id"),
    "save": ("DIR", "where the smallest cases go (.lockstep)"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lockstep", "lockstep: KV caches and their schedulers")
    for name, (value, text) in _OPTIONS.items():
        group.addoption(f"--lockstep-{name}", metavar=value, help=text)
        parser.addini(f"lockstep_{name}", text)
    group.addoption(
        "--lockstep-record",
        action="store_true",
        help="record and audit the vLLM schedulers of every test, as with lockstep_audit",
    )


def _option(config: pytest.Config, name: str) -> str:
    """From the command line, or else from the ini file."""
    return config.getoption(f"lockstep_{name}") or config.getini(f"lockstep_{name}") or ""


def _path(config: pytest.Config, name: str) -> Path:
    """The path as typed; in an ini file, relative to that file."""
    typed = config.getoption(f"lockstep_{name}")
    return Path(typed) if typed else config.rootpath / config.getini(f"lockstep_{name}")


def _seeds(config: pytest.Config, name: str) -> range:
    text = _option(config, name)
    if not text:
        return range(0)
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() if colon else not last)):
        raise pytest.UsageError(f"--lockstep-{name} {text}: expected A:B, as in 0:200")
    return range(int(first), int(last)) if colon else range(int(first), int(first) + 1)


def _check_save(path: Path) -> None:
    """A test that fails writes its evidence late: a folder that cannot be made is refused first."""
    made = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(f"--lockstep-save {path}: {error.strerror}") from None
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()


def settings_of(config: pytest.Config) -> items.Settings:
    settings = items.Settings(
        backend=_option(config, "backend"),
        decisions=_option(config, "decisions"),
        engine=_option(config, "engine"),
        one_at_a_time=hasattr(config, "workerinput"),
    )
    settings.trace = _option(config, "trace") or settings.trace
    if _option(config, "save"):
        settings.save = _path(config, "save")
    if _option(config, "known"):
        try:
            today = datetime.datetime.now(datetime.timezone.utc).date()
            settings.known = read_known(_path(config, "known"), today)
        except KnownFileError as error:
            raise pytest.UsageError(f"--lockstep-known: {error}") from None
    return settings


def pytest_configure(config: pytest.Config) -> None:
    """A wrong option ends the session here: under pytest-xdist a worker's message is lost."""
    command.folder = config.invocation_params.dir
    config.stash[_SETTINGS] = settings_of(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(config.stash[_SETTINGS]), "lockstep-summary")
        if _option(config, "save"):
            _check_save(command.folder / _path(config, "save"))
    for name in ("seeds", "layouts"):
        _seeds(config, name)
    if _option(config, "cases") and not _path(config, "cases").is_dir():
        raise pytest.UsageError(f"--lockstep-cases: there is no folder {_path(config, 'cases')}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome: Any = yield
    note(item, call, outcome.get_result())


class _Suite(pytest.Collector):
    """Where the tests hang that no file of Python holds."""

    def collect(self) -> list[Any]:
        return []


@pytest.hookimpl(tryfirst=True)  # before -k and -m select
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    settings = config.stash[_SETTINGS] = settings_of(config)  # a conftest may have changed them
    suite = _Suite.from_parent(session, name="lockstep", nodeid="lockstep")
    found = list(_tests(suite, config, settings))
    for item in found:
        names = [known.id for known in settings.known if known.names(item.name)]
        if names:
            item.add_marker(pytest.mark.xfail(strict=True, reason=", ".join(names),
                                              raises=pytest.xfail.Exception))  # fmt: skip
    items.extend(found)


def _tests(
    suite: pytest.Collector, config: pytest.Config, settings: items.Settings
) -> Iterator[items.LockstepItem]:
    if _option(config, "cases"):
        yield from items.items_of_folder(suite, _path(config, "cases"), settings)
    yield from items.items_of_seeds(suite, _seeds(config, "seeds"), settings)
    yield from items.items_of_layouts(suite, _seeds(config, "layouts"), settings)


def pytest_collection_finish(session: pytest.Session) -> None:
    seeds = [item for item in session.items if isinstance(item, items.SeedItem)]
    if seeds:
        seeds[0].runs.choose(item.seed for item in seeds)


def _watched(request: pytest.FixtureRequest, asked: bool) -> Iterator[Watch]:
    item, run = request.node, request.node.runtest
    settings = request.config.stash[_SETTINGS]
    watch = Watch(settings, items.save_folder(settings, item.nodeid), is_asked_for=asked)

    def runtest() -> None:
        __tracebackhide__ = True
        try:
            run()
        except (pytest.skip.Exception, pytest.xfail.Exception):
            watch.forget()
            raise
        except Exception:
            if kept := watch.recordings():
                again = "\n".join(command.line_to_repeat("audit", path) for path in kept)
                item.add_report_section("call", "recorded", again)
            raise
        watch.check(item.nodeid)

    item.runtest = runtest
    item.lockstep_judged = lambda: watch.judged
    with recorded_schedulers(watch):
        yield watch


@pytest.fixture
def lockstep_audit(request: pytest.FixtureRequest) -> Iterator[Watch]:
    """Records every scheduler of vLLM that the test makes, and audits the recordings when the test
    has passed: a finding fails it."""
    yield from _watched(request, asked=True)


@pytest.fixture(autouse=True)
def _lockstep_record(request: pytest.FixtureRequest) -> Iterator[None]:
    wanted = request.config.getoption("lockstep_record")
    if not wanted or "lockstep_audit" in request.fixturenames:
        yield
        return
    for _ in _watched(request, asked=False):
        yield


@pytest.fixture
def lockstep_kernels(request: pytest.FixtureRequest) -> Callable[..., command.Said]:
    """lockstep_kernels(Class, *options) replays the trace with the class's kernels, in this
    interpreter's environment. A difference fails the test; its cases stay."""
    settings = request.config.stash[_SETTINGS]

    def check(kernels: type, *options: str) -> command.Said:
        __tracebackhide__ = True
        named = f"{inspect.getsourcefile(kernels)}:{kernels.__name__}"
        said = command.run(
            "replay", settings.trace, "--kernels", named, "--engine-python", sys.executable,
            "--save", items.save_folder(settings, request.node.nodeid), "--shrink", *options,
        )  # fmt: skip
        if said.status != command.AGREED:
            pytest.fail(said.out[max(0, said.out.find("Verdict:")) :], pytrace=False)
        return said

    return check
