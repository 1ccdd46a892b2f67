"""The manifest of the guide fits the API of Kubeflow's training operator, and its command does what the guide says."""

from __future__ import annotations

import re

import pytest

from tests.ecosystem.beside import REPOSITORY
from tests.ranks.test_guides import blocks_of

GUIDE = REPOSITORY / "docs" / "guides" / "kubernetes.md"


@pytest.fixture
def manifest():
    yaml = pytest.importorskip("yaml")
    (block,) = [block for block in blocks_of(GUIDE) if block.language == "yaml"]
    return yaml.safe_load(block.text)


def misfits(value, kind, where=""):
    """What in a value the API does not know, or wants otherwise."""
    from kubeflow.training import models
    from kubernetes.client import models as core

    if container := re.fullmatch(r"(list|dict)[\[(](?:str, )?(.+)[\])]", kind):
        if type(value).__name__ != container[1]:
            return [f"{where}: {value!r} is no {container[1]}"]
        items = value.items() if container[1] == "dict" else enumerate(value)
        return [found for key, item in items for found in misfits(item, container[2], f"{where}.{key}")]
    if kind in ("str", "int", "bool"):
        return [] if type(value).__name__ == kind else [f"{where}: {value!r} is no {kind}"]
    model = getattr(models, kind, None) or getattr(core, kind)
    by_key = {key: name for name, key in model.attribute_map.items()}
    found = [f"{where}: unknown: {key}" for key in value.keys() - by_key.keys()]
    for key in value.keys() & by_key.keys():
        found += misfits(value[key], model.openapi_types[by_key[key]], f"{where}.{key}")
    given = {by_key[key]: item for key, item in value.items() if key in by_key}
    try:
        # The constructor knows which entries there must be.
        model(**given)
    except ValueError as error:
        found.append(f"{where}: {error}")
    return found


def test_the_manifest_fits_the_operators_api(manifest):
    pytest.importorskip("kubeflow.training")
    for limits in [
        manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]
    ]:
        # Quantities may be numbers; the client's type is that of their text.
        limits["limits"] = {name: str(quantity) for name, quantity in limits["limits"].items()}
    assert misfits(manifest, "KubeflowOrgV1PyTorchJob") == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "elasticPolicy", "maxRestart"), 3),
        (("spec", "elasticPolicy", "maxReplicas"), "2"),
        (("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "container"), []),
        (("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers"), [{"image": "any"}]),
    ],
)
def test_a_manifest_that_does_not_fit_is_noticed(manifest, path, value):
    pytest.importorskip("kubeflow.training")
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert misfits(manifest, "KubeflowOrgV1PyTorchJob")


def test_the_command_is_one_that_exists(manifest):
    from shardwise.cli import parser

    container = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    words = container["command"]
    options = parser().parse_args(words[words.index("shardwise") + 1 :])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert options.auto_resume
    assert options.out.startswith(mounts["runs"])
