"""The dense family's forward on an NVIDIA card: kernels of our own, and CUDA graphs for all but the longest chunks.

The same arithmetic for every row wherever it is computed: the reduction order of each kernel is a function of the weight's shape and of
constants (see triton_kernels), so decode rows, chunks and both together give one row the same bits, with a graph or without.

One stream, one arena: a forward's transients live in buffers sized once for the largest forward and used by all layers in turn, which
is safe because only one forward is under way. Nothing waits for the device unless the host is several forwards ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ds4batch.engine.graphs import captured
from ds4batch.engine.linear_cuda import ADD, SILU_MUL, Scratch, multiply
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Output
from ds4batch.engine.pages import PagePool
from ds4batch.engine.rows import Segment
from ds4batch.engine.weights.config import ModelConfig
from triton_kernels.attention_decode import MAX_CHECK_ROWS, attention_decode, decode_workspace
from triton_kernels.attention_prefill import DEFAULT_TILE_LINES, PrefillTiles, attention_prefill, prefill_tiles, prefill_workspace
from triton_kernels.attention_prefill import Segment as Chunk
from triton_kernels.embedding import embed
from triton_kernels.keep_rows import keep_rows
from triton_kernels.norm import rms_norm
from triton_kernels.rope_kv import rope_kv

SPLIT = 256
"""Keys in an attention split; a constant, because it is part of a row's arithmetic."""

STRETCH = 2048
"""Keys whose splits are merged among themselves first; likewise."""

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Decode rows of a recorded forward; fewer are filled up with rows that write and read nothing."""

ROWS = tuple(range(16, 128, 16)) + tuple(range(128, 512, 32)) + tuple(range(512, 1025, 64))
"""All rows of a recorded forward with chunks, filled up likewise. Above, the host is quicker than the device; nothing is recorded."""


def bucket_of(rows: int) -> int:
    """The decode rows of the recorded forward that holds this many; as many where none does."""
    return next((b for b in BUCKETS if rows <= b), rows)


EARLY_ROWS = 64
"""Rows up to which kernels may begin before their predecessor has ended. With more, its programs and theirs get into each other's way."""

_CHUNK_SEGMENTS = 8  # sessions whose prompts may share a recorded forward

Array = np.ndarray[Any, Any]

_AHEAD = 4  # forwards whose inputs may be on their way


class Keeper(Protocol):
    """Who wants the hidden states behind the last layer, for drafts."""

    @property
    def ring(self) -> torch.Tensor:
        """fp32 [places, hidden]: where they go."""

    def places(self, segments: Sequence[Segment]) -> Array:
        """int32: the place of each position of the segments, one after another, -1 for none. Asked once, when they are evaluated."""

    def bind(self, drawn: torch.Tensor, at: int) -> None:
        """Drafts go to int64 `drawn[at :]`, where the tokens of a forward may name them; there is room for all sessions'."""


