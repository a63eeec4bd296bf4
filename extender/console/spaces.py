"""Body of the free memory and replicas for pods of one size."""

from pydantic import BaseModel

from extender.placement.capacity import Space


class SpaceView(BaseModel):
    """The memory and replicas on the nodes that a pod of one size may run on."""

    #: Number of nodes with a device of the resource that take pods, and of those that take none.
    open_nodes: int
    closed_nodes: int
    #: Number of nodes on which one more pod fits.
    fitting_nodes: int
    #: Memory that one pod takes on the node where it takes the least; null without devices.
    need_bytes: int | None
    #: Headroom of healthy devices of the resource on open nodes, and on closed nodes.
    headroom_bytes: int
    closed_bytes: int
    #: The part of the headroom on devices without a free replica.
    stranded_bytes: int
    #: Free replicas on open nodes, and how many of them are on devices without room for the pod.
    replicas_free: int
    replicas_stranded: int
    #: The largest request per device that fits; null if other reasons than memory prevent it.
    largest_fitting_bytes: int | None


def space_view(found: Space) -> SpaceView:
    return SpaceView.model_validate(found, from_attributes=True)
