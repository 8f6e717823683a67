"""What a job leaves in its slot for the next one: the checkpoint as the router will see it.

The memory-text tier trusts the published text blindly, so it must be the text of exactly those tokens, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.backend import Text
from scheduler.job import Job, pack
from scheduler.slots import NOTHING, Checkpoint

_REPLACEMENT = "\ufffd"  # what `Text.render` shows for bytes that are no character
_OVERLAP = 8  # tokens rendered again to join two pieces


def publish(text: Text | None, job: Job, tokens: Sequence[int], earlier: Checkpoint) -> Checkpoint:
    """The checkpoint a job leaves: `tokens` in the slot that held `earlier` before the job came.

    A prompt that was evaluated to its end stands for the text it was made from, so only the answer is rendered. After a cut
    one a text is known only as far as the earlier checkpoint had one; the ids alone bring a repeated request back
    here. Without `text` the checkpoint gets none.
    """
    if not tokens:
        return NOTHING
    complete = len(tokens) >= len(job.prompt)
    known, covered = "", 0
    if complete and job.prompt_text:
        known, covered = job.prompt_text, len(job.prompt)
    elif earlier.text and job.cached >= earlier.length:
        known, covered = earlier.text, earlier.length
    rendered = checkpoint_text(text, tokens, known, covered) if text is not None and (complete or covered) else None
    return Checkpoint(
        length=len(tokens),
        packed=pack(tokens),
        text=rendered,
        turn_start=job.turn_start,
        prompt_length=len(job.prompt) if complete else 0,
        asked=job.text,
        points=tuple(point for point in job.points if point.tokens <= len(tokens)),
        images=tuple(image for image in job.images if image.at + image.tokens <= len(tokens)),
    )


def text_at(text: Text, job: Job, length: int) -> str | None:
    """The text of the first `length` tokens of a job that runs; None when nobody can vouch for one.

    Within the prompt it is the prompt's own text without what the tokens after it are rendered as.
    """
    prompt = job.prompt
    if length >= len(prompt):
        tokens = prompt + job.generated[: length - len(prompt)]
        return checkpoint_text(text, tokens, job.prompt_text, len(prompt) if job.prompt_text else 0)
    rest = text.render(prompt[length:])
    if not job.prompt_text or _REPLACEMENT in rest or not job.prompt_text.endswith(rest):
        return None
    return job.prompt_text[: len(job.prompt_text) - len(rest)] or None


def checkpoint_text(text: Text, tokens: Sequence[int], known: str, covered: int) -> str | None:
    """The text of `tokens`, of which `known` is the text of the first `covered`.

    Only what follows is rendered, with a few tokens before it: their own text must come out as the start, which
    proves that no character is split there and that a token is rendered alike wherever it stands. If it does not,
    everything is rendered. None when a character is incomplete: the bytes behind U+FFFD are not what a client would
    send back for it.
    """
    if covered == len(tokens) and covered:
        return known
    if covered:
        tail = list(tokens[max(0, covered - _OVERLAP) : covered])
        before = text.render(tail)
        after = text.render(tail + list(tokens[covered:]))
        if _REPLACEMENT not in before and after.startswith(before):
            added = after[len(before) :]
            return None if _REPLACEMENT in added else known + added
    whole = text.render(tokens)
    return None if _REPLACEMENT in whole else whole
