"""How many drafts the model would accept: on streams that it wrote greedily, against the tokens that it wrote.

A draft counts at every place of an answer, as if a step had begun there; draft n of a chain only where the n - 1 before it were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds4batch.engine.draft.mtp_head import MtpWeights
from scripts.mtp_prompts import KINDS
from scripts.mtp_streams import in_loop
from scripts.mtp_training import Corpus, Index, Teacher, pieces, product, states

Flags = npt.NDArray[np.bool_]


class Matched(NamedTuple):
    """One stream's drafts. Place i is the chain that begins when the answer's token i is known."""

    stream: int
    right: Flags  # [depth, places]: whether draft n is the token; False past the end
    looping: Flags  # [places]: whether draft 1's token is part of a repetition


def measure(weights: MtpWeights, teacher: Teacher, corpus: Corpus, which: Index, depth: int) -> list[Matched]:
    """Draft along the streams `which`, which are greedy ones. The weights count as their file has them, in bf16."""
    answers = corpus.answers
    rounded = weights.to(teacher.device, torch.bfloat16).to(teacher.device, teacher.dtype)
    found = []
    with torch.no_grad():
        for batch in corpus.batches(which):
            written = corpus.tokens[batch.now + 2]
            right = np.stack([
                torch.cat([product(part, teacher.head.t()).argmax(-1) for part in state.split(pieces(teacher.device))])
                .eq(written).cpu().numpy()
                for state in states(rounded, teacher, corpus, batch, depth)
            ])  # fmt: skip
            ends = np.cumsum(batch.counts)
            for stream, end, count in zip(batch.streams.tolist(), ends, batch.counts, strict=True):
                own = np.zeros((depth, count), np.bool_)
                for n in range(depth):  # row t of draft n is of the chain that began n rows before
                    own[n, : count - n] = right[n, end - count + n : end]
                first = answers.offset[stream] + answers.prompt[stream]
                answer = answers.tokens[first : answers.offset[stream + 1]]
                found.append(Matched(stream, own, in_loop(answer)[1:]))
    return found


def acceptance(found: Sequence[Matched], loops: bool = True) -> dict[str, Any]:
    """Shares accepted: of drafts 1, of drafts 2 where draft 1 was right, and so on.

    Without `loops` chains that begin in one are left out.
    """
    depth = len(found[0].right) if found else 0
    tried, taken = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    for match in found:
        chain = np.ones(match.right.shape[1], np.bool_) if loops else ~match.looping
        for n, right in enumerate(match.right):
            chain = chain & (np.arange(len(chain)) < len(chain) - n)
            tried[n] += chain.sum()
            chain = chain & right
            taken[n] += chain.sum()
    shares = {f"draft_{n + 1}": round(int(taken[n]) / max(int(tried[n]), 1), 4) for n in range(depth)}
    return shares | {"tokens": int(tried[0]) if depth else 0, "streams": len(found)}


def tokens_a_step(found: Sequence[Matched], drafts: int) -> float:
    """Tokens that a step gives with so many drafts, walking each stream from its first token on."""
    steps = tokens = 0
    for match in found:
        at, places = 0, match.right.shape[1]
        while at < places:
            taken = 0
            while taken < drafts and at + taken < places and match.right[taken, at]:
                taken += 1
            steps += 1
            at += 1 + taken
        tokens += min(at, places)
    return round(tokens / max(steps, 1), 3)


def figures(found: Sequence[Matched], corpus: Corpus) -> dict[str, Any]:
    """All of it: overall, without repetitions, by kind of prompt, and tokens a step."""
    kinds = {m.stream: KINDS[int(corpus.answers.kind[m.stream])] for m in found}
    depth = len(found[0].right) if found else 0
    return {
        "overall": acceptance(found),
        "without_loops": acceptance(found, loops=False),
        "by_kind": {kind: acceptance([m for m in found if kinds[m.stream] == kind]) for kind in KINDS if kind in kinds.values()},
        "tokens_a_step": {str(n): tokens_a_step(found, n) for n in range(1, depth + 1)},
    }
