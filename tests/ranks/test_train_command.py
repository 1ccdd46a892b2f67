"""The command, as it is typed: what it shows, how it ends, what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.train.display import Lines
from shardwise.train.doctor import Finding
from shardwise.train.launch import run_local_ranks
from shardwise.train.live import Live
from shardwise.train.records import RunFacts, StepRecord, Summary, recent_loss
from shardwise.train.run_folder import new_folder, newest_folder
from tests.ranks.training import run_part, small_config, write_text

REPOSITORY = Path(__file__).parents[2]
SMALL = (
    *("--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2"),
    *("--set", "model.hidden=16", "--set", "model.context=16", "--set", "evaluate.batches=1"),
)


@contextlib.contextmanager
def command(*arguments):
    """The command in a process of its own, which does not outlive the test."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", *arguments],
        env={**clean, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended(process):
    out, err = process.communicate()
    return process.returncode, out, err


# --- ends ---------------------------------------------------------------------------------------------------------


def test_sigterm_saves_and_exits_with_0_and_the_run_resumes_in_one_process(tmp_path, given_one_rank, capsys):
    steps = ("--set", "train.steps=100000")
    with command("train", "tiny", *SMALL, *steps, "--out", str(tmp_path / "run"), "--json") as process:
        lines = []
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1]["kind"] == "step" and lines[-1]["step"] >= 3:
                process.send_signal(signal.SIGTERM)
                break
        status, rest, errors = ended(process)
    assert (status, errors) == (0, "")
    lines += [json.loads(line) for line in rest.splitlines()]
    end = lines[-1]
    first_note = next(line["text"] for line in lines if line["kind"] == "note")
    # Rank 0 is already saving if the signal reached the other rank a step before.
    assert first_note.startswith(("stopping after this step …", "stopping after the checkpoint …"))
    assert [line["kind"] for line in lines[:3]] == ["begin", "step", "step"]
    assert (end["kind"], end["ended"]) == ("end", "stopped")
    stopped_at = end["step"]
    assert end["checkpoint"].endswith(f"step-{stopped_at:08d}")

    # A recipe, settings and folder are remembered; joining the rank of another launcher works too.
    going_on = ["train", "--resume", str(tmp_path / "run"), "--set", f"train.steps={stopped_at + 2}"]
    assert main(going_on) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    assert f"resumed step-{stopped_at:08d}, saved on 2 ranks" in out
    assert f"step {stopped_at + 2}/{stopped_at + 2}" in out
    assert "1 CPU rank" in out
    assert (tmp_path / "run" / "loss.png").exists()


