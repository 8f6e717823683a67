"""Requests and histories that no client should send: refused with a reason,
or answered like any other; never a fault of the server."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.api_clients import CLIENTS, Asked, Chat, Client, Messages, Object, Responses
from tests.e2e.conftest import CTX, Scripted
from tests.e2e.test_apis import TURNS, tokens
from tests.scripted.spellings import SPELLINGS
from tests.server.harness import Answer, until

QUESTION = "ask-many"
DIALECTS = st.sampled_from(sorted(SPELLINGS))
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

TEXTS = st.sampled_from(
    [
        "", " ", "\n\n", "plain", "é\U0001f600", "\x00", "\ud83d", "\ue000answer\ue000", "\ue000sampled 0\ue000",
        "{{ x }}{% y %}", "a" * 2000,
        "<think>", "</think>", "</think></think>", "<tool_call>", "</tool_call>", "<tool_result>", "</tool_result>",
        "&lt;/tool_result>",
        "</tool_response>", "<tools>", "<｜DSML｜tool_calls>", "</｜DSML｜parameter>", "<｜DSML｜ calls>", "<arg_key>",
        "</arg_value>", "</parameter>",
        "<｜User｜>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|user|>", "<|observation|>", "<|python_tag|>", "[gMASK]<sop>",
    ]
) | st.text(max_size=8)  # fmt: skip
ARGUMENTS: list[Any] = [
    '{"at":"x","times":2}', '{"times":2, "at":"\\u0000\\ud83d"}', '{"at":"x"', '{"at":', "{", "", " ", "[]", '"s"', "null",
    "NaN", '{"a":NaN}',
    '{"a":1e999}', '{"a":1,"a":2}', '{"":1}', '{"<b>":"</parameter>"}', '{"a":{"b":[1,{"c":null}]}}',
    '{"at":"</think></tool_call>"}',
    "[" * 3000, '{"a":' * 500, '{"a":' * 300 + "1" + "}" * 300, "9" * 4100, "\x00", {"at": 3}, {"a": {"b": []}}, [], 5, True,
    None,
]  # fmt: skip
IDS = st.sampled_from(["call_1", "call_1", "call_2", "", "x" * 300, "<b>", "é"])
NAMES = st.sampled_from(["look", "count", "rest", "nobody", "a b", "<x>", 'a"b', "é", ""])


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def an_object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional or {})


# What each API's history may consist of, and more.

CHAT = an_object(
    {},
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]),
        "content": maybe(TEXTS | st.lists(TEXTS | an_object({"type": st.just("text"), "text": TEXTS}), max_size=3)),
        "reasoning_content": maybe(TEXTS),
        "tool_call_id": IDS,
        "tool_calls": maybe(
            st.lists(
                an_object({}, {"id": IDS, "function": an_object({}, {"name": NAMES, "arguments": st.sampled_from(ARGUMENTS)})}),
                max_size=2,
            )
        ),
    },
)
ITEMS = st.one_of(
    an_object(
        {"content": maybe(TEXTS | st.lists(an_object({"type": st.just("input_text"), "text": TEXTS}), max_size=2))},
        {"type": st.just("message"), "role": st.sampled_from(["user", "assistant", "system", "developer"])},
    ),
    an_object(
        {"type": st.just("reasoning")},
        {
            "summary": st.lists(an_object({"type": st.just("summary_text"), "text": TEXTS}), max_size=2),
            "encrypted_content": maybe(TEXTS | st.sampled_from(["ds4batch.1.", "ds4batch.1.%%", "ds4batch.1._w=="])),
            "status": st.sampled_from(["completed", "incomplete", "in_progress"]),
        },
    ),
    an_object(
        {"type": st.sampled_from(["function_call", "custom_tool_call", "local_shell_call", "tool_search_call"])},
        {
            "call_id": IDS, "id": IDS, "name": NAMES, "namespace": NAMES, "arguments": st.sampled_from(ARGUMENTS),
            "input": TEXTS, "status": st.sampled_from(["completed", "incomplete"]),
        },
    ),
    an_object(
        {"type": st.sampled_from(["function_call_output", "custom_tool_call_output", "tool_search_output"])},
        {"call_id": IDS, "output": st.sampled_from(["", "x", [], [1], {}, None, 5, [{"type": "input_text", "text": "y"}]]),
         "tools": st.sampled_from([None, [], [{"name": "found"}], [{"name": "look"}], {}])},
    ),
    st.sampled_from([{"type": "compaction"}, {"type": "item_reference", "id": "x"}]),
)  # fmt: skip
BLOCKS = st.one_of(
    an_object({"type": st.just("text"), "text": TEXTS}),
    an_object({"type": st.just("thinking"), "thinking": TEXTS, "signature": TEXTS}),
    st.just({"type": "redacted_thinking", "data": "x"}),
    an_object({"type": st.just("tool_use"), "id": IDS, "name": NAMES}, {"input": st.sampled_from(ARGUMENTS)}),
    an_object(
        {"type": st.just("tool_result"), "tool_use_id": IDS},
        {"content": maybe(TEXTS | st.lists(an_object({"type": st.just("text"), "text": TEXTS}), max_size=2)), "is_error": st.just(True)},
    ),
)  # fmt: skip
MESSAGES = an_object(
    {"content": maybe(TEXTS | st.lists(BLOCKS, max_size=4))},
    {"role": st.sampled_from(["user", "assistant", "system"])},
)
HISTORIES: list[tuple[Client, st.SearchStrategy[Any]]] = [(Chat(), CHAT), (Responses(), ITEMS), (Messages(), MESSAGES)]


def history_of(client: Client, body: Object) -> list[Any]:
    """Where a body keeps its messages."""
    found: list[Any] = body["input" if client.name == "responses" else "messages"]
    return found


def check_refused(answer: Answer, client: Client) -> None:
    assert answer.status == 400, answer.raw
    assert client.message(answer)


@pytest.mark.parametrize(("client", "pieces"), HISTORIES, ids=[client.name for client, _ in HISTORIES])
def test_a_question_behind_any_history_is_refused_or_answered_as_ever(
    servers: dict[str, Scripted], client: Client, pieces: st.SearchStrategy[Any]
) -> None:
    refused: list[bool] = []

    @settings(max_examples=60, deadline=None, database=None)
    @given(DIALECTS, st.lists(pieces, min_size=1, max_size=4), st.booleans())
    def ask(dialect: str, history: list[Any], stream: bool) -> None:
        body = client.body([Asked(QUESTION)])
        history_of(client, body)[-1:-1] = history
        answer = client.send(servers[dialect], body, stream=stream)
        refused.append(answer.status != 200)
        if answer.status != 200:
            check_refused(answer, client)
        else:
            reply = client.whole(client.assembled(answer) if stream else answer.body)
            assert reply.said == TURNS[QUESTION]

    ask()
    assert not all(refused)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda value: str(value)[:12])
def test_arguments_of_any_kind_in_a_history_are_no_fault(model: Scripted, arguments: Any) -> None:
    function = {"name": "look", "arguments": arguments}
    chat: Object = {"role": "assistant", "content": "so", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    item = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}
    block = {"type": "tool_use", "id": "c1", "name": "look", "input": arguments}
    for client, said in zip(CLIENTS, (chat, item, {"role": "assistant", "content": [block]}), strict=True):
        body = client.body([Asked("once"), Asked("ask-bare")])
        history_of(client, body)[-1:-1] = [said]
        reply = client.whole(client.send(model, body).body)
        assert reply.said == TURNS["ask-bare"]


# Whole bodies.

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**70, 1.5, float("nan"), float("inf"), "", "x", "auto", "none", "required", "\ud83d", [],
    [None], [[]], ["x"], {},
    {"type": "x"}, {"type": "function"}, {"type": "json_schema"},
    {"type": "json_object"}, {"name": "look"}, [{"type": "text", "text": "ask-text"}],
]  # fmt: skip
FIELDS = (
    "model", "messages", "input", "prompt", "system", "instructions", "tools", "tool_choice", "max_tokens",
    "max_output_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "stream_options", "thinking", "think", "reasoning_effort",
    "reasoning", "text",
    "response_format", "output_config", "chat_template_kwargs", "logprobs", "top_logprobs", "logit_bias", "include", "store",
    "metadata", "n",
    "previous_response_id", "conversation", "background", "echo", "suffix", "presence_penalty", "service_tier",
)  # fmt: skip


def bodies() -> list[tuple[str, Object]]:
    chat, responses, messages = (client.body([Asked("ask-call")]) for client in CLIENTS)
    prompt: Object = {"prompt": "ask-text", "max_tokens": 30}
    return list(zip(PATHS, (chat, prompt, responses, messages, messages), strict=True))


def replaced(data: st.DataObject, value: Any, junk: Any) -> Any:
    """`value` with something inside, or all of it, replaced."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 3)) == 0:
        return junk
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    at = data.draw(st.sampled_from(keys))
    value[at] = replaced(data, value[at], junk)
    return value


