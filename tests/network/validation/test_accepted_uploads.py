"""Honest uploads: none is refused, whatever the method, its settings, the models, the ranks and the round."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.config.sections.network_section import Limits
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, ServerView, Task
from fedlowrank.core.learning.optimizer import SGD, AdamW, Schedule
from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import AnyMethod, ClientJob, ClientResult
from fedlowrank.engines.sequential import Sequential
from fedlowrank.linalg.delta import DeltaForm
from fedlowrank.linalg.factored import Factored
from fedlowrank.linalg.matricize import LowRank, Sparse
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.models.architecture import Architecture
from fedlowrank.network.validation.shape_tracing import trace_template
from fedlowrank.network.validation.uploads import Templates, inspect_upload
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation as small
from fedlowrank.training.tracing import TracingTrainer
from tests.methods.setting import KINDS, Net, federate_one_model, federate_two_models, make_arrays
from tests.network.validation.attacked_rounds import aggregate
from tests.support.method_calls import Reply

torch.set_num_threads(1)

FAST: dict[str, Any] = {"optimizer": SGD(lr=0.3), "batch_size": 8}
WIRES: tuple[Any, ...] = ("float32", "bfloat16", "int8")
HEADS = ("shared", "personal", "frozen")
UNEQUAL = ("fedhl", "hetlora", "flexlora", "flora")
EQUAL = ("fedit", "ffa_lora", "fedsa_lora", "fedex_lora")


def made(name: str, **settings: Any) -> AnyMethod:
    """A method of that name."""
    method: AnyMethod = METHODS[name](**settings)
    return method


@dataclass
class Guarded(Sequential):
    """The sequential engine, whose every upload crosses as bytes and is inspected."""

    name = "guarded"
    templates: Templates | None = None
    uploads: list[Any] = field(default_factory=list)
    downs: list[Any] = field(default_factory=list)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Iterator[ClientResult]:
        self.templates = self.templates or Templates(method, task)
        for job, outcome in zip(jobs, super().run(method, federation, task, round, jobs), strict=True):
            data = tree.encode(outcome.upload)
            template = self.templates.of(job.client, job.down)
            upload = inspect_upload(data, template, job.client, Limits())
            assert tree.equal(upload, outcome.upload)
            # the limits are of the size of what comes
            assert len(data) <= template.bytes + 64
            assert int.from_bytes(data[:8], "little") <= template.header
            self.uploads.append(upload)
            self.downs.append(job.down)
            yield dataclasses.replace(outcome, upload=upload)


def go(method: AnyMethod, federation: Federation, rounds: int = 3, **settings: Any) -> Guarded:
    """A few rounds in which some clients miss some, and the second net lets everything through, too."""
    rest = {"rounds": 6, "participation": 0.75, "evaluate_every": 99, **settings}
    guarded = Guarded()
    run = Run(method, federation, RunSettings(**rest), guarded)
    for t in range(rounds):
        before, start = run.state.server, len(guarded.uploads)
        infos = run.participants(t)
        run.step()
        actual = zip(infos, guarded.uploads[start:], strict=True)
        replies = [Reply(i, u) for i, u in actual if u is not None]
        if replies:
            view = ServerView(run.task, t, federation.key / "server" / t)
            server, dropped = aggregate(method, before, replies, view)
            assert not dropped
            assert tree.equal(server, run.state.server)
    return guarded


# -- no honest reply is refused


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_its_default_settings(name: str) -> None:
    method = made(name)
    actual = go(method, small(method.heterogeneous))
    assert len(actual.uploads) == 12


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_methods_of_each_kind_on_models_in_float64_with_adamw(name: str) -> None:
    optimizer: Any = (
        SGD(lr=0.1, schedule=Schedule("exponential", factor=0.5))
        if name in ("scaffold", "fednova", "fedslr")
        else AdamW(lr=0.01)
    )
    method = made(name, **{**FAST, "optimizer": optimizer}, **training(name))
    assert go(
        method, federate_two_models() if method.heterogeneous else federate_one_model(), rounds=2
    ).uploads


def training(name: str) -> dict[str, Any]:
    """The rank of a method that trains factors; nothing for others."""
    return {"training": LoRATraining(rank=2)} if trains_factors(name) else {}


def trains_factors(name: str) -> bool:
    return "training" in {f.name for f in dataclasses.fields(METHODS[name])}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "head", "wire"),
    [
        *itertools.product(("fedhl", "fedit"), HEADS, WIRES),
        *((n, *pair) for n in (*UNEQUAL[1:], *EQUAL[1:]) for pair in zip(HEADS, WIRES, strict=True)),
    ],
)
def test_lora_on_every_wire_and_with_every_head(name: str, head: Any, wire: Any) -> None:
    ranks = (1, 2, 3, 4) if name in UNEQUAL else (3,) * 4
    federation = Federation.from_arrays(
        make_arrays(), lambda: Net(9, 10, dtype=torch.float32), classes=4, rank=ranks
    )
    method = made(name, **FAST, training=LoRATraining(rank=2, scaling="alpha", head=head, wire=wire))
    actual = go(method, federation)
    seen = {next(iter(u.factors.values())).b.shape[1] for u in actual.uploads}
    assert seen == ({0} if name == "fedsa_lora" else set(ranks))


@pytest.mark.full
def test_a_client_may_prune_its_rank_and_only_as_declared() -> None:
    federation = Federation.from_arrays(make_arrays(), lambda: Net(9, 10), classes=4, rank=(2, 5, 7, 9))
    for wire in WIRES:
        method = made("hetlora", **FAST, prune=0.6, penalty=3.0, training=LoRATraining(wire=wire))
        actual = go(method, federation, rounds=5)
        pairs = list(zip(actual.downs, actual.uploads, strict=True))
        ranks = [[next(iter(m.factors.values())).b.shape[1] for m in pair] for pair in pairs]
        assert {up < down for down, up in ranks} == {True, False}
        assert all(up in (down, max(1, int(0.6 * down))) for down, up in ranks)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "flora stacked": ("flora", {"base_updates": "stacked"}),
    "flora merged": ("flora", {"base_updates": "merged"}),
    "fedex stacked": ("fedex_lora", {"base_updates": "stacked"}),
    "fedhl with the residual": ("fedhl", {"residual": True, "delta_form": DeltaForm("exact")}),
    "fedhl dense": ("fedhl", {"delta_form": DeltaForm("dense")}),
    "flexlora capped": ("flexlora", {"delta_form": DeltaForm("capped", cap=2)}),
    "hetlora per index by norm": ("hetlora", {"per_index": True, "weighting": "norm"}),
    "fedspa with fixed masks": ("fedspa", {"prune": 0.0}),
    "fedspa": ("fedspa", {"density": 0.6}),
    "fedslr of low rank": ("fedslr", {"lam": 0.06, "prox_step": 5.0}),
    "fedslr sparse, with every gamma": (
        "fedslr",
        {"lam": 0.02, "global_norm": "sparse", "memory_efficient": False},
    ),
    "gpgd": ("gpgd", {"lam": 0.03}),
    "floral, eq. 5": ("floral", {"router": Router(update="mfl")}),
    "floral, noise": ("floral", {"router": Router(noise=1.0, top=2, keep=False), "center": True}),
    "floral, optimal": ("floral", {"router": Router(routing="optimal")}),
    "ensemble, eq. 5": ("ensemble", {"router": Router(update="mfl"), "mix": "weights"}),
    "ensemble, optimal": ("ensemble", {"router": Router(routing="optimal")}),
    "ifca": ("ifca", {"weighting": "uniform"}),
    "fedproto": ("fedproto", {"inference": "nearest", "weighting": "uniform"}),
    "feddyn": ("feddyn", {"inference": "mean_of_clients"}),
    "per-fedavg": ("per_fedavg", {"variant": "hessian_free"}),
    "pfedlora": ("pfedlora", {"width": 3, "relu": True, "start": "svd"}),
    "fedavgm": ("fedavgm", {"server_momentum": 0.5, "weighting": "uniform"}),
    "fednova with momentum": ("fednova", {"optimizer": SGD(lr=0.1, momentum=0.9)}),
    "fednova, proximal": ("fednova", {"mu": 0.1}),
    "fedbabu, head": ("fedbabu", {"fine_tuned_part": "head", "fine_tuning_epochs": 1}),
    "scaffold that stands still": ("scaffold", {"optimizer": SGD(lr=0.0)}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_change_what_is_sent(case: str) -> None:
    name, settings = SETTINGS[case]
    ranks = (1, 2, 3, 4) if name in UNEQUAL else (3,) * 4
    rest: dict[str, Any] = {"rank": ranks} if trains_factors(name) else {"cluster": (0, 1, 0, 2)}
    federation = Federation.from_arrays(
        make_arrays(), lambda: Net(9, 10, dtype=torch.float32), classes=4, **rest
    )
    actual = go(made(name, **{**FAST, **settings}), federation, rounds=4)
    assert len(actual.uploads) == 12
    if case == "fedslr of low rank":
        # the download changes its form, the upload does not
        forms = {type(w) for down in actual.downs for w in down.values()}
        assert LowRank in forms
    if case.startswith("fedslr sparse"):
        assert any(isinstance(w, Sparse) for down in actual.downs for w in down.values())


@pytest.mark.full
@pytest.mark.parametrize("energy", [0.3, 0.8, 1.0])
def test_weights_travel_whole_or_as_factors_of_any_rank(energy: float) -> None:
    method = made("fedkd", **FAST, energy_start=energy, energy_end=max(0.99, energy))
    federation = Federation.from_arrays(make_arrays(), lambda: Net(30, 20, dtype=torch.float32), classes=4)
    actual = go(method, federation, rounds=6, participation=0.5)
    forms = {type(w) for upload in actual.uploads for w in upload.values()}
    assert forms == ({Tensor} if energy == 1 else {Tensor, Factored})
    if energy < 1:
        # a client that missed rounds is sent several updates
        assert max(len(down.updates) for down in actual.downs) > 1
        ranks = {w.rank for u in actual.uploads for w in u.values() if isinstance(w, Factored)}
        assert len(ranks) > 2


@pytest.mark.full
@pytest.mark.parametrize("name", ["fd", "fedproto"])
def test_clients_send_rows_for_the_classes_they_own(name: str) -> None:
    actual = go(made(name, **FAST), federate_two_models())
    assert {len(u.labels) for u in actual.uploads} == {2, 3}


# -- other data


def regression() -> Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 6)), rng.normal(size=(20, 3)).astype(np.float32)) for _ in range(4)]
    return Federation.from_arrays(data, lambda: Net(5, 4, inputs=6, classes=3, dtype=torch.float32))


class Normalized(nn.Module):
    """Images, a batch normalization of planes and one of vectors, for which one example is no batch."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.payload = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5)
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.payload(x))
        return scores


