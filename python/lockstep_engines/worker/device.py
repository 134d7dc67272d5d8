"""A device for vLLM's GPU worker on a machine without one: memory of the host, and Triton's
interpreter for vLLM's kernels.

take_the_place_of_cuda() comes before anything imports torch or vLLM. What only a CUDA device has
(streams, events, pinned memory) becomes an object that does nothing: here everything runs in the
order in which it is issued. vLLM's code is unedited: its platform is neither CUDA nor a CPU, so it
takes the branches of a GPU.
"""

from __future__ import annotations

import os
from typing import Any

from lockstep_engines.protocol import passes_on
from lockstep_engines.worker import interpreter as worker_interpreter

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
_platforms: list[Any] = []  # of this process, once it is set up


class _Idle:
    """A stream or an event: there is nothing to wait for."""

    cuda_stream = 0
    device: Any = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    record = synchronize = wait = wait_stream = wait_event = _nothing

    def record_event(self, *_: Any, **__: Any) -> _Idle:
        return _Idle()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _replace_streams(torch: Any) -> None:
    idle, nothing = _Idle(), _Idle()._nothing
    _Idle.device = torch.device("cpu")
    for module in (torch, torch.cuda):
        module.Event = module.Stream = _Idle
    torch.cuda.current_stream = torch.accelerator.current_stream = lambda *_, **__: idle
    torch.cuda.stream = lambda stream: idle
    torch.cuda.set_stream = torch.accelerator.set_stream = nothing
    torch.cuda.synchronize = torch.accelerator.synchronize = nothing
    torch.cuda.empty_cache = torch.accelerator.empty_cache = nothing
    torch.Tensor.record_stream = nothing
    torch.accelerator.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0


def _replace_pinned_memory(torch: Any) -> None:
    """Pinning asks a CUDA driver; the memory is the host's with and without."""

    def unpinned(make: Any) -> Any:
        @passes_on
        def made(*args: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return make(*args, **options)

        return made

    makers = "empty empty_like empty_strided full full_like ones tensor zeros zeros_like".split()
    for name in makers:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


def replace_device(torch: Any, capability: tuple[int, int], name: str) -> None:
    """torch's CUDA device: it has this capability and name, and its memory is the host's."""
    _replace_streams(torch)
    _replace_pinned_memory(torch)
    torch.cuda.get_device_capability = lambda *_, **__: capability
    torch.cuda.get_device_name = lambda *_, **__: name


def _make_platform(torch: Any) -> Any:
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class HostPlatform(Platform):
        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        dispatch_key = "CPU"
        dist_backend = "gloo"
        simple_compile_backend = "eager"
        supported_quantization: list[str] = []
        # Of the current case: attention, and MLA.
        attention_backends = ("vllm.v1.attention.backends.triton_attn.TritonAttentionBackend", "")

        worker_class = "vllm.v1.worker.gpu_worker.Worker"
        supported_dtypes = [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "lockstep"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 1 << 34

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(8, 0)

        @classmethod
        def set_device(cls, device: Any) -> None: ...

        @classmethod
        def manual_seed_all(cls, seed: int) -> None: ...

        @classmethod
        def inference_mode(cls) -> Any:
            return torch.no_grad()

        @classmethod
        def import_kernels(cls) -> None:
            """There is no compiled extension."""

        @classmethod
        def get_current_memory_usage(cls, device: Any = None) -> float:
            return 0.0

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 8

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def support_hybrid_kv_cache(cls) -> bool:
            return True

        @classmethod
        def check_if_supports_dtype(cls, dtype: Any) -> None: ...

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            module = "vllm.distributed.device_communicators.base_device_communicator"
            return f"{module}.DeviceCommunicatorBase"

        @classmethod
        def get_punica_wrapper(cls) -> str:
            return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

        @classmethod
        def check_runner_kv_caches_multi_layer(cls) -> None: ...

        @classmethod
        def get_attn_backend_cls(cls, selected: Any, attn_selector_config: Any, **_: Any) -> str:
            own = cls.attention_backends[bool(attn_selector_config.use_mla)]
            return own if selected is None else selected.get_path()

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            from vllm.config import CompilationMode, CUDAGraphMode

            vllm_config.parallel_config.worker_cls = cls.worker_class
            compilation = vllm_config.compilation_config
            compilation.mode = CompilationMode.NONE
            compilation.cudagraph_mode = CUDAGraphMode.NONE
            compilation.cudagraph_capture_sizes = []

    return HostPlatform()


def inspect_models_in_this_process() -> None:
    """Replaces vLLM's inspection of a model class in a child process, where nothing is set up."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def take_the_place_of_cuda(runner: str) -> Any:
    """Sets this process up, once, for a worker of runner "v1" or "v2"; returns the platform.
    Replaces the device of torch, Triton's launches, vLLM's platform, and its views of pinned
    memory."""
    os.environ.update(ENVIRONMENT, TRITON_INTERPRET="1")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    if _platforms:
        return _platforms[0]
    import torch

    replace_device(torch, capability=(8, 0), name="lockstep")
    worker_interpreter.fix()
    import vllm.platforms

    platform = _make_platform(torch)
    vllm.platforms.current_platform = platform
    # A device reads the host's memory through an address of its own, which here is the host's.
    from vllm.utils import platform_utils, torch_utils

    platform_utils.is_uva_available = lambda: True
    torch_utils.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    torch.set_num_threads(1)
    _platforms.append(platform)
    return platform
