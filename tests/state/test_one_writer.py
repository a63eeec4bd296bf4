"""Only ``ClusterWriter`` changes the state of the cluster: a write by a reader is a type error."""

import re
from collections.abc import Iterable
from pathlib import Path

from mypy import api

from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_parts import Parts
from headroom.core.placement.policy import Rules
from tests.controlplane import ROOT

READER = """
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster

def read(cluster: Cluster, pod: Pod) -> object:
    return cluster.holds.nominees(0.0), cluster.budgets.unlisted, cluster.overuses.lasting

def write(cluster: Cluster, pod: Pod) -> None:
"""
WRITES = {
    "cluster.apply([])": "apply",
    "cluster.settle()": "settle",
    "cluster.holds.end('uid', 'n')": "end",
    "cluster.holds.assume": "assume",
    "cluster.overuses.update(0.0)": "update",
    "cluster.neighbours.pod_seen(pod, True)": "pod_seen",
    "cluster.budgets.unlisted = False": "unlisted",
    "cluster.gpu_users = {}": "gpu_users",
    "cluster.market = None": "market",
}


def checked(lines: Iterable[str], folder: Path) -> dict[int, str]:
    """Return the message of mypy for each of these lines of a function that has a ``Cluster``."""
    module, cache = folder / "reader.py", Path(ROOT, ".mypy_cache", "readers")
    module.write_text(READER + "".join(f"    {line}\n" for line in lines))
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(cache)]
    found, errors, _ = api.run([*options, str(module)])
    assert not errors
    said = re.findall(r"reader\.py:(\d+): (?:error|note): (.*)", found)
    return {int(number) - READER.count("\n") - 1: text for number, text in said}


def test_mypy_rejects_only_writes_by_readers(tmp_path: Path) -> None:
    said = checked(WRITES, tmp_path)
    assert said.keys() == set(range(len(WRITES)))
    for number, name in enumerate(WRITES.values()):
        assert f'"{name}"' in said[number]


def test_readers_see_each_part_by_a_protocol(tmp_path: Path) -> None:
    cluster = Cluster(Parts(Rules(), 1.0, 0.0, ()))
    shown = [name for name in vars(cluster) if not name.startswith("_")]
    said = checked([f"reveal_type(cluster.{name})" for name in shown], tmp_path)
    protocols = {name: text for name, text in zip(shown, said.values(), strict=True)}
    assert len(protocols) > 10
    for name, text in protocols.items():
        assert '"headroom.core.cluster.readers.' in text or "Mapping[" in text, name
