"""Tests which pods are evicted because they use more than their limit (headroom.gpu/vram-limit)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.contract.gpunode import ContainerCharge, GPUNode, Reservation
from headroom.contract.kube import Pod
from headroom.core.overuse.selection import TOLERANCE_BYTES, Overusing
from headroom.core.placement.policy import Rules
from tests.builders import GIB, MIB, container, gpunode, reservation, shared, use
from tests.builders import pod as plain_pod
from tests.state.test_overuse_decisions import found, node_of, reserved, shown

#: Evicts only pods whose annotation or limit allows it.
REPORT = Rules()
EVICT = Rules(evict_overuse=True)
LIMIT, ON_OVERUSE = "headroom.gpu/vram-limit", "headroom.gpu/on-overuse"


def pod(uid: str, limit: str | None = None, vram: str = "8Gi", **of: Any) -> Pod:
    own = {} if limit is None else {LIMIT: limit}
    annotations = {**own, **(of.pop("annotations", None) or {})}
    return plain_pod(vram, uid=uid, name=uid, node="n", annotations=annotations, **of)


def selected(node: GPUNode, *pods: Pod, rules: Rules = REPORT) -> dict[str, int | None]:
    """Return the exceeded limit of each selected pod by uid."""
    evictions = found(node, *pods, rules=rules)
    return {uid: each.exceeded_limit_bytes for uid, each in evictions.selected.items()}


def alone(used_gib: float) -> GPUNode:
    return node_of({"p": reserved(8)}, {"p": used_gib})


@pytest.mark.parametrize(
    ("limit", "used_gib", "evicted"),
    [
        pytest.param(None, 23, False, id="no limit"),
        pytest.param("none", 23, False, id="none"),
        pytest.param("12Gi", 8, False, id="within its request"),
        pytest.param("12Gi", 12, False, id="between request and limit"),
        pytest.param("12Gi", 12.5, False, id="512 MiB above its limit, about a CUDA context"),
        pytest.param("12Gi", 12.5 + 1 / 1024, True, id="above its limit"),
        pytest.param("50%", 12.5 + 1 / 1024, True, id="above its share"),
        pytest.param("main=12Gi", 12.5 + 1 / 1024, True, id="above its container's limit"),
        pytest.param("8Gi", 8.5, False, id="guaranteed, and a CUDA context"),
        pytest.param("8Gi", 8.5 + 1 / 1024, True, id="guaranteed"),
        pytest.param("4Gi", 23, False, id="the limit is below the request, so it is invalid"),
        pytest.param("much", 23, False, id="the limit cannot be read"),
    ],
)
def test_a_pod_above_its_limit_is_evicted_without_pressure(
    limit: str | None, used_gib: float, evicted: bool
) -> None:
    """It is also evicted if it is alone on its device, and if setting on_overuse is report."""
    assert set(selected(alone(used_gib), pod("p", limit))) == ({"p"} if evicted else set())


def test_a_share_is_a_share_of_the_allocatable_memory() -> None:
    (over,) = found(alone(12.6), pod("p", "50%")).selected.values()
    assert (over.reserved_bytes, over.exceeded_limit_bytes) == (8 * GIB, 12 * GIB)


@pytest.mark.parametrize(
    ("rules", "annotations", "evicted"),
    [
        pytest.param(REPORT, {}, True, id="the limit allows the eviction"),
        pytest.param(REPORT, {ON_OVERUSE: "report"}, True, id="its author cannot exempt it"),
        pytest.param(EVICT, {ON_OVERUSE: "report"}, True, id="its author cannot exempt it (evict)"),
        pytest.param(
            Rules(overuse_opt_out=True), {ON_OVERUSE: "report"}, False, id="the setting exempts it"
        ),
        pytest.param(EVICT, {"kubernetes.io/config.mirror": "x"}, False, id="static"),
    ],
)
def test_who_may_exempt_a_pod_above_its_limit(
    rules: Rules, annotations: Mapping[str, str], evicted: bool
) -> None:
    node, made = alone(13), pod("p", "12Gi", annotations=annotations)
    result = found(node, made, rules=rules)
    assert set(result.selected) == ({"p"} if evicted else set())
    assert result.unresolved == ()  # No other pod lacks memory.


def test_between_request_and_limit_the_rules_of_overuse_decide() -> None:
    node = node_of({"p": reserved(8), "q": reserved(12)}, {"p": 14, "q": 2})
    pods = pod("p", "20Gi"), pod("q", vram="12Gi")
    assert selected(node, *pods, rules=EVICT) == {"p": None}
    assert selected(node, *pods) == {}
    spare = node_of({"p": reserved(8), "q": reserved(12)}, {"p": 12, "q": 2})
    assert selected(spare, *pods, rules=EVICT) == {}


def test_pods_above_their_limits_come_before_pods_above_their_requests() -> None:
    held = {"p": reserved(2), "q": reserved(4), "r": reserved(12)}
    node = node_of(held, {"p": 9, "q": 7, "r": 2})
    small = pod("p", vram="2Gi", priority=-5)
    assert selected(node, small, pod("q", vram="4Gi"), pod("r", vram="12Gi"), rules=EVICT) == {
        "p": None
    }
    limited = pod("q", "6Gi", vram="4Gi", priority=1000)
    assert selected(node, small, limited, pod("r", vram="12Gi"), rules=EVICT) == {"q": 6 * GIB}


def test_among_pods_above_their_limits_the_largest_excess_and_then_the_priority_decides() -> None:
    held = {"p": reserved(4), "q": reserved(4)}
    by_excess = node_of(held, {"p": 7, "q": 8})
    pods = pod("p", "5Gi", vram="4Gi"), pod("q", "6Gi", vram="4Gi", priority=9)
    assert set(selected(by_excess, *pods)) == {"p"}  # 1.5 of 5 GiB; q 1.5 of 6 GiB
    equal = node_of(held, {"p": 7, "q": 7})
    pods = pod("p", "5Gi", vram="4Gi", priority=1), pod("q", "5Gi", vram="4Gi")
    assert set(selected(equal, *pods)) == {"q"}


def test_a_pod_that_may_not_be_evicted_does_not_protect_another_pod_above_its_limit() -> None:
    held = {"p": reserved(4), "q": reserved(4)}
    node = node_of(held, {"p": 9, "q": 7})
    opted = pod("p", "4Gi", vram="4Gi", namespace="a", annotations={ON_OVERUSE: "report"})
    other = pod("q", "5Gi", vram="4Gi", namespace="b")
    rules = Rules(evict_overuse=True, overuse_opt_out=True)
    assert set(selected(node, opted, other, rules=rules)) == {"q"}


def test_no_pod_is_evicted_in_place_of_a_protected_pod_above_its_limit() -> None:
    """The author of p must not be able to decide that the pod of another namespace is evicted."""
    held = {"p": reserved(2, namespace="a"), "q": reserved(4, namespace="b"), "r": reserved(12)}
    node = node_of(held, {"p": 7, "q": 9, "r": 2})
    opted = pod("p", "6Gi", vram="2Gi", namespace="a", annotations={ON_OVERUSE: "report"})
    others = pod("q", vram="4Gi", namespace="b"), pod("r", vram="12Gi")
    result = found(node, opted, *others, rules=Rules(evict_overuse=True, overuse_opt_out=True))
    assert (dict(result.selected), result.unresolved) == ({}, ("a",))


def test_each_device_has_its_own_limit() -> None:
    """A pod with two GPUs is evicted if it exceeds its limit on one of them."""
    charge = reservation({"a": 8 * GIB, "b": 8 * GIB}, count=2)
    for used_gib, evicted in ((12, {}), (13, {"p": 12 * GIB})):
        node = gpunode(
            shared("a", free=1, allocated=1, used_bytes=2 * GIB),
            shared("b", free=1, allocated=1, used_bytes=used_gib * GIB),
            reservations={"p": charge},
            pods=[use("p", "a", 2 * GIB), use("p", "b", used_gib * GIB)],
        )
        made = plain_pod(
            "8Gi", container(gpus=2), uid="p", name="p", node="n", annotations={LIMIT: "12Gi"}
        )
        assert selected(node, made) == evicted


def two_containers(on_cache: str) -> GPUNode:
    """Return a node on which container main uses 8 GiB of a, and cache uses 6 GiB."""
    made = reservation({"a": 10 * GIB, "b": 10 * GIB}, count=2)
    (charge,) = made.charges
    parts = [ContainerCharge("main", 1, 8 * GIB), ContainerCharge("cache", 1, 2 * GIB)]
    charge = msgspec.structs.replace(charge, containers=parts)
    made = msgspec.structs.replace(made, charges=[charge])
    rows = [
        use("p", "a", 8 * GIB, container="main", replica="a::1"),
        use("p", on_cache, 6 * GIB, container="cache", replica=f"{on_cache}::2"),
    ]
    used = {"a": 8 * GIB, "b": 0}
    used[on_cache] += 6 * GIB
    devices = [
        shared(uuid, free=1, allocated=2, used_bytes=used_bytes)
        for uuid, used_bytes in used.items()
    ]
    return gpunode(*devices, reservations={"p": made}, pods=rows)


@pytest.mark.parametrize(
    ("on_cache", "limit", "evicted"),
    [
        pytest.param("a", "main=10Gi,cache=4Gi", {}, id="one device: 14 of 14 GiB"),
        pytest.param("a", "main=8Gi,cache=4Gi", {"p": 12 * GIB}, id="one device: 14 of 12 GiB"),
        pytest.param("b", "main=10Gi,cache=4Gi", {"p": 4 * GIB}, id="two devices: 6 of 4 GiB"),
        pytest.param("b", "main=10Gi,cache=6Gi", {}, id="two devices: 6 of 6 GiB"),
        pytest.param("b", "main=10Gi", {}, id="a container without a limit is invalid"),
    ],
)
def test_the_limits_of_the_containers_on_a_device_are_added(
    on_cache: str, limit: str, evicted: dict[str, int]
) -> None:
    made = plain_pod(
        "main=8Gi,cache=2Gi",
        *(container("main"), container("cache")),
        uid="p",
        name="p",
        node="n",
        annotations={LIMIT: limit},
    )
    assert selected(two_containers(on_cache), made) == evicted


def test_a_pod_that_starts_alone_may_not_exceed_its_limit_either() -> None:
    starting = msgspec.structs.replace(reserved(8), phase="starting", start_timeout_s=600)
    node = node_of({"p": starting}, {"p": 13})
    made = pod("p", "12Gi", annotations={"headroom.gpu/startup": "alone"})
    assert selected(node, made) == {"p": 12 * GIB}


def test_the_message_names_use_and_limit() -> None:
    (over,) = shown(alone(13), pod("p", "12Gi"), rules=REPORT).values()
    assert (over.outcome, over.limit_bytes) == ("next", 12 * GIB)
    assert over.message == "evicted next; it uses 13.0 GiB, and its limit is 12.0 GiB"
    (over,) = shown(alone(10), pod("p", "12Gi"), rules=REPORT).values()
    assert (over.outcome, over.limit_bytes) == ("none", 12 * GIB)
    assert over.message == "not evicted, because no other pod is on its GPU"
    opted = pod("p", "12Gi", annotations={ON_OVERUSE: "report"})
    (over,) = shown(alone(13), opted, rules=Rules(overuse_opt_out=True)).values()
    assert over.outcome == "protected"


@dataclass(frozen=True)
class Life:
    """A pod on a GPU of 24 GiB. Amounts are in MiB."""

    request: int
    limit: int | None
    used: int | None
    priority: int
    namespace: str
    on_overuse: str | None
    adopted: bool

    def pod(self, uid: str, limited: bool = True) -> Pod:
        annotations = {}
        if self.limit is not None and limited:
            annotations[LIMIT] = f"{self.limit}Mi"
        if self.on_overuse is not None:
            annotations[ON_OVERUSE] = self.on_overuse
        of = {"namespace": self.namespace, "priority": self.priority, "annotations": annotations}
        return pod(uid, None, f"{self.request}Mi", **of)

    def reservation(self) -> Reservation:
        flags = ["adopted"] if self.adopted else []
        return reserved(self.request / 1024, *flags, namespace=self.namespace)


amounts = st.sampled_from([1024, 2048, 4096, 6144, 8192])
lives = st.builds(
    Life,
    request=amounts,
    # A limit below the request is invalid.
    limit=st.one_of(st.none(), st.sampled_from([512, 1024, 2048, 4096, 6144, 8192, 20480])),
    used=st.one_of(st.none(), st.sampled_from([0, 1000, 2048, 2561, 4700, 6144, 8704, 8705, 9000])),
    priority=st.integers(-1, 1),
    namespace=st.sampled_from(["a", "b"]),
    on_overuse=st.sampled_from([None, "report", "evict"]),
    adopted=st.booleans(),
)


@settings(max_examples=200)
@given(st.lists(lives, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_limits_evict_no_pod_within_its_request_and_change_nothing_for_other_pods(
    of: list[Life], evicts: bool, opt_out: bool
) -> None:
    rules = Rules(evict_overuse=evicts, overuse_opt_out=opt_out)
    named = {f"p{index}": each for index, each in enumerate(of)}
    node = node_of(
        {uid: each.reservation() for uid, each in named.items()},
        {uid: None if each.used is None else each.used / 1024 for uid, each in named.items()},
    )
    limited = found(node, *(each.pod(uid) for uid, each in named.items()), rules=rules)
    before = found(node, *(each.pod(uid, False) for uid, each in named.items()), rules=rules)

    def exceeds(each: Life) -> bool:
        return (
            each.limit is not None
            and each.limit >= each.request
            and (each.used or 0) * MIB > each.limit * MIB + TOLERANCE_BYTES
        )

    for uid, over in limited.decided.items():
        each = named[uid]
        used_bytes = (each.used or 0) * MIB
        assert used_bytes > over.reserved_bytes + TOLERANCE_BYTES
        if not each.adopted:
            assert over.reserved_bytes == each.request * MIB
        assert (over.exceeded_limit_bytes is not None) == exceeds(each)
        if over.exceeded_limit_bytes is None:
            # The pods of an unlimited cluster that are selected are still the only candidates.
            assert uid in before.selected
    if not any(map(exceeds, of)):
        assert limited == before
    above = [each for each in of if exceeds(each)]
    exempt = [each for each in above if opt_out and each.on_overuse == "report"]
    believed = sum(each.used or 0 for each in of) <= 24 * 1024
    if believed and len(exempt) < len(above):
        (over,) = limited.selected.values()
        assert isinstance(over, Overusing)
        assert over.exceeded_limit_bytes is not None
