"""Files that are damaged, forged or no files at all are refused with a CheckpointError: none hangs, none loads."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
import zlib

import pytest
import torch
from torch import nn

from shardwise.checkpoint import convert, load_parts, read_manifest
from shardwise.checkpoint.manifest import MANIFEST, Manifest, first_damage
from shardwise.checkpoint.parts import part_of
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import TrainingState
from shardwise.checkpoint.weights import Weight, Weights, open_weights
from shardwise.errors import CheckpointError

pytestmark = pytest.mark.timeout(
    120
)  # a pipe that is opened, or a loop over an empty tensor, would never end

TENSORS = {"grid": torch.arange(24.0).view(4, 6), "bias": torch.arange(5, dtype=torch.int16)}


def weights(tensors):
    return Weights(tuple(Weight.of(name, tensor) for name, tensor in sorted(tensors.items())), None)


@pytest.fixture
def checkpoint(tmp_path):
    return convert.import_weights(weights(TENSORS), tmp_path / "run")


@pytest.fixture
def safetensors(tmp_path):
    (path,) = convert.export_safetensors(weights(TENSORS), tmp_path / "w.safetensors")
    return path


@pytest.fixture
def torch_file(tmp_path):
    torch.save(TENSORS, tmp_path / "w.pt")
    return tmp_path / "w.pt"


def refused(source, words=None):
    """Opening it is refused, in words; what is opened must be whole, so nothing is read afterwards."""
    with pytest.raises(CheckpointError, match=words) as error:
        open_weights(source)
    assert error.value.where
    assert error.value.fix
    return str(error.value)


def body_of(checkpoint):
    return json.loads((checkpoint / MANIFEST).read_text())["body"]


def forge(checkpoint, body):
    """A manifest with a right checksum, whatever it says."""
    text = body if isinstance(body, str) else json.dumps(body, sort_keys=True)
    (checkpoint / MANIFEST).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n')


# --- a manifest -----------------------------------------------------------------------------------------------------


def in_chunks(checkpoint, *boxes):
    """The page of a checkpoint whose tensor 'grid' of (4, 6) lies in these blocks, end to end in one file."""
    chunks, start = [], 0
    for offsets, sizes in boxes:
        chunks.append([list(offsets), list(sizes), "rank-00000.bin", start])
        start += (sizes[0] * sizes[1] * 4 + 63) // 64 * 64
    body = body_of(checkpoint)
    grid = {"chunks": chunks, "dtype": "float32", "shape": [4, 6]}
    last = chunks[-1][3] + boxes[-1][1][0] * boxes[-1][1][1] * 4
    data = torch.arange(last, dtype=torch.uint8).numpy().tobytes() if last < 256 else bytes(last)
    (checkpoint / "rank-00000.bin").write_bytes(data)
    forge(
        checkpoint,
        {**body, "files": {"rank-00000.bin": [last, zlib.crc32(data)]}, "tensors": {"model/grid": grid}},
    )


GRIDS = {
    "whole": [((0, 0), (4, 6))],
    "rows": [((2, 0), (2, 6)), ((0, 0), (2, 6))],
    "a grid": [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (2, 3))],
    "a pinwheel": [
        ((0, 0), (1, 4)),
        ((0, 4), (3, 2)),
        ((3, 2), (1, 4)),
        ((1, 0), (3, 2)),
        ((1, 2), (2, 2)),
    ],
}
BAD_GRIDS = {
    "the same rows twice": [((0, 0), (2, 6)), ((0, 0), (2, 6))],
    "rows that overlap": [((0, 0), (2, 6)), ((1, 0), (2, 6))],
    "a grid with one block twice": [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 0), (2, 3))],
    "a hole": [((0, 0), (1, 6)), ((2, 0), (2, 6))],
    "a row too many": [((0, 0), (4, 6)), ((3, 0), (1, 6))],
    "an empty block": [((0, 0), (4, 6)), ((4, 0), (0, 6))],
    "beyond the tensor": [((0, 0), (5, 6))],
}


@pytest.mark.parametrize("name", GRIDS)
def test_chunks_that_tile_a_tensor_are_read(checkpoint, name):
    in_chunks(checkpoint, *GRIDS[name])
    (grid,) = open_weights(checkpoint).tensors
    assert sum(block.numel() for block in grid.rows(grid.dtype, block_bytes=1)) == 24
    covered = torch.zeros(4, 6)
    for (row, column), part in grid.blocks:
        covered[row : row + part.size(0), column : column + part.size(1)] += 1
    assert torch.equal(covered, torch.ones(4, 6))


@pytest.mark.parametrize("name", BAD_GRIDS)
def test_chunks_that_do_not_tile_a_tensor_are_refused(checkpoint, name):
    in_chunks(checkpoint, *BAD_GRIDS[name])
    with pytest.raises(CheckpointError, match=r"overlap|inside its tensor|cannot be at byte"):
        read_manifest(checkpoint)


def test_two_tensors_cannot_lie_on_the_same_bytes_and_no_byte_can_be_left_out(checkpoint):
    body = body_of(checkpoint)
    shifted = json.loads(json.dumps(body))
    shifted["tensors"]["model/grid"]["chunks"][0][3] = 0
    forge(checkpoint, shifted)
    refused(checkpoint, "overlap or leave bytes out")
    fewer = json.loads(json.dumps(body))
    del fewer["tensors"]["model/bias"]
    forge(checkpoint, fewer)
    refused(checkpoint, "overlap or leave bytes out")
    longer = json.loads(json.dumps(body))
    longer["files"]["rank-00000.bin"][0] += 100
    forge(checkpoint, longer)
    refused(checkpoint, "its chunks end at")


HOSTILE = [
    float("nan"),
    float("inf"),
    -1,
    1.0,
    1e300,
    True,
    None,
    "4",
    [],
    {},
    2**62,
    2**63,
    2**64,
    10**400,
    [[4]],
]


def places(value, path=()):
    """Every number of a page, by the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            yield from places(inner, (*path, key))
    elif isinstance(value, int):
        yield path


