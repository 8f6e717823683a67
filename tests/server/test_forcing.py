"""Requests that decide the form of the answer: what is refused, and that whatever a model says comes out as what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.chat.conversation import Tool
from ds4batch.chat.grammars import GRAMMARS
from ds4batch.messages import Constraint
from ds4batch.server.apis.forcing import constraint
from ds4batch.server.apis.schema_facts import part, references
from ds4batch.server.apis.tools import ToolChoice, read_tools
from ds4batch.server.errors import ApiError
from tests.forced import Answer, Babbler, Reader, fits
from tests.server.harness import RealServer

ENDS = {
    "dsml": "</｜DSML｜parameter>",
    "dsml-v41": "</｜DSML｜ parameter>",
    "glm": "</arg_value>",
    "qwen": "</parameter>",
    "hermes": "",
    "llama3": "",
}
REQUIRED = ToolChoice("required")


def tool(name: str, parameters: Any = None, **more: Any) -> Tool:
    return read_tools([{"name": name, **({} if parameters is None else {"parameters": parameters}), **more}], "tools")[0]


CITY = tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]})
ADD = tool("add", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]})


def answer(held: Constraint | None, grammar: str, tools: list[Tool], **how: Any) -> Answer:
    assert held is not None
    reader = Reader(grammar, {one.name: one.strings for one in tools}, how.pop("thinking", False))
    script = how.pop("script", "")
    return Babbler(held, reader, ends=[ENDS[grammar]] if ENDS.get(grammar) else [], **how).run(script)


def refused(*arguments: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        constraint(*arguments)
    assert caught.value.status == 400
    return caught.value


# Calls.

values = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "enum": ["red", "dark blue", "a<b & c"]},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False},
        {"$ref": "#/$defs/Level"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": [1, 2, None]},
        {},
    ]
)
parameter_schemas = st.builds(
    lambda properties, some, extra: {
        "type": "object",
        "properties": properties,
        "required": [key for i, key in enumerate(properties) if some >> i & 1],
        "$defs": {"Level": {"type": "string", "enum": ["low", "high"]}},
        **extra,
    },
    st.dictionaries(st.sampled_from(["path", "n", "file-name", "größe"]), values, max_size=4),
    st.integers(0, 15),
    st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}]),
)


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
@settings(max_examples=40, deadline=None)
@given(parameter_schemas, parameter_schemas, st.integers(0, 10**6), st.sampled_from([0.0, 1.0]))
def test_a_call_that_must_be_made_is_made_and_fits_its_schema(
    grammar: str, first: dict[str, Any], second: dict[str, Any], seed: int, temperature: float
) -> None:
    tools = [tool("run", first), tool("run_all", second)]
    found = answer(constraint(REQUIRED, None, "", tools, grammar), grammar, tools, seed=seed, temperature=temperature)
    assert found.reason == "tool_calls", found.text
    assert found.turn.content.strip() == ""
    assert found.turn.calls == found.turn.complete_calls != []
    for call in found.turn.calls:
        schema = first if call.name == "run" else second
        assert call.name in ("run", "run_all")
        assert fits(schema, json.loads(call.arguments)), found.text


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_a_named_tool_is_called_once_whatever_the_model_would_say(grammar: str) -> None:
    tools = [ADD, CITY]
    held = constraint(ToolChoice("named", "weather"), None, "", tools, grammar)
    for seed in range(6):
        found = answer(held, grammar, tools, seed=seed, script="I would rather add two numbers.")
        assert [call.name for call in found.turn.complete_calls] == ["weather"]
        assert found.reason == "tool_calls"


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_several_calls_may_be_made_and_reasoning_comes_first(grammar: str) -> None:
    tools = [ADD, CITY]
    call = {
        "dsml": '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n',
        "glm": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        "qwen": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    }[grammar.removesuffix("-v41")]
    between = {"qwen": "\n", "hermes": "\n", "llama3": "; "}.get(grammar, "")
    said = call + between + call
    if grammar.startswith("dsml"):
        said = f"<｜DSML｜tool_calls>\n{said}</｜DSML｜tool_calls>"
    if grammar == "dsml-v41":
        said = said.replace("｜tool_calls>", "｜ calls>").replace("｜invoke", "｜ invoke").replace("｜parameter", "｜ parameter")
    thought = "No tool is needed: 1 < 2.</think>"
    found = answer(constraint(REQUIRED, None, "", tools, grammar), grammar, tools, thinking=True, script=f"{thought}\n\n{said}", free=0)
    assert found.text == f"{thought}\n\n{said}"
    assert [(call.name, json.loads(call.arguments)) for call in found.turn.complete_calls] == [("add", {"a": 1, "b": 2})] * 2
    assert (found.reason, found.turn.reasoning) == ("tool_calls", ["No tool is needed: 1 < 2."])


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_with_tools_left_to_the_model_it_calls_or_answers_in_the_form(grammar: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    held = constraint(ToolChoice(), form, "text.format", [ADD], grammar)
    kinds = set()
    for script in ('{"n": 5}', "<", '{"name": "add', "no"):
        found = answer(held, grammar, [ADD], script=script, seed=len(script))
        kinds.add(found.reason)
        if found.turn.calls:
            assert fits(ADD.parameters, json.loads(found.turn.calls[0].arguments))
        else:
            assert isinstance(json.loads(found.turn.content)["n"], int)
    assert kinds == {"stop", "tool_calls"}


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_a_tool_without_a_schema_takes_any_arguments_and_one_without_parameters_none(grammar: str) -> None:
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    for seed, one in enumerate([tool("free"), tool("none", empty), tool("text", type="custom")]):
        found = answer(constraint(REQUIRED, None, "", [one], grammar), grammar, [one], seed=seed)
        assert found.reason == "tool_calls"
        arguments = json.loads(found.turn.calls[0].arguments)
        assert isinstance(arguments, dict)
        if one.name == "none":
            assert arguments == {}
        if one.name == "text":
            assert isinstance(arguments["input"], str)


def test_what_a_tool_schema_asks_beyond_what_can_be_enforced_is_left_to_the_model_unless_it_is_strict() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert constraint(REQUIRED, None, "", [tool("x", parameters)], "hermes") is not None
    problem = refused(REQUIRED, None, "", [ADD, tool("x", parameters, strict=True)], "hermes")
    assert problem.param == "tools"
    assert "'x'" in problem.message
    assert "uniqueItems" in problem.message


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"type": 7},
        {"type": "object", "properties": [1]},
        {"type": "object", "properties": {"a": 3}},
        {"type": "object", "properties": {"a": {"type": "text"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "http://example.org/a"}}, "required": ["a"]},
        {"type": "object", "properties": {}, "required": "a"},
        {"type": "object", "properties": {"a": {"enum": 5}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]},
        {"allOf": 3},
    ],
    ids=str,
)
def test_a_schema_that_is_none_is_refused_naming_the_tool(grammar: str, parameters: dict[str, Any]) -> None:
    problem = refused(REQUIRED, None, "", [ADD, tool("bad", parameters)], grammar)
    assert problem.param == "tools"
    assert "'bad'" in problem.message


def test_a_model_that_calls_no_tools_cannot_be_made_to() -> None:
    assert refused(REQUIRED, None, "", [ADD], "").param == "tool_choice"


def test_a_tool_that_was_not_shown_is_called_only_by_name() -> None:
    hidden = tool("hidden", {"type": "object", "properties": {}}, defer_loading=True)
    held = constraint(REQUIRED, None, "", [hidden, ADD], "hermes")
    assert held is not None
    assert "hidden" not in held.grammar
    assert constraint(ToolChoice("named", "hidden"), None, "", [hidden, ADD], "hermes") is not None


# Formats.


def test_nothing_is_held_where_nothing_is_asked() -> None:
    assert constraint(ToolChoice(), None, "response_format", [ADD], "qwen") is None
    assert constraint(ToolChoice("none"), None, "response_format", [], "qwen") is None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_object", "schema": {"type": "object"}},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
        {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
    ],
)
def test_a_format_is_read_as_each_api_writes_it(form: dict[str, Any]) -> None:
    found = answer(constraint(ToolChoice(), form, "f", [], "qwen"), "qwen", [])
    assert found.reason == "stop"
    assert isinstance(json.loads(found.text), dict)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar"}, "f.type"),
        ({"type": 3}, "f.type"),
        ({}, "f.type"),
        ({"type": "json_schema"}, "f.schema"),
        ({"type": "json_schema", "json_schema": 4}, "f.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "f.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "f.json_schema.schema"),
        ({"type": "json_schema", "schema": "x"}, "f.schema"),
    ],
)
def test_a_format_that_is_none_is_refused_naming_the_member(form: dict[str, Any], param: str) -> None:
    problem = refused(ToolChoice(), form, "f", [], "qwen")
    assert (problem.param, problem.message.split(":")[0]) == ("f", param)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "file:///etc/passwd"}, "passwd"),
        ({"enum": []}, "empty"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "const": "\ud800"}, "escape"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema: dict[str, Any], why: str) -> None:
    problem = refused(ToolChoice(), {"type": "json_schema", "schema": schema}, "text.format", [], "qwen")
    assert problem.message.startswith("text.format: the schema cannot be enforced: ")
    assert why in problem.message
    assert "x-guidance" not in problem.message
    assert "%json" not in problem.message


def test_a_client_cannot_set_what_is_ours_inside_a_schema() -> None:
    loose = {"type": "integer", "uniqueItems": True, "x-guidance": {"lenient": True, "whitespace_pattern": "x+"}}
    assert "uniqueItems" in refused(ToolChoice(), {"type": "json_schema", "schema": loose}, "f", [], "").message


# Over a socket: the whole server over a model that says something else.

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LIMITS = {"max_tokens": 800, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def stubborn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A model that reasons and then refuses."""
    script = tmp_path_factory.mktemp("script") / "stubborn.json"
    says = [{"say": "hm, {no}</think>\n\nI would rather not.", "margin": 30}]
    script.write_text(json.dumps({"dialect": "qwen3.8", "answers": says}))
    server = RealServer("--script", str(script), "--ctx", "6000", "--batched-session", "2")
    yield server
    server.close()


