"""Tests pods that start alone: where they fit, when their start ends, and that no other pod
waits.
"""

from typing import Any

import msgspec
import pytest

from headroom.contract.annotations import STARTUP, STARTUP_TIMEOUT
from headroom.contract.gpunode import RUNNING, STARTING, Plugin, PodUse, Reservation
from headroom.contract.kept_fields import kept_pod
from headroom.contract.kube import (
    Container,
    ContainerState,
    ContainerStatus,
    InitContainer,
    Pod,
    PodCondition,
    PodStatus,
    Present,
    Waiting,
)
from headroom.contract.reasons import Reason
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import place
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, understand
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from headroom.core.starting_alone.phase import Start, StartEnd
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    NOW_S,
    choosing,
    container,
    device,
    mig,
    pod,
    reason_for,
    request,
    reservation,
    shared,
    use,
    weighed,
)

STUCK_AFTER_S = 60.0

ALONE = {STARTUP: "alone"}
WAITS = Reason.OTHER_STARTING
STEERED = Plugin(allocation_policy="distributed", topology_manager_policy="none", steered=[GPU])


def alone(*containers: Container, vram: str | None = "4Gi", **annotations: str) -> Pod:
    return pod(vram, *containers, annotations={**ALONE, **annotations})


def starting(*on: str, gib: int = 4, phase: Any = STARTING, **of: Any) -> Reservation:
    made = reservation({uuid: gib * GIB for uuid in on}, **of)
    return msgspec.structs.replace(made, phase=phase, start_timeout_s=600)


def two_gpus(b_allocated: int = 0, plugin: Plugin = DISTRIBUTED, **how: Any) -> NodeTerms:
    """Return a node on whose GPU a one pod starts alone. The plugin gives the next pod GPU b if b
    has no pod.
    """
    rows = [use("s", "a", GIB, replica="a::0")]
    rows += [use("q", "b", GIB, replica="b::0")] * b_allocated
    held = {"s": starting("a", "b"), "q": reservation({"b": GIB})}
    return weighed(
        shared("a", free=3, allocated=1, used_bytes=GIB),
        shared("b", free=4 - b_allocated, allocated=b_allocated, used_bytes=b_allocated * GIB),
        pods=rows,
        reservations=held if b_allocated else {"s": held["s"]},
        plugin=plugin,
        **how,
    )


def test_a_pod_waits_for_the_starting_pod_on_its_next_device() -> None:
    assert reason_for(alone(), two_gpus()) is None  # The plugin chooses b.
    assert reason_for(alone(), two_gpus(b_allocated=1)) is WAITS  # The pod can get a or b.
    assert reason_for(alone(), two_gpus(plugin=Plugin())) is WAITS  # The policy is unknown.


def test_pods_that_do_not_start_alone_never_wait() -> None:
    assert reason_for(pod("4Gi"), two_gpus(b_allocated=1)) is None


@pytest.mark.parametrize("phase", ["", RUNNING])
def test_pods_that_have_started_block_no_pod(phase: str) -> None:
    one_gpu = weighed(
        shared("a", free=3, allocated=1, used_bytes=GIB),
        pods=[use("s", "a", GIB, replica="a::0")],
        reservations={"s": starting("a", phase=phase)},
    )
    assert reason_for(alone(), one_gpu) is None


def test_an_unconfirmed_pod_counts_on_each_device_that_both_could_get() -> None:
    """Without pods on two GPUs, the plugin gives each pod its own GPU. With one GPU, both pods get
    it.
    """
    unconfirmed = {"s": starting("a", "b")}
    both = [shared("a"), shared("b")]
    apart = weighed(*both, reservations=unconfirmed, plugin=DISTRIBUTED)
    assert reason_for(alone(), apart) is None
    packed = msgspec.structs.replace(DISTRIBUTED, allocation_policy="packed")
    assert reason_for(alone(), weighed(*both, reservations=unconfirmed, plugin=packed)) is WAITS
    assert reason_for(alone(), weighed(shared("a"), reservations=unconfirmed)) is WAITS


def test_a_pod_never_shares_an_unshared_device() -> None:
    node = weighed(device("a"), device("b"), reservations={"s": starting("a", "b")})
    assert reason_for(alone(), node) is None


