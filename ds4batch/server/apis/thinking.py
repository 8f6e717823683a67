"""Whether and how hard the model is to think, from the fields of a request. The same names and rules in every API.

An API's reader says which of its fields hold the switch and the effort; `resolve` weighs them with the model's name and the context.
"""

from __future__ import annotations

import re

from ds4batch.chat.conversation import Effort, Thinking
from ds4batch.server import fields
from ds4batch.server.apis.served import Served
from ds4batch.server.errors import bad_field
from ds4batch.server.fields import Object, describe

MAX_EFFORT_CTX = 393_216
"""The highest effort wants this much context, in tokens; in a smaller one it would only be cut off, so the next lower one is taken."""

_EFFORTS: dict[str, Effort] = {"max": "max", "high": "high", "xhigh": "high", "medium": "medium", "low": "low", "minimal": "low"}
_NO_EFFORT = ("none", "0")
_LEVEL = re.compile(r"[1-9]?[0-9]|100")

_OWNERS = {"qwen3.8-flash-next": "qwen/", "glm-5.2": "zai/", "glm-5.3-flash": "zai/"}
_OFF = {"deepseek-chat"} | {model + end for model in _OWNERS for end in ("-chat", "-no-think", "-nothink")}
_ON = {"deepseek-reasoner"} | {model + "-reasoner" for model in _OWNERS}
ALIASES = {
    **dict.fromkeys(_OFF | {f"{owner}{model}-chat" for model, owner in _OWNERS.items()}, False),
    **dict.fromkeys(_ON | {f"{owner}{model}-reasoner" for model, owner in _OWNERS.items()}, True),
}
"""Model names that say whether to think, where the request does not say it otherwise."""


def switch(body: Object, name: str, *, where: str = "") -> bool | None:
    """A field that turns thinking on or off: a boolean, or an object of the type `enabled` or `disabled`.

    None where it is absent or null, or an object of another type, which leaves the choice to the model.
    """
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise bad_field(where + name, f"expected true or false or an object, got {describe(value)}")
    return {"enabled": True, "disabled": False}.get(fields.text(value, "type", where=f"{where}{name}."))


def effort(body: Object, name: str, levels: bool, *, where: str = "") -> str | None:
    """A field that names the effort, or gives it as a number of 0..100 in a string where the model has `levels`; None where absent."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise bad_field(where + name, f"expected a string, got {describe(value)}")
    if value in _EFFORTS or value == "none" or (levels and _LEVEL.fullmatch(value)):
        return value
    wanted = ", ".join([*_EFFORTS, "none"]) + (", or a number from 0 to 100 in a string" if levels else "")
    raise bad_field(where + name, f"expected one of {wanted}, got {value[:40]!r}")


def resolve(served: Served, model: str, enabled: bool | None, asked: str | None) -> Thinking:
    """What a request means that asks for the model `model`, with the values that `switch` and `effort` read."""
    if asked in _NO_EFFORT:
        enabled = False
    if enabled is None:
        enabled = ALIASES.get(model)
    if enabled is False:
        return Thinking(enabled=False, explicit=True)
    level = int(asked) if asked is not None and asked not in _EFFORTS else None
    named = "high" if asked is None else _EFFORTS[asked] if level is None else _effort_of(level)
    if named == "max" and served.ctx < MAX_EFFORT_CTX:
        named = "high"
    return Thinking(True, named, level, explicit=enabled is not None or asked is not None)


def _effort_of(level: int) -> Effort:
    """The name nearest to a number."""
    return "low" if level < 60 else "high" if level < 90 else "max"
