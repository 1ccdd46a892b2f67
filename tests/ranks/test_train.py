"""A run is the same run whatever happens to it: stopped, resumed, on other ranks, in another sharding."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, StateError
from shardwise.policies import set_trust, trust
from shardwise.testing import run_ranks
from shardwise.train import kept_files, run_files, tokenizers
from shardwise.train.model import OwnModel
from shardwise.train.optional_packages import require
from tests.ranks.tables import slow
from tests.ranks.training import (
    STEPS,
    Noted,
    assert_same,
    checkpoint_at,
    in_mode,
    run_part,
    small_config,
    whole_tensors,
    write_text,
)

MODES = ("none", "optimizer", "gradients", "full", "hybrid")


def on_ranks(world_size, function, *args):
    return run_ranks(function, world_size, *args, kind="gloo")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing happens to, on four ranks; its losses and its last checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = small_config(write_text(folder))
    losses, _ = run_ranks(run_part, 4, config, folder / "run", draws=True, kind="gloo")[0]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    return config, losses, whole_tensors(checkpoint_at(folder / "run"))


def stop_and_resume(config, folder, modes):
    for mode in modes:
        ours = in_mode(config, mode)
        whole, _ = run_part(ours, f"{folder}/{mode}-whole")
        first, _ = run_part(ours, f"{folder}/{mode}", stop_after=4)
        second, _ = run_part(ours, f"{folder}/{mode}", resume=True)
        assert first + second == whole, mode


@pytest.mark.arithmetic
@pytest.mark.parametrize("modes", [("optimizer", "full"), slow(MODES)], ids=["two modes", "all modes"])
def test_a_run_that_is_stopped_and_resumed_is_bitwise_the_run_that_was_not(undisturbed, tmp_path, modes):
    config, _, tensors = undisturbed
    on_ranks(2, stop_and_resume, config, str(tmp_path), modes)
    for mode in modes:
        last = whole_tensors(checkpoint_at(tmp_path / mode))
        assert_same(last, whole_tensors(checkpoint_at(tmp_path / f"{mode}-whole")))
        # And all modes are the same run, to float tolerance.
        for name, value in last.items():
            torch.testing.assert_close(value, tensors[name], rtol=2e-3, atol=2e-4, msg=f"{mode}: {name}")


def test_a_run_goes_from_4_ranks_full_to_2_hybrid_to_3_zero1_to_1(undisturbed, tmp_path):
    config, losses, tensors = undisturbed
    followed = []
    parts = ((4, "full", 2), (2, "hybrid", 3), (3, "optimizer", 5), (1, "none", None))
    for number, (world_size, mode, stop_after) in enumerate(parts):
        ours = in_mode(config, mode)
        found = run_ranks(
            run_part, world_size, ours, tmp_path, resume=number > 0, stop_after=stop_after, kind="gloo"
        )
        followed += found[0][0]
        if number:
            before = parts[number - 1]
            assert f"saved on {before[0]} ranks in mode {before[1]}" in found[0][1][0]
    assert followed[:2] == losses[:2]
    assert followed == pytest.approx(losses, rel=1e-4)
    last = whole_tensors(checkpoint_at(tmp_path))
    assert last.keys() == tensors.keys()
    for name, value in last.items():
        torch.testing.assert_close(value, tensors[name], rtol=2e-3, atol=2e-4, msg=name)


def settings_that_change_how_not_what(config, folder):
    # Without a backend that builds kernels, what is compiled computes the very same numbers.
    torch.compile = functools.partial(torch.compile, backend="eager")
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    changes = {
        "accumulate": {"train": dataclasses.replace(config.train, accumulate=3)},
        "recompute": {"sharding": dataclasses.replace(config.sharding, recompute=True)},
        "compile": {"sharding": dataclasses.replace(config.sharding, compile=True)},
        "compile and recompute": {
            "sharding": dataclasses.replace(config.sharding, compile=True, recompute=True)
        },
        "offload": {"sharding": dataclasses.replace(config.sharding, offload=True)},
        "groups": {"sharding": dataclasses.replace(config.sharding, group_bytes=2**30)},
        "waiting for saves": {
            "checkpoint": dataclasses.replace(config.checkpoint, asynchronous=False, every=2)
        },
        "replicas that accumulate": {
            "sharding": dataclasses.replace(config.sharding, mode="none"),
            "train": dataclasses.replace(config.train, accumulate=2),
        },
        "hybrid that accumulates": {
            "sharding": dataclasses.replace(config.sharding, mode="hybrid"),
            "train": dataclasses.replace(config.train, accumulate=2),
        },
    }
    losses, compiled = {}, {}
    try:
        for name, change in {"as it is": {}, **changes}.items():
            train = dataclasses.replace(change.get("train", config.train), steps=3)
            ours = dataclasses.replace(config, **{**change, "train": train})
            torch._dynamo.reset()  # or what the run before compiled would do
            before = frames["ok"]
            losses[name], _ = run_part(ours, f"{folder}/{name}")
            compiled[name] = frames["ok"] - before
    finally:
        torch.compile = torch.compile.func
    return losses, compiled


def test_settings_that_change_how_a_step_is_done_do_not_change_what_is_learnt(undisturbed, tmp_path):
    config, _, _ = undisturbed
    losses, compiled = on_ranks(2, settings_that_change_how_not_what, config, str(tmp_path))[0]
    expected = losses.pop("as it is")
    for name in ("recompute", "compile", "compile and recompute", "offload", "groups", "waiting for saves"):
        assert losses.pop(name) == expected, name
    for name, found in losses.items():
        assert found == pytest.approx(expected, rel=1e-4), name
    assert {name for name, count in compiled.items() if count} == {"compile", "compile and recompute"}


# --- exact sums -----------------------------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """A block that drops at random; its buffer is saved and, in low precision, widens what it is multiplied with."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        return x + torch.nn.functional.dropout(self.linear(self.norm(x)), 0.2, self.training) * self.scale


class DroppingModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(128, 8)
        self.blocks = torch.nn.Sequential(Dropping(), Dropping())
        self.head = torch.nn.Linear(8, 128)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)).to(self.head.weight.dtype))


EXACT_PLACES = {1: ("full",), 2: ("optimizer", "gradients"), 4: ("none", "hybrid")}


def run_exactly(config, folder, modes, moved, precisions):
    # One run moves from one rank to two to four, each time in another mode; the others stay where they are.
    stop_after = {1: 1, 2: 2, 4: None}[dist.get_world_size()]
    run_part(in_mode(config, modes[0]), moved, resume=stop_after != 1, stop_after=stop_after)
    for mode in modes:
        for precision in precisions:
            sharding = dataclasses.replace(config.sharding, mode=mode, precision=precision)
            run_part(dataclasses.replace(config, sharding=sharding), f"{folder}/{mode}-{precision}")


@pytest.mark.arithmetic
@pytest.mark.parametrize("precisions", [("fp32",), slow(("fp32", "bf16"))], ids=["fp32", "all"])
def test_an_exact_run_is_the_same_to_the_last_bit_on_any_number_of_ranks_in_every_mode(tmp_path, precisions):
    from shardwise.train.records import read_metrics

    config = dataclasses.replace(
        small_config(
            write_text(tmp_path), "train.steps=3", "train.exact_micro_batches=4", "optimizer.clip=0.1"
        ),
        model=OwnModel(DroppingModel, Dropping, context=8, vocabulary=128),
    )
    first = {}
    for world_size, modes in EXACT_PLACES.items():
        folders = str(tmp_path / str(world_size)), modes, str(tmp_path / "moved")
        on_ranks(world_size, run_exactly, config, *folders, precisions)
        for mode in modes:
            for precision in precisions:
                folder = tmp_path / str(world_size) / f"{mode}-{precision}"
                where = f"{world_size} ranks, {mode}, {precision}"
                reported = [(each.loss, each.grad_norm, each.eval_loss) for each in read_metrics(folder)]
                tensors = whole_tensors(checkpoint_at(folder, 3))
                reported_first, tensors_first = first.setdefault(precision, (reported, tensors))
                assert reported == reported_first, where
                assert tensors.keys() == tensors_first.keys(), where
                different = [name for name in tensors if not torch.equal(tensors[name], tensors_first[name])]
                assert not different, where
    assert len({str(reported) for reported, _ in first.values()}) == len(precisions)
    assert_same(whole_tensors(checkpoint_at(tmp_path / "moved", 3)), first["fp32"][1])