def test_a_pod_with_several_devices_waits_for_each_of_them() -> None:
    """The pod gets both GPUs, and one of them has a starting pod."""
    two = alone(container(gpus=2))
    assert reason_for(two, two_gpus()) is WAITS
    unconfirmed = weighed(
        shared("a"), shared("b"), reservations={"s": starting("a", "b")}, plugin=DISTRIBUTED
    )
    assert reason_for(two, unconfirmed) is WAITS
    assert reason_for(pod("4Gi", container(gpus=2)), two_gpus()) is None


def test_mig_instances_that_share_memory_are_one_device() -> None:
    resource = "nvidia.com/mig-1c.2g.20gb"
    mates = [mig("m1", 1, resource=resource), mig("m2", 1, resource=resource)]
    other = mig("m3", 2, resource=resource)
    of_mig = alone(container(resource=resource))
    held = {"s": starting("m1", resource=resource)}
    rows = [use("s", "m1", GIB, replica="m1")]
    taken = msgspec.structs.replace(
        mates[0], replicas=msgspec.structs.replace(mates[0].replicas, free=0, allocated=1)
    )
    assert reason_for(of_mig, weighed(taken, mates[1], pods=rows, reservations=held)) is WAITS
    assert reason_for(of_mig, weighed(taken, other, pods=rows, reservations=held)) is None


def test_a_steered_node_gives_the_pod_a_device_where_no_pod_is_starting() -> None:
    node = two_gpus(b_allocated=1, plugin=STEERED)
    snap = build([node])
    verdicts = fit(request(alone()), snap, snap.rows(["n"]), NOW_S)
    placed = place(request(alone()), snap, verdicts, 0)
    assert [charge.choices for charge in placed.charges] == [["b"]]


def test_the_starting_pod_is_the_reason_on_a_steered_node_if_only_its_device_has_memory() -> None:
    full = weighed(
        shared("a", free=3, allocated=1, used_bytes=GIB),
        shared("b", free=3, allocated=1, used_bytes=23 * GIB),
        pods=[use("s", "a", GIB, replica="a::0"), use("q", "b", 23 * GIB, replica="b::0")],
        reservations={"s": starting("a"), "q": reservation({"b": 23 * GIB})},
        plugin=STEERED,
    )
    assert reason_for(alone(), full) is WAITS
    assert reason_for(alone(vram="22Gi"), full) is Reason.MEMORY_ON_ANY


def test_missing_memory_takes_precedence_over_a_starting_pod_as_the_reason() -> None:
    assert reason_for(alone(vram="22Gi"), two_gpus(1)) is Reason.MEMORY_ON_SOME


def test_a_pod_that_chooses_its_devices_waits_for_each_starting_pod() -> None:
    """The pod may use all devices, including devices that the plugin would give to the other
    pod.
    """
    rules = Rules(visible_devices=Rules().visible_devices.CHARGE)
    everywhere = request(alone(choosing(container())), rules=rules)
    unconfirmed = {"s": starting("a", "b")}
    node = weighed(shared("a"), shared("b"), reservations=unconfirmed, plugin=DISTRIBUTED)
    snap = build([node])
    assert fit(everywhere, snap, snap.rows(["n"]), NOW_S).reason(0) is WAITS
    idle = build([weighed(shared("a"), shared("b"), plugin=DISTRIBUTED)])
    assert fit(everywhere, idle, idle.rows(["n"]), NOW_S).reason(0) is None


def test_the_reservation_is_starting_until_the_timeout_that_the_settings_allow() -> None:
    snap = build([weighed(shared("a"))])
    for text, rules, timeout_s in (
        (None, Rules(), 600),
        ("1h30m", Rules(max_startup_timeout_s=86_400), 5400),
        ("90s", Rules(), 90),
        ("2h", Rules(), 3600),
    ):
        asks = alone(**({} if text is None else {STARTUP_TIMEOUT: text}))
        asked = request(asks, rules=rules)
        verdicts = fit(asked, snap, snap.rows(["n"]), NOW_S)
        made = place(asked, snap, verdicts, 0).reservation("default", "p")
        assert (made.phase, made.start_timeout_s) == (STARTING, timeout_s)
    ordinary = request("4Gi")
    verdicts = fit(ordinary, snap, snap.rows(["n"]), NOW_S)
    made = place(ordinary, snap, verdicts, 0).reservation("default", "p")
    assert (made.phase, made.start_timeout_s) == ("", 0)


