"""Records what vLLM 0.33.0 plans for layers, as a line of a layout recording (layout_recording 2).

vLLM's own functions decide: the layout, the groups, the plan, the capacity, the block sizes, and
the views of both model runners on the CPU. Only the metadata builders are replaced: they need a
GPU and shape no memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.worker import utils as worker

Line = dict[str, Any]

TYPES = {
    "full": kv.FullAttentionSpec,
    "mla": kv.MLAAttentionSpec,
    "hidden_state": kv.HiddenStateCacheSpec,
    "rswa": kv.RSWASpec,
    "sink_full": kv.SinkFullAttentionSpec,
    "chunked_local": kv.ChunkedLocalAttentionSpec,
    "sliding_window": kv.SlidingWindowSpec,
    "sliding_window_mla": kv.SlidingWindowMLASpec,
    "circular_buffer": kv.CircularBufferSpec,
    "cross": kv.CrossAttentionSpec,
    "mamba": kv.MambaSpec,
}
NAMES = {cls: name for name, cls in TYPES.items()}
# Fields that a recorded spec always has.
_ALWAYS = {"block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "shapes", "dtypes",
           "mamba_type", "mamba_cache_mode", "num_speculative_blocks"}  # fmt: skip
_MAMBA_DEFAULTS = {"num_heads": 1, "tokens_per_state": -1}


@dataclass
class Layer:
    name: str
    spec: kv.KVCacheSpec | None
    backend: type | None
    backend_name: str


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, MultipleOf):
        return {"multiple_of": value.base}
    if isinstance(value, (kv.KVQuantMode,)):
        return value.name
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return getattr(value, "name", value).lower() if hasattr(value, "name") else value


_MAMBA_TYPES = {"MAMBA1": "mamba1", "MAMBA2": "mamba2", "SHORT_CONV": "short_conv",
                "LINEAR": "linear", "GDN_ATTN": "gdn_attn"}  # fmt: skip


def spec_record(spec: kv.KVCacheSpec) -> Line:
    record: Line = {"type": NAMES[type(spec)]}
    for entry in fields(spec):
        value = getattr(spec, entry.name)
        default = entry.default
        if entry.name == "dcp_sharded":
            default = isinstance(spec, kv.AttentionSpec)
        elif isinstance(spec, kv.MambaSpec) and entry.name in _MAMBA_DEFAULTS:
            continue
        if entry.name == "mamba_type":
            record["mamba_type"] = _MAMBA_TYPES.get(value.name, value.name.lower())
        elif entry.name in _ALWAYS or value != default:
            record[entry.name] = value.value if entry.name == "cache_role" else _plain(value)
    record["page_size_bytes"] = spec.page_size_bytes
    record["hnc"] = [
        spec.num_heads,
        1 if isinstance(spec, kv.MambaSpec) else spec.num_states,
        spec.state_content_size_bytes,
    ]
    if (stride := spec.get_block_stride_alignment()) != 1:
        record["stride_alignment_bytes"] = stride
    return record


class _Builder:
    """In the place of a backend's metadata builder."""

    requires_block_table_width = False
    _init_reorder_batch_threshold = None

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Holder:
    """A layer as far as the worker binds its cache: the view that it gets."""

    kv_cache: Any = None


