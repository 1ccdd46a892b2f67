"""``shardwise doctor``: checks what this machine has, whether ranks can communicate, and how to fix what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.engine.kernels import can_compile
from shardwise.train.launch import run_local_ranks
from shardwise.train.records import counted, format_bytes

__all__ = ["Finding", "examine"]

_RANKS_MEET_SECONDS = 60.0
_NEEDED = "numpy"
_EXTRAS = {
    "rich": "live progress",
    "matplotlib": "the loss curve as a picture",
    "tensorboard": "output.tensorboard=true",
    "transformers": "Hugging Face models and tokenizers",
    "datasets": "Hugging Face data sets",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``good`` is None if it is neither good nor bad."""

    name: str
    good: bool | None
    text: str
    fix: str | None = None


def examine() -> Iterator[Finding]:
    """Checks this machine and yields findings; a bad one keeps ``shardwise train`` from working."""
    yield _check_python()
    yield _check_torch()
    yield Finding("CPU", None, f"{os.cpu_count()} cores, {format_bytes(_host_bytes())} of memory")
    yield _check_gpus()
    yield _check_disk(Path.cwd())
    yield _check_open_files()
    yield _check_loopback()
    yield _check_ranks(2, "cpu")
    if torch.cuda.is_available():
        yield _check_ranks(torch.cuda.device_count(), "cuda")
        yield _check_kernels()
    yield _check_compiler()
    yield _check_package(_NEEDED, "shardwise train needs it", is_needed=True)
    for package, purpose in _EXTRAS.items():
        yield _check_package(package, purpose)


def _check_python() -> Finding:
    good = sys.version_info >= (3, 10)
    return Finding(
        "Python", good, platform.python_version(), None if good else "install Python 3.10 or newer"
    )


def _check_torch() -> Finding:
    version = torch.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding(
            "torch", False, f"{version}, without gloo", "install a torch from PyPI: pip install torch"
        )
    good = numbers >= (2, 11)
    return Finding("torch", good, version, None if good else "pip install 'torch>=2.11'")


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_gpus() -> Finding:
    count = torch.cuda.device_count()
    if count and torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(count)}
        memory = format_bytes(torch.cuda.get_device_properties(0).total_memory)
        if not dist.is_nccl_available():
            return Finding(
                "GPUs", False, "present, but torch was built without NCCL", "install a torch build with CUDA"
            )
        return Finding("GPUs", True, f"{count} × {', '.join(sorted(names))}, {memory} each")
    if Path("/proc/driver/nvidia").exists():
        return Finding(
            "GPUs",
            False,
            "a driver is installed, but torch sees no GPU",
            "install a torch build for its CUDA version",
        )
    return Finding("GPUs", None, "none: ranks run on the CPU")


def _check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    good = free > 1 << 30 and os.access(folder, os.W_OK)
    fix = None if good else "free disk space, or train into another folder: --out FOLDER"
    return Finding("disk", good, f"{format_bytes(free)} free in {folder}", fix)


def _check_open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = limit >= 1024
    return Finding("open files", good, f"limit {limit}", None if good else "ulimit -n 4096")


def _check_loopback() -> Finding:
    state = Path("/sys/class/net/lo/operstate")
    flags = Path("/sys/class/net/lo/flags")
    try:
        up = bool(int(flags.read_text(), 16) & 1)
    except (OSError, ValueError):
        up = not state.exists()
    return Finding("loopback", up, "lo is up" if up else "lo is down", None if up else "ip link set lo up")


def _all_reduce_on_rank(device: torch.device) -> None:
    """Runs on every rank: an all-reduce whose result is right only if all ranks took part."""
    value = torch.ones(1024, device=device) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    world_size = dist.get_world_size()
    if float(value[0]) != world_size * (world_size + 1) / 2:
        raise RuntimeError(f"a sum over {world_size} ranks came out as {float(value[0])}")


def _check_ranks(ranks: int, kind: str) -> Finding:
    name = counted(ranks, f"{kind.upper()} rank")
    begun = time.monotonic()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = run_local_ranks(_all_reduce_on_rank, ranks, kind, timeout_seconds=_RANKS_MEET_SECONDS)
    if status == 0:
        return Finding(name, True, f"connected and computed a sum in {time.monotonic() - begun:.1f} s")
    reason = [line for line in said.getvalue().strip().splitlines() if not line.startswith("  then:")]
    fix = "bring lo up and check the firewall; shardwise train tiny --ranks 2 shows the full error"
    return Finding(name, False, reason[-1] if reason else "they could not connect", fix)


def _check_kernels() -> Finding:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if can_compile(torch.device("cuda", torch.cuda.current_device())):
            return Finding("CUDA kernels", True, "compiled by NVIDIA's run-time compiler")
    reason = (
        str(said[-1].message) if said else "they could not be compiled before; steps take a little longer"
    )
    return Finding("CUDA kernels", None, reason, "pip install the nvidia-cuda-nvrtc of torch's CUDA version")


def _check_compiler() -> Finding:
    found = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if found is None:
        return Finding("C++ compiler", None, "none: sharding.compile needs one", "apt install g++")
    return Finding("C++ compiler", True, f"{found}, for sharding.compile")


def _check_package(name: str, purpose: str, *, is_needed: bool = False) -> Finding:
    # Searched as an import does: a package that only has metadata here does not help.
    if importlib.util.find_spec(name) is None:
        good = False if is_needed else None
        return Finding(name, good, f"not installed: {purpose}", f"pip install {name}")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "installed"
    return Finding(name, True, version)
