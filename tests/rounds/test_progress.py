"""What a run prints on the way where there is no terminal, and how it is named."""

from __future__ import annotations

import pytest

from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.logs import progress
from fedlowrank.rounds.logs.progress import bar, run_label
from tests.support.client_tables import make_client_table


def record(round: int) -> RoundRecord:
    measured = make_client_table({"accuracy": {"personal": {"test": [0.5, 1.0, None]}}})
    return RoundRecord(round=round, measured=measured if round % 2 == 0 else None)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, [0, 1, 2, 3]), (3600.0, [3])])
def test_plain_lines_now_and_then(
    seconds: float, rounds: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds)
    with bar("FedAvg, seed 0", 3) as show:
        for completed in range(4):
            show(record(completed))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "".join(f"FedAvg, seed 0: round {r} of 3, test  75.0 %\n" for r in rounds)


def test_a_run_is_named_by_method_seed_and_what_was_varied() -> None:
    config = {"method": {"title": "pFedLoRA"}, "run": {"seed": 4}, "vary": {"defaults.optimizer.lr": 0.1}}
    assert run_label(config) == "pFedLoRA, seed 4, lr 0.1"
    assert run_label({**config, "vary": {}}) == "pFedLoRA, seed 4"
    # a field of another method says nothing of this one
    vary = {"methods.pfedlora.epochs": 1, "methods.fedavg.epochs": 3}
    method = {**config["method"], "name": "pfedlora"}
    assert (
        run_label({**config, "method": method, "vary": vary}) == "pFedLoRA, seed 4, epochs 1, fedavg.epochs 3"
    )
