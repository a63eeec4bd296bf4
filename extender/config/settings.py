"""Every setting of the extender, what it means and what it is when nobody says."""

from enum import Enum
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from contract.annotations import MIRROR, ScoringPolicy
from extender.admission.context import Wishes
from extender.config.consistency import RULES
from extender.config.field_types import Places, QuantityBytes, Url, Weight
from extender.placement.policy import MIB, Rules, VisibleDevices, Weights
from extender.server.tls import TlsFiles
from extender.state.decision_records import DEFAULT_BOUNDS, Bounds

#: Right values of settings that have none by default.
EXAMPLES = {
    "verbs_host": "127.0.0.1",
    "debug_host": "0.0.0.0",
    "debug_tls_cert": "/etc/headroom/tls/tls.crt",
    "debug_tls_key": "/etc/headroom/tls/tls.key",
    "webhook_tls_cert": "/etc/headroom/tls/tls.crt",
    "webhook_tls_key": "/etc/headroom/tls/tls.key",
    "tls_cert": "/etc/headroom/tls/tls.crt",
    "tls_key": "/etc/headroom/tls/tls.key",
    "tls_client_ca": "/etc/headroom/client/ca.crt",
    "extenders": "[headroom-journal.headroom-system.svc]",
    "max_body": "16Mi",
    "gate_image": "registry.example/headroom-agent:1.0",
    "journal_bytes": "16Mi",
    "prometheus_url": "http://prometheus.monitoring:9090",
    "prometheus_token_file": "/var/run/secrets/prometheus/token",
    "prometheus_ca": "/etc/headroom/prometheus/ca.crt",
}


class Mode(Enum):
    ENFORCE = "enforce"
    OBSERVE = "observe"


#: Settings that a running process takes over when the file changes; all others after a restart.
RELOADED = (
    "mode",
    "reject_unannotated",
    "policy",
    "score_weights",
    "on_miss",
    "orphan_after_s",
    "waiting_events_per_s",
)


class OnMiss(Enum):
    REPORT = "report"
    EVICT = "evict"


