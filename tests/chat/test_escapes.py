"""Data inside markup: it cannot close what holds it, is otherwise untouched, and can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.escapes import attribute, escape, unattribute, unescape

ENDS = (
    "</tool_result>",
    "</｜DSML｜parameter>",
    "</｜DSML｜ parameter>",
    "</arg_value>",
    "</tool_response>",
    "</parameter>",
    "<lt;>",  # looks like what escapes it
    "<amp;lt;x",
    "<",
)


def bodies(end: str) -> st.SearchStrategy[str]:
    """Texts of what is near an end or an escape of one, in any order and overlapping."""
    parts = st.sampled_from(["&", "amp;", "lt;", "&lt;", "&amp;", "<", end, end[1:], end[: len(end) // 2], end[-1]])
    return st.lists(parts | st.text(max_size=3), max_size=12).map("".join)


CASES = st.sampled_from(ENDS).flatmap(lambda end: st.tuples(st.just(end), bodies(end)))


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a <b> & c", "a <b> & c"),
        ("a < b && c", "a < b && c"),
        ("&lt; &amp; &amp;lt;", "&lt; &amp; &amp;lt;"),
        ("x</tool_result>y", "x&lt;/tool_result>y"),
        ("&lt;/tool_result>", "&amp;lt;/tool_result>"),
        ("&amp;amp;lt;/tool_result>", "&amp;amp;amp;lt;/tool_result>"),
        ("&amp;&lt;/tool_result>", "&amp;&amp;lt;/tool_result>"),
        ("<</tool_result></tool_result>", "<&lt;/tool_result>&lt;/tool_result>"),
        ("</tool_result", "</tool_result"),
        ("/tool_result>", "/tool_result>"),
        ("</TOOL_RESULT>", "</TOOL_RESULT>"),
        ("", ""),
    ],
)
def test_only_the_end_and_what_looks_like_its_escape_change(text: str, escaped: str) -> None:
    assert escape(text, "</tool_result>") == escaped
    assert unescape(escaped, "</tool_result>") == text


@given(CASES)
def test_an_escaped_body_holds_no_end_and_can_be_read_back(case: tuple[str, str]) -> None:
    end, text = case
    escaped = escape(text, end)
    assert end not in escaped
    assert unescape(escaped, end) == text
    assert unescape(escape(escaped, end), end) == escaped


@given(CASES)
def test_a_body_without_the_end_of_its_tag_is_untouched(case: tuple[str, str]) -> None:
    end, text = case
    text = text.replace(end[1:], "")
    if end[1:] not in text:
        assert escape(text, end) == unescape(text, end) == text


@pytest.mark.parametrize("end", ["", ">", "/x>", "<a<", "<a&b>", "&<"])
@pytest.mark.parametrize("function", [escape, unescape])
def test_what_is_no_closing_tag_is_refused(end: str, function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="is no closing tag"):
        function(f"x{end[1:]}", end)


def test_the_work_is_linear_even_in_disguises() -> None:
    # A quadratic scan of these would take hours.
    for text in ("&amp;" + "amp;" * 300_000, "&" * 1_000_000, "&amp;lt;/x>" * 100_000, "&lt;" * 300_000):
        assert unescape(escape(text + "</x>", "</x>"), "</x>") == text + "</x>"


@given(st.text(alphabet="&<>\"'aé;", max_size=20) | st.lists(st.sampled_from(["&amp;", "lt;", "&", "<", '"'])).map("".join))
def test_attributes_can_be_read_back_and_cannot_end(text: str) -> None:
    written = attribute(text)
    assert not set('<>"') & set(written)
    assert unattribute(written) == text


def test_attributes_are_decoded_once() -> None:
    assert attribute('a & <b> "c"') == "a &amp; &lt;b&gt; &quot;c&quot;"
    assert unattribute("&amp;lt; &apos;&nbsp;") == "&lt; '&nbsp;"
