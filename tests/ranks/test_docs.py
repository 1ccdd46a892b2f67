"""The examples in README.md, docs/fully_shard.md and docs/wrapper.md run as they are printed.

A page's first block is what all of its blocks begin with; each other block runs by itself after it, on two ranks. An
example's line numbers in a traceback are those of its page.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.testing import run_ranks

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
GUIDE = REPOSITORY / "docs" / "fully_shard.md"
COMPILED_ONLY = "<!-- compiled only:"


class Example(NamedTuple):
    """A block of Python on a page: the heading above it, its first line there, and whether it is to be run."""

    page: str
    heading: str
    line: int
    source: str
    runs: bool

    def code(self, *left_out):
        """The example, compiled; lines that begin with ``left_out`` must be there, and are not run."""
        lines = self.source.split("\n")
        for start in left_out:
            assert any(line.startswith(start) for line in lines), f"{self.page} has no line {start}..."
        kept = ["" if line.startswith(left_out or ("\0",)) else line for line in lines]
        return compile("\n" * (self.line - 1) + "\n".join(kept), self.page, "exec")


def examples(path):
    found, block = [], None
    heading, previous, begins = "", "", 0
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if block is not None:
            if line == "```":
                runs = not previous.startswith(COMPILED_ONLY)
                found.append(Example(path.name, heading, begins, "\n".join(block), runs))
                block = None
            else:
                block.append(line)
        elif line == "```python":
            block, begins = [], number + 1
        elif not line.startswith("```"):
            heading = line.lstrip("# ") if line.startswith("#") else heading
            previous = line
    return found


def example_under(heading):
    (example,) = [example for example in examples(README) if example.heading == heading]
    return example


def names_of(guide):
    """A name for each example: its heading, numbered where there are several."""
    seen = {}
    for example in guide:
        seen[example.heading] = seen.get(example.heading, 0) + 1
        yield f"{re.sub('[^a-z]+', '-', example.heading.lower())}-{seen[example.heading]}"


def run_example(first, example, folder):
    namespace = {"__name__": "example"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(first.code(), namespace)
        exec(example.code(), namespace)


FIRST, *GUIDE_EXAMPLES = examples(GUIDE)


@pytest.mark.parametrize("example", GUIDE_EXAMPLES, ids=names_of(GUIDE_EXAMPLES))
def test_the_guides_examples_run(example, tmp_path):
    if example.runs:
        run_ranks(run_example, 2, FIRST, example, tmp_path, kind="gloo")
    else:
        example.code()


def run_pages(pages, folder):
    """Their examples in turn, each after its page's first lines and with a namespace of its own."""
    trusted = shardwise.set_trust()
    try:
        for first, *rest in pages:
            for example in rest:
                run_example(first, example, folder)
    finally:
        shardwise.set_trust(**dataclasses.asdict(trusted))


def test_the_other_guides_examples_run(tmp_path):
    pages = [examples(REPOSITORY / "docs" / name) for name in ("wrapper.md", "zero.md", "trust.md")]
    assert all(len(page) > 5 for page in pages)
    run_ranks(run_pages, 2, pages, tmp_path, kind="gloo")


