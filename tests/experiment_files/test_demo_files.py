"""The files of ``make demo``: every setting that was tuned lies inside its grid."""

from __future__ import annotations

import functools

import pytest

from fedlowrank.config.tuning import tune_settings
from tests.experiment_files.common import ROOT, loaded


@pytest.mark.parametrize("stem", ["floral", "pfedlora", "fedslr", "fedhl"])
def test_the_chosen_settings_lie_inside_the_grid(stem: str) -> None:
    experiment = loaded(ROOT / "demo" / f"{stem}.toml")
    tune = tune_settings(experiment)
    assert set(experiment.seeds) == set(tune.test_seeds)
    for name in experiment.compared_methods:
        method, grid = experiment.build_method(name), tune.grid_of(name)
        assert "optimizer.lr" in grid
        for field, values in grid.items():
            chosen = functools.reduce(getattr, field.split("."), method)
            assert chosen in values, f"{name}: {field} = {chosen} was never tried"
            assert min(values) < chosen < max(values), f"{name}: {field} = {chosen} is at the edge"
