"""Metrics of the controller of device taints."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from headroom.runtime.telemetry import ProcessTelemetry

OUTCOMES = ("created", "deleted", "failed")


class TaintTelemetry(ProcessTelemetry):
    loops = ("election", "taint")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "headroom_device_taints_ready")
        self.leads = Gauge(
            "headroom_device_taints_leads",
            "1 while this controller holds the Lease and writes DeviceTaintRules.",
            registry=registry,
        )
        self.rules = Gauge(
            "headroom_device_taints",
            "DRA devices that are tainted now; 0 while another controller leads.",
            registry=registry,
        )
        self.untainted = Gauge(
            "headroom_device_taints_beyond_limit",
            "DRA devices whose use exceeds their claims, but which are not tainted because the "
            "maximum number of taints is reached.",
            registry=registry,
        )
        self.writes = Counter(
            "headroom_device_taint_writes_total",
            "Writes of DeviceTaintRules by outcome: created, deleted or failed (repeated later).",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.writes.labels(outcome)
