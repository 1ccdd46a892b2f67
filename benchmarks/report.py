"""Generates the tables and the plot of benchmarks/README.md from the results files.

    python benchmarks/report.py            # writes them
    python benchmarks/report.py --check    # checks whether they are current

A question without a results file is marked as such.
"""

from __future__ import annotations

import html
import json
import sys
import textwrap
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
README = HERE / "README.md"
PLOT = HERE / "results" / "figures.svg"
BEGIN, END = "<!-- table: written by report.py -->\n", "<!-- end of table -->\n"
PROFILES_BEGIN, PROFILES_END = "<!-- profiles: written by report.py -->\n", "<!-- end of profiles -->\n"


class Question(NamedTuple):
    """A question, where it is asked, and the figure of a results file that answers it. Lower figures are better.

    A question without a target is in the tables, but not in the plot.
    """

    asked: str
    where: str
    target: float | None
    file: str
    path: tuple[str, ...]
    rounds: tuple[str, ...] = ()
    floor: Floor | None = None


class Floor(NamedTuple):
    """What the figure would be if the library itself cost nothing: a figure, or the quotient of two."""

    file: str
    path: tuple[str, ...]
    over: tuple[str, ...] = ()


def of_figures(
    asked: str, where: str, target: float | None, file: str, name: str, floor: Floor | None = None
) -> Question:
    figure = ("figures", name)
    return Question(asked, where, target, file, (*figure, "value"), (*figure, "by_round"), floor)


def host(asked: str, where: str, target: float, file: str, profile: str = "") -> Question:
    peer = "FSDP1" if "wrapper" in file else "FSDP2"
    still = ("figures", f"(shardwise - still) / ({peer} - plain)", "value")
    floor = Floor(profile, still) if profile else None
    ratio = ("overhead_ratio", "wall")
    return Question(asked, where, target, file, (*ratio, "of_medians"), (*ratio, "by_round"), floor)


def captured(where: str, target: float, file: str, peer: str) -> Question:
    """Returns a question about a captured step; its floor is a graph of the unsharded model."""
    asked = "captured step / " + {"plain": "plain eager", "FSDP2, by hand": "FSDP2's by hand"}[peer]
    floor = Floor(file, step_of("plain, by hand"), step_of(peer))
    return of_figures(asked, where, target, file, f"shardwise.capture / {peer}", floor)


def step_of(name: str) -> tuple[str, ...]:
    return ("step_ms", name, "wall", "median")


