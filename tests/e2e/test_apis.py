"""Every API on every dialect: what a client sees of a turn that a scripted model sampled."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ds4batch.scripted.vocabulary import scripted_tokenizer
from tests.e2e.api_clients import CLIENTS, Asked, Client, Messages, Reply, Responses, Results, without_own
from tests.e2e.conftest import CTX, RETRY, SLOTS, Scripted
from tests.scripted.spellings import AT, COUNT, LOOK, NO_ARGUMENTS, SCHEMAS

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
WORDS = scripted_tokenizer("x.json")


def tokens(text: str) -> int:
    """Of a scripted answer, without the one that ends it."""
    return len(WORDS.encode(text))


TURNS: dict[str, tuple[str, str, list[tuple[str, Any]], str]] = {
    "ask-text": ("hm, é\nso", "Hello \U0001f600, wörld.\n\nBye.", [], "stop"),
    "ask-call": ("hm", "I look.", [LOOK], "tool_calls"),
    "ask-bare": ("hm", "", [NO_ARGUMENTS], "tool_calls"),
    "ask-many": ("hm", "I look twice.", [LOOK, COUNT, NO_ARGUMENTS], "tool_calls"),
    "ask-broken": ("hmagain", "I try.Now then.", [COUNT], "tool_calls"),  # its second try is all that is seen of the calls
    "ask-mended": ("hm", "I look.", [LOOK], "tool_calls"),  # all that lacks is the outermost end
    "ask-inside": ("hm, I look", "", [COUNT], "tool_calls"),  # the reasoning was not closed before
}
"""What a client is to see of a turn: reasoning, text, calls, why it ended."""


@pytest.mark.parametrize("asked", TURNS)
def test_a_turn_is_seen_as_it_was_meant_and_its_stream_adds_up_to_the_object(model: Scripted, client: Client, asked: str) -> None:
    streamed, whole = (client.ask(model, [Asked(asked)], stream=stream) for stream in (True, False))
    assert streamed.said == whole.said == TURNS[asked]
    if not (isinstance(client, Messages) and asked == "ask-broken"):  # where the object has all thinking before all text
        assert without_own(streamed.whole) == without_own(whole.whole)
    expected = tokens(model.answers[asked]) + (tokens(model.answers[RETRY]) if asked == "ask-broken" else 0)
    assert streamed.usage.generated == whole.usage.generated == expected
    assert streamed.usage.prompt == whole.usage.prompt
    for reply in (streamed, whole):
        assert len({call.id for call in reply.calls}) == len(TURNS[asked][2])
        assert {call.id.split("_")[0] for call in reply.calls} <= {"toolu" if isinstance(client, Messages) else "call"}


def test_without_tools_reasoning_is_told_and_calls_are_text(model: Scripted, client: Client) -> None:
    reply = client.ask(model, [Asked("ask-call")], stream=True, tools=False)
    assert reply.said == ("hm", "I look." + model.spelling.block(LOOK), [], "stop")


@pytest.mark.parametrize("remember", [True, False], ids=["with reasoning", "without"])
def test_a_tool_loop_evaluates_nothing_twice(model: Scripted, client: Client, remember: bool) -> None:
    talk: list[Any] = [Asked(f"ask-loop {client.name} {remember}")]
    replies: list[Reply] = []

    def go_on(*more: Any) -> Reply:
        talk.extend(more)
        replies.append(client.ask(model, talk, stream=remember, remember=remember))
        talk.append(replies[-1])
        return replies[-1]

    first = go_on()
    assert [call.name for call in first.calls] == ["look", "count"]
    one, two = (call.id for call in first.calls)
    second = go_on(Results(((two, "seen-one too"), (one, "seen-one"))))
    assert second.said == ("second", "And again.", [("look", {"at": "there", "times": 1})], "tool_calls")
    third = go_on(Results(((second.calls[0].id, "seen-two"),)))
    assert third.said == ("third", "All is seen.", [], "stop")
    fourth = go_on(Asked("ask-more"))
    assert fourth.said == ("fourth", "There is no more.", [], "stop")
    if model.dialect == "jinja":
        del replies[-1]  # its template never shows a reasoning, so nobody can know how the next request will look
    for before, after in itertools.pairwise(replies):
        assert after.usage.cached >= before.usage.prompt + before.usage.generated - 1


@pytest.mark.parametrize("odd", ["ask-broken", "ask-mended", "ask-inside"])
def test_odd_calls_are_gone_on_from_like_any(model: Scripted, client: Client, odd: str) -> None:
    asked = Asked(f"{odd} {client.name}")
    reply = client.ask(model, [asked], stream=True)
    results = Results(((reply.calls[0].id, "seen-two"),))
    after = client.ask(model, [asked, reply, results], stream=True)
    assert after.said == ("third", "All is seen.", [], "stop")
    assert after.usage.cached >= reply.usage.prompt + reply.usage.generated - 1


def test_calls_come_back_to_the_model_as_it_wrote_them(model: Scripted, client: Client) -> None:
    """Another result than the one that was gone on from, so that nothing but the prompt's own text can show what it shares."""
    asked = Asked(f"ask-loop again {client.name}")
    first = client.ask(model, [asked])
    one, two = (call.id for call in first.calls)
    client.ask(model, [asked, first, Results(((one, "seen-one"), (two, "seen-one")))])
    other = client.ask(model, [asked, first, Results(((one, "A seen-one"), (two, "B seen-one")))])
    assert other.content == "And again."
    hidden = tokens(model.spelling.turn("first", "I look.", LOOK, COUNT)) if model.dialect == "jinja" else 1
    assert other.usage.cached >= first.usage.prompt + first.usage.generated - hidden


