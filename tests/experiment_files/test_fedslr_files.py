"""FedSLR's experiment files: they say what the paper says, in its protocol, and the small ones run."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.merging import read_tables
from fedlowrank.config.sections.data_section import Preparation
from fedlowrank.core.errors import ConfigError
from fedlowrank.data.datasets.cifar import Cifar10, Cifar100
from fedlowrank.data.datasets.images import Folder
from fedlowrank.data.partitioning.partition import EqualDirichlet, Iid
from fedlowrank.data.partitioning.split import Matched
from fedlowrank.rounds.simulate import simulate
from tests.experiment_files.common import FEDSLR, ROOT, loaded, runnable, variants

GKR, MIXED = "fedslr.gkr", "fedslr"

# arXiv:2302.11051, column by column; first the rows
ROWS_1 = (
    "scaffold", "feddyn", "fedavg", GKR, "per_fedavg", "lg_fedavg", "fedrep", "ditto", "apfl", "standalone", "fedspa",
    MIXED,
)  # fmt: skip
TABLE_1 = {
    "cifar10-iid": (91.33, 92.61, 90.25, 91.73, 89.57, 38.32, 89.28, 89.16, 75.11, 38.30, 88.31, 89.72),
    "cifar10-noniid": (82.91, 90.14, 82.89, 87.52, 91.55, 81.35, 93.41, 94.39, 87.11, 82.17, 93.19, 95.30),
    "cifar100-iid": (66.68, 68.68, 61.92, 66.40, 57.10, 12.96, 15.36, 59.36, 30.99, 10.97, 48.00, 64.95),
    "cifar100-noniid": (59.48, 64.29, 55.78, 64.22, 63.73, 49.90, 60.42, 78.67, 61.14, 47.99, 73.87, 82.19),
    "tiny-iid": (43.13, 43.52, 35.17, 41.32, 34.41, 5.34, 5.48, 34.78, 20.16, 3.86, 30.39, 38.20),
    "tiny-noniid": (34.11, 38.02, 30.56, 35.13, 37.52, 35.68, 46.42, 58.30, 48.02, 34.28, 53.76, 59.13),
}
ROWS_2 = ("fedavg", "scaffold", GKR, "apfl", "fedspa", "lg_fedavg", "fedrep", MIXED)
TABLE_2 = {
    "cifar10-noniid": (
        (893.92, 1787.83, 626.89, 893.92, 446.96, 0.41, 893.51, 626.89),
        (11.17, 11.17, 3.51, 22.35, 5.59, 11.17, 11.17, 3.96),
    ),
    "cifar100-noniid": (
        (893.92, 1787.83, 722.60, 893.92, 446.96, 4.08, 889.84, 722.60),
        (11.17, 11.17, 5.54, 22.35, 5.59, 11.17, 11.17, 6.69),
    ),
    "tiny-noniid": (
        (893.92, 1787.83, 730.00, 893.92, 446.96, 8.13, 885.78, 730.00),
        (11.17, 11.17, 5.34, 22.35, 5.59, 11.17, 11.17, 7.59),
    ),
}

# what is varied; then accuracy, GB and millions of parameters of each series, a number for each value
SWEEPS: dict[str, tuple[str, tuple[Any, ...], dict[str, dict[str, tuple[float, ...]]]]] = {
    "table3-lambda": (
        "methods.fedslr.lam",
        (1e-05, 5e-05, 0.0001, 0.0005, 0.001),
        {
            "accuracy": {
                GKR: (63.63, 64.27, 64.22, 61.81, 54.26),
                MIXED: (81.89, 81.20, 82.19, 80.10, 74.33),
            },
            "communication": {
                GKR: (819.44, 770.39, 722.60, 568.43, 498.20),
                MIXED: (819.44, 770.39, 722.60, 568.43, 498.20),
            },
            "parameters": {GKR: (7.33, 6.56, 5.54, 3.09, 1.27), MIXED: (8.54, 7.83, 6.69, 4.04, 2.24)},
        },
    ),
    "table4-mu": (
        "methods.fedslr.mu",
        (0.0001, 0.0005, 0.001, 0.005, 0.01),
        {
            "accuracy": {MIXED: (79.15, 81.78, 82.19, 81.82, 80.81)},
            "communication": {MIXED: (720.60, 722.60, 722.60, 722.60, 720.60)},
            "parameters": {MIXED: (8.50, 7.12, 6.69, 5.78, 5.56)},
        },
    ),
    "table5-eta-g": (
        "methods.fedslr.prox_step",
        (2, 10, 20, 100),
        {
            "accuracy": {GKR: (60.74, 64.22, 61.02, 58.69), MIXED: (80.37, 82.19, 80.60, 78.33)},
            "communication": {GKR: (894.06, 722.60, 668.94, 559.88), MIXED: (894.06, 722.60, 668.94, 559.88)},
            "parameters": {GKR: (10.65, 5.54, 5.16, 2.99), MIXED: (12.36, 6.69, 6.15, 3.90)},
        },
    ),
    "table6-epochs": (
        "defaults.epochs",
        (1, 2, 3, 4),
        {"accuracy": {GKR: (58.20, 64.51, 63.86, 64.17), MIXED: (78.82, 81.46, 81.97, 82.20)}},
    ),
    "table7-personal": (
        "methods.fedslr.mu",
        (1e-3, 1e-4, 1e-5),
        {"accuracy": {MIXED: (37.14, 44.16, 44.54)}},
    ),
    "table8-global": (
        "methods.fedslr.lam",
        (1e-3, 1e-4, 1e-5),
        {"accuracy": {GKR: (54.26, 64.22, 63.63), MIXED: (54.26, 64.22, 63.63)}},
    ),
    "variants-low-rank": ("methods.fedslr.personal_norm", ("sparse", "low_rank"), {}),
    "variants-sparse": ("methods.fedslr.personal_norm", ("sparse", "low_rank"), {}),
}
OTHERS = {"figure5": ["fedavg", "scaffold", "fedslr"], "variants-prox": ["fedslr", "lpgd", "gpgd"]}

MAIN = [f"table1-{column}" for column in TABLE_1]
STEMS = [*MAIN, *SWEEPS, *OTHERS]

# what a file changes of the paper's λ = 1e-4, μ = 1e-3, η_g = 10 and p that starts at zero, besides what it varies
CHANGED: dict[str, dict[str, Any]] = {
    "table7-personal": {"lam": 10.0, "personal_start": "initial"},
    "table8-global": {"mu": 10.0},
    "variants-sparse": {"lam": 2.5e-6, "global_norm": "sparse"},
}


def whole(stem: str) -> Path:
    return FEDSLR / f"{stem}.toml"


def small(stem: str) -> Path:
    return FEDSLR / "cpu" / f"{stem}.toml"


def data_of(stem: str) -> str:
    return stem.split("-")[1] if stem in MAIN else "cifar100"


def shown(made: ExperimentConfig) -> dict[str, Any]:
    """The paper's numbers beside a run, without their label and the kinds that it has none of."""
    reference = made.describe()["reference"]
    return {kind: numbers for kind, numbers in reference.items() if kind != "label" and numbers}


