"""The rows of one forward: what is evaluated, where its keys go, and which sessions attention can treat together.

Everything that depends on the batch is worked out here, once a forward, and used by all layers. Nothing here may change a
row's arithmetic: grouping, order and padding decide only where a row is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

SPLIT = 128
"""Keys in one attention split. Splits are absolute: split s covers keys [s * SPLIT, (s + 1) * SPLIT)."""

QUERY_TILE = 64
"""Query rows of one prefill tile; later tiles see more splits, so smaller tiles skip more of the masked half."""

_SMALL_ROWS = 64
"""Up to here every multiple that the exact path asks for is a size of its own: that many decode at once."""

GROUP_ROWS = 4
"""Sessions with at most this many rows each are attended together; longer chunks go one by one."""

RUN_SLACK = 4
"""Splits a group may compute for nothing before it is cheaper to attend two groups."""


class Segment(NamedTuple):
    """Consecutive tokens of one session: positions start .. start + len(tokens) - 1."""

    pages: Sequence[int]
    start: int
    tokens: Sequence[int]
    wants_logits: bool  # of the last token and of the `drafts` before it
    slot: int = 0  # whose fixed-size state they advance, where the model has one
    drafts: int = 0  # of the tokens, the last ones that are guesses: the state before each of them is kept


class Span(NamedTuple):
    """Where a segment lies in a forward: rows row .. row + rows - 1 are positions start .. of the slot's session."""

    slot: int
    row: int
    start: int
    rows: int
    drafts: int = 0  # of the rows, the last ones


class Tile(NamedTuple):
    """Queries that attend together: `sessions` sessions with `rows` rows each, over the first `keys` keys.

    `pages` is the first page when all keys lie in the sessions' first pages and those are adjacent, else the page table.
    """

    where: torch.Tensor | slice  # rows of the forward, session by session
    sessions: int
    rows: int
    keys: int  # a multiple of SPLIT
    pages: int | torch.Tensor  # first page, or [sessions, pages]
    mask: torch.Tensor  # [sessions, 1, padded queries, keys - mask_start]: 0 or -inf, added to the scores
    mask_start: int  # every row sees all keys before this one


@dataclass(frozen=True)
class Rows:
    """A forward's inputs. R counts rows with padding; padding rows write no keys and are read by nobody."""

    tokens: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64
    real: slice  # rows that are not padding
    pages: torch.Tensor  # [real rows] page of each row's keys
    offsets: torch.Tensor  # [real rows] position in that page
    run: tuple[int, int, int] | None  # page, first and end offset, where all keys lie one after another in one page
    tiles: list[Tile]
    spans: list[Span]
    multiple: int  # products run on a multiple of this many rows
    logit_rows: torch.Tensor  # [logit rows, padded] indices of rows whose logits are wanted
    logits: int  # how many of them are wanted


class Layout(NamedTuple):
    """What a plan must know of the pool and the model."""

    page_tokens: int
    group: int  # query heads that share one key head
    device: torch.device
    row_multiple: int  # forwards run on a multiple of this many rows


def plan(segments: Sequence[Segment], layout: Layout) -> Rows:
    """The rows of `segments`, in their order, padded at the end."""
    first = [0]
    for segment in segments:
        first.append(first[-1] + len(segment.tokens))
    return _rows(segments, first, product_rows(first[-1], layout.row_multiple), layout, _tiles(segments, first, layout))


def plan_tile(segment: Segment, tile: int, layout: Layout) -> Rows:
    """The rows of one segment inside one tile of `tile` rows whose border is absolute.

    Position p always lies in row p % tile of a forward of `tile` rows, and attends in a tile of that many queries, so a
    row's arithmetic has one shape whatever else is asked for. The segment must not cross a border.
    """
    lead = segment.start % tile
    if lead + len(segment.tokens) > tile:
        raise ValueError(f"{len(segment.tokens)} rows from position {segment.start} cross a tile of {tile}")
    base = segment.start - lead
    wide = Segment(segment.pages, base, [0] * tile, False)
    tiles = [_tile([wide], slice(0, tile), layout)]
    return _rows([segment], [lead, lead + len(segment.tokens)], tile, layout, tiles)


def product_rows(count: int, multiple: int) -> int:
    """Rows that a product of `count` rows runs on: the next of few sizes, at most an eighth and a multiple larger.

    A library of products keeps what it has made for every number of rows it has seen, 0.6 MB for each shape of weights.
    """
    return _pad(count if count <= _SMALL_ROWS else _pad(count, 1 << count.bit_length() - 4), multiple)


def product_sizes(most: int, multiple: int) -> list[int]:
    """All that `product_rows` says of up to `most` rows, ascending."""
    return sorted({product_rows(count, multiple) for count in range(1, most + 1)})