def test_anything_but_the_number_that_belongs_there_is_refused(checkpoint):
    original = body_of(checkpoint)
    found = list(places(original))
    assert len(found) > 15
    for place in found:
        for hostile in HOSTILE:
            body = json.loads(json.dumps(original))
            inner = body
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = hostile
            forge(checkpoint, body)
            with pytest.raises(CheckpointError):
                read_manifest(checkpoint)
    forge(checkpoint, original)
    assert read_manifest(checkpoint).run["step"] == 0


def test_an_empty_tensor_with_a_huge_size_is_refused(checkpoint, safetensors, torch_file):
    body = body_of(checkpoint)
    body["tensors"]["model/none"] = {"dtype": "uint8", "shape": [2**61, 0], "chunks": []}
    forge(checkpoint, body)
    refused(checkpoint, "no tensor can have the shape")
    body["tensors"]["model/none"]["shape"] = [1] * 70 + [0]
    forge(checkpoint, body)
    refused(checkpoint, "no tensor can have the shape")
    write_safetensors(safetensors, {"none": entry("F32", [2**62, 0], 0, 0)}, b"")
    refused(safetensors, "expected a whole number|no tensor can have the shape")
    write_safetensors(safetensors, {"none": entry("F32", [2**61, 0], 0, 0)}, b"")
    refused(safetensors, "no tensor can have the shape")
    torch.save({"none": torch.empty(2**61, 0)}, torch_file)
    refused(torch_file, "no tensor can have the shape")


def test_an_empty_tensor_is_converted(tmp_path):
    tensors = {**TENSORS, "none": torch.empty(3, 0), "scalar": torch.tensor(2.5)}
    (path,) = convert.export_safetensors(weights(tensors), tmp_path / "w.safetensors")
    back = convert.import_weights(open_weights(path), tmp_path / "run")
    file = convert.export_torch(open_weights(back), tmp_path / "w.pt")
    found = torch.load(file, weights_only=True)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_json_that_is_nested_deeply_is_refused(checkpoint, safetensors, tmp_path, depth):
    body = json.dumps(body_of(checkpoint), sort_keys=True)
    nested = "[" * depth + "]" * depth
    forge(checkpoint, body.replace('"step": 0', f'"step": 0, "x": {nested}'))
    refused(checkpoint, "nested too deeply")
    write_safetensors(safetensors, f'{{"a": {nested}}}'.encode(), b"")
    refused(safetensors, "nested too deeply|expected an object")
    folder = tmp_path / "hf"
    convert.export_safetensors(weights(TENSORS), folder)
    (folder / "config.json").write_text(f'{{"a": {nested}}}')
    refused(folder, "nested too deeply")


