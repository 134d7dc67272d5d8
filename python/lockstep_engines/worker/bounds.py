"""Every access of an interpreted kernel, checked against the memory of the kernel's arguments: the
storages of its arguments and the tensors that its addresses and tables of addresses point into. On
a GPU a stray access reads or overwrites what is there, without a report.

An access through the address of one argument that ends in another's memory is not seen.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from lockstep_engines.protocol import EngineFault


class OutOfBounds(EngineFault):
    """Raised before the access, which would crash the process or touch other data."""


@dataclass(frozen=True)
class Region:
    """`end`: after its last byte."""

    name: str
    first: int
    end: int


_launched: list[Region] = []  # of the kernel that runs
_integers: list[Any] = []  # its arguments that may hold addresses
_kernel = ""
_others: list[Region] = []  # memory of tensors that were alive when it was looked up
_pointed: list[Region] | None = None  # those of _others that _integers point into


def _region_of(name: str, tensor: torch.Tensor) -> Region:
    storage = tensor.untyped_storage()
    return Region(name, storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def begin(kernel: str, arguments: dict[str, Any]) -> None:
    """A launch, with its arguments by name."""
    global _kernel, _pointed
    _kernel, _pointed = kernel, None
    _launched.clear()
    _integers.clear()
    for name, value in arguments.items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().nbytes():
                _launched.append(_region_of(name, one))
                if one.dtype in (torch.int64, torch.uint64):
                    _integers.append(one)
            elif isinstance(one, int):
                _integers.append(one)


def check(verb: str, addresses: numpy.ndarray, mask: numpy.ndarray, size: int) -> None:
    """Checks accesses of `size` bytes at each unmasked address."""
    if not mask.all():
        addresses = addresses[mask != 0]  # integers, too
    if addresses.size == 0:
        return
    global _pointed
    first, end = int(addresses.min()), int(addresses.max()) + size
    for region in _launched:
        if region.first <= first and end <= region.end:
            return
    missed = _outside(addresses, size, _launched)
    if len(missed):
        if _pointed is None:
            _pointed = _pointed_into(_others)
        missed = _outside(missed, size, _pointed)
    if len(missed):
        _others[:] = _alive()
        _pointed = _pointed_into(_others)
        missed = _outside(missed, size, _pointed)
    if len(missed):
        raise OutOfBounds(f"{_kernel} {verb} {size} bytes {_place_of(int(missed[0]), size)}")


def _outside(addresses: numpy.ndarray, size: int, regions: list[Region]) -> numpy.ndarray:
    inside = numpy.zeros(addresses.shape, dtype=bool)
    for region in regions:
        if region.end - region.first >= size:
            last = numpy.uint64(region.end - size)
            inside |= (addresses >= numpy.uint64(region.first)) & (addresses <= last)
    return addresses[~inside]


def _pointed_into(regions: list[Region]) -> list[Region]:
    """The memory that an address among the kernel's arguments points into."""
    values = [numpy.asarray(one).reshape(-1).astype(numpy.int64) for one in _integers]
    addresses = numpy.sort(numpy.concatenate([*values, numpy.zeros(1, numpy.int64)]))
    firsts = numpy.searchsorted(addresses, [region.first for region in regions])
    ends = numpy.searchsorted(addresses, [region.end for region in regions])
    return [regions[index] for index in numpy.flatnonzero(firsts < ends)]


def _alive() -> list[Region]:
    """The memory of all tensors: addresses in a table are of tensors that live on."""
    found: dict[tuple[int, int], Region] = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.device.type == "cpu":
            region = _region_of("a tensor", one)
            found[region.first, region.end] = region
    return list(found.values())


def _place_of(address: int, size: int) -> str:
    """The place of an access, relative to the nearest memory."""

    def distance(region: Region) -> int:
        return max(region.first - address, address + size - region.end)

    nearest = min([*_launched, *_others], key=distance)
    if address < nearest.first:
        return f"{nearest.first - address} bytes before {nearest.name}"
    return f"{address - nearest.end} bytes past the end of {nearest.name}"
