"""Ends a steering agent after its permissions are deleted, as ``helm uninstall`` and ``kubectl
delete -k`` do without waiting for the pods of the DaemonSet.

API server, kubelet and device plugin are real. The agent has its own account and roles.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.agent.installed_agent import ACCOUNTS, AGENT, AT_ONCE, RBAC, manifests, token, unless
from tests.controlplane import ControlPlane
from tests.kubelet.node_objects import gpu_pod
from tests.kubelet.steered_node import StartSteered, SteeredNode, start_steered

__all__ = ["start_steered"]

BINDING = "agent-of-the-uninstalled"
#: Longer than the kubelet of a busy machine takes to reject a pod that was just bound.
STALE_AFTER_S = 30


@contextlib.contextmanager
def permitted(plane: ControlPlane) -> Iterator[str]:
    """Grant the agent's account its roles. Return a token of the account."""
    undo = contextlib.ExitStack()

    def create(path: str, body: dict[str, Any]) -> None:
        unless(409, plane, "POST", path, body)
        undo.callback(unless, 404, plane, "DELETE", f"{path}/{body['metadata']['name']}", AT_ONCE)

    with undo:
        create(ACCOUNTS, {"metadata": {"name": AGENT}})
        for role in manifests("rbac.yaml"):
            if role["metadata"]["name"] == AGENT:
                kinds = f"{_place(role)}/{role['kind'].lower()}"
                create(f"{kinds}s", role)
                create(f"{kinds}bindings", _binding(role))
        yield token(plane, None)


def withdraw_permissions(plane: ControlPlane) -> None:
    for role in manifests("rbac.yaml"):
        if role["metadata"]["name"] == AGENT:
            path = f"{_place(role)}/{role['kind'].lower()}bindings/{BINDING}"
            plane.call("DELETE", path, AT_ONCE)


def _place(role: dict[str, Any]) -> str:
    namespace = role["metadata"].get("namespace")
    return f"{RBAC}/namespaces/{namespace}" if namespace else RBAC


def _binding(role: dict[str, Any]) -> dict[str, Any]:
    namespace = ACCOUNTS.split("/")[-2]
    return {
        "metadata": {"name": BINDING},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role["kind"], "name": AGENT},
        "subjects": [{"kind": "ServiceAccount", "name": AGENT, "namespace": namespace}],
    }


def restart_with(steered: SteeredNode, account: str) -> None:
    """Replace the agent by one with a token of its account."""
    steered.node.end("agent")
    kubeconfig = steered.node.folder / "agent.kubeconfig"
    steered.plane.write_kubeconfig(kubeconfig, {"token": account})
    steered.node.start_agent(
        kubeconfig,
        "--device-choice=steered",
        f"--stale-after={STALE_AFTER_S}",
    )
    steered.until_steered()


def test_an_agent_that_ends_without_permissions_restores_the_device_plugin(
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
        assert steered.steered()  # The report that extenders use until it is stale.
        node.end("agent")
    assert "plugin_brought_back" in node.log("agent")
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.device("after") == "GPU-0"  # The plugin's choice.
    assert node.status("before")["phase"] == "Running"
    assert not list((node.root / "device-plugins").glob("headroom-*"))
