"""The three APIs that hold conversations: from a request to a prompt, and to the answer in the API's own shape.

What a request means is its reader's (server/apis), how the answer looks its wire's; the generation is generation.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from ds4batch.chat.conversation import Conversation
from ds4batch.messages import API, Constraint, Reading
from ds4batch.server.apis import chat_input, forcing, messages, responses
from ds4batch.server.apis.chat_input import ChatRequest
from ds4batch.server.apis.chat_wire import ChatWire
from ds4batch.server.apis.messages import MessagesRequest
from ds4batch.server.apis.messages_wire import MessagesWire
from ds4batch.server.apis.responses import ResponsesRequest
from ds4batch.server.apis.responses_wire import ResponsesWire
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object
from ds4batch.server.generation import Plan, generate
from ds4batch.server.prompts import Prompt, chat_prompt
from ds4batch.server.service import Exchange, Service, Tokenizer

_IDS: dict[API, str] = {"chat": "call_", "responses": "call_", "anthropic": "toolu_"}


async def chat_completions(service: Service, exchange: Exchange, body: Object) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    request = chat_input.read_request(body, service.served)
    held = await _held(service, request, "response_format")
    service.link.check_available()
    prompt = await chat_prompt(service, request.conversation, "messages")
    plan = Plan(prompt, request.sampling, request.limits, "chat", _reading(service, prompt, "chat"), constraint=held)
    wire = ChatWire(request.model, request.limits.include_usage, _speller(service, request.sampling.logprobs))
    return await generate(service, exchange, plan, wire)


async def create_response(service: Service, exchange: Exchange, body: Object) -> web.StreamResponse:
    """POST /v1/responses."""
    request = responses.read_request(body, service.served)
    held = await _held(service, request, "text.format")
    service.link.check_available()
    live = _live(service, request.conversation, request.undeclared, responses.continuation_lost)
    prompt = await chat_prompt(service, request.conversation, "input", request.results_from if live else None)
    plan = Plan(prompt, request.sampling, request.limits, "responses", _reading(service, prompt, "responses"), live, held)
    wire = ResponsesWire(request, _speller(service, request.sampling.logprobs))
    return await generate(service, exchange, plan, wire)


async def create_message(service: Service, exchange: Exchange, body: Object) -> web.StreamResponse:
    """POST /v1/messages."""
    request = messages.read_request(body, service.served)
    held = await _held(service, request, "output_config.format")
    service.link.check_available()
    live = _live(service, request.conversation, request.undeclared, messages.continuation_lost)
    prompt = await chat_prompt(service, request.conversation, "messages", request.results_from if live else None)
    plan = Plan(prompt, request.sampling, request.limits, "anthropic", _reading(service, prompt, "anthropic"), live, held)
    return await generate(service, exchange, plan, MessagesWire(request.model, len(prompt.tokens)))


async def count_tokens(service: Service, exchange: Exchange, body: Object) -> web.StreamResponse:
    """POST /v1/messages/count_tokens: as many as the same request would have as input."""
    request = messages.read_request({"max_tokens": 1, **body}, service.served)
    prompt = await chat_prompt(service, request.conversation, "messages")
    return exchange.json(messages.token_count(len(prompt.tokens)))


def _reading(service: Service, prompt: Prompt, api: API) -> Reading:
    """How the answer to a prompt is read."""
    conversation = prompt.conversation
    tools = conversation.tools if conversation is not None else ()
    offered = {tool.name: sorted(tool.strings) for tool in tools} if tools and service.model.dialect.grammar else None
    return Reading(grammar=service.model.dialect.grammar, thinking=prompt.thinking, tools=offered, ids=_IDS[api])


def _live(
    service: Service, conversation: Conversation, undeclared: Sequence[str], lost: Callable[[str, int], ApiError]
) -> bool:
    """Whether the request goes on from a session instead of a history. Raises ApiError 400 for calls that were never made here."""
    unknown = next((call_id for call_id in undeclared if not service.memory.may_know(call_id)), None)
    if unknown is not None:
        raise lost(unknown, 400)
    if undeclared and any(message.role == "assistant" for message in conversation.messages):
        raise lost(undeclared[0], 400)  # a history that lacks its last turn cannot be rendered
    return bool(undeclared)


async def _held(service: Service, request: ChatRequest | ResponsesRequest | MessagesRequest, where: str) -> Constraint | None:
    """What the answer is held to. `where` is the field of the request's format. Raises ApiError 400."""
    if request.format is None and request.choice.mode not in ("required", "named"):
        return None
    tools, grammar = request.conversation.tools, service.model.dialect.grammar
    # Off the loop: checking a large grammar takes longer than a step.
    make = partial(forcing.constraint, request.choice, request.format, where, tools, grammar)
    held = await asyncio.get_running_loop().run_in_executor(service.pool, make)
    if held is not None and request.sampling.ignore_eos:
        raise bad_field("ignore_eos", "an answer of a given form ends where the form does")
    return held


def _speller(service: Service, logprobs: int | None) -> Tokenizer | None:
    return service.model.tokenizer if logprobs is not None else None
