"""``--dry-run`` says what would run, finds what stands against it, and writes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from shardwise.checkpoint.convert import import_weights
from shardwise.checkpoint.weights import Weight, Weights
from shardwise.cli import main
from shardwise.train.run_folder import FolderLock

SMALL = ("model.layers=1", "model.width=16", "model.heads=2", "model.hidden=16", "model.context=16")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(capsys, *words, status=0):
    assert main(["train", *words, "--device", "cpu", "--dry-run"]) == status
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def facts(capsys, *words, status=0):
    return json.loads(said(capsys, *words, "--json", status=status))


def test_it_says_what_would_run_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = said(capsys, "tiny", "--set", "train.steps=7", "--set", "train.accumulate=3")
    assert max(map(len, text.splitlines()[:-1])) <= 60
    joined = " ".join(text.split())
    for words in (
        "train.steps = 7 (recipe: 120)",
        "2 CPU ranks, sharding full, fp32",
        "455.5k parameters",
        "7 of 12 sequences of 64 tokens: 768 tokens a step, 5.4k in all; 6 per rank in 3 micro-batches",
        "the source code of Python's library 4.2M tokens",
        "runs/tiny, a checkpoint every 40 steps and at the end",
        "nothing stands against it",
    ):
        assert words in joined, words
    assert list(tmp_path.iterdir()) == []


def test_one_of_a_thing_is_not_plural(capsys):
    text = said(capsys, "tiny", "--ranks", "1", "--set", "train.batch_size=1", "--set", "checkpoint.every=1")
    for words in ("1 CPU rank,", "of 1 sequence of", "in 1 micro-batch\n", "a checkpoint every 1 step and"):
        assert words in text


def test_ranks_that_divide_matrices_read_the_same_data(capsys):
    text = said(capsys, "tiny", "--ranks", "4", "--set", "sharding.tensor_parallel=2")
    for words in ("sharding full, tensor parallel 2, fp32", "6 per rank in 1 micro-batch\n"):
        assert words in text, words
    found = facts(capsys, "tiny", "--ranks", "3", "--set", "sharding.tensor_parallel=2", status=1)
    assert "3 ranks cannot be divided" in found["problems"][0]


@pytest.mark.parametrize(
    ("mode", "ranks", "parts"),
    [("none", 4, (1, 1, 1)), ("optimizer", 4, (1, 1, 4)), ("full", 4, (4, 4, 4)), ("hybrid", 4, (2, 2, 2))],
)
def test_memory_is_what_each_mode_leaves_on_a_rank(capsys, mode, ranks, parts):
    found = facts(capsys, "tiny", "--ranks", str(ranks), "--set", f"sharding.mode={mode}")
    weights = 4 * found["parameters"]
    # Two moments for each parameter, and a step for each of 39.
    wanted = {"weights": weights, "gradients": weights, "optimizer_state": 2 * weights + 4 * 39}
    assert found["bytes_per_rank"] == {
        name: size // part for (name, size), part in zip(wanted.items(), parts, strict=True)
    }


def test_every_problem_is_found_not_only_the_first(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    found = facts(
        capsys,
        "tiny",
        *("--set", "data.path=nowhere.txt", "--set", "train.batch_size=11"),
        *("--set", "optimizer.arguments.speed=3", "--out", "file/below"),
        status=1,
    )
    assert not found["good"]
    text = "\n".join(found["problems"])
    for words in (
        "there is no file or folder 'nowhere.txt'",
        "a batch of 11 sequences cannot be divided among 2 ranks with 1 micro-batch each",
        "AdamW has no argument 'speed'",
        "cannot create a run in",
    ):
        assert words in text
    assert len(found["problems"]) == 4


def test_a_model_that_no_device_holds_is_a_problem_that_takes_no_memory_to_find(capsys):
    large = ("--set", "model.layers=1", "--set", "model.vocabulary=1000000000")
    text = said(capsys, "llama-8b", "--ranks", "1", *large, status=1)
    assert "8.2T parameters" in text
    assert "a rank needs" in text


def test_rows_are_looked_at_but_not_made_into_tokens(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    text = said(capsys, "tiny", "--set", "data.path=rows.jsonl")
    assert "rows.jsonl: 1 file, 0 KiB; becomes tokens of 'bytes' when the run starts" in " ".join(
        text.split()
    )
    (tmp_path / "rows.jsonl").write_text('{"txt": "a"}\n')
    assert "there is no text in 'text'" in said(capsys, "tiny", "--set", "data.path=rows.jsonl", status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def resumable(folder, step):
    """A run's folder with weights of the small tiny at a step, by the names that its checkpoints have."""
    from shardwise.train.request import Request, resolve

    with torch.device("meta"):
        module: nn.Module = resolve(Request("tiny", SMALL)).config.model.build()
    weights = tuple(Weight.of(name, torch.ones(param.shape)) for name, param in module.named_parameters())
    import_weights(Weights(weights, None), folder)
    (folder / "config.json").write_text(json.dumps({"recipe": "tiny", "settings": list(SMALL)}))
    return folder


def test_a_run_to_resume_is_checked_against_its_checkpoint(tmp_path, capsys):
    folder = resumable(tmp_path / "run", 0)
    before = sorted(path.name for path in folder.iterdir())
    assert facts(capsys, "--resume", "run")["first_step"] == 0
    other = said(capsys, "--resume", "run", "--set", "model.width=32", status=1)
    assert "has shape [256, 32], and the checkpoint has one of shape [256, 16]" in other
    assert "--out" in said(capsys, "--resume", "run", "--out", "elsewhere", status=1)
    lock = FolderLock(folder)
    assert "another run is active" in said(capsys, "--resume", "run", status=1)
    lock.release(remove=True)
    assert sorted(path.name for path in folder.iterdir()) == before
