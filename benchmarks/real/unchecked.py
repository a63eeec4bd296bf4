"""``headroom serve`` without the check for other schedulers' binds, to compare with:
python -m benchmarks.real.unchecked serve --config FILE ..."""

from contract.kube import Pod
from extender.app.cli import app
from extender.ledger.node_capacity import NodeCapacity


async def unchecked(self: NodeCapacity, pod: Pod, node: str) -> bool:
    return False


if __name__ == "__main__":
    NodeCapacity.exceeded = unchecked  # type: ignore[method-assign]
    app()