def _pad(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _rows(segments: Sequence[Segment], first: Sequence[int], padded: int, layout: Layout, tiles: list[Tile]) -> Rows:
    tokens, positions = [0] * padded, [0] * padded
    pages: list[int] = []
    offsets: list[int] = []
    wanted: list[int] = []
    size = layout.page_tokens
    for segment, row in zip(segments, first, strict=False):
        count = len(segment.tokens)
        tokens[row : row + count] = segment.tokens
        span = range(segment.start, segment.start + count)
        positions[row : row + count] = span
        pages += [segment.pages[p // size] for p in span]
        offsets += [p % size for p in span]
        if segment.wants_logits:
            wanted += range(row + count - 1 - segment.drafts, row + count)
    logits = len(wanted)
    wanted += [padded - 1] * (product_rows(logits, layout.row_multiple) - logits)
    device = layout.device
    return Rows(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        real=slice(first[0], first[-1]),
        pages=torch.tensor(pages, device=device),
        offsets=torch.tensor(offsets, device=device),
        run=(pages[0], offsets[0], offsets[-1] + 1) if len(segments) == 1 and pages[0] == pages[-1] else None,
        tiles=tiles,
        spans=[Span(s.slot, row, s.start, len(s.tokens), s.drafts) for s, row in zip(segments, first, strict=False)],
        multiple=layout.row_multiple,
        logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
        logits=logits,
    )


def _tiles(segments: Sequence[Segment], first: Sequence[int], layout: Layout) -> list[Tile]:
    tiles: list[Tile] = []
    small: dict[int, list[int]] = {}
    for i, segment in enumerate(segments):
        count = len(segment.tokens)
        if count <= GROUP_ROWS:
            small.setdefault(count, []).append(i)
            continue
        for at in range(0, count, QUERY_TILE):
            part = segment.tokens[at : at + QUERY_TILE]
            piece = Segment(segment.pages, segment.start + at, part, False)
            row = first[i] + at
            tiles.append(_tile([piece], slice(row, row + len(part)), layout))
    for members in small.values():
        for run in _runs([segments[i] for i in members], members, layout):
            rows = [first[i] + r for i in run for r in range(len(segments[i].tokens))]
            consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
            index = slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, device=layout.device)
            tiles.append(_tile([segments[i] for i in run], index, layout))
    return tiles


def _runs(segments: Sequence[Segment], members: Sequence[int], layout: Layout) -> list[list[int]]:
    """Split sessions into groups worth attending together: alike in length and, where one page holds a session, adjacent."""
    keys = {i: _keys(s) // SPLIT for s, i in zip(segments, members, strict=True)}
    one_page = all(len(s.pages) == 1 for s in segments)
    order = sorted(zip(segments, members, strict=True), key=lambda pair: pair[0].pages[0] if one_page else keys[pair[1]])
    runs: list[list[int]] = []
    last_page = -2
    for segment, i in order:
        page = segment.pages[0]
        if runs and (not one_page or page == last_page + 1):
            run = runs[-1]
            longest = max(keys[m] for m in [*run, i])
            waste = sum(longest - keys[m] for m in [*run, i])
            already = sum(max(keys[m] for m in run) - keys[m] for m in run)
            if waste - already <= RUN_SLACK:
                run.append(i)
                last_page = page
                continue
        runs.append([i])
        last_page = page
    return runs


def _keys(segment: Segment) -> int:
    return _pad(segment.start + len(segment.tokens), SPLIT)


def _tile(segments: Sequence[Segment], index: torch.Tensor | slice, layout: Layout) -> Tile:
    rows = len(segments[0].tokens)
    keys = max(_keys(s) for s in segments)
    queries = _pad(rows * layout.group, 4)
    start = min(s.start for s in segments) // SPLIT * SPLIT
    device = layout.device
    position = torch.tensor([[s.start + r for r in range(rows)] for s in segments], device=device)
    key = torch.arange(start, keys, device=device)
    hidden = torch.zeros(len(segments), 1, rows, keys - start, device=device)
    hidden.masked_fill_((key > position[:, :, None])[:, None], float("-inf"))
    mask = torch.zeros(len(segments), 1, queries, keys - start, device=device)
    mask[:, :, : rows * layout.group] = hidden.repeat_interleave(layout.group, dim=2)
    return Tile(index, len(segments), rows, keys, _page_table(segments, keys, layout), mask, start)


def _page_table(segments: Sequence[Segment], keys: int, layout: Layout) -> int | torch.Tensor:
    first = segments[0].pages[0]
    if keys <= layout.page_tokens and all(s.pages[0] == first + i for i, s in enumerate(segments)):
        return first
    count = -(-keys // layout.page_tokens)
    # A session shorter than the longest repeats its first page: those keys are masked, and any page is finite.
    table = [[*s.pages[:count], *[s.pages[0]] * (count - len(s.pages))] for s in segments]
    return torch.tensor(table, device=layout.device)
