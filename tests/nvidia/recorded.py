"""Answers of NVIDIA's device plugin v0.19.3, kept: python -m tests.nvidia.recorded"""

from pathlib import Path

import msgspec

from tests.nvidia.states import Gpu, State, answered, states
from tests.nvidia.stock import StockPlugin

RECORDED = Path(__file__).parents[1] / "recorded/device-plugin/preferred.json"
ASKED = [(2, 16, 40), (3, 5, 60), (4, 4, 80), (8, 10, 60)]


class Recording(msgspec.Struct, array_like=True):
    replicas: int
    #: By device: numbers of the free replicas, how many are sick, the NUMA node.
    gpus: list[tuple[list[int], int, int]]
    aligned: bool
    size: int
    #: Every device of which a replica was given, in hundreds of answers.
    given: list[int]

    def state(self) -> State:
        gpus = tuple(Gpu(tuple(free), sick, numa) for free, sick, numa in self.gpus)
        return State(self.replicas, gpus, self.aligned, self.size)


def record() -> list[Recording]:
    """Asks each question many times over, whatever we expect."""
    recordings: list[Recording] = []
    for gpus, replicas, count in ASKED:
        plugin = StockPlugin(gpus, replicas)
        try:
            for state in states(replicas, gpus, seed=100 + gpus, count=count):
                if state.waiting:
                    continue
                seen = answered(plugin, state, set(range(gpus)))
                recordings.append(
                    Recording(
                        replicas,
                        [(list(gpu.free), gpu.unhealthy, gpu.numa) for gpu in state.gpus],
                        state.aligned,
                        state.size,
                        sorted(seen),
                    )
                )
        finally:
            plugin.stop()
    return recordings


if __name__ == "__main__":
    lines = (msgspec.json.encode(recording).decode() for recording in record())
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
