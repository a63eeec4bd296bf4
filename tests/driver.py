"""Builds fake NVIDIA driver libraries, and writes the table of devices that they read.

TEST_NVML can name a folder with another libnvidia-ml.so.1, for example NVIDIA's mock. Tests that
need extensions of the fake library do not work with it.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
CUDA_SOURCE = Path(__file__).with_name("fake_cuda.c")
GIB = 1 << 30
_TESTS = Path(__file__).parent
#: PYTHONPATH of agents. It hides rich, as in the agent's image, because importing rich takes a
#: fifth of the CPU that an agent needs to start.
AGENT_PATH = f"{_TESTS / 'without_rich'}{os.pathsep}{_TESTS.parent}"


def library_folder(missing: Sequence[str] = ()) -> Path:
    """Return a folder with libnvidia-ml.so.1. The library is rebuilt only if its source changes.

    The library does not export the functions in ``missing``, as an older driver would not.
    """
    if other := os.environ.get("TEST_NVML"):
        return Path(other)
    return _built(SOURCE, "nvml", "libnvidia-ml.so.1", missing)


def cuda_folder() -> Path:
    """Return a folder with libcuda.so.1. The fake NVML library reports the memory that it
    allocates.
    """
    return _built(CUDA_SOURCE, "cuda", "libcuda.so.1")


def _built(source: Path, kind: str, name: str, missing: Sequence[str] = ()) -> Path:
    hidden = "".join(f"{each}; " for each in missing)
    exports = f"{{ global: *; {f'local: {hidden}' if hidden else ''}}};\n"
    flags = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags.append(f"-Wl,-soname,{name}")
    built_from = source.read_bytes() + "".join([exports, *flags]).encode()
    digest = hashlib.sha256(built_from).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"headroom-fake-{kind}-{os.getuid()}-{digest}"
    library = folder / name
    if not library.exists():
        if shutil.which("gcc") is None:
            raise RuntimeError(
                "gcc is missing: the fake driver library of the tests is C; "
                "example: apt-get install gcc libc6-dev"
            )
        folder.mkdir(exist_ok=True)
        built = folder / f"building-{os.getpid()}"
        script = built.with_suffix(".map")
        script.write_text(exports)
        flags.append(f"-Wl,--version-script={script}")
        done = subprocess.run(
            ["gcc", *flags, "-o", built, source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the fake driver library does not compile:\n{done.stderr}")
        script.unlink()
        # Rename atomically, because parallel sessions must never see an incomplete library.
        built.rename(library)
    return folder


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG device. Devices of one GPU instance share its memory."""

    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    memory_bytes: int = 10 * GIB
    reserved_bytes: int = 16 << 20
    model: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    memory_bytes: int = 80 * GIB
    reserved_bytes: int = GIB // 2
    model: str = "NVIDIA H100 80GB HBM3"
    #: The NUMA node of the GPU, or None if the machine does not report it.
    numa: int | None = None
    #: nvmlDeviceArchitecture: 6 Turing, 7 Ampere, 9 Hopper, 10 Blackwell.
    architecture: int = 9
    instances: tuple[Instance, ...] = ()


def t4(uuid: str) -> Gpu:
    return Gpu(uuid, 15 * GIB, 458 << 20, "Tesla T4", architecture=6)


def a100(uuid: str) -> Gpu:
    return Gpu(uuid, 80 * GIB, 608 << 20, "NVIDIA A100-SXM4-80GB", architecture=7)


def h100(uuid: str) -> Gpu:
    return Gpu(uuid)


def b200(uuid: str) -> Gpu:
    return Gpu(uuid, 180 * GIB, GIB, "NVIDIA B200", architecture=10)


def mig_minors(gpus: list[Gpu]) -> str:
    """Return the content of /proc/driver/nvidia-caps/mig-minors for these GPUs."""
    paths = (
        path
        for index, gpu in enumerate(gpus)
        for each in gpu.instances
        for path in (
            f"gpu{index}/gi{each.gpu_instance}/access",
            f"gpu{index}/gi{each.gpu_instance}/ci{each.compute_instance}/access",
        )
    )
    return "".join(f"{path} {number}\n" for number, path in enumerate(paths))


