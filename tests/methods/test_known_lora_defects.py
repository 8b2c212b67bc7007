"""Defects found in public code of federated LoRA, each with a test that ours does not have it; what travels,
what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contract import Reply, server_update
from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.core import tree
from fedlowrank.core.contract.method import ServerView
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, LocalSchedule, Schedule
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import ClientResult, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.families.lora_family import Tuning
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.checkpoint import load, save
from golden import lora_reference as reference
from golden.reference import forward

from .setting import CLASSES, INPUTS, arrays, run_of
from .test_lora_methods import NAMES, TUNING, head_is, hetlora, setting_of, unequal, updates_are
from .test_lora_methods import drawn as random_a

LOCAL: dict[str, Any] = {"optimizer": SGD(lr=0.3), "batch_size": 8, "epochs": 2}
QUIET: dict[str, Any] = {"evaluate_every": 99}
MIXED: list[Any] = [FedHL, FlexLoRA, HetLoRA, FLoRA]
SAME: list[Any] = [FedIT, FFALoRA, FedSALoRA, FedExLoRA]
SHAPES = ((9, 12), (10, 9))
HEAD = CLASSES * 10 + CLASSES
every = pytest.mark.parametrize("kind", MIXED + SAME, ids=lambda k: k.title)


def ranks_for(kind: Any) -> Sequence[int]:
    return (1, 2, 3, 4) if kind in MIXED else (2,) * 4


def go(
    kind: Any, steps: int | None = None, ranks: Sequence[int] = (), engine: Any = Sequential, **kwargs: Any
) -> Run:
    fields = {f.name for f in dataclasses.fields(kind)}
    method = kind(**{**LOCAL, "tuning": TUNING, **{k: v for k, v in kwargs.items() if k in fields}})
    rest = {**QUIET, **{k: v for k, v in kwargs.items() if k not in fields}}
    return run_of(method, unequal(ranks or ranks_for(kind)), steps=steps, engine=engine, **rest)


def box(run: Run, client: int) -> tuple[Any, Any]:
    """A client's next state, and what it would send now."""
    info, method = run.federation.infos[client], run.method
    trainer = run.engine.trainer(method, run.federation, run.round, info)
    view = client_view(run.federation, run.task, run.round, info, trainer)
    return method.local_update(run.state_of(info), method.download(run.state.server, info), view)


def replies_of(run: Run, clients: Sequence[int]) -> list[Reply]:
    return [Reply(run.federation.infos[k], box(run, k)[1]) for k in clients]


def answered(run: Run, replies: list[Reply]) -> Any:
    view = ServerView(run.task, run.round, run.federation.key / "server" / run.round)
    return tree.canonical(server_update(run.method, run.state.server, replies, view))


def scores(run: Run, client: int, series: str = "personal") -> Tensor:
    return (
        run.local_model(run.federation.infos[client])
        .predictors[series](run.federation.clients[client].test.x)
        .detach()
    )


def paths(value: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(t.shape) for path, t in tree.leaves(value)}


def apart(a: Any, b: Any) -> float:
    """The largest difference of two trees, or infinity where they are of other forms."""
    x, y = dict(tree.leaves(a)), dict(tree.leaves(b))
    if paths(a) != paths(b):
        return float("inf")
    return max(float((x[p] - y[p]).abs().max()) if x[p].numel() else 0.0 for p in x)


# -- defects of public code ----------------------------------------------------------------------------------


def test_norms_that_are_all_zero_leave_the_weights_by_examples() -> None:
    run = run_of(HetLoRA(weighting="norm", optimizer=SGD(lr=0.0)), unequal(), steps=0, **QUIET)
    before = run.state.server.factors
    run.step()
    # the first component is everyone's; a mean of equal values is that value
    for n, p in run.state.server.factors.items():
        torch.testing.assert_close(p.a[0], before[n].a[0], rtol=0, atol=1e-15)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MIXED, ids=lambda k: k.title)