def function(one: Tool) -> dict[str, Any]:
    return {"name": one.name, "parameters": one.parameters}


def test_chat_answers_in_the_form_or_with_the_call_streamed_or_not(stubborn: RealServer) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": NUMBER}}}
    choice = stubborn.chat(**LIMITS, **form).body["choices"][0]
    assert fits(NUMBER, json.loads(choice["message"]["content"]))
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("hm, {no}", "stop")
    parts = [event["choices"][0]["delta"] for event in stubborn.chat(**LIMITS, **form, stream=True).events[:-1]]
    assert "".join(part.get("content") or "" for part in parts) == choice["message"]["content"]
    tools = [{"type": "function", "function": function(one)} for one in (ADD, CITY)]
    choice = stubborn.chat(**LIMITS, tools=tools, tool_choice={"type": "function", "function": {"name": "add"}}).body["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("add", "tool_calls")
    assert fits(ADD.parameters, json.loads(call["function"]["arguments"]))


def test_responses_answer_in_the_form_or_with_the_call(stubborn: RealServer) -> None:
    body = {"input": "hi", "max_output_tokens": 800, "temperature": 1.0}
    form = {"text": {"format": {"type": "json_schema", "name": "n", "schema": NUMBER}}}
    done = stubborn.request("POST", "/v1/responses", {**body, **form}).body
    (said,) = [item for item in done["output"] if item["type"] == "message"]
    assert fits(NUMBER, json.loads(said["content"][0]["text"]))
    tools = [{"type": "function", **function(ADD)}]
    done = stubborn.request("POST", "/v1/responses", {**body, "tools": tools, "tool_choice": "required"}).body
    called = [item for item in done["output"] if item["type"] == "function_call"]
    assert called
    assert all(fits(ADD.parameters, json.loads(item["arguments"])) for item in called)


def test_messages_answer_in_the_form_or_with_the_call(stubborn: RealServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 800, "thinking": {"type": "enabled"}}
    form = {"output_config": {"format": {"type": "json_schema", "schema": NUMBER}}}
    done = stubborn.request("POST", "/v1/messages", {**body, **form}).body
    assert fits(NUMBER, json.loads(done["content"][-1]["text"]))
    tools = [{"name": "add", "input_schema": ADD.parameters}]
    done = stubborn.request("POST", "/v1/messages", {**body, "tools": tools, "tool_choice": {"type": "any"}}).body
    assert done["stop_reason"] == "tool_use"
    assert fits(ADD.parameters, done["content"][-1]["input"])


def test_a_form_that_is_none_is_a_bad_request_on_the_wire(stubborn: RealServer) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    problem = stubborn.chat(response_format=form)
    assert problem.status == 400
    assert "response_format" in problem.body["error"]["message"]
    problem = stubborn.chat(response_format={"type": "json_object"}, ignore_eos=True, temperature=0)
    assert (problem.status, problem.body["error"]["param"]) == (400, "ignore_eos")


def form(schema: dict[str, Any]) -> Constraint | None:
    return constraint(ToolChoice(), {"type": "json_schema", "schema": schema}, "text.format", (), "hermes")


def refusal_of(schema: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        form(schema)
    assert (caught.value.status, caught.value.param) == (400, "text")
    return caught.value.message


def members(count: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "string"} for i in range(count)}


def test_an_object_may_have_so_many_members_and_no_more() -> None:
    assert form({"type": "object", "properties": members(400)})
    assert "401 members that may be left out, at most 400" in refusal_of({"type": "object", "properties": members(401)})
    needed = {"type": "object", "properties": members(2000), "required": list(members(2000))}
    assert form(needed)
    assert "2001 members, at most 2000" in refusal_of({**needed, "properties": members(2001)})
    assert "401 members" in refusal_of({"type": "array", "items": {"anyOf": [{}, {"properties": members(401)}]}})


def test_patterns_of_members_are_refused_before_each_is_compared_with_each() -> None:
    def patterns(count: int) -> dict[str, Any]:
        return {"type": "object", "patternProperties": {f"^a{i:05d}$": {"type": "string"} for i in range(count)}}

    assert form(patterns(64))
    assert "2080 pairs, at most 2048" in refusal_of(patterns(65))
    assert "pairs" in refusal_of({"anyOf": [patterns(40), patterns(40), patterns(40)]})


@pytest.mark.parametrize("family", ["hermes", "qwen", "dsml", "glm", "llama3"])
def test_references_to_one_definition_cost_no_more_than_the_definition_each(family: str) -> None:
    def grammar(count: int) -> str:
        properties = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(count)}
        tool = Tool("f", '{"name": "f"}', {"type": "object", "properties": properties, "$defs": {"a": {"type": "integer"}}})
        held = constraint(ToolChoice("required"), None, "text.format", [tool], family)
        assert held is not None
        return held.grammar

    assert len(grammar(300)) < 4 * len(grammar(100))


