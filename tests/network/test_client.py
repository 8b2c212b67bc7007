"""A client's half: its folder, its answers, and data of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from filelock import FileLock

from fedlowrank.config.assembly import Shares, assemble
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError, ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.federation import hash_examples
from fedlowrank.engines.engine import ClientJob
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.network.client import ClientRuntime, prepare, read_own_share
from fedlowrank.network.messages import Answer, RefusedOrderError, RegistrationRequest, digest_sections
from fedlowrank.network.operation.client_count import count_clients
from fedlowrank.network.persistence.client_memory import ClientMemory
from fedlowrank.network.server import NetworkError
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.rounds.run import Run
from fedlowrank.storage.digest import seal
from tests.network.orders_by_hand import RUN_NAME, encode_download, make_order
from tests.support.local_network import (
    Hazard,
    LocalTransport,
    assert_same_states,
    no_space,
    serve_run,
    small,
    tables,
)


@pytest.fixture
def folder(experiment: ExperimentConfig, tmp_path: Path) -> Path:
    prepare(tmp_path / "client", experiment, 1, experiment.shares(), SiteSettings.simulated())
    return tmp_path / "client"


def answer(run: Run, folder: Path, /, add: float = 0.0, **fields: Any) -> tuple[Answer, bytes]:
    """What a client's process that begins now answers to an order; to the download a number may be added."""
    return ClientRuntime(folder).answer(make_order(run, **fields), encode_download(run, add))


# -- the folder


def test_preparing_twice_keeps_what_the_client_remembers(experiment: ExperimentConfig, folder: Path) -> None:
    memory = ClientMemory(folder / RUN_NAME)
    memory.propose(0, 1, {"x": 1}, b"", "o", "a")
    memory.read_state(1)
    # where its things lie and how it is reached is nobody else's business
    changed = experiment.overlay({"network": {"wait": 5.0}, "run": {"threads": 2}})
    prepare(folder, changed, 1, experiment.shares())
    assert ClientMemory(folder / RUN_NAME).read_state(1) == {"x": 1}
    assert ClientRuntime(folder).experiment.run.threads == 2


def replace_data(shares: Shares, **parts: Any) -> Shares:
    """The shares with other data of client 1."""
    return dataclasses.replace(
        shares, data=(shares.data[0], dataclasses.replace(shares.data[1], **parts), shares.data[2])
    )


