"""The machine that is checked: its GPUs, and the commands that all checks run."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.children import Child, ChildFailed, Children
from benchmarks.gpu.fixtures import Fixtures
from benchmarks.gpu.lines import NotPossible
from benchmarks.gpu.smi import Smi, parse

#: If more than this is in use and no process is listed, an invisible process uses the GPU.
_UNSEEN_BYTES = 512 << 20
_CALL_S = 60.0
#: Inode of the first PID namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

Status = dict[str, Any]


class NoGpu(Exception):
    """There is no GPU to check. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    cost_s: float
    looks: int
    #: Maximum seconds of one driver call.
    deadline_s: float
    gpu: str
    sizes_gib: tuple[float, ...]
    #: Seconds over which SM activity is measured.
    pause_s: float


class Machine:
    """Raises ``NoGpu``. ``gpu`` is the device that is checked, as ``measures identity`` prints
    it."""

    def __init__(
        self,
        options: Options,
        children: Children,
        fixtures: Fixtures,
        environment: Mapping[str, str],
    ) -> None:
        self.options = options
        self.children = children
        self.fixtures = fixtures
        self.path = environment.get("PATH", os.defpath)
        self.is_root = os.geteuid() == 0
        try:
            self.identity = self.measure("identity")
        except ChildFailed as err:
            raise NoGpu(f"the driver cannot be asked: {err}") from err
        if why := self.identity["why_not"]:
            raise NoGpu(why)
        if not self.identity["devices"]:
            raise NoGpu("the driver shows no device")
        self.driver: str = self.identity["driver"]
        self.devices: list[dict[str, Any]] = self.identity["devices"]
        self.gpu = self._chosen(options.gpu)
        self.uuid: str = self.gpu["uuid"]
        self.busy = _busy(self.gpu)

    @property
    def model(self) -> str:
        return str(self.gpu["model"])

    @property
    def free_bytes(self) -> int:
        return int(self.gpu["free"] or 0)

    @property
    def in_first_pid_namespace(self) -> bool:
        try:
            return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
        except OSError:  # gVisor does not have this file
            return False

    def alone(self) -> None:
        """Raise ``NotPossible`` if others use the GPU, because the check would disturb them."""
        devices = self.measure("identity")["devices"]
        busy = next((_busy(each) for each in devices if each["uuid"] == self.uuid), "")
        if busy:
            raise NotPossible(f"the GPU is in use ({busy}), and this would disturb it")

    def has(self, name: str) -> bool:
        return shutil.which(name, path=self.path) is not None

    def tool(self, name: str) -> str:
        found = shutil.which(name, path=self.path)
        if found is None:
            raise NotPossible(f"{name} is not installed")
        return found

    def measure(self, *args: str, prefix: Sequence[str] = ()) -> dict[str, Any]:
        """Return what ``benchmarks.gpu.measures`` prints. Raises ``ChildFailed``."""
        argv = [*prefix, sys.executable, "-m", "benchmarks.gpu.measures", *args]
        done = self.children.run(argv, _CALL_S + 0.2 * self.options.looks)
        if done.status:
            raise ChildFailed(f"{' '.join(args)}: {last_line(done.err)}")
        found: dict[str, Any] = json.loads(done.out)
        return found

    def agent(self, pause_s: float = 0.0, prefix: Sequence[str] = ()) -> Status:
        """Return what ``agent --once --json`` prints. SM activity needs a pause."""
        argv = [*prefix, sys.executable, "-m", "agent", "--once", "--json"]
        argv += ["--pause", f"{pause_s:g}"]
        done = self.children.run(argv, _CALL_S)
        if done.status not in (0, 1) or not done.out.strip():
            raise ChildFailed(f"agent --once --json: {last_line(done.err)}")
        status: Status = json.loads(done.out)
        return status

    def smi_xml(self) -> str:
        done = self.children.run([self.tool("nvidia-smi"), "-q", "-x"], _CALL_S)
        if done.status:
            raise ChildFailed(f"nvidia-smi -q -x: exit status {done.status}: {done.out[:200]}")
        return done.out

    def smi(self) -> Smi:
        return parse(self.smi_xml())

    @property
    def worker_argv(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu.worker"]

    def worker(self, **environment: str) -> Child:
        """Return a process with a CUDA context on the GPU."""
        on_the_gpu = {"CUDA_VISIBLE_DEVICES": self.uuid}
        child = self.children.start(self.worker_argv, **on_the_gpu | environment)
        opened(child)
        return child

    def _chosen(self, wanted: str) -> dict[str, Any]:
        if wanted:
            for device in self.devices:
                if wanted in (device["uuid"], str(device["index"])):
                    return device
            known = ", ".join(f"{d['index']} ({d['uuid']})" for d in self.devices)
            raise NoGpu(f"there is no GPU {wanted!r}; there are: {known}")
        return max(self.devices, key=lambda d: (not d["fault"], not _busy(d), d["free"] or 0))


def last_line(text: str) -> str:
    """Return the line of an error output that describes the error."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no error text"])[-1]


def opened(child: Child) -> None:
    """Create the worker's context. Raises ``NotPossible`` if CUDA cannot create it."""
    answer = child.ask(_CALL_S, do="open")
    if "error" in answer:
        raise NotPossible(f"CUDA gives no context: {answer['call']}: {answer['error']}")


def device_of(status: Status, uuid: str) -> dict[str, Any]:
    """Return one device of the agent's report. Raises ``ChildFailed`` if it is missing."""
    for device in status["devices"]:
        if device["uuid"] == uuid:
            found: dict[str, Any] = device
            return found
    raise ChildFailed(f"the agent reports no device {uuid}")


def source_of(status: Status, name: str) -> dict[str, Any]:
    """Return one source of the report. Default values, such as state ok, are not in it."""
    found = [each for each in status.get("sources", []) if each["name"] == name]
    return found[0] if found else {"name": name, "state": "absent", "message": ""}


def _busy(device: dict[str, Any]) -> str:
    """Return the processes that use the device, or "" if it is idle."""
    pids = [pid for pid, _ in device["processes"] or []]
    if pids:
        return f"{len(pids)} process{'' if len(pids) == 1 else 'es'} of others"
    if device["total"] is None:
        return ""
    used_bytes = device["total"] - device["free"] - (device["reserved"] or 0)
    return f"{used_bytes >> 20} MiB by no listed process" if used_bytes > _UNSEEN_BYTES else ""
