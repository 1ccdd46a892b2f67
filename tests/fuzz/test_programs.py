"""Runs a fixed sample of programs, and tests the detection and shrinking of failures on planted defects."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.testing import run_ranks
from tests.fuzz import trial
from tests.fuzz.actions import Action, Step
from tests.fuzz.models import Block
from tests.fuzz.oracle import Comparison, Plain, Sharded, Tolerance, compared, differences
from tests.fuzz.programs import Program, draw, source
from tests.fuzz.run import Session, Worker, parsed, run_many
from tests.fuzz.settings import Settings, UnitCall
from tests.fuzz.shrink import shrunk, smaller

SLICE = 150
SLOW_SLICE = 900


def ran(first: int, count: int, without: str = "gloo") -> Any:
    return run_many(parsed(["--seed", str(first), "--count", str(count), "--without", without]))


@pytest.mark.timeout(300)
def test_a_slice_of_programs_computes_what_plain_code_does():
    report = ran(0, SLICE)
    assert report.programs == SLICE
    assert not report.failures, "\n\n".join(
        f"{each.how}\n{each.test}\n{each.text}" for each in report.failures
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_longer_slice_of_programs_computes_what_plain_code_does():
    report = ran(10_000, SLOW_SLICE, without="")
    assert not report.failures, "\n\n".join(
        f"{each.how}\n{each.test}\n{each.text}" for each in report.failures
    )


def test_a_seed_is_one_program_in_any_process():
    script = "from tests.fuzz.programs import draw, source; print([source(draw(seed)) for seed in range(50)])"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "7")
    }
    assert len(texts) == 1
    assert source(draw(3)) != source(draw(4))


def test_leaving_a_feature_out_leaves_it_out():
    for seed in range(200):
        program = draw(seed, frozenset({"recursive", "wrapper", "zero", "freeze"}))
        assert "recursive" not in {block.kind for _, block in program.model.walk()}
        assert program.settings.api == "fully_shard"
        assert not any(action.kind == "freeze" for action in program.actions)


# --- planted defects --------------------------------------------------------------------------------------------------


def a_program(**changes: Any) -> Program:
    steps = tuple(Action("step", (number, Step())) for number in range(3))
    made = Program(
        seed=5,
        settings=Settings(world=2, width=5, optimizer="adam"),
        model=Block(
            "pair", "model", (Block("linear", "m1"), Block("residual", "m2", (Block("mlp", "m3", (), (7,)),)))
        ),
        units=(UnitCall(("m1",), False), UnitCall(("m2",)), UnitCall(("",))),
        frozen=("m2.m3.up.bias",),
        actions=(Action("eval", (9, "no_grad")), *steps),
    )
    return replace(made, **changes)


class LosesABias(Sharded):
    """A defect: the second backward drops the gradient of the first unit's bias."""

    backwards = 0

    def _backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        super()._backward(loss, options)
        self.backwards += 1
        if self.backwards == 2:
            next(param for name, param in self.model.named_parameters() if name.endswith("bias")).grad = None


class RaisesOnOneRank(Sharded):
    """A defect: one rank raises, and the other waits for it."""

    def _backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        if self.rank == 1:
            raise KeyError("planted")
        super()._backward(loss, options)


class WrongValue(Sharded):
    """A defect: one element of a parameter is off by one ulp."""

    def finish(self) -> None:
        super().finish()
        param = next(iter(self.model.parameters())).to_local().detach()
        if param.numel():
            param.view(-1)[0] = torch.nextafter(param.view(-1)[0], torch.tensor(9.0, dtype=param.dtype))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plant(side: type[Sharded]) -> None:
        monkeypatch.setitem(trial.SIDES, "fully_shard", side)

    return plant


def test_what_is_right_passes():
    assert trial.run(a_program()) == trial.Outcome()


def test_one_wrong_bit_is_found(planted):
    planted(WrongValue)
    outcome = trial.run(a_program())
    assert outcome.how == "differs"
    assert "at the end: parameter m1.weight" in outcome.text


