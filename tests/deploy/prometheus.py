"""Checks that Prometheus can read the metrics of an installation with the role from the monitors
component.
"""

from tests.deploy.installation import Installation
from tests.deploy.rendered import DEPLOY
from tests.promtool import complaints
from tests.waiting import until

ACCOUNT, NAMESPACE = "prometheus-k8s", "monitoring"


def prometheus_can_only_read_metrics(installation: Installation) -> None:
    plane = installation.plane
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    plane.call("POST", accounts, {"metadata": {"name": ACCOUNT}})
    request = {"spec": {"expirationSeconds": 3600}}
    token = plane.call("POST", f"{accounts}/{ACCOUNT}/token", request)["status"]["token"]
    assert installation.answers("/metrics", token)[0] == 403
    assert installation.journal_answers("/metrics", token)[0] == 403
    assert installation.webhook_probes_answer("/metrics", token)[0] == 403
    assert installation.webhook_probes_answer("/metrics")[0] == 401
    assert installation.webhook_answers("/metrics")[0] == 404
    file = DEPLOY / "components/monitors/rbac.yaml"
    plane.kubectl("apply", f"--filename={file}")
    # Wait, because Headroom caches a rejected token for some seconds.
    until(lambda: installation.answers("/metrics", token)[0] == 200, "the console's metrics")
    until(lambda: installation.journal_answers("/metrics", token)[0] == 200, "the extender's")
    until(lambda: installation.webhook_probes_answer("/metrics", token)[0] == 200, "the webhook's")
    of_webhook = installation.webhook_probes_answer("/metrics", token)[1]
    of_console = installation.answers("/metrics", token)[1]
    of_extender = installation.journal_answers("/metrics", token)[1]
    assert "headroom_console_ready 1.0" in of_console
    assert "headroom_ready 1.0" in of_extender
    assert "headroom_webhook_ready 1.0" in of_webhook
    texts = of_console, of_extender, of_webhook
    assert [complaints(text) for text in texts] == [[], [], []]
    for path in ("/v1/status", "/v1/decisions"):
        status, body = installation.answers(path, token)
        assert status == 403, body
    assert installation.journal_answers("/v1/journal", token)[0] == 403
    plane.kubectl("delete", f"--filename={file}")
    plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
