"""A process with a CUDA context that executes commands: one JSON object a line, in and out.

    {"do": "open"}                             create the context
    {"do": "allocate", "bytes": N}
    {"do": "profile"}                          return the free memory that the process sees
    {"do": "fill", "bytes": N, "piece": N}     allocate in pieces, as an engine does at start-up
    {"do": "spin", "seconds": S, "blocks": N}  answers at its begin and at its end
    {"do": "fault"}                            run a kernel that writes to an illegal address

The process ends at the end of its input. A failed call answers {"error": NAME, "code": N,
"call": CALL}.
"""

import json
import sys
import time
from typing import Any

from benchmarks.gpu.cuda import Cuda, CudaError


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
        case "fault":
            cuda.fault()
            return {}
    raise ValueError(command)


def filled(cuda: Cuda, wanted_bytes: int, piece_bytes: int) -> dict[str, Any]:
    """How much of ``wanted_bytes`` could be allocated, and the error that stopped it."""
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
