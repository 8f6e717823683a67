"""How soon Python's collector finds what requests leave in cycles.

What lives for some seconds, as a request does, is of the oldest generation when it ends, which is collected after so many collections of
the next younger one, and not before a quarter of what is there is new. The defaults let 70,000 objects come together first.
"""

from __future__ import annotations

import gc

OLDEST = 2
"""Collections of the middle generation before one of the oldest; 10 by default. What they walk is small once the start is frozen."""


def keep_what_is_there() -> None:
    """Take what there is now out of all later collections, and out of the count that these wait for."""
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is left to collect; the first counted all
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, OLDEST)
