"""The reuse ladder: every way a job can use what a slot holds, best first, each said once.

A tier is a probe (pure: it reads a published checkpoint and the job, never tokenises, renders, touches the device or
changes anything) and a materialisation (the same decision carried out on the device). The router scores with the
probe and admission carries out the answer it gave, so the two cannot disagree. A new tier is one more entry of
`LADDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.backend import Backend, Text
from scheduler.job import TOKEN_BYTES, Job
from scheduler.options import Options
from scheduler.slots import Checkpoint

GENERATION_PROMPT_TOKENS = 4
"""Tokens a chat template may open the answer with and not repeat in the next request: an empty or an open think
block.

Fewer than stand between the last word of a message and the answer in any common template, so that a prompt which
differs in its last word is not taken for a repetition.
"""

_BLOCK = 4096  # bytes compared at once


class Reuse(NamedTuple):
    """What a job finds in a slot."""

    tier: str
    tokens: int  # of the checkpoint, that stay; at least one token of the prompt is evaluated after them
    suffix_from: int | None  # where the rest of the job's text begins, when it has to be tokenised by itself
    lost: int  # of the checkpoint, that go
    foreign: bool  # what goes may be another conversation's: no better than evicting, unless the slot is stale


class View(NamedTuple):
    """All a probe may look at."""

    checkpoint: Checkpoint
    job: Job
    common: int  # leading tokens that checkpoint and prompt share
    can_truncate: Callable[[int], bool]
    options: Options


class Hold(NamedTuple):
    """What a materialisation works with: a slot nobody else touches, and the answer the probe gave."""

    slot: int
    job: Job
    reuse: Reuse
    backend: Backend
    text: Text


@dataclass(frozen=True)
class Tier:
    """One rung of the ladder."""

    name: str
    probe: Callable[[View], Reuse | None]
    materialise: Callable[[Hold], list[int] | None]
    """Returns the prompt's ids, of which the slot now holds the first; None, with nothing changed, when it cannot."""
    live_state: bool = False  # it continues what only the slot knows, as `Job.needs_live_state` demands


def common_prefix(a: bytes, b: bytes) -> int:
    """Leading tokens that two packed token lists share. Compares block by block, then halves the block that differs."""
    size = min(len(a), len(b))
    start = 0
    while start < size and a[start : start + _BLOCK] == b[start : start + _BLOCK]:
        start += _BLOCK
    low, high = start // TOKEN_BYTES, min(start + _BLOCK, size) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[start : middle * TOKEN_BYTES] == b[start : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return min(low, size // TOKEN_BYTES)


def _rewind_to_prompt(view: View) -> Reuse | None:
    """The whole prompt lies inside the checkpoint: go back to its last token, which is evaluated again."""
    prompt, live = len(view.job.tokens), view.checkpoint.length
    if not (1 < prompt < live and view.common == prompt and view.can_truncate(prompt - 1)):
        return None
    return Reuse("memory-rewind", prompt - 1, None, live - prompt + 1, foreign=False)


def _extend_tokens(view: View) -> Reuse | None:
    """The prompt continues the checkpoint token by token."""
    prompt, live = len(view.job.tokens), view.checkpoint.length
    if view.common != live:
        return None
    return _whole(view, "memory-token", None, live if prompt > live else live - 1)


def _extend_text(view: View) -> Reuse | None:
    """The job's text continues the checkpoint's, though its tokens differ: a model need not write a text in the
    tokens the tokeniser would choose. The checkpoint's ids stay and only the rest of the text is tokenised."""
    text = view.checkpoint.text
    if not text or not view.job.text.startswith(text):
        return None
    live = view.checkpoint.length
    return _whole(view, "memory-text", len(text), live if len(text) < len(view.job.text) else live - 1)


def _whole(view: View, tier: str, suffix_from: int | None, tokens: int) -> Reuse | None:
    """Reuse of a checkpoint up to its end, or up to its last token when nothing follows that could be evaluated."""
    live = view.checkpoint.length
    if tokens < live and (tokens < 1 or not view.can_truncate(tokens)):
        return None
    return Reuse(tier, tokens, suffix_from, 0, foreign=False)


