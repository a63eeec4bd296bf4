"""Tests the reservation and the annotations of a pod that fits."""

import json
from fractions import Fraction

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headroom.contract.annotations import PLACEMENT
from headroom.contract.gpunode import Charge, Replicas, Reservation
from headroom.contract.kube import Pod
from headroom.core.placement.placement_record import Placement, place
from headroom.core.placement.prediction_outcome import predicted
from headroom.core.placement.snapshot import NodeTerms
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    container,
    device,
    judged,
    mig,
    pod,
    request,
    shared,
    weighed,
)

SHARED = "nvidia.com/gpu.shared"
STEERED = msgspec.structs.replace(DISTRIBUTED, steered=[GPU])


def placed(asked: Pod, node: NodeTerms) -> Placement:
    snap, verdicts = judged(asked, node)
    assert verdicts.fits.all()
    return place(request(asked), snap, verdicts, 0)


def written(placement: Placement) -> dict[str, str]:
    prefix = "headroom.gpu/"
    return {
        key.removeprefix(prefix): value
        for key, value in placement.annotations.items()
        if key != PLACEMENT
    }


def test_the_charge_lists_every_device_that_the_pod_could_get() -> None:
    node = weighed(shared("a"), shared("b"), shared("c", free=0, allocated=4))
    assert placed(pod("8Gi"), node).charges == (
        Charge(resource=GPU, count=1, candidates={"a": 8 * GIB, "b": 8 * GIB}),
    )


def test_a_share_is_charged_in_bytes_of_each_device() -> None:
    node = weighed(shared("a"), shared("b", memory_bytes=16 * GIB))
    (charge,) = placed(pod("25%"), node).charges
    assert charge.candidates == {"a": 6 * GIB, "b": 4 * GIB}


def test_a_device_that_only_later_pods_could_cause_is_charged_but_not_predicted() -> None:
    """Pods bound later can displace the pod to this device, where its share has a different
    size.
    """
    node = weighed(
        shared("a"),
        shared("b", free=3, allocated=1, memory_bytes=16 * GIB),
        plugin=DISTRIBUTED,
    )
    (charge,) = placed(pod("25%"), node).charges
    assert charge.candidates == {"a": 6 * GIB, "b": 4 * GIB}
    assert charge.beyond == ["b"]
    reservation = Reservation(namespace="default", name="p", charges=[charge])
    assert predicted(reservation) == ("a",)


def test_containers_that_can_share_a_device_are_charged_together() -> None:
    asked = pod("a=8Gi,b=2Gi", container("a"), container("b"), init=[container("i", gpus=0)])
    (charge,) = placed(asked, weighed(shared("x"))).charges
    assert (charge.count, charge.candidates) == (2, {"x": 10 * GIB})
    (charge,) = placed(asked, weighed(device("x"), device("y"))).charges
    assert charge.candidates == {"x": 8 * GIB, "y": 8 * GIB}


def test_instances_are_charged_all_containers_that_can_use_their_memory() -> None:
    (charge,) = placed(pod("3Gi", container(gpus=2)), weighed(mig("x", 1), mig("y", 1))).charges
    assert charge.candidates == {"x": 6 * GIB, "y": 6 * GIB}


def test_annotations_have_device_bytes_and_fraction() -> None:
    placement = placed(pod("6Gi"), weighed(device("a")))
    expected = {"devices.0": "a", "bytes.0": str(6 * GIB), "fraction.0": "0.2500"}
    assert written(placement) == expected
    body = json.loads(placement.annotations[PLACEMENT])
    assert body == {
        "node": "n",
        "decision": "uid-p.1",
        "containers": {
            "main": {"resource": GPU, "count": 1, "bytes": {"a": 6 * GIB}, "devices": ["a"]}
        },
        "asked": "6Gi",
    }


@pytest.mark.parametrize(
    ("vram", "limit", "count_bytes", "fraction"),
    [
        pytest.param("6Gi", "12Gi", 12 * GIB, "0.5000", id="amount"),
        pytest.param("6Gi", "50%", 12 * GIB, "0.5000", id="share"),
        pytest.param("6Gi", "main=6Gi", 6 * GIB, "0.2500", id="guaranteed"),
        pytest.param("12Gi", "25%", 12 * GIB, "0.5000", id="a share below the request"),
        pytest.param("6Gi", "80Gi", 24 * GIB, "1.0000", id="more than the device has"),
    ],
)
def test_the_limit_is_written_if_there_is_one(
    vram: str, limit: str, count_bytes: int, fraction: str
) -> None:
    limited = pod(vram, annotations={"headroom.gpu/vram-limit": limit})
    values = written(placed(limited, weighed(device("a"))))
    plain = written(placed(pod(vram), weighed(device("a"))))
    assert values == plain | {"limit-bytes.0": str(count_bytes), "limit-fraction.0": fraction}


def test_the_binding_of_a_pod_with_limits_has_at_most_256_annotations() -> None:
    for count, limits in ((40, 40), (64, 0)):
        names = [f"c{i}" for i in range(count)]
        many = pod("1Mi", *map(container, names), annotations={"headroom.gpu/vram-limit": "2Mi"})
        placement = placed(many, weighed(shared("a", free=64)))
        assert len(placement.annotations) <= 256
        assert sum(key.startswith("limit-bytes.") for key in written(placement)) == limits


