"""ε of a site's runs on the same data, against dp-accounting called directly; whose data is the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("dp_accounting")

import dp_accounting

from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.data.dataset import Examples
from fedlowrank.data.overlap import MAX_SKETCH_DIGESTS, measure_overlap, sketch_examples, sketch_files
from fedlowrank.trust.privacy.accounting import Sampling, composed_epsilon, total_epsilon
from fedlowrank.trust.privacy.budget import Budget
from fedlowrank.trust.privacy.site_ledger import (
    SiteLedger,
    SiteRun,
    list_accounts,
    read_entries,
    state_folder,
    total_epsilon_of,
)
from fedlowrank.trust.trust_settings import Privacy

DELTA = 1e-3
ALL = Sampling("all", 3)


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOWRANK_STATE", str(tmp_path / "state"))


def site(name: str, kind: Any = "local", data: Sequence[str] = ("a", "b")) -> SiteLedger:
    return SiteLedger(name, SiteRun(kind, tuple(data), DELTA, "rdp"))


def budget(
    name: str, kind: Any, epsilon: float, noise: float, sampling: Sampling = ALL, **more: Any
) -> Budget:
    made = Budget(
        Privacy(kind, noise=noise, epsilon=epsilon, delta=DELTA, accountant="rdp"),
        sampling,
        100,
        1.0,
        seeded=False,
    )
    made.count_site(site(name, "server" if kind == "central" else kind, **more))
    return made


def gaussian_epsilon(noises: Sequence[float], delta: float = DELTA) -> float:
    """ε of Gaussian releases of sensitivity 1, by Rényi divergences."""
    accountant = dp_accounting.rdp.RdpAccountant()
    for noise in noises:
        accountant.compose(dp_accounting.GaussianDpEvent(noise))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("kind", ["local", "central"])
def test_runs_on_the_same_data_share_one_budget(kind: Any, tmp_path: Path) -> None:
    """Each run alone would be allowed six rounds; together they are allowed six."""
    # replace-one: two updates differ by twice the clipping norm
    factor = 2.0 if kind == "local" else 1.0
    noise = 4.0 * factor
    limit = gaussian_epsilon([4.0] * 6) + 1e-6
    done = 0
    for name in ("one", "two", "three"):
        run = budget(name, kind, limit, noise)
        # every run has a folder of its own, or none is left of it
        run.open(tmp_path / f"{name}.jsonl")
        for t in range(4):
            if run.allowed([1], t):
                run.charge(t, 1.0, [1])
                done += 1
    assert done == 6
    assert "earlier runs of this site on the same data" in run.reason()
    assert "fedlowrank privacy" in run.reason()
    if kind == "central":
        with pytest.raises(ConfigError, match="earlier runs"):
            run.charge(5, 1.0, [1])
    actual = read_entries(state_folder() / "privacy")
    assert [len(group) for group in list_accounts(actual)] == [2]
    total = total_epsilon_of(
        next(run.kind for run, _ in actual.values()), [ledger for _, ledger in actual.values()], DELTA, "rdp"
    )
    assert total == pytest.approx(gaussian_epsilon([4.0] * 6), rel=1e-9)


def test_a_client_counts_under_whatever_number_it_had() -> None:
    one, two = site("one"), site("two")
    one.charge(0, 2.0, 1.0, ALL, [1])
    two.charge(0, 4.0, 1.0, ALL, [2])
    assert one.precision() == two.precision() == pytest.approx(2.0**-2 + 4.0**-2)


def test_a_folder_that_is_older_than_the_ledger_counts(tmp_path: Path) -> None:
    """The site's ledger was lost, or the run began before there was one."""
    noise, limit = 4.0, gaussian_epsilon([2.0] * 3) + 1e-6
    before = Budget(Privacy("local", noise=noise, epsilon=limit, delta=DELTA), ALL, 100, 1.0, seeded=False)
    before.open(tmp_path / "privacy.jsonl")
    for t in range(3):
        before.charge(t, 1.0, [1])
    after = budget("one", "local", limit, noise)
    after.open(tmp_path / "privacy.jsonl")
    assert not after.allowed([1], 3)


