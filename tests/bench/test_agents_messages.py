"""How the agents' clients encode a history."""

from __future__ import annotations

import json

import pytest

from bench.agent_messages import TOOLS, Habit, ToolCall, Turn, encoded, encoded_result, history, without_opening

CALL = ToolCall("call_1", "read_file", '{"limit": 40, "path": "caf\\u00e9.txt", "offset": 7}')
RESULT = '{"path": "a", "lines": "caf\u00e9 ", "at": 1}'
LOOP = Turn("I plan first. Then I read. ", "first the plan", (CALL,), (RESULT,))
ASKED = Turn("I plan first. Then I read. ", "first the plan", user="And now?")
LAST = Turn("Done.", "", (CALL,), (RESULT,))


@pytest.mark.parametrize("habit", Habit)
def test_the_last_turn_goes_back_as_it_was_received(habit: Habit) -> None:
    assistant, tool = history([LOOP], habit)
    assert assistant["content"] == LOOP.content
    assert assistant["reasoning_content"] == LOOP.reasoning
    assert assistant["tool_calls"][0]["function"]["arguments"] == CALL.arguments
    assert tool == {"role": "tool", "tool_call_id": "call_1", "content": RESULT}


def test_the_exact_client_never_changes_a_byte() -> None:
    once = history([LOOP], Habit.EXACT)
    assert history([LOOP, LAST], Habit.EXACT)[: len(once)] == once


@pytest.mark.parametrize("habit", [Habit.SCHEMA_ORDER, Habit.COMPACT, Habit.FORGETFUL])
def test_the_other_clients_change_an_older_call_without_changing_its_meaning(habit: Habit) -> None:
    written = encoded(CALL, habit)
    assert written != CALL.arguments
    assert json.loads(written) == json.loads(CALL.arguments)


def test_each_client_has_its_own_form() -> None:
    assert encoded(CALL, Habit.SCHEMA_ORDER) == '{"path": "caf\u00e9.txt", "offset": 7, "limit": 40}'
    assert encoded(CALL, Habit.COMPACT) == '{"limit":40,"path":"caf\\u00e9.txt","offset":7}'
    assert encoded(CALL, Habit.FORGETFUL) == '{"limit":40,"offset":7,"path":"caf\\u00e9.txt"}'


def test_an_argument_that_no_schema_knows_comes_last() -> None:
    call = ToolCall("c", "read_file", '{"why": "x", "limit": 1, "path": "p"}')
    assert list(json.loads(encoded(call, Habit.SCHEMA_ORDER))) == ["path", "limit", "why"]


@pytest.mark.parametrize("habit", Habit)
@pytest.mark.parametrize("arguments", ['{"path": "cut sho', "[1, 2]", ""])
def test_arguments_that_are_no_object_stay_as_they_are(habit: Habit, arguments: str) -> None:
    assert encoded(ToolCall("c", "read_file", arguments), habit) == arguments


def test_results_are_encoded_again_by_some() -> None:
    assert encoded_result(RESULT, Habit.EXACT) == encoded_result(RESULT, Habit.SCHEMA_ORDER) == RESULT
    assert encoded_result(RESULT, Habit.COMPACT) == '{"path":"a","lines":"caf\\u00e9 ","at":1}'
    assert encoded_result(RESULT, Habit.FORGETFUL) == '{"at":1,"lines":"caf\\u00e9 ","path":"a"}'
    assert encoded_result(" plain ", Habit.FORGETFUL) == "plain"
    assert encoded_result(" plain ", Habit.COMPACT) == " plain "


def test_the_forgetful_client_drops_reasoning_once_the_user_spoke() -> None:
    within_the_loop = history([LOOP, LAST], Habit.FORGETFUL)[0]
    assert within_the_loop["reasoning_content"] == LOOP.reasoning
    later = history([ASKED, LAST], Habit.FORGETFUL)[0]
    assert later == {"role": "assistant", "content": "I plan first. Then I read."}
    for habit in (Habit.EXACT, Habit.SCHEMA_ORDER, Habit.COMPACT):
        assert history([ASKED, LAST], habit)[0]["reasoning_content"] == ASKED.reasoning


def test_a_model_without_reasoning_loses_the_opening_of_its_answer_instead() -> None:
    spoken = Turn("I plan first. Then I read.", user="And now?")
    assert history([spoken, LAST], Habit.FORGETFUL)[0]["content"] == "Then I read."
    assert without_opening("one\ntwo. three") == "two. three"
    assert without_opening("One sentence. ") == "One sentence. "
    assert without_opening("") == ""


def test_every_tool_requires_an_argument_that_it_has() -> None:
    for tool in TOOLS:
        parameters = tool["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])
