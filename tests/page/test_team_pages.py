"""Tests the views of teams, quotas, idle pods, costs and recommendations, in Chromium."""

from pathlib import Path

from playwright.sync_api import Route, expect

from tests.page.conftest import CONTRASTS, Looked


def test_teams_are_sorted_and_searched_by_the_parameters_in_the_url(readings: Looked) -> None:
    page = readings.open("/teams?sort=waiting_pods")
    status = page.get_by_role("status").filter(has_text="team-a")
    expect(status).to_have_text("team-a comes first by waiting pods: 1 pod.")
    owners = page.get_by_role("table", name="By owner").get_by_role("row")
    expect(owners.nth(1)).to_contain_text("team-a/large")
    waiting = owners.nth(1).get_by_role("cell").last
    expect(waiting).to_have_text("1 pod, 90.0 GiB")
    page.get_by_label("Find").fill("other")
    expect(owners).to_have_count(0)
    assert page.url.endswith("#/teams?sort=waiting_pods&find=other")


def test_the_quotas_of_a_namespace_are_below_its_teams(readings: Looked) -> None:
    """The test answers the request, because the embedded server has no quotas."""
    row = {
        **{"namespace": "team-a", "name": "gpu-memory", "resource": "requests.headroom.gpu/vram"},
        **{"hard_bytes": 12 << 30, "used_bytes": 12 << 30, "reserved_bytes": 7 << 30},
    }
    asked: list[str] = []

    def answered(route: Route) -> None:
        asked.append(route.request.url.partition("/v1/")[2])
        route.fulfill(json=route.fetch().json() | {"quotas": [row]})

    readings.page.route("**/v1/quotas*", answered)
    page = readings.open("/teams/team-a")
    found = page.get_by_role("table", name="Quotas").get_by_role("row").nth(1)
    expect(found.get_by_role("cell")).to_have_text(
        ["team-a", "gpu-memory", "12.0 GiB", "12.0 GiB", "0.0 GiB", "7.0 GiB"]
    )
    assert page.evaluate(CONTRASTS) == []
    assert asked == ["quotas?namespace=team-a"]
    # The page refreshes every few seconds, but reads quotas once a minute.
    refresh = """async () => {
        const {quotas} = await import("./page/quotas.js"), found = quotas("");
        await found.refresh(); await found.refresh();
        return found.element.querySelectorAll("tbody tr").length;
    }"""
    assert (page.evaluate(refresh), asked[1:]) == (1, ["quotas"])


def test_unreadable_quotas_are_shown_as_a_sentence(readings: Looked) -> None:
    detail = "the ResourceQuotas cannot be read: see the log of the console"
    readings.expected = "503"
    readings.page.route(
        "**/v1/quotas*", lambda route: route.fulfill(status=503, json={"detail": detail})
    )
    page = readings.open("/teams")
    expect(page.get_by_text(f"Quotas: {detail}.")).to_be_visible()
    expect(page.get_by_role("table", name="By namespace")).to_be_visible()


def test_a_team_lead_finds_in_three_clicks_which_team_wastes_most(readings: Looked) -> None:
    sums = {"pods": 1, "waiting_pods": 0, "reserved_bytes": 8 << 30, "used_bytes": 2 << 30}
    sums |= {"peak_bytes": 3 << 30, "overuse_bytes": 0, "unmeasured_pods": 0}
    ml = {"namespace": "team-a", **sums, "unused_bytes": 6 << 30}
    owner = {**ml, "kind": "Pod", "name": "runs"}

    def measured(route: Route) -> None:
        body = route.fetch().json()
        body |= {"teams": [ml, {**ml, "namespace": "web", "unused_bytes": 1 << 30}]}
        route.fulfill(json=body | {"owners": [owner], "matching": 1})

    readings.page.route("**/v1/teams*", measured)
    page = readings.open("/overview")
    page.get_by_role("link", name="Teams").click()
    expect(page.get_by_text("team-a wastes most:")).to_have_text(
        "team-a wastes most: 6.0 GiB are reserved and unused, 75 % of its reservations. "
        "Of all owners, Pod team-a/runs wastes most: 6.0 GiB."
    )
    page.get_by_role("table", name="By owner").get_by_role("link", name="team-a/runs").click()
    rows = page.get_by_role("table", name="All pods").get_by_role("row")
    expect(rows).to_have_count(2)
    rows.get_by_role("link", name="team-a/runs").click()
    expect(page.locator(".verdict")).to_have_text("bound to node l4-0000")


