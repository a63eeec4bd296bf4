"""Runs nvidia-smi. Reads the XML of ``nvidia-smi -q -x`` and the output of ``nvidia-smi dmon``."""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SmiProcess:
    pid: int
    #: C, G or M+C.
    kind: str
    used_mib: int | None
    command: str


@dataclass(frozen=True, slots=True)
class SmiMemory:
    total_mib: int | None
    #: None on drivers before 510.
    reserved_mib: int | None
    used_mib: int | None


@dataclass(frozen=True, slots=True)
class SmiGpu:
    #: Position in the XML, which is nvidia-smi's index.
    index: int
    uuid: str
    model: str
    minor: int | None
    memory: SmiMemory
    processes: tuple[SmiProcess, ...] = ()
    #: GPU instance -> its memory, which its compute instances share.
    instances: dict[int, SmiMemory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Smi:
    driver: str
    gpus: tuple[SmiGpu, ...]

    def gpu(self, uuid: str) -> SmiGpu | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def parse(xml: str) -> Smi:
    """Parse the XML. Raises ``ValueError`` if it is not what nvidia-smi prints."""
    try:
        # Its DOCTYPE names a file that does not exist, but ElementTree does not open it.
        root = ET.fromstring(xml)
    except ET.ParseError as err:
        raise ValueError(f"nvidia-smi -q -x printed no XML: {err}") from err
    gpus = tuple(_gpu(index, each) for index, each in enumerate(root.findall("gpu")))
    return Smi(root.findtext("driver_version", ""), gpus)


def _gpu(index: int, gpu: ET.Element) -> SmiGpu:
    instances = {
        int(each.findtext("gpu_instance_id", "0")): _memory(each)
        for each in gpu.findall("mig_devices/mig_device")
    }
    processes = tuple(
        SmiProcess(
            int(each.findtext("pid", "0")),
            each.findtext("type", ""),
            _number(each.findtext("used_memory")),
            each.findtext("process_name", ""),
        )
        for each in gpu.findall("processes/process_info")
    )
    return SmiGpu(
        index,
        gpu.findtext("uuid", ""),
        gpu.findtext("product_name", ""),
        _number(gpu.findtext("minor_number")),
        _memory(gpu),
        processes,
        instances,
    )


def _memory(element: ET.Element) -> SmiMemory:
    memory = element.find("fb_memory_usage")
    if memory is None:
        return SmiMemory(None, None, None)
    return SmiMemory(*(_number(memory.findtext(key)) for key in ("total", "reserved", "used")))


def _number(text: str | None) -> int | None:
    """Return the number in a text such as "81559 MiB", or None for "N/A" and the like."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None


def dmon(text: str) -> list[dict[str, float]]:
    """Return each sample of ``nvidia-smi dmon``, by the names in its first line."""
    names: list[str] = []
    samples = []
    for line in text.splitlines():
        words = line.lstrip("# ").split()
        if line.startswith("#"):
            names = names or [word.lower() for word in words]
        elif words and names:
            samples.append(
                {
                    name: float(word)
                    for name, word in zip(names, words, strict=False)
                    if re.fullmatch(r"\d+(\.\d+)?", word)
                }
            )
    return samples
