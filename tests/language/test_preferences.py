"""DPO and ORPO learn from pairs of responses as their formulas say, through every engine and LoRA method."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.nn import functional

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.contract.task import Batch
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.learning.batch_losses import task_loss
from fedlowrank.core.learning.losses import Loss
from fedlowrank.engines import ENGINES
from fedlowrank.rounds.run import Run

torch.set_num_threads(1)

ROWS = [
    ("who is the fox?", "the quick brown fox", "a dog"),
    ("why?", "1 + 1 = 2, said the fox", "a lazy dog sleeps; the fox does not"),
    ("the dog", "sleeps", "jumps over the lazy fox"),
]


def write_rows(folder: Path, clients: int = 2, count: int = 9) -> str:
    folder.mkdir()
    for c in range(clients):
        rows = []
        for i in range(count):
            prompt, chosen, rejected = ROWS[i % 3]
            rows.append({"prompt": f"{prompt} {i}", "chosen": chosen, "rejected": rejected})
        (folder / f"site{c}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def experiment(base: Path, rows: str, loss: Any, method: str = "fedit", **more: Any) -> ExperimentConfig:
    tables: dict[str, Any] = {
        "name": "pairs",
        "method": method,
        "data": {"source": "text", "path": rows, "client_by_file": True, "normalize": "none"},
        "partition": {"kind": "natural"},
        "language": {"path": str(base), "context": 48, "format": "plain"},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "loss": loss,
        "run": {"rounds": 1},
        "defaults": {"steps": 2, "batch_size": 3, "optimizer": {"kind": "sgd", "lr": 0.5}},
        "split": {"kind": "local", "train": 0.7, "val": 0.0, "test": 0.3},
    }
    for name, value in more.items():
        tables[name] = {**tables.get(name, {}), **value}
    return ExperimentConfig.parse(tables)


def make_run(config: ExperimentConfig, engine: str = "sequential") -> Run:
    return Run(config.build_method(config.default_method), config.federation(), config.run, ENGINES[engine]())


def hand_log_probabilities(model: Any, ids: list[int], labels: list[int]) -> torch.Tensor:
    """Of the labelled tokens of one text without padding, one by one."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    found = [
        logits[t - 1].log_softmax(-1)[label] for t, label in enumerate(labels) if t > 0 and label != -100
    ]
    return torch.stack(found)


def responses(x: dict[str, torch.Tensor], row: int, which: int) -> tuple[list[int], list[int]]:
    mask = x["attention_mask"][row, which] == 1
    return x["input_ids"][row, which][mask].tolist(), x["labels"][row, which][mask].tolist()


