"""The keeper of a steered resource, where what it needs is in the way."""

import time
from pathlib import Path

from structlog.testing import capture_logs

from agent.steering.keeper import Keeper, Seat, plugin_socket
from agent.steering.relay import PREFIX

RESOURCE = "nvidia.com/gpu"


def test_a_socket_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    for name in (plugin_socket(RESOURCE), "kubelet.sock"):
        (tmp_path / name).touch()
    (tmp_path / f"{PREFIX}{plugin_socket(RESOURCE)}").mkdir()
    keeper = Keeper(
        tmp_path, Seat(tmp_path), RESOURCE, lambda wish: None, lambda _: None, lambda: None
    )
    with capture_logs() as logs:
        keeper.start()
        until_s = time.monotonic() + 30
        while len(logs) < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
        keeper.stop()
    assert [log["event"] for log in logs[:2]] == 2 * ["steering_broken"]