class Recorder:
    """Plans for one set of layers under `config` (vLLM's, or what stands for it)."""

    def __init__(self, config: Any, layers: list[Layer], memory: int, asked: str | None,
                 stages: tuple[int, ...] = ()) -> None:  # fmt: skip
        """`stages`: layers with a cache of each pipeline stage."""
        self.config, self.layers, self.memory, self.asked = config, layers, memory, asked
        self.stages = stages
        self.specs: list[kv.KVCacheSpec] = []
        self.line: Line = {}

    def _index(self, spec: kv.KVCacheSpec) -> int:
        for i, known in enumerate(self.specs):
            if known == spec and known.is_draft == spec.is_draft:
                return i
        self.specs.append(spec)
        return len(self.specs) - 1

    def record(self, pools: tuple[int, ...]) -> Line:
        line = self.line
        entries = [[layer.name, None if layer.spec is None else self._index(layer.spec),
                    layer.backend_name] for layer in self.layers]  # fmt: skip
        line["specs_of_first_runner"] = "same"
        line["specs"] = [spec_record(spec) for spec in self.specs]
        line["layers"] = entries
        stage = "layout"
        try:
            self._layout()
            stage = "groups"
            named = [(layer.name, layer.spec) for layer in self.layers if layer.spec is not None]
            ends = [sum(self.stages[: i + 1]) for i in range(len(self.stages))] or [len(named)]
            workers = [dict(named[first:end])
                       for first, end in zip([0, *ends], ends, strict=False)]  # fmt: skip
            groups = planning.get_global_kv_cache_groups(self.config, workers)
            stage = "plan"
            memory = [self.memory] * len(workers)
            plans = planning.get_kv_cache_configs(self.config, workers, memory, groups)
        except Exception as error:  # vLLM refuses in many ways
            line["refused"] = {"stage": stage, "text": f"{type(error).__name__}: {error}"}
            return line
        self._plan(plans[0])
        if len(plans) > 1:
            line["plans_of_other_workers"] = [self._plan_record(plan) for plan in plans[1:]]
        if any(_has_foreign_tensor(plan) for plan in plans):
            line["defects"] = ["stage: a tensor of another worker's layers"]
        for count in pools:
            line["pools"][str(count)] = self._pool(plans[0], count)
        return line

    def _layout(self) -> None:
        backends: dict[str, type] = {}
        for layer in self.layers:
            if layer.backend is not None:
                backends.setdefault(layer.backend_name, layer.backend)
        distinct = list(dict.fromkeys(backends.values()))
        declared = {}
        for name, backend in backends.items():
            layouts = backend.supported_kv_cache_layouts()
            declared[name] = None if layouts is None else [one.name for one in layouts]
        supported = get_supported_kv_cache_layouts(distinct)
        self.line["layout"] = {"supported": [one.name for one in supported], "declared": declared}
        import vllm.envs as envs

        envs.VLLM_KV_CACHE_LAYOUT = self.asked
        chosen = resolve_kv_cache_layout(
            self.config, [[one.name for one in supported]],
            [layer.spec for layer in self.layers if layer.spec is not None])  # fmt: skip
        by = "option" if self.asked else "backends" if any(declared.values()) else "default"
        self.line["layout"] |= {"chosen": chosen.name, "by": by}

    def _group(self, group: kv.KVCacheGroupSpec) -> Line:
        record: Line = {"layers": list(group.layer_names)}
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            parts: list[Line] = []
            for name, one in spec.kv_cache_specs.items():
                index = self._spec_or_index(one)
                if parts and parts[-1]["spec"] == index:
                    parts[-1]["layers"].append(name)
                else:
                    parts.append({"spec": index, "layers": [name]})
            record["spec"] = {"type": "uniform_type", "block_size": spec.block_size,
                              "page_size_bytes": spec.page_size_bytes,
                              "dcp_sharded": spec.dcp_sharded, "parts": parts}  # fmt: skip
        else:
            record["spec"] = self._spec_or_index(spec)
        if group.is_eagle_group:
            record["is_eagle_group"] = True
        return record

    def _spec_or_index(self, spec: kv.KVCacheSpec) -> Any:
        record = spec_record(spec)
        for i, known in enumerate(self.line["specs"]):
            if known == record:
                return i
        return record

    def _plan_record(self, plan: kv.KVCacheConfig) -> Line:
        return {
            "num_blocks": plan.num_blocks,
            "groups": [self._group(group) for group in plan.kv_cache_groups],
            "tensors": [_tensor(tensor, True) for tensor in plan.kv_cache_tensors],
            "kv_tp_replicas": plan.kv_tp_replicas,
        }

    def _plan(self, plan: kv.KVCacheConfig) -> None:
        line = self.line
        line["plan"] = self._plan_record(plan)
        scheduler = utils.generate_scheduler_kv_cache_config([plan])
        line["needs_zeroing"] = scheduler.needs_kv_cache_zeroing
        line["pools"] = {}
        if not plan.kv_cache_groups:
            return
        tokens, concurrency = utils.get_kv_cache_capacity(self.config, scheduler)
        line["capacity"] = {"max_concurrency": concurrency, "tokens": tokens}
        cached = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_groups
                  if g.kv_cache_spec.prefix_cacheable]  # fmt: skip
        every = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_groups]
        self.config.cache_config.block_size = min(cached or every)
        try:
            scheduler_size, hash_size = utils.resolve_kv_cache_block_sizes(scheduler, self.config)
            hits = utils.resolve_cache_hit_alignment_tokens(
                scheduler, self.config, scheduler_size, hash_size)  # fmt: skip
        except Exception as error:
            line["block_sizes"] = {"refused": f"{type(error).__name__}: {error}"}
            return
        line["block_sizes"] = {"cache_config": self.config.cache_config.block_size,
                               "scheduler": scheduler_size, "hash": hash_size,
                               "hit_alignment": hits}  # fmt: skip

    def _pool(self, plan: kv.KVCacheConfig, count: int) -> Line:
        builder = planning.DefaultKVCacheConfigBuilder()
        override, cache = None, self.config.cache_config
        override, cache.num_gpu_blocks_override = cache.num_gpu_blocks_override, None
        try:
            small = builder.get_kv_cache_config_from_groups(
                self.config, plan.kv_cache_groups, count)  # fmt: skip
        finally:
            cache.num_gpu_blocks_override = override
        record: Line = {"tensors": [_tensor(one, False) for one in small.kv_cache_tensors],
                        "second_runner": "same"}  # fmt: skip
        try:
            record["first_runner"] = self._run(small)
        except Exception as error:
            record["first_runner"] = {"refused": f"{type(error).__name__}: {error}"}
        return record

    def _run(self, plan: kv.KVCacheConfig) -> Line:
        by_name = {layer.name: layer for layer in self.layers}
        groups: list[list[worker.AttentionGroup]] = []
        for g, group in enumerate(plan.kv_cache_groups):
            parts: dict[Any, worker.AttentionGroup] = {}
            for name in group.layer_names:
                spec = group.kv_cache_spec
                if isinstance(spec, kv.UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                backend = by_name[name].backend
                part = parts.setdefault(
                    (backend.full_cls_name(), spec), worker.AttentionGroup(backend, [], spec, g)
                )
                part.layer_names.append(name)
            groups.append(list(parts.values()))
        sizes = worker.prepare_kernel_block_sizes(plan, groups)
        for g, parts in enumerate(groups):
            for part in parts:
                self._build(part, sizes[g])
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        views = worker.allocate_kv_cache(plan, torch.device("cpu"), layout, sizes)
        every = [part for parts in groups for part in parts]
        bound = worker.map_kv_caches_to_kernel_blocks(views, every)
        record: Line = {"kernel_block_sizes": sizes,
                        "allocation_bytes": [plan.kv_cache_tensors[0].size]}  # fmt: skip
        if mapped := [part for part in every if part.kernel_block_size is not None]:
            record["kernel_block_groups"] = [
                {"group": part.kv_cache_group_id, "first": part.layer_names[0],
                 "kernel_block_size": part.kernel_block_size,
                 "kernel_block_stride": part.kernel_block_stride} for part in mapped]  # fmt: skip
        record["views"] = {}
        for name, view in views.items():
            record["views"][name] = {"page": _view(view)}
            if bound[name] is not view:
                record["views"][name]["bound"] = _view(bound[name])
        self._zero(every, sizes, bound, plan, record)
        return record

    def _build(self, part: worker.AttentionGroup, size: int) -> None:
        get_builder_cls = part.backend.get_builder_cls
        part.backend.get_builder_cls = staticmethod(lambda: _Builder)
        try:
            part.create_metadata_builders(self.config, torch.device("cpu"), size)
        finally:
            part.backend.get_builder_cls = get_builder_cls

    def _zero(self, every: list[Any], sizes: list[int], bound: Any, plan: Any,
              record: Line) -> None:  # fmt: skip
        holders = {}
        for name, view in bound.items():
            holders[name] = _Holder()
            holders[name].kv_cache = view
        try:
            zeroer = worker.KVBlockZeroer(torch.device("cpu"), every, sizes, holders,
                                          plan.num_blocks)  # fmt: skip
        except AssertionError as error:
            record["zero"] = {"refused": f"AssertionError: {error}"}
            return
        if zeroer._meta is None:
            return
        base = min(view.untyped_storage().data_ptr() for view in bound.values())
        segments = zip(*(t.tolist() for t in zeroer._meta[:3]), strict=True)
        rows = [[int(a) - base, int(s) * 4, int(p) * 4] for a, s, p in segments]
        text = "".join(f"{a},{s},{p}\n" for a, s, p in rows)
        record["zero"] = {"segments": len(rows), "first": rows[:4], "last": rows[-1],
                          "sha256": hashlib.sha256(text.encode()).hexdigest()[:32]}  # fmt: skip


def _has_foreign_tensor(plan: kv.KVCacheConfig) -> bool:
    own = {name for group in plan.kv_cache_groups for name in group.layer_names}
    return any(tensor.layers[0] not in own for tensor in plan.kv_cache_tensors)


def _tensor(tensor: kv.KVCacheTensor, named: bool) -> Line:
    record: Line = {"size": tensor.size}
    if named:
        record["layers"] = list(tensor.layers)
    return record | {"layer_stride": tensor.layer_stride, "block_stride": tensor.block_stride,
                     "offset": tensor.offset}  # fmt: skip


def _view(view: torch.Tensor) -> Line:
    item = view.element_size()
    last = view.storage_offset() + sum(
        (n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))  # fmt: skip
    return {"shape": list(view.shape), "stride": list(view.stride()),
            "offset": view.storage_offset(), "dtype": str(view.dtype).removeprefix("torch."),
            "bytes": [view.storage_offset() * item, (last + 1) * item]}  # fmt: skip


def bare_config(*, max_model_len: int, mamba_cache_mode: str = "none", dcp: int = 1, tp: int = 1,
                prefix_match_unit: int | None = None, prefix_caching: bool = True,
                disable_hybrid: bool = False, num_gpu_blocks_override: int | None = None,
                pp: int = 1, lookahead: int = 1, drops: bool | None = None) -> Any:  # fmt: skip
    """What the planner reads of a VllmConfig."""
    cache = SimpleNamespace(
        kv_cache_layout=None, num_gpu_blocks_override=num_gpu_blocks_override, block_size=16,
        prefix_match_unit=prefix_match_unit, enable_prefix_caching=prefix_caching,
        mamba_cache_mode=mamba_cache_mode, prefix_cache_retention_interval=None)  # fmt: skip
    cache.get_resolved_kv_cache_layout = lambda: kv.KVCacheLayout[cache.kv_cache_layout]
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(max_model_len=max_model_len, original_max_model_len=None,
                                     supports_kv_cache_grouping=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, decode_context_parallel_size=dcp),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=disable_hybrid, max_num_encoder_input_tokens=8192,
            max_num_seqs=4),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None if drops is None else SimpleNamespace(
            method="eagle3", use_eagle_block_drop=lambda: drops),
        kv_transfer_config=None, max_in_flight_tokens=8192 * pp,
        num_prefill_lookahead_tokens=lookahead,
        device_config=SimpleNamespace(device_type="cuda"))  # fmt: skip
