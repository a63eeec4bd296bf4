"""A driver of NVIDIA's without GPUs: the fake library, and the table of devices that it reads."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 1 << 30


def library_folder() -> Path:
    """A folder with libnvidia-ml.so.1 in it, built once for each state of its source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"headroom-fake-nvml-{os.getuid()}-{digest}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        if shutil.which("gcc") is None:
            raise RuntimeError(
                "gcc is missing: the fake driver library of the tests is C; "
                "right is, for example: apt-get install gcc libc6-dev"
            )
        folder.mkdir(exist_ok=True)
        built = folder / f"building-{os.getpid()}"
        flags = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
        done = subprocess.run(
            ["gcc", *flags, "-o", built, SOURCE], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the fake driver library does not compile:\n{done.stderr}")
        built.rename(library)  # at once, so that sessions side by side see all of it or nothing
    return folder


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    memory_bytes: int = 80 * GIB
    reserved_bytes: int = GIB // 2
    model: str = "NVIDIA H100 80GB HBM3"
    #: The NUMA node that it hangs on; None where the machine does not say.
    numa: int | None = None


class Driver:
    """Every change is in the table, whole, when the call returns."""

    def __init__(self, table: Path, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.table = table
        #: pid -> uuid -> bytes
        self._used: dict[int, Mapping[str, int]] = {}
        #: uuid -> the XIDs that it has had
        self._xids: dict[str, list[int]] = {gpu.uuid: [] for gpu in gpus}
        #: uuid -> the least memory that was ever free; below zero: more was taken than there is.
        self.least_free_bytes = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
        self._lock = threading.Lock()
        self._write()

    def use(self, pid: int, used: Mapping[str, int]) -> None:
        """The process holds these bytes by device, and nothing else; none: it is gone."""
        with self._lock:
            self._used.pop(pid, None)
            if used:
                self._used[pid] = used
            self._write()

    def fail(self, uuid: str, xid: int) -> None:
        """The device raises an XID event."""
        with self._lock:
            self._xids[uuid].append(xid)
            self._write()

    def _write(self) -> None:
        lines = []
        for gpu in self.gpus:
            held = {pid: used[gpu.uuid] for pid, used in self._used.items() if gpu.uuid in used}
            free_bytes = gpu.memory_bytes - gpu.reserved_bytes - sum(held.values())
            self.least_free_bytes[gpu.uuid] = min(self.least_free_bytes[gpu.uuid], free_bytes)
            sizes = f"{gpu.memory_bytes} {gpu.reserved_bytes} {free_bytes}"
            lines.append(f"device {gpu.uuid} {sizes} {gpu.model}")
            lines += [f"process compute {pid} {used_bytes}" for pid, used_bytes in held.items()]
            lines += [f"xid {xid}" for xid in self._xids[gpu.uuid]]
        unfinished = self.table.with_suffix(".unfinished")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.rename(self.table)
