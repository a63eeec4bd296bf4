"""Simulates a machine with GPUs, with stand-ins for the driver library, libcuda, nvidia-smi and
MPS.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.controlplane import ROOT
from tests.driver import AGENT_PATH, Driver, Gpu, cuda_folder, h100, library_folder

FIRST = "GPU-9b07c1d2-3e4f-5a6b-7c8d-9e0f1a2b3c4d"
SECOND = "GPU-4c1e0000-1111-2222-3333-444455556666"
SCRIPTS = {"nvidia-smi": "nvidia_smi.py", "nvidia-cuda-mps-control": "mps_control.py"}
TIMEOUT_S = 240


class Stage:
    """Stand-ins with their device table, report and files. ``run`` runs the complete command on
    them.
    """

    def __init__(self, folder: Path, gpus: list[Gpu] | None = None) -> None:
        self.out = folder / "recorded"
        self.cuda = folder / "cuda"
        self.cuda.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, source in SCRIPTS.items():
            text = Path(__file__).with_name(source).read_text()
            self.script(name, f"#!{sys.executable}\n{text}")
        self.driver = Driver(folder / "table", [h100(FIRST)] if gpus is None else gpus)
        for gpu in self.driver.gpus:
            self.driver.say(gpu.uuid, *self.quiet)
        self.environment = {
            "LD_LIBRARY_PATH": f"{library_folder()}:{cuda_folder()}",
            "FAKE_NVML_TABLE": str(self.driver.table),
            "FAKE_CUDA_FOLDER": str(self.cuda),
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": AGENT_PATH,
        }

    #: Lines of the device table for an idle GPU.
    quiet = ("util 0", "sm 0 0", "recovery 0")

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "--out", str(self.out), *args],
            env=os.environ | self.environment | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, **environment: str) -> tuple[int, str, str]:
        """Run the command. Return its exit status, stdout and stderr."""
        process = self.start(*args, **environment)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def verdicts(self, *args: str, **environment: str) -> dict[str, tuple[str, str]]:
        """Run the command. Return the verdict and the summary of each line of its output."""
        status, out, err = self.run(*args, **environment)
        assert status in (0, 1), out + err
        assert (self.out / "report.json").exists(), out + err
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        found = {line["name"]: (line["verdict"], line["summary"]) for line in report["lines"]}
        assert status == any(verdict == "differs" for verdict, _ in found.values()), out
        return found

    def processes(self) -> list[str]:
        """Return the command lines of all processes that use these stand-ins."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if str(self.cuda).encode() in path.read_bytes():
                    found.append(path.with_name("cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found
