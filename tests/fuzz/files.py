"""Damages or forges checkpoints, safetensors and torch files from a seed, and checks how shardwise reads them.

    python -m tests.fuzz.files --count 2000 --seed 0 --result benchmarks/results/fuzz_files.json
    python -m tests.fuzz.files --seed 0 --case 17 --keep folder      repeats one case and keeps its files

A small file of some kind is written, then changed. *Damage* is blind: bits, blocks, lengths, whole files of a folder.
*Forgery* knows the format: it changes the contents and corrects the checksums. Each file is then loaded into a model
and converted; this must raise a CheckpointError, or the result must be right:

- if the format has checksums, a damaged file yields the original contents or an error;
- any other file yields what it contains according to a second, simple reader below.

Any other exception, a wrong value, a crash or a hang is a failure.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import pickle
import platform
import random
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.checkpoint import Store, TrainingState, convert, read_manifest
from shardwise.checkpoint.disk import RawFile
from shardwise.checkpoint.manifest import MANIFEST, Chunk, Manifest, TensorRecord, first_damage
from shardwise.checkpoint.parts import dtype_name
from shardwise.checkpoint.safetensors_file import DTYPE_NAMES
from shardwise.checkpoint.weights import open_weights
from shardwise.errors import CheckpointError
from shardwise.testing import run_ranks

SECONDS_A_CASE = 120  # a case that takes longer counts as a hang
MODEL_SIZES = (3, 5, 2)


class Invalid(Exception):
    """Raised by the second reader: the file is not valid."""


class Wrong(AssertionError):
    """A failure: something that no file may cause."""


@dataclass(frozen=True)
class Made:
    """A changed file: its path, and a function that returns what it contains."""

    kind: str
    change: str
    path: Path
    truth: Callable[[], dict[str, torch.Tensor]]


# --- what is made ---------------------------------------------------------------------------------------------------


def new_model():
    first, middle, last = MODEL_SIZES
    return nn.Sequential(
        nn.Linear(first, middle), nn.BatchNorm1d(middle), nn.Linear(middle, last, bias=False)
    )


def tensors_for(chance, with_optimizer):
    """Returns a random state of the model above, under the names that a checkpoint uses."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    tensors = {}
    model = new_model()
    for name, value in model.state_dict().items():
        like = value if value.is_floating_point() else value.float()
        drawn = torch.randn(like.shape, generator=generator)
        tensors[f"model/{name}"] = drawn if value.is_floating_point() else (drawn * 100).to(value.dtype)
    if with_optimizer:
        for name, param in model.named_parameters():
            tensors[f"optimizer/{name}/step"] = torch.tensor(float(chance.randrange(9)))
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer/{name}/{key}"] = torch.randn(param.shape, generator=generator)
    return tensors


