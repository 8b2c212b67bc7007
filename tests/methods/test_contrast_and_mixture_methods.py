"""MOON, FedRoD, pFedMe and FedALA: against NumPy, in their limits, and what they refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.counting import Counting
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedala import FedALA
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.methods.moon import MOON
from fedlowrank.methods.pfedme import PFedMe
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from golden import contrast_and_mixture_reference as golden
from golden import reference

from .setting import (
    CLASSES,
    INPUTS,
    SIZES,
    WIDTH,
    Net,
    alike,
    arrays,
    layers,
    plan,
    run_of,
    same,
    start_of,
    states,
    train_data,
)

LR = 0.3
LOCAL = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
F32 = {"dtype": torch.float32}
ABSENT = [sorted(set(range(CLASSES)) - set(y.tolist())) for _, y in train_data(alike())]


def given(run: Run) -> tuple[Any, ...]:
    """What the references know of a run: the initial network, clients, data, the order of examples, the rate."""
    federation = run.federation
    return start_of(federation)[0], len(SIZES), train_data(federation), plan(run), LR


def local_model(run: Run, client: int) -> Any:
    return run.local_model(run.federation.infos[client])


# -- against NumPy -------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.2)])
def test_moon(mu: float, temperature: float, engine: type[Engine]) -> None:
    run = run_of(MOON(mu=mu, temperature=temperature, **LOCAL), alike(), rounds=4, engine=engine, **SAMPLE)
    net, last = golden.moon(*given(run), mu, temperature)
    same(layers(run.state.server), net)
    same([layers(s) for s in states(run)], last)
    # the loss counts: without it the model is another one
    plain = golden.moon(*given(run), 0.0, temperature)[0]
    assert max(np.abs(a[0] - b[0]).max() for a, b in zip(net, plain, strict=True)) > 1e-3


@pytest.mark.few(2)
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod(gamma: float, engine: type[Engine]) -> None:
    assert all(ABSENT)
    run = run_of(FedRoD(gamma=gamma, **LOCAL), alike(), engine=engine, **SAMPLE)
    net, heads = golden.fedrod(*given(run), gamma)
    same(layers(run.state.server), net)
    same([layers(s) for s in states(run)], heads)
    for k, head in enumerate(heads):
        x = run.federation.clients[k].test.x
        inputs, scores = reference.forward(net, x.double().numpy())
        predictors = local_model(run, k).predictors
        assert list(predictors) == ["personal", "global"]
        same(predictors["global"](x), scores)
        same(predictors["personal"](x), scores + inputs[-1] @ head[0][0].T + head[0][1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("steps", "beta", "weighting", "rounds"), [(5, 1.0, "uniform", None), (1, 0.6, "examples", 7)]
)
def test_pfedme(steps: int, beta: float, weighting: Any, rounds: int | None, engine: type[Engine]) -> None:
    method = PFedMe(
        lam=2.0, inner_steps=steps, inner_lr=0.2, beta=beta, weighting=weighting, local_rounds=rounds, **LOCAL
    )
    run = run_of(method, alike(), engine=engine, **SAMPLE)
    # R local rounds at clients of any size: two epochs of the smallest have but four mini-batches
    taken = {len(local) for clients in plan(run) for local, _ in clients.values()}
    assert taken == {rounds} if rounds else len(taken) > 1
    w, personal = golden.pfedme(*given(run), 2.0, steps, 0.2, beta, weighting == "examples")
    same(layers(run.state.server), w)
    same([layers(s) for s in states(run)], personal)


def check_shares(rounds: list[dict[int, list[list[np.ndarray]]]]) -> None:
    """The weights see 80 % of a client's examples, as often as there are epochs, and others in each round."""
    drawn: dict[int, list[frozenset[int]]] = {}
    for clients in rounds:
        for k, (local, later, first) in clients.items():
            assert set(np.concatenate(local)) == set(range(SIZES[k]))
            for steps, epochs in ((later, 1), (first, 2)):
                found, counts = np.unique(np.concatenate(steps), return_counts=True)
                assert len(found) == 4 * SIZES[k] // 5
                assert (counts == epochs).all()
            drawn.setdefault(k, []).append(frozenset(np.concatenate(later).tolist()))
    assert all(len(set(sets)) > 1 for sets in drawn.values())


@pytest.mark.full
@pytest.mark.parametrize(("eta", "upper"), [(1.0, 1), (20.0, 1), (20.0, 2)])
def test_fedala(eta: float, upper: int, engine: type[Engine]) -> None:
    method = FedALA(eta=eta, first_epochs=2, layers=None if upper == 1 else upper, **LOCAL)
    run = run_of(method, alike(), rounds=5, engine=engine, **SAMPLE)
    check_shares(plan(run))
    net, own, weights, seen = golden.fedala(*given(run), eta, upper)
    # every kind of round comes up: the first, the second, and a later one
    assert max(seen) >= 3
    same(layers(run.state.server), net)
    found = states(run)
    same([layers(s.upper) for s in found], own)
    same([layers(s.weights) for s in found], weights)
    assert [s.rounds for s in found] == seen
    values = torch.cat([t.flatten() for s in found for t in tree.tensors(s.weights)])
    assert ((values > 0) & (values < 1)).any()
    # at the large rate some elements come to the lower bound, where they are clipped
    assert eta == 1.0 or (values == 0).any()
    for k in range(len(SIZES)):
        wanted = net[:-upper] + golden.between(weights[k], net[-upper:], own[k])
        same(layers(run.personal(run.federation.infos[k])), wanted)


