"""Checkpoints are whole or not there, tell when they were altered, run no code, and become other formats and back."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import resource
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise.checkpoint.saver as saver_room
from shardwise import FullyShardedDataParallel
from shardwise.checkpoint import convert, weights
from shardwise.checkpoint.manifest import MANIFEST, Manifest, first_damage, read_manifest
from shardwise.checkpoint.parts import Part, part_of
from shardwise.checkpoint.saver import Saver
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import TrainingState
from shardwise.errors import CheckpointError, ConfigError
from shardwise.testing import run_ranks
from shardwise.train.checkpointing import find_good_checkpoint
from shardwise.train.team import Team
from tests.ranks.training import (
    Noted,
    assert_same,
    checkpoint_at,
    in_mode,
    run_part,
    small_config,
    whole_tensors,
    write_text,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two ranks that saved after each of four steps and keeps three checkpoints; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    config = small_config(write_text(folder), "train.steps=4", "checkpoint.every=1", "checkpoint.keep=3")
    losses, lines = run_ranks(run_part, 2, config, folder / "run", kind="gloo")[0]
    return config, folder / "run", losses, lines


@pytest.fixture
def copied(finished, tmp_path):
    _, run, _, _ = finished
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


# --- the folder ---------------------------------------------------------------------------------------------------


def test_the_newest_k_are_kept_and_latest_names_the_last(finished):
    _, run, _, lines = finished
    store = Store(run / "checkpoints")
    assert [store.step_of(path) for path in store.checkpoints()] == [4, 3, 2]
    assert store.latest() == checkpoint_at(run, 4)
    assert [line.split(" in ")[0] for line in lines] == [f"saved step-0000000{step}" for step in (1, 2, 3, 4)]
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "latest",
        *(f"step-0000000{step}" for step in (2, 3, 4)),
    ]


def test_what_a_crash_leaves_half_written_is_no_checkpoint_and_is_swept_away(copied):
    store = Store(copied / "checkpoints")
    shutil.copytree(checkpoint_at(copied, 4), store.saving_path(5))
    (store.saving_path(5) / MANIFEST).unlink()
    assert store.checkpoints()[0] == checkpoint_at(copied, 4)
    store.sweep()
    assert not store.saving_path(5).exists()


def test_a_latest_that_names_nothing_is_passed_over(copied):
    store = Store(copied / "checkpoints")
    for text in ("step-00000099\n", "../../etc\n", "", "\udcff"):
        (store.folder / "latest").write_text(text, errors="surrogateescape")
        assert store.checkpoints()[0] == checkpoint_at(copied, 4)


def test_a_step_that_is_reached_again_replaces_its_checkpoint(copied):
    store = Store(copied / "checkpoints")
    shutil.copytree(checkpoint_at(copied, 2), store.saving_path(4))
    store.commit(4)
    assert read_manifest(checkpoint_at(copied, 4)).run["step"] == 2
    assert [store.step_of(path) for path in store.checkpoints()] == [4, 3, 2]
    assert not list(store.folder.glob(".saving-*"))


def test_a_crash_between_a_folders_name_and_latest_loses_nothing(copied):
    store = Store(copied / "checkpoints")
    (store.folder / "latest").write_text("step-00000002\n")
    assert store.checkpoints()[0] == checkpoint_at(copied, 4)


def save_while_the_disk_waits(folder):
    """A save whose writing is held up, while the tensors that it is of go on changing."""
    goes_on = threading.Event()
    writes = saver_room.write_checkpoint

    def held_up(*args):
        goes_on.wait()
        writes(*args)

    saver_room.write_checkpoint = held_up
    try:
        tensor = torch.arange(6.0)
        saver = Saver(Store(folder), Team.new_group(), keep=0)
        for step in (1, 2):
            saver.save(step, {"model/w": part_of(tensor)}, {"step": step})
            busy = saver.is_busy
            tensor.add_(100.0)
            assert not saver.outcomes()
            goes_on.set()
            saver.wait()
            goes_on.clear()
            (outcome,) = saver.outcomes()
            assert busy
            assert outcome.problem is None
    finally:
        saver_room.write_checkpoint = writes
    return [whole_tensors(Store(folder).path_of(step))["model/w"] for step in (1, 2)]


def test_a_save_waits_only_for_a_copy_and_contains_the_state_at_its_start(tmp_path):
    ((first, second),) = run_ranks(save_while_the_disk_waits, 1, tmp_path, kind="gloo")
    assert torch.equal(first, torch.arange(6.0))
    assert torch.equal(second, torch.arange(6.0) + 100)


def whole(value):
    return Part(torch.full((5, 3), value), (0, 0), (5, 3))


def rows_of(rank, value):
    """A rank's rows of a tensor with three: the third rank of three has the last, a fourth would have none."""
    start, stop = (0, 1, 3, 3)[rank], (1, 3, 3, 3)[rank]
    return Part(torch.full((stop - start, 2), value), (start, 0), (3, 2))


