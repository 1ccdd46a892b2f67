"""Drawing tokens, the cache of keys and values, and text from tokens: without ranks."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from shardwise.errors import ConfigError, StateError
from shardwise.train.llama import KeyValueCache, Llama
from shardwise.train.model import OwnModel
from shardwise.train.sampling import Sampling, draw, probabilities, tokens_after
from shardwise.train.tokenizers import Bytes, Ids, load_tokenizer, save_tokenizer

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, 3.0])


def chances(**settings):
    tokens, found = probabilities(LOGITS, Sampling(**settings))
    return dict(zip(tokens.tolist(), found.tolist(), strict=True))


def test_probabilities_are_the_softmax_at_this_temperature():
    expected = torch.softmax(LOGITS.double() / 0.5, dim=0)
    assert chances(temperature=0.5) == pytest.approx(dict(enumerate(expected.tolist())))


def test_temperature_0_takes_the_first_of_the_likeliest():
    assert chances(temperature=0.0) == {1: 1.0}


def test_top_k_and_top_p_keep_the_likeliest_and_scale_them_to_1():
    assert list(chances(top_k=3)) == [1, 4, 3]
    assert sum(chances(top_k=3).values()) == pytest.approx(1.0)
    # The two likeliest have less than 0.9 together, the three likeliest more.
    assert list(chances(temperature=1.0, top_p=0.9)) == [1, 4, 3]
    assert list(chances(temperature=1.0, top_p=1e-9)) == [1]


def test_draws_have_these_probabilities_and_repeat_with_their_seed():
    sampling = Sampling(temperature=1.0, top_k=3)
    drawn = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        drawn.append([draw(LOGITS, sampling, generator) for _ in range(3000)])
    assert drawn[0] == drawn[1]
    for token, chance in chances(temperature=1.0, top_k=3).items():
        assert drawn[0].count(token) / 3000 == pytest.approx(chance, abs=0.03)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match="fix: "):
        Sampling(**wrong)


def test_an_output_that_is_not_a_number_is_reported():
    with pytest.raises(StateError, match="not a number"):
        probabilities(torch.tensor([0.0, float("nan")]), Sampling())


# --- the cache ----------------------------------------------------------------------------------------------------


def llama(dtype):
    torch.manual_seed(0)
    source = Llama(layers=3, width=24, heads=4, kv_heads=2, hidden=40, vocabulary=50, context=16)
    return source, source.build().to(dtype)


def test_the_first_tokens_with_a_cache_are_bitwise_those_without():
    source, model = llama(torch.float32)
    tokens = torch.randint(50, (2, 9))
    assert torch.equal(model.model(tokens), model.model(tokens, KeyValueCache(3)))
    logits, _ = source.extend(model, tokens, None)
    torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(5, 1, 1, 1, 1), (1, 8), (3, 3, 3)])
def test_tokens_after_a_cache_get_the_logits_that_they_get_together(lengths):
    # In double precision: matrix products of other shapes add in another order.
    source, model = llama(torch.float64)
    tokens = torch.randint(50, (2, 9))
    whole, cache, start = model(tokens), None, 0
    for length in lengths:
        logits, cache = source.extend(model, tokens[:, start : start + length], cache)
        start += length
        torch.testing.assert_close(logits, whole[:, start - 1], rtol=1e-6, atol=1e-7)
        assert cache.length == start


def test_a_model_without_a_cache_runs_all_tokens_again():
    source = OwnModel(make=lambda: None, unit=torch.nn.Linear)
    seen = []

    def module(tokens):
        seen.append(tokens.tolist())
        return torch.nn.functional.one_hot(tokens, 8).float()

    _, cache = source.extend(module, torch.tensor([[1, 2]]), None)
    logits, _ = source.extend(module, torch.tensor([[3]]), cache)
    assert seen == [[[1, 2]], [[1, 2, 3]]]
    assert int(logits.argmax()) == 3


def test_text_longer_than_the_context_goes_on_from_its_last_half():
    seen = []

    def extend(tokens, cache):
        cache = [*(cache or []), *tokens]
        seen.append(cache)
        return torch.tensor(float(len(seen))), cache

    made = list(itertools.islice(tokens_after([1, 2, 3], extend, 4, lambda logits: 100 + int(logits)), 4))
    assert made == [101, 102, 103, 104]
    assert seen == [[1, 2, 3], [1, 2, 3, 101], [101, 102], [101, 102, 103]]


# --- tokenizers ---------------------------------------------------------------------------------------------------


def test_bytes_become_characters_once_all_of_their_bytes_have_come():
    stream = Bytes().stream()
    shown = [stream.add(token) for token in Bytes().encode("aé€")]
    assert shown == ["a", "", "é", "", "", "€"]
    assert stream.add(0xE2) == ""
    assert stream.finish() == "�"


def test_unknown_tokenizers_take_and_show_numbers():
    assert Ids().encode("3 14 159") == [3, 14, 159]
    assert Ids().stream().add(26) == " 26"
    with pytest.raises(ConfigError, match="--tokenizer"):
        Ids().encode("some text")


def test_a_saved_byte_tokenizer_maps_each_byte_to_its_number(tmp_path):
    save_tokenizer("bytes", tmp_path / "kept")
    assert isinstance(load_tokenizer(str(tmp_path / "kept")), Bytes)
    vocabulary = json.loads((tmp_path / "kept" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == 65
    # Byte-level vocabularies write a space as this letter.
    assert vocabulary["Ġ"] == 32
