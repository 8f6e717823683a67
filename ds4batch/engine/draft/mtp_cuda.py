"""Drafts from an MTP module on an NVIDIA card: the kernels of a decode step, recorded by the number of sessions.

Drafts stay on the device: `drawn` holds them where the next forward's tokens may name them (see triton_kernels.embedding), and a copy
goes to the host, which needs them only when that forward's draws are there. Hidden states are kept by the forward itself, in the
places that `places` gives its rows.

A proposal may begin before the host knows what was drawn (`expect`): the rows to be evaluated are the same however many drafts were
right, and triton_kernels.accepted finds where each session goes on. Then the device makes drafts while the host takes the tokens in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ds4batch.engine.draft.drafter import Expected, Proposal, Tokens
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_head import MtpWeights
from ds4batch.engine.draft.mtp_window import MOST_ROWS, PAGE, PAGES, RING, SEEN, Array, rows_of, where
from ds4batch.engine.graphs import captured
from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import ADD, SILU_MUL, Scratch, multiply
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.dense_cuda import SPLIT, STRETCH, bucket_of
from ds4batch.engine.rows import Segment
from triton_kernels.accepted import accepted
from triton_kernels.attention_decode import attention_decode, decode_workspace
from triton_kernels.embedding import embed
from triton_kernels.norm import rms_norm
from triton_kernels.rope_kv import rope_kv

_AHEAD = 4  # proposals whose inputs may be on their way
_MADE_UP = (16, 64, 256, MOST_ROWS)
"""Rows that are made up for at once, filled up: so that nothing is compiled while serving."""


class _Part(NamedTuple):
    """One session's rows in a proposal. Its query is behind the first rows, of which there is one more than drafts that were right."""

    slot: int
    base: int  # position of the first row
    tokens: Sequence[int]  # behind each row: ids, or names
    drawn: Sequence[int]  # places in `drawn` of what decides: a row counts as right if both hold the same token
    guessed: Sequence[int]


class _Expected(NamedTuple):
    """A proposal that was begun."""

    sessions: dict[int, tuple[int, int]]  # by slot, in order: tokens of the checkpoint and drafts behind it
    fetch: _Fetch


