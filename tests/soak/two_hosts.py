"""Two hosts train under torchrun as two nodes; processes, hosts and the cable between them fail, and the job goes on
from its last checkpoint by itself. The hosts are network namespaces of this machine, which takes root.

    sudo .venv/bin/python -m tests.soak.two_hosts [--only workers,node] [--result result.json]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.ranks.test_guides import blocks_of
from tests.soak.hosts import REPOSITORY, Host, two_hosts, wait_until

STEPS, SAVED, PAUSED_AT = 40, 10, 25
GUIDE = REPOSITORY / "docs" / "guides" / "many_machines.md"
MANIFEST = GUIDE.parent / "kubernetes.md"
# Any recipe, small: on a CPU, as a matter of seconds.
SIZES = ("layers=2", "width=32", "hidden=48", "heads=4", "kv_heads=2", "context=32", "vocabulary=256")
SMALL = [
    *(f"model.{size}" for size in SIZES),
    *("train.batch_size=4", "train.accumulate=1", f"checkpoint.every={SAVED}", "evaluate.batches=1"),
    *("sharding.compile=false", "sharding.precision=fp32"),
]
SETTINGS = [*SMALL, f"train.steps={STEPS}", "sharding.mode=hybrid"]
TRAIN = [
    *("shardwise", "train", "tiny", "--device", "cpu", "--auto-resume", "--out", "run"),
    *(word for setting in SETTINGS for word in ("--set", setting)),
]
PROGRAMS = {"shardwise train": TRAIN, "a program of one's own": ["train.py"], "a pod": (POD := ["pod"])}


@dataclass
class Job:
    """A program on two hosts, in a folder that both see; one rank of one host pauses in the middle."""

    hosts: tuple[Host, Host]
    folder: Path
    program: list[str]
    """The module or file, and its arguments."""
    nodes: str = "2"
    pauses_on: int = 1
    """Which host's rank pauses: the one that something happens to."""
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *numbers: int) -> None:
        """Starts torchrun on these hosts, all with the same command."""
        for number in numbers:
            host = self.hosts[number]
            torchrun, environment = self._as_pod() if self.program == POD else self._as_node(host)
            command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
            # Or torch 2.13's rendezvous leaves a host that comes back without an address.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            if number == self.pauses_on:
                environment.update(PAUSED=str(self.paused), PAUSE_AT=str(PAUSED_AT))
            # The folder is the file system that both hosts see.
            here = ["env", "--chdir", str(self.folder)]
            self.agents[number] = host.start([*here, *command], self.log(number), environment)

    def _as_node(self, host: Host) -> tuple[list[str], dict[str, str]]:
        options = [
            *("--nnodes", self.nodes, "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"{self.hosts[0].address}:29500", "--local-addr", host.address),
        ]
        return [*options, "-m", "tests.soak.pausing", *self.program], {}

    def _as_pod(self) -> tuple[list[str], dict[str, str]]:
        """The command of the manifest on a small model, with the variables that the operator sets in a pod."""
        (manifest,) = [block.text for block in blocks_of(MANIFEST) if block.language == "yaml"]
        words = re.findall(r"- (.+)", manifest.split("command:")[1].split("env:")[0])
        assert words[0] == "torchrun", words
        module = words.index("shardwise")
        small = [f"--set={setting}" for setting in SETTINGS]
        command = [
            *words[1:module],
            "tests.soak.pausing",
            *words[module:],
            *small,
            "--device=cpu",
            "--out=run",
        ]
        return command, {
            "PET_NNODES": f"{self.nodes}:{self.nodes}",
            "PET_NPROC_PER_NODE": "1",
            "PET_MAX_RESTARTS": "10",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": "first",
            "PET_RDZV_ENDPOINT": f"{self.hosts[0].name}:23456",
        }

    @property
    def paused(self) -> Path:
        return self.folder / "paused"

    def log(self, number: int) -> Path:
        return self.folder / f"node{number + 1}.log"

    def said(self) -> str:
        return "\n".join(self.log(number).read_text(errors="replace") for number in sorted(self.agents))

    def wait_until_paused(self) -> None:
        """Returns in the middle of the run, when a checkpoint is on disk."""
        wait_until(lambda: self.paused.exists() or self._failed(), "the rank that pauses")
        wait_until(lambda: self.checkpoints() or self._failed(), "a checkpoint")
        assert not self._failed(), self.said()

    def _failed(self) -> bool:
        return any(agent.poll() for agent in self.agents.values())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("**/checkpoints/step-*"))

    def wait(self) -> None:
        """Waits for the job's end, which must be a good one."""
        for agent in self.agents.values():
            wait_until(lambda agent=agent: agent.poll() is not None, f"the end of the job\n{self.said()}")
        assert not self._failed(), self.said()


