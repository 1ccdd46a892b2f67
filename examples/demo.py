"""Train a small Llama on two CPU ranks; stop it, resume it, compare it with one process bit for bit, and export it.

    make demo                                  # or, with shardwise installed:
    python examples/demo.py --steps 200

Every line that begins with $ is a command you can type yourself. The text it learns is the source of Python's own
standard library, so nothing is downloaded.

Why the two runs must be equal: a run's batches, first weights and learning rates do not depend on the number of ranks.
Two ranks take half of each batch and average their gradients, added in rank order; one process takes the same halves
one after the other. The same arithmetic in the same order, so every weight must come out the same to the last bit.
(Clipping is off for that: the norm of a gradient in two halves rounds differently from that of the whole.)
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from shardwise.checkpoint.weights import open_weights
from shardwise.train.records import read_metrics


def run(*arguments: str) -> None:
    """Runs a command, as it is shown."""
    print("\n$ shardwise " + shlex.join(arguments), flush=True)
    done = subprocess.run([sys.executable, "-m", "shardwise", *arguments], check=False)
    if done.returncode:
        print("the demo ends here; 'shardwise doctor' says what this machine is missing", file=sys.stderr)
        sys.exit(done.returncode)


def weights_of(run_folder: Path) -> dict[str, torch.Tensor]:
    return {
        weight.name: torch.cat(list(weight.rows(weight.dtype))) for weight in open_weights(run_folder).tensors
    }


def compare(left: Path, right: Path) -> bool:
    """Whether two runs left the same losses and weights, to the last bit; tells how far they are apart."""
    losses = [[record.loss for record in read_metrics(folder)] for folder in (left, right)]
    weights = [weights_of(folder) for folder in (left, right)]
    apart = max(
        float((value.double() - weights[1][name].double()).abs().max()) for name, value in weights[0].items()
    )
    same = losses[0] == losses[1] and all(
        torch.equal(value, weights[1][name]) for name, value in weights[0].items()
    )
    print(f"\n  losses              {len(losses[0])} steps, {losses[0][0]:.4f} → {losses[0][-1]:.4f}")
    print(f"  weights             {len(weights[0])} tensors, at most {apart:g} apart")
    if same:
        print("  two ranks and one   equal, bit for bit")
    else:
        print("  two ranks and one   NOT EQUAL: sharding changed the arithmetic", file=sys.stderr)
    return same


def main() -> int:
    arguments = argparse.ArgumentParser(description="Train, resume, compare and export a small model.")
    arguments.add_argument("--steps", type=int, default=80, help="training steps (default: 80)")
    num_steps = max(2, arguments.parse_args().steps)

    with tempfile.TemporaryDirectory(prefix="shardwise-demo-") as folder:
        two, one = Path(folder) / "two", Path(folder) / "one"
        settings = ["--set", f"train.steps={num_steps}", "--set", "optimizer.clip=0"]
        settings += ["--set", f"checkpoint.every={max(1, num_steps // 4)}"]
        lines = ["--set", f"output.every={max(1, num_steps // 10)}"]
        run(
            "train",
            "tiny",
            "--ranks",
            "2",
            *settings,
            *lines,
            "--stop-after",
            str(num_steps // 2),
            "--out",
            str(two),
        )
        run("train", "--resume", str(two), "--ranks", "2")
        # The same batches in the same halves, one after the other, in a single process.
        halves = ["--set", "train.accumulate=2"]
        run("train", "tiny", "--ranks", "1", *settings, *halves, "--out", str(one), "--quiet")
        same = compare(two, one)
        run("convert", str(two), str(Path(folder) / "model"))
        curve = Path("runs") / "demo-loss.png"
        curve.parent.mkdir(exist_ok=True)
        curve.write_bytes((two / "loss.png").read_bytes())
        print(f"\n  the loss curve is in {curve.resolve()}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
