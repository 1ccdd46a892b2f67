"""Cuts sequences from tokens: of one length from texts, or conversations, padded or packed; and mixes several sources.

    texts      │ context tokens │ context tokens │ …        every token but the first is a target
    padded     │ conversation ░░│ conversation ░░░░░░│ …
    packed     │ conversation ▏ another ▏ a third ░░│ …     none sees the others

Samples are numbered: those to train on come first, held-out ones after them; `held_out` says where both lie in the
data. Any sample can be read at any time, so a run resumes at the exact sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.config import Place
from shardwise.train.data import Corpus
from shardwise.train.held_out import HeldOut
from shardwise.train.losses import IGNORED
from shardwise.train.records import counted
from shardwise.train.sample_order import shuffled

__all__ = ["Batch", "Conversations", "Mixture", "Samples", "Texts", "check_vocabulary"]

_PADDING = 0
_MIXTURE_KEY = 0x3175
_BLOCK = 1 << 20
_MOST_BLOCKS = 32


class Batch(NamedTuple):
    """Sequences, one in each row. Of one sequence, too, in which the tensors have one dimension less."""

    inputs: Tensor
    targets: Tensor
    """The token after each input, or ``IGNORED``."""
    segments: Tensor | None = None
    """The number of each token's conversation in its row, if rows have several."""

    def to(self, device: torch.device) -> Batch:
        segments = None if self.segments is None else self.segments.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), segments)


class Samples(ABC):
    """Numbered samples of one data source, or several: those to train on, then those held out."""

    num_training: int
    num_held_out: int
    targets_of_sample: int | None
    """The number of targets in every sample; None if samples differ."""
    remark: str = ""
    """What to tell about samples that are not as they are in the data."""

    @abstractmethod
    def read(self, sample: int) -> Batch:
        """Returns one sequence."""

    def batch(self, samples: Sequence[int]) -> Batch:
        """Returns a row for each sample, padded to the longest."""
        return _stacked([self.read(sample) for sample in samples])


class _SourceSamples(Samples):
    """The samples of one source.

    Args:
        num_samples: the number of all samples.
        held_out: the fraction of them that is held out.
        place: where they are held out.
        targets_of_sample: the number of targets in every sample; None if samples differ.
        size: what the data has, for errors.

    Raises:
        ConfigError: there is not one sample to train on and, if some are to be held out, one of those.
    """

    def __init__(
        self, num_samples: int, held_out: float, place: Place, targets_of_sample: int | None, size: str
    ) -> None:
        self.num_held_out = min(num_samples - 1, max(1, round(num_samples * held_out))) if held_out else 0
        self.num_training = num_samples - self.num_held_out
        self.targets_of_sample = targets_of_sample
        if self.num_training < 1 or (held_out and self.num_held_out < 1):
            raise ConfigError(
                f"the data has {size}",
                where="data.path",
                fix="use more data, a smaller model.context, or data.held_out=0"
                if held_out
                else "use more data, or a smaller model.context",
            )
        self._held_out = HeldOut(num_samples, self.num_held_out, place)

    def read(self, sample: int) -> Batch:
        if sample < self.num_training:
            return self.read_at(self._held_out.training_place(sample))
        return self.read_at(self._held_out.held_out_place(sample - self.num_training))

    @abstractmethod
    def read_at(self, place: int) -> Batch:
        """Returns the sequence at a place in the data."""


