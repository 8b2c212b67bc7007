"""What is set and read by nothing is an error that names the setting and what to type: in files and in constructors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlowrank import Attack, Clipping, Compression, Privacy, Robust, SecureSums, simulate
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.config.comparison import plan_runs
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.sections.data_section import Preparation
from fedlowrank.config.tuning import plan_tuning
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import Schedule
from fedlowrank.data.augment import Augment
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.methods.per_fedavg import PerFedAvg
from fedlowrank.methods.shared.effective_delta import Weighing
from fedlowrank.models.zoo import ModelSettings
from fedlowrank.rounds.participation.devices import Devices
from tests.methods.setting import federate_one_model

UNREAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str, str]] = {
    "noise": (lambda: Privacy(noise=1.0), {"privacy": {"noise": 1.0}}, "privacy.noise = 1.0", "'central' or 'local'"),
    "epsilon": (lambda: Privacy(epsilon=1.0), {"privacy": {"epsilon": 1.0}}, "privacy.epsilon", "privacy.kind"),
    "delta": (lambda: Privacy(delta=1e-5), {"privacy": {"delta": 1e-5}}, "privacy.delta", "privacy.kind"),
    "accountant": (
        lambda: Privacy("none", accountant="pld"), {"privacy": {"accountant": "pld"}}, "privacy.accountant",
        "privacy.kind",
    ),
    "hostile": (lambda: Robust(hostile=0.3), {"robust": {"hostile": 0.3}}, "robust.hostile", "'krum'"),
    "weights": (lambda: Robust(weights="examples"), {"robust": {"weights": "examples"}}, "robust.weights", "'median'"),
    "error feedback": (
        lambda: Compression(error_feedback=False), {"compression": {"error_feedback": False}},
        "compression.error_feedback", "compression.uplink",
    ),
    "rate": (lambda: Clipping(1.0, rate=0.5), {"clipping": {"norm": 1.0, "rate": 0.5}}, "clipping.rate", "quantile"),
    "share": (lambda: Attack(share=0.5), {"attack": {"share": 0.5}}, "attack.share", "'sign_flip'"),
    "strength": (
        lambda: Attack("label_flip", strength=2.0), {"attack": {"kind": "label_flip", "strength": 2.0}},
        "attack.strength", "'scaled'",
    ),
    "target": (
        lambda: Attack("scaled", target=3), {"attack": {"kind": "scaled", "target": 3}}, "attack.target", "'backdoor'"
    ),
    "bits": (lambda: SecureSums(bits=8), {"secure": {"bits": 8}}, "secure.bits", "secure.on to True"),
    "bound": (lambda: SecureSums(bound=1.0), {"secure": {"bound": 1.0}}, "secure.bound", "secure.on"),
    "threshold": (lambda: SecureSums(threshold=0.9), {"secure": {"threshold": 0.9}}, "secure.threshold", "secure.on"),
    "per client": (
        lambda: Devices(per_client=True), {"devices": {"per_client": True}}, "devices.per_client", "a list"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_a_setting_that_nothing_reads_is_named_with_what_to_type(case: str) -> None:
    make, run, named, cure = UNREAD[case]
    for refused in (make, lambda: ExperimentConfig.parse({"run": run})):
        with pytest.raises(ConfigError) as error:
            refused()
        assert f"run.{named}" in str(error.value)
        assert cure in str(error.value)
        assert "leave run." in str(error.value)


def test_the_settings_of_the_issue_never_run_unprotected() -> None:
    """Noise and a clipping norm, without a kind: the losses were those of no privacy to every digit."""
    with pytest.raises(ConfigError, match=r"run\.privacy\.noise = 1\.0 does nothing"):
        simulate(
            "fedavg", federate_one_model(), rounds=1, privacy=Privacy(noise=1.0), clipping=Clipping(norm=1.0)
        )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Schedule(factor=0.9), "schedule.factor = 0.9 does nothing"),
        (lambda: Schedule("cosine", factor=0.9), "'exponential' or 'step'"),
        (lambda: Schedule("step", factor=0.9, floor=0.1), "schedule.floor"),
        (lambda: Schedule("exponential", factor=0.9, every=2), "schedule.every"),
        (lambda: Schedule("exponential"), "schedule.factor = 1.0"),
        (lambda: Augment(fill=0.5), "Augment.fill = 0.5 does nothing"),
        (lambda: Preparation(keep_at_least=5), "data.keep_at_least = 5 does nothing"),
        (lambda: PerFedAvg(delta=0.1), "delta = 0.1 does nothing"),
        (lambda: ModelSettings(names=("linear",), hidden=(9,)), "model.hidden = (9,) does nothing"),
        (lambda: ModelSettings(names=("cnn1", "vgg8"), bias=False), "name mlp or linear in model.names"),
        (lambda: ModelSettings(names=("mlp",), split="fc1"), "model.split = 'fc1' does nothing"),
        (lambda: ModelSettings(names=("m:own",), hidden=(9,)), "model.hidden"),
        (lambda: Router("optimal", lr=1.0), "router.lr = 1.0 does nothing with router.routing = 'optimal'"),
        (lambda: Router("optimal", update="mfl"), "router.update = 'mfl' does nothing"),
        (
            lambda: Router(update="mfl", unseen_steps=3),
            "router.unseen_steps = 3 does nothing with router.update = 'mfl'",
        ),
        (lambda: Router(update="mfl", noise=0.1), "router.noise"),
        (lambda: Router(update="mfl", temperature=2.0), "router.temperature"),
        (lambda: Weighing("ranks", eps=0.1), "weighing.eps = 0.1 does nothing with weighing.by = 'ranks'"),
        (lambda: Weighing("examples", by_examples=True), "weighing.by_examples"),
        (
            lambda: HetLoRA(penalty=0.1),
            "HetLoRA.penalty = 0.1 does nothing with HetLoRA.prune = 1.0: set prune",
        ),
    ],
)
def test_other_sections_with_a_switch(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert named in str(error.value)


def test_settings_that_some_model_or_value_reads_are_accepted() -> None:
    """Of several models one reads the field is enough; a switched table keeps what its new value reads."""
    assert ModelSettings(names=("linear", "mlp"), hidden=(9,), bias=False).hidden == (9,)
    Router(update="mfl", lr=2.0, top=1)
    tables = {
        "method": "floral",
        "model": {"names": ["mlp"], "hidden": [9], "bias": False},
        "methods": {"floral": {"router": {"lr": 0.3, "unseen_steps": 3}}},
        "tune": {"grid": {"router.routing": ["learned", "optimal"], "epochs": [1, 2]}},
    }
    base = ExperimentConfig.parse(tables)
    made = base.overlay({"model": {"names": ["linear"]}})
    assert made.model == ModelSettings(names=("linear",), bias=False)
    actual = [setting.runs[0].experiment.build_method("floral") for setting in plan_tuning(base, Path("out"))]
    assert [one.router for one in actual] == [Router(lr=0.3, unseen_steps=3)] * 2 + [Router("optimal")] * 2  # type: ignore[attr-defined]


def test_a_value_that_is_the_default_says_nothing() -> None:
    """Files spell defaults out, and a stored configuration holds all of them."""
    run = {
        "robust": {"hostile": 0.2, "weights": "equal"},
        "attack": {"share": 0.2},
        "secure": {"bits": 22},
        "privacy": {"kind": "none", "accountant": "rdp"},
    }
    made = ExperimentConfig.parse({"run": run})
    assert made == ExperimentConfig.parse({})
    assert ExperimentConfig.parse({"run": dataclasses.asdict(made.run)}).run == made.run


@pytest.mark.parametrize(
    ("run", "vary", "expected"),
    [
        (
            {"robust": {"rule": "krum", "hostile": 0.3}},
            "run.robust.rule=mean,median,krum",
            [Robust(), Robust("median", 0.3), Robust("krum", 0.3)],
        ),
        (
            {"attack": {"kind": "backdoor", "share": 0.3, "target": 1}},
            "run.attack.kind=none,backdoor",
            [Attack(), Attack("backdoor", 0.3, target=1)],
        ),
        (
            {"secure": {"on": True, "bits": 8}},
            "run.secure.on=false,true",
            [SecureSums(), SecureSums(True, 8)],
        ),
        (
            {"compression": {"uplink": "int8", "error_feedback": False}},
            "run.compression.uplink='',int8",
            [Compression(), Compression("int8", error_feedback=False)],
        ),
    ],
)
def test_a_comparison_may_switch_a_section_off(run: dict[str, Any], vary: str, expected: list[Any]) -> None:
    """What the chosen value does not read is left out of that run."""
    base = ExperimentConfig.parse({"run": {"participation": 1.0, **run}})
    planned = plan_runs(base, ["fedavg"], [0], [vary], Path("runs"))
    assert [getattr(one.experiment.run, next(iter(run))) for one in planned] == expected


def test_a_comparison_does_not_leave_out_what_it_varies() -> None:
    base = ExperimentConfig.parse({"run": {"robust": {"rule": "krum"}}})
    with pytest.raises(ConfigError, match=r"run\.robust\.hostile = 0\.3"):
        plan_runs(base, ["fedavg"], [0], ["run.robust.rule=mean", "run.robust.hostile=0.3"], Path("runs"))


def test_the_best_state_needs_validation_and_a_folder(tmp_path: Path) -> None:
    for settings, named in (({"folder": tmp_path / "run"}, "validation"), ({}, "folder")):
        with pytest.raises(ConfigError, match=named):
            simulate("fedavg", federate_one_model(), rounds=1, keep_best=True, **settings)
    assert not (tmp_path / "run").exists()
