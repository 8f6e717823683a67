"""Draws tokens where the logits are: the whole batch together, one copy back, nothing waits until the tokens are asked for.

Requests whose draw needs more than a row's logits, knobs and fixed offsets (penalties, log-probabilities) are left to the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ds4batch.engine.sampler import Draw, Offsets
from triton_kernels.sampling import Request, pack, sample, workspace

_TURNS = 4  # batches whose tokens may be on their way
_KEPT = 64  # sets of offsets that stay on the device


class Fetch:
    """Host buffers of one batch, and when its tokens are in them."""

    def __init__(self, rows: int, words: int) -> None:
        self.knobs = torch.zeros(rows, 6, dtype=torch.int64, pin_memory=True)
        self.tokens = torch.zeros(rows + 1, dtype=torch.int64, pin_memory=True)
        self.masks = torch.zeros(rows, words, dtype=torch.int32, pin_memory=True)
        self.done = torch.cuda.Event()
        self.count = 0

    def wait(self) -> tuple[list[int], bool]:
        """The tokens, and whether all flags were set."""
        self.done.synchronize()
        *tokens, finite = self.tokens[: self.count + 1].tolist()
        return tokens, bool(finite)


class DeviceSampler:
    """The sampler of one device, for up to `rows` rows of `vocab` logits."""

    def __init__(self, rows: int, vocab: int, device: torch.device, drawn: torch.Tensor) -> None:
        """`drawn`: int64 [rows] on the device. It holds a batch's tokens until the next is drawn."""
        self._space = workspace(rows, vocab, device)
        self._drawn = drawn
        self._knobs = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        self._vocab = vocab
        self._offsets: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # fp32 [vocab] each, those used last at the end
        self._set = torch.ones(1, dtype=torch.bool, device=device)
        self._masks = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=device)
        self._turns = [Fetch(rows, self._masks.shape[1]) for _ in range(_TURNS)]
        self._turn = 0

    def launch(
        self, logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int], flags: Sequence[torch.Tensor]
    ) -> Fetch:
        """Draw a token for each row of fp32 [R, vocab]. `flags`: bool [1] each, on the device; they come back with the tokens.

        What is returned must be waited for before three more batches are drawn.
        """
        self._turn = (self._turn + 1) % _TURNS
        turn = self._turns[self._turn]
        turn.done.synchronize()  # its buffers were read
        count = turn.count = len(draws)
        requests = [
            Request(d.temperature, d.sampling.top_k, d.sampling.top_p, d.sampling.min_p, d.sampling.seed, position)
            for d, position in zip(draws, positions, strict=True)
        ]
        knobs, needs = pack(requests)
        placed = None
        if needs.sampled:  # through pinned memory: a copy from any other may wait for the device
            turn.knobs[:count].copy_(knobs)
            placed = self._knobs[:count].copy_(turn.knobs[:count], non_blocking=True)
        shifted = self._masked(self._shifted(logits, draws), logits, draws, turn)
        tokens = sample(shifted, placed, needs, self._drawn[:count], self._space)
        finite = flags[0] if len(flags) == 1 else torch.cat([self._set, *flags]).all().view(1)
        turn.tokens[: count + 1].copy_(torch.cat([tokens, finite]), non_blocking=True)
        turn.done.record()
        return turn

    def _shifted(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """The logits with each request's offsets: a copy, or the same tensor where there are none."""
        offsets = [draw.offsets for draw in draws]
        keys = [one.key if one is not None else b"" for one in offsets]
        if not any(keys):
            return logits
        if len(set(keys)) == 1 and offsets[0] is not None:
            return logits + self._vector(keys[0], offsets[0])
        logits = logits.clone()
        for row, (key, one) in enumerate(zip(keys, offsets, strict=True)):
            if one is not None:
                logits[row] += self._vector(key, one)
        return logits

    def _masked(self, shifted: torch.Tensor, logits: torch.Tensor, draws: Sequence[Draw], turn: Fetch) -> torch.Tensor:
        """`shifted` without what the requests' masks leave out: changed in place unless it is `logits`."""
        masks = {row: draw.mask for row, draw in enumerate(draws) if draw.mask is not None}
        if not masks:
            return shifted
        pack_masks(list(masks.values()), turn.masks)
        placed = self._masks[: len(masks)].copy_(turn.masks[: len(masks)], non_blocking=True)
        return mask_rows(shifted.clone() if shifted is logits else shifted, list(masks), placed)

    def _vector(self, key: bytes, offsets: Offsets) -> torch.Tensor:
        """fp32 [vocab] on the device."""
        if key not in self._offsets:
            whole = torch.zeros(self._vocab)
            whole[torch.from_numpy(offsets.ids)] = torch.from_numpy(offsets.values)
            self._offsets[key] = whole.to(self._knobs.device)
            if len(self._offsets) > _KEPT:
                self._offsets.popitem(last=False)
        self._offsets.move_to_end(key)
        return self._offsets[key]


def pack_masks(masks: Sequence[npt.NDArray[np.int32]], into: torch.Tensor) -> None:
    """Write masks into the first rows of int32 [rows, words] on the host. What is past a mask's end is left out of the draw."""
    rows = into.numpy()
    for row, mask in zip(rows, masks, strict=False):
        row[: len(mask)] = mask[: len(row)]
        row[len(mask) :] = 0


def mask_rows(logits: torch.Tensor, rows: Sequence[int], masks: torch.Tensor) -> torch.Tensor:
    """Set to minus infinity, in place, what a mask leaves out of its row. Touches no other row and waits for nothing.

    logits: fp32 [R, V]. rows: which of them. masks: int32 [len(rows), ceil(V / 32)], a bit a token, the lowest first.
    """
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    left_out = ((masks.unsqueeze(-1) >> bits) & 1 == 0).view(len(rows), -1)
    for at, row in enumerate(rows):
        logits[row].masked_fill_(left_out[at, :vocab], -torch.inf)
    return logits
