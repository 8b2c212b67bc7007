"""Every mistake a person can make gives one clear message, exit code 1, and leaves nothing half-written."""

from __future__ import annotations

import errno
import gzip
import os
import struct
from pathlib import Path

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.core.errors import FedlowrankError
from fedlowrank.data.datasets.bundled import Iris
from fedlowrank.results.records import RunRecord
from fedlowrank.storage import checkpoint
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]


@pytest.mark.full
def test_a_missing_file(capsys: Capsys) -> None:
    for command in ("run", "compare", "data"):
        assert "no experiment file nowhere.toml" in refused(capsys, command, "nowhere.toml")
    assert files(Path()) == {}


def test_no_method_and_a_function_as_data(capsys: Capsys) -> None:
    file = write(
        Path(), SMALL.replace('method = "fedavg"', "").replace('compare = ["standalone", "fedavg"]', "")
    )
    said = refused(capsys, "run", file)
    assert "names no method" in said
    assert "--method fedavg" in said
    said = refused(capsys, "run", write(Path()), "data.source=my_data:load")
    assert "numpy.savez" in said
    assert "Federation.from_arrays" in said


def test_a_folder_instead_of_a_file(capsys: Capsys) -> None:
    Path("folder.toml").mkdir()
    assert "folder.toml" in refused(capsys, "run", "folder.toml")


@pytest.mark.parametrize("text", ["[data", "a = ", "name = 'x' name = 'y'", "\x00"])
def test_not_toml(text: str, capsys: Capsys) -> None:
    assert "not a TOML file" in refused(capsys, "run", write(Path(), text))


def test_bytes_that_are_no_text(capsys: Capsys) -> None:
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "not a TOML file" in refused(capsys, "run", "binary.toml")


def test_extending_what_is_not_there_or_oneself(capsys: Capsys) -> None:
    assert "base.toml" in refused(capsys, "run", write(Path(), 'extends = "base.toml"'))
    assert "extends itself" in refused(capsys, "run", write(Path(), 'extends = "small.toml"'))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[runn]\nrounds = 2", ("runn", "Did you mean 'run'?")),
        ("[run]\nround = 2", ("run.round", "Did you mean 'rounds'?")),
        ("[partition]\nclient = 2", ("partition.client", "Did you mean 'clients'?")),
        ("[model]\nname = ['mlp']", ("model.name", "Did you mean 'names'?")),
        ("[defaults]\nbatchsize = 2", ("batchsize", "Did you mean 'batch_size'?")),
        ("[defaults.optimizer]\nlearning_rate = 2", ("learning_rate",)),
        ("[methods.pfedlora]\nmuu = 0.9", ("methods.pfedlora.muu", "Did you mean 'mu'?")),
        ("[methods.pfedlra]\nmu = 0.9", ("pfedlra", "Did you mean 'pfedlora'?")),
        ("[data]\nsource = 'digitz'", ("data", "digitz", "Did you mean 'digits'?")),
        ("[partition]\nkind = 'pathologic'", ("partition", "Did you mean 'pathological'?")),
        ("[split]\nkind = 'locl'", ("split", "Did you mean 'local'?")),
        ("method = 'fedavg'\n[model]\nnames = ['cnn11']", ("model.names", "cnn11", "Did you mean 'cnn1'?")),
        ("method = 'fedavgg'", ("fedavgg", "Did you mean 'fedavg'?")),
        ("compare = ['fedavg', 'fedpro']", ("fedpro", "Did you mean 'fedpro")),
        ("[run]\nengine = 'sequental'", ("run.engine", "Did you mean 'sequential'?")),
    ],
    ids=lambda v: v.replace("\n", " ") if isinstance(v, str) else "",
)
def test_an_unknown_name_gets_a_suggestion(text: str, says: tuple[str, ...], capsys: Capsys) -> None:
    for command in ("run", "compare", "data"):
        actual = refused(capsys, command, write(Path(), text))
        for part in says:
            assert part in actual
    assert list(files(Path())) == ["small.toml"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.rounds=many", ("run.rounds", "integer", "'many'")),
        ("run.rounds=2.5", ("run.rounds", "2.5")),
        ("run.rounds=[2]", ("run.rounds",)),
        ("run.participation=all", ("run.participation", "'all'")),
        ("model.names=mlp", ("model.names",)),
        ("model.hidden=4", ("model.hidden",)),
        ("run=5", ("run",)),
        ("data=iris", ("data",)),
        ("methods=5", ("methods",)),
        ("methods.fedavg=5", ("fedavg",)),
        ("defaults=5", ("defaults",)),
        ("partition.clients=three", ("partition.clients", "'three'")),
        ("defaults.optimizer=sgd", ("optimizer",)),
        ("defaults.optimizer.lr=fast", ("lr", "'fast'")),
        ("defaults.optimizer.kind=adam", ("adam",)),
        ("compare=5", ("compare",)),
        ("compare=fedavg", ("compare",)),
        ("method=5", ("5",)),
        ("seeds=5", ("seeds",)),
        ("seeds=[a]", ("seeds",)),
        ("vary=5", ("vary",)),
        ("name=5", ("name",)),
        ("reference.accuracy=5", ("reference",)),
    ],
)
def test_a_value_of_the_wrong_type(override: str, says: tuple[str, ...], capsys: Capsys) -> None:
    text = SMALL + '[reference]\nlabel = "x"\naccuracy = { fedavg = 50.0 }\n'
    actual = refused(capsys, "compare", write(Path(), text), override)
    for part in says:
        assert part in actual
    assert list(files(Path())) == ["small.toml"]


