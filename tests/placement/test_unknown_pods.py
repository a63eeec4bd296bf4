"""Replays pods that only the report shows with all their replicas."""

from headroom.core.placement.prediction_outcome import _unknown_pods
from tests.builders import GPU, device, mig, status, use

MIG = "nvidia.com/mig-1g.10gb"


def test_a_pod_that_holds_two_resources_keeps_both() -> None:
    report = status(
        device("GPU-0"),
        mig("MIG-0", 0, resource=MIG),
        mig("MIG-1", 1, resource=MIG),
        pods=[
            use("u", "GPU-0", replica="0"),
            use("u", "MIG-0", replica="1"),
            use("u", "MIG-1", replica="2"),
            use("known", "GPU-0", replica="3"),
        ],
    )
    (found,) = _unknown_pods(report, {"known"}).items()
    uid, reservation = found
    assert uid == "u"
    assert {charge.resource: charge.count for charge in reservation.charges} == {GPU: 1, MIG: 2}