def test_two_processes_do_not_spend_the_same_rest(tmp_path: Path) -> None:
    limit = gaussian_epsilon([4.0] * 3) + 1e-6
    one, two = (budget(name, "central", limit, 4.0) for name in ("one", "two"))
    done = 0
    for t in range(3):
        for run in (one, two):
            # both found room before either charged
            if run.allowed([1], t):
                run.charge(t, 1.0, [1])
                done += 1
    assert done == 3


def test_other_data_is_another_account() -> None:
    site("one").charge(0, 1.0, 1.0, ALL, [0])
    assert site("two", data=["c", "d"]).precision() == 0
    assert site("three", "server").draws_of_others() == {}
    # of servers, one client in common is enough
    many = [f"client {i}" for i in range(50)]
    site("four", "server", many).charge(0, 1.0, 1.0, ALL, [0])
    assert site("five", "server", [many[7]]).draws_of_others() == {(1.0, ALL): 1}
    assert site("six", "server", ["client 50"]).draws_of_others() == {}


@pytest.mark.parametrize(("common", "counts"), [(50, True), (11, True), (8, False), (1, False)])
def test_a_tenth_of_the_smaller_data_in_common_is_one_account(common: int, counts: bool) -> None:
    one, two = ([f"{i:04d}" for i in numbers] for numbers in (range(100), range(100 - common, 600)))
    site("one", data=one).charge(0, 1.0, 1.0, ALL, [0])
    assert (site("two", data=two).precision() == 1) is counts


def test_poisson_draws_of_several_runs_are_composed() -> None:
    poisson = Sampling("poisson", 50, rate=0.1)
    for name, noise, rounds in (("one", 1.0, 4), ("two", 2.0, 6)):
        for t in range(rounds):
            site(name, "central").charge(t, noise, 1.0, poisson, [0])
    accountant = dp_accounting.rdp.RdpAccountant()
    for noise, rounds in ((1.0, 4), (2.0, 6)):
        event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(event, rounds)
    ledgers = [ledger for _, ledger in read_entries(state_folder() / "privacy").values()]
    assert total_epsilon_of("central", ledgers, DELTA, "rdp") == pytest.approx(
        accountant.get_epsilon(DELTA), rel=1e-9
    )


def test_a_client_of_a_server_counts_all_its_rounds_drawn_or_not() -> None:
    poisson = Sampling("poisson", 50, rate=0.1)

    def epsilon(rounds: int) -> float:
        accountant = dp_accounting.rdp.RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
        accountant.compose(event, rounds)
        return float(accountant.get_epsilon(DELTA))

    def follow(ledger: SiteLedger, rounds: int, trains: bool = True, limit: float | None = None) -> float:
        return ledger.follow(rounds, 1.0, 1.0, poisson, 3, limit, trains=trains)

    one, two = site("one", "central"), site("two", "central")
    # drawn in rounds 1 and 5, and told of the end after round 6
    costs = [follow(one, 1), follow(one, 5), follow(one, 6, False), follow(one, 6, False)]
    assert costs == pytest.approx([epsilon(n) for n in (1, 5, 6, 6)])
    # a round that is done again has the same draw, and noise of its own
    again = follow(two, 1), follow(two, 1)
    assert again[0] == pytest.approx(epsilon(7))
    assert again[1] > epsilon(8)
    folder = state_folder() / "privacy"
    assert [ledger.rounds() for _, ledger in read_entries(folder).values()] == [6, 2]
    assert follow(two, 5, limit=again[1]) > again[1]
    assert [ledger.rounds() for _, ledger in read_entries(folder).values()] == [6, 2]
    # a server's ledger, and that of the client's own noise, are others
    assert site("three", "server", ["a"]).draws_of_others() == {}
    assert site("four").precision() == 0