@pytest.mark.parametrize("override", ["rounds", "=5", ".=5", "run.=5", "run..rounds=5"])
def test_an_override_of_another_form(override: str, capsys: Capsys) -> None:
    assert "section.field=value" in refused(capsys, "run", write(Path()), override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.participation=0", "participation"),
        ("run.participation=1.5", "participation"),
        ("run.participation=-1", "participation"),
        ("run.participation=nan", "participation"),
        ("run.rounds=0", "rounds"),
        ("run.rounds=-3", "rounds"),
        ("run.checkpoint_every=0", "checkpoint_every"),
        ("run.evaluate_every=0", "evaluate_every"),
        ("run.threads=0", "threads"),
        ("run.threads=8193", "run.threads must be <= 8192; it is 8193"),
        ("run.threads=9999999999999999", "run.threads must be <= 8192; it is 9999999999999999"),
        ("run.threads=99999999999999999999", "run.threads: whole numbers have at most 64 bits"),
        ("run.lost_replies=1", "lost_replies"),
        ("run.target=2", "target"),
        ("run.representations=-5", "representations"),
        ("defaults.batch_size=0", "batch_size"),
        ("defaults.epochs=0", "epochs"),
        ("defaults.optimizer.lr=-1", "lr"),
        ("defaults.optimizer.lr=nan", "lr"),
        ("methods.pfedlora.mu=0.2", "mu"),
        ("methods.fedproto.lam=-1", "lam"),
        ("partition.clients=0", "clients"),
        ("partition.clients=1000", "client"),
        ("model.names=[]", "names"),
        ("model.hidden=[]", "hidden"),
        ("model.hidden=[0]", "hidden"),
    ],
)
def test_a_value_out_of_range(override: str, says: str, capsys: Capsys) -> None:
    actual = refused(capsys, "run", write(Path()), override)
    assert says in actual
    assert list(files(Path())) == ["small.toml"]


def test_more_classes_a_client_than_there_are(capsys: Capsys) -> None:
    actual = refused(
        capsys, "run", write(Path()), "partition.kind=pathological", "partition.classes_per_client=4"
    )
    assert "classes_per_client is 4" in actual
    assert "3 classes" in actual


@pytest.mark.full
def test_a_client_without_examples_or_with_too_few(capsys: Capsys) -> None:
    actual = refused(capsys, "run", write(Path()), "partition.clients=100")
    assert "client" in actual
    assert "examples" in actual
    actual = refused(capsys, "run", write(Path()), "partition.clients=200")
    assert "client" in actual


@pytest.mark.full
def test_clients_of_a_single_class_work_and_are_noted(capsys: Capsys) -> None:
    out = done(capsys, "run", write(Path()), "partition.kind=pathological", "partition.classes_per_client=1")
    assert "single class" in out
    assert "client 0" in out
    assert len(RunRecord.load(Path("runs/small/fedavg-s0")).rounds) == 3


# Files of data sets