def _questions() -> list[Question]:
    ours, reserved = "shardwise / plain", "shardwise / FSDP2: reserved"
    found = [
        *(
            host("host overhead of forward and backward, of FSDP2's", where, target, file, profile)
            for where, target, file, profile in (
                ("16 cores, torch 2.11, fake 8", 0.08, "host_overhead_cpu", ""),
                ("2 cores, torch 2.13, fake 8", 0.08, "host_overhead_cpu_two_cores_1", "host_profile_cpu"),
                (
                    "2 cores, torch 2.13, fake 8, again",
                    0.08,
                    "host_overhead_cpu_two_cores_2",
                    "host_profile_cpu",
                ),
                (
                    "2 cores, torch 2.13, fake 8, 45 rounds",
                    0.08,
                    "host_overhead_cpu_two_cores_long",
                    "host_profile_cpu",
                ),
                ("2 cores, torch 2.13, fake 8, newest", 0.08, "host_overhead_cpu_two_cores_joined", ""),
                ("GPU, tiny, fake 8", 0.15, "host_overhead_cuda", "host_profile_cuda"),
                ("GPU, tiny, fake 8, newest", 0.15, "host_overhead_cuda_joined", ""),
            )
        ),
        *(
            Question(
                "host overhead with four blocks a unit (`group_bytes`), of FSDP2's",
                where,
                target,
                file,
                ("overhead_ratio_joined", "wall", "of_medians"),
                ("overhead_ratio_joined", "wall", "by_round"),
            )
            for where, target, file in (
                ("2 cores, torch 2.13, fake 8", 0.15, "host_overhead_cpu_two_cores_joined"),
                ("GPU, tiny, fake 8", 0.17, "host_overhead_cuda_joined"),
            )
        ),
        *(
            host("host overhead of the wrapper, of FSDP1's", where, 0.2, file, profile)
            for where, file, profile in (
                ("CPU, fake 8", "host_overhead_wrapper_cpu", "host_profile_wrapper_cpu"),
                ("CPU, fake 8, 30 rounds", "host_overhead_wrapper_cpu_long", "host_profile_wrapper_cpu"),
                (
                    "CPU, fake 8, `use_orig_params`, 30 rounds",
                    "host_overhead_wrapper_orig_cpu_long",
                    "",
                ),
                ("GPU, tiny, fake 8", "host_overhead_wrapper_cuda", "host_profile_wrapper_cuda"),
            )
        ),
    ]
    for suffix, group in (("fake", "fake 8"), ("nccl", "NCCL 1"), ("nccl_2", "NCCL 2")):
        file, where = f"captured_step_tiny_{suffix}", f"GPU, tiny, {group}"
        found += [captured(where, 0.15, file, "plain"), captured(where, 0.75, file, "FSDP2, by hand")]
    found.append(captured("GPU, 1B, fake 8", 0.98, "captured_step_1b_fake", "plain"))
    for where, what, target, file in (
        ("GPU, 1B, fake 8", "", 1.02, "step_time_1b_8_cuda"),
        ("GPU, 1B, fake 8, again", "", 1.02, "step_time_1b_8_cuda_again"),
        ("GPU, 1B, fake 8", ", blocks compiled", 1.02, "step_time_1b_8_compiled_cuda"),
        ("GPU, 8B, fake 8", "", 1.03, "step_time_8b_8_cuda"),
        ("GPU, 8B, fake 8", ", blocks compiled", 1.03, "step_time_8b_8_compiled_cuda"),
    ):
        floor = Floor(file, ("figures", "plain, and the group's own / plain", "value"))
        found.append(of_figures(f"forward and backward / plain{what}", where, target, file, ours, floor))
    for world in (8, 64):
        where, file = f"GPU, 8B, fake {world}", f"step_memory_8b_{world}_cuda"
        # The floor: no memory is reserved that is not allocated.
        floor = Floor(file, ("peak_bytes", "shardwise", "allocated"), ("peak_bytes", "FSDP2", "reserved"))
        found += [
            of_figures("peak reserved memory / FSDP2's", where, 0.85, file, reserved, floor),
            of_figures(
                "peak reserved / peak allocated", where, 1.05, file, "shardwise: reserved / allocated"
            ),
        ]
    for device in ("cpu", "cuda"):
        where = "CPU" if device == "cpu" else "GPU"
        found += [
            of_figures("optimizer step / plain", where, 1.1, f"optimizer_step_{device}", ours),
            of_figures("clipping / plain", where, 1.2, f"clip_{device}", ours),
        ]
    found += [
        of_figures(
            f"{bits}-bit AdamW's step by flat / as it is",
            "CPU, small, CPU time",
            None,
            "low_bit_step_cpu",
            f"AdamW{bits}bit: flat / as it is, CPU time",
        )
        for bits in (8, 4)
    ]
    wire = "shardwise: bytes a step / parameter bytes"
    file = "whole_step_small_gloo_4"
    found += [
        of_figures(asked, "CPU, 4 gloo ranks", target, file, name)
        for asked, target, name in (
            ("Muon's step / FSDP2's", 0.4, "shardwise / FSDP2"),
            ("Muon's work, most of a rank / even", 1.1, "imbalance of work"),
            ("Muon's bytes a step / parameter bytes", 2.1, "bytes a step / parameter bytes"),
            ("Muon's state, most of a rank / even", 1.1, "largest state of a rank / an even share"),
        )
    ]
    for where, file in (
        ("GPU, 1B, fake 8", "whole_step_1b_fake_8"),
        ("GPU, 8B, fake 8", "whole_step_8b_fake_8"),
        ("GPU, 1B, NCCL 2", "whole_step_1b_nccl_2"),
    ):
        found += [
            of_figures("Muon's step / FSDP2's", where, 0.35, file, "shardwise / FSDP2"),
            of_figures("Muon's step / the ideal", where, 1.15, file, "shardwise / ideal"),
        ]
    return [
        *found,
        *(
            of_figures(
                "offloaded step / FSDP2's",
                f"GPU, 1B, NCCL 1{when}",
                0.62,
                file,
                "shardwise / FSDP2",
                Floor(file, ("figures", "floor", "value")),
            )
            for when, file in (
                ("", "offload_step_1b_cuda"),
                (", again", "offload_step_1b_cuda_again"),
                (", a third time", "offload_step_1b_cuda_third"),
            )
        ),
        *(
            of_figures(
                f"{what} of a very small model / FSDP1's, CPU time",
                where,
                1.2,
                f"small_models_{case}",
                f"{what}: shardwise / FSDP1, cpu",
            )
            for where, case in (
                ("CPU, 2 gloo ranks", "2"),
                ("CPU, 2 gloo ranks, `use_orig_params`", "2_orig"),
                ("CPU, 4 gloo ranks", "4"),
            )
            for what in ("set-up", "steps")
        ),
        *(
            Question(
                "step with settings that `choose` chose / the fastest of 50 by hand",
                f"GPU, {where}, fake 8",
                1.05,
                "auto_plan",
                ("final", name, "chosen / fastest"),
                ("final", name, "by_round"),
            )
            for where, name in (("tiny", "tiny"), ("1B", "1b"))
        ),
        *(
            Question(
                "pairs of those settings that differ by 5 % and were ranked wrong / all pairs",
                f"GPU, {where}, fake 8",
                None,
                "auto_plan",
                ("summary", name, "share of pairs ranked wrong"),
            )
            for where, name in (("tiny", "tiny"), ("1B", "1b"))
        ),
        of_figures("training step / FSDP2's", "CPU, 4 gloo ranks", 0.6, "gloo_step", "shardwise / FSDP2"),
        of_figures("bytes on the wire / parameter bytes", "CPU, 4 gloo ranks", 2.3, "gloo_step", wire),
        *(
            of_figures(
                f"training step / {peer}",
                "CPU, 4 gloo ranks",
                None,
                "gloo_step_deepspeed",
                f"shardwise / {peer}",
            )
            for peer in ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3, resharding")
        ),
    ]


