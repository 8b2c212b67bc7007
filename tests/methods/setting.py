"""A small federation for the tests of methods: four clients of unequal size and skewed classes, models of two
forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.contract.method import AnyMethod, ClientInfo
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine, client_key, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.models import standard
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.local_data import LocalData

torch.set_num_threads(1)

INPUTS, CLASSES, WIDTH = 12, 4, 10
SIZES = (23, 9, 31, 14)
# label 3 belongs to client 2 alone
OWNED = ((0, 1), (0, 1, 2), (2, 3), (1, 2))


KINDS = (
    *("standalone", "fedavg", "fedadam", "scaffold", "feddyn"),
    *("ditto", "per_fedavg", "fedrep", "fedspa", "fedbabu"),
    *("fedkd", "fd", "fedproto", "pfedlora"),
    *("fedslr", "floral", "fedem", "ifca"),
    *("fedhl", "hetlora", "fedit"),
)
"""A method of each kind of message, state and inference, for tests of code that all methods share. What is a method's
own is tested by the battery of ``fedlowrank.testing.check``, which every method passes."""


class Net(nn.Module):
    """Linear layers with ReLU between them, computed in the type of the parameters whatever that of the
    inputs."""

    head_name = "head"

    def __init__(
        self, *hidden: int, inputs: int = INPUTS, classes: int = CLASSES, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in zip((inputs, *hidden), hidden, strict=False):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1], classes)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(next(self.parameters()).dtype)))


standard.LAYERS |= {Net}  # its forward pass is deterministic, so clients may be batched


def arrays(
    seed: int = 0, sizes: Sequence[int] = SIZES, owned: Sequence[Sequence[int]] = OWNED
) -> list[dict[str, Any]]:
    """Train and test examples of every client; classes are shifted Gaussians."""
    rng = np.random.default_rng(seed)
    center = rng.normal(size=(CLASSES, INPUTS))
    out = []
    for n, labels in zip(sizes, owned, strict=True):
        parts = {}
        for part, m in (("train", n), ("test", 11)):
            # every label at least once, then at random
            y = np.concatenate([labels, rng.choice(labels, m - len(labels))])
            parts[part] = ((center[y] + rng.normal(size=(m, INPUTS))).astype(np.float32), y)
        out.append(parts)
    return out


def alike(dtype: torch.dtype = torch.float64, seed: int = 0, **kwargs: Any) -> Federation:
    """All clients hold one architecture."""
    return Federation.from_arrays(
        kwargs.pop("clients", None) or arrays(),
        {"small": lambda: Net(WIDTH, dtype=dtype)},
        classes=CLASSES,
        seed=seed,
        **kwargs,
    )


def unlike(
    deep_width: int = WIDTH, dtype: torch.dtype = torch.float64, seed: int = 0, **kwargs: Any
) -> Federation:
    """Clients 0 and 2 hold a deeper model than clients 1 and 3, with a representation of ``deep_width``."""
    models = {"deep": lambda: Net(9, deep_width, dtype=dtype), "small": lambda: Net(WIDTH, dtype=dtype)}
    return Federation.from_arrays(arrays(), models, classes=CLASSES, seed=seed, **kwargs)


def run_of(
    method: AnyMethod,
    federation: Federation,
    rounds: int = 3,
    steps: int | None = None,
    engine: type[Engine] = Sequential,
    **kwargs: Any,
) -> Run:
    """A run after that many rounds, all by default."""
    run = Run(method, federation, RunSettings(rounds=rounds, **kwargs), engine())
    for _ in range(rounds if steps is None else steps):
        run.step()
    return run


def order_of(run: Run, round: int, info: ClientInfo) -> list[list[np.ndarray]]:
    """Indices of the examples of every step of every pass."""
    method, federation = run.method, run.federation
    local = LocalData(
        info, federation.clients[info.id].train, method.passes(), client_key(federation, info.id, round)
    )
    return [[i.numpy() for i in local.order(name)] for name in method.passes()]


def plan(run: Run) -> list[dict[int, list[list[np.ndarray]]]]:
    """What the reference needs to know of a run: who takes part in a round and in which order it sees its
    examples."""
    return [{i.id: order_of(run, t, i) for i in run.participants(t)} for t in range(run.settings.rounds)]


def train_data(federation: Federation) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(c.train.x.double().numpy(), c.train.y.numpy()) for c in federation.clients]


def layers(params: dict[str, Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Parameters as the reference writes them: (weight, bias) a layer."""
    values = [p.detach().double().numpy().copy() for p in params.values()]
    return list(zip(values[::2], values[1::2], strict=True))


def start_of(federation: Federation) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Initial networks of all clients."""
    return [layers(federation.architectures[i.architecture].initial) for i in federation.infos]


def view_of(run: Run, client: int, round: int | None = None, trainer: Any = None) -> Any:
    """What the method of a client sees in a round, the next one by default."""
    info, t = run.federation.infos[client], run.round if round is None else round
    trainer = trainer or run.engine.trainer(run.method, run.federation, t, info)
    return client_view(run.federation, run.task, t, info, trainer)


def at(run: Run, client: int) -> tuple[Any, Any, Any]:
    """State, download and view of a client after the rounds that were."""
    info = run.federation.infos[client]
    return run.state_of(info), run.method.download(run.state.server, info), view_of(run, client)


def states(run: Run) -> list[Any]:
    """State of every client, in order; all have taken part at least once, or the test would not see them."""
    assert sorted(run.state.clients) == list(range(len(SIZES)))
    assert all(len(r) == 3 for r in plan(run))
    return [run.state.clients[k] for k in range(len(SIZES))]


def same(found: Any, wanted: Any, atol: float = 1e-10) -> None:
    """Nested lists of arrays agree up to rounding; what is found may hold tensors."""
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for f, w in zip(found, wanted, strict=True):
            same(f, w, atol)
        return
    found = found.double().numpy() if isinstance(found, Tensor) else found
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def close(a: Any, b: Any, atol: float = 1e-12) -> None:
    """Two trees of tensors agree up to rounding."""
    tree.map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=atol), a, b)
