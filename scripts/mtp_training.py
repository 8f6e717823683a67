"""The training of a next-n prediction module: the frozen model's hidden states and logits, the loss and the loop.

The model's hidden states are computed once for all streams and stay on the device; its logits are made again for every batch, which
is cheaper than to keep them. The loss's gradient is written out and taken in pieces, so that the logits of few rows exist at a time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds4batch.engine.draft.mtp_head import Block, MtpWeights, draft_rows, layer, rms_norm
from ds4batch.engine.rope import rotations
from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.source import WeightSource
from scripts.mtp_streams import Answers

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of torch's attention; not cuDNN's, which plans anew for every shape."""

THINNED = (1, 2, 4)
"""Of drafts 1 to 3 one row in so many is looked at in a step, so their losses weigh 1, 1/2 and 1/4, and cost as much."""

LENGTHS = 64  # batches are as wide as a multiple of this
WARM_UP = 0.03  # of the time
LOWEST = 0.02  # of the peak's learning rate, at the end
AHEAD = 8  # steps that the host may be ahead of the device

Index = npt.NDArray[np.int64]
Say = Callable[[str], None]


class Teacher:
    """The model in plain torch: whole sequences, no cache, nothing that learns."""

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ModelError for a model whose layers have more than the module's: biases, or norms of q and k."""
        config = source.config
        if config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm:
            raise ModelError(f"{source.path}: layers with biases or norms of q and k are not trained for")

        def load(name: str) -> torch.Tensor:
            tensor = source.load(name)
            return tensor.to(device, dtype if tensor.dim() > 1 else torch.float32)

        names = {field.name: field.name for field in fields(Block)} | {"out": "o"}
        self.config, self.device, self.dtype = config, device, dtype
        self.embed = load("embed.weight")
        self.layers = [
            Block(**{ours: load(f"layers.{i}.{theirs}.weight") for ours, theirs in names.items()}) for i in range(config.layers)
        ]
        self.norm = load("norm.weight")
        self.head = self.embed if config.tied else load("head.weight")
        self.turns = rotations(config.rope, config.head_dim, config.context).to(device)

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """fp32 [B, T, hidden] of int64 [B, T]: the residual stream behind the last layer."""
        x = F.embedding(tokens, self.embed).float()
        with sdpa_kernel(BACKENDS):
            for block in self.layers:
                x = layer(block, self.config, self.turns, x).hidden
        return x

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocab] of the residual stream, [rows, hidden]."""
        return product(rms_norm(hidden.float(), self.norm, self.config), self.head.t())

    def start(self, hidden: torch.Tensor) -> MtpWeights:
        """Where training starts, fp32: the last layer again, fed with the hidden state alone, at the size it has in `hidden`.

        hidden: [rows, hidden], some of the model's.
        """
        size = self.config.hidden
        scale = hidden.float().square().mean(-1).sqrt().median()
        ones = torch.ones(size, device=self.device)
        proj = torch.cat([torch.zeros(size, size, device=self.device), torch.eye(size, device=self.device)], 1)
        block = {field.name: getattr(self.layers[-1], field.name).float() for field in fields(Block)}
        return MtpWeights(**block, embed_norm=ones * scale, hidden_norm=ones * scale, proj=proj, norm=self.norm.clone())


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W in fp32, [rows, out], of operands in the weight's type. W: [in, out]."""
    x = x.to(weight.dtype)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight, out_dtype=torch.float32)
    return torch.mm(x, weight).float()


def pieces(device: torch.device) -> int:
    """Rows whose logits exist together."""
    return 8192 if device.type == "cuda" else 512


class Batch(NamedTuple):
    """Some streams side by side, T places of each."""

    streams: Index
    at: torch.Tensor  # int64 [B, T + 1]: where each token is among all; past a stream's end, its last one
    rows: torch.Tensor  # int64 [R]: those of the B * T places whose drafts count, a stream's one after another
    counts: Index  # [B]: how many of them are a stream's

    @property
    def now(self) -> torch.Tensor:
        """int64 [R]: where the token of each row is."""
        return self.at[:, :-1].flatten()[self.rows]


