"""The memory of a case: vLLM's plan of it, the buffers in a file that Lockstep maps too, and the
place of every layer in them."""

from __future__ import annotations

import importlib.util
import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.core import kv_cache_utils

from lockstep_engines.protocol import EngineFault, Refused, passes_on
from lockstep_engines.worker.layers import Layer, ModelLayer


class SharedMemory(TorchFunctionMode):
    """Within it, vLLM's buffers of the cache are parts of a mapped file. A buffer is recognized by
    its call: zeros of bytes, as many as the plan says."""

    def __init__(self, path: str, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = list(sizes)
        with open(path, "r+b") as file:
            file.truncate(max(1, sum(sizes)))
            self._map = mmap.mmap(file.fileno(), max(1, sum(sizes)))
        self.first_byte = torch.frombuffer(self._map, dtype=torch.int8).data_ptr()
        self._used = 0

    @passes_on
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if args and isinstance(args[0], int) else None
        makes_zeros = getattr(func, "__name__", "") == "zeros"
        if makes_zeros and kwargs.get("dtype") == torch.int8 and size in self._sizes:
            self._sizes.remove(size)
            first, self._used = self._used, self._used + size
            # Its own storage: vLLM counts the offset of a view from the start of the storage.
            made = torch.frombuffer(self._map, dtype=torch.int8, count=size, offset=first)
            return made.zero_()
        return func(*args, **kwargs)

    def check_used_up(self) -> None:
        if self._sizes:
            raise EngineFault(f"vLLM never allocated buffers of {self._sizes} bytes")


def plan(worker: Any, vllm_config: Any, groups: list[Any], num_blocks: int) -> Any:
    """vLLM's KVCacheConfig for these groups. Raises Refused where it plans other blocks."""
    planning: Any = kv_cache_utils
    if importlib.util.find_spec("vllm.v1.core.kv_cache_planning"):  # since 0.33.0
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks_override = num_blocks
    if hasattr(cache_config, "get_resolved_kv_cache_layout"):
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

        specs = [spec for group in groups for spec in _specs_in(group)]
        resolve_kv_cache_layout(vllm_config, [worker.get_supported_kv_cache_layouts()], specs)
    made = planning.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    if made.num_blocks != num_blocks:
        raise Refused(f"vLLM plans {made.num_blocks} blocks instead of {num_blocks}")
    specs = [spec for group in groups for spec in _specs_in(group)]
    if any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs):
        _set_hash_sizes(vllm_config, made)
    return made


def _set_hash_sizes(vllm_config: Any, made: Any) -> None:
    """As vLLM's engine core sets them: prefills export states where hits can begin."""
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(made, vllm_config)
    made.hash_block_size = sizes[1]
    made.cache_hit_alignment_tokens = kv_cache_utils.resolve_cache_hit_alignment_tokens(
        made, vllm_config, *sizes
    )


def _specs_in(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def buffer_sizes(kv_config: Any) -> list[int]:
    """One buffer for all tensors, or one for each; in bytes."""
    tensors = kv_config.kv_cache_tensors
    if tensors and hasattr(tensors[0], "layer_stride"):
        return [tensors[0].size]
    return [tensor.size for tensor in tensors]


def _pages(kv_config: Any) -> dict[str, tuple[int, int]]:
    """Per layer: the offset of the first block's page, and the distance to the next page."""
    pages: dict[str, tuple[int, int]] = {}
    offset = 0
    for tensor in kv_config.kv_cache_tensors:
        if hasattr(tensor, "layer_stride"):
            for i, name in enumerate(tensor.layers):
                pages[name] = (tensor.offset + i * tensor.layer_stride, tensor.block_stride)
            continue
        for name in tensor.shared_by:
            pages[name] = (offset, tensor.size // kv_config.num_blocks)
        offset += tensor.size
    return pages


def description(
    kv_config: Any, order: str, kinds: list[ModelLayer], first_byte: int
) -> dict[str, Any]:
    """The reply to `open`: the size of the memory, and the offset of every layer's KV entries and
    recurrent states in it, in bytes."""
    pages = _pages(kv_config)
    layers = []
    for kind in kinds:
        offset, stride = pages[kind.layer.name]
        layer = {"name": kind.layer.name, "page_offset": offset, "page_stride": stride}
        layer["parts"] = [_part(kind.layer, tensor, first_byte) for tensor in kind.parts()]
        if states := kind.states():
            layer["states"] = [_state(kind.layer, state, first_byte) for state in states]
        layers.append(layer)
    return {"bytes": sum(buffer_sizes(kv_config)), "order": order, "layers": layers}


def _part(layer: Layer, tensor: torch.Tensor, first_byte: int) -> dict[str, Any]:
    size = tensor.element_size()
    if tensor.stride(3) != 1:
        raise Refused(f"{layer.name}: elements of a row are not contiguous")
    return {
        "offset": tensor.data_ptr() - first_byte,
        "shape": [*tensor.shape[:3], tensor.shape[3] * size],
        "stride": [stride * size for stride in tensor.stride()[:3]],
    }


def _state(layer: Layer, state: torch.Tensor, first_byte: int) -> dict[str, Any]:
    if not state[0].is_contiguous():
        raise Refused(f"{layer.name}: elements of a state are not contiguous")
    return {
        "offset": state.data_ptr() - first_byte,
        "shape": [len(state), state[0].nbytes],
        "stride": state.stride(0) * state.element_size(),
    }