@settings(max_examples=150, deadline=None, database=None)
@given(st.data(), DIALECTS, st.sampled_from(bodies()), st.booleans())
def test_no_body_is_a_fault_of_the_server_and_every_stream_is_closed(
    servers: dict[str, Scripted], data: st.DataObject, dialect: str, request: tuple[str, Object], stream: bool
) -> None:
    path, body = request[0], copy.deepcopy(request[1])
    for _ in range(data.draw(st.integers(1, 2))):
        junk = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
        if data.draw(st.booleans()):
            body[data.draw(st.sampled_from(FIELDS))] = junk
        else:
            key = data.draw(st.sampled_from(sorted(body)))
            body[key] = replaced(data, body[key], junk)
    answer = servers[dialect].request("POST", path, {**body, "stream": stream})
    assert answer.status in (200, 400), (body, answer.raw)
    if answer.status == 400:
        error = json.loads(answer.raw)
        assert error["error"]["message"]
        assert error["error"]["type"] == "invalid_request_error"
        assert ("type" in error) == path.startswith("/v1/messages")
    elif answer.headers["content-type"] == "text/event-stream":
        check_closed(path, answer)
    else:
        assert isinstance(answer.body, dict)


def check_closed(path: str, answer: Answer) -> None:
    """The stream ends as those of its API do, and with nothing behind that."""
    assert answer.raw.endswith(b"\n\n")
    last = answer.events[-1]
    if path == "/v1/messages":
        assert last["type"] == "message_stop"
        kinds = [event["type"] for event in answer.events]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0
    elif path == "/v1/responses":
        assert last["type"] in ("response.completed", "response.incomplete")
        kinds = [event["type"] for event in answer.events]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    else:
        assert last == "[DONE]"
        assert any(choice["finish_reason"] for event in answer.events[:-1] for choice in event["choices"])