def test_an_uncertain_device_is_not_written() -> None:
    placement = placed(pod("6Gi"), weighed(shared("a"), shared("b")))
    assert written(placement) == {"bytes.0": str(6 * GIB), "fraction.0": "0.2500"}
    main = json.loads(placement.annotations[PLACEMENT])["containers"]["main"]
    assert main["candidates"] == ["a", "b"]
    assert "devices" not in main


@pytest.mark.parametrize(
    ("node", "certain"),
    [
        pytest.param(
            weighed(shared("a", free=3, allocated=1), shared("b"), plugin=DISTRIBUTED),
            False,
            id="the only candidate: a pod on a may end before this pod is admitted",
        ),
        pytest.param(
            weighed(device("a", replicas=Replicas(allocated=1)), device("b")),
            False,
            id="the only free device",
        ),
        pytest.param(weighed(shared("b"), plugin=DISTRIBUTED), True, id="the only device"),
        pytest.param(
            weighed(shared("a", memory_bytes=4 * GIB), shared("b"), plugin=STEERED),
            True,
            id="steered",
        ),
    ],
)
def test_a_device_is_written_if_the_pod_can_get_no_other(node: NodeTerms, certain: bool) -> None:
    placement = placed(pod("6Gi"), node)
    assert list(placement.charges[0].candidates) == ["b"]
    assert written(placement).get("devices.0") == ("b" if certain else None)
    main = json.loads(placement.annotations[PLACEMENT])["containers"]["main"]
    assert main["devices" if certain else "candidates"] == ["b"]


@pytest.mark.parametrize(
    ("node", "certain"),
    [
        pytest.param(weighed(device("a"), device("b")), True, id="two unshared devices"),
        pytest.param(
            weighed(shared("a"), shared("b")), False, id="both replicas could be on one device"
        ),
        pytest.param(
            weighed(device("a"), device("b"), device("c")),
            False,
            id="two of three unshared devices",
        ),
    ],
)
def test_two_replicas_are_written_if_their_devices_are_certain(
    node: NodeTerms, certain: bool
) -> None:
    placement = placed(pod("1Gi", container(gpus=2)), node)
    assert ("devices.0" in written(placement)) is certain


def test_values_are_within_the_reservation_on_every_device() -> None:
    sizes = weighed(shared("a"), shared("b", memory_bytes=16 * GIB))
    assert written(placed(pod("25%"), sizes)) == {
        "bytes.0": str(4 * GIB),  # 25 % of b
        "fraction.0": "0.2500",
    }
    assert written(placed(pod("8Gi"), sizes)) == {
        "bytes.0": str(8 * GIB),
        "fraction.0": "0.3333",  # 8 of 24 GiB. The fraction of b, 0.5, would allow 12 GiB on a.
    }


def test_values_are_safe_on_a_device_to_which_the_pod_can_be_displaced() -> None:
    """The plugin would choose b, but a pod that is bound later can get b before this pod."""
    node = weighed(
        shared("a", free=3, allocated=1), shared("b", memory_bytes=16 * GIB), plugin=DISTRIBUTED
    )
    placement = placed(pod("8Gi"), node)
    assert list(placement.charges[0].candidates) == ["b"]
    assert written(placement)["fraction.0"] == "0.3333"  # a share of a


def test_values_apply_to_the_device_that_headroom_chooses() -> None:
    node = weighed(
        shared("a"),
        shared("b", memory_bytes=16 * GIB),
        plugin=STEERED,
    )
    placement = placed(pod("8Gi"), node)
    assert placement.charges[0].choices == ["b"]
    assert written(placement) == {
        "devices.0": "b",
        "bytes.0": str(8 * GIB),
        "fraction.0": "0.5000",
    }


@given(
    memories=st.lists(st.integers(8 * GIB, 192 * GIB), min_size=1, max_size=4),
    asked=st.one_of(
        st.integers(1, 8 * GIB).map(str), st.integers(1, 100).map("{}%".format), st.none()
    ),
    reserve_bytes=st.sampled_from([0, GIB // 2]),
)
def test_no_value_exceeds_the_reservation(
    memories: list[int], asked: str | None, reserve_bytes: int
) -> None:
    devices = [shared(f"g{i}", memory_bytes=size) for i, size in enumerate(memories)]
    node = weighed(*devices, reserve_bytes=reserve_bytes)
    snap, verdicts = judged(pod(asked), node)
    assume(verdicts.fits.all())
    placement = place(request(pod(asked)), snap, verdicts, 0)
    values = written(placement)
    reserved = placement.charges[0].candidates
    for each in devices:
        reserved_bytes = reserved[each.uuid]
        assert 0 < int(values["bytes.0"]) <= reserved_bytes
        assert int(Fraction(values["fraction.0"]) * each.memory_bytes) <= reserved_bytes


def test_a_fraction_is_rounded_down() -> None:
    third = placed(pod("8Gi"), weighed(device("a", memory_bytes=24 * GIB + 1)))
    assert written(third)["fraction.0"] == "0.3333"
    assert written(placed(pod(None), weighed(device("a"))))["fraction.0"] == "1.0000"
    assert written(placed(pod("1M"), weighed(device("a"))))["fraction.0"] == "0.0000"


def test_init_containers_do_not_count_in_the_index() -> None:
    placement = placed(pod("1Gi", container("a"), init=[container("i")]), weighed(device("x")))
    assert set(written(placement)) == {"bytes.0", "fraction.0"}
    assert set(json.loads(placement.annotations[PLACEMENT])["containers"]) == {"i", "a"}


def test_a_pod_without_gpus_gets_no_annotations() -> None:
    assert placed(pod(None, container(gpus=0)), weighed(device())) == Placement((), {})
