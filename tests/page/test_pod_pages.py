"""Tests the page in Chromium: pods, pending pods, explanations and what-if."""

import re

import msgspec
from playwright.sync_api import Browser, Route, expect

from headroom.contract.gpunode import PodUse, Replicas
from headroom.kubectl import tables
from headroom.kubectl.why import why
from tests.page.conftest import CONTRASTS, GIB, PLUGIN, Looked, ask, place, report
from tests.serving import Server


def test_pods_are_searched_by_the_parameters_in_the_url(readings: Looked) -> None:
    page = readings.open("/pods?state=waiting")
    status = page.get_by_role("status").filter(has_text="found")
    expect(status).to_have_text(
        "1 pod found, 1 waiting for 90.0 GiB: 0.0 GiB reserved, 0.0 GiB in use, 0.0 GiB unused."
    )
    rows = page.get_by_role("table", name="All pods").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("1 x nvidia.com/gpu with 90Gi")
    expect(page.get_by_role("link", name="team-a/large")).to_be_visible()
    page.get_by_label("State").select_option("bound")
    expect(rows.nth(1).get_by_role("cell")).to_have_text(
        [
            *("team-a/runsPod runs", re.compile("unconfirmed|running"), "7.0 GiB", "-", "-", "-"),
            *(re.compile(r"\d+d"), "l4-0000L4"),
        ]
    )
    assert page.url.endswith("#/pods?state=bound")
    page.get_by_label("Search").fill("no such")
    expect(page.get_by_text("No pod matches.")).to_be_visible()
    assert page.url.endswith("#/pods?state=bound&search=no+such")
    page.get_by_role("button", name="Clear").click()
    expect(rows).to_have_count(3)
    assert page.url.endswith("#/pods")


