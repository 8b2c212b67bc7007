"""Settings that a run cannot follow are refused before it begins."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.core.errors import ConfigError


def test_adapters_without_a_language_model_or_a_folder_are_refused_before_training(tmp_path: Path) -> None:
    x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
    federation = Federation.from_arrays([(x, y)], nn.Linear(3, 2))
    seen: list[Any] = []
    with pytest.raises(ConfigError, match="only language models"):
        simulate("fedavg", federation, folder=tmp_path / "run", rounds=1, adapters=[1], on_round=seen.append)
    language: Any = dataclasses.replace(federation, companion=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pass folder="):
        simulate("fedavg", language, rounds=1, adapters=[1], on_round=seen.append)
    assert not seen
    assert not (tmp_path / "run").exists()
