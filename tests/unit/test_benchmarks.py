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


def test_a_figure_without_a_target_is_told_and_not_judged(monkeypatch):
    report = load_report()
    question = report.Question("asked", "where", None, "file", ())
    monkeypatch.setattr(report, "QUESTIONS", [question])
    monkeypatch.setattr(report, "answer", lambda _: report.Answer(0.5, [0.4, 0.6], "a CPU"))
    assert "| asked | where | none | 0.500 | 0.400 to 0.600 |" in report.table()
    assert "asked" not in report.plot()


def test_every_benchmark_is_on_the_page():
    page = (BENCHMARKS / "README.md").read_text()
    shared = {"models.py", "measuring.py", "report.py"}
    for path in BENCHMARKS.glob("*.py"):
        assert f"`{path.name}`" in page or path.name in shared, path.name
    named = set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) - {"captured_step.py"}
    assert named <= {path.name for path in BENCHMARKS.glob("*.py")}
