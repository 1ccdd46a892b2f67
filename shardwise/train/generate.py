"""``shardwise generate``: text from a trained model, on one process or sharded over ranks.

All ranks compute every token together, rank 0 draws it, and rank 0 alone reads prompts and writes text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.model_ranks import run_model_ranks
from shardwise.train.parallel import Parallel
from shardwise.train.sampling import Sampling, draw, tokens_after
from shardwise.train.team import Team
from shardwise.train.tokenizers import Tokenizer, load_tokenizer
from shardwise.train.trained_model import TrainedModel, find_model, load_model

__all__ = ["Generator", "Request", "generate"]


@dataclass(frozen=True)
class Request:
    """The arguments of ``shardwise generate``."""

    model: str
    prompts: tuple[str, ...] = ()
    is_interactive: bool = False
    """Ask for prompts in the terminal, one after another."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 200
    recipe: str | None = None
    tokenizer: str | None = None
    ranks: int | None = None
    device: str = "auto"
    as_json: bool = False


def generate(request: Request) -> int:
    """Generates text, and returns the exit status."""
    if request.max_tokens < 1:
        raise ConfigError(
            f"{request.max_tokens} tokens were asked for", where="--max-tokens", fix="use 1 or more"
        )
    # Before any rank exists, so that a bad request fails at once.
    model = find_model(request.model, request.recipe, request.tokenizer)
    tokenizer = load_tokenizer(model.tokenizer)
    for prompt in request.prompts:
        check_tokens(tokenizer.encode(prompt), model)
    return run_model_ranks(partial(generate_on_rank, request), request.ranks, request.device)


def generate_on_rank(request: Request, device: torch.device) -> None:
    team = Team()
    model = team.together(lambda: find_model(request.model, request.recipe, request.tokenizer))
    tokenizer = team.together(lambda: load_tokenizer(model.tokenizer))
    generator = Generator(load_model(model, team, device), model, team, device)
    show = _as_json if request.as_json else _as_text
    for number, prompt in enumerate(_prompts(request, team)):
        try:
            # All ranks have the same prompt, so all of them refuse it or none does.
            tokens = tokenizer.encode(prompt) or list(tokenizer.start)
            check_tokens(tokens, model)
        except ConfigError as error:
            if not request.is_interactive:
                raise
            if team.rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        context = model.source.context
        if team.rank == 0 and len(tokens) > context:
            lengths = f"the prompt has {len(tokens)} tokens, of which the model sees the last {context}"
            print(f"note: {lengths}", file=sys.stderr, flush=True)
        made = islice(generator.tokens(tokens, request.sampling, number), request.max_tokens)
        if team.rank == 0:
            is_next = number > 0 and not request.is_interactive
            show(prompt, until_end(made, tokenizer), tokenizer, is_next)
        else:
            for _ in until_end(made, tokenizer):
                pass


class Generator:
    """Generates tokens with a model on all ranks; every rank gets the same tokens."""

    def __init__(self, parallel: Parallel, model: TrainedModel, team: Team, device: torch.device) -> None:
        self._parallel, self._model, self._team, self._device = parallel, model, team, device

    def tokens(self, prompt: list[int], sampling: Sampling, number: int = 0) -> Iterator[int]:
        """Yields tokens after a prompt, without end; ``number`` makes the draws of several prompts differ."""
        random = torch.Generator().manual_seed((sampling.seed * 1_000_003 + number) % (1 << 63))
        choose = partial(self._choose, sampling=sampling, random=random)
        return tokens_after(prompt, self._extend, self._model.source.context, choose)

    def _extend(self, tokens: list[int], cache: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            logits, cache = self._parallel.extend(torch.tensor([tokens], device=self._device), cache)
        return logits[0], cache

    def _choose(self, logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
        token = draw(logits, sampling, random)
        if self._team.world_size == 1:
            return token
        # Rank 0 decides: devices may round differently.
        shared = torch.tensor([token])
        dist.broadcast(shared, 0, group=self._team.group)
        return int(shared)


def until_end(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[int]:
    """Yields tokens up to the one that ends a text."""
    for token in tokens:
        if token == tokenizer.end:
            return
        yield token


def check_tokens(tokens: list[int], model: TrainedModel) -> None:
    odd = next((token for token in tokens if not 0 <= token < model.source.vocabulary), None)
    if odd is not None:
        raise ConfigError(
            f"the prompt contains token {odd}, but the model's vocabulary is {model.source.vocabulary}",
            where="the prompt",
            fix="use the tokenizer that the model was trained with: --tokenizer NAME",
        )


# --- prompts and text ---------------------------------------------------------------------------------------------


def _prompts(request: Request, team: Team) -> Iterator[str]:
    if not request.is_interactive:
        yield from request.prompts or ("",)
        return
    ask = _ask_in_terminal() if team.rank == 0 else None
    while (prompt := team.from_first(lambda: ask() if ask else None)) is not None:
        if prompt:
            yield prompt


def _ask_in_terminal() -> Callable[[], str | None]:
    """Returns a function that asks for a line in the terminal; None at its end."""
    # A rank started here has no standard input of its own.
    terminal = os.open("/dev/tty", os.O_RDWR)
    os.dup2(terminal, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  for as long as the process lives
    import readline  # noqa: F401  lines can be edited and recalled

    print("Type the beginning of a text, and the model goes on. Ctrl-D ends.", file=sys.stderr, flush=True)

    def ask() -> str | None:
        try:
            return input("> ")
        except EOFError:
            print()
            return None

    return ask


def _as_text(prompt: str, tokens: Iterator[int], tokenizer: Tokenizer, is_next: bool) -> None:
    if is_next:
        print("---")
    stream = tokenizer.stream()
    print(prompt, end="", flush=True)
    for token in tokens:
        print(stream.add(token), end="", flush=True)
    print(stream.finish(), flush=True)


def _as_json(prompt: str, tokens: Iterator[int], tokenizer: Tokenizer, _is_next: bool) -> None:
    begun = time.perf_counter()
    stream = tokenizer.stream()
    made = list(tokens)
    text = "".join(map(stream.add, made)) + stream.finish()
    seconds = time.perf_counter() - begun
    record = {"prompt": prompt, "text": text, "tokens": len(made), "seconds": seconds}
    print(json.dumps(record), flush=True)
