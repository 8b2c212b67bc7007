"""Complex, empty and mixed parameters, and sparse gradients, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, AdamW, Federation, simulate
from fedlowrank.adapters.state_dict import full_state_dict
from fedlowrank.core import tree
from fedlowrank.core.errors import TaskError
from fedlowrank.methods import (
    GPGD,
    LPGD,
    METHODS,
    SCAFFOLD,
    FedAvg,
    FedDyn,
    FedKD,
    FedProx,
    FedSLR,
    FedSpa,
    PerFedAvg,
    PFedMe,
)

torch.set_num_threads(1)


class Net(nn.Module):
    """Embedded tokens, turned by a complex matrix where it has one."""

    head_name = "head"

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 6, sparse=kind == "sparse")
        self.head = nn.Linear(6, 3)
        if kind == "complex":
            self.phase = nn.Parameter(0.3 * torch.randn(6, 6, dtype=torch.complex64))
        elif kind == "mixed":
            self.emb.to(torch.bfloat16)
        elif kind == "empty":
            self.none = nn.ParameterList(
                [torch.zeros(s) for s in ((0, 5), (5, 0), (0, 0), (0,), (3, 0, 2, 2))]
            )
            self.one = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x.long()).mean(1).float()
        if hasattr(self, "phase"):
            h = h + (h.to(self.phase.dtype) @ self.phase).abs()
        if hasattr(self, "one"):
            h = h * self.one + sum(p.sum() for p in self.none)
        scores: Tensor = self.head(h)
        return scores


def module(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(kind)


def data(sizes: tuple[int, ...] = (12, 12)) -> list[tuple[Tensor, Tensor]]:
    # tokens 9 to 11 do not occur: weight decay and proximal terms move their rows all the same
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, 9, (n, 4), generator=generator).float(),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def federation(kind: str) -> Federation:
    return Federation.from_arrays([{"train": pair} for pair in data()], module(kind), classes=3)


OPTIONS = {
    "plain": SGD(lr=0.3),
    "weight_decay": SGD(lr=0.3, weight_decay=0.05),
    "clip": SGD(lr=0.3, clip=0.1),
    "momentum": SGD(lr=0.3, momentum=0.9),
    "nesterov": SGD(lr=0.3, momentum=0.9, nesterov=True),
    "adamw": AdamW(lr=0.05),
}
METHODS_ON_ROWS: dict[str, Any] = {
    **{name: FedAvg(batch_size=4, epochs=2, optimizer=o) for name, o in OPTIONS.items()},
    "fedprox": FedProx(batch_size=4, epochs=2, mu=0.5, optimizer=SGD(lr=0.3)),
    "scaffold": SCAFFOLD(batch_size=4, optimizer=SGD(lr=0.3)),
    "feddyn": FedDyn(batch_size=4, optimizer=SGD(lr=0.3)),
    "pfedme": PFedMe(batch_size=4, optimizer=SGD(lr=0.02)),
    "per_fedavg": PerFedAvg(batch_size=4, variant="hessian_free", optimizer=SGD(lr=0.3)),
    "fedspa": FedSpa(batch_size=4, optimizer=SGD(lr=0.3)),
    "fedslr": FedSLR(batch_size=4, optimizer=SGD(lr=0.3)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS_ON_ROWS)
def test_a_sparse_embedding_is_trained_as_a_dense_one(name: str) -> None:
    """The gradient's form says nothing of its value; ``micro_batch`` adds up several."""
    method, actual = METHODS_ON_ROWS[name], []
    cases: list[tuple[str, dict[str, Any]]] = [("", {}), ("sparse", {}), ("sparse", {"engine": "vectorized"})]
    # a loss with an inner step is no mean over the examples, so parts of a batch do not add up to it
    cases += [("sparse", {"micro_batch": 3})] if isinstance(method, FedAvg) else []
    for kind, settings in cases:
        run = simulate(method, federation(kind), rounds=2, evaluate_every=2, **settings)
        actual.append(run.personal(0))
    for other in actual[1:]:
        torch.testing.assert_close(other, actual[0], rtol=1e-4, atol=1e-6)


STEPS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer], float | None]] = {
    "sgd": (SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3), None),
    "momentum": (
        SGD(lr=0.3, momentum=0.9, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.05),
        None,
    ),
    "adamw": (AdamW(lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.05), None),
    "clip": (SGD(lr=0.3, clip=0.1), lambda p: torch.optim.SGD(p, lr=0.3), 0.1),
}


@pytest.mark.parametrize("name", STEPS)
def test_complex_parameters_step_as_in_torch(name: str) -> None:
    optimizer, make, bound = STEPS[name]
    result = simulate(FedAvg(epochs=3, batch_size=12, optimizer=optimizer), federation("complex"), rounds=1)
    ends = []
    for x, y in data():
        net = module("complex")
        theirs = make(net.parameters())
        for _ in range(3):
            theirs.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            if bound is not None:
                nn.utils.clip_grad_norm_(net.parameters(), bound)
            theirs.step()
        ends.append(net.state_dict())
    actual = result.personal(0)
    assert actual["phase"].dtype == torch.complex64
    for n, t in actual.items():
        torch.testing.assert_close(t, (ends[0][n] + ends[1][n]) / 2, rtol=1e-4, atol=1e-5)
    module("complex").load_state_dict(actual)
    exported = result.deploy(0)
    x = data()[0][0]
    torch.testing.assert_close(exported(x), result.predict(0, x))


