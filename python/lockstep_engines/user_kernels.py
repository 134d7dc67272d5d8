"""python -m lockstep_engines.user_kernels module:Class [--cuda]: a user's kernels for Lockstep.

The class's functions receive tensors that are views of Lockstep's memory, which this process maps:
no byte is copied. With --cuda the memory is the first GPU's. docs/check_your_kernels.md describes
the class and its arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import mmap
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_engines import missing, protocol
from lockstep_engines.gpu_memory import SharedMemory
from lockstep_engines.protocol import EngineFault, Object, encodable

_QUERY_DTYPES = ("fp32", "bf16", "fp16")
# Functions of a class, with the names of their arguments.
_WRITE = ("layer", "key", "value", "kv_cache", "slot_mapping")
_ATTEND = ("layer", "query", "kv_cache", "block_table", "seq_lens", "query_start_loc")
_SLOTS = ("group", "positions", "batch_indices", "block_table", "block_size")
_SEQUENCES = ("query_start_loc", "initial_indices", "has_initial_state", "cache_indices")
_FUNCTIONS = {
    "write": _WRITE,
    "write_latent": tuple(name for name in _WRITE if name != "value"),
    "attend": _ATTEND,
    "attend_latent": _ATTEND,
    "begin_step": _SLOTS,
    "map_slots": (*_SLOTS, "slot_mapping"),
    "conv": ("layer", "x", "conv_state", "weight", *_SEQUENCES),
    "ssm": ("layer", "x", "dt", "A", "B", "C", "D", "dt_bias", "ssm_state", *_SEQUENCES),
    "delta": ("layer", "q", "k", "v", "g", "beta", "ssm_state", *_SEQUENCES),
    "zero_blocks": ("group", "pages", "block_ids"),
    "copy_blocks": ("group", "pages", "sources", "targets"),
}


@dataclass
class Layer:
    """A layer as passed to functions. Zeros: no window, no chunk."""

    name: str
    kind: str
    group: int
    sliding_window: int
    attention_chunk_size: int
    index: int
    num_kv_heads: int
    head_size: int
    dtype: str  # of the cache's elements: "bf16", "fp8" (e4m3), "fp8_e5m2", ...
    kv_quant_mode: str  # how write quantises: "none", "fp8_per_tensor", "nvfp4", ...
    scale: float = 0.0  # of scores, of the delta rule's outputs
    k_scale: Any = None  # of the stored elements; one tensor, 1.0 of a cache that is not quantised
    v_scale: Any = None
    kv_layout: str = "NHD"  # "HND": a head's tokens of a block are adjacent
    k_scale_cache: Any = None  # of rows with their own scales
    v_scale_cache: Any = None

    def first_position(self, seq_len: Any) -> Any:
        """The first position that the last of seq_len tokens attends to; elementwise for a
        tensor."""
        if self.attention_chunk_size:
            return (seq_len - 1) // self.attention_chunk_size * self.attention_chunk_size
        window = self.sliding_window
        return (seq_len - window) * (seq_len > window) if window else 0 * seq_len


class _Torch:
    """Views as torch tensors."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)  # the tensors of a step are small
        self.module: Any = torch
        self.name = f"torch {torch.__version__}"
        self._dtypes = {
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp32": torch.float32,
            "fp8": torch.float8_e4m3fn,
            "fp8_e5m2": torch.float8_e5m2,
            "int8": torch.int8,
            "uint8": torch.uint8,
            "int32": torch.int32,
            "int64": torch.int64,
        }

    def use_gpu(self) -> None:
        if not self.module.cuda.is_available():
            _refuse(f"--backend cuda: {self.name} in {sys.executable} finds no GPU")
        self.module.set_default_device("cuda")  # of what the class makes, too

    def view(self, memory: mmap.mmap | SharedMemory, tensor: Object) -> Any:
        dtype = self._dtypes[tensor["dtype"]]
        size, rest = dtype.itemsize, [stride % dtype.itemsize for stride in tensor["strides"]]
        if any(rest):
            raise EngineFault(
                f"rows of {tensor['dtype']} are {tensor['strides']} bytes apart, which torch "
                "cannot express; choose head and page sizes that are multiples of the element"
            )
        last = sum((n - 1) * s for n, s in zip(tensor["shape"], tensor["strides"], strict=True))
        count, offset = last // size + 1, tensor["offset"]
        if isinstance(memory, SharedMemory):
            flat = memory.bytes[offset : offset + count * size].view(dtype)
        else:
            flat = self.module.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(tensor["shape"], [stride // size for stride in tensor["strides"]])

    def integers(self, values: list[int]) -> Any:
        return self.module.tensor(values, dtype=self.module.int32)

    def flags(self, values: list[int]) -> Any:
        return self.module.tensor(values, dtype=self.module.bool)

    def one(self) -> Any:
        return self.module.ones(1)

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.module.Tensor)

    def is_float(self, value: Any) -> bool:
        return bool(value.dtype.is_floating_point)


class _Numpy:
    """Views as numpy arrays; bf16 and fp8 are their bits."""

    def __init__(self) -> None:
        import numpy

        self.module = numpy
        self.name = f"numpy {numpy.__version__}"
        self._dtypes = {"bf16": "u2", "fp16": "f2", "fp32": "f4", "int32": "i4", "int64": "i8"}
        self._dtypes |= {"fp8": "u1", "fp8_e5m2": "u1"}

    def view(self, memory: mmap.mmap, tensor: Object) -> Any:
        dtype = self._dtypes.get(tensor["dtype"], tensor["dtype"])
        return self.module.ndarray(
            tensor["shape"], dtype, memory, tensor["offset"], tensor["strides"]
        )

    def integers(self, values: list[int]) -> Any:
        return self.module.array(values, "i4")

    def flags(self, values: list[int]) -> Any:
        return self.module.array(values, bool)

    def one(self) -> Any:
        return self.module.ones(1, "f4")

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.module.ndarray)

    def is_float(self, value: Any) -> bool:
        return bool(value.dtype.kind == "f")