def test_these_are_all_the_files() -> None:
    assert set(runnable(FEDSLR)) == {p for stem in STEMS for p in (whole(stem), small(stem))}


@pytest.mark.full
@pytest.mark.parametrize("stem", STEMS)
def test_every_file_has_a_small_version(stem: str) -> None:
    large, little = loaded(whole(stem)), loaded(small(stem))
    assert large.name == f"fedslr-{stem}"
    assert little.name == f"fedslr-{stem}-cpu"
    assert little.compared_methods == large.compared_methods
    assert little.run.rounds <= 60 < large.run.rounds
    assert type(little.partition) is type(large.partition)
    assert little.data.preparation.examples is not None
    assert little.data.preparation.examples <= 10_000
    if isinstance(little.partition, EqualDirichlet):
        classes = 20 if getattr(little.data.source, "labels", "") == "coarse" else 10
        assert little.partition.alpha == pytest.approx(0.1 * classes)
    varies, of = ("".join(e.vary).partition("=") for e in (little, large))
    assert varies[0] == of[0]
    assert len(varies[2].split(",")) == len(of[2].split(","))
    # with other values, models and data there is nothing to compare
    assert little.reference is None


@pytest.mark.few(2)
@pytest.mark.parametrize("stem", MAIN)
def test_table_1_and_2_show_the_numbers_of_the_paper(stem: str) -> None:
    column = stem.removeprefix("table1-")
    made = loaded(whole(stem))
    expected: dict[str, Any] = {"accuracy": dict(zip(ROWS_1, TABLE_1[column], strict=True))}
    if column in TABLE_2:
        for kind, numbers in zip(("communication", "parameters"), TABLE_2[column], strict=True):
            expected[kind] = dict(zip(ROWS_2, numbers, strict=True))
    assert shown(made) == expected
    assert sorted({row.partition(".")[0] for row in ROWS_1}) == sorted(made.compared_methods)
    title = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny": "TinyImageNet"}[data_of(stem)]
    split = {"iid": "IID", "noniid": "Non-IID"}[column.split("-")[1]]
    assert made.describe()["reference"]["label"].endswith(f", {title} {split}")


