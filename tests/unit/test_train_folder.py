"""A run's folder: one run at a time, files that are whole or as they were, no writing through links."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import threading

import pytest

from shardwise.errors import ConfigError
from shardwise.train import records, run_files, run_folder
from shardwise.train.command import Request, opened_run_folder
from shardwise.train.display import FaultTolerantDisplay, Logged, Quiet
from shardwise.train.rank_states import RankState
from shardwise.train.report import Report, Unwritten
from shardwise.train.run_folder import FolderLock, new_folder

FORK = multiprocessing.get_context("fork")


# --- the lock -------------------------------------------------------------------------------------------------------


def test_a_folder_is_locked_for_one_run_and_free_when_that_has_ended(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run is active in .*: process {os.getpid()} on "):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


def hold_and_die(path, ready):
    lock = FolderLock(path)
    ready.put(lock is not None)
    threading.Event().wait()


def test_a_lock_does_not_outlive_a_run_that_was_killed(tmp_path):
    ready = FORK.SimpleQueue()
    holder = FORK.Process(target=hold_and_die, args=(tmp_path, ready))
    holder.start()
    assert ready.get()
    with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
        FolderLock(tmp_path)
    holder.kill()
    holder.join()
    assert (tmp_path / ".lock").exists()
    FolderLock(tmp_path).release()


def test_a_lock_file_that_was_removed_no_longer_locks(tmp_path):
    first = FolderLock(tmp_path)
    late = os.open(tmp_path / ".lock", os.O_RDWR)  # opened before it is removed, locked after
    first.release(remove=True)
    held = FolderLock(tmp_path)
    assert not os.path.samestat(os.fstat(late), os.stat(tmp_path / ".lock"))
    with pytest.raises(ConfigError, match="another run"):
        FolderLock(tmp_path)
    os.close(late)
    held.release()


def test_only_one_of_two_requests_gets_a_folder(tmp_path):
    request = Request("tiny", (f"output.folder={tmp_path / 'run'}",))
    with opened_run_folder(request) as (_, first):
        (first / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match="another run is active"), opened_run_folder(request):
            pass
        assert (first / "metrics.jsonl").exists()
    with opened_run_folder(request) as (_, again):
        assert again == first


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    with opened_run_folder(Request("tiny", (f"output.folder={tmp_path / 'run'}",))) as (_, made):
        # Of a rank that was killed while it made tokens.
        (made / ".tokens.bin-1a2b3c4d").write_bytes(b"x")
        (made / ".tokens.ends").write_bytes(b"x")
        assert made.is_dir()
    assert not made.exists()


def test_runs_that_start_at_the_same_time_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gate, made = threading.Barrier(8), []

    def start():
        gate.wait()
        made.extend(new_folder("", "tiny") for _ in range(10))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 80
    assert {path.name for path in made} == {"tiny", *(f"tiny-{number}" for number in range(2, 81))}


def test_a_run_that_never_began_leaves_nothing_behind_and_takes_nothing_away(tmp_path):
    def begin(folder):
        with opened_run_folder(Request("tiny", (f"output.folder={folder}",))):
            RankState(folder, 0).now("reading the data")
            (folder / "tokenizer").mkdir(exist_ok=True)

    begin(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine" / "tokenizer").mkdir(parents=True)
    begin(tmp_path / "mine")
    assert (tmp_path / "mine" / "tokenizer").is_dir()


def test_a_log_stays_that_of_its_run_and_has_what_was_said_before_it_began(tmp_path):
    facts = records.RunFacts("tiny", "run", "Llama", 1, 1, "full", "fp32", "CPU", 1, 3, 0, 8, None, 1.0)
    display = Logged(Quiet(), tmp_path / "log.txt")
    display.note("reading 3 files")
    assert not (tmp_path / "log.txt").exists()
    display.begin(facts)
    display.note("saved step-00000001")
    (tmp_path / "log.txt").rename(tmp_path / "moved")
    (tmp_path / "log.txt").write_text("of another run\n")
    display.note("saved step-00000002")
    display.close()
    assert (tmp_path / "log.txt").read_text() == "of another run\n"
    texts = [line[21:] for line in (tmp_path / "moved").read_text().splitlines()]
    assert (texts[0], texts[-1]) == ("reading 3 files", "saved step-00000002")


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, fails):
    run_files.replace_file(tmp_path / "config.json", "before")

    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_files.os, fails, fail)
    with pytest.raises(OSError, match="No space"):
        run_files.replace_file(tmp_path / "config.json", "after, and longer")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "before"


def record(step, loss=1.0):
    return records.StepRecord(step, loss, 1e-3, 1.0, 0.1, 100.0, 1 << 20)


def test_metrics_survive_a_crash_while_they_are_truncated(tmp_path, monkeypatch):
    (tmp_path / records.METRICS).write_text("".join(record(step).to_json() + "\n" for step in range(1, 9)))

    def crash(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_files.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        records.keep_metrics_up_to(tmp_path, 4)
    monkeypatch.undo()
    assert [each.step for each in records.read_metrics(tmp_path)] == list(range(1, 9))
    records.keep_metrics_up_to(tmp_path, 4)
    assert [each.step for each in records.read_metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b"\x00\x00\xff", b"[" * 100_000, b"17", b'{"step": "x"}']
)
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path, torn):
    good = "".join(record(step).to_json() + "\n" for step in (1, 2))
    (tmp_path / records.METRICS).write_bytes(good.encode() + torn)
    assert [each.step for each in records.read_metrics(tmp_path)] == [1, 2]


def test_steps_that_were_run_again_count_once_where_the_first_could_not_be_removed(tmp_path):
    lines = [record(1), record(2), record(3), record(2, loss=5.0)]
    (tmp_path / records.METRICS).write_text("".join(each.to_json() + "\n" for each in lines))
    assert [(each.step, each.loss) for each in records.read_metrics(tmp_path)] == [(1, 1.0), (2, 5.0)]


def test_a_line_that_could_not_be_written_does_not_spoil_the_next(tmp_path, monkeypatch):
    lines = run_files.LineFile(tmp_path / "lines")
    lines.write("first")
    write = os.write

    def half(descriptor, data):
        monkeypatch.setattr(run_files.os, "write", full)
        return write(descriptor, data[:3])

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_files.os, "write", half)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            lines.write("second")
    monkeypatch.undo()
    lines.write("third")
    lines.close()
    assert (tmp_path / "lines").read_text().splitlines() == ["first", "sec", "third"]


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "loss.png",
        "tensorboard",
        "loggers.json",
        "wandb",
        "mlruns",
        "checkpoints",
        "logs",
        ".lock",
    ],
)
def test_links_where_a_run_writes_are_refused(tmp_path, name):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.write_text("{}")
    (run / name).symlink_to(elsewhere)
    with (
        pytest.raises(ConfigError, match="symbolic link"),
        opened_run_folder(Request("tiny", resume=str(run))),
    ):
        pass
    assert elsewhere.read_text() == "{}"


def test_links_among_checkpoints_and_logs_are_refused(tmp_path):
    for number, (inner, name) in enumerate((("checkpoints", ".latest"), ("logs", "rank-0.log"))):
        (tmp_path / f"{number}" / inner).mkdir(parents=True)
        (tmp_path / f"{number}" / inner / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="symbolic link"):
            run_folder.refuse_links_in(tmp_path / f"{number}")


def test_lines_are_not_written_through_a_link_that_came_later(tmp_path):
    (tmp_path / "elsewhere").write_text("theirs")
    (tmp_path / records.METRICS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        run_files.LineFile(tmp_path / records.METRICS).write("ours")
    assert (tmp_path / "elsewhere").read_text() == "theirs"


def test_a_folder_that_is_itself_reached_through_a_link_is_fine(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with opened_run_folder(Request("tiny", (f"output.folder={tmp_path / 'run'}",))) as (_, found):
        assert found == tmp_path / "disk"


# --- what cannot be written -----------------------------------------------------------------------------------------


class Warned:
    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)

    def step(self, _record):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_metrics_that_cannot_be_written_are_reported_once_and_counted(tmp_path, monkeypatch):
    display, unwritten = Warned(), Unwritten()

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    report = Report(tmp_path, display, unwritten, lambda: None, from_step=0)
    report.step(record(1))
    monkeypatch.setattr(run_files.os, "write", full)
    report.step(record(2))
    report.step(record(3))
    monkeypatch.undo()
    report.step(record(4))
    report.close()
    assert [each.step for each in records.read_metrics(tmp_path)] == [1, 4]
    assert display.warnings == [
        "metrics.jsonl cannot be written, training continues: No space left on device"
    ]
    assert unwritten.lines() == ("metrics.jsonl: No space left on device, 2 times",)


def test_metrics_continue_if_their_file_was_removed_and_are_reported_if_their_folder_was(tmp_path):
    display, unwritten = Warned(), Unwritten()
    folder = tmp_path / "run"
    folder.mkdir()
    report = Report(folder, display, unwritten, lambda: None, from_step=0)
    report.step(record(1))
    (folder / records.METRICS).unlink()
    report.step(record(2))
    assert [each.step for each in records.read_metrics(folder)] == [2]
    assert display.warnings == []
    os.rename(folder, tmp_path / "moved")
    report.step(record(3))
    assert display.warnings == [
        "metrics.jsonl cannot be written, training continues: No such file or directory"
    ]
    assert not folder.exists()
    os.rename(tmp_path / "moved", folder)
    report.step(record(4))
    report.close()
    assert [each.step for each in records.read_metrics(folder)] == [2, 4]


def test_nothing_is_written_to_a_folder_that_another_run_uses(tmp_path):
    display, unwritten, others = Warned(), Unwritten(), []
    report = Report(tmp_path, display, unwritten, lambda: others[0] if others else None, from_step=0)
    report.step(record(1))
    before = (tmp_path / records.METRICS).read_bytes()
    others.append("process 7")
    report.step(record(2))
    report.draw_curve()
    assert (tmp_path / records.METRICS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [records.METRICS]
    assert display.warnings[0] == (
        "metrics.jsonl cannot be written, training continues: another run is using the folder: process 7"
    )
    report.close()


def test_a_curve_and_a_summary_that_cannot_be_written_are_reported(tmp_path, monkeypatch):
    display, unwritten = Warned(), Unwritten()
    report = Report(tmp_path, display, unwritten, lambda: None, from_step=0)
    report.step(record(1))

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_files.os, "fsync", full)
    summary = records.Summary("finished", str(tmp_path), 1, 1, 1.0, 1.0, None, 1.0, 8, 8.0, 1 << 20, None)
    assert report.draw_curve() is None
    report.end(summary)
    assert [line.partition(":")[0] for line in unwritten.lines()] == ["loss.png", "summary.json"]
    assert json.dumps(summary.as_json())


def test_a_log_on_a_full_disk_does_not_end_a_run():
    lost = []
    FaultTolerantDisplay(Warned(), lost.append).step(record(1))
    assert [error.errno for error in lost] == [errno.ENOSPC]
