"""Model ids that mean the loaded model with its thinking switched. Clients that know no other switch use them."""

from __future__ import annotations

from ds4batch.chat.conversation import Thinking

_FAMILIES = ("qwen3.8-flash-next", "glm-5.2", "glm-5.3-flash")
_MAKERS = ("qwen/qwen3.8-flash-next", "zai/glm-5.2", "zai/glm-5.3-flash")
_OFF = frozenset(
    {
        "deepseek-chat",
        *(family + ending for family in _FAMILIES for ending in ("-chat", "-no-think", "-nothink")),
        *(family + "-chat" for family in _MAKERS),
    }
)
_ON = frozenset({"deepseek-reasoner", *(family + "-reasoner" for family in (*_FAMILIES, *_MAKERS))})


def by_alias(model: str, thinking: Thinking) -> Thinking:
    """`thinking` as the requested model id has it, which is spelt exactly so. What the request says itself stays."""
    if thinking.explicit or model not in _OFF | _ON:
        return thinking
    return thinking._replace(enabled=model in _ON, explicit=True)
