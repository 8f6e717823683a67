"""The dense family's forward on an NVIDIA card: kernels of our own, and CUDA graphs for steady decode.

The same arithmetic for every row wherever it is computed: the reduction order of each kernel is a function of the weight's shape and of
constants (see triton_kernels), so decode rows, chunks and both together give one row the same bits, with a graph or without.

One stream, one arena: a forward's transients live in buffers sized once for the largest forward and used by all layers in turn, which
is safe because only one forward is under way. Nothing waits for the device unless the host is several forwards ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ds4batch.engine.linear_cuda import ADD, SILU_MUL, Scratch, multiply
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Output
from ds4batch.engine.pages import PagePool
from ds4batch.engine.rows import Segment
from ds4batch.engine.weights.config import ModelConfig
from triton_kernels.attention_decode import attention_decode, decode_workspace
from triton_kernels.attention_prefill import PrefillTiles, attention_prefill, prefill_tiles
from triton_kernels.attention_prefill import Segment as Chunk
from triton_kernels.embedding import embed
from triton_kernels.norm import rms_norm
from triton_kernels.rope_kv import rope_kv

SPLIT = 256
"""Keys in an attention split; a constant, because it is part of a row's arithmetic."""

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a captured decode step; fewer are filled up with rows that write and read nothing."""

Array = np.ndarray[Any, Any]

_AHEAD = 4  # forwards whose inputs may be on their way


class _Arena:
    """Transients of one forward. R is the largest number of rows."""

    def __init__(self, model: DenseModel, rows: int, logit_rows: int) -> None:
        config, device, dtype = model.config, model.device, model.dtype
        heads = config.heads * config.head_dim

        def typed(width: int) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        self.hidden = torch.empty(rows, config.hidden, dtype=torch.float32, device=device)
        self.normed = typed(config.hidden)
        self.qkv = typed(heads + 2 * config.kv_heads * config.head_dim)
        self.q = typed(heads)
        self.attended = typed(heads)
        self.gated = typed(config.ffn)
        self.last = torch.empty(logit_rows, config.hidden, dtype=dtype, device=device)
        self.logits = torch.empty(logit_rows, config.vocab, dtype=torch.float32, device=device)
        self.finite = torch.empty(logit_rows, dtype=torch.bool, device=device)


class _Inputs:
    """The integers of a forward, written on the host and copied in one piece: rows [R] and page tables [S, pages].

    The host may be several forwards ahead of the device, so there are a few host buffers in turn, and one is written again only
    when its copy is done.
    """

    def __init__(self, rows: int, sessions: int, pages: int, device: torch.device) -> None:
        self.rows, self.sessions, self.pages = rows, sessions, pages
        size = 7 * rows + sessions * pages
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_AHEAD)]
        self._copied = [torch.cuda.Event() for _ in range(_AHEAD)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        whole = self.device
        self.tokens = whole[: 2 * rows].view(torch.int64)
        self.positions = whole[2 * rows : 4 * rows].view(torch.int64)
        self.slot_pages = whole[4 * rows : 5 * rows]
        self.slot_offsets = whole[5 * rows : 6 * rows]
        self.lengths = whole[6 * rows : 7 * rows]
        self.table = whole[7 * rows :].view(sessions, pages)

    def _fill_singles(
        self,
        segments: Sequence[Segment],
        page_tokens: int,
        wide: Array,
        pages: Array,
        offsets: Array,
        lengths: Array,
        table: Array,
    ) -> int:
        """Write the leading segments of one row, all columns at once; how many there are."""
        count = next((i for i, segment in enumerate(segments) if len(segment.tokens) > 1), len(segments))
        for i, segment in enumerate(segments[:count]):
            table[i, : len(segment.pages)] = segment.pages
        position = np.fromiter((segment.start for segment in segments[:count]), np.int64, count)
        wide[:count] = [segment.tokens[0] for segment in segments[:count]]
        wide[self.rows : self.rows + count] = position
        pages[:count] = table[np.arange(count), position // page_tokens]
        offsets[:count] = position % page_tokens
        lengths[:count] = position + 1
        return count

    def fill(self, segments: Sequence[Segment], page_tokens: int) -> None:
        """Write the segments' rows in order; the rest is padding: no page, no key in sight."""
        self._turn = (self._turn + 1) % _AHEAD
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        copied.synchronize()
        rows, array = self.rows, host.numpy()
        wide = array[: 4 * rows].view(np.int64)
        pages, offsets, lengths = (array[i * rows : (i + 1) * rows] for i in (4, 5, 6))
        table = array[7 * rows :].reshape(self.sessions, self.pages)
        at = self._fill_singles(segments, page_tokens, wide, pages, offsets, lengths, table)
        for i, segment in enumerate(segments[at:], at):
            count = len(segment.tokens)
            here = slice(at, at + count)
            position = np.arange(segment.start, segment.start + count)
            held = np.asarray(segment.pages, np.int32)
            wide[here] = segment.tokens
            wide[rows + at : rows + at + count] = position
            pages[here] = held[position // page_tokens]
            offsets[here] = position % page_tokens
            lengths[here] = position + 1
            table[i, : len(held)] = held
            at += count
        wide[at:rows] = 0
        wide[rows + at : 2 * rows] = 0
        pages[at:] = -1
        offsets[at:] = 0
        lengths[at:] = 0
        self.device.copy_(host, non_blocking=True)
        copied.record()


def _sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that nobody waits for, which takes pinned memory."""
    return host.pin_memory().to(device, non_blocking=True)


class _Captured(NamedTuple):
    """A recorded step and all memory that its kernels name."""

    inputs: _Inputs
    arena: _Arena
    graph: torch.cuda.CUDAGraph
    output: Output


def supported(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Why such a model's forward has to be plain torch; "" when the kernels can run it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "no card of compute capability 8.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"weights in {dtype}"
    if config.head_dim not in (64, 128):
        return f"heads of {config.head_dim} dimensions"
    if config.heads // config.kv_heads > 16:
        return f"{config.heads // config.kv_heads} heads share a key"
    return ""


class CudaForward:
    """Runs segments on a card. One at a time; the logits of a forward are valid until the next one."""

    early = True  # kernels of a decode step may begin while their predecessor ends

    def __init__(self, model: DenseModel, pool: PagePool, slots: int, ctx: int, largest: int, graphs: bool = True) -> None:
        """`largest` is the most rows of a forward; `graphs` off runs every step kernel by kernel."""
        self._model = model
        self._pool = pool
        self.drawn = torch.zeros(slots, dtype=torch.int64, device=model.device)  # tokens that rows may name, see `embed`
        config = model.config
        self._pages = -(-ctx // pool.shape.page_tokens)
        self._largest = largest
        self._slots = slots
        self._arena = _Arena(model, largest, slots)
        self._inputs = _Inputs(largest, slots, self._pages, model.device)
        self._splits = -(-self._pages * pool.shape.page_tokens // SPLIT)
        self._workspace = decode_workspace(
            self._bucket(slots), config.heads, config.kv_heads, config.head_dim, self._splits, model.device
        )
        turns = model.rotations[:, 0]
        self._cos, self._sin = turns.real.contiguous(), turns.imag.contiguous()
        self._scratch = Scratch(model.device) if model.quantised else None
        self._graphs: dict[int, _Captured] | None = {} if graphs else None
        self._early = self.early and torch.cuda.get_device_capability(model.device) >= (9, 0)

    def __call__(self, segments: Sequence[Segment]) -> tuple[Output, list[int]]:
        """The forward's output, and for each logits row the index of its segment."""
        singles = [i for i, s in enumerate(segments) if len(s.tokens) == 1]
        chunks = [i for i, s in enumerate(segments) if len(s.tokens) > 1]
        order = singles + chunks
        ordered = [segments[i] for i in order]
        if not chunks and self._graphs is not None and len(singles) <= BUCKETS[-1]:
            output = self._replay(ordered)
            return Output(output.logits[: len(order)], output.finite[: len(order)]), order
        return self._eager(ordered, len(singles), order)

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """What a decode step of `rows` rows replays. Raises ValueError while no such step has run."""
        captured = (self._graphs or {}).get(self._bucket(rows))
        if captured is None:
            raise ValueError(f"no step of {rows} rows was recorded")
        return captured.graph

    def _bucket(self, rows: int) -> int:
        return next((b for b in BUCKETS if rows <= b), rows)

    def _replay(self, segments: Sequence[Segment]) -> Output:
        assert self._graphs is not None
        bucket = self._bucket(len(segments))
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        captured = self._graphs[bucket]
        captured.inputs.fill(segments, self._pool.shape.page_tokens)
        captured.graph.replay()
        return captured.output

    def _capture(self, bucket: int) -> _Captured:
        """Record the kernels of a decode step of `bucket` rows."""
        inputs = _Inputs(bucket, bucket, self._pages, self._model.device)
        arena = _Arena(self._model, bucket, bucket)
        inputs.fill([], self._pool.shape.page_tokens)

        def step() -> Output:
            self._layers(inputs, arena, bucket, bucket, None)
            return self._head(arena, arena.hidden[:bucket], bucket)

        side = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # compiles what is new
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step()
        return _Captured(inputs, arena, graph, output)

    def _eager(self, segments: Sequence[Segment], singles: int, order: list[int]) -> tuple[Output, list[int]]:
        rows = sum(len(s.tokens) for s in segments)
        if rows > self._largest:
            raise ValueError(f"a forward of {rows} rows; the largest is {self._largest}")
        inputs, arena = self._inputs, self._arena
        inputs.fill(segments, self._pool.shape.page_tokens)
        chunks, at = [], singles
        wanted, owners = [], []
        for i, segment in enumerate(segments):
            count = len(segment.tokens)
            start = i if i < singles else at
            if i >= singles:
                chunks.append(Chunk(at, count, segment.start, i))
                at += count
            if segment.wants_logits:
                wanted.append(start + count - 1)
                owners.append(order[i])
        config = self._model.config
        tiles = None
        if chunks:
            cut = prefill_tiles(chunks, heads=config.heads, kv_heads=config.kv_heads, device="cpu")
            tiles = PrefillTiles(*_sent(torch.stack(cut), self._model.device))
        self._layers(inputs, arena, rows, singles, tiles)
        finite = torch.isfinite(arena.hidden[:rows].sum(-1))
        if not wanted:
            return Output(arena.logits[:0], finite), owners
        picked = arena.hidden[_sent(torch.tensor(wanted), self._model.device)]
        output = self._head(arena, picked, len(wanted))
        return Output(output.logits, finite), owners

    def _layers(self, inputs: _Inputs, arena: _Arena, rows: int, singles: int, tiles: Any) -> None:
        """Embedding and all blocks; the residual stream is left in arena.hidden."""
        model, config, pool = self._model, self._model.config, self._pool
        early = self._early and rows <= 64
        hidden, normed, qkv = arena.hidden[:rows], arena.normed[:rows], arena.qkv[:rows]
        q, attended = arena.q[:rows].view(rows, config.heads, config.head_dim), arena.attended[:rows]
        gated = arena.gated[:rows]
        embed(inputs.tokens[:rows], model.embed, hidden, self.drawn, early)
        shared: dict[str, Any] = {"scale": model.scale, "page_tokens": pool.shape.page_tokens, "split": SPLIT}
        for index, layer in enumerate(model.layers):
            k, v = pool.k[index], pool.v[index]
            rms_norm(hidden, layer.attn_norm, config.norm_eps, normed, early=early)
            multiply(normed, layer.qkv, qkv, scratch=self._scratch, early=early)
            rope_kv(qkv, inputs.positions[:rows], self._cos, self._sin, q, k, v, inputs.slot_pages[:rows],
                    inputs.slot_offsets[:rows], norm=layer.qk_norm, eps=config.norm_eps, early=early)  # fmt: skip
            if singles:
                attention_decode(q[:singles], k, v, inputs.table[:singles], inputs.lengths[:singles], attended[:singles],
                                 self._workspace, max_splits=self._splits, early=early, **shared)  # fmt: skip
            if tiles is not None:
                attention_prefill(q, k, v, inputs.table, tiles, attended, **shared)
            multiply(attended, layer.out, hidden, epilogue=ADD, scratch=self._scratch, early=early)
            rms_norm(hidden, layer.mlp_norm, config.norm_eps, normed, early=early)
            multiply(normed, layer.gate_up, gated, epilogue=SILU_MUL, scratch=self._scratch, early=early)
            multiply(gated, layer.down, hidden, epilogue=ADD, scratch=self._scratch, early=early)

    def _head(self, arena: _Arena, hidden: torch.Tensor, rows: int) -> Output:
        config = self._model.config
        last, logits, finite = arena.last[:rows], arena.logits[:rows], arena.finite[:rows]
        rms_norm(hidden, self._model.norm, config.norm_eps, last, finite=finite, early=self._early)
        multiply(last, self._model.head, logits, scratch=self._scratch, early=self._early)
        return Output(logits, finite)
