"""Contrastive embeddings are InfoNCE with in-batch negatives as plain PyTorch computes it, and batches are never split."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

from fedlowrank.cli.language_commands import language_of_run
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.contract import Batch
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.core.learning.batch_losses import task_loss
from fedlowrank.core.learning.contrastive_losses import contrastive_losses, nearest_is_own
from fedlowrank.core.learning.losses import Loss
from fedlowrank.data.dataset import Examples
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.results.evaluation.pools import ScoringPool
from fedlowrank.results.evaluation.scoring import count_labels, measure_predictor
from fedlowrank.rounds.run import Run
from tests.language.memory_limits import limit_memory

torch.set_num_threads(1)


def pairs(folder: Path, count: int = 24, names: tuple[str, str] = ("anchor", "positive")) -> Path:
    rows = [
        dict(zip(names, (f"who is {i}?", f"the fox {i} " * (1 + i % 3)), strict=True)) for i in range(count)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def tables(base: Path, path: Path, **more: Any) -> dict[str, Any]:
    """Tables of an experiment; ``more`` by section."""
    targets = ["query", "value"] if "bert" in str(base) else ["q_proj", "v_proj"]
    made: dict[str, Any] = {
        "name": "embeddings",
        "method": "fedit",
        "data": {"source": "text", "path": str(path), "normalize": "none"},
        "partition": {"kind": "iid", "clients": 2},
        "language": {"path": str(base), "task": "embedding", "context": 48},
        "lora": {"r": 2, "lora_alpha": 4, "target_modules": targets, "ranks": [2]},
        "loss": {"kind": "contrastive", "temperature": 0.2},
        "run": {"rounds": 1, "representations": 0},
        "defaults": {"batch_size": 4, "optimizer": {"kind": "adamw", "lr": 0.02}},
    }
    for section, fields in more.items():
        made[section] = {**made.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return made


def run_of(made: dict[str, Any], engine: Engine | None = None, steps: int | None = None) -> Run:
    experiment = ExperimentConfig.parse(made)
    method = experiment.build_method(experiment.default_method)
    run = Run(method, experiment.federation(), experiment.run, engine or Sequential())
    for _ in range(experiment.run.rounds if steps is None else steps):
        run.step()
    return run


def embed(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The mean of the last hidden states of one text without padding."""
    kept = ids[mask != 0][None]
    out = model(input_ids=kept, attention_mask=torch.ones_like(kept))
    states = out if isinstance(out, Tensor) else out.last_hidden_state
    return states[0].mean(0)


def loss_by_hand(model: Any, x: dict[str, Tensor], temperature: float) -> tuple[Tensor, list[bool]]:
    """InfoNCE of a batch, pair by pair."""
    count = len(x["input_ids"])
    actual = [
        [embed(model, x["input_ids"][i, side], x["attention_mask"][i, side]) for side in (0, 1)]
        for i in range(count)
    ]
    losses, nearest = [], []
    for i in range(count):
        a = actual[i][0]
        cosines = torch.stack([a @ p / (a.norm() * p.norm()) for _, p in actual])
        powers = torch.exp(cosines / temperature)
        losses.append(-torch.log(powers[i] / powers.sum()))
        nearest.append(int(cosines.argmax()) == i)
    return torch.stack(losses).mean(), nearest


