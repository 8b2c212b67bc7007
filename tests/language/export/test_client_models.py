"""A client that infers by a mixture of models has no adapter, no answers and no scores of one of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli.language_commands import language_of_run, scores
from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError
from fedlowrank.language.export.server_model import find_server_model
from fedlowrank.language.scores import PerplexityTask
from fedlowrank.rounds.run import Run
from tests.language.peft_scores import score_with_peft, take_inputs
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)


def make_tables(llama: Path, folder: Path, method: str, **more: Any) -> dict[str, Any]:
    """Two components that soon differ."""
    defaults = {"clusters": 2, "optimizer": {"kind": "sgd", "lr": 3.0}}
    changes = {"lora": {"ranks": [2]}, "defaults": defaults, "partition": {"clients": 2}} | more
    return make_causal_tables(llama, folder, method=method, **changes)


def score_as_evaluated(run: Run, client: int) -> torch.Tensor:
    """Log-probabilities by which a client infers."""
    predict = next(iter(run.local_model(run.federation.infos[client]).predictors.values()))
    with torch.no_grad():
        return predict(take_inputs(run)).log_softmax(-1)


@pytest.mark.parametrize("method", ["fedem", "ensemble"])
def test_a_mixture_is_not_written_as_one_of_its_models(
    method: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_rounds(make_tables(llama, tmp_path, method, language={"prompts": ["who is 1?"]}))
    language = language_of_run(run)
    with torch.no_grad(), language.use_parameters(run.personal_params(run.federation.infos[0])) as model:
        component = model(**take_inputs(run)).logits.log_softmax(-1)
    assert float((component - score_as_evaluated(run, 0)).abs().max()) > 1e-3
    assert find_server_model(run) is None
    with caplog.at_level(logging.WARNING):
        assert language.write(run, tmp_path / "out") == []
        assert language.answer(run) == []
    said = [message for message in caplog.messages if "mixture of 2 models" in message]
    assert [message.partition(" at client ")[2] for message in said] == [
        f"{client}, so this client has no {output}" for output in ("adapter", "answers") for client in "01"
    ]
    task = PerplexityTask(str(tmp_path / "train.jsonl"), text="response")
    for name in ("0", "server"):
        with pytest.raises(
            ConfigError, match=r"mixture of 2 models at client 0.*Ensemble with mix = 'weights'"
        ):
            scores(run, task, [name])
    assert scores(run, task, ["base"])["base"].value > 1


def test_a_mixture_of_weights_is_one_model(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_tables(llama, tmp_path, "ensemble", methods={"ensemble": {"mix": "weights"}}))
    (*_, last) = language_of_run(run).write(run, tmp_path / "out")
    assert last.name == "client_0001"
    actual = score_with_peft(llama, last, take_inputs(run)).log_softmax(-1)
    torch.testing.assert_close(actual, score_as_evaluated(run, 1), rtol=1e-4, atol=1e-4)


def test_a_run_of_mixtures_ends_and_its_commands_refuse(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = make_tables(
        llama, tmp_path, "fedem", language={"prompts": ["who is 1?"]}, run={"rounds": 1, "adapters": [1]}
    )
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["run", str(write_toml(tables, tmp_path / "e.toml")), "-o", str(run)]) == 0
    assert not (run / "adapters").exists()
    assert not (run / "answers.jsonl").exists()
    out.mkdir()
    (out / "mine").touch()
    capsys.readouterr()
    for command in (["adapters", str(run), "-o", str(out), "--force"], ["chat", str(run), "--prompt", "x"]):
        assert main(command) == 1
        assert "mixture of 2 models" in capsys.readouterr().err
    # refused before the folder is moved aside
    assert (out / "mine").exists()
