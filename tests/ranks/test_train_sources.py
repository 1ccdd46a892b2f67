"""A run on rows, mixtures and conversations is the same run however it is divided, stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from shardwise.testing import run_ranks
from shardwise.train.parallel import Parallel
from shardwise.train.settings import with_settings
from shardwise.train.sources import open_data, tokenize_sources
from tests.ranks.tables import slow
from tests.ranks.training import (
    Noted,
    assert_same,
    checkpoint_at,
    run_part,
    small_config,
    whole_tensors,
    write_text,
)

CPU = torch.device("cpu")


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


# --- beside a plain loop --------------------------------------------------------------------------------------------

CHOICES = (
    *("model.width=24", "model.heads=4", "model.kv_heads=2", "model.hidden=30", "model.vocabulary=256"),
    *(
        "data.format=chat",
        "data.packing=true",
        "model.context=90",
        "train.batch_size=4",
        "train.accumulate=2",
    ),
    *("train.steps=4", "optimizer.warmup=2", "optimizer.lr=0.01", "optimizer.schedule=linear"),
    *("optimizer.clip=0.3", "optimizer.weight_decay=0.2", "optimizer.min_lr=0.1"),
)
RATES = (0.005, 0.01, 0.01, 0.0055)


def write_messages(folder):
    rows = [
        [("system", "s" * (number % 3)), ("user", f"{number}?"), ("assistant", "é" * (1 + number % 5))]
        for number in range(40)
    ]
    path = folder / "messages.jsonl"
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) + "\n"
            for row in rows
        )
    )
    # Written out by hand: the prompt, and the answer that is learnt.
    return path, [
        (f"system: {s}\0user: {u}\0assistant: ".encode(), f"{a}\0".encode())
        for (_, s), (_, u), (_, a) in rows
    ]


def train_plainly(config, folder, documents):
    """Trains on one document after the other, without packs, engine, schedule or loss of the library."""
    tokenize_sources(config.data, Path(folder), lambda text: None)
    data = open_data(config, Path(folder), 1)
    model = Parallel(config.model, with_settings(config, ["sharding.mode=none"]).sharding, CPU, 0).module
    answers = {bytes([*prompt, *answer][:-1]): (prompt, answer) for prompt, answer in documents}
    matrices, norms = (
        [param for param in model.parameters() if (param.dim() > 1) == many] for many in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    figures = []
    for step, rate in enumerate(RATES):
        sums, count = [], 0
        for position in range(4 * step, 4 * step + 4):
            inputs, _, segments = data.samples.read(data.order.sample(position))
            for segment in segments.unique():
                prompt, answer = answers[bytes(inputs[segments == segment].tolist())]
                tokens = torch.tensor([*prompt, *answer])
                logits = model(tokens[None, :-1])[0, len(prompt) - 1 :]
                sums.append(F.cross_entropy(logits, tokens[len(prompt) :], reduction="sum"))
                count += len(answer)
        loss = sum(sums) / count
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        figures.append((loss.item(), norm.item(), rate))
    return figures


def figures_of(config, folder):
    display = Noted()
    run_part(config, folder, display=display)
    return [(record.loss, record.grad_norm, record.lr) for record in display.records]


@pytest.mark.parametrize(
    ("world_size", "choice"),
    [
        (2, "sharding.mode=full"),
        slow(2, "sharding.mode=none"),
        slow(4, "sharding.tensor_parallel=2"),
        slow(4, "sharding.pipeline=2"),
    ],
)
def test_packed_chats_train_as_a_plain_loop_over_their_documents(tmp_path, world_size, choice):
    path, documents = write_messages(tmp_path)
    config = small_config("", f"data.path={path}", *CHOICES)
    (expected,) = run_ranks(train_plainly, 1, config, tmp_path, documents, kind="gloo")
    config = with_settings(config, [choice])
    found = run_ranks(figures_of, world_size, config, str(tmp_path / "run"), kind="gloo")[0]
    # Sums in other orders: a document that is seen, masked or counted wrongly changes the second digit.
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, rel=1e-5)


# --- what is held out -----------------------------------------------------------------------------------------------


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
