"""Drafts from an MTP module (mtp_head), in plain torch: for CPUs, and as the oracle of mtp_cuda.

Rows of the module are evaluated for the whole batch in one pass, then one query a session and draft. Drafts are guesses: nothing here
has to have the same bits anywhere, and the window of mtp_window makes the module forget what lies far behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ds4batch.engine.draft.drafter import Expected, Proposal, Tokens
from ds4batch.engine.draft.mtp_head import MtpWeights
from ds4batch.engine.draft.mtp_window import MOST_ROWS, PAGE, PAGES, RING, Array, Queries, Rows, Window, queries_of, rows_of
from ds4batch.engine.linear import Linear
from ds4batch.engine.models.dense import DenseModel, paired
from ds4batch.engine.rows import Span, product_rows, product_sizes

_ROWS_MULTIPLE = 16  # rows of the module that are evaluated together
_QUERIES_MULTIPLE = 2  # of one a session: they are few


class Prepared(NamedTuple):
    """The module's weights as a forward takes them: like a layer's, with heads' dimensions in pairs."""

    embed_norm: torch.Tensor  # fp32 [hidden]
    hidden_norm: torch.Tensor
    proj: Linear  # [hidden, 2 * hidden]: the columns of the embedding, then those of the hidden state
    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    norm: torch.Tensor


def prepared(weights: MtpWeights, head_dim: int) -> Prepared:
    """The weights on their device, in their type; norms in fp32."""
    qkv = torch.cat([paired(weights.q, head_dim), paired(weights.k, head_dim), weights.v])
    return Prepared(
        embed_norm=weights.embed_norm.float(),
        hidden_norm=weights.hidden_norm.float(),
        proj=Linear(weights.proj),
        attn_norm=weights.attn_norm.float(),
        qkv=Linear(qkv),
        out=Linear(weights.out),
        mlp_norm=weights.mlp_norm.float(),
        gate_up=Linear(torch.cat([weights.gate, weights.up])),
        down=Linear(weights.down),
        norm=weights.norm.float(),
    )