@pytest.mark.parametrize("key", ["body", "crc32", "format", "files", "run", "dtype", "model/grid"])
def test_a_key_that_is_there_twice_is_refused(checkpoint, key):
    text = json.dumps(body_of(checkpoint), sort_keys=True)
    if key in ("body", "crc32"):
        page = (checkpoint / MANIFEST).read_text()
        (checkpoint / MANIFEST).write_text(page.replace(f'"{key}":', f'"{key}": 0, "{key}":', 1))
    else:
        assert f'"{key}":' in text
        forge(checkpoint, text.replace(f'"{key}":', f'"{key}": 0, "{key}":', 1))
    refused(checkpoint)


@pytest.mark.parametrize(
    "name", ["../rank-00000.bin", "/etc/passwd", "rank-00000.bin\0", "..", ".", "", "a/b", "\ud800", MANIFEST]
)
def test_a_name_in_a_manifest_that_is_no_file_of_its_folder_is_refused(checkpoint, name):
    body = body_of(checkpoint)
    body["files"] = {name: body["files"]["rank-00000.bin"]}
    for tensor in body["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk[2] = name
    shutil.copy(checkpoint / "rank-00000.bin", checkpoint.parent / "rank-00000.bin")
    forge(checkpoint, body)
    refused(checkpoint, "manifest of a checkpoint cannot be read")


def test_a_link_out_of_a_checkpoint_is_refused(checkpoint):
    outside = checkpoint.parent.parent / "outside.bin"
    (checkpoint / "rank-00000.bin").rename(outside)
    (checkpoint / "rank-00000.bin").symlink_to(outside)
    assert "symbolic link" in first_damage(checkpoint, read_manifest(checkpoint))
    refused(checkpoint, "symbolic link")
    (checkpoint / MANIFEST).rename(outside)
    (checkpoint / MANIFEST).symlink_to(outside)
    with pytest.raises(CheckpointError, match="symbolic link"):
        read_manifest(checkpoint)


def test_links_in_a_store_are_not_followed(checkpoint, tmp_path):
    store = Store(checkpoint.parent)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, elsewhere)
    (store.folder / "step-00000007").symlink_to(elsewhere)
    assert store.checkpoints() == [checkpoint]
    (store.folder / "latest").unlink()
    (store.folder / "latest").write_text("step-00000007")
    assert store.latest() is None
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (store.folder / ".latest").symlink_to(victim)
    (store.folder / ".saving-00000009").symlink_to(elsewhere)
    store.sweep()
    shutil.copytree(checkpoint, store.saving_path(9))
    store.commit(9)
    store.prune(1)
    assert store.latest() == store.path_of(9)
    assert victim.read_text() == "mine"
    assert (elsewhere / MANIFEST).exists()
    assert not list(store.folder.glob(".saving-*"))


# --- what is no file ------------------------------------------------------------------------------------------------


def put(kind, path):
    if os.path.lexists(path):
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(1 << 40)