# -- limits --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD(lr=0.2, momentum=0.9), AdamW(lr=0.01)])
@pytest.mark.parametrize(
    "method",
    [lambda **k: MOON(mu=0.0, **k), lambda **k: FedRoD(gamma=0.0, **k), lambda **k: FedALA(eta=0.0, **k)],
    ids=["moon without contrast", "fedrod with cross-entropy", "fedala with W = 1"],
)
def test_the_global_model_is_that_of_fedavg(method: Any, optimizer: Any) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    found, wanted = (run_of(m(**settings), alike(), **SAMPLE).state.server for m in (method, FedAvg))
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-13), found, wanted)


def test_with_its_weights_at_one_fedala_infers_by_the_download_bit_for_bit() -> None:
    run = run_of(FedALA(eta=0.0, **LOCAL), alike(**F32), **SAMPLE)
    for k in range(len(SIZES)):
        assert tree.equal(run.personal(run.federation.infos[k]), run.state.server)


def test_the_first_round_of_moon_is_that_of_fedavg() -> None:
    settings = {**LOCAL, "optimizer": SGD(lr=0.1)}
    found, wanted = (
        run_of(m, alike(), rounds=3, steps=1).state.server
        for m in (MOON(mu=5.0, **settings), FedAvg(**settings))
    )
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-13), found, wanted)


class Wet(Net):
    """A model with dropout before its head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.dropout(self.body(x.to(self.head.weight.dtype)), 0.5, self.training))


def test_the_targets_of_moon_are_without_dropout(engine: type[Engine]) -> None:
    """In round 0 both targets are equal, so that the contrast has no gradient whatever dropout draws."""
    federation = Federation.from_arrays(arrays(), lambda: Wet(WIDTH), classes=CLASSES)
    found, wanted = (
        run_of(m, federation, rounds=1, engine=engine).state.server
        for m in (MOON(mu=5.0, **LOCAL), FedAvg(**LOCAL))
    )
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12), found, wanted)


def test_a_client_of_fedrod_that_never_trained_scores_as_the_generic_model() -> None:
    run = run_of(FedRoD(**LOCAL), alike(**F32), rounds=2, steps=1, participation=0.5)
    unseen = sorted(set(range(len(SIZES))) - set(run.state.clients))
    assert unseen
    for k in range(len(SIZES)):
        x = run.federation.clients[k].test.x
        both = local_model(run, k).predictors
        assert torch.equal(both["personal"](x), both["global"](x)) == (k in unseen)


def test_a_class_that_a_client_lacks_keeps_its_weights_in_the_balanced_loss() -> None:
    method = FedRoD(**LOCAL)
    run = run_of(method, alike(), steps=0)
    for info in run.federation.infos:
        trainer = run.engine.trainer(method, run.federation, 0, info)
        view = client_view(run.federation, run.task, 0, info, trainer)
        start = method.download(run.state.server, info)
        _, end = method.local_update(run.state_of(info), start, view)
        moved = (end["head.weight"] - start["head.weight"]).abs().amax(1) > 0
        assert (~moved).nonzero()[:, 0].tolist() == ABSENT[info.id]


@pytest.mark.filterwarnings("ignore:.*makes 6 scores")
def test_an_output_beyond_the_classes_keeps_its_weights_in_the_balanced_loss(engine: type[Engine]) -> None:
    federation = Federation.from_arrays(arrays(), lambda: Net(WIDTH, classes=CLASSES + 2), classes=CLASSES)
    run = run_of(FedRoD(**LOCAL), federation, engine=engine)
    start, end = federation.architectures["model"].initial["head.weight"], run.state.server["head.weight"]
    torch.testing.assert_close(end[CLASSES:], start[CLASSES:], rtol=0, atol=1e-12)
    assert ((end - start)[:CLASSES].abs().amax(1) > 1e-3).all()
    # the personal head learns to score them low
    assert all((s["head.bias"][CLASSES:] < 0).all() for s in run.state.clients.values())


def test_a_step_of_pfedme_follows_the_gradient_of_the_moreau_envelope() -> None:
    # the envelope of a quadratic in closed form: f(θ) = ½‖θ - y‖² has F(w) = λ / (1 + λ) ½‖w - y‖²
    lam, y = 3.0, 2.0

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.full((1,), 5.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.value.expand(len(x), 1)

    data = [{"train": (np.zeros((6, 1), np.float32), np.full((6, 1), y, np.float32))}]
    federation = Federation.from_arrays(data, Constant, classes=0)
    # enough inner steps to arrive at the minimizer
    method = PFedMe(lam=lam, inner_steps=200, inner_lr=0.1, optimizer=SGD(lr=0.1), batch_size=6)
    run = run_of(method, federation, rounds=1)
    w = 5.0 - 0.1 * lam / (1 + lam) * (5.0 - y)
    assert run.state.server["value"].item() == pytest.approx(w, abs=1e-12)
    # and its proximal point (y + λ w) / (1 + λ)
    assert run.state.clients[0]["value"].item() == pytest.approx((y + lam * w) / (1 + lam), abs=1e-12)


def test_moon_survives_representations_of_zeros() -> None:
    class Dead(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            with torch.no_grad():
                # no unit is ever active
                self.body[0].weight.zero_()
                self.body[0].bias.fill_(-1.0)

    federation = Federation.from_arrays(arrays(), Dead, classes=CLASSES)
    run = run_of(MOON(**LOCAL), federation, rounds=2)
    assert tree.not_finite(run.state.server) is None


class Tagger(nn.Module):
    """Scores of the next token, each by the embedding of one token alone."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(torch.relu(self.inner(self.embedding(input_ids.long()))) + 0.3)


