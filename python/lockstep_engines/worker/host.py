"""vLLM's GPU worker with the host as its device, and what it replaces in vLLM for that."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.rendezvous import register_rendezvous_handler
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends import triton_attn
from vllm.v1.worker import gpu_worker

from lockstep_engines.worker import layers as worker_layers
from lockstep_engines.worker import model as worker_model
from lockstep_engines.worker.device import inspect_models_in_this_process

INIT_METHOD = "lockstep://"  # of the process group of one rank


class HostWorker(gpu_worker.Worker):
    """vLLM's GPU worker; only its device is the host."""

    allocation: Any = None

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        gpu_worker.set_random_seed(self.model_config.seed)
        if hasattr(self, "_init_workspace_and_model_runner"):
            return self._init_workspace_and_model_runner()
        gpu_worker.init_workspace_manager(self.device, 1)
        if self.use_v2_model_runner:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        else:
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        """The context of vLLM's allocations: the cache goes into shared memory."""
        return self.allocation if tag == "kv_cache" else contextlib.nullcontext()


def patch_vllm() -> None:
    """Replaces what a worker without weights, files and ports cannot use. Later calls repeat it.

    - The rendezvous of the process group: one rank finds itself.
    - The inspection of model classes in a child process: it would not know our models.
    - The Triton kernel of attention: its arguments are compared, and it computes nothing.
    - The registry of models: it gets the model without weights, also under the names that vLLM
      gives to a draft model.
    """
    register_rendezvous_handler("lockstep", _rendezvous)
    inspect_models_in_this_process()
    triton_attn.unified_attention = worker_layers.take_down_attention
    for prefix in ("", "Eagle"):
        for made in (worker_model.ContentModel, worker_model.HybridContentModel):
            ModelRegistry.register_model(f"{prefix}Lockstep{made.__name__}", made)


def _rendezvous(*_: Any, **__: Any) -> Any:
    """A store of one rank, without a file or a port."""
    yield torch.distributed.HashStore(), 0, 1