def test_a_call_that_breaks_off_in_its_arguments_is_text(model: Scripted, client: Client) -> None:
    streamed, whole = (client.ask(model, [Asked("ask-half")], stream=stream) for stream in (True, False))
    text = model.answers["ask-half"]
    assert streamed.said == whole.said == ("hm", text[text.index("I try.") :], [], "stop")


def test_several_conversations_at_once_do_not_touch_each_other(model: Scripted) -> None:
    def loop(client: Client, name: str) -> None:
        talk: list[Any] = [Asked(f"ask-loop at once {name}")]
        for then in ("seen-one", "seen-two"):
            reply = client.ask(model, talk, stream=True)
            talk += [reply, Results(tuple((call.id, f"{then} {name}") for call in reply.calls))]
            after = client.ask(model, talk)
        assert after.said == ("third", "All is seen.", [], "stop")

    with ThreadPoolExecutor(SLOTS) as pool:
        for done in [pool.submit(loop, CLIENTS[i % 3], f"{i}") for i in range(SLOTS)]:
            done.result()


def test_a_freeform_tool_gets_its_text_and_goes_on(model: Scripted) -> None:
    client, patch = Responses(), "*** Begin\n+ \u00e9\n*** End\n"
    body = client.body([Asked("ask-patch")]) | {"tools": [{"type": "custom", "name": "patch"}]}
    first = client.assembled(client.send(model, body, stream=True))
    (call,) = [item for item in first["output"] if item["type"] == "custom_tool_call"]
    assert (call["name"], call["input"], call["status"]) == ("patch", patch, "completed")
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "seen-two"}
    body["input"] += [*first["output"], result]
    second = client.whole(client.send(model, body).body)
    assert second.content == "All is seen."
    assert second.usage.cached >= first["usage"]["total_tokens"] - 1


def test_two_tries_share_one_limit(model: Scripted, client: Client) -> None:
    limit = tokens(model.answers["ask-broken"]) + 12
    reply = client.ask(model, [Asked("ask-broken")], stream=True, more={client.limit: limit})
    assert (reply.reason, reply.calls, reply.usage.generated) == ("length", (), limit)
    limit = tokens(model.answers["ask-broken"])
    reply = client.ask(model, [Asked("ask-broken")], more={client.limit: limit})
    assert (reply.reason, reply.calls, reply.usage.generated) == ("length", (), limit)
    assert reply.content == "I try." + model.spelling.unreadable  # nothing is left for another try, so it is the answer


@STREAMED
def test_a_call_that_the_limit_cuts_is_no_call(model: Scripted, client: Client, stream: bool) -> None:
    text = model.answers["ask-many"]
    limit = tokens(text[: text.index("sheep")])
    reply = client.ask(model, [Asked("ask-many")], stream=stream, more={client.limit: limit})
    assert (reply.reason, reply.usage.generated) == ("length", limit)
    assert [(call.name, call.parsed) for call in reply.calls] == [LOOK]
    assert reply.content.startswith("I look twice.")
    assert reply.content != "I look twice."  # what the other call would have been


