"""A disk that refuses anything at any moment of a save: training goes on, no half checkpoint is believed, and the next
save works as soon as there is room."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint import disk
from shardwise.checkpoint import staging as image_room
from shardwise.checkpoint.manifest import first_damage, read_manifest
from shardwise.checkpoint.parts import Part, part_of
from shardwise.checkpoint.saver import Saver
from shardwise.checkpoint.store import Store
from shardwise.testing import run_ranks
from shardwise.train.team import Team

NEEDS_ROOM = ("fsync", "rename", "replace", "mkdir")
REMOVES = ("unlink", "rmdir")


class File:
    """A file whose every write asks the disk first."""

    def __init__(self, file, ask):
        self._file, self._ask = file, ask

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        self._ask()
        return self._file.write(data)


class Disk:
    """The disk of this process, which can refuse the n-th thing that is asked of it.

    ``once``: that one alone. ``full``: that and all that needs room after it. ``broken``: that and all after it.
    """

    def __init__(self):
        self.count, self.refuse_at, self.kind, self.fired = 0, 0, "once", False
        self._real = {name: getattr(os, name) for name in NEEDS_ROOM + REMOVES}
        self._create = disk.create_file

    def __enter__(self):
        for name, real in self._real.items():
            setattr(os, name, partial(self._call, real, name in REMOVES))
        disk.create_file = self._create_file
        return self

    def __exit__(self, *_):
        for name, real in self._real.items():
            setattr(os, name, real)
        disk.create_file = self._create

    def set(self, refuse_at, kind="once"):
        self.count, self.refuse_at, self.kind, self.fired = 0, refuse_at, kind, False

    def _call(self, real, removes, *args, **kwargs):
        self._ask(removes)
        if real is self._real["fsync"]:
            return None  # nobody pulls the plug here, and disks take their time
        return real(*args, **kwargs)

    def _create_file(self, path, **kwargs):
        self._ask(removes=False)
        return File(self._create(path, **kwargs), partial(self._ask, removes=False))

    def _ask(self, removes=False):
        if removes and self.kind != "broken":
            return
        self.count += 1
        hit = self.count == self.refuse_at if self.kind == "once" else self.count >= self.refuse_at > 0
        if hit:
            self.fired = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def parts_at(step, rank):
    """One tensor that both have, and rows of another; their values tell the step."""
    rows = Part(torch.full((2, 3), float(step)), (2 * rank, 0), (4, 3))
    return {"model/both": part_of(torch.full((5,), float(step))), "model/rows": rows}


def leftovers(store):
    return sorted(path.name for path in store.folder.iterdir() if path.name.startswith("."))


def check_store(store):
    """Everything that has a checkpoint's name is whole, and latest is one of them."""
    for path in store.checkpoints():
        assert first_damage(path, read_manifest(path)) is None
    assert store.latest() in store.checkpoints()


def save_through_faults(folder, kind, failing_rank, again):
    """Refuses the first, the second, ... thing that a save asks of the disk, until a save asks no more of it.

    ``again``: it is a save of a step that is there already.
    """
    rank, store, team = dist.get_rank(), Store(folder), Team()
    # Not asynchronous: a thread of the lowest priority would wait long on a busy machine.
    saver = Saver(store, team.new_group(), keep=2, asynchronous=False)
    outcomes = []

    def save(step):
        saver.save(step, parts_at(step, rank), {"step": step})
        saver.wait()
        (outcome,) = saver.outcomes()
        outcomes.append(outcome.problem)
        dist.barrier()
        return outcome.problem

    step, failures, spared, faults = 1, 0, 0, 0
    with Disk() as this_disk:
        assert save(step) is None
        while True:
            faults += 1
            wanted = step if again else step + 1
            this_disk.set(faults if rank == failing_rank else 0, kind)
            problem = save(wanted)
            fired = any(team.collect(this_disk.fired))
            this_disk.set(0)
            dist.barrier()
            if rank == 0:
                check_store(store)
                assert problem is not None or store.latest() == store.path_of(wanted)
                assert kind == "broken" or leftovers(store) == []
            if problem is not None:
                failures += 1
                assert "No space left on device" in problem
            elif fired:
                spared += 1
            step = wanted + 1
            assert save(step) is None
            if rank == 0:
                check_store(store)
                assert store.latest() == store.path_of(step)
                assert len(store.checkpoints()) == 2
                assert leftovers(store) == []
            dist.barrier()
            if not fired:
                return outcomes, failures, spared


