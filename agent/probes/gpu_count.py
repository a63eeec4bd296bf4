"""Compares how many GPUs the kernel and the driver have, and decides when to reopen the driver.

The driver counts GPUs when it is opened. A GPU that is attached later (in a VM, after a rescan of
the PCI bus, or back from vfio) appears only when the driver is opened again. Some GPUs never
appear, because they cannot be started or because their device files are not in the agent's
container.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: PCI classes of display and 3D controllers.
_GPU_CLASSES = ("0x0300", "0x0302")
#: Shortest and longest wait in seconds before the driver is opened again because the numbers still
#: differ. The first wait is the shortest.
FIRST_WAIT_S, LONGEST_WAIT_S = 15.0, 600.0
#: After this many samples and seconds, the agent stops trying to close the driver for a while. The
#: driver cannot be closed while a call hangs, and no XIDs are received during the attempts.
_MOST_TRIES, _TRY_FOR_S = 3, 15.0


def attached_gpus(sysfs: Path) -> int:
    """Return the number of GPUs that the kernel has bound to NVIDIA's driver, or 0 if unknown.

    Virtual functions on a host of virtual machines do not count, because the driver does not list
    them.
    """
    found = 0
    for device in sysfs.glob("bus/pci/drivers/nvidia/*:*"):
        with contextlib.suppress(OSError):
            is_gpu = (device / "class").read_text().startswith(_GPU_CLASSES)
            found += is_gpu and not (device / "physfn").exists()
    return found


class GpuCount:
    """Compares the kernel's number of GPUs with the driver's."""

    def __init__(self, sysfs: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sysfs = sysfs
        self._monotonic = monotonic
        self._kernel = self._driver = 0
        self._due_s = 0.0
        self._wait_s = FIRST_WAIT_S
        self._tries = 0

    def compare(self, driver: int) -> bool:
        """Count the kernel's GPUs, and return whether the driver must be closed and opened again.

        ``driver`` is the number of GPUs that the driver lists.
        """
        before = self._kernel, self._driver
        self._kernel, self._driver = attached_gpus(self._sysfs), driver
        if not self._kernel or self._kernel == driver:
            return False
        now_s = self._monotonic()
        if before != (self._kernel, driver):
            self._due_s, self._wait_s, self._tries = now_s, FIRST_WAIT_S, 0
        if now_s < self._due_s:
            return False
        self._tries += 1
        if self._tries > _MOST_TRIES and now_s - self._due_s > _TRY_FOR_S:
            self.closed()
            return False
        return True

    def closed(self) -> None:
        """Record that the driver was closed, and make the next wait longer."""
        self._due_s = self._monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self._tries = 0

    def messages(self) -> Iterator[str]:
        """Yield a message if the numbers differ. It stays the same until one of the numbers
        changes."""
        if self._kernel > self._driver:
            shown = f"only {self._driver}" if self._driver else "none"
            yield (
                f"the kernel has {self._kernel} NVIDIA GPU{'s' if self._kernel != 1 else ''}, but"
                f" the driver shows {shown} to this container: if this persists, delete the agent's"
                " pod when the driver is ready"
            )
        elif 0 < self._kernel < self._driver:
            yield (
                f"the driver shows {self._driver} GPUs, but the kernel has only {self._kernel}: the"
                " others are gone, and are removed when the driver is opened again"
            )