class Driver:
    """Writes the device table. Each method writes its change atomically before it returns."""

    def __init__(self, table: Path, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.table = table
        #: Maps each process ID to the bytes that the process uses on each device, by UUID.
        self._used: dict[int, Mapping[str, int]] = {}
        #: Maps the UUID of each device to its XID events.
        self._xids: dict[str, list[int]] = {gpu.uuid: [] for gpu in gpus}
        #: Maps the UUID of each device to the lowest number of free bytes so far, which is negative
        #: if the device was overcommitted.
        self.least_free_bytes = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
        #: Further lines of the table by UUID. An empty UUID stands for the whole driver. See
        #: fake_nvml.c.
        self._said: dict[str, tuple[str, ...]] = {}
        self._lock = threading.RLock()
        self._batches = 0
        self._write()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Collect changes and write all of them at the end of the context."""
        with self._lock:
            self._batches += 1
        try:
            yield
        finally:
            with self._lock:
                self._batches -= 1
                self._write()

    def add(self, gpu: Gpu) -> None:
        """Add a GPU, as if the kernel module detected it."""
        with self._lock:
            self.gpus.append(gpu)
            self._xids[gpu.uuid] = []
            self.least_free_bytes[gpu.uuid] = gpu.memory_bytes
            self._write()

    def remove(self, uuid: str) -> None:
        """Remove a GPU, as if it was bound to another kernel module."""
        with self._lock:
            self.gpus = [gpu for gpu in self.gpus if gpu.uuid != uuid]
            self._write()

    def use(self, pid: int, used: Mapping[str, int]) -> None:
        """Set the bytes that the process uses on each device. An empty mapping ends the process."""
        with self._lock:
            self._used.pop(pid, None)
            if used:
                self._used[pid] = used
            self._write()

    def fail(self, uuid: str, xid: int) -> None:
        """Raise an XID event on the device."""
        with self._lock:
            self._xids[uuid].append(xid)
            self._write()

    def say(self, uuid: str, *statements: str) -> None:
        """Set further table lines for a GPU or an instance, or for the driver if ``uuid`` is empty.

        The lines replace the earlier lines of the same UUID.
        """
        with self._lock:
            self._said[uuid] = statements
            self._write()

    def _write(self) -> None:
        if self._batches:
            return
        lines = [*self._said.get("", ())]
        for gpu in self.gpus:
            least_bytes = min(self.least_free_bytes[gpu.uuid], self._free_bytes(gpu))
            self.least_free_bytes[gpu.uuid] = least_bytes
            lines.append(f"device {gpu.uuid} {self._sizes(gpu)} {gpu.model}")
            lines.append(f"arch {gpu.architecture}")
            lines += self._details(gpu.uuid)
            lines += [f"xid {xid}" for xid in self._xids[gpu.uuid]]
            for each in gpu.instances:
                ids = f"{each.uuid} {each.gpu_instance} {each.compute_instance}"
                lines.append(f"mig {ids} {self._sizes(each)} {each.model}")
                lines += self._details(each.uuid)
        unfinished = self.table.with_suffix(".unfinished")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.rename(self.table)

    def _held(self, uuid: str) -> dict[int, int]:
        return {pid: used[uuid] for pid, used in self._used.items() if uuid in used}

    def _free_bytes(self, device: Gpu | Instance) -> int:
        held_bytes = sum(self._held(device.uuid).values())
        return device.memory_bytes - device.reserved_bytes - held_bytes

    def _sizes(self, device: Gpu | Instance) -> str:
        return f"{device.memory_bytes} {device.reserved_bytes} {self._free_bytes(device)}"

    def _details(self, uuid: str) -> list[str]:
        held = [f"process compute {pid} {used}" for pid, used in self._held(uuid).items()]
        return [*held, *self._said.get(uuid, ())]
