"""Early stopping over a network, where a round's evaluation is known one round later."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.digest import write_sealed
from tests.support.local_network import local, run_whole, serve_run, small

# no step is long enough to change an accuracy
STILL = {"optimizer": {"kind": "sgd", "lr": 1e-9}}


@pytest.mark.full
def test_it_stops_one_round_later_and_resumes_likewise(tmp_path: Path) -> None:
    run = {"patience": 2, "rounds": 9, "representations": 0, "evaluate_every": 1}
    made = small("fedavg", run=run, defaults=STILL)
    carrier, result = run_whole(made, tmp_path / "whole")
    # two evaluations without a better one: after rounds 1 and 2, known in round 3
    assert [r.round for r in result.rounds] == [0, 1, 2, 3]
    assert all(r.is_evaluated for r in result.rounds)
    # the clients were told that it is over
    assert [order.last for _, order in carrier.orders()].count(True) == 3
    folder = tmp_path / "whole" / "run"
    why = "stopped early: no better validation for 2 evaluations after round 0"
    status = {"state": "finished", "rounds": 3, "message": why}
    assert RunRecord.load(folder).status == status

    # killed after its last round, it ends there and trains nothing more
    write_sealed(folder / "status.json", {"state": "running", "rounds": 0, "message": ""})
    resumed = serve_run(carrier, made, folder, resume=True)
    assert [r.untimed() for r in resumed.rounds] == [r.untimed() for r in result.rounds]
    assert RunRecord.load(folder).status == status
    # with more patience, it goes on
    more = small("fedavg", run={**run, "patience": 4}, defaults=STILL)
    assert len(serve_run(carrier, more, folder, resume=True).rounds) == 6


def test_private_clients_send_no_validation(tmp_path: Path) -> None:
    run = {
        "patience": 2,
        "clipping": {"norm": 1.0},
        "privacy": {"kind": "central", "noise": 1.0, "delta": 0.01},
    }
    made = small("fedavg", run={**run, "sampling": "poisson", "participation": 0.5})
    carrier = local(made, tmp_path)
    with pytest.raises(ConfigError, match="patience"):
        serve_run(carrier, made, tmp_path / "run")