def test_data_may_change_until_the_client_has_trained(
    experiment: ExperimentConfig, sequential_run: Run, folder: Path
) -> None:
    shares = experiment.shares()
    own = shares.data[1]
    fewer = replace_data(shares, train=own.train.take(torch.arange(3)))
    # a run that began, but in which this client has not trained
    (folder / RUN_NAME).mkdir()
    prepare(folder, experiment, 1, fewer)
    assert len(ClientRuntime(folder).data.train) == 3
    prepare(folder, experiment, 1, shares)
    answer(sequential_run, folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    resorted = replace_data(shares, test=own.test.take(torch.arange(len(own.test) - 1, -1, -1)))
    for other, parts in (
        (fewer, "examples"),
        (resorted, "examples"),
        (replace_data(shares, val=own.test), "examples"),
        (replace_data(shares, train=own.test, test=own.train), "examples"),
        (dataclasses.replace(shares, classes=shares.classes[::-1]), "classes"),
        (dataclasses.replace(shares, columns=("a", "b", "c", "d")), "columns"),
    ):
        with pytest.raises(DataError, match=rf"has trained .* changed since: other {parts}\.") as error:
            prepare(folder, experiment, 1, other)
        assert "Start the client with the data of before" in str(error.value)
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    # a new release may word a note otherwise
    prepare(folder, experiment, 1, replace_data(shares, notes=("a note",)))
    assert answer(sequential_run, folder, round=1, stamp=1)[0].problem == ""
    # the folder of a client of an earlier release has no format
    contents = json.loads((folder / "client.json").read_text())
    del contents["format"]
    (folder / "client.json").write_text(json.dumps(seal(contents)))
    chat, other = (
        dataclasses.replace(shares, language=SimpleNamespace(prompt_format=n)) for n in ("chat", "alpaca")
    )
    prepare(folder, experiment, 1, chat)
    with pytest.raises(DataError, match=r"other format\."):
        prepare(folder, experiment, 1, other)


def test_a_folder_of_another_client_or_experiment_is_refused_and_left_alone(
    experiment: ExperimentConfig, folder: Path
) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(
        ConfigError, match="is the folder of client 1 of another experiment or of one that was changed"
    ):
        prepare(folder, experiment, 0, experiment.shares())
    for other in (
        {"method": "fedavg"},
        {"run": {**experiment.to_dict()["run"], "seed": 7}},
        {"defaults": {"epochs": 2}},
    ):
        changed = ExperimentConfig.parse({**experiment.to_dict(), **other})
        with pytest.raises(ConfigError, match="Choose another folder, or remove it"):
            prepare(folder, changed, 1, changed.shares())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_missing_or_damaged_client_folder_is_refused(
    experiment: ExperimentConfig, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a client's folder"):
        ClientRuntime(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make .*file/x"):
        prepare(tmp_path / "file" / "x", experiment, 1, experiment.shares())
    stored = json.loads((folder / "client.json").read_text())
    damaged: list[Any] = [
        "",
        "{",
        "[]",
        "null",
        "3",
        {},
        *({k: v for k, v in stored.items() if k != n} for n in stored),
    ]
    for text in damaged:
        (folder / "client.json").write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(CheckpointError, match=r"client\.json is damaged"):
            ClientRuntime(folder)
        with pytest.raises(CheckpointError, match=r"client\.json is damaged"):
            prepare(folder, experiment, 1, experiment.shares())
    (folder / "client.json").write_text(json.dumps(stored))
    data = (folder / "data.tree").read_bytes()
    for other in (None, b"", data[:-1], tree.encode({"train": 3}), tree.encode(None)):
        (folder / "data.tree").unlink(missing_ok=True)
        if other is not None:
            (folder / "data.tree").write_bytes(other)
        with pytest.raises(CheckpointError, match=r"data\.tree is (missing or )?damaged"):
            ClientRuntime(folder)


@pytest.mark.full
def test_a_disk_that_is_full_leaves_no_folder_that_looks_whole(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    for place in range(8):
        carrier = LocalTransport({}, hazards={0: Hazard({place}, no_space)})
        with carrier.world(), pytest.raises(CheckpointError, match="No space left"):
            prepare(tmp_path / str(place), experiment, 1, experiment.shares())
        prepare(tmp_path / str(place), experiment, 1, experiment.shares())
        assert len(ClientRuntime(tmp_path / str(place)).data.train)


# -- who it is


def test_it_registers_without_an_example(experiment: ExperimentConfig, folder: Path) -> None:
    header, payload = ClientRuntime(folder).make_registration()
    mine = experiment.shares().data[1]
    assert (header.client, header.examples, header.sizes) == (
        1,
        len(mine.train),
        (len(mine.val), len(mine.test)),
    )
    assert header.sections == digest_sections(experiment.to_dict())
    assert header.base == {}
    form = tree.decode(payload)
    assert form["x"].shape == (0, 4)
    assert form["y"].shape == (0,)
    assert form["y"].dtype == torch.int64
    assert form["classes"] == list(experiment.shares().classes)
    assert len(payload) < 1000


# -- its answers


@pytest.mark.full
def test_the_same_order_gets_the_same_bytes_and_is_worked_on_once(sequential_run: Run, folder: Path) -> None:
    carrier = LocalTransport({101: folder})
    with carrier.world():
        first = answer(sequential_run, folder)
        again = answer(sequential_run, folder)
        assert again == first
        assert carrier.trained == [(1, 0)]
        # the sequential run sends the same
        outcome = next(
            iter(
                Sequential().run(
                    sequential_run.method,
                    sequential_run.federation,
                    sequential_run.task,
                    0,
                    [job(sequential_run, 1)],
                )
            )
        )
        assert first[1] == tree.encode(outcome.upload)
        assert (first[0].steps, first[0].flops) == (outcome.meter.steps, outcome.meter.flops)
        assert first[0].losses == outcome.meter.losses
        # another order is another order, be it by its header or by its payload alone
        trains = len(carrier.trained)
        answer(sequential_run, folder, add=1.0)
        answer(sequential_run, folder, add=1.0, evaluate=True)
        assert len(carrier.trained) == trains + 2


def job(run: Run, client: int) -> Any:
    info = run.federation.infos[client]
    return ClientJob(run.state_of(info), run.method.download(run.state.server, info), info)


@pytest.mark.full
def test_a_run_that_went_back_asks_for_old_rounds_again_and_orders_of_before_are_not_answered(
    sequential_run: Run, folder: Path
) -> None:
    for t in range(3):
        assert answer(sequential_run, folder, round=t, stamp=t)[0].problem == ""
    before = tree.decode(answer(sequential_run, folder, round=1, stamp=1, branch=1, add=1.0)[1])
    # from the state after round 1, as a client that never went further
    fresh = folder.with_name("fresh")
    prepare(fresh, ClientRuntime(folder).experiment, 1, ClientRuntime(folder).experiment.shares())
    answer(sequential_run, fresh)
    expected = tree.decode(answer(sequential_run, fresh, round=1, stamp=1, add=1.0)[1])
    assert tree.equal(before, expected)
    late, payload = answer(sequential_run, folder, round=3, stamp=2)
    assert (late.kind, payload) == ("other", b"")
    assert answer(sequential_run, folder, round=2, stamp=2, branch=1)[0].problem == ""


def test_a_damaged_state_is_not_built_on(sequential_run: Run, folder: Path) -> None:
    for t in range(2):
        assert answer(sequential_run, folder, round=t, stamp=t)[0].problem == ""
    path = folder / RUN_NAME / "000002.tree"
    data = path.read_bytes()
    place = data.index(b"\n") + 500
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    header, payload = answer(sequential_run, folder, round=2, stamp=2)
    assert (header.kind, payload) == ("disk", b"")
    assert "000002.tree is damaged: its digest is not the one in its first line" in header.problem


def test_damaged_examples_are_not_trained_on(sequential_run: Run, folder: Path) -> None:
    path = folder / "data.tree"
    data = path.read_bytes()
    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"data\.tree is damaged"):
            ClientRuntime(folder)


def test_runs_have_memories_of_their_own(sequential_run: Run, folder: Path) -> None:
    answer(sequential_run, folder)
    header, _ = answer(sequential_run, folder, run="other", round=1, stamp=1)
    assert header.kind == "state"
    assert "was lost or is of another machine" in header.problem
    header, _ = answer(sequential_run, folder, round=1, stamp=1)
    assert header.problem == ""


@pytest.mark.parametrize(
    "name", ["../../x", "..", ".", "", "a/b", "a b", "ä", "x" * 65, "a\n", "/etc/x", "a\0b", "²"]
)
def test_a_run_with_a_name_that_is_a_path_is_refused(sequential_run: Run, folder: Path, name: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(ConfigError, match="the server calls its run"):
        answer(sequential_run, folder, run=name)
    assert [p for p in sorted(folder.parent.rglob("*")) if p.name != "lock"] == before


def test_training_that_diverges_is_reported_and_keeps_the_state(sequential_run: Run, folder: Path) -> None:
    answer(sequential_run, folder)
    header, payload = answer(sequential_run, folder, round=1, stamp=1, add=math.nan)
    assert (header.kind, payload) == ("training", b"")
    assert "not finite" in header.problem
    assert (header.steps, header.losses) == (0, {})
    header, _ = answer(sequential_run, folder, round=2, stamp=1)
    assert header.problem == ""


@pytest.mark.full
def test_a_full_disk_is_said_to_be_full_wherever_it_strikes(sequential_run: Run, folder: Path) -> None:
    runtime, now = ClientRuntime(folder), make_order(sequential_run, round=1, stamp=1)
    runtime.answer(make_order(sequential_run), encode_download(sequential_run))
    shutil.copytree(folder / RUN_NAME, folder / "before")
    expected = runtime.answer(now, encode_download(sequential_run))
    for place in range(30):
        shutil.rmtree(folder / RUN_NAME)
        shutil.copytree(folder / "before", folder / RUN_NAME)
        carrier = LocalTransport({}, hazards={0: Hazard({place}, no_space)})
        with carrier.world():
            header, payload = runtime.answer(now, encode_download(sequential_run))
        if header.problem:
            assert (header.kind, payload) == ("disk", b"")
            assert "No space left on device" in header.problem
        # whatever happened, once there is room again all is as if nothing had
        assert runtime.answer(now, encode_download(sequential_run)) == expected
        if len(carrier.hazards[0].points) <= place:
            break
    # site.json and the state: not synced, not renamed, renamed, its folder not synced
    assert place == 8


def test_an_order_of_a_round_that_is_over_changes_nothing(sequential_run: Run, folder: Path) -> None:
    answer(sequential_run, folder)
    # the reply was lost, and the server went on; then a process of before gets to its old order
    answer(sequential_run, folder, round=2)
    header, payload = answer(sequential_run, folder, round=1)
    assert (header.kind, payload) == ("other", b"")
    assert "an order of round 2 came when one of round 3 had been answered" in header.problem
    assert answer(sequential_run, folder, round=3, stamp=3)[0].problem == ""


def test_two_processes_of_one_client_wait_for_each_other(sequential_run: Run, folder: Path) -> None:
    done = threading.Event()
    other = ClientRuntime(folder)

    def work() -> None:
        other.answer(make_order(sequential_run), encode_download(sequential_run))
        done.set()

    thread = threading.Thread(target=work)
    with FileLock(folder / "lock"):
        thread.start()
        assert not done.wait(0.3)
    thread.join(60)
    assert done.is_set()


@pytest.mark.full
def test_at_the_end_it_writes_its_model_down(sequential_run: Run, folder: Path) -> None:
    answer(sequential_run, folder)
    sequential_run.step()
    header, _ = answer(sequential_run, folder, stamp=1, train=False, evaluate=True, last=True)
    model = safetensors.torch.load_file(folder / RUN_NAME / "model" / "model.safetensors")
    expected = sequential_run.personal_params(sequential_run.federation.infos[1])
    assert tree.equal(model, {n: expected[n] for n in model})
    assert model.keys() == expected.keys()
    assert header.evaluation is not None
    actual = sequential_run.evaluate()
    assert actual is not None
    assert header.evaluation.values("accuracy", series="personal", split="test") == [
        actual.values("accuracy", series="personal", split="test")[1]
    ]
    assert (header.steps, header.losses, header.problem) == (0, {}, "")


def test_a_client_that_infers_by_several_models_says_which_one_it_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ensemble = small("ensemble", rounds=4)
    prepare(tmp_path / "client", ensemble, 1, ensemble.shares(), SiteSettings.simulated())
    run = Run(ensemble.build_method("ensemble"), ensemble.federation(), ensemble.run, Sequential())
    answer(run, tmp_path / "client")
    run.step()
    answer(run, tmp_path / "client", stamp=1, train=False, evaluate=True, last=True)
    assert "client 1 infers by more than the scores of one model" in caplog.text


# -- data of one's own


@pytest.fixture
def own(tmp_path: Path) -> tuple[ExperimentConfig, list[Path]]:
    """Three organizations with a file each, and an experiment whose own file nobody has."""
    draw = np.random.default_rng(0)
    files = []
    for i, n in enumerate((30, 41, 52)):
        x = draw.normal(size=(n, 5)).astype("float32") + i
        files.append(tmp_path / f"mine-{i}.npz")
        np.savez(files[-1], x=x, y=(x[:, 0] > i).astype("int64"), classes=np.array(["no", "yes"]))
    data = {"source": "arrays", "path": str(tmp_path / "nowhere.npz"), "normalize": "none"}
    split = {"kind": "local", "train": 0.7, "val": 0.1, "test": 0.2}
    return ExperimentConfig.parse({**tables("scaffold"), "data": data, "split": split}), files


def small_network(made: ExperimentConfig) -> ExperimentConfig:
    return ExperimentConfig.parse({**made.to_dict(), "network": {"min_clients": 2}})


def test_a_federation_of_data_of_ones_own(own: tuple[ExperimentConfig, list[Path]], tmp_path: Path) -> None:
    made, files = own
    shares = [read_own_share(made, i, 3, path) for i, path in enumerate(files)]
    for i, (share, n) in enumerate(zip(shares, (30, 41, 52), strict=True)):
        parts = [len(p) for p in (share.data[i].train, share.data[i].val, share.data[i].test)]
        assert sum(parts) == n
        assert parts[1] == round(0.1 * n)
        assert [len(d.train) for k, d in enumerate(share.data) if k != i] == [0, 0]
    folders = {100 + i: tmp_path / f"client-{i}" for i in range(3)}
    for i, share in enumerate(shares):
        prepare(folders[100 + i], made, i, share, SiteSettings.simulated())
    carrier = LocalTransport(folders)
    result = serve_run(carrier, made, tmp_path / "run")
    whole = Shares(tuple(share.data[i] for i, share in enumerate(shares)), ("no", "yes"))
    run = Run(made.build_method("scaffold"), assemble(made, whole), made.run, Sequential())
    records = [run.record_initial_models(), *(run.step() for _ in range(3))]
    assert_same_states(result, carrier, run)
    assert [r.values() for r in result.rounds] == [r.values() for r in records]
    assert [r["train"] for r in result.run.clients()] == [len(d.train) for d in whole.data]


def test_a_file_of_ones_own_that_is_not_there_or_does_not_fit_is_named(
    own: tuple[ExperimentConfig, list[Path]], tmp_path: Path
) -> None:
    made, files = own
    with pytest.raises(DataError, match=r"nothing\.npz"):
        read_own_share(made, 0, 3, tmp_path / "nothing.npz")
    whole = ExperimentConfig.parse({**made.to_dict(), "split": {"kind": "whole_test"}})
    with pytest.raises(ConfigError, match=r"data\.test"):
        read_own_share(whole, 0, 3, files[0], files[1])


def test_a_client_that_computes_with_another_number_of_clients_is_not_admitted(
    own: tuple[ExperimentConfig, list[Path]], tmp_path: Path
) -> None:
    made, files = own
    more = ExperimentConfig.parse({**made.to_dict(), "network": {"clients": 4}})
    folders = {100 + i: tmp_path / f"client-{i}" for i in range(3)}
    for i, path in enumerate(files):
        site = more if i == 2 else made
        prepare(folders[100 + i], site, i, read_own_share(site, i, count_clients(site), path))
    carrier = LocalTransport(folders)
    with pytest.raises(NetworkError, match=r"client 2 computes with 4 clients, the server with 3"):
        serve_run(carrier, made, tmp_path / "run")
    assert not carrier.orders()
    # also where a client's share is one of the experiment's own data, which has no examples for a fourth
    prepare(tmp_path / "shared", small("scaffold", network={"clients": 4}), 1, small("scaffold").shares())
    assert ClientRuntime(tmp_path / "shared").make_registration()[0].client_count == 4


@pytest.mark.full
def test_a_client_with_other_columns_is_not_admitted(
    own: tuple[ExperimentConfig, list[Path]], tmp_path: Path
) -> None:
    made, files = own
    np.savez(files[2], x=np.zeros((9, 6), "float32"), y=np.zeros(9, "int64"), classes=np.array(["no", "yes"]))
    folders = {100 + i: tmp_path / f"client-{i}" for i in range(3)}
    for i, path in enumerate(files):
        prepare(folders[100 + i], made, i, read_own_share(made, i, 3, path))
    # it is the first to answer, and the others are right all the same
    carrier = LocalTransport(folders)
    with pytest.raises(
        NetworkError, match=r"only 2 of 3 clients came(.|\n)*client 2 has examples of another form: .*\[6\]"
    ):
        serve_run(carrier, made, tmp_path / "run")
    assert not carrier.orders()
    result = serve_run(carrier, small_network(made), tmp_path / "run")
    assert {client for client, _ in carrier.orders()} == {0, 1}
    assert [r.lost for r in result.rounds[1:]] == [{"2": "client 2 is not connected"}] * 3


# -- tables of ones own


TABLE = {"source": "csv", "label": "ill", "normalize": "none", "classes": ["no", "yes"]}


def table(file: Path, columns: list[str], wards: str = "", rows: int = 30) -> Path:
    """A table whose column x decides the label."""
    draw = np.random.default_rng(len(file.name))
    values = {c: draw.normal(size=rows).round(3).astype(str) for c in columns}
    label = np.where(values["x"].astype(float) > 0, "yes", "no")
    if wards:
        values["ward"] = np.resize(list(wards), rows)
    lines = [",".join([*values, "ill"]), *map(",".join, zip(*values.values(), label, strict=True))]
    file.write_text("\n".join(lines) + "\n")
    return file


def of_tables(folder: Path, **data: Any) -> ExperimentConfig:
    split = {"kind": "local", "train": 0.7, "val": 0.1, "test": 0.2}
    made = {**TABLE, "path": str(folder / "nowhere.csv"), **data}
    return ExperimentConfig.parse({**tables("fedavg", rounds=1), "data": made, "split": split})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ((["y", "x"], ""), 'input 1 is "y" and theirs "x", input 2 is "x" and theirs "y"'),
        ((["x", "y"], "ac"), 'input 4 is "ward=c" and theirs "ward=b"'),
    ],
)
def test_a_table_with_other_columns_or_values_is_not_admitted(
    other: tuple[list[str], str], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = of_tables(tmp_path).overlay({"network": {"min_clients": 2}})
    wards = "ab" if other[1] else ""
    files = [table(tmp_path / "0.csv", ["x", "y"], wards), table(tmp_path / "01.csv", ["x", "y"], wards)]
    files.append(table(tmp_path / "2.csv", *other))
    folders = {100 + i: tmp_path / f"client-{i}" for i in range(3)}
    for i, path in enumerate(files):
        prepare(folders[100 + i], made, i, read_own_share(made, i, 3, path), SiteSettings.simulated())
    carrier = LocalTransport(folders)
    result = serve_run(carrier, made, tmp_path / "run", audit=tmp_path / "audit.jsonl")
    assert result.rounds[1].lost.keys() == {"2"}
    # the server logs and audits it, and the client learns the reason
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    (rejected,) = [e for e in events if e["event"] == "rejected"]
    assert rejected["client"] == 2 or rejected["client"] is None
    assert why in rejected["why"]
    assert why in caplog.text
    assert "has other columns than the other clients" in (folders[102] / "rejected.txt").read_text()
    assert not (folders[101] / "rejected.txt").exists()


def test_the_order_of_columns_does_not_matter_if_the_experiment_names_them(tmp_path: Path) -> None:
    made = of_tables(tmp_path, features=["x", "y"])
    forms = [
        ClientRuntime(folder).make_registration()[1]
        for folder, columns in ((tmp_path / "a", ["x", "y"]), (tmp_path / "b", ["y", "x"]))
        if prepare(folder, made, 0, read_own_share(made, 0, 3, table(tmp_path / "t.csv", columns))) is None
    ]
    assert forms[0] == forms[1]


def test_names_of_columns_do_not_leave_a_site_in_a_private_run(tmp_path: Path) -> None:
    privacy = {"kind": "local", "epsilon": 2.0, "delta": 1e-5}
    made = of_tables(tmp_path).overlay({"run": {"privacy": privacy, "clipping": {"norm": 1.0}}})
    prepare(tmp_path / "a", made, 0, read_own_share(made, 0, 3, table(tmp_path / "t.csv", ["x", "y"], "ab")))
    assert b"ward" not in ClientRuntime(tmp_path / "a").make_registration()[1]
    assert b"digest " in ClientRuntime(tmp_path / "a").make_registration()[1]


@pytest.mark.parametrize("how", ["scale", "standard"])
def test_a_normalization_that_would_be_fitted_to_one_file_is_refused(how: str, tmp_path: Path) -> None:
    file = table(tmp_path / "t.csv", ["x", "y"])
    with pytest.raises(ConfigError, match=rf"data\.normalize is '{how}'.*standard_per_client"):
        read_own_share(of_tables(tmp_path, normalize=how), 0, 3, file)
    assert len(read_own_share(of_tables(tmp_path, normalize="standard_per_client"), 0, 3, file).data[0].train)


def test_images_as_bytes_keep_the_default_normalization(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 1, 4, 4)).astype("uint8")
    pixels[0, 0, 0, :2] = 0, 255
    file = tmp_path / "images.npz"
    made = ExperimentConfig.parse({
        **tables("fedavg"), "data": {"source": "arrays", "path": str(file)}, "split": {"kind": "local"}
    })  # fmt: skip
    np.savez(file, x=pixels, y=np.arange(30) % 2)
    assert torch.equal(read_own_share(made, 1, 3, file).data[1].train.inputs.amax(), torch.tensor(1.0))  # type: ignore[union-attr]
    assert "stretched" not in caplog.text
    np.savez(file, x=pixels // 2, y=np.arange(30) % 2)
    read_own_share(made, 1, 3, file)
    assert "images of this client are stretched from 0..0.498" in caplog.text
    np.savez(file, x=pixels.astype("float32"), y=np.arange(30) % 2)
    with pytest.raises(ConfigError, match=r"data\.normalize is 'scale'"):
        read_own_share(made, 1, 3, file)


def test_a_file_of_ones_own_is_one_client_with_or_without_the_column_of_the_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = of_tables(tmp_path, client="ward").to_dict()
    made = ExperimentConfig.parse({**made, "partition": {"kind": "natural"}, "network": {"clients": 3}})
    forms = []
    for wards in ("", "a", "ab"):
        assert "names 2 clients" not in caplog.text
        shares = read_own_share(made, 1, 3, table(tmp_path / "t.csv", ["x", "y"], wards))
        assert shares.columns == ("x", "y")
        forms.append(shares.data[1])
    assert all(hash_examples(data) == hash_examples(forms[0]) for data in forms)
    assert sum(map(len, (forms[0].train, forms[0].val, forms[0].test))) == 30
    assert "t.csv names 2 clients (a, b): all its rows belong to client 1" in caplog.text


@pytest.mark.full
def test_texts_of_ones_own_are_one_client_with_or_without_the_column_of_the_clients(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base", "causal", Key((0,)), ["the fox jumps over the dog"])
    data = {"source": "instructions", "path": "nowhere.jsonl", "client": "author", "normalize": "none"}
    made = ExperimentConfig.parse({
        "name": "texts", "method": "fedavg", "data": data, "partition": {"kind": "natural"},
        "language": {"path": str(base), "format": "plain", "context": 64}, "network": {"clients": 3},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    })  # fmt: skip
    found = []
    for author in ({}, {"author": "a"}):
        rows = [{"instruction": f"who {i}?", "output": "the fox", **author} for i in range(20)]
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(read_own_share(made, 1, 3, tmp_path / "own.jsonl").data[1])
    assert hash_examples(found[0]) == hash_examples(found[1])


@pytest.mark.parametrize("data", [{}, {"client": "ward"}])
def test_a_file_with_too_few_rows_is_named_with_its_client(data: dict[str, str], tmp_path: Path) -> None:
    file = table(tmp_path / "t.csv", ["x"], "a", rows=1)
    made = of_tables(tmp_path, features=["x"], **data)
    with pytest.raises(
        DataError, match=r"^client 2: .*t\.csv has 1 example, too few .*3 parts\. Add examples, or"
    ):
        read_own_share(made, 2, 3, file)


def test_a_test_file_that_the_split_ignores_is_refused(tmp_path: Path) -> None:
    files = [table(tmp_path / name, ["x", "y"]) for name in ("t.csv", "test.csv")]
    with pytest.raises(ConfigError, match=r"--test .*'local' does not use test data.*'whole_test'"):
        read_own_share(of_tables(tmp_path), 0, 3, *files)
    made = of_tables(tmp_path).to_dict()
    own_test = ExperimentConfig.parse({**made, "split": {"kind": "own_test"}})
    with pytest.raises(DataError, match=r"natural clients in both.*set split\.kind to 'whole_test'"):
        read_own_share(own_test, 0, 3, *files)
    whole = ExperimentConfig.parse({**made, "split": {"kind": "whole_test"}})
    assert len(read_own_share(whole, 0, 3, *files).data[0].test) == 30


def test_a_client_keeps_why_the_server_rejected_it(experiment: ExperimentConfig, folder: Path) -> None:
    header = RegistrationRequest(rejection="client 1 has\nanother form").to_json()
    with pytest.raises(RefusedOrderError, match="does not let this client take part: client 1 has another"):
        ClientRuntime(folder).reply("registration", header, b"")
    assert (folder / "rejected.txt").read_text() == "client 1 has another form"
    (line,) = (folder / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "refused"