class ScoreWeights(BaseModel):
    """As in ``placement.rules``; what the terms say is in docs/scores.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    packing: Weight = Weights().packing
    prediction: Weight = Weights().prediction
    sm_activity: Weight = Weights().sm_activity
    slack: Weight = Weights().slack
    smallest_device: Weight = Weights().smallest_device
    report: Weight = Weights().report

    @model_validator(mode="after")
    def _some_term_counts(self) -> Self:
        if not self.rules.total:
            raise ValueError("all are 0, so that nothing counts; right is, for example, packing: 5")
        return self

    @property
    def rules(self) -> Weights:
        return Weights(**self.model_dump())


class Settings(BaseModel):
    """All settings, as ``extender.config.loading`` reads them. Unknown settings are errors, so that
    a misspelled name is not silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = Field(
        Mode.ENFORCE,
        description="enforce; or observe: nothing is refused, preferred, evicted or told in "
        "Events, so that pods go where they would go without Headroom, and what would have been "
        "decided is put on record and counted: docs/observe.md.",
    )
    host: str = Field(
        "127.0.0.1",
        description="Address that both servers listen on, where they have none of their own.",
    )
    verbs_host: str | None = Field(
        None,
        description="Address of kube-scheduler's port alone. Where it is not a loopback address "
        "tls_cert, tls_key and tls_client_ca are needed: whoever reaches bind can bind pods.",
    )
    debug_host: str | None = Field(None, description="Address of the debug API's port alone.")
    insecure_verbs: bool = Field(
        False,
        description="Serve kube-scheduler's port to other machines without TLS, or without asking "
        "for a client certificate: everybody who reaches it can bind pods.",
    )
    verbs_port: int = Field(8888, ge=0, le=65535, description="kube-scheduler's port; 0: any.")
    debug_port: int = Field(8889, ge=0, le=65535, description="Debug API's port; 0: any.")
    debug_open: bool = Field(
        False,
        description="In a cluster, answer the debug API without asking the API server who may read "
        "it; only where host is a loopback address.",
    )
    debug_tls_cert: Path | None = Field(
        None,
        description="Certificate in PEM, with the chain: the debug API's port speaks TLS only, and "
        "knows users by their client certificates, too. May be the file of tls_cert.",
    )
    debug_tls_key: Path | None = Field(
        None, description="Private key of debug_tls_cert in PEM, unencrypted."
    )
    tls_cert: Path | None = Field(
        None,
        description="Certificate in PEM, with the chain: kube-scheduler's port speaks TLS only.",
    )
    tls_key: Path | None = Field(None, description="Private key of tls_cert in PEM, unencrypted.")
    tls_client_ca: Path | None = Field(
        None,
        description="CA certificates in PEM: on kube-scheduler's port only who shows a certificate "
        "signed by one of them is answered. Best a CA that signs for nobody else.",
    )
    max_body: QuantityBytes = Field(
        16 * MIB,
        description="Largest body of a scheduler call, as in 16Mi. With nodeCacheCapable true, "
        "5,000 nodes need 100 kB; with it false, 9 kB for every node. Of the admission webhook "
        "too, where an object and what it was before take 6 MiB at most.",
    )
    webhook_port: int = Field(
        9443,
        ge=0,
        le=65535,
        description="Port of `headroom webhook`; 0: any.",
    )
    webhook_tls_cert: Path | None = Field(
        None,
        description="Certificate in PEM, with the chain, for the name of the webhook's Service. "
        "`headroom webhook` needs it: an API server calls webhooks over TLS only.",
    )
    webhook_tls_key: Path | None = Field(
        None, description="Private key of webhook_tls_cert in PEM, unencrypted."
    )
    scheduler_name: str = Field(
        "headroom",
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        max_length=253,
        description="Scheduler that asks this extender: the webhook gives it to GPU pods that name "
        "none, unless label headroom.gpu/scheduler of their namespace says otherwise. "
        "default-scheduler: nobody's scheduler is changed.",
    )
    gate_image: str = Field(
        "",
        max_length=1000,
        description="Image of the gate that the webhook gives to pods for gated nodes: that of the "
        "agent, with its tag or digest. Empty: pods get no gate, and gated nodes take none. Pods "
        "that got theirs with another tag or digest keep it.",
    )
    mirror_vram: bool = Field(
        False,
        description="Show memory to the rest of Kubernetes as extended resource headroom.gpu/vram, "
        "in MiB: the webhook adds it to pods, and nodes are given it as capacity, which takes the "
        "permission of deploy/components/in-tree-mirror.",
    )
    resources: tuple[str, ...] = Field(
        Rules().resources,
        min_length=1,
        description="Extended resources that are GPUs; a trailing * stands for any ending.",
    )
    reject_unannotated: bool = Field(
        False, description="Refuse pods that ask for a GPU and do not say how much of its memory."
    )
    require_report: bool = Field(
        True,
        description="Where no agent reports, labels may stand in for it: for GPUs that nobody "
        "shares in any case, for shared ones only if this is false. Nothing is measured there.",
    )
    policy: ScoringPolicy = Field(
        ScoringPolicy.PACK, description="Scoring of pods that do not choose: pack or spread."
    )
    score_weights: ScoreWeights = Field(
        ScoreWeights(),
        description="How much each named term of a score counts, beside each other; not all 0.",
    )
    filter_best_only: bool = Field(
        False,
        description="Filter answers with the best node alone, unless a preference of a user could "
        "speak for another one; then kube-scheduler neither scores nodes nor asks which is best. "
        "Not where another extender filters after this one, nor where plugins of yours are to "
        "outweigh Headroom's choice: docs/scheduler.md.",
    )
    on_miss: OnMiss = Field(
        OnMiss.REPORT,
        description="What becomes of a pod that ended on a device without room for it, where no "
        "gate held it back: report; or evict, if it is new, uses no memory yet and has a "
        "controller. A pod at its gate is evicted in any case.",
    )
    visible_devices: VisibleDevices = Field(
        VisibleDevices.REJECT,
        description="What becomes of a pod that sets NVIDIA_VISIBLE_DEVICES itself, on a node that "
        "may obey it: refuse it, or charge it on every device of the node.",
    )
    suspect_env_from: bool = Field(
        False,
        description="Take a container with envFrom for one that sets NVIDIA_VISIBLE_DEVICES, which "
        "nobody can tell, unless its own env or a prefix excludes it.",
    )
    stale_after_s: float = Field(
        90.0, gt=0, description="A node not heard of for so many seconds takes no new pods."
    )
    blind_after_s: float = Field(
        90.0,
        gt=70,
        description="When nothing of some kind was heard from the API server for so many seconds, "
        "nothing is decided any more; a quiet cluster is heard of every 60 s.",
    )
    nomination_hold_s: float = Field(
        60.0,
        ge=5,
        le=3600,
        description="A place on a node is kept for the pod that others were evicted for, for so "
        "many seconds after the last of them has left; then others may take it.",
    )
    evict_for_memory: bool = Field(
        False,
        description="Evict pods of lower priority for one that only GPU memory keeps from a node, "
        "about which kube-scheduler does not ask. Disruption budgets are never violated. False: "
        "only whom kube-scheduler evicts.",
    )
    orphan_after_s: float = Field(
        60.0, gt=0, description="Age at which a promise without a bound pod is looked into."
    )
    bind_deadline_s: float = Field(
        4.0,
        gt=0,
        le=60,
        description="A bind is not completed on newer facts after so long. Less than httpTimeout "
        "of kube-scheduler's extender entry: kube-scheduler gives a bind up then.",
    )
    overuse_after_s: float = Field(
        Rules().overuse_after_s,
        ge=0,
        description="A pod that uses more than it asked for is told of after so many seconds.",
    )
    waiting_events_per_s: int = Field(
        10,
        ge=0,
        le=1000,
        description="Events a second, at most, that tell why pods wait; each pod's is written anew "
        "once a minute at most, and only when it says something new. 0: none are written.",
    )
    device_series: int = Field(
        2000,
        ge=0,
        le=100_000,
        description="Devices, at most, of which /metrics has series of their own, by the names of "
        "nodes; headroom_ledger_devices_left_out says how many are not. 0: sums only.",
    )
    agent_namespace: str = Field(
        "headroom-system", description="Namespace of the agents' heartbeat Leases."
    )
    journal_decisions: int = Field(
        DEFAULT_BOUNDS.decisions,
        ge=1,
        description="Decisions that the debug API remembers, the last ones.",
    )
    journal_bytes: QuantityBytes = Field(
        DEFAULT_BOUNDS.size_bytes,
        description="Memory that they may take, as in 16Mi; each takes about 1 KiB.",
    )
    journal_age_s: float = Field(
        DEFAULT_BOUNDS.age_s, gt=0, description="Seconds after which a decision is forgotten."
    )
    extenders: Places = Field(
        (),
        description="The extenders whose journals the console follows: names or addresses, each "
        "with a port unless it is debug_port; best the one name of a headless Service, which has "
        "an address for each. A process that finds itself among them does not follow itself.",
    )
    prometheus_url: Url | None = Field(
        None,
        repr=False,
        description="Prometheus that keeps dcgm-exporter's DCGM_FI_PROF_SM_ACTIVE, for how busy "
        "SMs are wont to be; without one the agents' own samples count.",
    )
    prometheus_window_s: float = Field(
        900.0, ge=60, le=86_400, description="How far back SM activity is looked at."
    )
    prometheus_quantile: float = Field(
        0.95, ge=0, le=1, description="Quantile of SM activity over the window: 1 is its maximum."
    )
    prometheus_refresh_s: float = Field(
        60.0, ge=1, description="Seconds between two queries, each for the whole fleet."
    )
    prometheus_timeout_s: float = Field(
        15.0, gt=0, description="A refresh whose queries take longer together has failed."
    )
    prometheus_stale_after_s: float = Field(
        180.0,
        gt=0,
        description="A device whose newest sample in Prometheus is older is judged by its agent's.",
    )
    prometheus_token_file: Path | None = Field(
        None, description="File with a bearer token for Prometheus; read before each query."
    )
    prometheus_ca: Path | None = Field(
        None, description="CA certificates in PEM for Prometheus' own; else those of the system."
    )

    @field_validator("resources")
    @classmethod
    def _mirror_is_no_gpu(cls, resources: tuple[str, ...]) -> tuple[str, ...]:
        if Rules(resources=resources).manages(MIRROR):
            raise ValueError(
                f"{MIRROR} is what the webhook adds for others to count; taken for a GPU it would "
                "be charged once more; right is, for example, nvidia.com/gpu"
            )
        return resources

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        for rule in RULES:
            rule(self)
        return self

    def where(self, name: str) -> tuple[str, str]:
        """The setting by which a server has its address, and the address."""
        own: str | None = getattr(self, name)
        return (name, own) if own is not None else ("host", self.host)

    @property
    def verbs_at(self) -> str:
        """The address that kube-scheduler's port is on."""
        return self.where("verbs_host")[1]

    @property
    def debug_at(self) -> str:
        """The address that the debug API's port is on."""
        return self.where("debug_host")[1]

    @property
    def tls(self) -> TlsFiles | None:
        """The files that kube-scheduler's port is served with; None: without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def debug_tls(self) -> TlsFiles | None:
        """The files that the debug port is served with; None: without TLS."""
        if self.debug_tls_cert is None or self.debug_tls_key is None:
            return None
        return TlsFiles(self.debug_tls_cert, self.debug_tls_key, setting="debug_tls")

    @property
    def webhook_tls(self) -> TlsFiles | None:
        """The files that the webhook is served with; None: it cannot be served."""
        if self.webhook_tls_cert is None or self.webhook_tls_key is None:
            return None
        return TlsFiles(self.webhook_tls_cert, self.webhook_tls_key, setting="webhook_tls")

    @property
    def shown(self) -> dict[str, Path]:
        """The file of the certificate of each port of the extender that speaks TLS."""
        files = {"verbs": self.tls_cert, "debug": self.debug_tls_cert}
        return {port: path for port, path in files.items() if path is not None}

    @property
    def wishes(self) -> Wishes:
        observes = self.mode is Mode.OBSERVE
        return Wishes(self.scheduler_name, self.gate_image, self.mirror_vram, observes)

    @property
    def journal(self) -> Bounds:
        return Bounds(self.journal_decisions, self.journal_bytes, self.journal_age_s)

    @property
    def rules(self) -> Rules:
        return Rules(
            resources=self.resources,
            reject_unannotated=self.reject_unannotated,
            require_report=self.require_report,
            gate_image=self.gate_image,
            overuse_after_s=self.overuse_after_s,
            nomination_hold_s=self.nomination_hold_s,
            evict_for_memory=self.evict_for_memory,
            evict_misses=self.on_miss is OnMiss.EVICT,
            policy=self.policy,
            weights=self.score_weights.rules,
            visible_devices=self.visible_devices,
            suspect_env_from=self.suspect_env_from,
        )
