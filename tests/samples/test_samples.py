"""Checks that the samples for frameworks start with their share of the memory, and do not start
without a share.

``make samples`` passes these values to the frameworks' own parsers (check_frameworks.py).
"""

import sys
from pathlib import Path

import pytest

from headroom.contract.annotations import ShareMode, parse_share, parse_vram
from tests.admission.reviews import around, mutated
from tests.builders import GIB
from tests.samples.scripts import NAMES, RECORDER, SAMPLES, STARTS, Ran, manifest, nvidia_smi, run

#: A share of 8 GiB on a 24 GiB device, of which other pods use 10 GiB.
SHARE = {"HEADROOM_VRAM_BYTES": str(8 * GIB), "HEADROOM_VRAM_FRACTION": "0.3333"}
SMI = nvidia_smi({"memory.used": 10240, "memory.free": 14336, "memory.total": 24576})
#: A fake TensorFlow that records the sample's calls.
TENSORFLOW = """
import json
from pathlib import Path
from types import SimpleNamespace

def record(gpu, limits):
    Path("limits.json").write_text(json.dumps([gpu, limits]))

config = SimpleNamespace(
    list_physical_devices=lambda kind: [f"{kind}:0"],
    LogicalDeviceConfiguration=lambda memory_limit: memory_limit,
    set_logical_device_configuration=record,
)
"""


def start(name: str, folder: Path, variables: dict[str, str], smi: str | None = SMI) -> Ran:
    programs = {STARTS[name]: RECORDER}
    if name == "tensorflow":
        (folder / "tensorflow.py").write_text(TENSORFLOW)
        (folder / "train.py").write_text(RECORDER.partition("\n")[2])
        programs = {"python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}
    if smi is not None:
        programs["nvidia-smi"] = smi
    return run(name, folder, variables, programs)


def test_every_framework_has_a_sample() -> None:
    assert list(STARTS) == NAMES
    assert {path.name for path in SAMPLES.iterdir()} == {f"{name}.yaml" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_webhook_sets_the_variables_of_the_sample(name: str) -> None:
    stored, answer = mutated({"kind": "Pod", **manifest(name)}, around())
    assert answer.warnings == ()
    annotations = stored["metadata"]["annotations"]
    assert parse_share(annotations["headroom.gpu/share"]) is ShareMode.ENV
    assert parse_vram(annotations["headroom.gpu/vram"]).everywhere
    (container,) = stored["spec"]["containers"]
    added = [each["name"] for each in container["env"] if each["name"].startswith("HEADROOM")]
    assert added == ["HEADROOM_VRAM_BYTES", "HEADROOM_VRAM_FRACTION"]
    # Kubernetes replaces $$ in arguments with $.
    assert not any("$$" in text for text in [*container["command"], *container["args"]])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("vllm", ["serve", "Qwen/Qwen3-4B", "--gpu-memory-utilization", "0.3020"]),
        ("triton", ["--model-repository=/models", "--model-load-gpu-limit=0:0.7500"]),
        (
            "llama-cpp",
            ["--model", "/models/model.gguf", "--fit", "on", "--fit-target", "6144"],
        ),
        ("ollama", ["serve"]),
        ("pytorch", ["train.py"]),
        ("jax", ["train.py"]),
        ("tensorflow", []),
    ],
)
def test_samples_pass_the_share_as_arguments(name: str, args: list[str], tmp_path: Path) -> None:
    ran = start(name, tmp_path, SHARE)
    assert (ran.code, ran.output) == (0, "")
    assert ran.args == args


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        # The value is 0.3333 minus the share of a CUDA context, which takes 768 MiB of 8 GiB,
        # rounded down.
        ("pytorch", "PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.3020"),
        ("jax", "XLA_CLIENT_MEM_FRACTION", "0.3020"),
        ("ollama", "LLAMA_ARG_FIT_TARGET", "6144"),
    ],
)
def test_samples_pass_the_share_as_variables(
    name: str, variable: str, value: str, tmp_path: Path
) -> None:
    assert start(name, tmp_path, SHARE).env[variable] == value


def test_pytorch_may_use_memory_up_to_its_limit(tmp_path: Path) -> None:
    limit = {
        "HEADROOM_VRAM_LIMIT_BYTES": str(16 * GIB),
        "HEADROOM_VRAM_LIMIT_FRACTION": "0.6666",
    }
    # The value is 0.6666 minus 768 MiB of 16 GiB.
    ran = start("pytorch", tmp_path, SHARE | limit)
    assert ran.env["PYTORCH_CUDA_ALLOC_CONF"] == "per_process_memory_fraction:0.6353"


