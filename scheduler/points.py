"""What a job's prompt stands for, once it is known which ids it will be evaluated as: its text, and the places in it that its
client may come back to.

A client comes back by text: to the end of its last message (a retry, a history that goes on without the answer) and to the
beginning of its last turn (an edit). Where the session spells or shows less than the client does, only these places tell
which tokens a part of the client's text stands for. Reads values and asks the tokeniser for a few tokens; changes the job alone.
"""

from __future__ import annotations

import logging

from scheduler.backend import Text
from scheduler.bindings import Point, latest
from scheduler.job import Job
from scheduler.reuse import Reuse
from scheduler.slots import Checkpoint

log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"  # what `Text.render` shows for bytes that are no character


def settle(job: Job, held: Checkpoint, reuse: Reuse, text: Text, marks: bool) -> None:
    """Note text, points and images of `job.prompt`, which begins with `reuse.tokens` of what `held` describes.

    With `marks` the session can only be cut to a point that is marked on the way, so the prompt's end is always one. Otherwise
    it is one only where the session's ids may not be the client's. What cannot be tokenised or rendered has no point.
    """
    suffix = reuse.suffix_from
    if suffix is None:
        job.prompt_text = job.text
    else:
        whole = reuse.lost == 0 and held.text is not None
        job.prompt_text = f"{held.text}{text.render(reuse.owed)}{job.text[suffix:]}" if whole else ""
        job.images = tuple(new._replace(at=old.at) for new, old in zip(job.images, held.images, strict=False))
    earlier = [
        point
        for point in held.points
        if point.text and point.tokens <= reuse.tokens and job.text[: point.text] == held.asked[: point.text]
    ]
    if suffix and reuse.tokens == held.length:
        earlier.append(Point(held.length + len(reuse.owed), suffix))  # the turn begins where the last one ended
    end: list[Point] = []
    if marks or suffix is not None or job.generation_from is not None:
        try:
            end = _end(job, text)
        except Exception:  # a point is worth a tier, not the request
            log.exception("job %d: the end of its prompt", job.id)
    job.points = latest([*(point for point in earlier if point.tokens < len(job.prompt)), *end])
    job.mark_at = end[0].tokens if marks and end else 0


def _end(job: Job, text: Text) -> list[Point]:
    """The end of the last message where it is known, else the last place but one; nothing in a prompt of one token."""
    prompt = job.prompt
    if job.generation_from is not None:
        opening = text.tokenise(job.text[job.generation_from :])
        at = len(prompt) - len(opening)
        if at > 0 and prompt[at:] == opening:
            return [Point(at, job.generation_from)]
    if len(prompt) < 2:
        return []
    last = text.render(prompt[-1:])
    known = last and _REPLACEMENT not in last and job.text.endswith(last)
    return [Point(len(prompt) - 1, len(job.text) - len(last) if known else None)]
