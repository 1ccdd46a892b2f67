"""State dicts in files of ``torch.save``: every checksum is compared, and nothing in them can run code or grow.

``torch.load`` maps such a file, and then looks neither at checksums nor at how long a record is; so this does.
"""

from __future__ import annotations

import mmap
import os
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwise.checkpoint import strict_json
from shardwise.checkpoint.disk import open_file
from shardwise.checkpoint.manifest import ITEM_BYTES, check_shape
from shardwise.checkpoint.parts import dtype_name
from shardwise.checkpoint.strict_json import shown
from shardwise.errors import CheckpointError

__all__ = ["read_torch_file"]

MOST_BYTES_PER_BYTE = 64  # of a file: layers may share weights, which are in it once
PICKLE_LIMIT_BYTES = 1 << 28
_GROWS = (
    "APPEND",
    "APPENDS",
    "SETITEM",
    "SETITEMS",
    "ADDITEMS",
    "BUILD",
)  # opcodes that leave the object they change
_LOCAL_HEADER = struct.Struct("<26x2H")

Span = tuple[int, int]
"""First byte, and how many."""


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict by name, mapped: they are read from disk when they are used.

    Raises:
        CheckpointError: it is damaged, or holds something else.
    """
    with open_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        records = _checked_records(file, str(path))
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  of any kind: the file decides which
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"torch cannot load it without running code: {first}",
            where=str(path),
            fix="save a plain state dict",
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError("it holds no state dict", where=str(path), fix="save model.state_dict()")
    try:
        _check_plain(loaded)
        _check_storages(loaded, records)
        total_bytes = sum(value.nbytes for value in loaded.values())
        if total_bytes > MOST_BYTES_PER_BYTE * max(num_bytes, 1 << 20):
            raise ValueError(f"it makes {total_bytes} bytes of a file of {num_bytes}: tensors are expanded")
    except ValueError as error:
        raise CheckpointError(
            f"its state dict cannot be converted: {error}",
            where=str(path),
            fix="save a state dict of plain tensors: {name: tensor.clone() for name, tensor in ...}",
        ) from None
    return {name: value.detach() for name, value in sorted(loaded.items())}


def _checked_records(file: BinaryIO, where: str) -> set[Span]:
    """Where records lie in a file; raises CheckpointError unless each holds what was written."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            if len({record.filename for record in records}) != len(records):
                raise ValueError("two of its records have one name")
            spans, end = set(), 0
            for record in records:
                if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                    raise ValueError(f"its record {shown(record.filename)} is compressed")
                file.seek(record.header_offset)
                header = file.read(_LOCAL_HEADER.size)
                start = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
                if record.header_offset < end or start + record.file_size > archive.start_dir:
                    raise ValueError(f"its record {shown(record.filename)} overlaps another")
                end = start + record.file_size
                spans.add((start, record.file_size))
            # Only now: what was checked so far is what keeps this from reading more than the file has.
            for record in records:
                with archive.open(record) as content:
                    while content.read(1 << 22):
                        pass  # reading to the end compares the checksum
                if record.filename.endswith("/data.pkl"):
                    if record.file_size > PICKLE_LIMIT_BYTES:
                        raise ValueError(f"its pickle has {record.file_size} bytes")
                    _check_pickle(archive.read(record))
            return spans
    except Exception as error:  # noqa: BLE001  zipfile has no error of its own for much of what can be wrong
        raise CheckpointError(
            f"it is no file that torch.save has written in the last years, or a damaged one: {error}",
            where=where,
            fix="get the file again; if it is older, or was saved without checksums "
            "(torch.serialization.set_crc32_options(False)), load and save it anew with torch",
        ) from None


def _check_pickle(content: bytes) -> None:
    """Refuses objects that a few bytes make huge: a pair of one pair twice, of one pair twice, and so on.

    Loading them is quick, but a dict that has one for a key walks through all of it, and so does an error message.
    Each object is its size here, in a list of one element: it grows when something is put into it.
    """
    limit = MOST_BYTES_PER_BYTE * max(len(content), 1 << 16)
    stack: list[list[int]] = []
    marks: list[int] = []
    memo: dict[Any, list[int]] = {}
    for code, argument, _ in pickletools.genops(content):
        before, after = code.stack_before, code.stack_after
        if code.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if code.name == "MEMOIZE" else argument] = stack[-1]
        elif after == [pickletools.markobject]:
            marks.append(len(stack))
        else:
            has_mark = pickletools.markobject in before
            bottom = marks.pop() if has_mark else len(stack)
            bottom -= before.index(pickletools.markobject) if has_mark else len(before)
            if bottom < 0:
                raise ValueError("its pickle is damaged")
            taken = stack[bottom:]
            del stack[bottom:]
            size = 1 + sum(inner for (inner,) in taken)
            if size > limit:
                raise ValueError("its pickle makes a huge object of a few bytes")
            if taken and code.name in _GROWS:
                taken[0][0] = size
                stack.append(taken[0])
            else:
                stack.extend([size] for _ in after)


def _check_plain(state: dict[Any, Tensor]) -> None:
    for name, value in state.items():
        strict_json.text(name)
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise ValueError(f"'{name}' is a {type(value).__name__}, {value.layout}")
        if value.device.type != "cpu" or dtype_name(value.dtype) not in ITEM_BYTES:
            raise ValueError(f"'{name}' is of {value.dtype} on {value.device}")
        check_shape(tuple(value.shape), value.itemsize)


def _check_storages(state: dict[Any, Tensor], records: set[Span]) -> None:
    """Refuses a storage that is not one of the file's records, from its first byte to its last.

    All are views of one mapping of the file. Where that begins, torch does not tell; so a beginning is looked for that
    every storage agrees with.
    """
    storages = [value.untyped_storage() for value in state.values() if value.numel()]
    found = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
    if not found:
        return
    address, num_bytes = min(found)
    bases = {address - start for start, size in records if size == num_bytes}
    for base in bases:
        if base % mmap.PAGESIZE == 0 and all((place - base, size) in records for place, size in found):
            return
    raise ValueError("a tensor has more or fewer bytes than the file holds for it")
