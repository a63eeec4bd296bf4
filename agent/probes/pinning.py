"""Decides whether a pod can choose its device by its own NVIDIA_VISIBLE_DEVICES. Pure.

The container toolkit uses CDI annotations first, then volume mounts, then the variable. The pod's
own value of the variable overrides the plugin's. CDI devices that the runtime injects set the
variable to ``void``. So a pod can choose only if the plugin uses the variable alone, and the
toolkit honours it. The administrator can forbid that for unprivileged pods. If the plugin also
passes device files (PASS_DEVICE_SPECS), the pod additionally sees the device that the plugin chose.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Pinning = Literal["honoured", "ignored", "unknown"]

#: Modes of the NVIDIA runtime in which the variable may contain a bare UUID.
_BARE_UUID_MODES = {"auto", "legacy", "jit-cdi"}


def pinning(
    strategies: Sequence[str],
    toolkit_obeys_environment: bool | None,
    passes_device_specs: bool | None = False,
) -> Pinning:
    """Return whether a pod's own variable has an effect.

    ``strategies`` are the plugin's device list strategies, empty if they are not known.
    """
    if not strategies:
        return "unknown"
    if "envvar" not in strategies:
        return "ignored"
    if len(set(strategies)) > 1:
        return "unknown"  # which strategy takes effect depends on the runtime's mode
    if toolkit_obeys_environment is None or (toolkit_obeys_environment and passes_device_specs):
        return "unknown"
    return "honoured" if toolkit_obeys_environment else "ignored"


def obeys_environment(toolkit: Mapping[str, Any]) -> bool | None:
    """Return whether the toolkit honours the variable, from its decoded config.toml.

    None if the value would have to be a CDI name. Missing settings have the toolkit's default.
    """
    if toolkit.get("accept-nvidia-visible-devices-envvar-when-unprivileged", True) is not True:
        return False
    runtime = toolkit.get("nvidia-container-runtime", {})
    mode = runtime.get("mode", "auto") if isinstance(runtime, Mapping) else "auto"
    return True if mode in _BARE_UUID_MODES else None
