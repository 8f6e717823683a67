"""GET /v1/models and /v1/models/{id}: the one model that is loaded, under all names that mean it."""

from __future__ import annotations

from typing import Any

from ds4batch.server.apis.thinking import ALIASES
from ds4batch.server.service import OWNER, Service

CREATED = 1767225600  # 2026-01-01; clients want a number, and one that changes would make equal answers differ
_PARAMETERS = (
    "tools",
    "tool_choice",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "ignore_eos",
    "stop",
    "seed",
    "stream",
    "reasoning_effort",
)


_FAMILY_NAMES = {"deepseek-v4": ("deepseek-v4-flash", "deepseek-v4-pro"), "deepseek-v4.1": ("deepseek-v4.1-flash",)}
"""What clients of a dialect's family may be set up to ask for."""


def known(service: Service, name: str) -> bool:
    """Whether a model of that name is the loaded one: it is listed, or a name that only says whether to think."""
    return name in _names(service) or name in ALIASES


def _names(service: Service) -> list[str]:
    own = service.model.id
    variants = [own + end for end in ("-chat", "-reasoner") if own + end in ALIASES]
    return list(dict.fromkeys([own, *variants, *_FAMILY_NAMES.get(service.model.dialect.name, ())]))


def model_object(service: Service, name: str) -> dict[str, Any]:
    """The loaded model under one of its names."""
    ctx = service.settings.ctx
    return {
        "id": name,
        "object": "model",
        "created": CREATED,
        "owned_by": OWNER,
        "name": service.model.name,
        "context_length": ctx,
        "top_provider": {
            "context_length": ctx,
            "max_completion_tokens": min(service.settings.tokens, ctx),
            "is_moderated": False,
        },
        "supported_parameters": list(_PARAMETERS),
    }


def model_list(service: Service) -> dict[str, Any]:
    """All names of the one model."""
    return {"object": "list", "data": [model_object(service, name) for name in _names(service)]}
