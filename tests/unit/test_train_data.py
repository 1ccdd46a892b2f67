"""Tokens from text, folders, binaries and data sets; sequences out of them; what cannot be read is told."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train import data, documents, tokenizers, tokenizing
from shardwise.train import samples as samples_of
from shardwise.train.config import Data
from shardwise.train.sources import tokenize_sources


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


def test_samples_are_sequences_with_the_token_after_and_the_end_is_held_out_if_asked_for():
    corpus = data.Corpus([torch.arange(100), torch.arange(100, 201)])
    samples = samples_of.Texts(corpus, context=10, vocabulary=300, held_out=0.1, place="end")
    assert (samples.num_training, samples.num_held_out) == (18, 2)
    inputs, targets, _ = samples.batch([0, 9, 19])
    assert inputs[1].tolist() == list(range(90, 100))
    assert torch.equal(targets, inputs + 1)
    assert int(targets[2, -1]) == 200


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("nowhere.txt", None, "there is no file or folder"),
        ("empty.txt", b"", "it contains no text"),
        ("odd.bin", b"abc", "not a whole number of"),
        ("empty.bin", b"", "it contains no text"),
    ],
)
def test_data_that_is_missing_or_empty_or_cut_is_reported(tmp_path, path, content, words):
    if content is not None:
        (tmp_path / path).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        data.open_corpus(Data(path=str(tmp_path / path)))


def test_a_folder_without_text_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="no text"):
        data.open_corpus(Data(path=str(tmp_path)))


def test_files_that_are_no_text_are_left_out_with_a_word_or_refused_alone(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.dat").write_bytes(b"\0\1")
    (tmp_path / "c.txt").touch()
    said = []
    tokenize_sources(Data(path=str(tmp_path)), tmp_path, said.append)
    assert said == [f"left out of {tmp_path}, as empty or binary: b.dat and 1 more"]
    with pytest.raises(ConfigError, match=r"b\.dat' is a binary file(.|\n)*token_dtype=uint8"):
        data.open_corpus(Data(path=str(tmp_path / "b.dat")))


def test_too_little_data_and_tokens_beyond_the_vocabulary_are_reported():
    with pytest.raises(ConfigError, match="5 tokens, too few for sequences of 10"):
        samples_of.Texts(data.Corpus([torch.arange(5)]), 10, 256, 0.1)
    with pytest.raises(ConfigError, match="too few"):
        samples_of.Texts(data.Corpus([torch.arange(11)]), 10, 256, 0.1)  # one sample, and one to hold out
    assert samples_of.Texts(data.Corpus([torch.arange(11)]), 10, 256, 0.0).num_training == 1
    samples = samples_of.Texts(data.Corpus([torch.arange(50)]), 10, 20, 0.0)
    samples.batch([0])
    with pytest.raises(ConfigError, match=r"token 30, but the model's vocabulary is 20"):
        samples.batch([0, 2])


def test_a_change_anywhere_in_data_of_the_same_length_changes_its_fingerprint():
    tokens = torch.arange(100_000) % 251
    before = data.Corpus([tokens]).fingerprint()
    assert before == data.Corpus([tokens[:70_001], tokens[70_001:].to(torch.uint8)]).fingerprint()
    for place in (0, 16_384, 50_000, 99_999):
        changed = tokens.clone()
        changed[place] += 1
        assert data.Corpus([changed]).fingerprint() != before


def test_negative_tokens_are_refused_before_the_first_step(tmp_path):
    (tmp_path / "a.bin").write_bytes(torch.tensor([5, -1] * 500, dtype=torch.int32).numpy().tobytes())
    corpus = data.open_corpus(Data(path=str(tmp_path / "a.bin"), token_dtype="int32"))
    with pytest.raises(ConfigError, match="contains token -1"):
        samples_of.check_vocabulary(corpus, 256, is_chat=False)


class Rows(list):
    column_names = ("text", "id")


def packages(monkeypatch, **packages):
    for module in (documents, tokenizers):
        monkeypatch.setattr(module, "require", lambda name, purpose: packages[name])


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
        transformers=SimpleNamespace(
            AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **_: tokenizer)
        ),
    )
    choice = Data(path="hf:corpus:subset", tokenizer="some-tokenizer", split="validation")
    assert tokenizing.needs_tokenizing(choice)
    tokenizing.tokenize(choice, tmp_path / "tokens.bin")
    corpus = data.open_corpus(choice, tmp_path / "tokens.bin")
    assert corpus.read(0, corpus.num_tokens).tolist() == [291, 294, 500, 297, 500]
    assert asked == [(("corpus", "subset"), {"split": "validation"})]
    with pytest.raises(ConfigError, match="use one of text, id"):
        tokenizing.tokenize(Data(path="hf:corpus", column="body"), tmp_path / "other.bin")


def test_a_data_set_that_cannot_be_loaded_is_reported_and_leaves_no_tokens(tmp_path, monkeypatch):
    def load_dataset(*_args, **_kwargs):
        raise RuntimeError("no network")

    packages(monkeypatch, datasets=SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConfigError, match="no network"):
        tokenizing.tokenize(Data(path="hf:corpus"), tmp_path / "tokens.bin")
    assert not (tmp_path / "tokens.bin").exists()


def test_a_package_that_is_not_installed_is_reported_with_the_command_that_installs_it():
    from shardwise.train.optional_packages import require

    with pytest.raises(ConfigError, match="pip install surely_not_there"):
        require("surely_not_there", "a test")


# --- the dtype of a binary ------------------------------------------------------------------------------------------

DTYPES = ("uint8", "uint16", "int32", "int64")


def zipf(vocabulary, count):
    """Token ids as text has them: small ones most of the time."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return ((vocabulary**uniform).to(torch.int64) - 1).clamp(0, vocabulary - 1)