def odd_tensors(chance):
    """Returns tensors of many dtypes and shapes, including empty ones and scalars."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float64,
    ]
    tensors = {}
    for number in range(chance.randint(1, 5)):
        shape = [chance.choice([0, 1, 2, 3, 4, 7]) for _ in range(chance.randint(0, 3))]
        values = torch.randn(shape, generator=generator) * 50
        tensors[f"layers.{number}.{chance.choice(['weight', 'bias'])}"] = values.to(chance.choice(dtypes))
    return tensors


def write_checkpoint(folder, tensors, chance):
    """Writes a checkpoint as ranks would: each tensor cut into a grid of blocks, in the files of one to three ranks."""
    folder.mkdir(parents=True)
    files = [RawFile(folder / f"rank-{rank:05d}.bin") for rank in range(chance.randint(1, 3))]
    records = {}
    for name, tensor in sorted(tensors.items()):
        chunks = []
        for offsets, sizes in grid(tuple(tensor.shape), chance):
            rank = chance.randrange(len(files))
            block = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            start = files[rank].append(block)
            chunks.append(Chunk(offsets, sizes, f"rank-{rank:05d}.bin", start))
        records[name] = TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), tuple(chunks))
    for file in files:
        file.__exit__(None)
    written = {f"rank-{rank:05d}.bin": file.record for rank, file in enumerate(files)}
    run = {"step": 3, "samples": 24, "hugging_face": {"model_type": "llama"}, "world_size": len(files)}
    (folder / MANIFEST).write_text(Manifest(records, written, run).to_text())


def grid(shape, chance):
    """Returns blocks that tile a shape."""
    blocks = [((), ())]
    for size in shape:
        cuts = sorted({0, size, *(chance.randint(0, size) for _ in range(chance.randint(0, 2)))})
        spans = list(itertools.pairwise(cuts)) or [(0, 0)]
        blocks = [
            ((*offsets, start), (*sizes, stop - start)) for offsets, sizes in blocks for start, stop in spans
        ]
    return blocks


# --- second readers -------------------------------------------------------------------------------------------------


def simply(read):
    """Decorates a simple reader: any exception in it means that the file is not valid."""

    def truth(*args):
        try:
            return read(*args)
        except Exception as error:
            raise Invalid(repr(error)) from error

    return truth


def unique(pairs):
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def whole(number):
    assert type(number) is int
    assert 0 <= number < 1 << 40
    return number


@simply
def checkpoint_truth(folder):
    page = json.loads((folder / MANIFEST).read_text(), object_pairs_hook=unique)["body"]
    data = {}
    for name, (num_bytes, crc32) in page["files"].items():
        assert name == os.path.basename(name)
        data[name] = (folder / name).read_bytes()
        assert (len(data[name]), zlib.crc32(data[name])) == (num_bytes, crc32)
    tensors = {}
    for name, record in page["tensors"].items():
        dtype, shape = getattr(torch, record["dtype"]), [whole(size) for size in record["shape"]]
        assert math.prod(max(1, size) for size in shape) < 100_000
        filled, times = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int32)
        for offsets, sizes, file, start in record["chunks"]:
            assert len(offsets) == len(sizes) == len(shape)
            bounds = [(whole(o), whole(o) + whole(s)) for o, s in zip(offsets, sizes, strict=True)]
            assert all(stop <= size for (_, stop), size in zip(bounds, shape, strict=True))
            where = tuple(slice(*bound) for bound in bounds)
            if numel := math.prod(sizes):
                num_bytes = numel * dtype.itemsize
                content = bytearray(data[file][whole(start) : start + num_bytes])
                assert len(content) == num_bytes
                filled[where] = torch.frombuffer(content, dtype=dtype).view(sizes)
            times[where] += 1
        assert bool((times == 1).all())
        tensors[name] = filled
    return tensors


@simply
def safetensors_truth(path):
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    data, header = content[begin:], json.loads(content[8:begin], object_pairs_hook=unique)
    header.pop("__metadata__", None)
    dtypes = {theirs: getattr(torch, ours) for ours, theirs in DTYPE_NAMES.items()}
    tensors, times = {}, torch.zeros(len(data), dtype=torch.int32)
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert type(start) is type(stop) is int
        assert 0 <= start <= stop <= len(data)
        times[start:stop] += 1
        dtype = dtypes[entry["dtype"]]
        if start == stop:
            tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        else:
            raw = torch.frombuffer(bytearray(data[start:stop]), dtype=dtype)
            tensors[name] = raw.view(
                entry["shape"]
            ).clone()  # torch reads any byte but 0 as True; a copy has 1
    assert bool((times == 1).all())
    return tensors


@simply
def read_by_package(path):
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


@simply
def folder_truth(folder):
    index = folder / "model.safetensors.index.json"
    if index.exists():
        homes = json.loads(index.read_text(), object_pairs_hook=unique)["weight_map"]
        return {name: safetensors_truth(folder / file)[name] for name, file in homes.items()}
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in safetensors_truth(path).items():
            assert name not in found
            found[name] = tensor
    return found


class Unpickler(pickle._Unpickler):
    """Python's own unpickler, restricted to what a plain state dict needs."""

    def __init__(self, archive, prefix):
        super().__init__(archive.open(f"{prefix}/data.pkl"))
        self._archive, self._prefix = archive, prefix

    def find_class(self, module, name):
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if module == "torch" and name.endswith("Storage"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # typed storages are deprecated
                return getattr(torch, name).dtype
        return known[module, name]

    def persistent_load(self, saved):
        kind, dtype, key, _, numel = saved
        assert kind == "storage"
        content = bytearray(self._archive.read(f"{self._prefix}/data/{key}"))
        if not numel:
            return torch.empty(0, dtype=dtype)  # nothing of the record is read
        assert len(content) == numel * dtype.itemsize
        return torch.frombuffer(content, dtype=dtype)

    @staticmethod
    def _rebuild(storage, offset, size, stride, *_):
        assert math.prod(size) < 100_000
        return torch.as_strided(storage, size, stride, offset).clone()


@simply
def torch_truth(path):
    with zipfile.ZipFile(path) as archive:
        (prefix,) = {name.split("/")[0] for name in archive.namelist()}
        state = Unpickler(archive, prefix).load()
    for key in ("state_dict", "model"):
        if isinstance(state.get(key), dict):
            state = state[key]
    assert all(type(name) is str and type(value) is torch.Tensor for name, value in state.items())
    return dict(state)


# --- damage: blind changes of bytes ---------------------------------------------------------------------------------


def damaged(content, chance):
    """Returns changed bytes, by one of the accidents that happen to files."""
    content, size = bytearray(content), len(content)
    how = chance.choice(["flip", "flip", "cut", "extend", "zero", "swap", "repeat", "remove", "noise"])
    start = chance.randrange(max(size, 1))
    length = chance.randint(1, max(1, size // chance.choice([2, 20])))
    if how == "flip":
        for _ in range(chance.choice([1, 1, 2, 5])):
            content[chance.randrange(size)] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[start:]
    elif how == "extend":
        content += chance.choice([b"\0", b"}", chance.randbytes(length), bytes(content[start:])])
    elif how == "zero":
        content[start : start + length] = bytes(len(content[start : start + length]))
    elif how == "swap":
        other = chance.randrange(size)
        first, second = content[start : start + length], content[other : other + length]
        content[start : start + len(second)], content[other : other + len(first)] = second, first
    elif how == "repeat":
        content[start:start] = content[start : start + length]
    elif how == "remove":
        del content[start : start + length]
    else:
        content[start : start + length] = chance.randbytes(len(content[start : start + length]))
    return bytes(content), how


def damage_file(path, chance):
    content, how = damaged(path.read_bytes(), chance)
    path.write_bytes(content)
    return how


def disturb_folder(folder, chance):
    """Damages a folder by an accident to a whole file."""
    path = chance.choice(sorted(folder.iterdir()))
    how = chance.choice(["lose", "empty", "swap", "link", "pipe", "folder", "grow"])
    if how == "swap":
        others = [other for other in sorted(folder.iterdir()) if other != path]
        if others:
            other = chance.choice(others)
            first, second = path.read_bytes(), other.read_bytes()
            path.write_bytes(second)
            other.write_bytes(first)
            return how
        how = "lose"
    if how == "grow":
        with path.open("r+b") as file:
            file.truncate(1 << 40)
        return how
    moved = folder.parent / "moved"
    path.rename(moved)
    if how == "empty":
        path.touch()
    elif how == "link":
        path.symlink_to(moved)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    return how


# --- forgery: valid-looking changes of contents ---------------------------------------------------------------------


class Pairs(list):
    """A JSON object in which a key may occur twice."""


HOSTILE = [
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    -(2**63),
    0,
    1,
    1.0,
    1e308,
    True,
    False,
    None,
    "",
    "0",
    "../x",
    "\ud800",
    [],
    [0],
    Pairs(),
    2**31,
    2**62,
    2**63,
    2**64,
    10**400,
]


def dumps(value):
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumps(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumps, value)) + "]"
    return value.text if isinstance(value, Nested) else json.dumps(value)


@dataclass(frozen=True)
class Nested:
    depth: int

    @property
    def text(self):
        return "[" * self.depth + "]" * self.depth


def containers(value, found=None):
    """Returns all non-empty objects and lists of a document."""
    found = [] if found is None else found
    if isinstance(value, list):
        if value:
            found.append(value)
        for inner in value:
            containers(inner[1] if isinstance(value, Pairs) else inner, found)
    return found


def get(container, place):
    return container[place][1] if isinstance(container, Pairs) else container[place]


def put(container, place, value):
    container[place] = (container[place][0], value) if isinstance(container, Pairs) else value


def forge_json(text, chance):
    """Returns the document with one or two changes."""
    document = json.loads(text, object_pairs_hook=Pairs)
    names = []
    for _ in range(chance.choice([1, 1, 1, 2])):
        found = containers(document)
        if not found:
            break
        container = chance.choice(found)
        place, other = chance.randrange(len(container)), chance.randrange(len(container))
        value = get(container, place)
        how = chance.choice(
            [
                "drop",
                "twice",
                "swap",
                "hostile",
                "hostile",
                "nudge",
                "nudge",
                "shuffle",
                "rename",
                "nest",
                "copy",
            ]
        )
        if how == "drop":
            del container[place]
        elif how == "twice":
            container.insert(other, copy.deepcopy(container[place]))
        elif how == "swap":
            kept = get(container, other)
            put(container, other, value)
            put(container, place, kept)
        elif how == "hostile":
            put(container, place, copy.deepcopy(chance.choice(HOSTILE)))
        elif how == "nudge" and type(value) is int:
            put(container, place, value + chance.choice([-64, -4, -1, 1, 2, 4, 64, value]))
        elif how == "shuffle":
            chance.shuffle(container)
        elif how == "rename" and isinstance(container, Pairs):
            key = chance.choice(
                [container[other][0], container[place][0] + "x", "", "__metadata__", "\ud800"]
            )
            container[place] = (key, value)
        elif how == "nest":
            put(container, place, Nested(chance.choice([70, 990, 100_000])))
        else:
            # A value from anywhere in the document: a dtype as a file, offsets as a shape.
            donor = chance.choice(found)
            put(container, place, copy.deepcopy(get(donor, chance.randrange(len(donor)))))
            how = "copy"
        names.append(how)
    return dumps(document), "+".join(names)


def forge_manifest(folder, chance):
    page = json.loads((folder / MANIFEST).read_text())
    text, how = forge_json(json.dumps(page["body"], sort_keys=True), chance)
    (folder / MANIFEST).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n')
    return how


def forge_cut(folder, chance):
    """Changes offsets or sizes of one tensor's chunks, as if ranks had disagreed."""
    page = json.loads((folder / MANIFEST).read_text())
    tensors = [tensor for tensor in page["body"]["tensors"].values() if tensor["shape"]]
    tensor = chance.choice(tensors)
    first, second = chance.choice(tensor["chunks"]), chance.choice(tensor["chunks"])
    how = chance.choice(["offsets", "sizes", "trade", "place"])
    dim = chance.randrange(len(tensor["shape"]))
    if how == "offsets":
        first[0][dim] = chance.randint(0, tensor["shape"][dim])
    elif how == "sizes":
        first[1][dim] = chance.randint(0, tensor["shape"][dim])
    elif how == "trade":
        first[0], second[0] = second[0], first[0]
    else:
        first[2:], second[2:] = second[2:], first[2:]
    text = json.dumps(page["body"], sort_keys=True)
    (folder / MANIFEST).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n')
    return f"cut: {how}"


def forge_safetensors(path, chance):
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    text, how = forge_json(content[8 : 8 + length].decode(), chance)
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + content[8 + length :])
    return how


def forge_archive(path, chance):
    """Rewrites the records of a torch file, some of them changed, with correct checksums."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    how = chance.choice(
        ["pickle", "pickle", "content", "compress", "drop", "twice", "trade", "rename", "order"]
    )
    place, other = chance.randrange(len(records)), chance.randrange(len(records))
    (name, content), (other_name, _) = records[place], records[other]
    if how == "pickle":
        place = next(number for number, (name, _) in enumerate(records) if name.endswith("data.pkl"))
        records[place] = (records[place][0], damaged(records[place][1], chance)[0])
    elif how == "content":
        records[place] = (name, damaged(content, chance)[0] if content else b"x")
    elif how == "drop":
        del records[place]
    elif how == "twice":
        records.insert(other, (name, damaged(content, chance)[0] if content else b"x"))
    elif how == "trade":
        records[place], records[other] = (name, records[other][1]), (other_name, content)
    elif how == "rename":
        new = chance.choice([f"../{name}", "/etc/passwd", "", name + "x", name.replace("/", "\\", 1)])
        records[place] = (new, content)
    elif how == "order":
        chance.shuffle(records)
    compression = chance.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]) if how == "compress" else 0
    with zipfile.ZipFile(path, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that occur twice
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return f"archive: {how}"


def forge_directory(path, chance):
    """Changes one field of one entry of a torch file's directory, or of a record's own header."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos, at = archive.infolist(), archive.start_dir
    entries = []
    for info in infos:
        entries.append(at)
        at += 46 + sum(struct.unpack_from("<3H", content, at + 28))
        assert content[entries[-1] : entries[-1] + 4] == b"PK\1\2", info
    inside = chance.random() < 0.6
    if inside:
        start, fields = chance.choice(entries), {"method": (10, "H"), "crc": (16, "I"), "packed": (20, "I")}
        fields |= {
            "size": (24, "I"),
            "offset": (42, "I"),
            "flags": (8, "H"),
            "name": (28, "H"),
            "extra": (30, "H"),
        }
    else:
        start = chance.choice(infos).header_offset
        fields = {"method": (8, "H"), "crc": (14, "I"), "packed": (18, "I"), "size": (22, "I")}
        fields |= {"name": (26, "H"), "extra": (28, "H"), "flags": (6, "H")}
    field, (offset, form) = chance.choice(sorted(fields.items()))
    (value,) = struct.unpack_from(f"<{form}", content, start + offset)
    other = struct.unpack_from(
        f"<{form}", content, chance.choice(entries) + (fields["size"][0] if inside else 24)
    )
    most = (1 << (8 * struct.calcsize(form))) - 1
    drawn = chance.choice([0, 1, 8, value + 1, value - 1, value * 2, most, other[0], chance.getrandbits(16)])
    struct.pack_into(f"<{form}", content, start + offset, drawn & most)
    path.write_bytes(content)
    return f"directory: {field}"


# --- a case ---------------------------------------------------------------------------------------------------------


def make(seed, number, folder):
    """Makes the file of a case, in the given folder."""
    chance = random.Random(f"{seed}:{number}")
    return chance.choice(
        [make_checkpoint] * 4 + [make_safetensors] * 2 + [make_folder] + [make_torch_file] * 3
    )(folder, chance)


def make_checkpoint(folder, chance):
    path = folder / "run" / "checkpoints" / "step-00000003"
    tensors = tensors_for(chance, with_optimizer=chance.random() < 0.7)
    write_checkpoint(path, tensors, chance)
    (path.parent / "latest").write_text("step-00000003\n")
    change = chance.choice(["nothing"] + ["bytes"] * 4 + ["files"] * 2 + ["manifest"] * 8 + ["cut"] * 3)
    if change == "manifest":
        return Made("checkpoint", forge_manifest(path, chance), path, lambda: checkpoint_truth(path))
    if change == "cut":
        return Made("checkpoint", forge_cut(path, chance), path, lambda: checkpoint_truth(path))
    if change == "bytes":
        change = "bytes: " + damage_file(chance.choice(sorted(path.iterdir())), chance)
    elif change == "files":
        change = "files: " + disturb_folder(path, chance)
    return Made("checkpoint", change, path, lambda: tensors)


def make_safetensors(folder, chance):
    path = folder / "w.safetensors"
    save_file(odd_tensors(chance), path, metadata=chance.choice([None, {"format": "pt"}]))
    change = chance.choice(["nothing"] + ["bytes"] * 4 + ["header"] * 10)
    if change == "bytes":
        change = "bytes: " + damage_file(path, chance)
    elif change == "header":
        change = forge_safetensors(path, chance)
    return Made("safetensors", change, path, lambda: safetensors_truth(path))


def make_folder(folder, chance):
    path = folder / "hf"
    path.mkdir()
    tensors = odd_tensors(chance)
    files = {f"model-{n:05d}-of-00002.safetensors": {} for n in (1, 2)}
    homes = {name: chance.choice(sorted(files)) for name in tensors}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == file}, path / file)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4, "rope": {"a": 1}}))
    if chance.random() < 0.8:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    change = chance.choice(["nothing", "bytes", "files", "json", "json"])
    if change == "bytes":
        change = "bytes: " + damage_file(chance.choice(sorted(path.glob("*.safetensors"))), chance)
    elif change == "files":
        change = "files: " + disturb_folder(path, chance)
    elif change == "json":
        file = chance.choice(sorted(path.glob("*.json")))
        text, change = forge_json(file.read_text(), chance)
        file.write_text(text)
    return Made("folder", change, path, lambda: folder_truth(path))