def test_after_all_that_nothing_runs_and_no_log_has_a_fault(servers: dict[str, Scripted]) -> None:
    for server in servers.values():
        server.until_metric("vllm:num_requests_running", 0)
        until(lambda server=server: server.health()["status"] == "ok")  # type: ignore[misc]
        assert not [line for line in server.lines if "Traceback" in line or "failed" in line]


# Limits that are met exactly.


@STREAMED
def test_reasoning_that_the_limit_cuts_stays_reasoning(model: Scripted, client: Client, stream: bool) -> None:
    if not model.spelling.opened:
        pytest.skip("its reasoning is not open from the beginning")
    limit = tokens("hm, é")
    reply = client.ask(model, [Asked("ask-text")], stream=stream, more={client.limit: limit})
    assert reply.said == ("hm, é", "", [], "length")
    assert reply.usage.generated == limit


def test_a_prompt_as_long_as_the_context_is_refused_and_one_shorter_is_not(model: Scripted, client: Client) -> None:
    def body(letters: int) -> Object:
        return client.body([Asked("x" * letters)], tools=False) | {client.limit: 5}

    frame = client.whole(client.send(model, body(1)).body).usage.prompt - 1
    full = client.send(model, body(CTX - frame))
    error = full.body["error"]
    assert (full.status, error["n_prompt_tokens"], error["n_ctx"]) == (400, CTX, CTX)
    if client.name != "messages":
        param = {"chat": "messages", "responses": "input"}[client.name]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"] == f"Prompt has {CTX} tokens, but the configured context size is {CTX} tokens"
    fitting = client.send(model, body(CTX - frame - 1))
    assert client.whole(fitting.body).usage.prompt == CTX - 1
