"""Selects GPUs to cordon, previews the effect, and edits the annotation. Only pure functions."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from headroom.contract.annotations import CORDON, DEVICE_CHOICE, parse_cordon
from headroom.contract.commands import command
from headroom.contract.errors import BadAnnotation
from headroom.contract.quantity import gib
from headroom.kubectl.debug_api_client import BAD_INPUT, CommandError
from headroom.kubectl.top import counted

Body = Mapping[str, Any]
#: A whole UUID as the driver reports it, also for a MIG device of an old driver.
_WHOLE_UUID = re.compile(
    r"(MIG-)?(GPU-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/\d+/\d+)?", re.IGNORECASE
)
_UUID_EXAMPLE = "GPU-5fd9a1c4-3c3e-4f5a-9a57-0f4e7d1b2c3d"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG device that can be cordoned."""

    uuid: str
    #: Index of the physical GPU; None if the debug API did not report it.
    index: int | None = None
    #: The devices that take no pods if it is cordoned: the device itself, or all MIG devices of the
    #: GPU.
    devices: tuple[Body, ...] = field(default=(), compare=False)
    #: For a MIG device, the UUID of its physical GPU.
    parent: str | None = None

    def __str__(self) -> str:
        return self.uuid if self.index is None else f"{self.uuid} (GPU {self.index})"