def make_torch_file(folder, chance):
    path = folder / "w.pt"
    tensors = odd_tensors(chance)
    if len(tensors) > 1 and chance.random() < 0.3:
        tensors["tied"] = next(iter(tensors.values()))
    torch.save(chance.choice([tensors, OrderedDict(tensors), {"model": tensors}]), path)
    change = chance.choice(["nothing"] + ["bytes"] * 4 + ["archive"] * 5 + ["directory"] * 5)
    if change == "archive":
        return Made("torch", forge_archive(path, chance), path, lambda: torch_truth(path))
    if change == "bytes":
        change = "bytes: " + damage_file(path, chance)
    elif change == "directory":
        change = forge_directory(path, chance)
    return Made("torch", change, path, lambda: tensors)


def check_readers(made, folder):
    """Reads the file in all ways; returns 'refused' or 'right' for each. Raises Wrong, or what the library raised."""

    def truth():
        named = made.truth()
        return (
            named if made.kind == "checkpoint" else {f"model/{name}": value for name, value in named.items()}
        )

    outcomes = {"convert": outcome_of(lambda: converted(made, folder), truth, "model/")}
    if made.kind == "checkpoint":
        for ranks in (1, 2):
            first, *others = run_ranks(load_on_a_rank, ranks, made, kind="threads")
            if any(other != first for other in others):
                raise Wrong(f"ranks differ: {[first, *others]}")
            outcomes[f"load on {ranks}"] = first
        outcomes["verify"] = outcome_of(lambda: verified(made), made.truth, "")
        Store(made.path.parent).latest()
    return outcomes


