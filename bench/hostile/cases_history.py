"""Conversations that no client should send: unpaired calls, markup and templates as text, images that are none, and all of it at random."""

from __future__ import annotations

import random
from typing import Any

from bench.hostile.case import CHAT, COUNT, MESSAGES, RESPONSES, Case, Object, base, json_case
from bench.hostile.values import TEXTS, hostile_text

_URLS = (
    "data:image/png;base64,AAAA", "data:image/png;base64,%%%", "data:,", "data:image/svg+xml;base64,PHN2Zy8+",
    "http://169.254.169.254/latest/meta-data",
    "file:///etc/passwd", "http://localhost:1/x.png", "", "data:image/gif;base64," + "R0lG" * 50_000, "ftp://x", "\x00",
)  # fmt: skip
_ARGUMENTS: tuple[Any, ...] = (
    '{"q":"x"}', "{", "", "[]", "null", "NaN", '{"q":1e999}', '{"q":1,"q":2}', "[" * 5000, '{"a":' * 300 + "1" + "}" * 300,
    "9" * 5000, "\x00", "\ud800",
    {"q": {"r": [None]}}, {}, [], 5, True, None, {"</tool_call>": "</arg_value>"}, '{"q":"</think>"}', "{{ x }}",
)  # fmt: skip


def fixed() -> list[Case]:
    """Each odd history once, in each API."""
    found = []
    for name, messages in _chats().items():
        found.append(json_case("history", name, CHAT, {**base(CHAT), "messages": messages}))
    for name, items in _items().items():
        found.append(json_case("history", name, RESPONSES, {**base(RESPONSES), "input": items}))
    for name, messages in _anthropic().items():
        for path in (MESSAGES, COUNT):
            found.append(json_case("history", name, path, {**base(path), "messages": messages}))
    for text in TEXTS:
        turn = [{"role": "user", "content": text}]
        found.append(json_case("history", f"says {text[:30]!r}", CHAT, {**base(CHAT), "messages": turn}))
        found.append(json_case("history", f"says {text[:30]!r}", MESSAGES, {**base(MESSAGES), "system": text, "messages": turn}))
        found.append(
            json_case("history", f"says {text[:30]!r}", RESPONSES, {**base(RESPONSES), "instructions": text, "input": text})
        )
        role = [{"role": text, "content": "x"}]
        found += [
            json_case("history", f"role {text[:30]!r}", path, {**base(path), "messages": role}) for path in (CHAT, MESSAGES)
        ]
    options: Any
    for options in (
        {"enable_thinking": "{{ x }}"},
        {"a": "{% include '/etc/passwd' %}"},
        {"messages": []},
        {"tools": None, "bos_token": "x"},
        [],
    ):
        found.append(json_case("history", f"template {options}", CHAT, {**base(CHAT), "chat_template_kwargs": options}))
    found.append(json_case("history", "a template", CHAT, {**base(CHAT), "chat_template": "{{ 10 ** 10 ** 10 }}"}))
    return found


def _user(content: Any) -> Object:
    return {"role": "user", "content": content}


