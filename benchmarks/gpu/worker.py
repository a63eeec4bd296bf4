"""A process with a CUDA context that executes commands. Each line in and out is a JSON object.

    {"do": "open"}                             create the context
    {"do": "allocate", "bytes": N}
    {"do": "profile"}                          return the free memory that the process sees
    {"do": "fill", "bytes": N, "piece": N}     allocate in pieces, as an engine does at start-up
    {"do": "spin", "seconds": S, "blocks": N}  answer at its start and at its end
    {"do": "rounds", "sms": R, "kernel_s": S}  return how many rounds take this time
    {"do": "work", "sms": R, "rounds": N, "pause_s": S, "seconds": S}
                                               return how many such kernels it runs per second
    {"do": "fault"}                            run a kernel that writes to an illegal address

The process ends when its input ends. If a call fails, the answer is {"error": NAME, "code": N,
"call": CALL}.
"""

import json
import sys
import time
from typing import Any

from benchmarks.gpu.cuda import Cuda, CudaError

#: Rounds of a kernel that is timed to calibrate a load, and number of times that it is timed.
_ROUNDS, _TRIES = 1_000_000, 3


class Load:
    """Equal kernels, one after the other, on a part of the SMs, with pauses."""

    def __init__(self, cuda: Cuda, sm_ratio: float) -> None:
        self._run = cuda.work(max(1, round(cuda.sms() * sm_ratio)))

    def rounds(self, kernel_s: float) -> int:
        """Return the rounds of a kernel that takes ``kernel_s`` if no other process has kernels."""
        return max(1, round(_ROUNDS * kernel_s / min(self._run(_ROUNDS) for _ in range(_TRIES))))

    def rate(self, length_s: float, rounds: int, pause_s: float) -> float:
        """Return the kernels per second over the middle half of the time.

        In the first and the last quarter, another process may not have kernels.
        """
        began_s, kernels_s = time.monotonic(), []
        while (now_s := time.monotonic() - began_s) < length_s:
            took_s = self._run(rounds)
            if length_s / 4 <= now_s <= length_s * 3 / 4:
                kernels_s.append(took_s)
            time.sleep(pause_s)
        return len(kernels_s) / (sum(kernels_s) + len(kernels_s) * pause_s) if kernels_s else 0.0


def main() -> int:
    cuda: Cuda | None = None
    for line in sys.stdin:
        command = json.loads(line)
        began_s = time.monotonic()
        try:
            if command["do"] == "open":
                cuda = Cuda()
                answer: dict[str, Any] = {}
            else:
                assert cuda is not None
                answer = obey(cuda, command)
        except CudaError as err:
            answer = {"error": err.name, "code": err.code, "call": err.call}
        except OSError as err:
            answer = {"error": str(err), "code": -1, "call": "dlopen"}
        say(answer | {"took_s": round(time.monotonic() - began_s, 6)})
    return 0


def obey(cuda: Cuda, command: dict[str, Any]) -> dict[str, Any]:
    match command["do"]:
        case "allocate":
            cuda.allocate(command["bytes"])
            return {"bytes": command["bytes"]}
        case "profile":
            free_bytes, total_bytes = cuda.memory()
            return {"free": free_bytes, "total": total_bytes}
        case "fill":
            return filled(cuda, command["bytes"], command["piece"])
        case "spin":
            say({"spinning": True})
            cuda.spin(command["seconds"], command["blocks"])
            return {}
        case "rounds":
            return {"rounds": Load(cuda, command["sms"]).rounds(command["kernel_s"])}
        case "work":
            load = Load(cuda, command["sms"])
            return {"rate": load.rate(command["seconds"], command["rounds"], command["pause_s"])}
        case "fault":
            cuda.fault()
            return {}
    raise ValueError(command)


def filled(cuda: Cuda, wanted_bytes: int, piece_bytes: int) -> dict[str, Any]:
    """Allocate up to ``wanted_bytes``. Return how much succeeded, and the error that stopped it."""
    got_bytes = 0
    while got_bytes < wanted_bytes:
        piece = min(piece_bytes, wanted_bytes - got_bytes)
        try:
            cuda.allocate(piece)
        except CudaError as err:
            return {"wanted": wanted_bytes, "got": got_bytes, "rejected": err.name}
        got_bytes += piece
    return {"wanted": wanted_bytes, "got": got_bytes}


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