def test_a_rank_may_equal_a_dimension_of_a_layer(kind: Any) -> None:
    ranks = (9, 1, 9, 4)
    if kind is HetLoRA:
        hetlora(HetLoRA(tuning=TUNING, **LOCAL), Sequential, ranks)
        return
    run = go(kind, ranks=ranks, participation=0.75)
    s = setting_of(run)
    if kind is FLoRA:
        key = run.federation.key / "client"
        net = reference.flora(
            s, [{k: random_a(key / k / t, ranks[k]) for k in c} for t, c in enumerate(s.rounds)]
        )
        head_is(run, net, 1e-9)
        np.testing.assert_allclose(
            scores(run, 1).numpy(),
            forward(net, run.federation.clients[1].test.x.double().numpy())[1],
            atol=1e-9,
        )
    else:
        ws, net, *_ = reference.fedhl(s) if kind is FedHL else reference.flexlora(s)
        updates_are(run, ws, net, ranks, 1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", MIXED, ids=lambda k: k.title)
def test_the_server_holds_the_clients_own_scales(kind: Any) -> None:
    # of scale 2, 1, 2/3 and 1/2: α/r with ranks that differ, and a server padded to rank 4
    for client, rank in enumerate((1, 2, 3, 4)):
        run = go(kind, 0)
        upload = box(run, client)[1]
        server = answered(run, [Reply(run.federation.infos[client], upload)])
        for n in NAMES:
            wanted = 2 / rank * upload.factors[n].dense()
            held = (
                server.delta[n].dense()
                if kind in (FedHL, FlexLoRA)
                else (server.history.updates[0] if kind is FLoRA else server.factors)[n].dense()
            )
            torch.testing.assert_close(held, wanted, rtol=0, atol=1e-14)
            assert float(wanted.norm()) > 1e-3


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MIXED, ids=lambda k: k.title)
def test_every_client_trains_at_its_own_rank(kind: Any) -> None:
    run = go(kind, 2)
    for k, rank in enumerate((1, 2, 3, 4)):
        up = box(run, k)[1]
        assert {n: (p.b.shape, p.a.shape) for n, p in up.factors.items()} == {
            n: ((d, rank), (rank, w)) for n, (d, w) in zip(NAMES, SHAPES, strict=True)
        }
        assert all(np.linalg.matrix_rank(up.factors[n].dense()) == rank for n in NAMES)
        if kind is not FLoRA:
            down = run.method.download(run.state.server, run.federation.infos[k])
            assert paths(getattr(down, "message", down)) == paths(up)


@pytest.mark.parametrize("kind", [FedHL, FlexLoRA], ids=lambda k: k.title)
def test_a_client_of_full_rank_receives_w_itself(kind: Any) -> None:
    # with V in place of Vᵀ a layer that is not square could not even be multiplied; a square one would be
    # wrong by 1.65
    run = go(kind, 2, ranks=(9, 2, 3, 4))
    sent = unpack_factors(
        getattr(d := run.method.download(run.state.server, run.federation.infos[0]), "message", d).factors
    )
    for n in NAMES:
        w = run.state.server.delta[n].dense()
        assert float((2 / 9 * sent[n].dense() - w).norm() / w.norm()) < 1e-14


@pytest.mark.full
@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA], ids=lambda k: k.title)
@pytest.mark.parametrize("keep", ["merged", "stacked"])
def test_a_client_that_missed_rounds_catches_up_exactly(kind: Any, keep: Any) -> None:
    run = go(kind, 0, keep=keep, rounds=5, participation=0.5, lost_replies=0.3)
    seen = dict.fromkeys(range(4), 0)
    lost = 0
    for _ in range(5):
        for k in range(4):
            down = run.method.download(run.state.server, run.federation.infos[k])
            held = down.stacks if kind is FLoRA else down.residuals
            assert len(held) == len(run.state.server.history.updates) - seen[k]
        before = len(run.state.server.history.updates)
        record = run.step()
        lost += len(record.lost)
        assert len(run.state.server.history.updates) == before + (len(record.lost) < 2)
        seen |= {k: before for k in record.participants if str(k) not in record.lost}
        for k in range(4):
            # whoever took part or not, and whose reply was lost: all now predict as the server does
            torch.testing.assert_close(scores(run, k), scores(run, k, "server"), rtol=0, atol=1e-12)
    assert lost > 0
    assert len(set(seen.values())) > 1


