"""The page of the debug API, read from the OpenAPI document of a console."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from extender.metrics import Telemetry
from extender.scheduler.journal_endpoint import JournalSource, journal_routes
from headroom.console.app import console_app
from headroom.console.feed.feed import KINDS, Feed
from headroom.console.feed.journals import Journals
from headroom.console.view_context import Context
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from headroom.runtime.follow.journal_stream import StateLine
from reference.markdown import as_code, code, head, sentence, table

_INTRO = """\
[debug-api.md](debug-api.md) shows who may read it, and how consoles and extenders answer together.
`GET /openapi.json` of a console describes the same endpoints for programs.

- Each JSON body also has `api_version` (`headroom.gpu/v1`), `generated_at` and
  `snapshot_generation`, which grows with every change that this replica has applied.
- Times are RFC 3339 in UTC with whole seconds, as in Kubernetes (`2026-11-28T17:52:28Z`), so that
  jq can parse them.
- A pod is always named by the parameter `pod=NAMESPACE/NAME`, and `GET /v1` lists all views. A
  parameter that a view does not have is an error.
- Views answer `HEAD`, and compress JSON for clients that accept gzip.
- The name of a quantity ends with its unit: `_bytes`, `_s` (seconds), `_ms` (milliseconds),
  `_ratio` (0 to 1). A value that is not known is `null`, never 0.
- Long lists have pages: set `limit`, and set `continue` to the value of `continue` in the previous
  body. The next page starts after the previous one, even if objects were added or removed.
- An answer with a weak `ETag` can be revalidated: a request with this value in `If-None-Match` is
  answered with 304 and no body while only `generated_at` and ages have changed.
- Each answer has the headers `Headroom-Replica`, the name of the replica, and `Headroom-Mode`,
  `enforce` or `observe`.

"""
_ERRORS = """\
## Errors

The body of an error is `application/problem+json` (RFC 9457): `type`
(`urn:headroom:problem:not-found`), `title`, `status`, and a `detail` that names the error, its
place and a valid example. Only `/healthz` and `/readyz` answer in plain text.

"""
_CHANGES = """\
## Changes

`GET /v1/events` has these values of `kind`, which a stream also names in `event:`, and of `cause`.
If only figures changed, such as the memory in use, the stream has an event `snapshot` with the new
generation, at most twice a second; lists leave this event out.

"""
_USUAL = {
    "401": "The session or token is missing or invalid.",
    "403": "You lack the permission for this view.",
    "422": "A parameter or the body is not valid.",
    "500": "An error in Headroom; the log has the details.",
    "503": "The API server cannot be asked whether you may read this, so the request is denied.",
}
#: Fields of every body, which the text above describes, so tables omit them.
_OF_EVERY_BODY = ("api_version", "generated_at", "snapshot_generation")
_LEFT_OUT = ("ProblemBody",)
#: Part of a field's name -> its unit.
_UNITS = (("_bytes", "bytes"), ("_s", "s"), ("_ms", "ms"), ("_ratio", "0..1"))
_Schema = Mapping[str, Any]


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a console that also serves the journal."""
    cluster = ClusterWriter(Rules(), 90.0, 0.0).cluster
    stream = JournalSource("", Journal(), lambda: StateLine("", "", 0.0, 0, "", ""))
    journals = Journals("", stream.journal, lambda: [])
    context = Context(
        cluster,
        journals,
        Telemetry(CollectorRegistry()),
        lambda: "",
        lambda: 0.0,
        lambda: 0.0,
        "",
        Feed.over(),
    )
    return console_app(context, journal_routes(stream)).openapi()


def page() -> str:
    """Return docs/reference/api.md."""
    found = document()
    schemas = {name: each for name, each in found["components"]["schemas"].items()}
    objects = sorted((_title(name), name) for name in _objects(found))
    text = head("Endpoints of the debug API", "the routes and models in headroom/console") + _INTRO
    text += _ERRORS + table("status | meaning", _USUAL.items()) + "## Endpoints\n\n"
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            text += _endpoint(f"{method.upper()} {path}", operation, schemas)
    text += _CHANGES + table("event | cause", [(code(kind), KINDS[kind]) for kind in KINDS])
    text += "## Objects\n\n"
    for title, name in objects:
        text += f"### `{title}`\n\n"
        if about := schemas[name].get("description"):
            text += f"{as_code(inspect.cleandoc(about))}\n\n"
        text += table("field | type | description", _fields(schemas[name], schemas))
    return text.rstrip("\n") + "\n"


