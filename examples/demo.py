"""Train a small transformer on two CPU ranks, sharded, and check it against one process, bit for bit.

    make demo                                  # or, with shardwise installed:
    python examples/demo.py --steps 100

Two processes on this machine train a character model on Python's own documentation. Each keeps half of every
parameter, gathers a block's weights just before it runs, and frees them just after. Then one process trains
the same model from the same seed: it runs both halves of each batch in turn, adds the two gradients in rank
order and divides by two. The same arithmetic in the same order, so every weight must come out the same to the
last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import pydoc
import re
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor, nn

from shardwise import fully_shard
from shardwise.errors import ShardwiseError
from shardwise.testing import run_ranks

NUM_RANKS = 2
SEED = 7
VOCABULARY = 128
CONTEXT = 64
BATCH_OF_A_RANK = 8
WIDTH = 96
NUM_HEADS = 4
NUM_BLOCKS = 4
LEARNING_RATE = 3e-3


# --- the model: nothing in it knows about ranks ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.characters.weight  # tied, as in GPT-2
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> Transformer:
    torch.manual_seed(SEED)
    return Transformer()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


# --- the data: what every Python carries ----------------------------------------------------------------------


def load_text() -> Tensor:
    with contextlib.redirect_stdout(io.StringIO()) as zen:
        importlib.import_module("this")
    pages = [zen.getvalue()]
    for module in (
        "argparse",
        "decimal",
        "difflib",
        "heapq",
        "itertools",
        "random",
        "statistics",
        "textwrap",
    ):
        pages.append(pydoc.plain(pydoc.render_doc(module)))
    # Addresses of objects differ from run to run; without them, so do no losses.
    text = re.sub(r"0x[0-9a-f]+", "0x0", "\n".join(pages))
    codes = [code for code in map(ord, text) if code < VOCABULARY]
    return torch.tensor(codes, dtype=torch.long)


def batch_of(text: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The rank's rows of this step's global batch, and the same rows one character on."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT - 1, (NUM_RANKS, BATCH_OF_A_RANK), generator=generator)[rank]
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, text: Tensor, step: int, rank: int) -> Tensor:
    characters, targets = batch_of(text, step, rank)
    return F.cross_entropy(model(characters).flatten(0, 1), targets.flatten())


# --- two ways to train it -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run leaves behind: the loss of each step, the final weights, and how much it had to keep."""

    losses: list[float]
    weights: dict[str, Tensor]
    kept_bytes: int


def train_sharded(text: Tensor, num_steps: int) -> Run:
    """What each rank does. This is all that sharding changes: two lines that call ``fully_shard``."""
    rank = dist.get_rank()
    model = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = make_optimizer(model)

    progress = Progress("sharded", num_steps, whose_memory="a rank", shown=rank == 0)
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, text, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        progress.show(step + 1, losses[-1])

    weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    return Run(losses, weights, kept_bytes(model, optimizer))