@STREAMED
def test_nothing_is_shown_from_a_stop_text_on(model: Scripted, client: Client, stream: bool) -> None:
    if isinstance(client, Responses):
        pytest.skip("this API has no stop texts")
    reply = client.ask(model, [Asked("ask-text")], stream=stream, more={client.stop: ["wörl", "Bye"]})
    assert reply.said == ("hm, é\nso", "Hello \U0001f600, ", [], "stop")


def test_thinking_can_be_switched_off(model: Scripted, client: Client) -> None:
    off: dict[str, dict[str, Any]] = {
        "chat": {"reasoning_effort": "none"},
        "responses": {"reasoning": {"effort": "none"}},
        "messages": {"thinking": {"type": "disabled"}},
    }
    reply = client.ask(model, [Asked("say-bare")], stream=True, more=off[client.name])
    assert reply.said == ("", "Just text.", [("count", COUNT[1])], "tool_calls")


def test_a_count_of_tokens_is_the_input_of_the_same_call(model: Scripted) -> None:
    client = Messages()
    switches: tuple[dict[str, Any] | None, ...] = ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 100}, None)
    for thinking in switches:
        for tools in (True, False):
            body = client.body([Asked("ask-text")], tools=tools) | {"thinking": thinking}
            counted = model.request("POST", "/v1/messages/count_tokens?beta=true", body | {"max_tokens": None})
            whole = client.whole(client.send(model, body | {"max_tokens": 1}).body)
            assert counted.body == {"input_tokens": whole.usage.prompt}


@pytest.mark.parametrize("asked", ["ask-quiet", "ask-text", "ask-many"])
def test_a_count_of_tokens_is_the_input_of_a_call_that_goes_on(model: Scripted, asked: str) -> None:
    if model.dialect == "jinja" and asked != "ask-quiet":
        pytest.skip("its session will hold a reasoning that no prompt of its template shows")
    client = Messages()
    first = client.ask(model, [Asked(asked)])
    results = Results(tuple((call.id, f"seen-two {call.name}") for call in first.calls))
    longer = client.body([Asked(asked), first, results if first.calls else Asked("ask-more")])
    counted = model.request("POST", "/v1/messages/count_tokens", longer).body["input_tokens"]
    stream = client.send(model, longer, stream=True)
    usage = stream.events[0]["message"]["usage"]
    assert counted == usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == client.whole(client.assembled(stream)).usage.prompt


# Results without a history.

OUTPUT_ONLY: tuple[Client, ...] = (Responses(), Messages())


@pytest.mark.parametrize("client", OUTPUT_ONLY, ids=lambda client: client.name)
def test_results_alone_go_on_where_their_calls_were_sampled(model: Scripted, client: Client) -> None:
    stream = isinstance(client, Messages)
    first = client.ask(model, [Asked(f"ask-loop alone {client.name}")], stream=stream)
    one, two = (call.id for call in first.calls)
    second = client.ask(model, [Results(((two, "seen-one"), (one, "seen-one")))], stream=stream)
    assert second.said[1:] == ("And again.", [("look", {"at": "there", "times": 1})], "tool_calls")
    assert second.usage.cached >= first.usage.prompt + first.usage.generated - 1
    third = client.ask(model, [Results(((second.calls[0].id, "seen-two"),))], stream=stream)
    assert third.said == ("third", "All is seen.", [], "stop")
    assert third.usage.cached >= second.usage.prompt + second.usage.generated - 1


@pytest.mark.parametrize("client", OUTPUT_ONLY, ids=lambda client: client.name)
def test_results_whose_session_went_on_are_a_conflict(model: Scripted, client: Client) -> None:
    asked = Asked(f"ask-loop lost {client.name}")
    first = client.ask(model, [asked])
    one, two = (call.id for call in first.calls)
    for stream in (True, False):
        partly = client.send(model, client.body([Results(((one, "seen-one"),))]), stream=stream)
        assert partly.status == 409
    both = Results(((one, "seen-one"), (two, "seen-one")))
    client.ask(model, [asked, first, both])
    lost = client.send(model, client.body([both]), stream=True)
    assert lost.status == 409
    assert "continuation state is not available" in client.message(lost)
    assert client.ask(model, [asked, first, both]).reason == "tool_calls"  # as the message says


