"""The part of JAX that the line frameworks uses, on the stand-in for libcuda, as a module ``jax``.

Its allocator takes the fraction of the device in XLA_CLIENT_MEM_FRACTION, as JAX does.
FAKE_JAX_LIBRARY_MIB is memory that the first convolution allocates in addition.
"""

import os
from types import SimpleNamespace

from benchmarks.gpu.cuda import Cuda

__version__ = "0.0.0"

_cuda = Cuda()
_rest_bytes = int(float(os.environ["XLA_CLIENT_MEM_FRACTION"]) * _cuda.memory()[1])


class JaxRuntimeError(Exception):
    pass


class Array:
    def __init__(self, size_bytes: int) -> None:
        global _rest_bytes
        if size_bytes > _rest_bytes:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED")
        _cuda.allocate(size_bytes)
        _rest_bytes -= size_bytes

    def block_until_ready(self) -> "Array":
        return self

    def __matmul__(self, other: "Array") -> "Array":
        return self


def _convolve(image: Array, *_: object) -> Array:
    _cuda.allocate(int(os.environ.get("FAKE_JAX_LIBRARY_MIB", "0")) << 20)
    return image


errors = SimpleNamespace(JaxRuntimeError=JaxRuntimeError)
lax = SimpleNamespace(conv=_convolve)
numpy = SimpleNamespace(uint8=1, zeros=lambda shape, _: Array(shape[0]), ones=lambda _: Array(0))
