"""``shardwise.plan``: memory beside what a GPU allocated, what the text says, and what cannot be predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import ConfigError, MixedPrecisionPolicy
from shardwise.comm.dry_run import rehearsing
from shardwise.forecast.alternatives import over_ranks, smallest_change
from shardwise.forecast.choice import choose_for
from shardwise.forecast.dry_mesh import dry_mesh
from shardwise.forecast.recording import TapeRecorder
from shardwise.forecast.rehearsal import block_bytes, large_modules, sharded_as
from shardwise.forecast.report import comparison_text
from shardwise.forecast.settings import Settings
from shardwise.forecast.tape import Collective, Mark, Op
from shardwise.planning import memory as planned_kinds
from shardwise.training_step.planned_memory import planned_memory

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WIDTH = 2048
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class MeasuredBlock(nn.Sequential):
    def __init__(self, width):
        super().__init__(
            nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False)
        )


def stack(width=WIDTH):
    """The model of benchmarks/backward_memory.py."""
    return nn.Sequential(*(MeasuredBlock(width) for _ in range(6)))


def planned(model=stack, inputs=None, **settings):
    inputs = torch.empty(4, WIDTH, device="meta") if inputs is None else inputs
    options = {"ranks": 8, "wrap": MeasuredBlock, "optimizer": None, "loss": lambda out: out.float().sum()}
    return shardwise.plan(model, inputs, **{**options, **settings})


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("freed after forward", {}),
        ("kept after forward", {"reshard_after_forward": False}),
        ("offloaded", {"offload": True}),
        ("bf16", {"mp_policy": MIXED}),
    ],
)
def test_memory_is_what_a_gpu_allocated_in_every_phase(ranks, mode, settings):
    measured = json.loads((RESULTS / "backward_memory_cuda.json").read_text())["blocks"]
    found = planned(ranks=ranks, **settings).memory
    block = 8 * WIDTH * WIDTH * 4
    in_blocks = {
        phase: round((num_bytes - found.by_kind["workspaces"]) / block, 2)
        for phase, num_bytes in {
            "idle": found.idle,
            "forward": found.by_phase["forward"],
            "backward": found.by_phase["backward"],
            "after_backward": found.by_phase["optimizer"],
        }.items()
    }
    assert in_blocks == measured[f"shardwise, {ranks} ranks, {mode}"]


def test_what_the_engine_holds_at_the_peak_of_backward_is_the_planned_memory():
    recorder = TapeRecorder()
    with rehearsing(recorder), torch.device("meta"):
        model = sharded_as(stack(), Settings(wrap=MeasuredBlock), dry_mesh(recorder, 8))
        expected = planned_memory(model).backward.by_kind
    found = planned().memory.by_kind
    for kind in (
        planned_kinds.SHARDS,
        planned_kinds.GATHERED,
        planned_kinds.GRADIENTS,
        planned_kinds.ROWS,
        planned_kinds.SHARD_GRADIENTS,
    ):
        assert found.get(kind, 0) == expected.get(kind, 0), kind


def test_adam_holds_two_numbers_for_each_of_a_ranks_elements():
    without, with_adam = planned(), planned(optimizer="adamw")
    shards = without.memory.by_kind[planned_kinds.SHARDS]
    assert with_adam.memory.idle - without.memory.idle == 2 * shards + 12 * 512


def test_recomputation_holds_fewer_activations_and_computes_more():
    inputs = torch.empty(4096, WIDTH, device="meta")
    kept, recomputed = planned(inputs=inputs), planned(inputs=inputs, recompute=True)
    assert recomputed.memory.by_kind["activations"] < kept.memory.by_kind["activations"] / 2
    assert recomputed.step.flops > kept.step.flops


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(256), nn.Linear(256, 768)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, 512, 4, 192).transpose(1, 2).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(mixed.transpose(1, 2).reshape(1, 512, 256), 0.1)


def calls_of(made):
    return {entry.name for entry in made.rehearsal.tape if type(entry).__name__ == "Op"}


def test_attention_norms_and_dropout_are_the_kernels_that_cuda_runs():
    inputs = torch.empty(1, 512, 256, dtype=torch.bfloat16, device="meta")
    calls = calls_of(
        shardwise.plan(
            lambda: nn.Sequential(Attending(), Attending()),
            inputs,
            ranks=2,
            mp_policy=MIXED,
            loss=lambda out: out.sum(),
        )
    )
    assert {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "rms_norm",
        "rms_norm_backward",
        "native_dropout",
    } <= calls
    assert "_softmax" not in calls
    # And torch's own functions are back.
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize(("vocabulary", "share"), [(50_257, "unaligned"), (50_264, "")])
def test_products_of_matrices_whose_rows_begin_at_odd_places_are_slower(vocabulary, share):
    x = torch.empty(32, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = planned(
        lambda: nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, vocabulary, bias=False)),
        x,
        wrap=nn.Linear,
        mp_policy=MIXED,
    )
    tape = found.rehearsal.tape[found.rehearsal.steps[-1] :]
    shares = [op.share for op in tape if isinstance(op, Op) and op.kind == "matmul"]
    # Forward, two products of backward, and one where the inputs need no gradient.
    assert shares == ["", share, share, share, ""]


@pytest.mark.parametrize(("width", "tensors"), [(64, 1), (2048, 2)])
def test_small_parameters_are_gathered_together_however_many_they_are(width, tensors):
    model = stack if width == WIDTH else lambda: nn.Sequential(*(MeasuredBlock(width) for _ in range(512)))
    found = planned(model, torch.empty(4, width, device="meta"), group_bytes=0 if width == WIDTH else 2**30)
    gathers = [
        each for each in found.rehearsal.tape if isinstance(each, Collective) and each.kind == "all_gather"
    ]
    assert max(each.num_bytes for each in gathers) >= 2**26
    marks = [each for each in found.rehearsal.tape if isinstance(each, Mark) and each.kind == "reduce"]
    assert marks[-1].num_params == (2 if width == WIDTH else 1024)
    assert {each.num_tensors for each in gathers} == {tensors}


def test_the_text_says_what_holds_memory_where_time_goes_and_whether_it_fits():
    text = planned(name="stack", optimizer="adamw").text()
    for part in (
        "stack: 0.20 B parameters, 7 units, 8 × H200",
        "fits with",
        "optimizer",
        "shards",
        "matrix products",
        "exposed communication",
        "waiting for the host",
        "8 ranks, over",
    ):
        assert part in text, part


def test_a_step_that_does_not_fit_says_by_how_much_and_which_change_helps():
    inputs = torch.empty(512, 8192, 2048, device="meta")
    made = planned(inputs=inputs)
    assert not made.fits
    assert "does not fit by" in made.text()
    found = smallest_change(made)
    assert found is not None
    name, changed = found
    assert changed.fits
    assert name.startswith(("micro_batches=", "recompute=True"))


@pytest.mark.slow
def test_the_choice_is_the_fastest_that_fits():
    inputs = torch.empty(4096, WIDTH, device="meta")

    def chosen(budget_gb):
        return shardwise.choose(
            stack,
            inputs,
            ranks=8,
            wrap=MeasuredBlock,
            loss=lambda out: out.float().sum(),
            budget_gb=budget_gb,
        )

    free = chosen(100)
    assert free.best.seconds <= 1.01 * min(plan.seconds for _, plan in free.compared)
    tight = chosen(free.best.memory.reserved / 2**30 - 0.2)
    assert tight.best.memory.reserved < free.best.memory.reserved
    assert tight.text().startswith("chosen: ")
    with pytest.raises(ConfigError, match=r"fits into 0\.0100 GiB"):
        chosen(0.01)


def test_a_choice_shards_as_it_was_predicted():
    apart = planned()
    made = planned(group_bytes=3 * max(block_bytes(apart.question.job, apart.question.settings)))
    assert len(made.rehearsal.units) == 3


class Tokens(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(200_000, 64)
        self.blocks = nn.ModuleList(MeasuredBlock(64) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 200_000, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def test_large_embeddings_are_units_of_their_own_where_that_saves_memory():
    def asked(tied=False, **settings):
        tokens = torch.empty(16, dtype=torch.long, device="meta")
        return planned(lambda: Tokens(tied), tokens, **settings)

    together = asked()
    job, settings = together.question.job, together.question.settings
    assert large_modules(job, settings) == ("embed", "out")
    assert large_modules(asked(tied=True).question.job, settings) == ("embed",)
    apart = asked(alone=("embed", "out"))
    assert {"embed", "out"} <= set(apart.rehearsal.units)
    assert apart.memory.allocated < together.memory.allocated
    chosen = choose_for(together.question, apart.memory.reserved)
    assert chosen.settings["alone"] == ("embed", "out")


def test_more_ranks_hold_less_each_and_communicate_over_slower_links():
    made = planned()
    curve = over_ranks(made.question, 8, 32)
    assert [name for name, _ in curve] == ["ranks=8", "ranks=16", "ranks=32"]
    assert curve[2][1].memory.idle < curve[0][1].memory.idle
    assert curve[2][1].seconds > curve[0][1].seconds
    assert len(comparison_text(curve).splitlines()) == 4


def test_the_picture_has_lanes_and_a_curve_that_reaches_the_peak():
    made = planned()
    timeline = made.timeline
    assert {"compute", "gather", "reduce", "host"} <= {lane.name for lane in timeline.lanes}
    assert timeline.memory is not None
    held = made.memory.allocated - made.memory.by_kind["workspaces"]
    assert max(map(sum, timeline.memory.levels)) == pytest.approx(held, rel=0.01)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Choosing(), Choosing()])

    def forward(self, x):
        return self.inner[1](x)


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight if x.sum().item() > 0 else x


def test_a_model_that_looks_at_values_is_refused_and_the_module_named():
    with pytest.raises(ConfigError, match=r"cannot be run without data(.|\n)*module 'inner\.1' \(Choosing\)"):
        shardwise.plan(Branching, torch.empty(2, 4, device="meta"), ranks=2)


class LooksBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


class LookingBack(nn.Linear):
    def forward(self, x):
        return LooksBack.apply(super().forward(x))


class ReadsWeights(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = self.weight.abs().max().item()


def test_what_looks_at_values_in_backward_or_while_it_is_built_is_refused_as_well():
    inputs = torch.empty(2, 4, device="meta")
    with pytest.raises(ConfigError, match="cannot run backward without data"):
        shardwise.plan(lambda: nn.Sequential(LookingBack(4, 4)), inputs, ranks=2)
    with pytest.raises(ConfigError, match=r"cannot be built without data(.|\n)*load them after"):
        shardwise.plan(ReadsWeights, inputs, ranks=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 6, "nodes": 4}, "6 ranks cannot be spread over 4 nodes"),
        ({"ranks": 6, "replicas": 4}, "6 ranks cannot be divided into 4 replicas"),
        ({"api": "wrapper", "offload": True}, "no prediction for the wrapper with offload"),
        ({"optimizer": "lion"}, "no prediction for the optimizer 'lion'"),
        ({"device": "h900"}, "there are no prices of a device 'h900'"),
        ({"model": nn.Linear(2, 2)}, "Linear has memory"),
    ],
)
def test_questions_without_an_answer_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_a_mesh_of_meta_devices_outside_of_a_plan_is_refused():
    mesh = dry_mesh(TapeRecorder(), 2)
    with pytest.raises(shardwise.StateError, match="nothing is there to predict"):
        shardwise.fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
def test_peaks_of_the_8b_model_are_those_of_a_gpu_to_the_byte(ranks):
    from benchmarks.models import SIZES, Language

    measured = json.loads((RESULTS / f"step_memory_8b_{ranks}_cuda.json").read_text())["peak_bytes"][
        "shardwise"
    ]
    tokens = torch.empty(1, 8192, dtype=torch.long, device="meta")
    found = shardwise.plan(
        lambda: Language(SIZES["8b"]), (tokens, tokens), ranks=ranks, mp_policy=MIXED, optimizer=None
    ).memory
    assert {"allocated": found.allocated, "reserved": found.reserved} == measured
