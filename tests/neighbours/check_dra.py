"""Tests DRA with a real kube-scheduler, kubelet and driver next to Headroom
(docs/how-to/dra.md).
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from headroom.core.cluster.claimed_devices import DraDevice
from headroom.dra_taints.taint_rules import TaintRules
from headroom.runtime.kube.api_errors import ApiStatus
from headroom.runtime.kube.client import KubeApi
from tests.e2e.conftest import Tell
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.neighbours.dra import (
    ACCOUNT,
    FOLDERS,
    GIB,
    PODS,
    RULES_VERSIONS,
    Counter,
    DraPlane,
    Scene,
    headroom,
    install,
    pending,
    running,
    scene,
    start_controller,
)
from tests.waiting import until

pytestmark = pytest.mark.slow

#: Maximum number of seconds from a change of the use until a device is tainted, and until its taint
#: is removed.
TAINTED_LIMIT_S, CLEARED_LIMIT_S = 10.0, 15.0


@pytest.mark.parametrize("version", RULES_VERSIONS)
def test_rules_are_written_in_the_version_that_the_api_server_serves(version: str) -> None:
    """kube-scheduler reads only one of the API versions, so the test does not run it."""
    plane = DraPlane(version)
    try:
        plane.start()
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
        api = KubeApi(plane.configuration(install(plane)))
        rules = TaintRules(api)
        assert rules.discover()
        assert rules.version == version
        device = DraDevice("n", "gpu-0")
        until(lambda: created(rules, device), "the account has its rights", 30.0)
        assert list(rules.list()) == [device]
        (rule,) = plane.rules()
        (owner,) = rule["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("ValidatingAdmissionPolicy", ACCOUNT)

        # The admission policy of the component rejects all other rules.
        strong = rule["spec"] | {"taint": rule["spec"]["taint"] | {"effect": "NoExecute"}}
        labels = rule["metadata"]["labels"]
        for metadata, spec, message in (
            ({"labels": labels}, strong, "with effect NoSchedule"),
            ({"labels": labels}, rule["spec"] | {"deviceSelector": {}}, "only single devices"),
            ({}, rule["spec"], "with label app.kubernetes.io/managed-by"),
        ):
            body = {"metadata": metadata | {"name": "another"}, "spec": spec}
            # The API server needs a moment to read a new policy.
            until(partial(is_rejected, api, plane, body, message), message, 30.0)
        plane.call("POST", plane.rules_path, {"metadata": {"name": "other"}, "spec": strong})
        with pytest.raises(ApiStatus, match="with label"):
            api.call("DELETE", f"{plane.rules_path}/other")
        rules.delete(rules.list()[device])
        assert [each["metadata"]["name"] for each in plane.rules()] == ["other"]
    finally:
        plane.stop()


def created(rules: TaintRules, device: DraDevice) -> bool:
    """Create a rule. Return False if the API server has not read the roles yet."""
    try:
        rules.create(device, "n", "GPU-0")
    except ApiStatus as err:
        if err.status != 403:
            raise
        return False
    return True


def is_rejected(api: KubeApi, plane: DraPlane, body: Mapping[str, Any], message: str) -> bool:
    """Return whether the API server rejects a rule with a message that contains ``message``."""
    query = {"dryRun": "All"}
    try:
        api.call("POST", plane.rules_path, query=query, body=json.dumps(body).encode())
    except ApiStatus as err:
        return message in err.message
    return False


def test_claims_are_compared_with_use_and_devices_are_tainted(tell: Tell) -> None:
    if os.geteuid() != 0:
        pytest.fail("a kubelet needs root. Run as root: make neighbours")
    with scene() as played:
        first, second = claims_appear_in_drift(played, tell)
        start_controller(played)
        assert played.tainted() == set()
        unattributed_processes_taint_the_device(played, tell, first, second)
        use_beyond_a_claim_taints_the_device(played, tell, first)
        taints_do_not_flap_with_changing_use(played, tell)
        ending_pods_cause_no_taint(played, tell)
        an_uninstall_leaves_no_rules(played, tell, first)


def claims_appear_in_drift(played: Scene, tell: Tell) -> tuple[str, str]:
    """Create pods a (30 GiB) and b (20 GiB), which share one device, and pod c (60 GiB), which has
    the other device. Return both devices.
    """
    devices: dict[str, str] = {}
    for name, memory in (("a", "30Gi"), ("b", "20Gi"), ("c", "60Gi")):
        played.claim(name, memory)
        devices[name] = played.run(name)
    assert devices["a"] == devices["b"] != devices["c"], devices
    for name, used_gib in (("a", 25), ("b", 20), ("c", 60)):
        played.use(name, used_gib * GIB)
    expected = {("a", 30, 25), ("b", 20, 20), ("c", 60, 60)}

    def shown() -> bool:
        rows = {
            (row["name"], row["claimed_bytes"] // GIB, (row["measured_bytes"] or 0) // GIB)
            for row in played.drift()
        }
        return rows == expected

    took_s = played.seconds_until(shown, "claims and use in /v1/drift", 60.0)
    tell(f"claims and measured use of 3 pods are in /v1/drift after {took_s:.1f} s")
    table = headroom("--server", played.console, "drift", "-A")
    assert "claimed  30.0 GiB  25.0 GiB  ok" in table, table
    return devices["a"], devices["c"]


def unattributed_processes_taint_the_device(
    played: Scene, tell: Tell, first: str, second: str
) -> None:
    """Check that only pod d (25 GiB) has to wait, because it fits only on the first device."""
    played.unknown_process(first, 5 * GIB)
    took_s = played.seconds_until(lambda: played.tainted() == {first}, "the taint", 30.0)
    tell(f"tainted {took_s:.1f} s after a process of no pod used 5 GiB")
    assert took_s < TAINTED_LIMIT_S
    (rule,) = played.plane.rules()
    assert rule["spec"]["taint"]["effect"] == "NoSchedule"
    played.claim("d", "25Gi")
    until(lambda: pending(played, "d"), "kube-scheduler rejects pod d", 60.0)
    played.claim("e", "15Gi")
    assert played.run("e") == second
    until(lambda: running(played) == {"a", "b", "c", "e"}, "all others run", 60.0)
    table = headroom("--server", played.console, "drift", "-A")
    assert "processes of no known pod use 5.0 GiB of" in table, table
    assert played.device_of("d") == ""
    played.unknown_process(first, 0)
    took_s = played.seconds_until(lambda: not played.tainted(), "the taint is cleared", 30.0)
    tell(f"cleared {took_s:.1f} s after the process ended")
    assert took_s < CLEARED_LIMIT_S
    assert played.run("d") == first


def use_beyond_a_claim_taints_the_device(played: Scene, tell: Tell, first: str) -> None:
    played.use("b", 24 * GIB)
    took_s = played.seconds_until(lambda: played.tainted() == {first}, "the taint", 30.0)
    tell(f"tainted {took_s:.1f} s after a pod of 20 GiB used 24 GiB")
    assert took_s < TAINTED_LIMIT_S
    assert [row["excess_bytes"] for row in played.drift() if row["name"] == "b"] == [4 * GIB]
    played.use("b", 20 * GIB)
    took_s = played.seconds_until(lambda: not played.tainted(), "the taint is cleared", 60.0)
    tell(f"cleared {took_s:.1f} s after it used 20 GiB again; the time to clear doubled to 6 s")


def taints_do_not_flap_with_changing_use(played: Scene, tell: Tell) -> None:
    """For 90 s, overcommit a device for 3 of every 6 s, and count its taints."""
    counted = Counter(played)
    for _ in range(15):
        played.use("b", 24 * GIB)
        counted.watch(3.0)
        played.use("b", 20 * GIB)
        counted.watch(3.0)
    tell(f"{counted.created} taints in 90 s with excess in every second 3 s")
    assert counted.created <= 3
    played.seconds_until(lambda: not played.tainted(), "the taint is cleared", 120.0)


def ending_pods_cause_no_taint(played: Scene, tell: Tell) -> None:
    """End pods, and check that no taint appears, although for some seconds the report shows the use
    of pods whose claims are already deallocated.
    """
    counted = Counter(played)
    for name in ("c", "e"):
        played.plane.call("DELETE", f"{PODS}/{name}")
    counted.watch(20.0)
    assert counted.created == 0
    until(lambda: running(played) == {"a", "b", "d"}, "the others run", 60.0)
    tell("no taint in 20 s after two pods ended")


def an_uninstall_leaves_no_rules(played: Scene, tell: Tell, first: str) -> None:
    played.use("b", 24 * GIB)
    played.seconds_until(lambda: played.tainted() == {first}, "the taint", 30.0)
    played.plane.kill("device-taints")
    played.plane.call("DELETE", f"{FOLDERS['ValidatingAdmissionPolicy']}/{ACCOUNT}")
    took_s = played.seconds_until(lambda: not played.plane.rules(), "the rules are gone", 60.0)
    tell(f"Kubernetes deleted the rules {took_s:.1f} s after the uninstall")
