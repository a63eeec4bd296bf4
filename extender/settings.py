"""Every setting of the extender, what it means and what it is when nobody says."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from contract.annotations import ScoringPolicy
from contract.errors import BadQuantity
from contract.quantity import parse_bytes
from extender.errors import BadSettings
from extender.placement.rules import MIB, Rules, VisibleDevices
from extender.tls import TlsFiles


def _quantity(value: Any) -> Any:
    """A Kubernetes quantity, as in 64Mi, or a number of bytes."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except BadQuantity as err:
            raise ValueError(f"{err}; right is, for example, 64Mi") from err
    return value


QuantityBytes = Annotated[int, BeforeValidator(_quantity), Field(ge=0)]


class OnMiss(Enum):
    REPORT = "report"
    EVICT = "evict"


class Settings(BaseModel):
    """Read from a YAML file; unknown keys are refused, so that a slip is not silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address that both servers listen on.")
    verbs_port: int = Field(8888, ge=0, le=65535, description="kube-scheduler's port; 0: any.")
    debug_port: int = Field(8889, ge=0, le=65535, description="Debug API's port; 0: any.")
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
        "5,000 nodes need 100 kB; with it false, 9 kB for every node.",
    )
    resources: tuple[str, ...] = Field(
        Rules().resources,
        min_length=1,
        description="Extended resources that are GPUs; a trailing * stands for any ending.",
    )
    refuse_unannotated: bool = Field(
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
    on_miss: OnMiss = Field(
        OnMiss.REPORT,
        description="What becomes of a pod that ended on a device without room for it, where no "
        "gate held it back: report; or evict, if it is new, uses no memory yet and has a "
        "controller. A pod at its gate is evicted in any case.",
    )
    visible_devices: VisibleDevices = Field(
        VisibleDevices.REFUSE,
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
    orphan_after_s: float = Field(
        60.0, gt=0, description="Age at which a promise without a bound pod is looked into."
    )
    agent_namespace: str = Field(
        "headroom-system", description="Namespace of the agents' heartbeat Leases."
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(
                f"{given} is set and {missing} is not; right are both, "
                "for example --tls-cert tls.crt --tls-key tls.key"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca is set without tls_cert and tls_key; right are all three, "
                "for example --tls-cert tls.crt --tls-key tls.key --tls-client-ca ca.crt"
            )
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """The files that kube-scheduler's port is served with; None: without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def rules(self) -> Rules:
        return Rules(
            resources=self.resources,
            refuse_unannotated=self.refuse_unannotated,
            require_report=self.require_report,
            evict_misses=self.on_miss is OnMiss.EVICT,
            policy=self.policy,
            visible_devices=self.visible_devices,
            suspect_env_from=self.suspect_env_from,
        )


def load_settings(path: Path | None, **overrides: Any) -> Settings:
    """The file's settings, with the overrides that are not None on top; raises ``BadSettings``."""
    written = read_yaml(path) if path else {}
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return Settings(**{**written, **given})
    except ValidationError as err:
        raise BadSettings(f"{path or 'settings'}: {said(err)}") from err


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; raises ``BadSettings`` saying what is wrong and where."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise BadSettings(f"{path}: cannot be read: {err.strerror}") from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        raise BadSettings(f"{path}: is not YAML: {' '.join(str(err).split())}") from err
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadSettings(f"{path}: must hold a mapping, as in 'policy: pack'")
    return content


def said(err: ValidationError) -> str:
    """pydantic's findings on one line: where, what."""
    return "; ".join(
        f"{'.'.join(str(part) for part in finding['loc']) or 'it'}: {finding['msg']}"
        for finding in err.errors()
    )
