"""An experiment as one parsed object: it prints itself, takes overrides, and equals what means the same."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.field_help import find_tables
from fedlowrank.config.reading.merging import format_toml
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.partitioning.partition import Dirichlet, Iid

GROUPS = {"kind": "sgd", "lr": 0.5, "groups": {"head/weight": {"lr": 0.25}, "b.c": {"weight_decay": 1e-5}}}
TABLES: dict[str, Any] = {
    "name": "small",
    "title": 'a "title"\n\t\\ with \x7f, é and 中',
    "compare": ["fedavg", "half"],
    "vary": "run.rounds=1,2",
    "partition": {"kind": "dirichlet", "alpha": 0.25},
    "run": {"rounds": 2, "adapters": [1, 2], "target": 0.5, "keep_best": True},
    "network": {"limits": {"max_norm": 1e30}},
    "defaults": {"optimizer": GROUPS},
    "methods": {
        "half": {"method": "fedavg", "title": "Half", "weighting": "uniform"},
        "a b": {"method": "fedprox"},
    },
    "reference": {"label": "x", "accuracy": {"fedavg": [1.0, "-"], "half.personal": 2.5}},
}


def test_it_prints_what_is_not_as_by_default() -> None:
    made = ExperimentConfig.parse(TABLES)
    data = {"data": {"source": "digits"}, "split": {"kind": "local"}}
    assert made.to_dict() == {**TABLES, "vary": ["run.rounds=1,2"], **data}
    again = ExperimentConfig.parse(tomllib.loads(made.to_toml()))
    assert again == made
    assert again.title == TABLES["title"]
    optimizer = again.build_method("half").optimizer
    assert isinstance(optimizer, SGD)
    assert optimizer.groups["b.c"].weight_decay == 1e-5


def test_a_default_that_is_spelled_out_changes_nothing() -> None:
    spelled = {
        "partition": {"kind": "iid", "clients": 10},
        "concept": {"kind": "none"},
        "run": {"seed": 0},
        "lora": {},
    }
    assert ExperimentConfig.parse(spelled) == ExperimentConfig.parse({})
    assert ExperimentConfig.parse(spelled).to_dict() == ExperimentConfig.parse({}).to_dict()


@pytest.mark.full
def test_one_other_field_is_another_experiment() -> None:
    made = ExperimentConfig.parse(TABLES)
    for section, fields in {"run": {"seed": 1}, "defaults": {"epochs": 2}, "data": {"keep": 0.5}}.items():
        assert made.overlay({section: fields}) != made
    assert made.overlay({}) == made


@pytest.mark.parametrize("field", ["run.participation", "partition.alpha", "loss.kind", "run.target"])
def test_a_papers_number_of_a_default_value_is_shown(field: str) -> None:
    values: dict[str, tuple[Any, Any]] = {
        "run.participation": (0.5, 1.0), "partition.alpha": (0.1, 0.5), "loss.kind": ("focal", "cross_entropy"),
        "run.target": (0.5, 0.7),
    }  # fmt: skip
    section, key = field.split(".")
    vary = f"{field}={','.join(map(str, values[field]))}"
    tables = {"vary": vary, "partition": {"kind": "dirichlet", "clients": 3}, "method": "fedavg"}
    tables["reference"] = {"label": "Table 1", "accuracy": {"fedavg": [80.0, 90.0]}}
    for value, number in zip(values[field], (80.0, 90.0), strict=True):
        made = ExperimentConfig.parse(tables).overlay({section: {key: value}})
        assert made.describe()["reference"]["accuracy"] == {"fedavg": number}


@pytest.mark.full
def test_what_is_laid_over_keeps_the_rest_unless_the_kind_changes() -> None:
    made = ExperimentConfig.parse(TABLES)
    assert made.overlay({"partition": {"clients": 3}}).partition == Dirichlet(3, 0.25)
    assert made.overlay({"partition": {"kind": "iid"}}).partition == Iid()
    with pytest.raises(ConfigError, match=r"partition\.alpha: there is no such field"):
        made.overlay({"partition": {"kind": "iid", "alpha": 0.5}})


def test_nobody_changes_a_parsed_experiment() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ExperimentConfig.parse(TABLES).name = "other"  # type: ignore[misc]


def test_tables_in_lists_are_toml_too() -> None:
    tables = {"a": [{"b": 1, "c d": [True, "x"]}], "e": {}, "f": {"g": {"h": float("inf")}}}
    assert tomllib.loads(format_toml(tables)) == tables


@pytest.mark.full
def test_optional_libraries_wait_until_they_are_needed() -> None:
    text = "import sys; from fedlowrank.cli.main import main; main(['list'])"
    text += "; print([m for m in ('transformers', 'peft', 'flwr', 'datasets') if m in sys.modules], file=sys.stderr)"
    actual = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert actual.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("data.source", "csv"),
        ("partition.kind", "dirichlet"),
        ("split.kind", "matched"),
        ("concept.kind", "rotation"),
    ],
)
def test_help_on_the_entry_that_chooses_a_table_shows_all_kinds(path: str, kind: str) -> None:
    tables = find_tables(path)
    assert tables == [table for table in find_tables(path.partition(".")[0]) if table.kind]
    assert kind in {table.kind for table in tables}
    with pytest.raises(ConfigError, match="no section or field"):
        find_tables("run.kind")