class MtpDrafter:
    """The drafts of one engine's sessions. Follows what the engine does to them, see Window."""

    wants_hidden = True

    def __init__(self, model: DenseModel, weights: MtpWeights, slots: int) -> None:
        """`weights`: of the model's shape. Takes slots * RING rows of hidden states and keys on the model's device."""
        config = model.config
        self._model = model
        self._weights = prepared(weights.to(model.device, model.dtype), config.head_dim)
        self._windows = [Window() for _ in range(slots)]
        self._ring = torch.zeros(slots * RING, config.hidden, device=model.device)
        shape = (slots * PAGES, config.kv_heads, PAGE, config.head_dim)
        self._k, self._v = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        self._warm_up(slots)

    def note(self, spans: Sequence[Span], hidden: torch.Tensor) -> None:
        """A forward has evaluated `spans`. hidden: fp32 [rows, hidden], the residual stream behind the last layer."""
        rows, places = [], []
        for span in spans:
            kept = self._windows[span.slot].extend(span.start, span.rows)
            rows += [span.row + p - span.start for p in kept]
            places += [span.slot * RING + p % RING for p in kept]
        if rows:
            device = self._ring.device
            self._ring[torch.tensor(places, device=device)] = hidden[torch.tensor(rows, device=device)]

    def cut(self, slot: int, length: int) -> None:
        """The slot's session was shortened to `length` tokens."""
        self._windows[slot].cut(length)

    def fork(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of `source` are those of `target` now."""
        kept = self._windows[source]
        self._windows[target] = Window(kept.first, kept.end, kept.done, kept.follow)
        self._windows[target].cut(length)
        self._ring.view(-1, RING, self._ring.shape[1])[target].copy_(self._ring.view(-1, RING, self._ring.shape[1])[source])
        for pool in (self._k, self._v):
            pages = pool.view(-1, PAGES, *pool.shape[1:])
            pages[target].copy_(pages[source])

    def replaced(self, slot: int, length: int) -> None:
        """The slot holds `length` tokens of which nothing was noted."""
        self._windows[slot] = Window(length, length, length)

    def expect(self, sessions: Sequence[Expected], tokens: Tokens) -> None:
        """Drafts are made when they are asked for."""

    @torch.inference_mode()
    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        """Up to `count` drafts by slot for each (slot, token that follows its checkpoint). A slot of which nothing is kept gets none."""
        able = self._able(wants, tokens)
        if not able:
            return Proposal({})
        drafts = self._drafts(*self._placed(able, tokens), count)
        for slot, token in able:
            self._windows[slot].made(token)
        return Proposal(dict(zip([slot for slot, _ in able], drafts, strict=True)))

    def _able(self, wants: Sequence[tuple[int, int]], tokens: Tokens) -> list[tuple[int, int]]:
        """The wants of sessions whose last hidden state is kept."""
        windows = self._windows
        return [(s, t) for s, t in wants if windows[s].first < windows[s].end == len(tokens(s))]

    def _placed(self, wants: Sequence[tuple[int, int]], tokens: Tokens) -> tuple[Rows, Array]:
        """The rows that are missing before the drafts, and the first position that each session keeps."""
        parts = []
        for slot, token in wants:
            known = tokens(slot)
            missing = self._windows[slot].missing(known, token)
            parts.append((slot, missing, [*known[missing.start + 1 : missing.stop], token]))
        return rows_of(parts), np.array([self._windows[slot].first for slot, _ in wants])

    def _drafts(self, rows: Rows, first: Array, count: int) -> list[list[int]]:
        """The drafts of each session."""
        at = rows.positions[rows.last]
        queries = queries_of(rows.slots, at, first)
        y = self._block(*self._last_rows(rows), queries)
        found = [self._choice(y)]
        for depth in range(1, count):
            queries = queries_of(rows.slots, at + depth, first)
            x, q = self._rows(found[-1], y, queries.positions, queries.pages, queries.offsets)
            y = self._block(x, q, queries)
            found.append(self._choice(y))
        chains: list[list[int]] = torch.stack(found, 1).tolist()
        return chains

    def _last_rows(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate `rows`, at most MOST_ROWS at a time; what `_rows` says of each session's last one."""
        found = []
        for begin in range(0, len(rows.tokens), MOST_ROWS):
            tokens, positions, places, pages, offsets = (vector[begin : begin + MOST_ROWS] for vector in rows[:5])
            x, q = self._rows(self._on(tokens), self._ring[self._on(places)], positions, pages, offsets)
            last = self._on(rows.last[(begin <= rows.last) & (rows.last < begin + MOST_ROWS)] - begin)
            found.append((x[last], q[last]))
        x, q = (torch.cat(part) for part in zip(*found, strict=True))
        return x, q

    def _rows(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: Array, pages: Array, offsets: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream before the block, fp32 [R, hidden], and its queries, fp32 [R, heads, head_dim]. Writes keys and values."""
        model, weights, config, rows = self._model, self._weights, self._model.config, len(tokens)
        entered = self._normed(F.embedding(tokens, model.embed).float(), weights.embed_norm)
        both = torch.cat([entered, self._normed(hidden, weights.hidden_norm)], -1)
        x = weights.proj(_padded(both, _ROWS_MULTIPLE)).float()
        qkv = weights.qkv(self._normed(x, weights.attn_norm))[:rows]
        x = x[:rows]
        split = qkv.view(len(qkv), config.heads + 2 * config.kv_heads, config.head_dim).float()
        turned = split[:, : config.heads + config.kv_heads]
        torch.view_as_complex(turned.view(*turned.shape[:2], -1, 2)).mul_(model.rotations[self._on(positions)])
        where = self._on(pages).long(), slice(None), self._on(offsets).long()
        self._k[where] = split[:, config.heads : config.heads + config.kv_heads].to(self._k.dtype)
        self._v[where] = split[:, config.heads + config.kv_heads :].to(self._v.dtype)
        return x, split[:, : config.heads]

    def _block(self, x: torch.Tensor, q: torch.Tensor, queries: Queries) -> torch.Tensor:
        """The residual stream behind the block, fp32 [sessions, hidden]."""
        config, weights = self._model.config, self._weights
        lengths, used = self._on(queries.lengths), -(-int(queries.lengths.max()) // PAGE)
        table = self._on(queries.table[:, :used]).long()
        seen = (torch.arange(used * PAGE, device=x.device) < lengths[:, None])[:, None, None]
        k, v = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (self._k, self._v))
        grouped = q.to(k.dtype).view(len(q), config.kv_heads, -1, config.head_dim)
        attended = F.scaled_dot_product_attention(grouped, k, v, seen, scale=self._model.scale)
        x = x + weights.out(_padded(attended.reshape(len(x), -1), _QUERIES_MULTIPLE))[: len(x)]
        gate, up = weights.gate_up(_padded(self._normed(x, weights.mlp_norm), _QUERIES_MULTIPLE)).chunk(2, -1)
        return x + weights.down(F.silu(gate).mul_(up))[: len(x)]

    def _choice(self, y: torch.Tensor) -> torch.Tensor:
        """int64 [sessions]: the likeliest token behind each."""
        return self._model.head(_padded(self._normed(y, self._weights.norm), _QUERIES_MULTIPLE))[: len(y)].argmax(-1)

    @torch.inference_mode()
    def _warm_up(self, slots: int) -> None:
        """Run every product on every number of rows that occurs: what a library keeps of each is there then, and grows no more."""
        weights = self._weights
        wide = product_sizes(min(MOST_ROWS, slots * RING), _ROWS_MULTIPLE)
        narrow = product_sizes(slots, _QUERIES_MULTIPLE)
        for products, sizes in (
            ((weights.proj, weights.qkv), wide),
            ((weights.out, weights.gate_up, weights.down, self._model.head), narrow),
        ):
            for product in products:
                x = torch.zeros(sizes[-1], product.shape[1], dtype=product.dtype, device=product.device)
                for rows in sizes:
                    product(x[:rows])

    def _on(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._ring.device)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self._model.config.hidden,), weight, self._model.config.norm_eps).to(self._model.dtype)


def _padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zero rows at the end, up to a number on which products run."""
    return F.pad(x, (0, 0, 0, product_rows(len(x), multiple) - len(x)))
