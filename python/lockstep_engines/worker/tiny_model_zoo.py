"""Tiny shapes of vLLM's models, with random weights: worker/tiny_models.py."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
_STATES = {"mamba_cache_mode": "align"}


def _draw_weights(model: torch.nn.Module, offset_of_norms: float) -> None:
    """Weights of a size at which layers neither vanish nor explode; decays stay decays."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            drawn *= 0.3 if parameter.dim() > 1 else 0.1
            if "norm" in name and parameter.dim() == 1:
                drawn += offset_of_norms
            if name.endswith(".A"):
                drawn = -1.0 - drawn.abs()
            parameter.copy_(drawn.to(parameter.dtype))


@dataclass(frozen=True)
class TinyModel:
    """`config`: as of a model's config.json. `tolerance`: of the largest number of a row, or of 1.
    `num_blocks`: so few that requests are preempted; where blocks of states are too large for that,
    they are by a reset of the cache in step `reset_at`. `norms`: what a weight of a norm is
    near."""

    config: dict[str, Any]
    tolerance: float = 1e-4
    dtype: str = "float32"
    num_blocks: int = 11
    reset_at: int = -1
    norms: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # of the engine that shares memory
    without_experts: str = ""  # the module of a class that asks for some; their routing is compiled

    def prepare(self) -> None:
        if self.without_experts:
            module = importlib.import_module(self.without_experts)
            made = getattr(module, self.config["architectures"][0])
            made.set_moe_parameters = lambda _: None

    def draw_weights(self, model: torch.nn.Module) -> None:
        _draw_weights(model, self.norms)


def _tiny(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return _BASE | {"architectures": [architecture], "model_type": model_type} | more


_LINEAR = ["linear_attention"] * 3 + ["full_attention"]

ZOO: dict[str, TinyModel] = {
    "llama": TinyModel(_tiny("LlamaForCausalLM", "llama")),
    "gemma3": TinyModel(
        _tiny(
            "Gemma3ForCausalLM",
            "gemma3_text",
            num_hidden_layers=4,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=32,
            rope_local_base_freq=10000.0,
        ),
        norms=0.0,
        num_blocks=26,
    ),
    "lfm2": TinyModel(
        _tiny(
            "Lfm2ForCausalLM",
            "lfm2",
            num_hidden_layers=4,
            conv_L_cache=3,
            conv_bias=False,
            block_dim=64,
            block_ff_dim=64,
            conv_dim=64,
            conv_dim_out=64,
            norm_eps=1e-6,
            layer_types=["conv", "conv", "conv", "full_attention"],
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        ),
        options=_STATES,
        num_blocks=32,
    ),
    "bamba": TinyModel(
        _tiny(
            "BambaForCausalLM",
            "bamba",
            num_hidden_layers=4,
            attn_layer_indices=[1, 3],
            attn_rotary_emb=16,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            num_logits_to_keep=1,
        ),
        options=_STATES,
        num_blocks=20,
        reset_at=14,
    ),
    "falcon-h1": TinyModel(
        _tiny(
            "FalconH1ForCausalLM",
            "falcon_h1",
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=1,
            mamba_chunk_size=32,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            mamba_norm_before_gate=True,
            mamba_rms_norm=False,
            projectors_bias=False,
            attention_bias=False,
            mlp_bias=False,
            ssm_multipliers=[1.0] * 5,
            mlp_multipliers=[1.0, 1.0],
        ),
        options=_STATES,
        num_blocks=20,
        reset_at=14,
    ),
    "qwen3-next": TinyModel(
        _tiny(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            num_hidden_layers=4,
            layer_types=_LINEAR,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            num_experts=0,
            num_experts_per_tok=0,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            partial_rotary_factor=0.25,
            norm_topk_prob=True,
        ),
        tolerance=3e-2,
        dtype="float16",
        norms=0.0,
        options=_STATES,
        num_blocks=24,
        reset_at=14,
        without_experts="vllm.model_executor.models.qwen3_next",
    ),
}