def save_what_changes(folder):
    """Saves of parts that are the same, that one rank alone has more of, fewer of, or in a dtype without a name."""
    rank, store = dist.get_rank(), Store(folder)
    planned = []
    plans = saver_room.plan_writes
    saver_room.plan_writes = lambda *args: planned.append(step) or plans(*args)
    saver = Saver(store, Team.new_group(), keep=0)
    problems, staged_bytes = {}, {}
    try:
        for step in range(1, 8):
            value = float(step)
            parts = {"model/whole": whole(value), "model/rows": rows_of(rank, value), "model/zero": EMPTY}
            if step == 3 and rank == 1:
                parts["model/late"] = part_of(torch.arange(step))
            if step == 4 and rank == 0:
                del parts["model/whole"]
            if step == 6 and rank == 2:
                parts["model/odd"] = part_of(torch.zeros(4, dtype=torch.float8_e4m3fnuz))
            saver.save(step, parts, {})
            saver.wait()
            (outcome,) = saver.outcomes()
            problems[step] = outcome.problem
            staged_bytes[step] = sum(piece.nbytes for piece in saver._image.pieces(saver._image._layout))
    finally:
        saver_room.plan_writes = plans
    return planned, problems, staged_bytes


EMPTY = Part(torch.empty(0, 4), (0, 0), (0, 4))


def test_writes_are_planned_again_exactly_when_the_parts_of_some_rank_change(tmp_path):
    store = Store(tmp_path)
    on_all = run_ranks(save_what_changes, 4, tmp_path, kind="gloo")
    for planned, problems, _ in on_all:
        # 2 goes by the plan of 1; whoever has nothing new follows those who have, and back again.
        assert planned == [1, 3, 4, 5, 6, 7]
        reported = problems.pop(6)
        assert "'model/odd' has dtype torch.float8_e4m3fnuz, which a checkpoint cannot hold" in reported
        assert "(rank 2)" in reported
        assert set(problems.values()) == {None}
    # Once it is known who writes a tensor that all have, nobody else copies it.
    assert sum(staged[1] for _, _, staged in on_all) > sum(staged[2] for _, _, staged in on_all)
    assert not store.path_of(6).exists()
    for step in (1, 2, 3, 4, 5, 7):
        expected = {
            "model/whole": torch.full((5, 3), float(step)),
            "model/rows": torch.full((3, 2), float(step)),
            "model/zero": torch.empty(0, 4),
        }
        if step == 3:
            expected["model/late"] = torch.arange(step)
        assert_same(whole_tensors(store.path_of(step)), expected)
        manifest = read_manifest(store.path_of(step))
        assert first_damage(store.path_of(step), manifest) is None


# --- damage -------------------------------------------------------------------------------------------------------


def truncate(checkpoint):
    path = checkpoint / "rank-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(checkpoint):
    path = checkpoint / "rank-00000.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_a_file(checkpoint):
    (checkpoint / "rank-00000.bin").unlink()


