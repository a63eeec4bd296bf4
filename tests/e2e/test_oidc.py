"""Tests users from OpenID Connect. Only the API server gets their tokens, and Headroom gets their
names.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom.contract.console import CSRS
from tests.controlplane import built
from tests.e2e.cluster import PlayedCluster
from tests.e2e.test_console_access import by_plugin, csrs, own_sessions, top, watched_by
from tests.egress import ProxyingPlane
from tests.issuer import Issuer
from tests.processes import starts_processes

__all__ = ["own_sessions"]

GROUP = "oidc:gpu-watchers"


class OidcPlane(ProxyingPlane):
    """A control plane whose API server accepts the tokens of ``issuer``."""

    issuer: Issuer

    def start(self) -> None:
        self.issuer = Issuer(self.folder)
        super().start()

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*self.issuer.flags(), *flags)

    def stop(self) -> None:
        super().stop()
        self.issuer.close()


@pytest.fixture(scope="module")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[OidcPlane]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        built("etcd", "kube-apiserver", "kubectl")
    plane = OidcPlane()
    try:
        plane.start()
        plane.install_crd()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="module")
@starts_processes
def cluster(plane: OidcPlane) -> Iterator[PlayedCluster]:
    cluster = watched_by(GROUP, plane)
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_a_user_of_the_issuer_reads_with_one_session_for_each_token(
    cluster: PlayedCluster, plane: OidcPlane, tmp_path: Path
) -> None:
    token = plane.issuer.token("jane", groups=["gpu-watchers"])
    cluster.until(
        lambda: top(plane, tmp_path, {"token": token}).returncode == 0,
        "the API server has the keys",
    )
    # The cloud provider's command or kubelogin prints another token each time.
    renewed = plane.issuer.token("jane", groups=["gpu-watchers"], jti="2")
    for _ in range(2):
        shown = top(plane, tmp_path, by_plugin(tmp_path, {"token": renewed}))
        assert (shown.returncode, shown.stderr) == (0, "")
        assert cluster.names[0] in shown.stdout
    sessions = csrs(plane).values()
    assert [each["username"] for each in sessions] == ["oidc:jane"] * 2
    assert all(GROUP in each["groups"] for each in sessions)
    written = str(plane.call("GET", CSRS))
    assert token not in written
    assert renewed not in written


@pytest.mark.slow
@pytest.mark.parametrize("claims", [{"lasts_s": -60}, {"aud": "another"}, {"iss": "https://x"}])
def test_a_token_that_the_api_server_rejects_opens_no_session(
    cluster: PlayedCluster, plane: OidcPlane, tmp_path: Path, claims: dict[str, str]
) -> None:
    before = csrs(plane)
    token = plane.issuer.token("eve", groups=["gpu-watchers"], **claims)  # type: ignore[arg-type]
    shown = top(plane, tmp_path, by_plugin(tmp_path, {"token": token}))
    assert shown.returncode == 3
    assert "rejects the kubeconfig's credentials" in shown.stderr
    assert token not in shown.stderr + shown.stdout
    assert csrs(plane) == before


@pytest.mark.slow
def test_a_user_of_the_issuer_without_rights_gets_the_missing_rights(
    cluster: PlayedCluster, plane: OidcPlane, tmp_path: Path
) -> None:
    shown = top(plane, tmp_path, {"token": plane.issuer.token("newcomer")})
    assert shown.returncode == 3
    assert 'User "oidc:newcomer" cannot create' in shown.stderr
    assert "--clusterrole=headroom-user --user=NAME" in shown.stderr
