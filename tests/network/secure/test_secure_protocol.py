"""A secure sum of signed steps: its total is the plain one, whoever disappears, and lies reveal nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from fedlowrank.network.secure.leader import SumLeader, vector_from_bytes, vector_to_bytes
from fedlowrank.network.secure.member import SecureSumError, SumMember, min_participants
from fedlowrank.network.secure.signing import MemberSigner, Session
from tests.network.secure.member_keys import KEYS, ROSTER

SESSION = Session("a" * 16, 0, 3)


def members(n: int, session: Session = SESSION) -> dict[int, SumMember]:
    return {c: SumMember(c, n, session, ROSTER, MemberSigner(KEYS[c])) for c in range(n)}


def vectors(n: int, size: int = 5) -> dict[int, Any]:
    g = np.random.default_rng(n)
    return {c: g.integers(0, 2**64, size, dtype=np.uint64) for c in range(n)}


def play(
    people: dict[int, SumMember],
    x: dict[int, Any],
    gone: dict[int, Collection[int]] | None = None,
    change: Callable[[str, Any], Any] = lambda step, value: value,
) -> tuple[SumLeader, Any]:
    """Take all steps; the clients ``gone[k]`` disappear before step k; ``change`` alters what is sent."""
    gone, n = gone or {}, len(people)
    here, leader = dict(people), SumLeader(n, SESSION, ROSTER)

    def left(step: int) -> dict[int, SumMember]:
        for client in gone.get(step, ()):
            del here[client]
        return dict(here)

    for c, m in left(1).items():
        leader.announce(c, m.announce())
    leader.check(len(leader.announced), "announced keys")
    for c, m in left(2).items():
        leader.share(c, change("shares", m.share(change("announced", dict(leader.announced)))))
    leader.check(len(leader.sharers), "shared secrets")
    for c, m in left(3).items():
        leader.add(c, vector_from_bytes(vector_to_bytes(m.mask(x[c], change("boxes", leader.boxes_for(c))))))
    leader.check(len(leader.replied), "replied")
    for c, m in left(4).items():
        if c in leader.replied:
            leader.agree(c, m.agree(change("replied", list(leader.replied))))
    leader.check(len(leader.signatures), "signed")
    for c, m in left(5).items():
        if c in leader.signatures:
            leader.reveal(c, change("revealed", m.reveal(dict(leader.signatures))))
    return leader, leader.compute_total()


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_the_total_is_that_of_numpy(n: int) -> None:
    x = vectors(n)
    _, total = play(members(n), x)
    assert np.array_equal(total, np.sum(list(x.values()), 0, dtype=np.uint64))


@pytest.mark.few(2)
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_as_many_as_the_threshold_allows_may_disappear_at_any_step(step: int) -> None:
    n, x = 7, vectors(7)
    lost = n - min_participants(n)
    assert (min_participants(n), lost) == (5, 2)
    leader, total = play(members(n), x, {step: (1, 4)})
    # whoever is lost after its vector arrived is in the total
    inside = [c for c in range(n) if step > 3 or c not in (1, 4)]
    assert sorted(leader.replied) == inside
    assert np.array_equal(total, np.sum([x[c] for c in inside], 0, dtype=np.uint64))
    with pytest.raises(SecureSumError, match=r"[34] clients .*, and 5 "):
        play(members(n), x, {step: (1, 4, 6)})


def test_two_may_disappear_at_different_steps() -> None:
    x = vectors(7)
    _, total = play(members(7), x, {2: (0,), 4: (5,)})
    assert np.array_equal(total, np.sum([x[c] for c in range(1, 7)], 0, dtype=np.uint64))


def test_what_the_server_sees_of_a_vector_is_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked vector of zeros passes as random: its bits are balanced, and differ from run to run."""
    seen: list[Any] = []
    add = SumLeader.add

    def watch(leader: SumLeader, client: int, masked: Any) -> None:
        seen.append(masked.copy())
        add(leader, client, masked)

    monkeypatch.setattr(SumLeader, "add", watch)
    for _ in range(2):
        _, total = play(members(3), dict.fromkeys(range(3), np.zeros(4000, np.uint64)))
        assert not total.any()
    for masked in seen:
        share = np.unpackbits(masked.view(np.uint8)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / (64 * 4000) ** 0.5
    assert not np.array_equal(seen[0], seen[3])


class TestLies:
    """What a server, or a client, may try."""

    def test_no_two_lists_are_signed_by_enough(self) -> None:
        """A server that shows half of the clients another list gets shares of neither kind from any."""
        people, x = members(7), vectors(7)
        leader = SumLeader(7, SESSION, ROSTER)
        for c, m in people.items():
            leader.announce(c, m.announce())
        for c, m in people.items():
            leader.share(c, m.share(dict(leader.announced)))
        for c, m in people.items():
            leader.add(c, m.mask(x[c], leader.boxes_for(c)))
        lists = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]]
        signed = {c: m.agree(lists[c % 2]) for c, m in people.items() if c < 6}
        for c in range(6):
            with pytest.raises(SecureSumError, match=r"3 clients signed the list .* 5 must"):
                people[c].reveal(signed)

    def test_shares_are_revealed_once(self) -> None:
        people = members(3)
        leader, _ = play(people, vectors(3))
        for m in people.values():
            with pytest.raises(SecureSumError, match="step 4 of a secure sum after step 5"):
                m.agree([0, 1, 2])
            with pytest.raises(SecureSumError, match="step 5"):
                m.reveal(leader.signatures)

    def test_one_vector_is_masked_once(self) -> None:
        people = members(3)
        leader = SumLeader(3, SESSION, ROSTER)
        for c, m in people.items():
            leader.announce(c, m.announce())
        for c, m in people.items():
            leader.share(c, m.share(dict(leader.announced)))
        people[0].mask(vectors(3)[0], leader.boxes_for(0))
        with pytest.raises(SecureSumError, match=r"step 3 .* after step 3"):
            people[0].mask(vectors(3)[0], leader.boxes_for(0))

    def test_keys_of_the_servers_own_are_noticed(self) -> None:
        """A server that plays the other clients would know all masks."""

        def forge(step: str, value: Any) -> Any:
            if step != "announced":
                return value
            return {
                c: SumMember(c, 3, SESSION, ROSTER, MemberSigner(KEYS[6])).announce() if c else a
                for c, a in value.items()
            }

        with pytest.raises(SecureSumError, match="client 1 did not sign the keys"):
            play(members(3), vectors(3), change=forge)

    def test_keys_of_another_round_are_noticed(self) -> None:
        old = {c: m.announce() for c, m in members(3, Session("a" * 16, 0, 2)).items()}
        with pytest.raises(SecureSumError, match="did not sign"):
            play(members(3), vectors(3), change=lambda s, v: {**v, 2: old[2]} if s == "announced" else v)

    @pytest.mark.parametrize(
        ("step", "change", "message"),
        [
            ("announced", lambda v: {c: a for c, a in v.items() if c < 2}, "2 clients announced keys, and 3 of 3"),
            ("boxes", lambda v: {c: b[:-1] + bytes([b[-1] ^ 1]) for c, b in v.items()}, "changed on the way"),
            ("boxes", lambda v: {}, "1 clients shared secrets"),
            ("replied", lambda v: v[:2], "2 clients replied, and 3 of 3 must"),
            ("replied", lambda v: [*v[:2], 5], "cannot be|replied"),
        ],
    )  # fmt: skip
    def test_what_a_client_refuses(self, step: str, change: Any, message: str) -> None:
        with pytest.raises(SecureSumError, match=message):
            play(members(3), vectors(3), change=lambda s, v: change(v) if s == step else v)

    def test_a_key_of_low_order_is_refused_by_the_server(self) -> None:
        signer, keys = MemberSigner(KEYS[0]), (bytes(32), b"\x09" + bytes(31), bytes(32))
        announcement = *keys, signer.sign(SESSION.message("keys", 0, *keys))
        with pytest.raises(SecureSumError, match="no keys of X25519"):
            SumLeader(3, SESSION, ROSTER).announce(0, announcement)

    def test_wrong_shares_of_a_few_clients_change_nothing(self) -> None:
        x, calls = vectors(7), []

        def lie(step: str, value: Any) -> Any:
            if step == "revealed":
                calls.append(1)
                if len(calls) in (2, 5):
                    return {c: bytes(len(s)) for c, s in value.items()}
            return value

        _, total = play(members(7), x, change=lie)
        assert np.array_equal(total, np.sum(list(x.values()), 0, dtype=np.uint64))

    def test_wrong_shares_of_more_are_an_error_and_no_wrong_total(self) -> None:
        def lie(step: str, value: Any) -> Any:
            return {c: bytes(len(s)) for c, s in value.items()} if step == "revealed" else value

        with pytest.raises(SecureSumError, match="shares of the secrets of client 0 are wrong"):
            play(members(3), vectors(3), change=lie)
