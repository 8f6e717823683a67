"""The reuse ladder: every way a job can use what a slot holds, best first, each said once.

Three things can show that a request continues a session. Its tokens or its text, where the client sends back all that was
sampled. Keys (see scheduler.bindings), where it sends less or other bytes: the ids of calls whose results it brings, or the
conversation without its reasoning; keys hold only as long as nothing else happened in the slot. And points, for a client that
goes back. Whatever it is, the ids in the session stay, and only what is new is tokenised.

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
from scheduler.bindings import Bindings, Image, Point
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
_SHOWN_LESS = frozenset({"chat", "anthropic"})  # APIs whose clients may send an answer back without its reasoning


class Reuse(NamedTuple):
    """What a job finds in a slot."""

    tier: str
    tokens: int  # of the checkpoint, that stay; at least one token of the prompt is evaluated after them
    suffix_from: int | None  # where the rest of the job's text begins, when it has to be tokenised by itself
    lost: int  # of the checkpoint, that go
    foreign: bool  # what goes may be another conversation's: no better than evicting, unless the slot is stale
    owed: tuple[int, ...] = ()  # ids that come before the rest of the text: drawn by the last turn, and never evaluated


class View(NamedTuple):
    """All a probe may look at."""

    checkpoint: Checkpoint
    job: Job
    bindings: Bindings | None  # that hold for the checkpoint
    common: int  # leading tokens that checkpoint and prompt share
    can_truncate: Callable[[int], bool]
    options: Options

    def same_images(self, *fields: str) -> bool:
        """Whether the images of the checkpoint are those of the job that come first, and agree in `fields` besides."""
        pairs = zip(self.checkpoint.images, self.job.images, strict=False)
        wanted = ("fingerprint", "tokens", *fields)
        return len(self.checkpoint.images) <= len(self.job.images) and all(_alike(old, new, wanted) for old, new in pairs)


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


def _alike(a: Image, b: Image, fields: Sequence[str]) -> bool:
    return all(getattr(a, field) == getattr(b, field) for field in fields)


def _by_visible_text(view: View, tier: str, apis: frozenset[str]) -> Reuse | None:
    """The job's text continues the conversation as its client saw it."""
    bindings, text = view.bindings, view.job.text
    if bindings is None or bindings.api not in apis or view.job.api not in apis:
        return None
    visible = bindings.keys.visible
    if not visible or len(visible) >= len(text) or not text.startswith(visible) or not view.same_images("offset"):
        return None
    return Reuse(tier, view.checkpoint.length, len(visible), 0, foreign=False)


def _responses_visible(view: View) -> Reuse | None:
    return _by_visible_text(view, "responses-visible", frozenset({"responses"}))


def _thinking_visible(view: View) -> Reuse | None:
    return _by_visible_text(view, "thinking-visible", _SHOWN_LESS)


def _by_calls(view: View, tier: str, api: str) -> Reuse | None:
    """The job brings the results of exactly the calls that the session ends with."""
    bindings, continues = view.bindings, view.job.continues
    if bindings is None or continues is None or not bindings.api == view.job.api == api:
        return None
    if not continues.calls or continues.calls != bindings.keys.calls:
        return None
    return Reuse(tier, view.checkpoint.length, continues.suffix_from, 0, foreign=False, owed=bindings.owed)


def _responses_tool_output(view: View) -> Reuse | None:
    return _by_calls(view, "responses-tool-output", "responses")


def _anthropic_tool_output(view: View) -> Reuse | None:
    return _by_calls(view, "anthropic-tool-output", "anthropic")


def _chat_tool_output(view: View) -> Reuse | None:
    return _by_calls(view, "chat-tool-output", "chat")


def _rewind_to_prompt(view: View) -> Reuse | None:
    """The whole prompt lies inside the checkpoint: go back to its last token, which is evaluated again."""
    prompt, live = len(view.job.tokens), view.checkpoint.length
    if not (1 < prompt < live and view.common == prompt and view.can_truncate(prompt - 1) and view.same_images("at")):
        return None
    return Reuse("memory-rewind", prompt - 1, None, live - prompt + 1, foreign=False)


def _extend_tokens(view: View) -> Reuse | None:
    """The prompt continues the checkpoint token by token."""
    prompt, live = len(view.job.tokens), view.checkpoint.length
    if view.common != live or not view.same_images("at"):
        return None
    return _whole(view, "memory-token", None, live if prompt > live else live - 1)


def _extend_text(view: View) -> Reuse | None:
    """The job's text continues the checkpoint's, though its tokens differ: a model need not write a text in the
    tokens the tokeniser would choose. The checkpoint's ids stay and only the rest of the text is tokenised."""
    text = view.checkpoint.text
    if not text or not view.job.text.startswith(text) or not view.same_images("offset"):
        return None
    live = view.checkpoint.length
    return _whole(view, "memory-text", len(text), live if len(text) < len(view.job.text) else live - 1)


