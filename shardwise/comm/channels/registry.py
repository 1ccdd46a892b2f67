"""The one channel of each process group, and the kind that its backend needs."""

from __future__ import annotations

import threading
import weakref

import torch
import torch.distributed as dist

from shardwise import policies
from shardwise.comm.channels.backend import BackendChannel
from shardwise.comm.channels.channel import GroupChannel
from shardwise.comm.channels.gloo import GlooChannel
from shardwise.comm.channels.threads import ThreadChannel
from shardwise.comm.channels.watched import WatchedChannel
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.torch_internals import backend_name

_lock = threading.Lock()
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupChannel]] = weakref.WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup, device: torch.device) -> GroupChannel:
    """Returns the one channel of a group: everything sent over the group must be in one log."""
    with _lock:
        channels = _channels.setdefault(group, {})
        if device.type not in channels:
            channels[device.type] = channel = _make_channel(group, device)
            if isinstance(channel, WatchedChannel) and channel.checks:
                WATCHDOG.watch(channel)
        return channels[device.type]


def _make_channel(group: dist.ProcessGroup, device: torch.device) -> GroupChannel:
    backend = backend_name(group, device)
    if group.size() == 1 or backend == "fake":
        return GroupChannel(group, device)
    if device.type == "cpu" and backend == "gloo":
        return GlooChannel(group, device)
    if device.type == "cpu" and backend == "threaded":
        return ThreadChannel(group, device)
    return GroupChannel(group, device) if policies.trust().checks == "off" else BackendChannel(group, device)
