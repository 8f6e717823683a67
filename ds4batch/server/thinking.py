"""The fields that switch a model's thinking, as the variables chat templates know. A template without them ignores both."""

from __future__ import annotations

from typing import Any

from ds4batch.server import fields
from ds4batch.server.errors import bad_field
from ds4batch.server.fields import Object

_EFFORTS = {"max": "max", "high": "high", "xhigh": "high", "medium": "medium", "low": "low", "minimal": "low", "none": "none"}


def read_thinking(body: Object) -> dict[str, Any]:
    """Template variables: `enable_thinking` and `reasoning_effort`, each only where the request controls it."""
    enabled = _switch(body)
    kwargs = fields.obj(body, "chat_template_kwargs") or {}
    if kwargs.get("enable_thinking") is not None:
        enabled = fields.flag(kwargs, "enable_thinking")
    effort = _effort(body, "") or _effort(kwargs, "chat_template_kwargs.")
    if effort == "none":
        return {"enable_thinking": False}
    out: dict[str, Any] = {}
    if enabled is not None:
        out["enable_thinking"] = enabled
    if effort is not None:
        out["reasoning_effort"] = effort
    return out


def _switch(body: Object) -> bool | None:
    think = body.get("thinking")
    if isinstance(think, dict):
        return {"enabled": True, "disabled": False}.get(str(think.get("type")))
    for name in ("thinking", "think"):
        if body.get(name) is not None:
            return fields.flag(body, name)
    return None


def _effort(body: Object, where: str) -> str | None:
    value = body.get("reasoning_effort")
    if value is None:
        return None
    name = where + "reasoning_effort"
    if not isinstance(value, str):
        raise bad_field(name, f"expected a string, got {fields.describe(value)}")
    if value not in _EFFORTS:
        raise bad_field(name, f"expected one of {', '.join(_EFFORTS)}, got {value[:40]!r}")
    return _EFFORTS[value]