def _whole(view: View, tier: str, suffix_from: int | None, tokens: int) -> Reuse | None:
    """Reuse of a checkpoint up to its end, or up to its last token when nothing follows that could be evaluated."""
    live = view.checkpoint.length
    if tokens < live and (tokens < 1 or not view.can_truncate(tokens)):
        return None
    return Reuse(tier, tokens, suffix_from, 0, foreign=False)


def _return_to_point(view: View) -> Reuse | None:
    """The client goes back to a place in its last turns. Where tokens agree as far and can be cut there, that is better."""
    for point in reversed(view.checkpoint.points):
        if not (0 < point.tokens <= view.checkpoint.length and view.can_truncate(point.tokens)):
            continue
        if point.tokens > view.common:
            suffix_from = point.text if _begins_with(view, point) else 0
        elif point.tokens < view.common and view.can_truncate(view.common):
            return None
        else:
            suffix_from = None if point.tokens < len(view.job.tokens) and view.same_images("at") else 0
        if suffix_from != 0:
            lost = view.checkpoint.length - point.tokens
            return Reuse("rewind-point", point.tokens, suffix_from, lost, foreign=not _own_point(view, point))
    return None


def _begins_with(view: View, point: Point) -> bool:
    """Whether the job's text begins with what the point stands for, and goes on."""
    text, size = view.job.text, point.text or 0
    return 0 < size < len(text) and text[:size] == view.checkpoint.asked[:size] and view.same_images("offset")


def _own_point(view: View, point: Point) -> bool:
    """Whether nobody else would come back to `point`: the end of the last message, or the beginning of the last turn unless
    that destroys as much as an empty slot would have to evaluate."""
    held = view.checkpoint
    if held.prompt_length and point == held.points[-1]:
        return True
    return 0 < held.turn_start <= point.tokens and held.length - point.tokens < len(view.job.tokens)


def _rewind_to_common(view: View) -> Reuse | None:
    """Prompt and checkpoint part ways somewhere: cut the checkpoint there.

    Worth it for a prefix that is long by itself and a good part of the prompt. What is cut off is the client's own
    last turn if all the earlier ones are shared: an edited message, a history without its reasoning. Otherwise it may
    belong to a conversation that only begins with the same system prompt, and the answer is marked foreign; so is a cut
    that destroys as much as an empty slot would have to evaluate.
    """
    prompt, live, common = len(view.job.tokens), view.checkpoint.length, view.common
    if not (1 < common < min(prompt, live) and view.can_truncate(common) and view.same_images("at")):
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
    job, suffix_from = hold.job, hold.reuse.suffix_from or 0
    if any(image.offset >= suffix_from for image in job.images):
        return None  # a text cannot say what an image's tokens are
    whole = list(hold.backend.tokens(hold.slot))
    live = whole[: len(whole) - hold.reuse.lost]
    prompt = [*live, *hold.reuse.owed, *hold.text.tokenise(job.text[suffix_from:])]
    if len(prompt) >= hold.backend.ctx:
        return None  # the other tokenisation is longer, and the prompt's own fits
    if len(prompt) == len(live):
        hold = hold._replace(reuse=hold.reuse._replace(tokens=len(live) - 1))
    return prompt if _shorten(hold) else None


def _keep_either(hold: Hold) -> list[int] | None:
    """The prompt's own ids where they agree up to the point, else the session's."""
    return _keep(hold) if hold.reuse.suffix_from is None else _keep_and_tokenise(hold)


def _shorten(hold: Hold) -> bool:
    keep = hold.reuse.tokens
    return keep == len(hold.backend.tokens(hold.slot)) or hold.backend.truncate(hold.slot, keep)


LADDER: tuple[Tier, ...] = (
    Tier("responses-visible", _responses_visible, _keep_and_tokenise, live_state=True),
    Tier("responses-tool-output", _responses_tool_output, _keep_and_tokenise, live_state=True),
    Tier("anthropic-tool-output", _anthropic_tool_output, _keep_and_tokenise, live_state=True),
    Tier("chat-tool-output", _chat_tool_output, _keep_and_tokenise),
    Tier("memory-rewind", _rewind_to_prompt, _keep),
    Tier("memory-token", _extend_tokens, _keep),
    Tier("thinking-visible", _thinking_visible, _keep_and_tokenise),
    Tier("memory-text", _extend_text, _keep_and_tokenise),
    Tier("rewind-point", _return_to_point, _keep_either),
    # last: whatever keeps the whole checkpoint is better than cutting it
    Tier("memory-rewind", _rewind_to_common, _keep),
)


FROM_DISK = Tier("disk-text", lambda view: None, _keep_and_tokenise)
"""Not of the ladder: a store of checkpoints finds it, and what it found is put into the slot before this is carried out."""


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
    bindings: Bindings | None = None,
) -> Found:
    """The first tier of `ladder` that lets `job` use `checkpoint`, whose valid `bindings` are given. Pure; see the module."""
    if not checkpoint.length:
        return NOT_FOUND
    view = View(checkpoint, job, bindings, common_prefix(checkpoint.packed, job.packed), can_truncate, options)
    if not view.same_images():
        return NOT_FOUND
    for tier in ladder:
        reuse = tier.probe(view)
        if reuse is not None:
            return Found(reuse, tier)
    return NOT_FOUND
