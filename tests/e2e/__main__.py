"""Runs a small cluster to try out by hand, with three nodes, a bound pod and an unschedulable pod.

The API server, kube-scheduler, controllers, ``headroom serve``, the webhook and the admission
policies are real. The kubelets, device plugins and agents of the nodes are simulated until Ctrl-C.
No containers run, so logs, exec and port forwarding do not work.
"""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from urllib3.exceptions import HTTPError

from agent.kube_publisher import NotDelivered
from tests.admission.server import start_webhook
from tests.admission.site import ADMISSION, webhooks
from tests.certificates import Authority
from tests.controlplane import ApiRefused, control_plane
from tests.deploy.pages import tools
from tests.e2e.cluster import NAMESPACE, PODS, pod_manifest
from tests.e2e.nodes import Shape
from tests.e2e.playground import (
    VRAM,
    Playground,
    PlaygroundCluster,
    default_scheduler,
    install,
    used_bytes,
)

#: Interval of heartbeats. It is shorter than that of real agents, so that deleted pods hold memory
#: for at most 5 s.
HEARTBEAT_S = 5.0
PLACEMENT = "headroom.gpu/placement"

WHAT_NEXT = """
A cluster of three GPU nodes, each with a 24 GiB GPU that eight pods may share. In another terminal:

  export KUBECONFIG={kubeconfig}
  export HEADROOM_SERVER={console}
  export PATH={bin}:$PATH
  kubectl get gpunodes
  kubectl headroom top
  kubectl describe pod too-large
  kubectl headroom why too-large

To create a pod of your own, for example (its containers are only simulated):

  kubectl create -f - <<EOF
  apiVersion: v1
  kind: Pod
  metadata: {{name: mine, annotations: {{headroom.gpu/vram: 8Gi}}}}
  spec:
    containers:
      - {{name: main, image: none, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}
  EOF

The page: {console}/
Ctrl-C ends all of it.
"""


def end_on_signals() -> None:
    """Raise ``KeyboardInterrupt`` on SIGTERM too, and raise it again if Python has dropped the
    exception.

    Python drops an exception that is raised in a finalizer.
    """

    def raise_again(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            sys.__unraisablehook__(dropped)

    for each in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(each, signal.default_int_handler)
    sys.unraisablehook = raise_again


def main() -> None:
    end_on_signals()
    with contextlib.suppress(KeyboardInterrupt), control_plane(Playground) as plane:
        install(plane)
        cluster = PlaygroundCluster(plane, 3, Shape())
        cluster.create()
        try:
            cluster.bring_up()
            plane.start_controller_manager()
            cluster.start_scheduler_as("default-scheduler", default_scheduler(plane))
            install_webhook(cluster)
            cluster.create_pod("placed", "20Gi")
            cluster.create_pod("too-large", "25Gi")
            cluster.until(lambda: bool(cluster.rejection("too-large")), "a pod is rejected")
            text = WHAT_NEXT.format(
                kubeconfig=plane.kubeconfig(namespace=NAMESPACE),
                console=cluster.debug_url(),
                bin=tools(plane.folder, "kubectl"),
            )
            sys.stdout.write(text)
            sys.stdout.flush()
            play(cluster)
        finally:  # Objects end with the API server, and the user may have deleted the CRD.
            cluster.nodes.close()
            cluster.kill_all()


def install_webhook(cluster: PlaygroundCluster) -> None:
    """Start the webhook and wait until the API server calls it."""
    plane = cluster.plane
    authority = Authority(plane.folder, "webhook-ca")
    kubeconfig = plane.kubeconfig("webhook-of-the-tests")
    webhook = start_webhook(plane, "webhook", authority, kubeconfig)
    for each in webhooks(webhook.url, authority):
        plane.call("POST", f"{ADMISSION}/{each['kind'].lower()}s", each)
    pod = pod_manifest("8Gi")
    pod["metadata"]["name"] = "dry-run"
    del pod["spec"]["schedulerName"]

    def called() -> bool:
        answer = plane.call("POST", f"{PODS}?dryRun=All", pod)
        return bool(answer["spec"]["schedulerName"] == "headroom")

    cluster.until(called, "the API server calls the webhook")


def play(cluster: PlaygroundCluster) -> None:
    """Act as the kubelets and agents of all nodes. While the API server does not respond, wait."""
    beat_at_s = time.monotonic()
    while True:
        with contextlib.suppress(NotDelivered, ApiRefused, HTTPError):
            pods = cluster.plane.call("GET", "/api/v1/pods")["items"]
            for pod in pods:
                act_as_kubelet(cluster, pod)
            cluster.nodes.observe([with_bytes(pod, cluster.nodes.shape) for pod in pods])
            if time.monotonic() - beat_at_s > HEARTBEAT_S:
                beat_at_s = time.monotonic()
                cluster.nodes.report(cluster.names)
                cluster.nodes.restore_agents(pods)
                cluster.nodes.renew()
        time.sleep(1.0)


def act_as_kubelet(cluster: PlaygroundCluster, pod: Mapping[str, Any]) -> None:
    """Start the containers of a bound pod, and end the containers of a deleted pod."""
    if not pod["spec"].get("nodeName"):
        return
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
    if pod["metadata"].get("deletionTimestamp"):
        patch_status(cluster, path, {"phase": "Succeeded"})
        cluster.plane.call("DELETE", path, {"gracePeriodSeconds": 0})
    elif pod["status"]["phase"] == "Pending":
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        containers = [
            {
                **{"name": each["name"], "image": each["image"], "imageID": "", "restartCount": 0},
                **{"ready": True, "started": True, "state": {"running": {"startedAt": now}}},
            }
            for each in pod["spec"]["containers"]
        ]
        ready = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        status = {"phase": "Running", "startTime": now, "containerStatuses": containers}
        status["conditions"] = [*pod["status"].get("conditions", ()), *ready]
        patch_status(cluster, path, status)


def patch_status(cluster: PlaygroundCluster, path: str, status: Mapping[str, Any]) -> None:
    """Merge ``status`` into the status of the pod at this path."""
    patch = "application/merge-patch+json"
    cluster.plane.call("PATCH", f"{path}/status", {"status": status}, patch)


def with_bytes(pod: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the pod with its request replaced by the bytes that it uses, because the request can
    be a percentage such as 25%.
    """
    metadata = pod["metadata"]
    annotations = metadata.get("annotations", {})
    if PLACEMENT in annotations:
        reserved = json.loads(annotations[PLACEMENT])["containers"].values()
        request_bytes = sum(max(each["bytes"].values(), default=0) for each in reserved)
    elif (found := used_bytes(pod, shape)) is not None:
        request_bytes = found
    else:
        return dict(pod)
    annotations = {**annotations, VRAM: str(request_bytes)}
    return {**pod, "metadata": {**metadata, "annotations": annotations}}


if __name__ == "__main__":
    main()
