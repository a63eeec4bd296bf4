"""Identifies programs by their image, command, arguments and environment.

Some programs decide on their own how much memory they take. Their peak depends on a setting, so the
setting must change with the request. Settings and defaults come from the documentation of the
programs (vLLM 0.32, JAX 0.10, TensorFlow 2.21, PyTorch 2.13).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Family(Enum):
    """Frameworks and engines whose memory allocation is known."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    TGI = "Text Generation Inference"
    JAX = "JAX"
    TENSORFLOW = "TensorFlow"
    PYTORCH = "PyTorch"
    UNKNOWN = ""


#: The family for a text in an image, a command, an argument or the name of a variable. The first
#: match is used, because engines are built on the frameworks that follow them in this list.
_MARKS: tuple[tuple[str, Family], ...] = (
    ("vllm", Family.VLLM),
    ("sglang", Family.SGLANG),
    ("text-generation-inference", Family.TGI),
    ("text-generation-launcher", Family.TGI),
    ("xla_python_client", Family.JAX),
    ("jax", Family.JAX),
    ("tf_force_gpu_allow_growth", Family.TENSORFLOW),
    ("tf_gpu_allocator", Family.TENSORFLOW),
    ("tensorflow", Family.TENSORFLOW),
    ("pytorch_cuda_alloc_conf", Family.PYTORCH),
    ("pytorch_alloc_conf", Family.PYTORCH),
    ("torchrun", Family.PYTORCH),
    ("pytorch", Family.PYTORCH),
    ("torch", Family.PYTORCH),
)

#: Message to users about the setting that decides the peak, by family.
_SETTINGS = {
    Family.VLLM: (
        "vLLM takes the share of the device that --gpu-memory-utilization sets (default 0.9), or "
        "--kv-cache-memory-bytes for its cache. Lower it together with the request."
    ),
    Family.SGLANG: (
        "SGLang takes the share of the device that --mem-fraction-static sets. Lower it together "
        "with the request."
    ),
    Family.TGI: (
        "Text Generation Inference takes the share of the device that --cuda-memory-fraction sets "
        "(default 1.0). Lower it together with the request."
    ),
    Family.JAX: (
        "JAX takes the share of the device that XLA_PYTHON_CLIENT_MEM_FRACTION sets (default "
        "0.75). Lower it, or set XLA_PYTHON_CLIENT_PREALLOCATE=false to see what it needs."
    ),
    Family.TENSORFLOW: (
        "TensorFlow takes almost the whole device. Set TF_FORCE_GPU_ALLOW_GROWTH=true to see what "
        "it needs, or a memory_limit with tf.config.set_logical_device_configuration."
    ),
    Family.PYTORCH: (
        "PyTorch's caching allocator keeps memory that tensors no longer use, so a peak can be "
        "more than the program needs. PYTORCH_ALLOC_CONF=expandable_segments:True often lowers "
        "it; torch.cuda.set_per_process_memory_fraction limits it."
    ),
    Family.UNKNOWN: (
        "This program allocates memory once at its start and then keeps it. Its peak is "
        "probably the value of a setting, which must change together with the request."
    ),
}


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a container."""

    #: A hash that is equal for containers that run the same program. The version of the image does
    #: not count.
    fingerprint: str
    family: Family
    #: The image with its tag. Programs with other tags have the same fingerprint.
    image: str = field(default="", compare=False)


def program(
    image: str,
    command: Iterable[str],
    args: Iterable[str],
    environment: Mapping[str, str],
) -> Program:
    """Return the program of a container with these fields."""
    command, args = list(command), list(args)
    whole = [repository(image), command, args, sorted(environment.items())]
    digest = hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:12]
    texts = [repository(image), *command, *args, *environment]
    return Program(digest, family(texts), image)


def family(texts: Iterable[str]) -> Family:
    """Return the family that these texts identify."""
    lowered = [text.lower() for text in texts]
    for mark, found in _MARKS:
        if any(mark in text for text in lowered):
            return found
    return Family.UNKNOWN


def repository(image: str) -> str:
    """Return an image's name without its tag and digest."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def setting(found: Family, self_sized: bool) -> str:
    """Return a message about the setting that decides the peak, or an empty string if there is no
    such setting."""
    if found is Family.PYTORCH or self_sized:
        return _SETTINGS[found]
    return ""
