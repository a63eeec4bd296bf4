"""What is left for pods of one size, as several views show it."""

from pydantic import BaseModel

from extender.placement.capacity import Space


class SpaceView(BaseModel):
    """The memory and replicas on the nodes that a pod of one size may run on."""

    #: That have a device of the resource and take pods; and that have one and take none.
    open_nodes: int
    closed_nodes: int
    #: On which one more pod fits.
    fitting_nodes: int
    #: What one pod takes of a node, where that is least; null without devices.
    need_bytes: int | None
    #: Left on the sound devices of the resource, on open nodes; and on closed ones.
    headroom_bytes: int
    closed_bytes: int
    #: Of the headroom what lies on devices without a replica for anybody.
    stranded_bytes: int
    #: Replicas on open nodes that nobody holds, and of those the ones on devices without room.
    replicas_free: int
    replicas_stranded: int
    #: The largest request per device that fits; null where more than memory is in the way.
    largest_fitting_bytes: int | None


def space_view(found: Space) -> SpaceView:
    return SpaceView.model_validate(found, from_attributes=True)
