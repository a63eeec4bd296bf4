"""Draws in four frames why a scheduler that counts replicas overcommits a GPU.

All numbers and choices come from Headroom's model of the device plugin and from its verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pictures.svg import BLUE, GREEN, GREY, INK, QUIET, RED, Drawing
from headroom.contract.gpunode import Plugin
from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.placement.device_plugin_model import plugin_choices
from tests.builders import GIB, GPU, judged, reservation, shared, use, weighed

GPU_GIB, RESERVED_GIB, REPLICAS = 24, 0.5, 4
#: GiB of the running pods on each GPU, and of the pod that is created.
RUNNING_GIB = ((4, 4), (16,))
ASKED_GIB = 12

_PX_OF_GIB = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of the model for the pod that is created. GPUs are indices."""

    #: Free bytes on each GPU.
    free_bytes: tuple[int, ...]
    #: The GPU that the device plugin chooses.
    plugins: int
    #: The GPU that Headroom chooses on a steered node.
    steered: int

    @property
    def missing_bytes(self) -> int:
        return ASKED_GIB * GIB - self.free_bytes[self.plugins]


def outcome() -> Outcome:
    """Run the model. Raises ``ValueError`` if the example does not show the problem."""
    steering = Plugin(
        allocation_policy="distributed", topology_manager_policy="none", steered=[GPU]
    )
    stock = Plugin(allocation_policy="distributed", topology_manager_policy="none")
    devices = [
        shared(
            f"GPU-{index}",
            free=REPLICAS - len(pods),
            allocated=len(pods),
            reserved_bytes=int(RESERVED_GIB * GIB),
            used_bytes=sum(pods) * GIB,
        )
        for index, pods in enumerate(RUNNING_GIB)
    ]
    running = [
        (f"uid-{index}-{number}", f"GPU-{index}", size * GIB)
        for index, pods in enumerate(RUNNING_GIB)
        for number, size in enumerate(pods)
    ]
    uses = [use(*each) for each in running]
    reservations = {uid: reservation({on: size}) for uid, on, size in running}
    chosen = plugin_choices(devices, stock, {}, {}, [0, 0], [len(each) for each in RUNNING_GIB])
    first = [index for index, each in enumerate(chosen) if each.first == 0]
    verdicts = [
        judged(
            f"{ASKED_GIB}Gi",
            weighed(*devices, pods=uses, reservations=reservations, plugin=plugin),
        )[1]
        for plugin in (stock, steering)
    ]
    ask = verdicts[1].asks[0]
    free_bytes = tuple(int(each) for each in ask.free_bytes[0])
    steered = [index for index, candidate in enumerate(ask.candidates[0]) if candidate]
    waits = verdicts[0].reason(0) is Reason.MEMORY_ON_SOME
    if not waits or not verdicts[1].fits[0] or len(first) != 1 or len(steered) != 1:
        raise ValueError("the example does not show the device-choice problem: change its pods")
    return Outcome(free_bytes, first[0], steered[0])


def draw() -> str:
    """Return the picture as SVG."""
    found = outcome()
    in_use = [len(pods) for pods in RUNNING_GIB]
    replicas = REPLICAS * len(RUNNING_GIB)
    fits = [f"GPU {i}" for i, free in enumerate(found.free_bytes) if free >= ASKED_GIB * GIB]
    drawing = Drawing(820, 672, "Why the scheduler cannot choose the GPU, in four frames")

    frame = _Frame(drawing, 12, 12, f"1. A node with two GPUs of {GPU_GIB} GiB")
    frame.gpus(found)
    frame.says(
        f"A pod of {ASKED_GIB} GiB is created.\nIts memory is free on {', '.join(fits)} only."
    )

    frame = _Frame(drawing, 416, 12, "2. kube-scheduler chooses the node")
    frame.gpus(found, memory=False)
    frame.says(
        f"It counts replicas: {replicas - sum(in_use)} of {replicas} are free.\n"
        "It does not count memory or choose a GPU."
    )

    frame = _Frame(drawing, 12, 342, "3. The device plugin chooses the GPU")
    frame.gpus(found, new=found.plugins)
    frame.says(
        f"GPU {found.plugins} has the fewest replicas in use: {in_use[found.plugins]}.\n"
        f"{gib(found.missing_bytes)} are missing: out of memory."
    )

    left = found.free_bytes[found.steered] - ASKED_GIB * GIB
    frame = _Frame(drawing, 416, 342, "4. Headroom checks the GPU first")
    frame.gpus(found, new=found.steered)
    frame.says(
        f"It predicts GPU {found.plugins}, so the pod waits.\n"
        f"If you steer the node, it chooses GPU {found.steered}:\n{gib(left)} stay free."
    )
    return str(drawing)


class _Frame:
    """One frame, with its corner at (x, y)."""

    def __init__(self, drawing: Drawing, x: int, y: int, title: str) -> None:
        self._drawing, self._x, self._y = drawing, x, y
        drawing.box(x, y, 392, 318, line=GREY)
        drawing.text(x + 16, y + 30, title, size=16, bold=True)

    def says(self, lines: str) -> None:
        self._drawing.text(self._x + 16, self._y + 266, lines, size=15)

    def gpus(self, found: Outcome, *, memory: bool = True, new: int | None = None) -> None:
        """Draw each GPU with its memory, its pods and its replicas.

        ``memory`` is whether to show the memory. ``new`` is the GPU that gets the pod.
        """
        drawing, x, width = self._drawing, self._x + 74, GPU_GIB * _PX_OF_GIB
        for index, pods in enumerate(RUNNING_GIB):
            y, added = self._y + 52 + 98 * index, new == index
            drawing.text(self._x + 16, y + 26, f"GPU {index}", size=15, bold=True)
            drawing.box(x, y, width, 40, fill="#f6f8fa", dashed=not memory, round_px=2)
            left = found.free_bytes[index] - ASKED_GIB * GIB * added
            fills = [BLUE] * len(pods) + [GREEN if left >= 0 else RED] * added
            if memory:
                self._pods(x, y, (*pods, *[ASKED_GIB] * added), fills, left)
            else:
                middle = x + width / 2
                drawing.text(middle, y + 25, "memory: not counted", fill=QUIET, anchor="middle")
            for place, fill in enumerate([*fills, *["#ffffff"] * (REPLICAS - len(fills))]):
                drawing.box(x + 20 * place, y + 52, 14, 14, round_px=2, fill=fill, line=INK)
            drawing.text(x + 90, y + 64, f"{len(fills)} of {REPLICAS} replicas in use")

    def _pods(
        self, x: float, y: float, sizes_gib: Sequence[int], fills: Sequence[str], left: int
    ) -> None:
        drawing, at, edge = self._drawing, x, x + GPU_GIB * _PX_OF_GIB
        for size_gib, fill in zip(sizes_gib, fills, strict=True):
            width = size_gib * _PX_OF_GIB
            drawing.box(at, y, width, 40, fill=fill, line="#ffffff", round_px=2)
            label = f"{size_gib} GiB" if width > 60 else str(size_gib)
            middle = (at + min(at + width, edge)) / 2
            drawing.text(middle, y + 25, label, bold=True, fill="#ffffff", anchor="middle")
            at += width
        if left < 0:
            drawing.box(edge - 1, y - 6, 2, 52, fill=INK, line=INK, round_px=0)
        elif edge - at > 60:
            label = f"{gib(left)} free" if edge - at > 110 else gib(left)
            drawing.text((at + edge) / 2, y + 25, label, size=13, anchor="middle")
