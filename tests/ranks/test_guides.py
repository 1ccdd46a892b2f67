"""The tutorial, the guides and the commands of all pages run as printed, on two ranks.

Blocks of a page run one after the other, in one folder and one namespace. A Python block that begins with the name of
a file is also written to it. Training commands run on the ranks that are there, with fewer steps; what needs other
machines or packages says so in a comment above it, and is only parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from shardwise.cli import main, request_of
from shardwise.cli import parser as command_line
from shardwise.testing import run_ranks
from shardwise.train import evaluation, generate
from shardwise.train.command import opened_run_folder, resolve, train_on_rank
from shardwise.train.team import Team
from shardwise.train.watch import WatchServer, run_facts

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "docs" / "tutorial.md", *sorted((REPOSITORY / "docs" / "guides").glob("*.md"))]
# Pages whose Python is run by test_docs.py; their commands are run here.
OTHERS = [
    REPOSITORY / "README.md",
    *(REPOSITORY / "docs" / f"{name}.md" for name in ("fully_shard", "trust", "wrapper", "zero")),
]
NOT_RUN = "<!-- not run:"
FEWER = (
    "train.steps=3",
    "evaluate.batches=1",
    "checkpoint.every=0",
    "train.batch_size=4",
    "output.show=quiet",
)
ON_ALL_RANKS = ("generate", "eval")
SMALLER = ("model.layers=2", "model.width=16", "model.heads=2", "model.kv_heads=2", "model.context=48")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    runs: bool


def blocks_of(path):
    found, block, before, begins = [], None, "", ("", 0)
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if block is not None:
            if line == "```":
                runs = not before.startswith(NOT_RUN)
                found.append(Block(path.name, begins[1], begins[0], "\n".join(block), runs))
                block = None
            else:
                block.append(line)
        elif line.startswith("```"):
            block, begins = [], (line[3:], number + 1)
        elif line:
            before = line
    return found


def commands_of(block):
    """The words of each shardwise command of a shell block, whatever starts it."""
    for line in block.text.replace("\\\n", " ").split("\n"):
        words = shlex.split(line, comments=True)
        if "shardwise" in words:
            yield words[words.index("shardwise") + 1 :]


def run_page(blocks, folder, patch):
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    namespace = {"__name__": "example"}
    for block in blocks:
        if block.language == "python" and block.runs:
            if file := re.match(r"# (\w+\.py)\n", block.text):
                (folder / file[1]).write_text(block.text)
                dist.barrier()
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, block.page, "exec"), namespace)
            dist.barrier()
        elif block.language == "sh" and block.runs:
            for words in commands_of(block):
                run_command(words)


def run_command(words):
    if ">" in words:
        *words, _, target = words
        if dist.get_rank() == 0:
            with open(target, "w") as file, contextlib.redirect_stdout(file):
                assert main(words) == 0
        dist.barrier()
        return
    options = command_line().parse_args(words)
    if words[0] == "train" and not (options.lists or options.dry_run):
        request = request_of(options)
        is_built_in = request.recipe == "tiny" or request.recipe is None
        settings = (*request.settings, *FEWER, *(SMALLER if is_built_in else ()))
        request = dataclasses.replace(request, settings=settings)
        team = Team()
        with contextlib.ExitStack() as stack:
            request, folder = team.from_first(lambda: stack.enter_context(opened_run_folder(request)))
            train_on_rank(request, folder, torch.device("cpu"), team)
    elif dist.get_rank() == 0 or words[0] in ON_ALL_RANKS:
        assert main(words) == 0
    dist.barrier()


def run_pages(pages, others, folder):
    with pytest.MonkeyPatch.context() as patch:
        for module in (generate, evaluation):
            patch.setattr(
                module, "run_model_ranks", lambda work, ranks, device: work(torch.device("cpu")) or 0
            )
        for path in pages:
            run_page(blocks_of(path), Path(folder) / path.stem, patch)
        for path in others:
            commands = [block for block in blocks_of(path) if block.language == "sh"]
            run_page(commands, Path(folder) / path.stem, patch)


def test_the_tutorial_the_guides_and_all_commands_run(tmp_path):
    run_ranks(run_pages, 2, PAGES, OTHERS, str(tmp_path), kind="gloo")
    assert (tmp_path / "tutorial" / "exported" / "model.safetensors").exists()
    assert (tmp_path / "README" / "exported" / "model.safetensors").exists()
    assert (tmp_path / "own_model" / "runs" / "mine" / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_is_what_a_newcomer_types(tmp_path):
    """Every command in a process of its own, with a fifth of the steps; then the page that shows how it learned."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}
    said = {}
    for block in blocks_of(REPOSITORY / "docs" / "tutorial.md"):
        if not block.runs:
            continue
        if block.language == "python":
            (tmp_path / "texts.py").write_text(block.text)
            lines = ["python texts.py"]
        else:
            lines = block.text.replace("1500", "300").split("\n")
        for line in lines:
            words = shlex.split(line, comments=True)
            words = [sys.executable, *(["-m", "shardwise"] if words[0] == "shardwise" else []), *words[1:]]
            done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stderr)
            said[line.partition("#")[0].strip()] = done.stdout
    assert "finished at step 300 of 300" in said["shardwise runs runs/first"]
    loss, tokens = re.findall(r"loss ([\d.]+) .* (\d+) tokens", said["shardwise eval runs/first"])[0]
    assert float(loss) < 3.0
    assert int(tokens) > 20_000
    text = said['shardwise generate runs/first "The statement " --max-tokens 200']
    assert text.startswith("The statement ")
    assert sum(letter.isalpha() or letter.isspace() for letter in text) > len(text) / 2
    server = WatchServer([tmp_path / "runs"])
    try:
        facts = {path.name: run_facts(path) for path in server.runs()}
    finally:
        server.server_close()
    assert facts["first"]["step"] == 300
    assert set(facts) == {"first", "second", "third", "fourth", "fifth"}


