"""CUDA kernels for rows: one launch packs all gradients of a unit, one copies all its gathered parameters out.

torch's operations on lists of tensors send the device a table of addresses before each kernel. That takes the host
longer than everything else it does for a unit, and costs a captured step one more copy each time. Here the table is
passed as launch arguments: it is planned at set-up (``planning/column_blocks``), and a step only fills in addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from shardwise.comm.dry_run import current_dry_run, is_dry
from shardwise.cuda_driver import Kernel, compile_kernels, pointers_to
from shardwise.engine.buffers import ElasticBuffer
from shardwise.planning.column_blocks import ColumnBlock
from shardwise.planning.layout import ceil_div

# As many as fit into a launch's arguments, which are limited to 4096 bytes.
_MOST_COLUMN_BLOCKS = 48
_NUM_THREADS = 256
# Limited, so that compute kernels can run beside these.
_MOST_THREAD_BLOCKS = 1056
# What each thread moves at a time, and how many times per tile at most.
_BYTES_A_THREAD = 16
_NUM_TURNS = 8

# A thread block processes tile after tile; a tile is a part of one rank's shard of one parameter.
_SOURCE = """
struct Block { long long start, length, filled, shard, numel, skip, full_start; unsigned first_tile, tiles_each; };
struct Blocks { long long row_numel; unsigned num_blocks, num_tiles, tile; Block all[48]; };
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

struct Tile { unsigned block; long long rank, begin, numel, there; };

// Which columns of which rank's row a tile is, and how many of them the parameter has elements for.
__device__ inline Tile find(const Blocks& blocks, unsigned number) {
    Tile tile;
    tile.block = 0;
    while (tile.block + 1 < blocks.num_blocks && number >= blocks.all[tile.block + 1].first_tile) ++tile.block;
    const Block& block = blocks.all[tile.block];
    const unsigned rank = (number - block.first_tile) / block.tiles_each;
    tile.rank = rank;
    tile.begin = (long long)(number - block.first_tile - rank * block.tiles_each) * blocks.tile;
    tile.numel = min((long long)blocks.tile, block.length - tile.begin);
    const long long left = min(block.filled, block.numel - tile.rank * block.shard - block.skip) - tile.begin;
    tile.there = max(0LL, min(left, tile.numel));
    return tile;
}

template <typename From, typename To>
__device__ void pack(To* rows, const Addresses& gradients, const Blocks& blocks) {
    for (unsigned number = blockIdx.x; number < blocks.num_tiles; number += gridDim.x) {
        const Tile tile = find(blocks, number);
        const Block& block = blocks.all[tile.block];
        const From* from = (const From*)gradients.of[tile.block];
        const long long there = from == nullptr ? 0 : tile.there;
        To* to = rows + tile.rank * blocks.row_numel + block.start + tile.begin;
        if (there) move(from + tile.rank * block.shard + block.skip + tile.begin, to, there);
        for (long long i = there + threadIdx.x; i < tile.numel; i += blockDim.x) to[i] = To(0);
    }
}

#define ARGUMENTS long long rows, const __grid_constant__ Addresses addresses, const __grid_constant__ Blocks blocks

extern "C" __global__ void pack_bytes(ARGUMENTS) {
    pack<unsigned char, unsigned char>((unsigned char*)rows, addresses, blocks);
}
extern "C" __global__ void pack_bfloat16(ARGUMENTS) { pack<Bfloat16, float>((float*)rows, addresses, blocks); }
extern "C" __global__ void pack_half(ARGUMENTS) { pack<Half, float>((float*)rows, addresses, blocks); }

extern "C" __global__ void copy_out(ARGUMENTS) {
    for (unsigned number = blockIdx.x; number < blocks.num_tiles; number += gridDim.x) {
        const Tile tile = find(blocks, number);
        const Block& block = blocks.all[tile.block];
        const unsigned char* row = (const unsigned char*)rows + tile.rank * blocks.row_numel;
        unsigned char* full = (unsigned char*)addresses.of[0] + block.full_start;
        move(row + block.start + tile.begin, full + tile.rank * block.shard + tile.begin, tile.there);
    }
}
"""
_NAMES = ("pack_bytes", "pack_bfloat16", "pack_half", "copy_out")


class _ColumnBlock(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("start", "length", "filled", "shard", "numel", "skip", "full_start")
        ),
        *((name, ctypes.c_uint32) for name in ("first_tile", "tiles_each")),
    ]


class _ColumnBlocks(ctypes.Structure):
    _fields_ = [
        ("row_numel", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("num_blocks", "num_tiles", "tile")),
        ("all", _ColumnBlock * _MOST_COLUMN_BLOCKS),
    ]


_Addresses = ctypes.c_int64 * _MOST_COLUMN_BLOCKS


class _Launch:
    """One launch of a kernel, for as many column blocks as fit into its arguments.

    ``itemsize`` is the size of the elements that the kernel moves; where it casts, the larger one.
    """

    def __init__(
        self, kernel: Kernel, blocks: Sequence[ColumnBlock], world: int, row_numel: int, itemsize: int
    ) -> None:
        self._kernel = kernel
        self._rows = ctypes.c_int64()
        self.addresses = _Addresses()
        self.members = [block.member for block in blocks]
        turn = _NUM_THREADS * _BYTES_A_THREAD // itemsize
        turns = ceil_div(world * sum(block.length for block in blocks), _MOST_THREAD_BLOCKS * turn)
        tile = turn * min(turns, _NUM_TURNS)
        made, num_tiles = [], 0
        for block in blocks:
            numbers = (block.start, block.length, block.filled, block.shard, block.numel, block.skip)
            tiles_each = ceil_div(block.length, tile)
            made.append(_ColumnBlock(*numbers, block.full_start, num_tiles, tiles_each))
            num_tiles += world * tiles_each
        table = (_ColumnBlock * _MOST_COLUMN_BLOCKS)(*made)
        self._blocks = _ColumnBlocks(row_numel, len(blocks), num_tiles, tile, table)
        self._num_thread_blocks = min(num_tiles, _MOST_THREAD_BLOCKS)
        self._arguments = pointers_to(self._rows, self.addresses, self._blocks)

    def run(self, rows_address: int) -> None:
        self._rows.value = rows_address
        self._kernel.launch(self._num_thread_blocks, _NUM_THREADS, self._arguments)


def can_compile(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device."""
    return _kernels(device) is not None


