"""Drafts from an MTP module on an NVIDIA card: the kernels of a decode step, recorded by the number of sessions.

Drafts stay on the device: `drawn` holds them where the next forward's tokens may name them (see triton_kernels.embedding), and a copy
goes to the host, which needs them only when that forward's draws are there. Hidden states are kept by the forward itself, in the
places that `places` gives its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ds4batch.engine.draft.drafter import Proposal, Tokens
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_head import MtpWeights
from ds4batch.engine.draft.mtp_window import PAGE, RING, SEEN, Queries, Rows, queries_of
from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import ADD, SILU_MUL, Scratch, multiply
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.dense_cuda import SPLIT, STRETCH, bucket_of
from ds4batch.engine.rows import Segment
from triton_kernels.attention_decode import attention_decode, decode_workspace
from triton_kernels.embedding import embed
from triton_kernels.norm import rms_norm
from triton_kernels.rope_kv import rope_kv

_AHEAD = 4  # proposals whose inputs may be on their way
_EAGER = 1024  # rows that are made up for at once

Array = np.ndarray[Any, Any]


class _Frame(NamedTuple):
    """What a recorded proposal has room for."""

    sessions: int
    rows: int  # of the module before the first draft, at most
    drafts: int


class _Inputs:
    """The integers of a proposal, copied in one piece from one of a few host buffers in turn."""

    def __init__(self, frame: _Frame, device: torch.device) -> None:
        self.frame = frame
        sessions, rows, drafts = frame
        wide = [rows, rows, rows, sessions, drafts * sessions]  # int64
        narrow = [rows, rows, drafts * sessions, drafts * sessions, drafts * sessions, drafts * sessions * SEEN]
        self._ends = np.cumsum([*(2 * n for n in wide), *narrow]).tolist()
        on_card = device.type == "cuda"
        self._hosts = [torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=on_card) for _ in range(_AHEAD)]
        self._copied = [torch.cuda.Event() for _ in range(_AHEAD)] if on_card else None
        self._turn = 0
        self._device = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        parts = self._device.tensor_split(self._ends[:-1])
        self.tokens, self.positions, self.places, self.last = (part.view(torch.int64) for part in parts[:4])
        self.at = parts[4].view(torch.int64).view(drafts, sessions)
        self.pages, self.offsets = parts[5:7]
        self.query_pages, self.query_offsets, self.lengths = (part.view(drafts, sessions) for part in parts[7:10])
        self.table = parts[10].view(drafts, sessions, SEEN)

    def fill(self, rows: Rows, queries: Sequence[Queries]) -> None:
        """Write them; what is left of the frame writes and sees no key."""
        drafts = self.frame.drafts
        self._turn = (self._turn + 1) % _AHEAD
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        host = self._hosts[self._turn]
        parts = np.split(host.numpy(), self._ends[:-1])
        for part, values in zip(parts[:4], (rows.tokens, rows.positions, rows.places, rows.last), strict=True):
            _put(part.view(np.int64), values, 0)
        _put(parts[5], rows.pages, -1)
        _put(parts[6], rows.offsets, 0)
        wide = [part.reshape(drafts, -1) for part in (parts[4].view(np.int64), *parts[7:11])]
        for depth, query in enumerate(queries):
            _put(wide[0][depth], query.positions, 0)
            _put(wide[1][depth], query.pages, -1)
            for part, values in zip(wide[2:], (query.offsets, query.lengths, query.table), strict=True):
                _put(part[depth], values.reshape(-1), 0)
        self._device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()


def _put(part: Array, values: Array, blank: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = blank


class _Recorded(NamedTuple):
    inputs: _Inputs
    replay: Callable[[], object]


class _OnDevice(Proposal):
    """Drafts that the device is making."""

    def __init__(self, names: dict[int, list[int]], fetch: _Fetch) -> None:
        super().__init__(names)
        self._fetch = fetch
        self._rows = {slot: i for i, slot in enumerate(names)}

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
        self.drafts = torch.zeros(self.sessions * most, dtype=torch.int64, device=model.device)
        """int64 [sessions * drafts] of the last proposal, a session's one after another; see `bind`."""
        self._named = 0
        self._graphs = graphs
        config, device = model.config, model.device
        self._arena = _Arena(model, max(self.sessions * (most + 1), _EAGER), self.sessions)
        self._proj = [Linear(part.contiguous()) for part in self._weights.proj.weight.split(config.hidden, 1)]
        splits = -(-SEEN * PAGE // SPLIT)
        self._space = decode_workspace(self.sessions, config.heads, config.kv_heads, config.head_dim, splits, device)
        self._splits = splits
        self._scratch = Scratch(model.linears) if model.quantised else None
        turns = model.rotations[:, 0]
        self._cos, self._sin = turns.real.contiguous(), turns.imag.contiguous()
        self._recorded: dict[_Frame, _Recorded] = {}
        self._fetches = [_Fetch(self.sessions * most, device.type == "cuda") for _ in range(_AHEAD)]
        self._turn = 0
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    @property
    def ring(self) -> torch.Tensor:
        """fp32 [places, hidden]: where a forward keeps its hidden states."""
        return self._ring

    def bind(self, drawn: torch.Tensor, at: int) -> None:
        """`drawn[at :]` holds the drafts from now on; tokens of a forward may name them there."""
        self.drafts = drawn[at : at + self.sessions * self.most]
        self._named = at

    def places(self, segments: Sequence[Segment]) -> Array:
        """See dense_cuda.Keeper."""
        if not segments:
            return np.zeros(0, np.int32)
        firsts = [self._windows[s.slot].extend(s.start, len(s.tokens)).start for s in segments]
        counts = np.array([len(segment.tokens) for segment in segments])
        about = np.array([(s.slot, s.start, first) for s, first in zip(segments, firsts, strict=True)])
        slots, starts, first = np.repeat(about, counts, axis=0).T
        positions = starts + np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.where(positions >= first, slots * RING + positions % RING, -1).astype(np.int32)

    @torch.inference_mode()
    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        """See MtpDrafter. The device always makes `most` drafts, so that what is recorded serves every `count` up to that."""
        able = self._able(wants, tokens)
        if not able:
            return Proposal({})
        rows, first = self._placed(able, tokens)
        rows = self._make_up(rows, self.most + 1)
        last = len(self._cos) - 1
        queries = [queries_of(rows.slots, np.minimum(rows.positions[rows.last] + i, last), first) for i in range(self.most)]
        sessions = bucket_of(len(able))
        kept = self._kept(_Frame(sessions, sessions * (self.most + 1), self.most))
        kept.inputs.fill(rows, queries)
        kept.replay()
        self._turn = (self._turn + 1) % _AHEAD
        fetch = self._fetches[self._turn]
        fetch.start(self.drafts[: sessions * self.most].view(sessions, self.most))
        for slot, token in able:
            self._windows[slot].made(token)
        names = {slot: [-1 - (self._named + i * self.most + d) for d in range(count)] for i, (slot, _) in enumerate(able)}
        return _OnDevice(names, fetch)

    def _make_up(self, rows: Rows, most: int) -> Rows:
        """Evaluate what goes beyond the last `most` rows of each session; those that are left."""
        begins = np.concatenate([[0], rows.last[:-1] + 1])
        starts = np.maximum(begins, rows.last - most + 1)
        if (starts == begins).all():
            return rows
        late = np.zeros(len(rows.tokens), bool)
        for start, last in zip(starts, rows.last, strict=True):
            late[start : last + 1] = True
        early = [vector[~late] for vector in rows[:5]]
        device = self._ring.device
        for begin in range(0, len(early[0]), _EAGER):
            tokens, positions, places, pages, offsets = (torch.from_numpy(v[begin : begin + _EAGER]).to(device) for v in early)
            torch.index_select(self._ring, 0, places, out=self._arena.hidden[: len(places)])
            self._rows_on_card(tokens, self._arena.hidden[: len(places)], positions, pages, offsets)
        kept = [vector[late] for vector in rows[:5]]
        return Rows(kept[0], kept[1], kept[2], kept[3], kept[4], np.cumsum(rows.last - starts + 1) - 1, rows.slots)

    def _kept(self, frame: _Frame) -> _Recorded:
        """The recorded proposal of `frame`, recorded now if it was not."""
        if frame not in self._recorded:
            inputs = _Inputs(frame, self._ring.device)
            nothing, none = np.zeros(0, np.int64), np.zeros(0, np.int32)
            rows = Rows(nothing, nothing, nothing, none, none, nothing, nothing)
            inputs.fill(rows, [Queries(nothing, none, none, np.zeros((0, SEEN), np.int32), none)] * frame.drafts)
            self._recorded[frame] = self._record(frame, inputs)
        return self._recorded[frame]

    def _record(self, frame: _Frame, inputs: _Inputs) -> _Recorded:
        def run() -> None:
            self._run(frame, inputs)

        if self._ring.device.type != "cuda" or not self._graphs:
            return _Recorded(inputs, run)
        side = torch.cuda.Stream(self._ring.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return _Recorded(inputs, graph.replay)

    def _run(self, frame: _Frame, inputs: _Inputs) -> None:
        """Launch the kernels of a proposal over what lies in `inputs`."""
        drafts = self.drafts[: frame.sessions * frame.drafts].view(frame.sessions, frame.drafts)
        hidden = torch.index_select(self._ring, 0, inputs.places, out=self._arena.hidden[: frame.rows])
        x, q = self._rows_on_card(inputs.tokens, hidden, inputs.positions, inputs.pages, inputs.offsets)
        y = self._block_on_card(x[inputs.last], q[inputs.last], inputs, 0)
        found = self._choice_on_card(y)
        drafts[:, 0].copy_(found)
        for depth in range(1, frame.drafts):
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
        embed(tokens, self._model.embed, self._arena.embedded[:rows], early=early)
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
