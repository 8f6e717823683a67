"""Rotary position embedding: the frequencies of each scaling rule, and the table of rotations.

Formulas: RoPE (Su et al., arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), and Llama 3.1's
smoothed interpolation as its model card states it; parameter names follow transformers' `rope_parameters`.
"""

from __future__ import annotations

import math

import torch

from ds4batch.engine.weights.config import ModelError, Rope


def rotations(rope: Rope, head_dim: int, ctx: int) -> torch.Tensor:
    """complex64 [ctx, head_dim / 2]: what the i-th pair of a head at each position is multiplied by.

    Computed in fp64 from the position alone, so a position's rotation does not depend on the context's length. Raises
    ModelError for the dynamic rule beyond the trained context, whose rotations would depend on the prompt's length.
    """
    frequencies, magnitude = _frequencies(rope, head_dim, ctx)
    angle = torch.outer(torch.arange(ctx, dtype=torch.float64), frequencies)
    return torch.polar(torch.full_like(angle, magnitude), angle).to(torch.complex64)


def _frequencies(rope: Rope, head_dim: int, ctx: int) -> tuple[torch.Tensor, float]:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = rope.theta**-exponent
    if rope.factors is not None:
        return plain / torch.tensor(rope.factors, dtype=torch.float64), 1.0
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "dynamic":
            if ctx > rope.original_context:
                raise ModelError(
                    f"rope scaling 'dynamic' makes a token's state depend on the prompt's length beyond "
                    f"{rope.original_context} positions; use --ctx {rope.original_context} or less"
                )
            return plain, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, head_dim)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(wavelength > longest, plain / rope.factor, torch.where(wavelength < shortest, plain, blended))


def _yarn(rope: Rope, plain: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    def turning_dim(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(turning_dim(rope.beta_fast)), 0)
    high = min(math.ceil(turning_dim(rope.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = plain / rope.factor * (1 - keep) + plain * keep
    magnitude = rope.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return frequencies, magnitude
