"""Every experiment file: it loads, it says what the paper says, and the small ones run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.merging import parse_value, read_tables
from fedlowrank.core.arguments.user_code import import_named
from fedlowrank.data.partitioning.partition import Pathological
from fedlowrank.data.partitioning.split import LocalSplit
from fedlowrank.data.sources import SOURCES
from fedlowrank.methods import METHODS
from fedlowrank.models.zoo import MODELS
from fedlowrank.rounds.simulate import simulate
from tests.experiment_files.common import FEDSLR, FILES, PFEDLORA, ROOT, loaded, name_of, runnable, variants

RUNNABLE = [*runnable(PFEDLORA), *runnable(FEDSLR)]
BUNDLED = ("digits", "wine", "breast_cancer", "iris")

FIGURES = (
    "figure5", "figure6", "figure7", "figure8-cifar10", "figure8-cifar100", "figure9-cifar10", "figure9-cifar100",
    "figure10", "figure11-mu", "figure11-width",
)  # fmt: skip
ORDER = ("standalone", "fml", "fedkd", "lg_fedavg", "fd", "fedproto", "pfedlora")

# column by column as printed in arXiv:2310.13283v2; methods in the order above
TABLE_1 = {
    "cifar10-n10": (96.35, 94.83, 94.77, 96.47, 96.30, 95.83, 96.69),
    "cifar100-n10": (74.32, 70.02, 70.04, 73.43, "-", 72.79, 75.58),
    "cifar10-n50": (95.25, 93.18, 92.93, 94.20, "-", 95.10, 95.55),
    "cifar100-n50": (62.38, 57.56, 57.56, 61.77, "-", 62.55, 62.55),
    "cifar10-n100": (92.58, 87.93, 90.23, 90.25, "-", 91.19, 92.80),
    "cifar100-n100": (54.93, 46.20, 50.99, 46.64, "-", 54.01, 55.82),
}
TABLE_2 = {
    "cifar10-n10": (96.53, 30.48, 80.20, 96.30, 96.21, 96.51, 96.66),
    "cifar100-n10": (72.53, 16.84, 53.23, 72.20, "-", 72.59, 73.58),
    "cifar10-n50": (95.14, "-", 77.37, 94.83, "-", 95.48, 95.74),
    "cifar100-n50": (62.71, 21.96, 44.27, 60.95, "-", 62.69, 64.06),
    "cifar10-n100": (91.97, "-", 73.21, 91.27, "-", 92.49, 92.58),
    "cifar100-n100": (53.04, 15.21, 37.21, 45.83, "-", 53.67, 53.95),
}
TABLES = {f"table{t}-{c}": v for t, table in ((1, TABLE_1), (2, TABLE_2)) for c, v in table.items()}
PROTOCOL = {"n10": (10, 1.0), "n50": (50, 0.2), "n100": (100, 0.1)}
FIVE = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")


@pytest.mark.few(18)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_loads(path: Path) -> None:
    made = loaded(path)
    variants_ = {name for name, settings in made.methods.items() if settings.method}
    kinds = {str(made.methods[name].method) for name in variants_}
    assert {kind for kind in kinds if ":" not in kind} <= set(METHODS)
    for name in variants_:
        made.build_method(name)
    assert set(made.compared_methods) <= variants_ | set(METHODS)
    assert made.default_method in variants_ | set(METHODS)
    assert set(made.methods) <= variants_ | set(METHODS)
    assert set(made.model.names) - set(made.model.own) <= set(MODELS)
    for name in made.model.own:
        assert callable(import_named(name, "model.names"))


@pytest.mark.few(8)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_experiment_prints_a_file_that_makes_it_again(path: Path) -> None:
    made = loaded(path)
    again = tomllib.loads(made.to_toml())
    assert again == made.to_dict()
    assert ExperimentConfig.parse(again) == made


@pytest.mark.parametrize("stem", TABLES)
def test_every_table_has_a_file(stem: str) -> None:
    made = loaded(PFEDLORA / f"{stem}.toml")
    assert made.name == stem
    assert loaded(PFEDLORA / f"{stem}.toml", "run.rounds=20").run.rounds < made.run.rounds == 500


@pytest.mark.few(4)
@pytest.mark.parametrize("stem", FIGURES)
def test_every_figure_has_a_file_and_a_small_version(stem: str) -> None:
    whole, small = loaded(PFEDLORA / f"{stem}.toml"), loaded(PFEDLORA / "cpu" / f"{stem}.toml")
    assert whole.name == stem
    assert small.name == f"{stem}-cpu"
    assert small.compared_methods == whole.compared_methods
    assert small.run.rounds < whole.run.rounds == 500
    assert "".join(small.vary).partition("=")[0] == "".join(whole.vary).partition("=")[0]


@pytest.mark.full
def test_names_are_unique() -> None:
    # the name is the folder of the runs: two experiments of one name would take each other's runs for their own
    experiments = runnable(ROOT)
    names = [loaded(p).name for p in experiments]
    assert sorted(names) == sorted(set(names))
    titles = [loaded(p).title for p in experiments]
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize("stem", TABLES)
def test_tables_show_the_numbers_of_the_paper(stem: str) -> None:
    tables = read_tables(PFEDLORA / f"{stem}.toml")
    assert tables["reference"]["accuracy"] == dict(zip(ORDER, TABLES[stem], strict=True))
    table, data, clients = stem.split("-")
    label = tables["reference"]["label"]
    assert f"Table {table[-1]}" in label
    assert {"cifar10": "CIFAR-10,", "cifar100": "CIFAR-100,"}[data] in label
    assert f"N={clients[1:]}," in label
    shown = loaded(PFEDLORA / f"{stem}.toml").describe()["reference"]["accuracy"]
    assert shown == {m: None if v == "-" else v for m, v in zip(ORDER, TABLES[stem], strict=True)}


@pytest.mark.parametrize("stem", TABLES)
def test_tables_follow_the_protocol_of_the_paper(stem: str) -> None:
    made = loaded(PFEDLORA / f"{stem}.toml")
    table, data, size = stem.split("-")
    clients, participation = PROTOCOL[size]
    assert made.partition == Pathological(clients, {"cifar10": 2, "cifar100": 10}[data])
    assert made.run.participation == participation
    assert isinstance(made.data.source, SOURCES[data])
    assert isinstance(made.split, LocalSplit)
    assert set(ORDER) <= set(made.compared_methods)
    pfedlora: Any = made.build_method("pfedlora")
    fedproto: Any = made.build_method("fedproto")
    assert pfedlora.optimizer.lr == 0.01
    assert fedproto.lam == {"cifar10": 0.1, "cifar100": 1.0}[data]
    if table == "table1":
        assert made.model.names == ("cnn1",)
        assert made.model.split == "fc1"
        assert pfedlora.relu
        assert pfedlora.width in (100, 200, 300, 400, 500)
        assert "fedavg" in made.compared_methods
    else:
        assert made.model.names == FIVE
        assert made.model.split == "fc2"
        assert not pfedlora.relu
        assert pfedlora.width in (20, 40, 60, 80)


VALUES = {
    "figure8-cifar10": ("partition.classes_per_client", [2, 4, 6, 8, 10]),
    "figure8-cifar100": ("partition.classes_per_client", [10, 30, 50, 70, 90, 100]),
    "figure9-cifar10": ("run.participation", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]),
    "figure9-cifar100": ("run.participation", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]),
    "figure11-mu": ("methods.pfedlora.mu", [0.5, 0.6, 0.7, 0.8, 0.9]),
    "figure11-width": ("methods.pfedlora.width", [20, 40, 60, 80]),
}


@pytest.mark.parametrize("stem", VALUES)
def test_figures_vary_what_the_paper_varies(stem: str) -> None:
    field, expected = VALUES[stem]
    text = read_tables(PFEDLORA / f"{stem}.toml")["vary"]
    assert text.startswith(f"{field}=")
    assert [parse_value(v) for v in text.partition("=")[2].split(",")] == expected


@pytest.mark.full
@pytest.mark.parametrize("path", [p for p in RUNNABLE if "vary" in read_tables(p)], ids=name_of)
def test_every_varied_value_reaches_the_experiment(path: Path) -> None:
    field = read_tables(path)["vary"].partition("=")[0]
    section, _, rest = field.partition(".")
    seen = []
    for made in variants(path):
        if section == "run":
            seen.append(getattr(made.run, rest))
        elif section == "methods":
            method, _, name = rest.partition(".")
            assert method in made.compared_methods
            seen.append(getattr(made.build_method(method), name))
        else:
            actual = getattr(made, section)
            seen.append(actual[rest] if isinstance(actual, dict) else getattr(actual, rest))
    assert len(seen) == len(set(seen)) > 1
    assert seen == [parse_value(v) for v in read_tables(path)["vary"].partition("=")[2].split(",")]


@pytest.mark.full
@pytest.mark.parametrize("stem", [*TABLES, *FIGURES])
@pytest.mark.usefixtures("blank_images")
def test_the_data_can_be_shared_out_for_every_value(stem: str) -> None:
    sizes = []
    # sharing out depends on the data alone: the first value will do where something else varies
    varies = str(read_tables(PFEDLORA / f"{stem}.toml").get("vary", "")).startswith("partition.")
    for made in list(variants(PFEDLORA / f"{stem}.toml"))[: None if varies else 1]:
        clients = made.federation().clients
        assert len(clients) == getattr(made.partition, "clients", None)
        sizes.append({len(torch.unique(c.train.y)) for c in clients})
        assert all(len(c.test) for c in clients)
    if varies:
        assert max(sizes[0]) < max(sizes[-1])


def bundled() -> list[Path]:
    return [p for p in RUNNABLE if read_tables(p)["data"]["source"] in BUNDLED]


@pytest.mark.full
@pytest.mark.parametrize("path", bundled(), ids=name_of)
def test_small_versions_run(path: Path) -> None:
    """One round of pFedLoRA at the last of the varied values, on one architecture of small width."""
    *_, last = variants(path)
    small = last.overlay(
        {"model": {"names": ["cnn5"]}, "run": {"rounds": 1, "participation": 0.1, "representations": 0}}
    )
    result = simulate(
        small.build_method("pfedlora"), small.federation(), rounds=1, participation=0.1, seed=small.run.seed
    )
    assert len(result.rounds) == 2
    assert 0 <= result.mean_accuracy() <= 1


@pytest.mark.full
def test_a_small_version_runs_with_every_method_it_compares() -> None:
    path = PFEDLORA / "cpu" / "figure10.toml"
    made = loaded(path, "run.rounds=1", "run.participation=0.1")
    federation = made.federation()
    assert {i.architecture for i in federation.infos} == set(FIVE)
    for name in made.compared_methods:
        assert len(simulate(made.build_method(name), federation, rounds=1, participation=0.1).rounds) == 2


def test_every_file_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for path in RUNNABLE:
        stem = path.stem
        pattern = stem if stem in text else stem.rsplit("-", 1)[0]
        assert pattern in text, f"experiments/README.md does not mention {stem}"
