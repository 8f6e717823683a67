"""What the owner is told of a request's reuse: one line in the log, and in which message a prompt left the nearest session."""

from __future__ import annotations

from ds4batch.messages import Divergence, Routed
from ds4batch.server.prompts import Prompt
from ds4batch.server.service import Tokenizer


def line(routed: Routed, prompt_tokens: int) -> str:
    """How much of a prompt was found where, or why nothing was."""
    found = f"{routed.cached_tokens} of {prompt_tokens} prompt tokens reused"
    if routed.cached_tokens:
        found += f" ({routed.tier}{', ' + routed.source if routed.source else ''}, slot {routed.slot})"
    if routed.fell_from is not None:
        found += f"; {routed.fell_from} was found and could not be carried out"
    differs = routed.divergence
    if differs is not None:
        found += f"; slot {differs.slot} agrees up to token {differs.at} of its {differs.live}: "
        found += f"it holds {differs.held!r}, the request {differs.asked!r}"
    return found


def diverging_message(prompt: Prompt, divergence: Divergence, tokenizer: Tokenizer) -> int | None:
    """The index of the message in which the prompt leaves the session; None before the first and where there are none.

    A template may trim what it renders, so a message begins where its content is next found; one that is not found begins
    nowhere. Decodes up to the whole prompt: not for the event loop.
    """
    place = len(tokenizer.decode(prompt.tokens[: divergence.at]))
    found, at = None, 0
    for i, message in enumerate(prompt.messages):
        content = message.text.strip()
        begins = prompt.text.find(content, at) if content else -1
        if begins > place:
            break
        if begins >= 0:
            found, at = i, begins + len(content)
    return found
