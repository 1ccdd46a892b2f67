"""Reads state dicts from files of ``torch.save``, safely: checks every checksum, runs no code, and bounds memory.

``torch.load`` with ``mmap=True`` checks neither checksums nor the sizes of records, so this module does.
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

MAX_EXPANSION = 64  # bytes of tensors per byte of the file, in which tied weights are stored once
PICKLE_LIMIT_BYTES = 1 << 28
# Opcodes that change an object on the stack, and leave it there.
_MUTATING_OPCODES = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_LOCAL_HEADER = struct.Struct("<26x2H")

Span = tuple[int, int]
"""The offset of the first byte, and the number of bytes."""


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """Returns a state dict's tensors by name, memory-mapped: their data is read from disk when it is used.

    Raises:
        CheckpointError: the file is damaged, or does not contain a state dict.
    """
    with open_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        records = _checked_records(file, str(path))
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  the file's content decides which
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
        raise CheckpointError("it contains no state dict", where=str(path), fix="save model.state_dict()")
    try:
        _check_plain(loaded)
        _check_storages(loaded, records)
        total_bytes = sum(value.nbytes for value in loaded.values())
        if total_bytes > MAX_EXPANSION * max(num_bytes, 1 << 20):
            raise ValueError(f"{total_bytes} bytes of tensors in a file of {num_bytes}: tensors are expanded")
    except ValueError as error:
        raise CheckpointError(
            f"its state dict cannot be converted: {error}",
            where=str(path),
            fix="save a state dict of plain tensors: {name: tensor.clone() for name, tensor in ...}",
        ) from None
    return {name: value.detach() for name, value in sorted(loaded.items())}


def _checked_records(file: BinaryIO, where: str) -> set[Span]:
    """Returns the spans of a file's records; raises CheckpointError unless all checksums match."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            if len({record.filename for record in records}) != len(records):
                raise ValueError("two of its records have the same name")
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
            # Only after the checks above, without which this could read more than the file has.
            for record in records:
                with archive.open(record) as content:
                    while content.read(1 << 22):
                        pass  # reading to the end compares the checksum
                if record.filename.endswith("/data.pkl"):
                    if record.file_size > PICKLE_LIMIT_BYTES:
                        raise ValueError(f"its pickle has {record.file_size} bytes")
                    _check_pickle(archive.read(record))
            return spans
    except Exception as error:  # noqa: BLE001  zipfile raises errors of many kinds
        raise CheckpointError(
            f"not a file of torch.save in its current (zip) format, or a damaged one: {error}",
            where=where,
            fix="download or copy the file again; if it is in the old format, or was saved without checksums "
            "(torch.serialization.set_crc32_options(False)), load it and save it again with torch",
        ) from None


def _check_pickle(content: bytes) -> None:
    """Refuses objects that are huge although their pickle is short: a pair of the same pair, of the same pair, ...

    They load quickly, but hashing one as a dict's key, or printing it, visits every element. Runs the pickle with sizes
    instead of objects. A size is a list of one int, so that it can grow when something is added to the object.
    """
    limit = MAX_EXPANSION * max(len(content), 1 << 16)
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
            popped = stack[bottom:]
            del stack[bottom:]
            size = 1 + sum(inner for (inner,) in popped)
            if size > limit:
                raise ValueError("its pickle makes a huge object of a few bytes")
            if popped and code.name in _MUTATING_OPCODES:
                popped[0][0] = size
                stack.append(popped[0])
            else:
                stack.extend([size] for _ in after)


def _check_plain(state: dict[Any, Tensor]) -> None:
    for name, value in state.items():
        strict_json.text(name)
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise ValueError(f"'{name}' is a {type(value).__name__}, {value.layout}")
        if value.device.type != "cpu" or dtype_name(value.dtype) not in ITEM_BYTES:
            raise ValueError(f"'{name}' has dtype {value.dtype} on {value.device}")
        check_shape(tuple(value.shape), value.itemsize)


def _check_storages(state: dict[Any, Tensor], records: set[Span]) -> None:
    """Refuses a storage that is not exactly one of the file's records.

    All storages are views of one mapping of the file. torch does not expose its address, so this searches for one that
    is consistent with all storages.
    """
    storages = [value.untyped_storage() for value in state.values() if value.numel()]
    found = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
    if not found:
        return
    address, num_bytes = min(found)
    bases = {address - start for start, size in records if size == num_bytes}
    for base in bases:
        if base % mmap.PAGESIZE == 0 and all((start - base, size) in records for start, size in found):
            return
    raise ValueError("a tensor has more or fewer bytes than the file holds for it")
