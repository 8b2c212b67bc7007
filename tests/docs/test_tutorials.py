"""The tutorial's code is run as a reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "your-own-method.md").read_text()
METHOD, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fedavgm.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_it_passes_the_battery_and_runs_from_the_command_line(folder: Path) -> None:
    commands = re.findall(r"^fedlowrank (.*)$", PAGE, re.MULTILINE)
    assert [c.split()[0] for c in commands] == ["check", "run", "compare"]
    for command in commands:
        words = command.replace("experiments/", f"{ROOT}/experiments/").split()
        found = subprocess.run(
            [sys.executable, "-m", "fedlowrank.cli.main", *words], capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stdout + found.stderr
        assert "FedAvgM" in found.stdout
        assert "FAILED" not in found.stdout


def test_the_python_example_runs_and_is_the_formula(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(USE, "tutorial", "exec"), {})
    assert 0 <= float(capsys.readouterr().out) <= 1

    from fedavgm import FedAvgM, Server

    from fedlowrank import SGD, Federation, simulate

    assert Server.__module__ == "fedavgm"
    generator = torch.Generator().manual_seed(0)
    sizes = (20, 60)
    clients = [(torch.randn(n, 3, generator=generator), torch.arange(n) % 2) for n in sizes]
    federation = Federation.from_arrays(clients, torch.nn.Linear(3, 2, dtype=torch.float32), val=0, test=0)
    run = simulate(FedAvgM(beta=0.5, batch_size=1000, optimizer=SGD(lr=0.5)), federation, rounds=3).run

    def gradient(w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = x @ w.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        p = p / p.sum(1, keepdims=True) - np.eye(2)[y]
        return p.T @ x / len(x), p.mean(0)

    initial = federation.architectures["model"].initial
    theta = [initial[n].double().numpy() for n in ("weight", "bias")]
    v = [np.zeros_like(t) for t in theta]
    for _ in range(3):
        ends = []
        for client in run.federation.clients:
            g = gradient(*theta, client.train.x.double().numpy(), client.train.y.numpy())
            ends.append([t - 0.5 * s for t, s in zip(theta, g, strict=True)])
        mean = [np.average(ts, axis=0, weights=sizes) for ts in zip(*ends, strict=True)]
        v = [0.5 * m + (t - mu) for m, t, mu in zip(v, theta, mean, strict=True)]
        theta = [t - m for t, m in zip(theta, v, strict=True)]
    for name, expected in zip(("weight", "bias"), theta, strict=True):
        np.testing.assert_allclose(run.state.server.model[name].numpy(), expected, rtol=1e-4, atol=1e-5)
