"""Kernels of our own for rows on a GPU: one launch packs all gradients of a unit, one copies all its parameters out.

torch's operations on lists of tensors send the device a table of addresses before each kernel. That takes the host
longer than all else it does for a unit, and a captured step a copy more at each place. Here the table goes with the
launch, as arguments: everything in it was decided beforehand (``plan/strips``), only addresses are filled in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from shardwise.cuda_driver import Kernel, compile_kernels, pointers_to
from shardwise.engine.buffers import ElasticBuffer
from shardwise.plan.spans import ceil_div
from shardwise.plan.strips import Strip

# As many as arguments have room for, which are 4096 bytes.
_MOST_STRIPS = 48
_NUM_THREADS = 256
# Compute needs room beside them. Small units are shared out among as many, large ones in tiles that are worth finding.
_MOST_THREAD_BLOCKS = 1056
# What each thread of a thread block moves at a time, and how often for a tile at most.
_BYTES_A_THREAD = 16
_NUM_TURNS = 8

# A thread block takes tile after tile; a tile is a part of one rank's share of one parameter.
_SOURCE = """
struct Strip { long long start, span, width, own, numel, skip, whole_start; unsigned first_tile, tiles_each; };
struct Strips { long long row_numel; unsigned num_strips, num_tiles, tile; Strip all[48]; };
struct Addresses { long long of[48]; };
struct Bfloat16 { unsigned short bits; };
struct Half { unsigned short bits; };

__device__ inline void convert(unsigned char from, unsigned char& to) { to = from; }
__device__ inline void convert(Bfloat16 from, float& to) { to = __uint_as_float((unsigned)from.bits << 16); }
__device__ inline void convert(Half from, float& to) { asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from.bits)); }

template <typename From, typename To>
__device__ void move(const From* __restrict__ from, To* __restrict__ to, long long numel) {
    constexpr int each = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
    struct alignas(sizeof(From) * each) Read { From all[each]; };
    struct alignas(sizeof(To) * each) Written { To all[each]; };
    long long done = 0;
    if ((unsigned long long)from % sizeof(Read) == 0 && (unsigned long long)to % sizeof(Written) == 0) {
        const Read* reads = (const Read*)from;
        Written* writes = (Written*)to;
        const long long num = numel / each;
        #pragma unroll 4
        for (long long i = threadIdx.x; i < num; i += blockDim.x) {
            const Read read = reads[i];
            Written written;
            #pragma unroll
            for (int j = 0; j < each; ++j) convert(read.all[j], written.all[j]);
            writes[i] = written;
        }
        done = num * each;
    }
    for (long long i = done + threadIdx.x; i < numel; i += blockDim.x) convert(from[i], to[i]);
}

struct Tile { unsigned strip; long long rank, begin, numel, there; };

// Which columns of which rank's row a tile is, and how many of them the parameter has elements for.
__device__ inline Tile find(const Strips& strips, unsigned number) {
    Tile tile;
    tile.strip = 0;
    while (tile.strip + 1 < strips.num_strips && number >= strips.all[tile.strip + 1].first_tile) ++tile.strip;
    const Strip& strip = strips.all[tile.strip];
    const unsigned rank = (number - strip.first_tile) / strip.tiles_each;
    tile.rank = rank;
    tile.begin = (long long)(number - strip.first_tile - rank * strip.tiles_each) * strips.tile;
    tile.numel = min((long long)strips.tile, strip.span - tile.begin);
    const long long left = min(strip.width, strip.numel - tile.rank * strip.own - strip.skip) - tile.begin;
    tile.there = max(0LL, min(left, tile.numel));
    return tile;
}

