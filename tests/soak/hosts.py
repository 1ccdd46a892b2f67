"""Hosts as network namespaces of one machine, joined by a virtual cable. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface besides loopback, a name, and what the other is called."""

    name: str
    space: str
    interface: str
    address: str

    def start(self, command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a command here; what it says is appended to a file."""
        # With processes of its own: shardwise takes ranks that could see each other's for ranks of one host.
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        named = [*apart, "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.space, *named, *command],
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "GLOO_SOCKET_IFNAME": self.interface,
                    "OMP_NUM_THREADS": "1",
                    **environment,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def kill(self, *, only: str = "") -> int:
        """Kills the processes here, or those with this in their environment, and returns how many there were."""
        return sum(_kill(pid) for pid in self.processes() if only.encode() in _environment(pid))

    def processes(self) -> list[int]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def plug(self, *, connected: bool) -> None:
        """Plugs the cable in, or pulls it out."""
        _ip("-n", self.space, "link", "set", self.interface, "up" if connected else "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that know each other by name; their processes do not outlive them."""
    number = os.getpid()
    # So that the hosts end with a program that is told to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hosts = tuple(
        Host(f"node{index}", f"shardwise-{number}-{index}", f"sw{number}{index}"[:15], f"10.77.0.{index}")
        for index in (1, 2)
    )
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    folders = [Path("/etc/netns") / host.space for host in hosts]
    try:
        for host, folder in zip(hosts, folders, strict=True):
            _ip("netns", "add", host.space)
            # `ip netns exec` puts this in the place of /etc/hosts.
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(names)
        one, two = hosts
        _ip("link", "add", one.interface, "type", "veth", "peer", "name", two.interface)
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.space)
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.space, "link", "set", "lo", "up")
            _ip("-n", host.space, "link", "set", host.interface, "up")
        yield one, two
    finally:
        for host, folder in zip(hosts, folders, strict=True):
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
                _ip("netns", "del", host.space)
            (folder / "hosts").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def wait_until(event: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Waits for an event; the limit is for hangs."""
    deadline = time.monotonic() + seconds
    while not event():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
