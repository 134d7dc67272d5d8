"""The cache of each layer of a model, from vLLM's own model classes: no weights, no GPU.

take_the_place_of_a_gpu() comes before anything imports torch or vLLM. The platform is vLLM's own
for CUDA and reports an H100. Compiled modules are empty; no kernel runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_engines import scratch
from lockstep_engines.worker import device as worker_device


class _Compiled(types.ModuleType):
    """A compiled module as an import needs it: its names exist and do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Compiled(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        return None


class _CompiledModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's compiled modules and packages of kernels or images that are not installed."""

    roots: tuple[str, ...] = ("cutlass", "deep_gemm")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root, last = name.partition(".")[0], name.rpartition(".")[2]
        is_compiled = root == "vllm" and ("_C" in last and last.startswith("_"))
        if is_compiled or root in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Compiled(spec.name)

    def exec_module(self, module: Any) -> None: ...


def _stand_in_for_operators(torch: Any, every: bool) -> None:
    """Compiled operators that report the device's features return true. `every`: the others also
    exist, and do nothing."""
    find = torch._ops._OpNamespace.__getattr__

    def found(namespace: Any, name: str) -> Any:
        try:
            return find(namespace, name)
        except AttributeError:
            if "supports" in name:
                return lambda *_: True
            if not every or name.startswith("__"):
                raise
            return _Compiled(name)

    torch._ops._OpNamespace.__getattr__ = found


def take_the_place_of_a_gpu() -> None:
    """Sets this process up, once. Replaces the device of torch, vLLM's platform, its inspection of
    model classes, and the modules and operators that only a build has."""
    if any(isinstance(finder, _CompiledModules) for finder in sys.meta_path):
        return
    os.environ.update(worker_device.ENVIRONMENT, VLLM_LOGGING_LEVEL="CRITICAL")
    modules = _CompiledModules()
    sys.meta_path.append(modules)
    import torch
    from torch.utils._device import _device_constructors

    _stand_in_for_operators(torch, every=False)
    _device_constructors()  # torch.device("meta") knows them by identity
    worker_device.replace_device(torch, capability=(9, 0), name="NVIDIA H100 80GB HBM3")
    import vllm.platforms as platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class H100(cuda.NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def set_device(cls, device: Any) -> None: ...

    platforms.current_platform = platforms._current_platform = H100()
    worker_device.inspect_models_in_this_process()
    modules.roots += ("torchvision",)  # transformers has looked for it
    import vllm._custom_ops  # noqa: F401, describes the operators that exist

    _stand_in_for_operators(torch, every=True)


@dataclass
class Layer:
    name: str
    backend: Any  # vLLM's class
    spec: Any  # vLLM's; None: keeps nothing of its own


@dataclass
class Layers:
    config: Any  # VllmConfig
    version: str  # vLLM's
    model_class: str
    supports_pp: bool
    layers: list[Layer] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # layers whose cache another layer reads


def _single_rank(config: Any) -> None:
    """The process groups of one rank, from which model classes read their sizes."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with scratch.folder() as folder, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


_TABLES = ("arange", "full", "linspace", "ones", "tensor")


def _on_no_device(torch: Any, computes_tables: bool) -> Any:
    """Tensors of the GPU are on torch's meta device. `computes_tables`: those of a few numbers are
    real, for the classes that read them while they are built."""
    from torch.overrides import TorchFunctionMode

    def moved(value: Any) -> Any:
        is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("meta") if is_device else value

    class NoDevice(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            options = {name: moved(value) for name, value in (kwargs or {}).items()}
            if isinstance(options.get("device"), int):  # the number of a GPU
                options["device"] = torch.device("meta")
            if computes_tables and getattr(function, "__name__", "") in _TABLES:
                options.setdefault("device", "cpu")
            return function(*map(moved, args), **options)

    return NoDevice()


def _built(config: Any) -> Any:
    """The model of `config`, without its weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    for computes_tables in (False, True):
        config.compilation_config.static_forward_context.clear()
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(dtype),
            torch.device("meta"),
            _on_no_device(torch, computes_tables),
        ):
            try:
                return initialize_model(config)
            except (NotImplementedError, RuntimeError) as error:
                if computes_tables or "meta" not in str(error):
                    raise
    raise AssertionError("unreachable")


# Keys that a configuration class of the model's own repository gives under vLLM's names.
_ALIASES = {
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
}


def _accept_configuration(folder: str) -> None:
    """A configuration class of the model's own repository is not loaded. Where vLLM has the
    model's class, a class with the file's keys replaces it."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    given = json.loads((Path(folder) / "config.json").read_text())
    kind, architectures = given.get("model_type"), given.get("architectures") or ()
    if kind is None or kind in CONFIG_MAPPING or kind in _CONFIG_REGISTRY:
        return
    if any(name in ModelRegistry.get_supported_archs() for name in architectures):
        names = {name: key for name, keys in _ALIASES.items() if name not in given
                 for key in keys if key in given}  # fmt: skip
        keys = {"model_type": kind, "attribute_map": names}
        AutoConfig.register(kind, type("PlainConfig", (PretrainedConfig,), keys))


def layers_of(folder: str) -> Layers:
    """The layers that vLLM builds for the folder of a config.json. Raises vLLM's own error for a
    configuration that it refuses."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import supports_pp
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import attn_utils

    _accept_configuration(folder)
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        disable_log_stats=True,
    ).create_engine_config()
    _single_rank(config)
    model = _built(config)
    current_platform.update_block_size_for_backend(config)
    made = Layers(config, vllm.__version__, type(model).__name__, supports_pp(type(model)))
    specs = attn_utils.get_kv_cache_spec(config)
    for name, layer in config.compilation_config.static_forward_context.items():
        if hasattr(layer, "get_attn_backend") and hasattr(layer, "get_kv_cache_spec"):
            backend = layer.get_attn_backend()
            made.layers.append(Layer(name, backend, specs.get(name)))
            if target := getattr(layer, "kv_sharing_target_layer_name", None):
                made.shared.append(target)
    return made


def described(folder: str) -> dict[str, Any]:
    """The model file of the folder's config.json, or {"refused": why}."""
    from lockstep_engines.vllm.model_file import NotInModelFiles, model_file

    take_the_place_of_a_gpu()
    try:
        return model_file(layers_of(folder), Path(folder).resolve().name)
    except NotInModelFiles as error:
        return {"refused": str(error)}
    except Exception as error:  # a refusal of the engine's own
        return {"refused": f"vLLM refuses it: {_sentence(error)}"}


def _sentence(error: Exception) -> str:
    """The first line of vLLM's message, without the lines that pydantic adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), lines[0] if lines
                else type(error).__name__)  # fmt: skip
    return said.removeprefix("Value error, ").split(" [type=")[0]