def test_a_user_finds_in_two_clicks_why_a_pod_is_pending_and_what_helps(
    readings: Looked, server: Server
) -> None:
    page = readings.open("/overview")
    page.get_by_role("link", name="Pods", exact=True).click()
    page.get_by_role("link", name="team-a/large").click()
    verdict = page.locator(".verdict")
    expect(verdict).to_have_text(
        "no node can take the pod: it needs 90.0 GiB, larger than any GPU that it may use "
        "(80.0 GiB)"
    )
    # The page, the API and `kubectl headroom why` show the same sentences.
    body = server.get("/v1/explain?pod=team-a/large").json()
    assert why(body)[0] == f"Pod team-a/large: {verdict.inner_text()}"
    lower = page.get_by_role("listitem").filter(has_text=body["suggestions"][0])
    assert f"  {body['suggestions'][0]}" in why(body)
    fix = lower.locator("code")
    expect(fix).to_have_text(body["advice"][0]["fix"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    lower.get_by_role("button", name="Copy").click()
    expect(lower.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == body["advice"][0]["fix"]
    life = page.get_by_role("list", name="Timeline").get_by_role("listitem")
    expect(life.first).to_contain_text("filtered kube-scheduler tried it: 3 nodes offered, none")
    expect(life.last).to_contain_text("created the pod was created")
    assert page.evaluate(CONTRASTS) == []


def test_500_pending_pods_fill_at_most_six_screens_of_a_phone(readings: Looked) -> None:
    def many(route: Route) -> None:
        body = route.fetch().json()
        limit = int(re.search(r"limit=(\d+)", route.request.url)[1])  # type: ignore[index]
        body |= {"pods": body["pods"] * limit, "matching": 500, "remaining": 500 - limit}
        route.fulfill(json=body | {"continue": "team-a/large"})

    readings.page.set_viewport_size({"width": 390, "height": 844})
    readings.page.route("**/v1/pending?*", many)
    page = readings.open("/pending")
    expect(page.get_by_text("500 pods pending for a GPU")).to_be_visible()
    expect(page.get_by_role("link", name="team-a/large")).to_have_count(10)
    expect(page.get_by_role("button", name="Next")).to_be_enabled()
    assert page.evaluate("document.documentElement.scrollHeight") <= 6 * 844
    # The reason and the link to this view are visible without scrolling.
    reason = page.get_by_text("no node can take the pod").first
    for found in (reason, page.get_by_role("link", name="Pending 1")):
        box = found.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_times_in_sentences_are_in_the_zone_of_the_reader(browser: Browser, server: Server) -> None:
    context = browser.new_context(timezone_id="Asia/Tokyo")
    try:
        page = context.new_page()
        page.goto(f"{server.debug}/#/pod/team-a/large")
        attempts = page.locator("#answer").get_by_text("kube-scheduler offered")
        expect(attempts).to_have_text(
            re.compile(r"at the latest at \d+ \w+, \d\d:\d\d:\d\d (GMT\+9|JST)$")
        )
        body = server.get("/v1/explain?pod=team-a/large").json()
        assert re.search(r"at the latest at [\dT:.-]+Z$", body["attempts"]["message"])
    finally:
        context.close()


def test_a_pod_on_a_device_links_to_its_explanation(readings: Looked) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("team-a/runs")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.locator("summary").click()
    page.get_by_role("link", name="team-a/runs").first.click()
    expect(page.get_by_role("heading", name="Pod team-a/runs")).to_be_visible()
    expect(page.locator("#answer")).to_contain_text("bound to node l4-0000")
    expect(page.get_by_role("table", name="Annotations")).to_contain_text("headroom.gpu/placement")


def test_a_pending_pod_links_to_the_arithmetic_of_the_nearest_node(readings: Looked) -> None:
    page = readings.open("/pending")
    waits = page.get_by_role("table", name="Pending pods")
    expect(waits).to_contain_text("10.0 GiB short on h100")
    expect(page.locator("nav")).to_contain_text("Pending 1")
    page.get_by_role("link", name="team-a/large").click()
    answer = page.locator("#answer")
    expect(answer).to_contain_text("no node can take the pod")
    expect(answer).to_contain_text("container main requests 1 x nvidia.com/gpu with 90Gi")
    expect(answer).to_contain_text("3 nodes: insufficient GPU memory on any device")
    expect(answer).to_contain_text(
        re.compile(r"Computed by the console now, from generation \d+ of its snapshot")
    )
    expect(page.locator("#details")).to_contain_text(
        re.compile(r"source: decision, generation \d+ of extender \w+")
    )
    sums = page.get_by_role("table", name="Candidate devices of h100")
    first = sums.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
    assert first[:1] == ["0, 1, 2, 3, 4, 5, 6, 7 H100"]
    page.set_viewport_size({"width": 390, "height": 844})
    box = sums.get_by_text("10.0 GiB").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390
    # The column about reduced memory is missing, because nothing reduces the memory of these
    # devices.
    memory, headroom, room, needs, short = map(gib, first[1:6])
    assert memory == headroom
    assert needs - room == short == 10


def test_the_last_decision_shows_the_extender_and_the_verb_that_ranked(readings: Looked) -> None:
    """The extender that ranked the nodes can differ from the extender that filtered them."""
    by_filter = False

    def ranked(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        body["last_decision"]["filter"]["replica"] = "ext-filter"
        body["last_decision"]["prioritize"] = {
            **{"replica": "ext-ranks", "snapshot_generation": 4711, "at": body["generated_at"]},
            **{"took_ms": 0.5, "times": 1, "offered": 2, "winner": "h100", "candidates": []},
            "by_filter": by_filter,
        }
        route.fulfill(response=response, json=body)

    readings.page.route(re.compile(r"/v1/explain\?pod="), ranked)
    answer = readings.open("/pod/team-a/large").locator("#details")
    expect(answer).to_contain_text("source: decision, generation 4711 of extender ext-ranks")
    expect(answer).to_contain_text("prioritize: h100 of 2 nodes (0.5 ms)")
    by_filter = True
    readings.page.reload()
    expect(answer).to_contain_text("filter returned only the best: h100 of 2 nodes")


def gib(text: str) -> float:
    return float(text.removesuffix(" GiB"))


def test_an_unknown_pod_is_reported(readings: Looked) -> None:
    readings.expected = "404"  # The browser writes this error to its console.
    page = readings.open("/pod")
    page.get_by_role("textbox", name="Pod").fill("team-a/unknown")
    page.get_by_role("button", name="Why?").click()
    expect(page.locator("#answer")).to_contain_text("pod team-a/unknown is not known")


def test_what_if_shows_placements(readings: Looked) -> None:
    page = readings.open("/what-if")
    page.get_by_label("Pods to add").fill("2")
    page.get_by_label("GPU memory of each pod").fill("70Gi")
    page.get_by_label("Nodes to drain").fill("l4-0000")
    page.get_by_role("button", name="What if?").click()
    expect(page.locator("#answer")).to_contain_text("all 3 pods are placed")
    goes = page.get_by_role("table", name="Placements")
    expect(goes.get_by_role("row").filter(has_text="team-a/runs")).to_contain_text("l4-0000")
    expect(goes.get_by_role("row").filter(has_text="asked-0-1")).to_contain_text("h100")
    page.get_by_label("Device choices to change").fill("h100=steered")
    page.get_by_role("button", name="What if?").click()
    steered = page.get_by_role("row").filter(has_text="asked-0-1")
    expect(steered).to_contain_text("GPU-h100-")
    page.get_by_label("Device choices to change").fill("h100:steered")
    page.get_by_role("button", name="What if?").click()
    expect(page.locator("#answer")).to_have_text(
        "h100:steered is not NODE=CHOICE. Example: gpu-a=steered"
    )
    page.get_by_label("Device choices to change").fill("")
    page.get_by_label("Nodes to add").fill("h100")
    page.get_by_role("button", name="What if?").click()
    expect(page.locator("#answer")).to_have_text("h100 is not NODE=COUNT. Example: gpu-a=2")
    expect(page.get_by_label("Nodes to add")).to_be_focused()
    expect(page.get_by_label("Nodes to add")).to_have_attribute("aria-invalid", "true")


def test_what_if_compares_the_cluster_before_and_after_each_kind_of_change(
    readings: Looked, server: Server
) -> None:
    page = readings.open("/what-if?count=10&vram=60Gi&drain=l4-0000&replicas=l4-0002%3D8")
    rows = page.get_by_role("table", name="Before and after").get_by_role("row")
    # Eight pods get a GPU each. The pods of the drained node move to another node.
    bound = server.get("/v1/pods?state=bound").json()["matching"]
    expect(rows.nth(1).get_by_role("cell")).to_have_text(
        ["Pods placed", str(bound), str(bound + 8), "+8"]
    )
    expect(rows.nth(2).get_by_role("cell")).to_have_text(
        ["Pods that would not fit", "0", "2", "+2"]
    )
    expect(page.locator("#answer")).to_contain_text(
        "2 pods would not fit: default/asked-0-8, default/asked-0-9. 59 nodes: "
    )
    page.get_by_label("Pods to add").fill("13")
    page.get_by_label("Device choices to change").fill("l4-0001=steered")
    page.keyboard.press("Enter")
    expect(rows.nth(2)).to_contain_text("+5")
    expect(page.locator("#answer")).to_contain_text("default/asked-0-10 and 2 more. ")
    assert page.evaluate(CONTRASTS) == []
    page.reload()
    expect(rows.nth(2)).to_contain_text("+5")
    # `kubectl headroom whatif` prints the same words and figures.
    asked = {
        "pods": [{"count": 13, "vram": "60Gi", "gpus": 1}],
        **{
            "drain": ["l4-0000"],
            "replicas": {"l4-0002": 8},
            "device_choices": {"l4-0001": "steered"},
        },
    }
    printed = tables.before_and_after(server.debug_post("/v1/whatif", asked).json()).rows
    shown = [row.get_by_role("cell").all_inner_texts() for row in rows.all()[1:]]
    assert [row[0] for row in shown] == [row[0] for row in printed]
    assert shown == [list(row) for row in printed]
    assert [row[3] for row in shown[:5]] == ["+8", "+5", "+480.0 GiB", shown[3][3], "-2"]
    assert shown[4][1:3] == ["128", "126"]
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_group_is_one_row_of_the_pending_page(readings: Looked) -> None:
    message = "3 of 8 pods of group train are bound, waiting for 5 x 12Gi; none of them fits now"
    group = {"name": "train", "waiting": 5, "requests": "5 x 12Gi", "message": message}

    def with_group(route: Route) -> None:
        body = route.fetch().json()
        members = [body["pods"][0] | {"name": f"train-{i}", "group": group} for i in range(3, 8)]
        route.fulfill(json=body | {"pods": body["pods"] + members})

    readings.page.route("**/v1/pending?*", with_group)
    rows = readings.open("/pending").get_by_role("table", name="Pending pods").get_by_role("row")
    expect(rows).to_have_count(3)  # One row is the header.
    expect(rows.last).to_contain_text("team-a/train-3")
    expect(rows.last).to_contain_text("5 pods of group train")
    expect(rows.last).to_contain_text(message)


def test_the_pending_page_shows_pods_that_steering_would_place(readings: Looked) -> None:
    sentence = "1 pending pod with 16.0 GiB waits; steering 1 node would place it"
    to_do = "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered"

    def with_steering(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        assert body["steering"] is None  # The only pending pod is larger than any GPU.
        body["steering"] = {"sentence": sentence, "to_do": to_do}
        route.fulfill(response=response, json=body)

    readings.page.route("**/v1/pending?*steering=true*", with_steering)
    page = readings.open("/pending")
    expect(page.get_by_text(f"{sentence}. To do: {to_do}")).to_be_visible()


def test_names_are_shown_as_text_and_not_as_html(readings: Looked, server: Server) -> None:
    name = "<img src=x onerror=alert(1)>"
    ask(server, name, "90Gi", ["h100"])
    try:
        page = readings.open("/pending")
        expect(page.get_by_role("link", name=f"team-a/{name}")).to_be_visible()
        assert page.locator("table img").count() == 0
    finally:
        assert server.delete(f"/embedded/v1/pods/team-a/{name}".replace(" ", "%20")).status == 204


def test_a_pod_with_two_gpus_is_shown_on_each_of_them(readings: Looked, server: Server) -> None:
    steering = msgspec.structs.replace(
        PLUGIN,
        topology_manager_policy="none",
        steered=["nvidia.com/gpu"],
        steers_several=True,
        fail_requests_greater_than_one=False,
    )
    report(server, "l4-0050", {}, {}, plugin=steering)
    place(server, "pair", "10Gi", "l4-0050", gpus=2)
    taken = {"used_bytes": GIB, "replicas": Replicas(free=3, allocated=1)}
    gpus = [f"GPU-l4-0050-{index}" for index in (0, 1)]
    uses = [
        PodUse("uid-pair", gpu, "team-a", "pair", "main", replica=f"{gpu}::0", used_bytes=GIB)
        for gpu in gpus
    ]
    report(server, "l4-0050", taken, taken, pods=uses, plugin=steering)
    page = readings.open("/pod/team-a/pair")
    expect(page.locator("#answer")).to_contain_text("bound to node l4-0050")
    annotations = page.get_by_role("table", name="Annotations")
    expect(annotations).to_contain_text(",".join(gpus))
    page = readings.open("/pods?search=team-a%2Fpair")
    row = page.get_by_role("table", name="All pods").get_by_role("row").nth(1)
    expect(row).to_contain_text("20.0 GiB")
    expect(row).to_contain_text("GPU 0, GPU 1")
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("team-a/pair")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.locator("summary").click()
    expect(page.get_by_role("link", name="team-a/pair")).to_have_count(2)
