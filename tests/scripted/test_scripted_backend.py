"""The scripted model under the real sampler and reader: what it says, and that chance touches payload alone."""

from __future__ import annotations

import codecs
import time
from typing import NamedTuple

import msgspec
import pytest

import ds4batch.messages as m
from ds4batch.chat.events import Turn
from ds4batch.chat.markup import MARKUP
from ds4batch.chat.tracker import Tracker
from ds4batch.engine.service import Service
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.scripted.backend import ScriptedBackend
from ds4batch.scripted.script import Answer, Script
from ds4batch.scripted.vocabulary import scripted_tokenizer
from scheduler import Options
from tests.scripted.spellings import COUNT, LOOK, NO_ARGUMENTS, SCHEMAS, SPELLINGS, Spelling

SLOTS = 32
WORDS = scripted_tokenizer("play.json")
STRINGS = {"look": ["at"], "count": ["what"], "rest": []}
assert list(STRINGS) == list(SCHEMAS)


class Said(NamedTuple):
    """One request's answer."""

    text: str
    turn: Turn
    end: m.Finished
    tokens: list[int]  # with log-probabilities


def ask(*answers: Answer, prompt: str = "hi", requests: int = 1, **rest: object) -> list[Said]:
    """The answers to so many requests that run at once, each with another seed."""
    options = Options(mixed_prefill_quantum=512, idle_prefill_quantum=512, itl_budget=1.0, max_queue=1000)
    backend = ScriptedBackend(Script(answers), WORDS, SLOTS, 4096)
    service = Service(backend, TokenizerVocabulary(WORDS), time.monotonic, SLOTS, options)
    sampling = rest.pop("sampling", m.Sampling())
    assert isinstance(sampling, m.Sampling)
    for i in range(requests):
        drawn = msgspec.structs.replace(sampling, seed=i)
        members = {"tokens": WORDS.encode(prompt), "text": prompt, "max_tokens": 900, "arrival": 0.0, **rest}
        service.handle(m.Submit(id=i, sampling=drawn, **members))  # type: ignore[arg-type]
    said, turns, ends = [""] * requests, [Turn() for _ in range(requests)], {}
    tokens: list[list[int]] = [[] for _ in range(requests)]
    while service.busy:
        for event in service.step().events:
            match event:
                case m.Delta():
                    said[event.id] += event.text
                    turns[event.id].add(event.events)
                    tokens[event.id] += [item.token for item in event.logprobs]
                case m.Finished():
                    turns[event.id].add(event.rest)
                    ends[event.id] = event
    return [Said(said[i], turns[i], ends[i], tokens[i]) for i in range(requests)]


def test_an_answer_is_said_to_its_end_and_its_tokens_are_bytes() -> None:
    (said,) = ask(Answer("", "café \U0001f600".encode()))
    assert (said.text, said.end.reason, said.end.completion_tokens) == ("café \U0001f600", "stop", 10)


def test_an_open_answer_runs_to_its_limit() -> None:
    (said,) = ask(Answer("", b"on and on", end=False), max_tokens=20)
    assert (said.text, said.end.reason, said.end.completion_tokens) == ("on and on" + " " * 11, "length", 20)


def test_bytes_that_are_no_text_are_replaced_and_what_surrounds_them_is_not() -> None:
    (said,) = ask(Answer("", b"a\xff\xc3</think>\xc3\xa9z"))
    assert said.text == "a\ufffd\ufffd\u00e9z"  # no reading: special tokens have no text
    (said,) = ask(Answer("", b"a\xff</think>\xc3\xa9z"), reading=m.Reading(grammar="glm", thinking=True))
    assert (said.turn.reasoning, said.turn.content) == (["a\ufffd"], "\u00e9z")


def test_a_prompt_that_no_answer_fits_is_answered_with_nothing() -> None:
    (said,) = ask(Answer("bye", b"good bye"))
    assert (said.text, said.end.reason, said.end.completion_tokens) == ("", "stop", 0)


