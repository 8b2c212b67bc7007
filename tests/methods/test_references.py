"""The NumPy references have the gradients of their losses, and the data of the setting is as the tests assume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.golden import reference

from .run_contents import get_initial_networks, get_train_data
from .setting import CLASSES, OWNED, SIZES, WIDTH, Net, federate_two_models, make_arrays


def test_the_reference_has_the_gradients_of_its_losses() -> None:
    """Central differences of a network's loss, so that the reference is not merely consistent with the
    package."""
    federation = federate_two_models()
    net = get_initial_networks(federation)[0]
    x, y = get_train_data(federation)[0]
    inputs, scores = reference.forward(net, x)
    grads = reference.backward(
        net, inputs, (reference.softmax(scores) - reference.one_hot(y, CLASSES)) / len(y)
    )
    rng = np.random.default_rng(0)
    for layer in range(len(net)):
        for part in (0, 1):
            towards = rng.normal(size=net[layer][part].shape)
            values = []
            for step in (1e-5, -1e-5):
                moved = [list(pair) for pair in net]
                moved[layer][part] = moved[layer][part] + step * towards
                values.append(reference.cross_entropy(reference.forward([tuple(p) for p in moved], x)[1], y))
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(
                float((grads[layer][part] * towards).sum()), abs=1e-7
            )


def test_data_of_the_setting_is_as_the_tests_assume() -> None:
    for part, labels, n in zip(make_arrays(), OWNED, SIZES, strict=True):
        assert sorted(set(part["train"][1].tolist())) == list(labels)
        assert len(part["train"][1]) == n
    assert Net(WIDTH).head.weight.dtype == torch.float64
