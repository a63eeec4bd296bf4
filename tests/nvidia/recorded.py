"""Records answers of NVIDIA's device plugin with its version: python -m tests.nvidia.recorded"""

import random
import re
from pathlib import Path

import msgspec

from tests.nvidia.states import Gpu, State, answered, states, walked
from tests.nvidia.stock import StockPlugin

TESTS = Path(__file__).parents[1]
RECORDED = TESTS / "recorded/device-plugin/preferred.json"
#: Each entry has the number of GPUs, the number of replicas per GPU, and the number of states to
#: record.
ASKED = [(1, 2, 10), (2, 16, 150), (3, 5, 250), (4, 4, 300), (5, 3, 200), (6, 8, 200), (8, 10, 150)]
#: Number of requests in each state that has unconfirmed pods. Before each request, a random number
#: of these pods are admitted.
WALKS = 40


class Recording(msgspec.Struct, array_like=True):
    replicas: int
    #: For each device, the indices of its free replicas, the number of its unhealthy replicas, and
    #: its NUMA node.
    gpus: list[tuple[list[int], int, int]]
    aligned: bool
    size: int
    #: Number of unconfirmed pods. Any of them may have been admitted before the request.
    waiting: int
    #: All devices that the plugin chose in hundreds of answers.
    given: list[int]

    def state(self) -> State:
        gpus = tuple(Gpu(tuple(free), sick, numa) for free, sick, numa in self.gpus)
        return State(self.replicas, gpus, self.aligned, self.size, self.waiting)


class Recordings(msgspec.Struct):
    plugin: str
    policy: str
    answers: list[Recording]


def pinned_version() -> str:
    """Return the plugin version that the tests build and run."""
    required = (TESTS / "gobin/nvidia-device-plugin/go.mod").read_text()
    match = re.search(r"github\.com/NVIDIA/k8s-device-plugin (v\S+)", required)
    assert match is not None
    return match[1]


def recorded() -> Recordings:
    return msgspec.json.decode(RECORDED.read_bytes(), type=Recordings)


def record() -> list[Recording]:
    """Record many answers to each request, without using our prediction."""
    recordings: list[Recording] = []
    draw = random.Random(1)
    for gpus, replicas, count in ASKED:
        plugin = StockPlugin(gpus, replicas)
        try:
            for state in states(replicas, gpus, seed=100 + gpus, count=count):
                if state.waiting:
                    given = {walked(plugin, state, draw) for _ in range(WALKS)}
                else:
                    given = set(answered(plugin, state, set(range(gpus))))
                recordings.append(
                    Recording(
                        replicas,
                        [(list(gpu.free), gpu.unhealthy, gpu.numa) for gpu in state.gpus],
                        state.aligned,
                        state.size,
                        state.waiting,
                        sorted(given),
                    )
                )
        finally:
            plugin.stop()
    return recordings


if __name__ == "__main__":
    rows = ",\n".join(msgspec.json.encode(recording).decode() for recording in record())
    head = f'{{"plugin": "{pinned_version()}", "policy": "distributed", "answers": [\n'
    RECORDED.write_text(f"{head}{rows}\n]}}\n")
