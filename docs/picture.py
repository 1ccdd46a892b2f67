"""Draws docs/run.svg: what a terminal shows of a real run of ``shardwise train tiny``.

python docs/picture.py           # on a machine that does nothing else: the picture shows its speed
"""

from __future__ import annotations

import base64
import html
import io
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import matplotlib
import torch
from fontTools import subset
from rich.console import Console
from rich.text import Text

from shardwise.train.launch import run_local_ranks
from shardwise.train.live import Live
from shardwise.train.loop import Trainer
from shardwise.train.recipes import load_recipe
from shardwise.train.records import RunFacts, Summary
from shardwise.train.team import Team

TARGET = Path(__file__).resolve().parent / "run.svg"
FAMILY = "shardwise-mono"
FONTS = f"{FAMILY}, Menlo, Consolas, monospace"
QUIET_LOAD = 0.5


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
    trainer = Trainer(load_recipe("tiny"), folder, team, device, Drawn(console), {"recipe": "tiny"})
    summary: Summary = trainer.run()
    if team.rank == 0:
        assert summary.first_loss is not None
        assert summary.last_loss is not None
        assert summary.last_loss < summary.first_loss
        TARGET.write_text(with_own_fonts(console.export_svg(title="shardwise", clear=False)))


def with_own_fonts(svg: str) -> str:
    """Returns the picture with the glyphs that it uses inside it: the same in every browser, and nothing is fetched."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    characters = set(html.unescape(re.sub(r"<[^>]*>", "", svg)))
    faces = "".join(
        f"@font-face {{ font-family: {FAMILY}; font-weight: {weight}; "
        f"src: url(data:font/woff;base64,{subset_of(file, characters)}) }}\n"
        for weight, file in (("normal", "DejaVuSansMono.ttf"), ("bold", "DejaVuSansMono-Bold.ttf"))
    )
    svg = svg.replace("Fira Code, monospace", FONTS).replace("font-family: arial", f"font-family: {FONTS}")
    return svg.replace("<style>", f"<style>\n{faces}", 1)


def subset_of(file: str, characters: set[str]) -> str:
    """Returns a font of matplotlib's with these characters only, in base64."""
    options = subset.Options(flavor="woff", layout_features=[], hinting=False, name_IDs=[1, 2, 13])
    options.drop_tables += ["FFTM"]
    font = subset.load_font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / file), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=map(ord, characters))
    subsetter.subset(font)
    found = io.BytesIO()
    subset.save_font(font, found, options)
    return base64.b64encode(found.getvalue()).decode()


def main() -> int:
    if os.getloadavg()[0] > QUIET_LOAD and "--busy" not in sys.argv:
        print("other programs are running: the picture would show their speed, too (--busy draws it)")
        return 1
    with tempfile.TemporaryDirectory() as somewhere:
        os.chdir(somewhere)
        folder = Path("runs") / "tiny"
        folder.mkdir(parents=True)
        status = run_local_ranks(partial(train_and_draw, folder), 2, "cpu")
        os.chdir("/")
    return status


if __name__ == "__main__":
    sys.exit(main())
