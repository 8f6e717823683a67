"""Tests that ask for `either_device` run over a device that works when it is called, and over one that works on its own."""

import pytest
from scheduler_rig import Rig


@pytest.fixture(params=[False, True], ids=["waits", "chains"])
def either_device(request, monkeypatch):
    """Whether the rig's device chains; what a Rig is told itself stands."""
    monkeypatch.setattr(Rig, "chains", request.param)
    return request.param