KINDS = ["pipe", "folder", "device", "endless"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once(kind, checkpoint, safetensors, torch_file, tmp_path):
    put(kind, safetensors)
    refused(safetensors)
    if kind != "endless":
        put(kind, torch_file)
        refused(torch_file)
    folder = tmp_path / "hf"
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
        convert.export_safetensors(weights(TENSORS), folder)
        put(kind, folder / name)
        refused(folder)
        shutil.rmtree(folder)
    put(kind, Store(checkpoint.parent).folder / "latest")
    assert Store(checkpoint.parent).latest() is None
    manifest = read_manifest(checkpoint)
    put(kind, checkpoint / "rank-00000.bin")
    assert first_damage(checkpoint, manifest)
    with pytest.raises(CheckpointError):
        load_parts({"model/grid": part_of(torch.zeros(4, 6))}, checkpoint, manifest, None)
    put(kind, checkpoint / MANIFEST)
    with pytest.raises(CheckpointError):
        read_manifest(checkpoint)


def test_writing_replaces_what_lies_under_a_name_and_follows_no_link(tmp_path):
    from shardwise.checkpoint.disk import RawFile, write_text

    victim = tmp_path / "victim"
    for write in (lambda path: write_text(path, "new"), lambda path: RawFile(path).__exit__(None)):
        victim.write_text("mine")
        path = tmp_path / "name"
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
        write(path)
        assert victim.read_text() == "mine"
        assert not path.is_symlink()
        put("pipe", path)
        write(path)
        assert path.is_file()


# --- damage that a load finds ---------------------------------------------------------------------------------------


def test_a_load_compares_checksums_before_it_changes_anything(tmp_path):
    model = nn.Linear(6, 4)
    path = convert.import_weights(weights(dict(model.state_dict())), tmp_path / "run")
    state, manifest = TrainingState(model), read_manifest(path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = bytearray((path / "rank-00000.bin").read_bytes())
    data[3] ^= 1
    (path / "rank-00000.bin").write_bytes(data)
    for load in (
        lambda: state.load(path, manifest, None),
        lambda: load_parts(state.parts(), path, manifest, None),
    ):
        with pytest.raises(CheckpointError, match=r"the checksum of rank-00000\.bin does not match"):
            load()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_optimizer_state_of_a_parameter_that_the_model_has_not_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    path = convert.import_weights(weights(dict(model.state_dict())), tmp_path / "run")
    manifest = read_manifest(path)
    record = manifest.tensors["model/bias"]
    for name in ("optimizer/other/exp_avg", "optimizer/bias"):
        forged = Manifest({**manifest.tensors, name: record}, manifest.files, {})
        with pytest.raises(CheckpointError, match="the model has no parameter"):
            TrainingState(model).load(path, forged, None)


# --- safetensors ----------------------------------------------------------------------------------------------------


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write_safetensors(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


A, B = entry("F32", [1], 0, 4), entry("F32", [1], 4, 8)
ONE = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
BAD_SAFETENSORS = {
    "overlap": ({"a": A, "b": A}, 4),
    "partial overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6),
    "hole": ({"a": A, "b": entry("F32", [1], 8, 12)}, 12),
    "hole at the start": ({"b": B}, 8),
    "trailing bytes": ({"a": A}, 5),
    "missing bytes": ({"a": A}, 3),
    "duplicate name": (b'{"a":' + ONE + b',"a":' + ONE + b"}", 4),
    "duplicate field": (b'{"a":{"dtype":"I32",' + ONE[1:] + b"}", 4),
    "unknown field": ({"a": {**A, "scale": 2}}, 4),
    "missing field": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4),
    "unknown dtype": ({"a": entry("F33", [1], 0, 4)}, 4),
    "dtype that is a list": ({"a": entry(["F32"], [1], 0, 4)}, 4),
    "size that does not match": ({"a": entry("F32", [2], 0, 4)}, 4),
    "offsets the wrong way round": ({"a": entry("F32", [1], 4, 0)}, 4),
    "negative shape": ({"a": entry("F32", [-1, -1], 0, 4)}, 4),
    "float": ({"a": entry("F32", [1.0], 0, 4)}, 4),
    "bool": ({"a": entry("F32", [True], 0, 4)}, 4),
    "nan": ({"a": entry("F32", [float("nan")], 0, 4)}, 4),
    "three offsets": ({"a": {**A, "data_offsets": [0, 4, 8]}}, 4),
    "metadata that is no text": ({"__metadata__": {"n": 1}, "a": A}, 4),
    "metadata that is a list": ({"__metadata__": [], "a": A}, 4),
    "metadata with half a character": (b'{"__metadata__":{"a":"\\ud800"},"a":' + ONE + b"}", 4),
    "a list": (b"[]", 0),
    "no utf-8": (b'{"\xff":' + ONE + b"}", 4),
    "half a character": (b'{"\\ud800":' + ONE + b"}", 4),
    "overflow": ({"a": entry("F32", [2**33, 2**31], 0, 0)}, 0),
}


@pytest.mark.parametrize("name", BAD_SAFETENSORS)
def test_a_safetensors_file_that_breaks_a_rule_is_refused(safetensors, name):
    header, num_bytes = BAD_SAFETENSORS[name]
    write_safetensors(safetensors, header, bytes(num_bytes))
    refused(safetensors, "not a safetensors file, or a damaged one")


@pytest.mark.parametrize("length", [0, 7, 100_000_001, 2**63, 2**64 - 1])
def test_a_safetensors_header_is_no_longer_than_the_file_or_the_limit(safetensors, length):
    safetensors.write_bytes(struct.pack("<Q", length)[: max(length, 7) if length == 7 else 8] + b"{" * 8)
    with safetensors.open("r+b") as file:
        file.truncate(1 << 28 if length > 100 else 15)
    refused(safetensors, "not a safetensors file, or a damaged one")


def test_safetensors_of_any_alignment_and_order_are_read(safetensors):
    header = {"b": entry("F32", [2], 1, 9), "a": entry("U8", [1], 0, 1), "n": entry("F16", [0, 3], 9, 9)}
    write_safetensors(safetensors, header, b"\7" + torch.tensor([1.5, 2.5]).numpy().tobytes())
    found = {weight.name: list(weight.rows(weight.dtype)) for weight in open_weights(safetensors).tensors}
    assert found["a"][0].tolist() == [7]
    assert found["b"][0].tolist() == [1.5, 2.5]
    assert found["n"] == []


def test_a_folder_of_safetensors_holds_what_its_index_lists(tmp_path):
    folder = tmp_path / "hf"
    files = convert.export_safetensors(weights(TENSORS), folder, shard_bytes=1)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    assert len(open_weights(folder).tensors) == 2
    for change in (
        {"grid": "../w.safetensors"},
        {"grid": str(files[1])},
        {"grid": 7},
        {"grid": files[0].name},
        {"more": files[0].name},
    ):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], **change}}))
        refused(folder)
    index.write_text("[]")
    refused(folder, "not an index of weights")
    index.write_text(json.dumps(good))
    convert.export_safetensors(weights({"old": torch.ones(3)}), folder / "model-old.safetensors")
    assert len(open_weights(folder).tensors) == 2  # a file that is not listed is no part of the model
    index.unlink()
    convert.export_safetensors(weights({"grid": torch.ones(3)}), folder / "zzz.safetensors")
    refused(folder, "'grid' is in zzz.safetensors, where it does not belong")
    files[1].unlink()
    index.write_text(json.dumps(good))
    refused(folder)


