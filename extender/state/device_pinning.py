"""Device choice ``pinned``: the device of a pinned pod, and why a node cannot be pinned."""

from contract.gpunode import Plugin, Reservation


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


def pinned_to(held: Reservation) -> str:
    """Return the uuid of the device that a reservation pins its pod to; empty if it pins none.

    A Binding of an earlier attempt may still arrive and set this device in the pod's annotations.
    So the pod keeps this device until the reservation is removed. Once it is, such a Binding fails.
    """
    charges = [charge for charge in held.charges if charge.by_environment]
    return next((min(charge.candidates) for charge in charges if len(charge.candidates) == 1), "")
