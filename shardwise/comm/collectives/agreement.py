"""Small messages between ranks over a group's channel; and the check that all ranks hold the same model.

That check comes before data of different sizes can meet in a collective. Ranks exchange a short digest first; only if
digests differ do they exchange the texts, to name the first difference. Dispatch modes do not see this traffic, so it
is not counted as the model's.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.channels.channel import collective_code
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.errors import RankDisagreement
from shardwise.torch_internals import unseen_by_modes

_BEGIN = collective_code("use the model for the first time")
_COMPARE = collective_code("compare the models of all ranks")


def check_same_model(lines: Sequence[str], calls: GroupCollectives, device: torch.device) -> None:
    """Raises ``RankDisagreement`` on every rank unless all ranks of the group hold the same ``lines``.

    Each line describes one parameter; the message names the first that differs, and which ranks hold what.
    """
    text = "\n".join(lines).encode()
    if not calls.channel.carries_data:
        # On the host: NCCL connects ranks in their first collective, and a wait for a missing rank there never ends.
        calls.channel.agree(_BEGIN)
    with unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
        digests = gather_bytes(hashlib.sha256(text).digest(), calls, device)
        if len(set(digests)) == 1:
            return
        texts = [entry.rstrip(b"\0").decode().split("\n") for entry in _gather_padded(text, calls, device)]
    ranks = dist.get_process_group_ranks(calls.group)
    raise RankDisagreement(
        f"ranks hold different models: {describe_first_difference(texts, ranks)}",
        where=f"rank {dist.get_rank()}, before the first gather",
        fix="build the same model, with the same names, shapes and dtypes, on every rank",
    )


def describe_first_difference(texts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Says which ranks have what in the first line in which their texts differ."""
    lines = next(each for each in zip_longest(*texts, fillvalue="nothing more") if len(set(each)) > 1)
    holders: dict[str, list[int]] = {}
    for rank, line in zip(ranks, lines, strict=True):
        holders.setdefault(line, []).append(rank)
    return "; ".join(
        f"rank {held[0]} has {line}" if len(held) == 1 else f"ranks {', '.join(map(str, held))} have {line}"
        for line, held in holders.items()
    )


def gather_bytes(
    own: bytes, calls: GroupCollectives, device: torch.device, code: int = _COMPARE
) -> list[bytes]:
    """Returns every rank's bytes, all of the same length, in rank order; ``code`` is its event in the log."""
    if calls.is_dry:
        return [own] * calls.world
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    received = torch.empty(len(own) * calls.world, dtype=torch.uint8, device=device)
    calls.issue_all_gather(received, sent, code).wait()
    everything = bytearray(received.numel())
    torch.frombuffer(everything, dtype=torch.uint8).copy_(received)
    return [bytes(everything[start : start + len(own)]) for start in range(0, len(everything), len(own))]


def _gather_padded(own: bytes, calls: GroupCollectives, device: torch.device) -> list[bytes]:
    """Returns every rank's bytes, in rank order, padded with zeros to the longest."""
    lengths = gather_bytes(len(own).to_bytes(8, "little"), calls, device)
    longest = max(int.from_bytes(length, "little") for length in lengths)
    return gather_bytes(own.ljust(longest, b"\0"), calls, device)


def gather_objects(own: Any, calls: GroupCollectives) -> list[Any]:
    """Returns every rank's object, of any size, in rank order. Not for use within steps."""
    if calls.world == 1:
        return [own]
    with unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
        pickled = _gather_padded(pickle.dumps(own), calls, calls.device)
    # A pickle marks its own end: the padding is not read.
    return [pickle.loads(entry) for entry in pickled]
