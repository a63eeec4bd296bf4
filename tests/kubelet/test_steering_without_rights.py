"""Ends a steering agent after its permissions are deleted. ``helm uninstall`` and ``kubectl delete
-k`` do this, because they do not wait for the pods of the DaemonSet.

The API server, the kubelet and the device plugin are real. The agent has its own account and roles.
"""

import contextlib
from collections.abc import Iterator

from tests.admission.site import AGENT, AT_ONCE, RBAC, Site, manifests
from tests.controlplane import ControlPlane
from tests.kubelet.node_objects import gpu_pod
from tests.kubelet.steered_node import StartSteered, SteeredNode, start_steered

__all__ = ["start_steered"]

#: Longer than the time in which a kubelet on a busy machine rejects a pod that was just bound.
STALE_AFTER_S = 30


@contextlib.contextmanager
def permitted(plane: ControlPlane) -> Iterator[str]:
    """Grant the agent's account its roles. Return a token of the account."""
    with contextlib.closing(Site(plane)) as site:
        site.add_accounts(AGENT)
        yield site.token(AGENT)


def withdraw_permissions(plane: ControlPlane) -> None:
    for role in manifests("base/rbac.yaml"):
        if role["metadata"]["name"] == AGENT:
            namespace = role["metadata"].get("namespace")
            where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
            binding = f"{where}/{role['kind'].lower()}bindings/{AGENT}-of-the-tests"
            plane.call("DELETE", binding, AT_ONCE)


def restart_with(steered: SteeredNode, account: str) -> None:
    """Replace the agent with an agent that uses a token of its account."""
    steered.node.end("agent")
    kubeconfig = steered.node.folder / "agent.kubeconfig"
    steered.plane.write_kubeconfig(kubeconfig, {"token": account})
    steered.node.start_agent(
        kubeconfig,
        "--device-choice=steered",
        f"--stale-after={STALE_AFTER_S}",
    )
    steered.until_steered()


def test_an_agent_that_shuts_down_after_it_lost_its_permissions_restores_the_device_plugin(
    start_steered: StartSteered, plane: ControlPlane
) -> None:
    steered = start_steered(flags=("--device-choice=predicted",))
    node = steered.node
    with permitted(plane) as account:
        restart_with(steered, account)
        assert steered.place("before", "GPU-1") == "GPU-1"
        node.wait(lambda: node.status("before")["phase"] == "Running", "a pod that runs")
        # Extenders still rely on the agent's choice.
        steered.reservation(gpu_pod("without-ledger"), "GPU-1", 4)
        withdraw_permissions(plane)
        node._processes["agent"].terminate()
        node.wait(lambda: "ledger_not_read" in node.log("agent"), "an agent without the ledger")
        steered.bind("without-ledger")
        node.wait(
            lambda: "UnexpectedAdmissionError" in node.events("without-ledger"), "a rejection"
        )
        assert "plugin_brought_back" not in node.log("agent")
        assert steered.steered()  # Extenders use this report until it is stale.
        node.end("agent")
    assert "plugin_brought_back" in node.log("agent")
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.device("after") == "GPU-0"  # The plugin's choice.
    assert node.status("before")["phase"] == "Running"
    assert not list((node.root / "device-plugins").glob("headroom-*"))
