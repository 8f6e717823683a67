"""Owns the model and the resident sessions: the scheduler's Backend over torch.

All operations are transactions. `launch` checks everything and takes its pages before it touches a session; if the device fails
in the middle, the sessions of that launch hold nothing afterwards, and the others are as they were.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ds4batch.engine.exact import TILE, ExactPath
from ds4batch.engine.models.dense import DenseModel, Output
from ds4batch.engine.pages import OutOfPages, PagePool
from ds4batch.engine.rows import Layout, Segment, plan, plan_tile
from ds4batch.engine.sampler import Draw, draw
from ds4batch.engine.session import Session
from scheduler.backend import BackendError, Sampled, Work

if TYPE_CHECKING:
    from ds4batch.engine.device_sampler import DeviceSampler

log = logging.getLogger(__name__)

Forward = Callable[[Sequence[Segment]], tuple[Output, list[int]]]
"""Evaluates segments: the output, and for each row of its logits the index of its segment."""


class Engine:
    """N sessions on one device. One thread calls it."""

    def __init__(
        self,
        model: DenseModel,
        pool: PagePool,
        slots: int,
        ctx: int,
        path: ExactPath,
        forward: Forward | None = None,
        sampler: DeviceSampler | None = None,
    ) -> None:
        """`forward` runs all segments at once where the path is native; without one the model does, in plain torch.

        `sampler` draws plain requests on the device; without one all are drawn on the host.
        """
        self.model = model
        self.pool = pool
        self.path = path
        self.sessions = [Session(i, pool, ctx) for i in range(slots)]
        self.native_forwards = 0
        self.fallbacks: Counter[str] = Counter()
        self.last_fallback: str | None = None
        self._ctx = ctx
        config = model.config
        self._layout = Layout(pool.shape.page_tokens, config.heads // config.kv_heads, model.device, path.row_multiple)
        self.forward = forward or self._reference
        self._sampler = sampler
        self._unchecked: tuple[torch.Tensor, list[Work]] | None = None  # the last forward's finiteness, while nobody has waited
        self._rows: tuple[torch.Tensor, list[int]] | None = None  # the last forward's logits and their slots

    @property
    def ctx(self) -> int:
        """Positions a session can hold."""
        return self._ctx

    def tokens(self, slot: int) -> Sequence[int]:
        """The slot's checkpoint; see scheduler.backend."""
        return self.sessions[slot].tokens

    def logits(self, slot: int) -> torch.Tensor:
        """fp32 [vocab] of the slot's last position. Raises ValueError when its last forward did not keep them."""
        logits = self.sessions[slot].logits
        if logits is None:
            raise ValueError(f"slot {slot} holds no logits")
        return logits

    def can_truncate(self, slot: int, length: int) -> bool:
        """Keys and values are append-only, so any prefix can be kept."""
        return 0 <= length <= len(self.sessions[slot].tokens)

    def truncate(self, slot: int, length: int) -> bool:
        """Keep a prefix of the slot's checkpoint; False, with nothing changed, when it is shorter than that."""
        if not self.can_truncate(slot, length):
            return False
        self.sessions[slot].truncate(length)
        return True

    def launch(self, work: Sequence[Work]) -> None:
        """Evaluate all rows; see scheduler.backend."""
        self._check(work)
        try:
            self._take_pages(work)
            found = self._run(work)
        except OutOfPages as error:
            raise ValueError(str(error)) from None
        except RuntimeError as error:
            self._lose(work)
            raise BackendError(f"forward failed: {error}") from error
        for item in work:
            self.sessions[item.slot].tokens.extend(item.tokens)
            self.sessions[item.slot].logits = found.get(item.slot)

    def sample(self, picks: Sequence[tuple[int, Draw]]) -> list[Sampled]:
        """Draw one token for each slot from the logits its last launch kept."""
        if self._sampler is not None and all(state.plain for _, state in picks):
            drawn = self._sample_on_device(self._sampler, picks)
        else:
            self._check_finite()
            drawn = [draw(self.logits(slot).cpu().numpy(), state, len(self.sessions[slot].tokens)) for slot, state in picks]
        for (_, state), one in zip(picks, drawn, strict=True):
            state.note(one.token)
        return drawn

    def _sample_on_device(self, sampler: DeviceSampler, picks: Sequence[tuple[int, Draw]]) -> list[Sampled]:
        slots = [slot for slot, _ in picks]
        rows = (
            self._rows[0] if self._rows is not None and self._rows[1] == slots else torch.stack([self.logits(s) for s in slots])
        )
        tokens = sampler.launch(rows, [state for _, state in picks], [len(self.sessions[s].tokens) for s in slots])
        if self._unchecked is not None:
            tokens = torch.cat([tokens, self._unchecked[0].all().view(1)])  # one copy, one wait
            *found, finite = tokens.tolist()
            if not finite:
                self._check_finite()
            self._unchecked = None
        else:
            found = tokens.tolist()
        return [Sampled(token, None, ()) for token in found]

    def _check_finite(self) -> None:
        """Raise BackendError, with the sessions of the last forward emptied, when it gave a value that is not finite."""
        if self._unchecked is None:
            return
        finite, work = self._unchecked
        self._unchecked = None
        self._require_finite(finite, work)

    def _require_finite(self, finite: torch.Tensor, work: Sequence[Work]) -> None:
        if not bool(finite.all()):
            self._lose(work)
            raise BackendError(f"a hidden state is not finite (slots {[w.slot for w in work]})")

    def _check(self, work: Sequence[Work]) -> None:
        if not work:
            raise ValueError("a launch needs at least one row")
        seen: set[int] = set()
        vocab = self.model.config.vocab
        for item in work:
            if not 0 <= item.slot < len(self.sessions):
                raise ValueError(f"slot {item.slot} does not exist")
            if item.slot in seen:
                raise ValueError(f"slot {item.slot} appears twice in one launch")
            seen.add(item.slot)
            if not item.tokens:
                raise ValueError(f"slot {item.slot} brings no tokens")
            if min(item.tokens) < 0 or max(item.tokens) >= vocab:
                bad = next(t for t in item.tokens if not 0 <= t < vocab)
                raise ValueError(f"token {bad} for slot {item.slot} is outside the vocabulary of {vocab}")
            length = len(self.sessions[item.slot].tokens) + len(item.tokens)
            if length > self._ctx:
                raise ValueError(f"slot {item.slot} would hold {length} tokens; its context is {self._ctx}")

    def _take_pages(self, work: Sequence[Work]) -> None:
        """All pages the launch writes, or OutOfPages with no session changed."""
        wanted = 0
        for item in work:
            session = self.sessions[item.slot]
            start = len(session.tokens)
            wanted += max(session.pages_missing(start + len(item.tokens)), 0) + len(session.shared_tail(start))
        if wanted > self.pool.free:
            raise OutOfPages(f"{wanted} KV pages wanted, {self.pool.free} of {self.pool.pages} free")
        for item in work:
            session = self.sessions[item.slot]
            start = len(session.tokens)
            for i in session.shared_tail(start):
                session.pages[i] = self.pool.copy(session.pages[i])
            session.pages += self.pool.take(max(session.pages_missing(start + len(item.tokens)), 0))

    def _run(self, work: Sequence[Work]) -> dict[int, torch.Tensor]:
        """Logits by slot, for those that asked."""
        self._unchecked = self._rows = None
        if self.path.native:
            return self._run_native(work)
        self._count_fallback(self.path.reason)
        found: dict[int, torch.Tensor] = {}
        for item in sorted(work, key=lambda w: w.slot):
            for segment in self._tiles(item):
                output = self.model.forward(plan_tile(segment, TILE, self._layout), self.pool)
                self._require_finite(output.finite, [item])
                if segment.wants_logits:
                    found[item.slot] = output.logits[0]
        return found

    def _run_native(self, work: Sequence[Work]) -> dict[int, torch.Tensor]:
        self.native_forwards += 1
        self.last_fallback = None
        sessions = [self.sessions[item.slot] for item in work]
        segments = [Segment(s.pages, len(s.tokens), w.tokens, w.wants_logits) for s, w in zip(sessions, work, strict=True)]
        output, owners = self.forward(segments)
        if self._sampler is None:
            self._require_finite(output.finite, work)
        else:
            self._unchecked = output.finite, list(work)  # asked when the tokens are waited for anyway
        logits = output.logits if self.forward == self._reference else output.logits.clone()
        slots = [work[i].slot for i in owners]
        self._rows = logits, slots
        return {slot: row for slot, row, i in zip(slots, logits, owners, strict=True) if work[i].wants_logits}

    def _reference(self, segments: Sequence[Segment]) -> tuple[Output, list[int]]:
        """All rows in one forward of plain torch."""
        owners = [i for i, segment in enumerate(segments) if segment.wants_logits]
        return self.model.forward(plan(segments, self._layout), self.pool), owners

    def _tiles(self, item: Work) -> Iterator[Segment]:
        """One slot's tokens cut at multiples of TILE; only the last piece may want logits."""
        session = self.sessions[item.slot]
        at, start = 0, len(session.tokens)
        while at < len(item.tokens):
            count = min(TILE - (start + at) % TILE, len(item.tokens) - at)
            last = at + count == len(item.tokens)
            yield Segment(session.pages, start + at, item.tokens[at : at + count], item.wants_logits and last)
            at += count

    def _count_fallback(self, reason: str) -> None:
        if not self.fallbacks[reason]:
            log.warning("ordered path in use: %s", reason)
        self.fallbacks[reason] += 1
        self.last_fallback = reason

    def _lose(self, work: Sequence[Work]) -> None:
        for item in work:
            self.sessions[item.slot].poison()
