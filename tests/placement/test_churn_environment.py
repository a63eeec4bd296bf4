"""Simulates a node with pods whose own NVIDIA_VISIBLE_DEVICES decides which devices they use.

The replica that the plugin allocates affects its next choice. The memory is on the devices of the
variable. In some runs the process table does not show it there.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from headroom.contract.gpunode import PodUse
from headroom.core.placement.policy import Rules, VisibleDevices
from tests.builders import choosing, container
from tests.examples import examples
from tests.placement.test_churn import Churn


class ChurnByEnvironment(Churn):
    wishes = Rules(visible_devices=VisibleDevices.CHARGE)

    @initialize(uses=st.booleans())
    def look(self, uses: bool) -> None:
        self.uses = uses

    @rule(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2))
    def bind_a_pod_that_sees_all_devices(self, sizes: list[int]) -> None:
        self.try_to_bind(sizes, [choosing(container(f"c{number}")) for number in range(len(sizes))])

    def row(self, uid: str, index: int, number: int) -> PodUse:
        row = super().row(uid, index, number)
        if self.pods[uid].sees is None or not self.uses:
            return row
        return PodUse(uid=uid, device=row.device, replica=row.replica, used_bytes=0)


TestByEnvironment = ChurnByEnvironment.TestCase
TestByEnvironment.settings = settings(
    max_examples=examples(150), stateful_step_count=25, deadline=None
)
