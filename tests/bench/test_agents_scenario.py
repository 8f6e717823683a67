"""The script of the agents, against a server that is a function of the request."""

from __future__ import annotations

import asyncio
import hashlib
import json
from itertools import accumulate

from bench import corpus
from bench.agent_accounting import Rendered
from bench.agent_check import chosen, repeated
from bench.agent_client import Answer, Pieces, Request
from bench.agent_messages import Json, ToolCall
from bench.agent_scenario import MAIN, SUB_AGENTS, Plan, Record, Scenario, unique_bodies
from bench.prompts import PromptBook
from ds4batch.repl.sse import Event

PLAN = Plan(seed=0, turns=4, main_tokens=200, turn_tokens=20, answer_tokens=8)
BOOK = PromptBook(corpus.prose(20_000), 0, run="", prompt_tokens=0)


class WordRenderer:
    """Tools, then messages one after another, with their calls; a token is four bytes."""

    def rendered(self, body: Json) -> Rendered:
        shown = [f"<{m['role']}>{m['content']}{json.dumps(m.get('tool_calls', []))}</>" for m in body["messages"]]
        text = (json.dumps(body["tools"]) + "".join(shown)).encode()
        return Rendered(text, list(accumulate(len(text[i : i + 4]) for i in range(0, len(text), 4))))

    def fed_back(self, answer: str, *, stopped: bool) -> bytes:
        return answer.encode()


def said(request: Request, failing: str = "") -> Answer:
    if request.id.endswith(failing) and failing:
        return Answer(failure="http_500: broken")
    digest = hashlib.sha256(json.dumps(request.body).encode()).hexdigest()
    text = f"I saw {digest[:6]}. And {digest[6:12]}."
    return Answer(
        text[:4] if request.hangup_after else text, finish_reason="stop", output_tokens=5, hung_up=bool(request.hangup_after)
    )


def play(failing: str = "", label: str = "t") -> list[Record]:
    async def ask(request: Request) -> Answer:
        await asyncio.sleep(0)
        return said(request, failing)

    async def nothing(turn: int) -> None:
        return None

    async def whole() -> list[Record]:
        scenario = Scenario(PLAN, WordRenderer(), BOOK, "m", ask, label)  # type: ignore[arg-type]
        await scenario.run(nothing)
        return scenario.records

    return asyncio.run(whole())


def by_kind(records: list[Record], kind: str) -> Record:
    (record,) = [r for r in records if r.request.kind == kind]
    return record


def test_the_same_seed_and_answers_give_the_same_requests() -> None:
    assert [r.request for r in play()] == [r.request for r in play()]


def test_all_agents_share_one_system_prompt_and_its_tools() -> None:
    bodies = [r.request.body for r in play()]
    assert len({json.dumps([body["messages"][0], body["tools"]]) for body in bodies}) == 1
    assert len({r.request.agent for r in play()}) == SUB_AGENTS + 1


def test_the_retry_asks_exactly_what_the_hang_up_asked() -> None:
    records = play()
    hangup, retry = by_kind(records, "hangup"), by_kind(records, "retry")
    assert hangup.request.hangup_after
    assert not retry.request.hangup_after
    assert retry.request.body == hangup.request.body
    assert retry.new_tokens == 1


def test_the_edit_changes_the_last_message_alone() -> None:
    records = play()
    edit = by_kind(records, "edit").request
    (before,) = [r.request for r in records if r.request.id == edit.id.replace("-edit", "-turn")]
    assert edit.body["messages"][:-1] == before.body["messages"][:-1]
    assert edit.body["messages"][-1]["role"] == "user"
    assert edit.body["messages"][-1]["content"].startswith(before.body["messages"][-1]["content"])
    assert edit.body["messages"][-1] != before.body["messages"][-1]


def test_the_main_agent_grows_and_hears_of_every_sub_agent() -> None:
    mains = [r for r in play() if r.request.agent == MAIN]
    assert len(mains) == PLAN.turns + 1
    lengths = [r.rendered_tokens for r in mains]
    assert lengths == sorted(set(lengths))
    report = json.loads(mains[1].request.body["messages"][-1]["content"])["reports"]
    assert set(report) == {f"sub{i}" for i in range(1, SUB_AGENTS + 1)}


def test_sub_agents_have_only_their_tasks_new() -> None:
    records = play()
    shared = len(f"<system>{records[0].request.body['messages'][0]['content']}</>") // 4
    for record in records:
        if record.request.agent != MAIN and record.request.id.endswith("-0-turn"):
            assert record.new_tokens <= record.rendered_tokens - shared
            assert record.new_tokens > 10


def test_a_client_that_encodes_its_history_anew_pays_for_the_tail_only() -> None:
    records = {r.request.id: r for r in play()}
    exact, compact = records["t-sub7-2-turn"], records["t-sub1-2-turn"]
    assert exact.new_tokens < compact.new_tokens < compact.rendered_tokens - 200


def test_some_answers_are_greedy_and_some_are_drawn_from_a_seed() -> None:
    samplings = {(r.request.body["temperature"], "seed" in r.request.body) for r in play()}
    assert samplings == {(0, False), (0.8, True)}


def test_a_failed_request_ends_its_own_conversation_only() -> None:
    records = play(failing="sub3-1-turn")
    assert [r.request.id for r in records if r.request.agent == "sub3"] == ["t-sub3-0-turn", "t-sub3-1-turn"]
    assert len([r for r in records if r.request.agent == "sub4"]) == PLAN.turns


def test_calls_of_the_model_itself_are_answered_one_by_one() -> None:
    scenario = Scenario(PLAN, WordRenderer(), BOOK, "m", None, "t")  # type: ignore[arg-type]
    agent = scenario._subs[0]
    calls = (ToolCall("x", "search", "{}"), ToolCall("y", "run", "{}"))
    turn = scenario._next(agent, 0, Answer("text", calls=calls))
    assert turn.calls == calls
    assert len(set(turn.results)) == 2


def test_the_sample_takes_the_odd_requests_first_and_none_twice() -> None:
    records = play() + play(label="again")
    sample = chosen(records, 3, seed=1)
    assert {"retry", "edit"} < {r.request.kind for r in sample}
    assert len(sample) == 3
    assert len(chosen(records, None, 1)) == len(unique_bodies(records)) == len(play()) - 1
    assert not any(r.answer.hung_up for r in chosen(records, None, 1))


def test_unlike_answers_to_one_request_are_found() -> None:
    records = play() + play(label="again")
    count, unlike = repeated(records)
    assert (count, unlike) == (len(play()) - 1, ())
    changed = records[-1]
    other = Answer(changed.answer.content + "!", finish_reason="stop", output_tokens=5)
    _, unlike = repeated([*records[:-1], Record(changed.request, other, 1, 1)])
    assert len(unlike) == 1


def test_an_answer_is_put_together_from_its_pieces() -> None:
    pieces = Pieces()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "text"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "run", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ):
        data = json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        pieces.stream.accept(Event("message", data), 0.0)
        pieces.delta(data)
    pieces.delta("[DONE]")
    answer = pieces.answer()
    assert (answer.content, answer.reasoning) == ("text", "hm")
    assert answer.calls == (ToolCall("c1", "run", '{"a": 1}'),)
    assert answer.bits != Answer("text", "hm", (ToolCall("c2", "run", '{"a": 2}'),)).bits
    assert answer.bits == Answer("text", "hm", (ToolCall("another id", "run", '{"a": 1}'),)).bits
