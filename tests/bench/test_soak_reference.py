"""The soak's reference: an answer that is another alone is found, and one that only its session explains is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from bench.soak.asks import APIS, Pool, Script, Wish, ask_of
from bench.soak.ledger import ENDED, Ending
from bench.soak.plan import plan
from bench.soak.reference import Comparison, Reference, broken_off, subsets
from bench.soak.replies import Said
from tests.bench.soak_evidence import record

Answer = Callable[[dict[str, Any], list[str]], str]  # of a body, and of the prompts that the session has seen


def compared(answer: Answer, *records: Any) -> Comparison:
    """The reference's verdict over a server that answers as `answer` says."""
    seen: list[str] = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        text = answer(body, seen)
        seen.append(json.dumps(body["messages"]))
        usage = {"prompt_tokens": 5, "completion_tokens": len(text.split()), "prompt_tokens_details": {"cached_tokens": 0}}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"created": 1, "choices": [choice], "usage": usage})

    async def stranger(request: web.Request) -> web.Response:
        seen.clear()
        return web.json_response({})

    async def run() -> Comparison:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", chat), web.post("/v1/completions", stranger)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await Reference(runner.addresses[0]).compare(records)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def said(text: str) -> Said:
    return Said(text, finish="stop", tokens=len(text.split()))


def repeats(body: dict[str, Any], seen: list[str]) -> str:
    return "You said: " + str(body["messages"][-1]["content"])


ASK = ask_of(Wish("chat", ("one",)))
TURN = ask_of(Wish("chat", ("one", "You said: one", "two")))


def test_equal_answers_and_beginnings_pass() -> None:
    whole = record(ask=ASK, said=said("You said: one"))
    beginning = record(1, ask=ASK, said=Said("You sa"), ending=Ending.LEFT, fates=ENDED)
    nothing = record(2, ask=ASK, said=Said(), ending=Ending.LEFT, fates=ENDED)
    found = compared(repeats, whole, beginning, nothing)
    assert (found.different, found.whole, found.beginnings, found.wrong, found.unanswered) == (1, 1, 1, (), ())


@pytest.mark.parametrize(
    "spoilt",
    [
        record(ask=ASK, said=said("You said: ane")),
        record(ask=ASK, said=replace(said("You said: one"), finish="length")),
        record(ask=ASK, said=replace(said("You said: one"), tokens=4)),
        record(ask=ASK, said=replace(said("You said: one"), logprobs=("x",))),
        record(ask=ASK, said=Said("You se"), ending=Ending.LEFT),
        record(ask=ASK, said=Said("You sa!"), ending=Ending.FAILED),
    ],
)
def test_one_different_bit_is_a_wrong_answer(spoilt: Any) -> None:
    found = compared(repeats, record(1, ask=ASK, said=said("You said: one")), spoilt)
    assert [wrong.record for wrong in found.wrong] == [spoilt]
    assert found.wrong[0].where != "nothing"


def test_a_turn_that_only_its_sampled_history_explains_is_right_and_counted() -> None:
    def by_session(body: dict[str, Any], seen: list[str]) -> str:
        return "from its session" if seen else "from its text"

    kept = record(ask=TURN, said=said("from its session"))
    lost = record(1, ask=TURN, said=said("from its text"))
    found = compared(by_session, kept, lost)
    assert (found.wrong, found.as_sampled) == ((), 1)
    found = compared(by_session, record(ask=TURN, said=said("from elsewhere")))
    assert len(found.wrong) == 1


def test_so_is_a_turn_that_only_the_beginning_of_an_earlier_answer_explains() -> None:
    """Seen in a soak: a client left behind two tokens, "\\n\\n", and the prompt of another's next turn went on from there."""
    lengths: list[int] = []

    def by_session(body: dict[str, Any], seen: list[str]) -> str:
        lengths[len(seen) :] = [body["max_tokens"]]
        return "from a beginning" if seen and lengths[-2] == 2 else "from its text"

    found = compared(by_session, record(ask=TURN, said=said("from a beginning")))
    assert (found.wrong, found.as_sampled) == ((), 1)