@pytest.mark.full
@pytest.mark.parametrize("kind", [FedHL, FLoRA, FedExLoRA], ids=lambda k: k.title)
def test_a_run_resumed_in_the_middle_ends_in_the_same_bits(kind: Any, tmp_path: Path) -> None:
    whole, half = (go(kind, n, rounds=4, participation=0.5) for n in (4, 2))
    save(tmp_path, half.round, half.state.server, half.state.clients)
    again = Run(half.method, half.federation, half.settings, Sequential())
    again.restore(load(tmp_path))
    for _ in range(2):
        again.step()
    assert tree.equal(again.state.server, whole.state.server)
    assert again.state.clients.keys() == whole.state.clients.keys()
    assert all(tree.equal(again.state.clients[k], whole.state.clients[k]) for k in whole.state.clients)


# -- replies that cannot be used -----------------------------------------------------------------------------


class Spoiled(Sequential):
    """Client 2 sends a number that is none in the last tensor of its reply."""

    value = float("nan")

    def run(self, *args: Any) -> Any:
        for job, outcome in zip(args[-1], super().run(*args), strict=True):
            if job.client.id == 2:
                last = list(tree.leaves(outcome.upload))[-1][1]
                last[..., -1] = self.value
            yield ClientResult(outcome.state, outcome.upload, outcome.meter)


class Infinite(Spoiled):
    value = float("-inf")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "engine"),
    [(FedIT, Infinite), *((kind, Spoiled) for kind in MIXED + SAME)],
    ids=lambda v: v.__name__,
)
def test_a_reply_that_is_not_finite_is_dropped_and_the_rest_goes_on(kind: Any, engine: type[Spoiled]) -> None:
    run = go(kind, 1)
    run.engine = engine()
    before, wanted = run.state.clients[2], answered(run, replies_of(run, (0, 1, 3)))
    record = run.step()
    assert record.participants == [0, 1, 2, 3]
    assert record.lost.keys() == {"2"}
    assert "the reply of client 2 holds a NaN or an infinity at /rest/head.bias" in record.lost["2"]
    assert tree.equal(run.state.server, wanted)
    assert tree.equal(run.state.clients[2], before)


# -- refused before training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAME, ids=lambda k: k.title)
def test_unequal_ranks_are_refused_with_both_clients(kind: Any) -> None:
    with pytest.raises(
        TaskError, match=rf"{kind.title} .* client 0 has 2 and client 2 has 3.*fedhl, hetlora"
    ):
        go(kind, 0, ranks=(2, 2, 3, 2))