def test_a_client_counts_rounds_that_were_released_again_without_it() -> None:
    """A draw that is released twice costs as one with the combined noise; so do rounds before the run went back."""
    poisson = Sampling("poisson", 50, rate=0.1)
    accountant = dp_accounting.rdp.RdpAccountant()
    for noise, draws in ((1.0, 5), (0.5**0.5, 2), (1 / 3**0.5, 1)):
        event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(event, draws)
    ledger = site("repeated", "central")
    ledger.follow(2, 1.0, 1.0, poisson, 3, None, trains=True)
    for _ in range(2):
        # rounds 1 to 6, of which 2, 3 and 4 were released again, and 7 and 8 before the run went back
        actual = ledger.follow(
            6, 1.0, 1.0, poisson, 3, None, trains=False, repeats={1: 2, 2: 3, 3: 2, 6: 1, 7: 1}
        )
        assert actual == pytest.approx(accountant.get_epsilon(DELTA))


def test_what_no_accountant_composes_is_added_up() -> None:
    """Draws of a fixed size are replace-one; two steps of add-or-remove replace a client."""
    fixed, poisson = Sampling("fixed", 50, count=5), Sampling("poisson", 50, rate=0.1)
    parts: list[dict[tuple[float, Sampling], int]] = [{(2.0, fixed): 10}, {(2.0, poisson): 10}]
    actual = total_epsilon({**parts[0], **parts[1]}, DELTA, "rdp")
    replaced = composed_epsilon(parts[0], DELTA / 2, "rdp")
    twice = actual - replaced
    # (ε, δ') for one step is (2ε, (1 + exp ε) δ') for two, for some δ' that keeps to δ/2
    one = twice / 2
    small = (DELTA / 2) / (1 + math.exp(one))
    assert composed_epsilon(parts[1], small, "rdp") <= one + 1e-9
    # not much more than needed
    assert one < 1.5 * composed_epsilon(parts[1], small, "rdp")
    for part in parts:
        assert actual > composed_epsilon(part, DELTA, "rdp")
        assert total_epsilon(part, DELTA, "rdp") == composed_epsilon(part, DELTA, "rdp")
    # a run by privacy loss distributions after others whose draws these cannot bound
    assert total_epsilon(parts[0], DELTA, "pld") == composed_epsilon(parts[0], DELTA, "rdp")
    assert total_epsilon({(1e-3, poisson): 1, (2.0, fixed): 1}, DELTA, "rdp") == math.inf


def test_files_are_the_same_data_in_any_order_and_with_more_lines(tmp_path: Path) -> None:
    lines = [f'{{"text": "patient {i}"}}' for i in range(200)]
    names = {
        "first": lines,
        "reversed": lines[::-1],
        "one more": [*lines, '{"text": "a new one"}'],
        "half": lines[:100],
        "few": [*lines[:5], *(f"other {i}" for i in range(200))],
        "others": [f"other {i}" for i in range(100)],
    }
    for name, content in names.items():
        (tmp_path / name).write_text("\n".join(content) + "\n")
    (tmp_path / "dos").write_bytes(("\r\n".join(lines) + "\r\n").encode())
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    (folder / "a").write_text("\n".join(lines[:50]) + "\n\n\n")
    (folder / "b").write_text("\n".join(lines[50:]))
    first = sketch_files([tmp_path / "first"])
    actual = {
        path: measure_overlap(first, sketch_files([tmp_path / path])) for path in (*names, "dos", "folder")
    }
    assert actual == {
        "first": 1, "reversed": 1, "one more": 1, "half": 1, "few": 0.025, "others": 0, "dos": 1, "folder": 1
    }  # fmt: skip
    assert measure_overlap(first, []) == 0