@pytest.mark.slow
@pytest.mark.arithmetic
def test_muon_trains_the_same_to_the_last_bit_on_any_number_of_ranks_in_every_mode(tmp_path):
    exact = "train.steps=3", "train.exact_micro_batches=4", "optimizer=muon"
    config = small_config(write_text(tmp_path), *exact)
    first = None
    for world_size, modes in EXACT_PLACES.items():
        folders = str(tmp_path / str(world_size)), modes, str(tmp_path / "moved")
        on_ranks(world_size, run_exactly, config, *folders, ("fp32",))
        for mode in modes:
            tensors = whole_tensors(checkpoint_at(tmp_path / str(world_size) / f"{mode}-fp32", 3))
            first = tensors if first is None else first
            assert_same(tensors, first)
    assert_same(whole_tensors(checkpoint_at(tmp_path / "moved", 3)), first)


def test_muon_steps_the_matrices_of_blocks_and_adamw_the_rest(tmp_path):
    text = write_text(tmp_path)
    for name in ("muon", "adamw"):
        config = small_config(text, "train.steps=1", f"optimizer={name}")
        on_ranks(2, run_part, config, str(tmp_path / name))
    muon, adamw = (whole_tensors(checkpoint_at(tmp_path / name, 1)) for name in ("muon", "adamw"))
    with_momentum = {name.split("/")[1] for name in muon if name.endswith("/momentum_buffer")}
    with_moments = {name.split("/")[1] for name in muon if name.endswith("/exp_avg")}
    assert with_momentum
    assert all(name.startswith("model.layers.") for name in with_momentum)
    assert not with_momentum & with_moments
    assert with_momentum | with_moments == {name.split("/")[1] for name in adamw if name.endswith("/exp_avg")}


def refused_on_three_ranks(config, folder):
    with pytest.raises(ConfigError, match="6 micro-batches cannot be summed exactly on 3 ranks"):
        run_part(config, folder)


def test_a_number_of_ranks_that_cannot_sum_exactly_is_refused_by_all_of_them(tmp_path):
    config = small_config(write_text(tmp_path), "train.exact_micro_batches=6")
    on_ranks(3, refused_on_three_ranks, config, str(tmp_path / "run"))


# --- numbers that are none ----------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Once it has been called ``good_calls`` times: no number comes out, or no gradient goes back."""

    def __init__(self, good_calls=1000, breaks="output"):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.good_calls, self.breaks = good_calls, breaks

    def forward(self, x):
        self.good_calls -= 1
        x = x + self.linear(x)
        if self.good_calls < 0:
            if self.breaks == "output":
                return x * math.nan
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * math.inf)
        return x


class Model(torch.nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.embed = torch.nn.Embedding(128, 8)
        self.blocks = torch.nn.Sequential(Block(), Block(good_calls=3, breaks=breaks), Block())
        self.head = torch.nn.Linear(8, 128)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def run_into_nan(config, folder):
    messages = []
    for breaks in ("output", "gradient"):
        model = OwnModel(functools.partial(Model, breaks), Block, context=8, vocabulary=128)
        with pytest.raises(StateError) as stopped:
            run_part(dataclasses.replace(config, model=model), f"{folder}/{breaks}")
        messages.append(str(stopped.value))
    return messages


def test_a_gradient_that_is_not_finite_stops_the_run_names_step_and_unit_and_saves_the_weights_before_it(
    undisturbed, tmp_path
):
    config, _, _ = undisturbed
    for output, gradient in on_ranks(2, run_into_nan, config, tmp_path):
        assert "the output of unit 'blocks.1' is the first that is not finite" in output
        assert "gradients are not, from unit 'blocks.1' backwards" in gradient
        for message in (output, gradient):
            assert "step 4" in message
            assert "--resume" in message
    for breaks in ("output", "gradient"):
        saved = whole_tensors(checkpoint_at(tmp_path / breaks, 3))
        assert all(bool(value.isfinite().all()) for value in saved.values())
        assert not checkpoint_at(tmp_path / breaks, 4).exists()


# --- what a run finds, and cannot write -----------------------------------------------------------------------------


def train_on_two_texts(config, folder):
    """The same folder, asked for one text and then, resumed, for another of the same length."""
    said, tokens = [], []
    for resume in (False, True):
        ours = dataclasses.replace(
            config, data=dataclasses.replace(config.data, path=f"{folder}/{resume}.txt")
        )
        _, lines = run_part(ours, f"{folder}/run", resume=resume, stop_after=4 if resume else 2)
        said.append(lines)
        tokens.append(Path(folder, "run", "tokens.bin").read_bytes())
    return said, tokens


class Twice:
    """A tokenizer."""

    eos_token_id = None

    def get_vocab(self):
        return {}

    def encode(self, text, add_special_tokens):
        return [byte for byte in text.encode() for _ in range(2)]

    def save_pretrained(self, folder):
        Path(folder).mkdir()


def with_tokenizer(function, *args):
    found = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **_: Twice()))
    tokenizers.require = lambda name, purpose: found
    try:
        return function(*args)
    finally:
        tokenizers.require = require


