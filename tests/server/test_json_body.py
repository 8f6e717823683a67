from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.server.errors import ApiError
from ds4batch.server.jsonbody import MAX_DEPTH, parse_object


def refused(data: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        parse_object(data)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"x"', b"3", b'{"a":}', b'{"a":1}x', b"\xff\xfe{}", b'{"a":"\n"}', b'{"model":"a","model":{'],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    assert refused(data).startswith("invalid JSON request")


def test_the_last_of_duplicate_members_wins() -> None:
    assert parse_object(b'{"a":1,"a":{"b":2},"a":[3]}') == {"a": [3]}


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"\uD83DA", "\ufffdA"),
        (rb"\uD83D\u0041", "\ufffdA"),
        (rb"\uDE00", "\ufffd"),
        (rb"\uD83D\uDE00", "\U0001f600"),
        (rb"\uD83D\uD83D\uDE00", "\ufffd\U0001f600"),
        (rb"a\u0000b", "a\x00b"),
        (rb"\\uD83D", "\\uD83D"),
    ],
)
def test_lone_surrogates_become_the_replacement_character(escaped: bytes, text: str) -> None:
    data = b'{"a":"' + escaped + b'","b":["' + escaped + b'",[{"' + escaped + b'":1}]]}'
    assert parse_object(data) == {"a": text, "b": [text, [{text: 1}]]}


def test_numbers_of_any_size_are_taken() -> None:
    body = parse_object(b'{"a":NaN,"b":-Infinity,"c":1e999,"d":' + b"9" * 6000 + b',"e":12345678901234567890123}')
    assert body["a"] != body["a"]
    assert (body["b"], body["c"], body["d"]) == (float("-inf"), float("inf"), float("inf"))
    assert body["e"] == 12345678901234567890123


@pytest.mark.parametrize("wrap", [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_is_refused_beyond_the_limit_and_only_there(wrap: tuple[bytes, bytes]) -> None:
    def nested(levels: int) -> bytes:
        return b'{"x":' + wrap[0] * levels + b"1" + wrap[1] * levels + b"}"

    assert "x" in parse_object(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 400, 100_000):
        assert "nested deeper than 256 levels" in refused(nested(levels))


def test_a_flood_of_empty_lists_is_refused_before_it_is_parsed() -> None:
    assert "more than 1000000 objects and lists" in refused(b'{"x":[' + b"[]," * 1_000_000 + b"1]}")


def test_brackets_in_strings_are_no_nesting() -> None:
    assert parse_object(json.dumps({"a": "[" * 5000}).encode())["a"] == "[" * 5000


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_object(b"\xef\xbb\xbf{}") == {}


_TEXT = st.text(alphabet=st.characters(exclude_categories=[]), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(_TEXT, _VALUES, max_size=5))
def test_any_object_comes_back_equal_but_for_surrogates_and_encodes_as_utf8(body: dict[str, Any]) -> None:
    parsed = parse_object(json.dumps(body).encode())
    json.dumps(parsed, ensure_ascii=False).encode()
    if not any(0xD800 <= ord(c) < 0xE000 for c in json.dumps(body, ensure_ascii=False)):
        assert parsed == body