@pytest.mark.parametrize("client", OUTPUT_ONLY, ids=lambda client: client.name)
def test_results_of_calls_that_were_never_made_are_refused(model: Scripted, client: Client) -> None:
    answer = client.send(model, client.body([Results((("call_never", "seen-one"),))]))
    assert answer.status == 400
    assert "continuation state is not available for " in client.message(answer)
    assert "call_never; retry by replaying the full " in client.message(answer)


# Requests that are odd, and those that are wrong.


def test_what_a_client_adds_is_passed_over(model: Scripted, client: Client) -> None:
    odd = {"metadata": {"user_id": "x"}, "service_tier": "auto", "x": [[[]]], "store": False, "user": "me", "betas": ["a"]}
    assert client.ask(model, [Asked("ask-text")], more=odd).content.startswith("Hello")
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y", "authorization": "Bearer z", "x-api-key": "k"}
    path = client.path.partition("?")[0] + "?beta=true&x=/v1/nothing"
    assert model.request("POST", path, client.body([Asked("ask-text")]), headers).status == 200
    assert model.request("HEAD", "/").raw == b""


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"messages": []}, "messages: must not be empty"),
        ({"tools": {}}, "tools: expected a list"),
        ({"temperature": -1}, "temperature: "),
        ({"messages": [{"role": "user", "content": "x " * CTX}]}, "but the configured context size is"),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "the loaded model has no vision"),
    ],
    "responses": [
        ({"input": None}, "missing input"),
        ({"input": [{"type": "parable"}]}, "input[0].type: unsupported item type 'parable'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported; replay full input instead"),
        ({"input": "x " * CTX}, "but the configured context size is"),
        ({"input": [{"content": [{"type": "input_image", "image_url": "x"}]}]}, "the loaded model has no vision"),
    ],
    "messages": [
        ({"messages": None}, "missing messages"),
        ({"max_tokens": "many"}, "max_tokens: expected a number"),
        ({"messages": [{"role": "user", "content": [{"type": "parable"}]}]}, "messages[0].content[0].type: "),
        ({"messages": [{"role": "user", "content": "x " * CTX}]}, "prompt is too long: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "the loaded model has no vision"),
    ],
}


@STREAMED
def test_an_error_has_the_shape_of_its_api(servers: dict[str, Scripted], client: Client, stream: bool) -> None:
    model = servers["glm"]
    for more, message in WRONG[client.name]:
        answer = client.send(model, client.body([Asked("ask-text")]) | more, stream=stream)
        assert answer.status == 400
        assert message in client.message(answer)
        assert answer.headers["content-type"] == "application/json"
    broken = model.request("POST", client.path, b"{")
    assert broken.status == 400
    assert "invalid JSON request" in client.message(broken)


def test_the_official_client_reads_chats_and_responses(model: Scripted) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{model.port}/v1", api_key="any", max_retries=0) as sdk:
        tools: Any = [{"type": "function", "function": {"name": name, "parameters": form}} for name, form in SCHEMAS.items()]
        with sdk.chat.completions.stream(model="m", messages=[{"role": "user", "content": "ask-many"}], tools=tools) as stream:
            choice = stream.get_final_completion().choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look twice.")
        made = choice.message.tool_calls or []
        assert [call.function.name for call in made] == ["look", "count", "rest"]
        assert made[0].function.arguments.count(AT.splitlines()[0][:10]) == 1
        flat: Any = [{"type": "function", "name": name, "parameters": form, "strict": False} for name, form in SCHEMAS.items()]
        with sdk.responses.stream(model="m", input="ask-many", tools=flat, reasoning={"summary": "auto"}) as events:
            response = events.get_final_response()
        assert (response.status, response.output_text) == ("completed", "I look twice.")
        assert [item.type for item in response.output] == ["reasoning", "message", *["function_call"] * 3]


def test_the_model_is_listed_under_the_names_of_its_family(servers: dict[str, Scripted]) -> None:
    families = {"deepseek-v4": ["deepseek-v4-flash", "deepseek-v4-pro"], "deepseek-v4.1": ["deepseek-v4.1-flash"], "jinja": []}
    for dialect, names in families.items():
        with openai.OpenAI(base_url=f"http://127.0.0.1:{servers[dialect].port}/v1", api_key="any", max_retries=0) as sdk:
            listed = [model.id for model in sdk.models.list()]
            assert listed[1:] == names
            assert all(sdk.models.retrieve(name).id == name for name in (*listed, "deepseek-chat", "zai/glm-5.2-chat"))
            with pytest.raises(openai.NotFoundError):
                sdk.models.retrieve("deepseek-v5")
