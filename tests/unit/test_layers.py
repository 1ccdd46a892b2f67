"""The package has layers, and imports only go down.

The rules are checked on the source, not by importing it. Each rule is also shown to catch small offenders, so
that none can pass by being blind.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shardwise"

# From the bottom up. Packages of one layer do not import each other.
LAYERS = [
    ("errors", "version"),
    ("policies", "trace", "torch_internals", "torch_threads"),
    ("cuda_driver",),
    ("planning", "comm"),
    ("engine",),
    ("optim",),
    ("training_step",),
    ("composable", "wrapper", "zero"),
    ("forward_methods",),
    ("checkpoint", "forecast"),
    ("train", "testing", "compat"),
    ("api", "cli"),
]
# Imported only where what it is made with, rich, is there.
IS_OPTIONAL = "shardwise.train.live"
# The doors to torch's underscore names.
DOORS = ("torch_internals", "torch_threads.py")
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

TORCHS_OWN_ANSWERS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
)

NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def imported_names(source: str, module: str) -> Iterator[str]:
    """Every dotted name a file imports, with the names taken from it; relative imports made absolute."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{origin}.{alias.name}"


def reached_names(source: str) -> Iterator[str]:
    """Every dotted name reached through an import, as in ``import torch; torch._C.x``."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        path = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in bound:
            yield ".".join([bound[node.id], *reversed(path)])


def climbs(source: str, module: str) -> list[str]:
    """Imports of ``shardwise`` that do not go down from ``module``."""
    here = module.split(".")[1]
    found = []
    for name in imported_names(source, module):
        parts = name.split(".")
        if parts[0] != "shardwise" or here in ("__init__", "__main__"):
            continue
        there = parts[1] if len(parts) > 1 else ""
        if there == here:
            continue
        # Everything else is the public API, which is for users.
        if there not in LAYER_OF or LAYER_OF[there] >= LAYER_OF[here]:
            found.append(name)
    return found


def impurities_of_plan(source: str, module: str) -> list[str]:
    """``planning`` decides with integers: no torch, and of shardwise only errors and itself."""
    found = []
    for name in imported_names(source, module):
        root, *rest = name.split(".")
        package = rest[0] if rest else ""
        if root == "torch" or (root == "shardwise" and package not in ("errors", "planning")):
            found.append(name)
    return found


def borrowed_answers(source: str, module: str) -> list[str]:
    """FSDP and ZeRO are what this library is; torch's are for tests and benchmarks to compare with."""
    names = [*imported_names(source, module), *reached_names(source)]
    return [name for name in names if name.startswith(TORCHS_OWN_ANSWERS)]


def imports_beside_torch(source: str, module: str) -> list[str]:
    """What a file needs to be imported and neither Python nor torch brings; functions ask for more when called."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    known = {*sys.stdlib_module_names, "torch", "shardwise"}
    return [
        name
        for name in imported_names(ast.unparse(tree), module)
        if name.split(".")[0] not in known or name.startswith(IS_OPTIONAL)
    ]


def underscores_of_torch(source: str, module: str) -> list[str]:
    names = [*imported_names(source, module), *reached_names(source)]
    return [
        name
        for name in names
        if name.split(".")[0] == "torch"
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts)


LIBRARY = sorted(PACKAGE.rglob("*.py"))


def found_in(paths: Iterable[Path], offences: Callable[[str, str], list[str]]) -> dict[str, list[str]]:
    """What each file does against a rule, by its module's name; of files that keep to it, nothing."""
    found = {module_of(path): offences(path.read_text(), module_of(path)) for path in paths}
    return {module: names for module, names in found.items() if names}


def test_imports_only_go_down():
    assert found_in(LIBRARY, climbs) == {}


def test_every_file_is_in_a_package_that_has_a_layer():
    packages = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in LIBRARY}
    assert packages - {"__init__", "__main__"} <= set(LAYER_OF)