def test_tensorflow_limits_every_gpu(tmp_path: Path) -> None:
    start("tensorflow", tmp_path, SHARE)
    assert (tmp_path / "limits.json").read_text() == '["GPU:0", [7424]]'


def test_an_image_that_configures_pytorchs_allocator_keeps_its_options(tmp_path: Path) -> None:
    image = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ran = start("pytorch", tmp_path, SHARE | image)
    assert ran.env["PYTORCH_CUDA_ALLOC_CONF"] == (
        "expandable_segments:True,per_process_memory_fraction:0.3020"
    )


def test_image_variables_that_jax_would_reject_are_removed(tmp_path: Path) -> None:
    image = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    ran = start("jax", tmp_path, SHARE | image)
    assert ran.args == ["train.py"]
    assert not image.keys() & ran.env.keys()


@pytest.mark.parametrize("value", [None, ""], ids=["absent", "empty"])
@pytest.mark.parametrize("name", NAMES)
def test_no_sample_starts_without_a_share(name: str, value: str | None, tmp_path: Path) -> None:
    ran = start(name, tmp_path, {} if value is None else dict.fromkeys(SHARE, value))
    assert ran.code != 0
    assert ran.args is None
    assert (
        "HEADROOM_VRAM_BYTES: needs annotation headroom.gpu/share: env, and a pod that Headroom "
        "placed; see docs/how-to/frameworks.md"
    ) in ran.output


@pytest.mark.parametrize("name", ["jax", "pytorch", "vllm"])
def test_no_sample_starts_without_the_fraction(name: str, tmp_path: Path) -> None:
    ran = start(name, tmp_path, SHARE | {"HEADROOM_VRAM_FRACTION": ""})
    assert (ran.code != 0, ran.args) == (True, None)
    assert "HEADROOM_VRAM_FRACTION: needs annotation headroom.gpu/share: env" in ran.output


@pytest.mark.parametrize("name", ["jax", "pytorch", "tensorflow", "vllm"])
def test_a_share_smaller_than_a_cuda_context_is_rejected(name: str, tmp_path: Path) -> None:
    small = {"HEADROOM_VRAM_BYTES": str(GIB // 2), "HEADROOM_VRAM_FRACTION": "0.0208"}
    ran = start(name, tmp_path, small)
    assert (ran.code != 0, ran.args) == (True, None)
    assert (
        "HEADROOM_VRAM_BYTES: 536870912 bytes are too few for a CUDA context of 768 MiB"
    ) in ran.output
    measured = start(name, tmp_path, small | {"CUDA_CONTEXT_MIB": "256"})
    assert (measured.code, measured.output) == (0, "")


@pytest.mark.parametrize("name", ["llama-cpp", "ollama", "triton"])
def test_samples_that_measure_the_device_need_exactly_one_device(name: str, tmp_path: Path) -> None:
    gpu = {"memory.used": 0, "memory.free": 24576, "memory.total": 24576}
    ran = start(name, tmp_path, SHARE, nvidia_smi(gpu, gpu))
    assert (ran.code != 0, ran.args) == (True, None)
    assert "bytes on 2 GPUs; this sample is for one GPU" in ran.output
    ran = start(name, tmp_path, SHARE, "#!/bin/sh\necho 'no driver' >&2\nexit 9\n")
    assert (ran.code, ran.output, ran.args) == (9, "no driver\n", None)


@pytest.mark.parametrize("name", ["llama-cpp", "ollama"])
def test_no_margin_is_needed_on_a_device_with_less_free_memory(name: str, tmp_path: Path) -> None:
    ran = start(name, tmp_path, SHARE, nvidia_smi({"memory.free": 4096}))
    margins = [ran.env.get("LLAMA_ARG_FIT_TARGET"), (ran.args or [""])[-1]]
    assert "0" in margins


def test_tritons_limit_is_at_most_the_memory_of_the_device(tmp_path: Path) -> None:
    full = nvidia_smi({"memory.used": 20480, "memory.total": 24576})
    ran = start("triton", tmp_path, SHARE, full)
    assert ran.args is not None
    assert ran.args[-1] == "--model-load-gpu-limit=0:1.0000"
