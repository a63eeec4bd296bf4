"""Checks that the debug API conforms to its OpenAPI document, even for invalid requests."""

from typing import Any

import hypothesis
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck

from headroom.console.app import _VIEWS, _metrics, _probes
from headroom.console.views import index
from tests.examples import examples
from tests.fuzz.world import Attacked

_world = Attacked()
_app = _world.console
#: The list is a constant, because computing the document takes each worker 1 s of CPU.
OPERATIONS = [
    (method.lower(), route.path)
    for group in (
        *(_probes, _metrics, index.routes),
        *(module.routes for module in _VIEWS),
        _world.journal_routes,
    )
    for route in group.routes
    if isinstance(route, APIRoute) and route.include_in_schema
    for method in sorted(route.methods)
]


def test_every_described_endpoint_is_tested() -> None:
    paths = _app.openapi()["paths"]
    assert sorted(OPERATIONS) == sorted((method, path) for path in paths for method in paths[path])


@pytest.fixture(scope="module")
def described() -> Any:
    # Import the package here, without its pytest plugin, because otherwise each worker would import
    # it and generate all cases.
    import schemathesis

    return schemathesis.openapi.from_asgi("/openapi.json", _app)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_endpoint_conforms_to_its_description(described: Any, method: str, path: str) -> None:
    from schemathesis import Case, checks
    from schemathesis.pytest import _test_builder as builder

    conformance = (
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    )

    @hypothesis.settings(
        max_examples=examples(38),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def conforms(case: Case) -> None:
        case.call_and_validate(checks=conformance)

    builder.build_operation_test(
        config=described.config,
        operation=described[path][method.upper()],
        test_func=conforms,
        given_kwargs={},
        feedback=builder.FeedbackSources(),
    )()
    _world.unharmed()
