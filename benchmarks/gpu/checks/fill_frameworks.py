"""``train.py`` of the line frameworks: allocates until an allocation fails, then computes.

Prints the framework's version, the allocated bytes, and the most bytes that the driver lists for
this process.
"""

import json
import os
import sys
from typing import Any

import pynvml

_PIECE_BYTES = 64 << 20
#: Number of pieces that are released before the framework computes.
_PIECES_FOR_RESULTS = 16


def with_torch() -> tuple[str, int, int]:
    import torch

    pieces: list[Any] = []
    try:
        while True:
            pieces.append(torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        allocated_bytes = len(pieces) * _PIECE_BYTES
    del pieces[-_PIECES_FOR_RESULTS:]
    square = torch.ones(2048, 2048, device="cuda", requires_grad=True)
    (square @ square).sum().backward()
    image = torch.ones(8, 16, 128, 128, device="cuda")
    torch.nn.functional.conv2d(image, torch.ones(16, 16, 3, 3, device="cuda"))
    torch.cuda.synchronize()
    return torch.__version__, allocated_bytes, _listed_bytes()


def with_jax() -> tuple[str, int, int]:
    import jax
    from jax import numpy

    pieces: list[Any] = []
    try:
        while True:
            pieces.append(numpy.zeros((_PIECE_BYTES,), numpy.uint8).block_until_ready())
    except jax.errors.JaxRuntimeError:
        allocated_bytes = len(pieces) * _PIECE_BYTES
    del pieces[-_PIECES_FOR_RESULTS:]
    square = numpy.ones((2048, 2048))
    (square @ square).block_until_ready()
    image = numpy.ones((8, 16, 128, 128))
    jax.lax.conv(image, numpy.ones((16, 16, 3, 3)), (1, 1), "SAME").block_until_ready()
    return jax.__version__, allocated_bytes, _listed_bytes()


def _listed_bytes() -> int:
    """Return the bytes that the driver lists for this process, including bytes that allocators
    keep."""
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(os.environ["CUDA_VISIBLE_DEVICES"])
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    return sum(int(each.usedGpuMemory) for each in listed if each.pid == os.getpid())


if __name__ == "__main__":
    version, allocated, most = {"torch": with_torch, "jax": with_jax}[os.environ["FRAMEWORK"]]()
    found = {"version": version, "allocated": allocated, "listed": most}
    sys.stdout.write(json.dumps(found) + "\n")