class Corpus:
    """Answers on the device, with what the model made of every token."""

    def __init__(self, answers: Answers, teacher: Teacher, batch_tokens: int, say: Say) -> None:
        """`batch_tokens`: the most places of a batch."""
        self.answers, self.device, self.batch_tokens = answers, teacher.device, batch_tokens
        self.tokens = torch.from_numpy(answers.tokens).to(self.device, torch.int64)
        # Zeros, because what is past a stream's end must be finite: its gradients are zeros times this.
        self.hidden = torch.zeros(len(self.tokens), teacher.config.hidden, dtype=teacher.dtype, device=self.device)
        self.best = self.tokens.roll(-1)  # the model's next token: in a greedy answer the one that followed
        same, compared, said = torch.zeros((), dtype=torch.int64, device=self.device), 0, time.monotonic()
        start = said
        for batch in self.batches(np.arange(len(answers.lengths))):
            places = batch.at[:, :-1]
            self.hidden[places] = teacher.hidden(self.tokens[places]).to(teacher.dtype)
            behind = batch.now + 1
            follows = self.tokens[behind + 1]
            best = torch.cat([teacher.logits(self.hidden[part]).argmax(-1) for part in behind.split(pieces(self.device))])
            greedy = answers.greedy[batch.streams]
            keep = sent(np.repeat(greedy, batch.counts), self.device)
            same += (keep & (best == follows)).sum()
            compared += int(batch.counts[greedy].sum())
            self.best[behind] = torch.where(keep, follows, best)
            if time.monotonic() - said >= 10:
                said = time.monotonic()
                say(f"hidden states: {compared:,} greedy tokens compared")
        self.agreement = int(same) / max(compared, 1)
        say(
            f"hidden states: {len(self.tokens):,} in {time.monotonic() - start:.1f} s; the most likely token here is the engine's "
            f"in {self.agreement:.3%} of {compared:,} greedy tokens"
        )

    def batches(self, which: Index, shuffled: np.random.Generator | None = None) -> Iterator[Batch]:
        """The streams `which`, side by side with others of like length."""
        key = shuffled.random(len(which)) if shuffled is not None else np.arange(len(which))
        widths = -(-(self.answers.lengths[which] - 1) // LENGTHS) * LENGTHS
        order = np.lexsort((key, widths))
        cuts, first = [], 0
        for end in range(1, len(order) + 1):  # the last of a batch is the widest
            if end == len(order) or (end + 1 - first) * widths[order[end]] > self.batch_tokens:
                cuts.append(order[first:end])
                first = end
        for i in shuffled.permutation(len(cuts)) if shuffled is not None else range(len(cuts)):
            yield self._batch(which[cuts[i]], int(widths[cuts[i][-1]]))

    def _batch(self, streams: Index, width: int) -> Batch:
        answers = self.answers
        lengths, prompt = answers.lengths[streams][:, None], answers.prompt[streams][:, None]
        place = np.arange(width + 1)
        at = answers.offset[streams][:, None] + np.minimum(place, lengths - 1)
        # The first draft is made when the answer's first token is drawn; each row's draft is of the token after the next.
        counted = ((place >= prompt - 1) & (place <= lengths - 3))[:, :-1]
        return Batch(streams, sent(at, self.device), sent(np.flatnonzero(counted), self.device), counted.sum(1))


def sent(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def states(
    weights: MtpWeights, teacher: Teacher, corpus: Corpus, batch: Batch, depth: int, parts: Sequence[slice] = ()
) -> list[torch.Tensor]:
    """fp32 [R, hidden] for each of `depth` drafts: what the head multiplies, in the batch's rows or in these parts of them."""
    with sdpa_kernel(BACKENDS):
        drafts = draft_rows(
            weights, teacher.config, teacher.turns, F.embedding(corpus.tokens[batch.at[:, 1:]], teacher.embed),
            corpus.hidden[batch.at[:, :-1]], depth,
        )  # fmt: skip
    chosen = [batch.rows[part] for part in parts] or [batch.rows] * depth
    return [rms_norm(d.hidden.flatten(0, 1)[rows], weights.norm, teacher.config) for d, rows in zip(drafts, chosen, strict=True)]


class Loss(NamedTuple):
    """What a batch brought. A draft's loss is the cross entropy with a mixture of the model's most likely token and its softmax."""

    gradients: list[torch.Tensor]  # fp32, like the states: of the sum of all losses over R
    surprise: torch.Tensor  # [drafts]: mean -log probability of the model's most likely token


@torch.no_grad()
def loss_of(
    found: Sequence[torch.Tensor], parts: Sequence[slice], teacher: Teacher, hidden: torch.Tensor, best: torch.Tensor, hard: float
) -> Loss:
    """found: fp32 for each draft, of the rows parts[i] of R, whose steps divide `pieces`.

    hidden: [R, hidden], the model's one place further; best: int64 [R], its token there. `hard`: that token's share of the mixture.
    """
    gradients = [torch.empty_like(state) for state in found]
    surprise = torch.zeros(len(found), device=hidden.device)
    size = pieces(hidden.device)
    for first in range(0, len(best), size):
        token = best[first : first + size, None]
        wanted = torch.softmax(teacher.logits(hidden[first : first + size]), -1).mul_(1 - hard)
        wanted.scatter_add_(1, token, torch.full_like(token, 1, dtype=wanted.dtype).mul_(hard))
        for i, (state, part) in enumerate(zip(found, parts, strict=True)):
            if not len(state):
                continue
            here = slice(first // part.step, (first + size) // part.step)
            likely = torch.softmax(product(state[here], teacher.head.t()), -1)
            surprise[i] -= likely.gather(1, token[part]).clamp_(min=1e-30).log_().sum() / len(state)
            gradients[i][here] = product(likely.sub_(wanted[part]), teacher.head).div_(len(best))
    return Loss(gradients, surprise)


class Plan(NamedTuple):
    """How training runs."""

    deadline: float  # time.monotonic()
    rate: float  # learning rate at its peak
    hard: float
    depth: int
    seed: int
    pause: float  # seconds between two calls of `paused`
    most_steps: int = 0  # 0: until the deadline


def train(
    start: MtpWeights, teacher: Teacher, corpus: Corpus, which: Index, plan: Plan, paused: Callable[[MtpWeights], None], say: Say
) -> tuple[MtpWeights, int]:
    """Train on the streams `which` until the deadline; the weights, fp32, and the number of steps. `paused` is shown them on the way.

    Products are in the teacher's type.
    """
    device = teacher.device
    weights = MtpWeights(**{f.name: getattr(start, f.name).detach().clone().requires_grad_() for f in fields(MtpWeights)})
    matrices, norms = ([p for p in weights.named().values() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    half = torch.autocast(device.type, torch.bfloat16, enabled=teacher.dtype == torch.bfloat16)
    shuffled = np.random.default_rng(plan.seed)
    seen = torch.zeros(plan.depth, device=device)
    began = said = rested = time.monotonic()
    steps = rows = marked = 0
    for epoch in itertools.count() if len(which) else ():
        for batch in corpus.batches(which, shuffled):
            now = time.monotonic()
            progress = steps / plan.most_steps if plan.most_steps else (now - began) / max(plan.deadline - began, 1e-9)
            if progress >= 1 or now >= plan.deadline:
                return weights, steps
            cosine = LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * progress)) / 2
            for group in optimiser.param_groups:
                group["lr"] = plan.rate * min(1.0, (progress + 1e-3) / WARM_UP) * cosine
            parts = [slice(int(shuffled.integers(step)), None, step) for step in THINNED[: plan.depth]]
            with half:
                found = states(weights, teacher, corpus, batch, plan.depth, parts)
            behind = batch.now + 1
            loss = loss_of([f.detach() for f in found], parts, teacher, corpus.hidden[behind], corpus.best[behind], plan.hard)
            torch.autograd.backward(found, loss.gradients)
            torch.nn.utils.clip_grad_norm_([*matrices, *norms], 1.0)
            optimiser.step()
            optimiser.zero_grad()
            seen += loss.surprise
            steps += 1
            rows += len(batch.rows)
            if device.type == "cuda" and steps % AHEAD == 0:
                torch.cuda.synchronize()
            now = time.monotonic()
            if now - said >= 10 or steps == 1:
                means = ", ".join(f"{value / (steps - marked):.3f}" for value in seen.tolist())
                say(f"training: step {steps}, epoch {epoch}, {rows / (now - began):,.0f} rows/s, surprise of drafts {means}")
                said, marked = now, steps
                seen.zero_()
            if now - rested >= plan.pause:
                paused(weights)
                rested = time.monotonic()
    return weights, steps
