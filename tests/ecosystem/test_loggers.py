"""Loggers receive the figures of a run, and a resumed run continues what they had: with the real libraries."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.testing import run_ranks
from shardwise.train import MLflow, TensorBoard, WandB
from shardwise.train.loggers import known_run
from shardwise.train.records import read_metrics
from tests.ranks.training import run_part, small_config, write_text


def log_twice(config, folder, make_logger):
    """A run of six steps, stopped after three and resumed."""
    for resume in (False, True):
        part = {"resume": True} if resume else {"stop_after": 3}
        run_part(dataclasses.replace(config, callbacks=(make_logger(),)), folder, **part)


def test_tensorboard_has_every_step_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(log_twice, 1, small_config(write_text(tmp_path)), tmp_path / "run", TensorBoard, kind="gloo")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    records = read_metrics(tmp_path / "run")
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(record.step, pytest.approx(record.loss, rel=1e-6)) for record in records]
    assert events.Scalars("eval_loss")[-1].step == 6


def test_mlflow_has_every_step_in_one_run_of_a_local_file_store(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = small_config(write_text(tmp_path))
    run_ranks(log_twice, 1, config, tmp_path / "run", MLflow, kind="gloo")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("shardwise")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "6"
    found = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
    assert found == [(record.step, record.loss) for record in read_metrics(tmp_path / "run")]


def offline():
    return WandB(mode="offline")


def records_of(file):
    """Yields the records of wandb's file: a header of 7 bytes, then pieces in blocks of 32 KiB, as in a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, place, pieces = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        # A whole record, or the last piece of one.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def test_wandb_logs_offline_under_one_id(tmp_path):
    pytest.importorskip("wandb")
    run_ranks(log_twice, 1, small_config(write_text(tmp_path)), tmp_path / "run", offline, kind="gloo")
    identity = known_run(tmp_path / "run", "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    losses = [
        float(item.value_json)
        for file in files
        for record in records_of(file)
        for item in record.history.item
        if "loss" in (item.key, *item.nested_key)
    ]
    assert losses == [record.loss for record in read_metrics(tmp_path / "run")]
