"""The code of tutorials is run as a reader would run it."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "your-own-method.md").read_text()
METHOD, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
TRUST = (ROOT / "docs" / "tutorials" / "privacy-and-robustness.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fedexp.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_command(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, which must succeed."""
    words = shlex.split(command.replace("experiments/", f"{ROOT}/experiments/"))
    # embedding plots take seconds, and no tutorial shows one
    code = main([*words, "run.representations=0"] if words[0] in ("run", "compare") else words)
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    return printed.out


@pytest.mark.full
def test_it_passes_the_battery_and_runs_from_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [c for c in re.findall(r"^fedlowrank (.*)$", PAGE, re.MULTILINE) if "fedexp" in c]
    assert [c.split()[0] for c in commands] == ["check", "run", "compare", "run"]
    for command in commands:
        printed = run_command(command, capsys)
        assert "FedExP" in printed
        assert "FAILED" not in printed


@pytest.mark.full
def test_the_python_example_runs_and_is_the_formula(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(USE, "tutorial", "exec"), {})
    assert 0 <= float(capsys.readouterr().out) <= 1

    from fedexp import FedExP

    from fedlowrank import SGD, Federation, simulate

    generator = torch.Generator().manual_seed(0)
    sizes = (20, 60, 30)
    inputs = [torch.randn(n, 3, generator=generator) for n in sizes]
    # the labels of client 1 are the others' reversed, so that updates oppose each other and the step is above 1
    clients = [(x, ((x[:, 0] > 0) ^ (i == 1)).long()) for i, x in enumerate(inputs)]
    federation = Federation.from_arrays(clients, torch.nn.Linear(3, 2, dtype=torch.float32), val=0, test=0)
    method = FedExP(eps=1e-4, batch_size=1000, optimizer=SGD(lr=0.5))
    run = simulate(method, federation, rounds=3).run

    def gradient(w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = x @ w.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        p = p / p.sum(1, keepdims=True) - np.eye(2)[y]
        return p.T @ x / len(x), p.mean(0)

    initial = federation.architectures["model"].initial
    theta = [initial[n].double().numpy() for n in ("weight", "bias")]
    steps = []
    for _ in range(3):
        updates = []
        for client in run.federation.clients:
            g = gradient(*theta, client.train.x.double().numpy(), client.train.y.numpy())
            updates.append(np.concatenate([-0.5 * part.ravel() for part in g]))
        mean = np.mean(updates, axis=0)
        squares = sum(u @ u for u in updates)
        steps.append(max(1, squares / (2 * len(updates) * (mean @ mean + 1e-4))))
        moved = steps[-1] * mean
        theta = [theta[0] + moved[:6].reshape(2, 3), theta[1] + moved[6:]]
    assert max(steps) > 1, "the formula would be FedAvg's"
    for name, expected in zip(("weight", "bias"), theta, strict=True):
        np.testing.assert_allclose(run.state.server[name].numpy(), expected, rtol=1e-4, atol=1e-5)


def last_record(folder: Path) -> dict[str, Any]:
    from fedlowrank.storage.run_files import read_lines

    actual: dict[str, Any] = json.loads(read_lines(folder)[-1])
    return actual


class TestPrivacyAndRobustness:
    """The commands of the page, in its order, and what the page says that they show."""

    commands = re.findall(r"^fedlowrank (.*)$", TRUST, re.MULTILINE)

    def test_every_command_is_run_below(self) -> None:
        names = [m[1] if (m := re.search(r"-o runs/(\w+)", c)) else c for c in self.commands]
        assert names == ["list --trust", "small", "private", "local", "attacked", "secure"]
        assert len(TRUST.splitlines()) <= 120

    @pytest.fixture
    def made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., Path]:
        """Runs the command that writes the run folder of a name, with some settings replaced."""
        monkeypatch.chdir(tmp_path)

        def run(name: str, *replaced: tuple[str, str]) -> Path:
            (command,) = (c for c in self.commands if f"-o runs/{name} " in c)
            for setting, cheaper in replaced:
                assert setting in command
                command = command.replace(setting, cheaper)
            run_command(command, capsys)
            return tmp_path / "runs" / name

        return run

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "central" in run_command(self.commands[0], capsys)

    @pytest.mark.full
    def test_compression(self, made: Callable[..., Path]) -> None:
        last = last_record(made("small"))
        # 5 % of the entries, a byte each, and a bit for the place of every entry, which had 4 bytes
        assert last["bytes_up"] / last["bytes_down"] == pytest.approx((0.05 + 1 / 8) / 4, rel=0.05)

    @pytest.mark.full
    def test_central_privacy(self, made: Callable[..., Path]) -> None:
        folder = made("private")
        assert 7.9 < last_record(folder)["server_metrics"]["privacy"]["epsilon"] <= 8
        charged = [json.loads(line) for line in (folder / "privacy.jsonl").read_text().splitlines()]
        assert [line["round"] for line in charged] == [0, 1, 2]
        assert charged[-1]["clients"] == last_record(folder)["participants"]

    @pytest.mark.full
    def test_local_privacy(self, made: Callable[..., Path]) -> None:
        folder = made("local")
        assert 7.9 < last_record(folder)["server_metrics"]["privacy"]["epsilon"] <= 8

    @pytest.mark.full
    def test_a_rule_against_an_attack(self, made: Callable[..., Path]) -> None:
        folder = made("attacked")
        mean, krum = csv.DictReader((folder / "report.csv").read_text().splitlines())
        said = [float(x) / 100 for x in re.findall(r"\(here about (\d+) % and (\d+) %\)", TRUST)[0]]
        assert [float(row["accuracy_last"]) for row in (mean, krum)] == pytest.approx(said, abs=0.1)
        assert float(krum["hostile_weight"]) == 0

    @pytest.mark.full
    def test_one_round_under_attack_says_what_each_rule_let_in(self, made: Callable[..., Path]) -> None:
        folder = made(
            "attacked", ("run.rounds=8", "run.rounds=1"), ("defaults.epochs=5", "defaults.epochs=1")
        )
        mean, krum = csv.DictReader((folder / "report.csv").read_text().splitlines())
        assert [0 <= float(row["accuracy_last"]) <= 1 for row in (mean, krum)] == [True, True]
        assert mean["hostile_weight"] == ""
        assert float(krum["hostile_weight"]) == 0
        assert "No result counts the hostile clients" in (folder / "report.html").read_text()

    @pytest.mark.full
    def test_secure_sums(self, made: Callable[..., Path]) -> None:
        last = last_record(made("secure"))
        assert last["round"] == 2
        assert last["lost"] == {}

    def test_the_experiment_file(self, tmp_path: Path) -> None:
        from fedlowrank.config.experiment import ExperimentConfig

        (text,) = re.findall(r"```toml\n(.*?)```", TRUST, re.DOTALL)
        (tmp_path / "file.toml").write_text(text.replace("experiments/", f"{ROOT}/experiments/"))
        run = ExperimentConfig.read(tmp_path / "file.toml").run
        assert (run.clipping.norm, run.privacy.kind, run.privacy.epsilon) == (0.5, "central", 8)
        assert (run.sampling, run.participation) == ("poisson", 0.5)

    @pytest.mark.full
    def test_the_python_example_prints_what_the_page_says(self, capsys: pytest.CaptureFixture[str]) -> None:
        (text,) = re.findall(r"```python\n(.*?)```", TRUST, re.DOTALL)
        exec(compile(text, "tutorial", "exec"), {})
        rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
        assert [row[0] for row in rows] == ["none", "central", "local"]
        (said,) = re.findall(r"accuracies are about (\d+) %, (\d+) % and (\d+) %", TRUST)
        assert [float(row[1]) for row in rows] == pytest.approx([float(x) / 100 for x in said], abs=0.05)
        assert rows[0][2] == "None"
        for row in rows[1:]:
            assert 7.9 < float(re.findall(r"'epsilon': ([\d.]+)", row[2])[0]) <= 8