def test_what_does_not_run_is_python_all_the_same():
    for path in PAGES:
        for block in blocks_of(path):
            if block.language == "python" and not block.runs:
                compile(block.text, block.page, "exec")


def test_every_command_of_every_page_is_one_that_exists(monkeypatch):
    seen = 0
    for path in [*PAGES, *OTHERS]:
        for block in blocks_of(path):
            for words in commands_of(block) if block.language == "sh" else ():
                options = command_line().parse_args(words[: words.index(">")] if ">" in words else words)
                seen += 1
                if (
                    words[0] == "train"
                    and not re.search(r"\.py:|\.toml$", options.recipe or "")
                    and options.resume is None
                ):
                    resolve(request_of(options))
    assert seen > 15


def all_blocks():
    pages = [path for place in ("*.md", "docs/**/*.md", "benchmarks/*.md") for path in REPOSITORY.glob(place)]
    return [(path, block) for path in pages for block in blocks_of(path)]


def test_no_block_of_code_is_left_out():
    for path, block in all_blocks():
        where = f"{block.page}:{block.line}"
        assert block.language in ("python", "sh", "diff", "text", "yaml"), f"{where}: what is it?"
        if block.language == "python":
            assert path in [*PAGES, *OTHERS], f"{where}: no test runs it"
        if block.language == "text" and path.name != "reference.md":
            commands = re.findall(
                r"^(?:\$ )?(?:shardwise|make|pip|python|torchrun) .*", block.text, re.MULTILINE
            )
            assert not commands, f"{where}: {commands} are commands, mark them sh"


def test_every_shell_block_is_shell():
    for _, block in all_blocks():
        if block.language == "sh":
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert done.returncode == 0, f"{block.page}:{block.line}: {done.stderr}"


def test_slurm_has_accepted_the_options_of_the_jobs():
    """`tests/soak/slurm.py` asks a real one, and writes down what it was asked."""
    page = (REPOSITORY / "docs" / "guides" / "slurm.md").read_text()
    accepted = json.loads((REPOSITORY / "benchmarks" / "results" / "slurm.json").read_text())["accepted"]
    printed = re.findall(r"^#SBATCH (.+)$", page, re.MULTILINE)
    assert printed == [option for options in accepted.values() for option in options]


def test_what_a_diff_adds_is_python_and_its_imports_work():
    seen = 0
    for _, block in all_blocks():
        if block.language == "diff":
            added = "\n".join(line[1:] for line in block.text.split("\n") if not line.startswith("-"))
            compile(added, block.page, "exec")
            imports = [line for line in added.split("\n") if line.startswith("from ")]
            exec("\n".join(imports), {})
            seen += len(imports)
    assert seen >= 3


def test_make_pip_and_python_are_given_what_exists():
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    project = (REPOSITORY / "pyproject.toml").read_text()
    extras = set(
        re.findall(r"^(\w+) = \[", project.split("optional-dependencies]")[1].split("\n[")[0], re.MULTILINE)
    )
    pages = [path for place in ("*.md", "docs/**/*.md", "benchmarks/*.md") for path in REPOSITORY.glob(place)]
    text = "\n".join(path.read_text() for path in pages if path.name != "CHANGELOG.md")
    code = re.findall(r"`([^`\n]+)`", text) + [
        line for _, block in all_blocks() for line in block.text.split("\n")
    ]
    made, wanted, scripts = set(), set(), set()
    for line in code:
        if found := re.match(r"make ((?:[a-z-]+ ?)+)", line):
            made.update(found[1].split())
        wanted.update(re.findall(r"\.\[([\w,]+)\]", line))
        scripts.update(re.findall(r"python (?:-m )?((?:tests|benchmarks|examples)[\w./]+)", line))
    assert made <= targets, made - targets
    assert len(made) > 8
    assert {name for names in wanted for name in names.split(",")} <= extras
    for script in scripts:
        path = REPOSITORY / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
        assert path.exists(), script


@pytest.mark.slow
def test_the_readmes_program_runs_under_torchrun(tmp_path):
    (program,) = [
        block.text for block in blocks_of(REPOSITORY / "README.md") if "init_process_group" in block.text
    ]
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (.+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 2


def load_generator():
    spec = importlib.util.spec_from_file_location("make_reference", REPOSITORY / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name_and_every_setting():
    generator = load_generator()
    written = (REPOSITORY / "docs" / "reference.md").read_text()
    headings = set(re.findall(r"^### (\w+)$", written, re.MULTILINE))
    missing = {name.rpartition(".")[2] for name, _ in generator.public_names()} - headings
    assert not missing, f"run make reference: {missing}"
    for name, value in generator.public_names():
        entry = written.split(f"\n### {name.rpartition('.')[2]}\n", 1)[1].split("\n### ")[0]
        members = "".join(generator.members_of(value)) if inspect.isclass(value) else ""
        missing = {
            member
            for member in re.findall(r"^- `(\w+)", members, re.MULTILINE)
            if f"- `{member}" not in entry
        }
        assert not missing, f"run make reference: {name} lacks {missing}"
    settings = set(re.findall(r"^\| `(\w+\.\w+)` \|", written, re.MULTILINE))
    from shardwise.train.config import Config
    from shardwise.train.settings import settings_of

    assert {name for name, _, _ in settings_of(Config()) if "." in name} == settings
