"""The description against what the server does: its routes, what its readers read and refuse, what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import Server, running, script
from test_status import service

from ds4batch.server.app import Front
from ds4batch.server.chat import chat_completions, create_message, create_response
from ds4batch.server.completions import completions
from ds4batch.server.errors import ApiError, Unavailable
from ds4batch.server.openapi import document

DOCUMENT = document(False)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "input_schema": {"type": "object"}}
TURN = [{"role": "user", "content": "x"}]
REQUESTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ChatRequest": (chat_completions, {"messages": TURN, "tools": [{"type": "function", "function": TOOL}]}),
    "CompletionRequest": (completions, {"prompt": "x"}),
    "ResponsesRequest": (create_response, {"input": TURN, "tools": [TOOL]}),
    "MessagesRequest": (create_message, {"messages": TURN, "tools": [TOOL]}),
}


class Watched(dict[str, Any]):
    """An object that notes which of its members are looked at, and of the objects in it."""

    def __init__(self, given: dict[str, Any], seen: set[str], where: str = "") -> None:
        super().__init__({name: watched(value, seen, where + name) for name, value in given.items()})
        self._seen, self._where = seen, where

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(self._where + name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._seen.add(self._where + name)
        return super().__getitem__(name)


def watched(value: Any, seen: set[str], where: str) -> Any:
    if isinstance(value, dict):
        return Watched(value, seen, where + ".")
    return [watched(item, seen, where + "[]") for item in value] if isinstance(value, list) else value


def read(name: str, body: dict[str, Any]) -> None:
    """Have a body read as its endpoint does. Raises ApiError 400 where it is refused."""
    handler, _ = REQUESTS[name]
    with contextlib.suppress(Unavailable):  # no engine runs: everything was read and taken
        asyncio.run(handler(service(), None, body))


def accepted(name: str, **members: Any) -> bool:
    try:
        read(name, {**REQUESTS[name][1], **members})
    except ApiError:
        return False
    return True


def properties(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each member of a request with each form it may have."""
    for member, schema in SCHEMAS[name]["properties"].items():
        yield from ((member, form) for form in forms(schema))


def test_every_route_is_described_and_nothing_else() -> None:
    described = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == Front(service()).routes


def test_what_is_described_is_answered(server: Server) -> None:
    assert server.get("/openapi.json").body == DOCUMENT
    for path, item in DOCUMENT["paths"].items():
        if "post" in item:
            assert server.request("POST", path, {}).status == 400
        elif path != "/status/stream":
            answer = server.get(path.replace("{model}", "fake-model"))
            assert answer.status == 200
            assert answer.headers["content-type"].split(";")[0] in item["get"]["responses"]["200"]["content"]


