"""``kubectl headroom whatif``: simulates new pods and changes to nodes on a copy."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from headroom.contract.annotations import DeviceChoice
from headroom.contract.quantity import for_people, gib
from headroom.kubectl import tables
from headroom.kubectl.debug_api_client import BAD_INPUT, NOT_THERE, CommandError
from headroom.kubectl.options import DataFormat, Options, note_implausible
from headroom.kubectl.output import not_checked, print_data, show_details, show_lines, show_table

Body = Mapping[str, Any]
#: Explains why the free memory shrinks by more than the placed pods reserve.
KEPT = "until a pod's GPU is known, its memory is not free on any GPU that the pod could get"
_CHOICES = tuple(choice.value for choice in DeviceChoice)


def whatif(
    context: typer.Context,
    pods: Annotated[int, typer.Option(min=0, help="Number of new pods.")] = 0,
    vram: Annotated[str, typer.Option(help="Memory of each new pod: 20Gi.")] = "",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each new pod.")] = 1,
    drain: Annotated[list[str] | None, typer.Option(help="A node to drain.")] = None,
    add: Annotated[
        list[str] | None, typer.Option(help="NODE=COUNT: add this many nodes like NODE.")
    ] = None,
    replicas: Annotated[
        list[str] | None, typer.Option(help="NODE=COUNT: replicas of each GPU of NODE.")
    ] = None,
    device_choice: Annotated[
        list[str] | None,
        typer.Option(help=f"NODE=CHOICE: how GPUs of NODE are chosen: {', '.join(_CHOICES)}."),
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="A pod that ends: name, or namespace/name.")
    ] = None,
    output: DataFormat = None,
) -> None:
    """Simulate new pods and changes to nodes, without making them.

    The exit status is 1 if a pod would not fit. --drain, --add, --replicas, --device-choice and
    --release may be repeated.
    """
    options: Options = context.obj
    if not pods and (vram or gpus != 1):
        raise CommandError(
            "--vram and --gpus describe new pods; also set their number with --pods. "
            "Example: --pods 4 --vram 20Gi",
            BAD_INPUT,
        )
    note_implausible(vram)
    asked = {
        "pods": [{"count": pods, "vram": vram, "gpus": gpus}] if pods else [],
        "drain": drain or [],
        "add": [{"like": node, "count": count} for node, count in _counts("--add", add)],
        "replicas": dict(_counts("--replicas", replicas)),
        "device_choices": dict(_device_choices(device_choice)),
        "release": ["/".join(options.pod(each, None)) for each in release or ()],
    }
    body = options.api().post("whatif", body=asked)
    if not print_data(body, output):
        show_lines([body["message"]])
        if "before" in body:  # an older console has no totals
            show_table(body, tables.before_and_after(body), None, "")
        show_details(lines(body))
        if body["placements"] or body["rejections"]:
            show_table(body, tables.moves(body), None, "")
    if body["rejected"]:
        raise typer.Exit(NOT_THERE)


def lines(body: Body) -> Iterator[str]:
    """Yield the changes of free memory, and the checks that the simulation does not make."""
    for space in body["spaces"]:
        request, before, after = space["request"], space["before"], space["after"]
        headroom = gib(before["headroom_bytes"]), gib(after["headroom_bytes"])
        largest = _largest(before), _largest(after)
        if headroom[0] != headroom[1] or largest[0] != largest[1]:
            yield (
                f"for {request['count']} x {for_people(request['amount'])}: {_change(headroom)} "
                f"free; largest request that fits: {_change(largest)}"
            )
    if any(len(each["devices"]) > 1 for each in body["placements"]):
        yield KEPT
    yield not_checked(body)


def _largest(space: Body) -> str:
    return "none" if space["largest_fitting_bytes"] is None else gib(space["largest_fitting_bytes"])


def _change(ends: tuple[str, str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]}, then {ends[1]}"


def _counts(flag: str, given: list[str] | None) -> Iterator[tuple[str, int]]:
    """Parse NODE=COUNT arguments. Raises ``CommandError``."""
    for each in given or ():
        node, _, count = each.rpartition("=")
        if not node or not count.isascii() or not count.isdecimal() or len(count) > 6:
            raise CommandError(
                f"{flag}: {each!r} is not NODE=COUNT. Example: {flag} gpu-a=4", BAD_INPUT
            )
        yield node, int(count)


def _device_choices(given: list[str] | None) -> Iterator[tuple[str, str]]:
    """Parse NODE=CHOICE arguments. Raises ``CommandError``."""
    for each in given or ():
        node, _, choice = each.rpartition("=")
        if not node or choice not in _CHOICES:
            raise CommandError(
                f"--device-choice: {each!r} is not NODE=CHOICE with one of {', '.join(_CHOICES)}. "
                "Example: --device-choice gpu-a=steered",
                BAD_INPUT,
            )
        yield node, choice
