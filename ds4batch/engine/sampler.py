"""From logits to a token: one row at a time, so that a row's draw depends on its own logits alone.

Order: offsets (logit_bias, bans) and penalties change the logits, and a mask leaves out tokens; a temperature of 0 then takes the
highest (ties to the lowest id).
Otherwise temperature, min_p (against the most likely token), top_k, top_p (over what is left), and one inverse-CDF draw in ascending
token order with the position's random number. Log-probabilities are the model's own, before any of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4batch.engine.philox import uniform
from ds4batch.messages import Sampling
from scheduler.backend import Sampled

Array = npt.NDArray[np.float32]

_COLDEST = 1e-5  # a lower temperature draws the same token; fp32 could not divide by it
_LEAST_PENALTY = 1e-30  # of repetition: fp32 could not divide by one that is smaller still
_HIGHEST = np.float32(1e38)  # of a logit that a penalty divided: an infinite one has no weight that could be compared


class Offsets(NamedTuple):
    """What is added to some logits at every position of a request."""

    ids: npt.NDArray[np.int64]  # ascending
    values: Array

    @property
    def key(self) -> bytes:
        """Equal for equal offsets."""
        return self.ids.tobytes() + self.values.tobytes()


class Draw:
    """One request's way of drawing, and what its penalties must remember of its tokens."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], stop_tokens: Iterable[int]) -> None:
        self.sampling = sampling
        self.offsets = _offsets(sampling, stop_tokens)
        self._prompt = np.unique(np.asarray(prompt, np.int64)) if sampling.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}
        self.penalised = self._prompt is not None or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        """Whether a draw depends on the tokens before it."""
        self.plain = sampling.logprobs is None and not self.penalised
        """Whether a draw needs the row's logits, the sampling's knobs, `offsets`, `mask` and nothing else."""
        self.greedy = False
        """Whether the next token is the most likely one, whatever the temperature."""
        self.mask: npt.NDArray[np.int32] | None = None
        """The tokens that the next one is drawn from, a bit each, see engine/constraint.py; None for all."""

    @property
    def temperature(self) -> float:
        """That of the next token."""
        return 0.0 if self.greedy else self.sampling.temperature

    def note(self, token: int) -> None:
        """Remember a token that was drawn, in the order of the draws."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def adjust(self, logits: Array) -> Array:
        """The logits with offsets, penalties and mask: a copy, or the same array where nothing changes."""
        shifted = self._shifted(logits)
        if self.mask is None:
            return shifted
        allowed = np.unpackbits(self.mask.view(np.uint8), count=len(logits), bitorder="little")
        return np.where(allowed.view(np.bool_), shifted, np.float32(-np.inf))

    def _shifted(self, logits: Array) -> Array:
        s = self.sampling
        drawn = np.fromiter(self._counts, np.int64, len(self._counts))
        penalised = len(drawn) > 0 and (s.presence_penalty != 0.0 or s.frequency_penalty != 0.0)
        if self.offsets is None and self._prompt is None and not penalised:
            return logits
        logits = logits.copy()
        if self.offsets is not None:
            logits[self.offsets.ids] += self.offsets.values
        if self._prompt is not None:
            seen = np.union1d(self._prompt, drawn)
            values = logits[seen]
            factor = np.float32(max(s.repetition_penalty, _LEAST_PENALTY))
            with np.errstate(over="ignore"):
                logits[seen] = np.minimum(np.where(values > 0, values / factor, values * factor), _HIGHEST)
        if penalised:
            counts = np.fromiter(self._counts.values(), np.float32, len(drawn))
            logits[drawn] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts
        return logits


def draw(logits: Array, state: Draw, position: int) -> Sampled:
    """The token at `position`, from fp32 [vocab] logits. Changes nothing; the caller notes the token once it counts."""
    sampling = state.sampling
    adjusted = state.adjust(logits)
    token = int(np.argmax(adjusted)) if state.temperature == 0.0 else _pick(adjusted, sampling, position)
    if sampling.logprobs is None:
        return Sampled(token, None, ())
    return _with_logprobs(token, logits, sampling.logprobs)


def _offsets(sampling: Sampling, stop_tokens: Iterable[int]) -> Offsets | None:
    """The request's logit_bias, and with ignore_eos minus infinity for each stop token."""
    wanted = dict(sampling.logit_bias or {})
    if sampling.ignore_eos:
        wanted |= dict.fromkeys(stop_tokens, -math.inf)
    if not wanted:
        return None
    ids = np.fromiter(sorted(wanted), np.int64, len(wanted))
    return Offsets(ids, np.fromiter((wanted[i] for i in ids.tolist()), np.float32, len(ids)))


def _pick(logits: Array, sampling: Sampling, position: int) -> int:
    with np.errstate(over="ignore"):  # what is so far below the highest has no weight, as minus infinity has none
        scaled = (logits - logits.max()) / np.float32(max(sampling.temperature, _COLDEST))
    ids: npt.NDArray[np.int64] | None = None
    if sampling.min_p > 0.0:
        ids = np.flatnonzero(scaled >= math.log(min(sampling.min_p, 1.0)))
        scaled = scaled[ids]
    if 0 < sampling.top_k < len(scaled):
        kept = _highest(scaled, sampling.top_k)
        ids, scaled = _narrow(ids, kept), scaled[kept]
    weights = np.exp(scaled.astype(np.float64))
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = _narrow(ids, kept), weights[kept]
    cumulative = np.cumsum(weights)
    at = int(np.searchsorted(cumulative, uniform(sampling.seed, position) * cumulative[-1], side="right"))
    at = min(at, len(weights) - 1)
    return at if ids is None else int(ids[at])


def _narrow(ids: npt.NDArray[np.int64] | None, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return kept if ids is None else ids[kept]


def _highest(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Ascending indices of the `count` highest values, ties to the lower index."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    level = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Ascending indices of the smallest set of the most likely tokens that holds `top_p` of the weight; never empty."""
    wanted = top_p * weights.sum()
    count = min(256, len(weights))
    while True:
        best = _highest(weights, count)
        best = best[np.argsort(-weights[best], kind="stable")]
        cumulative = np.cumsum(weights[best])
        if cumulative[-1] >= wanted or count == len(weights):
            last = int(np.searchsorted(cumulative, wanted, side="left"))
            return np.sort(best[: last + 1])
        count = min(count * 8, len(weights))


def _with_logprobs(token: int, logits: Array, top: int) -> Sampled:
    exact = logits.astype(np.float64)
    peak = exact.max()
    norm = peak + np.log(np.exp(exact - peak).sum())
    rivals: list[tuple[int, float]] = []
    if top:
        best = _highest(logits, min(top, len(logits)))
        best = best[np.argsort(-logits[best], kind="stable")]
        rivals = [(int(i), float(exact[i] - norm)) for i in best]
    return Sampled(token, float(exact[token] - norm), tuple(rivals))