def alter_the_manifest(checkpoint):
    path = checkpoint / MANIFEST
    path.write_text(path.read_text().replace('"step": 4', '"step": 3'))


def cut_the_manifest(checkpoint):
    path = checkpoint / MANIFEST
    path.write_text(path.read_text()[:-40])


DAMAGES = {
    truncate: "bytes, but had",
    flip_a_bit: "the checksum of rank-00000.bin does not match",
    lose_a_file: "rank-00000.bin cannot be read",
    alter_the_manifest: "its checksum does not match",
    cut_the_manifest: "the manifest of a checkpoint cannot be read",
}


def find_in_all(runs):
    """Where each run would go on, with what warnings, and whether resuming without a good checkpoint is refused."""
    found = {}
    for name, run in runs.items():
        try:
            good = find_good_checkpoint(Store(run / "checkpoints"), Team())
            found[name] = (good.path.name, list(good.warnings))
        except CheckpointError as error:
            found[name] = ("none", [str(error)])
    return found


def test_a_damaged_checkpoint_is_put_aside_with_a_warning_and_the_one_before_is_taken(finished, tmp_path):
    _, original, _, _ = finished
    runs = {}
    for damage in DAMAGES:
        runs[damage.__name__] = shutil.copytree(original, tmp_path / damage.__name__)
        damage(checkpoint_at(runs[damage.__name__], 4))
    runs["every one"] = shutil.copytree(original, tmp_path / "every")
    for step in (2, 3, 4):
        flip_a_bit(checkpoint_at(runs["every one"], step))
    on_all = run_ranks(find_in_all, 2, runs, kind="gloo")
    assert on_all[0] == on_all[1]
    for damage, words in DAMAGES.items():
        taken, (warning,) = on_all[0][damage.__name__]
        assert taken == "step-00000003"
        assert "step-00000004 is damaged" in warning
        assert words in warning
        store = Store(runs[damage.__name__] / "checkpoints")
        assert store.latest() == checkpoint_at(runs[damage.__name__], 3)
        assert (store.folder / "damaged-step-00000004").is_dir()
    taken, (message,) = on_all[0]["every one"]
    assert taken == "none"
    assert "no good checkpoint" in message
    assert "step-00000002 is damaged" in message


def resume_and_go_on(config, run):
    return run_part(config, run, resume=True)


def test_a_run_goes_on_from_the_one_before_a_damaged_one_to_the_same_end(finished, copied):
    config, original, losses, _ = finished
    flip_a_bit(checkpoint_at(copied, 4))
    again, lines = run_ranks(resume_and_go_on, 2, config, copied, kind="gloo")[0]
    assert again == losses[3:]
    assert lines[0].startswith("warning: step-00000004 is damaged")
    assert_same(whole_tensors(checkpoint_at(copied, 4)), whole_tensors(checkpoint_at(original, 4)))


# --- another model, a full disk -------------------------------------------------------------------------------------


def resume_as_others(config, run):
    """The refusals of models that differ in a size, in a missing layer, and in one layer more."""
    messages = []
    for change in ({"hidden": 29}, {"layers": 3}, {"layers": 1}):
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, **change))
        with pytest.raises(CheckpointError) as refused:
            run_part(other, run, resume=True)
        messages.append(str(refused.value))
    return messages