template <typename From, typename To>
__device__ void pack(To* rows, const Addresses& gradients, const Strips& strips) {
    for (unsigned number = blockIdx.x; number < strips.num_tiles; number += gridDim.x) {
        const Tile tile = find(strips, number);
        const Strip& strip = strips.all[tile.strip];
        const From* from = (const From*)gradients.of[tile.strip];
        const long long there = from == nullptr ? 0 : tile.there;
        To* to = rows + tile.rank * strips.row_numel + strip.start + tile.begin;
        if (there) move(from + tile.rank * strip.own + strip.skip + tile.begin, to, there);
        for (long long i = there + threadIdx.x; i < tile.numel; i += blockDim.x) to[i] = To(0);
    }
}

#define ARGUMENTS long long rows, const __grid_constant__ Addresses addresses, const __grid_constant__ Strips strips

extern "C" __global__ void pack_bytes(ARGUMENTS) {
    pack<unsigned char, unsigned char>((unsigned char*)rows, addresses, strips);
}
extern "C" __global__ void pack_bfloat16(ARGUMENTS) { pack<Bfloat16, float>((float*)rows, addresses, strips); }
extern "C" __global__ void pack_half(ARGUMENTS) { pack<Half, float>((float*)rows, addresses, strips); }

extern "C" __global__ void copy_out(ARGUMENTS) {
    for (unsigned number = blockIdx.x; number < strips.num_tiles; number += gridDim.x) {
        const Tile tile = find(strips, number);
        const Strip& strip = strips.all[tile.strip];
        const unsigned char* row = (const unsigned char*)rows + tile.rank * strips.row_numel;
        unsigned char* whole = (unsigned char*)addresses.of[0] + strip.whole_start;
        move(row + strip.start + tile.begin, whole + tile.rank * strip.own + tile.begin, tile.there);
    }
}
"""
_NAMES = ("pack_bytes", "pack_bfloat16", "pack_half", "copy_out")


class _Strip(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("start", "span", "width", "own", "numel", "skip", "whole_start")
        ),
        *((name, ctypes.c_uint32) for name in ("first_tile", "tiles_each")),
    ]


class _Strips(ctypes.Structure):
    _fields_ = [
        ("row_numel", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("num_strips", "num_tiles", "tile")),
        ("all", _Strip * _MOST_STRIPS),
    ]


_Addresses = ctypes.c_int64 * _MOST_STRIPS


class _Launch:
    """One launch for up to as many strips as its arguments have room for.

    ``itemsize`` is that of the elements which the kernel moves, the larger one where it casts.
    """

    def __init__(
        self, kernel: Kernel, strips: Sequence[Strip], world: int, row_numel: int, itemsize: int
    ) -> None:
        self._kernel = kernel
        self._rows = ctypes.c_int64()
        self.addresses = _Addresses()
        self.members = [strip.member for strip in strips]
        turn = _NUM_THREADS * _BYTES_A_THREAD // itemsize
        turns = ceil_div(world * sum(strip.span for strip in strips), _MOST_THREAD_BLOCKS * turn)
        tile = turn * min(turns, _NUM_TURNS)
        made, num_tiles = [], 0
        for strip in strips:
            numbers = (strip.start, strip.span, strip.width, strip.own, strip.numel, strip.skip)
            tiles_each = ceil_div(strip.span, tile)
            made.append(_Strip(*numbers, strip.whole_start, num_tiles, tiles_each))
            num_tiles += world * tiles_each
        self._strips = _Strips(row_numel, len(strips), num_tiles, tile, (_Strip * _MOST_STRIPS)(*made))
        self._num_thread_blocks = min(num_tiles, _MOST_THREAD_BLOCKS)
        self._arguments = pointers_to(self._rows, self.addresses, self._strips)

    def run(self, rows_address: int) -> None:
        self._rows.value = rows_address
        self._kernel.launch(self._num_thread_blocks, _NUM_THREADS, self._arguments)


def can_compile(device: torch.device) -> bool:
    """Whether there are kernels for this device."""
    return _kernels(device) is not None


def _kernels(device: torch.device) -> dict[str, Kernel] | None:
    index = torch.cuda.current_device() if device.index is None else device.index
    return compile_kernels(_SOURCE, _NAMES, index)


def _launches(
    kernel: Kernel, strips: Sequence[Strip], world: int, row_numel: int, itemsize: int
) -> list[_Launch]:
    return [
        _Launch(kernel, strips[start : start + _MOST_STRIPS], world, row_numel, itemsize)
        for start in range(0, len(strips), _MOST_STRIPS)
    ]


class PackKernel:
    """Packs gradients into rows: cast, cut and padded. A gradient that is missing is zeros."""

    def __init__(
        self,
        launches: dict[torch.dtype, list[_Launch]],
        rows: ElasticBuffer,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        self._launches = launches
        self._rows = rows.tensor(dtype, 0, (1,))
        self._dtype = dtype
        # What gradients usually have. Those put by from earlier backwards come in the rows' own dtype.
        self._gradient_dtype = gradient_dtype

    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        dtype = self._gradient_dtype
        if dtype not in self._launches or not _all_have(dtype, gradients):
            dtype = self._dtype
        rows_address = self._rows.data_ptr()
        for launch in self._launches[dtype]:
            # alive: copies of gradients that lie otherwise than their parameters, until the kernel is launched
            packed = [_in_order(gradients[member], dtype) for member in launch.members]
            launch.addresses[: len(packed)] = [
                0 if gradient is None else gradient.data_ptr() for gradient in packed
            ]
            launch.run(rows_address)


def _all_have(dtype: torch.dtype, gradients: list[torch.Tensor | None]) -> bool:
    return all(gradient is None or gradient.dtype is dtype for gradient in gradients)


def _in_order(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The gradient, element after element in memory, in ``dtype``."""
    if gradient is None or (gradient.dtype is dtype and gradient.is_contiguous()):
        return gradient
    return gradient.to(dtype).contiguous()