def test_the_idle_page_shows_which_pods_hold_memory(readings: Looked) -> None:
    sums = {"held_bytes": 12 << 30, "gpus_ratio": 0.5, "gpu_days": 1.0, "cost": 60.0}
    team = {"namespace": "team-a", "pods": 1, **sums}
    idle_pod = {
        **{"namespace": "team-a", "name": "notebook", "node": "l4-0000", "device": "GPU-l4-0000-0"},
        **{"idle_s": 172_800.0, "idle_since": "2026-11-19T00:00:00Z", "gpu_ratio": 0.5},
        **{key: sums[key] for key in ("held_bytes", "gpu_days", "cost")},
    }
    asked: list[str] = []

    def idle(route: Route) -> None:
        asked.append(route.request.url)
        body = route.fetch().json()
        body |= {"gpu_hour_price": 2.5, "devices_without_sm_activity": 3, "pods": [idle_pod]}
        body |= {"teams": [team], "owners": [team | {"kind": "StatefulSet", "name": "notebook"}]}
        route.fulfill(json=body)

    page = readings.open("/idle")
    # The devices of this server have no SM activity.
    status = page.get_by_role("status").filter(has_text="Not checked")
    expect(status).to_have_text(
        "No pod holds this much memory and is idle for this long. "
        "Not checked: 128 devices without a measurement of SM activity."
    )
    page.route("**/v1/idle?*", idle)
    page.get_by_label("Idle for at least").fill("24")
    page.get_by_label("and holding at least").fill("8Gi")
    page.get_by_role("button", name="Show").click()
    expect(status).to_have_text(
        "1 pod held 1.00 GPU days without using them. "
        "Not checked: 3 devices without a measurement of SM activity."
    )
    assert asked[-1].endswith("/v1/idle?hours=24&held=8Gi")
    for name, cells in (
        ("By namespace", ["team-a", "1", "12.0 GiB", "0.50", "1.00", "60.00"]),
        ("By owner", ["team-a", "StatefulSet notebook", "1", "12.0 GiB", "0.50", "1.00", "60.00"]),
    ):
        row = page.get_by_role("table", name=name).get_by_role("row").nth(1)
        assert row.get_by_role("cell").all_inner_texts() == cells
    pods = page.get_by_role("table", name="Pods, the most wasteful first")
    expect(pods.get_by_role("link", name="team-a/notebook")).to_be_visible()
    expect(pods).to_contain_text("2d")


def test_the_idle_page_has_the_costs_of_a_range(readings: Looked) -> None:
    hours = {
        **{"held_gpu_hours": 1440.0, "used_gpu_hours": 1000.0, "idle_gpu_hours": 400.0},
        **{"unmeasured_gpu_hours": 40.0, "held_gib_days": 720.0, "unused_gib_days": 300.5},
        **{"unmeasured_gib_days": 0.0, "cost": 3600.0, "idle_cost": 1000.0},
    }

    def costs(route: Route) -> None:
        body = route.fetch(url=route.request.url.replace("since=30d", "since=1h")).json()
        body |= {"gpu_hour_price": 2.5, "covered_s": 600 * 3600, "from_s": 0, "to_s": 720 * 3600}
        body |= {"namespaces": [{"namespace": "team-a", **hours}], "total": hours}
        route.fulfill(json=body)

    page = readings.open("/idle")
    page.route("**/v1/costs?since=30d", costs)
    page.get_by_label("In", exact=True).select_option("the last 30 days")
    status = page.get_by_role("status").filter(has_text="Pods held")
    expect(status).to_have_text(
        "Pods held 1,440.00 GPU hours and left 400.00 idle, which cost 1,000.00 of 3,600.00. "
        "Recorded: 600.0 of 720.0 hours."
    )
    sums = page.get_by_role("table", name="GPU hours by namespace, the most idle first")
    cells = sums.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
    figures = ["1,440.00", "1,000.00", "400.00", "40.00", "720.00", "300.50"]
    assert cells == ["team-a", *figures, "3,600.00", "1,000.00"]
    headers = sums.get_by_role("columnheader").all_inner_texts()
    units = [*(f"GPU hours {of}" for of in ("held", "used", "idle", "not measured"))]
    assert headers[1:7] == [*units, "GiB days held", "GiB days unused"]
    # This server has no Prometheus.
    readings.expected = "503"
    page.get_by_label("In", exact=True).select_option("the last 7 days")
    sentence = "Not available: the console records only the last hour"
    expect(page.get_by_text(sentence)).to_be_visible()