def _rewind_to_common(view: View) -> Reuse | None:
    """Prompt and checkpoint part ways somewhere: cut the checkpoint there.

    Worth it for a prefix that is long by itself and a good part of the prompt. What is cut off is the client's own
    last turn if all the earlier ones are shared: an edited message, a history without its reasoning. Otherwise it may
    belong to a conversation that only begins with the same system prompt, and the answer is marked foreign; so is a cut
    that destroys as much as an empty slot would have to evaluate.
    """
    prompt, live, common = len(view.job.tokens), view.checkpoint.length, view.common
    if not (1 < common < min(prompt, live) and view.can_truncate(common)):
        return None
    if common < view.options.rewind_min_tokens or common < view.options.rewind_min_share * prompt:
        return None
    lost = live - common
    own = _shares_all_but_last_turn(view.checkpoint, common) and lost < prompt
    return Reuse("memory-rewind", common, None, lost, foreign=not own)


def _shares_all_but_last_turn(checkpoint: Checkpoint, common: int) -> bool:
    """Whether `common` tokens reach past the point where the slot's last turn began.

    After a first turn nothing says where the system prompt ends, so only its whole prompt counts, less what
    opened the answer.
    """
    frontier = checkpoint.turn_start or checkpoint.prompt_length - GENERATION_PROMPT_TOKENS
    return 0 < frontier <= common


def turn_start_after(checkpoint: Checkpoint, reuse: Reuse) -> int:
    """Where the turn begins that follows `reuse` of `checkpoint`: the length of the conversation's earlier turns, or 0.

    A whole answered turn that stays is an earlier one. A prompt cut short is not: it may end inside the system prompt.
    """
    if reuse.tokens == checkpoint.length and checkpoint.prompt_length:
        return checkpoint.length
    return checkpoint.turn_start if checkpoint.turn_start <= reuse.tokens else 0


def _keep(hold: Hold) -> list[int] | None:
    """Keep the tokens the probe named; the prompt's own ids follow them."""
    return hold.job.tokens if _shorten(hold) else None


def _keep_and_tokenise(hold: Hold) -> list[int] | None:
    """Keep the checkpoint's ids and tokenise the rest of the text by itself.

    The rest is never cut out of the prompt's ids: a tokeniser may merge across the point where the texts part.
    """
    live = list(hold.backend.tokens(hold.slot))
    prompt = live + hold.text.tokenise(hold.job.text[hold.reuse.suffix_from :])
    if len(prompt) >= hold.backend.ctx:
        return None  # the other tokenisation is longer, and the prompt's own fits
    if len(prompt) == len(live):
        hold = hold._replace(reuse=hold.reuse._replace(tokens=len(live) - 1))
    return prompt if _shorten(hold) else None


def _shorten(hold: Hold) -> bool:
    keep = hold.reuse.tokens
    return keep == len(hold.backend.tokens(hold.slot)) or hold.backend.truncate(hold.slot, keep)


LADDER: tuple[Tier, ...] = (
    Tier("memory-rewind", _rewind_to_prompt, _keep),
    Tier("memory-token", _extend_tokens, _keep),
    Tier("memory-text", _extend_text, _keep_and_tokenise),
    # last: whatever keeps the whole checkpoint is better than cutting it
    Tier("memory-rewind", _rewind_to_common, _keep),
)


class Found(NamedTuple):
    """A probe's answer with the tier that gave it."""

    reuse: Reuse
    tier: Tier | None


NOT_FOUND = Found(Reuse("none", 0, None, 0, foreign=False), None)


def probe(
    checkpoint: Checkpoint,
    job: Job,
    can_truncate: Callable[[int], bool],
    options: Options,
    ladder: Sequence[Tier] = LADDER,
) -> Found:
    """The first tier of `ladder` that lets `job` use `checkpoint`. Pure; see the module."""
    if not checkpoint.length:
        return NOT_FOUND
    view = View(checkpoint, job, common_prefix(checkpoint.packed, job.packed), can_truncate, options)
    for tier in ladder:
        reuse = tier.probe(view)
        if reuse is not None:
            return Found(reuse, tier)
    return NOT_FOUND