@pytest.mark.parametrize("settings", [{"engine": "wire"}, {"engine": "vectorized"}])
def test_complex_parameters_in_every_engine(settings: dict[str, Any]) -> None:
    method = FedProx(batch_size=4, mu=0.1, optimizer=SGD(lr=0.3, clip=1.0))
    expected = simulate(method, federation("complex"), rounds=2).personal(0)
    torch.testing.assert_close(
        simulate(method, federation("complex"), rounds=2, **settings).personal(0), expected
    )


# an own code path for the type of a parameter each
@pytest.mark.few(11)
@pytest.mark.parametrize("kind", ["complex", "empty", "mixed"])
@pytest.mark.parametrize(
    "name",
    [
        *("apfl", "fedkd", "fd", "fedproto", "ensemble", "fedem", "ifca", "pfedlora", "fedspa"),
        *("fedyogi", "feddyn", "floral"),
    ],
)
def test_methods_train_unusual_parameters(name: str, kind: str) -> None:
    result = simulate(METHODS[name](batch_size=6, optimizer=SGD(lr=0.1)), federation(kind), rounds=2)
    # of an ensemble the model with the largest share
    info, models = result.run.federation.infos[1], result.run.federation.architectures
    module(kind).load_state_dict(full_state_dict(models[info.architecture], result.run.personal_params(info)))


@pytest.mark.parametrize("name", ["fedslr", "gpgd", "lpgd"])
def test_a_nuclear_norm_is_one_of_real_matrices(name: str) -> None:
    with pytest.raises(TaskError, match=r"the parameter 'phase' is complex.*exclude = \['phase'\]"):
        simulate(METHODS[name](), federation("complex"), rounds=1)
    excluded = METHODS[name](exclude=("phase",), batch_size=6)
    assert simulate(excluded, federation("complex"), rounds=1).personal(0)["phase"].is_complex()
    assert simulate(
        METHODS[name](**{"global_norm" if name == "fedslr" else "norm": "sparse"}),
        federation("empty"),
        rounds=1,
    )
    assert simulate(METHODS[name](lam=0.01), federation("empty"), rounds=1)


def test_trust_treats_complex_parameters_by_their_parts() -> None:
    from fedlowrank.trust.trust_settings import Clipping, Compression

    for optimizer_free in (
        {"clipping": Clipping(norm=1e-3)},
        {"compression": Compression(uplink="low_rank:1 + int8", error_feedback=True)},
    ):
        start = module("complex").state_dict()
        result = simulate(FedAvg(optimizer=SGD(lr=0.3)), federation("complex"), rounds=1, **optimizer_free)
        moved = {n: (t - start[n]).abs().double().square().sum() for n, t in result.personal(0).items()}
        assert moved["phase"] > 0
        if "clipping" in optimizer_free:
            assert float(sum(moved.values()) ** 0.5) <= 1e-3 * (1 + 1e-3)


def test_a_complex_leaf_of_a_tree() -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    back = tree.decode(tree.encode({"z": z, "conj": z.conj(), "none": z[:0]}))
    assert torch.equal(back["z"], z)
    assert torch.equal(back["conj"], z.conj().resolve_conj())
    assert back["none"].shape == (0, 2)
    assert tree.numel(z) == 12
    z[1, 1] = complex(0, float("nan"))
    assert tree.not_finite({"z": z}) == "/z"


def test_fedkd_of_half_precision() -> None:
    net = module("").to(torch.bfloat16)
    net.forward = lambda x, f=net: f.head(f.emb(x.long()).mean(1))  # type: ignore[method-assign]
    made = Federation.from_arrays([{"train": pair} for pair in data()], net, classes=3)
    assert (
        simulate(FedKD(optimizer=SGD(lr=0.1)), made, rounds=2).personal(0)["emb.weight"].dtype
        == torch.bfloat16
    )


class ComplexLayer(nn.Module):
    """A complex layer with a bias, which is stored as real numbers ``[8, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 8, dtype=torch.complex64), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.to(torch.complex64)).abs())


@pytest.mark.parametrize(
    "method",
    [
        FedSLR(global_norm="sparse", lam=1.0, prox_step=0.1, optimizer=SGD(lr=1e-9)),
        GPGD(norm="sparse", lam=1.0, prox_step=0.1, optimizer=SGD(lr=1e-9)),
        LPGD(norm="sparse", lam=1e8, optimizer=SGD(lr=1e-9)),
        FedSpa(density=0.4, optimizer=SGD(lr=1e-9)),
    ],
    ids=lambda m: m.title,
)
def test_a_complex_bias_is_a_vector(method: Any) -> None:
    clients = [(torch.randn(6, 5), torch.arange(6) % 3) for _ in range(2)]
    torch.manual_seed(0)
    net = ComplexLayer()
    state = simulate(method, Federation.from_arrays(clients, net, classes=3, seed=0), rounds=1).personal(
        client=0
    )
    # the norm and the mask change weights alone
    torch.testing.assert_close(state["layer.bias"], net.layer.bias.detach(), rtol=0, atol=1e-6)
    assert not torch.allclose(state["layer.weight"], net.layer.weight.detach(), atol=1e-3)
