"""Engines that start within a second: forks of one process that has imported their libraries.

Nine tenths of an engine's start are imports of torch, transformers and what they need. With
LOCKSTEP_WARM_ENGINES=FOLDER an engine's process hands its command line, environment and standard
streams to a server in FOLDER, and stays to pass on the exit status. The server forks for each
engine. It imports what the first engine had imported before its first message, except the engine
and Lockstep.

Invariants
(1) An engine's process ends when its client ends, and the client ends with its status.
(2) A server serves one interpreter, environment and part of the engine (scheduler or worker).
(3) A server has one thread when it forks, else it stops serving. Without a server engines start
    as they do without the variable.
(4) A server ends when its socket is removed, or after `_IDLE_SECONDS` without an engine.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lockstep_engines.plants import ImportedAlready

VARIABLE = "LOCKSTEP_WARM_ENGINES"
TOO_WARM = 75  # exit status of a fork in which ImportedAlready was raised
_IDLE_SECONDS = 300
_START_SECONDS = 20
_NOT_OF_ENGINES = frozenset(("PWD", "OLDPWD", "SHLVL", "_", VARIABLE))
_PACKAGE = __name__.partition(".")[0]
_NEVER_IMPORTED = ("vllm", "sglang", _PACKAGE, "__main__")
_report: int | None = None  # in a fork: the end of a pipe for the list of its imports


def _socket_path(folder: str) -> Path:
    ignored = {(name, os.environ.get(name, "")) for name in _NOT_OF_ENGINES}
    part = [sys.argv[1], "--worker" in sys.argv]
    facts = [sys.executable, part, sorted(os.environ.items() - ignored)]
    return Path(folder) / (hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16] + ".sock")


def hand_over() -> None:
    """Has a server run this command line, and exits with its status. Returns if no server is
    available, and in a server's fork."""
    folder = os.environ.pop(VARIABLE, None)
    if folder is None:
        return
    path = _socket_path(folder)
    with contextlib.suppress(OSError):
        status = ask(_connect(path), ["-m", _PACKAGE, *sys.argv[1:]], sys.path)
        if status is not None:
            os._exit(status)


def ask(server: socket.socket, command: list[str], path: list[str] | None) -> int | None:
    """Has the server run Python with these arguments; the exit status, or None if the server
    stopped serving. `path`: the fork's sys.path; None: the server's, after PYTHONPATH."""
    orders = {
        "command": command,
        "path": path,
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
    }
    socket.send_fds(server, [json.dumps(orders).encode() + b"\n"], [0, 1, 2])
    status = server.recv(4)
    return int.from_bytes(status, "little") if len(status) == 4 else None


def _connect(path: Path) -> socket.socket:
    """Starts the server if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            server.connect(str(path))
            return server
        path.unlink(missing_ok=True)
        serve = f"from {__name__} import serve; serve()"
        command = [sys.executable, "-c", serve, str(path)]
        none = subprocess.DEVNULL
        subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                server.connect(str(path))
                return server
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)


def list_imports() -> None:
    """In the first fork, before the first message: lists the modules that the server imports for
    later forks."""
    global _report
    if _report is None:
        return
    names = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _NEVER_IMPORTED and getattr(module, "__file__", None)
    ]
    with os.fdopen(_report, "w") as sink:
        json.dump({"modules": names, "environ": dict(os.environ)}, sink)
    _report = None


class Server:
    """`is_warm`: this process has imported what its forks need."""

    def __init__(
        self, path: str, idle_seconds: float = _IDLE_SECONDS, is_warm: bool = False
    ) -> None:
        self._path, self._idle_seconds = path, idle_seconds
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listed: int | None = None  # the first fork lists its imports here
        self._is_warm = is_warm

    def close(self) -> None:
        """In a process that does not serve."""
        self._listener.close()

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
        last = time.monotonic()
        while os.path.exists(self._path) and time.monotonic() - last < self._idle_seconds:
            waited: list[Any] = (
                [self._listener] if self._listed is None else [self._listener, self._listed]
            )
            ready, _, _ = select.select(waited, [], [], 1)
            if self._listed in ready:
                self._import_listed()
            if self._listener in ready:
                last = time.monotonic()
                self._take(self._listener.accept()[0])
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _import_listed(self) -> None:
        with os.fdopen(self._listed or 0) as source:
            text = source.read()
        self._listed = None
        if not text:
            return  # it ended before; the next one lists them
        listed = json.loads(text)
        # OpenBLAS starts threads when it is imported.
        os.environ.update(listed["environ"], OPENBLAS_NUM_THREADS="1")
        for name in listed["modules"]:
            # What is imported in another order than there may be missing: the fork imports it.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self._is_warm = True
        if len(os.listdir("/proc/self/task")) > 1:
            os.unlink(self._path)

    def _take(self, client: socket.socket) -> None:
        """Forks a keeper, which forks the engine."""
        message, fds, _, _ = socket.recv_fds(client, 1 << 20, 3)
        while message and not message.endswith(b"\n"):
            message += client.recv(1 << 20)
        report = None
        if message and not self._is_warm and self._listed is None:
            self._listed, report = os.pipe()
        if message and os.fork() == 0:
            self._listener.close()
            _keep(client, json.loads(message), fds, report)
        for fd in (*fds, *([] if report is None else [report])):
            os.close(fd)
        client.close()


def _keep(client: socket.socket, orders: Any, fds: list[int], report: int | None) -> None:
    """Ends with the engine's status, or ends the engine with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    engine = os.fork()
    if engine == 0:
        client.close()
        _become(orders, fds, report)
    for fd in (*fds, *([] if report is None else [report])):
        os.close(fd)

    def end_with_client() -> None:
        if not client.recv(1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    threading.Thread(target=end_with_client, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
    with contextlib.suppress(OSError):
        client.send((status if status >= 0 else 128 - status).to_bytes(4, "little"))
    os._exit(0)


def _become(orders: Any, fds: list[int], report: int | None) -> None:
    """In the engine's process: adopts the engine's command line."""
    global _report
    _report = report
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(orders["cwd"])
    os.environ.clear()
    os.environ.update(orders["environ"])
    if orders["path"] is None:
        paths = orders["environ"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [one for one in paths if one and one not in sys.path]
    else:
        sys.path[:] = orders["path"]
    tempfile.tempdir = None  # of another TMPDIR
    status = 1
    try:
        _run(orders["command"])
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except ImportedAlready:
        status = TOO_WARM
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _run(command: list[str]) -> None:
    """Runs the arguments as the interpreter does."""
    kind, *rest = command
    sys.argv[1:] = rest[1:]
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0] = "-c"
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = command
        file = os.path.abspath(kind)
        sys.path.insert(0, os.path.dirname(file))
        runpy.run_path(file, run_name="__main__")


def serve() -> None:
    server = Server(os.path.abspath(sys.argv[1]))
    os.chdir("/")
    server.serve()