def test_a_tensor_that_safetensors_cannot_hold_is_refused_and_nothing_is_left(tmp_path):
    for tensors in ({"c": torch.zeros(2, dtype=torch.complex128)}, {"__metadata__": torch.zeros(2)}):
        with pytest.raises(CheckpointError, match="a safetensors file cannot hold"):
            convert.export_safetensors(weights(tensors), tmp_path / "w.safetensors")
        assert list(tmp_path.iterdir()) == []


# --- torch's files --------------------------------------------------------------------------------------------------


def records_of(path):
    """Where each record's bytes lie in a torch file."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            content = path.read_bytes()
            name_bytes, extra_bytes = struct.unpack_from("<HH", content, info.header_offset + 26)
            yield info.filename, info.header_offset + 30 + name_bytes + extra_bytes, info.file_size


def test_a_changed_bit_in_any_record_of_a_torch_file_is_found(torch_file):
    good = torch_file.read_bytes()
    found = list(records_of(torch_file))
    assert len(found) > 4
    for _, start, size in found:
        for byte in {start, start + size // 2, start + size - 1}:
            content = bytearray(good)
            content[byte] ^= 4
            torch_file.write_bytes(content)
            refused(torch_file, "a damaged one")
    torch_file.write_bytes(good)
    assert len(open_weights(torch_file).tensors) == 2


def rewrite(path, compression=zipfile.ZIP_STORED, change=None):
    """The same archive by another writer, some records changed; every checksum is right."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records:
            archive.writestr(name, (change or (lambda _, content: content))(name.split("/", 1)[1], content))


def test_a_torch_file_that_is_compressed_is_refused_before_it_is_unpacked(torch_file):
    rewrite(
        torch_file, zipfile.ZIP_DEFLATED, lambda name, content: bytes(100 << 20) if name == "x" else content
    )
    refused(torch_file, "is compressed")
    torch.save({"x": torch.zeros(50 << 20, dtype=torch.uint8)}, torch_file)
    rewrite(torch_file, zipfile.ZIP_DEFLATED)
    assert torch_file.stat().st_size < 1 << 20
    refused(torch_file, "is compressed")


