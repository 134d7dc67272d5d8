"""Cache writes and attention of rows with their own scales, by the rules of docs/kernels.md, and
one planted defect."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))

from torch_kernels import Sdpa  # noqa: E402

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def nearest(x):
    """To integers, ties away from zero."""
    return torch.trunc(x + torch.copysign(torch.tensor(0.5), x))


def packed(codes):
    """Two codes of 4 bits per byte, the even one in the low half."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpacked(stored):
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2)


class RowScales(Sdpa):
    """Sound."""

    def declines(self, layer):
        return layer.kv_quant_mode != "nvfp4" and "token_head" not in layer.kv_quant_mode

    def write(self, layer, key, value, kv_cache, slot_mapping):
        is_token = slot_mapping >= 0
        slots, size = slot_mapping[is_token], kv_cache.shape[2]
        scales = layer.k_scale_cache, layer.v_scale_cache
        for cache, of_rows, rows in zip(kv_cache, scales, (key, value), strict=True):
            stored, scale = self.quantised(layer, cache, of_rows, rows[is_token].float())
            cache[slots // size, slots % size] = stored
            of_rows[slots // size, slots % size] = scale

    def quantised(self, layer, cache, of_rows, x):
        if of_rows.dim() == 4:
            return self.as_nvfp4(layer.k_scale, x)
        if cache.dtype == torch.uint8:
            return self.as_int4(x)
        top = 127 if cache.dtype == torch.int8 else 448
        scale = (x.abs().amax(-1) / top).clamp(min=1e-6)
        x = (x * (1 / scale)[..., None]).clamp(-top, top)
        return (nearest(x) if top == 127 else x).to(cache.dtype), scale

    def as_int4(self, x):
        low, high = x.amin(-1), x.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-6)
        zero = nearest(-low / scale).clamp(0, 15)
        codes = nearest(x * (1 / scale)[..., None] + zero[..., None]).clamp(0, 15)
        bits = scale.view(torch.int32) & ~15 | zero.to(torch.int32)
        return packed(codes), bits.view(torch.float32)

    def as_nvfp4(self, layer_scale, x):
        groups, inverse = x.unflatten(-1, (-1, 16)), 1 / layer_scale
        scale = inverse * (groups.abs().amax(-1) * (1 / 6))
        scale = scale.clamp(max=448).to(torch.float8_e4m3fn)
        factor = torch.where(scale.float() == 0, 0, 1 / (scale.float() * (1 / inverse)))
        y = groups * factor[..., None]
        above = torch.where(torch.arange(7) % 2 == 0, y.abs()[..., None] > TIES,
                            y.abs()[..., None] >= TIES)  # fmt: skip
        codes = above.sum(-1) | torch.signbit(y) * 8
        return packed(codes.flatten(-2)), scale

    def attend(self, layer, query, kv_cache, *rest):
        numbers = torch.stack(
            [
                self.numbers(layer, cache, scales)
                for cache, scales in zip(
                    kv_cache, (layer.k_scale_cache, layer.v_scale_cache), strict=True
                )
            ]
        )
        scale, layer.k_scale = layer.k_scale, 1.0
        output = super().attend(layer, query, numbers, *rest)
        layer.k_scale = scale
        return output

    def numbers(self, layer, cache, scales):
        if scales.dim() == 4:
            codes = unpacked(cache)
            x = E2M1[(codes & 7).long()] * torch.where(codes < 8, 1.0, -1.0)
            return (x.unflatten(-1, (-1, 16)) * scales.float()[..., None]).flatten(
                -2
            ) * layer.k_scale
        if cache.dtype == torch.uint8:
            bits = scales.contiguous().view(torch.int32)
            scale, zero = (bits & ~15).view(torch.float32), (bits & 15).float()
            return (unpacked(cache).float() - zero[..., None]) * scale[..., None]
        return cache.float() * scales[..., None]


class ScalesOfTheFirstHead(RowScales):
    def quantised(self, layer, cache, of_rows, x):
        stored, scale = super().quantised(layer, cache, of_rows, x)
        return stored, scale[:, :1].expand(scale.shape)
