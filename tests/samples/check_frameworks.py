"""Runs each sample until the argument parser of the real framework has read its options.

``make samples`` runs this module. ``make test`` does not, because the module downloads 5 GB,
installs 11 GB below .cache/samples, and compiles llama.cpp. No GPU is needed, because a sample ends
when the framework has read its share of the memory. docs/design/frameworks.md shows the versions in
``PINNED``.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import ROOT, built
from tests.samples.scripts import Ran, run
from tests.samples.test_samples import SHARE, SMI

#: Versions of PyPI packages. vLLM depends on PyTorch, so it has no entry. nvidia-pytriton contains
#: the server of Triton 2.51.0, and llama-cpp-python the source of llama.cpp.
#: tests/gobin/ollama-share pins Ollama.
PINNED = {
    "vllm": "0.33.0",
    "jax": "0.10.2",
    "tensorflow-cpu": "2.21.0",
    "nvidia-pytriton": "0.7.0",
    "llama-cpp-python": "0.3.36",
}
PYTORCH = "2.14.0"
TRITON = "2.51.0"
OLLAMA = "v0.34.0"
CACHE = ROOT / ".cache/samples"


def finished(*command: str | Path, timeout_s: float = 3000, **how: Any) -> str:
    """Run a command and return its output. If the command fails, the test fails with the output."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
        **how,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def environment(package: str) -> Path:
    """Return the Python interpreter of an environment with this package. The first call installs
    the package.
    """
    folder = CACHE / f"{package}-{PINNED[package]}"
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        finished(python, "-m", "pip", "install", "-q", f"{package}=={PINNED[package]}")
        (folder / "installed").touch()
    return python


def site_packages(python: Path) -> Path:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    return site


