"""Tokens from text, folders, binaries and data sets; sequences out of them; what cannot be read is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train import data
from shardwise.train.config import Data


def tokens_of(corpus):
    return bytes(corpus.read(0, corpus.num_tokens).tolist())


def test_the_embedded_text_is_there_and_is_the_same_every_time():
    first, second = data.open_corpus(Data()), data.open_corpus(Data())
    assert first.num_tokens > 1_000_000
    assert first.fingerprint() == second.fingerprint()
    assert b"import" in tokens_of(first)


def test_a_text_file_is_its_bytes(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("grüße")
    assert tokens_of(data.open_corpus(Data(path=str(file)))) == "grüße".encode()


def test_a_folder_is_its_text_files_in_order_without_hidden_and_binary_ones(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in {
        "b.txt": b"BB",
        "a.md": b"A",
        "sub/c.py": b"CCC",
        ".hidden": b"no",
        "sub/.git": b"no",
        "image.png": b"\x89PNG\0no",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    corpus = data.open_corpus(Data(path=str(tmp_path)))
    assert tokens_of(corpus) == b"ABBCCC"
    for start in range(7):
        for stop in range(start + 1, 7):
            assert bytes(corpus.read(start, stop).tolist()) == b"ABBCCC"[start:stop]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_a_binary_is_mapped_in_its_dtype(tmp_path, dtype):
    file = tmp_path / "tokens.bin"
    values = [7, 250, 3, 9]
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    file.write_bytes(b"".join(value.to_bytes(width, "little") for value in values))
    corpus = data.open_corpus(Data(path=str(file), token_dtype=dtype))
    assert corpus.read(0, 4).tolist() == values


def test_samples_are_sequences_with_the_token_after_and_the_end_is_held_out():
    corpus = data.Corpus([torch.arange(100), torch.arange(100, 201)])
    samples = data.Samples(corpus, context=10, vocabulary=300, held_out=0.1)
    assert (samples.num_training, samples.num_held_out) == (18, 2)
    inputs, targets = samples.batch([0, 9, 19])
    assert inputs[1].tolist() == list(range(90, 100))
    assert torch.equal(targets, inputs + 1)
    assert int(targets[2, -1]) == 200


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("nowhere.txt", None, "there is no file or folder"),
        ("empty.txt", b"", "there is no text in it"),
        ("odd.bin", b"abc", "no whole number of"),
        ("empty.bin", b"", "there is no text in it"),
    ],
)
def test_data_that_is_missing_or_empty_or_cut_is_told(tmp_path, path, content, words):
    if content is not None:
        (tmp_path / path).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        data.open_corpus(Data(path=str(tmp_path / path)))


def test_a_folder_without_text_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no text"):
        data.open_corpus(Data(path=str(tmp_path)))


def test_too_little_data_and_tokens_beyond_the_vocabulary_are_told():
    with pytest.raises(ConfigError, match="5 tokens, too few for sequences of 10"):
        data.Samples(data.Corpus([torch.arange(5)]), 10, 256, 0.1)
    with pytest.raises(ConfigError, match="too few"):
        data.Samples(data.Corpus([torch.arange(11)]), 10, 256, 0.1)  # one sample, and one to hold out
    assert data.Samples(data.Corpus([torch.arange(11)]), 10, 256, 0.0).num_training == 1
    samples = data.Samples(data.Corpus([torch.arange(50)]), 10, 20, 0.0)
    samples.batch([0])
    with pytest.raises(ConfigError, match=r"token 30, and the model knows 20"):
        samples.batch([0, 2])


class Rows(list):
    column_names = ("text", "id")


def packages(monkeypatch, **packages):
    monkeypatch.setattr(data, "require", lambda name, purpose: packages[name])


def test_a_data_set_goes_through_its_tokenizer_into_a_file(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Rows([{"text": "ab"}, {"text": "c"}])

    tokenizer = SimpleNamespace(
        eos_token_id=500, encode=lambda text, add_special_tokens: [ord(letter) * 3 for letter in text]
    )
    packages(
        monkeypatch,
        datasets=SimpleNamespace(load_dataset=load_dataset),
        transformers=SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda name: tokenizer)),
    )
    choice = Data(path="hf:corpus:subset", tokenizer="some-tokenizer", split="validation")
    assert data.needs_tokenizing(choice)
    data.tokenize(choice, tmp_path / "tokens.bin")
    corpus = data.open_corpus(choice, tmp_path / "tokens.bin")
    assert corpus.read(0, corpus.num_tokens).tolist() == [291, 294, 500, 297, 500]
    assert asked == [(("corpus", "subset"), {"split": "validation"})]
    with pytest.raises(ConfigError, match="use one of text, id"):
        data.tokenize(Data(path="hf:corpus", column="body"), tmp_path / "other.bin")


def test_a_data_set_that_cannot_be_loaded_is_told_and_leaves_no_tokens(tmp_path, monkeypatch):
    def load_dataset(*_args, **_kwargs):
        raise RuntimeError("no network")

    packages(monkeypatch, datasets=SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConfigError, match="no network"):
        data.tokenize(Data(path="hf:corpus"), tmp_path / "tokens.bin")
    assert not (tmp_path / "tokens.bin").exists()


def test_a_package_that_is_not_installed_is_told_with_the_command_that_installs_it():
    from shardwise.train.extras import require

    with pytest.raises(ConfigError, match="pip install surely_not_there"):
        require("surely_not_there", "a test")
