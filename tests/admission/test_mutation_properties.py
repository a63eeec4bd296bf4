"""Tests properties of the mutation that hold for every pod."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.admission.reviews import (
    GATE_IMAGE,
    all_containers,
    around,
    container,
    manifest,
    mutated,
    node,
)

# The strategies below draw any pod.

ENV = st.lists(
    st.sampled_from(
        [
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "HEADROOM_VRAM_BYTES", "value": "7"},
            {"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "7"},
            {"name": "OTHER", "value": "x"},
        ]
    ),
    max_size=2,
    unique_by=lambda each: each["name"],
)


@st.composite
def containers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    made = container(name, draw(st.integers(0, 2)))
    env = draw(st.none() | ENV)
    if env is not None or draw(st.booleans()):
        made["env"] = env
    if draw(st.booleans()):
        made["resources"].pop("requests")
    return made


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    made = manifest(
        draw(st.sampled_from([None, "8Gi", "25%", "8Gj", "c0=8Gi"])),
        *[draw(containers(f"c{i}")) for i in range(draw(st.integers(1, 3)))],
        annotations=draw(
            st.dictionaries(
                st.sampled_from(
                    [
                        "headroom.gpu/gated",
                        "headroom.gpu/share",
                        "headroom.gpu/placement",
                        "headroom.gpu/devices.0",
                        "foreign/key~x",
                    ]
                ),
                st.sampled_from(["true", "false", "env", "limit", "{}"]),
            )
        ),
        schedulerName=draw(st.sampled_from(["default-scheduler", "headroom", "other"])),
    )
    init = [draw(containers(f"i{i}")) for i in range(draw(st.integers(0, 2)))]
    if init or draw(st.booleans()):
        made["spec"]["initContainers"] = init or draw(st.sampled_from([None, []]))
    return made


ARROUNDS = st.builds(
    lambda choices, default, mirror, share: around(
        *(
            node(f"n{i}", choice, driver="615.1", strategy="cdi-cri", limits="ok")
            for i, choice in enumerate(choices)
        ),
        annotations={
            **({"headroom.gpu/default-vram": default} if default else {}),
            **({"headroom.gpu/share": share} if share else {}),
        },
        gate_image=GATE_IMAGE,
        mirror=mirror,
        counts=mirror,
    ),
    st.lists(st.sampled_from([None, "gated", "steered"]), max_size=3),
    st.sampled_from(["", "4Gi", "c1=4Gi"]),
    st.booleans(),
    st.sampled_from(["", "env", "limit"]),
)


@given(pods(), ARROUNDS)
def test_a_repeated_mutation_changes_nothing(obj: dict[str, Any], where: Any) -> None:
    stored, _ = mutated(obj, where)
    again, answer = mutated(stored, where)
    # The webhook writes the complete gate each time, because other webhooks may have changed fields
    # that it does not compare.
    of_gate = "/spec/initContainers/0"
    assert {operation.path for operation in answer.operations} <= {of_gate}
    assert again == stored


@given(pods(), ARROUNDS)
def test_fields_of_others_stay_unchanged(obj: dict[str, Any], where: Any) -> None:
    stored, _ = mutated(obj, where)
    assert without_ours(stored) == without_ours(obj)
    names = [c["name"] for c in stored["spec"].get("initContainers") or ()]
    assert names.count("headroom-gate") <= 1
    for each in all_containers(stored):
        variables = [v["name"] for v in each.get("env") or ()]
        assert len(variables) == len(set(variables))


#: All variables that Headroom can write into a container.
WRITTEN = {
    "HEADROOM_VRAM_BYTES",
    "HEADROOM_VRAM_FRACTION",
    "NVIDIA_GPU_MEMORY_LIMIT",
    "NVIDIA_GPU_MEMORY_REQUEST",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
}


#: Prefixes of annotations that Headroom writes. The last two exclude the gate's connections from
#: the proxy of a service mesh.
OURS = (
    "headroom.gpu/",
    "traffic.sidecar.istio.io/excludeOutboundPorts",
    "config.linkerd.io/skip-outbound-ports",
)


def without_ours(obj: dict[str, Any]) -> Any:
    """Return the pod without the fields that Headroom can write. Keep variables that a user has
    set.
    """
    spec = obj["spec"]
    metadata = dict(obj["metadata"])
    annotations = metadata.pop("annotations", None) or {}
    scheduler = spec["schedulerName"]
    return (
        metadata,
        {key: text for key, text in annotations.items() if not key.startswith(OURS)},
        "-" if scheduler in ("default-scheduler", "headroom") else scheduler,
        [_bare(c) for c in all_containers(obj) if c["name"] != "headroom-gate"],
    )


def _bare(each: dict[str, Any]) -> Any:
    env = [
        v
        for v in each.get("env") or ()
        if v["name"] not in WRITTEN or (v.get("value") in ("all", "7") and "valueFrom" not in v)
    ]
    amounts = {
        key: {
            n: q
            for n, q in held.items()
            if n not in ("headroom.gpu/vram", "headroom.gpu/vram-bytes")
        }
        for key, held in each["resources"].items()
    }
    amounts = {key: held for key, held in amounts.items() if held}
    rest = {k: v for k, v in each.items() if k not in ("env", "resources")}
    return rest, env, amounts


def test_in_mode_observe_no_pod_depends_on_a_placement() -> None:
    """In this mode, a pod that does not fit is bound without a placement."""
    gated = node(choice="gated")
    asked = {"headroom.gpu/share": "env"}
    places = around(gated, gate_image=GATE_IMAGE, observes=True)
    for obj in (manifest(annotations=asked), manifest(annotations={"headroom.gpu/gated": "true"})):
        before = obj["spec"] | {"schedulerName": "headroom"}
        stored, _ = mutated(obj, places)
        assert stored["spec"] == before
        enforced, _ = mutated(obj, around(gated, gate_image=GATE_IMAGE))
        assert enforced["spec"] != before
