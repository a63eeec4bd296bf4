"""Why a node's device choice has no effect, for its report and for messages to people."""

from contract.gpunode import Plugin

#: Why an agent cannot steer, and which two settings permit it.
STEERING_NOT_PERMITTED = (
    "not permitted: the agent has the kubelet's device plugin directory read-only"
    " (chart value agent.steering.permitted, or component deploy/components/steering)"
)
#: The obstacle if an agent does not report whether it may steer.
STEERING_UNKNOWN = "its agent has not reported whether it may steer"


def why_not_pinned(plugin: Plugin) -> str:
    """Return what prevents pinning, according to the report, and what the administrator can do."""
    strategy = plugin.device_list_strategy
    if plugin.pinning == "ignored":
        if "envvar" in strategy.split(","):
            return (
                "the NVIDIA container toolkit ignores NVIDIA_VISIBLE_DEVICES of unprivileged pods; "
                "set accept-nvidia-visible-devices-envvar-when-unprivileged = true"
            )
        return (
            f"the device plugin uses device list strategy {strategy}, which overrides "
            "NVIDIA_VISIBLE_DEVICES; set DEVICE_LIST_STRATEGY=envvar"
        )
    if not strategy:
        return (
            "the device list strategy of the device plugin is unknown, and device choice pinned "
            "requires DEVICE_LIST_STRATEGY=envvar"
        )
    if strategy != "envvar":
        return (
            f"the device plugin uses device list strategy {strategy}, which may override "
            "NVIDIA_VISIBLE_DEVICES; set DEVICE_LIST_STRATEGY=envvar"
        )
    return (
        "the agent cannot confirm that NVIDIA_VISIBLE_DEVICES takes effect; "
        "set NVIDIA runtime mode auto, legacy or jit-cdi, and PASS_DEVICE_SPECS=false"
    )
