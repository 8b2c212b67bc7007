"""What a run logs while it goes on, read back with the readers of TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import json
import logging
import math
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import Federation, simulate
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.results.records import RoundRecord
from fedlowrank.results.scalars import list_scalars
from tests.support.client_tables import make_client_table
from tests.support.local_network import local, serve_run, small

Found = list[tuple[str, int, float]]
"""Tag, step and value."""


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        # of these libraries' own dependencies
        warnings.simplefilter("ignore")
        yield
        if wandb := sys.modules.get("wandb"):
            # it would write the next run to the folder of this test
            wandb.teardown()


def run(folder: str | None, **settings: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 3, generator=generator), torch.arange(20) % 2) for _ in range(2)]
    module = torch.nn.Linear(3, 2)
    torch.nn.init.eye_(module.weight)
    torch.nn.init.zeros_(module.bias)
    federation = Federation.from_arrays(clients, module, val=0.25)
    chosen = {"rounds": 4, "representations": 0, "evaluate_every": 2, "checkpoint_every": 1, **settings}
    return simulate("fedavg", federation, folder=folder, **chosen)


def in_tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(tag, e.step, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a file of Weights & Biases, which has no reader in Python any more: the log format of LevelDB
    (blocks of 32 KiB; each chunk has a checksum, a length and a type) behind seven bytes."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        # whole or last part
        if kind in (1, 4):
            yield parts
            parts = b""


def in_wandb(folder: Path) -> Found:
    from wandb.proto import wandb_internal_pb2

    identifier = json.loads((folder / "logging.json").read_text())["wandb"]
    actual: Found = []
    for path in sorted(Path("wandb").glob(f"offline-run-*-{identifier}*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                step = record.history.step.num
                for item in record.history.item:
                    tag = item.key or "/".join(item.nested_key)
                    if not tag.startswith("_"):
                        actual.append((tag, step, json.loads(item.value_json)))
    return actual


def in_mlflow(folder: Path) -> Found:
    from mlflow import MlflowClient

    client, identifier = MlflowClient(), json.loads((folder / "logging.json").read_text())["mlflow"]
    tags = client.get_run(identifier).data.metrics
    return [(tag, m.step, m.value) for tag in tags for m in client.get_metric_history(identifier, tag)]


def expected(records: list[RoundRecord]) -> dict[tuple[str, int], float]:
    """By the records, in plain words."""
    actual, total = {}, 0
    for r in records:
        total += r.bytes_up + r.bytes_down
        actual["bytes/total", r.round] = total
        actual |= {(f"seconds/{kind}", r.round): value for kind, value in r.seconds.items()}
        actual |= {(f"training_loss/{name}", r.round): value for name, value in r.training_losses.items()}
        for tag in ("accuracy", "loss"):
            for split in ("val", "test"):
                known = [
                    value for value in r.values(tag, series="personal", split=split) if value is not None
                ]
                if known:
                    actual[f"{tag}/personal/{split}", r.round] = sum(known) / len(known)
    return actual


def assert_logged(found: Found, records: list[RoundRecord]) -> None:
    counts = Counter((tag, step) for tag, step, _ in found)
    assert not [key for key, count in counts.items() if count > 1]
    values = {(tag, step): value for tag, step, value in found}
    truth = expected(records)
    assert {"bytes/up", "bytes/down"} == {tag for tag, _ in values} - {tag for tag, _ in truth}
    for key, value in truth.items():
        assert math.isclose(values[key], value, rel_tol=1e-6), key
    assert {step for _, step in values} == {r.round for r in records}


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}


def test_values_while_it_runs_and_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in READERS:
        pytest.importorskip(name)
    folder, plain = tmp_path / "run", run(None)
    seen: dict[int, set[int]] = {}

    def look(record: RoundRecord) -> None:
        # the record itself is logged after the callbacks
        if record.round:
            seen[record.round] = {step for _, step, _ in in_tensorboard(folder)}

    def crash(record: RoundRecord) -> None:
        if record.round == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(str(folder), log=tuple(READERS), on_round=[look, crash])
    assert seen == {1: {0}, 2: {0, 1}, 3: {0, 1, 2}}
    actual = run(str(folder), log=tuple(READERS), resume=True)
    # nothing of it changes the run
    assert [r.untimed() for r in actual.rounds] == [r.untimed() for r in plain.rounds]
    said = capfd.readouterr()
    assert said.out + said.err == ""
    # another library may have lowered the level of all loggers
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert_logged(in_tensorboard(folder), actual.rounds)
    assert_logged(in_mlflow(folder), actual.rounds)
    # offline, each process has a folder of the same identifier
    assert_logged(in_wandb(folder), actual.rounds)

    from mlflow import MlflowClient

    info = MlflowClient().get_run(json.loads((folder / "logging.json").read_text())["mlflow"])
    assert info.info.run_name == "FedAvg, seed 0"
    assert info.info.status == "FINISHED"
    assert info.data.params["run.rounds"] == "4"


@pytest.mark.parametrize("name", READERS)
def test_rounds_without_a_logger_are_caught_up(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    folder = tmp_path / "run"
    run(str(folder), log=(name,), rounds=2)
    run(str(folder), log=(), rounds=4, resume=True)
    actual = run(str(folder), log=(name,), rounds=6, resume=True)
    assert_logged(READERS[name](folder), actual.rounds)


def test_a_target_that_fails_stops_the_run_which_goes_on_without_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"

    def fill_disk(record: RoundRecord) -> None:
        if record.round == 2:
            (event_file,) = (folder / "tensorboard").iterdir()
            event_file.unlink()
            event_file.symlink_to("/dev/full")

    with pytest.raises(CheckpointError, match=r"log: tensorboard failed: OSError: .*No space left") as error:
        run(str(folder), log=("tensorboard",), on_round=fill_disk)
    assert "resume=True, log=()" in str(error.value)
    assert "`fedlowrank resume RUN run.log=[]`" in error.value.for_command
    actual = run(str(folder), log=(), resume=True)
    assert [r.untimed() for r in actual.rounds] == [r.untimed() for r in run(None).rounds]


def test_a_target_that_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    close = SummaryWriter.close

    def fail(writer: SummaryWriter) -> None:
        close(writer)
        raise OSError("no connection")

    def interrupt(record: RoundRecord) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(SummaryWriter, "close", fail)
    with pytest.raises(CheckpointError, match=r"log: tensorboard failed: OSError: no connection\. Go on"):
        run("finished", log=("tensorboard",), rounds=1)
    # an error of the run itself stays the one that is raised
    with caplog.at_level(logging.WARNING, logger="fedlowrank"), pytest.raises(KeyboardInterrupt):
        run("interrupted", log=("tensorboard",), on_round=interrupt)
    assert "run.log: tensorboard cannot be closed: OSError: no connection" in caplog.messages


def test_mlflow_has_every_number_of_a_round_that_is_repeated_with_more(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"

    def crash(record: RoundRecord) -> None:
        if record.round == 3:
            raise SystemExit  # before a checkpoint, so that rounds 1 to 3 are run again

    settings: Any = {"log": ("mlflow",), "checkpoint_every": 4}
    with pytest.raises(SystemExit):
        run(str(folder), evaluate_every=4, on_round=crash, **settings)
    actual = run(str(folder), evaluate_every=1, resume=True, **settings)
    assert [r.is_evaluated for r in actual.rounds] == [True] * 5
    # the seconds that were logged are those of the first time
    steps = sorted(step for tag, step, _ in in_mlflow(folder) if tag == "accuracy/personal/test")
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", READERS)
def test_a_run_that_went_back_leaves_the_numbers_of_before(name: str, tmp_path: Path) -> None:
    """A target keeps what was logged, so the rounds that are repeated without a client need a new one."""
    pytest.importorskip(name)
    made, out = small("fedavg", rounds=4, run={"log": [name]}), tmp_path / "served" / "run"
    carrier = local(made, tmp_path / "served")
    before = serve_run(carrier, made, out).rounds
    prepare_resume(out, 2, {1})
    after = serve_run(carrier, made, out, resume=True).rounds
    assert after[3].training_losses != before[3].training_losses
    values = {(tag, step): value for tag, step, value in READERS[name](out)}
    for record in after:
        for title, loss in record.training_losses.items():
            assert values[f"training_loss/{title}", record.round] == pytest.approx(loss, rel=1e-6)
    assert {step for _, step in values} == {0, 1, 2, 3, 4}


OWN = """
def share(scores, targets):
    return float((targets == 1).mean())