FAULTS = (
    *("kill at any time", "crash", "raise", "thread", "exit"),
    *("disk", "files", "folder", "launcher", "same folder"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_disturbed_runs_lose_nothing_and_report_the_first_error_first():
    schedule = [sys.executable, "-m", "tests.fuzz.faults", "--quiet", "--only", ",".join(FAULTS)]
    done = subprocess.run(
        [*schedule, "--runs", str(len(FAULTS))],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    assert {outcome.partition(":")[0] for outcome in outcomes} == set(FAULTS)


def test_the_command_is_a_module_too():
    # As -m shardwise, other tests run it.
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "trace", "/nowhere"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: /nowhere is not the trace of a failed rank"), done.stderr


def test_the_console_script_is_the_command():
    (script,) = [
        line for line in (REPOSITORY / "pyproject.toml").read_text().splitlines() if "shardwise.cli" in line
    ]
    assert script == 'shardwise = "shardwise.cli:main"'
    assert callable(main)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_data_that_is_missing_is_reported_once(tmp_path, given_one_rank, capsys):
    missing = f"{tmp_path}/nowhere.txt"
    assert main(["train", "tiny", "--set", f"data.path={missing}", "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: there is no file or folder")
    assert "fix:   check the path" in said.err
    assert said.err.count("nowhere.txt") == 1
    assert not (tmp_path / "run").exists()  # nor is anything left of a run that never began


def open_on_some(folder):
    """Only the first rank's machine has the data."""
    text = write_text(folder) if dist.get_rank() == 0 else Path(folder) / "nowhere.txt"
    dist.barrier()
    with pytest.raises(ConfigError) as refused:
        run_part(small_config(text), f"{folder}/run")
    return str(refused.value), refused.value.agreed


def test_data_that_is_missing_on_one_machine_is_an_error_on_all(tmp_path):
    first, second = run_ranks(open_on_some, 2, str(tmp_path), kind="gloo")
    assert first == second
    assert first[1]
    assert "nowhere.txt" in first[0]


def test_a_port_in_use_is_reported(tmp_path, given_one_rank, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", given_one_rank))
        taken.listen()
        assert main(["train", "tiny", "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert f"port {given_one_rank} of 127.0.0.1 is in use by another program" in said
    assert "MASTER_PORT" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "tiny", "--set", "train.step=3"], "did you mean 'train.steps'?"),
        (["train", "tinny"], "did you mean 'tiny'?"),
        (["train", "tiny", "--ranks", "0"], "--ranks 1 or more"),
        (["train", "--resume", "/nowhere"], "there is no run in '/nowhere'"),
        (["convert", "/nowhere", "/nowhere/else"], "there are no weights in '/nowhere'"),
    ],
)
def test_invalid_requests_are_refused_in_one_message_before_anything_starts(arguments, words, capsys):
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert words in said.err


def test_more_ranks_than_gpus_are_refused_by_the_command(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main(["train", "tiny", "--ranks", "4"]) == 1
    assert "4 ranks were requested, but this machine has 2 GPUs" in capsys.readouterr().err


def test_a_run_is_not_started_in_the_folder_of_another(tmp_path):
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume"):
        new_folder(str(tmp_path), "tiny")


def test_a_run_is_not_started_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for wanted in ("file", "file/below", "/proc/here"):
        with pytest.raises(ConfigError, match=f"cannot create a run in '{wanted}'.*\\n.*output.folder"):
            new_folder(wanted, "tiny")
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create a run in 'runs/tiny'.*\n.*the current folder"):
        new_folder("", "tiny")


def test_the_newest_run_resumes_with_its_own_settings(tmp_path, given_one_rank, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = ["model.layers=1", "model.width=16", "model.hidden=16", "train.batch_size=2", "evaluate.batches=0"]
    settings = [part for setting in tiny for part in ("--set", setting)]
    assert main(["train", "tiny", *settings, "--set", "train.steps=1"]) == 0
    assert main(["train", "tiny", "--resume", "--set", "train.steps=2"]) == 0
    assert "finished at step 2 of 2" in capsys.readouterr().out
    (made,) = (tmp_path / "runs").iterdir()
    assert [json.loads(line)["step"] for line in (made / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_the_same_command_begins_a_run_and_continues_it(tmp_path, given_one_rank, capsys):
    tiny = [*SMALL, "--set", "train.batch_size=2", "--set", "train.steps=3", "--device", "cpu"]
    again = ["train", "tiny", *tiny, "--auto-resume", "--out", str(tmp_path / "run")]
    for stop_after, ended in (
        ("1", "stopped at step 1"),
        ("2", "stopped at step 2"),
        ("3", "finished at step 3"),
    ):
        assert main([*again, "--stop-after", stop_after]) == 0
        assert ended in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert len(config["settings"]) == len(set(config["settings"]))
    # A launcher may start it once more.
    assert main(again) == 0
    assert main(again[:-2]) == 1
    assert "--auto-resume needs to know the folder" in capsys.readouterr().err


def test_a_recipe_that_only_a_runs_folder_names_is_not_run(tmp_path, capsys):
    planted = tmp_path / "planted.py"
    planted.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef recipe(): ...\n")
    (tmp_path / "config.json").write_text(json.dumps({"recipe": f"{planted}:recipe", "settings": []}))
    assert main(["train", "--resume", str(tmp_path)]) == 1
    assert f"name it again: shardwise train {planted}:recipe --resume" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    main(["train", f"{planted}:recipe", "--resume", str(tmp_path)])
    assert (tmp_path / "ran").exists()  # it does run where it is asked for


def test_runs_without_a_folder_are_numbered_and_the_newest_is_the_one_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--resume FOLDER"):
        newest_folder("tiny")
    for number, name in enumerate(("tiny", "tiny-2", "tiny-3", "tiny-other")):
        made = new_folder("runs/tiny-other" if name == "tiny-other" else "", "tiny")
        assert made == tmp_path / "runs" / name
        (made / "checkpoints").mkdir()
        (made / "checkpoints" / "latest").write_text("")
        os.utime(made / "checkpoints" / "latest", (number, 100 - number if name == "tiny-3" else number))
    assert newest_folder("tiny") == tmp_path / "runs" / "tiny-3"


def test_settings_are_listed(capsys):
    assert main(["train", "llama-8b", "--settings", "--set", "train.seed=5"]) == 0
    out = capsys.readouterr().out
    assert "model.width = 4096\n" in out
    assert "train.seed = 5\n" in out


# --- before, at and after the end -----------------------------------------------------------------------------------


def test_the_command_says_at_once_which_ranks_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shardwise.train.command.run_local_ranks", lambda *_, **__: 0)
    monkeypatch.chdir(tmp_path)
    for number, (ranks, shown) in enumerate({"1": "1 CPU rank", "2": "2 CPU ranks"}.items()):
        asked = ["train", "tiny", "--device", "cpu", "--ranks", ranks, "--out", f"runs/{number}"]
        assert main(asked) == 0
        assert capsys.readouterr().err == f"starting {shown} in runs/{number} …\n"
        for silent in (["--quiet"], ["--json"]):
            assert main([*asked, *silent]) == 0
            assert capsys.readouterr().err == ""


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_resumed_run_says_what_it_keeps_and_refuses_fewer_steps_and_another_folder(
    tmp_path, given_one_rank, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    few = ("--set", "train.batch_size=2", "--set", "evaluate.every=2", "--out", "runs/x")
    assert main(["train", "tiny", *SMALL, *few, "--set", "train.steps=3", "--stop-after", "2"]) == 0
    out = capsys.readouterr().out
    assert "stopped at step 2 of 3" in out
    assert out.splitlines()[-1] == "  go on with   shardwise train --resume runs/x"
    before = files_in(tmp_path)
    for asked, words in (
        (("--set", "train.steps=1"), "the run has done 2 steps, and train.steps is 1"),
        (("--stop-after", "1"), "the run has done 2 steps, and --stop-after is 1"),
        (("--out", "runs/y"), "a run continues in its own folder, 'runs/x', not in 'runs/y'"),
    ):
        assert main(["train", "--resume", "runs/x", *asked]) == 1
        assert words in capsys.readouterr().err
        assert files_in(tmp_path) == before

    longer = ["train", "--resume", "runs/x", "--out", str(tmp_path / "runs" / "x"), "--set", "train.steps=4"]
    assert main([*longer, "--stop-after", "3"]) == 0
    out = capsys.readouterr().out
    assert "resumed step-00000002, saved on 1 rank in mode full\n" in out
    kept = next(line for line in out.splitlines() if line.startswith("kept from before: "))
    assert "train.batch_size=2, evaluate.every=2" in kept
    assert "train.steps" not in kept
    assert ", at step 2\n" in out
    assert "train.steps = 4\n" in (tmp_path / "runs" / "x" / "config.toml").read_text()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_profiled_run_writes_its_steps_and_goes_on(tmp_path, mode):
    run = tmp_path / "run"
    few = ("--set", "train.steps=5", "--set", "train.batch_size=2", "--set", f"sharding.mode={mode}")
    # In a process of its own: torch's profiler reads only once what it may print.
    with command(
        "train", "tiny", *SMALL, *few, "--ranks", "1", "--out", str(run), "--profile", "1"
    ) as process:
        status, out, errors = ended(process)
    assert (status, errors) == (0, f"loading torch …\nstarting 1 CPU rank in {run} …\n")
    assert f"profile: {run}/profile" in out
    assert "finished at step 5 of 5" in out
    timeline = json.loads((run / "profile" / "rank-0.timeline.json").read_text())
    lanes = {lane["name"]: lane["bars"] for lane in timeline["lanes"]}
    assert (timeline["name"], timeline["facts"]["step"]) == ("rank 0, measured", "3")
    host = ["data", "forward", "loss, backward, clip", "optimizer", "rest"]
    assert [bar["kind"] for bar in lanes["host"]] == host
    assert ("compute" in lanes) == (mode == "full")
    assert json.loads((run / "profile" / "rank-0.torch.json").read_text())["traceEvents"]


def test_a_terminal_gets_its_cursor_back_from_ranks_that_were_killed(monkeypatch):
    for is_terminal, wanted in ((True, "\x1b[?25h\n"), (False, "")):
        screen = io.StringIO()
        screen.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr("sys.stdout", screen)
        assert run_local_ranks(fail, 1, "cpu") == 1
        assert screen.getvalue() == wanted


def fail(_device):
    raise ConfigError("no", where="here", fix="none")


def test_a_run_that_is_too_short_to_profile_says_so(tmp_path, given_one_rank, capsys):
    few = ("--set", "train.steps=2", "--set", "train.batch_size=2", "--out", str(tmp_path / "run"))
    assert main(["train", "tiny", *SMALL, *few, "--profile"]) == 0
    assert "the run was too short to profile a step" in capsys.readouterr().out


# --- what is shown ------------------------------------------------------------------------------------------------

FACTS = RunFacts(
    "tiny", "runs/tiny", "Llama", 455_520, 4 << 20, "full", "fp32", "CPU", 2, 20, 0, 768, 1e12, 3e6
)
RECORDS = [
    StepRecord(
        step, 5.0 - step / 5, 1e-3, 1.5, 0.1, 7680.0, 300 << 20, 0.02, step == 3, 2.5 if step == 20 else None
    )
    for step in range(1, 21)
]
SUMMARY = Summary(
    "finished", "runs/tiny", 20, 20, 4.8, 1.0, 2.5, 2.0, 15360, 7680.0, 300 << 20, "runs/c", "runs/p"
)


def test_a_terminal_shows_progress_the_curve_and_the_summary():
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    live = Live(console=console)
    live.begin(FACTS)
    for record in RECORDS:
        live.step(record)
    live.warn("careful")
    live.end(SUMMARY)
    text = console.export_text()
    for words in (
        "step 20/20",
        "455.5k parameters",
        "7.7k",
        "2.0%",
        "300.0 MiB",
        "█",
        "▁",
        "4.8000 → 1.0000",
        "careful",
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [40, 60, 200])
def test_no_figure_is_cut_however_wide_the_terminal_is(width):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    live = Live(console=console)
    live.begin(FACTS)
    for record in RECORDS[:-1]:
        live.step(dataclasses.replace(record, eval_loss=2.5 if record.step == 8 else None))
    command = f"shardwise train --resume {'long/' * 20}run"
    live.end(
        dataclasses.replace(SUMMARY, step=19, eval_step=8, checkpoint="far/" * 30 + "end", go_on_with=command)
    )
    text = console.export_text()
    words = ("tokens/s", "7.7k", "checkpoint", "300.0 MiB", "2.5000 at 8", "step 19/20")
    assert [word for word in words if word not in text] == []
    assert text.count("…") == 0
    joined = re.sub(r"[│\s]", "", text)
    assert "far/" * 30 + "end" in joined
    assert "2.5000,atstep8" in joined
    # On one line, to be copied.
    assert f"go on with  {command}\n" in text


def test_losses_on_screen_and_in_the_summary_are_means_of_the_last_ones():
    losses = [float(number) for number in range(1, 101)]
    assert recent_loss(losses) == 98.0
    assert recent_loss([*losses[:-1], math.nan]) == 97.5
    assert recent_loss([math.nan]) is not None
    assert recent_loss([]) is None
    stream = io.StringIO()
    lines = Lines(stream, every=1)
    lines.begin(dataclasses.replace(FACTS, losses_before=tuple(losses[:-1]), first_step=99, num_steps=100))
    lines.step(dataclasses.replace(RECORDS[0], step=100, loss=losses[-1]))
    assert "  loss 98.0000  " in stream.getvalue()


def test_a_log_has_a_line_for_every_nth_step_and_the_last():
    stream = io.StringIO()
    lines = Lines(stream, every=8)
    lines.begin(FACTS)
    for record in RECORDS:
        lines.step(record)
    lines.end(SUMMARY)
    shown = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert [line.split("/")[0] for line in shown] == ["step  8", "step 16", "step 20"]
    assert "eval 2.5000" in shown[-1]
    assert "mfu 2.0%" in shown[-1]


def test_a_run_that_had_no_steps_left_says_how_to_train_longer():
    stream = io.StringIO()
    Lines(stream, every=8).end(dataclasses.replace(SUMMARY, tokens=0, tokens_per_second=0.0))
    assert (
        "finished at step 20 of 20: no steps were left; use --set train.steps=N to train longer"
        in stream.getvalue()
    )
    assert "tokens/s" not in stream.getvalue()


def test_the_doctor_names_what_is_missing_with_the_command_that_fixes_it(monkeypatch, capsys):
    monkeypatch.setattr(
        "shardwise.train.doctor._check_loopback",
        lambda: Finding("loopback", False, "lo is down", "ip link set lo up"),
    )
    monkeypatch.setattr("shardwise.train.doctor.run_local_ranks", lambda *_, **__: 0)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "NO  loopback" in out
    assert "fix: ip link set lo up" in out
    assert "ok  2 CPU ranks" in out
    assert "1 to fix before training" in out
