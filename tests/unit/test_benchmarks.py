"""The benchmarks' page says what the results files say."""

import importlib.util
import json
import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_report():
    spec = importlib.util.spec_from_file_location("benchmarks_report", BENCHMARKS / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_and_the_plot_are_made_from_the_results_as_they_are():
    report = load_report()
    assert report.README.read_text() == report.page(), "run: python benchmarks/report.py"
    assert report.PLOT.read_text() == report.plot(), "run: python benchmarks/report.py"


def test_a_figure_is_found_in_its_results_file(tmp_path):
    report = load_report()
    question = next(each for each in report.QUESTIONS if each.file == "clip_cpu")
    assert report.answer(question, tmp_path) is None
    machine = {"gpu": None, "cpu": "a CPU", "torch": "2.11"}
    figures = {"shardwise / plain": {"value": 0.9, "by_round": [0.8, 1.0]}}
    (tmp_path / "clip_cpu.json").write_text(json.dumps({"machine": machine, "figures": figures}))
    assert report.answer(question, tmp_path) == (0.9, [0.8, 1.0], "a CPU, torch 2.11")


def test_a_figure_without_a_target_is_reported_and_not_judged(monkeypatch):
    report = load_report()
    question = report.Question("asked", "where", None, "file", ())
    monkeypatch.setattr(report, "QUESTIONS", [question])
    monkeypatch.setattr(report, "answer", lambda _: report.Answer(0.5, [0.4, 0.6], "a CPU"))
    assert "| asked | where | none | 0.500 | 0.400 to 0.600 |" in report.table()
    assert "asked" not in report.plot()


def test_the_plot_cuts_no_label_and_marks_every_bar_that_it_breaks(monkeypatch):
    report = load_report()
    plotted = [each for each in report.QUESTIONS if each.target is not None]
    # At this size a letter of a wide font takes 7.5 points, a bold one 8.5.
    assert all(len(each.where) * 7.5 < report.LABELS - 12 for each in plotted)
    assert all(len(each.asked) * 8.5 < report.LABELS + report.BAR for each in plotted)
    for value, breaks in ((0.05, 0), (0.15, 0), (0.25, 2)):
        monkeypatch.setattr(report, "QUESTIONS", [report.Question("asked", "where", 0.1, "file", ())])
        monkeypatch.setattr(report, "answer", lambda _, value=value: report.Answer(value, [], "a CPU"))
        drawn = report.plot()
        assert drawn.count("<path") == 2 + breaks  # the legend has two
        widths = [float(width) for width in re.findall(r'<rect x="330" y="\d+" width="([\d.]+)"', drawn)]
        assert widths == [round(min(value / 0.1, 2) * 210, 1)]
        assert ("2.5 ×" in drawn) == bool(breaks)


def test_every_benchmark_is_on_the_page():
    page = (BENCHMARKS / "README.md").read_text()
    shared = {"models.py", "measuring.py", "report.py"}
    for path in BENCHMARKS.glob("*.py"):
        assert f"`{path.name}`" in page or path.name in shared, path.name
    named = set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) - {"captured_step.py"}
    assert named <= {path.name for path in BENCHMARKS.glob("*.py")}


def of_host(result):
    ratios = (result["overhead_ratio"], result.get("overhead_ratio_joined"))
    return [f"{ratio['wall']['of_medians']:.2f}" for ratio in ratios if ratio]


def figures(*names):
    return lambda result: [f"{result['figures'][name]['value']:.2f}" for name in names]


def counts(*names):
    return lambda result: [str(result[name]) for name in names]


def of_architectures(result):
    apart = [max(each["from plain"].values()) for each in result["architectures"].values()]
    return [str(len(apart)), str(apart.count(0))]


def of_choices(result):
    chosen = [trial for trial in result["random"] if "refused" not in trial]
    failed = [trial for trial in chosen if trial["measured"]["ended"] != "ok"]
    return [f"{result['final']['1b']['chosen / fastest']:.2f}", str(len(chosen)), str(len(failed))]


# Which figures of a results file the pages quote, as they print them.
QUOTED = {
    "architectures": of_architectures,
    "auto_plan": of_choices,
    "async_save": lambda result: [f"{100 * result[name]:.1f}%" for name in ("cost", "cost_in_cpu_time")],
    "fuzz_faults": counts(
        "runs",
        "unreadable_checkpoints",
        "runs_that_lost_more_than_the_last_save",
        "runs_whose_first_error_was_not_first",
    ),
    "fuzz_files": lambda result: [str(result["cases"]), str(len(result["failures"]))],
    "fuzz_finds": lambda result: [str(sum(find["seed"] is not None for find in result["defects"].values()))],
    "fuzz_programs": counts("programs", "failed"),
    "gloo_step": figures("shardwise / FSDP2"),
    "gloo_step_deepspeed": figures("shardwise / FSDP2", "shardwise / DeepSpeed ZeRO-3", "shardwise / DDP"),
    "step_memory_8b_8_cuda": figures("shardwise / FSDP2: reserved"),
    "trust_cost_cpu": figures("on / off"),
    "trust_cost_cuda": figures("on / off"),
    "two_hosts": counts("nodes"),
    "whole_step_1b_fake_8": figures("shardwise / FSDP2"),
    "whole_step_1b_nccl_2": figures("shardwise / FSDP2"),
    "whole_step_8b_fake_8": figures("shardwise / FSDP2"),
    "zero_soak_gloo": counts("hangs", "steps_that_differ"),
}


def quoted_from(name):
    result = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    return (of_host if name.startswith("host_overhead") else QUOTED[name])(result)


def test_the_page_of_results_quotes_the_files_that_it_names():
    page = (BENCHMARKS.parent / "docs" / "results.md").read_text()
    rows = re.findall(
        r"^\| .+ \| (\S+) \| \[(\w+)\]\(\.\./benchmarks/results/(\w+)\.json\) \|$", page, re.MULTILINE
    )
    assert len(rows) == page.count("\n| ") - 2 > 20  # but for the heads of the two tables
    quotes = {}
    for value, name, file in rows:
        assert name == file
        quotes.setdefault(file, []).append(value)
    for file, values in quotes.items():
        assert values == quoted_from(file), file


def test_the_readme_quotes_six_figures_and_the_files_they_are_in():
    page = (BENCHMARKS.parent / "README.md").read_text().split("## Results")[1].split("\n## ")[0]
    quotes = re.findall(r"\| \[([^]]+)\]\(benchmarks/results/(\w+)\.json\) \|", page)
    assert len(quotes) == 6
    for value, file in quotes:
        assert value in quoted_from(file), file
