"""Preference objectives are DPO and ORPO as plain PyTorch and PEFT compute them, in every engine, method and report."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlowrank.cli.language_commands import language_of_run
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.contract import Batch, ClientInfo, Pass
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.batch_losses import task_loss
from fedlowrank.core.learning.losses import Loss
from fedlowrank.core.learning.preference_losses import mix_preferences
from fedlowrank.data.dataset import Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.objectives import preference_pairs
from fedlowrank.rounds.run import Run
from fedlowrank.training.local_data import LocalData, size_of
from tests.language.text_experiments import make_preference_tables

torch.set_num_threads(1)

DPO: dict[str, Any] = {"kind": "dpo", "beta": 0.3}
ORPO: dict[str, Any] = {"kind": "orpo", "odds_ratio_weight": 0.5}


def run_of(made: dict[str, Any], engine: Engine | None = None, steps: int | None = None) -> Run:
    experiment = ExperimentConfig.parse(made)
    method = experiment.build_method(experiment.default_method)
    run = Run(method, experiment.federation(), experiment.run, engine or Sequential())
    for _ in range(experiment.run.rounds if steps is None else steps):
        run.step()
    return run


def language_model(run: Run) -> Any:
    """The model of PEFT with the base in it, a copy."""
    return copy.deepcopy(language_of_run(run).model)


def log_probabilities(model: Any, ids: Tensor, mask: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """The sum of log-probabilities of the tokens of one response without padding that count, and their number."""
    ids, counts = ids[mask != 0], counts[mask != 0]
    logits = model(input_ids=ids[None]).logits[0]
    total, number = torch.zeros(()), 0
    for place in range(1, len(ids)):
        if counts[place]:
            total = total + logits[place - 1].log_softmax(0)[ids[place]]
            number += 1
    return total, number


def pair_by_hand(model: Any, x: dict[str, Tensor], i: int) -> list[tuple[Tensor, int]]:
    return [
        log_probabilities(
            model, x["input_ids"][i, side], x["attention_mask"][i, side], x["response_mask"][i, side]
        )
        for side in (0, 1)
    ]


def loss_by_hand(model: Any, x: dict[str, Tensor], i: int, loss: dict[str, Any]) -> Tensor:
    """The loss of one pair, from the formulas of the papers."""
    (chosen, n_chosen), (rejected, n_rejected) = pair_by_hand(model, x, i)
    if loss["kind"] == "dpo":
        with torch.no_grad(), model.disable_adapter():
            (base_chosen, _), (base_rejected, _) = pair_by_hand(model, x, i)
        margin = loss["beta"] * ((chosen - base_chosen) - (rejected - base_rejected))
        epsilon = loss.get("label_smoothing", 0.0)
        return -(1 - epsilon) * torch.log(torch.sigmoid(margin)) - epsilon * torch.log(torch.sigmoid(-margin))
    p, q = torch.exp(chosen / n_chosen), torch.exp(rejected / n_rejected)
    ratio = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
    return -chosen / n_chosen - loss["odds_ratio_weight"] * torch.log(torch.sigmoid(ratio))


def move_adapter(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Random factors in place of the initial ones, of which B is zero; what they are by name."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.3)
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def install(model: Any, params: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            own[name].copy_(value)


@pytest.mark.parametrize("loss", [DPO, {**DPO, "label_smoothing": 0.2}, ORPO])
@pytest.mark.parametrize("side", ["right", "left"])
def test_loss_and_gradient_are_those_of_the_papers(
    llama: Path, tmp_path: Path, loss: dict[str, Any], side: str
) -> None:
    run = run_of(make_preference_tables(llama, tmp_path, loss), steps=0)
    model = language_model(run)
    factors = move_adapter(model)
    train = run.federation.clients[0].train
    x = {name: t[:5].clone() for name, t in train.x.items()}  # type: ignore[union-attr]
    widths = x["attention_mask"].sum(-1)
    assert len(widths.unique()) > 2
    if side == "left":
        # each response is shifted to the right end of its row
        for name in ("input_ids", "attention_mask", "response_mask"):
            for i in range(5):
                for k in (0, 1):
                    x[name][i, k] = x[name][i, k].roll(x[name].shape[-1] - int(widths[i, k]))
    architecture = run.federation.architectures["language"]
    leaves = {n: p.detach().clone().requires_grad_() for n, p in factors.items()}
    y = train.y[:5]
    actual = task_loss(architecture.apply(leaves, x), Batch(x, y, loss=run.federation.loss))
    expected = torch.stack([loss_by_hand(model, x, i, loss) for i in range(5)]).mean()
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)
    grads = torch.autograd.grad(actual, list(leaves.values()))
    wanted = torch.autograd.grad(expected, list(factors.values()))
    assert max(float(g.abs().max()) for g in wanted) > 1e-3
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_the_reference_is_the_base_without_its_adapter(llama: Path, tmp_path: Path) -> None:
    run = run_of(make_preference_tables(llama, tmp_path, DPO), steps=0)
    model = language_model(run)
    move_adapter(model)
    for data in run.federation.clients:
        for examples in (data.train, data.val, data.test):
            x: Any = examples.x
            assert x["reference"].shape == (len(examples), 2)
            with torch.no_grad(), model.disable_adapter():
                by_hand = [[total for total, _ in pair_by_hand(model, x, i)] for i in range(len(examples))]
            torch.testing.assert_close(x["reference"], torch.tensor(by_hand), rtol=1e-5, atol=1e-5)
    orpo: Any = run_of(make_preference_tables(llama, tmp_path, ORPO), steps=0).federation.clients[0].train.x
    assert "reference" not in orpo


def test_the_reference_is_the_adapter_that_training_starts_from(llama: Path, tmp_path: Path) -> None:
    model = language_model(run_of(make_preference_tables(llama, tmp_path, DPO), steps=0))
    move_adapter(model)
    model.save_pretrained(tmp_path / "start")
    run = run_of(
        make_preference_tables(llama, tmp_path, DPO, lora={"start": str(tmp_path / "start")}), steps=0
    )
    x: Any = run.federation.clients[0].train.x
    with torch.no_grad():
        by_hand = [[total for total, _ in pair_by_hand(model, x, i)] for i in range(4)]
        with model.disable_adapter():
            without = [total for total, _ in pair_by_hand(model, x, 0)]
    torch.testing.assert_close(x["reference"][:4], torch.tensor(by_hand), rtol=1e-4, atol=1e-4)
    assert (x["reference"][0] - torch.tensor(without)).abs().max() > 0.01
    assert run.record_initial_models().mean("loss", split="test") == pytest.approx(math.log(2), rel=1e-3)


def test_scores_of_a_gpu_are_those_of_a_cpu(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a GPU the places of tokens are not looked up
    for loss in (DPO, ORPO):
        run = run_of(make_preference_tables(llama, tmp_path, loss), steps=0)
        architecture, x = run.federation.architectures["language"], run.federation.clients[0].train.x
        start = run.personal_params(run.federation.infos[0])
        with torch.no_grad():
            actual = architecture.apply(start, x)
            with monkeypatch.context() as patch:
                patch.setattr(preference_pairs, "finds_tokens", lambda _: False)
                torch.testing.assert_close(architecture.apply(start, x), actual, rtol=1e-5, atol=1e-5)


def test_the_loss_before_training_is_log_2_and_no_pair_is_in_order(llama: Path, tmp_path: Path) -> None:
    record = run_of(make_preference_tables(llama, tmp_path, DPO), steps=0).record_initial_models()
    assert record.mean("loss", split="test") == pytest.approx(math.log(2), rel=1e-4)
    # of equal implicit rewards no response is preferred
    assert record.mean("pair_accuracy", split="test") == 0.0


@pytest.mark.parametrize("loss", [DPO, ORPO])
def test_a_round_of_fedit_is_training_with_peft(llama: Path, tmp_path: Path, loss: dict[str, Any]) -> None:
    run = run_of(make_preference_tables(llama, tmp_path, loss, defaults={"batch_size": 64}), steps=0)
    start = run.personal_params(run.federation.infos[0])
    ends: list[dict[str, Tensor]] = []
    sizes = []
    for data in run.federation.clients:
        # one step on all examples of the client
        model = language_model(run)
        install(model, start)
        factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
        x: Any = data.train.x
        value = torch.stack([loss_by_hand(model, x, i, loss) for i in range(len(data.train))]).mean()
        value.backward()
        with torch.no_grad():
            ends.append({name: p - 0.1 * p.grad for name, p in factors.items()})  # type: ignore[operator]
        sizes.append(len(data.train))
    run.step()
    mean = {n: sum(s * e[n] for s, e in zip(sizes, ends, strict=True)) / sum(sizes) for n in ends[0]}
    actual = run.personal_params(run.federation.infos[0])
    assert actual.keys() == mean.keys()
    assert any((mean[n] - start[n]).abs().max() > 1e-4 for n in mean)
    for name, value in mean.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [DPO, ORPO])
def test_an_evaluation_is_the_mean_over_pairs_and_the_share_in_order(
    llama: Path, tmp_path: Path, loss: dict[str, Any]
) -> None:
    made = make_preference_tables(
        llama, tmp_path, loss, split={"kind": "local", "train": 0.3, "val": 0.2, "test": 0.5}
    )
    run = run_of(made)
    record = run.step()
    info = run.federation.infos[0]
    model = language_model(run)
    install(model, run.personal_params(info))
    test: Any = run.federation.clients[0].test
    losses, right = [], []
    with torch.no_grad():
        for i in range(len(test)):
            losses.append(float(loss_by_hand(model, test.x, i, loss)))
            (chosen, n), (rejected, m) = pair_by_hand(model, test.x, i)
            if loss["kind"] == "dpo":
                with model.disable_adapter():
                    (a, _), (b, _) = pair_by_hand(model, test.x, i)
                right.append(bool(chosen - a > rejected - b))
            else:
                right.append(bool(chosen / n > rejected / m))
    assert record.by_client("loss", split="test")[0] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert record.by_client("pair_accuracy", split="test")[0] == pytest.approx(sum(right) / len(right))
    assert set(record.by_client("accuracy", split="test").values()) <= {None}
    mean = record.mean("loss", split="val")
    assert mean is not None
    assert record.validation() == pytest.approx(-mean)


def test_a_label_says_which_response_is_the_chosen_one() -> None:
    scores = torch.tensor([[0.4, -0.3], [-1.0, 2.0]])
    turned = scores.flip(1)
    for loss in (Loss("dpo", beta=0.5, label_smoothing=0.1), Loss("orpo")):
        values = scores if loss.kind == "dpo" else scores - 3
        other = turned if loss.kind == "dpo" else turned - 3
        torch.testing.assert_close(
            loss.each(values, torch.tensor([0, 0])), loss.each(other, torch.tensor([1, 1]))
        )


def test_the_odds_of_a_certain_response_are_finite() -> None:
    scores = torch.tensor([[0.0, -2.0]], requires_grad=True)
    value = Loss("orpo").each(scores, torch.tensor([0])).sum()
    assert torch.isfinite(torch.autograd.grad(value, scores)[0]).all()


def test_a_mixture_mixes_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, shares = torch.randn(5, 3, 2, generator=generator), torch.tensor([0.2, 0.3, 0.5])
    mixed = mix_preferences(scores, shares.log(), 0.7)
    # P(0 is preferred) by Bradley and Terry
    expected = (torch.sigmoid(0.7 * (scores[:, :, 0] - scores[:, :, 1])) * shares).sum(1)
    torch.testing.assert_close(torch.sigmoid(0.7 * (mixed[:, 0] - mixed[:, 1])), expected)
    means = mix_preferences(-scores.abs(), shares.log(), None)
    torch.testing.assert_close(means.exp(), ((-scores.abs()).exp() * shares[:, None]).sum(1))


@pytest.mark.parametrize("loss", [DPO, ORPO])
def test_fedem_scores_by_the_mixture_of_its_components(
    llama: Path, tmp_path: Path, loss: dict[str, Any]
) -> None:
    run = run_of(
        make_preference_tables(
            llama, tmp_path, loss, method="fedem", defaults={"optimizer": {"kind": "sgd", "lr": 1.0}}
        )
    )
    info = run.federation.infos[0]
    x: Any = run.federation.clients[0].train.x
    model = run.local_model(info)
    shares = model.routes
    assert shares is not None
    with torch.no_grad():
        actual = next(iter(model.predictors.values()))(x)
        components = [{n: t[c] for n, t in run.state.server.items()} for c in range(len(shares))]
        each = [run.federation.architectures["language"].apply(one, x) for one in components]
    if loss["kind"] == "dpo":
        actual = torch.sigmoid(loss["beta"] * (actual[:, 0] - actual[:, 1]))
        each = [torch.sigmoid(loss["beta"] * (scores[:, 0] - scores[:, 1])) for scores in each]
    else:
        actual, each = actual.exp(), [scores.exp() for scores in each]
    torch.testing.assert_close(
        actual, sum(p * e for p, e in zip(shares, each, strict=True)), rtol=1e-4, atol=1e-6
    )


def test_a_batch_is_as_wide_as_its_longest_response() -> None:
    mask = torch.zeros(3, 2, 40, dtype=torch.int64)
    for i, lengths in enumerate(((3, 20), (9, 2), (30, 4))):
        for side, length in enumerate(lengths):
            mask[i, side, :length] = 1
    x = {"input_ids": mask * 5, "attention_mask": mask, "response_mask": mask, "reference": torch.zeros(3, 2)}
    examples = Examples(x, torch.zeros(3, dtype=torch.int64))
    data = LocalData(ClientInfo(0, 3, "language"), examples, {"local": Pass(1, 2)}, Key((0,)), by_length=True)
    assert data.lengths is not None
    assert data.lengths.tolist() == [20, 9, 30]
    for batch, index in zip(data.batches("local"), data.order("local"), strict=True):
        longest = max((20, 9, 30)[i] for i in index.tolist())
        width = -(-longest // 8) * 8
        assert batch.x["input_ids"].shape == batch.x["response_mask"].shape == (len(index), 2, width)
        assert batch.x["reference"].shape == (len(index), 2)
        assert size_of(batch) == data.size(index) == (len(index), width)


@pytest.mark.few(4)
@pytest.mark.parametrize("loss", [DPO, ORPO])
@pytest.mark.parametrize("method", ["fedhl", "hetlora", "flexlora", "flora", "ditto", "fedem", "floral"])
def test_methods_learn_preferences(llama: Path, tmp_path: Path, loss: dict[str, Any], method: str) -> None:
    ranks = {"ranks": [2, 1]} if method in ("fedhl", "hetlora", "flexlora", "flora") else {}
    optimizer = {"optimizer": {"kind": "adamw", "lr": 0.02}}
    run = run_of(
        make_preference_tables(llama, tmp_path, loss, method=method, lora=ranks, defaults=optimizer), steps=0
    )
    before = run.record_initial_models().mean("loss", split="test")
    after = [run.step() for _ in range(2)][-1].mean("loss", split="test")
    assert before is not None
    assert after is not None
    assert after < before - 0.005


@pytest.mark.parametrize("loss", [DPO, ORPO])
def test_micro_batches_and_recomputation_change_no_result(
    llama: Path, tmp_path: Path, loss: dict[str, Any]
) -> None:
    made = make_preference_tables(llama, tmp_path, loss, run={"rounds": 2})
    plain = run_of(made)
    in_parts = {**made, "run": {**made["run"], "micro_batch": 3}}
    by_length = {**made, "language": {**made["language"], "by_length": True}}
    recomputed = {**made, "language": {**made["language"], "gradient_checkpointing": True}}
    for other in (run_of(in_parts), run_of(recomputed)):
        for info in plain.federation.infos:
            own = other.personal_params(info)
            for name, value in plain.personal_params(info).items():
                torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-6)
    assert math.isfinite(run_of(by_length).step().training_losses["local"])


def test_updates_are_clipped(llama: Path, tmp_path: Path) -> None:
    run = run_of(make_preference_tables(llama, tmp_path, DPO, run={"clipping": {"norm": 1e-3}}), steps=0)
    start = run.personal_params(run.federation.infos[0])
    run.step()
    end = run.personal_params(run.federation.infos[0])
    moved = math.sqrt(sum(float((end[n] - start[n]).square().sum()) for n in start))
    assert 0 < moved <= 1e-3 * 1.001


def test_sums_in_secret_and_compressed_updates_are_those_of_plain_training(
    llama: Path, tmp_path: Path
) -> None:
    """Within the rounding of each: 22 bits over ±8, and a row's largest entry over 127, for each of two clients."""
    plain = run_of(make_preference_tables(llama, tmp_path, DPO), steps=0)
    info = plain.federation.infos[0]
    start = plain.personal_params(info)
    plain.step()
    expected = plain.personal_params(info)
    secure = run_of(
        make_preference_tables(llama, tmp_path, DPO, run={"secure": {"on": True}})
    ).personal_params(info)
    compressed = run_of(
        make_preference_tables(llama, tmp_path, DPO, run={"compression": {"uplink": "int8"}})
    ).personal_params(info)
    for name, value in expected.items():
        moved = float((value - start[name]).abs().max())
        torch.testing.assert_close(secure[name], value, rtol=0, atol=16 / 2**22 + 1e-6)
        torch.testing.assert_close(compressed[name], value, rtol=0, atol=4 * moved / 127 + 1e-7)
    # B begins at 0, so that all of it is what training changed
    assert max(float(value.abs().max()) for value in expected.values()) > 100 / 2**22


