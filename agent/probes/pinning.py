"""Decides whether a pod can choose its device by its own NVIDIA_VISIBLE_DEVICES. Pure.

The container toolkit looks for CDI annotations first, then for volume mounts, then at the variable,
of which the pod's own value is the last and counts. CDI devices that the runtime injects by itself
set the variable to ``void``. So only a plugin that uses the variable alone leaves the choice open,
and then the toolkit must obey it, which its administrator can forbid for unprivileged pods. Where
the plugin hands out device files besides (PASS_DEVICE_SPECS), the pod sees its pick as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Pinning = Literal["honoured", "ignored", "unknown"]

#: Modes of the NVIDIA runtime in which a bare uuid in the variable means the device.
_BARE_UUID_MODES = {"auto", "legacy", "jit-cdi"}


def pinning(
    strategies: Sequence[str],
    toolkit_obeys_environment: bool | None,
    passes_device_specs: bool | None = False,
) -> Pinning:
    """``strategies`` are the plugin's; empty where they are not known."""
    if not strategies:
        return "unknown"
    if "envvar" not in strategies:
        return "ignored"
    if len(set(strategies)) > 1:
        return "unknown"  # which of them counts depends on the runtime's mode
    if toolkit_obeys_environment is None or (toolkit_obeys_environment and passes_device_specs):
        return "unknown"
    return "honoured" if toolkit_obeys_environment else "ignored"


def obeys_environment(toolkit: Mapping[str, Any]) -> bool | None:
    """Of the toolkit's config.toml, as decoded; None where the value would have to be a CDI name.

    What is not in there has the toolkit's own default.
    """
    if toolkit.get("accept-nvidia-visible-devices-envvar-when-unprivileged", True) is not True:
        return False
    runtime = toolkit.get("nvidia-container-runtime", {})
    mode = runtime.get("mode", "auto") if isinstance(runtime, Mapping) else "auto"
    return True if mode in _BARE_UUID_MODES else None