@pytest.mark.parametrize(
    ("kind", "failing_rank", "again"),
    [("once", 0, False), ("once", 0, True), ("full", 0, False), ("broken", 0, False), ("once", 1, False)],
)
def test_a_save_can_fail_anywhere_and_the_next_one_works(tmp_path, kind, failing_rank, again):
    first, second = run_ranks(save_through_faults, 2, tmp_path, kind, failing_rank, again, kind="gloo")
    assert first == second  # both are told the same, about every save
    _, failures, spared = first
    assert failures >= (5 if failing_rank == 0 else 3)
    # Old checkpoints that cannot be removed are no reason to call a new one failed.
    assert spared > 0 or failing_rank == 1 or again


def save_without(folder, what):
    """A save of a rank that has no memory for the copy, or no thread to spare; then one that has."""
    rank, store = dist.get_rank(), Store(folder)
    saver = Saver(store, Team.new_group(), keep=0)
    problems = []

    def fails(*args, **kwargs):
        raise RuntimeError(f"no {what}")

    real = image_room._host_memory, threading.Thread.start
    for step in (1, 2, 3):
        if step == 2 and rank == 1:
            if what == "memory":
                image_room._host_memory = fails
            else:
                threading.Thread.start = fails
        # Other parts than before: the copy needs memory of its own.
        parts = parts_at(step, rank) | {f"model/{step}": part_of(torch.zeros(100 * step))}
        try:
            saver.save(step, parts, {"step": step})
        finally:
            image_room._host_memory, threading.Thread.start = real
        saver.wait()
        (outcome,) = saver.outcomes()
        problems.append(outcome.problem)
    dist.barrier()
    return problems, [store.step_of(path) for path in store.checkpoints()]


def test_a_rank_without_memory_for_the_copy_fails_that_save_on_all_and_no_other(tmp_path):
    for problems, saved in run_ranks(save_without, 2, tmp_path, "memory", kind="gloo"):
        assert problems[0] is problems[2] is None
        assert "the copy in host memory failed: RuntimeError: no memory (rank 1)" in problems[1]
        assert saved == [3, 1]


def test_a_rank_that_cannot_start_a_thread_still_saves(tmp_path):
    for problems, saved in run_ranks(save_without, 2, tmp_path, "thread", kind="gloo"):
        assert problems == [None, None, None]
        assert saved == [3, 2, 1]


def save_while_it_is_removed(folder):
    """Somebody removes the checkpoints when one rank has written its file, and the other has not begun."""
    rank, store = dist.get_rank(), Store(folder)
    saver = Saver(store, Team.new_group(), keep=0)
    problems, create = [], disk.create_file

    def create_late(path, **options):
        while not (path.parent / "rank-00000.bin").exists():
            time.sleep(0.01)
        shutil.rmtree(folder)
        path.parent.mkdir(parents=True)
        return create(path, **options)

    for step in (1, 2):
        if (step, rank) == (1, 1):
            disk.create_file = create_late
        try:
            saver.save(step, parts_at(step, rank), {"step": step})
            saver.wait()
        finally:
            disk.create_file = create
        (outcome,) = saver.outcomes()
        problems.append(outcome.problem)
    dist.barrier()
    return problems, [store.step_of(path) for path in store.checkpoints()]


def test_a_checkpoint_that_is_removed_while_it_is_written_does_not_count(tmp_path):
    for problems, saved in run_ranks(save_while_it_is_removed, 2, tmp_path / "kept", kind="gloo"):
        assert problems == [
            "rank-00000.bin was removed or changed while the checkpoint was written (rank 0)",
            None,
        ]
        assert saved == [2]


def save_without_a_group(folder):
    """The group is gone when a save begins: its error is told, though asking the group for anything raises too."""
    group = Team.new_group()
    saver = Saver(Store(folder), group, keep=0)
    saver.save(1, parts_at(1, 0) | {"model/rows": part_of(torch.zeros(2))}, {})
    saver.wait()
    saver.outcomes()
    dist.destroy_process_group(group)
    saver._save(2, {}, None)
    (outcome,) = saver.outcomes()
    return outcome.problem


def test_a_save_whose_group_is_gone_is_reported_and_does_not_end_its_thread(tmp_path):
    (problem,) = run_ranks(save_without_a_group, 1, tmp_path, kind="gloo")
    assert problem