QUESTIONS = _questions()


class Answer(NamedTuple):
    value: float
    rounds: list[float]
    hardware: str


def answer(question: Question, results: Path = HERE / "results") -> Answer | None:
    path = results / f"{question.file}.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    value = look_up(result, question.path)
    if value is None:
        return None
    rounds = (look_up(result, question.rounds) if question.rounds else None) or []
    machine = result["machine"]
    return Answer(value, rounds, f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}")


def floor_of(question: Question, results: Path = HERE / "results") -> float | None:
    floor = question.floor
    if floor is None or not (path := results / f"{floor.file}.json").exists():
        return None
    result = json.loads(path.read_text())
    found: float | None = look_up(result, floor.path)
    return found / look_up(result, floor.over) if found is not None and floor.over else found


def look_up(result: Any, path: tuple[str, ...]) -> Any:
    return reduce(lambda found, key: found.get(key) if isinstance(found, dict) else None, path, result)


def table() -> str:
    lines = [
        "| question | where | target | measured | rounds | floor | file |",
        "|---|---|---|---|---|---|---|",
    ]
    for question in QUESTIONS:
        found = answer(question)
        target = "none" if question.target is None else f"≤ {question.target}"
        start = f"| {question.asked} | {question.where} | {target} |"
        if found is None:
            lines.append(f"{start} not measured yet | | | |")
            continue
        is_met = question.target is not None and found.value <= question.target
        value = f"**{found.value:.3f}**" if is_met else f"{found.value:.3f}"
        rounds = f"{found.rounds[0]:.3f} to {found.rounds[-1]:.3f}" if found.rounds else ""
        bound = floor_of(question)
        floor = "" if bound is None else f"{bound:.3f}"
        lines.append(f"{start} {value} | {rounds} | {floor} | {link(question.file)} |")
    hardware = {found.hardware for question in QUESTIONS if (found := answer(question)) is not None}
    measured_on = textwrap.fill(f"Measured on: {'; '.join(sorted(hardware))}.", 118)
    return "\n".join([*lines, "", measured_on]) + "\n"


