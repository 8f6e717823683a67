"""Dialects over templates of six kinds, and a short talk to show them."""

from __future__ import annotations

import json

from ds4batch.chat.conversation import Call, Conversation, Message, Thinking, Tool
from ds4batch.chat.dialects.base import Dialect
from ds4batch.chat.dialects.jinja import JinjaDialect
from ds4batch.chat.schemas import canonical
from ds4batch.chat.template import CHATML, TRANSCRIPT, ChatTemplate
from tests.chat.jinja_templates import GEMMA, LLAMA3, MISTRAL, QWEN3


def tool(name: str = "sh") -> Tool:
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    return Tool(name, canonical(json.dumps({"name": name, "description": "café", "parameters": parameters})), parameters)


TOOL = tool()
ASK = Message("user", "list")
CALL = Message("assistant", "ok", reasoning="hm", calls=(Call("call_1", "sh", '{"cmd":"ls -l","n":2}'),))
RESULT = Message("tool", "a b", call_id="call_1")
PAIR = Message("assistant", calls=(Call("call_1", "sh", '{"cmd":"a"}'), Call("call_2", "sh", '{"cmd":"b"}')))
ANSWERED = [ASK, CALL, RESULT, Message("assistant", "done", reasoning="so")]


def qwen(stops: tuple[str, ...] = ("<|im_end|>",)) -> JinjaDialect:
    return JinjaDialect(ChatTemplate(QWEN3, "", "<|im_end|>"), stops, "hermes")


def llama() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(LLAMA3, "<|begin_of_text|>", "<|eot_id|>"), ("<|eot_id|>",), "llama3")


def mistral() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(MISTRAL, "<s>", "</s>"), ("</s>",))


def gemma() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(GEMMA, "<bos>", "<eos>"), ("<end_of_turn>",))


def chatml() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(CHATML, "", ""), ("<|im_end|>",))


def transcript() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(TRANSCRIPT, "", ""))


ALL = (qwen, llama, mistral, gemma, chatml, transcript)


def prompt(dialect: Dialect, *messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking | None = None) -> str:
    return dialect.render(Conversation(messages, tools, thinking or Thinking())).text
