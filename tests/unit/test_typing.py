"""What a type checker sees of the public names, checked with mypy on a program of a user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """\
from torch import nn
from shardwise import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from typing_extensions import assert_type

class Net(nn.Module):
    def generate(self) -> str:
        return ""

def train(model: Net) -> None: ...

model = Net()
model = fully_shard(model, reshard_after_forward=False, wrap=nn.Linear, exact=True)
assert_type(model, FSDPModule)
assert_type(model.unshard(async_op=True), UnshardHandle | None)
model.set_requires_gradient_sync(False, recurse=False)
model.generate()
assert_type(next(model.parameters()), nn.Parameter)
train(model)
blocks = [Net(), Net()]
assert_type(fully_shard(blocks, mp_policy=MixedPrecisionPolicy()), list[FSDPModule])
fully_shard(Net(), exat=True)  # wrong
fully_shard(Net(), exact=3)  # wrong
model.unshard(async_op="no")  # wrong
"""


def test_a_sharded_modules_methods_are_visible_to_type_checkers(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # As for a user, whose checker reports errors in the user's own files only.
    options = ["--strict", "--follow-imports=silent", "--hide-error-context", "--no-pretty"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    reported = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert reported == wrong, checked.stdout + checked.stderr
