"""Overrides hold in any order, all of them are read, and two that contradict each other are an error."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.cli.main import main
from fedlowrank.config.comparison import plan_runs, read_varied
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.field_help import list_tables
from fedlowrank.config.reading.merging import LayeredTables, parse_override, parse_value, parse_variation
from fedlowrank.config.tuning import nest_values
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group
from fedlowrank.data.partitioning.partition import Dirichlet
from fedlowrank.linalg.delta import DeltaForm
from fedlowrank.methods import METHODS
from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]


def read(*overrides: str, text: str = SMALL) -> ExperimentConfig:
    return ExperimentConfig.read(write(Path(), text), overrides)


@pytest.mark.full
def test_overrides_that_switch_kinds_hold_in_every_order() -> None:
    texts = [
        "partition.alpha=0.25",
        "partition.kind=dirichlet",
        "partition.clients=4",
        "defaults.optimizer.kind=adamw",
        "defaults.optimizer.beta1=0.5",
    ]
    for order in itertools.permutations(texts):
        made = read(*order)
        assert made.partition == Dirichlet(clients=4, alpha=0.25)
        assert made.build_method("fedavg").optimizer == AdamW(lr=0.1, beta1=0.5)


@pytest.mark.full
def test_a_wrong_value_is_refused_in_every_order(capsys: Capsys) -> None:
    texts = ["partition.alpha=-1", "partition.kind=dirichlet"]
    for order in (texts, texts[::-1]):
        for command in ("run", "compare", "data"):
            assert "alpha" in refused(capsys, command, write(Path()), *order)
    assert list(files(Path())) == ["small.toml"]


def test_a_kind_that_the_file_has_by_default_keeps_its_table() -> None:
    text = SMALL.replace('kind = "iid"\n', "").replace('kind = "sgd", lr', "lr")
    made = read("partition.kind=iid", "defaults.optimizer.kind=sgd", text=text)
    assert made.partition.clients == 3
    assert made.build_method("fedavg").optimizer.lr == 0.1


def test_another_form_of_the_servers_update_discards_its_cap() -> None:
    text = (
        SMALL.replace('"standalone"', '"fedhl"')
        + '\n[methods.fedhl]\ndelta_form = { kind = "capped", cap = 8 }\n'
    )
    assert read(text=text).build_method("fedhl").delta_form == DeltaForm("capped", cap=8)
    exact = read("methods.fedhl.delta_form.kind=exact", text=text)
    assert exact.build_method("fedhl").delta_form == DeltaForm("exact")


def test_the_help_of_a_methods_table_names_a_field_of_it() -> None:
    titles = [t.title for t in list_tables() if t.path.startswith("methods.") and t.path.count(".") == 2]
    names = [
        name.strip().split(".")
        for title in titles
        for name in title.strip("[]").split(",")
        if "methods." in name
    ]
    assert ["methods", "flexlora", "delta_form"] in names
    for _, method, field in names:
        classes = METHODS.values() if method == "NAME" else [METHODS[method]]
        assert any(field in cls.__dataclass_fields__ for cls in classes), f"{method}.{field}"


def test_another_kind_says_what_it_discards_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    text = SMALL.replace('kind = "iid"', 'kind = "dirichlet"\nalpha = 0.5')
    with caplog.at_level("INFO", "fedlowrank.config"):
        laid = LayeredTables.read(Path(write(Path(), text)), ["partition.kind=iid"])
        assert laid.join(["run.rounds=1"]).merge() == {
            **laid.merge(),
            "run": {**laid.tables["run"], "rounds": 1},
        }
    # once, whatever the number of runs
    assert [record.getMessage() for record in caplog.records] == [
        "partition.kind = 'iid' overrides the file, in which partition.alpha = 0.5 has no effect then"
    ]


@pytest.mark.parametrize(
    ("table", "override", "read_too", "kind"),
    [
        ("[run.attack]\nkind = 'scaled'\nshare = 0.4\nstrength = 3.0\n", "run.attack.kind=label_flip", "share", "kind"),
        (
            "[run.privacy]\nkind = 'central'\nnoise = 2.0\ndelta = 1e-3\n[run.clipping]\nnorm = 1.0\n",
            "run.privacy.kind=local",
            "noise",
            "kind",
        ),
        ("[partition]\nkind = 'dirichlet'\nclients = 4\nalpha = 0.2\n", "partition.kind=equal_dirichlet", "alpha", "kind"),
        ("[partition]\nkind = 'dirichlet'\nclients = 4\nalpha = 0.2\n", "partition.kind=iid", "clients", "kind"),
        ("[split]\nkind = 'whole_test'\nval = 0.3\n", "split.kind=own_test", "val", "kind"),
        ("[concept]\nkind = 'rotation'\nclusters = 2\n", "concept.kind=label_shift", "clusters", "kind"),
        ("[data]\nsource = 'iris'\nexamples = 50\n", "data.source=digits", "examples", "source"),
        ("[defaults.optimizer]\nlr = 0.3\nmomentum = 0.9\n", "defaults.optimizer.kind=adamw", "lr", "kind"),
        (
            "[defaults.optimizer.schedule]\nkind = 'step'\nfactor = 0.5\nevery = 3\nwarmup = 2\n",
            "defaults.optimizer.schedule.kind=exponential",
            "warmup",
            "kind",
        ),
    ],
)  # fmt: skip
def test_a_switch_keeps_the_fields_that_its_new_value_reads(
    table: str, override: str, read_too: str, kind: str
) -> None:
    """In an override, in a variation and in a file that extends another one."""
    name, _, value = override.partition("=")
    section = name.rpartition(".")[0]
    text, file = f"method = 'fedavg'\n{table}", Path("base.toml")
    file.write_text(text)
    Path("more.toml").write_text(f"extends = 'base.toml'\n[{section}]\n{kind} = '{value}'\n")
    expected: Any = tomllib.loads(text)
    for part in section.split("."):
        expected = expected[part]
    planned = plan_runs(
        read(text=text), ["fedavg"], [0], [f"{name}={value}"], Path("out"), LayeredTables.read(file)
    )
    for made in (read(override, text=text), ExperimentConfig.read("more.toml"), planned[0].experiment):
        actual: Any = made.to_dict()
        for part in section.split("."):
            actual = actual[part]
        assert (actual[kind], actual[read_too]) == (value, expected[read_too])


def test_a_switch_discards_no_misspelled_field() -> None:
    text = SMALL.replace("[partition]", "[partition]\nclientz = 4")
    with pytest.raises(ConfigError, match=r"partition\.clientz"):
        read("partition.kind=dirichlet", text=text)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("run.rounds=1", "run.rounds=2"),
        ("data.source=iris", "data.source=digits"),
        ('defaults.optimizer={kind="adamw"}', "defaults.optimizer.kind=sgd"),
        ("run=5", "run.rounds=2"),
        ("run.keep_best=true", "run.keep_best=1"),
    ],
)
def test_two_values_of_one_field_are_refused(first: str, second: str, capsys: Capsys) -> None:
    for order in ((first, second), (second, first)):
        assert "is given twice" in refused(capsys, "run", write(Path()), *order)


def test_the_same_value_twice_and_a_table_with_more_of_its_fields() -> None:
    made = read("run.rounds=7", "run.rounds=7", "run={ threads = 2 }", "run.patience=3")
    assert (made.run.rounds, made.run.threads, made.run.patience) == (7, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "run.engine=wire", "--engine", "vectorized"], "run.engine is given twice"),
        (["run", "run.log=[]", "--log", "wandb"], "run.log is given twice"),
        (["run", "methods.fedprox.mu=1"], "methods.fedprox: nothing reads this override"),
        (
            ["run", "methods.standalone.epochs=2"],
            "the methods that run are fedavg. Name standalone",
        ),
        (["run", "--method", "standalone", "methods.fedavg.epochs=2"], "methods.fedavg: nothing reads"),
        (["run", "--method", "standalone", "method=fedavg"], "method: nothing reads this override"),
        (["run", 'compare=["fedavg"]'], "compare: nothing reads"),
        (["run", "seeds=[1]"], "Write run.seed"),
        (["run", "vary=run.rounds=1,2"], "vary: nothing reads"),
        (["run", "tune.rounds=2"], "tune: nothing reads"),
        (["compare", "methods.fedprox.mu=1"], "methods.fedprox: nothing reads"),
        (["compare", "methods.fedavgg.epochs=1"], "there is no method 'fedavgg'. Did you mean 'fedavg'?"),
        (
            ["compare", "--methods", "fedavg", "methods.standalone.epochs=2"],
            "methods.standalone: nothing reads",
        ),
        (["compare", "--methods", "fedavg", 'compare=["fedavg"]'], "compare: nothing reads"),
        (["compare", "method=fedavg"], "method: nothing reads"),
        (["compare", "seeds=[1]", "--seeds", "2"], "seeds: nothing reads"),
        (["compare", "run.seed=1", "--seeds", "2"], "run.seed: nothing reads"),
        (["compare", "seeds=[1]", "run.seed=2"], "run.seed: nothing reads"),
        (["compare", "--vary", "run.seed=1,2"], "run.seed cannot be varied"),
        (["compare", "--vary", "tune.rounds=1,2"], "tune.rounds cannot be varied: `fedlowrank tune` alone"),
        (
            ["compare", "--vary", "method=fedavg,standalone"],
            "method cannot be varied: the methods are named by",
        ),
        (["compare", "--vary", "seeds=[0],[1]"], "seeds cannot be varied: the seeds are named by --seeds"),
        (["compare", "--vary", 'compare=["fedavg"],["standalone"]'], "compare cannot be varied"),
        (
            ["compare", "--vary", "run.target=0.1,0.3"],
            "run.target cannot be varied: it changes no run. Name the accuracy whose cost is reported by --target",
        ),
        (["run", "extends=other.toml"], "stands only at the top of such a file"),
        (["compare", "--seeds", ""], "--seeds takes whole numbers, such as 0,1,2; not ''"),
        (["compare", "run.rounds=1", "--vary", "run.rounds=2,3"], "run.rounds: nothing reads this override"),
        (["compare", "vary=run.rounds=1,2", "--vary", "run.rounds=2,3"], "vary: nothing reads"),
        (["compare", "--vary", "methods.fedprox.mu=0.1,1"], "methods.fedprox: nothing reads"),
        (["compare", "tune.rounds=2"], "tune: nothing reads"),
        (["tune", "run.seed=2"], "run.seed: nothing reads this override: the seeds are those of [tune]"),
        (["tune", "methods.fedprox.mu=1"], "methods.fedprox: nothing reads"),
        (["data", "methods.fedprox.mu=1"], "methods.fedprox: nothing reads"),
        (["run", "language.path=x"], "data.source 'iris' gives no texts"),
        (["run", "partition.alpha=0.5"], "no such field of kind 'iid'; it is one of 'dirichlet'"),
        (["run", "data.noises=1"], "data.noises: there is no such field of source 'iris'. Known: 'examples'"),
        (["run", 'data.path="C:\\Users"'], "Write 'C:\\Users' in single quotes"),
        (["run", 'data.path="C:\\new"'], "Write 'C:\\new' in single quotes"),
    ],
)
def test_what_nothing_reads_is_refused(arguments: list[str], says: str, capsys: Capsys) -> None:
    text = SMALL + "[tune]\nseeds = [7]\n"
    command, *rest = arguments
    assert says in refused(capsys, command, write(Path(), text), *rest)
    assert list(files(Path())) == ["small.toml"]


def test_a_default_that_every_method_has_its_own_value_of(capsys: Capsys) -> None:
    file = write(Path(), SMALL + "[methods.fedavg]\nepochs = 2\n")
    assert "Write methods.fedavg.epochs" in refused(capsys, "run", file, "defaults.epochs=3")
    # the other method of the comparison reads it
    made = read("defaults.epochs=3", text=Path(file).read_text())
    assert [made.build_method(name).epochs for name in ("fedavg", "standalone")] == [2, 3]


def test_a_varied_default_that_a_method_does_not_read_is_refused(capsys: Capsys) -> None:
    """Else two equal runs would bear the names of different values."""
    file = write(Path(), SMALL + "[methods.fedavg.optimizer]\nlr = 0.5\n")
    message = refused(capsys, "compare", file, "--vary", "defaults.optimizer.lr=0.01,0.02")
    assert "defaults.optimizer.lr is varied, and fedavg would not read it" in message
    assert "methods.fedavg.optimizer.lr=..." in message
    assert list(files(Path())) == ["small.toml"]
    tables = LayeredTables.read(Path(file))
    base = ExperimentConfig.parse(tables.merge())
    with pytest.raises(ConfigError, match="fedavg would not read it"):
        plan_runs(
            base, ["standalone", "fedavg"], [0], ["defaults.optimizer.lr=0.01,0.02"], Path("out"), tables
        )
    # each method that is compared reads these
    for names, vary in (
        (["standalone"], "defaults.optimizer.lr=0.01,0.02"),
        (["fedavg"], "defaults.epochs=1,2"),
    ):
        assert len(plan_runs(base, names, [0], [vary], Path("out"), tables)) == 2


def test_an_override_that_only_some_methods_read_is_logged(capsys: Capsys) -> None:
    file = write(Path(), SMALL + "[methods.fedavg.optimizer]\nlr = 0.5\n")
    assert main(["compare", file, "defaults.optimizer.lr=0.01", "run.rounds=1"]) == 0
    text = "defaults.optimizer: fedavg does not read this override, for the table methods.fedavg has its own"
    assert capsys.readouterr().err.count(text) == 1
    config = RunRecord.load(Path("runs/small/fedavg-s0")).config
    assert config["method"]["fields"]["optimizer"]["lr"] == 0.5


@pytest.mark.parametrize("name", ["a/b", "../../x", "a\\b", "..", ".", "", "a\nb"])
def test_a_name_that_cannot_be_a_folders_is_refused(name: str) -> None:
    """A run of ``a/b`` would lie one folder deeper, where no report looks for it."""
    tables = tomllib.loads(SMALL)
    with pytest.raises(ConfigError, match="cannot be the name of a folder"):
        ExperimentConfig.parse({**tables, "methods": {name: {"method": "fedavg"}}})
    with pytest.raises(ConfigError, match=r"name: .* cannot be the name of a folder"):
        ExperimentConfig.parse({**tables, "name": name})


def test_a_rank_that_every_client_replaces_by_its_own_is_refused() -> None:
    tables = {**tomllib.loads(SMALL), "method": "fedhl", "lora": {"ranks": [1, 2, 2]}}
    with pytest.raises(
        ConfigError, match=r"methods\.fedhl\.training\.rank = 2 does nothing beside lora\.ranks"
    ):
        ExperimentConfig.parse({**tables, "methods": {"fedhl": {"training": {"rank": 2}}}})
    made = ExperimentConfig.parse({**tables, "methods": {"fedhl": {"training": {"common_rank": 2}}}})
    assert made.build_method("fedhl").training.common_rank == 2  # type: ignore[attr-defined]


def test_a_whole_number_beyond_64_bits_is_refused_with_its_field() -> None:
    """Torch raises a TypeError for such a size."""
    for field in ("model.hidden=[18446744073709551616]", "partition.clients=18446744073709551616"):
        with pytest.raises(
            ConfigError, match=rf"{field.partition('=')[0]}: whole numbers have at most 64 bits"
        ):
            read(field)
    # a number with a fraction has no such bound
    assert read("partition.kind=dirichlet", "partition.alpha=18446744073709551616").partition.alpha == 2.0**64  # type: ignore[union-attr]
    huge = ("data.source=low_rank_teacher", "data.normalize=none", "data.inputs=1000000000000000")
    with pytest.raises(DataError, match=r"data: the memory of this machine does not suffice"):
        read(*huge).shares()


def test_infinity_is_no_clipping_and_survives_every_form(capsys: Capsys) -> None:
    """TOML has no null, so ``inf`` is the only way to name it in a grid."""
    text = SMALL + "[methods.fedavg.optimizer]\nlr = 0.1\nclip = inf\n"
    made = read(text=text)
    assert made.build_method("fedavg") == read(text=text.replace("clip = inf\n", "")).build_method("fedavg")
    assert ExperimentConfig.parse(tomllib.loads(made.to_toml())).to_dict() == made.to_dict()
    assert ExperimentConfig.parse(json.loads(json.dumps(made.to_dict()))).to_dict() == made.to_dict()
    done(capsys, "run", write(Path(), text), "run.rounds=1", "-o", "r")
    done(capsys, "resume", "r", "run.rounds=2")
    done(capsys, "run", write(Path()), "-o", "whole")
    records = [[r.untimed() for r in RunRecord.load(Path(folder)).rounds] for folder in ("r", "whole")]
    assert records[0] == records[1]
    done(capsys, "compare", write(Path()), "--methods", "fedavg", "--vary", "defaults.optimizer.clip=1.0,inf")
    assert "| inf |" in Path("runs/small/report.md").read_text()


def test_a_part_of_a_methods_table_is_laid_over_the_default() -> None:
    """As in a grid of `tune`: a grid over the momentum of one method keeps its learning rate."""
    made = read("methods.fedavg.optimizer.momentum=0.9").build_method("fedavg")
    assert made.optimizer == SGD(lr=0.1, momentum=0.9)
    # the default may be overridden, too, in any order
    for overrides in itertools.permutations(
        ("methods.fedavg.optimizer.kind=adamw", "defaults.optimizer.lr=0.2", "--")
    ):
        experiment = read(*(text for text in overrides if text != "--"))
        assert experiment.build_method("fedavg").optimizer == AdamW(lr=0.2)
        assert experiment.build_method("standalone").optimizer == SGD(lr=0.2)
    # a table of the file's own replaces the default, and is what is changed
    text = SMALL + "[methods.fedavg.optimizer]\nmomentum = 0.5\n"
    assert read("methods.fedavg.optimizer.weight_decay=0.1", text=text).build_method(
        "fedavg"
    ).optimizer == SGD(momentum=0.5, weight_decay=0.1)
    python = read().overlay({"methods": {"fedavg": {"optimizer": {"momentum": 0.9}}}})
    assert python.build_method("fedavg") == made
    laid = LayeredTables.read(Path(write(Path())))
    vary = ["methods.fedavg.optimizer.momentum=0.0,0.9"]
    base = read_varied(laid, vary, ("fedavg",))
    rates = [
        run.experiment.build_method("fedavg").optimizer.lr
        for run in plan_runs(base, ["fedavg"], [0], vary, Path(), laid)
    ]
    assert rates == [0.1, 0.1]


def test_a_variant_does_not_read_the_table_of_its_method(capsys: Capsys) -> None:
    text = SMALL.replace('method = "fedavg"', 'method = "far"') + '[methods.far]\nmethod = "fedprox"\n'
    assert "or set methods.far" in refused(capsys, "run", write(Path(), text), "methods.fedprox.mu=1")
    assert read("methods.far.mu=0.5", text=text).build_method("far").mu == 0.5  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize("order", [1, -1])
def test_variations_join_the_overrides(order: int) -> None:
    file = Path(write(Path()))
    overrides = ["partition.clients=4", "partition.alpha=0.5"]
    laid = LayeredTables.read(file, overrides[::order])
    vary = ["partition.kind=dirichlet", "run.rounds=1,2"][::order]
    base = read_varied(laid, vary, ())
    runs = plan_runs(base, ["fedavg"], [0, 1], vary, Path("out"), laid)
    assert len(runs) == 4
    for run in runs:
        assert run.experiment.partition == Dirichlet(clients=4, alpha=0.5)
        assert run.experiment.run.rounds == run.vary["run.rounds"]
    assert sorted(run.experiment.run.seed for run in runs) == [0, 0, 1, 1]


def test_a_grid_takes_overrides_of_single_fields() -> None:
    text = SMALL + '[tune.grid.optimizer]\nlr = [0.1, 0.3]\nkind = ["sgd", "adamw"]\n'
    tune = read('tune.grid.optimizer.kind=["adamw"]', text=text).tune
    assert tune is not None
    assert tune.grid_of("fedavg") == {"optimizer.lr": [0.1, 0.3], "optimizer.kind": ["adamw"]}
    text = SMALL + '[tune.grid]\n"optimizer.lr" = [0.1, 0.3]\nepochs = [1]\n'
    for name in ('tune.grid."optimizer.lr"', "tune.grid.optimizer.lr"):
        tune = read(f"{name}=[0.5]", text=text).tune
        assert tune is not None
        assert tune.grid_of("fedavg") == {"optimizer.lr": [0.5], "epochs": [1]}


def test_a_grid_that_names_a_field_twice() -> None:
    tables = tomllib.loads(SMALL)
    grid = {"optimizer.lr": [0.1], "optimizer": {"lr": [0.3]}}
    with pytest.raises(ConfigError, match=r"tune\.grid\.optimizer\.lr is in the grid twice"):
        ExperimentConfig.parse({**tables, "tune": {"grid": grid}})


@pytest.mark.full
def test_a_setting_of_a_grid_is_laid_over_in_every_order() -> None:
    made = read()
    values: list[tuple[str, Any]] = [("optimizer.kind", "adamw"), ("optimizer.beta1", 0.5), ("epochs", 2)]
    for order in itertools.permutations(values):
        tables = {"methods": {"fedavg": nest_values(made, "fedavg", dict(order))}}
        method = made.overlay(tables).build_method("fedavg")
        assert (method.optimizer, method.epochs) == (AdamW(lr=0.1, beta1=0.5), 2)


@pytest.mark.full
def test_resume_reads_every_override(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1", "-o", "r")
    for text, says in (
        ("method=standalone", "method: nothing reads"),
        ("methods.standalone.epochs=2", "methods.standalone: nothing reads"),
        ("seeds=[1]", "seeds: nothing reads"),
    ):
        assert says in refused(capsys, "resume", "r", text)
    assert "given twice" in refused(capsys, "resume", "r", "run.rounds=2", "run.rounds=3")
    done(capsys, "resume", "r", "run.rounds=2", "run.threads=1")
    assert len(RunRecord.load(Path("r")).rounds) == 3


def test_names_may_be_quoted() -> None:
    assert parse_override('methods."own.module:M".mu=1') == {"methods": {"own.module:M": {"mu": 1}}}
    assert parse_override("methods.own:M.mu=1") == {"methods": {"own:M": {"mu": 1}}}
    made = read("defaults.optimizer.groups.head/weight.lr=0.25")
    assert made.build_method("fedavg").optimizer.groups == {"head/weight": Group(lr=0.25)}


def test_a_line_break_in_a_value_hides_no_second_value() -> None:
    assert parse_override("title=1\nb = 2") == {"title": "1\nb = 2"}


def test_a_score_reads_every_override(capsys: Capsys) -> None:
    arguments = ["score", "nowhere", "limit=1", "limit=2", "--task", "perplexity"]
    assert main(arguments) == 1
    assert "limit is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("[run]\nrounds = '2'", "run.rounds: input should be a valid integer; it is '2'. Write rounds = 2 without"),
        ("[run]\nparticipation = '0.5'", "Write participation = 0.5 without quotes"),
        ("[run]\nkeep_best = 'True'", "Write keep_best = true without quotes"),
        ("[run]\nkeep_best = 1", "run.keep_best: input should be a valid boolean; it is 1"),
        ("[run]\nadapters = [1, '2']", "run.adapters: input should be a valid integer; it is '2'"),
        ("[run.robust]\nrule = 'krum'\nhostile = '0.3'", "run.robust.hostile"),
        ("[defaults]\nepochs = '2'", "epochs: input should be a valid integer; it is '2'"),
        ("[defaults.optimizer.groups.head]\nlr = '0.1'", "optimizer.groups.head.lr"),
        ("[methods.fedit]\ntraining.rank = '4'", "methods.fedit.training.rank"),
        ("[model]\nhidden = ['9']", "model.hidden"),
        ("[partition]\nclients = '3'", "partition.clients"),
        ("[data]\nexamples = '20'", "data.examples"),
        ("[lora]\nlora_alpha = '8'\nr = 4", "lora.lora_alpha"),
        ("[network.limits]\nban_after = '8'", "network.limits.ban_after"),
        ("[tune]\nrounds = '8'", "tune.rounds"),
        ("seeds = [0, '1']", "seeds: input should be a valid integer; it is '1'"),
    ],
)  # fmt: skip
def test_a_file_has_types_and_text_is_no_number(table: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.parse(tomllib.loads(f"method = 'fedavg'\n{table}"))
    assert says in str(error.value)


def test_a_command_line_is_text() -> None:
    made = read(
        "run.participation=.5",
        "run.rounds=2",
        "defaults.optimizer.lr=1.",
        "defaults.drop_last=True",
        "name=007",
    )
    method = made.build_method("fedavg")
    assert (made.run.participation, made.run.rounds, made.name) == (0.5, 2, "007")
    assert (method.optimizer.lr, method.drop_last) == (1.0, True)


def test_a_field_with_dashes_is_told_how_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "experiment.toml", "--run.rounds=3"])
    assert "set without dashes: run.rounds=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("run.rounds=1, 2", [1, 2]),
        ("model.hidden=[8],[16,16]", [[8], [16, 16]]),
        ("loss={ kind = 'focal', gamma = 1.0 },mse", [{"kind": "focal", "gamma": 1.0}, "mse"]),
        ("data.path=\"a,b.csv\",'c,d.csv',e.csv", ["a,b.csv", "c,d.csv", "e.csv"]),
        (r'name="a\",b",c', ['a",b', "c"]),
        ("name=O'Neil,don't", ["O'Neil", "don't"]),
        ("name=a[,b", ["a[", "b"]),
    ],
)
def test_commas_in_brackets_and_quotes_belong_to_a_varied_value(text: str, values: list[Any]) -> None:
    field, texts = parse_variation(text)
    assert [parse_value(value, field) for value in texts] == values


def test_lists_are_varied() -> None:
    laid = LayeredTables.read(Path(write(Path(), SMALL.replace('"linear"', '"mlp"'))))
    vary = ["model.hidden=[8],[16,16]"]
    runs = plan_runs(read_varied(laid, vary, ()), ["fedavg"], [0], vary, Path("out"), laid)
    assert [run.experiment.model.hidden for run in runs] == [(8,), (16, 16)]
    assert len({run.folder for run in runs}) == 2
    # tables of results group runs by it
    assert {*(tuple(run.vary.items()) for run in runs)} == {
        (("model.hidden", "[8]"),),
        (("model.hidden", "[16,16]"),),
    }
