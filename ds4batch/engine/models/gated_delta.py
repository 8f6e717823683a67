"""The gated delta net layer: a causal convolution, and a matrix for each head that forgets and learns one token at a time.

For a head with the matrix S [key_dim, value_dim], the token's unit key k, unit query q, value v, decay e^g and learning rate b
(Yang et al., arXiv 2412.06464; layer layout as in transformers' qwen3_next):

    d = b (v - e^g S^T k),   S <- e^g S + k d^T,   o = S^T q

It is evaluated in the sequential form: token after token, each with the same operations on the same shapes, so that a token's bits
do not depend on the chunk it came in. What does not depend on S is done for all rows at once; S is read once a token, for k and q
together, because S^T q follows from the S before: e^g S^T q + (q . k) d. Sessions of neighbouring slots with equally many rows
advance together; a head's matrices are multiplied in one shape whatever their number. Before each draft S and the convolution's
inputs are copied, so that a session can go back to where a draft was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ds4batch.engine.linear import Linear
from ds4batch.engine.models.gates import sigmoid, silu, softplus
from ds4batch.engine.rows import Span
from ds4batch.engine.state import StatePool
from ds4batch.engine.weights.hybrid_layout import HybridConfig

BLOCK = 128
"""Positions whose inputs to the recurrence are laid out at a time; bounds memory and changes no bits."""

_UNIT_EPS = 1e-6  # added to the squared length of k and q, as in flash-linear-attention


class DeltaNet(NamedTuple):
    """One layer's weights. Rows of `qkvz`: q, k, v, z, head by head; of `ba`: b, then a."""

    qkvz: Linear
    ba: Linear
    conv: torch.Tensor  # fp32 [conv_width, channels]; the last row is the token's own
    decay: torch.Tensor  # fp32 [value_heads]: -e^A
    dt_bias: torch.Tensor  # fp32 [value_heads]
    norm: torch.Tensor  # fp32 [value_dim]
    out: Linear


class Run(NamedTuple):
    """Sessions that advance together: slots slot .. slot + sessions - 1, `rows` rows each."""

    where: torch.Tensor | slice  # rows of the forward, session by session
    slot: int
    sessions: int
    rows: int
    drafts: int  # of each session's rows, the last ones


