"""What counts as a token, and which streams are rejected under which name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chat_stream import ChatStream, Events, Rejection, StreamRejected
from bench.server_metrics import difference, histogram, parse_metrics, speculation, total
from ds4batch.repl.sse import Event


def delta(**fields: Any) -> Event:
    return Event("message", json.dumps({"choices": [{"index": 0, "delta": fields}]}))


def finish(reason: str | None) -> Event:
    return Event("message", json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))


def usage(**fields: Any) -> Event:
    return Event("message", json.dumps({"choices": [], "usage": fields}))


DONE = Event("message", "[DONE]")


def read(*events: Event) -> ChatStream:
    stream = ChatStream()
    for second, event in enumerate(events):
        stream.accept(event, float(second))
    return stream


def reason_of(*events: Event, max_tokens: int = 8, exact: bool = False) -> str:
    with pytest.raises(StreamRejected) as caught:
        read(*events).check(max_tokens, exact)
    assert caught.value.detail
    return caught.value.reason


def test_role_chunks_empty_text_and_usage_are_no_tokens() -> None:
    stream = read(
        delta(role="assistant", content=""),
        delta(content=None),
        delta(content=""),
        delta(content="a"),
        delta(content="b"),
        finish("stop"),
        usage(completion_tokens=2),
        DONE,
    )
    assert stream.token_times == [3.0, 4.0]
    assert stream.done_at == 7.0
    stream.check(8, exact=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"content": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_thinking_text_and_tool_calls_are_tokens(fields: dict[str, Any]) -> None:
    assert read(delta(**fields)).token_times == [0.0]


def test_history_gets_the_visible_text_only() -> None:
    stream = read(delta(reasoning_content="secret"), delta(content="seen "), delta(content="twice"))
    assert "".join(stream.content) == "seen twice"


def test_output_tokens_come_from_usage_and_never_from_counting_chunks() -> None:
    stream = read(
        delta(content="three tokens at once"),
        finish("stop"),
        usage(completion_tokens=3, prompt_tokens=9, prompt_tokens_details={"cached_tokens": 4}),
        DONE,
    )
    assert (stream.output_tokens, stream.prompt_tokens, stream.cached_tokens) == (3, 9, 4)


def test_usage_without_details_counts_no_cached_tokens() -> None:
    assert read(usage(completion_tokens=1, prompt_tokens_details=None)).cached_tokens == 0


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_the_three_finish_reasons_are_accepted(reason: str) -> None:
    read(delta(content="a"), finish(reason), usage(completion_tokens=1), DONE).check(8, exact=False)


def test_each_defect_is_rejected_under_its_own_name() -> None:
    text, end, count = delta(content="a"), finish("stop"), usage(completion_tokens=1)
    assert reason_of(text, end, count) == Rejection.NO_DONE
    assert reason_of(text, count, DONE) == Rejection.BAD_FINISH_REASON
    assert reason_of(text, finish("content_filter"), count, DONE) == Rejection.BAD_FINISH_REASON
    assert reason_of(text, end, DONE) == Rejection.USAGE_MISSING
    assert reason_of(text, end, usage(completion_tokens=0), DONE) == Rejection.USAGE_OUT_OF_RANGE
    assert reason_of(text, end, usage(completion_tokens=9), DONE) == Rejection.USAGE_OUT_OF_RANGE
    assert reason_of(text, end, usage(completion_tokens="1"), DONE) == Rejection.USAGE_OUT_OF_RANGE
    assert reason_of(text, end, usage(prompt_tokens=1), DONE) == Rejection.USAGE_OUT_OF_RANGE
    assert reason_of(delta(role="assistant"), end, count, DONE) == Rejection.NO_TOKEN
    assert reason_of(text, end, usage(completion_tokens=7), DONE, exact=True) == Rejection.WRONG_TOKEN_COUNT
    assert reason_of(text, Event("error", "{}")) == Rejection.ERROR_EVENT
    assert reason_of(text, Event("message", '{"error": {"message": "boom"}}')) == Rejection.ERROR_EVENT


@pytest.mark.parametrize("data", ['{"choices": [', "word", "[1]", '{"choices": {"a": 1}}', '{"choices": [1]}'])
def test_a_chunk_that_is_no_chunk_is_broken_json(data: str) -> None:
    assert reason_of(Event("message", data)) == Rejection.BROKEN_JSON


def test_a_null_error_is_no_error() -> None:
    assert read(Event("message", '{"error": null, "choices": []}')).token_times == []


BYTES = (
    ": keepalive\n\nevent: error\r\ndata: one\r\n\r\ndata:two\ndata: lines\n\nid: 7\nretry: 3\n\n"
    'data: {"t": "gr\u00fc\u00df \U0001f600"}\n\n: prefill\n\ndata: [DONE]\n\ndata: cut off'
).encode()
EVENTS = [
    Event("error", "one"),
    Event("message", "two\nlines"),
    Event("message", '{"t": "gr\u00fc\u00df \U0001f600"}'),
    Event("message", "[DONE]"),
]


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield data[low:high]


@given(st.lists(st.integers(0, len(BYTES)), max_size=30).map(sorted))
def test_events_do_not_depend_on_how_the_network_cut_them(cuts: list[int]) -> None:
    events = Events()
    assert [event for piece in pieces(BYTES, cuts) for event in events.feed(piece)] == EVENTS


def test_bytes_that_are_not_utf8_reject_the_stream() -> None:
    with pytest.raises(StreamRejected, match=r"broken_json.*UTF-8"):
        Events().feed(b"data: \xff\xfe\n\n")


PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 2
vllm:num_requests_running{{engine="1"}} 3
# TYPE h_seconds histogram
h_seconds_bucket{{le="0.1"}} {a}
h_seconds_bucket{{le="0.2"}} {b}
h_seconds_bucket{{le="0.4"}} {b}
h_seconds_bucket{{le="+Inf"}} {c}
h_seconds_sum {s}
h_seconds_count {c}
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total {d}
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total {d}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total {e}
"""


def page(**values: float) -> dict[str, float]:
    return parse_metrics(PAGE.format(**values))


def test_server_figures_are_the_difference_over_the_load() -> None:
    delta = difference(page(a=5, b=5, c=5, s=0.1, d=4, e=1), page(a=5, b=13, c=15, s=2.1, d=14, e=8))
    assert total(delta, "vllm:num_requests_running") == 0.0
    assert total(page(a=0, b=0, c=0, s=0, d=0, e=0), "vllm:num_requests_running") == 5.0
    assert total(delta, "no_such_metric") is None
    queue = histogram(delta, "h_seconds")
    assert queue is not None
    assert queue.n == 10
    assert queue.mean == pytest.approx(200.0)
    assert queue.p50 == pytest.approx(100 + 100 * 5 / 8)  # the fifth of eight in the bucket from 100 to 200 ms
    assert queue.p90 is None  # lies beyond the last finite edge
    drafts = speculation(delta)
    assert drafts is not None
    assert (drafts.drafts, drafts.accepted) == (10, 7)
    assert drafts.rate == pytest.approx(0.7)
    assert drafts.mean_len == pytest.approx(1.7)


def test_a_server_that_observed_nothing_has_no_summary() -> None:
    same = page(a=1, b=1, c=1, s=1, d=1, e=1)
    assert histogram(difference(same, same), "h_seconds") is None
    assert speculation(difference(same, same)) is None