def test_the_document_is_whole() -> None:
    assert re.fullmatch(r"3\.1\.\d+", DOCUMENT["openapi"])
    assert {"title", "version"} <= DOCUMENT["info"].keys()
    operations = [(path, one) for path, item in DOCUMENT["paths"].items() for one in item.values()]
    ids = [one["operationId"] for _, one in operations]
    assert len(ids) == len(set(ids))
    for path, one in operations:
        declared = {parameter["name"] for parameter in one.get("parameters", ()) if parameter["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))
        for status, answer in one["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d", status)
            assert answer["description"]
            assert all("schema" in media for media in answer["content"].values())


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(inner)


def test_every_reference_leads_to_a_schema_and_every_schema_is_used() -> None:
    found = {node["$ref"] for node in nodes(DOCUMENT) if "$ref" in node}
    assert found == {f"#/components/schemas/{name}" for name in SCHEMAS}


def test_every_schema_makes_sense() -> None:
    for schema in nodes(SCHEMAS):
        if "type" not in schema or not isinstance(schema["type"], str):
            continue
        assert schema["type"] in {"object", "array", "string", "number", "integer", "boolean", "null"}
        assert set(schema.get("required", ())) <= schema.get("properties", {}).keys()
        assert schema["type"] != "array" or "items" in schema
        assert schema.get("minimum", 0) <= schema.get("maximum", schema.get("minimum", 0))
        assert schema.get("enum", ["x"])


@pytest.mark.parametrize("name", REQUESTS)
def test_every_member_that_a_reader_looks_at_is_described_and_no_other(name: str) -> None:
    seen: set[str] = set()
    body = REQUESTS[name][1] | {
        "stream_options": {},
        "output_config": {},
        "reasoning": {},
        "text": {},
        "chat_template_kwargs": {},
    }
    read(name, Watched(body, seen))
    top = {place for place in seen if "." not in place}
    assert top == SCHEMAS[name]["properties"].keys()
    for place in seen - top:
        assert described([SCHEMAS[name]], place), place


def described(schemas: list[dict[str, Any]], place: str) -> bool:
    """Whether a member is told of, such as `messages[].role`; in an object of anything it is."""
    for step in place.replace("[]", ".[]").split("."):
        found = []
        for form in itertools.chain.from_iterable(map(forms, schemas)):
            if step == "[]":
                found += [form["items"]] if "items" in form else []
            elif step in form.get("properties", {}):
                found.append(form["properties"][step])
            elif form.get("additionalProperties") is True:
                return True
        schemas = found
    return bool(schemas)


def forms(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema as each of the schemas that it may stand for."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rsplit("/")[-1]]
    if "anyOf" in schema:
        for form in schema["anyOf"]:
            yield from forms(form)
    else:
        yield schema


@pytest.mark.parametrize("name", REQUESTS)
def test_bounds_are_those_that_are_enforced(name: str) -> None:
    tried = 0
    base = {"ChatRequest": {"logprobs": True}}.get(name, {})
    for member, form in properties(name):
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in form:
                assert accepted(name, **base, **{member: form[bound]}), member
                assert not accepted(name, **base, **{member: form[bound] + step}), member
                tried += 1
    assert tried > 8
    assert not accepted(name, repetition_penalty=0)
    assert accepted(name, logit_bias={"5": 100})
    assert not accepted(name, logit_bias={"5": 101})


@pytest.mark.parametrize("name", REQUESTS)
def test_choices_and_types_are_those_that_are_enforced(name: str) -> None:
    for member, form in properties(name):
        for choice in form.get("enum", [form["const"]] if "const" in form else []):
            assert accepted(name, **{member: choice}), (member, choice)
        if "enum" in form or "const" in form:
            assert not accepted(name, **{member: True if form["type"] == "boolean" else "bogus"}), member
        if form.get("type") in ("number", "integer"):
            assert not accepted(name, **{member: "1"}), member
        if form.get("type") == "null" and len(SCHEMAS[name]["properties"][member].get("anyOf", [])) > 1:
            assert accepted(name, **{member: None}), member


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_required_is_missed(name: str) -> None:
    _, body = REQUESTS[name]
    for member in SCHEMAS[name]["required"]:
        with pytest.raises(ApiError, match=f"missing {member}"):
            read(name, {other: value for other, value in body.items() if other != member})


@pytest.mark.parametrize(("name", "message"), [("ChatRequest", "ChatMessage"), ("MessagesRequest", "AnthropicMessage")])
def test_roles_are_those_that_are_read(name: str, message: str) -> None:
    shapes = [shape["properties"]["role"] for shape in forms(SCHEMAS[message])]
    roles = [role for shape in shapes for form in forms(shape) for role in form.get("enum", [])]
    assert len(roles) >= 4
    for role in roles:
        assert accepted(name, messages=[{"role": role, "content": "x"}]), role
    assert not accepted(name, messages=[{"role": "bogus", "content": "x"}])


def conforms(value: Any, schema: dict[str, Any], where: str = "") -> None:
    """Assert that a value is of a schema; knows the words that the description uses for answers."""
    if "$ref" in schema:
        return conforms(value, SCHEMAS[schema["$ref"].rsplit("/")[-1]], where)
    if "anyOf" in schema:
        problems = []
        for form in schema["anyOf"]:
            try:
                return conforms(value, form, where)
            except AssertionError as problem:
                problems.append(problem)
        raise problems[0]
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }  # fmt: skip
    assert isinstance(value, kinds[schema["type"]]), f"{where}: {value!r}"
    assert value in schema.get("enum", [value]), f"{where}: {value!r}"
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= value.keys(), where
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, member in value.items():
            if name in known:
                conforms(member, known[name], f"{where}.{name}")
            elif isinstance(more, dict):
                conforms(member, more, f"{where}.{name}")
            else:
                assert not known, f"{where}.{name} is not described"
    if isinstance(value, list):
        for i, item in enumerate(value):
            conforms(item, schema["items"], f"{where}[{i}]")
    return None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURN, "logprobs": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": TURN, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": TURN}),
    ],
)
def test_answers_and_errors_are_as_described(server: Server, path: str, body: dict[str, Any]) -> None:
    answers = DOCUMENT["paths"][path]["post"]["responses"]
    conforms(server.request("POST", path, body).body, answers["200"]["content"]["application/json"]["schema"])
    long = {member: "y" * 5000 if member in ("prompt", "input") else value for member, value in body.items()}
    long = {**long, "messages": [{"role": "user", "content": "y" * 5000}]} if "messages" in body else long
    wrong = [{}, {**body, "temperature": "hot"}, {**body, **long}]
    statuses = [server.request("POST", path, one) for one in wrong]
    assert [answer.status for answer in statuses] == [400, 400, 400]
    for answer in statuses:
        conforms(answer.body, answers[str(answer.status)]["content"]["application/json"]["schema"])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/status.json"])
def test_figures_are_as_described(server: Server, path: str) -> None:
    server.chat()
    schema = DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    conforms(server.get(path.replace("{model}", "fake-model")).body, schema)
    missing = server.get("/v1/models/none")
    conforms(missing.body, SCHEMAS["OpenAIError"])


def test_health_and_errors_are_as_described_without_an_engine() -> None:
    with running({}, "--load", "1") as server:
        assert server.chat(script(die=True)).status == 503
        down = server.get("/health")
        assert down.status == 503
        conforms(down.body, SCHEMAS["Health"])
        refused = server.chat()
        conforms(refused.body, SCHEMAS["OpenAIError"])
        assert int(refused.headers["retry-after"]) >= 1


def test_efforts_in_numbers_are_described_where_the_model_takes_them() -> None:
    def effort(levels: bool) -> str:
        schema = document(levels)["components"]["schemas"]["ChatRequest"]["properties"]["reasoning_effort"]
        return str(schema)

    assert "0 to 100" in effort(True)
    assert "0 to 100" not in effort(False)