def mnist(folder: Path) -> Path:
    folder.mkdir()
    for part in ("train", "t10k"):
        images = struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(4 * 784)
        labels = struct.pack(">II", 0x801, 4) + bytes([0, 1, 0, 1])
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return folder


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("train-images-idx3-ubyte", struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(100), "found 100"),
        ("train-images-idx3-ubyte", b"", "0 bytes"),
        ("train-images-idx3-ubyte", b"not an image at all", "magic number"),
        ("t10k-labels-idx1-ubyte", struct.pack(">II", 0x801, 3) + bytes(3), "labels"),
    ],
)
def test_damaged_mnist(name: str, data: bytes, says: str, capsys: Capsys) -> None:
    (mnist(Path("m")) / name).write_bytes(data)
    actual = refused(capsys, "run", write(Path()), "data.source=mnist", "data.path=m")
    assert name in actual
    assert says in actual
    assert not Path("runs").exists()


def test_damaged_compression(capsys: Capsys) -> None:
    folder = mnist(Path("m"))
    plain = folder / "train-images-idx3-ubyte"
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes())[:-20])
    plain.unlink()
    assert "cut short" in refused(capsys, "data", write(Path()), "data.source=mnist", "data.path=m")


@pytest.mark.full
def test_damaged_cifar(capsys: Capsys) -> None:
    Path("c").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        Path(f"c/{name}.bin").write_bytes(bytes(2 * 3073))
    Path("c/data_batch_3.bin").write_bytes(bytes(3073 + 99))
    actual = refused(capsys, "run", write(Path()), "data.source=cifar10", "data.path=c")
    assert "data_batch_3.bin" in actual
    Path("c/data_batch_3.bin").write_bytes(bytes(3073))
    assert "equally many" in refused(capsys, "run", write(Path()), "data.source=cifar10", "data.path=c")
    Path("c/data_batch_3.bin").write_bytes(b"\xff" * 2 * 3073)
    assert "label" in refused(capsys, "run", write(Path()), "data.source=cifar10", "data.path=c")


@pytest.mark.full
@pytest.mark.parametrize("source", ["mnist", "cifar10", "cifar100", "folder", "arrays"])
def test_data_that_are_not_there(source: str, capsys: Capsys) -> None:
    actual = refused(capsys, "run", write(Path()), f"data.source={source}", "data.path=nowhere")
    assert "nowhere" in actual
    assert "data.path: this field is needed" in refused(capsys, "run", write(Path()), f"data.source={source}")


def test_a_field_of_another_source(capsys: Capsys) -> None:
    assert "data.labels" in refused(capsys, "run", write(Path()), "data.labels=fine")


# Models and methods that do not fit

MODELS = """
from torch import nn

class Net(nn.Module):
    head_name = "head"
    def __init__(self, width, shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(shape[0], width), nn.ReLU())
        self.head = nn.Linear(width, classes)
    def forward(self, x):
        return self.head(self.body(x))

def narrow(shape, classes):
    return Net(3, shape, classes)

def wide(shape, classes):
    return Net(5, shape, classes)

def narrow_too(shape, classes):
    return Net(3, shape, classes)

def breaks(shape, classes):
    raise ValueError("no model today")

def crooked(shape, classes):
    return nn.Linear(shape[0] + 1, classes)

def normalized(shape, classes):
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, -1)), norm, nn.Flatten(), nn.Linear(shape[0], classes))
"""


