"""Provides an API server that serves every kind in Headroom's manifests."""

from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane, built
from tests.deploy import foreign
from tests.deploy.rendered import NAMESPACE
from tests.processes import starts_processes


class Plane(ControlPlane):
    """A control plane whose API server accepts privileged containers, as in real clusters."""

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, "--allow-privileged=true")


@pytest.fixture(scope="module")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """An API server with the kinds of other projects and Headroom's namespace. It runs no
    controllers.

    Each module has its own API server, because the objects of one module would affect other
    modules.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # The first build takes minutes.
        built("etcd", "kube-apiserver", "kubectl", "helm", "argocd-diff", "flux-apply")
    plane = Plane()
    try:
        plane.start()
        foreign.install(plane)
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        yield plane
    finally:
        plane.stop()
