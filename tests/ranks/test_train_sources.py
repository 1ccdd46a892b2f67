"""A run on rows, mixtures and conversations is the same run however it is divided, stopped and resumed."""

from __future__ import annotations

import json

import pytest

from shardwise.testing import run_ranks
from shardwise.train.settings import with_settings
from tests.ranks.tables import slow
from tests.ranks.training import assert_same, checkpoint_at, run_part, small_config, whole_tensors, write_text


def write_chats(folder):
    """Conversations whose answers have very different lengths."""
    rows = [{"prompt": f"{number} times x is ", "completion": "x" * (1 + number % 7)} for number in range(40)]
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(folder):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number} of the file"}) + "\n" for number in range(60)))
    return path


def settings_of(name, folder):
    chat = (f"data.path={write_chats(folder)}", "data.format=chat", "model.context=24")
    rows, text = write_rows(folder), write_text(folder)
    return {
        "rows": (f"data.path={rows}",),
        "mixture": (f"data.sources={rows}*0.3,{text}*0.7",),
        "by size": (f"data.sources={rows},{text}",),
        "padded": chat,
        "packed": (*chat, "data.packing=true", "model.context=40", "train.batch_size=4"),
    }[name]


def stop_and_resume(configs, folder):
    found = {}
    for name, config in configs.items():
        whole, _ = run_part(config, f"{folder}/{name}-whole")
        first, _ = run_part(config, f"{folder}/{name}", stop_after=2)
        second, lines = run_part(config, f"{folder}/{name}", resume=True)
        found[name] = whole, first + second, lines
    return found


def test_a_run_on_any_source_resumes_at_the_exact_sample(tmp_path):
    names = ("rows", "mixture", "by size", "padded", "packed")
    configs = {name: small_config("", "train.steps=4", *settings_of(name, tmp_path)) for name in names}
    found = run_ranks(stop_and_resume, 2, configs, str(tmp_path), kind="gloo")[0]
    for name, (whole, resumed, lines) in found.items():
        assert resumed == whole, name
        assert not any("differs" in line or "again" in line for line in lines)
        assert_same(*(whole_tensors(checkpoint_at(tmp_path / f"{name}{end}", 4)) for end in ("", "-whole")))
    assert len({tuple(whole) for whole, _, _ in found.values()}) == len(names)


def change_split(folder, text):
    config = small_config(text, "train.steps=3", "data.held_out_from=end")
    run_part(config, folder, stop_after=2)
    return run_part(with_settings(config, ["data.held_out_from=everywhere"]), folder, resume=True)[1]


def test_a_resumed_run_that_holds_out_other_samples_says_so(tmp_path):
    lines = run_ranks(change_split, 1, str(tmp_path / "run"), str(write_text(tmp_path)), kind="gloo")[0]
    assert (
        "warning: data.held_out_from was end and is everywhere: samples that are held out now may have been trained "
        "on before" in lines
    )


def run_all(configs, folder):
    return {name: run_part(config, f"{folder}/{name}")[0] for name, config in configs.items()}


@pytest.mark.parametrize("mode", ["full", slow("none")])
def test_every_target_weighs_the_same_however_a_batch_of_masked_ones_is_divided(tmp_path, mode):
    text = settings_of("padded", tmp_path)
    configs = {
        f"{accumulate} micro-batches": small_config(
            "",
            *text,
            "train.steps=3",
            f"sharding.mode={mode}",
            f"train.accumulate={accumulate}",
            # So that an error in the gradients is not hidden by Adam's normalization.
            "optimizer=sgd",
        )
        for accumulate in (1, 3)
    }
    found = {}
    for world_size in (1, 2):
        losses = run_ranks(run_all, world_size, configs, str(tmp_path / str(world_size)), kind="gloo")[0]
        for name, own in losses.items():
            found[f"{world_size} ranks, {name}"] = own
            tensors = whole_tensors(checkpoint_at(tmp_path / str(world_size) / name, 3))
            expected = whole_tensors(checkpoint_at(tmp_path / "1" / "1 micro-batches", 3))
            for key, value in tensors.items():
                # Float sums in another order: a mean of means is wrong by more than a tenth.
                difference = (value - expected[key]).abs().max().item()
                assert difference < 1e-5, (world_size, name, key)
    expected = found.pop("1 ranks, 1 micro-batches")
    for name, own in found.items():
        assert own == pytest.approx(expected, rel=1e-5), name
