"""Checks over the life cycles of nodes and pods that only pods that may hold memory have
reservations.
"""

import pytest

from extender.ledger.bind_call import Bound, Declined
from headroom.contract.reasons import Reason
from tests.builders import GIB, device, shared, use
from tests.ledger.lives import Cluster

FULL = Reason.MEMORY_ON_ANY
#: Number of samples without a pod that prove its end. The first of these samples may have been
#: taken before the pod was marked.
SAMPLES = 3


def test_a_recreated_node_takes_pods_after_remaining_pods_are_charged() -> None:
    cluster = Cluster()
    cluster.create("p")
    assert cluster.bind("p") == Bound()
    cluster.create("q", "1Gi")
    cluster.remove_node()
    cluster.tidy()  # The finalizer is removed.
    assert cluster.server.read_gpunode("n") is None
    cluster.add_node()
    cluster.tidy()  # The GPUNode is created again and waits for a report.
    assert cluster.bind("q") == Declined(Reason.NO_REPORT)
    cluster.report()
    assert cluster.fits("1Gi") is Reason.NOT_INITIALISED
    cluster.done_by(0, cluster.found_by(0))
    assert cluster.reserved == {"p"}
    assert (cluster.fits("8Gi"), cluster.fits("9Gi")) == (None, FULL)


def test_a_node_deleted_with_its_pods_has_no_reservations() -> None:
    cluster = Cluster()
    cluster.create("p")
    cluster.bind("p")
    cluster.remove_node()
    cluster.tidy()
    # The garbage collector also deletes pods of missing nodes by force.
    cluster.server.lose_pod("p")
    cluster.add_node()
    cluster.tidy()
    cluster.report()
    cluster.tidy()
    assert cluster.reserved == set()
    assert cluster.fits("24Gi") is None


def test_a_bind_to_a_deleted_node_fails_or_is_charged() -> None:
    """The reservation was in a GPUNode that was deleted."""
    cluster = Cluster()
    late = cluster.create("p")
    cluster.remove_node()
    cluster.tidy()
    cluster.add_node()
    cluster.tidy()
    cluster.report()
    cluster.tidy()
    touched = cluster.server.read_pod("default", "p")
    assert touched is not None
    assert touched.metadata.resource_version != late.metadata.resource_version


def test_reservations_of_removed_gpus_are_charged_to_their_replacements() -> None:
    """After a GPU was replaced or MIG was reconfigured, an unconfirmed pod can get any of the new
    devices.
    """
    cluster = Cluster(shared("a"), shared("b"))
    cluster.create("p")
    cluster.bind("p")
    cluster.report(shared("c"), shared("d"))
    cluster.tidy()
    assert cluster.reserved == {"p"}
    # One of the two devices is in use, but it is unknown which device.
    assert (cluster.fits("8Gi"), cluster.fits("9Gi")) == (None, FULL)
    cluster.report(pods=[use("p", "d", 16 * GIB)])
    assert cluster.fits("24Gi") is not None
    assert cluster.fits("8Gi") is None


def test_all_reservations_are_charged_to_the_remaining_gpus() -> None:
    cluster = Cluster(device("a"), device("b"))
    for name in ("p", "q"):
        cluster.create(name)
        assert cluster.bind(name) == Bound()
    cluster.report(device("a"))
    cluster.tidy()
    assert cluster.reserved == {"p", "q"}
    assert cluster.fits("1Gi") is not None
    # One pod never got a device, and the kubelet rejects it.
    cluster.ends("q", "Failed")
    cluster.report(pods=[use("p", "a", 16 * GIB)])
    cluster.tidy()
    assert cluster.reserved == {"p"}


def test_after_a_reboot_pods_are_charged_before_they_are_reported_again() -> None:
    cluster = Cluster(shared("a"), shared("b"))
    cluster.create("p")
    cluster.bind("p")
    cluster.report(shared("a", free=3, allocated=1), shared("b"), pods=[use("p", "a", 16 * GIB)])
    # After the reboot, no pod holds a device, so the pod can get the other device.
    cluster.report(shared("a"), shared("b"))
    cluster.tidy()
    assert cluster.reserved == {"p"}
    assert (cluster.fits("8Gi"), cluster.fits("9Gi")) == (None, FULL)


def test_a_pod_rejected_by_the_kubelet_after_a_reboot_is_not_charged() -> None:
    cluster = Cluster()
    cluster.create("p")
    cluster.bind("p")
    cluster.report(pods=[use("p", "a", 16 * GIB)])
    cluster.report()
    cluster.ends("p", "Failed")  # UnexpectedAdmissionError
    cluster.tidy()
    assert cluster.reserved == set()


@pytest.mark.parametrize(
    "i", range(2), ids=["by the replica that bound the old pod", "by the other replica"]
)
def test_a_recreated_stateful_pod_is_charged_in_addition_to_the_old_pod(i: int) -> None:
    """The new pod has the old name but a new UID. The containers of the old pod may still run."""
    cluster = Cluster()
    cluster.create("web-0", "10Gi", uid="first")
    cluster.bind("web-0")
    cluster.report(pods=[use("first", "a", 10 * GIB)])
    cluster.server.lose_pod("web-0")
    cluster.create("web-0", "10Gi", uid="second")
    cluster.done_by(i, cluster.found_by(i))
    assert cluster.bind("web-0", by=i) == Bound()
    assert cluster.reserved == {"first", "second"}
    cluster.create("web-1", "10Gi")
    assert cluster.bind("web-1") != Bound()
    # A sample from after the removal shows only the second pod.
    for _ in range(SAMPLES):
        cluster.report(pods=[use("second", "a", 10 * GIB)])
        cluster.tidy()
    assert cluster.reserved == {"second"}
    assert cluster.bind("web-1") == Bound()


def test_an_ended_stateful_pod_frees_memory_for_its_successor() -> None:
    cluster = Cluster()
    for uid in ("first", "second", "third"):
        cluster.create("web-0", "24Gi", uid=uid)
        assert cluster.bind("web-0") == Bound(), uid
        cluster.report(pods=[use(uid, "a", 24 * GIB)])
        cluster.ends("web-0")
        cluster.report()
        cluster.server.lose_pod("web-0")
        cluster.tidy()
    assert cluster.reserved == set()


def test_a_force_deleted_unreserved_pod_is_charged_while_it_runs() -> None:
    cluster = Cluster()
    cluster.create("p", "20Gi", node="n")
    cluster.tidy()
    assert cluster.node.spec.reservations["p"].flags == ["adopted"]
    cluster.report(pods=[use("p", "a", GIB)])
    cluster.server.lose_pod("p")
    cluster.tidy()
    cluster.report(pods=[use("p", "a", GIB)])
    cluster.tidy()
    assert (cluster.reserved, cluster.fits("5Gi")) == ({"p"}, FULL)
    for _ in range(SAMPLES):
        cluster.report()
        cluster.tidy()
    assert (cluster.reserved, cluster.fits("24Gi")) == (set(), None)
