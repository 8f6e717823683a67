"""What is asked: every request of a run, fixed by the seed. Pure.

Each is greedy or seeded, so that its answer is a function of its tokens alone and can be held against a solo run. Conversations are
scripts of what the user says; what goes out at a turn depends on what was answered before, and so on nothing but the script.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from bench import seeded
from bench.soak.replies import PATHS, Json

APIS = tuple(PATHS)
TOPICS = ("rivers", "clocks", "bread", "lighthouses", "glaciers", "looms", "bees", "tides", "violins", "mines", "kites", "salt")
SYSTEMS = (
    "",
    "You are a terse assistant. " + "Answer in plain words and never make a list. " * 4,
    "You help a small team that repairs instruments. " + "Say what you know, and say when you do not. " * 6,
)
FOLLOW_UPS = ("Go on.", "Why is that so?", "Give one example.", "Say it in fewer words.", "And what came before that?")
MODEL = "any"
HEAVY_RIVALS = 20
_LOOK: Json = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 8}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["at", "times"],
    "additionalProperties": False,
}
_COLOUR: Json = {
    "type": "object",
    "properties": {"colour": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Wish:
    """What a request wants, in no API's words."""

    api: str
    said: tuple[str, ...]  # user, assistant, user, ...
    system: str = ""
    limit: int = 24  # tokens
    temperature: float = 0.0
    seed: int = 1
    stream: bool = False
    form: str = ""  # call: a tool must be called; json: the answer is held to a schema
    rivals: int | None = None  # log-probabilities, with so many rivals
    endless: bool = False  # no stop token can be drawn; chat and completions only

    @property
    def kind(self) -> str:
        """How the report counts it."""
        return self.form or ("turn" if len(self.said) > 1 else "single")


@dataclass(frozen=True)
class Ask:
    """One request as it is sent."""

    wish: Wish
    body: Json
    key: str  # the same for requests that must have the same answer

    @property
    def path(self) -> str:
        """Of its API."""
        return PATHS[self.wish.api]

    @property
    def data(self) -> bytes:
        """The body."""
        return json.dumps(self.body).encode()


def ask_of(wish: Wish) -> Ask:
    """The request in its API's words."""
    body = _BODIES[wish.api](wish)
    body |= {"model": MODEL, "temperature": wish.temperature, "seed": wish.seed}
    if wish.stream:
        body["stream"] = True
    if wish.endless:
        body["ignore_eos"] = True
    text = json.dumps(body, sort_keys=True)
    return Ask(wish, body, hashlib.sha256(f"{wish.api} {text}".encode()).hexdigest()[:24])


def _chat(wish: Wish) -> Json:
    body: Json = {"messages": _messages(wish, True), "max_tokens": wish.limit}
    if wish.stream:
        body["stream_options"] = {"include_usage": True}
    if wish.rivals is not None:
        body |= {"logprobs": True, "top_logprobs": wish.rivals}
    if wish.form == "call":
        body["tools"] = [
            {"type": "function", "function": {"name": "look", "description": "Looks somewhere.", "parameters": _LOOK}}
        ]
        body["tool_choice"] = {"type": "function", "function": {"name": "look"}}
    if wish.form == "json":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "colour", "schema": _COLOUR}}
    return body


def _completion(wish: Wish) -> Json:
    body: Json = {"prompt": "\n".join(filter(None, (wish.system, *wish.said))), "max_tokens": wish.limit}
    if wish.stream:
        body["stream_options"] = {"include_usage": True}
    if wish.rivals is not None:
        body["logprobs"] = wish.rivals
    return body