def test_a_run_is_never_trained_on_tokens_of_other_data(tmp_path):
    for resume, words in ((False, "the quick brown fox "), (True, "the lazy old dog is ")):
        (tmp_path / f"{resume}.txt").write_text(words * 60)
    config = small_config(tmp_path / "False.txt", "data.tokenizer=twice", "train.steps=4")
    ((said, tokens),) = on_ranks(1, with_tokenizer, train_on_two_texts, config, str(tmp_path))
    assert tokens[0] != tokens[1]
    assert b"l\0\0\0l\0\0\0a\0\0\0a" in tokens[1]
    assert not any("tokenizing again" in line for line in said[0])
    assert any("tokenizing again" in line for line in said[1])
    assert any("differs from what the checkpoint was trained on" in line for line in said[1])


def train_where_little_can_be_written(config, folder):
    def full(*_args):
        raise OSError(28, "No space left on device")

    append, run_files.open_for_append = run_files.open_for_append, full
    try:
        with pytest.raises(StateError) as caught:
            run_part(config, folder, display=(display := Noted()))
    finally:
        run_files.open_for_append = append
    return str(caught.value), display.lines, display.summary


def test_metrics_that_cannot_be_written_do_not_end_a_run_and_are_reported_at_its_end(undisturbed, tmp_path):
    config, _, tensors = undisturbed
    ((error, lines, summary),) = on_ranks(1, train_where_little_can_be_written, config, tmp_path)
    assert error.startswith(f"the run finished at step {STEPS} and its checkpoint is complete")
    assert f"metrics.jsonl: No space left on device, {STEPS} times" in error
    assert sum("metrics.jsonl cannot be written, training continues" in line for line in lines) == 1
    assert summary.unwritten == (f"metrics.jsonl: No space left on device, {STEPS} times",)
    assert whole_tensors(checkpoint_at(tmp_path)).keys() == tensors.keys()


def begin_where_nothing_can_be_written(config, folder):
    def full(*_args):
        raise OSError(28, "No space left on device")

    replace, kept_files.replace_file = kept_files.replace_file, full
    try:
        with pytest.raises(ConfigError) as refused:
            run_part(config, folder)
    finally:
        kept_files.replace_file = replace
    return str(refused.value)


def test_a_run_that_could_not_be_resumed_is_not_begun_on_any_rank(undisturbed, tmp_path):
    config, _, _ = undisturbed
    for reported in on_ranks(2, begin_where_nothing_can_be_written, config, tmp_path):
        assert "config.json cannot be written: No space left on device" in reported


def test_a_run_writes_down_its_metrics_its_summary_and_its_curve(undisturbed):
    from shardwise.train.records import read_metrics

    config, losses, _ = undisturbed
    folder = Path(config.data.path).parent / "run"
    assert [record.loss for record in read_metrics(folder)] == losses
    assert read_metrics(folder)[-1].eval_loss is not None
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert '"ended": "finished"' in (folder / "summary.json").read_text()


def run_with_late_seconds(config, folder):
    before = set_trust()
    try:
        run_part(config, folder, stop_after=1)
        return trust().late_seconds
    finally:
        set_trust(late_seconds=before.late_seconds)


def test_a_run_says_how_long_a_late_rank_is_waited_for(tmp_path):
    text = write_text(tmp_path)
    for seconds, expected in ((0.0, None), (77.0, 77.0)):
        config = small_config(text, f"train.late_seconds={seconds}")
        reported = on_ranks(2, run_with_late_seconds, config, str(tmp_path / f"run-{seconds}"))
        assert reported == [expected] * 2
