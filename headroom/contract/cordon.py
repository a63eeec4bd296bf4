"""Rules about cordoned devices that the agent and the extender share. Pure."""

from headroom.contract.gpunode import ADOPTED, Device, GPUNodeSpec, Reservation


def is_cordoned(device: Device, spec: GPUNodeSpec) -> bool:
    """Return whether the device, or the GPU that it is a part of, is cordoned."""
    return device.uuid in spec.cordoned or device.parent in spec.cordoned


def may_start_on(reservation: Reservation, device: str) -> bool:
    """Return whether a pod may start on a device (UUID) although it is cordoned.

    Only a pod that Headroom placed on the device may. It was placed before the cordon, because
    filter rejects cordoned devices. A pod that another scheduler bound was not placed on any
    device.
    """
    return ADOPTED not in reservation.flags and any(
        device in charge.candidates for charge in reservation.charges
    )
