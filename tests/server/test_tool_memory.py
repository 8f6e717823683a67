"""Which turns of a history are replayed as they were sampled: from memory, from the checkpoints on disk, or not at all."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.conversation import Call, Conversation, Message, Tool
from ds4batch.chat.events import TurnCall
from ds4batch.kvstore import reader
from ds4batch.kvstore.format import FLAG_TOOL_MAP
from ds4batch.kvstore.trailer import pack_tool_map
from ds4batch.server import tool_memory, tool_trailers
from ds4batch.server.tool_memory import Replay, ToolMemory
from ds4batch.server.tool_trailers import ToolTrailers
from tests.kvstore.rig import MortalDisk, Time, files, open_store, save
from tests.scripted.spellings import COUNT, LOOK, NO_ARGUMENTS, SCHEMAS, SPELLINGS

TEXT = "\n\n<tool_call>as it was sampled</tool_call>"
TOOLS = [Tool(name, json.dumps({"name": name}), schema) for name, schema in SCHEMAS.items()]
ROOMY = 1000


def history(*turns: Sequence[Call]) -> Conversation:
    """A conversation whose answers made these calls."""
    messages = [Message("user", "go")]
    for calls in turns:
        messages += [Message("assistant", "so", calls=tuple(calls)), *(Message("tool", "x", call_id=one.id) for one in calls)]
    return Conversation(messages, TOOLS)


def raws(memory: ToolMemory, *turns: Sequence[Call], grammar: str = "hermes") -> tuple[list[str | None], Replay]:
    """What stands for each turn, and the counts."""
    asked = history(*turns)
    messages, replay = memory.attach(asked, grammar)
    assert [(m.role, m.text, m.calls) for m in messages] == [(m.role, m.text, m.calls) for m in asked.messages]
    return [message.raw for message in messages if message.calls], replay


def knowing(*calls: tuple[str, str, str], text: str = TEXT) -> ToolMemory:
    """A memory of one turn with calls of (id, name, arguments)."""
    memory = ToolMemory(ROOMY)
    memory.remember([TurnCall(*one, complete=True) for one in calls], text)
    return memory


# meaning


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ('{"a": 1, "b": {"c": [1, 2]}}', '{"b":{"c":[1,2]},"a":1}'),
        ('{"a": "é\\n/"}', '{"a":"\\u00e9\\u000a\\/"}'),
        ('{"a": "\U0001f600"}', '{"a":"\\ud83d\\ude00"}'),
        ('{"a": 1.0, "b": 100, "c": 0.1}', '{"a":1,"b":1e2,"c":0.10}'),
        ('{"a": 123456789012345678901234567890}', '{"a":123456789012345678901234567890}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ("{}", ""),
        ("", "{}"),
        ('{"broken": ', '{"broken": '),
        ('{"input": "*** Begin\\n+ \\u00e9"}', "*** Begin\n+ é"),
        ('{"patch": "5"}', "5"),
        ('{"input": "{}"}', "{}"),
        ('{"input": ""}', ""),
        ('{"input": "x"}', '{"input": "x"}'),
    ],
)
def test_a_call_that_says_the_same_is_replayed_as_it_was_sampled(sampled: str, sent: str) -> None:
    assert raws(knowing(("a", "f", sampled)), [Call("a", "f", sent)]) == ([TEXT], Replay(replayed=1))


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": [0]}', '{"a": [false]}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": [1, 2]}', '{"a": [1]}'),
        ('{"a": "x"}', '{"A": "x"}'),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
        ('{"broken": ', '{"broken":'),
        ('{"input": "x", "more": 1}', "x"),
        ('{"input": 5}', "5"),
        ('{"input": "x"}', "y"),
        ('{"input": "x"}', ""),
        ('{"a": ' + "[" * 400 + "]" * 400 + "}", '{"a": ' + "[" * 401 + "]" * 401 + "}"),
        ("[" * 100_000, "[" * 100_001),
    ],
    ids=lambda text: text[:30],
)
def test_a_call_that_says_something_else_is_written_anew(sampled: str, sent: str) -> None:
    assert raws(knowing(("a", "f", sampled)), [Call("a", "f", sent)]) == ([None], Replay(rewritten=1))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\u00e9", max_size=2), inner, max_size=3),
    max_leaves=6,
)


def spelt(value: Any, ascii_only: bool, spaced: bool, backwards: bool) -> str:
    def turned(one: Any) -> Any:
        if isinstance(one, dict):
            return {k: turned(v) for k, v in (reversed(one.items()) if backwards else one.items())}
        return [turned(item) for item in one] if isinstance(one, list) else one

    return json.dumps(
        turned(value), ensure_ascii=ascii_only, indent=1 if spaced else None, separators=None if spaced else (",", ":")
    )


@given(st.dictionaries(st.text("abc", max_size=2), values, max_size=4), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_no_spelling_of_json_changes_what_it_says(arguments: dict[str, Any], how: tuple[bool, bool, bool]) -> None:
    sampled = json.dumps(arguments, ensure_ascii=False)
    assert raws(knowing(("a", "f", sampled)), [Call("a", "f", spelt(arguments, *how))]) == ([TEXT], Replay(replayed=1))


@given(values, values)
def test_two_values_are_alike_when_their_json_is(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert tool_memory._alike(one, other) == same


# all or nothing


TWO = [("a", "f", '{"x": 1}'), ("b", "g", "{}")]
SENT = [Call(*one) for one in TWO]


@pytest.mark.parametrize(
    ("sent", "missing"),
    [
        (SENT[:1], 0),
        (SENT[1:], 0),
        (SENT[::-1], 0),
        ([*SENT, SENT[1]], 0),
        ([SENT[0], Call("unknown", "g", "{}")], 1),
        ([Call("unknown", "f", '{"x": 1}'), SENT[1]], 1),
        ([SENT[0], Call("b", "f", "{}")], 0),
        ([SENT[0], Call("b", "g", '{"y": 0}')], 0),
        ([SENT[0], Call("other", "g", "{}")], 0),
        ([Call("", "f", '{"x": 1}'), Call("", "g", "{}")], 2),
    ],
)
def test_a_turn_that_is_not_whole_is_written_anew(sent: list[Call], missing: int) -> None:
    memory = knowing(*TWO)
    memory.remember([TurnCall("other", "g", "{}")], TEXT + "of another turn")
    assert raws(memory, sent) == ([None], Replay(rewritten=1, missing=missing))
    assert raws(memory, SENT) == ([TEXT], Replay(replayed=1))


def test_each_turn_of_a_history_stands_for_itself() -> None:
    memory = knowing(*TWO)
    memory.remember([TurnCall("c", "g", "{}")], "third")
    found, replay = raws(memory, SENT, [Call("gone", "f", "{}")], [Call("c", "g", "{}")], [Call("c", "g", '{"x": 1}')])
    assert found == [TEXT, None, "third", None]
    assert replay == Replay(replayed=2, rewritten=2, missing=1)


def test_what_has_its_text_already_is_left_alone() -> None:
    memory = knowing(*TWO)
    asked = Conversation([Message("assistant", calls=tuple(SENT), raw="given")])
    assert memory.attach(asked, "hermes") == ([asked.messages[0]], Replay())


def test_the_last_text_of_an_id_counts() -> None:
    memory = knowing(("a", "f", "{}"))
    memory.remember([TurnCall("a", "f", "{}")], "later")
    assert raws(memory, [Call("a", "f", "{}")])[0] == ["later"]
    assert len(memory) == 1


# limits


def remembered(memory: ToolMemory, ids: Sequence[str]) -> list[str]:
    return [call_id for call_id in ids if call_id in memory._blocks]


def test_the_calls_not_used_for_longest_go_first() -> None:
    memory = ToolMemory(3)
    for call_id in "abc":
        memory.remember([TurnCall(call_id, "f", "{}")], TEXT + call_id)
    assert raws(memory, [Call("a", "f", "{}")])[1].replayed == 1
    memory.remember([TurnCall("d", "f", "{}")], TEXT + "d")
    assert remembered(memory, "abcd") == ["a", "c", "d"]
    memory.remember([TurnCall(call_id, "f", "{}") for call_id in "efgh"], TEXT)
    assert remembered(memory, "acdefgh") == ["f", "g", "h"]
    assert raws(memory, [Call(call_id, "f", "{}") for call_id in "efgh"])[1] == Replay(rewritten=1, missing=1)


def test_text_is_bounded_and_a_turns_text_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_memory, "MAX_BYTES", 2000)
    memory = ToolMemory(ROOMY)
    memory.remember([TurnCall(call_id, "f", "{}") for call_id in "abcdefgh"], "x" * 1000)
    assert remembered(memory, "abcdefgh") == list("abcdefgh")
    memory.remember([TurnCall("i", "f", "{}")], "x" * 500)
    assert "i" in memory._blocks
    assert 0 < len(memory) < 9
    memory.remember([TurnCall("j", "f", "{}")], "x" * 5000)
    assert (len(memory), memory._bytes) == (0, 0)


def test_nothing_is_remembered_where_nothing_may_be(tmp_path: Path) -> None:
    stored(tmp_path, {"a": TEXT})
    memory = ToolMemory(0, ToolTrailers(tmp_path, 0))
    memory.remember([TurnCall("a", "f", "{}")], TEXT)
    assert memory.unknown(history([Call("a", "f", "{}")]).messages) == set()
    memory.load({"a"})
    assert raws(memory, [Call("a", "f", "{}")]) == ([None], Replay(rewritten=1, missing=1))


def test_a_history_of_four_thousand_calls_asks_for_each_once() -> None:
    memory = ToolMemory(10_000)
    turns = [[Call(f"c{i}", "f", f'{{"x":{i}}}')] for i in range(4096)]
    for (one,) in turns:
        memory.remember([TurnCall(*one)], f"{TEXT}{one.id}")
    asked: list[str] = []
    use = memory._use
    memory._use = lambda call_id: (asked.append(call_id), use(call_id))[1]  # type: ignore[method-assign]
    assert raws(memory, *turns)[1] == Replay(replayed=4096)
    assert len(asked) == 4096


def test_threads_remember_and_replay_at_once() -> None:
    memory = ToolMemory(64)
    failures: list[Any] = []

    def work(name: str) -> None:
        for i in range(400):
            ids = [f"{name}{i}a", f"{name}{i}b"]
            memory.remember([TurnCall(call_id, "f", "{}") for call_id in ids], name + str(i))
            found, _ = raws(memory, [Call(call_id, "f", "{}") for call_id in ids])
            if found not in ([name + str(i)], [None]):
                failures.append(found)

    threads = [threading.Thread(target=work, args=(name,)) for name in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(memory) == 64
    assert memory._bytes == sum(memory._size(call_id, block) for call_id, block in memory._blocks.items())


# from disk


def stored(directory: Path, calls: dict[str, str], text: bytes = b"a session", at: float = 1_000_000.0) -> None:
    save(open_store(directory, now=Time(at)), text, trailer=pack_tool_map(calls.items()), flags=FLAG_TOOL_MAP)


def after_restart(directory: Path, *turns: Sequence[Call]) -> ToolMemory:
    """A new memory that was asked for these turns."""
    memory = ToolMemory(ROOMY, ToolTrailers(directory, ROOMY))
    memory.load(memory.unknown(history(*turns).messages))
    return memory


def sent(ids: str, *calls: tuple[str, Any]) -> list[Call]:
    """Calls as a client spells them."""
    return [Call(i, name, json.dumps(dict(reversed(arguments.items())))) for i, (name, arguments) in zip(ids, calls, strict=True)]


@pytest.mark.parametrize("dialect", SPELLINGS)
def test_every_dialects_calls_are_read_again_from_disk(tmp_path: Path, dialect: str) -> None:
    spelling = SPELLINGS[dialect]
    one, three = spelling.block(LOOK), spelling.block(COUNT, NO_ARGUMENTS, LOOK)
    stored(tmp_path, {"a": one, "b": three, "c": three, "d": three})
    turns = [sent("a", LOOK), sent("bcd", COUNT, NO_ARGUMENTS, LOOK)]
    memory = after_restart(tmp_path, *turns)
    for _ in range(2):
        assert raws(memory, *turns, grammar=spelling.grammar) == ([one, three], Replay(disk=2))
    other = sent("bcd", COUNT, NO_ARGUMENTS, ("look", {**LOOK[1], "times": 4}))
    assert raws(memory, other, grammar=spelling.grammar) == ([None], Replay(rewritten=1))
    assert raws(memory, sent("b", COUNT), grammar=spelling.grammar) == ([None], Replay(rewritten=1))


def test_a_call_that_lacks_its_outermost_end_is_read_as_it_was(tmp_path: Path) -> None:
    text = SPELLINGS["qwen3.8"].block(LOOK).removesuffix("\n</tool_call>")
    stored(tmp_path, {"a": text})
    assert raws(after_restart(tmp_path, sent("a", LOOK)), sent("a", LOOK), grammar="qwen") == ([text], Replay(disk=1))


@pytest.mark.parametrize(
    "text",
    [
        "just text",
        "text before" + SPELLINGS["jinja"].block(LOOK),
        SPELLINGS["jinja"].block(LOOK) + "text behind",
        SPELLINGS["jinja"].block(LOOK)[:-20],
        SPELLINGS["glm"].block(LOOK),
        "<think>hm</think>" + SPELLINGS["jinja"].block(LOOK),
    ],
)
def test_text_from_disk_that_is_not_the_calls_and_nothing_else_is_not_used(tmp_path: Path, text: str) -> None:
    stored(tmp_path, {"a": text})
    assert raws(after_restart(tmp_path, sent("a", LOOK)), sent("a", LOOK)) == ([None], Replay(rewritten=1))


def test_what_cannot_be_read_without_its_tool_can_be_with_it(tmp_path: Path) -> None:
    """A digit is a string only where the tool says so."""
    spelling = SPELLINGS["glm"]
    text = spelling.block(("count", {"what": "7"}))
    stored(tmp_path, {"a": text})
    turn = sent("a", ("count", {"what": "7"}))
    memory = after_restart(tmp_path, turn)
    without = Conversation(history(turn).messages)
    assert memory.attach(without, spelling.grammar)[1] == Replay(rewritten=1)
    assert raws(memory, turn, grammar=spelling.grammar) == ([text], Replay(disk=1))
    assert memory.attach(without, spelling.grammar)[1] == Replay(disk=1)  # known from then on


def test_a_model_that_calls_no_tools_writes_all_anew(tmp_path: Path) -> None:
    stored(tmp_path, {"a": SPELLINGS["jinja"].block(LOOK)})
    assert raws(after_restart(tmp_path, sent("a", LOOK)), sent("a", LOOK), grammar="") == ([None], Replay(rewritten=1))


def test_calls_of_one_turn_may_come_from_two_files_and_memory(tmp_path: Path) -> None:
    text = SPELLINGS["jinja"].block(LOOK, COUNT, NO_ARGUMENTS)
    stored(tmp_path, {"a": text}, b"one")
    stored(tmp_path, {"b": text}, b"two")
    stored(tmp_path, {"c": text}, b"three")
    turn = sent("abc", LOOK, COUNT, NO_ARGUMENTS)
    memory = after_restart(tmp_path, turn[:1])
    memory.load(memory.unknown(history(turn).messages))
    assert raws(memory, turn) == ([text], Replay(disk=1))


def test_what_was_sampled_here_is_not_replaced_from_disk(tmp_path: Path) -> None:
    stored(tmp_path, {"a": SPELLINGS["jinja"].block(COUNT)})
    memory = ToolMemory(ROOMY, ToolTrailers(tmp_path, ROOMY))
    memory.remember([TurnCall("a", LOOK[0], json.dumps(LOOK[1]))], TEXT)
    assert memory.unknown(history(sent("a", LOOK)).messages) == set()
    memory.load({"a"})
    assert raws(memory, sent("a", LOOK)) == ([TEXT], Replay(replayed=1))


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    text = SPELLINGS["jinja"].block(LOOK)
    stored(tmp_path, dict.fromkeys("abcdef", text))
    memory = after_restart(tmp_path, sent("c", LOOK))
    assert remembered(memory, "abcdef") == ["c"]


def test_damaged_foreign_and_untagged_files_are_passed_over_and_stay(tmp_path: Path) -> None:
    text = SPELLINGS["jinja"].block(LOOK)
    stored(tmp_path, {"a": text}, b"damaged")
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    save(open_store(tmp_path), b"untagged", trailer=pack_tool_map([("b", text)]), flags=0)
    stored(tmp_path, {"d": text}, b"good")
    (tmp_path / ("0" * 40 + ".kv")).write_bytes(b"KVC")
    (tmp_path / "notes.kv").write_bytes(pack_tool_map([("c", text)]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert ToolTrailers(tmp_path, ROOMY).find(["a", "b", "c", "d"]) == {"d": text}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert ToolTrailers(tmp_path / "none", ROOMY).find({"a"}) == {}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the files that were opened; what was read of a file is its head and its trailer."""
    opened: list[str] = []

    def peek(disk: Any, path: Path, **rest: Any) -> Any:
        head, trailer = reader.peek(MortalDisk(), path, **rest)
        opened.append(reader.read_text(path, head.header).decode())
        return head, trailer

    monkeypatch.setattr(tool_trailers, "peek", peek)
    return opened


