"""Tests `kubectl headroom whatif` with a real extender."""

import re

import pytest

from tests.kubectl.served_fleet import server
from tests.kubectl.transcripts import run
from tests.serving import Server

__all__ = ["server"]


def test_whatif_shows_placements_and_changes_nothing(server: Server) -> None:
    before = server.get("/v1/nodes").json()["nodes"]
    drained = run(server.debug, "whatif", "--drain", "shared-0000", "--pods", "1", "--vram", "70Gi")
    assert drained.returncode == 0
    assert re.search(r"^team-a/fits +shared-0000 +shared-0001 ", drained.stdout, re.MULTILINE)
    assert re.search(r"^default/asked-0 +- +whole ", drained.stdout, re.MULTILINE)
    rejected = run(server.debug, "whatif", "--pods", "2", "--vram", "70Gi")
    assert rejected.returncode == 1
    assert "1 of 2 pods is placed" in rejected.stdout
    more = run(server.debug, "whatif", "--pods", "2", "--vram", "70Gi", "--add", "whole=1")
    assert more.returncode == 0
    after = server.get("/v1/nodes").json()["nodes"]
    for node in before + after:
        del node["report_age_s"]
    assert before == after


def test_the_size_of_new_pods_requires_their_number(server: Server) -> None:
    rejected = run(server.debug, "whatif", "--vram", "20Gi")
    assert rejected.returncode == 2
    assert rejected.stderr == (
        "kubectl headroom: --vram and --gpus describe new pods; also set their number with --pods. "
        "Example: --pods 4 --vram 20Gi\n"
    )


@pytest.mark.parametrize("command", [("capacity",), ("whatif", "--pods", "1")])
def test_an_amount_without_its_unit_gets_a_note(server: Server, command: tuple[str, ...]) -> None:
    shown = run(server.debug, *command, "--vram", "20")
    assert shown.returncode == 0
    assert shown.stderr == (
        "--vram: '20' is only 20 bytes; the unit is probably missing. Example: --vram 8Gi\n"
    )
    assert run(server.debug, *command, "--vram", "20Gi").stderr == ""


def test_a_released_pod_without_a_namespace_is_in_the_namespace_of_the_context(
    server: Server,
) -> None:
    rejected = run(server.debug, "whatif", "--release", "fits")
    assert rejected.returncode == 2
    assert "pod default/fits holds no GPU" in rejected.stderr
    assert run(server.debug, "whatif", "--release", "team-a/fits").returncode == 0


def test_whatif_changes_replicas_and_modes(server: Server) -> None:
    small = ("whatif", "--pods", "20", "--vram", "1Gi")
    # 15 replicas of the shared nodes and the GPU of the third node are free.
    few = run(server.debug, *small).stdout.splitlines()
    assert few[0].startswith("16 of 20 pods are placed; main reasons for the others: no free GPU")
    # The bound pod has 7 GiB, and each new pod has 1 GiB. Then all GPUs are in use.
    assert [line.split() for line in few[1:5]] == [
        ["TOTAL", "BEFORE", "AFTER", "DIFFERENCE"],
        ["Pods", "placed", "1", "17", "+16"],
        ["Pods", "that", "would", "not", "fit", "0", "4", "+4"],
        [*("GPU", "memory", "reserved"), *("7.0", "GiB", "23.0", "GiB", "+16.0", "GiB")],
    ]
    assert [line.split()[-3:] for line in few[6:9]] == [
        ["5", "5", "0"],
        ["1", "5", "+4"],
        ["4", "0", "-4"],
    ]
    # Each GPU of the first node has either the pod of 7 GiB and three other pods, or four other
    # pods.
    assert few[9] == (
        "  for 1 x 1Gi: 162.0 GiB, then 147.0 GiB free; largest request that fits: 80.0 GiB, then "
        "none"
    )
    assert run(server.debug, *small, "--replicas", "shared-0001=12").returncode == 0
    drained = ("--drain", "shared-0000", "--drain", "whole")
    large = ("whatif", "--pods", "2", "--vram", "15Gi", *drained)
    # The last pod could get either GPU of the node, and each GPU would then have 15 GiB more.
    assert run(server.debug, *large).stdout.startswith("2 of 3 pods are placed; ")
    steered = run(server.debug, *large, "--device-choice", "shared-0001=steered").stdout
    on = re.findall(r" on GPU-shared-0001-(\d)$", steered, re.MULTILINE)
    assert (len(on), set(on)) == (3, {"0", "1"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "shared-0000"), "Example: --replicas gpu-a=4"),
        (
            ("--device-choice", "shared-0000=magic"),
            "is not NODE=CHOICE with one of predicted, gated",
        ),
        (
            ("--device-choice", "whole=steered"),
            "--device-choice whole: steered, but no device of whole is share",
        ),
        (
            ("--drain", "nowhere"),
            "--drain: node nowhere has no known GPUs; kubectl headroom top lists the known nodes",
        ),
        (("--add", "nowhere=1"), "--add: node nowhere has no known GPUs"),
        (("--release", "a/b"), "--release: pod a/b holds no GPU"),
        (
            ("--pods", "1", "--vram", "20GB"),
            "--vram: '20GB' is not valid: 'GB' is not a unit; units are like Mi, Gi, M and G. "
            "Example: --vram 20Gi",
        ),
        (("--pods", "-1"), "Invalid value for '--pods': "),
    ],
)
def test_invalid_changes_are_rejected_with_an_example(
    server: Server, arguments: tuple[str, ...], message: str
) -> None:
    bad = run(server.debug, "whatif", *arguments)
    assert bad.returncode == 2
    assert message in bad.stderr
