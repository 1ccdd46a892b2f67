"""Conversations through the chat template of a real tokenizer, and packs through a model of transformers."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.train.chat import conversation_reader
from shardwise.train.config import Sharding
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.packing_check import check_packing
from shardwise.train.parallel import Parallel

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As templates of models that think: what they show of an answer depends on whether another message follows.
FORGETFUL = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else 'gone' }}")


def make_tokenizer(folder, template):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|user|>", "<|assistant|>", "<|end|>", "hi", "yo", "well", "then", "gone", "?"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return words


def chat(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def test_the_answers_of_a_template_are_learnt_with_their_ends_and_nothing_else(tmp_path):
    words = make_tokenizer(tmp_path, TEMPLATE)
    tokens = conversation_reader(str(tmp_path), learns_all=False)(chat("hi", "yo", "well", "then"), "here")
    shown = [words[token] if token >= 0 else f"({words[~token]})" for token in tokens]
    assert " ".join(shown) == (
        "(<|user|>) (hi) (<|end|>) (<|assistant|>) yo <|end|> (<|user|>) (well) (<|end|>) (<|assistant|>) then <|end|>"
    )


def test_a_template_that_changes_what_it_wrote_is_refused(tmp_path):
    make_tokenizer(tmp_path, FORGETFUL)
    read = conversation_reader(str(tmp_path), learns_all=False)
    with pytest.raises(ConfigError, match="differently once others follow"):
        read(chat("hi", "yo", "well", "then"), "here")


def make_merging_tokenizer(folder, template):
    """A tokenizer whose tokens reach over the ends of messages: ``: yo`` and a line break are one."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"]
    )
    tokenizer.train_from_iterator([": yo\n"] * 50, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return fast


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_answers_are_learnt_whole_where_tokens_reach_over_their_ends(tmp_path):
    tokenizer = make_merging_tokenizer(tmp_path, PLAIN)
    read = conversation_reader(str(tmp_path), learns_all=False)
    rows = {"messages": [{"role": "system", "content": "é 🙂"}, *chat("hi", "yo", "well", "🙂")["messages"]]}
    tokens = read(rows, "here")
    learnt, masked = (
        tokenizer.decode([token if token >= 0 else ~token for token in tokens if (token >= 0) == is_learnt])
        for is_learnt in (True, False)
    )
    everything = "system: é 🙂\nuser: hi\nassistant: yo\nuser: well\nassistant: 🙂\n"
    whole = tokenizer.encode(everything, add_special_tokens=False)
    assert [max(token, ~token) for token in tokens] == whole
    # One token is the end of the prompt and the beginning of the answer.
    assert learnt == ": yo\n🙂\n"
    assert masked == "system: é 🙂\nuser: hi\nassistantuser: well\nassistant: "


def test_a_conversation_that_a_template_refuses_is_named(tmp_path):
    strict = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        + TEMPLATE
    )
    make_tokenizer(tmp_path, strict)
    read = conversation_reader(str(tmp_path), learns_all=False)
    row = {"messages": [{"role": "system", "content": "hi"}, *chat("hi", "yo")["messages"]]}
    with pytest.raises(ConfigError, match=r"refuses it: TemplateError: no system turns(.|\n)*line 7"):
        read(row, "a.jsonl, line 7")
    assert read(chat("hi", "yo"), "here")


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_of_transformers_keeps_packed_conversations_apart(attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    )
    tokens = torch.randint(0, 64, (1, 11), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[0] * 4 + [1] * 5 + [-1] * 2])
    packed = model(tokens, **HuggingFaceModel("any").segment_arguments(segments)).logits[0]
    for first, last in ((0, 4), (4, 9)):
        alone = model(tokens[:, first:last]).logits[0]
        torch.testing.assert_close(packed[first:last], alone, rtol=1e-11, atol=1e-12)


class Made(HuggingFaceModel):
    """A model of transformers that needs no files."""

    def __init__(self, config, attention):
        super().__init__("any", context=24, vocabulary=64)
        object.__setattr__(self, "made", (config, attention))

    def build(self):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        config, attention = self.made
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def check_all(sharding, **models):
    found = {}
    for name, (config, attention) in models.items():
        source = Made(config, attention)
        parallel = Parallel(source, sharding, torch.device("cpu"), 0)
        try:
            check_packing(parallel, source.context, source.vocabulary, torch.device("cpu"))
        except ConfigError as error:
            found[name] = str(error)
        assert parallel.module.training
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_does_not_keep_packs_apart_is_refused_before_the_first_step(precision):
    transformers = pytest.importorskip("transformers")
    models = {
        "llama": (transformers.LlamaConfig(**SIZES), "sdpa"),
        "gpt neo": (
            transformers.GPTNeoConfig(
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                vocab_size=64,
                attention_types=[[["global"], 2]],
                max_position_embeddings=64,
            ),
            "eager",
        ),
        "window": (transformers.MistralConfig(**SIZES, sliding_window=3), "sdpa"),
        "bloom": (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64), "eager"),
        "mamba": (
            transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4),
            "eager",
        ),
    }
    (found,) = run_ranks(check_all, 1, Sharding(precision=precision), kind="gloo", **models)
    assert sorted(found) == ["bloom", "mamba", "window"]
    assert "logits of up to" in found["window"]
    assert "it raised" in found["bloom"]