def texts(pad: int, has_mask: bool) -> Federation:
    """Sequences of three to six tokens in a width of eight, padded with a token."""
    clients = []
    for k in range(3):
        ids = torch.randint(1, 11, (9, 8), generator=torch.Generator().manual_seed(k))
        mask = (torch.arange(8)[None] < torch.tensor([3, 4, 5, 6, 3, 4, 5, 6, 4])[:, None]).long()
        padded = torch.where(mask > 0, ids, pad)
        x = {"input_ids": padded} | ({"attention_mask": mask} if has_mask else {})
        clients.append((x, torch.where(mask > 0, ids, -100)))
    return Federation.from_arrays(clients, Tagger, loss="next_token")


@pytest.mark.parametrize("has_mask", [True, False])
def test_padding_of_texts_is_no_part_of_the_representation_of_moon(
    has_mask: bool, engine: type[Engine]
) -> None:
    settings: dict[str, Any] = {"batch_size": 3, "optimizer": SGD(lr=0.3)}
    runs = [run_of(MOON(mu=5.0, **settings), texts(pad, has_mask), rounds=2, engine=engine) for pad in (0, 7)]
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    tree.map_leaves(close, *(run.state.server for run in runs))
    plain = run_of(FedAvg(**settings), texts(0, has_mask), rounds=2, engine=engine)
    assert any((runs[0].state.server[n] - p).abs().max() > 1e-3 for n, p in plain.state.server.items())


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [MOON, FedRoD, FedALA])
def test_a_model_without_a_head_is_refused(method: Any) -> None:
    federation = Federation.from_arrays(
        arrays(), lambda: nn.Sequential(nn.Linear(INPUTS, CLASSES)), classes=4
    )
    with pytest.raises(TaskError, match="names no head"):
        Run(method(), federation, RunSettings(rounds=1), Sequential())


def test_fedala_of_so_many_layers_needs_no_head() -> None:
    make = lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(), nn.Linear(5, CLASSES))  # noqa: E731
    run = run_of(FedALA(layers=1, **LOCAL), Federation.from_arrays(arrays(), make, classes=4), rounds=2)
    assert {*run.state.clients[0].upper} == {"2.weight", "2.bias"}


def test_fedrod_refuses_a_head_of_several_layers() -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.head = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, CLASSES)).double()

    federation = Federation.from_arrays(arrays(), Deep, classes=CLASSES)
    with pytest.raises(TaskError, match="one linear layer"):
        Run(FedRoD(), federation, RunSettings(rounds=1), Sequential())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MOON(mu=-1.0), "mu"),
        (lambda: MOON(temperature=0.0), "temperature"),
        (lambda: FedRoD(gamma=-0.1), "gamma"),
        (lambda: PFedMe(lam=0.0), "lam"),
        (lambda: PFedMe(inner_steps=0), "inner_steps"),
        (lambda: PFedMe(local_rounds=0), "local_rounds"),
        (lambda: PFedMe(beta=0.0), "beta"),
        (lambda: PFedMe(weighting="even"), "weighting"),
        (lambda: FedALA(eta=-1.0), "eta"),
        (lambda: FedALA(first_epochs=0), "first_epochs"),
        (lambda: FedALA(layers=0), "layers"),
        (lambda: FedALA(share=0.0), "share"),
    ],
)
def test_bad_settings_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [MOON, FedRoD, PFedMe, FedALA])
def test_clients_of_one_model_are_trained_at_once(method: Any) -> None:
    run = run_of(method(**LOCAL), alike(**F32), engine=Counting)
    assert set(run.engine.sizes) == {len(SIZES)}