def plan_pack_kernel(
    strips: Sequence[Strip],
    world: int,
    row_numel: int,
    rows: ElasticBuffer,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> PackKernel | None:
    """None where there are no kernels."""
    kernels = _kernels(rows.device) if strips and rows.device.type == "cuda" else None
    if kernels is None:
        return None
    in_bytes = [strip.scaled(dtype.itemsize) for strip in strips]
    launches = {
        dtype: _launches(kernels["pack_bytes"], in_bytes, world, row_numel * dtype.itemsize, itemsize=1)
    }
    if dtype == torch.float32 and gradient_dtype in _CASTS:
        cast = kernels[_CASTS[gradient_dtype]]
        launches[gradient_dtype] = _launches(cast, strips, world, row_numel, dtype.itemsize)
    return PackKernel(launches, rows, dtype, gradient_dtype)


# What is cast to float32, without loss.
_CASTS = {torch.bfloat16: "pack_bfloat16", torch.float16: "pack_half"}


class CopyOutKernel:
    """Copies the rows of all ranks to the parameters' places."""

    def __init__(self, launches: list[_Launch], rows: ElasticBuffer, full: ElasticBuffer) -> None:
        self._launches = launches
        self._rows = rows.tensor(torch.uint8, 0, (1,))
        self._full = full.tensor(torch.uint8, 0, (1,))

    def run(self) -> None:
        rows_address, full_address = self._rows.data_ptr(), self._full.data_ptr()
        for launch in self._launches:
            launch.addresses[0] = full_address
            launch.run(rows_address)


def plan_copy_out_kernel(
    strips: Sequence[Strip], world: int, row_bytes: int, rows: ElasticBuffer, full: ElasticBuffer
) -> CopyOutKernel | None:
    """None where there are no kernels."""
    kernels = _kernels(rows.device) if strips and rows.device.type == "cuda" else None
    if kernels is None:
        return None
    return CopyOutKernel(_launches(kernels["copy_out"], strips, world, row_bytes, itemsize=1), rows, full)
