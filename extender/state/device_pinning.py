"""To which device a pod is pinned; and why a node that is to be pinned cannot be, said for the
administrator who wants to change it."""

from contract.gpunode import Plugin, Reservation


def why_not_pinned(plugin: Plugin) -> str:
    """What stands in the way, as far as the report tells."""
    strategy = plugin.device_list_strategy
    if plugin.pinning == "ignored":
        if "envvar" in strategy.split(","):
            return (
                "the container toolkit does not obey the variable of unprivileged pods; pinned "
                "takes accept-nvidia-visible-devices-envvar-when-unprivileged = true"
            )
        return (
            f"the device plugin hands devices over by {strategy}, which counts more than the "
            "variable; pinned takes DEVICE_LIST_STRATEGY=envvar"
        )
    if not strategy:
        return "no report tells how the device plugin hands devices over"
    if strategy != "envvar":
        return f"of {strategy} nobody can tell which counts; pinned takes envvar alone"
    return (
        "it is not seen that container toolkit and device plugin leave the choice to the variable; "
        "pinned takes runtime mode auto, legacy or jit-cdi, and PASS_DEVICE_SPECS=false"
    )


def pinned_to(held: Reservation) -> str:
    """The device of a pod that was promised it for certain; empty where there is none.

    A Binding of an earlier attempt may still arrive and tell the pod of this device. Before it can
    be promised another, the promise must have been taken back, which makes such Bindings fail.
    """
    charges = [charge for charge in held.charges if charge.by_environment]
    return next((min(charge.candidates) for charge in charges if len(charge.candidates) == 1), "")