def test_a_first_turn_has_no_such_excuse() -> None:
    def by_session(body: dict[str, Any], seen: list[str]) -> str:
        return "from its session" if seen else "from its text"

    assert len(compared(by_session, record(ask=ASK, said=said("from its session"))).wrong) == 1


def test_what_the_reference_does_not_answer_is_not_passed_over() -> None:
    def broken(body: dict[str, Any], seen: list[str]) -> str:
        raise web.HTTPInternalServerError

    assert compared(broken, record(ask=ASK, said=said("x"))).unanswered == (ASK.key,)


def test_every_choice_of_earlier_turns_is_tried_the_whole_conversation_first() -> None:
    wish = Wish("chat", ("a", "b", "c", "d", "e"))
    tried = [tuple(len(turn.said) for turn in turns) for turns in subsets(wish)]
    assert tried == [(1, 3), (1,), (3,)]


def test_each_earlier_turn_is_broken_off_at_each_token_alone_and_behind_those_before() -> None:
    wish = Wish("chat", ("a", "b", "c", "d", "e"), limit=3)
    tried = [tuple((len(turn.said), turn.limit) for turn in turns) for turns in broken_off(wish)]
    assert tried == [((1, 1),), ((1, 2),), ((3, 1),), ((1, 3), (3, 1)), ((3, 2),), ((1, 3), (3, 2))]


# what is asked, and when


def test_one_of_each_are_of_every_api_and_form() -> None:
    kinds = [(ask.wish.api, ask.wish.form) for ask in Pool(0, singles=300, scripts=0).one_of_each()]
    forms = {(api, form) for api in ("chat", "responses", "messages") for form in ("", "call", "json")}
    assert sorted(kinds) == sorted(forms | {("completions", "")})


def test_the_same_seed_asks_the_same_and_another_does_not() -> None:
    first, again, other = (Pool(seed, singles=40, scripts=8) for seed in (1, 1, 2))
    assert [ask.body for ask in first.singles] == [ask.body for ask in again.singles]
    assert [ask.body for ask in first.singles] != [ask.body for ask in other.singles]
    assert {ask.wish.api for ask in first.singles} == set(APIS)
    assert {ask.wish.form for ask in first.singles} == {"", "call", "json"}
    assert plan(1, 1200) == plan(1, 1200) != plan(2, 1200)


def test_every_request_is_a_function_of_its_tokens() -> None:
    for ask in Pool(3, singles=60, scripts=0).singles:
        assert ask.body["temperature"] == 0 or ask.body["seed"] > 0


def test_a_script_goes_on_from_what_was_answered_and_ends() -> None:
    script = Script(0, Wish("responses", ("a",)), ("b", "c"))
    asked = [script.turn(answers) for answers in ([], ["x"], ["x", "y"], ["x", "y", "z"])]
    assert [ask.wish.said if ask else None for ask in asked] == [("a",), ("a", "x", "b"), ("a", "x", "b", "y", "c"), None]
    assert len({ask.key for ask in asked if ask}) == 3


@pytest.mark.parametrize("minutes", [1, 3, 20])
def test_a_plan_has_every_fault_and_a_life_without_kills(minutes: int) -> None:
    lives = plan(0, 60 * minutes)
    happens = {event.what for life in lives for event in life.events}
    assert {"engine killed", "engine paused", "disk full", "checkpoints damaged", "clock jumps", "burst"} <= happens
    assert sum(life.seconds for life in lives) == pytest.approx(60 * minutes)
    (steady,) = [life for life in lives if life.steady]
    assert steady.seconds == max(life.seconds for life in lives)
    assert "engine killed" not in {event.what for event in steady.events}
    assert all(0 <= event.at <= life.seconds for life in lives for event in life.events)