@dataclass
class View:
    """A tensor for any other library, in host memory; strides in bytes."""

    memory: mmap.mmap
    offset: int
    dtype: str
    shape: list[int]
    strides: list[int]


class _Plain:
    """Views as View, lists of integers, and results as bytes; needs no package."""

    name = f"python {sys.version.split()[0]}"

    def view(self, memory: mmap.mmap, tensor: Object) -> Any:
        return View(memory, **tensor)

    def integers(self, values: list[int]) -> Any:
        return values

    def flags(self, values: list[int]) -> Any:
        return [bool(value) for value in values]

    def one(self) -> Any:
        return None


_FRAMEWORKS: dict[str, Any] = {"torch": _Torch, "numpy": _Numpy, "plain": _Plain}


def _before_run(what: str, function: Any, *arguments: Any) -> Any:
    """Calls code of the class. An exception refuses the layers, in one line with its place."""
    try:
        return function(*arguments)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        said = " ".join(str(error).split())
        raise protocol.Refused(f"{what} raised {type(error).__name__}: {said}{place}") from error


class Server:
    """One class; one run at a time."""

    def __init__(self, named: str, on_gpu: bool = False) -> None:
        self._named, self._on_gpu = named, on_gpu
        if on_gpu:
            _Torch().use_gpu()
        self._class = _class_of(named)
        self._functions = _functions_of(named, self._class)
        self._query_dtype = getattr(self._class, "query_dtype", "fp32")
        if self._query_dtype not in _QUERY_DTYPES:
            _refuse(f"{named}: query_dtype {self._query_dtype!r} is none of {_QUERY_DTYPES}")
        framework = getattr(self._class, "framework", "torch")
        if framework not in _FRAMEWORKS:
            _refuse(f"{named}: framework {framework!r} is none of {', '.join(_FRAMEWORKS)}")
        if on_gpu and framework != "torch":
            _refuse(f"{named}: framework {framework!r} has no tensors on a GPU; leave out "
                    "--backend cuda")  # fmt: skip
        self._arrays: Any = _FRAMEWORKS[framework]()
        self._memory: mmap.mmap | SharedMemory | None = None

    def hello(self) -> Object:
        engine = {"name": self._named, "version": self._arrays.name}
        return {"engine": engine, "features": [*self._functions, f"query:{self._query_dtype}"]}

    def open(self, case: Object, _client: Any) -> Object:
        self._path = case["memory"]
        self._layers = [Layer(**said) for said in case["layers"]]
        self._object = _before_run(f"{self._class.__name__}()", self._class)
        declines = getattr(self._object, "declines", lambda layer: "")
        return {
            "declined": [
                _reason(_before_run(f"declines of {layer.name}", declines, layer))
                for layer in self._layers
            ]
        }

    def close(self) -> None:
        if isinstance(self._memory, SharedMemory):
            self._memory.close()
        self._object = self._memory = None

    def _map(self, handle: str | None) -> mmap.mmap | SharedMemory:
        if self._memory is None and handle is not None:
            self._memory = SharedMemory(handle)
        if self._memory is None:
            with open(self._path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        return self._memory

    def _finish(self) -> None:
        """Waits for the GPU; raises its errors."""
        if self._on_gpu:
            self._arrays.module.cuda.synchronize()

    def run(self, message: Object) -> Object:
        function, tensors = message["run"], message["tensors"]
        memory = self._map(message.get("memory"))
        views: Object = {name: self._arrays.view(memory, said) for name, said in tensors.items()}
        views["pages"] = [views[name] for name in tensors if name.startswith("pages")]
        views |= {
            name: self._arrays.integers(values) for name, values in message["integers"].items()
        }
        if message["layer"] < 0:
            views["group"] = message["group"]
        else:
            views["layer"] = layer = self._layers[message["layer"]]
            layer.scale = message["scale"]
            layer.k_scale = layer.v_scale = views.get("scale", self._arrays.one())
            strides = tensors.get("kv_cache", {}).get("strides", ())
            layer.kv_layout = "HND" if len(strides) == 5 and strides[3] > strides[2] else "NHD"
            layer.k_scale_cache = views.get("k_scale_cache")
            layer.v_scale_cache = views.get("v_scale_cache")
        if "block_size" in message["integers"]:
            (views["block_size"],) = message["integers"]["block_size"]
        if "has_initial_state" in views:
            views["has_initial_state"] = self._arrays.flags(
                message["integers"]["has_initial_state"]
            )
        rows: list[int] = []
        if "rows" in views and not isinstance(self._arrays, _Plain):
            table, rows = views["block_table"], message["integers"]["rows"]
            views["block_table"] = table[rows]  # a copy
        try:
            result = getattr(self._object, function)(*(views[a] for a in _FUNCTIONS[function]))
            self._finish()
            if rows and (views["block_table"] != table[rows]).any():
                return {"fault": "it changed the block table"}
        except Exception as error:
            frames = error.__traceback__ and error.__traceback__.tb_next  # those of the class
            trace = "".join(traceback.format_exception(type(error), error, frames))
            what = f"{type(error).__name__}: {error}"
            return {"fault": encodable(what), "trace": encodable(trace)}
        if "output" in views:
            if fault := self._wrong(views["output"], result):
                return {"fault": fault}
            views["output"][...] = result.reshape(views["output"].shape)
            self._finish()
        return {}

    def _wrong(self, output: Any, result: Any) -> str:
        """Why Lockstep cannot use the result of a function; empty: it can."""
        if isinstance(self._arrays, _Plain):
            return "plain views have no results; leave attend, conv, ssm and delta out"
        shape = list(output.shape)
        expected = f"expected floats of shape {shape}"
        if not self._arrays.is_array(result):
            return f"it returned {type(result).__name__}; {expected}"
        is_shaped = list(result.shape) in (shape, [shape[0], math.prod(shape[1:])])
        if is_shaped and self._arrays.is_float(result):
            return ""
        dtype = str(result.dtype).removeprefix("torch.")
        return f"it returned {dtype} of shape {list(result.shape)}; {expected}"


def _reason(said: Any) -> str:
    """What declines() returned for a layer; empty: the class takes it."""
    if not isinstance(said, str | bool | None):
        raise protocol.Refused(f"declines returned {said!r}; expected why, True, or nothing")
    if isinstance(said, str):
        return encodable(said)
    return "the class declines the layer" if said else ""


def _class_of(named: str) -> Any:
    """The class of "module:Class" or "file.py:Class". Exits with one line."""
    place, _, name = named.rpartition(":")
    if not place or not name:
        _refuse(f"found {named!r}; expected module:Class or file.py:Class")
    sys.path.insert(0, os.getcwd())
    try:
        module = _module_of(place)
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)
        frames = [one for one in trace if one.filename[0] != "<"]
        at = f"{frames[-1].filename}:{frames[-1].lineno}; " if len(frames) > 2 else ""
        _refuse(
            f"{place} cannot be imported: {type(error).__name__}: {error} ({at}{sys.executable}; "
            "--engine-python names another interpreter)"
        )
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        _refuse(f"{place} has no class {name}")
    return found


