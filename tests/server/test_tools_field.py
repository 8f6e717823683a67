from __future__ import annotations

import json
from typing import Any

import pytest

from ds4batch.chat.schemas import canonical
from ds4batch.server.apis.tools import read_tools
from ds4batch.server.errors import ApiError

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"\n'}


def one(item: Any) -> Any:
    tools = read_tools([item], "tools")
    assert len(tools) == 1
    return tools[0]


def refusal(value: Any, where: str = "tools") -> str:
    with pytest.raises(ApiError) as caught:
        read_tools(value, where)
    assert caught.value.status == 400
    assert caught.value.param == where.split("[")[0].split(".")[0]
    return caught.value.message


def test_a_wrapped_function_is_the_schema() -> None:
    function = {"name": "ls", "description": "café 😀", "parameters": PARAMETERS}
    tool = one({"type": "function", "function": function})
    assert json.loads(tool.schema) == function
    assert list(json.loads(tool.schema)) == list(function)
    assert "café 😀" in tool.schema
    assert (tool.name, tool.wire_name, tool.namespace, tool.kind) == ("ls", "ls", "", "function")
    assert tool.parameters == PARAMETERS
    assert tool.strings == {"path"}


@pytest.mark.parametrize("key", ["parameters", "input_schema"])
def test_a_flat_item_is_its_own_schema(key: str) -> None:
    item = {"type": "function", "name": "ls", "strict": False, key: PARAMETERS}
    tool = one(item)
    assert json.loads(tool.schema) == item
    assert tool.parameters == PARAMETERS


def test_an_item_without_a_type_is_a_function() -> None:
    assert one({"name": "ls", "input_schema": PARAMETERS}).kind == "function"


def test_schemas_are_in_the_spelling_of_prompts() -> None:
    item = {"name": "f", "description": 'a\u0001\t"/é\u2028', "parameters": {"a": [1, 2.5, True, None, {}]}}
    schema = one(item).schema
    assert schema == canonical(schema)
    assert schema == canonical(json.dumps(item))


def test_functions_of_a_namespace_carry_it_in_the_prompt_and_not_on_the_wire() -> None:
    inner = {"type": "function", "name": "find", "description": "d", "strict": True, "parameters": PARAMETERS}
    other = {"name": "get", "input_schema": PARAMETERS}
    wrapped = {"type": "function", "function": {"name": "put"}}
    tools = read_tools([{"type": "namespace", "name": "mcp__x__", "description": "X", "tools": [inner, other, wrapped]}], "tools")
    assert [(tool.name, tool.wire_name, tool.namespace) for tool in tools] == [
        ("mcp__x__find", "find", "mcp__x__"),
        ("mcp__x__get", "get", "mcp__x__"),
        ("mcp__x__put", "put", "mcp__x__"),
    ]
    assert tools[0].schema == canonical(json.dumps({"name": "mcp__x__find", "description": "d", "parameters": PARAMETERS}))
    assert json.loads(tools[1].schema) == {"name": "mcp__x__get", "parameters": PARAMETERS}
    assert json.loads(tools[2].schema) == {"name": "mcp__x__put"}


def test_a_tool_search_has_defaults_for_what_it_leaves_out() -> None:
    tool = one({"type": "tool_search"})
    assert (tool.name, tool.kind) == ("tool_search", "tool_search")
    schema = json.loads(tool.schema)
    assert list(schema) == ["name", "description", "parameters"]
    assert schema["description"]
    assert "query" in tool.strings
    given = one({"type": "tool_search", "execution": "client", "description": "mine", "parameters": PARAMETERS})
    assert json.loads(given.schema) == {"name": "tool_search", "description": "mine", "parameters": PARAMETERS}


def test_a_function_may_be_called_tool_search() -> None:
    assert one({"type": "function", "name": "tool_search"}).kind == "function"


def test_a_custom_tool_takes_one_text_and_is_shown_as_it_came() -> None:
    item = {"type": "custom", "name": "apply_patch", "description": "d", "format": LARK}
    tool = one(item)
    assert tool.kind == "custom"
    assert json.loads(tool.schema) == item
    assert len(tool.strings) == 1


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search", "external_web_access": False},
        {"type": "web_search_preview"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "mcp", "server_label": "x", "server_url": "https://example.org"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "code_execution_20250825", "name": "code_execution"},
    ],
)
def test_tools_that_the_vendor_would_run_are_left_out(item: Any) -> None:
    assert [tool.name for tool in read_tools([item, {"name": "ls"}], "tools")] == ["ls"]


def test_a_tool_that_the_client_runs_is_kept_whatever_its_type() -> None:
    assert one({"type": "bash_20250124", "name": "bash"}).name == "bash"


def test_a_deferred_tool_says_so() -> None:
    assert one({"type": "function", "name": "f", "defer_loading": True}).deferred
    assert not one({"type": "function", "name": "f", "defer_loading": False}).deferred


def test_cache_marks_do_not_change_what_the_model_sees() -> None:
    plain = {"name": "f", "input_schema": PARAMETERS}
    assert one(plain | {"cache_control": {"type": "ephemeral"}}) == one(plain)


def test_a_tool_listed_twice_counts_once() -> None:
    assert len(read_tools([{"name": "f"}, {"name": "g"}, {"name": "f"}], "tools")) == 2


def test_absent_and_empty_are_no_tools() -> None:
    assert read_tools(None, "tools") == read_tools([], "tools") == []


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({}, "tools: expected a list, got an object"),
        ([1], "tools[0]: expected an object, got a number"),
        ([{"name": "f"}, {"type": "function"}], "tools[1].name: is missing"),
        ([{"type": "function", "function": {}}], "tools[0].function.name: is missing"),
        ([{"type": "function", "function": []}], "tools[0].function: expected an object, got a list"),
        ([{"type": 1, "name": "f"}], "tools[0].type: expected a string, got a number"),
        ([{"name": 1}], "tools[0].name: expected a string, got a number"),
        ([{"name": ""}], "tools[0].name: is missing"),
        ([{"type": "custom"}], "tools[0].name: is missing"),
        ([{"name": "f", "parameters": "{}"}], "tools[0].parameters: expected an object, got a string"),
        ([{"name": "f", "input_schema": []}], "tools[0].input_schema: expected an object, got a list"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools: expected a list, got null"),
        ([{"type": "namespace", "tools": []}], "tools[0].name: is missing"),
        ([{"type": "namespace", "name": "n", "tools": ["f"]}], "tools[0].tools[0]: expected an object, got a string"),
        ([{"type": "namespace", "name": "n", "tools": [{}]}], "tools[0].tools[0].name: is missing"),
        ([{"name": "nf"}, {"type": "namespace", "name": "n", "tools": [{"name": "f"}]}], "tools[1]: another tool is called 'nf'"),
        ([{"type": "tool_search", "parameters": 1}], "tools[0].parameters: expected an object, got a number"),
    ],
)
def test_bad_tools_are_refused_by_name(value: Any, named: str) -> None:
    assert refusal(value).startswith(named)


def test_the_field_is_named_as_the_caller_names_it() -> None:
    assert refusal([{}], "input[3].tools") == "input[3].tools[0].name: is missing"