def plain_model(base: Path, params: dict[str, torch.Tensor], language: Any) -> Any:
    """The base in plain PEFT with the factors of a run."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    made = peft.get_peft_model(model, language.model.peft_config["default"])
    own = dict(made.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            own[name].copy_(value)
    return made.eval()


def test_the_dpo_loss_is_that_of_two_passes_by_hand(llama: Path, tmp_path: Path) -> None:
    config = experiment(
        llama, write_rows(tmp_path / "rows"), {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.1}
    )
    run = make_run(config)
    run.start()
    run.step()
    federation = run.federation
    params = run.personal(federation.infos[0])
    examples = federation.clients[0].train
    model = federation.architectures["language"]
    batch = Batch(examples.x, examples.y, loss=federation.loss)
    found = task_loss(model.apply(params, examples.x), batch)
    plain = plain_model(llama, params, federation.companion)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    expected, right = [], 0
    with torch.no_grad():
        for row in range(len(examples)):
            ratios = []
            for which in range(2):
                text = responses(examples.x, row, which)
                ratio = hand_log_probabilities(plain, *text).sum() - hand_log_probabilities(base, *text).sum()
                ratios.append(float(ratio))
            margin = 0.3 * (ratios[0] - ratios[1])
            right += margin > 0
            sigmoid = 1 / (1 + math.exp(-margin))
            expected.append(-0.9 * math.log(sigmoid) - 0.1 * math.log(1 - sigmoid))
    assert float(found) == pytest.approx(sum(expected) / len(expected), abs=2e-5)
    assert abs(float(found) - math.log(2)) > 1e-3  # the adapter moved
    accuracy = (model.apply(params, examples.x).argmax(1) == examples.y).double().mean()
    assert float(accuracy) == right / len(examples)


def test_the_orpo_loss_is_that_of_odds_by_hand(llama: Path, tmp_path: Path) -> None:
    config = experiment(llama, write_rows(tmp_path / "rows"), {"kind": "orpo", "odds_ratio_weight": 0.7})
    run = make_run(config)
    run.start()
    run.step()
    federation = run.federation
    params = run.personal(federation.infos[1])
    examples = federation.clients[1].train
    assert "reference" not in examples.x
    found = task_loss(
        federation.architectures["language"].apply(params, examples.x),
        Batch(examples.x, examples.y, loss=federation.loss),
    )
    plain = plain_model(llama, params, federation.companion)
    expected = []
    with torch.no_grad():
        for row in range(len(examples)):
            means = [
                float(hand_log_probabilities(plain, *responses(examples.x, row, k)).mean()) for k in range(2)
            ]
            odds = [math.exp(m) / (1 - math.exp(m)) for m in means]
            ratio = odds[0] / odds[1]
            expected.append(-means[0] - 0.7 * math.log(ratio / (1 + ratio)))
    assert float(found) == pytest.approx(sum(expected) / len(expected), abs=2e-5)


def test_a_round_of_fedit_is_training_in_plain_peft(llama: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", clients=1)
    config = experiment(llama, rows, {"kind": "dpo"}, defaults={"steps": 1, "batch_size": 100})
    run = make_run(config)
    run.start()
    federation = run.federation
    start = {n: t.clone() for n, t in run.personal(federation.infos[0]).items()}
    examples = federation.clients[0].train
    plain = plain_model(llama, start, federation.companion)
    width = examples.x["input_ids"].shape[-1]
    flat = {n: t.reshape(-1, width) for n, t in examples.x.items() if n != "reference"}
    logits = plain(input_ids=flat["input_ids"], attention_mask=flat["attention_mask"]).logits[:, :-1]
    labels = flat["labels"][:, 1:]
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    total = (picked * (labels >= 0)).sum(1).reshape(-1, 2)
    with plain.disable_adapter(), torch.no_grad():
        logits = plain(input_ids=flat["input_ids"], attention_mask=flat["attention_mask"]).logits[:, :-1]
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    reference = (picked * (labels >= 0)).sum(1).reshape(-1, 2)
    assert torch.allclose(reference, examples.x["reference"], atol=1e-5)
    ratios = total - reference
    loss = -functional.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean()
    own = dict(plain.named_parameters())
    grads = torch.autograd.grad(loss, [own[n] for n in start])
    run.step()
    after = run.personal(federation.infos[0])
    moved = 0.0
    for (name, before), grad in zip(start.items(), grads, strict=True):
        assert torch.allclose(after[name], before - 0.5 * grad, atol=2e-6), name
        moved = max(moved, float((after[name] - before).abs().max()))
    assert moved > 1e-4


@pytest.mark.parametrize(
    "method", ["standalone", "fedit", "hetlora", "flexlora", "flora", "fedhl", "ffa_lora", "fedem"]
)
def test_methods_learn_which_response_is_preferred(method: str, llama: Path, tmp_path: Path) -> None:
    config = experiment(
        llama,
        write_rows(tmp_path / "rows"),
        {"kind": "dpo", "beta": 1.0},
        method,
        lora={"ranks": [4, 2]} if method in ("hetlora", "flexlora", "flora", "fedhl") else {},
        run={"rounds": 3},
        defaults={"steps": 4, "optimizer": {"kind": "adamw", "lr": 0.02}},
    )
    run = make_run(config)
    losses = [next(iter(run.step().loss.values())) for _ in range(3)]
    assert losses[0] < math.log(2) + 0.05
    assert losses[2] < losses[0] - 0.02


def test_engines_agree(llama: Path, tmp_path: Path) -> None:
    config = experiment(llama, write_rows(tmp_path / "rows"), {"kind": "orpo"})
    found = []
    for engine in ("sequential", "vectorized"):
        run = make_run(config, engine)
        run.start()
        run.step()
        found.append(run.personal(run.federation.infos[0]))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-5), name


def test_padding_and_micro_batches_change_nothing(llama: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    found = []
    for run_settings in ({}, {"micro_batch": 1}):
        run = make_run(experiment(llama, rows, {"kind": "dpo"}, run=run_settings))
        run.start()
        run.step()
        found.append(run.personal(run.federation.infos[0]))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-6), name
    federation = run.federation
    x, model = federation.clients[0].train.x, federation.architectures["language"]
    wider = {
        n: functional.pad(t, (0, 5), value=-100 if n == "labels" else 0) if t.ndim == 3 else t
        for n, t in x.items()
    }
    assert torch.allclose(model.apply(found[0], x), model.apply(found[0], wider), atol=1e-5)


def test_clipped_updates_of_pairs(llama: Path, tmp_path: Path) -> None:
    config = experiment(
        llama,
        write_rows(tmp_path / "rows"),
        {"kind": "dpo", "beta": 1.0},
        run={"clipping": {"norm": 1e-3}},
    )
    run = make_run(config)
    run.start()
    run.step()
    after = run.personal(run.federation.infos[0])
    scale = 8 / 4
    squares = [
        (scale * after[n.replace("lora_A", "lora_B")] @ a).square().sum()
        for n, a in after.items()
        if "lora_A" in n
    ]
    assert 0 < math.sqrt(float(sum(squares))) <= 1e-3 * 1.001


def test_the_model_still_answers(llama: Path, tmp_path: Path) -> None:
    run = make_run(experiment(llama, write_rows(tmp_path / "rows"), {"kind": "orpo"}))
    run.start()
    language = run.federation.companion
    ids = torch.tensor([[1, 5, 6]])
    with language.live(run.personal(run.federation.infos[0])) as model:
        written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    assert written.shape[1] > 3
    assert isinstance(language.model, peft.PeftModelForCausalLM)


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ({"kind": "dpo", "beta": 0.0}, "pairs", "beta must be > 0"),
        ({"kind": "dpo", "label_smoothing": 0.5}, "pairs", "label_smoothing must be"),
        ({"kind": "orpo", "beta": 0.2}, "pairs", "beta"),
        ({"kind": "dpo"}, "talks", "Give rows with 'chosen' and 'rejected'"),
        ("next_token", "pairs", "Set loss.kind = 'dpo' or 'orpo'"),
        ("auto", "pairs", "Set loss.kind = 'dpo' or 'orpo'"),
    ],
)
def test_what_does_not_fit_is_refused(
    loss: Any, data: str, message: str, llama: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows")
    if data == "talks":
        for file in Path(rows).iterdir():
            file.write_text("\n".join(json.dumps({"prompt": "a", "completion": "fox"}) for _ in range(9)))
    with pytest.raises((ConfigError, DataError), match=message):
        experiment(llama, rows, loss).federation()


def test_a_loss_of_pairs_needs_texts() -> None:
    tables = {"data": {"source": "digits"}, "method": "fedavg", "loss": "dpo"}
    with pytest.raises(DataError, match="learns from pairs of responses"):
        ExperimentConfig.parse({"name": "x", **tables}).federation()


def test_smoothed_dpo_by_numbers() -> None:
    scores, y = torch.tensor([[0.3, -0.2], [1.0, 2.0]]), torch.tensor([0, 1])
    loss = Loss("dpo", label_smoothing=0.25).each(scores, y)
    for value, margin in zip(loss.tolist(), (0.5, 1.0), strict=True):
        p = 1 / (1 + math.exp(-margin))
        assert value == pytest.approx(-0.75 * math.log(p) - 0.25 * math.log(1 - p), abs=1e-6)
