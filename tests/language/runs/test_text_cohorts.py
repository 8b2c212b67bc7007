"""Clients of a small transformers model are trained together, and each is what it is alone; what might differ is not."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.contract import Batch
from fedlowrank.engines.sequential import Sequential
from fedlowrank.rounds.run import Run
from fedlowrank.training import trainer
from fedlowrank.training.cohorts.cohort_batches import join_batches
from tests.language.text_experiments import make_causal_tables
from tests.support.counting_engine import CountingEngine

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "clients": 5, "alpha": 1.0},
    "lora": {"ranks": [4, 2, 1, 4, 2]},
    "defaults": {"batch_size": 4, "optimizer": {"kind": "sgd", "lr": 0.05}},
}


def pair_of(tables: dict[str, Any]) -> tuple[Run, Run, CountingEngine]:
    """The same run by the sequential and by the vectorized engine."""
    runs = []
    for engine in (Sequential(), counting := CountingEngine()):
        made = ExperimentConfig.parse(tables)
        runs.append(Run(made.build_method(made.default_method), made.federation(), made.run, engine))
    return runs[0], runs[1], counting


def assert_equal_rounds(one: Run, other: Run, rounds: int = 2) -> None:
    for _ in range(rounds):
        a, b = one.step(), other.step()
        assert (a.steps, a.flops, a.bytes_up) == (b.steps, b.flops, b.bytes_up)
        assert b.training_losses == pytest.approx(a.training_losses, abs=1e-5)
    for info in one.federation.infos:
        a, b = one.personal_params(info), other.personal_params(info)
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-5
    moved = zip(tree.tensors(one.state.server), tree.tensors(other.state.server), strict=True)
    assert max(float((x - y).abs().max()) for x, y in moved) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "ranks"), [("fedhl", [4, 2, 1, 4, 2]), ("flora", [4, 2, 1, 4, 2]), ("fedit", [2])]
)
def test_clients_are_what_they_are_alone(method: str, ranks: list[int], llama: Path, tmp_path: Path) -> None:
    one, other, engine = pair_of(
        make_causal_tables(llama, tmp_path, **{**SMALL, "method": method, "lora": {"ranks": ranks}})
    )
    # the clients hold unequal numbers of texts, so that a step of some has fewer, or none
    assert len({i.example_count for i in one.federation.infos}) > 1
    assert_equal_rounds(one, other)
    assert engine.sizes == [5, 5]


def test_a_classifier_that_reads_the_last_token_sees_the_tokenizer_s_padding(
    llama: Path, tmp_path: Path
) -> None:
    words = ["a fox", "a dog sleeps; the fox does not", "1 + 1 = 2, said the fox, and so did the dog"]
    # its padding is a token with a number of its own, by which transformers finds the last token of a text
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = "~"
    assert tokenizer.pad_token_id
    tokenizer.save_pretrained(base)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"pad_token_id": tokenizer.pad_token_id}))
    # texts of a class have one length, so that those of other clients are padded far
    rows = [{"text": words[i % 3] + f" {i % 7}", "label": i % 3} for i in range(72)]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    tables = make_causal_tables(
        llama,
        tmp_path,
        **{
            **SMALL,
            "lora": {"ranks": [2]},
            "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.2, "min_size": 5},
        },
        data={"source": "text_classes", "path": str(path)},
        language={"path": str(base), "task": "classification"},
        method="fedit",
    )
    for field in ("prompt", "response", "category"):
        del tables["data"][field]
    del tables["language"]["format"]
    one, other, engine = pair_of(tables)
    assert_equal_rounds(one, other)
    assert engine.sizes == [5, 5]


def test_a_missing_text_is_another_one_and_not_an_empty_one() -> None:
    def batch(texts: int) -> Batch:
        x = {n: torch.arange(1, 1 + texts * 3).reshape(texts, 3) for n in ("input_ids", "attention_mask")}
        return Batch(x, x["input_ids"])

    actual = join_batches([batch(3), batch(1)])
    assert actual.mask is not None
    assert actual.mask.tolist() == [[True] * 3, [True, False, False]]
    for t in actual.x.values():
        # without a token to attend to, the softmax of its scores may be NaN, and NaN times a weight of 0 as well
        assert t[1].tolist() == [[1, 2, 3]] * 3


def with_dropout(module: Any) -> None:
    module.base_model.model.model.layers[1].self_attn.attention_dropout = 0.1


def with_hook(module: Any) -> None:
    module.base_model.model.model.norm.register_forward_hook(lambda *_: None)


def with_own_layer(module: Any) -> None:
    class Own(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module.base_model.model.model.norm = Own()


@pytest.mark.parametrize(
    ("change", "tables", "reason"),
    [
        (with_dropout, {}, "self_attn' (LlamaAttention) is not standard"),
        (with_hook, {}, "a hook is registered on a layer"),
        (lambda _: None, {"language": {"gradient_checkpointing": True}}, "gradients are checkpointed"),
        (with_own_layer, {}, "model.norm' (Own) is not standard"),
        (lambda _: None, {"defaults": {"batch_size": 64}}, "tokens of 32 numbers is as fast alone"),
    ],
)  # fmt: skip
def test_what_may_differ_is_trained_alone(
    change: Callable[[Any], None], tables: dict[str, Any], reason: str, llama: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = ExperimentConfig.parse(
        make_causal_tables(
            llama,
            tmp_path,
            **{
                **SMALL,
                "partition": {"clients": 4, "alpha": 100.0},
                **tables,
                "method": "fedit",
                "lora": {"ranks": [2]},
            },
        )
    )
    on, engine = made.federation(), CountingEngine()
    # 8 texts of 24 tokens
    monkeypatch.setattr(trainer, "MAX_BATCHED_STEP", 8 * 24 * 32)
    change(on.architectures["language"].module)
    with caplog.at_level(logging.INFO):
        Run(made.build_method("fedit"), on, made.run, engine).step()
    assert engine.sizes == []
    assert reason in caplog.text
