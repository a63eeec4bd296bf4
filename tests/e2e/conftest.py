"""Fixtures for clusters of the size that a test requests, which end with the test."""

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

#: The API of groups is beta in Kubernetes 1.37 and alpha before, and off by default.
GROUP_API = "v1beta1" if is_at_least("1.37") else "v1alpha2" if is_at_least("1.36") else "v1alpha1"
#: From 1.37 on, one gate enables everything.
GROUP_GATES = ("GenericWorkload=true",)
if not is_at_least("1.37"):
    GROUP_GATES = (*GROUP_GATES, "GangScheduling=true")
#: In Kubernetes 1.36, groups have a priority only with this gate, which 1.35 lacks.
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
    """A control plane whose API server serves groups, does not taint new nodes, and has no request
    queues, which cost a tenth of its CPU.
    """

    without_admission = (*ControlPlane.without_admission, "TaintNodesByCondition")

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, *GROUP_FLAGS, "--enable-priority-and-fairness=false")


@pytest.fixture(scope="session")
@starts_processes
def binaries(request: pytest.FixtureRequest) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # The first build takes minutes, so show its progress.
    with capture.global_and_fixture_disabled():
        built(*BINARIES)


@pytest.fixture(scope="package")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """An API server for this folder, because extenders see everything in it. Each cluster starts
    without nodes, and leaves none. It ends with the folder, because it uses CPU while idle.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        built("etcd", "kube-apiserver")
    with control_plane(SparingPlane) as running:
        yield running


@pytest.fixture
def new_cluster(plane: ControlPlane, binaries: None) -> Iterator[NewCluster]:
    """Make a cluster with this number of nodes and no running processes."""
    with contextlib.ExitStack() as stack:

        def make(nodes: int, shape: Shape = ONE_GPU) -> PlayedCluster:
            cluster = PlayedCluster(plane, nodes, shape)
            stack.callback(cluster.close)
            cluster.create()
            return cluster

        yield make


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Print a measured figure at the end of the session's output."""
    # Reports transport the figures, also from other processes.
    return lambda line: request.node.user_properties.append(("measured", line))
