"""Triton's interpreter for vLLM's kernels: repaired where it differs from a compiled launch, and
watched by worker/bounds.py."""

from __future__ import annotations

import functools
import inspect
import math
import types
from typing import Any

from lockstep_engines.protocol import passes_on


def fix() -> None:
    """Comes before the first launch."""
    from triton.runtime.autotuner import Autotuner

    from lockstep_engines.worker import bounds as worker_bounds

    _fix_launches(worker_bounds)
    _wrap_around()
    _patch_language_once()
    _remember_facts()
    _watch_accesses(worker_bounds)
    # Nothing to time: the first configuration of a kernel is taken.
    Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]


def _fix_launches(bounds: Any) -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    function = interpreter.InterpretedFunction
    run, rewrite = function.run, function.rewrite

    class LoopIndex(int):
        """Compiled, the index of a loop is a tensor: it has to()."""

        def to(self, dtype: Any, **_: Any) -> Any:
            return interpreter._implicit_cvt(int(self)).to(dtype)

    @passes_on
    def run_with_grid(
        self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any
    ) -> Any:
        """A grid that is a function sees the arguments by name, and what it changes in them is
        what the kernel gets."""
        known = inspect.getfullargspec(self.fn).args
        named = {key: value for key, value in options.items() if key in known}
        bound = inspect.getcallargs(self.fn, *args, **named)
        if callable(grid):
            grid = grid(bound)
            args, options = (), bound
        bounds.begin(self.fn.__name__, bound)
        return run(self, *args, grid=tuple(grid), warmup=warmup, **options)

    def bind_language(self: Any) -> Any:
        """Builtins of the language that a module has given names of its own are reached too, and
        loops count in LoopIndex."""
        if self.fn in self.rewritten_fn:
            return self.rewritten_fn[self.fn]
        made = rewrite(self)
        scope = dict(made.__globals__)
        scope["range"] = lambda *bounds: map(LoopIndex, range(*bounds))
        for name, value in made.__globals__.items():
            if inspect.isfunction(value) and is_builtin(value):
                scope[name] = _with_semantic(value, interpreter.interpreter_semantic)
        bound = types.FunctionType(
            made.__code__, scope, made.__name__, made.__defaults__, made.__closure__
        )
        bound.__kwdefaults__, bound.__annotations__ = made.__kwdefaults__, made.__annotations__
        self.rewritten_fn[self.fn] = bound
        return bound

    function.run, function.rewrite = run_with_grid, bind_language


def _with_semantic(builtin: Any, semantic: Any) -> Any:
    return passes_on(lambda *args, **options: builtin(*args, **(options | {"_semantic": semantic})))


def _wrap_around() -> None:
    """Integers, as compiled; the interpreter asserts that they do not, a quarter of a step. An
    address that has wrapped around is out of bounds."""
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


class _Nothing:
    """To take back."""

    def restore(self) -> None: ...


def _patch_language_once() -> None:
    """The interpreter puts its builtins into the language at each launch and each call of a device
    function, and takes them out again: a third of a step. Nothing here compiles."""
    import triton.language as tl
    from triton.runtime import interpreter

    def sees_both() -> None: ...

    seen = types.FunctionType(sees_both.__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(seen)
    interpreter._patch_lang = lambda _: _Nothing()


def _remember_facts() -> None:
    """The interpreter derives shape and numpy type of each tensor, and the argument names of each
    kernel at each launch: a third of a step."""
    import triton.language as tl
    from triton.runtime import interpreter

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}
    get_np_dtype = interpreter._get_np_dtype
    find = inspect.getfullargspec

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        dims = type.shape if type.is_block() else ()
        if dims not in shapes:
            shapes[dims] = (tl.constexpr(math.prod(dims)), tl.tuple([*map(tl.constexpr, dims)]))
        self.numel, self.shape = shapes[dims]

    def dtype_of(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = get_np_dtype(dtype)
        return dtypes[dtype.name]

    tl.core.tensor.__init__ = init
    interpreter._get_np_dtype = dtype_of
    named = vars(inspect) | {"getfullargspec": functools.cache(find)}
    interpreter.inspect = types.SimpleNamespace(**named)


def _watch_accesses(bounds: Any) -> None:
    """Loads and stores of every form end in the masked ones; atomics have their own."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, change = builder.create_atomic_cas, builder.create_atomic_rmw

    def size_of(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    @passes_on
    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("reads", pointers.data, mask.data, size_of(pointers))
        return load(self, pointers, mask, *rest)

    @passes_on
    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("writes", pointers.data, mask.data, size_of(pointers))
        return store(self, pointers, value, mask, *rest)

    @passes_on
    def create_atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        everywhere = pointers.data == pointers.data
        bounds.check("exchanges", pointers.data, everywhere, size_of(pointers))
        return swap(self, pointers, *rest)

    @passes_on
    def create_atomic_rmw(
        self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        bounds.check("changes", pointers.data, mask.data, size_of(pointers))
        return change(self, operation, pointers, value, mask, *rest)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    builder.create_atomic_cas = create_atomic_cas
    builder.create_atomic_rmw = create_atomic_rmw
