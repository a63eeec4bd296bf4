"""Every setting of the extender, what it means and what it is when nobody says."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from contract.annotations import ScoringPolicy
from contract.errors import BadQuantity
from contract.quantity import parse_bytes
from extender.errors import BadSettings
from extender.placement.rules import MIB, Rules


def _quantity(value: Any) -> Any:
    """A Kubernetes quantity, as in 64Mi, or a number of bytes."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except BadQuantity as err:
            raise ValueError(f"{err}; right is, for example, 64Mi") from err
    return value


QuantityBytes = Annotated[int, BeforeValidator(_quantity), Field(ge=0)]


class Settings(BaseModel):
    """Read from a YAML file; unknown keys are refused, so that a slip is not silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address that both servers listen on.")
    verbs_port: int = Field(8888, ge=0, le=65535, description="kube-scheduler's port; 0: any.")
    debug_port: int = Field(8889, ge=0, le=65535, description="Debug API's port; 0: any.")
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
    unowned_tolerance: QuantityBytes = Field(
        64 * MIB, description="Use by unknown processes below this is never charged, as in 64Mi."
    )
    policy: ScoringPolicy = Field(
        ScoringPolicy.PACK, description="Scoring of pods that do not choose: pack or spread."
    )
    stale_after_s: float = Field(
        90.0, gt=0, description="A node not heard of for so many seconds takes no new pods."
    )
    orphan_after_s: float = Field(
        60.0, gt=0, description="Age at which a promise without a bound pod is looked into."
    )
    agent_namespace: str = Field(
        "headroom-system", description="Namespace of the agents' heartbeat Leases."
    )

    @property
    def rules(self) -> Rules:
        return Rules(
            resources=self.resources,
            refuse_unannotated=self.refuse_unannotated,
            unowned_tolerance_bytes=self.unowned_tolerance,
            policy=self.policy,
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
    except (yaml.YAMLError, UnicodeDecodeError) as err:
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