@pytest.mark.full
@pytest.mark.parametrize("stem", SWEEPS)
def test_every_value_reaches_the_method_and_has_its_own_numbers(stem: str) -> None:
    field, values, numbers = SWEEPS[stem]
    made = list(variants(whole(stem)))
    assert all(m.compared_methods == ["fedslr"] for m in made)
    assert whole(stem).read_text().count(f'\nvary = "{field}=') == 1
    for at, (one, value) in enumerate(zip(made, values, strict=True)):
        method: Any = one.build_method("fedslr")
        assert getattr(method, field.rpartition(".")[2]) == value
        expected = {kind: {s: column[at] for s, column in rows.items()} for kind, rows in numbers.items()}
        if numbers:
            assert shown(one) == expected
            assert one.describe()["reference"]["label"] == f"FedSLR Table {stem[5]}"
        else:
            assert one.describe()["reference"] is None


@pytest.mark.parametrize("stem", [s for s, (_, _, numbers) in SWEEPS.items() if numbers])
def test_a_list_needs_a_number_for_every_value(stem: str) -> None:
    tables = copy.deepcopy(read_tables(whole(stem)))
    tables["reference"]["accuracy"][MIXED].pop()
    with pytest.raises(ConfigError, match=r"reference\.accuracy\.fedslr holds"):
        ExperimentConfig.parse(tables)


@pytest.mark.few(15)
@pytest.mark.parametrize("stem", STEMS)
def test_the_whole_files_follow_the_protocol_of_the_paper(stem: str) -> None:
    made = loaded(whole(stem))
    assert (made.run.rounds, made.run.participation) == (1000, 0.1)
    assert made.split == Matched(val=0.0, test_per_client=100)
    data = data_of(stem)
    source: Any = made.data.source
    assert isinstance(source, {"cifar10": Cifar10, "cifar100": Cifar100, "tiny": Folder}[data])
    assert made.data.preparation == Preparation(normalize="standard")
    assert made.model.names == ("resnet18_tiny" if data == "tiny" else "resnet18",)
    assert source == type(source)(source.path, **({"size": 64} if data == "tiny" else {}))
    assert (made.augment.flip, made.augment.crop) == (True, 8 if data == "tiny" else 4)
    if stem.endswith("-iid"):
        assert made.partition == Iid(100)
    else:
        classes = {"cifar10": 10, "cifar100": 100, "tiny": 200}[data]
        assert isinstance(made.partition, EqualDirichlet)
        assert made.partition.clients == 100
        assert made.partition.alpha == pytest.approx(0.1 * classes)
    for name in made.compared_methods:
        method: Any = made.build_method(name)
        assert (method.epochs, method.batch_size) == (2, 20)
        rate = 0.001 if name == "per_fedavg" else 0.1
        for t in (0, 1, 999):
            assert method.optimizer.learning_rate(t) == pytest.approx(rate * 0.998**t)
        assert method.optimizer.weight_decay == 1e-3
        assert method.optimizer.momentum == 0


@pytest.mark.parametrize("stem", STEMS)
def test_fedslr_has_the_settings_of_the_paper(stem: str) -> None:
    method: Any = loaded(whole(stem)).build_method("fedslr")
    settings = {
        "lam": 1e-4, "mu": 1e-3, "prox_step": 10.0, "fusion_epochs": 1, "global_norm": "low_rank", "personal_norm": "sparse",
        "personal_start": "zero", "exclude": (), **CHANGED.get(stem, {}),
    }  # fmt: skip
    assert {name: getattr(method, name) for name in settings} == settings


@pytest.mark.parametrize("path", [whole("variants-prox"), small("variants-prox")], ids=["whole", "cpu"])
def test_the_places_of_the_prox_share_its_size(path: Path) -> None:
    methods: list[Any] = [loaded(path).build_method(name) for name in ("fedslr", "lpgd", "gpgd")]
    fedslr, lpgd, gpgd = methods
    assert lpgd.lam == gpgd.lam == fedslr.lam
    assert gpgd.prox_step == fedslr.prox_step


@pytest.mark.parametrize("stem", MAIN)
def test_the_baselines_have_the_settings_of_the_paper(stem: str) -> None:
    made = loaded(whole(stem))
    settings: dict[str, dict[str, Any]] = {
        "feddyn": {"alpha": 0.1},
        "ditto": {"lam": 0.1, "personal_epochs": 1},
        "apfl": {"alpha": 0.5, "adaptive": False},
        "per_fedavg": {"alpha": 0.01},
        "fedspa": {"density": 0.5},
        "standalone": {"all_clients": False},
        "scaffold": {"server_lr": 1.0},
    }
    for name, expected in settings.items():
        method: Any = made.build_method(name)
        assert {field: getattr(method, field) for field in expected} == expected