def _kernels(device: torch.device) -> dict[str, Kernel] | None:
    index = torch.cuda.current_device() if device.index is None else device.index
    return compile_kernels(_SOURCE, _NAMES, index)


def _launches(
    kernel: Kernel, blocks: Sequence[ColumnBlock], world: int, row_numel: int, itemsize: int
) -> list[_Launch]:
    return [
        _Launch(kernel, blocks[start : start + _MOST_COLUMN_BLOCKS], world, row_numel, itemsize)
        for start in range(0, len(blocks), _MOST_COLUMN_BLOCKS)
    ]


class PackKernel:
    """Casts, cuts and pads gradients into rows; writes zeros for a missing gradient."""

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
        # The usual dtype of gradients; stashed ones have the dtype of the rows.
        self._gradient_dtype = gradient_dtype

    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        dtype = self._gradient_dtype
        if dtype not in self._launches:
            dtype = self._dtype
        for gradient in gradients:
            if gradient is not None and gradient.dtype is not dtype:
                dtype = self._dtype
        rows_address = self._rows.data_ptr()
        for launch in self._launches[dtype]:
            addresses: list[ctypes.c_int64 | int] = []
            # alive: copies, until the kernel is launched
            copies = []
            for member in launch.members:
                gradient = gradients[member]
                # The kernel reads contiguous memory in ``dtype``. A tensor subclass may have no memory of its own, and
                # a tensor with a pending negation or conjugation other values.
                if gradient is not None and not (
                    type(gradient) is torch.Tensor
                    and gradient.dtype is dtype
                    and gradient.is_contiguous()
                    and not gradient.is_neg()
                    and not gradient.is_conj()
                ):
                    gradient = torch.empty(gradient.shape, dtype=dtype, device=gradient.device).copy_(
                        gradient
                    )
                    copies.append(gradient)
                addresses.append(0 if gradient is None else gradient.data_ptr())
            launch.addresses[: len(addresses)] = addresses
            launch.run(rows_address)


def plan_pack_kernel(
    blocks: Sequence[ColumnBlock],
    world: int,
    row_numel: int,
    rows: ElasticBuffer,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> PackKernel | DryPack | None:
    """Plans the kernel; None if the device has none."""
    if blocks and is_dry(rows.device):
        return DryPack(world * row_numel * dtype.itemsize)
    kernels = _kernels(rows.device) if blocks and rows.device.type == "cuda" else None
    if kernels is None:
        return None
    in_bytes = [block.scaled(dtype.itemsize) for block in blocks]
    launches = {
        dtype: _launches(kernels["pack_bytes"], in_bytes, world, row_numel * dtype.itemsize, itemsize=1)
    }
    if dtype == torch.float32 and gradient_dtype in _CASTS:
        cast = kernels[_CASTS[gradient_dtype]]
        launches[gradient_dtype] = _launches(cast, blocks, world, row_numel, dtype.itemsize)
    return PackKernel(launches, rows, dtype, gradient_dtype)


# Kernels that cast to float32, without loss.
_CASTS = {torch.bfloat16: "pack_bfloat16", torch.float16: "pack_half"}


class DryPack:
    """Stands for the kernel in a dry run."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        current_dry_run().moved("pack", present, self._num_bytes)


class CopyOutKernel:
    """Copies the rows of all ranks into the full parameters."""

    def __init__(self, launches: list[_Launch], rows: ElasticBuffer, full: ElasticBuffer) -> None:
        self._launches = launches
        self._rows = rows.tensor(torch.uint8, 0, (1,))
        self._full = full.tensor(torch.uint8, 0, (1,))

    def run(self) -> None:
        rows_address, full_address = self._rows.data_ptr(), self._full.data_ptr()
        for launch in self._launches:
            launch.addresses[0] = full_address
            launch.run(rows_address)


class DryCopyOut:
    """Stands for the kernel in a dry run."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def run(self) -> None:
        current_dry_run().moved("copy-out", (), self._num_bytes)


def plan_copy_out_kernel(
    blocks: Sequence[ColumnBlock], world: int, row_bytes: int, rows: ElasticBuffer, full: ElasticBuffer
) -> CopyOutKernel | DryCopyOut | None:
    """Plans the kernel; None if the device has none."""
    if blocks and is_dry(rows.device):
        return DryCopyOut(full.size_bytes)
    kernels = _kernels(rows.device) if blocks and rows.device.type == "cuda" else None
    if kernels is None:
        return None
    return CopyOutKernel(_launches(kernels["copy_out"], blocks, world, row_bytes, itemsize=1), rows, full)
