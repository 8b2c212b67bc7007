"""A rank above what a layer can have: lowered with one warning, alike in every place where a rank is set.

The reference is a plain PyTorch loop on W + s·B A with factors of the lowered ranks, and the run at the
lowered rank itself, for a matrix ``[d, k]`` has no rank above min(d, k)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, Floral, simulate
from fedlowrank.adapters.lora.lora_factors import find_lora, lora_of
from fedlowrank.adapters.lora.lora_layers import LoRALayer, add_lora
from fedlowrank.adapters.lora.rank_limits import describe_lowered_ranks
from fedlowrank.config.reading.parsing import build
from fedlowrank.config.sections.lora_section import LoraSettings
from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod, ClientInfo
from fedlowrank.core.errors import ConfigError, LoweredRankWarning, TaskError
from fedlowrank.data.partitioning.rank_skew import assign_ranks
from fedlowrank.engines.engine import client_key
from fedlowrank.linalg.delta import DeltaForm
from fedlowrank.methods import METHODS, FedHL, FedIT, FLoRA, HetLoRA
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.outcome.result import Result

from .run_contents import get_client_inputs
from .setting import run_rounds

LORA = ("fedit", "hetlora", "flexlora", "flora", "fedhl", "ffa_lora", "fedsa_lora", "fedex_lora")
ADAPTORS = ("floral", "local_adaptor")
quiet = pytest.mark.filterwarnings("ignore::fedlowrank.core.errors.LoweredRankWarning")


class Narrow(nn.Module):
    """A body of one layer or of two, 5 × 6 and 2 × 5, and a head."""

    head_name = "head"

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), *([nn.Linear(5, 2)] if layers == 2 else []))
        self.head = nn.Linear(2 if layers == 2 else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def clients(sizes: tuple[int, ...]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(3)
    actual = []
    for n in sizes:
        x, y = torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)
        actual.append({"train": (x, y), "test": (x[:4], y[:4])})
    return actual


def federation(
    model: Callable[[], nn.Module] = Narrow, sizes: tuple[int, ...] = (7, 9), **kwargs: Any
) -> Federation:
    return Federation.from_arrays(clients(sizes), model, classes=3, **kwargs)


def method(name: str, rank: float, **fields: Any) -> AnyMethod:
    cls = METHODS[name]
    given = {"training": LoRATraining(rank=rank)} if name in LORA else {"rank": rank}  # type: ignore[arg-type]
    return cls(batch_size=4, optimizer=SGD(lr=0.3), **{**given, **fields})


def lowered(caught: list[warnings.WarningMessage]) -> list[str]:
    assert {w.category for w in caught} <= {LoweredRankWarning}
    return [str(w.message) for w in caught]


def models(result: Result) -> list[dict[str, Tensor]]:
    return [result.personal(k) for k in range(len(result.run.federation.infos))]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_rank_above_every_layer_is_the_largest_rank_bit_for_bit(engine: str) -> None:
    for name in (*LORA, *ADAPTORS):
        runs = []
        for rank in (5, 10_000):
            made = method(name, rank, **({"kinds": ("linear",)} if name in ADAPTORS else {}))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                runs.append(simulate(made, federation(lambda: Narrow(1)), rounds=2, engine=engine))
        said = lowered(caught)
        assert len(said) == 1, name
        assert said[0].startswith(
            f"{made.title}: rank 10000 is above what layers can have; used is 5 in body"
        ), said
        assert "(5 × 6)" in said[0]
        for a, b in zip(*map(models, runs), strict=True):
            assert tree.equal(a, b), name
        # of another rank it is another model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = simulate(method(name, 2), federation(lambda: Narrow(1)), rounds=2, engine=engine)
        assert not tree.equal(models(other), models(runs[0])), name


def plain_loop(run: Any, scale: float, trained: str) -> dict[str, Tensor]:
    """A round of the one client by hand: SGD on the factors of each layer and on the head."""
    model = run.federation.architectures["model"]
    lora, data = lora_of(model), run.federation.clients[0].train
    drawn = lora.draw_factors(4, run.task.key / "lora")
    if isinstance(run.method, FLoRA):
        drawn = lora.draw_factors(4, client_key(run.federation, 0, 0) / "lora")
    leaves = {n: (p.b.clone(), p.a.clone()) for n, p in drawn.items()}
    head = {n: p.clone() for n, p in model.head_of(model.initial).items()}
    steps = run.engine.trainer(run.method, run.federation, 0, run.federation.infos[0]).data.order("local")
    params = [p for b, a in leaves.values() for p in ((b, a) if trained == "both" else (b,))] + [
        *head.values()
    ]
    optimizer = torch.optim.SGD([p.requires_grad_() for p in params], lr=0.3)

    def weights() -> dict[str, Tensor]:
        moved = {
            lora.layers[n].weight: lora.base[lora.layers[n].weight] + scale * b @ a
            for n, (b, a) in leaves.items()
        }
        return {**dict(model.module.named_parameters()), **moved, **head}

    for index in steps:
        optimizer.zero_grad()
        w = {n.replace(".base_layer", ""): p for n, p in weights().items()}
        h = torch.tanh(functional.linear(data.x[index], w["body.0.weight"], w["body.0.bias"]))
        r = functional.linear(h, w["body.2.weight"], w["body.2.bias"])
        functional.cross_entropy(
            functional.linear(r, w["head.weight"], w["head.bias"]), data.y[index]
        ).backward()
        optimizer.step()
    return {n.replace(".base_layer", ""): p.detach() for n, p in weights().items()}


@quiet
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_narrow_layer_has_fewer_components_under_the_same_scale(wrapped: bool) -> None:
    # of one client and one round, all aggregates are the client's own model
    def model() -> nn.Module:
        return add_lora(Narrow(), 4, 6.0, trainable=("head",)) if wrapped else Narrow()

    for name in LORA:
        run = simulate(method(name, 4), federation(model, (11,)), rounds=1).run
        expected = plain_loop(run, 1.5 if wrapped else 1.0, "b" if name == "ffa_lora" else "both")
        lora = lora_of(run.federation.architectures["model"])
        actual = dict(run.personal_params(run.federation.infos[0]))
        for layer in lora.layers.values() if wrapped else ():
            # FLoRA and FedEx-LoRA move the weight itself
            w = actual.get(layer.weight, lora.base[layer.weight])
            actual[layer.weight] = w + 1.5 * layer.read_pair(actual).dense()
        for n, p in actual.items():
            if "lora_" not in n:
                n = n.replace(".base_layer", "")
                torch.testing.assert_close(p, expected[n], rtol=1e-4, atol=1e-5, msg=f"{name}: {n}")
        moved = expected["body.2.weight"] - lora.base[lora.layers["body.2"].weight]
        assert np.linalg.matrix_rank(moved.numpy(), tol=1e-5) == 2


@quiet
def test_forms_of_one_server_agree_on_narrow_layers() -> None:
    ranks, training = [1, 10_000, 4], LoRATraining(scaling="alpha", rank=4)
    data = (7, 9, 8)

    def run(made: Any) -> Any:
        return simulate(
            made(batch_size=4, optimizer=SGD(lr=0.3), training=training),
            federation(sizes=data, rank=ranks),
            rounds=3,
        )

    def form(kind: Any) -> Any:
        return lambda **kw: FedHL(delta_form=DeltaForm(kind), **kw)

    def pairs() -> Any:
        yield run(form("exact")), run(form("dense"))
        yield run(form("exact")), run(form("capped"))
        yield run(FLoRA), run(lambda **kw: FLoRA(base_updates="stacked", **kw))

    for a, b in pairs():
        for x, y in zip(models(a), models(b), strict=True):
            tree.map_leaves(lambda p, q: torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4), x, y)
        delta = {
            n: p - a.run.federation.architectures["model"].initial[n]
            for n, p in a.run.local_model(a.run.federation.infos[1]).personal().items()
        }
        assert np.linalg.matrix_rank(delta["body.2.weight"].numpy(), tol=1e-5) == 2


@quiet
@pytest.mark.parametrize("name", ["fedhl", "flexlora", "flora"])
def test_the_server_multiplies_by_the_scale_of_the_rank_that_is_used(name: str) -> None:
    # α = 4, and the rank above all layers is 5
    training = LoRATraining(scaling="alpha", rank=4)
    made = METHODS[name](batch_size=4, optimizer=SGD(lr=0.3), training=training)
    run = run_rounds(made, federation(sizes=(7, 9, 8), rank=[1, 10_000, 4]), rounds=1, steps=0)
    expected: dict[str, Tensor] = {}
    for k, (n, scale) in enumerate(((7, 4.0), (9, 4 / 5), (8, 1.0))):
        assert training.compute_client_scale(run.task, run.federation.infos[k]) == pytest.approx(
            scale, rel=1e-15
        )
        _, upload = made.local_update(*get_client_inputs(run, k))
        # W = 0 truncates to itself at any rank, so that all of FedHL's weights are equal
        p = 1 / 3 if name == "fedhl" else n / 24
        for layer, pair in upload.factors.items():
            expected[layer] = expected.get(layer, torch.zeros(pair.dense().shape)) + p * scale * pair.dense()
    run.step()
    state, _, view = get_client_inputs(run, 0)
    server, initial = made.server_model(run.state.server, state, view), view.model.initial
    assert server is not None
    for layer, update in expected.items():
        assert float(update.abs().max()) > 0.01
        torch.testing.assert_close(
            server[f"{layer}.weight"] - initial[f"{layer}.weight"], update, rtol=1e-4, atol=1e-5
        )
    # of a configured rank above all layers, α is that of the rank that is used
    assert LoRATraining(scaling="alpha", rank=900).build_scaling(lora_of(view.model)).scale_at(5) == 1.0


@quiet
def test_hetlora_is_fedit_where_ranks_are_equal_and_prunes_wide_layers_alone() -> None:
    het, fedit = (
        simulate(
            cls(batch_size=4, optimizer=SGD(lr=0.3), training=LoRATraining(rank=900)), federation(), rounds=2
        )
        for cls in (HetLoRA, FedIT)
    )
    for x, y in zip(models(het), models(fedit), strict=True):
        tree.map_leaves(lambda p, q: torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6), x, y)
    fields: dict[str, Any] = {"prune": 0.7, "penalty": 30.0, "per_index": True}
    for engine in ("sequential", "vectorized"):
        made = HetLoRA(batch_size=4, optimizer=SGD(lr=0.05), training=LoRATraining(rank=900), **fields)
        server = simulate(made, federation(), rounds=3, engine=engine).run.state.server
        # 0.7 · 5 = 3, then 0.7 · 3 = 2
        assert set(server.ranks.values()) <= {3, 2}
        assert server.ranks
        assert {n: p.rank for n, p in server.factors.items()} == {"body.0": 5, "body.2": 2}


@pytest.mark.parametrize("rslora", [False, True])
def test_layers_of_add_lora(rslora: bool) -> None:
    module = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 2))
    with pytest.warns(LoweredRankWarning) as caught:
        made = add_lora(module, 10_000, 6.0, rslora=rslora)
    assert lowered(list(caught)) == [
        "LoRA: rank 10000 is above what layers can have; used is 4 in 0 (9 × 4), 3 in 2 (3 × 8), 2 in 3 (2 × 3)"
    ]
    scale = 6 / 4**0.5 if rslora else 6 / 4
    x = torch.arange(6).reshape(3, 2)
    h: Any = x
    for i, (layer, plain) in enumerate(zip(made, module, strict=True)):
        if not isinstance(layer, LoRALayer):
            h = plain(h)
            continue
        assert layer.lora_A.shape[0] == {0: 4, 2: 3, 3: 2}[i]
        with torch.no_grad():
            layer.lora_A += 0.3
            layer.lora_B += 0.2
            update = scale * layer.lora_B @ layer.lora_A
            if i == 0:
                h = functional.embedding(h, plain.weight + update.mT)
            else:
                h = functional.linear(h, plain.weight + update, plain.bias)
    torch.testing.assert_close(made(x).detach(), h.detach())
    assert find_lora(made, None).scale == pytest.approx(scale, rel=1e-15)
    base = nn.Linear(8, 3)
    with pytest.warns(LoweredRankWarning):
        above = add_lora(base, 10_000, 6.0, rslora=rslora)
    at = add_lora(base, 3, 6.0, rslora=rslora)
    assert tree.equal(dict(above.state_dict()), dict(at.state_dict()))
    assert above.lora_scaling == at.lora_scaling


def test_the_wrapper_floral() -> None:
    convolution = nn.Conv2d(2, 3, (3, 2))
    with pytest.warns(LoweredRankWarning, match=r"Floral: rank 10000 .* 6 in 0\.weight \(6 × 6\)") as caught:
        model = Floral(nn.Sequential(convolution), 10_000, 2)
    assert len(caught) == 1
    same = Floral(nn.Sequential(convolution), model.adapted()["0.weight"].rank, 2)
    assert tree.equal(dict(model.state_dict()), dict(same.state_dict()))


INTEGER = ": input should be a valid integer"
LEAST = " must be a whole number of at least 1; it is "
NO_RANKS: tuple[tuple[Any, str], ...] = (
    (0, f"{LEAST}0"),
    (-1, f"{LEAST}-1"),
    (1.5, f"{INTEGER}, got a number with a fractional part; it is 1.5"),
    (float("nan"), f"{INTEGER}, got a number with a fractional part; it is nan"),
    (True, f"{INTEGER}; it is True"),
    ("8", f"{INTEGER}; it is '8'"),
    ([3], f"{INTEGER}; it is [3]"),
)
RANK_PLACES: dict[str, Callable[[Any], Any]] = {
    "training.rank": lambda r: LoRATraining(rank=r),
    "Federation.from_arrays.rank, value 1": lambda r: federation(rank=[2, r]),
    "add_lora.rank": lambda r: add_lora(nn.Linear(3, 3), r),
    "lora.ranks, value 1": lambda r: LoraSettings(ranks=(2, r)),
    "lora.r": lambda r: LoraSettings(r=r),
    "client 0: its rank": lambda r: ClientInfo(0, 1, "m", rank=r),
    "partition.ranks, value 1": lambda r: assign_ranks([2, r], 2),
}
NUMBER = ": input should be a valid number; it is "
EITHER = " must be an integer >= 1, or a budget in (0, 1) of a layer's parameters; it is "
NO_BUDGETS: tuple[tuple[Any, str], ...] = (
    *((bad, f"{EITHER}{bad}") for bad in (0, -1, 1.5, float("nan"))),
    *((bad, f"{NUMBER}{bad!r}") for bad in (True, "8", None)),
)
BUDGET_PLACES: dict[str, Callable[..., Any]] = {
    "Floral": lambda **fields: Floral(nn.Linear(3, 3), **fields),
    "FederatedFloral": METHODS["floral"],
    "LocalAdaptor": METHODS["local_adaptor"],
}


@pytest.mark.parametrize("place", RANK_PLACES)
def test_what_is_no_rank_is_refused_alike_in_every_place(place: str) -> None:
    for bad, says in NO_RANKS:
        with pytest.raises(ConfigError) as error:
            RANK_PLACES[place](bad)
        assert str(error.value) == f"{place}{says}"
    # as from a file
    RANK_PLACES[place](2.0)


@pytest.mark.parametrize("place", BUDGET_PLACES)
def test_what_is_neither_rank_nor_budget_is_refused_alike(place: str) -> None:
    for bad, says in NO_BUDGETS:
        with pytest.raises(ConfigError) as error:
            BUDGET_PLACES[place](rank=bad)
        assert str(error.value) == f"{place}.rank{says}"
    with pytest.raises(ConfigError) as error:
        BUDGET_PLACES[place](rank_pattern={"weight": 1.5})
    assert str(error.value) == f"{place}.rank_pattern['weight']{EITHER}1.5"


def test_whole_numbers_are_ranks() -> None:
    # whole numbers of numpy are whole numbers
    assert [i.rank for i in federation(rank=np.array([2, 3])).infos] == [2, 3]
    for three in (np.int64(3), 3.0):
        ranks: list[Any] = [
            LoRATraining(rank=three).rank,  # type: ignore[arg-type]
            LoraSettings(ranks=(three,)).ranks[0],  # type: ignore[arg-type]
            LoraSettings(r=three).r,  # type: ignore[arg-type]
            ClientInfo(0, 1, "m", rank=three).rank,  # type: ignore[arg-type]
            federation(rank=[three, 2]).infos[0].rank,
        ]
        assert [(type(rank), rank) for rank in ranks] == [(int, 3)] * 5
    # and in a file
    table = {"ranks": [3.0], "r": 3.0}
    assert build(LoraSettings, table, "lora") == LoraSettings(ranks=(3,), r=3)
    assert build(LoRATraining, {"rank": 3.0}, "training") == LoRATraining(rank=3)
    for r in (0, 1.5, True):
        says = next(says for bad, says in NO_RANKS if bad is r or (r is not True and bad == r))
        with pytest.raises(ConfigError) as error:
            build(LoraSettings, {"r": r}, "lora")
        assert str(error.value) == f"lora.r{says}"


@quiet
def test_unequal_ranks_are_compared_as_they_are_used() -> None:
    simulate(method("fedit", 2), federation(rank=[5, 10_000]), rounds=1)
    with pytest.raises(TaskError, match="client 0 has 2 and client 1 has 5"):
        simulate(method("fedit", 2), federation(rank=[2, 10_000]), rounds=1)


def test_a_warning_names_the_first_layers() -> None:
    shapes = {f"l{i}": (3, 9) for i in range(7)} | {"wide": (30, 20)}
    (text,) = describe_lowered_ranks(dict.fromkeys(shapes, 8), shapes)
    assert text.endswith(
        "used is " + ", ".join(f"3 in l{i} (3 × 9)" for i in range(5)) + " and less in 2 more layers"
    )
    assert describe_lowered_ranks(dict.fromkeys(shapes, 3), shapes) == []


def sent(made: AnyMethod, on: Federation) -> int:
    """Numbers that a client sends in a round."""
    return simulate(made, on, rounds=1).rounds[-1].parameters_up


@pytest.mark.parametrize("name", LORA)
def test_clients_without_a_rank_have_that_of_the_models_layers(name: str) -> None:
    def adapted() -> nn.Module:
        return add_lora(Narrow(), rank=3, target_modules=["0"], trainable=["head"])

    def of(training: LoRATraining, **kwargs: Any) -> int:
        return sent(
            METHODS[name](batch_size=4, optimizer=SGD(lr=0.3), training=training),
            federation(adapted, **kwargs),
        )

    own = of(LoRATraining())
    assert own == of(LoRATraining(rank=3)) == of(LoRATraining(), rank=[3, 3])
    # the method's rank comes first, that of a client before it
    assert (
        of(LoRATraining(rank=2))
        == of(LoRATraining(), rank=[2, 2])
        == of(LoRATraining(rank=3), rank=[2, 2])
        < own
    )
    with pytest.raises(TaskError, match="client 1 has no rank, and others have one"):
        of(LoRATraining(), rank=[2, None])
