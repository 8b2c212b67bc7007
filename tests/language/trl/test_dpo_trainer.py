"""TRL's ``DPOTrainer`` takes the steps of a pass over pairs: the factors of plain PyTorch and PEFT, and the base as reference."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.data.dataset import Examples
from fedlowrank.language.trl.trainer_rows import list_pairs
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_preference_tables, run_rounds

torch.set_num_threads(1)
trl = pytest.importorskip("trl")

DPO: dict[str, Any] = {"kind": "dpo", "beta": 0.3}


def tables_of(llama: Path, folder: Path, trainer: str, **more: Any) -> dict[str, Any]:
    tables = make_preference_tables(llama, folder, more.pop("loss", DPO), **more)
    tables["language"]["trainer"] = trainer
    return tables


def factors_of(run: Run) -> list[dict[str, Tensor]]:
    return [dict(run.personal_params(info)) for info in run.federation.infos]


def response_sum(model: Any, ids: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    """log π of one response: the sum over its tokens that count."""
    ids, counts = ids[mask != 0], counts[mask != 0]
    log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return (log_p[torch.arange(len(ids) - 1), ids[1:]] * counts[1:]).sum()


def dpo_by_hand(model: Any, x: dict[str, Tensor], beta: float) -> Tensor:
    """Equation 7 of Rafailov et al. 2023, the mean over a batch; the reference is PEFT's model with its adapter disabled."""
    losses = []
    for i in range(len(x["input_ids"])):
        rows = [(x["input_ids"][i, k], x["attention_mask"][i, k], x["response_mask"][i, k]) for k in (0, 1)]
        chosen, rejected = (response_sum(model, *row) for row in rows)
        with torch.no_grad(), model.disable_adapter():
            base_chosen, base_rejected = (response_sum(model, *row) for row in rows)
        margin = beta * ((chosen - base_chosen) - (rejected - base_rejected))
        losses.append(-torch.log(torch.sigmoid(margin)))
    return torch.stack(losses).mean()