# --- what happens -----------------------------------------------------------------------------------------------------


def nothing(job: Job) -> None:
    """Nothing happens."""
    job.pauses_on = -1
    job.start(0, 1)


def workers(job: Job) -> None:
    """The processes that train on one host are killed; its launcher is not."""
    job.start(0, 1)
    job.wait_until_paused()
    assert job.hosts[1].kill(only="LOCAL_RANK=")


def node(job: Job) -> None:
    """Every process of a host is killed, and later the host is back, with the same command."""
    job.start(0, 1)
    job.wait_until_paused()
    job.hosts[1].kill()
    job.agents[1].wait()
    job.start(1)


def first_node(job: Job) -> None:
    """Every process of the host that holds the rendezvous is killed: both must be started again."""
    job.pauses_on = 0
    job.start(0, 1)
    job.wait_until_paused()
    job.hosts[0].kill()
    job.agents[0].wait()
    wait_until(lambda: job.agents[1].poll() is not None, "the other host to give up", 600)
    assert job.agents[1].returncode != 0
    job.start(0, 1)


def node_for_good(job: Job) -> None:
    """Every process of a host is killed, and the host does not come back: the other goes on alone."""
    job.nodes = "1:2"
    job.start(0, 1)
    job.wait_until_paused()
    job.hosts[1].kill()
    job.agents.pop(1).wait()


def cable(job: Job) -> None:
    """The cable is pulled out until the other host has noticed; nobody is killed."""
    job.start(0, 1)
    job.wait_until_paused()
    job.hosts[1].plug(connected=False)
    job.paused.with_suffix(".over").touch()
    wait_until(
        lambda: "failed (exitcode" in job.log(0).read_text(errors="replace"), "the other host to notice"
    )
    job.hosts[1].plug(connected=True)
    # torchrun of the host without a cable may have given up meanwhile, or go on.
    goes_on = re.compile("resumed step|finished")
    wait_until(lambda: job.agents[1].poll() is not None or goes_on.search(job.said()), "the second host", 600)
    if job.agents[1].poll():
        job.start(1)


HAPPENINGS: dict[str, Callable[[Job], None]] = {
    name.__name__: name for name in (nothing, workers, node, first_node, node_for_good, cable)
}


# --- what must come of it ---------------------------------------------------------------------------------------------


def run(hosts: tuple[Host, Host], folder: Path, happening: str, program: str) -> dict[str, object]:
    """Runs a program to its end, whatever happens to it, and returns what it left."""
    folder.mkdir()
    (own,) = [block for block in blocks_of(GUIDE) if block.text.startswith("# train.py")]
    (folder / "train.py").write_text(own.text)
    job = Job(hosts, folder, PROGRAMS[program])
    HAPPENINGS[happening](job)
    job.wait()
    assert happening == "nothing" or job.paused.exists()
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {
        "checkpoints": job.checkpoints(),
        "resumed": re.findall(r"resumed (step-\d+)", job.said()),
        "steps": [json.loads(line)["step"] for line in lines],
        "losses": [json.loads(line)["loss"] for line in lines],
    }


def check(found: dict[str, object], expected: dict[str, object], happening: str) -> dict[str, object]:
    """Compares a run with the one that nothing happened to."""
    assert found["checkpoints"] == expected["checkpoints"], (found, expected)
    assert found["steps"] == expected["steps"], found["steps"]
    # On one host fewer, gradients are summed in another order.
    same = found["losses"] == expected["losses"]
    assert same or happening == "node_for_good", (found["losses"], expected["losses"])
    # A program of one's own writes no losses down.
    return {"resumed": found["resumed"], "same_losses": same if found["losses"] else None}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(name for name in HAPPENINGS if name != "nothing"))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--result", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps what the runs leave")
    options = parser.parse_args()
    entries: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary, two_hosts() as hosts:
        parent = options.folder or Path(temporary)
        parent.mkdir(exist_ok=True)
        for program in options.programs.split(","):
            place = parent / program.replace(" ", "-")
            place.mkdir()
            expected = run(hosts, place / "nothing", "nothing", program)
            assert len(expected["checkpoints"]) > 1, expected
            for happening in options.only.split(","):
                found = run(hosts, place / happening, happening, program)
                entries[f"{program}: {happening}"] = check(found, expected, happening)
                print(json.dumps({f"{program}: {happening}": entries[f"{program}: {happening}"]}), flush=True)
    result = {"nodes": 2, "ranks": 2, "steps": STEPS, "saved_every": SAVED, "happenings": entries}
    if options.result:
        options.result.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
