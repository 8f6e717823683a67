"""Every field of every API with every value it does not want, and good requests broken in one place."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.hostile.case import (
    CHAT,
    COMPLETIONS,
    COUNT,
    MESSAGES,
    POSTS,
    RESPONSES,
    Case,
    Ending,
    Object,
    base,
    few_tokens,
    json_case,
)
from bench.hostile.values import SPELLINGS, places, spelt

_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q":"x"}'}}
_SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
_FUNCTION = {"name": "look", "description": "Looks.", "parameters": _SCHEMA}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def full(path: str) -> Object:
    """A request with every member that the API's reader looks at, down to the last block."""
    match path:
        case "/v1/chat/completions":
            return {
                **base(path),
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                    {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": [_CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
                ],
                "tools": [{"type": "function", "function": _FUNCTION}],
                "tool_choice": "auto",
            }
        case "/v1/responses":
            return {
                **base(path),
                "instructions": "Be brief.",
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q":"x"}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "seen"},
                ],
                "tools": [{"type": "function", **_FUNCTION}],
                "reasoning": {"effort": "low", "summary": "auto"},
                "text": {"format": {"type": "text"}},
            }
        case "/v1/messages" | "/v1/messages/count_tokens":
            return {
                **base(MESSAGES),
                "system": [{"type": "text", "text": "Be brief."}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": "s"},
                            {"type": "text", "text": "So."},
                            {"type": "tool_use", "id": "c1", "name": "look", "input": {"q": "x"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "s"}]}],
                    },
                ],
                "tools": [{"name": "look", "description": "Looks.", "input_schema": _SCHEMA}],
                "thinking": {"type": "disabled"},
            }
    return base(path)


class Field(NamedTuple):
    """A place in a full request, and what is to stand there."""

    path: str
    place: tuple[str | int, ...]
    value: str

    def case(self) -> Case:
        """The request. Made when it is sent: there are tens of thousands, some of them large."""
        shown = ".".join(map(str, self.place))
        limits = self.place[-1] in _LIMITS  # without one the answer may be as long as the context: its first bytes are enough
        body = {**full(self.path), "stream": True} if limits else full(self.path)
        data = spelt(body, self.place, self.value)
        ending: Ending = "first-bytes" if limits else "read"
        return json_case("field", f"{shown} = {self.value[:40]}", self.path, data, ending=ending)


def fields(description: Mapping[str, Any]) -> list[Field]:
    """Every member of a request that is described, and every place in a full one, with every hostile value."""
    found = []
    for path in POSTS:
        request = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        members = description["components"]["schemas"][request.rsplit("/")[-1]]["properties"]
        where = dict.fromkeys([*((name,) for name in members), *places(full(path))])
        found += [Field(path, place, value) for place in where for value in SPELLINGS]
    return found


def mutated(random: random.Random) -> Case:
    """A full request with one to three of its parts left out, doubled, swapped, renamed or put elsewhere."""
    path = random.choice(POSTS)
    body: Any = copy.deepcopy(full(path))
    done = []
    for _ in range(random.randrange(1, 4)):
        done.append(_mutate(body, random))
    return json_case("mutation", ", ".join(done), path, few_tokens(path, body))


def _mutate(body: Any, random: random.Random) -> str:
    options = places(body)
    if not options:
        return "nothing"
    place = random.choice(options)
    holder: Any = body
    key: Any
    for key in place[:-1]:
        holder = holder[key]
    key, shown = place[-1], ".".join(map(str, place))
    match random.randrange(6):
        case 0:
            del holder[key]
            return f"without {shown}"
        case 1:
            holder[key] = [holder[key]] * random.choice([1, 2, 300])
            return f"{shown} in a list"
        case 2:
            holder[key] = {"": holder[key], "type": "text"}
            return f"{shown} in an object"
        case 3 if isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[key]) for _ in range(random.choice([1, 3, 200])))
            return f"{shown} again"
        case 3:
            holder[str(key).upper()] = holder.pop(key)
            return f"{shown} in capitals"
        case 4:
            other = _at(body, random.choice(options))
            holder[key] = copy.deepcopy(other)
            return f"{shown} as another part"
        case _:
            holder[key] = str(holder[key]) if not isinstance(holder[key], str) else list(holder[key])
            return f"{shown} as another type"


