"""Checks that API servers of the three newest minor versions accept every rendered object."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy import foreign
from tests.deploy.rendered import (
    COMPONENTS,
    DEPLOY,
    PLATFORMS,
    objects,
    overlay,
    with_components,
)
from tests.deploy.schemas import MINORS, mistakes, serves
from tests.processes import starts_processes

pytestmark = pytest.mark.slow

#: Kinds of other projects, which are not built into the API server.
FOREIGN = foreign.KINDS


def all_objects(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of all overlays and components. The chart renders the same objects
    (test_rendered.py).
    """
    texts = [overlay(DEPLOY / "overlays" / platform) for platform in PLATFORMS]
    apart = {"privileged"}  # This component conflicts with other components.
    for name, components in (
        ("one", {*apart, "../default-scheduler"}),
        ("all", COMPONENTS.keys() - apart),
    ):
        (folder / name).mkdir()
        texts.append(with_components(folder / name, sorted(components)))
    different = {str(each): each for text in texts for each in objects(text).values()}
    return list(different.values())


@pytest.fixture(scope="module")
@starts_processes
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return all_objects(tmp_path_factory.mktemp("rendered"))


@pytest.mark.parametrize("minor", MINORS)
def test_every_object_satisfies_the_schemas(minor: str, rendered: list[dict[str, Any]]) -> None:
    checked = 0
    for each in rendered:
        what = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] in FOREIGN:
            assert not serves(minor, each), what
            continue
        assert mistakes(minor, each) == [], what
        checked += 1
    assert checked > 60


@pytest.mark.parametrize("minor", MINORS)
def test_the_schemas_reject_unknown_fields(minor: str) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a", "lables": {}},
        "spec": {"containers": [{"name": "a", "ports": [{"containerPort": "80"}]}]},
    }
    shown = "\n".join(mistakes(minor, pod))
    assert "'lables' was unexpected" in shown
    assert "$.spec.containers[0].ports[0].containerPort: '80' is not of type 'integer'" in shown
