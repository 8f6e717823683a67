"""Owns the model and the resident sessions: the scheduler's Backend over torch.

All operations are transactions. `launch` checks everything and takes its pages before it touches a session; if the device fails
in the middle, the sessions of that launch hold nothing afterwards, and the others are as they were.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from ds4batch.engine.draft.drafter import Drafter
from ds4batch.engine.draft.pending import PendingDrafts
from ds4batch.engine.exact import TILE, ExactPath
from ds4batch.engine.models.model import Model, Output
from ds4batch.engine.pages import OutOfPages, PagePool
from ds4batch.engine.rows import Layout, Segment, plan, plan_tile
from ds4batch.engine.sampler import Draw, draw
from ds4batch.engine.session import AWAY, Session
from scheduler.backend import CHAINED, BackendError, Draws, Held, Pick, Room, Sampled, Work

if TYPE_CHECKING:
    from ds4batch.engine.device_sampler import DeviceSampler, Fetch
    from scheduler.survey import Survey

log = logging.getLogger(__name__)

Forward = Callable[[Sequence[Segment]], tuple[Output, list[int]]]
"""Evaluates segments: the output, and for each row of its logits the index of its segment."""


class _Known(NamedTuple):
    """Tokens drawn on the host. Implements Draws."""

    drawn: Sequence[Sampled]

    def wait(self) -> Sequence[Sampled]:
        return self.drawn


class _Drawing(NamedTuple):
    """Tokens under way from the device. Implements Draws."""

    engine: Engine
    rows: Mapping[int, int]  # slot -> its last row of the draws
    touched: list[int]  # slots of the forwards since the draws before, and their forks
    fetch: Fetch

    def wait(self) -> Sequence[Sampled]:
        tokens, finite = self.fetch.wait()
        self.engine.take(self, tokens, finite)
        return [Sampled(token, None, ()) for token in tokens]


class Engine:
    """N sessions on one device. One thread calls it."""

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        slots: int,
        ctx: int,
        path: ExactPath,
        forward: Forward | None = None,
        sampler: DeviceSampler | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`forward` runs all segments at once where the path is native; without one the model does, in plain torch.

        `sampler` draws plain requests on the device; without one all are drawn on the host. Without a `drafter` nothing is drafted.
        """
        self.model = model
        self.pool = pool
        self.path = path
        self.sessions = [Session(i, pool, ctx) for i in range(slots)]
        self.native_forwards = 0
        self.fallbacks: Counter[str] = Counter()
        self.last_fallback: str | None = None
        self.survey: Survey | None = None
        self._ctx = ctx
        config = model.config
        self._layout = Layout(pool.shape.page_tokens, config.heads // config.kv_heads, model.device, path.row_multiple)
        self.forward = forward or self._reference
        self._sampler = sampler
        self._unchecked: list[tuple[torch.Tensor, list[int]]] = []  # bool [1] and slots of each forward since the last draws
        self._latest: _Drawing | None = None  # the draws that a token may be chained to
        self._chained: dict[int, _Drawing] = {}  # slot -> the draws its last token comes from, while it is not known
        self._held: dict[int, tuple[int, Held]] = {}  # by slot, with the pool's changes at the time
        self._drafts = PendingDrafts(drafter, self.sessions, config.vocab)
        self._rows: tuple[torch.Tensor, list[tuple[int, int]]] | None = None  # the last forward's logits, their slots and rows

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
        """Whether the slot has the state of that prefix; see Session.can_truncate."""
        return self.sessions[slot].can_truncate(length)

    @property
    def needs_marks(self) -> bool:
        """Whether the model keeps state that cannot be shortened."""
        return self.pool.state is not None

    def mark(self, slot: int) -> None:
        """Save the slot's state, so that a later `truncate` can come back to this length. One point a slot."""
        self.sessions[slot].mark()

    def truncate(self, slot: int, length: int) -> bool:
        """Keep a prefix of the slot's checkpoint; False, with nothing changed, when it is shorter than that."""
        if not self.can_truncate(slot, length):
            return False
        self.sessions[slot].truncate(length)
        self._drafts.cut(slot, length)
        return True

    def fork_point(self, source: int, most: int) -> int:
        """The longest prefix of at most `most` tokens that can be forked; see Session.fork_point."""
        return self.sessions[source].fork_point(most)

    def can_fork(self, source: int, length: int) -> bool:
        """Whether another session can begin with the first `length` tokens of the slot's."""
        return self.sessions[source].can_fork(length)

    def fork(self, source: int, target: int, length: int) -> bool:
        """Make the first `length` tokens of `source` those of `target`; see scheduler.backend."""
        if target in self._chained or not self.sessions[source].fork(self.sessions[target], length):
            return False
        self._drafts.fork(source, target, length)
        # what a forward under way may have spoilt is shared now, and must be lost in both
        drawings = [*([] if self._latest is None else [self._latest.touched]), *(d.touched for d in self._chained.values())]
        for members in [*(members for _, members in self._unchecked), *drawings]:
            if source in members and target not in members:
                members.append(target)
        return True

    def room(self) -> Room:
        """The pool's pages."""
        return Room(self.pool.pages, self.pool.free, self.pool.shape.page_tokens, self.pool.shape.bytes)

    def held(self, slot: int) -> Held:
        """Pages of the slot's session."""
        changes, held = self._held.get(slot, (-1, None))
        if held is None or changes != self.pool.changes:  # asked after every step, and most change nothing
            session = self.sessions[slot]
            pages = session.resident
            held = Held(len(pages), sum(self.pool.references(page) == 1 for page in pages), len(session.parked or ()))
            self._held[slot] = self.pool.changes, held
        return held

    def distinct(self, parts: Mapping[int, int]) -> int:
        """Pages that hold the first so many tokens of these sessions, a shared one counted once."""
        pages: set[int] = set()
        for slot, length in parts.items():
            pages.update(self.sessions[slot].pages[: -(-length // self.pool.shape.page_tokens)])
        return len(pages - {AWAY})

    def shortage(self, work: Sequence[Work]) -> int:
        """Pages that `launch` of `work` would lack."""
        return max(0, _wanted(self._page_needs(work)) - self.pool.free)

    def park(self, slot: int) -> None:
        """Move the session's pages to host memory; see scheduler.backend."""
        size = self.pool.shape.page_tokens
        others = (s for s in self.sessions if s.slot != slot and s.parked is None)
        # A page that another session is yet to write would cost it a copy as long as this one holds it too.
        self.sessions[slot].park({page for s in others for page in s.pages[: len(s.tokens) // size]})

    def resume(self, slot: int) -> bool:
        """Bring a parked session back, or return False with nothing changed when pages lack."""
        return self.sessions[slot].resume()

    def launch(self, work: Sequence[Work]) -> None:
        """Evaluate all rows; see scheduler.backend."""
        self._check(work)
        try:
            self._take_pages(work)
            found = self._run(work)
        except OutOfPages as error:
            raise ValueError(str(error)) from None
        except RuntimeError as error:
            self._lose([item.slot for item in work])
            raise BackendError(f"forward failed: {error}") from error
        for item in work:
            session = self.sessions[item.slot]
            if item.tokens is CHAINED and self._latest is not None:
                self._chained[item.slot] = self._latest
            else:
                session.tokens.extend(item.tokens)
            logits = found.get(item.slot)
            session.logits = logits[0] if item.drafts and logits is not None else logits
            if self._drafts.drafter is not None:
                self._drafts.launched(item, logits)

    def can_chain(self, slot: int, sampling: Draw) -> bool:
        """Whether the slot's next token may be evaluated before the host knows it; see scheduler.backend."""
        return self._sampler is not None and self.path.native and self.pool.state is None and sampling.plain

    def sample(self, picks: Sequence[Pick]) -> Draws:
        """Begin to draw a token for each pick from the logits its slot's last launch kept; see scheduler.backend."""
        if self._sampler is not None and all(pick.sampling.plain for pick in picks):
            return self._sample_on_device(self._sampler, picks)
        for pick in picks:
            if not self.independent(pick.sampling) and sum(other.slot == pick.slot for other in picks) > 1:
                raise ValueError(f"slot {pick.slot}: its draws depend on one another")
        self._check_finite()
        drawn = [draw(self._row(p.slot, p.row).cpu().numpy(), p.sampling, self._position(p.slot, p.row)) for p in picks]
        for pick, one in zip(picks, drawn, strict=True):
            if not self.independent(pick.sampling):
                pick.sampling.note(one.token)
        return _Known(drawn)

    def _sample_on_device(self, sampler: DeviceSampler, picks: Sequence[Pick]) -> Draws:
        wanted = [(pick.slot, pick.row) for pick in picks]
        rows = (
            self._rows[0]
            if self._rows is not None and self._rows[1] == wanted
            else torch.stack([self._row(slot, row) for slot, row in wanted])
        )
        unchecked, self._unchecked = self._unchecked, []
        positions = [self._position(slot, row) for slot, row in wanted]
        fetch = sampler.launch(rows, [pick.sampling for pick in picks], positions, [finite for finite, _ in unchecked])
        touched = [slot for _, members in unchecked for slot in members]
        self._latest = _Drawing(self, {pick.slot: i for i, pick in enumerate(picks)}, touched, fetch)
        return self._latest

    def independent(self, sampling: Draw) -> bool:
        """Whether a draw depends on no draw before it; see scheduler.backend."""
        return not sampling.penalised

    def can_draft(self, slot: int) -> bool:
        """Whether drafts can be proposed for the slot, and cut again."""
        return self._drafts.drafter is not None and (self.pool.state is None or self.pool.state.drafts > 0)

    def propose(self, wants: Sequence[tuple[int, int]], count: int) -> Sequence[int]:
        """Propose drafts for each (slot, token drawn and not evaluated); see scheduler.backend."""
        try:
            return self._drafts.propose(wants, self.tokens, count)
        except RuntimeError as error:
            self._lose([slot for slot, _ in wants])
            raise BackendError(f"the drafter failed: {error}") from error

    def expect(self, slots: Sequence[int]) -> None:
        """Drafts will be asked for behind the draws just begun; see scheduler.backend."""
        if self._latest is not None and all(slot in self._latest.rows for slot in slots):
            try:
                self._drafts.expect(self._latest.rows, slots, self.tokens)
            except RuntimeError as error:
                self._lose(slots)
                raise BackendError(f"the drafter failed: {error}") from error

    def drafts(self, slot: int) -> Sequence[int]:
        """The drafts of the slot's last launch, () when they were cut."""
        return self._drafts.values(slot)

    def accept(self, slot: int, count: int) -> None:
        """Make the first `count` drafts of the slot's last launch part of its checkpoint; see scheduler.backend."""
        self._drafts.accept(slot, count)

    def replaced(self, slot: int) -> None:
        """The slot's session was given to it from outside."""
        self._drafts.replaced(slot)

    def take(self, draws: _Drawing, tokens: Sequence[int], finite: bool) -> None:
        """The tokens of `draws` are known: give them to the sessions that were chained to them.

        Raises BackendError, with every session that took part emptied, when the forwards gave a value that is not finite.
        """
        if self._latest is draws:
            self._latest = None  # what is known is not chained to
        if not finite:
            self._refuse_values(draws.touched)
        for slot, row in draws.rows.items():
            if self._chained.get(slot) is draws:
                del self._chained[slot]
                self.sessions[slot].tokens.append(tokens[row])

    def _position(self, slot: int, row: int) -> int:
        """The position that a row's draw is for. A token that is not known yet counts too."""
        base = self._drafts.position(slot)
        return len(self.sessions[slot].tokens) + (slot in self._chained) if base is None else base + row

    def _row(self, slot: int, row: int) -> torch.Tensor:
        """fp32 [vocab] of what follows the slot's tokens, or its draft of this number. Raises ValueError when it was not kept."""
        logits = self._drafts.logits(slot, row)
        if logits is None and row:
            raise ValueError(f"slot {slot} holds no logits of row {row}")
        return self.logits(slot) if logits is None else logits

    def _check_finite(self) -> None:
        """Raise BackendError, with the sessions of the forwards since the last draws emptied, when one gave a value that is not finite."""
        unchecked, self._unchecked = self._unchecked, []
        if not all(bool(finite) for finite, _ in unchecked):
            self._refuse_values([slot for _, members in unchecked for slot in members])

    def _refuse_values(self, slots: Collection[int]) -> NoReturn:
        self._lose(slots)
        raise BackendError(f"a hidden state is not finite (slots {sorted(set(slots))})")

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
            if self.sessions[item.slot].parked is not None:
                raise ValueError(f"slot {item.slot} is parked")
            if item.slot in self._chained:
                raise ValueError(f"slot {item.slot} has a token that was not waited for")
            if item.drafts or self._drafts.drafter is not None:
                self._drafts.check(item)
            if not item.tokens:
                raise ValueError(f"slot {item.slot} brings no tokens")
            if item.tokens is CHAINED:
                if self._latest is None or item.slot not in self._latest.rows:
                    raise ValueError(f"slot {item.slot} was not drawn for on the device")
            elif min(item.tokens) < 0 or max(item.tokens) >= vocab:
                bad = next(t for t in item.tokens if not 0 <= t < vocab)
                raise ValueError(f"token {bad} for slot {item.slot} is outside the vocabulary of {vocab}")
            length = len(self.sessions[item.slot].tokens) + len(item.tokens) + item.drafts
            if length > self._ctx:
                raise ValueError(f"slot {item.slot} would hold {length} tokens; its context is {self._ctx}")

    def _take_pages(self, work: Sequence[Work]) -> None:
        """All pages the launch writes, or OutOfPages with no session changed."""
        needs = self._page_needs(work)
        wanted = _wanted(needs)
        if wanted > self.pool.free:
            raise OutOfPages(f"{wanted} KV pages wanted, {self.pool.free} of {self.pool.pages} free")
        for session, missing, shared in needs:
            for i in shared:
                session.pages[i] = self.pool.copy(session.pages[i])
            session.pages += self.pool.take(missing)

    def _page_needs(self, work: Sequence[Work]) -> list[tuple[Session, int, list[int]]]:
        """Sessions of `work` that need pages, how many, and the indices of shared ones that they would write."""
        needs = []  # most decode rows want nothing
        for item in work:
            session = self.sessions[item.slot]
            start = len(session.tokens)
            end = start + len(item.tokens) + item.drafts
            missing, shared = session.pages_missing(end), session.shared_tail(start)
            if missing > 0 or shared:
                needs.append((session, max(missing, 0), shared))
        return needs

    def _run(self, work: Sequence[Work]) -> dict[int, torch.Tensor]:
        """Logits by slot, for those that asked: [vocab], of what has drafts [1 + drafts, vocab]."""
        self._rows = None
        if self.path.native:
            return self._run_native(work)
        self._count_fallback(self.path.reason)
        found: dict[int, torch.Tensor] = {}
        for item in sorted(work, key=lambda w: w.slot):
            kept = []
            for i, segment in enumerate(self._tiles(item)):
                if item.drafts and i and self.pool.state is not None:
                    self.pool.state.keep(item.slot, i - 1)  # before the i-th draft, which is a segment of its own
                output = self.model.forward(plan_tile(segment, TILE, self._layout), self.pool)
                if not bool(output.finite.all()):
                    self._refuse_values([item.slot])
                self._drafts.note(output.spans, output.hidden)
                if segment.wants_logits:
                    kept.append(output.logits[0])
            if item.drafts and self.pool.state is not None:
                self.pool.state.advanced(item.slot, segment.start + 1, item.drafts)
            if kept:
                found[item.slot] = torch.stack(kept) if item.drafts else kept[0]
        return found

    def _run_native(self, work: Sequence[Work]) -> dict[int, torch.Tensor]:
        self.native_forwards += 1
        self.last_fallback = None
        output, owners = self.forward([self._segment(item) for item in work])
        # asked when the tokens are waited for anyway
        self._unchecked.append((output.finite.all().view(1), [item.slot for item in work]))
        if self._sampler is None:
            self._check_finite()
        self._drafts.note(output.spans, output.hidden)
        logits = output.logits if self.forward == self._reference else output.logits.clone()
        if not any(item.drafts for item in work):
            self._rows = logits, [(work[i].slot, 0) for i in owners]
            return {work[i].slot: row for i, row in zip(owners, logits, strict=True) if work[i].wants_logits}
        found, keys, at = {}, [], 0
        while at < len(owners):
            item = work[owners[at]]
            rows = 1 + item.drafts  # of one item they lie together
            keys += [(item.slot, row) for row in range(rows)]
            if item.wants_logits:
                found[item.slot] = logits[at : at + rows] if item.drafts else logits[at]
            at += rows
        self._rows = logits, keys
        return found

    def _segment(self, item: Work) -> Segment:
        """A slot's part of a forward. A chained token is named by its row of the draws: -1 for the first, -2 for the next."""
        session, tokens = self.sessions[item.slot], item.tokens
        if tokens is CHAINED and self._latest is not None:
            tokens = (-1 - self._latest.rows[item.slot],)
        if item.drafts:
            tokens = (*tokens, *self._drafts.tokens(item))
        return Segment(session.pages, len(session.tokens), tokens, item.wants_logits, item.slot, item.drafts)

    def _reference(self, segments: Sequence[Segment]) -> tuple[Output, list[int]]:
        """All rows in one forward of plain torch."""
        owners = [i for i, segment in enumerate(segments) if segment.wants_logits for _ in range(1 + segment.drafts)]
        return self.model.forward(plan(segments, self._layout), self.pool), owners

    def _tiles(self, item: Work) -> Iterator[Segment]:
        """One slot's tokens cut at multiples of TILE, of which the last piece may want logits; with drafts, one by one."""
        whole = self._segment(item)
        at = 0
        while at < len(whole.tokens):
            count = 1 if item.drafts else min(TILE - (whole.start + at) % TILE, len(whole.tokens) - at)
            wanted = item.wants_logits and (item.drafts > 0 or at + count == len(whole.tokens))
            yield Segment(whole.pages, whole.start + at, whole.tokens[at : at + count], wanted, item.slot)
            at += count

    def _count_fallback(self, reason: str) -> None:
        if not self.fallbacks[reason]:
            log.warning("ordered path in use: %s", reason)
        self.fallbacks[reason] += 1
        self.last_fallback = reason

    def _lose(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._chained.pop(slot, None)
            self.sessions[slot].poison()
            self._drafts.cut(slot, 0)


def _wanted(needs: Sequence[tuple[Session, int, list[int]]]) -> int:
    """Pages that all these needs take together."""
    return sum(missing + len(shared) for _, missing, shared in needs)