@pytest.mark.parametrize(
    ("annotations", "reason", "message"),
    [
        (
            {STARTUP: "first"},
            Reason.BAD_STARTUP,
            "annotation headroom.gpu/startup: 'first' is not one of alone. "
            "Example: headroom.gpu/startup: alone",
        ),
        (
            {**ALONE, STARTUP_TIMEOUT: "ten minutes"},
            Reason.BAD_STARTUP_TIMEOUT,
            "annotation headroom.gpu/startup-timeout: 'ten minutes' is not a duration from 1s to "
            "24h. Example: headroom.gpu/startup-timeout: 10m",
        ),
        (
            {STARTUP_TIMEOUT: "25h"},
            Reason.BAD_STARTUP_TIMEOUT,
            "annotation headroom.gpu/startup-timeout: '25h' is not a duration from 1s to 24h. "
            "Example: headroom.gpu/startup-timeout: 10m",
        ),
    ],
)
def test_an_invalid_annotation_is_reported(
    annotations: dict[str, str], reason: Reason, message: str
) -> None:
    wrong = understand(pod("4Gi", annotations=annotations), None, Rules())
    assert wrong == Unreadable(reason, message)
    assert understand(pod("4Gi", container(gpus=0), annotations=annotations), None, Rules()) != (
        wrong
    )


def test_status_fields_that_show_the_end_of_a_start_are_kept_for_pods_that_start_alone() -> None:
    ready = of_kubelet(PROBED, ready=True)
    bound = msgspec.structs.replace(ready, spec=msgspec.structs.replace(ready.spec, node_name="n"))
    assert end_of(kept_pod(bound)) is StartEnd.READY
    not_ready = of_kubelet(PROBED, waits="ErrImagePull")
    assert end_of(kept_pod(not_ready)) is StartEnd.STUCK
    metadata = msgspec.structs.replace(bound.metadata, annotations=None)
    ordinary = kept_pod(msgspec.structs.replace(bound, metadata=metadata))
    assert ordinary.status == PodStatus(
        phase="Running",
        init_container_statuses=ready.status and ready.status.init_container_statuses,
    )
    assert ordinary.spec.containers == [container()]


ROW = use("p", "a", GIB, container="main", started_at="2026-11-21T00:00:00Z")
SETTLED = msgspec.structs.replace(ROW, settled_at="2026-11-21T00:01:00Z")
NOT_STARTED = use("p", "b", 0, container="main")
PROBED = msgspec.structs.replace(container(), readiness_probe=Present())


def of_kubelet(
    *containers: Container,
    ready: bool = False,
    waits: str = "",
    running: bool = False,
    init_waits: str = "",
) -> Pod:
    """Return a pod that starts alone, with the status that its kubelet writes."""

    def state(why: str) -> ContainerState:
        return ContainerState(waiting=Waiting(reason=why)) if why else ContainerState()

    of_app = ContainerState(running=Present()) if running else state(waits)
    conditions = [PodCondition(type="Ready", status="True" if ready else "False")]
    status = PodStatus(
        phase="Running",
        conditions=conditions,
        container_statuses=[ContainerStatus(name="main", state=of_app)],
        init_container_statuses=[ContainerStatus(name="i", state=state(init_waits))],
    )
    return msgspec.structs.replace(alone(*containers), status=status)


def end_of(
    of: Pod | None = None, *rows: Any, age_s: float | None = 100.0, gpu: tuple[str, ...] = ("main",)
) -> StartEnd | None:
    return Start(age_s, timeout_s=600, pod=of, gpu_containers=gpu, rows=rows).end


def test_a_start_ends_when_the_probed_gpu_containers_are_ready() -> None:
    assert end_of(of_kubelet(PROBED, ready=True, running=True)) is StartEnd.READY
    assert end_of(of_kubelet(PROBED, running=True)) is None
    by_startup = msgspec.structs.replace(container(), startup_probe=Present())
    assert end_of(of_kubelet(by_startup, ready=True)) is StartEnd.READY
    assert end_of(of_kubelet(PROBED, container("log", gpus=0), ready=True)) is StartEnd.READY


def test_readiness_does_not_end_a_start_if_a_gpu_container_has_no_probe() -> None:
    assert end_of(of_kubelet(container(), ready=True, running=True)) is None
    proxy = msgspec.structs.replace(container("proxy", gpus=0), readiness_probe=Present())
    assert end_of(of_kubelet(container(), proxy, ready=True, running=True)) is None
    assert end_of(of_kubelet(PROBED, container("x"), ready=True), gpu=("main", "x")) is None