def images() -> Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 2, 6, 6)).astype(np.float32), rng.integers(0, 4, 20)) for _ in range(4)]
    return Federation.from_arrays(data, Normalized, classes=4)


class Header(nn.Module):
    """Scores of the next word by the last one."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.header, self.layer, self.head = nn.Embedding(9, 5), nn.Linear(5, 6), nn.Linear(6, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(self.header(input_ids) * attention_mask[..., None]))
        return scores


def texts() -> Federation:
    draw = torch.Generator().manual_seed(0)
    data, infos = [], []
    for i in range(4):
        ids = torch.randint(1, 9, (12, 7), generator=draw)
        examples = Examples({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids)
        data.append(ClientData(examples, examples.take(torch.arange(0)), examples))
        infos.append(ClientInfo(i, 12, "m", 2))
    example = {n: torch.ones(1, 7, dtype=torch.int64) for n in ("input_ids", "attention_mask")}
    return Federation(data, infos, {"m": Architecture("m", Header(), example)}, ())


@pytest.mark.full
@pytest.mark.parametrize("data", [regression, images, texts])
@pytest.mark.parametrize("name", KINDS)
def test_methods_of_each_kind_on_other_kinds_of_data(name: str, data: Callable[[], Federation]) -> None:
    if METHODS[name].needs_classes and data is not images:
        pytest.skip("needs classes")
    router = {"router": Router(update="mfl")} if name in ("floral", "ensemble") else {}
    settings = {"optimizer": SGD(lr=0.01), "batch_size": 10, **training(name), **router}
    assert len(go(made(name, **settings), data(), rounds=2).uploads) == 6


# -- what it costs to know


def test_clients_that_are_alike_have_one_template() -> None:
    federation = small(True, client_count=200)
    method, calls = made("pfedlora"), []

    class Counted(type(method)):  # type: ignore[misc]
        def local_update(self, state: Any, down: Any, view: Any) -> Any:
            calls.append(view.info.id)
            return super().local_update(state, down, view)

    task, counted = federation.task(5), Counted()
    server = method.server_init(task)
    templates = Templates(counted, task)
    for _ in range(3):
        for info in federation.infos:
            templates.of(info, method.download(server, info))
    # clients are of two architectures
    assert calls == [0, 1]
    # what is sent is looked at for its form alone, and a form that is new is looked at anew
    templates.of(federation.infos[0], tree.add(server, server))
    assert len(calls) == 2
    templates.of(federation.infos[0], tree.map_leaves(Tensor.double, server))
    assert len(calls) == 3
    for rank in range(1, 400):
        templates.of(dataclasses.replace(federation.infos[0], rank=rank), server)
    assert len(templates._known) == 256


def test_a_template_is_that_of_a_form_and_not_of_values() -> None:
    federation = Federation.from_arrays(make_arrays(), lambda: Net(9, 10), classes=4, rank=(4,) * 4)
    method, task, info = made("hetlora", prune=0.5), federation.task(3), federation.infos[0]
    down = method.download(method.server_init(task), info)
    expected = trace_template(method, task, info, down)
    # factors of -1 would seem to shrink in the dry run, as if they were to be pruned; a client may be sent
    # anything
    for value in (-1.0, float("nan"), 1e300):
        actual = trace_template(
            method, task, info, tree.map_leaves(lambda t, v=value: torch.full_like(t, v), down)
        )
        assert all(
            tree.signature(a) == tree.signature(b)
            for a, b in zip(actual.form.forms, expected.form.forms, strict=True)
        )
    assert [next(iter(f.factors.values())).rank for f in expected.form.forms] == [4, 2]


@pytest.mark.parametrize(
    ("data", "shape", "dtype"),
    [(regression, (2, 3), torch.float32), (images, (2,), torch.int64), (texts, (2, 7), torch.int64)],
)
def test_targets_of_shape_tracing_are_of_the_kind_of_the_task(
    data: Any, shape: Any, dtype: torch.dtype
) -> None:
    task = data().task(3)
    batch = TracingTrainer(made("fedavg"), task, task.architectures[task.clients[0].architecture])._batch()
    assert (tuple(batch.y.shape), batch.y.dtype) == (shape, dtype)
    x = batch.x.values() if isinstance(batch.x, dict) else [batch.x]
    assert all(len(t) == 2 for t in x)


def test_shape_tracing_takes_nothing_from_the_client_nor_from_its_word() -> None:
    federation = small(False)
    # data that cannot be read, and a claim that would fill the memory
    task = dataclasses.replace(
        federation.task(3), clients=[dataclasses.replace(federation.infos[0], example_count=10**15)]
    )
    method = made("floral", router=Router(noise=1.0))
    info = task.clients[0]
    template = trace_template(method, task, info, method.download(method.server_init(task), info))
    assert template.form.pi.shape == (4,)
    held = [t.untyped_storage().nbytes() for _, t in tree.leaves(template.form)]
    assert max(held) <= 8