def test_a_part_brings_what_it_refers_to_and_nothing_else() -> None:
    root = {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"items": {"$ref": "#/$defs/y"}}, "y": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#"}]}, "z": {"type": "null"}},
    }
    found = part({"$ref": "#/$defs/x", "title": "t"}, root)
    assert found["title"] == "t"
    text = json.dumps(found)
    assert "null" not in text
    for ref in references(found):
        assert ref.removeprefix("#/$defs/") in found["$defs"]
    assert len(found["$defs"]) == 3  # x, y and the root
    assert part({"type": "string"}, root) == {"type": "string"}
    assert part({"$ref": "#/nowhere"}, root) == {"$ref": "#/nowhere"}


def test_too_large_a_grammar_is_refused_before_it_is_compiled() -> None:
    assert "too large, at most 1048576 characters" in refusal_of({"const": "x" * (1 << 20)})
    large = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(390)}
    item = {"type": "array", "items": {"const": "x" * 4000}}
    tool = Tool("f", '{"name": "f"}', {"type": "object", "properties": large, "$defs": {"a": item}})
    with pytest.raises(ApiError, match="too large"):
        constraint(ToolChoice("required"), None, "text.format", [tool], "qwen")


def test_too_many_tools_are_refused() -> None:
    def tools(count: int) -> list[Tool]:
        return [Tool(f"f{i}", f'{{"name": "f{i}"}}', {"type": "object"}) for i in range(count)]

    assert constraint(ToolChoice("required"), None, "text.format", tools(256), "hermes")
    with pytest.raises(ApiError, match="calls of 257 tools cannot be enforced, at most of 256"):
        constraint(ToolChoice("required"), None, "text.format", tools(257), "hermes")


def test_an_error_of_the_engine_names_the_field_that_wants_the_form() -> None:
    held = form({"type": "string"})
    assert held is not None
    assert held.field == "text.format"
    forced = constraint(ToolChoice("required"), None, "text.format", [Tool("f", '{"name": "f"}', {"type": "object"})], "hermes")
    assert forced is not None
    assert forced.field == "tools"
