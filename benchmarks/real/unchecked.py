"""Runs ``headroom serve`` without the check for other schedulers' binds, for comparison:
python -m benchmarks.real.unchecked serve --config FILE ..."""

from extender.ledger.node_capacity import NodeCapacity
from headroom.commands import app
from headroom.contract.kube import Pod


async def unchecked(self: NodeCapacity, pod: Pod, node: str) -> bool:
    return False


if __name__ == "__main__":
    NodeCapacity.exceeded = unchecked  # type: ignore[method-assign]
    app()
