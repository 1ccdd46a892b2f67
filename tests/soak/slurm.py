"""A Slurm cluster of two hosts runs the job of the guide: it loses a node and is requeued, and it is asked to stop.

    sudo .venv/bin/python -m tests.soak.slurm [--result result.json]

The hosts are network namespaces of this machine. Slurm must be installed (Debian: slurmctld slurmd slurm-client) or
unpacked: then PATH has its programs, LD_LIBRARY_PATH its libraries, and SLURM_PLUGINS names its folder of plugins.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ranks.test_guides import blocks_of
from tests.soak.hosts import REPOSITORY, Host, two_hosts, wait_until
from tests.soak.two_hosts import PAUSED_AT, SMALL, STEPS

GUIDE = REPOSITORY / "docs" / "guides" / "slurm.md"

CONFIGURATION = """
ClusterName=here
SlurmctldHost=node1({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
GresTypes=gpu
SlurmdTimeout=15
ReturnToService=2
KillWait=5
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
{plugins}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


class Cluster:
    """Slurm on two hosts, with a controller on the first."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        for name in ("state", "spool-node1", "spool-node2", "bin"):
            (folder / name).mkdir(parents=True)
        nodes = [
            f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} CPUs=96 Gres=gpu:8"
            for host in hosts
        ]
        plugins = os.environ.get("SLURM_PLUGINS")
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                address=hosts[0].address,
                folder=folder,
                plugins=f"PluginDir={plugins}" if plugins else "",
                nodes="\n".join(nodes),
            )
        )
        # Loaded, though nothing here uses control groups.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        # What sbatch is given here, jobs have.
        self.environment = {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start(self) -> None:
        self.hosts[0].start(["slurmctld", "-D"], self.folder / "daemons.log", self.environment)
        for host in self.hosts:
            self.start_node(host)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", "two idle nodes", 60)

    def start_node(self, host: Host) -> None:
        stepd = shutil.which("slurmstepd")
        named = [*(["-d", stepd] if stepd else []), "-N", host.name]
        host.start(["slurmd", "-D", *named], self.folder / "daemons.log", self.environment)

    def ask(self, *command: str) -> str:
        """What a command says on the first host; what fails says nothing."""
        inside = ["ip", "netns", "exec", self.hosts[0].space, *command]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            inside, env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode and command[0] == "sbatch":
            raise RuntimeError(done.stderr)
        return (done.stdout or done.stderr if command[0] == "sbatch" else done.stdout).strip()

    def install(self, name: str, script: str) -> None:
        """Puts a program where the job finds it."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def jobs(self) -> list[str]:
        return self.ask("squeue", "-h", "-r", "-o", "%i %T").splitlines()

    def wait_until_paused(self) -> None:
        paused = self.folder / "paused"
        wait_until(lambda: paused.exists() or not self.jobs(), "the rank that pauses")
        assert paused.exists(), self.log()

    def wait_for_jobs(self) -> None:
        wait_until(lambda: not self.jobs(), "the jobs to end", 600)

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*-*-*.log")))


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    with two_hosts() as hosts:
        made = Cluster(hosts, folder)
        try:
            made.start()
            yield made
        except BaseException:
            print((folder / "slurmctld.log").read_text()[-3000:], made.log()[-5000:], file=sys.stderr)
            raise


def job_files(folder: Path) -> list[Path]:
    """The jobs of the guide, as files."""
    files = []
    for block in blocks_of(GUIDE):
        if "#SBATCH" in block.text:
            name = re.search(r"--job-name=(\w+)", block.text)
            assert name is not None
            files.append(folder / f"{name[1]}.sh")
            files[-1].write_text(block.text + "\n")
    return files


def options_of(job: str) -> list[str]:
    return re.findall(r"^#SBATCH (.+)$", job, re.MULTILINE)


def small(folder: Path, steps: int) -> str:
    """A stand-in for the command: the run of the guide on a CPU, and small; it pauses on the second host, once."""
    words = " ".join(f"--set {setting}" for setting in [*SMALL, f"train.steps={steps}"])
    return (
        f'[ "$SLURM_NODEID" = 1 ] && export PAUSED={folder}/paused PAUSE_AT={PAUSED_AT}\n'
        f'exec python -m tests.soak.pausing shardwise "$@" --device cpu --out {folder}/run {words}'
    )


def lose_a_node(slurm: Cluster, job: Path) -> dict[str, object]:
    """The second host dies in the middle of the run, and comes back later."""
    slurm.install("shardwise", small(slurm.folder, STEPS))
    slurm.ask("sbatch", "--ntasks-per-node=1", "--array=1-2%1", str(job))
    slurm.wait_until_paused()
    wait_until(lambda: list(slurm.folder.glob("run/checkpoints/step-*")), "a checkpoint")
    slurm.hosts[1].kill()
    wait_until(
        lambda: any(re.match(r"\d+_1 PENDING", job) for job in slurm.jobs()), "the job to be requeued", 600
    )
    slurm.start_node(slurm.hosts[1])
    slurm.wait_for_jobs()
    steps = steps_of(slurm.folder / "run")
    assert steps == list(range(1, STEPS + 1)), steps
    assert "no steps were left" in slurm.log()
    return {"steps": len(steps), "resumed": re.findall(r"resumed (step-\d+)", slurm.log())}


def run_out_of_time(slurm: Cluster, job: Path) -> dict[str, object]:
    """The ranks are asked to stop, as before the time is up; the next job of the array continues."""
    shutil.move(slurm.folder / "run", slurm.folder / "run-before")
    slurm.install("shardwise", small(slurm.folder, 1_000_000))
    slurm.ask("sbatch", "--ntasks-per-node=1", "--array=1-2%1", str(job))
    stopped = []
    for _ in range(2):
        before = stopped[-1] if stopped else 0
        wait_until(
            lambda before=before: max(steps_of(slurm.folder / "run"), default=0) > before + 3, "a few steps"
        )
        (running,) = [line.split()[0] for line in slurm.jobs() if "RUNNING" in line]
        slurm.ask("scancel", "--signal=TERM", running)
        wait_until(lambda running=running: running not in " ".join(slurm.jobs()), "the job to end", 600)
        stopped.append(max(steps_of(slurm.folder / "run")))
    slurm.wait_for_jobs()
    saved = sorted(int(path.name[5:]) for path in (slurm.folder / "run" / "checkpoints").glob("step-*"))
    assert set(stopped) <= set(saved), (stopped, saved)
    assert f"resumed step-{stopped[0]:08d}" in slurm.log()
    assert steps_of(slurm.folder / "run") == list(range(1, stopped[-1] + 1))
    return {"stopped_and_saved": True, "continued": True}


def own_program(slurm: Cluster, job: Path) -> dict[str, object]:
    """A program of one's own under torchrun: its processes on the second host are killed, and it continues."""
    (own,) = [
        block for block in blocks_of(GUIDE.parent / "many_machines.md") if block.text.startswith("# train.py")
    ]
    (slurm.folder / "train.py").write_text(own.text)
    (slurm.folder / "paused").unlink()
    slurm.install(
        "torchrun",
        f'[ "$SLURM_NODEID" = 1 ] && export PAUSED={slurm.folder}/paused PAUSE_AT={PAUSED_AT}\n'
        'address=$(getent hosts "$SLURMD_NODENAME" | cut -d " " -f 1)\n'
        'words=("$@")\nwords=("${words[@]/gpu/1}")\nwords=("${words[@]/train.py/-m tests.soak.pausing train.py}")\n'
        "exec python -m torch.distributed.run --local-addr $address ${words[*]}",
    )
    slurm.ask("sbatch", "--array=1-1%1", str(job))
    slurm.wait_until_paused()
    wait_until(lambda: list(slurm.folder.glob("checkpoints/step-*")), "a checkpoint")
    assert slurm.hosts[1].kill(only="LOCAL_RANK=")
    slurm.wait_for_jobs()
    found = sorted(path.name for path in slurm.folder.glob("checkpoints/step-*"))
    assert found[-1] == f"step-{STEPS:08d}", found
    return {"checkpoints": found}


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    # The last line may be half written.
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps what the jobs leave")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "cluster"
        with cluster(folder) as slurm:
            first, own = job_files(folder)
            result: dict[str, object] = {
                "slurm": slurm.ask("sinfo", "--version").removeprefix("slurm-wlm "),
                "nodes": 2,
            }
            for job in (first, own):
                slurm.ask("sbatch", "--test-only", str(job))
            result["accepted"] = {job.stem: options_of(job.read_text()) for job in (first, own)}
            for happening, job in ((lose_a_node, first), (run_out_of_time, first), (own_program, own)):
                result[happening.__name__] = happening(slurm, job)
                print(json.dumps({happening.__name__: result[happening.__name__]}), flush=True)
    if options.result:
        options.result.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
