"""Runs kube-scheduler and an extender over TLS. If one of them does not authenticate, GPU pods stay
pending with a message.
"""

import json
from pathlib import Path

import pytest

from headroom.runtime.server.tls import TlsFiles
from tests.certificates import Authority, Certificate
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "headroom-ca")


@pytest.fixture
def scheduler(authority: Authority) -> dict[str, str]:
    """Return the tlsConfig of a kube-scheduler that the extender accepts."""
    return {"caFile": str(authority.cert)} | shows(authority.sign("scheduler"))


def shows(client: Certificate) -> dict[str, str]:
    return {"certFile": str(client.cert), "keyFile": str(client.key)}


def over_tls(cluster: Cluster, authority: Authority, scheduler: dict[str, str]) -> None:
    """Start an extender that accepts clients of the authority, and a kube-scheduler with this
    tlsConfig.
    """
    signed = authority.sign("extender")
    url = cluster.start_extender(tls=TlsFiles(signed.cert, signed.key, authority.cert))
    # Run the scheduler like the default scheduler, which calls the extender only for GPU pods.
    cluster.start_scheduler(url, tls=scheduler, one_entry=True)
    cluster.settle()


def test_a_scheduler_sends_no_gpu_pod_to_a_server_that_it_does_not_trust(
    new_cluster: NewCluster, authority: Authority, scheduler: dict[str, str], tmp_path: Path
) -> None:
    cluster = new_cluster(1)
    over_tls(cluster, authority, scheduler | {"caFile": str(Authority(tmp_path, "other-ca").cert)})
    only_the_gpu_pod_stays_pending(cluster, "certificate signed by unknown authority")


def test_a_scheduler_without_a_certificate_gets_no_response(
    new_cluster: NewCluster, authority: Authority, scheduler: dict[str, str]
) -> None:
    cluster = new_cluster(1)
    over_tls(cluster, authority, {"caFile": scheduler["caFile"]})
    # The user's message mentions an EOF or a broken pipe. Only the extender logs the reason.
    only_the_gpu_pod_stays_pending(cluster, 'Post "https://')

    def rejected() -> list[dict[str, str]]:
        lines = cluster.plane.log("extender").splitlines()
        return [json.loads(line) for line in lines if "tls_client_rejected" in line]

    cluster.until(rejected, "the extender logs the rejection")
    assert rejected()[-1]["message"] == "PEER_DID_NOT_RETURN_A_CERTIFICATE"


def only_the_gpu_pod_stays_pending(cluster: Cluster, says: str) -> None:
    cluster.create_pod("waits", "1Gi")
    cluster.create_pod("plain", None, gpus=0)
    cluster.until(lambda: bool(cluster.node_of("plain")), "the pod without a GPU is bound")
    cluster.until(lambda: says in cluster.rejection("waits"), "the other waits and shows why")
    assert not cluster.node_of("waits")
