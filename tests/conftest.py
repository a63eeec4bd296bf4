"""What every folder of tests may ask for."""

from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane, built, control_plane


@pytest.fixture(scope="session")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A real API server with the CRD, shared by the session: use names of your own in it."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes and says so
        built("etcd", "kube-apiserver")
    with control_plane() as running:
        yield running