# --- the plot ---------------------------------------------------------------------------------------------------------

MET, MISSED, INK, FAINT = "#2b6ca3", "#d97f2a", "#222222", "#777777"
# The axis ends at twice the target; longer bars are broken there and labelled with their length.
AXIS_END = 2.0
LABELS, BAR, NUMBERS, ROW = 330, 420, 250, 22
WIDTH = LABELS + BAR + NUMBERS


def plot() -> str:
    """Returns the plot: each figure as a bar relative to its target; bars that end left of the line meet it."""
    groups: dict[str, list[tuple[Question, float, Answer]]] = {}
    for question in QUESTIONS:
        if question.target is not None and (found := answer(question)) is not None:
            groups.setdefault(question.asked, []).append((question, question.target, found))
    rows: list[str] = []
    y = 112
    for asked, group in groups.items():
        rows.append(_text(16, y + 15, asked, weight="bold"))
        y += ROW
        for question, target, found in group:
            rows += _bar(y, question.where, found.value, target)
            y += ROW
        y += 8
    line = LABELS + BAR / AXIS_END
    scale = [
        f'<line x1="{LABELS + BAR * at / AXIS_END:.0f}" y1="106" x2="{LABELS + BAR * at / AXIS_END:.0f}" y2="{y}" '
        'stroke="#dddddd"/>'
        for at in (0, 0.5, 1.5, 2)
    ]
    head = [
        _text(16, 28, "shardwise: what was measured, beside its targets", size=18, weight="bold"),
        _text(
            16,
            48,
            "Each bar is measured / target. Shorter is better; a bar that ends left of the line met it.",
            FAINT,
        ),
        f'<rect x="16" y="62" width="14" height="12" fill="{MET}"/>',
        _text(36, 73, "target met"),
        f'<rect x="120" y="62" width="14" height="12" fill="{MISSED}"/>',
        _text(140, 73, "target missed"),
        f'<rect x="240" y="62" width="34" height="12" fill="{MISSED}"/>{_break(262, 62, 12)}',
        _text(280, 73, "longer than the axis: its length beside it"),
        *(
            _text(LABELS + BAR * at / AXIS_END, 100, label, FAINT, anchor="middle")
            for at, label in ((0, "0"), (0.5, "0.5 ×"), (1, "target"), (1.5, "1.5 ×"), (2, "2 ×"))
        ),
        _text(WIDTH - 90, 100, "measured", FAINT, anchor="end"),
        _text(WIDTH - 16, 100, "target", FAINT, anchor="end"),
    ]
    foot = "fake 8: torch's fake process group as 8 ranks. NCCL 2: two ranks on one GPU. tiny, 1B, 8B: the model."
    height = y + 34
    font = 'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" font-size="12"'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    ends = f'x1="{line:.0f}" y1="106" x2="{line:.0f}" y2="{y}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">',
            "<title>shardwise: measured figures as parts of their targets</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *head,
            *scale,
            *rows,
            f'<line {ends} stroke="{INK}" stroke-width="1.5" stroke-dasharray="5 3"/>',
            _text(16, y + 20, foot, FAINT),
            "</svg>",
            "",
        ]
    )


def _bar(y: int, where: str, value: float, target: float) -> list[str]:
    part = value / target
    colour = MET if part <= 1 else MISSED
    length = max(1.0, min(part, AXIS_END) * BAR / AXIS_END)
    parts = [
        _text(LABELS - 12, y + 15, where.replace("`", ""), anchor="end"),
        f'<rect x="{LABELS}" y="{y + 4}" width="{length:.1f}" height="{ROW - 8}" fill="{colour}"/>',
        _text(WIDTH - 90, y + 15, f"{value:.3f}", anchor="end", weight="bold" if part <= 1 else "normal"),
        _text(WIDTH - 16, y + 15, f"≤ {target:g}", FAINT, anchor="end"),
    ]
    if part > AXIS_END:
        parts += [_break(LABELS + BAR - 24, y + 4, ROW - 8), _text(LABELS + BAR + 6, y + 15, f"{part:.1f} ×")]
    return parts


