"""The debug API conforms to its OpenAPI description, also for invalid requests."""

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from schemathesis import checks

from extender.console.app import console_app
from extender.console.view_context import Context
from extender.observability.journal_follower import Journals
from tests.examples import examples
from tests.fuzz.world import WALL_S, World

_world = World()
_app = console_app(
    Context(
        _world.cluster,
        Journals("one", _world.journal),
        _world.telemetry,
        lambda: "",
        lambda: _world.now_s,
        lambda: WALL_S,
    ),
    with_journal=True,
)
schema = schemathesis.openapi.from_asgi("/openapi.json", _app)


@schema.parametrize()
@hypothesis.settings(
    max_examples=examples(38),
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_endpoint_answers_as_it_is_described(case: schemathesis.Case) -> None:
    described = (
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    )
    case.call_and_validate(checks=described)
    _world.unharmed()