def test_names_in_a_checkpoint_do_not_depend_on_recomputation():
    def names(recomputes):
        layer = torch.nn.BatchNorm1d(3)
        model = torch.nn.Sequential(checkpoint_wrapper(layer) if recomputes else layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return sorted(TrainingState(model, optimizer).parts())

    assert names(recomputes=True) == names(recomputes=False)
    assert "model/0.running_mean" in names(recomputes=True)
    assert "optimizer/0.weight/momentum_buffer" in names(recomputes=True)


def test_a_checkpoint_of_another_model_is_refused_by_its_first_mismatch(finished, copied):
    config, _, _, _ = finished
    before = sorted(path.name for path in (copied / "checkpoints").iterdir())
    for size, missing, extra in run_ranks(resume_as_others, 2, config, copied, kind="gloo"):
        assert (
            "'model.layers.0.mlp.gate_proj.weight' has shape (27, 20) in the checkpoint and (29, 20)" in size
        )
        assert "it does not have 'model.layers.2." in missing
        assert "it has 'model.layers.1." in extra
        assert "which the model does not have" in extra
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == before


def train_on_a_full_disk(config, run):
    """The kernel refuses to write files beyond a size that no checkpoint fits in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    display = Noted()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError) as failed:
            run_part(config, run, display=display)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(failed.value), display, sorted(path.name for path in Path(run, "checkpoints").iterdir())


def test_training_goes_on_when_the_disk_is_full_and_says_so_and_fails_at_the_end(finished, tmp_path):
    config, _, losses, _ = finished
    results = run_ranks(train_on_a_full_disk, 2, config, tmp_path / "full", kind="gloo")
    for message, _, _ in results:
        assert "the last checkpoint could not be written" in message
        assert "File too large" in message
    _, display, leftovers = results[0]
    assert leftovers == []
    assert [record.loss for record in display.records] == losses
    assert len(display.lines) == 5  # the last is tried again
    for step, line in zip((1, 2, 3, 4, 4), display.lines, strict=True):
        assert f"warning: the checkpoint of step {step} could not be written, training continues" in line


# --- code in files ------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_no_file_of_a_checkpoint_can_run_code(finished, copied, tmp_path):
    config, _, _, _ = finished
    planted = tmp_path / "planted"
    payload = pickle.dumps(Payload(planted))
    pickle.loads(payload)
    assert planted.exists()  # it does work
    planted.rmdir()
    checkpoint = checkpoint_at(copied, 4)
    for name in (".metadata", "metadata.pkl", "extra.bin"):
        (checkpoint / name).write_bytes(payload)
    (copied / "checkpoints" / "latest").write_bytes(payload)
    run_ranks(resume_and_go_on, 2, dataclasses.replace(config), copied, kind="gloo")
    for content in (payload, json.dumps({"crc32": 0, "body": payload.decode("latin-1")}).encode()):
        (checkpoint / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError):
            read_manifest(checkpoint)
    file = tmp_path / "weights.pt"
    torch.save({"w": Payload(planted)}, file)
    with pytest.raises(CheckpointError, match="without running code"):
        weights.open_weights(file)
    assert not planted.exists()


def test_a_manifest_cannot_lead_out_of_its_folder_or_its_files(finished):
    _, run, _, _ = finished
    manifest = read_manifest(checkpoint_at(run, 4))
    name, record = next(iter(manifest.tensors.items()))
    file = record.chunks[0].file

    def refused(**changes):
        text = dataclasses.replace(manifest, **changes).to_text()
        with pytest.raises(CheckpointError):
            Manifest.from_text(text, "here")

    assert Manifest.from_text(manifest.to_text(), "here") == manifest
    for lead in ("../", "/tmp/", ""):
        files = {lead + key: value for key, value in manifest.files.items()}
        tensors = {
            key: dataclasses.replace(
                tensor,
                chunks=tuple(dataclasses.replace(chunk, file=lead + chunk.file) for chunk in tensor.chunks),
            )
            for key, tensor in manifest.tensors.items()
        }
        if lead:
            refused(files=files, tensors=tensors)
        else:
            assert (files, tensors) == (manifest.files, manifest.tensors)  # nothing else is wrong with them
    for change in ({"start": -8}, {"start": 10**12}, {"sizes": (10**9, 1)}, {"offsets": (-1, 0)}):
        chunk = dataclasses.replace(record.chunks[0], **change)
        refused(tensors={**manifest.tensors, name: dataclasses.replace(record, chunks=(chunk,))})
    refused(tensors={**manifest.tensors, name: dataclasses.replace(record, dtype="__class__")})
    refused(tensors={**manifest.tensors, name: dataclasses.replace(record, chunks=record.chunks[:1])})
    assert first_damage(checkpoint_at(run, 4), manifest, [file]) is None


# --- other formats ------------------------------------------------------------------------------------------------


def weights_of(run):
    tensors = whole_tensors(checkpoint_at(run, 4))
    return {
        name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")
    }


def test_weights_go_to_safetensors_in_hugging_faces_layout_sharded_by_size(finished, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    _, run, _, _ = finished
    monkeypatch.setattr(weights, "BLOCK_BYTES", 100)  # many blocks a tensor
    files = convert.export_safetensors(weights.open_weights(run), tmp_path / "hf", shard_bytes=12_000)
    assert len(files) > 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {}
    for file in files:
        content = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in content)
        assert len(content) == 1 or sum(value.nbytes for value in content.values()) <= 12_000
        found.update(content)
    assert_same(found, weights_of(run))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["dtype"]) == ("llama", 20, "float32")

    (one,) = convert.export_safetensors(
        weights.open_weights(run), tmp_path / "one.safetensors", dtype=torch.bfloat16
    )
    assert_same(load_file(one), {name: value.bfloat16() for name, value in weights_of(run).items()})
    with pytest.raises(ConfigError, match="exists already"):
        convert.export_safetensors(weights.open_weights(run), one)


def test_weights_go_to_a_torch_file(finished, tmp_path):
    _, run, _, _ = finished
    path = convert.export_torch(weights.open_weights(checkpoint_at(run, 4)), tmp_path / "m.pt")
    assert_same(torch.load(path, weights_only=True), weights_of(run))
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt"]


def go_on_from_weights(config, runs):
    return {name: run_part(config, run, resume=True) for name, run in runs.items()}


def test_a_run_resumes_from_weights_that_were_exported_and_imported(finished, tmp_path, monkeypatch):
    config, run, _, _ = finished
    monkeypatch.setattr(weights, "BLOCK_BYTES", 100)
    opened = weights.open_weights(run)
    convert.export_safetensors(opened, tmp_path / "hf", shard_bytes=12_000)
    convert.export_torch(opened, tmp_path / "m.pt")
    runs = {}
    for name in ("hf", "m.pt"):
        back = convert.import_weights(weights.open_weights(tmp_path / name), tmp_path / f"from-{name}")
        assert_same(weights_of(run), {k.removeprefix("model/"): v for k, v in whole_tensors(back).items()})
        runs[name] = tmp_path / f"from-{name}"
    found = run_ranks(go_on_from_weights, 2, in_mode(config, "optimizer"), runs, kind="gloo")[0]
    assert found["hf"][0] == found["m.pt"][0]
    assert "only weights" in found["hf"][1][0]


def test_sources_without_weights_or_with_damaged_ones_are_refused(finished, copied, tmp_path):
    _, run, _, _ = finished
    flip_a_bit(checkpoint_at(copied, 4))
    with pytest.raises(CheckpointError, match="damaged"):
        weights.open_weights(copied)
    (path,) = convert.export_safetensors(weights.open_weights(run), tmp_path / "w.safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="file not fully covered"):
        weights.open_weights(path)
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"its header has .* bytes, the limit is"):
        weights.open_weights(path)
    (tmp_path / "noise.bin").write_bytes(b"\x80\x02" * 50)
    with pytest.raises(CheckpointError, match=r"not a file of torch\.save"):
        weights.open_weights(tmp_path / "noise.bin")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="no state dict"):
        weights.open_weights(tmp_path / "list.pt")
    for nothing in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"no weights|damaged"):
            weights.open_weights(nothing)


def wrapped_and_sharded():
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="is sharded by FullyShardedDataParallel"):
        TrainingState(model)


def test_flat_shards_are_not_mistaken_for_full_parameters():
    run_ranks(wrapped_and_sharded, 2)
