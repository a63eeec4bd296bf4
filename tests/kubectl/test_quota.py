"""Tests that `kubectl headroom quota` lists quotas of GPU memory."""

from pathlib import Path
from typing import Any

from tests.kubectl.fake_cluster import serving_fake
from tests.kubectl.transcripts import run

GIB = 1 << 30


def row(name: str, used: float, hard: float) -> dict[str, Any]:
    return {
        "namespace": "team-a",
        "name": name,
        "resource": "requests.headroom.gpu/vram-bytes",
        "hard_bytes": int(hard * GIB),
        "used_bytes": int(used * GIB),
        "reserved_bytes": 12 * GIB,
    }


def test_used_hard_and_reserved_memory_are_shown(tmp_path: Path) -> None:
    with serving_fake(tmp_path) as (cluster, kubeconfig):
        command = "--kubeconfig", kubeconfig, "quota"
        cluster.answers["GET", "/v1/quotas"] = 200, {"quotas": [row("gpu", 20, 64), row("x", 8, 4)]}
        shown = run(cluster.url, *command, "-A")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.splitlines() == [
            "NAMESPACE  QUOTA      USED      HARD      LEFT  RESERVED",
            "team-a     gpu    20.0 GiB  64.0 GiB  44.0 GiB  12.0 GiB",
            "team-a     x       8.0 GiB   4.0 GiB   0.0 GiB  12.0 GiB",
        ]
        cluster.answers["GET", "/v1/quotas"] = 200, {"quotas": []}
        none = run(cluster.url, *command, "-n", "ml")
        assert none.stderr == (
            "no ResourceQuota of namespace ml limits GPU memory; -A shows all namespaces\n"
        )
