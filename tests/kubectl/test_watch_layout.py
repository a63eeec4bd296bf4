"""`top --watch`: which rows, entries and details are on a terminal of a given height."""

import re
from dataclasses import replace

import pytest

from headroom.kubectl.watch_frame import ASCII, BLOCKS, Choice, frame
from headroom.kubectl.watched_fleet import Order, WatchedFleet, ordered
from tests.kubectl.test_watch import AT_S, FIX, detail, fleet, reading


def large_fleet() -> WatchedFleet:
    """40 nodes with one GPU each: a, whose GPU has index 1, and n01 to n39."""
    zero = dict.fromkeys(("reason", "model", "used", "sm", "state", "risk"), [0] * 40)
    names = ["a", *(f"n{number:02}" for number in range(1, 40))]
    more = {"gpu": ["1"] + ["0"] * 39, "memory_gib": [24.0] * 40, "reserved": [5] * 40}
    return fleet(node=names, devices=[1] * 40, **zero, **more)


def test_a_list_that_becomes_shorter_than_the_page_is_shown_from_its_first_row() -> None:
    found = reading(fleet())
    choice = Choice(selected=2, first=2)
    lines = [text for _, text in frame(found, found.gpus, choice, 80, 24, AT_S)]
    (header,) = (i for i, line in enumerate(lines) if line.startswith("NODE "))
    rows = [line.split()[:2] for line in lines[header + 1 : header + 4]]
    assert rows == [[row.node, row.gpu] for row in found.gpus]
    assert (choice.first, choice.selected) == (0, 2)


def test_data_of_a_console_without_the_api_server_show_since_when() -> None:
    found = reading(fleet())
    api_server = {"kind": "api_server", "age_s": 120.0, "message": "no contact"}
    others = ({**api_server, "kind": "agents"}, {**api_server, "message": None})
    cut_off = replace(found, inputs=(*others, api_server))
    lines = [text for _, text in frame(cut_off, found.gpus, Choice(), 80, 24, AT_S + 1)]
    assert re.fullmatch(r"Not up to date since [\d:]+ \S+ \(2m\): no contact", lines[1])
    live = frame(replace(found, inputs=others), found.gpus, Choice(), 80, 24, AT_S + 1)
    assert live[0][1].endswith(", live")


def test_the_list_scrolls_no_further_than_to_the_selected_row() -> None:
    found = reading(large_fleet())
    names = [row.node for row in found.gpus]

    def page(choice: Choice) -> list[str]:
        lines = frame(found, found.gpus, choice, 80, 24, AT_S)
        return [text.split()[0] for _, text in lines if re.match(r"(a|n\d\d) +[01] ", text)]

    choice = Choice()
    first = page(choice)
    assert first == names[: len(first)]
    choice.selected = len(first)
    assert page(choice) == names[1 : len(first) + 1]
    choice.selected = 39
    assert page(choice) == names[-len(first) :]
    choice.selected = 39 - len(first)
    assert page(choice) == names[-len(first) - 1 : -1]


@pytest.mark.parametrize(
    ("height", "rows", "entries", "details"),
    [
        (7, 0, 0, 0),
        (9, 2, 0, 0),
        (10, 3, 0, 0),
        (13, 3, 0, 3),
        (15, 3, 0, 5),
        (17, 3, 2, 5),
        (18, 3, 3, 5),
        (24, 8, 4, 5),
    ],
)
def test_a_low_terminal_keeps_three_rows_if_it_can_before_details_and_entries(
    height: int, rows: int, entries: int, details: int
) -> None:
    found = reading(large_fleet(), detail())
    lines = [text for _, text in frame(found, found.gpus, Choice(), 80, height, AT_S)]
    (counts,) = (i for i, line in enumerate(lines) if line.startswith("At risk 1 "))
    (header,) = (i for i, line in enumerate(lines) if line.startswith("NODE "))
    table = [line for line in lines if re.match(r"(a|n\d\d) +[01] ", line)]
    assert (header - counts - 1, len(table)) == (entries, rows)
    *shown, keys = lines[header + 1 + rows :]
    assert keys.startswith("1 of 40 by worst")
    assert len(shown) == details
    assert [line.strip() for line in shown[:1]] == ["a GPU 1, L4"][:details]
    assert len(lines) == height


def test_an_empty_list_shows_why() -> None:
    found = reading(fleet())
    for choice, reason in (
        (Choice(), "no GPUs"),
        (Choice(search="h200"), "no node matches"),
        (Choice(troubled=True), "no node matches"),
    ):
        lines = [text for _, text in frame(found, [], choice, 80, 24, AT_S)]
        (header,) = (i for i, line in enumerate(lines) if line.startswith("NODE "))
        assert [line.strip() for line in lines[header + 1 : header + 3]] == [reason, ""]


