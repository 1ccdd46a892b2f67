"""Shared by benchmarks: contenders take turns, their steps are checked, and results record hardware and versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


def expect(condition: bool, message: str) -> None:
    """An assert that is also active under `python -O`: without it a figure would mean nothing."""
    if not condition:
        raise AssertionError(message)


def nothing() -> None:
    pass


class Contender(NamedTuple):
    """Something that takes steps. `before` and `after` are not timed; `after` checks that the step did its work."""

    name: str
    step: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


class Timing(NamedTuple):
    """Milliseconds of one step: wall-clock time, and CPU time of this process, which other programs disturb less."""

    wall: float
    cpu: float


def time_once(contender: Contender, wait: Callable[[], object]) -> Timing:
    contender.before()
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    contender.step()
    wait()
    timing = Timing(1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu))
    contender.after()
    return timing


def wait_for(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else nothing


class Times:
    """The times of all contenders, by name, round by round."""

    def __init__(self, rounds: dict[str, list[list[Timing]]]) -> None:
        self.rounds = rounds

    @classmethod
    def of_slowest(cls, by_rank: Sequence[Times]) -> Times:
        """Combines the times of ranks that took the same turns: a step's time is that of its slowest rank."""
        return cls(
            {
                name: [
                    [
                        Timing(*(max(values) for values in zip(*same, strict=True)))
                        for same in zip(*turns, strict=True)
                    ]
                    for turns in zip(*(times.rounds[name] for times in by_rank), strict=True)
                ]
                for name in by_rank[0].rounds
            }
        )

    def all(self, name: str, clock: str = "wall") -> list[float]:
        return [getattr(timing, clock) for timings in self.rounds[name] for timing in timings]

    def median(self, name: str, clock: str = "wall") -> float:
        return statistics.median(self.all(name, clock))

    def by_round(self, name: str, clock: str = "wall") -> list[float]:
        return [statistics.median(getattr(each, clock) for each in timings) for timings in self.rounds[name]]

    def summary(self) -> dict[str, Any]:
        return {
            name: {clock: summary(self.all(name, clock)) for clock in Timing._fields} for name in self.rounds
        }

    def ratio(self, of: str, to: str, clock: str = "wall") -> dict[str, Any]:
        """Returns the ratio of two contenders' times: of the medians, and round by round to show its spread."""
        rounds = zip(self.by_round(of, clock), self.by_round(to, clock), strict=True)
        return {
            "value": self.median(of, clock) / self.median(to, clock),
            "of_minima": min(self.all(of, clock)) / min(self.all(to, clock)),
            "by_round": sorted(one / other for one, other in rounds),
        }


def summary(times: Sequence[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"median": median, "quartiles": [low, high], "minimum": min(times)}


def take_turns(
    contenders: list[Contender], wait: Callable[[], object], rounds: int, iterations: int, warmup: int
) -> Times:
    """Times every contender in every round; the order rotates, so that none always follows the same one."""
    for contender in contenders:
        for _ in range(warmup):
            time_once(contender, wait)
    times: dict[str, list[list[Timing]]] = {contender.name: [] for contender in contenders}
    for index in range(rounds):
        turn = index % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            times[contender.name].append([time_once(contender, wait) for _ in range(iterations)])
    return Times(times)


# --- results ----------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def adamw_room(step: int, lr: float, scale: torch.Tensor) -> torch.Tensor:
    """Bounds how much one more step adds to the difference of two AdamW that differ only in their roundings.

    In float32, with torch's betas, and the same gradient g in every step. Each operation and each setting is rounded by
    at most u = 2**-24 of its result, or not at all if it is fused with the next; two of them differ by up to 2 u.

    - exp_avg m: (1 - beta1) (g - m) takes 3 roundings, the sum one; earlier errors decay by beta1 per step: relative to
      m, 6 u in total from the former and 2 u from each of the last 10 sums.
    - exp_avg_sq v: 2 roundings for beta2 v, 3 for (1 - beta2) g g, one for the sum, all of one sign: less than 8 u from
      each of the last 1000 steps. Its square root has half of that.
    - The rest of the quotient takes 7 roundings. It is at most lr, since m and the root of v equal g up to roundings.
    - The parameter itself: a setting, a product and a sum, relative to ``scale``, the parameter's largest value so far.
    """
    half_ulp = 2.0**-24 * 1.01
    of_quotient = (6 + 2 * min(step, 10)) + 8 * min(step, 1000) / 2 + 2 * 7
    return half_ulp * (2 * 3 * scale + lr * of_quotient)


def loopback_bytes() -> int:
    """Returns the bytes sent over the loopback interface since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("there is no loopback interface here")


def parser(doc: str | None, *, rounds: int, iterations: int, warmup: int = 3) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks share."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--iterations", type=int, default=iterations, help="timed steps a contender and round")
    made.add_argument("--warmup", type=int, default=warmup)
    made.add_argument("--out", type=Path, help="default: a file in results/ beside this one")
    return made


def write(
    benchmark: str,
    args: argparse.Namespace,
    out: Path | None,
    default_name: str,
    *,
    step_ms: dict[str, Any],
    figures: dict[str, dict[str, Any]],
    **more: Any,
) -> None:
    """Writes a results file and prints its times and figures. Each figure has at least a `value`."""
    result = {
        "benchmark": benchmark,
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(args.device),
        "step_ms": step_ms,
        "figures": figures,
        **more,
    }
    for name, clocks in step_ms.items():
        wall = clocks["wall"]
        low, high = wall["quartiles"]
        print(f"{name:>14}: {wall['median']:9.3f} ms a step   (quartiles {low:.3f} to {high:.3f})")
    for name, figure in figures.items():
        rounds = figure.get("by_round")
        spread = f"   (rounds {rounds[0]:.3f} to {rounds[-1]:.3f})" if rounds else ""
        print(f"{name} = {figure['value']:.3f}{spread}")
    path = out or RESULTS / f"{default_name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, default=str) + "\n")
    print(f"written to {os.path.relpath(path)}")
