"""Which calls belong to a session: those whose text occurs in its own, however many others are known."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ds4batch.engine import tool_blocks
from ds4batch.engine.tool_blocks import ToolBlocks
from ds4batch.kvstore.trailer import read_tool_map


def block(name: str, say: str = "") -> str:
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {{"say": "{say}"}}}}\n</tool_call>'


def saved(blocks: ToolBlocks, text: str) -> dict[str, str]:
    """What the trailer of a session of `text` holds."""
    return read_tool_map(blocks.trailer(text), 1 << 20).texts


def test_a_session_gets_the_calls_that_occur_in_its_text_with_all_their_ids() -> None:
    blocks = ToolBlocks(100)
    blocks.remember(["a", "b"], block("look"))
    blocks.remember(["c"], block("count", "é" * 300))
    blocks.remember(["d"], block("look"))  # another turn that reads alike
    blocks.remember(["e"], block("rest"))
    text = "system" + block("look") + "result" + block("count", "é" * 300) + "and so on"
    assert saved(blocks, text) == {"a": block("look"), "b": block("look"), "d": block("look"), "c": block("count", "é" * 300)}
    assert blocks.trailer("system") == b""
    assert blocks.trailer(block("look")[:-1].replace("look", "lock")) == b""


def test_a_call_whose_last_token_was_not_evaluated_belongs_to_its_session() -> None:
    blocks = ToolBlocks(100)
    blocks.remember(["a"], block("look", "there"))
    blocks.remember(["b"], block("look", "there and then"))
    text = "system" + block("look", "there")
    assert saved(blocks, text.removesuffix("</tool_call>")) == {"a": block("look", "there")}
    assert saved(blocks, text.removesuffix(">") + "result") == {}
    blocks.remember(["c"], block("look", "elsewhere" * 9))
    assert "c" not in saved(blocks, text[:30])  # a call that was only begun may become any


@pytest.mark.parametrize("length", [8, 15, 16, 17, 64, 1000])
def test_a_text_of_any_length_is_found_at_the_beginning_the_end_and_again_in_itself(length: int) -> None:
    blocks = ToolBlocks(100)
    text = ("<tool_call>" + "ab" * length)[:length]
    blocks.remember(["a"], text)
    blocks.remember(["longer"], text + "x" * 100)
    for session in (text, text + "end", "begin" + text, "<tool_c" + text):
        assert saved(blocks, session) == {"a": text}
    assert saved(blocks, "begin" + text + "x" * 100) == {"a": text, "longer": text + "x" * 100}


def test_what_was_stored_or_saved_last_is_kept() -> None:
    blocks = ToolBlocks(2)
    blocks.remember(["a"], block("one"))
    blocks.remember(["b"], block("two"))
    assert saved(blocks, block("one")) == {"a": block("one")}
    blocks.remember(["c"], block("three"))
    assert saved(blocks, block("one") + block("two") + block("three")) == {"a": block("one"), "c": block("three")}
    blocks.remember(["d", "e", "f"], block("four"))
    assert saved(blocks, block("four")) == {"e": block("four"), "f": block("four")}


def test_text_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_blocks, "MAX_CHARS", 1000)
    blocks = ToolBlocks(1000)
    for i in range(50):
        blocks.remember([f"id{i}"], block("look", f"{i:03}" + "x" * 100))
    assert 2 <= len(blocks) <= 5
    blocks.remember(["large"], block("look", "y" * 2000))
    assert len(blocks) == 0


def test_nothing_is_kept_where_nothing_may_be() -> None:
    blocks = ToolBlocks(0)
    blocks.remember(["a"], block("look"))
    blocks.learn({"b": block("look")})
    assert (len(blocks), blocks.trailer(block("look"))) == (0, b"")


def test_what_a_trailer_says_does_not_replace_what_was_sampled() -> None:
    blocks = ToolBlocks(10)
    blocks.remember(["a"], block("look"))
    blocks.learn({"a": block("count"), "b": block("count")})
    assert saved(blocks, block("look") + block("count")) == {"a": block("look"), "b": block("count")}
    blocks.remember(["a"], block("rest"))
    assert saved(blocks, block("look") + block("rest")) == {"a": block("rest")}


@given(st.lists(st.text("ab<", min_size=8, max_size=40), max_size=12), st.lists(st.integers(0, 11) | st.text("ab<", max_size=9)))
def test_exactly_what_occurs_is_found(texts: list[str], parts: list[int | str]) -> None:
    blocks = ToolBlocks(100)
    for i, text in enumerate(texts):
        blocks.remember([str(i)], text)
    session = "".join(part if isinstance(part, str) else texts[part % len(texts)] if texts else "" for part in parts)
    ends = {session[-n:] for n in range(8, len(session) + 1)}
    expected = {str(i): t for i, t in enumerate(texts) if t in session or any(t.startswith(end) for end in ends)}
    assert saved(blocks, session) == expected


def test_the_search_does_not_grow_with_what_other_sessions_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts looks at candidates: those of a session with 50 calls, beside 50 and beside 2,000 others."""
    looks = []

    class Counting(str):
        def startswith(self, *args):  # type: ignore[no-untyped-def,override]
            looks.append(args)
            return super().startswith(*args)

    def cost(others: int) -> int:
        blocks = ToolBlocks(10_000)
        for i in range(others):
            blocks.remember([f"other{i}"], block("look", f"{i} elsewhere " * 9))
        own = [block("look", f"here {i} " * 9) for i in range(50)]
        for i, text in enumerate(own):
            blocks.remember([f"own{i}"], text)
        looks.clear()
        assert len(saved(blocks, Counting("system" + "result".join(own) + "the end"))) == 50
        return len(looks)

    assert cost(2000) <= cost(50) + 5


