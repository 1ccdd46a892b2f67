"""Runs a program as ``python -m`` would, and pauses it after some steps of its optimizer, once.

    PAUSE_AT=25 PAUSED=/tmp/a-file python -m tests.soak.pausing train.py --its --arguments

The file says that the program pauses, until there is one with the ending ``.over``; where it is there already, nothing
pauses.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    program, sys.argv[:] = sys.argv[1], sys.argv[1:]
    paused = Path(os.environ.get("PAUSED", "/"))
    left = [int(os.environ.get("PAUSE_AT", "0"))]

    def pause(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0 and not paused.exists():
            paused.touch()
            while not paused.with_suffix(".over").exists():
                time.sleep(0.1)

    register_optimizer_step_post_hook(pause)
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
