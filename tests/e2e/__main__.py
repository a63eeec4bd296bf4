"""Keeps a small real cluster running for a person: three nodes, a placed and a rejected pod.

The API server, kube-scheduler and ``headroom serve`` are the real ones; the nodes are objects, and
what their kubelets, device plugins and agents would do is played here, until Ctrl-C.
"""

import contextlib
import signal
import sys
import time

from agent.kube_publisher import NotDelivered
from tests.controlplane import built, control_plane
from tests.e2e.cluster import NAMESPACE, PlayedCluster
from tests.e2e.nodes import Shape

HEARTBEAT_S = 30.0

WHAT_NEXT = """
A cluster of three GPU nodes, each with one 24 GiB GPU shared by eight. In another terminal:

  export KUBECONFIG={kubeconfig}
  alias kubectl={kubectl}
  kubectl get gpunodes
  kubectl describe pod too-large
  kubectl get pod placed -o yaml

One of your own, on nodes whose containers are only pretended:

  kubectl get pod placed -o yaml | sed 's/name: placed/name: mine/; s/20Gi/8Gi/; /nodeName/d' |
    kubectl create -f -

Headroom's explanation of it: {debug}/v1/explain/pods/{namespace}/mine
Ctrl-C ends all of it.
"""


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), control_plane() as plane:
        cluster = PlayedCluster(plane, 3, Shape())
        cluster.create()
        try:
            cluster.bring_up()
            cluster.create_pod("placed", "20Gi")
            cluster.create_pod("too-large", "25Gi")
            cluster.until(lambda: bool(cluster.rejection("too-large")), "a pod is rejected")
            said = WHAT_NEXT.format(
                kubeconfig=plane.kubeconfig(namespace=NAMESPACE),
                kubectl=built("kubectl")["kubectl"],
                debug=cluster.debug_url(),
                namespace=NAMESPACE,
            )
            sys.stdout.write(said)
            sys.stdout.flush()
            play(cluster)
        finally:
            cluster.close()


def play(cluster: PlayedCluster) -> None:
    """Be the nodes, for ever."""
    beat_at_s = time.monotonic()
    while True:
        with contextlib.suppress(NotDelivered):
            cluster.nodes.observe(cluster.pods())
            if time.monotonic() - beat_at_s > HEARTBEAT_S:
                beat_at_s = time.monotonic()
                cluster.nodes.report(cluster.names)
        time.sleep(1.0)


if __name__ == "__main__":
    main()
