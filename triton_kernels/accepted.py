"""Which drafts were right, and where the queries that follow them lie: what a drafter needs to go on before the host knows the tokens.

tokens: int64 [T], tokens by place. Sessions b < B, R rows each (a token and up to R - 1 drafts). Vectors over sessions, int64 but the
last: drawn [B, R], places in `tokens` of what was drawn from each row; guessed [B, R - 1], places of the drafts; counts, drafts of each;
base, the position of its first row; slots; first, the first position it keeps; used int32, 0 for padding.

    a        = how many of the first `counts` drafts are the token drawn from the row before them, all before it being right
    last     = b * R + a                            int64 [B]
    at       = min(base + a + depth, limit - 1)     int64 [D, B], for each further draft, depth < D
    pages, offsets, table, lengths                  int32 [D, B], [D, B], [D, B, SEEN], [D, B]: where its key goes and what it sees

A slot keeps PAGES pages of PAGE positions in a ring; a query sees SEEN of them, none that begins before `first` unless it is its own.
Padding has page -1 and length 0.

Integers only, one program a session.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["limit"])
def _accepted(
    tokens, drawn, guessed, counts, base, slots, first, used, last, at, pages, offsets, table, lengths, limit, sessions,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """One session."""
    b = tl.program_id(0)
    count = tl.load(counts + b)
    right = tl.load(used + b).to(tl.int64)
    taken = right * 0
    for i in tl.static_range(ROWS - 1):
        token = tl.load(tokens + tl.load(drawn + b * ROWS + i))
        draft = tl.load(tokens + tl.load(guessed + b * (ROWS - 1) + i))
        right = tl.where((token == draft) & (count > i), right, 0)
        taken += right
    tl.store(last + b, b * ROWS + taken)
    start = tl.load(base + b) + taken
    slot = tl.load(slots + b)
    kept = (tl.load(first + b) + PAGE - 1) // PAGE
    real = tl.load(used + b) != 0
    for depth in tl.static_range(DEPTH):
        place = depth * sessions + b
        position = tl.minimum(start + depth, limit - 1)
        own = position // PAGE
        oldest = tl.maximum(own - SEEN + 1, tl.minimum(kept, own))
        tl.store(at + place, position)
        tl.store(pages + place, tl.where(real, slot * PAGES + own % PAGES, -1).to(tl.int32))
        tl.store(offsets + place, (position % PAGE).to(tl.int32))
        tl.store(lengths + place, tl.where(real, position + 1 - oldest * PAGE, 0).to(tl.int32))
        for i in tl.static_range(SEEN):
            tl.store(table + place * SEEN + i, (slot * PAGES + (oldest + i) % PAGES).to(tl.int32))


def accepted(
    tokens: torch.Tensor,
    drawn: torch.Tensor,
    guessed: torch.Tensor,
    counts: torch.Tensor,
    base: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    used: torch.Tensor,
    last: torch.Tensor,
    at: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    limit: int,
    page: int,
    ring: int,
) -> None:
    """Write `last`, `at`, `pages`, `offsets`, `table` and `lengths`; shapes and meaning in the module docstring. `ring`: PAGES."""
    sessions, rows = drawn.shape
    _accepted[(sessions,)](
        tokens, drawn, guessed, counts, base, slots, first, used, last, at, pages, offsets, table, lengths, limit, sessions,
        rows, at.shape[0], page, ring, table.shape[2], num_warps=1,
    )  # fmt: skip


def accepted_reference(
    tokens: torch.Tensor, drawn: torch.Tensor, guessed: torch.Tensor, counts: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """int64 [B]: how many drafts were right, in plain torch."""
    rows = torch.arange(guessed.shape[1], device=tokens.device)
    right = (tokens[drawn[:, :-1]] == tokens[guessed]) & (rows < counts[:, None]) & (used != 0)[:, None]
    return right.long().cumprod(1).sum(1)
