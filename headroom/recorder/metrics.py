"""Metrics of the recorder."""

from prometheus_client import CollectorRegistry, Gauge

from headroom.runtime.telemetry import ProcessTelemetry, counter


class RecorderTelemetry(ProcessTelemetry):
    """Metrics of the recorder."""

    loops = ("election", "record", "history")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "headroom_recorder_ready")
        self.leads = Gauge(
            "headroom_recorder_leads",
            "1 while this recorder holds the Lease and writes VRAMProfiles.",
            registry=registry,
        )
        self.lives = counter(
            registry,
            "headroom_recorder_lives_total",
            "Lives of containers that ended, by ending: completed, failed, evicted, oom-killed or "
            "unknown.",
            ending=("completed", "failed", "evicted", "oom-killed", "unknown"),
        )
        self.writes = counter(
            registry,
            "headroom_recorder_writes_total",
            "Writes of VRAMProfiles by outcome: written, conflict (another process wrote it "
            "first; it is written again) or failed.",
            outcome=("written", "conflict", "failed"),
        )
        self.profiles = Gauge(
            "headroom_recorder_profiles",
            "VRAMProfiles in memory; 0 while another recorder leads.",
            registry=registry,
        )
        self.waiting = Gauge(
            "headroom_recorder_lives_waiting",
            "Lives that ended and are not written yet.",
            registry=registry,
        )
        self.past_lives = Gauge(
            "headroom_recorder_past_lives",
            "Lives read from Prometheus that wait for a pod of their owner.",
            registry=registry,
        )