def outcome_of(read, truth, prefixes, unchanged=lambda: None):
    """Calls ``read`` and compares the result with the truth under the prefixes; calls ``unchanged`` after a refusal."""
    try:
        found = read()
    except CheckpointError as error:
        if not (error.what and error.where):
            raise Wrong(f"it does not say what is wrong, or where: {error}") from None
        unchanged()
        return "refused"
    try:
        expected = {name: value for name, value in truth().items() if name.startswith(prefixes)}
    except Invalid as reason:
        raise Wrong(f"it is not valid, and was read all the same: {reason}") from reason
    if expected.keys() != found.keys():
        raise Wrong(f"names differ: {sorted(expected)} and {sorted(found)}")
    for name, value in expected.items():
        if not same(value, found[name]):
            raise Wrong(f"'{name}' differs: {value} and {found[name]}")
    return "right"


def same(first, second):
    """Returns whether two tensors are bitwise equal, with the same dtype and shape."""
    as_bytes = [value.contiguous().reshape(-1).view(torch.uint8) for value in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*as_bytes)


def converted(made, folder):
    """Converts the file, and returns what torch, the second reader or the format's package reads from the result."""
    weights = open_weights(made.path)
    if weights.is_checkpoint:
        found = torch.load(convert.export_torch(weights, folder / "out.pt"), weights_only=True)
        return {f"model/{name}": value for name, value in found.items()}
    if made.kind == "torch":
        (path,) = convert.export_safetensors(weights, folder / "out.safetensors")
        return {f"model/{name}": value for name, value in read_by_package(path).items()}
    return checkpoint_truth(convert.import_weights(weights, folder / "back"))


