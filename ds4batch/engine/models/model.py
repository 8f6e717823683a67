"""What the engine asks of a model, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ds4batch.engine.linear import Linear
from ds4batch.engine.pages import PagePool
from ds4batch.engine.rows import Rows, Span
from ds4batch.engine.state import StatePool
from ds4batch.engine.weights.config import ModelConfig


class Output(NamedTuple):
    """What a forward returns. logits: fp32 [wanted rows, vocab]; finite: bool [R], whether a row's last hidden state is.

    hidden: fp32 [R, hidden], the residual stream before the last norm, which the next forward may overwrite, and where the segments
    lie in it; both where a drafter may want them.
    """

    logits: torch.Tensor
    finite: torch.Tensor
    hidden: torch.Tensor | None = None
    spans: Sequence[Span] = ()


class Model(Protocol):
    """Weights on a device, and the one forward."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""

    @property
    def scale(self) -> float:
        """What attention multiplies scores by."""

    @property
    def head(self) -> Linear:
        """The product that gives the logits."""

    @property
    def linears(self) -> Sequence[Linear]:
        """One matrix product of each shape the layers hold."""

    @property
    def bytes(self) -> int:
        """Bytes the weights take on the device."""

    def new_state(self, slots: int, drafts: int = 0) -> StatePool | None:
        """What `slots` sessions keep beside keys and values, if anything; `drafts` are checked for each in a forward, at most."""

    def forward(self, rows: Rows, pool: PagePool) -> Output:
        """Evaluate all rows: advance the sessions in the pool, return the logits that were asked for."""
