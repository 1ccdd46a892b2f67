"""The parent of a run's ranks: what it tells of them, and its exit status."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.testing import run_ranks
from shardwise.train.command import Request, train
from shardwise.train.interrupt import Interrupt
from shardwise.train.launch import run_local_ranks
from shardwise.train.records import CONFIG, read_metrics
from shardwise.train.run_folder import LOCK, FolderLock
from tests.fuzz import faulty
from tests.ranks.training import STEPS, Noted, checkpoint_at, run_part, small_config, write_text

REPOSITORY = Path(__file__).parents[2]

# --- how ranks end ----------------------------------------------------------------------------------------------------


def leave_with_status_0(_device):
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_ends_with_status_0_before_it_is_done_has_failed(num_ranks, capfd):
    work = leave_with_status_0 if num_ranks == 2 else lambda _device: os._exit(0)
    assert run_local_ranks(work, num_ranks, "cpu") == 1
    said = capfd.readouterr().err
    assert said.startswith(f"error: rank {num_ranks - 1} exited with status 0 before it was done"), said


def name_what_is_no_text(_device):
    raise FileNotFoundError("no file 'caf\udce9.txt'")


def test_an_error_that_is_not_valid_text_is_reported(tmp_path, capfd):
    assert run_local_ranks(name_what_is_no_text, 1, "cpu", logs=tmp_path / "logs") == 1
    said = capfd.readouterr().err
    assert said.startswith("error: rank 0 failed\nTraceback"), said
    assert "FileNotFoundError: no file 'caf" in said
    assert f"  logs:  {tmp_path / 'logs'}" in said


def die_without_a_log(_device):
    os.kill(os.getpid(), signal.SIGKILL)


def test_logs_that_were_not_written_are_not_named(tmp_path, capfd):
    assert run_local_ranks(die_without_a_log, 1, "cpu", logs=tmp_path / "logs") == 1
    assert capfd.readouterr().err == "error: rank 0 was killed by SIGKILL\n"


# --- signals ----------------------------------------------------------------------------------------------------------


class Signals:
    """Sends this process a signal whenever a file appears: handlers run in the main thread, which waits for ranks."""

    def __init__(self, *signs):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(signs,))

    def _send(self, signs):
        for path, number in signs:
            while not path.exists():
                if self._over.wait(0.01):
                    return
            os.kill(os.getpid(), number)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def train_until_killed(folder, _device):
    with Interrupt() as interrupt:
        (folder / "trains").touch()
        while not interrupt.requested:
            time.sleep(0.01)
        (folder / "was asked").touch()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (folder / "does not save").touch()
        while True:
            time.sleep(0.01)


def test_a_second_signal_ends_a_run_that_trains_and_says_what_is_lost(tmp_path, capfd):
    signs = ((tmp_path / "trains", signal.SIGINT), (tmp_path / "does not save", signal.SIGINT))
    with Signals(*signs):
        assert run_local_ranks(partial(train_until_killed, tmp_path), 1, "cpu") == 130
    said = capfd.readouterr().err
    assert said == "error: stopped by SIGINT, then by SIGINT: progress since the last checkpoint is lost\n"


# --- folders that go --------------------------------------------------------------------------------------------------


class Doing(Noted):
    """A display that does something after a step."""

    def __init__(self, step, work):
        super().__init__()
        self._step, self._work = step, work

    def step(self, record):
        super().step(record)
        if record.step == self._step:
            self._work()


def train_while(config, folder, work):
    """A run whose folder something happens to, after its second step: its error, and what was said."""
    display = Doing(2, work)
    folder.mkdir(exist_ok=True)
    lock = FolderLock(folder) if dist.get_rank() == 0 else None
    dist.barrier()
    try:
        run_part(config, folder, display=display)
        error = ""
    except ShardwiseError as raised:
        error = str(raised)
    finally:
        if lock is not None:
            lock.release()
    return error, display.lines


def test_a_run_whose_folder_is_moved_continues_in_a_new_one_and_reports_it(tmp_path):
    config = small_config(write_text(tmp_path), "checkpoint.every=2", "checkpoint.asynchronous=false")
    folder, moved = tmp_path / "run", tmp_path / "moved"
    (error, lines), _ = run_ranks(
        train_while, 2, config, folder, partial(os.rename, folder, moved), kind="gloo"
    )
    reason = "it was removed or moved; recreating it"
    assert error.startswith(f"the run finished at step {STEPS} and its checkpoint is complete"), error
    assert f"    the run's folder: {reason}" in error
    assert f"warning: the run's folder {folder}: {reason}" in lines
    assert [record.step for record in read_metrics(moved)] == [1, 2]
    assert [record.step for record in read_metrics(folder)] == [3, 4, 5, 6]
    assert checkpoint_at(folder, STEPS).is_dir()
    assert (folder / CONFIG).read_bytes() == (moved / CONFIG).read_bytes()


def put_a_file_there(folder):
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def test_a_folder_that_cannot_be_recreated_is_reported(tmp_path):
    config = small_config(write_text(tmp_path), "checkpoint.every=2", "checkpoint.asynchronous=false")
    folder = tmp_path / "run"
    (error, lines), _ = run_ranks(
        train_while, 2, config, folder, partial(put_a_file_there, folder), kind="gloo"
    )
    assert error.startswith("the last checkpoint could not be written: NotADirectoryError"), error
    assert "warning: metrics.jsonl cannot be written, training continues: Not a directory" in lines


def take(folder):
    """What somebody does who takes a run for dead: removes it, and starts another."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / LOCK).write_text("process 7 on another host, since noon\n")


