"""One session's state between the page pool and the arrays of a checkpoint.

Owns the layout: `k` and `v` are [layers, kv_heads, tokens, head_dim], whatever the size of a page; `state` is what StatePool.snapshot
gives, at the session's end and at its saved point. It opens no files and keeps no session's books. `capture` and `adopt` belong to
the engine's thread; what lies between them, `arrays_of` and `fill_pages`, to any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.pages import Hold, PagePool
from ds4batch.kvstore.payload import APPEND, FIXED, ArraySpec, Buffer, StateArray, state_array
from ds4batch.kvstore.store import Restored
from ds4batch.kvstore.tensors import NAMES, as_array, fill


class Spoilt(Exception):
    """The device lost the session while it was being copied."""


@dataclass(frozen=True)
class Snapshot:
    """All that is needed to copy a session out while it goes on. Its pages stay until `hold` is dropped."""

    tokens: np.ndarray  # u32 [tokens]
    pages: list[int]
    hold: Hold
    states: Mapping[int, bytes]  # position -> state of fixed size
    ready: torch.cuda.Event | None  # when the device has written all of it


def capture(engine: Engine, slot: int) -> Snapshot:
    """The slot's session as it is now. It must be on the device and hold tokens."""
    session, pool = engine.sessions[slot], engine.pool
    live = len(session.tokens)
    pages = session.pages[: -(-live // pool.shape.page_tokens)]
    states = {}
    if pool.state is not None:
        states = {n: pool.state.snapshot(slot, session.evaluated, n) for n in {live, pool.state.saved(slot)} if n}
    ready = None
    if pool.k.device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(pool.k.device))
    return Snapshot(np.array(session.tokens, dtype="<u4"), pages, pool.hold(pages), states, ready)


def arrays_of(pool: PagePool, snapshot: Snapshot, copied: Callable[[], None]) -> list[StateArray]:
    """The snapshot as a checkpoint's arrays, copied out layer by layer as they are written. Their `chunks` raise Spoilt.

    `copied` is called when the last page has been read.
    """
    shape, count = pool.shape, len(snapshot.tokens)

    def values() -> Iterator[Buffer]:
        yield from _guarded(snapshot.hold, _rows(pool, 1, snapshot))
        copied()

    def rows(name: str, chunks: Callable[[], Iterator[Buffer]]) -> StateArray:
        spec = ArraySpec(name, APPEND, NAMES[shape.dtype], (shape.layers, shape.kv_heads, count, shape.head_dim), count)
        return StateArray(spec, chunks)

    states = (
        state_array("state", np.frombuffer(data, dtype="<f4"), "f32", kind=FIXED, position=n)
        for n, data in snapshot.states.items()
    )
    return [rows("k", lambda: _guarded(snapshot.hold, _rows(pool, 0, snapshot))), rows("v", values), *states]


def _guarded(hold: Hold, chunks: Iterator[Buffer]) -> Iterator[Buffer]:
    for chunk in chunks:
        yield chunk
        if hold.spoilt:  # asked when the chunk has been read
            raise Spoilt


def _rows(pool: PagePool, which: int, snapshot: Snapshot) -> Iterator[Buffer]:
    """Bytes of all keys (0) or values (1), in the order [layers, kv_heads, tokens, head_dim]."""
    if snapshot.ready is None:
        return _rows_of_host(pool, which, snapshot)
    return _rows_of_card(pool, which, snapshot, snapshot.ready)


def _rows_of_host(pool: PagePool, which: int, snapshot: Snapshot) -> Iterator[Buffer]:
    """Straight out of the pages, without a copy."""
    rows = (pool.k, pool.v)[which]
    for layer in range(pool.shape.layers):
        for head in range(pool.shape.kv_heads):
            for page, _, count in _parts(pool, snapshot.pages, len(snapshot.tokens)):
                yield as_array(rows[layer, page, head, :count]).reshape(-1).view(np.uint8).data


def _rows_of_card(pool: PagePool, which: int, snapshot: Snapshot, ready: torch.cuda.Event) -> Iterator[Buffer]:
    """A layer at a time through pinned memory, on a stream of its own."""
    shape, count = pool.shape, len(snapshot.tokens)
    words = pool.words[which]
    stream = torch.cuda.Stream(words.device)
    pinned = torch.empty((shape.kv_heads, count, words.shape[-1]), dtype=torch.int32, pin_memory=True)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        index = torch.tensor(snapshot.pages, device=words.device)
    for layer in range(shape.layers):
        with torch.cuda.stream(stream):
            pages = words[layer].index_select(0, index)  # [pages, kv_heads, page_tokens, words]
            pinned.copy_(pages.transpose(0, 1).reshape(shape.kv_heads, -1, words.shape[-1])[:, :count], non_blocking=True)
        stream.synchronize()
        yield pinned.numpy().reshape(-1).view(np.uint8).data


def problem(engine: Engine, found: Restored) -> str:
    """Why a checkpoint is not a session of this engine, or ""."""
    shape, state, count = engine.pool.shape, engine.pool.state, len(found.tokens)
    if not 0 < count < engine.ctx:
        return f"{count} tokens in a context of {engine.ctx}"
    if int(found.tokens.max()) >= engine.model.config.vocab:
        return f"token {int(found.tokens.max())} is outside the vocabulary"
    specs = {(spec.name, spec.position): spec for spec in found.specs}
    rows = (shape.layers, shape.kv_heads, count, shape.head_dim)
    for name in ("k", "v"):
        spec = specs.get((name, count))
        if spec is None or spec.dtype != NAMES[shape.dtype] or spec.shape != rows:
            return f"its {name} are not {NAMES[shape.dtype]} {rows}"
    if state is not None:
        states = [spec for spec in found.specs if spec.name == "state"]
        if ("state", count) not in specs or any(spec.size != state.shape.bytes for spec in states):
            return f"its state is not of {state.shape.bytes} bytes"
    return ""


def fill_pages(pool: PagePool, found: Restored, pages: Sequence[int]) -> None:
    """Write the keys and values into `pages`, which are nobody else's. They are there when this returns."""
    count = len(found.tokens)
    stream = torch.cuda.Stream(pool.k.device) if pool.k.device.type == "cuda" else None
    for name, rows, words in (("k", pool.k, pool.words[0]), ("v", pool.v, pool.words[1])):
        source = found.arrays[name, count]
        if stream is None:
            for layer in range(pool.shape.layers):
                for page, start, size in _parts(pool, pages, count):
                    fill(rows[layer, page, :, :size], source[layer][:, start : start + size])
            continue
        pinned = torch.empty(source.shape[1:], dtype=rows.dtype, pin_memory=True)
        for layer in range(pool.shape.layers):
            fill(pinned, source[layer])
            with torch.cuda.stream(stream):
                staged = pinned.view(torch.int32).to(words.device, non_blocking=True)
                for page, start, size in _parts(pool, pages, count):
                    words[layer, page, :, :size] = staged[:, start : start + size]
            stream.synchronize()


def adopt(engine: Engine, slot: int, found: Restored, pages: list[int]) -> None:
    """Make filled `pages` the session of an empty slot."""
    session, state, count = engine.sessions[slot], engine.pool.state, len(found.tokens)
    if state is not None:
        saved = max((spec.position for spec in found.specs if spec.name == "state" and spec.position < count), default=0)
        older = found.arrays["state", saved].tobytes() if saved else b""
        state.restore(slot, found.arrays["state", count].tobytes(), saved, older)
    session.tokens = found.tokens.tolist()
    session.pages = pages
    session.logits = None
    engine.replaced(slot)


def _parts(pool: PagePool, pages: Sequence[int], count: int) -> Iterator[tuple[int, int, int]]:
    """Each page with the first of its positions and how many of them are used."""
    size = pool.shape.page_tokens
    for i, page in enumerate(pages):
        yield page, i * size, min(size, count - i * size)
