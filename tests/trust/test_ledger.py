"""The ledger: what is charged, what a kill leaves, and what was spent."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

pytest.importorskip("dp_accounting")

from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.trust.privacy.accounting import Sampling, composed_epsilon, epsilon, local_epsilon
from fedlowrank.trust.privacy.ledger import PrivacyLedger

DELTA = 1e-5
POISSON = Sampling("poisson", 20, rate=0.1)
FIXED = Sampling("fixed", 20, count=2)


def charge(
    ledger: PrivacyLedger,
    round: int,
    clients: list[int],
    noise: float = 1.5,
    seeded: bool = False,
    clip: float = 0.1,
) -> bool:
    return ledger.charge(round, noise, clip, POISSON, clients, seeded=seeded)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "privacy.jsonl"


def test_a_line_for_each_charged_round(path: Path) -> None:
    ledger = PrivacyLedger(path)
    assert not path.exists()
    assert charge(ledger, 0, [7, 3])
    assert ledger.charge(1, 1.5, 0.2, FIXED, [3, 4], seeded=False)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first.pop("check") == zlib.crc32(json.dumps(first).encode())
    assert first == {
        "round": 0,
        "noise": 1.5,
        "clip": 0.1,
        "sampling": {"kind": "poisson", "clients": 20, "rate": 0.1},
        "clients": [3, 7],
    }
    assert second["sampling"] == {"kind": "fixed", "clients": 20, "count": 2}
    for seen in (ledger, PrivacyLedger(path)):
        assert seen.rounds() == 2
        assert [seen.releases(client) for client in (3, 4, 7, 8)] == [2, 1, 1, 0]


def test_clients_are_known_by_the_branch_of_a_run(path: Path) -> None:
    ledger = PrivacyLedger(path)
    ledger.charge(0, 1.5, 0.1, FIXED, [3], seeded=False)
    ledger.charge(0, 1.5, 0.1, FIXED, [4, 5], seeded=False, branch=1)
    ledger.charge(0, 1.5, 0.1, FIXED, [6], seeded=False, branch=1)
    first, second, _ = map(json.loads, path.read_text().splitlines())
    # ledgers of runs that never went back have the form of before
    assert ("branch" in first, second["branch"]) == (False, 1)
    for seen in (ledger, PrivacyLedger(path)):
        assert [seen.clients_in_branch(0, branch) for branch in (0, 1, 2)] == [{3}, {4, 5, 6}, set()]
        assert seen.releases(3) == seen.releases(6) == 1


@pytest.mark.full
def test_memory_and_file_agree(path: Path) -> None:
    memory, file = PrivacyLedger(), PrivacyLedger(path)
    for number in range(5):
        for ledger in (memory, file):
            charge(ledger, number, [number, number + 1])
    for ledger in (file, PrivacyLedger(path)):
        assert ledger.rounds() == memory.rounds() == 5
        for kind in ("central", "local"):
            assert ledger.spent(kind, DELTA, "rdp") == memory.spent(kind, DELTA, "rdp") > 0


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_repeated_round_counts_twice_unless_its_noise_is_seeded(path: Path, on_disk: bool) -> None:
    ledger = PrivacyLedger(path if on_disk else None)
    assert charge(ledger, 0, [1, 2], seeded=True)
    if on_disk:
        ledger = PrivacyLedger(path)
    assert not charge(ledger, 0, [2, 1], seeded=True)
    assert (ledger.rounds(), ledger.releases(1)) == (1, 1)
    # other bytes: other clients, another bound
    assert charge(ledger, 0, [1], seeded=True)
    assert charge(ledger, 0, [1, 2], seeded=True, clip=0.3)
    assert (ledger.rounds(), ledger.releases(1), ledger.releases(2)) == (3, 3, 2)
    assert charge(ledger, 0, [1, 2])
    assert charge(ledger, 0, [1, 2])
    assert (ledger.rounds(), ledger.releases(1)) == (5, 5)
    if on_disk:
        assert PrivacyLedger(path).rounds() == 5


@pytest.mark.full
def test_a_kill_at_any_byte_of_the_last_line_leaves_the_lines_before(path: Path) -> None:
    ledger = PrivacyLedger(path)
    for number in range(3):
        charge(ledger, number, [number])
    whole = path.read_bytes()
    before = whole[: whole[:-1].rfind(b"\n") + 1]
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        resumed = PrivacyLedger(path)
        assert resumed.rounds() == 2
        assert path.read_bytes() == whole[:size], "reading must not change the file"
        charge(resumed, 2, [2])
        assert path.read_bytes() == whole
    assert PrivacyLedger(path).rounds() == 3
    path.write_bytes(before + whole[len(before) : -1] + b" " * 500)
    charge(PrivacyLedger(path), 2, [2])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0][:-9], *lines[1:]],
        lambda lines: [lines[0], b"", *lines[1:]],
        lambda lines: [lines[0].replace(b"1.5", b"-1.5"), *lines[1:]],
        lambda lines: [lines[0].replace(b"1.5", b"9.5"), *lines[1:]],
        lambda lines: [lines[0].replace(b"[0, 5]", b"[0, 4]"), *lines[1:]],
        lambda lines: [lines[0].replace(b"1.5", b"NaN"), *lines[1:]],
        lambda lines: [lines[0].replace(b"noise", b"nois"), *lines[1:]],
        lambda lines: [lines[0].replace(b"poisson", b"uniform"), *lines[1:]],
        lambda lines: [lines[0].replace(b"[0, 5]", b"[5, 0]"), *lines[1:]],
        lambda lines: [lines[0].replace(b"[0, 5]", b"[5, 5]"), *lines[1:]],
        lambda lines: [lines[0].replace(b"[0, 5]", b"5"), *lines[1:]],
        lambda lines: [b"[]", *lines[1:]],
        lambda lines: [lines[0].replace(b'"round": 0', b'"round": 0.5'), *lines[1:]],
        lambda lines: [lines[0].replace(b"[0, 5]", b'["0", "5"]'), *lines[1:]],
        lambda lines: [*lines[:-1], bytes(len(lines[-1]))],
        lambda lines: [*lines[:-1], b"\xff"],
    ],
)
def test_a_damaged_whole_line_is_an_error(path: Path, damage: object) -> None:
    ledger = PrivacyLedger(path)
    charge(ledger, 0, [0, 5])
    charge(ledger, 1, [1])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in damage(lines)))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"line [12]: this is no charge"):
        PrivacyLedger(path)


def test_another_writer_is_noticed(path: Path) -> None:
    one, two = PrivacyLedger(path), PrivacyLedger(path)
    charge(one, 0, [1])
    with pytest.raises(CheckpointError, match="something else wrote"):
        charge(two, 0, [1])
    assert two.rounds() == 0
    assert PrivacyLedger(path).rounds() == 1
    path.unlink()
    with pytest.raises(CheckpointError, match="something else wrote"):
        charge(one, 1, [1])


def test_a_charge_is_on_disk_before_it_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = PrivacyLedger(path)
    charge(ledger, 0, [1])
    whole = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            charge(ledger, 1, [1])
    assert (ledger.rounds(), ledger.releases(1)) == (1, 1)
    charge(ledger, 2, [1])
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["round"] for line in path.read_bytes().splitlines()] == [0, 2]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write"):
        charge(PrivacyLedger(tmp_path / "none" / "privacy.jsonl"), 0, [1])


@pytest.mark.full
def test_what_was_spent() -> None:
    ledger = PrivacyLedger()
    assert ledger.spent("central", DELTA, "rdp") == ledger.spent("local", DELTA, "pld") == 0
    for number, clients in enumerate([[1, 2], [2, 3], []]):
        charge(ledger, number, clients)
    assert ledger.spent("central", DELTA, "rdp") == epsilon(1.5, 3, DELTA, POISSON, "rdp")
    assert ledger.spent("central", DELTA, "pld") == epsilon(1.5, 3, DELTA, POISSON, "pld")
    assert ledger.spent("local", DELTA, "pld") == pytest.approx(local_epsilon(1.5, 2, DELTA, "pld"), rel=1e-9)
    charge(ledger, 3, [4], noise=0.5)
    expected = composed_epsilon({(1.5, POISSON): 3, (0.5, POISSON): 1}, DELTA, "rdp")
    assert ledger.spent("central", DELTA, "rdp") == expected
    # the client with the least noise, not the one with the most releases
    assert ledger.spent("local", DELTA, "rdp") == local_epsilon(0.5, 1, DELTA, "rdp")


@pytest.mark.full
def test_a_repeated_draw_of_clients_is_amplified_once() -> None:
    repeated, redrawn = PrivacyLedger(), PrivacyLedger()
    for ledger, again in ((repeated, [1, 2]), (redrawn, [3])):
        charge(ledger, 0, [1, 2])
        charge(ledger, 0, again)
    assert redrawn.spent("central", DELTA, "rdp") == epsilon(1.5, 2, DELTA, POISSON, "rdp")
    assert repeated.spent("central", DELTA, "rdp") == pytest.approx(
        epsilon(1.5 / 2**0.5, 1, DELTA, POISSON, "rdp"), rel=1e-9
    )
    assert repeated.spent("central", DELTA, "rdp") > redrawn.spent("central", DELTA, "rdp")


@pytest.mark.parametrize(
    "settings",
    [{"round": -1}, {"noise": 0.0}, {"noise": float("nan")}, {"clip": 0.0}, {"client_ids": [1, 1]}],
)
def test_wrong_charges(path: Path, settings: dict[str, object]) -> None:
    right = {"round": 0, "noise": 1.0, "clip": 1.0, "sampling": FIXED, "client_ids": [1, 2], "seeded": False}
    with pytest.raises(ConfigError):
        PrivacyLedger(path).charge(**(right | settings))  # type: ignore[arg-type]
    assert not path.exists()
