"""The ends of a channel, over each transport."""

from __future__ import annotations

import pytest

from tests.unit.channel.ends import TRANSPORTS, Ends


@pytest.fixture(params=TRANSPORTS)
def ends(request, tmp_path):
    with Ends(request.param, tmp_path) as ends:
        yield ends
