"""A Python that has imported an engine already: each of its commands is a fork. Tests of engines
start hundreds of processes, and most of their time is imports.

    python warm_python.py serve ENGINE DIR FOLDER   # until standard input ends; makes FOLDER/python
    FOLDER/python -m lockstep_engines vllm DIR ...  # as the interpreter that runs the server

FOLDER/python passes its arguments, environment, folder and three streams to an image, a process
that has imported what such a command imports, and ends with the status of the fork that runs it.
The images `packages` and `worker` have imported no module of the engine: for commands that plant a
defect in one, and for those that no other image serves.

(1) A fork has the environment, folder, streams, arguments and `sys.path` of its command.
(2) A fork ends when its command ends, and the command when the fork ends, killed or not.
(3) Images have one thread: a fork of another thread's locks could wait forever.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent
THIRD_PARTY = "torch transformers numba fastapi openai".split()
# These import Triton, which a worker needs with its interpreter.
WITH_TRITON = "torch._dynamo compressed_tensors".split()
_STATUS = struct.Struct("i")


def _import(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _with_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    _import(WITH_TRITON)


def _scheduler() -> None:
    _import(["lockstep_engines.vllm.engine", "lockstep_engines.vllm.adapter"])


def _worker(runner: str) -> None:
    from lockstep_engines.worker import device

    device.take_the_place_of_cuda(runner)
    _import(["lockstep_engines.worker.adapter"])


IMAGES: dict[str, dict[str, Any]] = {
    "vllm": {
        "packages": lambda: None,
        "worker": _with_triton,
        "scheduler": _scheduler,
        "worker-v1": lambda: _worker("v1"),
        "worker-v2": lambda: _worker("v2"),
    },
    "sglang": {
        "packages": lambda: None,
        "scheduler": lambda: _import(["lockstep_engines.sglang.adapter"]),
    },
    "none": {"packages": lambda: None},  # of warm_python_test.py
}
# Tests that import vLLM's scheduler as `lockstep_engines ENGINE` does.
OF_SCHEDULER = frozenset(
    "vllm_reads vllm_calls vllm vllm_served vllm_connector vllm_hisparse vllm_shares sglang".split()
)


def image_of(arguments: list[str]) -> str:
    """The image for a command's arguments."""
    if Path(arguments[0]).stem.removesuffix("_test") in OF_SCHEDULER:
        return "scheduler"
    if arguments[:2] != ["-m", "lockstep_engines"] or {"--plants", "--layers"} & {*arguments}:
        return "packages"
    if {"--kernels", "--models"} & {*arguments} or {"--worker", "--plant"} <= {*arguments}:
        return "worker"
    if "--worker" in arguments:
        runner = arguments[arguments.index("--runner") + 1] if "--runner" in arguments else "v1"
        return f"worker-{runner}"
    return "packages" if "--plant" in arguments else "scheduler"


# The client's side: what FOLDER/python runs.


def ask(folder: str, arguments: list[str]) -> int:
    """Runs a command in a fork of its image; the exit status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(f"{folder}/{image_of(arguments)}")
        command = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(channel, [struct.pack("q", len(command))], [0, 1, 2])
        channel.sendall(command)
        for number in (signal.SIGINT, signal.SIGTERM):  # the closed channel ends the fork
            signal.signal(number, lambda number, _: os._exit(128 + number))
        for descriptor in (0, 1, 2):  # the fork has them; a reader waits for its end only
            os.close(descriptor)
        status = channel.recv(_STATUS.size)
    if len(status) < _STATUS.size:
        return 1
    code = _STATUS.unpack(status)[0]
    if code < 0:  # ended by a signal: so does the command
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return int(code)


# The server's side.


def _receive(channel: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
    size = struct.unpack("q", head)[0]
    text = b""
    while len(text) < size:
        part = channel.recv(size - len(text))
        if not part:
            raise EOFError("a command that was cut short")
        text += part
    arguments, environment, folder = json.loads(text)
    return arguments, environment, folder, list(descriptors)


def _become(arguments: list[str], environment: dict[str, str], folder: str, python: str) -> None:
    os.environ.clear()
    os.environ.update(environment, PYTHONHASHSEED="0")  # which is this process's, too
    os.chdir(folder)
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        buffering = 1 if name == "stderr" else -1
        stream = open(descriptor, mode, buffering=buffering, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    sys.executable = python
    sys.orig_argv = [python, *arguments]
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    tempfile.tempdir = None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        file = Path(arguments[0]).absolute()
        sys.path.insert(0, str(file.resolve().parent))
        runpy.run_path(str(file), run_name="__main__")


def _status_of(arguments: list[str]) -> int:
    """Runs the command; its exit status."""
    try:
        _run(arguments)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def _fork(channel: socket.socket, of_server: list[int], python: str) -> int:
    """Runs the command of the channel in a child, which closes the server's descriptors; its id."""
    arguments, environment, folder, descriptors = _receive(channel)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for descriptor in (channel.fileno(), *of_server):
            os.close(descriptor)
        for at, descriptor in enumerate(descriptors):
            os.dup2(descriptor, at)
            os.close(descriptor)
        _become(arguments, environment, folder, python)
        status = _status_of(arguments)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = status or 1
        os._exit(status & 0xFF)
    for descriptor in descriptors:
        os.close(descriptor)
    return child


def _serve(listener: socket.socket, lifeline: int, python: str) -> None:
    """Until the other end of the lifeline is closed."""
    children: dict[socket.socket, int] = {}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([listener, lifeline, ended, *children], [], [])
        for one in ready:
            if one == lifeline:
                for child in children.values():
                    os.kill(child, signal.SIGKILL)
                return
            if one == ended:
                os.read(ended, 512)
            elif one is listener:
                channel, _ = listener.accept()
                try:
                    others = [one.fileno() for one in (listener, *children)]
                    children[channel] = _fork(channel, [ended, wake, *others], python)
                except (EOFError, struct.error, ConnectionError):
                    channel.close()
            else:  # the command was killed
                os.kill(children[one], signal.SIGKILL)
        for channel, child in list(children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del children[channel]
                try:
                    channel.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
                except OSError:
                    pass
                channel.close()


def serve(engine: str, directory: str, folder: Path) -> None:
    """Images in FOLDER, each a child of this process, which has imported third-party packages."""
    python = folder / "python"
    sys.path[:0] = [str(directory), str(PACKAGES)]
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if engine != "none":
        _import(THIRD_PARTY)
    for name, imports in IMAGES[engine].items():
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{folder}/{name}")  # a command waits until the image has imported
        listener.listen(64)
        if os.fork() == 0:
            imports()
            count = len(os.listdir("/proc/self/task"))
            assert count == 1, f"the image {name} has {count} threads"
            gc.collect()
            gc.freeze()
            _serve(listener, 0, str(python))
            os._exit(0)
        listener.close()
    python.write_text(
        f"#!{sys.executable} -SE\nimport sys\nsys.path[:] = [{str(HERE)!r}, *sys.path]\n"
        f"import warm_python\nsys.exit(warm_python.ask({str(folder)!r}, sys.argv[1:]))\n"
    )
    python.chmod(0o755)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    serve(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