@pytest.mark.parametrize("width", [80, 100])
def test_every_word_of_a_risk_is_whole_on_a_narrow_terminal(width: int) -> None:
    found = reading(fleet(risk=[3, 4, 1], state=[2, 0, 0], cordoned=[]))
    lines = [text for _, text in frame(found, found.gpus, Choice(), width, 24, AT_S)]
    (header,) = (i for i, line in enumerate(lines) if line.startswith("NODE "))
    at = lines[header].index("STATE")
    assert [line[at:].strip() for line in lines[header + 1 : header + 4]] == [
        *("full soon; cordoned", "overcommitted", "overuse"),
    ]


def test_a_gpu_without_an_index_is_listed_by_the_start_of_its_uuid() -> None:
    body = {"gpu": ["0", "GPU-5e8a1b2c", "10"]}
    found = reading(fleet(**body), replace(detail(), gpu="GPU-5e8a1b2c"))
    rows = ordered(found.gpus, Order.NAME)
    lines = [text for _, text in frame(found, rows, Choice(selected=1), 80, 24, AT_S)]
    (header,) = (i for i, line in enumerate(lines) if line.startswith("NODE "))
    assert lines[header].startswith("NODE                   GPU  RESERVED")
    assert [line.split()[:2] for line in lines[header + 1 : header + 4]] == [
        *(["a", "0"], ["a", "GPU-5e8a1b2c"], ["b", "10"]),
    ]
    assert "a GPU-5e8a1b2c, L4" in lines
    assert all(len(line) <= 80 for line in lines)
    two = fleet(node=["a", "b", "c"], devices=[0, 3, 0], gpu=["GPU-5e8a1b2c", "10", "9"])
    assert [row.gpu for row in ordered(two.gpus(), Order.NAME)] == ["9", "10", "GPU-5e8a1b2c"]


def test_the_keys_are_short_if_a_search_leaves_no_room_for_their_names() -> None:
    found = reading(fleet())
    for search, keys in (("", "sort: w worst, a name"), ("l4-00", "w/a/r/u/m sort")):
        *_, (_, foot) = frame(found, found.gpus, Choice(search=search), 120, 24, AT_S)
        assert (keys in foot, foot.endswith("/ search"), len(foot) <= 120) == (True, True, True)


@pytest.mark.parametrize(("levels", "mark"), [(BLOCKS, "…"), (ASCII, "~")])
def test_a_list_that_is_cut_shows_that_more_follows(levels: str, mark: str) -> None:
    """First the reason for waiting is cut, because `why` prints it whole, then the list."""
    found = reading(large_fleet(), detail())
    group = {**found.overview["waiting"][0], "message": "no node can take the pod " * 40}
    found = replace(found, overview={**found.overview, "waiting": [group]})
    for height, has_fix in ((24, True), (17, False)):
        lines = [
            text for _, text in frame(found, found.gpus, Choice(), 80, height, AT_S, levels=levels)
        ]
        (header,) = (i for i, line in enumerate(lines) if line.startswith("NODE "))
        cut = [line for line in lines[4:header] if line.endswith(mark)]
        assert (lines[header - 1] == f"    Fix: {FIX}", len(cut)) == (has_fix, 1)
        assert "…" not in "".join(lines) or levels == BLOCKS


def test_a_pod_that_the_risk_names_is_not_named_again() -> None:
    found = reading(fleet())
    pods = [{"namespace": "team-a", "name": name} for name in ("llm", "llm-2")]
    risk = {**found.overview["at_risk"][0], "pods": pods}
    risk["message"] = "team-a/llm-2 uses 9.0 GiB and requested 7.0 GiB"
    found = replace(found, overview={**found.overview, "at_risk": [risk]})
    lines = [text for _, text in frame(found, found.gpus, Choice(), 80, 24, AT_S)]
    named = f"  a GPU 1: overcommitted: {risk['message']}; team-a/llm"
    assert [named[:80].rpartition(" ")[0], f"    {named.split()[-1]}"] == lines[5:7]


def test_a_fix_that_is_too_long_is_cut_and_a_command_is_whole() -> None:
    found = reading(fleet())
    group = {**found.overview["waiting"][0], "fix": "lower the request " * 9}
    command = "kubectl headroom cordon gke-prod-gpu-pool-1a2b3c4d-xyz1 0 --evict, then reset"
    fault = {"message": "GPU 0 of gke-prod is unhealthy: XID 79", "fix": f"{command} the GPU"}
    overview = {**found.overview, "waiting": [group, {**group, "fix": None}], "broken": [fault]}
    found = replace(found, overview={**overview, "at_risk": []})
    lines = [text for _, text in frame(found, found.gpus, Choice(), 80, 40, AT_S)]
    waits = "  team-b/job (3 pods waiting for 5m): no node can take the pod"
    first = lines.index(waits)
    assert lines[first : first + 6] == [
        waits,
        f"    Fix: {'lower the request ' * 9}"[:79] + "…",
        waits,
        "  GPU 0 of gke-prod is unhealthy: XID 79",
        f"    {command[: command.index(' reset')]}",
        "      reset the GPU",
    ]
