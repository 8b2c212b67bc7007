"""ε over a network is counted by data: another folder, or a removed one, does not begin afresh."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import dp_accounting
import pytest

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.network import client as runtime
from fedlowrank.network.client import prepare
from fedlowrank.network.drive import drive
from fedlowrank.network.messages import Order
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.transport import NodeMessage
from fedlowrank.trust.privacy.site_ledger import read_entries, state_folder
from tests.support.local_network import (
    Killed,
    LocalTransport,
    count_logged,
    fault_on_orders,
    local,
    run_whole,
    serve_run,
    small,
)

DELTA = 1e-3


def private(kind: str, noise: float, epsilon: float, **sections: Any) -> ExperimentConfig:
    privacy = {"kind": kind, "noise": noise, "epsilon": epsilon, "delta": DELTA}
    run = {"privacy": privacy, "clipping": {"norm": 0.1}, "participation": 1.0}
    return small("fedavg", rounds=3, run=run, network={"min_replies": 0}, **sections)


def composed(noise: float, releases: int) -> float:
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise), releases)
    return float(accountant.get_epsilon(DELTA))


def releases(folder: Path) -> int:
    """Rounds in which a client trained, by its own ledger."""
    path = folder / "privacy.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.few(2)
@pytest.mark.parametrize("lost", ["another folder", "removed folder", "removed ledger"])
def test_a_client_spends_one_budget_whatever_its_folder(
    lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget of five updates, and two runs of three rounds each."""
    made = private("local", 8.0, composed(4.0, 5) + 1e-6)
    carrier, _ = run_whole(made, tmp_path / "one")
    assert {releases(folder) for folder in carrier.folders.values()} == {3}
    base = tmp_path / ("two" if lost == "another folder" else "one")
    for folder in carrier.folders.values():
        if lost == "removed folder":
            shutil.rmtree(folder)
        elif lost == "removed ledger":
            (folder / "privacy.jsonl").unlink()
    again = local(made, base)
    result = serve_run(again, made, tmp_path / "second")
    # three, and then two
    assert {releases(folder) for folder in again.folders.values()} == {2}
    assert [len(record.lost) for record in result.rounds[1:]] == [0, 0, 3]
    # the server does not learn of other runs
    assert all(
        why.endswith(f"its privacy budget, privacy.epsilon = {made.run.privacy.epsilon}, is spent")
        for why in result.rounds[-1].lost.values()
    )
    assert any("earlier runs of this site on the same data" in line for line in caplog.messages)


def test_a_server_spends_one_budget_whatever_its_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["privacy"]) == 0
    assert "no run of this site has spent privacy" in capsys.readouterr().out
    made = private("central", 4.0, composed(4.0, 5) + 1e-6)
    _, first = run_whole(made, tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "run")
    _, second = run_whole(made, tmp_path / "two")
    assert (first.run.round, second.run.round) == (3, 2)
    assert "earlier runs of this site" in second.run.stopped
    assert count_logged(caplog, "earlier runs of this site on the same data have spent") == 1
    capsys.readouterr()
    assert main(["privacy"]) == 0
    shown = capsys.readouterr().out
    for epsilon in (composed(4.0, 3), composed(4.0, 2), composed(4.0, 5)):
        assert f"{epsilon:.4g}" in shown


def test_a_client_counts_the_rounds_that_a_server_released_again(tmp_path: Path) -> None:
    """It is drawn in half of the rounds, and so does not see how often the server goes through one."""
    run = {"sampling": "poisson", "participation": 0.5, "rounds": 6}
    privacy = {"kind": "central", "noise": 4.0, "delta": DELTA}
    made = small(
        "fedavg", 4, run={**run, "privacy": privacy, "clipping": {"norm": 0.1}, "keep_checkpoints": 9}
    )
    carrier = local(made, tmp_path)
    stops = iter([5])

    def die_in_round_5(_: LocalTransport, __: NodeMessage, round: int, ___: int) -> None:
        if round >= 5 and next(stops, None):
            raise Killed("server")

    carrier.fault = fault_on_orders(die_in_round_5)
    with pytest.raises(Killed):
        serve_run(carrier, made, tmp_path / "run")
    prepare_resume(tmp_path / "run", 2, [])
    serve_run(carrier, made, tmp_path / "run", resume=True)
    entries = read_entries(state_folder() / "privacy").values()
    (server,) = (ledger for site_run, ledger in entries if site_run.kind == "server")
    clients = [ledger for site_run, ledger in entries if site_run.kind == "central"]
    assert server.rounds() > made.run.rounds
    # those of the clients that were asked at least once
    assert clients
    assert [ledger.rounds() for ledger in clients] == [server.rounds()] * len(clients)