class _Inputs:
    """The integers of a proposal for so many sessions, copied in one piece from one of a few host buffers in turn, and what follows."""

    def __init__(self, sessions: int, most: int, device: torch.device) -> None:
        rows = most + 1
        wide, narrow = [sessions * rows] * 4 + [sessions * most] + [sessions] * 4, [sessions * rows] * 2 + [sessions]
        self._ends = np.cumsum([*(2 * n for n in wide), *narrow]).tolist()
        on_card = device.type == "cuda"
        self._hosts = [torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=on_card) for _ in range(_AHEAD)]
        self._copied = [torch.cuda.Event() for _ in range(_AHEAD)] if on_card else None
        self._turn = 0
        self._most = most
        self._device = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        parts = self._device.tensor_split(self._ends[:-1])
        whole = [part.view(torch.int64) for part in parts[:9]]
        self.tokens, self.positions, self.places, drawn, guessed = whole[:5]
        self.drawn, self.guessed = drawn.view(sessions, rows), guessed.view(sessions, most)
        self.counts, self.base, self.slots, self.first = whole[5:]
        self.pages, self.offsets, self.used = parts[9:]
        self.last = torch.zeros(sessions, dtype=torch.int64, device=device)
        self.at = torch.zeros(most, sessions, dtype=torch.int64, device=device)
        self.query_pages, self.query_offsets, self.lengths = (
            torch.zeros(most, sessions, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.table = torch.zeros(most, sessions, SEEN, dtype=torch.int32, device=device)

    def fill(self, parts: Sequence[_Part], first: Array) -> None:
        """Write the parts, which keep positions from `first` on; what is left of the sessions writes and sees no key."""
        self._turn = (self._turn + 1) % _AHEAD
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        host, most, here = self._hosts[self._turn], self._most, len(parts)
        views = np.split(host.numpy(), self._ends[:-1])
        tokens, positions, places, drawn, guessed, counts, base, slots, firsts = (view.view(np.int64) for view in views[:9])
        pages, offsets, used = views[9:]
        host.zero_()
        pages[:] = -1
        counts[:here] = [len(part.guessed) for part in parts]
        base[:here] = [part.base for part in parts]
        slots[:here] = [part.slot for part in parts]
        firsts[:here] = first
        used[:here] = 1
        for i, part in enumerate(parts):
            row = i * (most + 1)
            tokens[row : row + len(part.tokens)] = part.tokens
            drawn[row : row + len(part.drawn)] = part.drawn
            guessed[i * most : i * most + len(part.guessed)] = part.guessed
        behind = np.arange(most + 1)
        inside = behind <= counts[:here, None]
        at, slot = base[:here, None] + behind, np.broadcast_to(slots[:here, None], inside.shape)
        where_to, offset = where(slot, at)
        positions.reshape(-1, most + 1)[:here] = np.where(inside, at, 0)
        places.reshape(-1, most + 1)[:here] = np.where(inside, slot * RING + at % RING, 0)
        pages.reshape(-1, most + 1)[:here] = np.where(inside, where_to, -1)
        offsets.reshape(-1, most + 1)[:here] = offset
        self._device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()


class _Recorded(NamedTuple):
    inputs: _Inputs
    replay: Callable[[], object]


class _OnDevice(Proposal):
    """Drafts that the device is making."""

    def __init__(self, names: dict[int, list[int]], rows: dict[int, int], fetch: _Fetch) -> None:
        super().__init__(names)
        self._fetch, self._rows = fetch, rows

    def values(self, slot: int) -> Sequence[int]:
        return self._fetch.wait(self._rows[slot])


class _Fetch:
    """The host's copy of one proposal's drafts."""

    def __init__(self, size: int, on_card: bool) -> None:
        self._tokens = torch.zeros(size, dtype=torch.int64, pin_memory=on_card)
        self._done = torch.cuda.Event() if on_card else None
        self._known: list[list[int]] | None = None
        self._shape = (0, 0)

    def start(self, drafts: torch.Tensor) -> None:
        """int64 [sessions, drafts], contiguous."""
        if self._done is not None:
            self._done.synchronize()
        self._shape, self._known = (drafts.shape[0], drafts.shape[1]), None
        self._tokens[: drafts.numel()].copy_(drafts.reshape(-1), non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self, row: int) -> list[int]:
        if self._known is None:
            if self._done is not None:
                self._done.synchronize()
            self._known = self._tokens[: self._shape[0] * self._shape[1]].view(self._shape).tolist()
        return self._known[row]


class _Arena:
    """Transients of a proposal of up to `rows` rows and `sessions` sessions."""

    def __init__(self, model: DenseModel, rows: int, sessions: int) -> None:
        config, device, dtype = model.config, model.device, model.dtype
        heads = config.heads * config.head_dim

        def typed(count: int, width: int) -> torch.Tensor:
            return torch.empty(count, width, dtype=dtype, device=device)

        self.embedded, self.hidden, self.x = (torch.empty(rows, config.hidden, device=device) for _ in range(3))
        self.entered, self.normed = typed(rows, config.hidden), typed(rows, config.hidden)
        self.qkv = typed(rows, heads + 2 * config.kv_heads * config.head_dim)
        self.q = typed(rows, heads).view(rows, config.heads, config.head_dim)
        self.attended, self.gated = typed(sessions, heads), typed(sessions, config.ffn)
        self.logits = torch.empty(sessions, config.vocab, device=device)


class CudaMtpDrafter(MtpDrafter):
    """Drafts of sessions whose forwards run on a card."""

    wants_hidden = False  # the forward keeps them itself

    def __init__(self, model: DenseModel, weights: MtpWeights, slots: int, most: int, graphs: bool = True) -> None:
        """`most`: drafts of a session at a time."""
        super().__init__(model, weights, slots)
        self.most = most
        self.sessions = bucket_of(slots)
        self._tokens = torch.zeros(self.sessions * most, dtype=torch.int64, device=model.device)
        self.named = 0  # where in `drawn` the drafts are
        self._expected: _Expected | None = None
        self._graphs = graphs
        config, device = model.config, model.device
        self._arena = _Arena(model, max(self.sessions * (most + 1), MOST_ROWS), self.sessions)
        self._proj = [Linear(part.contiguous()) for part in self._weights.proj.weight.split(config.hidden, 1)]
        splits = -(-SEEN * PAGE // SPLIT)
        self._space = decode_workspace(self.sessions, config.heads, config.kv_heads, config.head_dim, splits, device)
        self._splits = splits
        self._scratch = Scratch(model.linears) if model.quantised else None
        turns = model.rotations[:, 0]
        self._cos, self._sin = turns.real.contiguous(), turns.imag.contiguous()
        self._recorded: dict[int, _Recorded] = {}  # by sessions
        self._fetches = [_Fetch(self.sessions * most, device.type == "cuda") for _ in range(_AHEAD)]
        self._turn = 0
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    @property
    def ring(self) -> torch.Tensor:
        """fp32 [places, hidden]: where a forward keeps its hidden states."""
        return self._ring

    @property
    def drafts(self) -> torch.Tensor:
        """int64 [sessions * most] of the last proposal, a session's one after another."""
        return self._tokens[self.named : self.named + self.sessions * self.most]

    def bind(self, drawn: torch.Tensor, at: int) -> None:
        """See dense_cuda.Keeper. What is drawn is expected at the beginning of `drawn`."""
        self._tokens, self.named = drawn, at
        if drawn.is_cuda:  # compiles what making up needs
            for size in _MADE_UP:
                self._evaluate([np.zeros(size, np.int64)] * 3 + [np.full(size, -1, np.int32), np.zeros(size, np.int32)])

    def places(self, segments: Sequence[Segment]) -> Array:
        """See dense_cuda.Keeper."""
        self._expected = None  # it was for the forward before
        if not segments:
            return np.zeros(0, np.int32)
        firsts = [self._windows[s.slot].extend(s.start, len(s.tokens)).start for s in segments]
        counts = np.array([len(segment.tokens) for segment in segments])
        about = np.array([(s.slot, s.start, first) for s, first in zip(segments, firsts, strict=True)])
        slots, starts, first = np.repeat(about, counts, axis=0).T
        positions = starts + np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.where(positions >= first, slots * RING + positions % RING, -1).astype(np.int32)

    @torch.inference_mode()
    def expect(self, sessions: Sequence[Expected], tokens: Tokens) -> None:
        """Begin. The rows behind a session's tokens and drafts are the same however many of these are right."""
        if not all(self._windows[s.slot].first < s.length == self._windows[s.slot].end - len(s.drafts) for s in sessions):
            return
        self._make_up({s.slot: s.length - 1 for s in sessions}, tokens)
        parts = []
        for slot, length, drawn, drafts in sessions:
            rows = range(drawn, drawn + len(drafts) + 1)
            parts.append(_Part(slot, length - 1, [-1 - row for row in rows], rows[:-1], [-1 - name for name in drafts]))
        if parts:
            begun = {slot: (length, len(drafts)) for slot, length, _, drafts in sessions}
            self._expected = _Expected(begun, self._begin(parts))

    @torch.inference_mode()
    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        """See MtpDrafter. The device always makes `most` drafts, so that what is recorded serves every `count` up to that."""
        able = self._able(wants, tokens)
        if not able:
            return Proposal({})
        expected, self._expected = self._expected, None
        if expected is None or not all(self._foreseen(expected, slot, len(tokens(slot))) for slot, _ in able):
            parts, bases = [], {}
            for slot, token in able:
                known = tokens(slot)
                bases[slot] = max(self._windows[slot].missing(known, token).start, len(known) - 1 - self.most)
            self._make_up(bases, tokens)
            for slot, token in able:
                known, base = tokens(slot), bases[slot]
                same = [0] * (len(known) - 1 - base)  # the host knows that they are right
                parts.append(_Part(slot, base, [*known[base + 1 :], token], same, same))
            expected = _Expected({slot: (0, 0) for slot, _ in able}, self._begin(parts))
        place = {slot: i for i, slot in enumerate(expected.sessions)}
        for slot, token in able:
            self._windows[slot].made(token)
        begin = {slot: self.named + place[slot] * self.most for slot, _ in able}
        return _OnDevice({slot: [-1 - at - d for d in range(count)] for slot, at in begin.items()}, place, expected.fetch)

    @staticmethod
    def _foreseen(expected: _Expected, slot: int, length: int) -> bool:
        before, drafts = expected.sessions.get(slot, (0, -1))
        return before <= length <= before + drafts

    def _make_up(self, until: Mapping[int, int], tokens: Tokens) -> None:
        """Evaluate the rows of each slot that are missing before this position, whose token is known."""
        parts = []
        for slot, end in until.items():
            window, known = self._windows[slot], tokens(slot)
            start = window.done
            if window.first < start <= end and known[start] != window.follow:
                start -= 1
            if (start := max(start, window.first)) < end:
                parts.append((slot, range(start, end), known[start + 1 : end + 1]))
                window.done, window.follow = end, known[end]
        if not parts:
            return
        rows = rows_of(parts)[:5]
        for begin in range(0, len(rows[0]), MOST_ROWS):
            some = [vector[begin : begin + MOST_ROWS] for vector in rows]
            size = next(size for size in _MADE_UP if len(some[0]) <= size)
            blanks = (0, 0, 0, -1, 0)  # the pages'
            self._evaluate([np.pad(v, (0, size - len(v)), constant_values=blank) for v, blank in zip(some, blanks, strict=True)])

    @torch.inference_mode()
    def _evaluate(self, rows: Sequence[Array]) -> None:
        """Keys and values of rows: tokens, positions, places, pages, offsets."""
        device = self._ring.device
        tokens, positions, places, pages, offsets = (torch.from_numpy(vector).to(device, non_blocking=True) for vector in rows)
        torch.index_select(self._ring, 0, places, out=self._arena.hidden[: len(places)])
        self._rows_on_card(tokens, self._arena.hidden[: len(places)], positions, pages, offsets)

    def _begin(self, parts: Sequence[_Part]) -> _Fetch:
        """Make drafts for these sessions, in this order."""
        sessions = bucket_of(len(parts))
        if sessions not in self._recorded:
            inputs = _Inputs(sessions, self.most, self._ring.device)
            inputs.fill([], np.zeros(0, np.int64))
            self._recorded[sessions] = self._record(inputs)
        kept = self._recorded[sessions]
        kept.inputs.fill(parts, np.array([self._windows[part.slot].first for part in parts]))
        kept.replay()
        self._turn = (self._turn + 1) % _AHEAD
        fetch = self._fetches[self._turn]
        fetch.start(self.drafts[: sessions * self.most].view(sessions, self.most))
        return fetch

    def _record(self, inputs: _Inputs) -> _Recorded:
        def run() -> None:
            self._run(inputs)

        if self._ring.device.type != "cuda" or not self._graphs:
            return _Recorded(inputs, run)
        graph, _ = captured(run)
        return _Recorded(inputs, graph.replay)

    def _run(self, inputs: _Inputs) -> None:
        """Launch the kernels of a proposal over what lies in `inputs`."""
        sessions, rows = inputs.drawn.shape
        drafts = self.drafts[: sessions * self.most].view(sessions, self.most)
        accepted(
            self._tokens, inputs.drawn, inputs.guessed, inputs.counts, inputs.base, inputs.slots, inputs.first, inputs.used,
            inputs.last, inputs.at, inputs.query_pages, inputs.query_offsets, inputs.table, inputs.lengths,
            limit=len(self._cos), page=PAGE, ring=PAGES,
        )  # fmt: skip
        hidden = torch.index_select(self._ring, 0, inputs.places, out=self._arena.hidden[: sessions * rows])
        x, q = self._rows_on_card(inputs.tokens, hidden, inputs.positions, inputs.pages, inputs.offsets)
        y = self._block_on_card(x[inputs.last], q[inputs.last], inputs, 0)
        found = self._choice_on_card(y)
        drafts[:, 0].copy_(found)
        for depth in range(1, self.most):
            x, q = self._rows_on_card(found, y, inputs.at[depth], inputs.query_pages[depth], inputs.query_offsets[depth])
            y = self._block_on_card(x.clone(), q, inputs, depth)
            found = self._choice_on_card(y)
            drafts[:, depth].copy_(found)

    def _rows_on_card(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream before the block and its queries, in buffers that the next call uses again."""
        weights, eps, early, rows = self._weights, self._model.config.norm_eps, self._early, len(tokens)
        x, entered, normed, qkv = (
            self._arena.x[:rows],
            self._arena.entered[:rows],
            self._arena.normed[:rows],
            self._arena.qkv[:rows],
        )
        embed(tokens, self._model.embed, self._arena.embedded[:rows], self._tokens, early)
        rms_norm(self._arena.embedded[:rows], weights.embed_norm, eps, entered, early=early)
        multiply(entered, self._proj[0], x, early=early)
        rms_norm(hidden, weights.hidden_norm, eps, normed, early=early)
        multiply(normed, self._proj[1], x, epilogue=ADD, early=early)
        rms_norm(x, weights.attn_norm, eps, entered, early=early)
        multiply(entered, weights.qkv, qkv, early=early)
        rope_kv(qkv, positions, self._cos, self._sin, self._arena.q[:rows], self._k, self._v, pages, offsets, early=early)
        return x, self._arena.q[:rows]

    def _block_on_card(self, x: torch.Tensor, q: torch.Tensor, inputs: _Inputs, depth: int) -> torch.Tensor:
        """The residual stream behind the block, fp32 [sessions, hidden], in place of x."""
        weights, eps, early, sessions = self._weights, self._model.config.norm_eps, self._early, len(x)
        attended, normed, gated = self._arena.attended[:sessions], self._arena.entered[:sessions], self._arena.gated[:sessions]
        attention_decode(q, self._k, self._v, inputs.table[depth], inputs.lengths[depth], attended, self._space,
                         scale=self._model.scale, page_tokens=PAGE, split=SPLIT, stretch=STRETCH, max_splits=self._splits,
                         early=early)  # fmt: skip
        multiply(attended, weights.out, x, epilogue=ADD, early=early)
        rms_norm(x, weights.mlp_norm, eps, normed, early=early)
        multiply(normed, weights.gate_up, gated, epilogue=SILU_MUL, early=early)
        multiply(gated, weights.down, x, epilogue=ADD, early=early)
        return x

    def _choice_on_card(self, y: torch.Tensor) -> torch.Tensor:
        """int64 [sessions]: the likeliest token behind each."""
        normed, logits = self._arena.entered[: len(y)], self._arena.logits[: len(y)]
        rms_norm(y, self._weights.norm, self._model.config.norm_eps, normed, early=self._early)
        return multiply(normed, self._model.head, logits, scratch=self._scratch, early=self._early).argmax(-1)
