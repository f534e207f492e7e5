"""Makes every test repeatable: what a test draws at random is a function of its name."""

from __future__ import annotations

import hashlib
import os
import random

import numpy
import pytest
import torch
from hypothesis import settings

# No deadlines: how long an example takes says how busy the machine is. Searching anew belongs to a person's machine; a
# shared check gives the same verdict for the same commit.
settings.register_profile("searching", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "searching")


@pytest.fixture(autouse=True)
def seeded_by_name(request: pytest.FixtureRequest) -> None:
    """Seeds the global generators, so that neither the order of tests nor their division among processes matters."""
    seed = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
