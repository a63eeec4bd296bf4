"""The node agent: what NVML and DCGM really measure, reported as a GPUNode's status."""

import sys

# structlog imports rich and pygments if they are installed, and the extender needs them in the same
# image. The agent never uses them, and they would take 5 MiB on every GPU node.
if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # its import fails
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
