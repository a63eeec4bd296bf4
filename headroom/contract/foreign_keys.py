"""Annotations and variables of other programs that Headroom reads."""

#: Annotation that a kubelet sets on the mirror pod of a static pod.
MIRRORED = "kubernetes.io/config.mirror"
#: Variable from which the container toolkit reads the devices of a container.
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"

#: Annotations of a node that HAMi's agent writes.
HAMI_HANDSHAKE = "hami.io/node-handshake"
HAMI_REGISTER = "hami.io/node-nvidia-register"
NODE_MARKS = (HAMI_HANDSHAKE, HAMI_REGISTER)

#: Annotations of a pod that other allocators write when they bind it.
HAMI_NODE = "hami.io/vgpu-node"
HAMI_ALLOCATED = "hami.io/vgpu-devices-allocated"
HAMI_ALLOCATES = "hami.io/vgpu-devices-to-allocate"
KAI_RESERVES = "run.ai/reserve_for_gpu_index"
GPUSHARE_DEVICE = "ALIYUN_COM_GPU_MEM_IDX"
_MARKS = frozenset((HAMI_NODE, HAMI_ALLOCATED, HAMI_ALLOCATES, KAI_RESERVES, GPUSHARE_DEVICE))


def is_kai_device(key: str) -> bool:
    """Return whether this is the annotation in which KAI records a container's device."""
    return key.startswith("nvidia.com/container.") and key.endswith(".gpus.devices")


def is_mark(key: str) -> bool:
    """Return whether another allocator writes the annotation when it binds a pod."""
    return key in _MARKS or is_kai_device(key)
