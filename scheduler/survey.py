"""What a device's steps were seen to take before any request came: a table that the cost model starts from.

A device computes rows in tiles, so the price of a step rises in steps of its own. A straight line through them is wrong by a third
where it matters; the table is right from the first prompt on.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

_TICK = 1e-9  # seconds: no step takes less


class Survey(NamedTuple):
    """Seconds that prompt tokens add to a step of decoders. Beyond the largest number of tokens they rise in proportion."""

    tokens: tuple[int, ...]  # ascending; a step of up to so many tokens takes as long as one of exactly so many
    depths: tuple[int, ...]  # ascending from 0, two or more: tokens before them where they were timed
    prices: tuple[tuple[float, ...], ...]  # seconds, for each of `depths` one for each of `tokens`

    def seconds(self, tokens: int, position: float) -> float:
        """What `tokens` add that lie around `position`: on the line through the two depths next to it."""
        if tokens <= 0:
            return 0.0
        at = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        scale = max(1.0, tokens / self.tokens[at])
        behind = min(max(bisect_left(self.depths, position), 1), len(self.depths) - 1)
        near, far = self.depths[behind - 1], self.depths[behind]
        first, last = self.prices[behind - 1][at], self.prices[behind][at]
        return scale * max(0.0, first + (last - first) * (position - near) / (far - near))

    def most(self, seconds: float, position: int, before: int, reach: float, base: float) -> int:
        """How many tokens from `position` on may join `before` tokens, of which `reach` is the sum of the positions, so that all
        together add at most `seconds`. Of the numbers that fit it is the one with the most tokens a second, in a step that takes
        `base` without them: prices rise in steps, and one token more than a tile holds may cost as much as half a tile.
        """
        best, fits = 0.0, 0
        for total in self.tokens:
            count = total - before
            if count <= 0:
                continue
            price = self.seconds(total, (reach + count * (position + (count - 1) / 2)) / total)
            if price <= seconds and (rate := total / max(base + price, _TICK)) >= best:
                best, fits = rate, count
        last = self.tokens[-1]
        if fits == last - before > 0:  # in proportion from here on
            price = self.seconds(last, position + last / 2) / last
            fits = max(fits, int(seconds / price) - before) if price > 0.0 else 1 << 30
        return fits
