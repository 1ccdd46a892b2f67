"""Rows become samples: JSON lines and Parquet, several sources by weight, conversations padded and packed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.chat import conversation_reader
from shardwise.train.config import Config, Data, Source
from shardwise.train.data import Corpus, open_corpus
from shardwise.train.llama import Llama, LlamaModel
from shardwise.train.losses import IGNORED
from shardwise.train.model import OwnModel, segment_mask, segment_positions
from shardwise.train.sample_order import Mix, SampleOrder
from shardwise.train.samples import Conversations, Mixture, Texts
from shardwise.train.settings import settings_of, with_settings
from shardwise.train.sources import open_data, tokenize_sources
from shardwise.train.tokenizing import token_lists, tokenize


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bytes_in(corpus):
    return bytes(corpus.read(0, corpus.num_tokens).tolist())


# --- rows -----------------------------------------------------------------------------------------------------------


def test_json_lines_are_read_by_key_with_a_line_between_them(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one", "n": 1}, {"text": "two", "n": 2}])
    tokenize(Data(path=path), tmp_path / "tokens.bin")
    assert bytes_in(open_corpus(Data(path=path), tmp_path / "tokens.bin")) == b"one\ntwo\n"


def test_a_folder_may_have_rows_and_texts(tmp_path):
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "b.jsonl", [{"body": "rows"}])
    (tmp_path / "folder" / "a.txt").write_text("text, ")
    choice = Data(path=str(tmp_path / "folder"), column="body")
    tokenize(choice, tmp_path / "tokens.bin")
    assert bytes_in(open_corpus(choice, tmp_path / "tokens.bin")) == b"text, rows\n"


def test_parquet_is_read_a_few_rows_at_a_time(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"row {number}" for number in range(1300)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    choice = Data(path=str(tmp_path / "a.parquet"))
    tokenize(choice, tmp_path / "tokens.bin")
    found = bytes_in(open_corpus(choice, tmp_path / "tokens.bin"))
    assert found.decode().splitlines() == texts


@pytest.mark.parametrize(
    ("line", "problem"),
    [("{", "it is no JSON"), ("[1]", "it is a list"), ('{"body": "x"}', "there is no text in 'text'")],
)
def test_a_bad_row_is_reported_with_its_line_and_leaves_no_tokens(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"{problem}(.|\n)*a\.jsonl, line 2"):
        tokenize(Data(path=str(tmp_path / "a.jsonl")), tmp_path / "tokens.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_rows_without_text_are_left_out_with_a_word_and_half_characters_are_replaced(tmp_path):
    rows = [{"text": "one"}, {"text": None}, {"text": ""}, {"text": "t\ud800wo"}]
    path, said = write_lines(tmp_path / "a.jsonl", rows), []
    tokenize_sources(Data(path=path), tmp_path, said.append)
    found = bytes_in(open_corpus(Data(path=path), tmp_path / "tokens.bin"))
    assert found.decode() == "one\n\nt\N{REPLACEMENT CHARACTER}wo\n"
    assert said[-1] == f"left out 1 of 4 rows of {path}: they have no text"


def test_a_column_of_a_column_is_named_with_dots(tmp_path):
    rows = [{"a.b": "not this", "a": {"b": "deep"}}, {"a": {"b": None}}]
    path = write_lines(tmp_path / "a.jsonl", rows[::-1])
    assert [bytes(each) for each in token_lists(Data(path=path, column="a.b"))] == [b"", b"not this\n"]
    path = write_lines(tmp_path / "b.jsonl", [{"id": 1, "a": {"b": "deep"}}])
    assert [bytes(each) for each in token_lists(Data(path=path, column="a.b"))] == [b"deep\n"]
    with pytest.raises(ConfigError, match=r"'a' is no text(.|\n)*a column with text; there are id, a"):
        list(token_lists(Data(path=path, column="a")))


def test_of_parquet_only_the_column_is_read_and_a_damaged_file_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["x" * 1000, None], "meta": [{"a": "m"}, {"a": "n"}]}), path)
    assert [bytes(each) for each in token_lists(Data(path=str(path)))] == [b"x" * 1000 + b"\n", b""]
    assert [bytes(each) for each in token_lists(Data(path=str(path), column="meta.a"))] == [b"m\n", b"n\n"]
    with pytest.raises(ConfigError, match=r"data\.column to one of: text"):
        list(token_lists(Data(path=str(path), column="body")))
    content = bytearray(path.read_bytes())
    content[10:60] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"it cannot be read(.|\n)*a\.parquet, after row 0"):
        list(token_lists(Data(path=str(path))))


# --- several sources ------------------------------------------------------------------------------------------------


def test_sources_are_settings_with_weights():
    config = with_settings(Config(), ["data.sources=web.jsonl*0.7, code/a.parquet*3"])
    assert config.data.sources == (Source("web.jsonl", 0.7), Source("code/a.parquet", 3.0))
    text = next(value for name, _, value in settings_of(config) if name == "data.sources")
    assert with_settings(Config(), [f"data.sources={text}"]).data.sources == config.data.sources
    assert with_settings(Config(), ["data.sources=a.txt,b.txt"]).data.sources[1] == Source("b.txt")
    for bad in ("a.txt*x", "a.txt*1,b.txt", "a.txt*0,b.txt*1", "a.txt*inf,b.txt*1"):
        with pytest.raises(ConfigError):
            with_settings(Config(), [f"data.sources={bad}"])
    with pytest.raises(ConfigError, match=r"data\.path is c\.txt, and data\.sources is a\.txt"):
        with_settings(Config(), ["data.path=c.txt", "data.sources=a.txt"])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 10)), min_size=2, max_size=5), st.integers(0, 9)
)
def test_every_block_of_draws_has_each_sources_part_and_every_epoch_every_sample_once(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    mix = Mix.of(sizes, weights)
    assert sum(mix.counts) == 4096
    for count, weight in zip(mix.counts, weights, strict=True):
        assert abs(count - 4096 * weight / sum(weights)) <= 1
    order = SampleOrder(sum(sizes), 1, seed=seed, mix=mix)
    drawn = [order.sample(position) for position in range(2 * 4096)]
    start = 0
    for size, count in zip(sizes, mix.counts, strict=True):
        own = Counter(sample - start for sample in drawn if start <= sample < start + size)
        assert own.total() == 2 * count
        # Every sample of a source is drawn equally often: once per epoch, and once more in the one under way.
        assert max(own.values()) <= 2 * count // size + (2 * count % size > 0)
        assert len(own) == min(size, 2 * count)
        start += size


def test_a_source_that_would_never_be_drawn_from_is_refused():
    with pytest.raises(ConfigError, match="source 2"):
        Mix.of((5, 5), (1.0, 1e-5))


def test_a_mixture_reads_each_sample_from_its_source_and_holds_out_a_part_of_each():
    first, second = Corpus([torch.arange(41)]), Corpus([torch.arange(100, 181)])
    parts = [Texts(corpus, 10, 256, 0.25, "end") for corpus in (first, second)]
    mixture = Mixture(parts, "end")
    assert (mixture.num_training, mixture.num_held_out) == (9, 3)
    starts = [int(mixture.read(sample).inputs[0]) for sample in range(12)]
    assert starts == [0, 10, 20, 100, 110, 120, 130, 140, 150, 30, 160, 170]


# --- conversations --------------------------------------------------------------------------------------------------

CHAT = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
    ]
}


def learnt(tokens):
    """Returns the text with the parts that are learnt in brackets."""
    text, inside = "", False
    for token in tokens:
        if (token >= 0) != inside:
            inside = not inside
            text += "[" if inside else "]"
        text += chr(token if token >= 0 else ~token)
    return text + ("]" if inside else "")


def test_only_answers_and_their_ends_are_learnt():
    read = conversation_reader("bytes", learns_all=False)
    tokens = read(CHAT, "here")
    assert learnt(tokens) == "user: hi\0assistant: [yo\0]user: ?\0assistant: [!\0]"
    assert sum(token >= 0 for token in tokens) == 5
    assert learnt(read({"prompt": "2+2=", "completion": "4"}, "here")) == "2+2=[4\0]"
    everything = conversation_reader("bytes", learns_all=True)
    assert learnt(everything({"prompt": "2+2=", "completion": "4"}, "here")) == "[2+2=4\0]"


def test_rows_that_are_no_conversations_are_refused():
    read = conversation_reader("bytes", learns_all=False)
    with pytest.raises(ConfigError, match="neither messages nor prompt and completion, but text"):
        read({"text": "x"}, "here")
    with pytest.raises(ConfigError, match="no list of roles and contents"):
        read({"messages": ["x"]}, "here")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": ["x"], "completion": "y"}, r"its prompt is no text, but \['x'\]"),
        (
            {"messages": [{"role": "user", "content": None}, CHAT["messages"][1]]},
            "message 0 is no text, but None",
        ),
        ({"messages": [{"role": "assistant", "content": ["x"]}]}, "message 0 is no text"),
    ],
)
def test_contents_that_are_no_text_are_refused_and_not_written_as_python_shows_them(row, problem):
    with pytest.raises(ConfigError, match=problem):
        conversation_reader("bytes", learns_all=False)(row, "here")


def test_conversations_without_an_answer_are_left_out_with_a_word(tmp_path):
    alone = {"messages": CHAT["messages"][:1]}
    rows = [CHAT, alone, {"messages": None}, {"prompt": "a", "completion": None}, CHAT]
    path, said = write_lines(tmp_path / "chat.jsonl", rows), []
    tokenize_sources(Data(path=path, format="chat"), tmp_path, said.append)
    assert said[-1] == f"left out 3 of 5 rows of {path}: nothing in them is to be learnt"


def test_conversations_whose_answers_begin_beyond_the_context_are_left_out_and_cut_ones_are_told(tmp_path):
    rows = [{"prompt": "p" * length, "completion": "yes"} for length in (2, 9, 4, 5, 30)]
    path = write_lines(tmp_path / "chat.jsonl", rows)
    for packing in (False, True):
        config = Config(
            model=replace(LLAMA, context=6),
            data=Data(path=path, format="chat", held_out=0.0, packing=packing),
        )
        tokenize_sources(config.data, tmp_path, print)
        samples = open_data(config, tmp_path, 1).samples
        assert samples.remark == (
            "longer than model.context=6 and cut: 4 of 5 conversations; left out, as nothing to learn remains: 2"
        )
        found = [samples.read(number).targets.tolist() for number in range(samples.num_training)]
        assert all(any(target != IGNORED for target in targets) for targets in found)
        assert [len(targets) for targets in found] == [5, 6, 6]
    with pytest.raises(
        ConfigError, match=r"in 5 conversations, nothing to learn is within 1 tokens(.|\n)*raise"
    ):
        open_data(replace(config, model=replace(LLAMA, context=1)), tmp_path, 1)


def conversations(lengths, context, *, packing, held_out=0.0):
    """Conversations of some lengths; every other token is not learnt; conversation c has tokens 10c, 10c + 1, ..."""
    tokens = [
        10 * number + place if place % 2 else ~(10 * number + place)
        for number, length in enumerate(lengths)
        for place in range(length)
    ]
    bounds = torch.stack(
        (torch.tensor(lengths).cumsum(0), torch.ones(len(lengths), dtype=torch.int64)), dim=1
    )
    return Conversations(Corpus([torch.tensor(tokens)]), bounds, context, 512, held_out, packing=packing)


def test_padded_conversations_have_one_row_each_and_no_targets_in_padding_or_prompts():
    samples = conversations([3, 6], 10, packing=False)
    batch = samples.batch([0, 1])
    assert batch.inputs.tolist() == [[0, 1, 0, 0, 0], [10, 11, 12, 13, 14]]
    assert batch.targets.tolist() == [[1, IGNORED, IGNORED, IGNORED, IGNORED], [11, IGNORED, 13, IGNORED, 15]]
    assert batch.segments is None


def test_packs_take_neighbours_for_as_long_as_they_fit_and_long_ones_are_cut():
    samples = conversations([3, 4, 3, 9, 2], 6, packing=True)
    assert samples.num_training == 4
    batch = samples.batch([0, 1, 2, 3])
    assert batch.inputs.tolist() == [
        [0, 1, 10, 11, 12, 0],
        [20, 21, 0, 0, 0, 0],
        [30, 31, 32, 33, 34, 35],
        [40, 0, 0, 0, 0, 0],
    ]
    assert batch.segments.tolist() == [
        [0, 0, 1, 1, 1, -1],
        [0, 0, -1, -1, -1, -1],
        [0] * 6,
        [0, -1, -1, -1, -1, -1],
    ]
    assert batch.targets[0].tolist() == [1, IGNORED, 11, IGNORED, 13, IGNORED]


@given(st.lists(st.integers(2, 12), min_size=1, max_size=30), st.integers(1, 15))
@settings(deadline=None)
def test_packing_and_padding_learn_the_same_targets(lengths, context):
    found = []
    for packing in (False, True):
        samples = conversations(lengths, context, packing=packing)
        batch = samples.batch(range(samples.num_training))
        assert batch.inputs.size(1) <= context
        found.append(batch.targets[batch.targets != IGNORED].tolist())
    assert found[0] == found[1]


def test_a_model_that_cannot_keep_packs_apart_is_refused_before_the_first_step(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [CHAT] * 9)
    config = Config(
        model=OwnModel(torch.nn.Identity, torch.nn.Identity, context=64),
        data=Data(path=path, format="chat", packing=True),
    )
    tokenize_sources(config.data, tmp_path, print)
    with pytest.raises(ConfigError, match=r"OwnModel does not keep packed(.|\n)*data\.packing=false"):
        open_data(config, tmp_path, 1)
    padded = replace(config, data=replace(config.data, packing=False))
    assert open_data(padded, tmp_path, 1).samples.num_training == 8


# --- attention ------------------------------------------------------------------------------------------------------

LLAMA = Llama(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=256, context=16)


def random_llama():
    torch.manual_seed(1)
    return LlamaModel(LLAMA).double()


def test_a_packed_conversation_computes_what_it_computes_alone():
    model = random_llama()
    samples = conversations([5, 7, 4, 9], 16, packing=True)
    alone = conversations([5, 7, 4, 9], 16, packing=False)
    packed = samples.batch([0, 1])
    logits = model(packed.inputs, segments=packed.segments)
    rows = [logits[row][packed.segments[row] == number] for row, number in ((0, 0), (0, 1), (0, 2), (1, 0))]
    gradients = torch.autograd.grad(sum(row.sin().sum() for row in rows), list(model.parameters()))
    separate = [model(alone.read(number).inputs[None])[0] for number in range(4)]
    expected = torch.autograd.grad(sum(row.sin().sum() for row in separate), list(model.parameters()))
    # In double precision: sums have under 2**8 terms of order 1, in a few orders of summation, through two layers.
    for found, wanted in [*zip(rows, separate, strict=True), *zip(gradients, expected, strict=True)]:
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_nothing_in_a_pack_or_its_padding_reaches_another_conversation_to_the_last_bit():
    model = random_llama().float()
    batch = conversations([5, 7, 3], 16, packing=True).batch([0])
    is_second = batch.segments == 1
    changed = torch.where(is_second, batch.inputs, (batch.inputs + 7) % 256)
    before, after = (model(tokens, segments=batch.segments) for tokens in (batch.inputs, changed))
    assert torch.equal(before[is_second], after[is_second])
    assert not torch.equal(before[~is_second], after[~is_second])


def test_positions_begin_anew_in_each_segment_and_nothing_later_or_elsewhere_is_seen():
    segments = torch.tensor([[0, 0, 1, 1, 1, -1], [4, 4, 4, 4, 4, 4]])
    assert segment_positions(segments).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    mask = segment_mask(segments)[:, 0]
    assert mask[1].equal(torch.ones(6, 6, dtype=torch.bool).tril())
    assert mask[0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