class _Frame(NamedTuple):
    """What a forward has room for. Decode rows come first, `check` a session; then the rows of chunks."""

    decode: int
    chunk: int
    segments: int  # chunks
    tiles: int  # of prefill attention
    wanted: int  # rows whose logits are taken; without chunks those of all rows are computed
    check: int = 1  # a token and its drafts

    @property
    def rows(self) -> int:
        """All of them."""
        return self.decode + self.chunk

    @property
    def sessions(self) -> int:
        """That decode."""
        return self.decode // self.check


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
    """The integers of a forward, written on the host and copied in one piece.

    The host may be several forwards ahead of the device, so there are a few host buffers in turn, and one is written again only
    when its copy is done.
    """

    def __init__(self, room: _Frame, pages: int, device: torch.device) -> None:
        self.room, self.pages = room, pages
        sizes = [2 * room.rows, 2 * room.rows, 2 * room.wanted, room.rows, room.rows, room.rows, room.rows]
        sizes += [4 * room.tiles, (room.sessions + room.segments) * pages]
        self._ends = np.cumsum(sizes).tolist()
        on_card = device.type == "cuda"
        self._hosts = [torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=on_card) for _ in range(_AHEAD)]
        self._copied = [torch.cuda.Event() for _ in range(_AHEAD)] if on_card else None
        self._turn = 0
        self._device = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        parts = self._device.tensor_split(self._ends[:-1])
        self.tokens, self.positions, self.wanted = (part.view(torch.int64) for part in parts[:3])
        self.slot_pages, self.slot_offsets, self.lengths, self.places = parts[3:7]
        self.tiles = parts[7].view(4, room.tiles)
        self.table = parts[8].view(room.sessions + room.segments, pages)

    def fill(
        self,
        segments: Sequence[Segment],
        singles: int,
        frame: _Frame,
        page_tokens: int,
        tiles: PrefillTiles | None,
        wanted: Sequence[int],
        keeper: Keeper | None = None,
    ) -> None:
        """Write the segments, the `singles` that decode first, as `frame` places them.

        What is left of its rows is padding: no page, no key in sight. `tiles`: of the chunks, as many as the frame has; `wanted`: rows.
        """
        self._turn = (self._turn + 1) % _AHEAD
        host = self._hosts[self._turn]
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        parts = np.split(host.numpy(), self._ends[:-1])
        tokens, positions = parts[0].view(np.int64), parts[1].view(np.int64)
        pages, offsets, lengths, places = parts[3:7]
        table = parts[8].reshape(-1, self.pages)
        for i, segment in enumerate(segments[:singles]):
            table[i, : len(segment.pages)] = segment.pages
        start = np.fromiter((segment.start for segment in segments[:singles]), np.int64, singles)
        rows: slice | Array = slice(singles)
        used, session = singles, np.arange(singles)
        if frame.check > 1:
            counts = np.fromiter((len(segment.tokens) for segment in segments[:singles]), np.int64, singles)
            session = np.repeat(session, counts)
            behind = np.arange(len(session)) - np.repeat(np.cumsum(counts) - counts, counts)  # their token
            rows, start, used = session * frame.check + behind, start[session] + behind, 0
        at = frame.decode
        for padding in (slice(used, frame.decode), slice(at + sum(len(s.tokens) for s in segments[singles:]), frame.rows)):
            tokens[padding] = positions[padding] = offsets[padding] = lengths[padding] = 0
            pages[padding] = places[padding] = -1
        tokens[rows] = [token for segment in segments[:singles] for token in segment.tokens]
        positions[rows] = start
        pages[rows] = table[session, start // page_tokens]
        offsets[rows] = start % page_tokens
        lengths[rows] = start + 1
        if keeper is not None:
            kept = keeper.places(segments)
            places[rows] = kept[: len(start)]
            places[at : at + len(kept) - len(start)] = kept[len(start) :]
        for i, segment in enumerate(segments[singles:], frame.sessions):
            here = slice(at, at + len(segment.tokens))
            position = np.arange(segment.start, segment.start + len(segment.tokens))
            held = np.asarray(segment.pages, np.int32)
            tokens[here] = segment.tokens
            positions[here] = position
            pages[here] = held[position // page_tokens]
            offsets[here] = position % page_tokens
            lengths[here] = position + 1
            table[i, : len(held)] = held
            at = here.stop
        if tiles is not None:
            parts[7].reshape(4, -1)[:, : frame.tiles] = torch.stack(tiles).numpy()
        chosen = parts[2].view(np.int64)
        chosen[: len(wanted)] = wanted
        chosen[len(wanted) : frame.wanted] = 0
        self._device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()


class _Recorded(NamedTuple):
    """A forward of one frame, and all memory that its kernels name."""

    inputs: _Inputs
    graph: torch.cuda.CUDAGraph | None  # none without a card: then `replay` runs the kernels one by one
    replay: Callable[[], object]
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

    def __init__(
        self,
        model: DenseModel,
        pool: PagePool,
        slots: int,
        ctx: int,
        largest: int,
        graphs: bool = True,
        drafts: int = 0,
        keeper: Keeper | None = None,
    ) -> None:
        """`largest` is the most rows of a forward; `graphs` off runs every step kernel by kernel; `drafts` are the most of a session."""
        self._model = model
        self._pool = pool
        self._keeper = keeper
        group = model.config.heads // model.config.kv_heads
        self._check = 1 + drafts if 1 + drafts <= min(MAX_CHECK_ROWS, 64 // group) else 1  # else its rows count as sessions
        self._draws = slots * (1 + drafts)
        self._named = torch.zeros(self._draws + bucket_of(slots) * drafts, dtype=torch.int64, device=model.device)
        if keeper is not None:
            keeper.bind(self._named, self._draws)
        config = model.config
        self._pages = -(-ctx // pool.shape.page_tokens)
        self._largest = largest
        self._sessions = bucket_of(slots * (1 + drafts) // self._check)  # that decode in a recorded forward with chunks
        decoders = self._sessions * self._check
        self._arena = _Arena(model, largest + decoders, decoders)
        self._tile_rows = DEFAULT_TILE_LINES // (config.heads // config.kv_heads)
        self._inputs = _Inputs(
            _Frame(decoders, largest, slots, -(-largest // self._tile_rows) + slots, decoders), self._pages, model.device
        )
        self._splits = -(-self._pages * pool.shape.page_tokens // SPLIT)
        self._workspace = decode_workspace(decoders, config.heads, config.kv_heads, config.head_dim, self._splits, model.device)
        self._stretches = -(-self._pages * pool.shape.page_tokens // STRETCH)
        self._prefill_workspace = prefill_workspace(
            -(-largest // self._tile_rows) + max(slots, _CHUNK_SEGMENTS), config.kv_heads, config.head_dim, self._stretches,
            model.device,
        )  # fmt: skip
        turns = model.rotations[:, 0]
        self._cos, self._sin = turns.real.contiguous(), turns.imag.contiguous()
        self._scratch = Scratch(model.linears) if model.quantised else None
        self._recorded: dict[_Frame, _Recorded] | None = {} if graphs else None
        self._early = self.early and model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) >= (9, 0)

    def __call__(self, segments: Sequence[Segment]) -> tuple[Output, list[int]]:
        """The forward's output, and for each logits row the index of its segment."""
        rows = sum(len(s.tokens) for s in segments)
        if rows > self._largest:
            raise ValueError(f"a forward of {rows} rows; the largest is {self._largest}")
        drafts = any(s.drafts for s in segments)
        owned = list(enumerate(segments))
        if drafts and self._check == 1:
            owned = [(i, part) for i, segment in owned for part in _apart(segment)]
        owned.sort(key=lambda pair: len(pair[1].tokens) > 1 + pair[1].drafts)
        order, ordered = [i for i, _ in owned], [segment for _, segment in owned]
        singles = sum(len(s.tokens) == 1 + s.drafts for s in ordered)
        chunks = len(ordered) - singles
        chunk_rows = sum(len(s.tokens) for s in ordered[singles:])
        page_tokens = self._pool.shape.page_tokens
        check = self._check if drafts else 1
        frame = self._frame(singles, chunks, chunk_rows, check)
        if frame is not None:
            tiles, wanted, owners = self._places(ordered, order, singles, frame)
            kept = self._kept(frame)
            inputs = kept.inputs
            inputs.fill(ordered, singles, frame, page_tokens, tiles, wanted, self._keeper)
            kept.replay()
            output = kept.output
        else:
            frame = _Frame(singles * check, chunk_rows, chunks, 0, sum(1 + s.drafts for s in segments if s.wants_logits), check)
            tiles, wanted, owners = self._places(ordered, order, singles, frame)
            frame = frame._replace(tiles=len(tiles.rows) if tiles is not None else 0)
            inputs = self._inputs
            inputs.fill(ordered, singles, frame, page_tokens, tiles, wanted, self._keeper)
            output = self._run(inputs, frame)
        if chunks:
            return output._replace(logits=output.logits[: len(owners)]), owners
        if check == 1:
            return output._replace(logits=output.logits[:singles], finite=output.finite[:singles]), owners
        real = inputs.wanted[: len(wanted)]  # padding lies between them
        return output._replace(logits=output.logits[real], finite=output.finite[real]), owners

    @property
    def drawn(self) -> torch.Tensor:
        """int64 [rows]: where the tokens drawn last belong, so that rows may name them; see triton_kernels.embedding."""
        return self._named[: self._draws]

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """What a decode step of `rows` rows replays. Raises ValueError while no such step has run."""
        bucket = bucket_of(rows)
        kept = (self._recorded or {}).get(_Frame(bucket, 0, 0, 0, bucket))
        if kept is None or kept.graph is None:
            raise ValueError(f"no step of {rows} rows was recorded")
        return kept.graph

    def _frame(self, singles: int, chunks: int, chunk_rows: int, check: int) -> _Frame | None:
        """The frame of a recorded forward that holds this many; None where none does."""
        if self._recorded is None or singles > BUCKETS[-1]:
            return None
        if not chunks:
            rows = bucket_of(singles) * check
            return _Frame(rows, 0, 0, 0, rows, check)
        decode = self._sessions * check if singles else 0
        rows = next((r for r in ROWS if decode + chunk_rows <= r), 0)
        if not rows or rows > len(self._arena.hidden) or chunks > _CHUNK_SEGMENTS or self._sessions > BUCKETS[-1]:
            return None
        room = rows - decode
        tiles = -(-room // self._tile_rows) + _CHUNK_SEGMENTS
        return _Frame(decode, room, _CHUNK_SEGMENTS, tiles, self._sessions * check, check)

    def _places(
        self, segments: Sequence[Segment], order: Sequence[int], singles: int, frame: _Frame
    ) -> tuple[PrefillTiles | None, list[int], list[int]]:
        """The tiles of the chunks, the rows whose logits are wanted, and for each of these the index of its segment."""
        if not frame.chunk and frame.check == 1:  # all are taken, in order
            return None, [], list(order)
        chunks: list[Chunk] = []
        wanted: list[int] = []
        owners: list[int] = []
        at = frame.decode
        for i, segment in enumerate(segments):
            end = i * frame.check + len(segment.tokens)
            if i >= singles:
                chunks.append(Chunk(at, len(segment.tokens), segment.start, frame.sessions + i - singles))
                at += len(segment.tokens)
                end = at
            if segment.wants_logits or not frame.chunk:
                wanted += range(end - 1 - segment.drafts, end)
                owners += [order[i]] * (1 + segment.drafts)
        if not frame.chunk:
            return None, wanted, owners
        config = self._model.config
        tiles = prefill_tiles(chunks, heads=config.heads, kv_heads=config.kv_heads, device="cpu", pad_to=frame.tiles)
        return tiles, wanted, owners

    def _kept(self, frame: _Frame) -> _Recorded:
        """The recorded forward of `frame`, recorded now if it was not."""
        assert self._recorded is not None
        if frame not in self._recorded:
            inputs = _Inputs(frame, self._pages, self._model.device)
            nothing = prefill_tiles([], heads=1, kv_heads=1, device="cpu", pad_to=frame.tiles) if frame.chunk else None
            inputs.fill([], 0, frame, self._pool.shape.page_tokens, nothing, [])
            self._recorded[frame] = _record(partial(self._run, inputs, frame), inputs)
        return self._recorded[frame]

    def _run(self, inputs: _Inputs, frame: _Frame) -> Output:
        """Launch the kernels of a forward over what lies in `inputs`."""
        arena, rows = self._arena, frame.rows
        tiles = PrefillTiles(*inputs.tiles[:, : frame.tiles]) if frame.chunk else None
        self._layers(inputs, frame, tiles)
        hidden = arena.hidden[:rows]
        if self._keeper is not None:
            keep_rows(hidden, inputs.places[:rows], self._keeper.ring, early=self._early and rows <= EARLY_ROWS)
        if not frame.chunk:
            return Output(*self._head(hidden), hidden)
        finite = hidden.sum(-1).isfinite() | (inputs.slot_pages[:rows] < 0)  # padding may hold anything
        if not frame.wanted:
            return Output(arena.logits[:0], finite, hidden)
        return Output(self._head(hidden[inputs.wanted[: frame.wanted]])[0], finite, hidden)

    def _layers(self, inputs: _Inputs, frame: _Frame, tiles: PrefillTiles | None) -> None:
        """Embedding and all blocks; the residual stream is left in the arena."""
        rows, singles = frame.rows, frame.decode
        model, config, pool, arena = self._model, self._model.config, self._pool, self._arena
        early = self._early and rows <= EARLY_ROWS
        hidden, normed, qkv = arena.hidden[:rows], arena.normed[:rows], arena.qkv[:rows]
        q, attended = arena.q[:rows].view(rows, config.heads, config.head_dim), arena.attended[:rows]
        gated = arena.gated[:rows]
        embed(inputs.tokens[:rows], model.embed, hidden, self._named, early)
        shared: dict[str, Any] = {"scale": model.scale, "page_tokens": pool.shape.page_tokens, "split": SPLIT, "stretch": STRETCH}
        for index, layer in enumerate(model.layers):
            k, v = pool.k[index], pool.v[index]
            rms_norm(hidden, layer.attn_norm, config.norm_eps, normed, early=early)
            multiply(normed, layer.qkv, qkv, scratch=self._scratch, early=early)
            rope_kv(qkv, inputs.positions[:rows], self._cos, self._sin, q, k, v, inputs.slot_pages[:rows],
                    inputs.slot_offsets[:rows], norm=layer.qk_norm, eps=config.norm_eps, early=early)  # fmt: skip
            if singles:
                attention_decode(q[:singles], k, v, inputs.table[: frame.sessions], inputs.lengths[:singles], attended[:singles],
                                 self._workspace, max_splits=self._splits, rows_per_session=frame.check, early=early,
                                 **shared)  # fmt: skip
            if tiles is not None:
                attention_prefill(q, k, v, inputs.table, tiles, attended, self._prefill_workspace,
                                  max_stretches=self._stretches, busy=-(-frame.chunk // self._tile_rows), early=early,
                                  **shared)  # fmt: skip
            multiply(attended, layer.out, hidden, epilogue=ADD, scratch=self._scratch, early=early)
            rms_norm(hidden, layer.mlp_norm, config.norm_eps, normed, early=early)
            multiply(normed, layer.gate_up, gated, epilogue=SILU_MUL, scratch=self._scratch, early=early)
            multiply(gated, layer.down, hidden, epilogue=ADD, scratch=self._scratch, early=early)

    def _head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the rows of `hidden`, and whether these are finite."""
        config, arena, rows = self._model.config, self._arena, len(hidden)
        last, logits, finite = arena.last[:rows], arena.logits[:rows], arena.finite[:rows]
        rms_norm(hidden, self._model.norm, config.norm_eps, last, finite=finite, early=self._early)
        multiply(last, self._model.head, logits, scratch=self._scratch, early=self._early)
        return logits, finite


def _apart(segment: Segment) -> list[Segment]:
    """A token and its drafts as sessions of one row each; other segments as they are."""
    if not segment.drafts:
        return [segment]
    return [segment._replace(start=segment.start + i, tokens=[token], drafts=0) for i, token in enumerate(segment.tokens)]


def _record(run: Callable[[], Output], inputs: _Inputs) -> _Recorded:
    """Run once, which compiles what is new, then keep the launches as a graph. Without a card they are made anew each time."""
    device = inputs.tokens.device
    if device.type != "cuda":
        return _Recorded(inputs, None, run, run())
    graph, output = captured(run)
    return _Recorded(inputs, graph, graph.replay, output)
