from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.conversation import Call, Message
from ds4batch.server.apis.responses_input import History, read_history
from ds4batch.server.apis.responses_reasoning import seal, unseal
from ds4batch.server.errors import ApiError


def history(*items: Any, instructions: Any = None) -> History:
    return read_history({"input": list(items), "instructions": instructions})


def read(*items: Any) -> list[Message]:
    return history(*items).messages


def refusal(body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        read_history(body)
    assert caught.value.status == 400
    assert caught.value.param == ("instructions" if "instructions" in caught.value.message else "input")
    return caught.value.message


def user(text: Any = "hi") -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]}


def call(id: str = "call_1", name: str = "ls", arguments: Any = '{"path":"."}', **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": id, "name": name, "arguments": arguments, **more}


def result(id: str = "call_1", output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


def test_a_string_is_one_user_message() -> None:
    assert read_history({"input": "hi"}).messages == [Message("user", "hi")]


def test_instructions_come_first_as_a_system_message() -> None:
    assert history(user(), instructions="be kind").messages == [Message("system", "be kind"), Message("user", "hi")]
    assert history(user(), instructions="").messages == [Message("user", "hi")]


def test_developer_messages_are_system_messages_in_their_place() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert read(developer, {"content": "u"}, developer) == [
        Message("system", "ab"),
        Message("user", "u"),
        Message("system", "ab"),
    ]


def test_text_comes_in_every_form_the_api_has() -> None:
    parts = [{"type": kind, "text": kind[0]} for kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text")]
    assert read(user("x") | {"content": ["<", *parts, {"type": "text", "text": None}, ">"]})[0].text == "<iotsr>"
    assert read(user("x") | {"content": None})[0].text == ""


def test_reasoning_text_and_calls_of_one_answer_are_one_message() -> None:
    assert read(
        user(), thought("hm"), answer("Let me see."), call(), call("call_2", "cat"), result(), result("call_2", "no")
    ) == [
        Message("user", "hi"),
        Message(
            "assistant",
            "Let me see.",
            "hm",
            (Call("call_1", "ls", '{"path":"."}'), Call("call_2", "cat", '{"path":"."}')),
        ),
        Message("tool", "ok", call_id="call_1"),
        Message("tool", "no", call_id="call_2"),
    ]


def test_a_call_without_text_makes_a_message_and_takes_the_reasoning() -> None:
    assert read(user(), thought("hm"), call())[1] == Message("assistant", "", "hm", (Call("call_1", "ls", '{"path":"."}'),))


def test_two_blocks_of_reasoning_are_joined_by_a_line() -> None:
    both = thought("a") | {"content": [{"type": "reasoning_text", "text": "b"}]}
    assert read(both, thought("c"), answer("x"))[0].reasoning == "a\nb\nc"


def test_reasoning_between_text_and_call_stays_with_their_message() -> None:
    assert read(thought("a"), answer("x"), thought("b"), call()) == [
        Message("assistant", "x", "a\nb", (Call("call_1", "ls", '{"path":"."}'),))
    ]


@pytest.mark.parametrize("item", [user(), result()])
def test_reasoning_that_led_to_nothing_keeps_its_place(item: Any) -> None:
    messages = read(call(), thought("lost"), item)
    assert messages[1] == Message("assistant", reasoning="lost")
    assert len(messages) == 3


def test_reasoning_at_the_end_is_a_message() -> None:
    assert read(user(), thought("hm"))[-1] == Message("assistant", reasoning="hm")


def test_compactions_are_passed_over_and_part_nothing() -> None:
    items = [thought("hm"), {"type": "compaction", "encrypted_content": "x"}, answer("x"), {"type": "context_compaction"}, call()]
    assert read(*items) == read(items[0], items[2], items[4])


def test_sealed_reasoning_comes_back_as_it_was_and_once() -> None:
    item = thought("a summary") | {"encrypted_content": seal("the very\n text")}
    assert read(item, answer("x"))[0].reasoning == "the very\n text"


def test_reasoning_sealed_elsewhere_is_read_from_what_is_shown() -> None:
    for foreign in ("gAAAAB", "ds4batch.1.%%%", "ds4batch.1.ü", "ds4batch.1._w==", ""):
        assert read(thought("shown") | {"encrypted_content": foreign}, answer("x"))[0].reasoning == "shown"
    assert read({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}, answer("x"))[0].reasoning == ""


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_a_seal_opens_to_its_text(text: str) -> None:
    assert unseal(seal(text)) == text


def test_a_namespace_is_part_of_the_name_in_the_prompt() -> None:
    assert read(call(name="find", namespace="mcp__x__"))[0].calls[0].name == "mcp__x__find"


def test_arguments_stay_what_the_client_sent() -> None:
    def arguments(**members: Any) -> str:
        item = {"type": "custom_tool_call", "call_id": "c", "name": "patch", **members}
        return read(item)[0].calls[0].arguments

    assert arguments(input="*** Begin\n") == "*** Begin\n"
    assert arguments(arguments='{ "a": 1 }', input="x") == '{ "a": 1 }'
    assert arguments(arguments={"é": [1, None]}) == '{"é":[1,null]}'
    assert arguments(arguments='{"cut') == '{"cut'
    assert arguments() == "{}"


def test_the_id_stands_in_for_a_call_id() -> None:
    messages = read(
        {"type": "function_call", "id": "fc_9", "name": "ls"}, {"type": "local_shell_call_output", "id": "fc_9", "output": ""}
    )
    assert messages[0].calls[0].id == messages[1].call_id == "fc_9"


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, "local_shell", '{"command":["ls"]}'),
        ({"type": "web_search_call", "action": {"query": "x"}, "arguments": "no"}, "web_search_call", '{"query":"x"}'),
        ({"type": "tool_search_call", "call_id": None, "arguments": {"query": "x"}}, "tool_search", '{"query":"x"}'),
        ({"type": "image_generation_call", "id": "ig", "result": "AAAA"}, "image_generation_call", "{}"),
        ({"type": "local_shell_call", "id": "c", "input": "raw"}, "local_shell", "raw"),
    ],
)
def test_hosted_calls_are_calls_by_a_name_of_their_own(item: Any, name: str, arguments: str) -> None:
    found = read(item)[0].calls[0]
    assert (found.name, found.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("plain", "plain"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        ([], ""),
        (None, ""),
        ({"content": "é", "ok": True}, '{"content":"é","ok":true}'),
        ([1, {"a": 2}], '[1,{"a":2}]'),
        (3.5, "3.5"),
    ],
)
def test_a_result_is_text_or_blocks_or_json(output: Any, text: str) -> None:
    assert read(call(), result(output=output))[-1].text == text