def verified(made):
    """Returns what the second reader reads; raises if the check of all files finds damage."""
    manifest = read_manifest(made.path)
    if damage := first_damage(made.path, manifest):
        raise CheckpointError(damage, where="first_damage")
    return checkpoint_truth(made.path)


def load_on_a_rank(made):
    """Loads the file into a sharded model and its optimizer; returns the outcome on this rank."""
    torch.manual_seed(0)
    model = fully_shard(new_model())
    optimizer = torch.optim.AdamW(model.parameters())

    def state():
        found = {f"model/{name}": full(value).clone() for name, value in model.state_dict().items()}
        for name, param in model.named_parameters():
            for key, value in optimizer.state.get(param, {}).items():
                found[f"optimizer/{name}/{key}"] = full(value)
        return found

    def load():
        TrainingState(model, optimizer).load(made.path, read_manifest(made.path), None)
        return state()

    def check_unchanged():
        now = state()
        if now.keys() != before.keys() or not all(same(now[name], before[name]) for name in before):
            raise Wrong("it was refused when part of it had been loaded")

    before = state()
    return outcome_of(load, lambda: as_loaded(made.truth()), ("model/", "optimizer/"), check_unchanged)


def as_loaded(tensors):
    """Returns the tensors as loaded: an optimizer's state, except step counts, gets its parameters' dtype."""
    return {
        name: value.float() if name.startswith("optimizer/") and not name.endswith("/step") else value
        for name, value in tensors.items()
    }


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def run_case(seed, number, folder):
    """Makes a file and reads it; returns its kind, the change made to it, and the outcomes."""
    made = make(seed, number, folder)
    try:
        outcomes = check_readers(made, folder)
        if made.change == "nothing" and set(outcomes.values()) != {"right"}:
            raise Wrong(f"nothing was changed, and it was refused: {outcomes}")
    except Exception as error:
        raise Wrong(
            f"case {number} of seed {seed}, {made.kind}, {made.change}: {type(error).__name__}: {error}"
        ) from error
    return made.kind, made.change, outcomes


