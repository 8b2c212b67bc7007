"""Settings of trainers: noise on embeddings, and a step that runs out of memory."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.language.embedding_noise import add_embedding_noise
from tests.language.memory_limits import limit_memory
from tests.language.text_experiments import make_causal_tables, run_rounds

torch.set_num_threads(1)


class Embedded(torch.nn.Module):
    """A module with embeddings, as models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 16)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table


def test_noise_is_uniform_within_its_bound_and_only_in_training() -> None:
    model, ids = Embedded(), torch.zeros(50, 25, dtype=torch.long)
    clean = model.table(ids).detach()
    add_embedding_noise(model, 5.0)
    model.train()
    noise = (model.table(ids) - clean).flatten()
    bound = 5.0 / (25 * 16) ** 0.5
    assert noise.abs().max() <= bound * 1.001
    assert float(noise.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    model.eval()
    assert torch.equal(model.table(ids), clean)


def test_noise_changes_training_and_comes_again_with_the_seed(llama: Path, tmp_path: Path) -> None:
    states = []
    for alpha in (0.0, 5.0, 5.0):
        tables = make_causal_tables(llama, tmp_path)
        tables["language"]["neftune"] = alpha
        run = run_rounds(tables)
        run.step()
        states.append(run.state.server)
    assert tree.equal(states[1], states[2])
    assert not tree.equal(states[0], states[1])
    tables["language"]["neftune"] = -1.0
    with pytest.raises(ConfigError, match="neftune"):
        run_rounds(tables)


def test_a_step_without_memory_is_halved_once_and_said(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = make_causal_tables(llama, tmp_path)
    size = 4
    tables.setdefault("defaults", {})["batch_size"] = size
    expected = run_rounds(tables)
    expected.step()
    limit_memory(monkeypatch, size // 2)
    run = run_rounds(tables)
    with caplog.at_level(logging.WARNING, "fedlowrank"):
        run.step()
    assert "ran out of memory" in caplog.text
    assert "run.micro_batch = 2" in caplog.text
    a, b = (tree.tensors(r.state.server) for r in (run, expected))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_step_that_needs_more_than_a_half_raises(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables.setdefault("defaults", {})["batch_size"] = 4
    limit_memory(monkeypatch, 1)
    with pytest.raises(torch.OutOfMemoryError):
        run_rounds(tables).step()