def _module_of(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        _refuse(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))
    # Its own name: types.py and json.py are modules of Python, kernels.v2.py has a dot in its stem.
    name = "kernels_of_" + path.stem.replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # of a name that ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions_of(named: str, made: Any) -> list[str]:
    """The functions that the class has. Exits with one line if a signature does not match."""
    found = [name for name in _FUNCTIONS if callable(getattr(made, name, None))]
    if not found:
        _refuse(f"{named} has none of the functions {', '.join(_FUNCTIONS)}")
    if callable(getattr(made, "declines", None)):
        _check_signature(named, made, "declines", ("layer",))
    for name in found:
        _check_signature(named, made, name, _FUNCTIONS[name])
    return found


def _check_signature(named: str, made: Any, name: str, expected: tuple[str, ...]) -> None:
    function = getattr(made, name)
    is_bound = inspect.ismethod(function) or isinstance(
        inspect.getattr_static(made, name), staticmethod
    )
    try:
        inspect.signature(function).bind(*(() if is_bound else ("self",)), *expected)
    except TypeError as error:
        signature = f"{name}{inspect.signature(function)}"
        wanted = f"{name}({', '.join(expected)})"
        _refuse(f"{named}: {signature} does not take {wanted}: {error}")
    except ValueError:
        pass  # compiled code without a signature


def _refuse(why: str) -> None:
    print(why, file=sys.stderr)
    sys.exit(missing.EXIT_STATUS)


def main() -> None:
    source, sink = protocol.own_pipe()
    try:
        server = Server(sys.argv[1], on_gpu="--cuda" in sys.argv[2:])
    except ImportError as error:  # torch
        _refuse(
            f"needs {error.name}, which {sys.executable} does not have; name an interpreter with "
            "--engine-python"
        )
    protocol.serve(protocol.KERNELS, server, source, sink)


if __name__ == "__main__":
    main()
