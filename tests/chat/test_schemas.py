"""JSON of clients in one spelling: equal for equal meaning, and nothing of it lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.schemas import MAX_DEPTH, canonical, compact, members

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
SPACES = st.lists(st.sampled_from([" ", "\n", "\t", "\r", "  "]), min_size=1).map(lambda drawn: "".join(drawn))
NEAR = st.lists(st.sampled_from([*'{}[]:,"\\ \n', "\\n", "\\ud83d", "é", "1", "-0", "1e3", "true", "nul", "NaN", "a"])).map(
    "".join
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"name":"f","description":"caf\\u00e9 \\ud83d\\ude00","parameters":{"a":[1,2.0]}}',
            '{"name": "f", "description": "café 😀", "parameters": {"a": [1, 2.0]}}',
        ),
        (" [ ] ", "[]"),
        ('{"b":{},"a":[]}', '{"b": {}, "a": []}'),
        ("[1.0,1e3,1E+3,-0,-0.0,12345678901234567890,1e999]", "[1.0, 1e3, 1E+3, -0, -0.0, 12345678901234567890, 1e999]"),
        ("[true,false,null]", "[true, false, null]"),
        (
            '"\\/ \\" \\\\ \\b\\f\\n\\r\\t \\u0000\\u001F\\u001f \\u007f \\u2028"',
            '"/ \\" \\\\ \\b\\f\\n\\r\\t \\u0000\\u001f\\u001f \x7f \u2028"',
        ),
        ('{"a":1,"a":{"a":2,"a":3}}', '{"a": 1, "a": {"a": 2, "a": 3}}'),
        ('["\\uD83DA","\\uD83D\\u0041","\\uDE00","\\uD83D\\uD83D\\uDE00"]', '["\ufffdA", "\ufffdA", "\ufffd", "\ufffd😀"]'),
        ('["\ud83d"]', '["\ufffd"]'),
        ('{"a, b: c":" , : "}', '{"a, b: c": " , : "}'),
        ('["\\\\","\\"",""]', '["\\\\", "\\"", ""]'),
    ],
)
def test_the_canonical_spelling(text: str, expected: str) -> None:
    assert canonical(text) == expected
    assert canonical(expected) == expected
    assert canonical(text.encode("utf-8", "surrogatepass")) == expected or "\ud83d" in text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "hello", "{'a': 1}", '{"a":1', '{"a" 1}', "[1 2]", "[1,]", '{"a":1,}', "[01]", "[1.]", "[+1]", "[NaN]"),
        *('{"a" :-Infinity}', '["a\n"]', '["\\x"]', '["', '["\\', "[1] x", "[1]]", "[}", "\ufeff[1 ]", "[\u00a01]", "\x0b[1 ]"),
    ],
)
def test_what_is_no_json_comes_back_unchanged(text: str) -> None:
    assert canonical(text) == text
    assert canonical(text.encode()) == text
    assert compact(text) == text
    assert members(text) is None


def test_bytes_that_are_no_utf8_become_text_all_the_same() -> None:
    assert canonical(b'{"a" : "\xff"}') == '{"a": "\ufffd"}'
    assert canonical(b"{\xff") == "{\ufffd"
    assert canonical("{\udcff") == "{\ufffd"


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a" :', "}"), ('[{"a" :', "}]")])
def test_nesting_is_read_to_its_limit_and_no_deeper(opens: str, closes: str) -> None:
    levels = opens.count("[") + opens.count("{")
    deepest = MAX_DEPTH // levels
    fits, beyond = (opens * n + "1" + closes * n for n in (deepest, deepest + 1))
    assert canonical(fits) == json.dumps(json.loads(fits))
    assert canonical(beyond) == beyond
    far = opens * 100_000 + closes * 100_000
    assert canonical(far) == far
    wide = "[" + "[1], " * 1000 + "[]]"
    assert canonical(wide) == wide


def test_numbers_of_any_length_are_kept() -> None:
    digits = "9" * 10_000
    assert canonical(f"[{digits}]") == f"[{digits}]"
    assert members(f'{{"n": {digits}}}') == [("n", None, digits)]


@given(VALUES, SPACES, st.booleans())
def test_two_spellings_of_one_value_give_one_text(value: Any, spaces: str, ascii_only: bool) -> None:
    plain = json.dumps(value, ensure_ascii=False)
    other = json.dumps(value, ensure_ascii=ascii_only, indent=spaces, separators=(f"{spaces},{spaces}", f"{spaces}:{spaces}"))
    assert canonical(plain) == canonical(other) == plain
    assert canonical(other.encode()) == plain
    assert json.loads(canonical(other)) == value


@given(VALUES, SPACES)
def test_compact_takes_white_space_and_nothing_else(value: Any, spaces: str) -> None:
    spaced = json.dumps(value, indent=spaces, separators=(f"{spaces},{spaces}", f"{spaces}:{spaces}"))
    assert compact(spaced) == json.dumps(value, separators=(",", ":"))


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=5), SPACES, st.booleans())
def test_members_are_the_object_in_order(value: dict[str, Any], spaces: str, ascii_only: bool) -> None:
    found = members(json.dumps(value, ensure_ascii=ascii_only, indent=spaces))
    assert found is not None
    assert [key for key, _, _ in found] == list(value)
    assert {key: json.loads(spelt) for key, _, spelt in found} == value
    assert all(text == (value[key] if isinstance(value[key], str) else None) for key, text, _ in found)
    assert all(spelt == compact(spelt) for _, _, spelt in found)


def _refuse(name: str) -> None:
    raise ValueError(name)


@given(NEAR)
def test_any_text_has_a_reading(text: str) -> None:
    """The same as Python's parser has, but for its constants that are no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError:
        assert canonical(text) == text == compact(text)
        assert members(text) is None
        return
    clean = json.loads(re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(value, ensure_ascii=False)))
    assert json.loads(canonical(text)) == clean
    canonical(text).encode()
    assert (members(text) is not None) == isinstance(value, dict)
    assert json.loads(compact(text)) == value


def test_members_of_an_object() -> None:
    spelt = ' {"a" : "x\\n\\ud83d", "b": {"c" : [1.0 , " \\u00e9 "]}, "n":1e3, "a\\u0062": null, "": [] } '
    assert members(spelt) == [
        ("a", "x\n\ufffd", '"x\\n\\ud83d"'),
        ("b", None, '{"c":[1.0," \\u00e9 "]}'),
        ("n", None, "1e3"),
        ("ab", None, "null"),
        ("", None, "[]"),
    ]
    assert members("{}") == []
    assert members(" [1] ") is None
    assert members('"{}"') is None


def test_of_a_member_that_comes_twice_the_last_counts_at_the_first_place() -> None:
    assert members('{"a":1,"b":2,"\\u0061":"x"}') == [("a", "x", '"x"'), ("b", None, "2")]


@pytest.mark.parametrize("function", [canonical, compact, members])
@pytest.mark.parametrize("piece", ['"\\', '"a', '"\\\n', "[", 'a"b', '{"a":', "\\n", "1,", '{"a":"\\n"},'])
def test_the_work_is_linear_in_any_text(function: Callable[[str], object], piece: str) -> None:
    # A scan that starts anew at every character of these would take hours.
    function("[" + piece * 200_000)
    function('["' + piece * 200_000 + '"]')
