"""Models of transformers in ``shardwise train``: trained from a folder, exported with their tokenizer, loaded again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.convert import export_safetensors
from shardwise.checkpoint.weights import open_weights
from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.train import Config, Data, HuggingFaceModel, Llama, Optimization, Training
from shardwise.train.generate import Generator
from shardwise.train.sampling import Sampling
from shardwise.train.sources import tokenize_sources
from shardwise.train.team import Team
from shardwise.train.tokenizers import load_tokenizer
from shardwise.train.trained_model import find_model, load_model
from tests.ranks.test_guides import REPOSITORY, blocks_of
from tests.ranks.training import run_part

transformers = pytest.importorskip("transformers")

TEXT = "the quick brown fox jumps over the lazy dog and the slow green toad sleeps under a warm red stone ."
WORDS = TEXT.split()
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=48, intermediate_size=40, max_position_embeddings=64, **SMALL
    ),
}


def make_folder(folder, config):
    """A model of transformers with new weights, its tokenizer, and texts to train on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["?", "<|end|>", *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(str(folder / "model"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(str(folder / "model"))
    (folder / "texts").mkdir()
    for number in range(3):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(WORDS * 30))
    return folder


def recipe(folder, **model):
    return Config(
        model=HuggingFaceModel(str(folder / "model"), **model),
        data=Data(path=str(folder / "texts"), tokenizer=str(folder / "model")),
        optimizer=Optimization(lr=1e-2, warmup=2),
        train=Training(steps=30, batch_size=4),
    )


def train_and_generate(folder):
    losses, _ = run_part(recipe(folder), folder / "run")
    team, device, found = Team(), torch.device("cpu"), find_model(str(folder / "run"))
    generator = Generator(load_model(found, team, device), found, team, device)
    tokens = load_tokenizer(found.tokenizer).encode("the quick brown")
    made = list(islice(generator.tokens(tokens, Sampling(temperature=0.0)), 8))
    return losses, made, found.source.context


@pytest.mark.parametrize("kind", [*CONFIGS])
def test_a_model_is_trained_exported_with_its_tokenizer_and_says_the_same_in_transformers(tmp_path, kind):
    folder = make_folder(tmp_path, CONFIGS[kind]())
    losses, made, context = run_ranks(train_and_generate, 2, folder, kind="gloo")[0]
    assert losses[-1] < losses[0] / 3
    assert context == {"gpt2": 16, "llama": 64}[kind]
    export_safetensors(open_weights(folder / "run"), folder / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "exported"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "exported"))
    prompt = tokenizer("the quick brown", return_tensors="pt", add_special_tokens=False).input_ids
    for _ in range(8):
        likeliest = model(prompt).logits[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat((prompt, likeliest), dim=1)
    assert prompt[0, 3:].tolist() == made
    assert tokenizer.decode(made[:2]) == "fox jumps"
    assert Path(find_model(str(folder / "exported")).tokenizer) == folder / "exported"


def test_a_model_whose_config_asks_for_tuples_trains_the_same(tmp_path):
    found = []
    for name, returns in (("tuple", False), ("object", True)):
        folder = tmp_path / name
        folder.mkdir()
        config = CONFIGS["gpt2"]()
        config.return_dict = returns
        make_folder(folder, config)
        found.append(run_ranks(train, 1, folder, kind="gloo")[0])
    assert found[0] == found[1]


def train(folder):
    return run_part(recipe(folder), folder / "run", stop_after=3)[0]


def test_what_does_not_fit_the_model_is_refused_before_a_step(tmp_path):
    folder = make_folder(tmp_path, CONFIGS["gpt2"]())
    with pytest.raises(ConfigError, match="at most 16 tokens"):
        recipe(folder, context=17).model.resolved()
    with pytest.raises(ConfigError, match="tokens, but the model's vocabulary is 10"):
        tokenize_sources(recipe(folder).data, tmp_path, print, 10)
    transformers.T5Config(vocab_size=48, d_model=32).save_pretrained(str(tmp_path / "t5"))
    with pytest.raises(ConfigError, match=r"encoder-decoder \(t5\)"):
        HuggingFaceModel(str(tmp_path / "t5"), pretrained=False).resolved()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"'.*empty' cannot be loaded as a model"):
        HuggingFaceModel(str(tmp_path / "empty")).resolved()


def train_on_bytes(folder):
    config = Config(
        model=Llama(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=32),
        data=Data(path=str(folder / "text.txt")),
        optimizer=Optimization(lr=1e-2, warmup=2),
        train=Training(steps=30, batch_size=4),
    )
    run_part(config, folder / "run")


def test_a_model_of_bytes_is_exported_with_a_tokenizer_that_transformers_reads(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("Grüße, 世界! " * 200)
    run_ranks(train_on_bytes, 1, tmp_path, kind="gloo")
    export_safetensors(open_weights(tmp_path / "run"), tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "exported"))
    text = "  Grüße,\n世界!"
    tokens = tokenizer(text).input_ids
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "exported"))
    assert model(torch.tensor([tokens])).logits.shape == (1, len(tokens), 256)
    # And as the tutorial does it.
    (program,) = [
        block for block in blocks_of(REPOSITORY / "docs" / "tutorial.md") if "transformers" in block.text
    ]
    monkeypatch.chdir(tmp_path)
    exec(program.text, {})
    assert capsys.readouterr().out.startswith("The statement ")
