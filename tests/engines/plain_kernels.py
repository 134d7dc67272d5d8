"""Cache writes without any package, and classes with one fault each, for tests of `--kernels`."""

import os
import struct


def _bytes_of(view):
    return {"int64": 8, "fp32": 4, "bf16": 2, "fp16": 2}.get(view.dtype, 1)


def _write(view, index, row):
    at = view.offset + sum(i * s for i, s in zip(index, view.strides, strict=False))
    view.memory[at : at + len(row)] = row


def _read(view, index):
    at = view.offset + sum(i * s for i, s in zip(index, view.strides, strict=False))
    return view.memory[at : at + view.shape[-1] * _bytes_of(view)]


def _slots(view):
    count = view.shape[0]
    return struct.unpack(f"<{count}q", view.memory[view.offset : view.offset + 8 * count])


class Sound:
    framework = "plain"

    def declines(self, layer):
        return "rows to quantise" if layer.kv_quant_mode != "none" else None

    def write(self, layer, key, value, kv_cache, slot_mapping):
        for part, rows in enumerate((key, value)):
            for token, slot in enumerate(_slots(slot_mapping)):
                if slot >= 0:
                    self.write_token(kv_cache, part, slot, rows, token)

    def write_token(self, kv_cache, part, slot, rows, token):
        block, offset = divmod(slot, kv_cache.shape[2])
        for head in range(rows.shape[1]):
            _write(kv_cache, (part, block, offset, head), _read(rows, (token, head)))


class Latent:
    framework = "plain"

    def write_latent(self, layer, key, kv_cache, slot_mapping):
        for token, slot in enumerate(_slots(slot_mapping)):
            if slot >= 0:
                _write(kv_cache, divmod(slot, kv_cache.shape[1]), _read(key, (token, 0)))


class WholeRows:
    """Rows of all heads of a token, as hidden states have them."""

    framework = "plain"

    def write_latent(self, layer, key, kv_cache, slot_mapping):
        row_bytes = kv_cache.shape[2] * _bytes_of(kv_cache)
        for token, slot in enumerate(_slots(slot_mapping)):
            row = b"".join(_read(key, (token, head)) for head in range(key.shape[1]))
            assert len(row) == row_bytes, f"{len(row)} bytes in a row of {row_bytes}"
            if slot >= 0:
                _write(kv_cache, divmod(slot, kv_cache.shape[1]), row)


def _integer(view, *index):
    assert all(i < n for i, n in zip(index, view.shape, strict=True)), f"{index} of {view.shape}"
    at = view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))
    return int.from_bytes(view.memory[at : at + view.strides[-1]], "little")


class MapsSlots(Sound):
    def begin_step(self, group, positions, batch_indices, block_table, block_size):
        count = range(positions.shape[0])
        self.tokens = [(_integer(batch_indices, i), _integer(positions, i)) for i in count]

    def map_slots(self, group, positions, batch_indices, block_table, block_size, slot_mapping):
        slots = [-1] * slot_mapping.shape[0]
        for i, (row, position) in enumerate(self.tokens):
            block = _integer(block_table, row, position // block_size)
            slots[i] = block * block_size + position % block_size
        packed = struct.pack(f"<{len(slots)}q", *slots)
        slot_mapping.memory[slot_mapping.offset : slot_mapping.offset + len(packed)] = packed


class MapsSlotsOfSixteen(MapsSlots):
    def map_slots(self, group, positions, batch_indices, block_table, block_size, slot_mapping):
        super().map_slots(group, positions, batch_indices, block_table, 16, slot_mapping)


class MapsSlotsBehindThePool(MapsSlots):
    """Has no write: the executor's kernels use its slots."""

    write = None

    def map_slots(self, group, positions, batch_indices, block_table, block_size, slot_mapping):
        view, count = slot_mapping, slot_mapping.shape[0]
        view.memory[view.offset : view.offset + 8 * count] = struct.pack("<q", 1 << 40) * count


class RaisesInMapSlots(MapsSlots):
    def map_slots(self, group, positions, batch_indices, block_table, block_size, slot_mapping):
        raise ValueError("no slots")


class SwapsParts(Sound):
    def write_token(self, kv_cache, part, slot, rows, token):
        super().write_token(kv_cache, 1 - part, slot, rows, token)


class HalvesBlocks(Sound):
    def write_token(self, kv_cache, part, slot, rows, token):
        block_size = kv_cache.shape[2] // 2
        slot = slot // block_size * kv_cache.shape[2] + slot % block_size
        super().write_token(kv_cache, part, slot % (8 * kv_cache.shape[2]), rows, token)


class WritesBeyond(Sound):
    def write(self, layer, key, value, kv_cache, slot_mapping):
        super().write(layer, key, value, kv_cache, slot_mapping)
        _write(kv_cache, (0, kv_cache.shape[1] - 1, 0, 0), b"x")


class Raises(Sound):
    def write(self, layer, key, value, kv_cache, slot_mapping):
        if layer.index == 1:
            raise ValueError(f"no kernel for {layer.name}")
        super().write(layer, key, value, kv_cache, slot_mapping)


class RaisesNoUtf8(Sound):
    def write(self, layer, key, value, kv_cache, slot_mapping):
        raise ValueError("no kernel for \udcff")


class Asks(Sound):
    def write(self, layer, key, value, kv_cache, slot_mapping):
        input("continue? ")


class Dies(Sound):
    def write(self, layer, key, value, kv_cache, slot_mapping):
        os._exit(3)


class Attends(Sound):
    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        return 0


class TakesTwo:
    framework = "plain"

    def write(self, key, value): ...


class DeclinesAll(Sound):
    def declines(self, layer):
        return True


class DeclinesTheSecond(Sound):
    def declines(self, layer):
        return layer.name == "layers.1"


class DeclinesByDtype(Sound):
    def declines(self, layer):
        return f"elements of {layer.dtype}"


class DeclinesByException(Sound):
    def declines(self, layer):
        return layer.no_such_field


class DeclinesNothing(Sound):
    def declines(self): ...


class NeedsMore(Sound):
    def __init__(self, more): ...


class DeclinesByNumber(Sound):
    def declines(self, layer):
        return 7


class OfNoFramework(Sound):
    framework = "jax"


class HasNone:
    framework = "plain"


class QueriesOfBf16(Sound):
    query_dtype = "bf16"


class QueriesOfFp16(Sound):
    query_dtype = "fp16"


class QueriesOfInt8(Sound):
    query_dtype = "int8"