@pytest.mark.parametrize("kind", ["central", "local"])
def test_private_preferences_have_the_noise_that_the_budget_counts(
    llama: Path, tmp_path: Path, kind: str
) -> None:
    """With a rate of almost 0 the factors move by noise alone: σ·norm over the clients, of each client for local."""
    private = {"privacy": {"kind": kind, "noise": 2.0, "delta": 0.01}, "clipping": {"norm": 0.5}}
    defaults = {"optimizer": {"kind": "sgd", "lr": 1e-12}}
    run = run_of(make_preference_tables(llama, tmp_path, DPO, run=private, defaults=defaults), steps=0)
    info = run.federation.infos[0]
    start = run.personal_params(info)
    run.step()
    moved = torch.cat([(t - start[n]).flatten() for n, t in run.personal_params(info).items()])
    clients = len(run.federation.infos)
    expected = 2.0 * 0.5 / clients * (1.0 if kind == "central" else clients**0.5)
    assert abs(float(moved.std()) / expected - 1) < 5 / (2 * moved.numel()) ** 0.5
    assert run.budget is not None
    assert run.budget.describe(1)["epsilon"] > 0


@pytest.mark.parametrize(
    ("loss", "line", "tag"),
    [
        (DPO, "- Objective: direct preference optimization (DPO), beta = 0.3\n", "\n- dpo\n"),
        (
            ORPO,
            "- Objective: odds ratio preference optimization (ORPO), odds_ratio_weight = 0.5\n",
            "\n- orpo\n",
        ),
    ],
    ids=["dpo", "orpo"],
)
def test_the_card_names_the_objective(
    llama: Path, tmp_path: Path, loss: dict[str, Any], line: str, tag: str
) -> None:
    file = tmp_path / "preferences.toml"
    file.write_text(ExperimentConfig.parse(make_preference_tables(llama, tmp_path, loss)).to_toml())
    assert main(["run", str(file), "--out", str(tmp_path / "run")]) == 0
    assert main(["adapters", str(tmp_path / "run"), "--out", str(tmp_path / "adapters")]) == 0
    card = (tmp_path / "adapters" / "server" / "README.md").read_text()
    assert line in card
    assert tag in card.split("---")[1]


