"""Tests how an agent in a pod reaches the API server."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.kube_client import NoCluster, connect, in_cluster

ENVIRONMENT = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")],
)
def test_address_and_certificate_are_read_from_the_pod(
    host: str, address: str, account: Path
) -> None:
    server = in_cluster(ENVIRONMENT | {"KUBERNETES_SERVICE_HOST": host}, account)
    assert server.address == address
    pool = server.pool.connection_pool_kw
    assert (pool["cert_reqs"], pool["ca_certs"]) == ("CERT_REQUIRED", str(account / "ca.crt"))


def test_a_replaced_token_is_used_with_the_next_request(account: Path) -> None:
    server = in_cluster(ENVIRONMENT, account)
    assert server.authentication() == {"Authorization": "Bearer first"}
    (account / "token").write_text("second")
    assert server.authentication() == {"Authorization": "Bearer second"}
    (account / "token").unlink()
    with pytest.raises(OSError, match="token"):
        server.authentication()


def test_a_request_without_a_token_reports_the_missing_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(NoCluster, match=r"serviceaccount/token.*pass --no-publish"):
        connect()


def test_in_a_pod_the_kubernetes_package_is_not_imported(account: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agent.kube_client import in_cluster;"
        "import agent.kube_publisher, agent.probes.node_probe;"
        "import agent.probes.node_probe, agent.steering.preferred_allocation;"
        f"in_cluster({ENVIRONMENT!r}, Path({str(account)!r}));"
        "print('kubernetes' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "False"
