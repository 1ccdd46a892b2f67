"""Draws docs/run.svg: what a terminal shows of a real run of ``shardwise train tiny``.

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from shardwise.train.launch import run_local_ranks
from shardwise.train.live import Live
from shardwise.train.loop import Trainer
from shardwise.train.recipes import load_recipe
from shardwise.train.records import RunFacts, Summary
from shardwise.train.team import Team

TARGET = Path(__file__).resolve().parent / "run.svg"
FONTS = "DejaVu Sans Mono, Menlo, Consolas, Liberation Mono, monospace"


class Drawn(Live):
    """Shows what stays on the screen: all but the frames that were drawn over."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console)
        self._live.start = lambda *_: None  # type: ignore[method-assign]

    def begin(self, facts: RunFacts) -> None:
        self._console.print(Text("$ shardwise train tiny", style="bold green"))
        super().begin(facts)


def train_and_draw(folder: Path, device: torch.device) -> None:
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    team = Team()
    trainer = Trainer(load_recipe("tiny"), folder, team, device, Drawn(console))
    summary: Summary = trainer.run()
    if team.rank == 0:
        assert summary.first_loss is not None
        assert summary.last_loss is not None
        assert summary.last_loss < summary.first_loss
        svg = console.export_svg(title="shardwise", clear=False)
        # The reader's own fonts: nothing is fetched, and each system has one of these.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
        TARGET.write_text(svg.replace("Fira Code, monospace", FONTS).replace("arial;", "Arial, sans-serif;"))


def main() -> int:
    with tempfile.TemporaryDirectory() as somewhere:
        os.chdir(somewhere)
        folder = Path("runs") / "tiny"
        folder.mkdir(parents=True)
        status = run_local_ranks(partial(train_and_draw, folder), 2, "cpu")
        os.chdir("/")
    return status


if __name__ == "__main__":
    sys.exit(main())