def _break(x: float, y: float, height: float) -> str:
    """Returns two slanted white lines, which mark a bar as broken."""
    return "".join(
        f'<path d="M{x + shift:.0f} {y + height + 1:.0f} l6 {-height - 2:.0f}" stroke="white" stroke-width="2.5"/>'
        for shift in (0, 7)
    )


def _text(
    x: float,
    y: float,
    text: str,
    colour: str = INK,
    *,
    size: int = 12,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    style = f'fill="{colour}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{html.escape(text)}</text>'


# --- profiles ---------------------------------------------------------------------------------------------------------


def profiles(results: Path = HERE / "results") -> str:
    """Returns the tables of all profiles that exist; an empty text if there are none."""
    read = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*_profile_*.json"))}
    hosts = {name: found for name, found in read.items() if found["benchmark"] == "host_profile"}
    steps = {name: found for name, found in read.items() if found["benchmark"] == "step_profile"}
    sections = [*([host_profiles(hosts)] if hosts else []), *([step_profiles(steps)] if steps else [])]
    return "\n".join(["## Where the rest goes\n", *sections]) if sections else ""


def host_profiles(found: dict[str, Any]) -> str:
    kinds = next(iter(found.values()))["parts_a_unit"]
    rows = []
    for name, each in found.items():
        face, where = each["settings"]["face"], "GPU" if each["settings"]["device"] == "cuda" else "CPU"
        ratio, floor = (figure["value"] for figure in each["figures"].values())
        parts = [each["parts_a_unit"][kind] for kind in kinds]
        row = [f"`{face}`, {where}, beside {each['peer']}"]
        row += [f"{part['us']:.0f} ({part['of_peer']:.3f})" for part in parts]
        row += [f"{each['overhead_us_a_unit']['shardwise']:.0f} ({ratio:.3f})", f"{floor:.3f}", link(name)]
        rows.append(row)
    return markdown(
        "Host time that sharding adds to a forward and backward, in µs a unit; in brackets, as a part of what the peer "
        "adds. *Floor*: the ratio of a library that makes the same calls and copies and does nothing else, by what a "
        "step of ours takes less without them; the model around them then runs faster, too.",
        ["host", *kinds, "all", "floor", "file"],
        rows,
    )


def step_profiles(found: dict[str, Any]) -> str:
    rows, reasons = [], {}
    for name, each in found.items():
        model = each["settings"]["model"] + (", captured" if each["settings"]["captured"] else "")
        for who, reasons in each["longer_than_plain_ms"].items():
            tables = [each["ms_a_step"][which] for which in ("plain", who)]
            beside = tables[1]["beside"]
            kinds = ", ".join(f"{kind} {taken:.2f}" for kind, taken in beside["kinds"].items())
            row = [f"{model}: {who}", *(f"{table['compute']['from first to last']:.2f}" for table in tables)]
            row += [f"{taken:+.2f}" for taken in reasons.values()]
            row += [f"{beside['busy']:.2f}: {kinds}", f"{beside['while compute is busy']:.2f}", link(name)]
            rows.append(row)
    return markdown(
        "A GPU's step in ms, from compute's first kernel to its last: how much longer than plain's, and by what; what "
        "runs beside compute, and how long both run at once. Being profiled makes steps longer, most of all by gaps.",
        ["step", "plain", "own", *reasons, "beside compute", "at once", "file"],
        rows,
    )


def link(name: str) -> str:
    return f"[{name}](results/{name}.json)"


def markdown(about: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join([textwrap.fill(about, 118), "", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def page() -> str:
    """Returns the README with current tables."""
    text = README.read_text()
    for begin, end, content in ((BEGIN, END, table()), (PROFILES_BEGIN, PROFILES_END, profiles())):
        before, rest = text.split(begin)
        text = before + begin + content + end + rest.split(end)[1]
    return text


def main() -> int:
    if "--check" in sys.argv:
        current = README.read_text() == page() and PLOT.exists() and PLOT.read_text() == plot()
        print("current" if current else "out of date: python benchmarks/report.py")
        return 0 if current else 1
    README.write_text(page())
    PLOT.write_text(plot())
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