# --- many of them ---------------------------------------------------------------------------------------------------


def work(seed, numbers):
    """Runs cases and prints a line before and after each, for the parent process."""
    for number in numbers:
        print(json.dumps({"begin": number}), flush=True)
        folder = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
        line = {"end": number}
        begun = time.monotonic()
        try:
            line["kind"], line["change"], line["outcomes"] = run_case(seed, number, folder)
        except BaseException as error:  # noqa: BLE001  any exception is a finding
            line["failure"] = f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({**line, "seconds": time.monotonic() - begun}), flush=True)


def run_all(seed, count):
    """Runs all cases, in processes that may crash or hang; returns a line for each."""
    lines, number = [], 0
    while number < count:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.files",
            "--seed",
            str(seed),
            "--work",
            str(number),
            str(count),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            while True:
                ready, _, _ = select.select([process.stdout], [], [], SECONDS_A_CASE)
                text = process.stdout.readline() if ready else b""
                if not text:
                    break
                line = json.loads(text)
                if "begin" in line:
                    number = line["begin"]
                else:
                    lines.append(line)
                    number += 1
                    if number % 100 == 0:
                        print(f"{number} of {count}", flush=True)
        finally:
            process.kill()
            status = process.wait()
        if number < count:
            what = "hang" if not ready else f"crash, exit status {status}"
            lines.append({"end": number, "failure": what, "seconds": SECONDS_A_CASE})
            number += 1
    return lines


