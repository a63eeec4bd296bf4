"""Fixtures that create clusters for a test and remove them at its end."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.controlplane import ControlPlane, built, control_plane
from tests.e2e.cluster import PlayedCluster
from tests.e2e.nodes import Shape
from tests.kubernetes_version import SCHEDULERS, UNDER_TEST, is_at_least
from tests.processes import starts_processes

BINARIES = (*SCHEDULERS, "kube-controller-manager", "kubectl")

ONE_GPU = Shape()

#: Version of the API for pod groups. It is beta in Kubernetes 1.37, alpha in older versions, and
#: off by default.
GROUP_API = "v1beta1" if is_at_least("1.37") else "v1alpha2" if is_at_least("1.36") else "v1alpha1"
#: Feature gates for pod groups. One gate is enough in Kubernetes 1.37 and newer.
GROUP_GATES = ("GenericWorkload=true",)
if not is_at_least("1.37"):
    GROUP_GATES = (*GROUP_GATES, "GangScheduling=true")
#: Feature gates for the priority of groups. Only Kubernetes 1.36 needs a gate, and 1.35 has none.
PRIORITY_GATES = () if UNDER_TEST != "1.36" else ("WorkloadAwarePreemption=true",)
GROUP_FLAGS = (
    (
        f"--feature-gates={','.join((*GROUP_GATES, *PRIORITY_GATES))}",
        f"--runtime-config=scheduling.k8s.io/{GROUP_API}=true",
    )
    if is_at_least("1.35")
    else ()
)

Tell = Callable[[str], None]

NewCluster = Callable[..., PlayedCluster]


class SparingPlane(ControlPlane):
    """A control plane whose API server serves pod groups and does not taint new nodes. It has no
    request queues, because they cost a tenth of its CPU.
    """

    without_admission = (*ControlPlane.without_admission, "TaintNodesByCondition")

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, *GROUP_FLAGS, "--enable-priority-and-fairness=false")


@pytest.fixture(scope="session")
@starts_processes
def binaries(request: pytest.FixtureRequest) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # Show the progress of the build, because the first build takes minutes.
    with capture.global_and_fixture_disabled():
        built(*BINARIES)


@pytest.fixture(scope="package")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """An API server for the tests of this folder, because extenders watch all of its objects. Each
    cluster starts without nodes and leaves no nodes. The API server ends with the folder's tests,
    because it uses CPU while idle.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        built("etcd", "kube-apiserver")
    with control_plane(SparingPlane) as running:
        yield running


@pytest.fixture
def new_cluster(plane: ControlPlane, binaries: None) -> Iterator[NewCluster]:
    """Return a function that creates a cluster with a number of nodes and without running
    processes.
    """
    with contextlib.ExitStack() as stack:

        def make(nodes: int, shape: Shape = ONE_GPU) -> PlayedCluster:
            cluster = PlayedCluster(plane, nodes, shape)
            stack.callback(cluster.close)
            cluster.create()
            return cluster

        yield make


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Return a function that prints a measured figure at the end of the session's output."""
    # Test reports also transport the figures from other worker processes.
    return lambda line: request.node.user_properties.append(("measured", line))
