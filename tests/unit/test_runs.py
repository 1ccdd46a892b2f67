"""``shardwise runs`` and ``shardwise watch`` read what runs leave in their folders."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from shardwise.checkpoint.convert import import_weights
from shardwise.checkpoint.weights import Weight, Weights
from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.train.rank_states import RankState, read_rank_states
from shardwise.train.records import StepRecord, smoothed
from shardwise.train.run_folder import FolderLock
from shardwise.train.runs import read_run
from shardwise.train.watch import WatchServer, read_lines


def make_run(folder, losses=(4.0, 3.0, 2.0), steps=3, ended="finished", **config):
    """A run's folder with one checkpoint, and metrics of these losses."""
    import_weights(Weights((Weight.of("weight", torch.ones(3)),), None), folder)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "recipe": "tiny",
                "settings": [f"train.steps={steps}"],
                "config": {"train.steps": steps, **config},
            }
        )
    )
    records = [
        StepRecord(number, loss, 1e-3, 1.0, 0.5, 1000.0, 1 << 20, eval_loss=2.5 if number == 2 else None)
        for number, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    if ended:
        (folder / "summary.json").write_text(json.dumps({"ended": ended, "step": len(losses)}))
    return folder


def said(capsys, *arguments, status=0):
    assert main(["runs", *map(str, arguments)]) == status
    return capsys.readouterr().out


def test_one_run_is_shown_with_how_it_ended_and_how_to_go_on(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "a")
    assert "finished at step 3 of 3" in text
    assert "4.0000 → 2.0000" in text
    assert "eval loss    2.5000, at step 2" in text
    assert "step-00000000" in text
    assert "shardwise train --resume a --set train.steps=6" in text


def test_states_are_told_apart(tmp_path):
    assert read_run(make_run(tmp_path / "stopped", ended="stopped", steps=9)).state == "stopped"
    assert read_run(make_run(tmp_path / "killed", ended=None)).state == "broken off"
    # More steps were asked for after it had finished.
    assert read_run(make_run(tmp_path / "longer", steps=9)).state == "stopped"
    folder = make_run(tmp_path / "running", ended=None)
    lock = FolderLock(folder)
    assert read_run(folder).state == "running"
    lock.release()
    assert read_run(folder).state == "broken off"


def test_several_runs_are_a_table_that_fits_the_terminal(tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):
        make_run(tmp_path / name, losses=[3.0 - number / 20 for number in range(21)], steps=21)
    monkeypatch.chdir(tmp_path)
    for width, shows_curve in ((60, False), (200, True)):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = said(capsys, ".").splitlines()
        assert [line.split()[0] for line in lines] == ["run", "a", "b"]
        assert max(map(len, lines)) <= width
        assert ("█" in lines[1]) == shows_curve
        assert "finished" in lines[1]
        assert "2.0000" in lines[1]


def test_compared_runs_show_settings_that_differ_and_curves_on_one_scale(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "a", **{"optimizer.lr": 0.1, "train.seed": 0})
    make_run(tmp_path / "b", losses=(2.0, 2.0, 2.0), **{"optimizer.lr": 0.2, "train.seed": 0})
    monkeypatch.chdir(tmp_path)
    for width in (60, 30):
        monkeypatch.setenv("COLUMNS", str(width))
        text = said(capsys, "a", "b", "--compare")
        assert "optimizer.lr" in text
        assert "0.2" in text
        assert "train.seed" not in text
    assert "█" in text
    assert "▁▁▁" in text


def test_any_folder_says_what_it_is(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert "a checkpoint of step 0" in said(capsys, run / "checkpoints" / "step-00000000")
    assert "a checkpoint of step 0" in said(capsys, run / "checkpoints")
    (tmp_path / "text" / "empty").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("hello")
    text = said(capsys, tmp_path / "text")
    assert "no run, checkpoint or model; 1 folder, 1 file, 5 bytes" in text
    assert "shardwise train tiny --set data.path=" in text
    assert said(capsys, tmp_path / "text" / "empty").rstrip().endswith("model; empty")


def test_folders_that_cannot_be_read_are_passed_over(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "shut" / "run")
    make_run(tmp_path / "open")
    (tmp_path / "loop").symlink_to(tmp_path)

    def scandir(path, scan=os.scandir):
        if Path(path).name == "shut":
            raise PermissionError
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.chdir(tmp_path)
    assert said(capsys, ".").splitlines()[0] == "open"


def test_a_run_that_is_named_twice_is_one_run(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert len(said(capsys, ".", "a", tmp_path / "a", "--json").splitlines()) == 1


def test_a_checkpoint_without_its_manifest_is_shown_as_damaged(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "step-00000000" / "manifest.json").unlink()
    text = said(capsys, run)
    assert "damaged: no manifest.json" in text
    assert "go on with" not in text


def test_imported_weights_wait_for_a_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import_weights(Weights((Weight.of("weight", torch.ones(3)),), None), tmp_path / "again")
    text = said(capsys, "again")
    assert "not begun, with weights to begin from" in text
    assert "shardwise train RECIPE --resume again" in text
    assert "?" not in text


def test_a_loss_that_is_not_a_number_is_shown_and_is_null_in_json(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "run", losses=(float("nan"),), **{"optimizer.lr": float("inf")})
    monkeypatch.chdir(tmp_path)
    assert "nan → –" in said(capsys, "run")
    assert json.loads(said(capsys, "run", "--json"), parse_constant=pytest.fail)["loss"] is None


def test_what_ranks_were_doing_is_shown_until_the_run_ends_well(tmp_path, capsys):
    run = make_run(tmp_path / "run", ended=None)
    states = [RankState(run, rank) for rank in range(3)]
    for rank, state in enumerate(states):
        state.now("building the model")
        state.now("in step 5" if rank == 1 else "in step 4")
    (run / "ranks" / "rank-7.json").write_text("[]")
    text = said(capsys, run)
    assert "in step 4: ranks 0, 2" in text
    assert "in step 5: rank 1" in text
    assert [state["is_gone"] for state in read_rank_states(run)] == [False] * 3
    (run / "ranks" / "rank-7.json").unlink()
    for state in states:
        state.close(remove=True)
    assert not (run / "ranks").exists()


def test_states_are_not_written_through_a_link(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.json").symlink_to(tmp_path / "theirs")
    RankState(tmp_path, 0).now("in step 1")
    assert not (tmp_path / "theirs").exists()


def test_one_run_cannot_be_compared(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["runs", str(run), "--compare"]) == 1
    assert "two are needed" in capsys.readouterr().err


def test_losses_of_several_runs_are_drawn_in_one_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / name) for name in "ab"]
    picture = tmp_path / "losses.png"
    assert "drawn:" in said(capsys, *runs, "--compare", "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["runs", str(runs[0]), "--picture", str(tmp_path / "no" / "a.png")]) == 1


def test_runs_that_are_half_written_are_shown_as_far_as_they_go(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("[]")
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 1}\nno JSON\n')
    text = said(capsys, "empty")
    assert "step-00000003  0 bytes  empty" in text
    assert "go on with" not in text
    assert "not begun" in said(capsys, "odd")
    text = said(capsys, "empty", "odd", "--compare")
    assert "steps 1 to" not in text


def test_verify_finds_a_changed_byte(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert said(capsys, run, "--verify").rstrip().endswith(": good")
    path = run / "checkpoints" / "step-00000000" / "rank-00000.bin"
    changed = bytearray(path.read_bytes())
    changed[0] ^= 1
    path.write_bytes(changed)
    assert "checksum" in said(capsys, run, "--verify", status=1)


def test_prune_keeps_the_newest_and_never_all(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "step-00000000").rename(run / "checkpoints" / "step-00000007")
    import_weights(Weights((Weight.of("weight", torch.ones(3)),), None), tmp_path / "other")
    (tmp_path / "other" / "checkpoints" / "step-00000000").rename(run / "checkpoints" / "step-00000002")
    assert "deleted step-00000002" in said(capsys, run, "--prune", 1)
    assert [facts.step for facts in read_run(run).checkpoints] == [7]
    assert main(["runs", str(run), "--prune", "0"]) == 1


def test_prune_passes_over_a_run_that_is_active(tmp_path, capsys):
    active, idle = make_run(tmp_path / "active"), make_run(tmp_path / "idle")
    lock = FolderLock(active)
    assert main(["runs", str(tmp_path), "--prune", "1"]) == 1
    out, err = capsys.readouterr()
    assert "another run is active" in err
    assert f"{idle}: deleted nothing" in out
    lock.release()


def test_means_leave_out_what_is_not_finite():
    assert smoothed([1.0, float("nan"), 3.0]) == [1.0, 3.0]
    assert smoothed([float(number) for number in range(40)])[-1] == 38.5


# --- the page -----------------------------------------------------------------------------------------------------


def test_metrics_are_read_as_they_grow_and_again_if_they_were_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path, 0)["records"] == []
    path.write_text('{"step": 1}\n{"step": 2')
    first = read_lines(path, 0)
    assert first == {"start": 0, "next": 12, "records": [{"step": 1}]}
    with path.open("a") as file:
        file.write("}\n")
    assert read_lines(path, 12)["records"] == [{"step": 2}]
    path.write_text('{"step": 1}\n')
    assert read_lines(path, 24) == {"start": 0, "next": 12, "records": [{"step": 1}]}


@pytest.fixture
def served(tmp_path):
    make_run(tmp_path / "a run")
    server = WatchServer([tmp_path])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.port}", tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
        return answer.read()


def test_the_page_has_nothing_from_elsewhere_and_its_data_is_of_the_runs(served):
    address, _ = served
    page = fetch(address).decode()
    assert "shardwise" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    (run,) = json.loads(fetch(f"{address}/runs"))
    assert (run["state"], run["step"]) == ("finished", 3)
    metrics = json.loads(fetch(f"{address}/metrics?from=0&run={quote(run['folder'])}"))
    assert [record["loss"] for record in metrics["records"]] == [4.0, 3.0, 2.0]


def test_the_page_gets_json_that_browsers_read_ranks_and_the_log(served):
    address, folder = served
    run = make_run(folder / "other", losses=(2.0, float("nan")), ended=None)
    RankState(run, 0).now("in step 3", 1 << 20)
    (run / "log.txt").write_text("2026-01-01 00:00:00  saved step-00000000\n")
    found = {
        Path(each["folder"]).name: each
        for each in json.loads(fetch(f"{address}/runs"), parse_constant=pytest.fail)
    }
    assert [state["doing"] for state in found["other"]["ranks"]] == ["in step 3"]
    assert found["a run"]["ranks"] == []
    query = f"run={quote(found['other']['folder'])}"
    metrics = json.loads(fetch(f"{address}/metrics?{query}"), parse_constant=pytest.fail)
    assert [record["loss"] for record in metrics["records"]] == [2.0, None]
    assert "saved step" in json.loads(fetch(f"{address}/log?{query}"))["log.txt"]


@pytest.mark.parametrize("path", ["/metrics?run=/etc", "/metrics?run=..", "/log", "/watch.py", "/runs/../x"])
def test_only_runs_that_are_shown_can_be_asked_for(served, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(served[0] + path)


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_host_name_is_refused(served, name):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetch(f"{served[0]}/runs", Host=name)


def test_a_reader_that_goes_away_is_no_error(served, capsys):
    port = int(served[0].rpartition(":")[2])
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", port)) as reader:
            reader.sendall(b"GET /runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            # Reset when closed, instead of read to the end.
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    fetch(f"{served[0]}/runs")
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join()
    assert capsys.readouterr().err == ""


def test_a_port_that_is_taken_is_reported(served):
    address, folder = served
    with pytest.raises(ConfigError, match="--port 0"):
        WatchServer([folder], int(address.rpartition(":")[2]))
