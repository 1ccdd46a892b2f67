"""The commands about this machine and its programs: ``shardwise doctor | run | trace``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import runpy
import sys

from shardwise.cli.wording import describe

__all__ = ["add_doctor", "add_run", "add_trace"]


# --- run ----------------------------------------------------------------------------------------------------------


def add_run(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Run a Python script with shardwise in place of torch's FSDP and ZeRO, for libraries that import those from "
        "torch: shardwise.install(), then the script.",
        "shardwise run script.py --epochs 3",
        "torchrun --nproc-per-node 2 -m shardwise run script.py",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    parser.set_defaults(run=_run, shows_tracebacks=True)


def _run(options: argparse.Namespace) -> int:
    from shardwise.compat import install

    if not options.is_module and not os.path.exists(options.script):
        print(f"error: there is no file '{options.script}'", file=sys.stderr)
        return 2
    installation = install()
    if os.environ.get("RANK", "0") == "0":
        print(installation, file=sys.stderr, flush=True)
    sys.argv[:] = [options.script, *options.arguments]
    if options.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        # As python does: the script finds what lies beside it, wherever it goes.
        script = os.path.abspath(options.script)
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
    return 0


# --- doctor -------------------------------------------------------------------------------------------------------


def add_doctor(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Check this machine: versions, devices, disk, and whether ranks can communicate. Or measure what work costs "
        "here: matrix products, memory, calls and collectives, for shardwise plan --device.",
        "shardwise doctor",
        "shardwise doctor --measure mine.json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument(
        "--measure",
        metavar="file",
        help="measure this machine's prices, in about a minute, and write a device file",
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks that measure at once (default: one per GPU, or 2 on a CPU)"
    )
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, although there is a GPU")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.measure is not None:
        return _measure(options)
    from shardwise.train.doctor import examine

    marks = {True: "ok", False: "NO", None: "--"}
    bad = 0
    for finding in examine():
        bad += finding.good is False
        if options.json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
            continue
        print(f"  {marks[finding.good]}  {finding.name:<13} {finding.text}", flush=True)
        if finding.fix:
            print(f"      {'':<13} fix: {finding.fix}", flush=True)
    if not options.json:
        print(
            "everything that training needs is available" if not bad else f"{bad} to fix before training",
            flush=True,
        )
    return 1 if bad else 0


def _measure(options: argparse.Namespace) -> int:
    from functools import partial

    import torch

    from shardwise.errors import ConfigError
    from shardwise.forecast.device_files import load_device
    from shardwise.forecast.measured_device import check_target, measure_device, measured_lines
    from shardwise.train.launch import run_local_ranks

    is_cuda = torch.cuda.is_available() and not options.cpu
    ranks = options.ranks or (torch.cuda.device_count() if is_cuda else 2)
    if ranks < 1 or (is_cuda and ranks > torch.cuda.device_count()):
        raise ConfigError(
            f"{ranks} ranks cannot measure here", where="--ranks", fix="pass one per GPU, or --cpu"
        )
    check_target(options.measure)
    work = partial(measure_device, os.path.abspath(options.measure))
    status = run_local_ranks(work, ranks, "cuda" if is_cuda else "cpu")
    if status == 0:
        print("\n".join(measured_lines(load_device(options.measure))))
        print(f"written: {options.measure}; use it with shardwise plan --device {options.measure}")
    return status


# --- trace --------------------------------------------------------------------------------------------------------


def add_trace(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Show what ranks did last, from the files that they left when they failed; or draw a step as a page, from a "
        "trace of Recorder.save_chrome or torch.profiler. Several are drawn over each other.",
        "shardwise trace shardwise-failure-rank0-1234.json",
        "shardwise trace step.json --html step.html",
        "shardwise trace predicted.json measured.json --html both.html",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="file",
        help="shardwise-failure-rank0-….json, as the error named it; or a trace",
    )
    parser.add_argument(
        "--html", metavar="page", help="draw the files, which are traces, as a page for a browser"
    )
    parser.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> int:
    if options.html is not None:
        from shardwise.forecast.measured import read_timeline
        from shardwise.forecast.page import write_page

        written = write_page(options.html, [read_timeline(file) for file in options.files])
        print(f"drawn: {written}")
        return 0
    from shardwise.trace import read_failure

    print("\n\n".join(read_failure(file).text() for file in options.files))
    return 0