@pytest.mark.parametrize(
    ("mine", "theirs", "common"), [(5000, 5000, 2500), (20_000, 5000, 5000), (9000, 300, 90)]
)
def test_the_share_of_large_data_is_estimated(mine: int, theirs: int, common: int, tmp_path: Path) -> None:
    one, two = range(mine), range(mine - common, mine - common + theirs)
    for name, numbers in (("one", one), ("two", two)):
        (tmp_path / name).write_text("\n".join(map(str, numbers)))
    a, b = sketch_files([tmp_path / "one"]), sketch_files([tmp_path / "two"])
    assert len(a) == MAX_SKETCH_DIGESTS
    # of (9000, 300), about 300 * 1024/9000 = 34 digests are compared
    deviation = 0.02 if theirs > 1000 else 0.08
    assert measure_overlap(a, b) == pytest.approx(common / min(mine, theirs), abs=4 * deviation)
    assert measure_overlap(a, b) == measure_overlap(b, a)


def test_prepared_examples_are_the_same_data_in_any_order() -> None:
    x, order = torch.randn(100, 3), torch.randperm(100)
    first = sketch_examples(Examples(x, torch.arange(100)))
    assert (
        measure_overlap(first, sketch_examples(Examples(x[order], torch.zeros(100, dtype=torch.int64)))) == 1
    )
    assert measure_overlap(first, sketch_examples(Examples(torch.randn(100, 3), torch.arange(100)))) == 0
    tokens = {
        "input_ids": torch.arange(40).reshape(10, 4),
        "attention_mask": torch.ones(10, 4, dtype=torch.int64),
    }
    assert len(sketch_examples(Examples(tokens, torch.arange(10)))) == 10


def test_a_damaged_ledger_of_the_site_is_named(tmp_path: Path) -> None:
    one = site("one")
    one.charge(0, 1.0, 1.0, ALL, [0])
    folder = tmp_path / "state" / "privacy"
    described, charges = folder / "one.json", folder / "one.jsonl"
    text = described.read_text()
    for damage in ("{}", "[]", text.replace('"local"', '"loyal"'), text.replace('"a"', "1")):
        described.write_text(damage)
        with pytest.raises(CheckpointError, match=r"one\.json"):
            site("two").precision()
    described.unlink()
    with pytest.raises(CheckpointError, match=r"one\.jsonl are charges"):
        site("two").precision()
    described.write_text(text)
    charges.write_text(charges.read_text().replace('"noise": 1.0', '"noise": 9.0'))
    with pytest.raises(CheckpointError, match="this is no charge"):
        site("two").precision()


def test_the_ledger_is_the_owners_alone(tmp_path: Path) -> None:
    site("one").charge(0, 1.0, 1.0, ALL, [0])
    state = tmp_path / "state"
    assert state.stat().st_mode & 0o777 == 0o700
    state.chmod(0o755)
    with pytest.raises(ConfigError, match=f"chmod -R go-rwx {state}"):
        site("one")
    state.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        site("../one")


def test_a_ledger_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLOWRANK_STATE", str(tmp_path / "file" / "state"))
    with pytest.raises(CheckpointError, match="set FEDLOWRANK_STATE to a folder that can be written"):
        site("one")


def test_where_the_ledger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_folder().name == "state"
    monkeypatch.delenv("FEDLOWRANK_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/states")
    assert state_folder() == Path("/var/states/fedlowrank")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local" / "state" / "fedlowrank"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="set FEDLOWRANK_STATE"):
        state_folder()


def test_examples_that_change_within_a_run_are_added_to_it(tmp_path: Path) -> None:
    site("one", data=["a", "b"]).charge(0, 1.0, 1.0, ALL, [0])
    site("one", data=["c", "d"]).charge(1, 1.0, 1.0, ALL, [0])
    stored = json.loads((tmp_path / "state" / "privacy" / "one.json").read_text())
    assert stored["data"] == ["a", "b", "c", "d"]
    for data in (["a"], ["d"]):
        assert site("two", data=data).precision() == 2
