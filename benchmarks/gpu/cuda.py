"""The CUDA driver API by ctypes. It needs the driver's libcuda.so.1 but no toolkit."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"

#: Runs until %globaltimer has advanced by the parameter, in nanoseconds.
_SPIN = """
.version {version}
.target {target}
.address_size 64
.visible .entry spin(.param .u64 length_ns)
{{
  .reg .u64 %rd<4>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [length_ns];
  mov.u64 %rd2, %globaltimer;
again:
  mov.u64 %rd3, %globaltimer;
  sub.u64 %rd3, %rd3, %rd2;
  setp.lt.u64 %p1, %rd3, %rd1;
  @%p1 bra again;
  ret;
}}
"""
#: Writes to an address that no process has mapped.
_FAULT = """
.version {version}
.target {target}
.address_size 64
.visible .entry fault()
{{
  .reg .u64 %rd<2>;
  .reg .u32 %r<2>;
  mov.u64 %rd1, 16;
  mov.u32 %r1, 1;
  st.global.u32 [%rd1], %r1;
  ret;
}}
"""
#: Runs a fixed number of rounds, however long they take. Unlike spin, other processes slow it down.
_WORK = """
.version {version}
.target {target}
.address_size 64
.visible .entry work(.param .u64 rounds, .param .u64 result)
{{
  .reg .u64 %rd<3>;
  .reg .u32 %r<2>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [rounds];
  ld.param.u64 %rd2, [result];
  mov.u32 %r1, %clock;
again:
  mad.lo.u32 %r1, %r1, 1664525, 1013904223;
  sub.u64 %rd1, %rd1, 1;
  setp.ne.u64 %p1, %rd1, 0;
  @%p1 bra again;
  st.global.u32 [%rd2], %r1;
  ret;
}}
"""
_WORK_THREADS = 1024
#: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_SM_COUNT = 16
#: Targets in the order in which they are tried, because a driver may not compile for the oldest.
_TARGETS = (("6.4", "sm_70"), ("6.4", "sm_75"), ("7.0", "sm_80"), ("5.0", "sm_52"))


class CudaError(Exception):
    """A failed call, with its code and the name of the code."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name


class Cuda:
    """A context on the first visible device. CUDA_VISIBLE_DEVICES chooses the device.

    Raises ``OSError`` if there is no libcuda, and ``CudaError``.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size_bytes: int) -> None:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))

    def memory(self) -> tuple[int, int]:
        """Return the free and total bytes that the process sees."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def spin(self, length_s: float, blocks: int) -> None:
        """Keep ``blocks`` blocks busy for this time, in kernels of 20 ms."""
        function = self._function(_SPIN, b"spin")
        until_s = time.monotonic() + length_s
        while time.monotonic() < until_s:
            length_ns = ctypes.c_uint64(20_000_000)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(length_ns))
            self._launch(function, blocks, 256, parameters)
            self._call("cuCtxSynchronize")

    def sms(self) -> int:
        """Return the number of SMs of the device."""
        count, device = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _SM_COUNT, device)
        return count.value

    def work(self, blocks: int) -> Callable[[int], float]:
        """Return a function that runs one kernel of a number of rounds and returns its seconds.

        The GPU measures the time, which includes the time in which other processes' kernels run.
        """
        function, result = self._function(_WORK, b"work"), ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(result), ctypes.c_size_t(4))
        events = ctypes.c_void_p(), ctypes.c_void_p()
        for event in events:
            self._call("cuEventCreate", ctypes.byref(event), 0)

        def run(rounds: int) -> float:
            count, took_ms = ctypes.c_uint64(rounds), ctypes.c_float()
            parameters = (ctypes.c_void_p * 2)(ctypes.addressof(count), ctypes.addressof(result))
            self._call("cuEventRecord", events[0], None)
            self._launch(function, blocks, _WORK_THREADS, parameters)
            self._call("cuEventRecord", events[1], None)
            self._call("cuCtxSynchronize")
            self._call("cuEventElapsedTime", ctypes.byref(took_ms), *events)
            return took_ms.value / 1000

        return run

    def fault(self) -> None:
        """Run a kernel that writes where nothing is mapped. Raises ``CudaError``."""
        self._launch(self._function(_FAULT, b"fault"), 1, 1, None)
        self._call("cuCtxSynchronize")

    def _launch(self, function: Any, blocks: int, threads: int, parameters: Any) -> None:
        shape = (blocks, 1, 1, threads, 1, 1, 0)
        self._call("cuLaunchKernel", function, *shape, None, parameters, None)

    def _function(self, text: str, name: bytes) -> Any:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        for number, (version, target) in enumerate(_TARGETS, 1):
            image = text.format(version=version, target=target).encode()
            try:
                self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
                break
            except CudaError:
                if number == len(_TARGETS):
                    raise
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
        return function

    def _call(self, name: str, *args: Any) -> None:
        code = int(getattr(self._library, name)(*args))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"unknown").decode())