def train_in_one_process(text: Tensor, num_steps: int) -> Run:
    """The same training without ranks: each rank's rows in turn, gradients added in rank order."""
    torch.set_num_threads(1)  # as on the ranks: more threads would add in another order
    model = make_model()
    optimizer = make_optimizer(model)

    progress = Progress("one process", num_steps, whose_memory="in all")
    losses = []
    for step in range(num_steps):
        loss_sum = torch.zeros(())
        gradient_sums: list[Tensor] = []
        for rank in range(NUM_RANKS):
            loss = loss_of(model, text, step, rank)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            loss_sum += loss.detach()
            if gradient_sums:
                for total, gradient in zip(gradient_sums, gradients, strict=True):
                    total += gradient
            else:
                gradient_sums = [gradient.clone() for gradient in gradients]
        for parameter, total in zip(model.parameters(), gradient_sums, strict=True):
            parameter.grad = total / NUM_RANKS
        optimizer.step()
        losses.append((loss_sum / NUM_RANKS).item())
        progress.show(step + 1, losses[-1])

    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return Run(losses, weights, kept_bytes(model, optimizer))


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return (mean / NUM_RANKS).item()


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What this process keeps between steps: weights and optimizer state, its own part of them."""
    kept = [*model.parameters()]
    for state in optimizer.state.values():
        kept += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    return sum(part.nbytes for part in map(local_part, kept))


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- what is shown --------------------------------------------------------------------------------------------


class Progress:
    """One line that is written over and over on a terminal; a line now and then where output goes to a file."""

    def __init__(self, title: str, num_steps: int, *, whose_memory: str, shown: bool = True) -> None:
        self._title = title
        self._num_steps = num_steps
        self._tokens_of_a_step = BATCH_OF_A_RANK * CONTEXT * NUM_RANKS
        self._whose_memory = whose_memory
        self._shown = shown
        self._live = sys.stdout.isatty()
        self._every = 1 if self._live else max(1, num_steps // 4)
        self._began = time.perf_counter()

    def show(self, step: int, loss: float) -> None:
        if not self._shown or (step % self._every and step != self._num_steps):
            return
        tokens_a_second = step * self._tokens_of_a_step / (time.perf_counter() - self._began)
        line = (
            f"  {self._title:<11}  step {step:>3}/{self._num_steps}  loss {loss:.4f}  "
            f"{tokens_a_second:>7,.0f} tokens/s  {resident_bytes() / 2**20:,.0f} MiB {self._whose_memory}"
        )
        if self._live:
            print(f"\r{line}", end="\n" if step == self._num_steps else "", flush=True)
        else:
            print(line, flush=True)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compare(sharded: Run, single: Run) -> bool:
    weight_difference = max(
        (sharded.weights[name] - weight).abs().max().item() for name, weight in single.weights.items()
    )
    loss_difference = max(abs(a - b) for a, b in zip(sharded.losses, single.losses, strict=True))
    same = all(torch.equal(sharded.weights[name], weight) for name, weight in single.weights.items())
    same = same and sharded.weights.keys() == single.weights.keys() and sharded.losses == single.losses

    mine, whole = sharded.kept_bytes / 2**20, single.kept_bytes / 2**20
    print()
    print(f"  kept between steps  {mine:.2f} MiB a rank, {whole:.2f} MiB in one process")
    print(f"  max difference      {weight_difference:g} in the weights, {loss_difference:g} in the losses")
    if same:
        print(
            f"  result              equal, bit for bit: {len(single.losses)} losses, {len(single.weights)} weights"
        )
    else:
        print("  result              NOT EQUAL: sharding changed the arithmetic", file=sys.stderr)
    return same


def main() -> int:
    arguments = argparse.ArgumentParser(description="Train on two CPU ranks and compare with one process.")
    arguments.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    num_steps = max(1, arguments.parse_args().steps)

    text = load_text()
    num_parameters = sum(parameter.numel() for parameter in make_model().parameters())
    print(f"shardwise on torch {torch.__version__}: {NUM_RANKS} CPU ranks, gloo on loopback")
    print(
        f"  {NUM_BLOCKS} blocks, {num_parameters:,} parameters, {len(text):,} characters of Python's documentation"
    )
    print()
    try:
        sharded = run_ranks(train_sharded, NUM_RANKS, text, num_steps, kind="gloo", timeout_seconds=600)[0]
    except ShardwiseError as error:
        print(f"\nthe sharded run failed: {error}", file=sys.stderr)
        print(
            "\nThe ranks meet through a file in the temporary folder and talk over the loopback interface 'lo'.\n"
            "If the traceback speaks of a connection, check that 'lo' is up and not behind a firewall.",
            file=sys.stderr,
        )
        return 1
    single = train_in_one_process(text, num_steps)
    return 0 if compare(sharded, single) else 1


if __name__ == "__main__":
    sys.exit(main())
