from __future__ import annotations

import json
from typing import Any

import pytest
from harness import Server, script

from ds4batch.server.fields import INT_MAX, clamp_int


def submitted(server: Server, content: str = "", **more: Any) -> Any:
    """What the engine got for a chat request."""
    answer = server.chat(content + script(echo=True), **more)
    assert answer.status == 200, answer.raw
    return json.loads(answer.body["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("value", "clamped"),
    [
        (float("nan"), 0),
        (-3, 0),
        (float("-inf"), 0),
        (float("inf"), INT_MAX),
        (10**400, INT_MAX),
        (7.9, 7),
        (2**31, INT_MAX),
        (2**31 - 1, INT_MAX),
    ],
)
def test_the_integer_rule(value: float, clamped: int) -> None:
    assert clamp_int(value) == clamped


def test_omitted_fields_take_the_defaults(server: Server) -> None:
    got = submitted(server)["sampling"]
    seed = got.pop("seed")
    assert got == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "ignore_eos": False,
    }
    assert 0 < seed < 2**63


def test_given_fields_reach_the_engine(server: Server) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.0,
        "seed": 7,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"65": -100, "66": 3.5},
    }
    got = submitted(server, **given)["sampling"]
    assert {name: got[name] for name in given} == given


def test_nan_counts_as_absent_and_a_top_p_of_zero_keeps_only_the_likeliest(server: Server) -> None:
    got = submitted(server, temperature=float("nan"), top_p=0)["sampling"]
    assert got["temperature"] == 1.0
    assert 0 < got["top_p"] < 1e-6


@pytest.mark.parametrize("seed", [None, 0, -4, float("nan"), float("inf")])
def test_a_seed_that_is_none_is_drawn_anew(server: Server, seed: Any) -> None:
    assert len({submitted(server, seed=seed)["sampling"]["seed"] for _ in range(3)}) == 3


def test_a_large_seed_stays_itself(server: Server) -> None:
    assert submitted(server, seed=2**40 + 3)["sampling"]["seed"] == 2**40 + 3


def test_the_output_limit_is_cut_to_the_room_in_the_context(server: Server) -> None:
    prompt = len("user: \nassistant:" + script(echo=True))
    assert submitted(server)["max_tokens"] == 4096 - prompt
    assert submitted(server, max_tokens=10**30)["max_tokens"] == 4096 - prompt
    assert submitted(server, max_tokens=9)["max_tokens"] == 9
    assert submitted(server, max_tokens=9, max_completion_tokens=8)["max_tokens"] == 8


@pytest.mark.parametrize(("stop", "got"), [("a", ["a"]), (["a", "", 3, None, "b", "a"], ["a", "b"]), ("", []), ([1, 2], [])])
def test_stop_strings_lose_what_is_no_text(server: Server, stop: Any, got: list[str]) -> None:
    assert submitted(server, stop=stop)["stop"] == got


def test_ignore_eos_passes_with_an_explicit_temperature_of_zero(server: Server) -> None:
    assert submitted(server, ignore_eos=True, temperature=0)["sampling"]["ignore_eos"] is True


def test_logprobs_are_asked_for_only_where_wanted(server: Server) -> None:
    assert submitted(server, logprobs=True)["sampling"]["logprobs"] == 0
    assert submitted(server, logprobs=True, top_logprobs=5)["sampling"]["logprobs"] == 5
    assert submitted(server, logprobs=False)["sampling"]["logprobs"] is None


def test_thinking_controls_reach_the_dialect(server: Server) -> None:
    def head(**more: Any) -> str:
        return str(submitted(server, **more)["text"]).split("user:")[0]

    assert head() == ""
    assert head(thinking=False) == "thinking: none\n"
    assert head(thinking={"type": "enabled"}) == "thinking: high\n"
    assert head(thinking={"type": "other"}) == ""
    assert head(reasoning_effort="none") == "thinking: none\n"
    assert head(reasoning_effort="xhigh", think=True) == "thinking: high\n"
    assert head(reasoning_effort="low") == "thinking: low\n"
    assert head(chat_template_kwargs={"enable_thinking": False, "other": 1}) == "thinking: none\n"


def test_tools_are_shown_in_canonical_json_unless_refused(server: Server) -> None:
    wrapped = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    flat = {"name": "ls", "parameters": {"type": "object"}}
    head = 'tools: {"name": "ls", "parameters": {"type": "object"}}\n'
    assert submitted(server, tools=[wrapped])["text"].startswith(head)
    assert submitted(server, tools=[flat], tool_choice="auto")["text"].startswith(head)
    assert not submitted(server, tools=[wrapped], tool_choice="none")["text"].startswith("tools")


def test_content_parts_are_joined_and_roles_brought_to_the_known_ones(server: Server) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, "b", {"type": "refusal"}]},
        {"content": [{"type": "text", "text": script(echo=True)}]},
        {"role": "assistant", "content": None},
        {"role": "function", "name": "f", "content": "r"},
    ]
    answer = server.request("POST", "/v1/chat/completions", {"messages": messages})
    text = json.loads(answer.body["choices"][0]["message"]["content"])["text"]
    assert text == f"system: ab\nuser: {script(echo=True)}\nassistant: \ntool: r\nassistant:"


def test_replayed_calls_keep_the_text_of_their_arguments_parsed_or_not(server: Server) -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"b": 1, "a": "x"}'}},
        {"id": "2", "function": {"name": "f", "arguments": "{cut"}},
        {"id": "3", "function": {"name": "f"}},
    ]
    messages = [{"content": script(echo=True)}, {"role": "assistant", "tool_calls": calls}]
    answer = server.request("POST", "/v1/chat/completions", {"messages": messages})
    line = json.loads(answer.body["choices"][0]["message"]["content"])["text"].split("\n")[1]
    assert line == 'assistant:  calls f {"b": 1, "a": "x"} calls f {cut'
