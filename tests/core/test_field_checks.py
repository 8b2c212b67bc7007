"""Constructors and functions answer wrong arguments as the command line does, and keep their signatures."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

import fedlowrank
from fedlowrank import (
    SGD,
    AdamW,
    Augment,
    Clipping,
    Devices,
    EarlyStopping,
    Federation,
    Floral,
    Method,
    Privacy,
    RunSettings,
    Schedule,
    simulate,
)
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.config.reading.field_help import list_tables
from fedlowrank.core.arguments.bounds import check_bounds
from fedlowrank.core.arguments.field_checks import CheckedFields, FieldChecks
from fedlowrank.core.errors import ConfigError
from fedlowrank.data.datasets.csv_table import Csv
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedavgm import FedAvgM
from fedlowrank.methods.fedhl import FedHL


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedAvg(lr=0.1), "FedAvg has no argument 'lr'. Did you mean optimizer=SGD(lr=0.1)?"),
        (lambda: FedAvg(learning_rate=0.1), "Did you mean optimizer=SGD(lr=0.1)?"),
        (lambda: FedAvg(beta1=0.1), "Did you mean optimizer=AdamW(beta1=0.1)?"),
        (lambda: FedAvg(factor=0.1), "Did you mean optimizer=SGD(schedule=Schedule(factor=0.1))?"),
        (lambda: FedAvg(rounds=5), "Did you mean simulate(..., rounds=5)?"),
        (lambda: FedAvg(epoch=5), "Did you mean 'epochs'?"),
        (lambda: FedAvg(nothing=5), "FedAvg has no argument 'nothing'. Known: 'batch_size', 'drop_last', 'epochs'"),
        (lambda: FedHL(rank=2), "FedHL has no argument 'rank'. Did you mean training=LoRATraining(rank=2)?"),
        (lambda: FedAvg(epochs=1.5), "FedAvg.epochs: input should be a valid integer, got a number with a frac"),
        (lambda: FedAvg(epochs=True), "FedAvg.epochs: input should be a valid integer; it is True"),
        (lambda: FedAvg(epochs=None), "FedAvg.epochs: input should be a valid integer; it is None"),
        (lambda: FedAvg(batch_size="32"), "FedAvg.batch_size: input should be a valid integer; it is '32'"),
        (lambda: FedAvg(1, "32"), "FedAvg.batch_size: input should be a valid integer; it is '32'"),
        (lambda: FedAvg(*range(1, 9)), "takes at most 6 arguments (epochs, batch_size, optimizer, drop_last, steps, weighting)"),
        (lambda: FedAvg(weighting="example"), "FedAvg.weighting: 'example' is no choice. Did you mean 'examples'?"),
        (lambda: FedAvg(optimizer="adam"), "SGD(...) or fedlowrank.AdamW(...), not 'adam'. Write optimizer=AdamW()"),
        (lambda: FedAvg(optimizer={"lr": 0.1}), "Write optimizer=SGD(lr=0.1)"),
        (lambda: FedAvg(optimizer=SGD), "not the class fedlowrank.core.learning.optimizer.SGD"),
        (lambda: FedAvg(optimizer=torch.optim.SGD), "not the class torch.optim.sgd.SGD"),
        (lambda: FedAvgM(server_optimizer=0.1), "has no argument 'server_optimizer'"),
        (lambda: dataclasses.replace(FedAvg(), epochs="2"), "FedAvg.epochs: input should be a valid integer"),
        (lambda: SGD(lr="0.1"), "SGD.lr: input should be a valid number; it is '0.1'"),
        (lambda: SGD(lr=torch.tensor(0.1)), "SGD.lr: input should be a valid number; it is a torch.Tensor"),
        (lambda: SGD(nesterov=1), "SGD.nesterov: input should be a valid boolean; it is 1"),
        (lambda: SGD(clip="1"), "SGD.clip: input should be a valid number; it is '1'"),
        (lambda: SGD(schedule="cosine"), "SGD.schedule must be fedlowrank.Schedule(...), not 'cosine'. Write schedule=Sch"),
        (lambda: SGD(schedule={"kind": "step"}), "Write schedule=Schedule(kind='step')"),
        (lambda: SGD(groups={"head": 0.1}), "SGD.groups must be fedlowrank.Group(...), not 0.1"),
        (lambda: SGD(groups=["head"]), "SGD.groups: input should be a dict"),
        (lambda: Schedule("cosine", rounds="5"), "Schedule.rounds: input should be a valid integer"),
        (lambda: Schedule(kind=5), "Schedule.kind: 5 is no choice"),
        (lambda: AdamW(betas=(0.8, 0.9)), "AdamW has no argument 'betas'. Write beta1=0.8, beta2=0.9"),
        (lambda: AdamW(betas=0.9), "AdamW has no argument 'betas'. Write beta1=..., beta2=..."),
        (lambda: AdamW(betas=(0.8, 0.9, 0.99)), "AdamW has no argument 'betas'. Write beta1=..., beta2=..."),
        (lambda: AdamW(momentum=0.9), "AdamW has no argument 'momentum'"),
        (lambda: Clipping(norm="1"), "Clipping.norm: input should be a valid number"),
        (lambda: Privacy(kind="centrl"), "Privacy.kind: 'centrl' is no choice. Did you mean 'central'?"),
        (lambda: Augment(flip="yes"), "Augment.flip: input should be a valid boolean"),
        (lambda: Devices(uplink="fast"), "Devices.uplink"),
        (lambda: RunSettings(clipping=1.0), "run.clipping must be fedlowrank.Clipping(...), not 1.0"),
        (lambda: RunSettings(privacy="central"), "Write privacy=Privacy(kind='central')"),
        (lambda: RunSettings(metrics="auroc"), "run.metrics: a list is needed, such as ['auroc']"),
        (lambda: RunSettings(adapters=[1, 2.5]), "run.adapters, value 1: input should be a valid integer"),
        (lambda: Csv(label="y"), "Csv.path: this field is needed"),
        (lambda: EarlyStopping(patience="3"), "EarlyStopping.patience: input should be a valid integer"),
        (lambda: EarlyStopping(patince=3), "EarlyStopping has no argument 'patince'. Did you mean 'patience'?"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_settings(make: Callable[[], Any], says: str) -> None:
    assert says in refused(make)


CLIENTS = [(np.zeros((8, 3), np.float32), np.arange(8) % 2) for _ in range(2)]
MODEL = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Federation.from_arrays(CLIENTS, MODEL, rank=2), "from_arrays.rank: a list is needed, such as [2]"),
        (lambda: Federation.from_arrays(CLIENTS, MODEL, ranks=[2]), "no argument 'ranks'. Did you mean 'rank'?"),
        (lambda: Federation.from_arrays(CLIENTS, MODEL, architecture="model"), "a list is needed, such as ['model']"),
        (lambda: Federation.from_arrays(CLIENTS, MODEL, val="0.1"), "from_arrays.val: input should be a valid number"),
        (lambda: Federation.from_arrays(CLIENTS, MODEL, seed=True), "from_arrays.seed: input should be a valid int"),
        (lambda: Federation.from_arrays(CLIENTS), "missing a required argument: 'model'"),
        (lambda: simulate("fedavg", federation(), rounds="2"), "rounds: input should be a valid integer; it is '2'"),
        (lambda: simulate("fedavg", federation(), lr=0.1), "the optimizer of the method: simulate(FedAvg(optimizer=SGD(lr=0.1))"),
        (lambda: simulate(FedAvg(optimizer=AdamW()), federation(), lr=0.1), "(FedAvg(optimizer=AdamW(lr=0.1))"),
        (lambda: simulate("fedavg", federation(), optimizer="adam"), "simulate(FedAvg(optimizer=AdamW())"),
        (lambda: simulate("fedavg", federation(), num_epochs=2), "Did you mean 'epochs'? It belongs to the method"),
        (lambda: simulate("fedavg", federation(), clusters=4), "FedAvg has none. Methods that have it: FLoRAL"),
        (lambda: simulate("fedavg", federation(), val=0.1), "belongs to the data: Federation.from_arrays(..., val="),
        (lambda: simulate("fedavg", federation(), noise=1.0), "Write privacy=Privacy(noise=1.0)."),
        (lambda: simulate("fedavg", federation(), round=1), "simulate has no argument 'round'. Did you mean 'rounds'?"),
        (lambda: simulate("fedavg", federation(), resume="no"), "simulate.resume: input should be a valid boolean"),
        (lambda: add_lora(MODEL, "2"), "add_lora.rank: input should be a valid integer; it is '2'"),
        (lambda: add_lora(MODEL, 2, target_module=["x"]), "Did you mean 'target_modules'?"),
        (lambda: add_lora(MODEL, 2, trainable="head"), "add_lora.trainable: a list is needed, such as ['head']"),
        (lambda: Floral(MODEL, ranks=0.1), "Floral has no argument 'ranks'. Did you mean 'rank'?"),
        (lambda: Floral(MODEL, "0.1"), "Floral.rank: input should be a valid number; it is '0.1'"),
        (lambda: Floral(MODEL, temperature=2.0), "Did you mean router=Router(temperature=2.0)?"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_a_function(make: Callable[[], Any], says: str) -> None:
    assert says in refused(make)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", METHODS)
def test_simulate_knows_where_every_field_of_a_method_belongs(name: str) -> None:
    method = METHODS[name]()
    run = {f.name for f in dataclasses.fields(RunSettings)}
    for field in dataclasses.fields(method):
        if field.name not in run:
            says = refused(lambda field=field: simulate(name, federation(), **{field.name: 1}))
            assert f"It belongs to the method: simulate({type(method).__name__}({field.name}=" in says
    for field in dataclasses.fields(method.optimizer):
        if field.name not in {*run, *(f.name for f in dataclasses.fields(method)), "kind", "schedule"}:
            says = refused(lambda field=field: simulate(name, federation(), **{field.name: 1}))
            kind = type(method.optimizer).__name__
            assert f"simulate({type(method).__name__}(optimizer={kind}({field.name}=1)), ...)" in says


def federation() -> Federation:
    return Federation.from_arrays(CLIENTS, MODEL)


def test_every_section_of_an_experiment_is_checked() -> None:
    classes = {table.settings for table in list_tables() if table.settings is not None}
    assert [cls.__name__ for cls in classes if not isinstance(cls, FieldChecks)] == []
    for cls in classes - {Method}:
        assert "has no argument 'surely_unknown'" in refused(lambda cls=cls: cls(surely_unknown=1))
        assert list(inspect.signature(cls).parameters) == [f.name for f in dataclasses.fields(cls) if f.init]


def test_values_that_fit_are_taken() -> None:
    method = FedAvg(np.int64(2), 16.0, AdamW(np.float32(0.5), clip=2))  # type: ignore[arg-type]  # 16 examples
    assert (method.epochs, type(method.epochs), method.batch_size) == (2, int, 16)
    assert type(method.batch_size) is int
    assert method.optimizer == AdamW(0.5, clip=2.0)
    assert type(method.optimizer.lr) is float
    assert RunSettings(keep_best=np.True_).keep_best is True  # type: ignore[arg-type]
    settings = RunSettings(adapters=[1, np.int64(2)], metrics=["auroc"])  # type: ignore[arg-type]
    assert settings.adapters == (1, 2)
    assert Csv(Path("a") / "b.csv", "y").path == str(Path("a") / "b.csv")  # type: ignore[arg-type]
    ranks = Federation.from_arrays(CLIENTS, MODEL, rank=np.array([1, 2]))  # type: ignore[arg-type]
    assert [info.rank for info in ranks.infos] == [1, 2]


def test_settings_are_copied_and_pickled_as_before() -> None:
    method = FedAvg(optimizer=SGD(lr=0.1, schedule=Schedule("cosine", rounds=5)))
    assert copy.deepcopy(method) == pickle.loads(pickle.dumps(method)) == method  # noqa: S301 - of our own
    assert dataclasses.replace(method, epochs=3).optimizer is method.optimizer


def test_signatures_stay_as_they_are_written() -> None:
    assert list(inspect.signature(FedAvg).parameters) == [
        "epochs",
        "batch_size",
        "optimizer",
        "drop_last",
        "steps",
        "weighting",
    ]
    assert inspect.signature(SGD).parameters["lr"].default == 0.01
    assert list(inspect.signature(add_lora).parameters)[:3] == ["module", "rank", "alpha"]
    assert list(inspect.signature(Floral).parameters)[:2] == ["model", "rank"]
    assert list(inspect.signature(Federation.from_arrays).parameters)[:2] == ["clients", "model"]
    assert "rounds" in (simulate.__doc__ or "")


# Methods of users


class _Own(Method[Any, None, Any, Any]):
    title = "Own"

    def server_init(self, task: Any) -> Any:
        return task.common_model(self.title).initial

    def local_update(self, state: None, down: Any, view: Any) -> Any:
        return None, down

    def server_update(self, server: Any, total: Any, view: Any) -> Any:
        return total


@dataclasses.dataclass(frozen=True)
class Own(_Own):
    beta: float = 0.5
    names: tuple[str, ...] = ()
    table: Mapping[str, float] = dataclasses.field(default_factory=dict)
    how: Literal["a", "b"] = "a"
    anything: Any = None
    function: Callable[[float], float] | None = None

    bounds: ClassVar[Mapping[str, str]] = {"beta": ">= 0 and < 1"}


def test_a_method_of_ones_own_is_checked() -> None:
    made = Own(beta=0, names=["x"], table={"y": 1}, anything=object(), function=abs)  # type: ignore[arg-type]
    assert (made.beta, made.names, made.function) == (0, ("x",), abs)
    assert "Own.beta: input should be a valid number; it is '0.1'" in refused(lambda: Own(beta="0.1"))  # type: ignore[arg-type]
    assert f"Own ({__name__}:Own): beta must be >= 0 and < 1; it is 2" in refused(lambda: Own(beta=2))
    assert "Own.how: 'c' is no choice" in refused(lambda: Own(how="c"))  # type: ignore[arg-type]
    assert "Own.table: input should be a valid number" in refused(lambda: Own(table={"y": "z"}))  # type: ignore[dict-item]
    assert "optimizer=SGD(lr=0.1)" in refused(lambda: Own(lr=0.1))  # type: ignore[call-arg]


def test_a_constructor_of_ones_own_is_left_alone() -> None:
    class Plain(_Own):
        def __init__(self, *names: str, **more: int) -> None:
            super().__init__()
            object.__setattr__(self, "given", (names, more))

    assert Plain("a", x=1).given == (("a",), {"x": 1})  # type: ignore[attr-defined]


def test_an_annotation_that_cannot_be_resolved_is_not_checked() -> None:
    class Local:
        pass

    @dataclasses.dataclass(frozen=True)
    class Other(_Own):
        one: Local | None = None

    one = Local()
    assert Other(one=one).one is one
    assert "has no argument 'two'" in refused(lambda: Other(two=1))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"beta": "[0, 1)"}, "bounds['beta'] is '[0, 1)'. Write '>= 0 and < 1'."),
        ({"beta": "(0, 1]"}, "Write '> 0 and <= 1'."),
        ({"beta": "]0; 1["}, "Write '> 0 and < 1'."),
        ({"beta": "[0, inf)"}, "Write '>= 0'."),
        ({"beta": "0 <= beta"}, "Write one comparison"),
        ({"beta": ">= 0, < 1"}, "Write one comparison"),
        ({"beta": ">= zero"}, "Write one comparison"),
        ({"beta": ""}, "Write one comparison"),
        ({"beta": (0, 1)}, "Write one comparison"),
        ({"gamma": "> 0"}, "bounds names 'gamma', which is no field"),
        ({"names": "> 0"}, "names must be a number, for bounds names it"),
        ("> 0", "bounds must be a dict by name of a field"),
    ],
)
def test_bounds_that_cannot_be_read(bounds: Any, says: str) -> None:
    made = dataclasses.make_dataclass("Made", [], bases=(Own,), frozen=True, namespace={"bounds": bounds})
    assert says in refused(made)


@pytest.mark.parametrize("bound", [">=0", "> -1", "<=1.5e0", ">= 0 and <= .5", " < 1"])
def test_bounds_that_can_be_read(bound: str) -> None:
    check_bounds(Own(beta=0.25), {"beta": bound}, "Own")


def test_the_public_settings_are_all_checked() -> None:
    actual = [getattr(fedlowrank, name) for name in fedlowrank.__all__]
    frozen = {v for v in actual if isinstance(v, type) and dataclasses.is_dataclass(v)}
    # what methods are handed, or what they return, is made in every step and not by users
    inner = {"Batch", "ClientInfo", "ClientModel", "ClientView", "Each", "Federation", "Key", "Mean", "Pass",
             "PaddedDimensions", "ProximalTerm", "Result", "ServerView", "Sum", "Task", "Update"}  # fmt: skip
    assert {v.__name__ for v in frozen if not issubclass(v, CheckedFields)} <= inner
