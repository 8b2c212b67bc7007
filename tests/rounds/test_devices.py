"""Simulated devices: seconds by hand, deadlines that lose exactly the slow, dropouts by their probability."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import Devices, Federation, load_rounds, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.network.operation.start_checks import check_network_settings
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.participation.devices import DeviceClock
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)

FEDAVG = FedAvg(epochs=1, batch_size=10, optimizer=SGD(lr=0.1))


def federation(*sizes: int) -> Federation:
    """Clients with so many training examples each, and a linear model."""
    g = torch.Generator().manual_seed(0)
    clients: list[Any] = []
    for n in sizes:
        x, y = torch.randn(n, 8, generator=g), torch.randint(2, (n,), generator=g)
        clients.append({"train": (x, y), "val": (x[:2], y[:2]), "test": (x[:5], y[:5])})
    return Federation.from_arrays(clients, lambda: torch.nn.Linear(8, 2), classes=2)


def run(on: Federation, devices: Devices, rounds: int = 1, **settings: Any) -> Any:
    chosen = {
        "rounds": rounds,
        "engine": "sequential",
        "representations": 0,
        "evaluate_every": 100,
        **settings,
    }
    return simulate(FEDAVG, on, devices=devices, **chosen)


def taken(on: Federation) -> tuple[list[int], int]:
    """Floating-point operations and bytes of each way of a client of ``federation(40, 20)`` in a round."""
    record = run(on, Devices()).rounds[1]
    # one epoch: operations go by examples; both clients get and send as many bytes
    assert record.flops % 60 == 0
    assert record.bytes_up % 2 == record.bytes_down % 2 == 0
    # forward and the gradient of the weights, two operations a multiply-add
    assert record.flops >= 60 * 4 * 8 * 2
    return [record.flops * 40 // 60, record.flops * 20 // 60], record.bytes_up // 2


@pytest.mark.full
def test_seconds_by_hand() -> None:
    on = federation(40, 20)
    (first, second), size = taken(on)
    devices = Devices(
        flops_per_second=1e3, speeds=[2.0, 0.5], uplink=[0.1, 0.002], downlink=0.05, latency=0.3
    )  # type: ignore[arg-type]
    down = run(on, Devices()).rounds[1].bytes_down // 2
    fast = 0.3 + down * 8 / 50_000 + first / 2000 + 0.3 + size * 8 / 100_000
    slow = 0.3 + down * 8 / 50_000 + second / 500 + 0.3 + size * 8 / 2000
    assert fast < slow
    actual = run(on, devices)
    assert actual.rounds[1].simulated_seconds == pytest.approx(slow, rel=1e-12)
    assert actual.rounds[0].simulated_seconds is None
    # the same clients, the other one the slower
    turned = dataclasses.replace(devices, speeds=(0.001, 0.5))
    assert run(on, turned).rounds[1].simulated_seconds == pytest.approx(fast + first / 1 - first / 2000)
    # time alone changes nothing else
    plain = run(on, Devices())
    assert tree.equal(actual.run.state.server, plain.run.state.server)
    without = {**actual.rounds[1].untimed(), "simulated_seconds": None}
    assert without == plain.rounds[1].untimed()
    assert json.loads(plain.rounds[1].to_line())["simulated_seconds"] is None
    line = actual.rounds[1].to_line()
    assert RoundRecord.from_line(line).simulated_seconds == actual.rounds[1].simulated_seconds


@pytest.mark.full
def test_a_deadline_loses_exactly_the_slow() -> None:
    on = federation(10, 20, 40, 80)
    devices = Devices(flops_per_second=1e4, speeds=(1.0, 0.5))
    flops = run(on, Devices()).rounds[1].flops
    # clients 0 and 1 have speed 1, clients 2 and 3 half of it
    seconds = [flops * n / 150 / 1e4 / speed for n, speed in [(10, 1), (20, 1), (40, 0.5), (80, 0.5)]]
    deadline = (seconds[2] + seconds[3]) / 2
    assert run(on, devices).rounds[1].simulated_seconds == pytest.approx(seconds[3])
    late = run(on, dataclasses.replace(devices, deadline=deadline))
    record = late.rounds[1]
    assert record.lost == {"3": f"too slow: {seconds[3]:.4g} s, and the deadline is {deadline:g} s"}
    assert record.simulated_seconds == deadline
    # as a run whose server never got that reply
    again = Run(FEDAVG, on, RunSettings(rounds=1), Sequential())
    again.step({"3": "lost"})
    assert tree.equal(again.state.server, late.run.state.server)
    assert sorted(again.state.clients) == sorted(late.run.state.clients) == [0, 1, 2]
    # a reply that arrives at the deadline is in time
    took = run(on, devices).rounds[1].simulated_seconds
    assert run(on, dataclasses.replace(devices, deadline=took)).rounds[1].lost == {}


@pytest.mark.full
def test_clients_drop_out_by_their_probability() -> None:
    rates, rounds = (0.9, 0.5, 1.0, 0.2), 2000
    clock = DeviceClock(Devices(availability=rates), 8, Key((3,)))
    lost = [clock.unavailable(t) for t in range(rounds)]
    for client in range(8):
        # a list is repeated evenly: clients 0 and 1 have the first rate
        p = 1 - rates[client // 2]
        count = sum(client in actual for actual in lost)
        assert abs(count - rounds * p) <= 4 * math.sqrt(rounds * p * (1 - p))
    # clients drop out independently of each other: 0.5² of the rounds lose both
    both = sum({2, 3} <= actual for actual in lost)
    assert abs(both - rounds / 4) <= 4 * math.sqrt(rounds * 3 / 16)
    assert DeviceClock(Devices(availability=rates), 8, Key((3,))).unavailable(7) == lost[7]
    assert any(
        DeviceClock(Devices(availability=rates), 8, Key((4,))).unavailable(t) != lost[t] for t in range(9)
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vectorized", "processes", "wire"])
def test_engines_simulate_the_same(engine: str) -> None:
    on = federation(20, 20, 40, 30, 60, 10)
    devices = Devices(
        flops_per_second=1e5, speeds=(1.0, 0.5, 0.1), uplink=0.1, availability=0.8, deadline=0.2
    )
    one = run(on, devices, rounds=6, participation=0.7)
    other = run(on, devices, rounds=6, participation=0.7, engine=engine)
    assert [r.simulated_seconds for r in one.rounds] == [r.simulated_seconds for r in other.rounds]
    assert [r.lost for r in one.rounds] == [r.lost for r in other.rounds]
    reasons = {reason.split(":")[0] for r in one.rounds for reason in r.lost.values()}
    assert reasons == {"too slow", "the client dropped out of the round"}


def test_a_resumed_run_is_an_unbroken_one(tmp_path: Path) -> None:
    on = federation(20, 40, 30)
    devices = Devices(flops_per_second=1e5, speeds=(1.0, 0.3, 0.1), availability=0.6, deadline=0.05)
    whole = run(on, devices, rounds=8, folder=tmp_path / "whole")
    run(on, devices, rounds=3, folder=tmp_path / "parts")
    parts = run(on, devices, rounds=8, folder=tmp_path / "parts", resume=True, evaluate_every=100)
    stored = RunRecord.load(tmp_path / "parts").rounds
    timed = [(r.simulated_seconds, r.lost) for r in whole.rounds]
    assert timed == [(r.simulated_seconds, r.lost) for r in parts.rounds]
    assert timed == [(r.simulated_seconds, r.lost) for r in stored]
    assert tree.equal(whole.run.state.server, parts.run.state.server)
    frame = load_rounds(tmp_path / "whole")
    assert frame["simulated_seconds"].tolist()[1:] == [r.simulated_seconds for r in whole.rounds[1:]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speeds": (1.0, 0.0), "flops_per_second": 1e9}, "speeds must be > 0"),
        ({"speeds": 0.5}, "set run.devices.flops_per_second"),
        ({"availability": 1.5}, "a probability"),
        ({"uplink": ()}, "uplink must be > 0"),
        ({"uplink": math.nan}, "uplink must be > 0"),
        ({"latency": -1.0}, "latency is a number of seconds"),
        ({"deadline": 60.0}, "deadline needs a simulated clock"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Devices(**fields)


def test_what_does_not_fit_is_refused() -> None:
    on = federation(10, 10)
    with pytest.raises(ConfigError, match=r"uplink has 3 numbers, but there are 2 clients"):
        run(on, Devices(uplink=(1.0, 2.0, 3.0)))
    with pytest.raises(ConfigError, match=r"devices must be fedlowrank\.Devices"):
        run(on, {"uplink": 1.0})  # type: ignore[arg-type]
    settings = RunSettings(devices=Devices(uplink=1.0))
    with pytest.raises(ConfigError, match=r"devices simulates"):
        check_network_settings(settings)


def test_in_an_experiment_file() -> None:
    tables = {"run": {"devices": {"speeds": [1, 0.5], "flops_per_second": 1e9, "uplink": 5, "deadline": 60}}}
    made = ExperimentConfig.parse(tables)
    expected = Devices(flops_per_second=1e9, speeds=(1.0, 0.5), uplink=5.0, deadline=60.0)
    assert made.run.devices == expected
    assert ExperimentConfig.parse(made.to_dict()).run.devices == expected
    with pytest.raises(ConfigError, match="Did you mean 'uplink'"):
        ExperimentConfig.parse({"run": {"devices": {"uplinks": 5}}})


TABLE = "client,speed,uplink,availability\n2, 0.1,1,0.5\n0,1,20,1\n1,0.5,5,0.9\n"


@pytest.mark.full
def test_a_table_of_devices(tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(TABLE)
    devices = Devices(file=str(tmp_path / "devices.csv"), flops_per_second=1e5, downlink=10.0)
    assert devices.speeds == (1.0, 0.5, 0.1)
    assert devices.uplink == (20.0, 5.0, 1.0)
    assert devices.availability == (1.0, 0.9, 0.5)
    assert devices.downlink == 10.0
    on = federation(20, 20, 20)
    written = Devices(1e5, (1.0, 0.5, 0.1), (20.0, 5.0, 1.0), 10.0, availability=(1.0, 0.9, 0.5))
    one, other = run(on, devices, rounds=3, folder=tmp_path / "run"), run(on, written, rounds=3)
    assert [(r.simulated_seconds, r.lost) for r in one.rounds] == [
        (r.simulated_seconds, r.lost) for r in other.rounds
    ]
    # the run holds the numbers, so that it goes on without the file
    (tmp_path / "devices.csv").unlink()
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["run"]["devices"]
    assert (stored["speeds"], stored["file"]) == ([1.0, 0.5, 0.1], "")
    again = ExperimentConfig.parse({"run": {"devices": stored}}).run.devices
    assert run(on, again, rounds=4, folder=tmp_path / "run", resume=True).rounds[-1].round == 4
    # a list repeated over more clients would give them the devices of others
    with pytest.raises(ConfigError, match=r"speeds has 3 numbers, but there are 6 clients; the table"):
        run(federation(10, 10, 10, 10, 10, 10), devices)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,sped\n0,1\n", "no column 'sped'. Did you mean 'speed'"),
        ("speed\n1\n", "needs the column client"),
        ("client\n0\n", "and one or more of speed, uplink"),
        ("client,speed\n0,1\n1,fast\n", "line 3, column speed: a number is needed, not 'fast'"),
        ("client,uplink\n0,1\n1,\n", "line 3, column uplink: a number is needed, not ''"),
        ("client,uplink\n0,1\n0,2\n", "client 0 stands there more than once"),
        ("client,uplink\n0,1\n2,2\n", "some are missing"),
        ("client,uplink\n", "some are missing"),
        ("client,uplink\n0,-1\n", "uplink must be > 0"),
        ("client,availability\n0,2\n", "a probability"),
        ("client,downlink\n0,2\n", "downlink is given twice"),
        ("", "cannot be read as CSV"),
        (None, "does not exist"),
    ],
)
def test_a_table_of_devices_that_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "devices.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Devices(file=str(path), flops_per_second=1e9, downlink=1.0)
