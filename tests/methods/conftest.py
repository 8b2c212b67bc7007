from __future__ import annotations

import pytest

from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized


@pytest.fixture(params=[Sequential, Vectorized])
def engine(request: pytest.FixtureRequest) -> type[Engine]:
    """Golden tests are of clients one by one, and of clients at once."""
    return request.param