@pytest.mark.full
@pytest.mark.parametrize("stem", [*MAIN, "figure5"])
@pytest.mark.usefixtures("blank_images")
def test_clients_hold_equal_shares_and_mixtures_of_the_papers_kind(stem: str) -> None:
    # images of one pixel have nothing to crop
    clients = loaded(whole(stem), "augment.flip=false", "augment.crop=0").federation().clients
    data = data_of(stem)
    classes, size = {"cifar10": (10, 500), "cifar100": (100, 500), "tiny": (200, 1000)}[data]
    assert len(clients) == 100
    assert {len(c.train) for c in clients} == {size}
    assert {len(c.val) for c in clients} == {0}
    shares = torch.stack([torch.bincount(c.train.y, minlength=classes) for c in clients]) / size
    # the expected sum of squares of a draw from Dirichlet(a, ..., a) is (a + 1) / (n a + 1); of n equal shares, 1 / n
    actual = shares.square().sum(1).mean().item()
    if stem.endswith("-iid"):
        assert actual == pytest.approx(1 / classes, abs=2 / size)
    else:
        assert actual == pytest.approx(1.1 / (0.1 * classes + 1), rel=0.3)
    for share, client in zip(shares, clients, strict=True):
        expected = (100 * share).round().clamp(max=10_000 // classes)
        tested = torch.bincount(client.test.y, minlength=classes)
        assert (tested - expected).abs().max() <= 1
        assert len(client.test) <= 100
        assert len(client.test) == 100 or client.notes


@pytest.mark.full
@pytest.mark.parametrize("stem", [s for s in STEMS if s not in ("table3-lambda", "figure5")])
@pytest.mark.usefixtures("noise")
def test_small_versions_run(stem: str) -> None:
    """One round of two clients with every method, at every varied value, on small images."""
    for made in variants(small(stem)):
        run_briefly(
            made, made.compared_methods if stem in OTHERS or stem == "table1-tiny-noniid" else ["fedslr"]
        )


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("stem", ["table3-lambda", "figure5"])
@pytest.mark.usefixtures("noise")
def test_small_versions_of_the_resnet_run(stem: str) -> None:
    *_, last = variants(small(stem))
    assert last.model.names == ("resnet18_w16",)
    run_briefly(last, last.compared_methods)


def run_briefly(made: ExperimentConfig, methods: list[str]) -> None:
    little = made.overlay(
        {
            "data": {"examples": 80},
            "partition": {"clients": 4},
            "split": {"test_per_client": 8},
            "run": {"rounds": 1, "representations": 0},
        }
    )
    federation = little.federation()
    for name in methods:
        result = simulate(
            little.build_method(name), federation, rounds=1, participation=0.5, representations=0
        )
        assert len(result.rounds) == 2
        assert {len(c.train) for c in federation.clients} == {20}
        assert 0 <= result.mean_accuracy() <= 1


@pytest.mark.full
def test_tiny_imagenet_is_laid_out_as_its_file_says(tmp_path: Path) -> None:
    names = ("n01443537", "n01629819")
    for at, name in enumerate(names):
        paint(tmp_path / "train" / name / "images" / f"{name}_0.JPEG", at)
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t62\n")
        paint(tmp_path / "val" / "images" / f"val_{at}.JPEG", at)
    paint(tmp_path / "test" / "images" / "test_0.JPEG", 0)
    rows = [f"val_{at}.JPEG\t{name}\t0\t32\t44\t62\n" for at, name in enumerate(names)]
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(rows))
    commands = re.findall(r"^#   (.+)$", (FEDSLR / "base-tiny.toml").read_text(), re.MULTILINE)
    assert len(commands) == 3
    subprocess.run(["bash", "-euc", "\n".join(commands)], cwd=tmp_path, check=True)
    settings = loaded(whole("table1-tiny-iid")).data.source
    data = Folder(str(tmp_path), size=settings.size).load()
    assert data.classes == names
    assert data.test is not None
    for part in (data.train, data.test):
        assert isinstance(part.x, torch.Tensor)
        assert part.x.shape == (2, 3, 64, 64)
        assert part.y.tolist() == part.x.mean((1, 2, 3)).round().tolist() == [0, 1]


def paint(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (255 * value,) * 3).save(file)


def test_the_readme_lists_every_file() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.partition("## FedSLR")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    named: list[str] = []
    for files, _, command in rows:
        for name in re.findall(r"`(.+?)`", files):
            # `-noniid` after `table1-cifar10-iid` is `table1-cifar10-noniid`
            named.append(named[-1].rpartition("-")[0] + name if name.startswith("-") else name)
        at = re.search(r"experiments/(fedslr/.+?\.toml)", command)
        assert at is not None
        assert (ROOT / at[1]).is_file()
    assert sorted(named) == sorted(STEMS)
