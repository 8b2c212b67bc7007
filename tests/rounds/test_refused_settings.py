"""Settings that a run cannot follow are refused before it begins."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError
from fedlowrank.trust.trust_settings import Clipping, Privacy


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


def test_a_run_in_another_thread_is_refused_and_one_in_a_callback_is_not() -> None:
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype("float32"), np.arange(8) % 2
    federation = Federation.from_arrays(
        [(x, y)] * 2, nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    )
    expected = simulate("fedavg", federation, rounds=2).personal(0)
    refusals: list[str] = []
    inner: list[Any] = []

    def run_in_thread(record: Any) -> None:
        def run() -> None:
            try:
                simulate("fedavg", federation, rounds=1)
            except ConfigError as error:
                refusals.append(str(error))

        # waits for the thread, which would never end if it waited for this run
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        if record.round == 1:
            inner.append(simulate("fedavg", federation, rounds=2).personal(0))

    outer = simulate("fedavg", federation, rounds=2, on_round=run_in_thread).personal(0)
    assert len(refusals) == 3
    assert all("another thread of this process runs simulate" in text for text in refusals)
    for params in (outer, *inner):
        assert all((params[name] == tensor).all() for name, tensor in expected.items())
    # the lock is free again, also after an error
    with pytest.raises(ConfigError):
        simulate("fedavg", federation, rounds=1, metrics=["rmse"])
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(simulate, "fedavg", federation, rounds=1).result().rounds) == 2


def test_a_run_leaves_the_modes_of_modules_as_they_were() -> None:
    x, y = np.random.default_rng(0).normal(size=(12, 3)).astype("float32"), np.arange(12) % 2
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    federation = Federation.from_arrays([(x, y)] * 2, module)
    for modes in ([True] * 4, [False] * 4, [False, False, True, False]):
        for layer, mode in zip(module.modules(), modes, strict=True):
            layer.training = mode
        result = simulate("fedavg", federation, rounds=1)
        assert [layer.training for layer in module.modules()] == modes
        # dropout does not act in predictions
        weights = result.personal(0)
        hidden = x @ weights["0.weight"].numpy().T + weights["0.bias"].numpy()
        scores = hidden @ weights["2.weight"].numpy().T + weights["2.bias"].numpy()
        np.testing.assert_allclose(result.predict(0, x).numpy(), scores, rtol=1e-5, atol=1e-6)

    def fail(record: Any) -> None:
        raise KeyError(record.round)

    module.train()
    with pytest.raises(KeyError):
        simulate("fedavg", federation, rounds=1, on_round=fail)
    assert all(layer.training for layer in module.modules())


def test_a_share_of_unseen_clients_that_rounds_to_none_is_refused() -> None:
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype("float32"), np.arange(8) % 2
    federation = Federation.from_arrays([(x, y)] * 4, nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"unseen = 0.1 of 4 clients rounds to no client. Set it to 0.25"):
        simulate("fedavg", federation, rounds=1, unseen=0.1)
    # an eighth of four clients rounds to one
    assert len(simulate("fedavg", federation, rounds=1, unseen=0.125).run.client_sampler.unseen) == 1
    assert not simulate("fedavg", federation, rounds=1, unseen=0.0).run.client_sampler.unseen


def test_a_noise_beyond_what_an_accountant_computes_is_refused() -> None:
    for noise in (2e6, 1e300):
        with pytest.raises(ConfigError, match=r"privacy: noise must be >= 1e-06 and <= 1e\+06"):
            Privacy("central", noise=noise, delta=1e-5)
    pytest.importorskip("dp_accounting")
    for settings in (Privacy("central", noise=1e6, delta=1e-5), Privacy("local", noise=1e6, delta=1e-5)):
        x, y = np.random.default_rng(0).normal(size=(8, 3)).astype("float32"), np.arange(8) % 2
        federation = Federation.from_arrays([(x, y)] * 4, nn.Linear(3, 2))
        for sampling in ("fixed", "poisson"):
            run = {"participation": 0.5, "sampling": sampling, "clipping": Clipping(norm=1.0)}
            record = simulate("fedavg", federation, rounds=1, privacy=settings, **run).rounds[-1]
            assert 0 <= record.server_metrics["privacy"]["epsilon"] < 0.1


def test_a_message_names_the_field_as_it_is_typed() -> None:
    """In a file the table is ``[run.clipping]``; an argument of simulate has no ``run.`` before it."""
    with pytest.raises(ConfigError, match=r"^run\.clipping\.quantile: .* set run\.clipping\.norm"):
        ExperimentConfig.parse({"run": {"clipping": {"quantile": 0.5}}})
    for section, values in {
        "robust": {"hostile": 0.7},
        "secure": {"bits": 1},
        "attack": {"share": 2},
    }.items():
        with pytest.raises(ConfigError, match=rf"^run\.{section}: {next(iter(values))} must be"):
            ExperimentConfig.parse({"run": {section: values}})