def write_binary(path, tokens, dtype):
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    path.write_bytes(b"".join(int(token).to_bytes(width, "little") for token in tokens))
    return path


def read_or_refuse(path, asked, vocabulary):
    """What a run would train on, or the setting that it is told to use."""
    corpus = data.open_corpus(Data(path=str(path), token_dtype=asked), vocabulary=vocabulary)
    samples = samples_of.Texts(corpus, 8, vocabulary, 0.0)
    samples.batch(range(min(samples.num_training, 100)))
    return corpus


@pytest.mark.parametrize(
    ("vocabulary", "written"),
    [
        *((200, "uint8"), (256, "uint16"), (256, "int32"), (32000, "uint16"), (32000, "int32")),
        *((32000, "int64"), (65536, "uint16"), (128256, "int32"), (128256, "int64")),
    ],
)
def test_a_binary_that_is_read_in_another_dtype_is_refused(tmp_path, vocabulary, written):
    tokens = zipf(vocabulary, 2001)
    path = write_binary(tmp_path / "tokens.bin", tokens, written)
    for asked in DTYPES:
        if asked == written:
            corpus = read_or_refuse(path, asked, vocabulary)
            assert corpus.read(0, corpus.num_tokens).tolist() == tokens.tolist()
        else:
            with pytest.raises(ConfigError, match=r"data\.token_dtype"):
                read_or_refuse(path, asked, vocabulary)


def test_a_refusal_names_the_dtype_to_use(tmp_path):
    path = write_binary(tmp_path / "tokens.bin", zipf(50257, 500), "int32")
    with pytest.raises(ConfigError, match=r"does not look like uint16(.|\n)*use data.token_dtype=int32"):
        read_or_refuse(path, "uint16", 50257)
    path.write_bytes(b"plain text that somebody called a binary, twice and thrice. " * 20)
    with pytest.raises(ConfigError, match=r"use data\.token_dtype=uint8"):
        read_or_refuse(path, "uint16", 50257)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unusual_tokens_are_read_as_they_are(tmp_path, dtype):
    """Padding, repetition, few tokens, bytes of text in a model that knows more: no reason to refuse."""
    text = list(b"the quick brown fox jumps over the lazy dog. " * 20)
    half = zipf(200, 400).tolist()
    for tokens in (half + [0] * 4000, [0] * 4000 + half, [1] * 500, [5, 0, 7, 0, 9, 0, 1, 0], text):
        path = write_binary(tmp_path / "tokens.bin", tokens, dtype)
        corpus = data.open_corpus(Data(path=str(path), token_dtype=dtype), vocabulary=32000)
        assert corpus.num_tokens == len(tokens)