def test_a_run_does_not_write_into_a_folder_that_another_uses(tmp_path):
    config = small_config(write_text(tmp_path), "checkpoint.every=2", "checkpoint.asynchronous=false")
    folder = tmp_path / "run"
    (error, lines), (second_error, _) = run_ranks(
        train_while, 2, config, folder, partial(take, folder), kind="gloo"
    )
    reason = "another run is using the folder: process 7 on another host, since noon"
    assert error == second_error
    assert error.startswith(f"the last checkpoint could not be written: {reason}"), error
    assert f"warning: metrics.jsonl cannot be written, training continues: {reason}" in lines
    assert [path.name for path in folder.iterdir()] == [LOCK]


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def test_a_folder_that_is_emptied_during_a_run_is_filled_again(tmp_path):
    config = small_config(write_text(tmp_path), "checkpoint.every=2")
    folder = tmp_path / "run"

    (error, _), _ = run_ranks(train_while, 2, config, folder, partial(empty, folder), kind="gloo")
    assert error == ""
    assert checkpoint_at(folder, STEPS).is_dir()
    assert [record.step for record in read_metrics(folder)] == [3, 4, 5, 6]


# --- streams and launchers --------------------------------------------------------------------------------------------


def train_without_streams(place, status):
    for number in (1, 2):
        os.close(number)
    sys.stdout = sys.stderr = None
    status.put(train(Request("tests.fuzz.faulty:recipe", (f"output.folder={place}",), device="cpu", ranks=1)))


def test_a_run_needs_no_standard_output_and_no_standard_error(small_run, tmp_path):
    context = multiprocessing.get_context("fork")
    status = context.SimpleQueue()
    process = context.Process(target=train_without_streams, args=(tmp_path / "run", status))
    process.start()
    process.join()
    assert not status.empty()
    assert status.get() == 0
    assert len(read_metrics(tmp_path / "run")) == faulty.STEPS


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    monkeypatch.setattr(faulty, "folder", tmp_path)
    write_text(tmp_path)


AS_A_RANK = """
import sys
from pathlib import Path
from shardwise.cli import main
from tests.fuzz import faulty

place = Path(sys.argv[1])
faulty.folder, faulty.fault = place, faulty.Fault("raise", 1, faulty.EVERY + 1)
sys.exit(main(["train", "tests.fuzz.faulty:recipe", "--out", str(place / "run"), "--device", "cpu", "--quiet"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_of_another_launcher_exit_with_a_status_and_the_first_failure_is_reported_first(tmp_path):
    # A save is under way when it fails, and its thread waits for a peer that will be gone.
    write_text(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "said").open("w") as said:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", AS_A_RANK, str(tmp_path)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "PYTHONPATH": str(REPOSITORY),
                },
                stderr=said,
            )
            for rank in range(2)
        ]
        statuses = [process.wait(timeout=180) for process in ranks]
    text = (tmp_path / "said").read_text()
    assert statuses == [1, 1], text
    assert text.startswith("error: rank 1 failed\nTraceback"), text
    assert faulty.WORDS in text.partition("\nerror: ")[0]
