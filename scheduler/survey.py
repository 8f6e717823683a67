"""What a device's steps were seen to take before any request came: a table that the cost model starts from.

A device computes rows in tiles, so the price of a step rises in steps of its own. A straight line through them is wrong by a third
where it matters; the table is right from the first prompt on.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Survey(NamedTuple):
    """Seconds that prompt tokens add to a step of decoders. Beyond the largest number of tokens they rise in proportion."""

    tokens: tuple[int, ...]  # ascending; a step of up to so many tokens takes as long as one of exactly so many
    first: tuple[float, ...]  # at the beginning of a prompt
    deep: tuple[float, ...]  # behind `depth` tokens
    depth: int

    def seconds(self, tokens: int, position: float) -> float:
        """What `tokens` add that lie around `position`."""
        if tokens <= 0:
            return 0.0
        at = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        scale = max(1.0, tokens / self.tokens[at])
        return scale * max(0.0, self.first[at] + (self.deep[at] - self.first[at]) * position / self.depth)

    def most(self, seconds: float, position: int, before: int, reach: float) -> int:
        """How many tokens from `position` on may join `before` tokens, of which `reach` is the sum of the positions, so that all
        together add at most `seconds`."""
        fits = 0
        for total in self.tokens:
            count = total - before
            if count > 0 and self.seconds(total, (reach + count * (position + (count - 1) / 2)) / total) <= seconds:
                fits = count
        last = self.tokens[-1]
        if fits == last - before > 0:  # in proportion from here on
            price = self.seconds(last, position + last / 2) / last
            fits = max(fits, int(seconds / price) - before) if price > 0.0 else 1 << 30
        return fits
