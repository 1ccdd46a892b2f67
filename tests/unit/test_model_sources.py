"""What a model's files and outputs say is read, or refused in one sentence, before anything is trained."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train import hub, hugging_face, tokenizers
from shardwise.train.data import Corpus
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.model import OwnModel
from shardwise.train.samples import check_vocabulary

# --- models by name -----------------------------------------------------------------------------------------------


class Loader:
    """A class of transformers that has these names in its cache, and these on the hub."""

    def __init__(self, cached=(), online=(), result="loaded"):
        self.cached, self.online, self.result, self.asked = cached, online, result, []

    def from_pretrained(self, name, local_files_only=False):
        self.asked.append((name, local_files_only))
        if name in self.cached or (name in self.online and not local_files_only):
            return self.result
        raise OSError(
            f"no {name} in the cache\nand a second line" if local_files_only else f"no {name} there\nnow"
        )


def test_what_was_downloaded_before_is_used_without_asking_the_hub(monkeypatch):
    monkeypatch.setattr(hub, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    loader = Loader(cached=("org/name",))
    assert hub.load_from_hub(loader, "org/name", "model") == "loaded"
    assert loader.asked == [("org/name", True)]


def test_a_name_is_looked_up_on_the_hub_and_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    assert hub.load_from_hub(Loader(online=("name",)), "name", "model") == "loaded"
    with pytest.raises(ConfigError, match="'other' cannot be loaded as a model: no other there\n"):
        hub.load_from_hub(Loader(), "other", "model")
    monkeypatch.setattr(hub, "_hub_answers", lambda: False)
    loader = Loader(online=("name",))
    with pytest.raises(ConfigError, match="hub cannot be reached to look up that name"):
        hub.load_from_hub(loader, "name", "model")
    assert loader.asked == [("name", True)]


def test_a_folder_that_is_missing_is_never_looked_up(tmp_path):
    (tmp_path / "file").write_text("x")
    loader = Loader()
    for name in ("./nowhere", "~/nowhere", "/no/where", "a/b/c", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=f"there is no folder '{name}'"):
            hub.load_from_hub(loader, name, "model")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        hub.load_from_hub(loader, str(tmp_path / "file"), "model")
    assert loader.asked == []


def test_a_hub_that_is_offline_or_has_no_address_does_not_answer(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert not hub._hub_answers()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub.urllib.request, "urlopen", lambda *_, **__: pytest.fail("it was asked"))
    assert not hub._hub_answers()


def made_for(monkeypatch, folder, **config):
    config = {"is_encoder_decoder": False, "model_type": "any", "vocab_size": 300, **config}
    made = SimpleNamespace(**config)
    made.get_text_config = lambda: made
    package = SimpleNamespace(AutoConfig=SimpleNamespace(from_pretrained=lambda name: made))
    monkeypatch.setattr(hugging_face, "require", lambda *_: package)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "asked", "context"),
    [
        ({"max_position_embeddings": 64}, {}, 64),
        ({"max_position_embeddings": 64}, {"context": 32}, 32),
        ({"max_position_embeddings": 131072}, {}, 1024),
        ({}, {}, 1024),
        ({}, {"context": 5000}, 5000),
    ],
)
def test_vocabulary_and_longest_context_are_those_of_the_config(
    monkeypatch, tmp_path, config, asked, context
):
    model = HuggingFaceModel(made_for(monkeypatch, tmp_path, **config), **asked)
    model.check()
    assert (model.resolved().context, model.resolved().vocabulary) == (context, 300)


@pytest.mark.parametrize(
    ("config", "asked", "words"),
    [
        ({"max_position_embeddings": 64}, {"context": 65}, "at most 64 tokens(.|\n)*model.context=64"),
        ({}, {"vocabulary": 301}, "model.vocabulary is 301, but the model knows 300"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, {}, r"an encoder-decoder \(t5\)"),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(monkeypatch, tmp_path, config, asked, words):
    with pytest.raises(ConfigError, match=words):
        HuggingFaceModel(made_for(monkeypatch, tmp_path, **config), **asked).resolved()


def test_a_missing_folder_is_refused_before_transformers_is_imported(monkeypatch):
    monkeypatch.setattr(hugging_face, "require", lambda *_: pytest.fail("imported"))
    with pytest.raises(ConfigError, match=r"there is no folder '\./nowhere'"):
        HuggingFaceModel("./nowhere").check()


def test_a_tokenizer_of_another_model_is_refused(monkeypatch, tmp_path):
    found = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 299})
    package = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda name: found))
    monkeypatch.setattr(tokenizers, "require", lambda *_: package)
    tokenizers.check_tokenizer(str(tmp_path), 300)
    with pytest.raises(ConfigError, match="has 300 tokens, but the model's vocabulary is 256"):
        tokenizers.check_tokenizer(str(tmp_path), 256)


def test_tokens_beyond_the_vocabulary_are_found_before_the_first_step_also_in_chats(monkeypatch):
    monkeypatch.setattr("shardwise.train.samples._BLOCK", 8)
    tokens = torch.arange(100, dtype=torch.int32) % 50
    check_vocabulary(Corpus([tokens, ~tokens]), 50, is_chat=True)
    for odd in (50, ~50):
        with pytest.raises(ConfigError, match="token 50, but the model's vocabulary is 50"):
            check_vocabulary(Corpus([tokens, torch.tensor([odd], dtype=torch.int32)]), 50, is_chat=True)
    with pytest.raises(ConfigError, match="token -4, but"):
        check_vocabulary(Corpus([tokens, ~tokens]), 50, is_chat=False)
    # Bytes need not be read for a vocabulary that has them all.
    monkeypatch.setattr(Corpus, "read", lambda *_: pytest.fail("read"))
    check_vocabulary(Corpus([torch.zeros(9, dtype=torch.uint8)]), 256, is_chat=False)


# --- what a model returns -----------------------------------------------------------------------------------------

LOGITS = torch.zeros(2, 3, 8)
Output = namedtuple("Output", ["loss", "logits"])
SOURCE = OwnModel(torch.nn.Identity, torch.nn.Identity, context=3, vocabulary=8)


class Named(dict):
    """As a ModelOutput: a mapping with attributes."""

    logits = LOGITS


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, None),
        (torch.zeros(()), LOGITS, (torch.zeros(2, 3, 4),)),
        [LOGITS],
        Output(torch.zeros(()), LOGITS),
        {"loss": None, "logits": LOGITS},
        SimpleNamespace(logits=LOGITS),
        Named(),
    ],
    ids=["tensor", "tuple", "tuple with loss", "list", "named tuple", "dict", "object", "ModelOutput"],
)
def test_logits_are_found_in_whatever_models_return(output):
    assert SOURCE.logits(output) is LOGITS


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "returned None"),
        ((torch.zeros(2), None), r"returned a tuple of a tensor of shape \(2,\), None, which has no logits"),
        ({"hidden": LOGITS}, "a dict of hidden"),
        (SimpleNamespace(logits=None), "a SimpleNamespace"),
    ],
)
def test_an_output_without_logits_is_refused_by_name(output, words):
    with pytest.raises(ConfigError, match=words):
        SOURCE.logits(output)


def test_logits_of_the_last_token_only_or_of_fewer_tokens_are_refused_by_name():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    SOURCE.check_logits(LOGITS, tokens)
    SOURCE.check_logits(torch.zeros(2, 3, 10), tokens)
    for shape in ((2, 1, 8), (2, 3, 7), (2, 8)):
        with pytest.raises(ConfigError, match=r"tokens of shape \(2, 3\) and a vocabulary of 8"):
            SOURCE.check_logits(torch.zeros(shape), tokens)
