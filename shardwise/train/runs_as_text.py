"""Shows runs and folders as text: a table, one run in full, several compared, or what else is in a folder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.train.rank_states import read_rank_states
from shardwise.train.records import (
    CONFIG,
    LOG,
    counted,
    format_bytes,
    format_count,
    format_duration,
    short_path,
    smoothed,
    sparkline,
)
from shardwise.train.run_files import read_json
from shardwise.train.run_folder import LOGS
from shardwise.train.runs import Run, entries_of

__all__ = ["compare_runs", "describe_folder", "list_runs", "show_run"]


# --- several runs -------------------------------------------------------------------------------------------------


def list_runs(runs: Iterable[Run], width: int) -> Iterator[str]:
    """Yields a table of runs; narrow terminals get fewer columns, and no column is cut."""
    rows = [
        [
            short_path(run.folder),
            run.state,
            f"{run.step}/{run.num_steps}" if run.num_steps else str(run.step),
            _loss(run),
            "–" if run.eval_record is None else f"{run.eval_record.eval_loss:.4f}",
            format_bytes(sum(facts.num_bytes for facts in run.checkpoints)),
            format_age(time.time() - run.changed_at),
            sparkline([record.loss for record in run.records], 16),
        ]
        for run in runs
    ]
    yield from _table([["run", "state", "step", "loss", "eval", "size", "changed", "curve"], *rows], width)


def compare_runs(runs: list[Run], width: int) -> Iterator[str]:
    """Yields what differs between runs: settings, results, and their curves on one scale."""
    names = [short_path(run.folder) for run in runs]
    keys = sorted({key for run in runs for key in run.config} - {"output.folder"})
    differing = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    results: dict[str, Callable[[Run], str]] = {
        "state": lambda run: run.state,
        "step": lambda run: str(run.step),
        "loss": _loss,
        "eval loss": lambda run: _eval_loss(run) or "–",
    }
    rows = [
        ["", *names],
        *([key, *(str(run.config.get(key, "–")) for run in runs)] for key in differing),
        *([name, *map(value, runs)] for name, value in results.items()),
    ]
    if sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))) <= width + 2:
        yield from _table(rows, width)
    else:
        # Too wide for a table: one setting below the other.
        for row in rows[1:]:
            yield row[0]
            yield from (f"  {name}: {value}" for name, value in zip(names, row[1:], strict=True))
    if not differing:
        yield "their settings are the same"
    yield from _curves(runs, names, width)


def _curves(runs: list[Run], names: list[str], width: int) -> Iterator[str]:
    """Yields the losses of several runs as lines with one scale for the loss and one for the steps."""
    values = [smoothed([record.loss for record in run.records]) for run in runs]
    found = [loss for curve in values for loss in curve]
    last = max(run.step for run in runs)
    for name, run, curve in zip(names, runs, values, strict=True):
        if curve:
            length = max(1, min(64, width - 2) * run.step // last)
            yield ""
            yield f"{name}: loss, steps 1 to {run.step}"
            yield f"  {sparkline(curve, length, min(found), max(found))}"


def _table(rows: list[list[str]], width: int) -> Iterator[str]:
    """Yields aligned rows; columns that do not fit the width are left out, from the right."""
    sizes = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while len(sizes) > 3 and sum(sizes) + 2 * (len(sizes) - 1) > width:
        sizes.pop()
    for row in rows:
        yield "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)).rstrip()


def _loss(run: Run) -> str:
    return "–" if run.loss is None else f"{run.loss:.4f}"


def _eval_loss(run: Run) -> str:
    """Returns the last loss on held-out data, with its step if steps came after it; empty if there is none."""
    found = run.eval_record
    if found is None:
        return ""
    return f"{found.eval_loss:.4f}" + ("" if found.step == run.step else f", at step {found.step}")


# --- one run ------------------------------------------------------------------------------------------------------


def show_run(run: Run) -> Iterator[str]:
    """Yields all about one run: settings, checkpoints, curve, how it ended, and how to go on."""
    yield short_path(run.folder)
    for name, lines in _facts_of(run).items():
        for number, line in enumerate(lines):
            yield f"  {name if not number else '':<12} {line}"


def _facts_of(run: Run) -> dict[str, list[str]]:
    facts = {
        "state": [_state_text(run)],
        "recipe": [run.recipe] if run.recipe else [],
        "settings": list(run.settings),
    }
    if run.records:
        losses = [record.loss for record in run.records]
        last = run.records[-1]
        spent = format_duration(sum(record.seconds for record in run.records))
        facts["loss"] = [f"{losses[0]:.4f} → {_loss(run)}", sparkline(losses, 44)]
        facts["eval loss"] = [text] if (text := _eval_loss(run)) else []
        facts["speed"] = [f"{format_count(last.tokens_per_second)} tokens/s, {spent} in steps"]
        facts["memory"] = [f"{format_bytes(last.memory_bytes)} peak per rank"]
    doing: dict[str, list[str]] = {}
    for state in read_rank_states(run.folder):
        doing.setdefault(str(state["doing"]), []).append(str(state["rank"]))
    facts["ranks"] = [f"{text}: {_numbers(ranks)}" for text, ranks in doing.items()]
    facts["checkpoints"] = [
        f"{each.name}  {format_bytes(each.num_bytes)}  {each.damage or _time(each.saved_at)}"
        for each in run.checkpoints
    ]
    logs = [run.folder / LOG, *(run.folder / LOGS / entry.name for entry in entries_of(run.folder / LOGS))]
    facts["log"] = [short_path(path) for path in logs if path.is_file() and path.stat().st_size]
    facts["go on with"] = [run.go_on_with] if run.go_on_with else []
    return facts


def _numbers(ranks: list[str]) -> str:
    """Returns which ranks, of many only some."""
    some = ", ".join(ranks[:12])
    more = len(ranks) - 12
    return f"rank{'s' * (len(ranks) > 1)} {some}" + (f" and {more} more" if more > 0 else "")


def _state_text(run: Run) -> str:
    if run.holder:
        return f"running at step {run.steps_text}: {run.holder}"
    if run.state == "not begun":
        return "not begun" + (", with weights to begin from" if run.go_on_with else "")
    if run.state == "broken off":
        saved = f"saved at step {run.checkpoints[0].step}" if run.checkpoints else "with no checkpoint"
        return f"broken off at step {run.steps_text}, {saved}"
    return f"{run.state} at step {run.steps_text}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def format_age(seconds: float) -> str:
    for size, noun in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{counted(int(seconds // size), noun)} ago"
    return "just now"


# --- a folder -----------------------------------------------------------------------------------------------------


def describe_folder(folder: Path) -> Iterator[str]:
    """Yields what is in a folder that is no run: checkpoints, an exported model, weights, text, or nothing known."""
    name = short_path(folder)
    checkpoints = Store(folder).checkpoints()
    if (folder / MANIFEST).exists() or checkpoints:
        path = folder if (folder / MANIFEST).exists() else checkpoints[0]
        manifest = read_manifest(path)
        size = format_bytes(sum(record.num_bytes for record in manifest.files.values()))
        ranks = manifest.run.get("world_size")
        saved = "" if ranks is None else f", saved on {counted(ranks, 'rank')}"
        count = len(checkpoints)
        several = f"{count} checkpoints, the newest" if count > 1 else "a checkpoint"
        yield f"{name}: {several} of step {manifest.run['step']}, {size}{saved}"
        yield f"  {'use it':<12} shardwise generate {name}"
        return
    entries = entries_of(folder)
    files = [entry for entry in entries if entry.is_file()]
    size = format_bytes(sum(entry.stat().st_size for entry in files))
    if weights := [entry for entry in files if entry.name.endswith(".safetensors")]:
        kind = read_json(folder / CONFIG).get("model_type")
        what = f"a model of type {kind}" if kind else f"weights without a {CONFIG}"
        yield f"{name}: {what}, {counted(len(weights), 'file')} of safetensors, {size}"
        if kind:
            yield f"  {'use it':<12} shardwise generate {name}"
        return
    kinds = Counter(Path(entry.name).suffix or "no suffix" for entry in files).most_common(5)
    inner = sum(entry.is_dir() for entry in entries)
    held = [counted(inner, "folder")] * bool(inner) + [f"{counted(len(files), 'file')}, {size}"] * bool(files)
    yield f"{name}: no run, checkpoint or model; {', '.join(held) or 'empty'}"
    if kinds:
        yield f"  {'files':<12} {', '.join(f'{count} {kind}' for kind, count in kinds)}"
    if any(kind in (".txt", ".md", ".jsonl", ".parquet") for kind, _ in kinds):
        yield f"  {'train on it':<12} shardwise train tiny --set data.path={name}"