def _response(wish: Wish) -> Json:
    items = [
        {"role": role, "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]}
        for role, text in _roles(wish.said)
    ]
    body: Json = {"input": items, "max_output_tokens": wish.limit, "store": False}
    if wish.system:
        body["instructions"] = wish.system
    if wish.rivals is not None:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": wish.rivals}
    if wish.form == "call":
        body["tools"] = [{"type": "function", "name": "look", "description": "Looks somewhere.", "parameters": _LOOK}]
        body["tool_choice"] = {"type": "function", "name": "look"}
    if wish.form == "json":
        body["text"] = {"format": {"type": "json_schema", "name": "colour", "schema": _COLOUR}}
    return body


def _message(wish: Wish) -> Json:
    body: Json = {"messages": _messages(wish, False), "max_tokens": wish.limit}
    if wish.system:
        body["system"] = wish.system
    if wish.form == "call":
        body["tools"] = [{"name": "look", "description": "Looks somewhere.", "input_schema": _LOOK}]
        body["tool_choice"] = {"type": "tool", "name": "look"}
    if wish.form == "json":
        body["output_config"] = {"format": {"type": "json_schema", "schema": _COLOUR}}
    return body


_BODIES = {"chat": _chat, "completions": _completion, "responses": _response, "messages": _message}


def _messages(wish: Wish, system: bool) -> list[Json]:
    head = [{"role": "system", "content": wish.system}] if system and wish.system else []
    return head + [{"role": role, "content": text} for role, text in _roles(wish.said)]


def _roles(said: Sequence[str]) -> list[tuple[str, str]]:
    return [("assistant" if i % 2 else "user", text) for i, text in enumerate(said)]


@dataclass(frozen=True)
class Script:
    """A conversation: its first wish, and what the user says at each further turn."""

    number: int
    first: Wish
    further: tuple[str, ...]

    def turn(self, answers: Sequence[str]) -> Ask | None:
        """The request behind `answers`, or None behind the last."""
        if len(answers) > len(self.further):
            return None
        said = list(self.first.said)
        for answer, text in zip(answers, self.further, strict=False):
            said += [answer, text]
        return ask_of(replace(self.first, said=tuple(said)))


class Pool:
    """All that may be asked in a run: `singles` requests that stand alone and `scripts` conversations."""

    def __init__(self, seed: int, singles: int, scripts: int) -> None:
        self.singles = [ask_of(_single(seeded.generator(seed, "single", i), i)) for i in range(singles)]
        self.scripts = [_script(seeded.generator(seed, "script", i), i) for i in range(scripts)]

    def one_of_each(self) -> list[Ask]:
        """A single of each API and form that there is one of."""
        return list({(ask.wish.api, ask.wish.form): ask for ask in reversed(self.singles)}.values())


def heavy(seed: int, number: int) -> Ask:
    """A stream of some hundred kilobytes: what does not fit into any buffer between a server and a client that does not read."""
    rnd = seeded.generator(seed, "heavy", number)
    wish = Wish("chat", (_opening(rnd),), limit=300, stream=True, rivals=HEAVY_RIVALS, endless=True)
    return ask_of(wish)


def endless(seed: int, *what: object, limit: int, stream: bool, padding: int = 0) -> Ask:
    """A request of exactly `limit` tokens that shares its beginning with nobody; its prompt is padded with so many sentences."""
    rnd = seeded.generator(seed, "endless", *what)
    said = (f"{rnd.randrange(10**9)} {_opening(rnd, padding)}",)
    return ask_of(Wish(rnd.choice(("chat", "completions")), said, limit=limit, stream=stream, endless=True))


def long(seed: int, *what: object, limit: int, stream: bool, padding: int) -> Ask:
    """What makes the largest forwards: so many times one sentence, which drafters take up, and every rival of what follows."""
    number = seeded.generator(seed, "long", *what).randrange(10**8, 10**9)
    said = str(number) + " Mind the tides, please, and what is said of them." * padding
    return ask_of(Wish("completions", (said,), limit=limit, stream=stream, rivals=HEAVY_RIVALS))


def _single(rnd: Random, number: int) -> Wish:
    api = APIS[number % len(APIS)]
    form = rnd.choice(("call", "json")) if api != "completions" and rnd.random() < 0.25 else ""
    return Wish(
        api,
        (_opening(rnd),),
        system=rnd.choice(SYSTEMS),
        limit=60 if form else rnd.choice((1, 8, 16, 32, 64)),
        temperature=rnd.choice((0.0, 0.0, 0.6, 1.0)),
        seed=rnd.randrange(1, 1 << 31),
        stream=rnd.random() < 0.6,
        form=form,
        rivals=rnd.choice((None, 0, 3)) if api != "messages" and not form else None,
    )


def _script(rnd: Random, number: int) -> Script:
    wish = Wish(
        APIS[number % len(APIS)],
        (_opening(rnd),),
        system=rnd.choice(SYSTEMS),
        limit=rnd.choice((12, 24, 40)),
        temperature=rnd.choice((0.0, 0.0, 0.6)),
        seed=rnd.randrange(1, 1 << 31),
        stream=rnd.random() < 0.6,
        rivals=rnd.choice((None, None, 2)) if number % len(APIS) != APIS.index("messages") else None,
    )
    return Script(number, wish, tuple(rnd.choice(FOLLOW_UPS) for _ in range(rnd.randrange(1, 4))))


def _opening(rnd: Random, padding: int | None = None) -> str:
    topic = rnd.choice(TOPICS)
    text = f"Tell me about {topic} number {rnd.randrange(1000)}. "
    return text + f"Mind the {topic}, please, and what is said of them. " * (
        rnd.choice((0, 1, 4, 12, 24)) if padding is None else padding
    )
