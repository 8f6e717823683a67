from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from harness import Server, script


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_the_official_client_lists_and_finds_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").owned_by == "ds4batch"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_official_client_gets_a_whole_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": script(n=2)}], logprobs=True)
    assert answer.choices[0].message.content == "w0 w1 "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].logprobs is not None
    assert [item.token for item in answer.choices[0].logprobs.content or []] == ["a", "b"]


def test_the_official_client_streams_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": script(n=9, delay=0.01)}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "".join(f"w{i} " for i in range(9))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_the_official_client_gets_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model="m", prompt="x", max_tokens=2).choices[0].text == "w0 w1 "
    streamed = client.completions.create(model="m", prompt="x", stream=True, logprobs=1)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "w0 w1 w2 w3 "


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    def ask(content: str, **more: object) -> object:
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], **more)  # type: ignore[call-overload]

    with pytest.raises(openai.BadRequestError, match="n: only 1 is supported"):
        ask("x", n=2)
    with pytest.raises(openai.BadRequestError) as caught:
        ask("a" * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError):
        ask(script(fail=500))
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(ask(script(fail=500, fail_after=1, delay=0.02), stream=True))  # type: ignore[call-overload]


def test_closing_the_official_clients_stream_ends_the_request(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": script(n=4000, delay=0.02)}], stream=True
    )
    next(iter(stream))
    stream.close()
    server.until_metric("vllm:num_requests_running", 0)