class Texts(_SourceSamples):
    """Sequences of one length from texts that follow one another without a gap."""

    def __init__(
        self, corpus: Corpus, context: int, vocabulary: int, held_out: float, place: Place = "everywhere"
    ) -> None:
        self._corpus, self._context, self._vocabulary = corpus, context, vocabulary
        size = f"{corpus.num_tokens} tokens, too few for sequences of {context}"
        super().__init__(max(0, corpus.num_tokens - 1) // context, held_out, place, context, size)

    def read_at(self, place: int) -> Batch:
        start = place * self._context
        tokens = self._corpus.read(start, start + self._context + 1)
        _check_tokens(tokens, self._vocabulary)
        return Batch(tokens[:-1], tokens[1:])


class Conversations(_SourceSamples):
    """Conversations, each cut to the context; those in which nothing to learn remains are left out.

    Args:
        corpus: their tokens; those that are not to be learnt as their complement.
        bounds: for each of them, where it ends in the corpus, and the first of its tokens that is a target.
        context: the most tokens of a sequence.
        vocabulary: the number of different tokens.
        held_out: the fraction of samples that is held out.
        place: where they are held out.
        packing: put as many neighbours as fit into a sequence.
    """

    def __init__(
        self,
        corpus: Corpus,
        bounds: Tensor,
        context: int,
        vocabulary: int,
        held_out: float,
        place: Place = "everywhere",
        *,
        packing: bool,
    ) -> None:
        self._corpus, self._context, self._vocabulary = corpus, context, vocabulary
        self._ends, first_targets = bounds.unbind(1)
        # A conversation of n tokens has n - 1 inputs.
        lengths = self._ends.diff(prepend=torch.zeros(1, dtype=torch.int64)) - 1
        self._kept = (first_targets <= context).nonzero().flatten()
        if not self._kept.numel():
            raise ConfigError(
                f"in {counted(self._ends.numel(), 'conversation')}, nothing to learn is within {context} tokens",
                where=f"model.context={context}",
                fix="raise model.context, or use shorter conversations",
            )
        kept_lengths = lengths[self._kept]
        self._firsts = _packs(kept_lengths.clamp(max=context), context) if packing else None
        num_samples = self._kept.numel() if self._firsts is None else self._firsts.numel() - 1
        num_all, num_kept = self._ends.numel(), self._kept.numel()
        if num_long := int((lengths > context).sum()):
            of_all = f"{num_long} of {counted(num_all, 'conversation')}"
            self.remark = f"longer than model.context={context} and cut: {of_all}"
            if num_kept < num_all:
                self.remark += f"; left out, as nothing to learn remains: {num_all - num_kept}"
        made = counted(num_samples, "sequence")
        size = f"{counted(num_all, 'conversation')}, which make {made} of up to {context} tokens"
        super().__init__(num_samples, held_out, place, None, size)

    def read_at(self, place: int) -> Batch:
        if self._firsts is None:
            return Batch(*self._conversation(place))
        first, last = self._firsts[place : place + 2].tolist()
        inputs, targets = zip(*map(self._conversation, range(first, last)), strict=True)
        segments = [torch.full_like(each, number) for number, each in enumerate(inputs)]
        return Batch(torch.cat(inputs), torch.cat(targets), torch.cat(segments))

    def _conversation(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of the so many-th conversation that is not left out."""
        number = int(self._kept[number])
        start = 0 if number == 0 else int(self._ends[number - 1])
        tokens = self._corpus.read(start, min(int(self._ends[number]), start + self._context + 1))
        is_learnt = tokens >= 0
        tokens = torch.where(is_learnt, tokens, ~tokens)
        _check_tokens(tokens, self._vocabulary)
        return tokens[:-1], tokens[1:].where(is_learnt[1:], IGNORED)


class Mixture(Samples):
    """Several sources as one: all training samples, source by source, then all held-out ones.

    Held-out samples of all sources are shuffled if they are from everywhere: an evaluation may read only the first.
    """

    def __init__(self, parts: Sequence[Samples], place: Place = "everywhere") -> None:
        self._parts, self._is_spread = parts, place == "everywhere"
        self._training = [0, *accumulate(part.num_training for part in parts)]
        self._held_out = [0, *accumulate(part.num_held_out for part in parts)]
        self.remark = "; ".join(part.remark for part in parts if part.remark)
        same = {part.targets_of_sample for part in parts}
        self.targets_of_sample = same.pop() if len(same) == 1 else None
        self.num_training, self.num_held_out = self._training[-1], self._held_out[-1]

    def read(self, sample: int) -> Batch:
        if sample < self.num_training:
            part = bisect_right(self._training, sample) - 1
            return self._parts[part].read(sample - self._training[part])
        sample -= self.num_training
        if self._is_spread:
            sample = shuffled(sample, self.num_held_out, _MIXTURE_KEY)
        part = bisect_right(self._held_out, sample) - 1
        return self._parts[part].read(self._parts[part].num_training + sample - self._held_out[part])


def _packs(lengths: Tensor, context: int) -> Tensor:
    """Returns the first conversation of each pack, and the end: each takes the next ones for as long as they fit."""
    sums = lengths.cumsum(0)
    firsts, number, done = [0], 0, 0
    while number < lengths.numel():
        number = int(torch.searchsorted(sums, done + context, right=True))
        done = int(sums[number - 1])
        firsts.append(number)
    return torch.tensor(firsts)


def check_vocabulary(corpus: Corpus, vocabulary: int, *, is_chat: bool) -> None:
    """Raises ConfigError if tokens are beyond the vocabulary: of a large corpus, some from all over it are read.

    The others are checked as they are used. Tokens of chats that are not to be learnt are kept as their complement.
    """
    if corpus.highest_possible < vocabulary:
        return
    num_blocks = math.ceil(corpus.num_tokens / _BLOCK)
    for number in range(0, num_blocks, math.ceil(num_blocks / _MOST_BLOCKS)):
        tokens = corpus.read(number * _BLOCK, min(corpus.num_tokens, (number + 1) * _BLOCK))
        _check_tokens(tokens.where(tokens >= 0, ~tokens) if is_chat else tokens, vocabulary)


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    lowest, highest = int(tokens.min()), int(tokens.max())
    if highest >= vocabulary or lowest < 0:
        raise ConfigError(
            f"the data contains token {lowest if lowest < 0 else highest}, but the model's vocabulary is {vocabulary}",
            where="data.path",
            fix="use the model's own tokenizer (data.tokenizer), check data.token_dtype, or raise model.vocabulary",
        )


def _stacked(rows: Sequence[Batch]) -> Batch:
    def stacked(tensors: Sequence[Tensor], padding: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=padding)

    segments = [row.segments for row in rows if row.segments is not None]
    return Batch(
        stacked([row.inputs for row in rows], _PADDING),
        stacked([row.targets for row in rows], IGNORED),
        # Padding is a segment of its own: it sees itself and no conversation.
        stacked(segments, -1) if segments else None,
    )