def test_a_start_ends_when_the_use_of_all_its_devices_has_settled() -> None:
    assert end_of(of_kubelet(running=True), SETTLED) is StartEnd.SETTLED
    assert end_of(of_kubelet(running=True), SETTLED, NOT_STARTED) is StartEnd.SETTLED
    assert end_of(of_kubelet(running=True), SETTLED, ROW) is None
    assert end_of(of_kubelet(running=True), NOT_STARTED) is None
    assert end_of(None, SETTLED) is StartEnd.SETTLED  # Deleted, but its containers may still run.


def row(container: str, device: str = "a", settled: bool = True) -> PodUse:
    """Return a row of a container that has begun to use the device."""
    settled_at = SETTLED.settled_at if settled else ""
    return msgspec.structs.replace(ROW, container=container, device=device, settled_at=settled_at)


def test_a_start_lasts_until_the_engine_has_settled_whatever_ran_before_it() -> None:
    """The init container converts weights on the GPU."""
    convert = InitContainer(name="convert", resources=container().resources)
    of = of_kubelet(running=False)
    of = msgspec.structs.replace(
        of, spec=msgspec.structs.replace(of.spec, init_containers=[convert])
    )
    gpu = ("convert", "main")
    assert end_of(of, row("convert"), gpu=gpu) is None
    assert end_of(of, row("convert"), row("main", settled=False), gpu=gpu) is None
    assert end_of(of, row("convert", settled=False), row("main"), gpu=gpu) is StartEnd.SETTLED
    assert end_of(of, row("convert"), gpu=("convert",)) is StartEnd.SETTLED  # There is no engine.


def test_a_start_lasts_until_each_engine_of_the_pod_has_settled() -> None:
    of = of_kubelet(container("one"), container("two"), running=True)
    gpu = ("one", "two")
    assert end_of(of, row("one"), gpu=gpu) is None  # The image of the other engine is being pulled.
    assert end_of(of, row("one"), row("two", "b", settled=False), gpu=gpu) is None
    assert end_of(of, row("one"), row("two", "b"), gpu=gpu) is StartEnd.SETTLED
    sidecar = InitContainer(name="cache", resources=container().resources, restart_policy="Always")
    beside = of_kubelet(running=True)
    beside = msgspec.structs.replace(
        beside, spec=msgspec.structs.replace(beside.spec, init_containers=[sidecar])
    )
    gpu = ("cache", "main")
    assert end_of(beside, row("cache"), gpu=gpu) is None
    assert end_of(beside, row("main"), gpu=gpu) is None
    assert end_of(beside, row("main"), row("cache"), gpu=gpu) is StartEnd.SETTLED


def test_the_use_of_a_device_that_the_pod_chose_itself_counts_for_each_container() -> None:
    """The kubelet gave the pod a replica of device a, but the pod uses device b."""
    idle = msgspec.structs.replace(NOT_STARTED, device="a")
    of = of_kubelet(running=True)
    assert end_of(of, idle, row("", "b")) is StartEnd.SETTLED
    assert end_of(of, idle, row("", "b", settled=False)) is None


def test_a_start_that_never_settles_times_out() -> None:
    assert end_of(of_kubelet(running=True), ROW, age_s=599.9) is None
    assert end_of(of_kubelet(running=True), ROW, age_s=600.0) is StartEnd.TIMED_OUT
    assert end_of(None, age_s=600.0) is StartEnd.TIMED_OUT
    assert end_of(age_s=None) is StartEnd.TIMED_OUT  # The time of the bind is invalid.
    assert end_of(age_s=-3600.0) is StartEnd.TIMED_OUT  # A clock was wrong.
    assert end_of(age_s=-5.0) is None


@pytest.mark.parametrize("why", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"])
def test_a_pod_that_the_kubelet_cannot_start_blocks_the_device_for_a_minute(why: str) -> None:
    assert end_of(of_kubelet(waits=why), age_s=STUCK_AFTER_S) is StartEnd.STUCK
    assert end_of(of_kubelet(init_waits=why), age_s=STUCK_AFTER_S) is StartEnd.STUCK
    assert end_of(of_kubelet(waits=why), age_s=STUCK_AFTER_S - 1) is None
    assert end_of(of_kubelet(running=True, init_waits=why), age_s=STUCK_AFTER_S) is None


@pytest.mark.parametrize("why", ["ContainerCreating", "PodInitializing", "CrashLoopBackOff"])
def test_a_pod_that_may_still_use_the_device_blocks_it(why: str) -> None:
    assert end_of(of_kubelet(waits=why), age_s=599.0) is None
