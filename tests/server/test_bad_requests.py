from __future__ import annotations

import json
from typing import Any

import pytest
from harness import Server

USER = [{"role": "user", "content": "hi"}]

HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"messages":[]}',
    b'{"messages":"x"}',
    b'{"messages":[{"role":"user"}]}',
    b'{"messages":[{"role":1,"content":2}]}',
    b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":-5}',
    b'{"messages":[{"role":"user","content":"hi"}],"temperature":NaN,"max_tokens":1}',
    b'{"messages":[{"role":"user","content":"\\ud83d"}],"max_tokens":2}',
    b'{"x":' + b"[" * 400 + b"]" * 400 + b',"messages":[]}',
    b'{"messages":[{"role":"user","content":"hi"}],"n":3}',
    b'{"messages":[{"role":"user","content":"' + b"word " * 9000 + b'"}]}',
    b'{"messages":[{"role":"user","content":"hi"}],"stop":[1,2]}',
    b'{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{"}}]},'
    b'{"role":"tool","tool_call_id":"a","content":"x"}],"max_tokens":2}',
    b'{"messages":[{"role":"user","content":"hi"}],"model":"a","model":{',
    b'{"prompt":{}}',
    b'{"prompt":[[]]}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_hostile_body_never_gives_a_server_error(server: Server, path: str, body: bytes) -> None:
    answer = server.request("POST", path, body)
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert answer.body["error"]["type"] == "invalid_request_error"
        assert answer.body["error"]["message"]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": None}, "missing messages"),
    ({"messages": {}}, "messages: expected a list, got an object"),
    ({"messages": [1]}, "messages[0]: expected an object, got a number"),
    ({"messages": [*USER, {"role": "wizard", "content": "x"}]}, "messages[1].role: unknown role 'wizard'"),
    ({"messages": [{"role": 1}]}, "messages[0].role: expected a string, got a number"),
    ({"messages": [{"content": 2}]}, "messages[0].content: expected a string or a list, got a number"),
    ({"messages": [{"content": ["a", 2]}]}, "messages[0].content[1]: expected a string or an object, got a number"),
    (
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]: the loaded model has no vision",
    ),
    ({"messages": [*USER, {"role": "system", "content": "late"}]}, "a system message must come first"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls: expected a list"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
    ({"max_tokens": -5}, "max_tokens: must be at least 1, got -5"),
    ({"max_completion_tokens": float("-inf")}, "max_completion_tokens: must be at least 1"),
    ({"max_tokens": "9"}, "max_tokens: expected a number, got a string"),
    ({"max_tokens": True}, "max_tokens: expected a number, got a boolean"),
    ({"temperature": -0.1}, "temperature: expected a number between 0 and 100, got -0.1"),
    ({"temperature": float("inf")}, "temperature: expected a number between 0 and 100, got inf"),
    ({"top_p": 1.5}, "top_p: expected a number between 0 and 1, got 1.5"),
    ({"min_p": -1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty: expected a number above 0"),
    ({"n": 2}, "n: only 1 is supported, got 2"),
    ({"best_of": 2}, "best_of: only 1 is supported, got 2"),
    ({"top_logprobs": 3}, "top_logprobs: needs logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected a number between 0 and 20, got 21"),
    ({"logprobs": 2}, "logprobs: expected true or false"),
    ({"logit_bias": {"256": 1}}, "logit_bias: '256' is not a token id below 256"),
    ({"logit_bias": {"a": 1}}, "logit_bias: 'a'"),
    ({"logit_bias": {"7": 101}}, "the bias of token 7 must be a number between -100 and 100"),
    ({"stop": 3}, "stop: expected a string or a list of strings, got a number"),
    ({"stop": [str(i) for i in range(65)]}, "stop: at most 64 stop strings, got 65"),
    ({"stream": "yes"}, "stream: expected true or false, got a string"),
    ({"stream_options": []}, "stream_options: expected an object, got a list"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: expected true or false, got a number"),
    ({"model": 3}, "model: expected a string, got a number"),
    ({"ignore_eos": True}, "ignore_eos requires an explicit temperature of 0"),
    ({"response_format": []}, "response_format: expected an object, got a list"),
    ({"tools": {}}, "tools: expected a list"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: is missing"),
    ({"tool_choice": "required"}, "tool_choice: a call is required, but there are no tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name: no tool is named ''"),
    ({"tool_choice": {"type": "lottery"}}, "tool_choice.type: expected function or custom, got 'lottery'"),
    ({"reasoning_effort": "50"}, "reasoning_effort: expected one of"),
    ({"thinking": 3}, "thinking: expected true or false"),
]


@pytest.mark.parametrize(("more", "message"), BAD_FIELDS, ids=[message[:40] for _, message in BAD_FIELDS])
def test_a_bad_field_of_a_chat_is_named(server: Server, more: dict[str, Any], message: str) -> None:
    answer = server.request("POST", "/v1/chat/completions", {"messages": USER, **more})
    assert answer.status == 400
    assert message in answer.body["error"]["message"]
    assert answer.body["error"]["param"] in more


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": None}, "missing prompt"),
        ({"prompt": 3}, "prompt: expected a string, a list of one string or a list of token ids, got a number"),
        ({"prompt": ["a", "b"]}, "prompt: one prompt a request, got 2"),
        ({"prompt": [[1], [2]]}, "prompt: one prompt a request, got 2"),
        ({"prompt": [1, 256]}, "prompt[1]: expected a token id below 256"),
        ({"prompt": [1, True]}, "prompt[1]: expected a token id below 256"),
        ({"prompt": []}, "prompt: must not be empty"),
        ({"prompt": ""}, "prompt: must not be empty"),
        ({"echo": True}, "echo: "),
        ({"suffix": "x"}, "suffix: "),
        ({"best_of": 2}, "best_of: only 1"),
        ({"logprobs": 21}, "logprobs: expected a number between 0 and 20, got 21"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(server: Server, more: dict[str, Any], message: str) -> None:
    answer = server.request("POST", "/v1/completions", {"prompt": "hi", **more})
    assert answer.status == 400
    assert message in answer.body["error"]["message"]


@pytest.mark.parametrize(("path", "param"), [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")])
def test_a_prompt_as_long_as_the_context_is_refused_and_one_shorter_is_not(server: Server, path: str, param: str) -> None:
    frame = 0 if param == "prompt" else len("user: \nassistant:")

    def ask(tokens: int) -> Any:
        text = "a" * (tokens - frame)
        body = {"prompt": text} if param == "prompt" else {"messages": [{"content": text}]}
        return server.request("POST", path, body)

    answer = ask(4096)
    assert answer.status == 400
    assert answer.body["error"] == {
        "message": "Prompt has 4096 tokens, but the configured context size is 4096 tokens",
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
        "n_prompt_tokens": 4096,
        "n_ctx": 4096,
    }
    last = ask(4095)
    assert last.status == 200
    assert last.body["usage"]["prompt_tokens"] == 4095
    assert last.body["usage"]["completion_tokens"] == 1
    assert last.body["choices"][0]["finish_reason"] == "length"


def test_the_count_of_a_prompt_far_beyond_the_context_is_projected(server: Server) -> None:
    answer = server.complete("a" * 1_000_000)
    assert answer.body["error"]["code"] == "context_length_exceeded"
    assert answer.body["error"]["n_prompt_tokens"] == 1_000_000  # a token a character here, so the projection is exact


def test_unknown_members_and_null_fields_are_accepted(server: Server) -> None:
    nulls = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "stop",
            "tools",
            "tool_choice",
            "logit_bias",
            "n",
            "stream",
            "seed",
            "logprobs",
            "response_format",
            "stream_options",
            "thinking",
            "reasoning_effort",
        ]
    )
    assert server.chat(**nulls, user="me", metadata={"a": [1]}, store=False, something={"else": 1}).status == 200


def test_the_server_counts_what_it_refuses(server: Server) -> None:
    before = server.metrics()
    server.chat(n=2)
    server.complete("a" * 5000)
    after = server.metrics()
    for reason in ("invalid", "context_length"):
        key = f'ds4batch_requests_rejected_total{{reason="{reason}"}}'
        assert after[key] == before[key] + 1
    assert after["ds4batch_requests_submitted_total"] == before["ds4batch_requests_submitted_total"]


def test_thousands_of_tool_pairs_are_read_in_linear_time(server: Server) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x":"\U0001f600"}'}}
    pair = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    answer = server.request("POST", "/v1/chat/completions", json.dumps({"messages": USER + 4096 * pair}).encode())
    assert answer.status == 400
    assert answer.body["error"]["code"] == "context_length_exceeded"
