"""Each program runs the selected cases; what they found goes into a file with versions and the date."""

import json
import os
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.ecosystem.beside import Beside

# Which libraries a file of tests tries. Guides are tried with all of them, and count for none.
LIBRARIES = {
    "test_accelerate.py": ("accelerate",),
    "test_bitsandbytes.py": ("bitsandbytes",),
    "test_lightning.py": ("lightning",),
    "test_ray.py": ("ray",),
    "test_torchao.py": ("torchao",),
    "test_torchtitan.py": ("torchtitan",),
    "test_transformers.py": ("transformers",),
    "test_trl.py": ("trl", "peft"),
}
_outcomes: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module")
def beside(request, tmp_path_factory):
    """Returns the ``Beside`` of a program."""
    made = {}

    def get(program):
        if program not in made:
            chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            cases = [params["case"] for params in chosen if params.get("program") == program]
            made[program] = Beside(program, tmp_path_factory.mktemp(program), list(dict.fromkeys(cases)))
        return made[program]

    return get


def pytest_runtest_logreport(report):
    file, _, name = report.nodeid.partition("::")
    if report.when == "call" or report.failed:
        _outcomes.setdefault(Path(file).name, {})[name] = report.outcome


def pytest_sessionfinish():
    """Writes the results file that ``ECOSYSTEM_RESULTS`` names; libraries that were not tried keep their entry."""
    file = os.environ.get("ECOSYSTEM_RESULTS")
    if not file:
        return
    path = Path(file)
    results = json.loads(path.read_text()) if path.exists() else {}
    for tests, libraries in LIBRARIES.items():
        for library in libraries if tests in _outcomes else ():
            outcomes = _outcomes[tests].values()
            results[library] = {
                "version": version(library),
                "torch": torch.__version__.partition("+")[0],
                "date": datetime.now(timezone.utc).date().isoformat(),
                "passed": sum(outcome == "passed" for outcome in outcomes),
                "failed": sum(outcome == "failed" for outcome in outcomes),
                "tests": dict(_outcomes[tests]),
            }
    path.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