def gpus_of(node: Body, parents: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs and MIG devices of a node that can be cordoned.

    ``node`` is the body of the debug API. ``parents`` maps each MIG device to its physical GPU,
    which can be cordoned too.
    """
    found = []
    of_parent: dict[str, list[Body]] = {}
    for device in node["devices"]:
        parent = parents.get(device["uuid"])
        found.append(Gpu(device["uuid"], device["driver_index"], (device,), parent))
        if parent is not None:
            of_parent.setdefault(parent, []).append(device)
    for parent, devices in of_parent.items():
        found.append(Gpu(parent, devices[0]["driver_index"], tuple(devices)))
    return found


def selected(node: str, gpus: Sequence[Gpu], given: Iterable[str]) -> list[Gpu]:
    """Return the GPU for each word: a UUID, the unique start of a UUID, or an index.

    An index selects a physical GPU. Raises ``CommandError`` that lists the node's GPUs.
    """
    chosen: dict[str, Gpu] = {}
    for word in given:
        found = [gpu for gpu in gpus if gpu.uuid == word]
        if not found and word.isascii() and word.isdecimal():
            found = [gpu for gpu in gpus if gpu.index == int(word) and gpu.parent is None]
        elif not found and word:
            found = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        if len(found) != 1:
            known = ", ".join(map(str, found or gpus)) or "none"
            what = f"node {node} has no GPU {word!r}. It has"
            if found:
                what = f"{word!r} is not unique on node {node}: {len(found)} GPUs match"
            example = (found or gpus)[0].uuid if found or gpus else _UUID_EXAMPLE
            raise CommandError(
                f"{what}: {known}. "
                f"Example: {command('kubectl', 'headroom', 'cordon', node, example)}",
                BAD_INPUT,
            )
        chosen[found[0].uuid] = found[0]
    return list(chosen.values())


def whole_uuids(given: Sequence[str], why: str) -> list[Gpu]:
    """Return the GPUs with these whole UUIDs, without a list of the node's GPUs.

    ``why`` is the reason why the debug API cannot be reached. Raises ``CommandError`` if a word is
    only the start of a UUID, or an index.
    """
    for word in given:
        if not _WHOLE_UUID.fullmatch(word):
            raise CommandError(
                f"{word!r} is not a whole UUID, and the debug API, which lists the GPUs of the "
                f"node, cannot be reached: {why}. Give the whole UUID, as nvidia-smi -L prints "
                f"it. Example: {_UUID_EXAMPLE}",
                BAD_INPUT,
            )
    return [Gpu(word) for word in dict.fromkeys(given)]


def annotated(node: str, annotations: Mapping[str, str]) -> frozenset[str]:
    """Return the UUIDs in the node's annotation. Raises ``CommandError`` if it is not valid."""
    try:
        return parse_cordon(annotations.get(CORDON, ""))
    except BadAnnotation as err:
        raise CommandError(
            f"node {node}: {err}. To remove it: "
            + command("kubectl", "annotate", "node", node, f"{CORDON}-"),
            BAD_INPUT,
        ) from err


def annotation(uuids: Set[str]) -> str | None:
    """Return the value of the annotation, or None to remove it. Raises ``CommandError``."""
    text = ",".join(sorted(uuids))
    try:
        parse_cordon(text)
    except BadAnnotation as err:
        raise CommandError(str(err), BAD_INPUT) from err
    return text or None


def preview(
    node: Body,
    chosen: Sequence[Gpu],
    annotations: Mapping[str, str],
    steering_obstacle: str | None = None,
    evict: bool = False,
) -> Iterator[str]:
    """Yield lines that show what the node loses if the GPUs are cordoned.

    ``annotations`` are the annotations of the Node. ``steering_obstacle`` is the known obstacle to
    steering the node, or None. ``evict`` is whether pods on the GPUs will be evicted.
    """
    for gpu in chosen:
        models = ", ".join(sorted({device["model"] for device in gpu.devices}))
        yield f"GPU {gpu.index} of node {node['name']}: {gpu.uuid}, {models}"
        pods = list(_pods(gpu))
        stay = "" if evict else " stays" if len(pods) == 1 else " stay"
        yield f"  {counted(len(pods), 'pod')} on it{stay}:" if pods else "  no pod is on it"
        yield from (f"    {pod}" for pod in pods)
        yield f"  lost: {_amounts(_open(gpu.devices))}"
    cordoned = {device["uuid"] for gpu in chosen for device in gpu.devices}
    cordoned |= {device["uuid"] for device in node["devices"] if device["cordoned"]}
    yield from _closing(node, cordoned, annotations, steering_obstacle)


def _pods(gpu: Gpu) -> Iterator[str]:
    for device in gpu.devices:
        for pod in device["holders"]:
            where = "" if pod["observed"] else ", may be on another GPU: no report shows it yet"
            amount = gib(pod["requested_bytes"])
            yield f"{pod['namespace']}/{pod['name']}: {amount} reserved{where}"
        if hidden := device["hidden_holders"]:
            yield f"{counted(hidden, 'more pod')} that you may not read"


def _open(devices: Iterable[Body]) -> list[Body]:
    """Return the devices that take pods."""
    return [each for each in devices if not each["cordoned"] and each["unhealthy"] is None]


def _amounts(devices: Sequence[Body]) -> str:
    if not devices:
        return "nothing, because it already takes no pods"
    replicas = sum(device["replicas_free"] for device in devices)
    # MIG compute instances that share memory each report all of it, so count it once.
    free = {each["memory_id"]: max(each["headroom_bytes"], 0) for each in devices}
    return f"{counted(replicas, 'free replica')}, {gib(sum(free.values()))} headroom"


def _closing(
    node: Body, cordoned: Set[str], annotations: Mapping[str, str], steering_obstacle: str | None
) -> Iterator[str]:
    """Describe the resources whose other GPUs take no pods, because the device plugin could choose
    a cordoned GPU."""
    name = node["name"]
    by_plugin = [each for each in node["devices"] if _plugin_chooses(node, each)]
    closing = []
    for resource in sorted({each["resource"] for each in by_plugin}):
        devices = [each for each in by_plugin if each["resource"] == resource]
        others = [each for each in _open(devices) if each["uuid"] not in cordoned]
        here = [each for each in devices if each["uuid"] in cordoned]
        if not here or not others:
            continue
        closing += here
        next_one = next((each for each in here if each["candidate"]), None)
        if next_one is None:
            yield (
                "The device plugin does not choose a cordoned GPU next. While it could, node "
                f"{name} takes no pods for {resource}."
            )
            continue
        yield (
            f"Node {name} takes no pods for {resource} while the device plugin could choose a "
            "cordoned GPU:"
        )
        yield f"  {next_one['uuid']}: {next_one['candidate_because']}"
        yield f"  also lost, on {counted(len(others), 'other GPU')}: {_amounts(others)}"
    if any(each["sharing"] != "none" for each in closing):
        steered = "annotate", "node", name, f"{DEVICE_CHOICE}=steered"
        overwrite = ["--overwrite"] if DEVICE_CHOICE in annotations else []
        yield "To keep the other GPUs open, let Headroom choose the GPU of each pod:"
        if steering_obstacle:
            yield f"  obstacle: {steering_obstacle}"
        yield f"  {command('kubectl', *steered, *overwrite)}"
    elif closing:
        yield "Headroom cannot choose GPUs that are not shared, so steering does not prevent this."


def _plugin_chooses(node: Body, device: Body) -> bool:
    """Return whether the device plugin, not Headroom, chooses the device."""
    return bool(device["policy"] != "steered")