def test_a_file_is_read_once_unless_it_changes_or_has_what_is_asked_for(tmp_path: Path, reads: list[str]) -> None:
    text = SPELLINGS["jinja"].block(LOOK)
    stored(tmp_path, {"a": text}, b"one")
    stored(tmp_path, {}, b"two")
    trailers = ToolTrailers(tmp_path, ROOMY)
    for _ in range(3):
        assert trailers.find({"unknown"}) == {}
    assert sorted(reads) == ["one", "two"]
    assert trailers.find({"a", "unknown"}) == {"a": text}
    assert sorted(reads) == ["one", "one", "two"]
    stored(tmp_path, {"b": text}, b"two")
    assert trailers.find({"b"}) == {"b": text}
    assert sorted(reads) == ["one", "one", "two", "two"]
    for name in files(tmp_path):
        (tmp_path / name).unlink()
    assert trailers.find({"a", "b"}) == {}


def test_the_search_ends_with_the_newest_file_that_has_all(tmp_path: Path, reads: list[str]) -> None:
    text = SPELLINGS["jinja"].block(LOOK)
    for i, name in enumerate([b"old", b"new", b"newest"]):
        stored(tmp_path, {"a": text, name.decode(): text}, name)
        os.utime(tmp_path / f"{reader.name_of(name)}.kv", (i, i))
    assert set(ToolTrailers(tmp_path, ROOMY).find({"a", "new"})) == {"a", "new"}
    assert reads == ["newest", "new"]