# --- tokens that were made before -----------------------------------------------------------------------------------


class Letters:
    eos_token_id = None

    def __init__(self, factor):
        self.factor = factor

    def encode(self, text, add_special_tokens):
        return [ord(letter) * self.factor for letter in text]


def tokens_in(path):
    return data.open_corpus(Data(tokenizer="any"), path)


def test_tokens_are_recomputed_when_the_data_the_tokenizer_or_the_file_changes(tmp_path, monkeypatch):
    loaded = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **_: Letters(len(name)))
    )
    packages(monkeypatch, transformers=loaded)
    text, other, target = tmp_path / "text.txt", tmp_path / "other.txt", tmp_path / "run" / "tokens.bin"
    target.parent.mkdir()
    text.write_text("abc")
    other.write_text("xyz")
    choice = Data(path=str(text), tokenizer="t1")
    assert tokenizing.tokens_state(choice, target) == "missing"
    tokenizing.tokenize(choice, target)
    assert tokenizing.tokens_state(choice, target) == "good"
    assert tokenizing.tokens_state(Data(path=str(other), tokenizer="t1"), target) == "stale"
    assert tokenizing.tokens_state(Data(path=str(text), tokenizer="t22"), target) == "stale"
    assert tokenizing.tokens_state(Data(path=str(text), tokenizer="t1", column="body"), target) == "stale"
    text.write_text("abcd")
    assert tokenizing.tokens_state(choice, target) == "stale"
    tokenizing.tokenize(choice, target)
    assert tokens_in(target).read(0, 4).tolist() == [2 * ord(letter) for letter in "abcd"]
    text.write_text("efgh")  # of the same length
    os.utime(text, (1, 1))
    assert tokenizing.tokens_state(choice, target) == "stale"
    tokenizing.tokenize(choice, target)
    target.write_bytes(target.read_bytes()[:-4])
    assert tokenizing.tokens_state(choice, target) == "stale"
    tokenizing.tokenize(choice, target)
    (target.parent / "tokens.json").unlink()
    assert tokenizing.tokens_state(choice, target) == "stale"


def test_changed_files_of_a_tokenizer_or_of_a_text_folder_are_noticed(tmp_path):
    texts, tokenizer = tmp_path / "texts", tmp_path / "tokenizer"
    for made in (texts, tokenizer):
        made.mkdir()
        (made / "one").write_text("1")
    choice = Data(path=str(texts), tokenizer=str(tokenizer))
    before = tokenizing._origin_of(choice)
    assert tokenizing._origin_of(choice) == before
    (tokenizer / "vocab.json").write_text("{}")
    assert tokenizing._origin_of(choice) != before
    before = tokenizing._origin_of(choice)
    (texts / "two").write_text("2")
    assert tokenizing._origin_of(choice) != before


def test_a_crash_while_tokenizing_leaves_no_tokens_that_are_used(tmp_path, monkeypatch):
    text, target = tmp_path / "text.txt", tmp_path / "run" / "tokens.bin"
    target.parent.mkdir()
    text.write_text("abc")
    loaded = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **_: Letters(2)))
    packages(monkeypatch, transformers=loaded)
    choice = Data(path=str(text), tokenizer="t1")
    tokenizing.tokenize(choice, target)
    text.write_text("other")

    def crash(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizing, "replace_file", crash)
    with pytest.raises(KeyboardInterrupt):
        tokenizing.tokenize(choice, target)
    assert tokenizing.tokens_state(choice, target) == "stale"