def test_a_session_may_be_saved_while_calls_are_made() -> None:
    blocks = ToolBlocks(50)
    blocks.remember(["mine"], block("mine"))
    failures: list[Exception] = []
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            try:
                assert saved(blocks, "x" + block("mine"))["mine"] == block("mine")
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(3000):
        blocks.remember([f"id{i % 49}"], block("look", str(i)))
        blocks.remember(["mine"], block("mine")) if not i % 40 else None
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


class Memory(RuleBasedStateMachine):
    """Against a list of calls in the order of their use, and `in`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = ToolBlocks(4)
        self.model: dict[str, str] = {}

    @rule(ids=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True), name=st.sampled_from(["x", "y", "xy"]))
    def remember(self, ids: list[str], name: str) -> None:
        self.blocks.remember(ids, block(name))
        for call_id in ids:
            self.model.pop(call_id, None)
            self.model[call_id] = block(name)
        for call_id in list(self.model)[:-4]:
            del self.model[call_id]

    @rule(names=st.lists(st.sampled_from(["x", "y", "xy", "z"]), max_size=2))
    def save(self, names: list[str]) -> None:
        text = "-".join(map(block, names))
        found = saved(self.blocks, text)
        assert found == {call_id: one for call_id, one in self.model.items() if one in text}
        for call_id in found:
            self.model[call_id] = self.model.pop(call_id)

    @invariant()
    def nothing_is_left_of_what_was_forgotten(self) -> None:
        assert len(self.blocks) == len(self.model)
        assert set(self.blocks._by_text) == set(self.model.values())
        expected = sum(64 + len(call_id) for call_id in self.model) + sum(map(len, set(self.model.values())))
        assert self.blocks._chars == expected
        filed = [one.text for some in self.blocks._filed.values() for one in some]
        assert sorted(filed) == sorted(set(self.model.values()))
        assert sum(self.blocks._leads.values()) == len(filed)
        assert (len(self.blocks._stems) == 0) == (not filed)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
