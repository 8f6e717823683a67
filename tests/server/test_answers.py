from __future__ import annotations

import concurrent.futures
import re
from typing import Any

import pytest
from harness import Answer, Server, script


def chunk(head: dict[str, Any], delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def test_a_chat_answer_in_one_object(server: Server) -> None:
    answer = server.chat(script(n=3, cached=5, tier="memory-token"), model="whatever/you like")
    assert answer.headers["content-type"] == "application/json"
    body = answer.body
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", body.pop("id"))
    assert body.pop("created") > 1.7e9
    prompt = len("user: \nassistant:" + script(n=3, cached=5, tier="memory-token"))
    assert body == {
        "object": "chat.completion",
        "model": "whatever/you like",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "w0 w1 w2 "}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 3,
            "total_tokens": prompt + 3,
            "prompt_tokens_details": {"cached_tokens": 5, "cache_write_tokens": prompt - 5},
        },
    }


def test_a_chat_stream_has_exactly_the_events_in_order(server: Server) -> None:
    answer = server.chat(script(n=2, delay=0.03), stream=True, stream_options={"include_usage": True}, max_tokens=2)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.raw.startswith(b": prefill\n\ndata: {")
    assert answer.raw.endswith(b"data: [DONE]\n\n")
    events = answer.events
    head = {name: events[0][name] for name in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", head["id"])
    assert events[:-2] == [
        chunk(head, {"role": "assistant"}),
        chunk(head, {"content": "w0 "}),
        chunk(head, {"content": "w1 "}),
        chunk(head, {}, "length"),
    ]
    usage = events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert events[-1] == "[DONE]"


def test_no_usage_is_streamed_unless_asked_for(server: Server) -> None:
    assert not any("usage" in event for event in server.chat(stream=True).events[:-1])


def test_a_stream_and_a_whole_answer_say_the_same(server: Server) -> None:
    streamed = server.chat(script(n=50, burst=7), stream=True).events
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed[:-1])
    whole = server.chat(script(n=50, burst=7)).body["choices"][0]
    assert text == whole["message"]["content"]
    assert streamed[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("prompt", ["say", ["say"], [115, 97, 121], [[115, 97, 121]]])
def test_a_completion_takes_its_prompt_raw(server: Server, prompt: Any) -> None:
    answer = server.complete(prompt)
    body = answer.body
    assert re.fullmatch("cmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"text": "w0 w1 w2 w3 ", "index": 0, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 3


def test_a_completion_stream_has_exactly_the_events_in_order(server: Server) -> None:
    events = server.complete(script(n=2, delay=0.03), stream=True, stream_options={"include_usage": True}).events
    assert [event["choices"] for event in events[:-1]] == [
        [{"text": "w0 ", "index": 0, "finish_reason": None}],
        [{"text": "w1 ", "index": 0, "finish_reason": None}],
        [{"text": "", "index": 0, "finish_reason": "stop"}],
        [],
    ]
    assert events[-2]["usage"]["completion_tokens"] == 2
    assert events[-1] == "[DONE]"


def test_chat_logprobs_in_both_forms(server: Server) -> None:
    want = {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}],
    }
    whole = server.chat(script(n=1), logprobs=True, top_logprobs=2).body["choices"][0]
    assert whole["logprobs"] == {"content": [want]}
    streamed = server.chat(script(n=1), logprobs=True, top_logprobs=2, stream=True).events
    assert [event["choices"][0].get("logprobs") for event in streamed[:-1]] == [None, {"content": [want]}, None]


def test_completion_logprobs_keep_their_offsets_over_chunks(server: Server) -> None:
    streamed = server.complete(script(n=3, delay=0.03), logprobs=1, stream=True).events
    shapes = [event["choices"][0]["logprobs"] for event in streamed[:3]]
    assert shapes == [
        {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [dict.fromkeys(["a", token], -0.5)], "text_offset": [i]}
        for i, token in enumerate("abc")
    ]


def test_an_engine_error_before_the_first_byte_is_a_status(server: Server) -> None:
    for stream in (False, True):
        answer = server.chat(script(fail=500), stream=stream)
        assert answer.status == 500
        assert answer.body == {"error": {"message": "scripted failure", "type": "server_error"}}


def test_an_engine_error_within_a_stream_is_an_event_and_nothing_follows(server: Server) -> None:
    answer = server.chat(script(fail=500, fail_after=2, delay=0.02), stream=True)
    assert answer.status == 200
    assert answer.raw.endswith(b'event: error\ndata: {"error":{"message":"scripted failure","type":"server_error"}}\n\n')
    assert b"[DONE]" not in answer.raw
    assert b"w1 " in answer.raw


def test_an_engine_error_after_the_keepalive_never_gives_a_second_status(server: Server) -> None:
    answer = server.chat(script(fail=500, fail_after=0, delay=0.1), stream=True)
    assert answer.status == 200
    assert answer.raw.startswith(b": prefill\n\nevent: error\n")
    assert b"HTTP/" not in answer.raw


def test_a_finish_reason_of_error_is_told(server: Server) -> None:
    assert server.chat(script(finish="error")).body["choices"][0]["finish_reason"] == "error"


def test_text_comes_back_as_it_left_the_engine(server: Server) -> None:
    text = '\U0001f600 \u4f60\u597d\u2028\x00 \\ " \r\n data: x\n\n'
    assert server.chat(script(whole_text=text)).body["choices"][0]["message"]["content"] == text
    assert server.chat(script(whole_text=text), stream=True).events[1]["choices"][0]["delta"]["content"] == text


OTHERS = {"/v1/responses": "input", "/v1/messages": "messages"}


def ask(server: Server, path: str, content: str, **more: Any) -> Answer:
    """A request to one of the other APIs."""
    messages = [{"role": "user", "content": content}]
    return server.request("POST", path, {OTHERS[path]: messages, "max_tokens": 100, **more})


def test_a_silent_stream_is_kept_alive_in_the_form_its_clients_count(server: Server) -> None:
    silent = script(n=1, delay=5.4)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        chat = pool.submit(server.chat, silent, stream=True)
        responses, messages = (pool.submit(ask, server, path, silent, stream=True) for path in OTHERS)
    answer = chat.result()
    assert answer.raw.count(b": prefill\n\n") == 2
    assert answer.raw.endswith(b"data: [DONE]\n\n")
    kinds = [event["type"] for event in responses.result().events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    kinds = [event["type"] for event in messages.result().events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]


@pytest.mark.parametrize("path", OTHERS)
def test_an_engine_error_has_the_shape_of_its_api_before_the_first_byte_and_within_a_stream(server: Server, path: str) -> None:
    failure = {"type": "api_error" if path == "/v1/messages" else "server_error", "message": "scripted failure"}
    for stream in (False, True):
        answer = ask(server, path, script(fail=500, progress=0), stream=stream)
        assert answer.status == 500
        assert answer.body["error"] == failure
    answer = ask(server, path, script(fail=500, fail_after=2, delay=0.02), stream=True)
    assert answer.status == 200
    assert b"w1 " in answer.raw
    last = answer.events[-1]
    if path == "/v1/messages":
        assert last == {"type": "error", "error": failure}
    else:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "scripted failure"}
        assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
