"""Device choice ``pinned``: the device of a pinned pod."""

from contract.gpunode import Reservation


def pinned_to(held: Reservation) -> str:
    """Return the uuid of the device that a reservation pins its pod to; empty if it pins none.

    A Binding of an earlier attempt may still arrive and set this device in the pod's annotations.
    So the pod keeps this device until the reservation is removed. Once it is, such a Binding fails.
    """
    charges = [charge for charge in held.charges if charge.by_environment]
    return next((min(charge.candidates) for charge in charges if len(charge.candidates) == 1), "")