def _at(body: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        body = body[key] if (isinstance(body, dict) and key in body) or (isinstance(body, list) and key < len(body)) else None
        if body is None:
            return None
    return body


def extremes() -> list[Case]:
    """Numbers and lists of the sampling fields at and beyond their ends, and many at once."""
    found = []
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        good, stop = base(path), "stop_sequences" if path == MESSAGES else "stop"
        limits = [name for name in _LIMITS if name in good]
        for name, value in (
            ("64 stops", [f"s{i}" for i in range(64)]), ("65 stops", [f"s{i}" for i in range(65)]), ("5000 stops",
            [f"s{i}" for i in range(5000)]),
            ("5000 equal stops", ["s"] * 5000), ("empty stops", [""] * 100), ("an empty stop", ""), ("a stop of 4096", "s" * 4096),
            ("a stop of 4097", "s" * 4097), ("a stop of a million", "s" * 10**6), ("stops of markup", ["<|im_end|>", "</s>", "\x00"]),
        ):  # fmt: skip
            found.append(json_case("sampling", name, path, {**good, stop: value}))
        for name, bias in (
            ("100,000 biases", {str(i): i % 201 - 100 for i in range(100_000)}), ("200 biases", {str(i): 1 for i in range(200)}),
            ("all banned", {str(i): -100 for i in range(256)}), ("a bias of 1e999", {"1": float("inf")}), ("a negative id", {"-1": 1}),
            ("an id of 400 digits", {"1" * 400: 1}), ("other digits", {"\u0661": 1}), ("one id twice", {"1": 1, "01": 2}),
        ):  # fmt: skip
            found.append(json_case("sampling", name, path, {**good, "logit_bias": bias}))
        for text in ("0", "1", "-1", "1e999", "NaN", "2147483648", "1" + "0" * 400, "0.9999", "1.0000001"):
            for limit in limits:
                data = spelt({**good, "stream": True}, (limit,), text)
                found.append(json_case("sampling", f"{limit} {text[:20]}", path, data, ending="first-bytes"))
        for more in (
            {"n": 1}, {"n": 10**6}, {"best_of": 1}, {"best_of": 0}, {"n": 1.0}, {"n": 1.5}, {"temperature": 5e-324}, {"temperature": 100},
            {"top_p": 0}, {"top_p": 5e-324}, {"min_p": 1}, {"min_p": 5e-324}, {"top_k": 1}, {"top_k": 2**40}, {"seed": 2**63},
            {"seed": 2**64 + 1},
            {"seed": -5}, {"seed": 0.5}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 100}, {"presence_penalty": 2,
            "frequency_penalty": -2},
            {"temperature": 100, "top_p": 1, "min_p": 0, "repetition_penalty": 100, "presence_penalty": -2,
            "frequency_penalty": -2, "seed": 1},
            {"logprobs": 20}, {"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 20, "include": ["message.output_text.logprobs"]},
            {"logprobs": True, "top_logprobs": 20.9}, {"ignore_eos": True}, {"stream": True, "stream_options": {"include_usage": True}},
            {"include": ["x"] * 5000}, {"model": "m" * 10**6}, {"model": "\x00\ud800"}, {"stream": True, "model": "a\nb\n\ndata: x"},
        ):  # fmt: skip
            found.append(json_case("sampling", str(more)[:60], path, {**good, "temperature": 1, **more}))
    prompt: Any
    for prompt in (
        [2**31],
        [-1],
        [10**30],
        [1.5],
        [0] * 200_000,
        [[0]] * 3,
        [[[0]]],
        ["a", 1],
        [1, "a"],
        [True],
        "\x00",
        " ",
        "\ud800",
        [[]],
        [""],
    ):
        found.append(json_case("sampling", f"a prompt {str(prompt)[:40]}", COMPLETIONS, {**base(COMPLETIONS), "prompt": prompt}))
    found.append(json_case("sampling", "a count of a million words", COUNT, {**base(COUNT), "system": "word " * 10**6}))
    return found
