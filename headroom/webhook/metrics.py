"""Metrics of the admission webhook."""

from prometheus_client import CollectorRegistry, Histogram

from headroom.runtime.telemetry import SECONDS, ProcessTelemetry, counter


class WebhookTelemetry(ProcessTelemetry):
    """Metrics of the admission webhook."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "headroom_webhook_ready")
        self.admission_seconds = Histogram(
            "headroom_admission_duration_seconds",
            "Time from the last byte of an admission request to the first byte of its answer, by "
            "path: mutate or validate.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.admission_errors = counter(
            registry,
            "headroom_admission_errors_total",
            "Admission requests that were not answered with a review: the API server applies the "
            "failure policy.",
            path=(),
        )