def llama_args() -> Path:
    """Compile the program ``llama-args`` with the source from llama-cpp-python, and return its
    path.
    """
    version = PINNED["llama-cpp-python"]
    folder = CACHE / f"llama-{version}"
    program = folder / "build/llama-args"
    if not program.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        finished(*pip, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}")
        with tarfile.open(folder / f"llama_cpp_python-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        source = folder / f"llama_cpp_python-{version}/vendor/llama.cpp"
        here = Path(__file__).with_name("llama-args")
        options = [f"-DLLAMA={source}", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0"]
        finished("cmake", "-S", here, "-B", folder / "build", *options)
        finished("cmake", "--build", folder / "build", "-j2", "--target", "llama-args")
    return program


def starter(*command: str | Path) -> str:
    """Return a script that runs a command and appends its own arguments."""
    return "#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in command) + ' "$@"\n'


def last_json(ran: Ran) -> Any:
    assert ran.code == 0, ran.output
    return json.loads(ran.output.splitlines()[-1])


VLLM = """
import json
import sys
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # no GPU is here to be recognised
from vllm.config import CacheConfig
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
cache = CacheConfig(
    gpu_memory_utilization=args.gpu_memory_utilization,
    kv_cache_memory_bytes=args.kv_cache_memory_bytes,
)
print(json.dumps([args.model_tag, cache.gpu_memory_utilization, cache.kv_cache_memory_bytes]))
"""


def vllm(folder: Path, variables: dict[str, str]) -> Ran:
    (folder / "parse.py").write_text(VLLM)
    program = starter(environment("vllm"), folder / "parse.py")
    return run("vllm", folder, variables, {"vllm": program}, timeout_s=300)


def test_vllm_gets_its_share(tmp_path: Path) -> None:
    ran = vllm(tmp_path, SHARE)
    assert last_json(ran) == ["Qwen/Qwen3-4B", 0.3020, None]


def test_vllm_rejects_an_invalid_fraction(tmp_path: Path) -> None:
    (tmp_path / "parse.py").write_text(VLLM)
    for value in ("", "0", "1.5", "abc"):
        command = [tmp_path / "parse.py", "serve", "m", "--gpu-memory-utilization", value]
        done = subprocess.run([environment("vllm"), *command], capture_output=True, check=False)
        assert done.returncode != 0, value


#: A program that prints the option from the configuration that PyTorch has parsed.
READ_BACK = """
#include <c10/cuda/CUDAAllocatorConfig.h>
extern "C" double fraction() {
  return c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::per_process_memory_fraction();
}
"""
PYTORCH_TRAIN = """
import ctypes, json, torch
library = ctypes.CDLL("./fraction.so")
library.fraction.restype = ctypes.c_double
print(json.dumps([torch.__version__.partition("+")[0], library.fraction()]))
"""


def pytorch(folder: Path, variables: dict[str, str]) -> Ran:
    python = environment("vllm")
    site = site_packages(python)
    (cuda,) = site.glob("nvidia/cu*/include/cuda_runtime_api.h")
    (folder / "fraction.cpp").write_text(READ_BACK)
    (folder / "train.py").write_text(PYTORCH_TRAIN)
    headers = [f"-I{site / 'torch/include'}", f"-I{cuda.parent}"]
    libraries = [f"-L{site / 'torch/lib'}", "-lc10_cuda", "-lc10"]
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", *headers, folder / "fraction.cpp"]
    finished(*compiler, *libraries, "-o", folder / "fraction.so")
    return run("pytorch", folder, variables, {"python3": starter(python)}, timeout_s=300)


@pytest.mark.parametrize("image", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}])
def test_pytorch_gets_its_share(image: dict[str, str], tmp_path: Path) -> None:
    ran = pytorch(tmp_path, SHARE | image | {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    assert last_json(ran) == [PYTORCH, 0.3020]


def test_pytorch_rejects_an_invalid_fraction(tmp_path: Path) -> None:
    for value in ("per_process_memory_fraction:1.5", "per_process_memory:0.5"):
        ran = pytorch(tmp_path, SHARE | {"PYTORCH_CUDA_ALLOC_CONF": value})
        assert ran.code != 0, value


JAX_TRAIN = """
import json
from jaxlib import xla_client
print(json.dumps(xla_client.generate_pjrt_gpu_plugin_options()))
"""


def jax(folder: Path, variables: dict[str, str]) -> Ran:
    (folder / "train.py").write_text(JAX_TRAIN)
    return run("jax", folder, variables, {"python3": starter(environment("jax"))}, timeout_s=300)


def test_jax_gets_its_share(tmp_path: Path) -> None:
    old = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    options = last_json(jax(tmp_path, SHARE | old))
    assert (options["memory_fraction"], options["allocator"]) == (0.3020, "default")


def test_jax_uses_its_default_if_the_variable_is_empty(tmp_path: Path) -> None:
    """The sample must check the variable, because JAX does not."""
    (tmp_path / "train.py").write_text(JAX_TRAIN)
    empty = os.environ | {"XLA_CLIENT_MEM_FRACTION": ""}
    printed = finished(environment("jax"), tmp_path / "train.py", env=empty)
    assert "memory_fraction" not in json.loads(printed.splitlines()[-1])


#: A program that runs the sample's code after it adds a GPU to TensorFlow's list, which is empty on
#: this machine.
TENSORFLOW = """
import sys
from tensorflow.python import pywrap_tfe

listed = pywrap_tfe.TF_ListPhysicalDevices()
pywrap_tfe.TF_ListPhysicalDevices = lambda: [*listed, b"/physical_device:GPU:0"]
assert sys.argv[1] == "-c"
exec(sys.argv[2])
"""
TENSORFLOW_TRAIN = """
import json
from tensorflow.python.eager import context
options = context.context()._compute_gpu_options()
print(json.dumps([list(device.memory_limit_mb) for device in options.experimental.virtual_devices]))
"""


def test_tensorflow_gets_its_limit(tmp_path: Path) -> None:
    (tmp_path / "with_gpu.py").write_text(TENSORFLOW)
    (tmp_path / "train.py").write_text(TENSORFLOW_TRAIN)
    program = starter(environment("tensorflow-cpu"), tmp_path / "with_gpu.py")
    ran = run("tensorflow", tmp_path, SHARE, {"python3": program}, timeout_s=300)
    assert last_json(ran) == [[7424.0]]


def triton(folder: Path, *more: str) -> Ran:
    site = site_packages(environment("nvidia-pytriton"))
    server = site / "pytriton/tritonserver/bin/tritonserver"
    # Let the server end by itself after its start: the model repository is empty, so loading a
    # model fails.
    ends = f"--model-repository='{folder}' --model-control-mode=explicit --load-model=none"
    closed = " ".join(f"--allow-{port}=false" for port in ("http", "grpc", "metrics"))
    # Append these options, because the server uses the first value of a repeated option.
    program = f"#!/bin/sh\nshift\nexec '{server}' {' '.join(more)} \"$@\" {ends} {closed}\n"
    return run("triton", folder, SHARE, {"tritonserver": program, "nvidia-smi": SMI})


def test_triton_gets_its_share(tmp_path: Path) -> None:
    ran = triton(tmp_path)
    assert re.search(rf"\| server_version +\| {re.escape(TRITON)} ", ran.output), ran.output
    assert ran.output.endswith("failed to load all models\n")


def test_triton_rejects_an_invalid_fraction(tmp_path: Path) -> None:
    ran = triton(tmp_path, "--model-load-gpu-limit=0:1.5")
    assert "expects limit fraction to be in range [0.0, 1.0], got 1.500000" in ran.output
    assert "server_version" not in ran.output


def test_llama_cpp_gets_its_margin(tmp_path: Path) -> None:
    programs = {"llama-server": starter(llama_args()), "nvidia-smi": SMI}
    ran = run("llama-cpp", tmp_path, SHARE, programs)
    assert (ran.code, ran.output.splitlines()[-1]) == (
        0,
        "fit=1 margin_mib=6144 layers_set=0 context_set=0",
    )


def test_ollama_passes_the_margin_to_llama_cpp(tmp_path: Path) -> None:
    assert (
        f"github.com/ollama/ollama {OLLAMA}\n"
        in (ROOT / "tests/gobin/ollama-share/go.mod").read_text()
    )
    program = f"#!/bin/sh\nexec '{built('ollama-share')['ollama-share']}' '{llama_args()}'\n"
    ran = run("ollama", tmp_path, SHARE, {"ollama": program, "nvidia-smi": SMI})
    assert ran.code == 0, ran.output
    first, *_, last = ran.output.splitlines()
    assert first == "max_loaded_models=1 keeps_models=true"
    assert last == "fit=1 margin_mib=6144 layers_set=0 context_set=0"
