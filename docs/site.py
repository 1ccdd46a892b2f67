"""Which files the site is made of; mkdocs calls it (mkdocs.yml, ``make docs``).

Pages are the repository's own Markdown files under their own paths, so that links which work in the repository work on
the site. API pages are one line per public name, which mkdocstrings replaces by signature and docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PLACES = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/*.svg",
    "docs/*.png",
    "benchmarks/README.md",
    "benchmarks/results/*",
    "examples/*.py",
)
API = ("shardwise", *(f"shardwise.{name}" for name in ("trace", "optim", "checkpoint", "train", "testing")))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for place in PLACES for path in root.glob(place)):
        name = path.relative_to(root).as_posix()
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    for module in API:
        content = "\n\n".join(
            [f"# {module}", *(f"::: {module}.{name}" for name in public_names(root, module))]
        )
        files.append(File.generated(config, f"api/{module}.md", content=content))
    return files


def public_names(root: Path, module: str) -> Iterator[str]:
    """What a module's ``__all__`` lists, but for modules, read without importing it."""
    path = root.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
            inside = {child.stem for child in path.iterdir()} if path.is_dir() else set()
            yield from (name for name in names if not name.startswith("__") and name not in inside)
