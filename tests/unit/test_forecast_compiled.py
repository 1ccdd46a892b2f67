"""Compiled blocks in a plan: what is one kernel, what is kept for backward, and that nothing else changes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import MixedPrecisionPolicy

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ROWS, WIDTH = 512, 256


class Gated(nn.Module):
    """A norm, and a gated pair of matrix products."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def planned(model=lambda: nn.Sequential(*(Gated() for _ in range(3))), **settings):
    inputs = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    options = {"ranks": 4, "mp_policy": MIXED, "optimizer": None, "loss": lambda out: out.float().sum()}
    return shardwise.plan(model, inputs, **{**options, **settings})


def ops_of(plan):
    begins = plan.rehearsal.steps[-1]
    return [entry for entry in plan.rehearsal.tape[begins:] if type(entry).__name__ == "Op"]


def test_neighbours_are_one_kernel_that_reads_its_inputs_once():
    fused = [op for op in ops_of(planned(compile=True)) if op.name == "fused"]
    wide, narrow = 2 * ROWS * 4 * WIDTH, 2 * ROWS * WIDTH
    # Forward of a block: the norm; the gate; the sum. The norm also writes a number a row, and reads its weight.
    norm, gate, last = fused[:3]
    assert 2 * narrow <= norm.num_bytes <= 2 * narrow + 4 * ROWS + 4 * WIDTH
    assert gate.num_bytes == 3 * wide
    assert last.num_bytes == 3 * narrow
    # Backward of the gate: its two inputs and the gradient are read, two gradients are written.
    assert sum(op.num_bytes == 5 * wide for op in fused) == 3


def test_compiled_blocks_keep_less_and_compute_the_same_products():
    eager, compiled = planned(), planned(compile=True)
    assert compiled.step.flops == eager.step.flops
    assert compiled.memory.by_kind["activations"] < eager.memory.by_kind["activations"]
    assert compiled.step.by_kind["elementwise"] < eager.step.by_kind["elementwise"]
    assert compiled.rehearsal.trace == eager.rehearsal.trace


def test_a_model_is_predicted_alike_however_often_it_was_compiled():
    # torch keeps eight versions of a function, and runs it as it is from then on.
    assert len({planned(compile=True).memory.allocated for _ in range(9)}) == 1


def test_a_models_own_calls_of_the_compiler_count_as_the_setting_does():
    def compiled_by_itself():
        model = nn.Sequential(*(Gated() for _ in range(3)))
        for block in model:
            block.compile()
        return model

    compile_ = torch.compile
    own, set_ = planned(compiled_by_itself), planned(compile=True)
    assert [op.name for op in ops_of(own)] == [op.name for op in ops_of(set_)]
    assert own.memory == set_.memory
    assert torch.compile is compile_


class Recomputing(Gated):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_recomputation_within_what_is_compiled_is_the_partitioners():
    kept, recomputed = (
        planned(compile=True),
        planned(lambda: nn.Sequential(*(Recomputing() for _ in range(3))), compile=True),
    )
    assert recomputed.memory.by_kind["activations"] < kept.memory.by_kind["activations"]
    assert recomputed.step.flops > kept.step.flops


def test_fused_kernels_are_priced_as_such():
    kinds = {
        (op.name, op.share) for op in ops_of(planned(compile=True)) if op.kind in ("elementwise", "reduction")
    }
    assert ("fused", "fused") in kinds
    assert all(share == "" for name, share in kinds if name != "fused")