def run_readme(folder):
    """The training example, then what the page says about the model it leaves behind."""
    namespace = {"__name__": "example"}
    # The group is there already, as it must be for whatever comes after.
    exec(
        example_under("In a program of your own").code(
            "dist.init_process_group", "dist.destroy_process_group"
        ),
        namespace,
    )
    loss = namespace["loss"].detach()
    dist.all_reduce(loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(example_under("See what a step does").code(), namespace)
    gathers = namespace["recorder"].of("unshard")
    namespace["model"] = torch.nn.Linear(8, 8)
    exec(example_under("ZeroRedundancyOptimizer").code(), namespace)
    return loss.item() / dist.get_world_size(), gathers


def test_the_readmes_examples_run_and_train(tmp_path):
    for loss, gathers in run_ranks(run_readme, 2, tmp_path, kind="gloo"):
        assert loss < 0.1  # it begins above 0.2
        assert gathers[:2] == [("unshard", "0", "forward"), ("unshard", "2", "forward")]
    assert (tmp_path / "step.json").exists()


def test_the_readmes_test_passes(tmp_path, monkeypatch):
    name = "test_of_the_readme"
    (tmp_path / f"{name}.py").write_text(example_under("Test your own sharded code").source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    module.test_every_rank_computes_the_same()


def pages():
    return [path for place in ("*.md", "docs/**/*.md", "benchmarks/*.md") for path in REPOSITORY.glob(place)]


def prose_of(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """What a link may name on a page: its headings in lower case, words joined by hyphens, without other signs."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    links = [
        (page, *target.partition("#")[::2])
        for page in pages()
        for target in re.findall(r"\]\(([^)]+)\)", prose_of(page))
        if not target.startswith(("http:", "https:"))
    ]
    assert len(links) > 50
    for page, target, anchor in links:
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(path), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_sites_navigation():
    listed = set(
        re.findall(
            r"^ +- (?:[^:\n]+: )?([\w./]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE
        )
    )
    listed = {name for name in listed if not name.startswith("api/")}
    assert listed == {str(page.relative_to(REPOSITORY)) for page in pages()}


def test_paragraphs_are_wrapped():
    long = [
        f"{page.name}: {line}"
        for page in pages()
        for line in prose_of(page).split("\n")
        if len(line) > 120 and not line.startswith(("|", "!["))
    ]
    assert not long, long


def test_the_architecture_is_short_and_drawn():
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    assert text.count("\n") <= 250, "move what is too much to docs/design"
    assert text.count("\n```text\n") == 3


def test_files_that_the_design_names_exist():
    text = design()
    files = set(re.findall(rf"`((?:{'|'.join(packages())})/[\w/]*(?:\.py)?)`", text))
    tests = set(re.findall(r"`(test_\w+\.py|tests/\w+/\w+\.py)`", text))
    assert len(files) > 50
    assert len(tests) > 50
    missing = [name for name in files if not (REPOSITORY / "shardwise" / name).exists()]
    for test in tests:
        where = REPOSITORY / test if "/" in test else REPOSITORY / "tests" / "ranks" / test
        if not where.exists():
            missing.append(test)
    assert not missing, missing


def packages():
    return [path.parent.name for path in (REPOSITORY / "shardwise").glob("*/__init__.py")]


def design():
    """ARCHITECTURE.md and the pages of docs/design, but for the one that is generated."""
    pages = sorted(path for path in (REPOSITORY / "docs" / "design").glob("*.md") if path.name != "files.md")
    return "".join(path.read_text() for path in [REPOSITORY / "ARCHITECTURE.md", *pages])


def test_the_packages_are_drawn_as_they_are():
    picture = (REPOSITORY / "ARCHITECTURE.md").read_text().split("## The packages")[1].split("```")[1]
    for name in packages():
        assert re.search(rf"\b{name}\b", picture), name


def test_every_file_is_on_the_page_of_files():
    listed, folder = set(), ""
    for line in (REPOSITORY / "docs" / "design" / "files.md").read_text().split("\n"):
        if line.startswith("## "):
            folder = line[3:]
        elif found := re.match(r"\| `(\w+\.py)` \| .+ \|$", line):
            listed.add(f"{folder}/{found[1]}")
    paths = (REPOSITORY / "shardwise").rglob("*.py")
    real = {str(path.relative_to(REPOSITORY)) for path in paths if not path.name.startswith("__")}
    assert listed == real, "run: make reference"


def test_nothing_uses_codes_that_only_a_specification_explains():
    sources = [
        path for place in ("shardwise", "tests", "benchmarks") for path in (REPOSITORY / place).rglob("*.py")
    ]
    for path in [*pages(), *sources]:
        assert not re.findall(r"\b(?:FS|WR|ZO|BY)\d+\b", path.read_text()), path.name


def defined_names(package):
    """Every class and function of the library, and ``Class.member`` for what is defined in a class."""
    names = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names.update(f"{node.name}.{member}" for member in members_of(node))
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
    return names


def members_of(cls):
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def test_names_that_the_design_uses_are_defined():
    names = defined_names(REPOSITORY / "shardwise")
    quoted = re.findall(r"`([\w.]+)`", design())
    used = {name for name in quoted if re.match(r"[A-Z]\w+\.\w+$", name) and name != "ARCHITECTURE.md"}
    assert len(used) > 15
    assert not used - names, used - names


def test_objects_are_defined_in_the_files_that_the_picture_names():
    picture = (REPOSITORY / "ARCHITECTURE.md").read_text().split("## The objects")[1].split("```")[1]
    drawn = re.findall(r"^\W*([A-Z]\w+)\b.* ([\w/]+\.py)$", picture, re.MULTILINE)
    assert len(drawn) > 10
    for name, file in drawn:
        source = (REPOSITORY / "shardwise" / file).read_text()
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"{name} is not in {file}"


def test_the_files_to_read_first_are_as_long_as_it_says():
    text = (REPOSITORY / "ARCHITECTURE.md").read_text().split("## Reading order")[1].split("\n## ")[0]
    files = re.findall(r"^\d\. `([\w/]+\.py)`", text, re.MULTILINE)
    assert len(files) == 8
    (said,) = re.findall(r"([\d,]+) lines", text)
    real = sum((REPOSITORY / "shardwise" / file).read_text().count("\n") for file in files)
    assert abs(real - int(said.replace(",", ""))) < 300, real