def test_two_rounds_of_one_step_are_sgd_on_the_loss_of_the_paper(llama: Path, tmp_path: Path) -> None:
    """In the second round the factors are no longer the initial ones, and the reference is still the base."""
    lr, more = 2.0, {"defaults": {"batch_size": 64, "epochs": 1, "optimizer": {"kind": "sgd", "lr": 2.0}}}
    run = run_rounds(tables_of(llama, tmp_path, "trl", method="standalone", **more), 0)
    (architecture,) = run.federation.architectures.values()
    by_hand = copy.deepcopy(architecture.module)
    run.step()
    run.step()
    for info, actual in zip(run.federation.infos, factors_of(run), strict=True):
        model: Any = copy.deepcopy(by_hand)
        trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
        first = {n: p.detach().clone() for n, p in trained.items()}
        x: Any = run.federation.clients[info.id].train.x
        for _ in range(2):
            loss = dpo_by_hand(model, x, DPO["beta"])
            with torch.no_grad():
                for p, g in zip(
                    trained.values(), torch.autograd.grad(loss, list(trained.values())), strict=True
                ):
                    p -= lr * g
        moved = max(float((p - first[n]).detach().abs().max()) for n, p in trained.items())
        assert moved > 1e-2
        assert actual.keys() == trained.keys()
        for name, p in trained.items():
            torch.testing.assert_close(actual[name], p.detach(), rtol=1e-3, atol=2e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedit", {}),
        ("fedhl", {"lora": {"ranks": [2, 1]}}),
        ("fedit", {"language": {"context": 14, "truncate": "left"}}),
        ("fedit", {"language": {"loss_on": "all"}}),
        (
            "fedit",
            {"defaults": {"batch_size": 4, "drop_last": True, "epochs": 2}, "run": {"micro_batch": 2}},
        ),
    ],
)
def test_factors_are_those_of_own_steps(
    method: str, more: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    more = {"run": {"rounds": 2, **more.get("run", {})}, **{n: v for n, v in more.items() if n != "run"}}
    own, other = (
        run_rounds(tables_of(llama, tmp_path, trainer, method=method, **more), 2)
        for trainer in ("own", "trl")
    )
    for one, another in zip(factors_of(own), factors_of(other), strict=True):
        assert one.keys() == another.keys()
        for name, value in one.items():
            torch.testing.assert_close(another[name], value, rtol=1e-3, atol=2e-5)


def test_nothing_of_the_trainer_stays_in_the_model(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(tables_of(llama, tmp_path, "trl", lora={"init_lora_weights": "pissa"}), 0)
    (architecture,) = run.federation.architectures.values()
    module: Any = architecture.module
    before = {n: t.clone() for n, t in module.state_dict().items()}
    config = copy.deepcopy(module.config.to_dict())
    run.step()
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    assert list(module.peft_config) == ["default"]
    assert "forward" not in vars(module.get_base_model())
    assert module.config.to_dict() == config


def test_rows_are_those_of_trl(llama: Path, tmp_path: Path) -> None:
    """TRL's own collator makes of them the tokens and masks of the examples; a pair may be in the other order."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    run = run_rounds(tables_of(llama, tmp_path, "own"), 0)
    train = run.federation.clients[0].train
    x: Any = train.x
    y = torch.tensor([0, 1] * len(train))[: len(train)]
    rows = list_pairs(Examples(x, y))
    batch = DataCollatorForPreference(pad_token_id=0)(rows)
    half = len(train)
    for i in range(half):
        for side, k in ((0, int(y[i])), (1, 1 - int(y[i]))):
            real = x["attention_mask"][i, k].bool()
            actual = batch["attention_mask"][side * half + i].bool()
            assert torch.equal(
                batch["input_ids"][side * half + i][actual].long(), x["input_ids"][i, k][real].long()
            )
            assert torch.equal(
                batch["completion_mask"][side * half + i][actual].long(),
                x["response_mask"][i, k][real].long(),
            )
            name = ("ref_chosen_logps", "ref_rejected_logps")[side]
            assert float(batch[name][i]) == float(x["reference"][i, k])


def write_turns(folder: Path) -> Path:
    """Conversations of two answers each, between which tokens of a response do not count."""
    rows = []
    for i in range(8):
        texts = [
            [
                {"role": "user", "content": f"who is {i}?"},
                {"role": "assistant", "content": words},
                {"role": "user", "content": "and then?"},
                {"role": "assistant", "content": words * 2},
            ]
            for words in ("the fox", "a dog " * (1 + i % 3))
        ]
        rows.append({"prompt": texts[0][:1], "chosen": texts[0][1:], "rejected": texts[1][1:]})
    path = folder / "turns.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_tokens_between_two_answers_do_not_count(llama: Path, tmp_path: Path) -> None:
    base, runs = shutil.copytree(llama, tmp_path / "base"), []
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(base)
    for trainer in ("own", "trl"):
        tables = tables_of(base, tmp_path, trainer)
        tables["language"] |= {"format": "chat", "context": 160}
        tables["data"]["path"] = str(write_turns(tmp_path))
        runs.append(run_rounds(tables, 1))
    x: Any = runs[0].federation.clients[0].train.x
    jumps = (x["response_mask"].diff(dim=-1) > 0).sum(-1)
    assert int(jumps.max()) == 2
    for one, another in zip(*map(factors_of, runs), strict=True):
        for name, value in one.items():
            torch.testing.assert_close(another[name], value, rtol=1e-3, atol=2e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "orpo": ({"loss": {"kind": "orpo"}}, r"loss\.kind = 'dpo'"),
    "smoothing": ({"loss": {**DPO, "label_smoothing": 0.1}}, r"loss\.label_smoothing = 0"),
    "beta": ({"language": {"trainer_args": {"beta": 0.5}}}, r"loss\.beta"),
    "reference": ({"language": {"trainer_args": {"sync_ref_model": True}}}, "as the reference"),
    "field": ({"language": {"trainer_args": {"dataset_kwarg": {}}}}, "dataset_kwarg has no effect"),
    "smoothing of labels": (
        {"language": {"trainer_args": {"label_smoothing_factor": 0.3}}},
        "label_smoothing_factor has no effect here: TRL reads it for texts",
    ),
    "temperature of another loss": (
        {"language": {"trainer_args": {"discopop_tau": 0.5, "loss_type": ["hinge"]}}},
        r"discopop_tau = 0\.5 has no effect without loss_type = \['discopop'\]",
    ),
    "coefficient of another divergence": (
        {"language": {"trainer_args": {"f_alpha_divergence_coef": 0.3}}},
        r"has no effect without f_divergence_type = 'alpha_divergence'",
    ),
    "parts of responses": (
        {"language": {"trainer_args": {"ld_alpha": 0.5}}},
        "the reference here is for whole responses",
    ),
    "dropout": ({"language": {"trainer_args": {"disable_dropout": True}}}, r"lora\.lora_dropout"),
    "parts": (
        {"defaults": {"batch_size": 3, "drop_last": True}, "run": {"micro_batch": 2}},
        "parts of unequal size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_trl_cannot_do_with_pairs_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    changed, words = REFUSED[name]
    with pytest.raises((ConfigError, TaskError), match=words):
        run_rounds(tables_of(llama, tmp_path, "trl", **changed), 1)


def test_a_weight_of_the_loss_multiplies_its_gradient(llama: Path, tmp_path: Path) -> None:
    """One step of SGD is three times as long."""
    starts, steps = [], []
    for arguments in ({}, {"loss_weights": [3.0]}):
        tables = tables_of(
            llama,
            tmp_path,
            "trl",
            language={"trainer_args": arguments},
            partition={"kind": "iid", "clients": 1},
            defaults={"batch_size": 64, "epochs": 1, "optimizer": {"kind": "sgd", "lr": 0.1}},
        )
        run = run_rounds(tables, 0)
        starts.append(factors_of(run)[0])
        run.step()
        steps.append({name: value - starts[-1][name] for name, value in factors_of(run)[0].items()})
    assert any(step.abs().max() > 1e-4 for step in steps[0].values())
    for name, step in steps[0].items():
        torch.testing.assert_close(steps[1][name], 3 * step, rtol=1e-3, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "arguments",
    [
        {"use_weighting": True},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        {"loss_type": ["discopop"], "discopop_tau": 0.5},
    ],
    ids=str,
)
def test_fields_of_trl_s_losses_have_an_effect(
    arguments: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    runs = [
        run_rounds(tables_of(llama, tmp_path, "trl", language={"trainer_args": changes}), 2)
        for changes in ({}, arguments)
    ]
    plain, changed = (factors_of(run)[0] for run in runs)
    assert any((changed[name] - value).abs().max() > 1e-6 for name, value in plain.items())


def test_pairs_are_padded_to_a_multiple(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    compute_loss = trl.DPOTrainer.compute_loss

    def record_width(self: Any, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        widths.append(inputs["input_ids"].shape[1])
        return compute_loss(self, model, inputs, *args, **more)

    monkeypatch.setattr(trl.DPOTrainer, "compute_loss", record_width)
    factors = []
    for arguments in ({}, {"pad_to_multiple_of": 16}):
        widths.clear()
        run = run_rounds(tables_of(llama, tmp_path, "trl", language={"trainer_args": arguments}), 1)
        assert widths
        assert all(width % 16 == 0 for width in widths) == bool(arguments)
        factors.append(factors_of(run)[0])
    for name, value in factors[0].items():
        torch.testing.assert_close(factors[1][name], value, rtol=1e-3, atol=2e-5)


def test_another_loss_of_trl_is_not_compared(llama: Path, tmp_path: Path) -> None:
    """``trainer_args.loss_type`` chooses one of TRL's losses of pairs."""
    runs = [
        run_rounds(tables_of(llama, tmp_path, "trl", language={"trainer_args": arguments}), 1)
        for arguments in ({}, {"loss_type": ["hinge"]})
    ]
    # at the initial factors the hinge has twice the slope of the logistic loss
    one, two = (factors_of(run)[0] for run in runs)
    assert not all(torch.allclose(value, two[name]) for name, value in one.items())
