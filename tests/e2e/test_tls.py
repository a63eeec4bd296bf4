"""Runs kube-scheduler and an extender over TLS. tests/e2e/test_schedulers.py has a scheduler that
does not trust the extender.
"""

import json
from pathlib import Path

from headroom.runtime.server.tls import TlsFiles
from tests.certificates import Authority
from tests.e2e.conftest import NewCluster


def test_a_scheduler_without_a_certificate_gets_no_response(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    cluster = new_cluster(1)
    authority = Authority(tmp_path, "headroom-ca")
    signed = authority.sign("extender")
    url = cluster.start_extender(tls=TlsFiles(signed.cert, signed.key, authority.cert))
    # Run the scheduler like the default scheduler, which calls the extender only for GPU pods.
    cluster.start_scheduler(url, tls={"caFile": str(authority.cert)}, one_entry=True)
    cluster.settle()
    cluster.create_pod("waits", "1Gi")
    cluster.create_pod("plain", None, gpus=0)
    cluster.until(lambda: bool(cluster.node_of("plain")), "the pod without a GPU is bound")
    # The user's message mentions an EOF or a broken pipe. Only the extender logs the reason.
    cluster.until(lambda: 'Post "https://' in cluster.rejection("waits"), "the other waits")
    assert not cluster.node_of("waits")

    def rejected() -> list[dict[str, str]]:
        lines = cluster.plane.log("extender").splitlines()
        return [json.loads(line) for line in lines if "tls_client_rejected" in line]

    cluster.until(rejected, "the extender logs the rejection")
    assert rejected()[-1]["message"] == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