def test_the_recommendations_page_simulates_on_request(readings: Looked) -> None:
    """The test answers the request, because the server records no runs."""
    freed = {"namespace": "team-a", "reclaimable_bytes": 21 << 30}
    team = {**freed, "owners": [{**freed, "kind": "StatefulSet", "name": "nb", "pods": 3}]}
    row = {
        **{"namespace": "team-a", "owner_kind": "StatefulSet", "owner_name": "nb", "family": False},
        **{"container": "main", "model": "L4", "pods": 3, "current_bytes": 16 << 30},
        **{"request_bytes": 9 << 30, "reclaimable_bytes": 21 << 30, "setting": ""},
        "message": "12 lives, 9 days; 0 of 9 were above the recommendation",
    }
    accepted = {"message": "3 pods created again", "not_checked": ["CPU"]}
    asked: list[str] = []

    def recorded(route: Route) -> None:
        asked.append(route.request.url.partition("/v1/")[2])
        body = route.fetch().json()
        assert body["recommendations"] == []
        body |= {"recommendations": [row], "teams": [team]}
        if "accepted" in route.request.url:
            body["accepted"] = accepted
        route.fulfill(json=body)

    page = readings.open("/recommendations")
    expect(page.get_by_text("No lives of containers are recorded.")).to_be_visible()
    page.route("**/v1/recommendations*", recorded)
    page.get_by_label("Namespace").fill("team-a")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("Lower requests would free 21.0 GiB.")).to_be_visible()
    for name, cells in (
        ("By namespace", ["team-a", "21.0 GiB", "StatefulSet nb (3 pods, 21.0 GiB)"]),
        (
            "By container, the largest difference first",
            [
                *("team-a/nb\nStatefulSet", "main\nL4", "3", "16.0 GiB", "9.0 GiB", "21.0 GiB"),
                row["message"],
            ],
        ),
    ):
        found = page.get_by_role("table", name=name).get_by_role("row").nth(1)
        assert found.get_by_role("cell").all_inner_texts() == cells
    page.get_by_role("button", name="Simulate that all are accepted").click()
    expect(page.get_by_text("Simulated: 3 pods created again. Not checked: CPU.")).to_be_visible()
    assert asked == [
        "recommendations?namespace=team-a",
        "recommendations?namespace=team-a&accepted=true",
    ]


def test_tables_are_saved_as_csv_for_a_spreadsheet(readings: Looked, tmp_path: Path) -> None:
    """The test answers the request, because the embedded server has no idle pods."""
    sums = {"pods": 1, "held_bytes": 8 << 30, "gpus_ratio": 0.5, "gpu_days": 1.25, "cost": None}
    hostile = {"namespace": '=cmd|"x", y', **sums, "list": [1]}
    pod = {
        **{"namespace": "ml", "name": "nb", "node": "n", "device": "GPU-1", "idle_s": 7200},
        **{"idle_since": "2026-11-28T18:30:00Z", "gpu_ratio": 0.5, **sums},
    }

    def answered(route: Route) -> None:
        body = route.fetch().json()
        route.fulfill(json=body | {"teams": [hostile], "owners": [], "pods": [pod]})

    readings.page.route("**/v1/idle*", answered)
    page = readings.open("/idle")

    def saved(name: str) -> tuple[str, str]:
        button = page.get_by_title(f'Save all rows of "{name}" for a spreadsheet')
        with page.expect_download() as download:
            button.click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        return file.name, file.read_bytes().decode()

    assert saved("idle by namespace") == (
        "headroom-idle-by-namespace.csv",
        "\ufeffnamespace,pods,held_bytes,gpus_ratio,gpu_days,cost\r\n"
        '"\'=cmd|""x"", y",1,8589934592,0.5,1.25,\r\n',
    )
    _, pods = saved("idle pods")
    assert pods.splitlines()[1].startswith("ml,nb,n,GPU-1,7200,2026-11-28T18:30:00Z,0.5,1,")
    page = readings.open("/pods")
    _, listed = saved("pods")
    names = [line.split(",")[1] for line in listed.splitlines()[1:]]
    assert len(names) == page.get_by_role("table", name="All pods").get_by_role("row").count() - 1
    assert "large" in names