def test_results_of_hosted_tools_are_looked_for_under_all_their_names() -> None:
    def text(**members: Any) -> str:
        return history({"type": "web_search_call_output", "call_id": "c", **members}).messages[0].text

    assert text(output="a", result="b") == "a"
    assert text(output=None, result={"b": 1}) == '{"b":1}'
    assert text(tools=[{"type": "function"}]) == '[{"type":"function"}]'


def test_a_search_result_brings_its_tools() -> None:
    def found(*tools: Any) -> dict[str, Any]:
        return {"type": "tool_search_output", "call_id": "s", "execution": "client", "status": "completed", "tools": list(tools)}

    space = {"type": "namespace", "name": "x_", "tools": [{"name": "a"}, {"name": "b"}]}
    search = {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "q"}}
    got = history(search, found(space), search, found({"type": "function", "name": "c"}, space))
    assert [tool.name for tool in got.found] == ["x_a", "x_b", "c"]
    assert json.loads(got.messages[1].text) == [space]


def test_what_was_sent_incomplete_comes_back() -> None:
    cut = answer("half") | {"status": "incomplete"}
    assert read(thought("hm") | {"status": "incomplete"}, cut, user("go on")) == [
        Message("assistant", "half", "hm"),
        Message("user", "go on"),
    ]


def test_a_call_that_was_sent_incomplete_is_none() -> None:
    messages = read(call(status="incomplete", arguments='{"a'), answer("its text"), user())
    assert messages == [Message("assistant", "its text"), Message("user", "hi")]


def test_trailing_results_continue_the_calls_of_the_answer_before_them() -> None:
    got = history(user(), answer("x"), call("a"), call("b"), result("b"), result("a"), instructions="s")
    assert got.continues == ("a", "b")
    assert got.results_from == 3
    assert got.undeclared == ()