def install(model: Any, params: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            own[name].copy_(value)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_loss_and_gradient_are_infonce(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run = run_of(tables(request.getfixturevalue(kind), pairs(tmp_path)), steps=0)
    model = copy.deepcopy(language_of_run(run).model)
    start = run.personal_params(run.federation.infos[0])
    draw = torch.Generator().manual_seed(0)
    install(model, {n: torch.randn(p.shape, generator=draw) * 0.3 for n, p in start.items()})
    factors = {n: p for n, p in model.named_parameters() if n in start}
    train: Any = run.federation.clients[0].train
    x = {n: t[:5] for n, t in train.x.items()}
    leaves = {n: p.detach().clone().requires_grad_() for n, p in factors.items()}
    architecture = run.federation.architectures["language"]
    actual = task_loss(architecture.apply(leaves, x), Batch(x, train.y[:5], loss=run.federation.loss))
    expected, _ = loss_by_hand(model, x, 0.2)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected, list(factors.values()))
    assert max(float(g.abs().max()) for g in wanted) > 1e-3
    for one, other in zip(torch.autograd.grad(actual, list(leaves.values())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_padding_and_other_clients_are_no_negatives() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 5, generator=generator), torch.randn(4, 2, 5, generator=generator)
    filled = torch.cat([a, torch.randn(1, 2, 5, generator=generator), b])
    mask = torch.tensor([True] * 3 + [False] + [True] * 4)
    actual = contrastive_losses(filled, 0.5, mask, 2)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual[:3], contrastive_losses(a, 0.5))
    torch.testing.assert_close(actual[4:], contrastive_losses(b, 0.5))


def test_an_anchor_as_near_to_another_positive_has_not_found_its_own() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    embeddings = torch.stack(
        [torch.stack([one, one]), torch.stack([other, other]), torch.stack([other, one])]
    )
    assert nearest_is_own(embeddings).tolist() == [False, True, False]


def test_an_evaluation_compares_consecutive_batches_of_32(llama: Path, tmp_path: Path) -> None:
    split = {"kind": "local", "train": 0.4, "val": 0.1, "test": 0.5}
    run = run_of(tables(llama, pairs(tmp_path, 160), split=split))
    record = run.record_initial_models()
    test: Any = run.federation.clients[0].test
    assert len(test) == 40
    model = copy.deepcopy(language_of_run(run).model)
    install(model, run.personal_params(run.federation.infos[0]))
    parts = [{n: t[a:b] for n, t in test.x.items()} for a, b in ((0, 32), (32, 40))]
    with torch.no_grad():
        actual = [loss_by_hand(model, part, 0.2) for part in parts]
    loss = (32 * float(actual[0][0]) + 8 * float(actual[1][0])) / 40
    nearest = [right for _, of in actual for right in of]
    assert record.by_client("loss", split="test")[0] == pytest.approx(loss, rel=1e-4)
    assert record.by_client("retrieval_accuracy", split="test")[0] == pytest.approx(sum(nearest) / 40)
    assert set(record.by_client("accuracy", split="test").values()) <= {None}


@pytest.mark.parametrize("count", [1, 33])
def test_an_evaluation_leaves_out_a_pair_without_others(count: int) -> None:
    g = torch.Generator().manual_seed(0)
    embeddings = torch.randn(count, 2, 8, generator=g)
    examples = Examples(torch.arange(count)[:, None].float(), torch.zeros(count, dtype=torch.int64))
    loss = Loss("contrastive", temperature=0.5)
    pool = ScoringPool([examples], loss=loss)
    results = measure_predictor(lambda x: embeddings[x[:, 0].long()], pool)
    assert count_labels(examples, loss) == count - 1
    if count == 1:
        assert results.accuracy == results.loss == [None]
        return
    anchors, positives = functional.normalize(embeddings[:32], dim=-1).unbind(1)
    cosines = anchors @ positives.T
    expected = functional.cross_entropy(cosines / 0.5, torch.arange(32))
    assert results.loss == [pytest.approx(float(expected), rel=1e-5)]
    hits = (cosines.argmax(1) == torch.arange(32)).float().mean()
    assert results.accuracy == [pytest.approx(float(hits))]


@pytest.mark.parametrize("method", ["fedit", "fedhl", "hetlora", "flexlora", "ditto"])
def test_methods_learn_embeddings(bert: Path, tmp_path: Path, method: str) -> None:
    run = run_of(tables(bert, pairs(tmp_path), method=method), steps=0)
    losses = [run.step().training_losses for _ in range(3)]
    first, last = (next(iter(one.values())) for one in (losses[0], losses[-1]))
    assert last < first - 0.01


def test_a_batch_without_memory_is_not_halved(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tables(llama, pairs(tmp_path)), steps=0)
    limit_memory(monkeypatch, 2)
    with pytest.raises(torch.OutOfMemoryError):
        run.step()


def test_the_vectorized_engine_says_that_it_trains_transformers_client_by_client(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tables(llama, pairs(tmp_path), run={"rounds": 1})
    with caplog.at_level("INFO", "fedlowrank.engines"):
        one, other = run_of(made), run_of(made, Vectorized())
    (message,) = [m for m in caplog.messages if m.startswith("engine vectorized")]
    assert "runs one client after another" in message
    assert "a hook is registered on a layer" in message
    for name, value in one.personal_params(one.federation.infos[1]).items():
        torch.testing.assert_close(
            other.personal_params(other.federation.infos[1])[name], value, rtol=0, atol=0
        )


def test_the_adapter_gives_the_embeddings_elsewhere(llama: Path, tmp_path: Path) -> None:
    run = run_of(tables(llama, pairs(tmp_path, names=("query", "document"))))
    language_of_run(run).write(run, tmp_path / "out")
    model = PeftModel.from_pretrained(
        AutoModel.from_pretrained(llama), tmp_path / "out" / "client_0000"
    ).eval()
    train: Any = run.federation.clients[0].train
    info = run.federation.infos[0]
    x = {n: t[:3] for n, t in train.x.items()}
    with torch.no_grad():
        predict = next(iter(run.local_model(info).predictors.values()))
        actual = predict(x)
        for i in range(3):
            for side in (0, 1):
                expected = embed(model, x["input_ids"][i, side], x["attention_mask"][i, side])
                torch.testing.assert_close(actual[i, side], expected, rtol=1e-4, atol=1e-5)


def test_the_data_command_and_a_report_name_both_texts(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "embeddings.toml"
    file.write_text(ExperimentConfig.parse(tables(llama, pairs(tmp_path, 48))).to_toml())
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "anchor: <s>who is" in printed
    assert "positive: <s>the fox" in printed
    assert "class 0" not in printed
    assert "reaches a mean test loss of" in printed
    assert "loss per token" not in printed


def test_pairs_that_never_meet_another_one_are_refused_before_the_run(bert: Path, tmp_path: Path) -> None:
    """Their loss is 0, and their gradient too."""
    with pytest.raises(
        ConfigError, match=r"batch_size = 1: loss 'contrastive' compares .* at least 2, for FedIT"
    ):
        run_of(tables(bert, pairs(tmp_path), defaults={"batch_size": 1}), steps=0)
    path = pairs(tmp_path, 13)
    rows = [
        json.loads(line) | {"site": "b" if i < 3 else "a"}
        for i, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    made = tables(
        bert, path, data={"client_column": "site"}, split={"train": 0.34, "val": 0.33, "test": 0.33}
    )
    made["partition"] = {"kind": "natural"}
    with pytest.raises(
        DataError, match=r"client 1 \(b\) trains on 1 of 1 pairs, and loss 'contrastive' compares"
    ):
        run_of(made, steps=0)
    # with a pair left over an epoch has other batches, too
    run = run_of({**made, "split": {"train": 0.6, "val": 0.0, "test": 0.4}, "defaults": {"batch_size": 5}})
    assert sorted(len(client.train) for client in run.federation.clients) == [2, 6]


def test_what_does_not_fit_is_said(llama: Path, tmp_path: Path) -> None:
    made = tables(llama, pairs(tmp_path))
    with pytest.raises(ConfigError, match=r"micro_batch = 2 takes a batch in parts, and loss 'contrastive'"):
        run_of({**made, "run": {**made["run"], "micro_batch": 2}})
    with pytest.raises(ConfigError, match=r"temperature.*> 0"):
        ExperimentConfig.parse({**made, "loss": {"kind": "contrastive", "temperature": 0.0}})
    with pytest.raises(ConfigError, match=r"Set it to 'embedding'"):
        run_of({**made, "language": {**made["language"], "task": "causal"}})
    with pytest.raises(DataError, match=r"Set loss to 'contrastive'"):
        run_of({**made, "loss": {"kind": "auto"}})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"the fox {i}"}) for i in range(12)))
    language = {**made["language"], "task": "causal"}
    with pytest.raises(DataError, match=r"language.task = 'embedding'"):
        run_of({**made, "data": {**made["data"], "path": str(texts)}, "language": language})
    with pytest.raises(TaskError, match=r"FedEM weighs each example by itself"):
        run_of({**made, "method": "fedem"})
    with pytest.raises(ConfigError, match=r"language.packing joins texts of a causal model"):
        run_of({**made, "language": {**made["language"], "packing": True}})
    assert math.isfinite(run_of(made).step().training_losses["local"])
