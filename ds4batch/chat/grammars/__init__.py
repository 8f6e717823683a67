"""The grammars of tool calls, by the name a dialect gives."""

from __future__ import annotations

from ds4batch.chat.grammars import dsml, glm, hermes, llama3, qwen
from ds4batch.chat.grammars.base import Grammar

GRAMMARS: dict[str, Grammar] = {
    "dsml": dsml.GRAMMAR,
    "dsml-v41": dsml.GRAMMAR,  # every spelling is read for both; they differ in what is rendered
    "glm": glm.GRAMMAR,
    "qwen": qwen.GRAMMAR,
    "hermes": hermes.GRAMMAR,
    "llama3": llama3.GRAMMAR,
}
