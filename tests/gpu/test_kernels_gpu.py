"""Our own kernels move the same bits as torch's operations: all dtypes, uneven shapes, gaps, missing gradients."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from shardwise import cuda_driver
from shardwise.engine import kernels
from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.gather.unit_gather import CopyBlocks
from shardwise.engine.kernels import CopyOutKernel, PackKernel, plan_copy_out_kernel, plan_pack_kernel
from shardwise.engine.reduce.reduce_plan import BlockwisePack, ContiguousPack
from shardwise.planning.column_blocks import (
    column_blocks_of_flat_packing,
    column_blocks_of_layout,
    column_blocks_of_packing,
)
from shardwise.planning.flat import FlatPacking, plan_flat
from shardwise.planning.layout import RowParam
from shardwise.planning.rows import RowsPacking, plan_rows
from shardwise.planning.slices import cut_into_slices
from shardwise.train import doctor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

SHAPES = {
    "a block": [(256, 256)] * 4 + [(704, 256)] * 2 + [(256, 704), (256,), (256,)],
    "uneven": [(7, 3), (1,), (8, 2), (0, 4), (5,), (16,), (333, 77), (2, 3)],
    "large": [(4099, 1023), (2048, 2048)],
    "many": [(index % 5 + 1, 3) for index in range(100)],
}
DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]


def cuda():
    return torch.device("cuda", torch.cuda.current_device())


def rows_of(num_bytes):
    rows = ElasticBuffer(num_bytes, cuda())
    rows.grow()
    return rows, rows.tensor(torch.uint8, 0, (num_bytes,))


def packed_by(pack, found, gradients):
    found.fill_(119)
    pack.fill(list(gradients), is_complete=all(gradient is not None for gradient in gradients))
    return found.clone()


def random_gradients(shapes, dtype):
    return [torch.randn(shape, device=cuda()).to(dtype) for shape in shapes]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("gradient_dtype", "dtype"), DTYPES)
def test_gradients_are_packed_as_block_by_block(name, gradient_dtype, dtype):
    shapes = SHAPES[name]
    for world in (1, 3, 8):
        params = [RowParam(shape, 0, "all", 4, dtype.itemsize) for shape in shapes]
        packing = RowsPacking(plan_rows(params, world))
        rows, found = rows_of(world * packing.row_numel * dtype.itemsize)
        kernel = plan_pack_kernel(
            column_blocks_of_packing(packing), world, packing.row_numel, rows, dtype, gradient_dtype
        )
        assert isinstance(kernel, PackKernel)
        blocks = BlockwisePack(packing, rows, dtype, len(shapes))
        gradients = random_gradients(shapes, gradient_dtype)
        transposed = [
            gradient.t().contiguous().t() if gradient.dim() == 2 else gradient for gradient in gradients
        ]
        some = [None if index % 3 == 1 else gradient for index, gradient in enumerate(gradients)]
        # As those that were put by come: wider than what backward gives, all or some of them.
        wider = random_gradients(shapes, torch.float32)
        mixed = [wider[index] if index % 2 else gradient for index, gradient in enumerate(some)]
        for given in (gradients, transposed, some, wider, mixed):
            assert torch.equal(packed_by(kernel, found, given), packed_by(blocks, found, given)), world


def pending(gradient):
    """The same values, not all of them in memory: two of its own, a negation, or a conjugation."""
    if gradient.is_complex():
        return gradient.conj_physical().conj()
    return torch._neg_view(-gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_gradients_whose_memory_has_other_values_are_packed(dtype):
    shapes, world = SHAPES["uneven"], 3
    params = [RowParam(shape, 0, "all", dtype.itemsize, dtype.itemsize) for shape in shapes]
    packing = RowsPacking(plan_rows(params, world))
    rows, found = rows_of(world * packing.row_numel * dtype.itemsize)
    blocks = column_blocks_of_packing(packing)
    kernel = plan_pack_kernel(blocks, world, packing.row_numel, rows, dtype, dtype)
    gradients = random_gradients(shapes, dtype)
    expected = packed_by(kernel, found, gradients)
    for given in (
        [TwoTensor(gradient, gradient.clone()) for gradient in gradients],
        [pending(gradient) for gradient in gradients],
    ):
        assert torch.equal(packed_by(kernel, found, given), expected)


@pytest.mark.parametrize("name", ["uneven", "large"])
def test_slices_are_packed_as_block_by_block(name):
    shapes, world = SHAPES[name], 3
    packing = RowsPacking(plan_rows([RowParam(shape, 0, "all", 4, 4) for shape in shapes], world))
    gradients = random_gradients(shapes, torch.bfloat16)
    for each in cut_into_slices(packing, packing.row_numel):
        rows, found = rows_of(world * each.row_numel * 4)
        blocks = column_blocks_of_packing(packing, each.columns)
        kernel = plan_pack_kernel(blocks, world, each.row_numel, rows, torch.float32, torch.bfloat16)
        blocks = BlockwisePack(each, rows, torch.float32, len(shapes))
        assert torch.equal(packed_by(kernel, found, gradients), packed_by(blocks, found, gradients))


@pytest.mark.parametrize("name", SHAPES)
def test_lines_are_packed_as_by_copies(name):
    shapes, world = SHAPES[name], 3
    packing = FlatPacking(
        plan_flat([RowParam(shape, 0, "all", 4, 4) for shape in shapes], world), range(len(shapes))
    )
    rows, found = rows_of(world * packing.row_numel * 4)
    gradients = random_gradients(shapes, torch.bfloat16)
    blocks = column_blocks_of_flat_packing(packing, [gradient.numel() for gradient in gradients])
    kernel = plan_pack_kernel(blocks, 1, world * packing.row_numel, rows, torch.float32, torch.bfloat16)
    copies = ContiguousPack(packing, rows, torch.float32, shapes)
    some = [None if index % 3 == 1 else gradient for index, gradient in enumerate(gradients)]
    for given in (gradients, some):
        assert torch.equal(packed_by(kernel, found, given), packed_by(copies, found, given))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_parameters_are_copied_out_as_block_by_block(name, world):
    kinds = [(torch.float32, "wide"), (torch.bfloat16, "narrow")]
    shapes = SHAPES[name]
    dtypes = [kinds[index % 2][0] for index in range(len(shapes))]
    params = [
        RowParam(shape, 0, kinds[index % 2][1], 4, dtypes[index].itemsize)
        for index, shape in enumerate(shapes)
    ]
    layout = plan_rows(params, world)
    rows, sent = rows_of(world * layout.sent_bytes)
    full, found = rows_of(layout.full_bytes)
    sent.copy_(torch.randint(1, 255, sent.shape, device=sent.device))
    kernel = plan_copy_out_kernel(column_blocks_of_layout(layout), world, layout.sent_bytes, rows, full)
    assert isinstance(kernel, CopyOutKernel)
    results = []
    for way in (kernel, CopyBlocks(layout, rows, full, dtypes)):
        found.zero_()
        way.run()
        results.append(found.clone())
    assert results[0].any()
    assert torch.equal(*results)


def test_kernels_follow_memory_that_moved_and_the_current_stream():
    shapes = SHAPES["a block"]
    packing = RowsPacking(plan_rows([RowParam(shape, 0, "all", 4, 4) for shape in shapes], 8))
    rows, found = rows_of(8 * packing.row_numel * 4)
    kernel = plan_pack_kernel(
        column_blocks_of_packing(packing), 8, packing.row_numel, rows, torch.float32, torch.bfloat16
    )
    gradients = random_gradients(shapes, torch.bfloat16)
    before = packed_by(kernel, found, gradients)
    rows.shrink()
    elsewhere = torch.empty(found.numel(), dtype=torch.uint8, device=cuda())
    rows.grow()
    assert torch.equal(packed_by(kernel, found, gradients), before)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        doubled = [gradient * 2 for gradient in gradients]
        after = packed_by(kernel, found, doubled)
    side.synchronize()
    assert torch.equal(after.view(torch.float32), before.view(torch.float32) * 2)
    del elsewhere


def test_a_launch_that_cannot_be_made_says_so():
    launch = kernels._kernels(cuda())["copy_out"]
    with pytest.raises(RuntimeError, match="CUDA error"):
        launch.launch(1, 100_000, None)


def test_without_a_compiler_torchs_operations_do_the_work():
    def missing():
        raise OSError("libnvrtc is not there")

    cuda_driver.compile_kernels.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "_compiler", missing)
        with pytest.warns(UserWarning, match="libnvrtc is not there"):
            assert not kernels.can_compile(cuda())
        layout = plan_rows([RowParam((8, 3), 0, "all", 4, 4)], 2)
        rows, _ = rows_of(2 * layout.sent_bytes)
        assert plan_copy_out_kernel(column_blocks_of_layout(layout), 2, layout.sent_bytes, rows, rows) is None
        found = doctor._check_kernels()
        assert found.good is None
        assert found.fix is not None
    cuda_driver.compile_kernels.cache_clear()
    assert doctor._check_kernels().good
