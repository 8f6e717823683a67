"""GET /v1/models and /v1/models/{id}: the one model that is loaded."""

from __future__ import annotations

from typing import Any

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


def model_object(service: Service) -> dict[str, Any]:
    """The loaded model."""
    ctx = service.settings.ctx
    return {
        "id": service.model.id,
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
    """All models: one."""
    return {"object": "list", "data": [model_object(service)]}