def test_what_was_said_counts_for_the_choice_of_the_next_answer() -> None:
    answers = (Answer("hi", b"hello"), Answer("hello", b"again"))
    assert [one.text for one in ask(*answers)] == ["hello"]
    assert [one.text for one in ask(*answers, prompt="hi hello hm")] == ["again"]


def reading(spelling: Spelling) -> m.Reading:
    return m.Reading(grammar=spelling.grammar, thinking=spelling.opened, tools=STRINGS)


@pytest.mark.parametrize("dialect", SPELLINGS)
def test_a_turn_is_read_as_it_was_meant(dialect: str) -> None:
    spelling = SPELLINGS[dialect]
    text = spelling.turn("hm, é", "I look.", LOOK, COUNT, NO_ARGUMENTS)
    (said,) = ask(Answer("", text.encode()), reading=reading(spelling))
    assert said.end.reason == "tool_calls"
    assert (said.turn.reasoning, said.turn.content) == (["hm, é"], "I look.")
    assert [call.name for call in said.turn.complete_calls] == ["look", "count", "rest"]
    assert said.end.raw == spelling.block(LOOK, COUNT, NO_ARGUMENTS)


@pytest.mark.parametrize("dialect", SPELLINGS)
def test_chance_strays_in_payload_and_never_in_the_markup_of_calls(dialect: str) -> None:
    """The logit of each scripted token is so little above the others that one of twelve tokens strays where it may."""
    spelling = SPELLINGS[dialect]
    text = "</think>" * spelling.opened + spelling.block(("look", {"at": "the sea and " * 3, "times": 3}))
    script = WORDS.encode(text)
    answers = ask(
        Answer("", text.encode(), margin=8.0),
        requests=64,
        reading=reading(spelling),
        sampling=m.Sampling(temperature=1.0, logprobs=0),
    )
    strayed = whole = both = 0
    for said in answers:
        structure = structural(spelling, said.tokens)
        wrong = {i for i, pair in enumerate(zip(said.tokens, script, strict=False)) if pair[0] != pair[1]}
        if structure and min(wrong, default=len(script)) > min(structure):  # else it strayed before its call
            assert not wrong & structure, said.text
            strayed += bool(wrong)
            whole += said.end.reason == "tool_calls"
            both += bool(wrong) and said.end.reason == "tool_calls"
    assert min(strayed, whole, both) > 3


def structural(spelling: Spelling, tokens: list[int]) -> set[int]:
    """The tokens that had to be the likeliest, going by all that was said before each."""
    tools = {name: frozenset(strings) for name, strings in STRINGS.items()}
    tracker = Tracker(spelling.grammar, thinking=spelling.opened, tools=tools, new_id=lambda: "call_1")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    places = set()
    for i, token in enumerate(tokens):
        if tracker.greedy:
            places.add(i)
        if token not in WORDS.special_ids or WORDS.decode([token]) in MARKUP:
            tracker.push(decoder.decode(WORDS.token_bytes(token)))
    return places


def test_a_prompt_that_ends_with_the_token_drawn_last_begins_a_turn_all_the_same() -> None:
    options = Options(mixed_prefill_quantum=512, idle_prefill_quantum=512, itl_budget=1.0, max_queue=10)
    backend = ScriptedBackend(Script((Answer("", b"yes", end=False),)), WORDS, 1, 4096)
    service = Service(backend, TokenizerVocabulary(WORDS), time.monotonic, 1, options)
    said = ["", ""]
    for i in range(2):
        greedy = m.Sampling(temperature=0.0)
        service.handle(m.Submit(id=i, sampling=greedy, tokens=WORDS.encode("hi "), text="hi ", max_tokens=8, arrival=0.0))
        while service.busy:
            said[i] += "".join(event.text for event in service.step().events if isinstance(event, m.Delta))
    assert said == ["yes     "] * 2