def summary(seed, lines):
    """Counts outcomes by kind of file and kind of change."""
    counts = {}
    failures = []
    for line in lines:
        if "failure" in line:
            failures.append({"case": line["end"], "what": line["failure"]})
            continue
        kind = counts.setdefault(line["kind"], {})
        change = line["change"].split("+")[0]
        outcomes = sorted(set(line["outcomes"].values()))
        # Some ways to read may refuse what others do not read: a conversion skips optimizer state.
        kind.setdefault(change, Counter())[" or ".join(outcomes)] += 1
    totals = sum((counter for kind in counts.values() for counter in kind.values()), Counter())
    return {
        "cases": len(lines),
        "seed": seed,
        "failures": failures,
        "outcomes": dict(sorted(totals.items())),
        "longest_case_seconds": round(max(line["seconds"] for line in lines), 2),
        "by_kind_and_change": {
            kind: {change: dict(sorted(counter.items())) for change, counter in sorted(changes.items())}
            for kind, changes in sorted(counts.items())
        },
        "device": "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--result", type=Path)
    options.add_argument("--case", type=int, help="run this one alone, and let its errors through")
    options.add_argument("--keep", type=Path, help="with --case: a folder to leave its files in")
    options.add_argument("--work", type=int, nargs=2, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.work is not None:
        work(options.seed, range(*options.work))
        return 0
    if options.case is not None:
        folder = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-files-"))
        folder.mkdir(parents=True, exist_ok=True)
        print(*run_case(options.seed, options.case, folder))
        return 0
    found = summary(options.seed, run_all(options.seed, options.count))
    text = json.dumps(found, indent=2) + "\n"
    print(text)
    if options.result is not None:
        options.result.write_text(text)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