def test_widths_that_do_not_fit(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("own_widths.py").write_text(MODELS)
    actual = refused(
        capsys,
        "run",
        write(Path()),
        "model.names=['own_widths:narrow', 'own_widths:wide']",
        "--method",
        "pfedlora",
    )
    for part in ("client 0", "3", "client 1", "5"):
        assert part in actual
    assert not Path("runs").exists()


@pytest.mark.full
def test_own_models_in_the_working_folder_are_found(capsys: Capsys) -> None:
    # as `check` finds one's own method there
    Path("own_here.py").write_text(MODELS)
    done(capsys, "run", write(Path()), "model.names=['own_here:narrow']")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_bad:nothing", "nothing"),
        ("no_such_module:f", "no_such_module"),
        ("own_bad:breaks", "no model today"),
        ("own_bad:crooked", "own_bad:crooked"),
        ("own_bad:normalized", "running statistics"),
    ],
)
def test_own_models_that_do_not_work(
    name: str, says: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("own_bad.py").write_text(MODELS)
    assert says in refused(capsys, "run", write(Path()), f"model.names=['{name}']")
    assert not Path("runs").exists()


def test_images_are_needed(capsys: Capsys) -> None:
    assert "images" in refused(capsys, "run", write(Path()), "model.names=['cnn1']")


def heterogeneous(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("own_two.py").write_text(MODELS)
    return write(Path(), SMALL.replace('["mlp"]\nhidden = [4]', '["own_two:narrow", "own_two:narrow_too"]'))


def test_a_method_for_equal_models_refuses_others(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = refused(capsys, "run", heterogeneous(monkeypatch))
    assert "same architecture" in actual
    assert "client 0" in actual
    assert not Path("runs").exists()


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_goes_on_without_what_does_not_fit(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = done(capsys, "compare", heterogeneous(monkeypatch))
    assert "not run: FedAvg" in out
    assert Path("runs/small/report.html").exists()
    assert RunRecord.load(Path("runs/small/standalone-s0")).status["state"] == "finished"
    assert not Path("runs/small/fedavg-s0").exists()


def test_compare_with_nothing_that_fits(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    code = main(["compare", heterogeneous(monkeypatch), "--methods", "fedavg"])
    said = capsys.readouterr()
    assert code == 1
    assert "same architecture" in said.out + said.err


# Runs that fail


@pytest.mark.full
def test_a_diverging_run_names_client_round_and_pass(capsys: Capsys) -> None:
    file = write(Path())
    actual = refused(
        capsys, "run", file, "defaults.optimizer.lr=1e30", "run.rounds=4", "defaults.batch_size=4"
    )
    for part in ("client ", "round ", "'local'", "not finite", "on_nan"):
        assert part in actual
    folder = Path("runs/small/fedavg-s0")
    record = RunRecord.load(folder)
    assert record.status["state"] == "diverged"
    assert "not finite" in record.status["message"]
    assert checkpoint.load(folder / "checkpoint").round == len(record.rounds) - 1
    # resuming comes to the same end, and not to a worse one
    before = files(folder / "checkpoint")
    assert "not finite" in refused(capsys, "resume", str(folder))
    assert files(folder / "checkpoint") == before


@pytest.mark.usefixtures("undrawn")
def test_compare_tells_of_a_diverging_method_and_keeps_the_others(capsys: Capsys) -> None:
    file = write(Path(), SMALL + "[methods.standalone.optimizer]\nlr = 1e30\n")
    code = main(["compare", file, "defaults.batch_size=4"])
    said = capsys.readouterr()
    assert "not finite" in said.out + said.err
    assert "Standalone" in said.out + said.err
    assert "Traceback" not in said.out + said.err
    assert RunRecord.load(Path("runs/small/fedavg-s0")).status["state"] == "finished"
    assert code == 0


@pytest.mark.full
def test_a_diverging_client_can_be_dropped(capsys: Capsys) -> None:
    out = done(
        capsys, "run", write(Path()), "defaults.optimizer.lr=1e30", "run.on_nan=drop", "defaults.batch_size=4"
    )
    assert "runs/small/fedavg-s0" in out
    record = RunRecord.load(Path("runs/small/fedavg-s0"))
    assert [r.round for r in record.rounds] == [0, 1, 2]
    assert record.rounds[1].lost


@pytest.mark.full
def test_a_full_disk(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, count = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal count
        count += 1
        if count > 15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    file = write(Path())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        whole = ("run", file, "run.rounds=8", "run.checkpoint_every=1")
        assert "No space left on device" in refused(capsys, *whole)
    folder = Path("runs/small/fedavg-s0")
    assert not list(folder.rglob("*.part"))
    done(capsys, "resume", str(folder))
    record = RunRecord.load(folder)
    assert [r.round for r in record.rounds] == list(range(9))
    done(capsys, "run", file, "run.rounds=8", "-o", "whole")
    assert [r.untimed() for r in record.rounds] == [r.untimed() for r in RunRecord.load(Path("whole")).rounds]


def test_a_full_disk_from_the_start(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in refused(capsys, "run", write(Path()))
    # what is left does not pass for a run, and does not stand in the way
    done(capsys, "run", write(Path()), "--force")


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_reports_and_pictures_on_a_full_disk(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file)
    Path("full.html").symlink_to("/dev/full")
    Path("full.svg").symlink_to("/dev/full")
    assert "full.svg" in refused(capsys, "data", file, "-o", "full.svg")
    # a report is replaced by a rename, so that the name on the full disk must be a folder's
    actual = main(["report", "runs/small/fedavg-s0", "-o", "full.html"])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert actual == 0 or said.err.startswith("error: ")


# Folders


@pytest.mark.full
def test_an_existing_run_is_refused_and_force_keeps_it(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file)
    folder = Path("runs/small/fedavg-s0")
    before = files(folder)
    actual = refused(capsys, "run", file)
    assert "runs/small/fedavg-s0 exists already" in actual
    assert "fedlowrank resume runs/small/fedavg-s0" in actual
    assert "--force" in actual
    assert files(folder) == before
    done(capsys, "run", file, "run.rounds=1", "--force")
    assert files(Path("runs/small/fedavg-s0.old-1")) == before
    assert len(RunRecord.load(folder).rounds) == 2
    done(capsys, "run", file, "--force")
    assert len(RunRecord.load(Path("runs/small/fedavg-s0.old-2")).rounds) == 2


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_refuses_runs_of_another_configuration(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "compare", file)
    before = files(Path("runs/small/fedavg-s0"))
    actual = refused(capsys, "compare", file, "defaults.optimizer.lr=0.2")
    assert "lr" in actual
    assert files(Path("runs/small/fedavg-s0")) == before


def test_a_report_of_no_run(capsys: Capsys) -> None:
    Path("empty").mkdir()
    assert "not a run folder" in refused(capsys, "report", "empty")
    assert "not a run folder" in refused(capsys, "report", "nowhere")
    assert not Path("report.html").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["2.0", "0", "-1", "nan"])
def test_a_target_out_of_range(target: str, capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file)
    assert "(0, 1]" in refused(capsys, "report", "runs/small/fedavg-s0", f"--target={target}")
    assert not Path("report.html").exists()
    # before hours of training, not after
    assert "(0, 1]" in refused(capsys, "compare", file, f"--target={target}", "-o", "other")
    assert not Path("other").exists()


def test_a_run_folder_below_a_file(capsys: Capsys) -> None:
    file = write(Path())
    Path("plain").write_text("")
    actual = refused(capsys, "run", file, "-o", "plain/run")
    assert "plain/run" in actual
    assert "exists already" in refused(capsys, "run", file, "-o", "plain")


@pytest.mark.usefixtures("undrawn")
def test_a_report_that_cannot_be_written(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file)
    Path("plain").write_text("")
    message = refused(capsys, "report", "runs/small/fedavg-s0", "--latex", "t", "--csv", "./t")
    assert "--latex and --csv both name t" in message
    assert not Path("t").exists()
    assert "plain" in refused(capsys, "report", "runs/small/fedavg-s0", "-o", "plain/report.html")
    assert "runs" in refused(capsys, "report", "runs/small/fedavg-s0", "-o", "runs")
    pytest.importorskip("tensorboard")
    assert "plain" in refused(capsys, "report", "runs/small/fedavg-s0", "--tensorboard", "plain")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission(capsys: Capsys) -> None:
    file = write(Path())
    Path("locked").mkdir(mode=0o500)
    assert "locked" in refused(capsys, "run", file, "-o", "locked/run")
    assert "locked" in refused(capsys, "report", "locked/run")


@pytest.mark.full
def test_a_folder_that_may_not_be_written(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(Path())

    def forbidden(*arguments: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", forbidden)
        assert "Permission denied" in refused(capsys, "run", file)
    done(capsys, "run", file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", forbidden)
        assert "Permission denied" in refused(capsys, "run", file, "--force")


# Options


@pytest.mark.parametrize("seeds", ["a,b", "1,", "1.5"])
def test_seeds_that_are_no_numbers(seeds: str, capsys: Capsys) -> None:
    assert "--seeds" in refused(capsys, "compare", write(Path()), f"--seeds={seeds}")
    assert not Path("runs").exists()


@pytest.mark.parametrize("vary", ["nonsense", "run.participation=", "=1,2", "run.participation"])
def test_a_variation_of_another_form(vary: str, capsys: Capsys) -> None:
    assert "vary" in refused(capsys, "compare", write(Path()), f"--vary={vary}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ("run.participations=0.1,0.2", "Did you mean 'participation'?"),
        ("run.participation=0.5,2", "participation"),
        ("nosuch.field=1,2", "nosuch"),
        ("partition.client=2,3", "Did you mean 'clients'?"),
        ("methods.pfedlora.muu=0.5,0.6", "Did you mean 'mu'?"),
    ],
)
def test_a_variation_of_what_there_is_not(vary: str, says: str, capsys: Capsys) -> None:
    assert says in refused(capsys, "compare", write(Path()), f"--vary={vary}")
    # every value is checked before the first is run
    assert not Path("runs").exists()


@pytest.mark.full
def test_unknown_methods_on_the_command_line(capsys: Capsys) -> None:
    assert "Did you mean 'fedavg'?" in refused(capsys, "run", write(Path()), "--method", "fedavgg")
    assert "Did you mean 'fedavg'?" in refused(
        capsys, "compare", write(Path()), "--methods", "standalone,fedavgg"
    )
    assert "Did you mean 'fedavg'?" in refused(capsys, "list", "fedavgg")
    assert "Did you mean 'fedavg'?" in refused(capsys, "check", "fedavgg")
    assert "To try a file: `fedlowrank run mine.toml run.rounds=1`" in refused(capsys, "check", "mine.toml")
    assert not Path("runs").exists()


OWN = """
import dataclasses
from fedlowrank import Method

class NotAMethod:
    pass

class Abstract(Method):
    title = "Abstract"
    citation = "none"

number = 7
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:Method", "no_such_module"),
        ("own_checked:Nothing", "Nothing"),
        ("own_checked:Abstract", "Abstract"),
        ("own_checked:NotAMethod", "NotAMethod"),
        ("own_checked:number", "number"),
        ("broken_module:X", "broken_module"),
        (":X", ":X"),
        ("own_checked:", "own_checked:"),
    ],
)
def test_a_class_that_cannot_be_checked(name: str, says: str, capsys: Capsys) -> None:
    Path("own_checked.py").write_text(OWN)
    Path("broken_module.py").write_text("def f(:\n")
    assert says in refused(capsys, "check", name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu", "toaster"])
def test_a_device_that_is_not_there(device: str, capsys: Capsys) -> None:
    actual = refused(capsys, "run", write(Path()), f"run.device={device}")
    assert "run.device" in actual
    assert not Path("runs").exists()


def test_a_picture_that_cannot_be_drawn(capsys: Capsys) -> None:
    file = write(Path())
    assert "picture.nope" in refused(capsys, "data", file, "-o", "picture.nope")
    assert "nowhere/picture.svg" in refused(capsys, "data", file, "-o", "nowhere/picture.svg")


def test_debug_shows_the_traceback(capsys: Capsys) -> None:
    with pytest.raises(FedlowrankError):
        main(["run", "nowhere.toml", "--debug"])
    assert main(["run", "nowhere.toml"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "error: there is no experiment file nowhere.toml\n")


def test_a_name_that_is_no_folder(capsys: Capsys) -> None:
    # the name becomes a folder below runs/
    for name in ("../outside", str(Path.cwd() / "outside"), ""):
        refused(capsys, "run", write(Path(), SMALL.replace('"small"', f'"{name}"')))
    assert list(files(Path())) == ["small.toml"]


def test_the_data_of_the_small_experiment() -> None:
    # the tests above count on these numbers
    assert len(Iris().load().train) == 150


@pytest.mark.parametrize("option", ["-o", "--out"])
def test_an_empty_path(option: str, capsys: Capsys) -> None:
    """As from a variable that the shell does not know."""
    with pytest.raises(SystemExit):
        main(["run", str(write(Path())), option, "", "--force"])
    assert "the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        # the tables beside a page would overwrite it
        (["report", "runs", "-o", "all.md"], "all.html"),
        (["report", "runs", "--latex", "t.csv"], "t.tex"),
        (["report", "runs", "--csv", "t.parquet"], "t.csv"),
        (["predict", "runs/a", "-o", "p.json"], "p.csv"),
        (["score", "runs/a", "--task", "perplexity", "-o", "s.json.gz"], "s.json"),
        (["export", "runs/a", "-o", "m.pt"], "m.safetensors"),
    ],
)
def test_a_name_of_another_format(arguments: list[str], name: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"Choose a name such as {name}" in capsys.readouterr().err