def test_a_small_torch_file_cannot_become_a_large_tensor(torch_file):
    torch.save({"x": torch.zeros(1).expand(2**33)}, torch_file)
    assert torch_file.stat().st_size < 2000
    refused(torch_file, "tensors are expanded")
    torch.save({f"{n}": x for x in [torch.zeros(1 << 20)] for n in range(100)}, torch_file)
    refused(torch_file, "tensors are expanded")
    torch.save(
        {"x": torch.zeros(1, 3).expand(4, 3), "tied": TENSORS["grid"], "grid": TENSORS["grid"]}, torch_file
    )
    assert len(open_weights(torch_file).tensors) == 3


def grown(levels, shared):
    """A pickle of a dict whose key holds something twice that holds something twice, and so on."""
    content, last = b"\x80\x02}q\x00)q\x01", 1
    for _ in range(levels):
        content += (
            b"h" + bytes([last]) + (b"h" + bytes([last]) if shared else b")") + b"\x86q" + bytes([last + 1])
        )
        last += 1
    return content + b"h\x00h" + bytes([last]) + b"K\x01s."


def test_a_pickle_that_makes_a_huge_object_of_a_few_bytes_is_refused(torch_file):
    rewrite(torch_file, change=lambda name, content: grown(100, True) if name == "data.pkl" else content)
    refused(torch_file, "makes a huge object of a few bytes")
    # A list that is put into itself after it was noted: [[..], [..]] of the same list.
    lists = b"\x80\x02" + b"".join(
        b"]q" + bytes([n]) + (b"(h" + bytes([n - 1]) + b"h" + bytes([n - 1]) + b"e" if n else b"K\x01a")
        for n in range(100)
    )
    rewrite(torch_file, change=lambda name, content: lists + b"." if name == "data.pkl" else content)
    refused(torch_file, "makes a huge object of a few bytes")
    rewrite(torch_file, change=lambda name, content: grown(100, False) if name == "data.pkl" else content)
    refused(torch_file, "no state dict")


def test_a_torch_file_whose_storage_is_not_as_long_as_it_says_is_refused(torch_file):
    torch.save({"x": torch.arange(6.0)}, torch_file)
    rewrite(torch_file, change=lambda name, content: content[:-4] if name == "data/0" else content)
    refused(torch_file)
    torch.save({"x": torch.arange(6.0)}, torch_file)
    rewrite(torch_file, change=lambda name, content: content + b"\0" * 8 if name == "data/0" else content)
    refused(torch_file, "more or fewer bytes than the file holds")


def test_a_torch_file_without_checksums_is_refused_and_told_why(torch_file):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(TENSORS, torch_file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert "set_crc32_options" in refused(torch_file, "a damaged one")


def test_a_torch_file_of_what_is_no_plain_tensor_is_refused(torch_file):
    for odd in (
        {"x": torch.zeros(3, 3).to_sparse()},
        {"x": torch.zeros(3, device="meta")},
        {"x": torch.zeros(3, dtype=torch.float8_e4m3fnuz)},
        {3: torch.zeros(3)},
    ):
        torch.save(odd, torch_file)
        refused(torch_file)


def test_records_of_a_torch_file_neither_overlap_nor_share_a_name(torch_file):
    good = torch_file.read_bytes()
    with zipfile.ZipFile(torch_file) as archive:
        first, second = [info for info in archive.infolist() if "/data/" in info.filename][:2]
        start = archive.start_dir
    where = good.index(second.filename.encode(), start)
    content = bytearray(good)
    content[where : where + len(second.filename)] = first.filename.encode()
    torch_file.write_bytes(content)
    refused(torch_file)
    content = bytearray(good)
    struct.pack_into("<I", content, where - 4, first.header_offset)
    torch_file.write_bytes(content)
    refused(torch_file)


# --- a disk that is full --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["w.safetensors", "hf", "w.pt", "run"])
def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, kind):
    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    writes = {"run": convert.import_weights, "w.pt": convert.export_torch}.get(
        kind, convert.export_safetensors
    )
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match="No space left on device"):
        writes(weights(TENSORS), tmp_path / "out" / kind)
    assert list((tmp_path / "out").iterdir()) == []
