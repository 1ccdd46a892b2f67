"""A run calls code of the user's own: when, on which ranks, and what happens if that code fails."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, StateError
from shardwise.testing import run_ranks
from shardwise.train import Callback
from shardwise.train.checks import check
from shardwise.train.records import read_metrics
from tests.ranks.training import Noted, run_part, small_config, write_text


class Recorder(Callback):
    def __init__(self, on_all_ranks=False, stops_at=None, fails_at=None):
        self.calls, self.on_all_ranks, self.stops_at, self.fails_at = [], on_all_ranks, stops_at, fails_at

    def on_start(self, run):
        self._note("start", run.facts.first_step, run.settings["train.steps"])

    def on_step(self, run, record):
        self._note("step", record.step)
        if record.step == self.stops_at:
            run.stop()

    def on_evaluation(self, run, step, loss):
        assert loss > 0
        self._note("evaluation", step)

    def on_checkpoint(self, run, step, path):
        assert (path / "manifest.json").exists()
        self._note("checkpoint", step)

    def on_end(self, run, summary):
        self._note("end", summary and summary.ended)

    def _note(self, *call):
        self.calls.append(call)
        if call == self.fails_at:
            raise RuntimeError("the server is gone")


def with_callbacks(config, *callbacks):
    return dataclasses.replace(config, callbacks=callbacks)


def run_with(config, folder, recorders, **part):
    run_part(with_callbacks(config, *recorders), folder, **part)
    return [recorder.calls for recorder in recorders]


def test_callbacks_are_called_in_order_on_rank_0_and_where_they_ask_on_all_ranks(tmp_path):
    config = small_config(write_text(tmp_path), "train.steps=4", "evaluate.every=2", "checkpoint.every=2")
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, asynchronous=False)
    )
    found = run_ranks(
        run_with, 2, config, tmp_path / "run", [Recorder(), Recorder(on_all_ranks=True)], kind="gloo"
    )
    expected = [("start", 0, 4), ("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2), ("step", 3)]
    expected += [("step", 4), ("evaluation", 4), ("checkpoint", 4), ("end", "finished")]
    assert found == [[expected, expected], [[], expected]]


def test_a_callback_stops_the_run_on_all_ranks_and_a_resumed_run_starts_where_it_ended(tmp_path):
    config = small_config(write_text(tmp_path))
    stopping = [Recorder(stops_at=2)]
    ((calls,), _) = run_ranks(run_with, 2, config, tmp_path / "run", stopping, kind="gloo")
    assert calls[-3:] == [("step", 3), ("checkpoint", 3), ("end", "stopped")]
    ((calls,), _) = run_ranks(
        run_with, 2, config, tmp_path / "run", [Recorder()], resume=True, stop_after=4, kind="gloo"
    )
    assert calls[:2] == [("start", 3, 6), ("step", 4)]


def run_into(config, folder, recorder, kind):
    display = Noted()
    with pytest.raises(kind) as raised:
        run_part(with_callbacks(config, recorder), folder, display=display)
    return str(raised.value), display.lines, recorder.calls


def test_a_callback_that_fails_after_the_start_costs_a_warning_and_an_error_at_the_end(tmp_path):
    config = small_config(write_text(tmp_path), "train.steps=3")
    failing = Recorder(fails_at=("step", 2))
    ((error, lines, calls),) = run_ranks(
        run_into, 1, config, tmp_path / "run", failing, StateError, kind="gloo"
    )
    assert "Recorder.on_step failed, training continues: RuntimeError: the server is gone" in lines[0]
    assert error.startswith("the run finished at step 3 and its checkpoint is complete")
    assert "but something beside it failed:\n    Recorder.on_step: RuntimeError: the server is gone" in error
    assert "disk" not in error
    assert calls[-1] == ("end", "finished")


def test_a_callback_that_fails_at_the_start_ends_the_run_on_all_ranks_before_a_step(tmp_path):
    config = small_config(write_text(tmp_path))
    failing = Recorder(fails_at=("start", 0, 6))
    for error, _, _ in run_ranks(run_into, 2, config, tmp_path / "run", failing, ConfigError, kind="gloo"):
        assert "callback Recorder failed: RuntimeError: the server is gone" in error
    assert not read_metrics(tmp_path / "run")


def test_a_run_that_fails_ends_its_callbacks_without_a_summary(tmp_path):
    config = small_config(write_text(tmp_path), "optimizer.lr=1e30", "optimizer.warmup=0")
    ((_, _, calls),) = run_ranks(run_into, 1, config, tmp_path / "run", Recorder(), StateError, kind="gloo")
    assert calls[-1] == ("end", None)


class FailsOnTheSecondRank(Callback):
    on_all_ranks = True

    def on_step(self, run, record):
        if run.rank == 1 and record.step == 2:
            raise ConnectionError("the server is gone")


def end_with_the_others(config, folder):
    try:
        return len(run_part(config, folder)[0])
    except StateError as error:
        return str(error)


def test_a_callback_that_fails_on_one_rank_stops_no_rank_and_says_which(tmp_path):
    config = with_callbacks(small_config(write_text(tmp_path), "train.steps=4"), FailsOnTheSecondRank())
    first, second = run_ranks(end_with_the_others, 2, config, tmp_path / "run", kind="gloo")
    assert first == 4
    assert second.startswith("the run finished at step 4 and its checkpoint is complete")
    assert "FailsOnTheSecondRank.on_step on rank 1: ConnectionError: the server is gone" in second
    assert "disk" not in second


def test_what_is_no_callback_is_refused_before_any_rank_exists(tmp_path):
    config = small_config(write_text(tmp_path))
    with pytest.raises(
        ConfigError, match=r"callbacks\[0\] is the class Recorder(.|\n)*write Recorder\(\.\.\.\)"
    ):
        check(with_callbacks(config, Recorder))
    with pytest.raises(ConfigError, match=r"callbacks\[1\] is a str(.|\n)*derive str"):
        check(with_callbacks(config, Recorder(), "log"))


def test_metrics_say_when_each_step_ended(tmp_path):
    before = time.time()
    config = small_config(write_text(tmp_path), "train.steps=3")
    run_ranks(run_part, 1, config, tmp_path / "run", kind="gloo")
    times = [record.time for record in read_metrics(Path(tmp_path / "run"))]
    assert times == sorted(times)
    # Rounded to milliseconds.
    assert before - 1e-3 <= times[0] <= times[-1] <= time.time() + 1e-3
