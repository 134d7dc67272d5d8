"""Triton's interpreter for vLLM's kernels: repaired where it differs from a compiled launch, with
all programs at once (worker/programs.py), and with every access checked (worker/bounds.py)."""

from __future__ import annotations

import functools
import inspect
import math
import types
from typing import Any

import numpy

from lockstep_engines.protocol import passes_on
from lockstep_engines.worker import programs


def fix() -> None:
    """Comes before the first launch."""
    from triton.runtime.autotuner import Autotuner

    from lockstep_engines.worker import bounds as worker_bounds

    _fix_launches(worker_bounds)
    _wrap_around()
    programs.change_interpreter()
    _patch_language_once()
    programs.change_tensors()
    _remember_facts()
    _watch_accesses(worker_bounds)
    # Nothing to time: the first configuration of a kernel is taken.
    Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]


def _fix_launches(bounds: Any) -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    function = interpreter.InterpretedFunction
    rewrite = function.rewrite
    signature_of = functools.cache(inspect.signature)

    @functools.cache
    def constants_of(function: Any) -> Any:
        executor = interpreter.GridExecutor(function.fn, function.arg_names, ())
        return executor.constexprs

    class LoopIndex(int):
        """Compiled, the index of a loop is a tensor: it has to()."""

        def to(self, dtype: Any, **_: Any) -> Any:
            return interpreter._implicit_cvt(int(self)).to(dtype)

    def indices(*bounds: Any) -> Any:
        start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        to_tensor = interpreter.interpreter_semantic.to_tensor
        tensors = [to_tensor(one, False) for one in (start, end, step)]
        if any(len(one.handle.data) > 1 for one in tensors):
            return programs.indices(*tensors)
        return map(LoopIndex, range(start, end, step))

    @passes_on
    def run_all(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        """A grid that is a function receives the arguments by name and may change them. No storage
        is copied: all of it is on the host."""
        if warmup:
            return
        signature = signature_of(self.fn)
        named = {key: options[key] for key in options.keys() & signature.parameters.keys()}
        full = signature.bind(*args, **named)
        full.apply_defaults()
        bound = full.arguments
        if callable(grid):
            grid = grid(bound)
        for hook in self.pre_run_hooks:
            hook(**bound)
        bounds.begin(self.fn.__name__, bound)
        for name in bound.keys() - constants_of(self):
            bound[name] = interpreter._implicit_cvt(bound[name])
        grid = (*grid, 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*grid)
        try:
            programs.run(functools.partial(self.rewrite(), **bound), grid)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def bind_language(self: Any) -> Any:
        """Builtins that a module has imported under its own names are patched too, and the index of
        a loop is a LoopIndex or a tensor."""
        if self.fn in self.rewritten_fn:
            return self.rewritten_fn[self.fn]
        made = rewrite(self)
        scope = dict(made.__globals__)
        scope["range"] = indices
        for name, value in made.__globals__.items():
            if inspect.isfunction(value) and is_builtin(value):
                scope[name] = _with_semantic(value, interpreter.interpreter_semantic)
        bound = types.FunctionType(
            made.__code__, scope, made.__name__, made.__defaults__, made.__closure__
        )
        bound.__kwdefaults__, bound.__annotations__ = made.__kwdefaults__, made.__annotations__
        self.rewritten_fn[self.fn] = bound
        return bound

    function.run, function.rewrite = run_all, bind_language


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
    """Restores nothing: there are no patches to undo."""

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
    """The interpreter derives the type of each block, shape and numpy type of each tensor, and the
    types of the arguments of each launch: half of a step."""
    import triton.language as tl
    from triton.runtime import interpreter

    blocks: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}
    get_np_dtype = interpreter._get_np_dtype
    make_block = tl.core.block_type.__init__

    def new_block(cls: Any, element: Any, shape: Any) -> Any:
        dims = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
        key = cls, type(element), element.name, dims
        if key not in blocks:
            blocks[key] = object.__new__(cls)
            make_block(blocks[key], element, shape)
        return blocks[key]

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        try:
            self.numel, self.shape = type.lockstep_facts
        except AttributeError:
            dims = [*type.shape] if type.is_block() else []
            facts = tl.constexpr(math.prod(dims)), tl.tuple([*map(tl.constexpr, dims)])
            self.numel, self.shape = type.lockstep_facts = facts

    def dtype_of(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = get_np_dtype(dtype)
        return dtypes[dtype.name]

    tl.core.block_type.__new__, tl.core.block_type.__init__ = new_block, lambda *_: None
    tl.core.tensor.__init__ = init
    tl.str_to_ty = functools.cache(tl.str_to_ty)
    interpreter._get_np_dtype = dtype_of


def _watch_accesses(bounds: Any) -> None:
    """All loads and stores end in the masked ones; atomics are separate."""
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def watched(verb: str, create: Any, mask_at: int | None, is_atomic: bool = False) -> Any:
        @passes_on
        def made(self: Any, *operands: Any, **options: Any) -> Any:
            pointers = next(one for one in operands if isinstance(one, handle))
            element = pointers.get_element_ty()

            def make() -> Any:
                taken = _for_as_many(handle, operands, programs.count() if is_atomic else 1)
                addresses = next(one.data for one in taken if isinstance(one, handle))
                if mask_at is None:
                    mask = numpy.ones(addresses.shape, bool)
                else:
                    mask = taken[mask_at].data
                bounds.check(verb, addresses, mask, max(1, element.primitive_bitwidth // 8))
                result = create(self, *taken, **options)
                return None if result is None else result.data

            data = programs.access(make)
            return None if data is None else handle(data, element)

        return made

    builder.create_masked_load = watched("reads", builder.create_masked_load, 1)
    builder.create_masked_store = watched("writes", builder.create_masked_store, 2)
    builder.create_atomic_cas = watched("exchanges", builder.create_atomic_cas, None, True)
    builder.create_atomic_rmw = watched("changes", builder.create_atomic_rmw, 3, True)


def _for_as_many(handle: Any, operands: tuple[Any, ...], least: int) -> list[Any]:
    """The operands, with tensors of the same shape, contiguous, of `least` programs or more."""
    data = [one.data for one in operands if isinstance(one, handle)]
    first = data[0]
    if len(first) < least or any(one.shape != first.shape for one in data):
        ranks = numpy.empty((least, *(1 for _ in first.shape[1:])), bool)
        data = [*numpy.broadcast_arrays(*data, ranks)]
    left = iter(data)
    return [
        handle(numpy.ascontiguousarray(next(left)), one.dtype) if isinstance(one, handle) else one
        for one in operands
    ]
