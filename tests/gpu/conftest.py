from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def card() -> torch.device:
    """The card these tests run on; without one they are skipped, and say so."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA card")
    return torch.device("cuda")