def test_settings_out_of_range_are_refused() -> None:
    for make, match in (
        (lambda: Tuning(rank=0), "tuning.rank must be a whole number of at least 1; it is 0"),
        (lambda: Tuning(head="kept"), "head"),  # type: ignore[arg-type]
        (lambda: FedHL(residual=True), "'exact' or 'capped', not 'auto'"),
        (lambda: HetLoRA(prune=0.0), "prune must be > 0 and <= 1"),
        (lambda: HetLoRA(penalty=-1.0), "penalty must be >= 0"),
        (lambda: FLoRA(keep="merge"), "Did you mean 'merged'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=match):
            make()


class Unused(nn.Module):
    """Its adapted layer has no part in the output."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head = nn.Linear(INPUTS, 5), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@every
def test_training_that_changes_no_factor_is_an_error(kind: Any) -> None:
    federation = Federation.from_arrays(arrays(), Unused, classes=CLASSES, rank=[2] * 4)
    # the decay of AdamW moves A all the same
    for optimizer in (SGD(lr=0.1), AdamW(lr=0.1)):
        run = Run(kind(optimizer=optimizer), federation, RunSettings(rounds=1), Sequential())
        with pytest.raises(TaskError, match="client 0, round 0: training changed no LoRA factor"):
            run.step()
    for quiet in (SGD(lr=0.0), SGD(lr=0.0, groups={"rest": Group(lr=0.1)})):
        Run(kind(optimizer=quiet), federation, RunSettings(rounds=1), Sequential()).step()


@pytest.mark.few(3)
@every
def test_steps_below_the_rounding_of_trained_factors_are_no_error(kind: Any) -> None:
    vanishing = Schedule("step", factor=1e-40, every=1)
    go(kind, 2, optimizer=SGD(lr=0.1, schedule=vanishing))


@pytest.mark.parametrize("steps", [None, 1])
@every
def test_rounds_after_the_end_of_a_schedule_over_rounds_are_no_error(kind: Any, steps: int | None) -> None:
    # FLoRA begins with fresh factors in every round
    go(kind, 2, optimizer=SGD(lr=0.1, local_schedule=LocalSchedule("cosine", rounds=1, steps=steps)))


# -- what travels --------------------------------------------------------------------------------------------


def numbers(kind: Any, rank: int) -> int:
    """Of a client's factors that travel."""
    return sum({FFALoRA: d, FedSALoRA: k}.get(kind, d + k) * rank for d, k in SHAPES)


@pytest.mark.few(4)
@every
@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
def test_the_head_travels_only_where_it_is_shared(kind: Any, head: Any) -> None:
    run = go(kind, 2, tuning=Tuning(rank=2, scaling="alpha", head=head), participation=0.75)
    initial = run.federation.architectures["model"].head_of(run.federation.architectures["model"].initial)
    for k, rank in enumerate(ranks_for(kind)):
        state, up = box(run, k)
        shared = {p for p in paths(up) if "head" in p}
        assert shared == ({"/rest/head.weight", "/rest/head.bias"} if head == "shared" else set())
        assert tree.numel(up) == numbers(kind, rank) + (HEAD if head == "shared" else 0)
        kept = {p for p in paths(state) if "head" in p}
        assert len(kept) == (2 if head == "personal" else 0)
        own = run.personal(run.federation.infos[k])
        assert all(torch.equal(own[n], p) for n, p in initial.items()) == (
            head == "frozen" or (head == "personal" and k not in run.state.clients)
        )
        if head == "personal" and k in run.state.clients:
            held = run.state.clients[k]
            assert all(
                torch.equal(own[n], (held if isinstance(held, dict) else held.rest)[n]) for n in initial
            )
    for server in (run.state.server, run.method.server_init(run.task)):
        assert set(server.rest) == (set(initial) if head == "shared" else set())
    replies = replies_of(run, (0, 2))
    if head == "shared":
        sizes = [r.client.examples for r in replies]
        mean = sum(
            w * r.upload.rest["head.weight"].numpy() for w, r in zip(sizes, replies, strict=True)
        ) / sum(sizes)
        np.testing.assert_allclose(
            answered(run, replies).rest["head.weight"].numpy(), mean, rtol=0, atol=1e-14
        )


@pytest.mark.full
def test_the_servers_series_uses_a_clients_own_head() -> None:
    for kind in MIXED:
        run = go(kind, 2, ranks=(9,) * 4, tuning=Tuning(rank=9, head="personal"))
        for k in range(4):
            torch.testing.assert_close(scores(run, k), scores(run, k, "server"), rtol=0, atol=1e-12)
        heads = [run.personal(i)["head.bias"] for i in run.federation.infos]
        assert not torch.allclose(heads[0], heads[1], atol=1e-3)


@pytest.mark.few(8)
@pytest.mark.parametrize(("wire", "size"), [("float32", 8), ("bfloat16", 2), ("int8", 1)])
@every
def test_bytes_on_the_wire(kind: Any, wire: Any, size: int) -> None:
    run = go(kind, 0, tuning=Tuning(rank=2, head="frozen", wire=wire))
    ranks = ranks_for(kind)
    ups = [box(run, k)[1] for k in range(4)]
    for up, rank in zip(ups, ranks, strict=True):
        # of int8 a scale of four bytes for each column of B and row of A
        scales = 4 * rank * len(SHAPES) * (1 if kind in (FFALoRA, FedSALoRA) else 2) if wire == "int8" else 0
        assert tree.nbytes(up) == size * numbers(kind, rank) + scales
        assert tree.encoded_size(up) == len(tree.encode(up)) >= tree.nbytes(up)
    assert run.step().bytes_up == sum(tree.encoded_size(up) for up in ups)


@pytest.mark.full
@every
def test_a_lossy_wire_costs_accuracy_and_nothing_else(kind: Any) -> None:
    exact, lossy = (
        go(kind, 3, tuning=Tuning(rank=2, wire=w), participation=0.75) for w in ("float32", "int8")
    )
    for k in range(4):
        gap = float((scores(exact, k) - scores(lossy, k)).abs().max())
        # of 8 bits a factor; clients that train on what they received do not stray far
        assert 1e-6 < gap < 0.05
