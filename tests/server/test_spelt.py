"""What a prompt shows of a body is the body's own spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.schemas import canonical
from ds4batch.server.apis import chat_input, messages, responses
from ds4batch.server.apis.served import Served
from ds4batch.server.errors import ApiError
from ds4batch.server.jsonbody import MAX_DEPTH, parse_object
from ds4batch.server.spelt import dumps

SERVED = Served("m", 100, 4096, 256, False)
NUMBERS = [
    "1.0",
    "1e3",
    "1E+3",
    "-0",
    "-0.0",
    "0.10",
    "1e400",
    "-1e-400",
    "9" * 5000,
    "123456789012345678901234567890",
    "2.50",
    "5e-324",
]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_a_tool_is_shown_as_it_was_spelt(number: str) -> None:
    schema = f'{{"name":"f","parameters":{{"type":"object","minimum":{number},"enum":[{number}]}}}}'
    (chat,) = chat_input.read_request(
        parse_object(f'{{"messages":[{{}}],"tools":[{{"type":"function","function":{schema}}}]}}'.encode()), SERVED
    ).conversation.tools
    (flat,) = responses.read_request(parse_object(f'{{"input":"x","tools":[{schema}]}}'.encode()), SERVED).conversation.tools
    (other,) = messages.read_request(
        parse_object(f'{{"messages":[{{}}],"tools":[{schema.replace("parameters", "input_schema")}]}}'.encode()), SERVED
    ).conversation.tools
    assert chat.schema == flat.schema == canonical(schema)
    assert other.schema == canonical(schema).replace("parameters", "input_schema")


def test_a_member_that_came_twice_is_shown_twice_and_counts_once() -> None:
    schema = '{"name":"f","a":1,"cache_control":{},"a":2,"parameters":{"properties":{"q":{},"q":{"type":"string"}}}}'
    body = parse_object(f'{{"messages":[{{}}],"tools":[{schema}]}}'.encode())
    (tool,) = chat_input.read_request(body, SERVED).conversation.tools
    assert tool.schema == canonical(schema.replace('"cache_control":{},', ""))
    assert tool.strings == {"q"}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_a_call_is_shown_as_it_was_spelt(number: str) -> None:
    call = f'{{"id":"c","function":{{"name":"f","arguments":{{"n":{number}}}}}}}'
    chat = chat_input.read_request(
        parse_object(f'{{"messages":[{{"role":"assistant","tool_calls":[{call}]}}]}}'.encode()), SERVED
    )
    assert chat.conversation.messages[0].calls[0].arguments == f'{{"n":{number}}}'
    block = f'{{"type":"tool_use","id":"c","name":"f","input":{{"n":{number}}}}}'
    said = messages.read_request(parse_object(f'{{"messages":[{{"role":"assistant","content":[{block}]}}]}}'.encode()), SERVED)
    assert said.conversation.messages[0].calls[0].arguments == f'{{"n":{number}}}'
    item = f'{{"type":"function_call","call_id":"c","name":"f","arguments":{{"n":{number}}}}}'
    sent = responses.read_request(parse_object(f'{{"input":[{item}]}}'.encode()), SERVED)
    assert sent.conversation.messages[0].calls[0].arguments == f'{{"n":{number}}}'


@pytest.mark.parametrize("first", ['"x"', "null", "{}", "[]"])
def test_content_twice_in_a_message_of_anthropic_is_refused_by_name(first: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":"a"}},{{"role":"user","content":{first},"content":"b"}}]}}'
    with pytest.raises(ApiError, match=r"messages\[1\]\.content: is there twice") as caught:
        messages.read_request(parse_object(body.encode()), SERVED)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    chat = chat_input.read_request(parse_object(body.replace(first, '"x"').encode()), SERVED)
    assert chat.conversation.messages[1].text == "b"  # elsewhere the last one counts


@pytest.mark.parametrize("wrap", [("[", "]"), ('{"a":', "}")])
def test_a_member_that_does_not_count_is_no_deeper_than_others(wrap: tuple[str, str]) -> None:
    def doubled(levels: int) -> bytes:
        return f'{{"x":{wrap[0] * levels}1{wrap[1] * levels},"x":1}}'.encode()

    assert json.loads(dumps(parse_object(doubled(MAX_DEPTH)))) == {"x": 1}
    with pytest.raises(ApiError, match="nested deeper"):
        parse_object(doubled(MAX_DEPTH + 1))


NUMBER = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(lambda text: json.dumps(text, ensure_ascii=False))
JSON = st.recursive(
    NUMBER | TEXT | st.sampled_from(["true", "false", "null", "{}", "[]"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(st.tuples(TEXT, inner), min_size=1, max_size=3).map(
            lambda pairs: "{" + ",".join(f"{k}:{v}" for k, v in pairs) + "}"
        ),
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_value_is_written_as_it_was_read(text: str) -> None:
    value: Any = parse_object(f'{{"x":{text}}}'.encode())["x"]
    assert canonical(dumps(value, spaced=True)) == dumps(value, spaced=True) == canonical(text)
    assert canonical(dumps(value)) == canonical(text)
