"""GLM's dialect: what it writes, and that what it says of its own prompts holds for the prompts that follow them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.conversation import Call, Conversation, Message, Thinking, Tool
from ds4batch.chat.dialects.base import Dialect, Rendered
from ds4batch.chat.dialects.glm import Glm
from ds4batch.chat.dialects.history import shown_schemas
from ds4batch.chat.escapes import unescape
from ds4batch.chat.events import Turn
from ds4batch.chat.schemas import canonical
from ds4batch.chat.tracker import Tracker
from ds4batch.messages import Continues, Visible

GLM: Dialect = Glm()
OFF = Thinking(enabled=False)
LOW = Thinking(effort="low")
HIGH = "[gMASK]<sop><|system|>Reasoning Effort: High"
NONE = "[gMASK]<sop>"


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Tool:
    shown = {"name": name, **({"parameters": parameters} if parameters else {})}
    return Tool(name, canonical(json.dumps({**shown, **more})), parameters or {}, wire_name=name)


SHELL = tool("sh", {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}})
CALL = Call("c1", "sh", '{"n": 2, "cmd": "ls -l"}')


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str = "", reasoning: str = "", *calls: Call, raw: str | None = None) -> Message:
    return Message("assistant", text, reasoning, calls, raw=raw)


def result(text: str, call_id: str = "c1") -> Message:
    return Message("tool", text, call_id=call_id)


def chat(*messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking = LOW) -> Conversation:
    return Conversation(messages, tools, thinking)


def text(*messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking = LOW) -> str:
    return GLM.render(chat(*messages, tools=tools, thinking=thinking)).text


# What is written.


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (OFF, f"{NONE}<|system|>S<|user|>hi<|assistant|><think></think>"),
        (LOW, f"{NONE}<|system|>S<|user|>hi<|assistant|><think>"),
        (Thinking(effort="medium"), f"{HIGH}<|system|>S<|user|>hi<|assistant|><think>"),
        (Thinking(effort="high"), f"{HIGH}<|system|>S<|user|>hi<|assistant|><think>"),
        (Thinking(effort="max"), f"{NONE}<|system|>Reasoning Effort: Max<|system|>S<|user|>hi<|assistant|><think>"),
    ],
)
def test_the_head_names_the_effort_and_the_opening_whether_the_model_thinks(thinking: Thinking, expected: str) -> None:
    rendered = GLM.render(chat(Message("system", "S"), user("hi"), thinking=thinking))
    assert rendered.text == expected
    assert rendered.thinking is thinking.enabled
    assert expected[rendered.generation_from :].startswith("<|assistant|>")


def test_a_tool_turn_keeps_its_reasoning_and_is_written_inline() -> None:
    call = Call("c1", "sh", '{"cmd":"ls"}')
    written = text(user("q"), said("", "r", call), result("a"), thinking=Thinking())
    assert written == (
        f"{HIGH}<|user|>q<|assistant|><think>r</think><tool_call>sh<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>"
        "<|observation|><tool_response>a</tool_response><|assistant|><think>"
    )


def test_reasoning_of_earlier_turns_goes_where_no_tools_play_a_part() -> None:
    assert text(user("a"), said("b", "r"), user("c")) == (
        f"{NONE}<|user|>a<|assistant|><think></think>b<|user|>c<|assistant|><think>"
    )
    assert "<think>r</think>b" in text(user("a"), said("b", "r"), user("c"), tools=(SHELL,))


def test_reasoning_stays_behind_the_last_user_message() -> None:
    assert text(user("a"), said("b", "r"), Message("system", "late")) == (
        f"{NONE}<|user|>a<|assistant|><think>r</think>b<|system|>late<|assistant|><think>"
    )


def test_system_messages_stand_where_they_were_said() -> None:
    assert text(Message("system", "s"), Message("system", "t"), user("a"), said("b"), Message("system", "u"), user("c")) == (
        f"{NONE}<|system|>s<|system|>t<|user|>a<|assistant|><think></think>b<|system|>u<|user|>c<|assistant|><think>"
    )


def test_results_of_parallel_calls_share_one_observation() -> None:
    calls = (Call("c1", "sh", '{"cmd": "a"}'), Call("c2", "sh", '{"cmd": "b"}'))
    assert text(user("q"), said(" both \n", "", *calls), result("1"), result("2", "c2"), user("go on"), result("3", "c3")) == (
        f"{NONE}<|user|>q<|assistant|><think></think>both"
        "<tool_call>sh<arg_key>cmd</arg_key><arg_value>a</arg_value></tool_call>"
        "<tool_call>sh<arg_key>cmd</arg_key><arg_value>b</arg_value></tool_call>"
        "<|observation|><tool_response>1</tool_response><tool_response>2</tool_response>"
        "<|user|>go on<|observation|><tool_response>3</tool_response><|assistant|><think>"
    )


def test_every_answer_opens_anew_and_the_last_one_is_continued() -> None:
    rendered = GLM.render(chat(user("a"), said("b"), said("c")))
    assert rendered.text == f"{NONE}<|user|>a<|assistant|><think></think>b<|assistant|><think></think>c"
    assert rendered.text[rendered.generation_from :] == "<|assistant|><think></think>c"
    assert not rendered.thinking
    assert rendered.visible is None


@pytest.mark.parametrize("inline", ["<think>r</think>b", "</think>b", "\n<think>r</think>b"])
def test_an_answer_that_brings_its_own_think_tag_gets_no_other(inline: str) -> None:
    assert text(user("a"), said(inline), user("c")) == (
        f"{NONE}<|user|>a<|assistant|>{inline.strip()}<|user|>c<|assistant|><think>"
    )


def test_arguments_are_written_in_declared_order_and_others_behind() -> None:
    arguments = '{"z": [1, 2.50], "n": 1e3, "y": null, "cmd": "caf\\u00e9 \\ud83d\\ude00 \\n"}'
    assert (
        "<tool_call>sh<arg_key>cmd</arg_key><arg_value>café 😀 \n</arg_value><arg_key>n</arg_key><arg_value>1e3</arg_value>"
        "<arg_key>z</arg_key><arg_value>[1,2.50]</arg_value><arg_key>y</arg_key><arg_value>null</arg_value></tool_call>"
    ) in text(user("a"), said("", "", Call("c", "sh", arguments)), tools=(SHELL,))


@pytest.mark.parametrize("arguments", ["ls -l", "[1]", '{"cut": "of', "NaN", ""])
def test_arguments_that_are_no_object_are_one_parameter(arguments: str) -> None:
    written = text(user("a"), said("", "", Call("c", "sh", arguments)), tools=(SHELL,))
    assert f"<tool_call>sh<arg_key>arguments</arg_key><arg_value>{arguments}</arg_value></tool_call>" in written


def test_a_call_without_arguments_is_its_name() -> None:
    assert text(user("a"), said("", "", Call("c", "sh", "{}"))).endswith("<think></think><tool_call>sh</tool_call>")


def test_sampled_calls_are_replayed_byte_for_byte() -> None:
    raw = "\n\n<tool_call>sh\n<arg_key> cmd</arg_key>\n<arg_value>ls</arg_value></tool_call>\n"
    assert text(user("a"), said("ok \n", "r", CALL, raw=raw), result("x")).startswith(
        f"{NONE}<|user|>a<|assistant|><think>r</think>ok{raw}<|observation|>"
    )


def test_data_cannot_close_what_holds_it_and_is_otherwise_untouched() -> None:
    arguments = json.dumps({"a</arg_key>b": "x</arg_value><arg_key>&lt;/arg_value> a < b && c", "n": ["</arg_value>"]})
    asked, called = user("<tool_response> & </tool_response>"), said("", "", Call("c", "f", arguments))
    assert text(asked, called, result("1 < 2 && </tool_response>")) == (
        f"{NONE}<|user|><tool_response> & </tool_response><|assistant|><think></think><tool_call>f"
        "<arg_key>a&lt;/arg_key>b</arg_key><arg_value>x&lt;/arg_value><arg_key>&amp;lt;/arg_value> a < b && c</arg_value>"
        '<arg_key>n</arg_key><arg_value>["&lt;/arg_value>"]</arg_value></tool_call>'
        "<|observation|><tool_response>1 < 2 && &lt;/tool_response></tool_response><|assistant|><think>"
    )


def test_tools_stand_before_the_system_text_with_canonical_schemas() -> None:
    written = text(Message("system", "S"), user("q"), tools=(SHELL, tool("g")), thinking=Thinking())
    shown = f'{SHELL.schema}\n\n\n{{"name": "g"}}\n\n\n</tools>'
    head, _, rest = written.partition("<tools>\n\n")
    assert head.startswith(f"{HIGH}<|system|>\n# Tools\n\n")
    assert rest.startswith(shown)
    assert "<tool_call>FUNCTION<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>" in rest
    assert rest.endswith("<|system|>S<|user|>q<|assistant|><think>")


def test_schemas_lose_what_is_the_servers_and_only_at_the_top() -> None:
    given_twice = tool("f", {"properties": {"strict": {}}}, strict=True, defer_loading=False, description='"strict"')
    assert shown_schemas([given_twice]) == [
        '{"name": "f", "parameters": {"properties": {"strict": {}}}, "description": "\\"strict\\""}'
    ]
    numbers = Tool("f", '{"name": "é", "strict": false, "x": {"a": 1.0, "b": [1e3, "\\n"]}}', {})
    assert shown_schemas([numbers]) == ['{"name": "é", "x": {"a": 1.0, "b": [1e3, "\\n"]}}']
    assert shown_schemas([Tool("f", "not JSON, strict", {})]) == ["not JSON, strict"]


def test_deferred_tools_are_not_shown() -> None:
    deferred = replace(tool("late"), deferred=True)
    assert shown_schemas([deferred, SHELL, tool("g", defer_loading=True)]) == [SHELL.schema]
    assert "<tools>\n</tools>" in text(user("q"), tools=(deferred,))


def test_a_retry_ends_the_turn_with_an_error_and_opens_another() -> None:
    asked = chat(user("q"), tools=(SHELL,), thinking=Thinking())
    retry = GLM.retry(asked, False, "no name </tool_response>")
    assert retry.startswith("<|observation|><tool_response>Tool error: invalid tool call: no name &lt;/tool_response>\n")
    assert retry.endswith("</tool_response><|assistant|><think>")
    assert GLM.retry(asked, True, "no name </tool_response>") == f"</think>{retry}"
    assert GLM.retry(replace(asked, thinking=OFF), False, "x").endswith("<|assistant|><think></think>")


# What is said of the requests that follow. The strategies are those of every family of tagged calls.

WORDS = st.text(alphabet="ab é😀<>&;/\n", max_size=8) | st.sampled_from(
    ["</tool_response>", "&lt;/arg_value>", "</arg_key>", "</parameter>", "<think>x", "</think>", "<|user|>", " padded \n"]
)
PLAIN = st.text(alphabet="abé 漢😀.", min_size=1, max_size=8).map(lambda drawn: f"x{drawn}x")
VALUES = st.none() | st.booleans() | st.integers() | WORDS
JSON = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=4)
ARGUMENTS = st.dictionaries(st.sampled_from(["cmd", "n", "other", "é"]), JSON).map(json.dumps) | WORDS
CALLS = st.lists(st.builds(Call, st.sampled_from(["c1", "c2", "c3"]), st.sampled_from(["sh", "f"]), ARGUMENTS), max_size=2).map(
    tuple
)
ANSWERS = st.builds(said, WORDS, WORDS) | st.builds(lambda words, r, calls: said(words, r, *calls), WORDS, WORDS, CALLS)
OTHERS = st.one_of(
    st.builds(user, WORDS),
    st.builds(result, WORDS, st.sampled_from(["c1", "c2", ""])),
    WORDS.map(lambda words: Message("system", words)),
)
MESSAGES = st.lists(OTHERS | ANSWERS, min_size=1, max_size=9).map(tuple)
TOOLS: st.SearchStrategy[tuple[Tool, ...]] = st.sampled_from([(), (SHELL,), (SHELL, replace(tool("f"), deferred=True))])
THINKING = st.builds(Thinking, st.booleans(), st.sampled_from(["low", "medium", "high", "max"]))
CHATS = st.builds(Conversation, MESSAGES, TOOLS, THINKING)


def firsts(conversation: Conversation) -> list[int]:
    """Every message that a tail may begin with."""
    messages = conversation.messages
    behind = [at for at in range(1, len(messages) + 1) if messages[at - 1].role == "assistant"]
    said_first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    alone = said_first < len(messages) and messages[said_first].role == "tool"
    return [*([said_first] if alone else []), *behind]


def grown(conversation: Conversation, *more: Message) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, *more))


def cut(conversation: Conversation, at: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:at])


def check_places(dialect: Dialect, conversation: Conversation) -> Rendered:
    """What holds of every prompt by itself: tails are its ends, and what it continues begins with a tail."""
    rendered = dialect.render(conversation)
    messages = conversation.messages
    assert dialect.render(replace(conversation, messages=list(messages))) == rendered
    for first in firsts(conversation):
        assert rendered.text.endswith(dialect.tail(conversation, first))
    for first in set(range(len(messages) + 2)) - set(firsts(conversation)):
        with pytest.raises(ValueError, match="does not follow an answer"):
            dialect.tail(conversation, first)
    start = max(firsts(conversation), default=None)
    ids = [message.call_id for message in messages[start:] if message.role == "tool"] if start is not None else []
    if not ids or not all(ids):
        assert rendered.continues is None
    else:
        assert start is not None
        assert rendered.continues is not None
        assert rendered.continues.calls == sorted(set(ids))
        assert rendered.text[rendered.continues.suffix_from :] == dialect.tail(conversation, start)
    due = messages[-1].role != "assistant"
    assert rendered.thinking == (due and conversation.thinking.enabled)
    if due:
        assert rendered.text[: rendered.generation_from] + opening(dialect, conversation) == rendered.text
    return rendered


def opening(dialect: Dialect, conversation: Conversation) -> str:
    asked = dialect.render(replace(conversation, messages=(user("?"),)))
    return asked.text[asked.generation_from :]


def check_visible(dialect: Dialect, conversation: Conversation, answer: str, reasonings: list[str]) -> None:
    """What the next request will begin with, whatever of `reasonings` it gives back."""
    rendered = dialect.render(conversation)
    if rendered.visible is None:
        return
    shared, head = rendered.visible.shared, rendered.visible.head
    begin = rendered.text[:shared] + head
    for reasoning in reasonings:
        after = dialect.render(grown(conversation, said(answer, reasoning), user("next"))).text
        assert after.startswith(begin + answer)
        assert len(after) > len(begin + answer)
    if conversation.tool_context:
        called = dialect.render(grown(conversation, said(answer, "", CALL, raw="\n\n<tool_call>"), result("1")))
        assert called.text.startswith(f"{begin}{answer}\n\n<tool_call>")


@given(CHATS)
def test_tails_and_continuations_are_ends_of_the_prompt(conversation: Conversation) -> None:
    check_places(GLM, conversation)


@given(CHATS, PLAIN, WORDS)
def test_visible_is_how_the_next_request_begins(conversation: Conversation, answer: str, reasoning: str) -> None:
    check_visible(GLM, conversation, answer, [""] if conversation.tool_context else ["", reasoning])
    rendered = GLM.render(conversation)
    if rendered.thinking and rendered.visible is None:
        after = GLM.render(grown(conversation, said(answer, reasoning), user("next"))).text
        assert after.startswith(f"{rendered.text}{reasoning}</think>{answer}")


@given(CHATS, PLAIN)
def test_without_thinking_the_next_request_begins_with_the_prompt_and_the_answer(conversation: Conversation, answer: str) -> None:
    asked = replace(conversation, tools=(SHELL,), thinking=OFF, messages=(*conversation.messages, user("q")))
    rendered = GLM.render(asked)
    assert rendered.visible is None
    assert GLM.render(grown(asked, said(answer), user("next"))).text.startswith(rendered.text + answer)


@given(CHATS)
def test_with_tools_a_history_that_grows_only_appends(conversation: Conversation) -> None:
    conversation = replace(conversation, tools=(SHELL,))
    whole = GLM.render(conversation).text
    for first in firsts(conversation):
        if first and conversation.messages[first - 1].role == "assistant":
            assert GLM.render(cut(conversation, first)).text + GLM.tail(conversation, first) == whole
    for at in range(1, len(conversation.messages)):
        before = GLM.render(cut(conversation, at))
        assert whole.startswith(before.text[: before.generation_from])


@given(CHATS)
def test_without_tools_a_history_that_users_go_on_with_only_appends(conversation: Conversation) -> None:
    messages = [replace(m, calls=()) for m in conversation.messages if m.role != "tool"]
    asked = Conversation((*messages, user("q")), (), conversation.thinking)
    before = GLM.render(asked)
    after = GLM.render(grown(asked, said("a", "r"), user("n"))).text
    assert after.startswith(before.text[: before.generation_from] + "<|assistant|>")


@given(st.dictionaries(WORDS, JSON), st.lists(WORDS))
def test_arguments_and_results_can_be_read_back(arguments: dict[str, Any], outputs: list[str]) -> None:
    call = Call("c", "f", json.dumps(arguments))
    written = text(user("q"), said("", "", call), *(result(output) for output in outputs), thinking=OFF)
    pairs = re.findall(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", written, re.DOTALL)
    read = {unescape(key, "</arg_key>"): unescape(value, "</arg_value>") for key, value in pairs}
    assert {k: v if isinstance(arguments[k], str) else json.loads(v) for k, v in read.items()} == arguments
    bodies = re.findall("<tool_response>(.*?)</tool_response>", written.partition("<|observation|>")[2], re.DOTALL)
    assert [unescape(body, "</tool_response>") for body in bodies] == outputs


KEYS = WORDS.filter(lambda key: bool(key) and key.strip() == key and not set("<>\n") & set(key))
TURNS = st.lists(st.dictionaries(KEYS, JSON), min_size=1, max_size=3)


@given(PLAIN, TURNS, st.booleans())
def test_what_is_written_is_what_the_tracker_reads(content: str, arguments: list[dict[str, Any]], thinking: bool) -> None:
    check_read_back(GLM, content, arguments, thinking)


def check_read_back(dialect: Dialect, content: str, arguments: list[dict[str, Any]], thinking: bool) -> None:
    """A turn as the dialect writes it, sampled and read, and written again with the text that was sampled."""
    asked = chat(user("q"), tools=(SHELL,), thinking=Thinking(thinking, "low"))
    before = dialect.render(asked)
    calls = tuple(Call(f"c{at}", "f", json.dumps(values)) for at, values in enumerate(arguments))
    sampled = dialect.render(grown(asked, said(content, "why" if thinking else "", *calls))).text[len(before.text) :]

    ids = (call.id for call in calls)
    everything = {"f": frozenset(key for values in arguments for key in values)}
    tracker = Tracker(dialect.grammar, thinking=before.thinking, tools=everything, new_id=lambda: next(ids))
    turn = Turn()
    turn.add(tracker.push(sampled))
    end = tracker.finish("stop")
    turn.add(end.events)
    assert (turn.content, turn.reasoning) == (content, ["why"] if thinking else [])
    assert [json.loads(call.arguments).keys() for call in turn.complete_calls] == [values.keys() for values in arguments]
    for call, values in zip(turn.complete_calls, arguments, strict=True):
        strings = {key: value for key, value in values.items() if isinstance(value, str)}
        assert strings.items() <= json.loads(call.arguments).items()

    replayed = grown(asked, said(turn.content, "".join(turn.reasoning), *calls, raw=end.raw), result("x"))
    assert dialect.render(replayed).text.startswith(before.text + sampled)


def test_the_results_of_calls_that_are_not_shown_continue_a_session() -> None:
    alone = chat(Message("system", "S"), result("1", "b"), result("2", "a"))
    rendered = GLM.render(alone)
    tail = "<|observation|><tool_response>1</tool_response><tool_response>2</tool_response><|assistant|><think>"
    assert rendered.text == f"{NONE}<|system|>S{tail}"
    assert rendered.continues == Continues(["a", "b"], len(f"{NONE}<|system|>S"))
    assert GLM.tail(alone, 1) == tail


def test_visible_takes_the_reasoning_from_an_answer_that_only_a_system_message_follows() -> None:
    rendered = GLM.render(chat(user("a"), said("b", "r"), Message("system", "late")))
    assert rendered.visible == Visible(
        len(f"{NONE}<|user|>a"), "<|assistant|><think></think>b<|system|>late<|assistant|><think></think>", "both"
    )


def test_visible_with_tools_only_for_clients_that_leave_reasoning_out() -> None:
    assert GLM.render(chat(user("a"), tools=(SHELL,))).visible is None
    assert GLM.render(chat(user("a"), said("b", "r"), user("c"), tools=(SHELL,))).visible is None
    assert GLM.render(chat(user("a"), said("b"), user("c"), tools=(SHELL,))).visible is not None


def work(render: Callable[[], object]) -> int:
    """Calls that a rendering makes, those of C functions included."""
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        render()
    finally:
        sys.setprofile(before)
    return calls


def pairs(count: int) -> Conversation:
    turns = ((said("ok", "r", Call(f"c{i}", "sh", '{"cmd": "ls", "n": 1}')), result("out", f"c{i}")) for i in range(count))
    return chat(user("q"), *(message for turn in turns for message in turn), tools=(SHELL,))


@pytest.mark.parametrize("what", ["render", "tail"])
def test_the_work_is_linear_in_the_history(what: str) -> None:
    check_linear(GLM, what)


def check_linear(dialect: Dialect, what: str) -> None:
    def run(conversation: Conversation) -> int:
        return work(lambda: dialect.render(conversation) if what == "render" else dialect.tail(conversation, 2))

    few, many = pairs(512), pairs(4096)
    run(pairs(1))  # fills caches
    assert run(many) < 8.2 * run(few)
