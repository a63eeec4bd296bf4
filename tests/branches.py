"""A table of the differences between NVIDIA's driver branches that affect the agent.

The fake driver library simulates each row with ``play`` and ``tests.driver.library_folder``.
``tests/agent/test_drivers.py`` runs the agent with each, and docs/design/agent.md shows the table.
"""

from dataclasses import dataclass

_LISTS = ("Compute", "Graphics", "MPSCompute")
_LISTS_V3 = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in _LISTS)
_LISTS_V2 = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v2" for kind in _LISTS)
_MEMORY_V2 = ("nvmlDeviceGetMemoryInfo_v2",)
_LIMITS = ("nvmlDeviceGetMemoryLimits_v1",)

NOT_SUPPORTED, INVALID_ARGUMENT = 3, 2
#: Size of a process list entry in nvml.h: 16 bytes in version 1, and 24 bytes in versions 2 and 3.
V1_BYTES, V3_BYTES = 16, 24


@dataclass(frozen=True, slots=True)
class Branch:
    #: The driver version that the fake library reports for the branch.
    driver: str
    #: The documents that describe the branch's behavior.
    source: str
    #: Functions that the branch's library does not export.
    missing: tuple[str, ...] = _LIMITS
    #: Bytes per process that the ``_v3`` functions for process lists write.
    entry_bytes: int = V3_BYTES
    #: NVML error code that the library returns for the recovery action, or 0 if it is supported.
    recovery_code: int = 0

    @property
    def play(self) -> str:
        """Return the lines for the device table of the fake library."""
        return f"driver {self.driver}\nentries {self.entry_bytes}\nfield {self.recovery_code}\n"

    @property
    def has_memory_v2(self) -> bool:
        return not {*_MEMORY_V2} & {*self.missing}

    @property
    def has_limits(self) -> bool:
        return not {*_LIMITS} & {*self.missing}


BRANCHES = (
    Branch(
        "450.248.02",
        "nvml.h of 450; lists v2 came with 470, v3 and memory v2 with 510 (nvitop pull 79)",
        missing=_LIMITS + _LISTS_V3 + _LISTS_V2 + _MEMORY_V2,
        recovery_code=INVALID_ARGUMENT,
    ),
    Branch(
        "470.256.02",
        "nvitop pull 79",
        missing=_LIMITS + _LISTS_V3 + _MEMORY_V2,
        recovery_code=INVALID_ARGUMENT,
    ),
    Branch(
        "535.43.02",
        "nvitop pull 79, go-nvml issue 75, nvidia-ml-py 12.535.77 (one struct of 32 bytes)",
        entry_bytes=32,
        recovery_code=NOT_SUPPORTED,
    ),
    Branch(
        "535.86.10",
        "nvitop pull 79 and issue 88, pynvml pull 48 (535.54.03)",
        entry_bytes=32,
        recovery_code=INVALID_ARGUMENT,
    ),
    Branch(
        "535.104.05",
        "nvidia-ml-py 12.535.108 (24 bytes again, NVML_FI_MAX 197)",
        recovery_code=NOT_SUPPORTED,
    ),
    Branch(
        "550.54.14",
        "nvidia-ml-py 12.550.52 (NVML_FI_MAX 200)",
        recovery_code=INVALID_ARGUMENT,
    ),
    Branch(
        "550.127.08",
        "nvitop pull 226 (eight Hopper GPUs, in a container)",
        entry_bytes=V1_BYTES,
        recovery_code=NOT_SUPPORTED,
    ),
    Branch(
        "560.35.03",
        "nvidia-ml-py 12.560.30 (NVML_FI_MAX 230: the field is the next one)",
        recovery_code=INVALID_ARGUMENT,
    ),
    Branch("570.133.20", "change log of NVML (the field is new in 565), nvidia-ml-py 12.570.86"),
    Branch("580.95.05", "nvidia-ml-py 13.580.65 (action 5 is a bus reset)"),
    Branch("590.44.01", "nvidia-ml-py 13.590.44 (has no action 5)"),
    Branch(
        "615.10.02",
        "change log of NVML from 610 to 615, nvidia-ml-py 13.615.71 (actions 5 to 7 are new)",
        missing=(),
    ),
)


def table() -> str:
    """Return the table as docs/design/agent.md shows it."""
    lines = [
        "| driver | process lists | memory | recovery action | limits | source |",
        "|---|---|---|---|---|---|",
    ]
    for each in BRANCHES:
        newest = next(
            version
            for version, names in (("v3", _LISTS_V3), ("v2", _LISTS_V2), ("v1", ()))
            if not {*names} & {*each.missing}
        )
        entry = {"v3": each.entry_bytes, "v2": V3_BYTES, "v1": V1_BYTES}[newest]
        codes = {0: "yes", NOT_SUPPORTED: "NOT_SUPPORTED", INVALID_ARGUMENT: "INVALID_ARGUMENT"}
        cells = (
            each.driver,
            f"{newest}, {entry} bytes",
            "v2" if each.has_memory_v2 else "v1",
            codes[each.recovery_code],
            "v1" if each.has_limits else "none",
            each.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