def test_a_lost_gradient_is_found_and_its_program_shrinks(planted):
    planted(LosesABias)
    runs: list[Program] = []

    def how(program: Program) -> str:
        runs.append(program)
        return trial.run(program).how

    small = shrunk(a_program(), how)
    assert trial.run(small).how == "differs"
    assert [action.kind for action in small.actions] == ["step", "step"]
    assert small.model == Block("linear", "model")
    assert small.frozen == ()
    assert small.settings == Settings(world=1)
    assert small.units == (UnitCall(("",)),)
    assert len(runs) < 120

    pasted: dict[str, Any] = {}
    exec(trial.as_test(small), pasted)
    with pytest.raises(AssertionError, match="gradient bias"):
        pasted["test_found_by_seed_5"]()


def test_an_error_that_only_sharded_code_raises_is_found(planted):
    planted(RaisesOnOneRank)
    outcome = trial.run(a_program())
    assert outcome.how == "raises KeyError: '…'"
    assert "planted" in outcome.text


def test_a_refusal_counts_as_right_only_if_it_is_listed():
    def refuses(side: Any) -> None:
        if isinstance(side, Sharded):
            from shardwise.errors import StateError

            raise StateError("this is not done")

    assert run_ranks(compared, 1, refuses, Sharded, {}, Tolerance(), (("known", "is not done"),)) == [
        Comparison(refused="known")
    ]
    with pytest.raises(RuntimeError, match="this is not done"):
        run_ranks(compared, 1, refuses, Sharded, {}, Tolerance(), ())


def test_a_refusal_that_the_program_catches_ends_the_comparison():
    def program(side: Any) -> None:
        side.note("first", 1)
        with side.catch("second"):
            if isinstance(side, Sharded):
                from shardwise.errors import StateError

                raise StateError("this is not done")
            raise KeyError
        side.note("third", isinstance(side, Sharded))

    assert run_ranks(compared, 1, program, Sharded, {}, Tolerance(), (("known", "is not done"),)) == [
        Comparison(refused="known")
    ]
    (comparison,) = run_ranks(compared, 1, program, Sharded, {}, Tolerance(), ())
    assert comparison.how == "differs: raised"


@pytest.mark.parametrize("kind", ["parameter", "gradient"])
def test_a_value_near_zero_has_the_rounding_errors_of_what_it_was(kind):
    def notes(*values: float) -> Any:
        return [(f"step {number}: {kind} p", torch.tensor([value])) for number, value in enumerate(values)]

    assert not list(differences(notes(1.0, 0.01), notes(1.0, 0.02), Tolerance(0.1)))
    assert list(differences(notes(1.0, 0.01), notes(1.0, 0.2), Tolerance(0.1)))
    assert list(differences(notes(0.01), notes(0.02), Tolerance(0.1)))


def test_an_error_that_plain_code_raises_too_must_be_of_its_type():
    def program(side: Any) -> None:
        raise ValueError if isinstance(side, Plain) else TypeError

    (comparison,) = run_ranks(compared, 1, program, Sharded, {}, Tolerance())
    assert comparison.how == "differs: raised"


def test_every_smaller_program_can_be_written():
    for seed in range(0, 40, 4):
        for candidate in list(smaller(draw(seed)))[::3]:
            compile(source(candidate), "candidate", "exec")


def test_a_run_that_is_told_to_stop_reports_what_it_ran_and_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = Session(parsed(["--count", "1000"]))
    session.stop()
    assert session.run().programs == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_temporary_files_of_programs_are_removed_with_their_worker():
    worker = Worker()
    try:
        # A pool of rank processes makes a folder where failing ranks leave their traces.
        gloo = a_program(settings=Settings(world=2, width=5, optimizer="adam", kind="gloo"))
        assert worker.run(gloo).how == ""
        folder = Path(worker._folder.name)
        assert list(folder.glob("shardwise-ranks-*"))
    finally:
        worker.close()
    assert not folder.exists()


@pytest.mark.timeout(120)
def test_a_worker_that_dies_is_replaced():
    worker = Worker()
    try:
        assert worker.run(a_program()).how == ""
        worker._process.kill()
        assert worker.run(a_program()).how.startswith("dies")
        assert worker.run(a_program()).how == ""
    finally:
        worker.close()
