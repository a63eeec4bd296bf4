"""An API server that serves every kind of Headroom's manifests."""

from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane, built
from tests.deploy import foreign
from tests.deploy.rendered import NAMESPACE
from tests.processes import starts_processes


class Plane(ControlPlane):
    """Its API server accepts privileged containers, as those of all real clusters do."""

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, "--allow-privileged=true")


@pytest.fixture(scope="module")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """The kinds of other projects and Headroom's namespace exist; no controller runs. One for each
    module, because objects of one would change what another finds."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes
        built("etcd", "kube-apiserver", "kubectl", "helm", "argocd-diff", "flux-apply")
    plane = Plane()
    try:
        plane.start()
        foreign.install(plane)
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        yield plane
    finally:
        plane.stop()
