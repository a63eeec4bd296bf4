"""Runs ``helm uninstall`` and ``kubectl delete -k`` while an agent steers, but skips the documented
first steps.

The API server, Helm, kubectl, the kubelet and the device plugin are real. The agent uses the
account of the installation, and ends after the DaemonSet is deleted, as its pod would.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.admission.site import Site
from tests.controlplane import built, control_plane
from tests.deploy.installation import AGENT, PODS, AuditedPlane
from tests.deploy.pages import Run, shell
from tests.deploy.rendered import CHART, COMPONENTS, DEPLOY, IMAGE_VALUES, IMAGES, NAMESPACE
from tests.kubelet.conftest import StartNode
from tests.kubelet.steered_node import StartSteered, SteeredNode, start_steered
from tests.processes import starts_processes

__all__ = ["start_steered"]

STALE_AFTER_S = 10


class Plane(AuditedPlane):
    """A control plane whose API server accepts privileged containers, as in real clusters."""

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, "--allow-privileged=true")


@pytest.fixture
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    """A control plane for each test, because the test removes the CRD and the namespace."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # The first build takes minutes.
        built("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm")
    with control_plane(Plane) as running:
        assert isinstance(running, Plane)
        running.start_controller_manager()
        yield running


def by_helm(plane: Plane, run: Run) -> str:
    """Install Headroom with Helm. Return the command that uninstalls it."""
    plane.kubectl("delete", "crd", "gpunodes.headroom.gpu")  # The chart contains the CRD.
    values = plane.folder / "values.json"
    values.write_text(json.dumps({"images": IMAGE_VALUES, **COMPONENTS["steering"]}))
    done(run, f"helm install headroom {CHART} -n {NAMESPACE} --create-namespace -f {values}")
    return f"helm uninstall headroom -n {NAMESPACE}"


def by_kustomize(plane: Plane, run: Run) -> str:
    """Install an overlay. Return the command that uninstalls it."""
    folder = plane.folder / "overlay"
    folder.mkdir()
    (folder / "deploy").symlink_to(DEPLOY)
    images = [
        {"name": name.rpartition(":")[0], "newName": new.rpartition(":")[0], "newTag": "0.1.0"}
        for name, new in IMAGES.items()
    ]
    overlay = {
        "resources": ["deploy/overlays/gpu-operator"],
        "components": ["deploy/components/steering"],
        "images": images,
    }
    (folder / "kustomization.yaml").write_text(json.dumps(overlay))
    done(run, f"kubectl apply --server-side --force-conflicts -k {folder}")
    # Do not wait, because only a running extender removes the finalizers of GPUNodes.
    return f"kubectl delete -k {folder} --ignore-not-found --wait=false"


def done(run: Run, command: str) -> None:
    output, status = run(command)
    assert status == 0, output


def act_as_extender_and_webhook(plane: Plane) -> None:
    """Remove the webhooks and policies, so that the test can act as the extender and the
    webhook.
    """
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    ours = "--selector=app.kubernetes.io/part-of=headroom"
    plane.kubectl("delete", f"{kinds},validatingadmissionpolicybindings", ours)


def restart_as_installed(steered: SteeredNode) -> None:
    """Replace the agent with an agent that has the token that the kubelet would mount into
    its pod.
    """
    node, plane = steered.node, steered.plane
    node.end("agent")
    container = {"name": "agent", "image": "none"}
    spec = {"nodeName": node.name, "serviceAccountName": AGENT, "containers": [container]}
    # Create the pod to which the token is bound.
    plane.call("POST", PODS, {"metadata": {"name": f"agent-on-{node.name}"}, "spec": spec})
    account = Site(plane).token(AGENT, node.name)
    kubeconfig = node.folder / "agent.kubeconfig"
    plane.write_kubeconfig(kubeconfig, {"token": account})
    node.start_agent(kubeconfig, "--device-choice=steered", f"--stale-after={STALE_AFTER_S}")
    steered.until_steered()


@pytest.mark.slow
@pytest.mark.parametrize("install", [by_helm, by_kustomize])
def test_after_uninstalling_the_device_plugin_serves_its_resource_again(
    plane: Plane,
    start_node: StartNode,
    start_steered: StartSteered,
    install: Callable[[Plane, Run], str],
) -> None:
    run = shell(plane.folder, plane.kubeconfig())
    uninstall = install(plane, run)
    act_as_extender_and_webhook(plane)
    steered = start_steered(flags=("--device-choice=predicted",))
    node = steered.node
    restart_as_installed(steered)
    assert steered.place("before", "GPU-1") == "GPU-1"
    node.wait(lambda: node.status("before")["phase"] == "Running", "a pod that runs")
    done(run, uninstall)
    assert plane.kubectl("get", "daemonsets", "-A", "-o", "name") == ""
    node.end("agent")
    assert "plugin_brought_back" in node.log("agent")
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.device("after") == "GPU-0"  # The plugin's choice.
    assert node.status("before")["phase"] == "Running"
    assert not list((node.root / "device-plugins").glob("headroom-*"))