def runs_of(spans: Sequence[Span], device: torch.device) -> list[Run]:
    """Group the sessions of a forward."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.slot):
        last = groups[-1][-1] if groups else None
        if last is not None and (span.slot, span.rows, span.drafts) == (last.slot + 1, last.rows, last.drafts):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [_run(group, device) for group in groups]


def _run(group: Sequence[Span], device: torch.device) -> Run:
    rows = [row for span in group for row in range(span.row, span.row + span.rows)]
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    where = slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows, device=device)
    return Run(where, group[0].slot, len(group), group[0].rows, group[0].drafts)


def delta_net(
    x: torch.Tensor, layer: DeltaNet, config: HybridConfig, runs: Sequence[Run], state: StatePool, place: int
) -> torch.Tensor:
    """x: [R, hidden] normed, in the weights' type; the result [R, hidden] too. Rows of no run give what zeros give.

    `place`: the layer of `state` that is advanced, and in which the states before drafts are kept.
    """
    heads, channels = config.value_heads, config.conv_channels
    conv, matrix = state.conv[place], state.matrix[place]  # [states, conv_rows, channels], [states, heads, key_dim, value_dim]
    mixed = layer.qkvz(x).float()
    gates = layer.ba.precise(x)
    rate = sigmoid(gates[:, :heads])
    kept = layer.decay.mul(softplus(gates[:, heads:] + layer.dt_bias)).exp_()  # e^g
    read = x.new_zeros(len(x), heads, config.value_dim, dtype=torch.float32)
    for run in runs:
        size = (run.sessions, run.rows)
        inputs = mixed[run.where, :channels].view(*size, channels)
        run_rate, run_kept = rate[run.where].view(*size, heads), kept[run.where].view(*size, heads)
        slots = slice(run.slot, run.slot + run.sessions)
        kept_before = state.before(run.drafts, run.slot, run.sessions)
        tails, matrices = [conv[rows] for rows in kept_before], [matrix[rows] for rows in kept_before]
        found = []
        for at in range(0, run.rows, BLOCK):
            part = slice(at, at + BLOCK)
            qkv = _convolve(inputs[:, part], layer.conv, conv[slots], tails)
            found.append(_recur(qkv, run_rate[:, part], run_kept[:, part], matrix[slots], config, matrices))
        read[run.where] = torch.cat(found, 1).view(-1, heads, config.value_dim)
    z = mixed[:, channels:].view(read.shape)
    gated = F.rms_norm(read, (config.value_dim,), layer.norm, config.norm_eps).mul_(silu(z))
    return layer.out(gated.view(len(x), -1).to(x.dtype))


def _convolve(inputs: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, before: Sequence[torch.Tensor]) -> torch.Tensor:
    """inputs: [sessions, rows, channels]; tail: the inputs before them, which are replaced by the last ones of these.

    before: of the same shape, one for each of the last rows, is given the inputs before that row.
    """
    rows = inputs.shape[1]
    window = torch.cat([tail, inputs], 1)
    total = window[:, :rows] * weight[0]
    for tap in range(1, len(weight)):
        total.add_(window[:, tap : tap + rows] * weight[tap])
    for i, kept in enumerate(before, rows - len(before)):
        kept.copy_(window[:, i : i + tail.shape[1]])
    tail.copy_(window[:, rows:])
    return silu(total)


def _recur(
    qkv: torch.Tensor,
    rate: torch.Tensor,
    kept: torch.Tensor,
    matrix: torch.Tensor,
    config: HybridConfig,
    before: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The recurrence over the rows of one run's block, one at a time.

    qkv: [sessions, rows, channels]; rate, kept: [sessions, rows, value_heads]; matrix: [sessions, value_heads, key_dim, value_dim],
    advanced in place; before: of the same shape, one for each of the last rows, is given the matrices before that row. Returns
    [sessions, rows, value_heads, value_dim].
    """
    sessions, rows = qkv.shape[:2]
    heads, key_dim, value_dim = config.value_heads, config.key_dim, config.value_dim
    batch = sessions * heads
    split = 2 * config.key_heads * key_dim
    qk = qkv[..., :split].reshape(sessions, rows, 2, config.key_heads, key_dim)
    # An RMS norm makes the length sqrt(key_dim): k is divided by it, q twice, because attention divides a score by it.
    qk = F.rms_norm(qk, (key_dim,), None, _UNIT_EPS / key_dim)
    qk = qk.permute(2, 1, 0, 3, 4).repeat_interleave(heads // config.key_heads, dim=3).reshape(2, rows, batch, key_dim)
    q, k = qk[0].mul_(1 / key_dim), qk[1].mul_(key_dim**-0.5)
    both = torch.stack([q, k], 2)  # [rows, batch, 2, key_dim]
    columns = k.unsqueeze(-1)  # [rows, batch, key_dim, 1]
    agreement = (q * k).sum(-1)[..., None, None]
    rate = rate.transpose(0, 1).reshape(rows, batch, 1, 1)
    kept = kept.transpose(0, 1).reshape(rows, batch, 1, 1)
    value = qkv[..., split:].reshape(sessions, rows, heads, value_dim).transpose(0, 1).reshape(rows, batch, 1, value_dim)
    value, known = value * rate, kept * rate
    state = matrix.view(batch, key_dim, value_dim)
    seen = qkv.new_empty(rows, batch, 2, value_dim)  # S^T q and S^T k, of the S before
    learnt = qkv.new_empty(rows, batch, 1, value_dim)
    for i in range(rows):
        if i >= rows - len(before):
            before[i - rows + len(before)].copy_(matrix)
        torch.bmm(both[i], state, out=seen[i])
        torch.mul(seen[i, :, 1:], known[i], out=learnt[i])
        torch.sub(value[i], learnt[i], out=learnt[i])
        state.mul_(kept[i]).baddbmm_(columns[i], learnt[i])
    out = (seen[:, :, :1] * kept).add_(learnt * agreement)
    return out.view(rows, sessions, heads, value_dim).transpose(0, 1)
