"""Rules about cordoned devices that the agent and the extender share. Pure."""

from headroom.contract.gpunode import ADOPTED, Device, GPUNodeSpec, Reservation


def is_cordoned(device: Device, spec: GPUNodeSpec) -> bool:
    """Return whether the device, or the GPU that it is a part of, is cordoned."""
    return device.uuid in spec.cordoned or device.parent in spec.cordoned


def may_start_on(reservation: Reservation, device: str) -> bool:
    """Return whether a pod may start on a device (UUID) although it is cordoned.

    Only a pod that Headroom placed on the device may start there. Headroom placed it before the
    cordon, because filter rejects cordoned devices. For a pod that another scheduler bound,
    Headroom did not choose a device.
    """
    return ADOPTED not in reservation.flags and any(
        device in charge.candidates for charge in reservation.charges
    )