def broken(scores, targets):
    return float("nan")
"""


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_every_metric_is_logged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    (tmp_path / "own_numbers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_numbers", raising=False)
    metrics = ("macro_f1", "own_numbers:share", "own_numbers:broken")
    actual = run("run", log=(name,), metrics=metrics)
    logged = {(tag, step): value for tag, step, value in READERS[name](tmp_path / "run")}
    for record in actual.rounds:
        for metric in metrics:
            for split in ("val", "test"):
                values = record.values(metric, series="personal", split=split)
                key = f"{metric}/personal/{split}", record.round
                if metric == "own_numbers:broken" and record.is_evaluated:
                    assert math.isnan(logged[key])
                elif record.is_evaluated:
                    mean = sum(v for v in values if v is not None) / len(values)
                    assert math.isclose(logged[key], mean, rel_tol=1e-6)
                else:
                    assert key not in logged


def test_a_mean_never_looks_better_for_a_client_that_diverged() -> None:
    clients = [{"id": i, "unseen": i == 3} for i in range(4)]
    tables = {
        "accuracy": {"own": {"test": [0.5, 0.7, None, 0.9], "val": [0.5, 0.75, 1.0, 0.9]}},
        "loss": {"own": {"test": [2.0, math.nan, None, 1.0], "val": [2.0, 1.0, 3.0, math.inf]}},
        "ece": {"own": {"test": [math.nan, 0.1, None, 0.3], "val": [0.1, 0.2, None, None]}},
    }
    actual = list_scalars(RoundRecord(1, measured=make_client_table(tables)), clients, 0)
    assert actual["accuracy/own/test"] == pytest.approx(0.6)
    assert actual["loss/own/val"] == 2.0
    assert actual["ece/own/val"] == pytest.approx(0.15)
    for tag in ("loss/own/test", "ece/own/test", "loss/own/val/unseen"):
        assert math.isnan(actual[tag])
    assert actual["ece/own/test/unseen"] == 0.3
    assert "ece/own/val/unseen" not in actual


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'fedlowrank\[{name}\]'"):
        run("run", log=(name,))
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_logged() -> None:
    with pytest.raises(ConfigError, match="tensorboard"):
        run("run", log=("tensorbord",))
    with pytest.raises(ConfigError, match=r"log: a list is needed"):
        run("run", log="wandb")


def test_a_run_without_a_folder_is_not_logged() -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ConfigError, match="needs a run folder"):
        run(None, log=("tensorboard",))
