"""Runs a short storm with a fixed seed on the real API server. ``make chaos`` runs a long one."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

from extender.ledger.kube_store import KubernetesStore
from headroom.contract.gpunode import GPUNodeSpec
from tests.chaos.__main__ import storm
from tests.chaos.altered import MUTANTS
from tests.chaos.faults import KINDS
from tests.chaos.site import SCHEDULERS, Plan
from tests.controlplane import built
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

#: A storm with few nodes and short timeouts, so short that it has each kind of fault only with some
#: seeds. kube-scheduler and extenders wait longer for binds than by default, because on a busy
#: machine most binds would otherwise time out and be retried.
SMALL = Plan(
    seed=2,
    lasts_s=34.0,
    alone_s=9.0,
    every_s=0.75,
    longest_s=5.0,
    settle_s=PATIENCE_S,
    quiet_s=2.0,
    nodes=6,
    most_pods=20,
    warm_pods=15,
    admission_s=0.5,
    agent_interval_s=1.0,
    heartbeat_s=3.0,
    timeout_s=15.0,
    settings={"orphan_after_s": 15.0, "stale_after_s": 9.0, "bind_deadline_s": 12.0},
)


def test_a_short_storm_loses_no_pod_and_reserves_no_memory_twice(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with (
        capture.global_and_fixture_disabled()
    ):  # Show the progress, because the first build takes minutes.
        built("etcd", "kube-apiserver", *SCHEDULERS)
    findings, counts = storm(SMALL, logs=tmp_path)
    assert not findings
    assert counts["faults"].keys() == {f"{of} {what}" for of in KINDS for what in KINDS[of]}
    assert counts["pods"]["bound"] >= 15
    assert counts["calls"].keys() >= {"filter", "bind"}
    # The proxies have injected the faults.
    assert counts["requests"]["cut"]
    assert sum(n for what, n in counts["requests"].items() if "answered" in what) > 0
    request.node.user_properties.append(("measured", f"{counts['pods']}"))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_still_apply_to_the_product(name: str) -> None:
    product = MUTANTS[name].getter()
    before = getattr(product, MUTANTS[name].attribute)
    with MUTANTS[name]:
        assert getattr(product, MUTANTS[name].attribute) is not before
    assert getattr(product, MUTANTS[name].attribute) is before


@pytest.mark.parametrize("name", [None, "no compare-and-swap"])
def test_without_compare_and_swap_a_write_has_no_version(name: str | None) -> None:
    sent: list[dict[str, Any]] = []

    class Api:
        async def call(self, method: str, path: str, *, body: bytes | None, **_: str) -> bytes:
            if body is not None:
                sent.append(json.loads(body))
            return b'{"metadata": {"name": "n", "resourceVersion": "1"}}'

    store = KubernetesStore(cast("Any", Api()), cast("Any", None))

    async def initialise() -> None:
        before = await store.read_gpunode("n")
        assert before is not None
        await store.write_spec(before, GPUNodeSpec(initialised=True))

    with MUTANTS[name] if name else contextlib.nullcontext():
        asyncio.run(initialise())
    (write,) = sent
    assert ("resourceVersion" in write["metadata"]) == (name is None)
    assert write["spec"] == {"initialised": True}
