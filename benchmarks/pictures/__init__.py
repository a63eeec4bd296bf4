"""The pictures of the docs, made from the running product: python -m benchmarks.pictures"""

#: Every file of docs/images.
FILES = (
    "overview.png",
    "fleet.png",
    "gpu.png",
    "pod.png",
    "plan.png",
    "why.png",
    "architecture.svg",
    "device-choice.svg",
)