def test_no_file_has_a_name_that_says_nothing():
    assert {path.stem for path in LIBRARY} & NAMES_THAT_SAY_NOTHING == set()


def test_plan_imports_no_torch_and_of_shardwise_only_errors():
    assert found_in((PACKAGE / "planning").rglob("*.py"), impurities_of_plan) == {}


def test_to_import_the_library_takes_torch_alone():
    assert found_in([path for path in LIBRARY if module_of(path) != IS_OPTIONAL], imports_beside_torch) == {}


def test_the_library_never_uses_torchs_own_fsdp_or_zero():
    # compat knows torch's own, as names to replace and types to be recognised by.
    others = [path for path in LIBRARY if path.relative_to(PACKAGE).parts[0] != "compat"]
    assert found_in(others, borrowed_answers) == {}


def test_torchs_underscore_names_are_used_behind_the_doors_alone():
    others = [path for path in LIBRARY if path.relative_to(PACKAGE).parts[0] not in DOORS]
    assert found_in(others, underscores_of_torch) == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.planning.rows", "from shardwise.engine import unit"),
        ("shardwise.planning.rows", "from ..engine.unit import Unit"),
        ("shardwise.planning.rows", "import shardwise.comm.mesh"),
        ("shardwise.comm.mesh", "def late():\n    from shardwise.composable import fully_shard"),
        ("shardwise.errors", "import shardwise.policies"),
        ("shardwise.engine.unit.unit", "from shardwise import testing"),
        ("shardwise.engine.unit.unit", "from shardwise import fully_shard"),
        ("shardwise.zero.optimizer", "from shardwise.wrapper.wrapper import FullyShardedDataParallel"),
    ],
)
def test_an_import_that_climbs_is_caught(module, source):
    assert climbs(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.engine.unit.unit", "from shardwise.planning.rows import plan_rows"),
        ("shardwise.engine.unit.unit", "from shardwise import torch_internals, trace"),
        ("shardwise.engine.unit.unit", "from .storage import Storage\nfrom ..errors import StateError"),
        ("shardwise.policies", "from shardwise.errors import ConfigError"),
        ("shardwise.engine.__init__", "from .unit import Unit"),
        ("shardwise.__init__", "from shardwise.composable.fully_shard import fully_shard"),
    ],
)
def test_an_import_that_goes_down_is_let_through(module, source):
    assert climbs(source, module) == []


@pytest.mark.parametrize(
    "source",
    ["import torch", "from torch import nn", "from shardwise.policies import X", "import shardwise.trace"],
)
def test_an_impure_plan_is_caught(source):
    assert impurities_of_plan(source, "shardwise.planning.rows")


def test_a_package_that_not_everybody_has_is_caught():
    here = "shardwise.train.loop"
    assert imports_beside_torch("import torch\nimport numpy as np", here) == ["numpy"]
    assert imports_beside_torch("def draw():\n    import numpy", here) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed import fsdp",
        "import torch.distributed.fsdp as peer",
        "import torch.distributed as dist\ndist.fsdp.fully_shard",
        "from torch.distributed._composable.fsdp import fully_shard",
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer",
        "from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step",
    ],
)
def test_torchs_own_fsdp_and_zero_are_caught(source):
    assert borrowed_answers(source, "shardwise.engine.unit.unit")


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch import _C",
        "from torch.utils._pytree import tree_flatten",
        "from torch.distributed.tensor import _api",
        "import torch\ntorch._foreach_copy_([], [])",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_group()",
    ],
)
def test_underscore_names_of_torch_are_caught(source):
    assert underscores_of_torch(source, "shardwise.engine.unit.unit")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "from torch.nn import Module",
        "self._x = 1",
        "import torch as t\nt.nn",
    ],
)
def test_public_names_of_torch_are_let_through(source):
    assert underscores_of_torch(source, "shardwise.engine.unit.unit") == []


def test_the_checks_see_the_library():
    assert PACKAGE / "errors.py" in LIBRARY
    assert PACKAGE / "testing" / "ranks.py" in LIBRARY
