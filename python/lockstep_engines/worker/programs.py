"""Runs all programs of a launch at once in Triton's interpreter, which runs them one by one.

Every value has a leading axis of programs. Where programs diverge (a condition, the bound of a
loop), each group runs the kernel again from its start. Accesses that it has made already are not
repeated: their results come from a journal.

Invariants
(1) The data of a scalar has the shape (n,), the data of a block (n, *shape); n is the number of
    running programs, or 1 for a value that is the same in all of them.
(2) A program makes each of its accesses once, in program order. Accesses of different programs
    are not ordered, as on a GPU.
(3) An operation of the interpreter that this module does not support is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy

# Elementwise.
_ELEMENTWISE = frozenset(
    "addptr add and ashr bitcast ceil clampf cos erf exp exp2 fabs fadd fcmpOEQ fcmpOGE fcmpOGT "
    "fcmpOLE fcmpOLT fcmpONE fcmpUEQ fcmpUGE fcmpUGT fcmpULE fcmpULT fcmpUNE fdiv floor fma fmul "
    "fneg fp_ext fp_to_fp fp_to_si fp_to_ui fp_trunc frem fsub iabs icmpEQ icmpNE icmpSGE icmpSGT "
    "icmpSLE icmpSLT icmpUGE icmpUGT icmpULE icmpULT idiv int_cast int_to_ptr log log2 lshr "
    "maximumf maxnumf maxsi maxui minimumf minnumf minsi minui mul or precise_divf precise_sqrt "
    "ptr_to_int rsqrt sdiv select shl si_to_fp sin sqrt srem sub udiv ui_to_fp umulhi urem "
    "xor".split()
)
# On trailing axes, without values, or built from operations that are replaced here.
_KEPT = frozenset(
    "assert assume barrier descriptor_load descriptor_store dot get_num_programs load "
    "make_tensor_descriptor split store".split()
)
_ACCESSES = frozenset("masked_load masked_store atomic_cas atomic_rmw".split())
_MOST_PROGRAMS = 512  # per run, which bounds the memory of its values


class _Diverged(BaseException):
    """Not an Exception, which a device function would wrap."""

    def __init__(self, values: numpy.ndarray) -> None:
        super().__init__()
        _, first, group = numpy.unique(values, return_index=True, return_inverse=True)
        self.groups = [numpy.flatnonzero(group == one) for one in numpy.argsort(first)]


class _Run:
    """Programs that have not diverged yet."""

    def __init__(self, ids: numpy.ndarray, journal: list[Any]) -> None:
        self.ids = ids  # (3, n)
        self.journal = journal  # results of their accesses
        self.count = 0  # accesses since the kernel's start

    def part(self, programs: numpy.ndarray) -> _Run:
        journal = [one if one is None or len(one) == 1 else one[programs] for one in self.journal]
        return _Run(self.ids[:, programs], journal)


_run = _Run(numpy.zeros((3, 1), numpy.int32), [])


def run(kernel: Callable[[], Any], grid: tuple[int, int, int]) -> None:
    """Calls the kernel until all programs of the grid have finished."""
    global _run
    ids = numpy.indices(grid, numpy.int32).reshape(3, -1)
    starts = range(0, ids.shape[1], _MOST_PROGRAMS)
    waiting = [_Run(ids[:, start : start + _MOST_PROGRAMS], []) for start in reversed(starts)]
    while waiting:
        _run = waiting.pop()
        try:
            kernel()
        except _Diverged as diverged:
            waiting += [_run.part(group) for group in reversed(diverged.groups)]


def count() -> int:
    """Of running programs."""
    return int(_run.ids.shape[1])


def access(make: Callable[[], Any]) -> Any:
    """The result of an access, of shape (n, ...), or None: made now, or from the journal."""
    if _run.count == len(_run.journal):
        _run.journal.append(make())
    _run.count += 1
    return _run.journal[_run.count - 1]


def value_of(data: numpy.ndarray) -> Any:
    """The value of a scalar. Programs with different values diverge."""
    if data.size > 1 and (data != data[0]).any():
        raise _Diverged(data)
    return data[0].item()


def indices(start: Any, end: Any, step: Any) -> Iterator[Any]:
    """The indices of a loop over range(start, end, step), all of them tensors. Programs diverge by
    the number of iterations, not by the start."""
    first, last, stride = (one.handle.data for one in (start, end, step))
    widest = max((start, end, step), key=lambda one: one.dtype.primitive_bitwidth)
    make = type(start.handle)
    for iteration in range(value_of(numpy.maximum(0, -((first - last) // stride)))):
        data = (first + iteration * stride).astype(widest.handle.data.dtype)
        yield type(start)(make(data, widest.dtype), widest.dtype)


def change_interpreter() -> None:
    """Call it before the interpreter patches the language."""
    from triton.runtime import interpreter

    _change_operations(interpreter)
    _change_descriptors(interpreter)
    interpreter.ReduceOps, interpreter.ScanOps = _reductions(interpreter)


def change_tensors() -> None:
    """Call it afterwards."""
    import triton.language as tl
    from triton.runtime import interpreter

    def transposed(self: Any) -> Any:
        *rest, rows, columns = self.type.shape
        handle = interpreter.TensorHandle(self.handle.data.swapaxes(-1, -2), self.handle.dtype)
        return tl.core.tensor(handle, tl.core.block_type(self.dtype, [*rest, columns, rows]))

    def truth(self: Any) -> bool:
        """True for a block, as in the interpreter."""
        is_scalar = self.handle.data.size == len(self.handle.data)
        return not is_scalar or bool(value_of(self.handle.data.reshape(-1)))

    tensor = tl.core.tensor
    tensor.__index__ = lambda self: int(value_of(self.handle.data.reshape(-1)))
    tensor.__bool__, tensor.T = truth, property(transposed)


def _change_operations(interpreter: Any) -> None:
    int32 = interpreter.tl.int32

    def made(source: Any, data: numpy.ndarray) -> Any:
        return interpreter.TensorHandle(data, source.dtype.scalar)

    def get_program_id(self: Any, axis: int) -> Any:
        return interpreter.TensorHandle(_run.ids[axis], int32)

    def make_range(self: Any, type: Any, start: int, stop: int) -> Any:
        return interpreter.TensorHandle(numpy.arange(start, stop, dtype=numpy.int32)[None], int32)

    def splat(self: Any, type: Any, arg: Any) -> Any:
        data = arg.data.reshape(-1, *(1 for _ in type.shape))
        return broadcast(self, made(arg, data), type.shape)

    def broadcast(self: Any, arg: Any, shape: Any) -> Any:
        return made(arg, numpy.broadcast_to(arg.data, (len(arg.data), *shape)))

    def reshape(self: Any, arg: Any, shape: Any, allow_reorder: bool) -> Any:
        return made(arg, arg.data.reshape(len(arg.data), *shape))

    def trans(self: Any, arg: Any, order: Any) -> Any:
        return made(arg, arg.data.transpose(0, *(axis + 1 for axis in order)))

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        return made(arg, numpy.expand_dims(arg.data, _past_programs(axis)))

    def gather(self: Any, source: Any, indices: Any, axis: int) -> Any:
        both = _of_as_many(source.data, indices.data)
        return made(source, numpy.take_along_axis(*both, axis=_past_programs(axis)))

    def cat(self: Any, left: Any, right: Any) -> Any:
        return made(left, numpy.concatenate(_of_as_many(left.data, right.data), axis=1))

    def join(self: Any, left: Any, right: Any) -> Any:
        return made(left, numpy.stack(_of_as_many(left.data, right.data), axis=-1))

    def unsplat(self: Any, arg: Any) -> Any:
        return made(arg, arg.data.reshape(-1))

    def print_(self: Any, prefix: str, hexadecimal: bool, values: Any, is_signed: Any) -> None:
        for i, at in enumerate(_run.ids.T.tolist()):
            for value in values:
                data = value.data[i if len(value.data) > 1 else 0].tolist()
                shown = numpy.vectorize(hex)(data).tolist() if hexadecimal else data
                print(f"({', '.join(map(str, at))}){prefix}{shown}")

    changed = (get_program_id, make_range, splat, broadcast, reshape, trans, expand_dims, gather,
               cat, join, unsplat, print_)  # fmt: skip
    names = [operation.__name__.rstrip("_") for operation in changed]
    for name, operation in zip(names, changed, strict=True):
        setattr(interpreter.InterpreterBuilder, f"create_{name}", operation)
    known = {*names} | _ELEMENTWISE | _KEPT | _ACCESSES
    for name in vars(interpreter.InterpreterBuilder):
        if name.startswith("create_") and name.removeprefix("create_") not in known:
            setattr(interpreter.InterpreterBuilder, name, _refusal_of(name))


def _past_programs(axis: int) -> int:
    return axis + (axis >= 0)


def _refusal_of(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"Triton's interpreter: {name} for all programs of a launch")

    return refuse


def _of_as_many(*data: numpy.ndarray) -> list[numpy.ndarray]:
    """The values, repeated to the same number of programs."""
    most = max(map(len, data))
    return [numpy.broadcast_to(one, (most, *one.shape[1:])) for one in data]


def _change_descriptors(interpreter: Any) -> None:
    """Programs with different descriptors or offsets diverge."""
    descriptor = interpreter.TensorDescHandle
    validate, materialize = descriptor.validate, descriptor.materialize_pointers

    def same(handles: Any) -> list[Any]:
        for one in handles:
            value_of(one.data)
        return [interpreter.TensorHandle(one.data[:1], one.dtype) for one in handles]

    def validate_same(self: Any) -> None:
        (self.base,) = same([self.base])
        self.shape, self.strides = same(self.shape), same(self.strides)
        validate(self)

    def materialize_same(self: Any, offsets: Any) -> Any:
        pointers, mask = materialize(self, same(offsets))
        made = interpreter.TensorHandle
        return made(pointers.data[None], pointers.dtype), made(mask[None], interpreter.tl.int1)

    descriptor.validate, descriptor.materialize_pointers = validate_same, materialize_same


def _reductions(interpreter: Any) -> tuple[type, type]:
    """The interpreter's reductions and scans, past the axis of programs."""
    tl = interpreter.tl

    def of_axis(base: Any) -> Any:
        class OfAxis(base):
            axis: int | None
            combine_fn: Any
            keep_dims: bool

            def apply_impl(self, values: Any) -> Any:
                if self.axis is None:
                    values = [self.to_tensor(_flat(one), one.dtype) for one in values]
                self.axis = _past_programs(self.axis or 0)
                return super().apply_impl(tuple(values))

            def to_tensor(self, data: Any, dtype: Any) -> Any:
                data = data.astype(interpreter._get_np_dtype(dtype), copy=False)
                type = tl.block_type(dtype, [*data.shape[1:]]) if data.ndim > 1 else dtype
                return tl.core.tensor(interpreter.TensorHandle(data, dtype.scalar), type)

            def _combined(self, values: Any) -> list[list[numpy.ndarray]]:
                """Running results along the axis."""
                columns = [numpy.moveaxis(one.handle.data, self.axis, 0) for one in values]
                combined = [[column[0] for column in columns]]
                for i in range(1, len(columns[0])):
                    now = [*combined[-1], *(column[i] for column in columns)]
                    types = [one.dtype for one in values] * 2
                    tensors = map(self.to_tensor, now, types)
                    result = self.combine_fn.fn(*tensors)
                    parts = result if isinstance(result, tuple) else (result,)
                    combined.append([part.handle.data for part in parts])
                return combined

        return OfAxis

    class Reduction(of_axis(interpreter.ReduceOps)):  # type: ignore[misc]
        def generic_reduce(self, values: Any) -> Any:
            last = self._combined(values)[-1]
            if self.keep_dims:
                last = [numpy.expand_dims(one, self.axis) for one in last]
            return [self.to_tensor(data, one.dtype) for data, one in zip(last, values, strict=True)]

    class Scan(of_axis(interpreter.ScanOps)):  # type: ignore[misc]
        def generic_scan(self, values: Any) -> Any:
            columns = zip(*self._combined(values), strict=True)
            stacked = [numpy.stack(numpy.broadcast_arrays(*one), self.axis) for one in columns]
            return [
                self.to_tensor(data, one.dtype) for data, one in zip(stacked, values, strict=True)
            ]

    return Reduction, Scan


def _flat(tensor: Any) -> numpy.ndarray:
    return tensor.handle.data.reshape(len(tensor.handle.data), -1)
