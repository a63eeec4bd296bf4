"""Tests that tables on narrow terminals do not cut numbers and states, and that shortened names
still differ.
"""

import pytest

from headroom.kubectl.table import STATE, Table, laid_out, shortened, wrapped

EKS = [f"ip-10-0-{a}-{b}.eu-central-1.compute.internal" for a in (1, 123) for b in (4, 45)]
GKE = ["gke-prod-gpu-pool-1a2b3c4d-xyz1", "gke-prod-gpu-pool-1a2b3c4d-xyz2"]


def lines(table: Table, width: int | None) -> list[str]:
    return [line for _, line in laid_out(table, width)]


def test_headers_of_several_words_wrap_only_if_the_columns_are_too_wide() -> None:
    table = Table(("NODE", "FREE REPLICAS", "MODEL", STATE))
    table.add("gpu-a", "4", "L4", "ok")
    table.total = ["TOTAL"]
    assert lines(table, 34) == lines(table, None)
    assert lines(table, None)[0] == "NODE   FREE REPLICAS  MODEL  STATE"
    assert lines(table, 33) == [
        "           FREE",
        "NODE   REPLICAS  MODEL  STATE",
        "gpu-a         4  L4     ok",
        "TOTAL",
    ]
    rows = [line for _, line in laid_out(table, 33, headers=False)]
    assert rows == ["gpu-a         4  L4     ok"]


def test_the_host_in_a_domain_name_is_kept() -> None:
    assert shortened(EKS, 15) == [
        "ip-10-0-1-4…",
        "ip-10-0-1-45…",
        "ip-10-0-123-4…",
        "ip-10-0-123-45…",
    ]
    # If there is more space, the end of the name is shown too.
    assert shortened(EKS[-1:], 24) == ["ip-10-0-123-45….internal"]


def test_other_names_are_shortened_in_the_middle() -> None:
    assert shortened(GKE, 15) == ["gke-pro…4d-xyz1", "gke-pro…4d-xyz2"]
    assert shortened(["gpu-a", *GKE], 16) == ["gpu-a", "gke-prod…4d-xyz1", "gke-prod…4d-xyz2"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(
            ["node-1-of-the-training-pool", "node-2-of-the-training-pool"],
            ["node-1-…ng-pool", "node-2-…ng-pool"],
            id="different at both ends",
        ),
        pytest.param(
            ["training-node-1-europe-west-pool", "training-node-2-europe-west-pool"],
            ["training-node-1…", "training-node-2…"],
            id="different only after the middle, so the width grows",
        ),
        pytest.param(
            ["a.long-domain-of-team-1.example", "a.long-domain-of-team-2.example"],
            ["a…eam-1.example", "a…eam-2.example"],
            id="different only in the domain",
        ),
        pytest.param(
            ["x" * 20, "x" * 21],
            ["x" * 20, "x" * 10 + "…" + "x" * 9],
            id="different only in length",
        ),
    ],
)
def test_different_names_stay_different(names: list[str], expected: list[str]) -> None:
    assert shortened(names, 15) == expected


def test_equal_names_stay_equal() -> None:
    assert shortened([GKE[0], GKE[0]], 15) == ["gke-pro…4d-xyz1"] * 2


NODES = Table(("NODE", "USED", STATE))
NODES.add(EKS[0], "640.0 GiB", "ok")
NODES.add(EKS[3], "-3.5 GiB", "overcommitted", bad=True)
NODES.add(EKS[1], "0.0 GiB", "GPU report of the node is stale")


def test_numbers_are_right_aligned_and_text_is_left_aligned() -> None:
    assert lines(NODES, None) == [
        "NODE                                               USED  STATE",
        "ip-10-0-1-4.eu-central-1.compute.internal     640.0 GiB  ok",
        "ip-10-0-123-45.eu-central-1.compute.internal   -3.5 GiB  overcommitted",
        "ip-10-0-1-45.eu-central-1.compute.internal      0.0 GiB  GPU report of the node is stale",
    ]


def test_on_a_narrow_terminal_names_are_shortened_and_long_states_move_below() -> None:
    assert lines(NODES, 41) == [
        "NODE                  USED  STATE",
        "ip-10-0-1-4…     640.0 GiB  ok",
        "ip-10-0-123-45…   -3.5 GiB  overcommitted",
        "ip-10-0-1-45…      0.0 GiB",
        "    GPU report of the node is stale",
    ]


def test_a_long_state_is_broken_between_words() -> None:
    table = Table(("NODE", STATE))
    table.add("gpu-a", "annotation headroom.gpu/reserve of the node is not valid")
    assert lines(table, 40) == [
        "NODE   STATE",
        "gpu-a",
        "    annotation headroom.gpu/reserve of",
        "    the node is not valid",
    ]


def test_the_host_of_a_domain_name_is_never_cut() -> None:
    table = Table(("NODE", "USED", STATE))
    table.add("ip-172-31-123-145.eu-central-1.compute.internal", "640.0 GiB", "ok")
    assert lines(table, 20)[1] == "ip-172-31-123-145…  640.0 GiB"


def test_numbers_and_states_stay_whole_on_a_too_narrow_terminal() -> None:
    whole = "\n".join(lines(NODES, 10))
    for text in ("640.0 GiB", "-3.5 GiB", "overcommitted", "stale", "ip-10-0-123-45…"):
        assert text in whole


def test_only_rows_with_a_problem_are_red_and_the_total_is_bold() -> None:
    table = Table(("NODE", STATE), total=["TOTAL  2 nodes"])
    table.add("a", "ok")
    table.add("b", "overcommitted", bad=True)
    assert list(laid_out(table, 80)) == [
        ("bold", "NODE  STATE"),
        ("", "a     ok"),
        ("red", "b     overcommitted"),
        ("bold", "TOTAL  2 nodes"),
    ]


def test_wrapped_lines_keep_their_indentation() -> None:
    text = "GPU-0: needs 90.0 GiB, 80.0 GiB free"
    assert wrapped(text, 30, "  ", "    ") == ["  GPU-0: needs 90.0 GiB, 80.0", "    GiB free"]
    assert wrapped(text, None, "  ", "    ") == [f"  {text}"]
    # A word that is longer than the terminal is wide, such as a UUID, is not cut.
    assert wrapped("x" * 40, 30) == ["x" * 40]