@pytest.mark.full
def test_clients_of_several_servers_spend_one_budget(tmp_path: Path) -> None:
    """Servers know nothing of each other, so it is the clients that stop."""
    made = private("central", 4.0, composed(4.0, 5) + 1e-6)
    results = []
    for name in ("hospitals", "banks"):
        carrier = local(made, tmp_path / name)
        results.append(serve_run(carrier, made, tmp_path / name / "run", federation=name))
    assert [result.run.round for result in results] == [3, 3]
    lost = [[len(record.lost) for record in result.rounds[1:]] for result in results]
    assert lost == [[0, 0, 0], [0, 0, 3]]
    assert all(why.endswith("is spent") for why in results[1].rounds[-1].lost.values())


@pytest.mark.full
def test_another_federation_has_a_budget_of_its_own(tmp_path: Path) -> None:
    """Of a server, whose clients have other data, or keep no account."""
    made = private("central", 4.0, composed(4.0, 3) + 1e-6)
    shares = made.shares()
    rounds = []
    for name, federation in (("one", "hospitals"), ("two", "banks"), ("three", "banks")):
        carrier = LocalTransport({100 + i: tmp_path / name / str(i) for i in range(3)})
        for i in range(3):
            prepare(carrier.folders[100 + i], made, i, shares, sketch=())
        rounds.append(serve_run(carrier, made, tmp_path / name / "run", federation=federation).run.round)
    assert rounds == [3, 3, 0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["central", "local"])
def test_a_simulation_has_no_account_at_the_site(kind: str, tmp_path: Path) -> None:
    made = private(kind, 8.0, composed(4.0, 3) + 1e-6)
    shares = made.shares()
    for name in ("one", "two"):
        carrier = LocalTransport({100 + i: tmp_path / name / str(i) for i in range(3)})
        for i in range(3):
            prepare(carrier.folders[100 + i], made, i, shares, sketch=())
        with carrier.world():
            assert drive(carrier, made, tmp_path / name / "run", at_site=False).run.round == 3
    assert not (tmp_path / "state").exists()


def test_the_data_of_a_client_is_its_file_whatever_is_made_of_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lines in another order, one more, other numbers by another normalization, and another client number."""
    pytest.importorskip("flwr")
    pytest.importorskip("cryptography")
    from fedlowrank.cli.deployment import network_commands as commands
    from tests.network.deployments import write_tables

    monkeypatch.setattr(commands, "supervise", lambda node, stop: None)
    lines = [f"{i % 7},{(i * i) % 11},{i % 3}" for i in range(60)]
    rows = {"of us.csv": lines, "b.csv": [*lines[::-1], "1,2,0"]}
    for name, content in rows.items():
        (tmp_path / name).write_text("\n".join(["x,y,label", *content]) + "\n")
        (tmp_path / name).chmod(0o644 if name == "of us.csv" else 0o600)
    spent = []
    for name, client, normalize in (("of us.csv", 0, "standard_per_client"), ("b.csv", 1, "none")):
        made = private(
            "local", 8.0, 100.0,
            data={"source": "csv", "path": name, "label": "label", "normalize": normalize},
        )  # fmt: skip
        table, folder = made.to_dict(), tmp_path / name.partition(".")[0]
        table |= {f"run.{section}": table["run"].pop(section) for section in ("privacy", "clipping")}
        file = write_tables(tmp_path / "t.toml", table)
        options = ["--client", str(client), "--data", str(tmp_path / name), "--folder", str(folder)]
        assert main(["join", str(file), *options, "--insecure"]) == 0, capsys.readouterr().err
        mine = runtime.ClientRuntime(folder)
        assert mine.budget is not None
        assert mine._spend(Order("abc", 0, 0, True, False), 0) == ""
        spent.append(mine.budget.spent_before())
    warned = [line for line in caplog.messages if "other users of this machine may be able to read" in line]
    assert [str(tmp_path / "of us.csv") in line for line in warned] == [True]
    # the command in it can be typed as it is
    assert os.system(warned[0].rpartition(": ")[2]) == 0
    assert (tmp_path / "of us.csv").stat().st_mode & 0o077 == 0
    assert spent == [0, pytest.approx(composed(4.0, 1))]
    stored = json.loads((tmp_path / "b" / "client.json").read_text())["parts"]
    # the lines that differ, and the names of the columns
    assert len(stored) == len({*rows["b.csv"]}) + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["central", "local"])
def test_a_simulation_by_flower_keeps_no_account(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's simulation is replaced by what it does with the server's half: call it."""
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    from fedlowrank.network import flower

    carriers: list[LocalTransport] = []

    def simulated(server: Any, *rest: Any, **more: Any) -> None:
        folders = {100 + i: tmp_path / "clients" / str(i) for i in range(3)}
        carriers.append(LocalTransport(folders))
        with carriers[0].world():
            server._main(None, None)

    monkeypatch.setattr("flwr.simulation.run_simulation", simulated)
    monkeypatch.setattr(flower, "GridTransport", lambda grid: carriers[0])
    flower.run_flower_simulation(private(kind, 8.0, 100.0), tmp_path / "run", tmp_path / "clients")
    assert carriers[0].trained
    assert not (tmp_path / "state").exists()