def test_results_alone_continue_calls_that_a_session_must_know() -> None:
    for instructions, first in ((None, 0), ("s", 1)):
        got = history(result("b"), result("a"), instructions=instructions)
        assert got.continues == got.undeclared == ("b", "a")
        assert got.results_from == first


def test_results_further_up_continue_nothing() -> None:
    got = history(call(), result(), user())
    assert (got.continues, got.results_from, got.undeclared) == ((), 3, ())


def test_a_call_must_stand_before_its_result() -> None:
    assert history(result("a"), call("a"), result("a"), call("b"), result("c")).undeclared == ("a", "c")


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([1], "input[0]: expected an object, got a number"),
        ([user(), {"type": "item_reference", "id": "x"}], "input[1].type: unsupported item type 'item_reference'"),
        ([{"type": 7}], "input[0].type: expected a string"),
        ([{"role": "robot"}], "input[0].role: unknown role 'robot'"),
        ([{"role": 1}], "input[0].role: expected a string"),
        ([user(1)], "input[0].content: expected a string or a list, got a number"),
        ([user([1])], "input[0].content[0]: expected a string or an object"),
        ([user([{"type": "input_text"}])], "input[0].content[0].text: is missing"),
        ([user([{"type": "input_text", "text": 1}])], "input[0].content[0].text: expected a string"),
        ([user(["a", {"type": "input_file"}])], "input[0].content[1].type: expected one of"),
        ([user([{"text": "a"}])], "input[0].content[0].type: expected one of"),
        ([user([{"type": "input_image", "image_url": "data:"}])], "input[0].content[0]: the loaded model has no vision"),
        ([result(output=[{"type": "input_image"}])], "input[0].output[0]: the loaded model has no vision"),
        ([result(output=["a", {"type": "x"}])], "input[0].output[1].type: expected one of"),
        ([{"type": "reasoning", "summary": [{"type": "x"}]}], "input[0].summary[0].type: expected one of"),
        ([{"type": "reasoning", "content": 1}], "input[0].content: expected a string or a list"),
        ([{"type": "reasoning", "encrypted_content": 1}], "input[0].encrypted_content: expected a string"),
        ([{"type": "function_call", "call_id": "c"}], "input[0].name: is missing"),
        ([{"type": "custom_tool_call", "name": "n"}], "input[0].call_id: is missing"),
        ([call(namespace=1)], "input[0].namespace: expected a string"),
        ([{"type": "function_call_output", "output": ""}], "input[0].call_id: is missing"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output: is missing"),
        ([{"type": "tool_search_output", "call_id": "c", "tools": [{}]}], "input[0].tools[0].name: is missing"),
        ([{"type": "tool_search_output", "call_id": "c", "tools": {}}], "input[0].tools: expected a list"),
        ([user() | {"status": "in_progress"}], "input[0].status: only completed items can be replayed, got 'in_progress'"),
        ([call(status="in_progress")], "input[0].status: only completed"),
        ([call(), result() | {"status": "incomplete"}], "input[1].status: only completed"),
        ([call(status=1)], "input[0].status: expected a string"),
        ([], "input: must not be empty"),
    ],
)
def test_bad_items_are_refused_by_name(items: list[Any], named: str) -> None:
    assert refusal({"input": items}).startswith(named)


def test_bad_fields_are_refused_by_name() -> None:
    assert refusal({}) == refusal({"input": None}) == "missing input"
    assert refusal({"input": {}}) == "input: expected a string or a list, got an object"
    assert refusal({"input": "x", "instructions": ["x"]}) == "instructions: expected a string, got a list"


def test_null_members_count_as_absent() -> None:
    item = call() | {"status": None, "namespace": None, "id": None}
    assert read(item, {"type": None, "role": None, "content": "u"})[1] == Message("user", "u")


def test_reading_is_linear_in_the_number_of_calls() -> None:
    def seconds(pairs: int) -> float:
        items = [item for i in range(pairs) for item in (thought("hm"), call(f"call_{i}"), result(f"call_{i}", "x" * 50))]
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            assert len(read(*items)) == 2 * pairs
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(4096) < 20 * seconds(512)  # eight times the pairs; a search of the history for each would cost 64 times
