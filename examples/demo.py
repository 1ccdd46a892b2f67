"""Train a small Llama on two CPU ranks; stop it, resume it, compare it with one process bit for bit, and export it.

    make demo                                  # or, with shardwise installed:
    python examples/demo.py --steps 200

Every line that begins with $ is a command you can type yourself; the results stay in ``runs/demo``. The training text
is the source of Python's own standard library, so nothing is downloaded.

Why the two runs must be equal: a run's batches, first weights and learning rates do not depend on the number of ranks.
Two ranks take half of each batch each and average their gradients, added in rank order; one process takes the same
halves one after the other. The same arithmetic in the same order gives the same weights, to the last bit.
(Clipping is off: the norm of a gradient in two halves rounds differently from that of the whole.)
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from shardwise.checkpoint.weights import open_weights
from shardwise.train.records import read_metrics
from shardwise.train.run_folder import new_folder


def as_typed() -> str:
    """Returns the command as a user would type it here."""
    installed = Path(sys.executable).with_name("shardwise")
    if shutil.which("shardwise") is None and installed.exists():
        return os.path.relpath(installed)
    return "shardwise"


def run(why: str, *arguments: str) -> None:
    """Prints what a command is for and the command itself, and runs it."""
    print(f"\n{why}\n$ {as_typed()} {shlex.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "shardwise", *arguments], check=False)
    if done.returncode:
        print(f"the demo ends here; '{as_typed()} doctor' says what this machine is missing", file=sys.stderr)
        sys.exit(done.returncode)


def weights_of(run_folder: Path) -> dict[str, torch.Tensor]:
    return {
        weight.name: torch.cat(list(weight.rows(weight.dtype))) for weight in open_weights(run_folder).tensors
    }


def compare(left: Path, right: Path) -> bool:
    """Returns whether two runs have bitwise equal losses and weights; prints the largest difference."""
    losses = [[record.loss for record in read_metrics(folder)] for folder in (left, right)]
    weights = [weights_of(folder) for folder in (left, right)]
    apart = max(
        float((value.double() - weights[1][name].double()).abs().max()) for name, value in weights[0].items()
    )
    same = losses[0] == losses[1] and all(
        torch.equal(value, weights[1][name]) for name, value in weights[0].items()
    )
    print(
        f"  losses    {len(losses[0])} steps, {losses[0][0]:.4f} in the first, {losses[0][-1]:.4f} in the last"
    )
    print(f"  weights   {len(weights[0])} tensors, at most {apart:g} apart")
    if same:
        print("  so two ranks and one process are equal, bit for bit")
    else:
        print("  NOT EQUAL: sharding changed the arithmetic", file=sys.stderr)
    return same


def main() -> int:
    arguments = argparse.ArgumentParser(description="Train, resume, compare and export a small model.")
    arguments.add_argument("--steps", type=int, default=80, help="training steps (default: 80)")
    num_steps = max(2, arguments.parse_args().steps)

    folder = Path(os.path.relpath(new_folder("", "demo")))
    two, one, model = folder / "two", folder / "one", folder / "model"
    settings = ["--set", f"train.steps={num_steps}", "--set", "optimizer.clip=0"]
    lines = ["--set", f"output.every={max(1, num_steps // 10)}"]
    half = ["--stop-after", str(num_steps // 2)]

    print("A small Llama on two CPU ranks, each with half of every parameter, gradient and optimizer state.")
    run(
        "1. Train, and stop half way:",
        *("train", "tiny", "--ranks", "2", *settings, *lines, *half, "--out", str(two)),
    )
    run("2. Go on from the checkpoint:", "train", "--resume", str(two), "--ranks", "2")
    run(
        "3. Take the same steps in one process, each rank's half of a batch after the other:",
        *("train", "tiny", "--ranks", "1", *settings, "--set", "train.accumulate=2"),
        *("--out", str(one), "--quiet"),
    )
    print("\n4. Compare the two runs:")
    same = compare(two, one)
    run("5. Export the weights, in Hugging Face's layout:", "convert", str(two), str(model))
    print(f"\nAll of it is in {folder}: {two / 'loss.png'} is the loss curve.")
    print(f"Next: '{as_typed()} train tiny' with your own settings, README.md, docs/tutorial.md.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