def _endpoint(title: str, operation: _Schema, schemas: _Schema) -> str:
    """Return the section of one endpoint; raise ``ValueError`` if it lacks a description."""
    if not operation.get("description"):
        raise ValueError(f"{title} has no description; add a docstring to its function")
    text = f"### `{title}`\n\n{as_code(inspect.cleandoc(operation['description']))}\n\n"
    parameters = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    rows = [_parameter(title, each, schemas) for each in parameters]
    if rows:
        text += table("parameter | type | default | description", rows)
    if body := operation.get("requestBody"):
        text += f"Request body: {_type(_json(body), schemas)}.\n\n"
    answer = _json(operation["responses"]["200"])
    bodies = [name for each in answer.get("anyOf", [answer]) if (name := _named(each))]
    for name in bodies:
        text += table("field of the body | type | description", _fields(schemas[name], schemas))
    if not bodies:
        content = operation["responses"]["200"].get("content", {})
        text += f"Answer: {', '.join(map(code, content))}.\n\n"
    errors = [
        f"- {status}: {sentence(each['description'])}\n"
        for status, each in operation["responses"].items()
        if status not in ("200", "422", "500") and each.get("description")
    ]
    return text + ("Other statuses:\n\n" + "".join(errors) + "\n" if errors else "")


def _parameter(title: str, parameter: _Schema, schemas: _Schema) -> tuple[str, ...]:
    text = parameter.get("description")
    if not text:
        raise ValueError(f"parameter {parameter['name']} of {title} has no description")
    schema = parameter["schema"]
    default = schema.get("default")
    shown = "" if default in (None, "") else code(str(default).lower())
    needed = ", required" if parameter.get("required") else ""
    examples = schema.get("examples", ())
    example = f" Example: {code(examples[0])}." if examples else ""
    return (
        code(parameter["name"]),
        _type(schema, schemas) + needed,
        shown,
        as_code(text) + example,
    )


def _fields(schema: _Schema, schemas: _Schema) -> Iterator[tuple[str, str, str]]:
    """Yield name, type with unit, and description of each field."""
    for name, below in schema.get("properties", {}).items():
        if name in _OF_EVERY_BODY:
            continue
        unit = next((f", {unit}" for part, unit in _UNITS if f"{part}_" in f"{name}_"), "")
        text = as_code(below.get("description", ""))
        yield code(name), _type(below, schemas) + unit, text


def _type(schema: _Schema, schemas: _Schema) -> str:
    if name := _named(schema):
        below = schemas[name]
        if "enum" in below:
            return _type(below, schemas)
        return f"[{_title(name)}](#{_title(name).lower()})"
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        null = " or null" if len(kinds) < len(schema["anyOf"]) else ""
        return " or ".join(_type(each, schemas) for each in kinds) + null
    if "const" in schema or "enum" in schema:
        return " or ".join(map(code, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        return f"map to {_type(values, schemas)}"
    return str(schema.get("type", "any"))


def _json(answer: _Schema) -> _Schema:
    found: _Schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    return found


def _named(schema: _Schema) -> str:
    """Return the name of the schema that a reference points to; "" if it is not a reference."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _title(name: str) -> str:
    """Return the name of an object without its module."""
    return name.rpartition("__")[2]


def _objects(found: _Schema) -> Iterator[str]:
    """Yield the schemas that are neither the body of an answer nor an enumeration."""
    bodies = {
        _named(_json(operation["responses"]["200"]))
        for operations in found["paths"].values()
        for operation in operations.values()
    }
    for name, schema in found["components"]["schemas"].items():
        if name not in bodies and "enum" not in schema and name not in _LEFT_OUT:
            yield name
