"""The description of the endpoints is that of the gateway: its routes, its structs, and examples that it accepts."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.services.gateway.site import Opened

from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.services.gateway.app import GatewayApp
from rolloutmq.services.gateway.pages.openapi import ENDPOINTS, Endpoint, openapi
from rolloutmq.services.http_server.access import HttpAccess

Schema = dict[str, Any]
KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from references(one)


def fits(value: Any, schema: Schema) -> bool:
    """Whether the value is as the schema says; no field may be missing there."""
    if "$ref" in schema:
        schema = openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return any(fits(value, one) for one in schema[several])
    if "enum" in schema:
        return value in schema["enum"]
    if "type" in schema and not isinstance(value, KINDS[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(fits(one, schema.get("items", {})) for one in value)
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return {*schema.get("required", ())} <= value.keys() <= known.keys() and all(
            fits(one, known[name]) for name, one in value.items()
        )
    return True


def replied(one: Endpoint, status: int) -> Schema:
    operation = openapi()["paths"][one.path][one.method.lower()]
    content: Schema = operation["responses"][str(status)]["content"]
    return content["application/json"]["schema"] if "application/json" in content else {}


def test_every_endpoint_is_described_and_no_other() -> None:
    nothing: Any = None
    app = GatewayApp(nothing, GatewayConfig(), HttpAccess())
    routes = {(method, path) for path, methods in app._routes.items() for method in methods}
    app.close()
    described = [(one.method, one.path) for one in ENDPOINTS]
    assert {*described} == routes | {("GET", "/batch")}
    assert len(described) == len({*described})


def test_every_reference_is_to_a_schema() -> None:
    names = {name.rpartition("/")[2] for name in references(openapi()["paths"])}
    assert names <= openapi()["components"]["schemas"].keys()
    assert {name.rpartition("/")[2] for name in references(openapi())} <= openapi()["components"][
        "schemas"
    ].keys()


def test_it_is_json_and_names_no_attribute_list() -> None:
    page = msgspec.json.encode(openapi()).decode()
    assert "Attributes:" not in page
    assert '"tokens"' in page


@pytest.mark.parametrize("named", ["Registration", "RegisterEnv", "ScoredData"])
def test_the_numbers_of_a_body_are_explained(named: str) -> None:
    properties = openapi()["components"]["schemas"][named]["properties"]
    explained = [name for name, one in properties.items() if "description" in one]
    assert len(explained) >= len(properties) / 2


async def ask(session: aiohttp.ClientSession, one: Endpoint, status: int = 200) -> None:
    query = {"env_id": "0"} if one.env_in_query else {}
    body = None if one.example is None else msgspec.json.encode(one.example)
    async with session.request(one.method, one.path, data=body, params=query) as answer:
        text = await answer.text()
        assert answer.status == status, (one.path, text)
        schema = replied(one, status)
        if schema:
            assert fits(msgspec.json.decode(text), schema), (one.path, text)


async def test_the_examples_are_accepted_and_the_replies_are_as_described(site: Opened) -> None:
    by_path = {(one.method, one.path): one for one in ENDPOINTS}
    batch, group = by_path["GET", "/batch"], by_path["POST", "/scored_data"]
    enrol, resets = by_path["POST", "/register-env"], [by_path[m, "/reset_data"] for m in ("GET", "POST")]
    async with site() as one:
        await ask(one.session, batch)  # nobody has registered
        await ask(one.session, enrol)
        await ask(one.session, by_path["GET", "/status-env"], 404)
        await ask(one.session, by_path["POST", "/register"])
        await ask(one.session, batch)  # none yet
        for _ in range(2):
            await ask(one.session, group)
        await ask(one.session, batch)
        await ask(one.session, enrol)
        for endpoint in ENDPOINTS:
            if endpoint not in resets:
                await ask(one.session, endpoint)
        for reset in resets:
            await ask(one.session, reset)
        async with one.session.post("/scored_data", data=b"{}") as answer:
            assert fits(await answer.json(), replied(group, answer.status))


def test_a_value_of_another_kind_does_not_fit() -> None:
    """The check above can fail."""
    schema = {"$ref": "#/components/schemas/Status"}
    assert fits({"current_step": 1, "queue_size": 2}, schema)
    assert not fits({"current_step": 1}, schema)
    assert not fits({"current_step": 1, "queue_size": 2, "more": 3}, schema)
    assert not fits({"current_step": 1, "queue_size": "2"}, schema)