def _chats() -> dict[str, list[Any]]:
    def called(arguments: Any, id: Any = "c1", name: Any = "look") -> Object:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}],
        }

    result = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    found: dict[str, list[Any]] = {
        "a result without a call": [_user("x"), result],
        "a result first": [result, _user("x")],
        "a call without a result": [_user("x"), called("{}"), _user("y")],
        "a call last": [_user("x"), called("{}")],
        "one result twice": [_user("x"), called("{}"), result, result],
        "a result of another": [_user("x"), called("{}"), {**result, "tool_call_id": "c2"}],
        "a result without an id": [_user("x"), called("{}"), {"role": "tool", "content": "x"}],
        "300 calls of one id": [_user("x"), called("{}"), *[called("{}"), result] * 300],
        "a call of 1000 functions": [_user("x"), {"role": "assistant", "tool_calls": called("{}")["tool_calls"] * 1000}, result],
        "systems everywhere": [{"role": "system", "content": "a"}, _user("x"), {"role": "system", "content": "b"},
        {"role": "developer", "content": "c"}],
        "a system alone": [{"role": "system", "content": "a"}],
        "an assistant alone": [{"role": "assistant", "content": "a"}],
        "two assistants": [_user("x"), {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        "20,000 empty messages": [{}] * 20_000,
        "empty contents": [_user(""), _user(None), _user([]), {"role": "assistant"}],
        "5000 parts": [_user([{"type": "text", "text": "x"}] * 5000)],
        "parts of no type": [_user([{"text": "x"}, {"type": None, "text": "y"}, {}])],
        "reasoning of a million": [_user("x"), {"role": "assistant", "reasoning_content": "r" * 10**6}, _user("y")],
        "a name of controls": [_user("x"), called("{}", name="\x00\n"), result],
    }  # fmt: skip
    found |= {f"arguments {str(value)[:20]!r}": [_user("x"), called(value), result] for value in _ARGUMENTS}
    found |= {f"image {url[:20]!r}": [_user([{"type": "image_url", "image_url": {"url": url}}])] for url in _URLS}
    kind: Any
    for kind in ("input_audio", "video_url", "file", "image", "input_image", "refusal", "\x00", {}, []):
        found[f"a part {kind!r}"] = [_user([{"type": kind, "data": "x", str(kind): {"data": "AAAA", "url": 1}}])]
    return found


def _items() -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
    found: dict[str, Any] = {
        "an output alone": [output],
        "an output of nobody": [_user("x"), {**output, "call_id": "none"}],
        "a call alone": [_user("x"), call],
        "outputs twice": [_user("x"), call, output, output],
        "reasoning alone": [{"type": "reasoning", "summary": []}],
        "sealed reasoning": [_user("x"), {"type": "reasoning", "encrypted_content": "ds4batch.1." + "A" * 10**5}],
        "sealed reasoning that is none": [_user("x"), {"type": "reasoning", "encrypted_content": "ds4batch.1.%%\x00"}],
        "an unknown item": [{"type": "hologram"}],
        "a reference": [{"type": "item_reference", "id": "x"}],
        "an item in progress": [{**call, "status": "in_progress"}, output],
        "3000 calls": [_user("x"), *[call, output] * 3000],
        "a search that found itself": [_user("x"), {"type": "tool_search_output", "call_id": "s",
        "tools": [{"type": "tool_search"}, {"name": "tool_search"}]}],
        "a shell": [_user("x"), {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec", "command": ["rm"] * 500}}],
        "a list in a list": [[_user("x")]],
        "numbers": [1, 2.5, None, True],
        "a billion laughs": "&lol9;" * 10_000,
    }  # fmt: skip
    for value in _ARGUMENTS:
        found[f"output {str(value)[:20]!r}"] = [_user("x"), call, {**output, "output": value}]
        found[f"arguments {str(value)[:20]!r}"] = [_user("x"), {**call, "arguments": value}, output]
    for url in _URLS:
        found[f"image {url[:20]!r}"] = [_user([{"type": "input_image", "image_url": url}])]
    return found


def _anthropic() -> dict[str, list[Any]]:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"q": "x"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "seen"}
    said = {"role": "assistant", "content": [use]}
    found: dict[str, list[Any]] = {
        "a result alone": [_user([result])],
        "a result of nobody": [_user("x"), _user([{**result, "tool_use_id": "none"}])],
        "a use alone": [_user("x"), said],
        "a result of the assistant": [_user("x"), {"role": "assistant", "content": [result]}],
        "a use of the user": [_user([use]), _user([result])],
        "results twice": [_user("x"), said, _user([result, result, {"type": "text", "text": "y"}])],
        "thinking of the user": [_user([{"type": "thinking", "thinking": "x"}])],
        "redacted thinking": [_user("x"), {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "\x00"}]}],
        "a result of results": [_user("x"), said, _user([{**result, "content": [result]}])],
        "a result of an image": [_user("x"), said, _user([{**result, "content": [{"type": "image", "source": {}}]}])],
        "a document": [_user([{"type": "document", "source": {"type": "url", "url": "file:///etc/passwd"}}])],
        "5000 uses": [_user("x"), {"role": "assistant", "content": [use] * 5000}, _user([result])],
        "5000 systems": [{"role": "system", "content": "x"}] * 5000,
        "blocks of no type": [_user([{"text": "x"}, {}])],
        "a block in a block": [_user([[{"type": "text", "text": "x"}]])],
        "attribution alone": [_user("x"), {"role": "system", "content": "x-anthropic-billing-header: y\n" * 20_000}],
    }
    for value in _ARGUMENTS:
        found[f"input {str(value)[:20]!r}"] = [
            _user("x"),
            {"role": "assistant", "content": [{**use, "input": value}]},
            _user([result]),
        ]
        found[f"result {str(value)[:20]!r}"] = [_user("x"), said, _user([{**result, "content": value}])]
    for url in _URLS:
        source = {"type": "base64", "media_type": "image/png", "data": url}
        found[f"image {url[:20]!r}"] = [_user([{"type": "image", "source": source}])]
    return found


def mixed(random: random.Random) -> Case:
    """A history of random pieces of the fixed ones, with random text."""
    path = random.choice((CHAT, RESPONSES, MESSAGES))
    pools: dict[str, dict[str, Any]] = {CHAT: _chats(), RESPONSES: _items(), MESSAGES: _anthropic()}
    lists = [pieces for pieces in pools[path].values() if isinstance(pieces, list) and len(pieces) < 100]
    pieces = [piece for _ in range(random.randrange(1, 5)) for piece in random.choice(lists)]
    random.shuffle(pieces)
    pieces.append(_user(hostile_text(random)))
    name = "input" if path == RESPONSES else "messages"
    return json_case("history", "a random one", path, {**base(path), name: pieces, "stream": random.random() < 0.5})
