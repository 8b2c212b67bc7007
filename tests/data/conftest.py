import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real() -> str:
    folder = os.environ.get("FEDLOWRANK_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FEDLOWRANK_DATA names no folder with the real data sets")
    return folder