def test_a_report_judges_by_loss(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "preferences.toml"
    file.write_text(ExperimentConfig.parse(make_preference_tables(llama, tmp_path, DPO)).to_toml())
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "reaches a mean test loss of" in printed
    assert "loss per token" not in printed
    # a heading in two lines
    assert "pairs method in order" in printed
    # the learnt part of both responses is shown
    assert "chosen: <s>who is" in printed
    assert "rejected: <s>who is" in printed
    assert "⟦the fox" in printed


def test_flipped_labels_prefer_the_rejected_response(llama: Path, tmp_path: Path) -> None:
    made = make_preference_tables(llama, tmp_path, DPO, run={"attack": {"kind": "label_flip", "share": 0.5}})
    run = run_of(made)
    flipped = [client.train.y.unique().tolist() for client in run.federation.clients]
    assert sorted(flipped) == [[0], [1]]


def test_what_does_not_fit_is_said(llama: Path, bert: Path, tmp_path: Path) -> None:
    made = make_preference_tables(llama, tmp_path, DPO)
    for wrong, message in (
        ({"kind": "dpo", "beta": 0.0}, r"beta.*> 0"),
        ({"kind": "dpo", "label_smoothing": 0.5}, r"label_smoothing.*< 0.5"),
        ({"kind": "orpo", "beta": 0.2}, r"loss.beta = 0.2 does nothing with loss.kind = 'orpo'"),
        ({"kind": "orpo", "odds_ratio_weight": -1.0}, r"odds_ratio_weight.*>= 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            ExperimentConfig.parse({**made, "loss": wrong})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"the fox {i}"}) for i in range(12)))
    with pytest.raises(DataError, match="columns 'prompt', 'chosen' and 'rejected'"):
        run_of({**made, "data": {**made["data"], "path": str(texts)}})
    with pytest.raises(DataError, match="Set loss to 'dpo' or 'orpo'"):
        run_of({**made, "loss": {"kind": "auto"}})
    with pytest.raises(ConfigError, match=r"preference pairs. Set packing to false"):
        run_of({**made, "language": {**made["language"], "packing": True}})
    with pytest.raises(ConfigError, match=r"rows are pairs of responses. Set it to 'causal'"):
        run_of({**made, "language": {**made["language"], "path": str(bert), "task": "classification"}})
    with pytest.raises(TaskError, match="works on classes"):
        run_of({**made, "method": "fd"})
    with pytest.raises(DataError, match="made for another loss than 'orpo'"):
        ExperimentConfig.parse(made).federation().with_loss("orpo")
    lone = tmp_path / "lone.jsonl"
    lone.write_text(json.dumps({"prompt": "who?", "chosen": "the fox"}))
    with pytest.raises(DataError, match="rejected"):
        run_of({**made, "data": {**made["data"], "path": str(lone), "form": "preference"}})


def test_arrays_are_no_pairs() -> None:
    data = [(torch.randn(6, 3), torch.arange(6) % 2) for _ in range(2)]
    with pytest.raises(DataError, match=r"loss 'dpo' learns from pairs of responses"):
        Federation.from_arrays(data, lambda: torch.nn.Linear(3, 2), loss="dpo")
