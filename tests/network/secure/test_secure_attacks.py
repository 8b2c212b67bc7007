"""What a server that lies, or a client, tries against secure sums; every test fails if its attack works.

What is not protected has a test, too: ``test_a_client_left_out_of_a_later_round_is_the_difference_of_two_totals``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.core.contract import Mean
from fedlowrank.core.errors import ConfigError
from fedlowrank.network.deploy.forget import forget
from fedlowrank.network.messages import Answer, Order, RefusedOrderError
from fedlowrank.network.secure.contributions import encode_contribution, make_grid
from fedlowrank.network.secure.leader import SumLeader, vector_from_bytes
from fedlowrank.network.secure.member import SecureSumError, SumMember, min_participants
from fedlowrank.network.secure.participation import (
    Participation,
    bytes_to_text,
    parcel_by_client,
    text_to_bytes,
    unpack_announcement,
)
from fedlowrank.network.secure.signing import MemberSigner, Session
from fedlowrank.network.transport import NodeMessage
from fedlowrank.trust.secure_sums import KeyPair, MaskingClient, combine
from fedlowrank.trust.trust_settings import SecureSums
from tests.network.deployments import write_tables
from tests.network.secure.member_keys import KEYS, ROSTER
from tests.network.secure.secure_sites import (
    is_close,
    make_secure_experiment,
    make_secure_sites,
    read_sent_orders,
    run_in_clear,
    run_secure,
)
from tests.support.local_network import fault_on_orders, serve_run

RUN, GRID = "a" * 16, SecureSums(on=True, bits=30, bound=8.0)
STEPS = ("announce", "share", "mask", "agree", "reveal")


def order(step: Any, parcel: Mapping[int, str] | None = None, **where: Any) -> Order:
    names = {str(c): text for c, text in (parcel or {}).items()}
    made = Order(RUN, 1, 0, step == "mask", False, step=step, parcel=names)
    return dataclasses.replace(made, **where)


class Server:
    """A server that may ask its four clients for anything.

    Args:
        folder: of the clients.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.n = folder, 4
        g = torch.Generator().manual_seed(0)
        self.x = {c: Mean({"w": torch.randn(3, generator=g)}, 10.0 + c) for c in range(self.n)}
        self.sites = {c: self.started(c) for c in range(self.n)}
        self.grid = make_grid(GRID, self.n)

    def vector(self, client: int) -> Any:
        """What a client contributes."""
        return encode_contribution(self.x[client], self.grid, None)

    def started(self, client: int) -> Participation:
        """A client's process, after a start."""
        own = self.folder / str(client)
        own.mkdir(parents=True, exist_ok=True)
        return Participation(client, self.n, own, ROSTER, MemberSigner(KEYS[client]))

    def ask(
        self, client: int, step: Any, parcel: Mapping[int, str] | None = None, **where: Any
    ) -> dict[int, str]:
        """The parcel that a client sends."""
        return parcel_by_client(self.sites[client].step(order(step, parcel, **where)))

    def send(self, client: int, asked: Order) -> Any:
        """What a client makes of an order of any step."""
        site = self.sites[client]
        return site.mask(asked, lambda: self.vector(client)) if asked.step == "mask" else site.step(asked)

    def masked(
        self, clients: Collection[int], downs: Mapping[int, str] | None = None, **where: Any
    ) -> tuple[SumLeader, dict[int, Any]]:
        """Take the steps up to the masked vectors; these are not added yet."""
        of = order("announce", **where)
        leader = SumLeader(self.n, Session(of.run, of.branch, of.round), ROSTER)
        for c in clients:
            leader.announce(c, unpack_announcement(self.ask(c, "announce", **where)[c]))
        keys = {c: bytes_to_text(actual) for c, actual in leader.announced.items()}
        for c in clients:
            boxes = self.ask(c, "share", keys, **where)
            leader.share(c, {to: text_to_bytes(box)[0] for to, box in boxes.items()})
        vectors = {}
        for c in clients:
            parcel = {other: bytes_to_text(box) for other, box in leader.boxes_for(c).items()}
            down = (downs or {}).get(c, "d")
            asked = order("mask", parcel, **where)
            self.sites[c].require(asked)
            vectors[c] = vector_from_bytes(self.sites[c].mask(asked, lambda c=c: self.vector(c), down))  # type: ignore[misc]
        leader.bind(b"d")
        return leader, vectors

    def revealed(self, leader: SumLeader, vectors: Mapping[int, Any], **where: Any) -> Any:
        """Take the other steps with the clients of these vectors; returns the total."""
        for c, vector in vectors.items():
            leader.add(c, vector)
        names = dict.fromkeys(vectors, "")
        for c in vectors:
            leader.agree(c, text_to_bytes(self.ask(c, "agree", names, **where)[c])[0])
        signed = {c: bytes_to_text(signature) for c, signature in leader.signatures.items()}
        for c in vectors:
            shares = self.ask(c, "reveal", signed, **where)
            leader.reveal(c, {owner: text_to_bytes(share)[0] for owner, share in shares.items()})
        return leader.compute_total()

    def total(self, clients: Collection[int], **where: Any) -> Any:
        """The total of some clients."""
        return self.revealed(
            *self.masked(clients, **where), **{k: v for k, v in where.items() if k != "downs"}
        )

    def plain(self, *clients: int) -> Any:
        """The sum of the clients' vectors, which the server does not know."""
        return np.sum([encode_contribution(self.x[c], self.grid, None) for c in clients], 0, dtype=np.uint64)


class TestDifferences:
    """Two totals that differ by one client are that client's vector."""

    def test_a_total_is_the_sum(self, tmp_path: Path) -> None:
        server = Server(tmp_path)
        assert np.array_equal(server.total(range(4)), server.plain(0, 1, 2, 3))
        assert np.array_equal(server.total(range(3), round=2), server.plain(0, 1, 2))

    @pytest.mark.parametrize(
        "where",
        [
            {},
            {"branch": 1},
            {"branch": 1, "round": 0},
            {"round": 0},
            {"run": "b" * 16},
            {"run": "b" * 16, "round": 2},
        ],
        ids=["again", "another branch", "branch and round", "lower round", "another run", "run and round"],
    )
    @pytest.mark.parametrize("started_again", [False, True])
    def test_no_round_has_a_second_total(self, where: Any, started_again: bool, tmp_path: Path) -> None:
        server = Server(tmp_path)
        everyone = server.total(range(4))
        if started_again:
            server.sites = {c: server.started(c) for c in range(4)}
        try:
            without = server.total(range(3), **where)
        except RefusedOrderError as error:
            assert "has masked" in str(error)  # noqa: PT017 - what is gained if nothing is raised matters
        else:
            assert not np.array_equal(everyone - without, server.plain(3)), "the vector of client 3 is known"
            pytest.fail("there are two totals of a round")

    def test_a_second_total_needs_all_masks_of_one_member(self, tmp_path: Path) -> None:
        """Two sums of a round begin; the one that was announced first cannot go on."""
        server = Server(tmp_path)
        first = server.ask(0, "announce")
        assert first != server.ask(0, "announce", branch=1)
        for step in STEPS[1:]:
            with pytest.raises(RefusedOrderError, match="takes no part"):
                server.send(0, order(step))

    def test_a_client_that_forgets_a_run_masks_none_of_its_rounds_again(self, tmp_path: Path) -> None:
        made = make_secure_experiment("fedavg", clients=4, rounds=1)
        carrier, keys = make_secure_sites(made, tmp_path)
        assert not serve_run(carrier, made, tmp_path / "run", member_keys=keys).rounds[1].lost
        folder = carrier.folders[100]
        forget(folder, 0)
        assert not list(folder.glob("*/*.tree"))
        server = Server(tmp_path / "other")
        server.sites[0] = Participation(0, 4, folder, ROSTER, MemberSigner(KEYS[0]))
        run = carrier.orders()[-1][1].run
        with pytest.raises(RefusedOrderError, match="masked a vector in round 1"):
            server.ask(0, "announce", run=run, round=0)

    def test_a_client_left_out_of_a_later_round_is_the_difference_of_two_totals(self, tmp_path: Path) -> None:
        """Not protected, but by noise: a server that sends one model twice, where clients train alike."""
        server = Server(tmp_path)
        difference = server.total(range(4)) - server.total(range(3), round=2)
        assert np.array_equal(difference, server.plain(3))
        # of three clients none may be left out
        assert min_participants(3) == 3

    def test_a_site_enters_one_run_with_a_folder(self, tmp_path: Path, capsys: Any) -> None:
        tables = {
            "name": "t", "method": "fedavg", "data": {"source": "iris"}, "partition": {"kind": "iid", "clients": 3},
            "model": {"names": ["mlp"]}, "run": {"rounds": 1, "secure": {"on": True, "bits": 30, "bound": 8.0}},
        }  # fmt: skip
        file = write_tables(tmp_path / "t.toml", tables)
        arguments = ["--client", "0", "--server", "h:1", "--insecure", "--folder", str(tmp_path / "c")]
        assert main(["join", str(file), *arguments, "--runs", "2"]) != 0
        assert "secure sums" in capsys.readouterr().err


class TestMasks:
    """Whatever a server shows to whom, it has no mask of one vector removed."""

    def test_masks_of_different_models_do_not_cancel(self, tmp_path: Path) -> None:
        """Pasquini et al. 2022: the others get a model whose updates are known, and so the total is the victim's."""
        server = Server(tmp_path)
        total = server.total(range(4), downs={0: "the real model"})
        assert not np.array_equal(total, server.plain(0, 1, 2, 3))
        # no number of it is that of the sum
        assert not (total == server.plain(0, 1, 2, 3)).any()

    def test_a_vector_that_is_said_to_be_lost_keeps_its_own_mask(self, tmp_path: Path) -> None:
        """A server that has y_3 says that client 3 is gone, and gets s_3; b_3 stays unknown."""
        server = Server(tmp_path)
        leader, vectors = server.masked(range(4))
        late = vectors.pop(3)
        assert np.array_equal(server.revealed(leader, vectors), server.plain(0, 1, 2))
        shares = [leader._shares[c][3] for c in range(3)]
        secret = combine(shares)
        assert leader._is_masking_secret(3, secret)
        pair = KeyPair(3, secret)
        for other in range(3):
            late = late - pair.mask(other, leader.announced[other][1], late.size, b"d")
        assert not (late == server.plain(3)).any()
        for c, step in itertools.product(range(3), ("agree", "reveal")):
            with pytest.raises(RefusedOrderError):
                server.ask(c, step, dict.fromkeys(range(4), ""))
        # client 3 signs a list that no other signs
        server.ask(3, "agree", dict.fromkeys(range(4), ""))
        with pytest.raises(RefusedOrderError, match="signed the list"):
            server.ask(3, "reveal", {c: bytes_to_text(s) for c, s in leader.signatures.items()})

    def test_of_two_lists_none_is_revealed(self, tmp_path: Path) -> None:
        """A server that has shares for a list with client 3 and for one without it has both its secrets."""
        server = Server(tmp_path)
        server.masked(range(4))
        everyone, part = dict.fromkeys(range(4), ""), dict.fromkeys(range(3), "")
        shown = {0: everyone, 3: everyone, 1: part, 2: part}
        signed = {c: server.ask(c, "agree", names)[c] for c, names in shown.items()}
        for c in range(4):
            with pytest.raises(
                RefusedOrderError, match="2 clients signed the list of those that replied, and 3"
            ):
                server.ask(c, "reveal", signed)

    def test_a_client_that_was_started_again_reveals_nothing(self, tmp_path: Path) -> None:
        server = Server(tmp_path)
        _, vectors = server.masked(range(4))
        server.sites[0] = server.started(0)
        for step in ("agree", "reveal"):
            with pytest.raises(RefusedOrderError, match="started again"):
                server.ask(0, step, dict.fromkeys(vectors, ""))

    @pytest.mark.parametrize("step", STEPS[2:])
    def test_no_step_is_left_out(self, step: str, tmp_path: Path) -> None:
        server = Server(tmp_path)
        server.ask(0, "announce")
        with pytest.raises(RefusedOrderError, match="after step 1"):
            server.send(0, order(step, dict.fromkeys(range(4), "")))


def test_no_order_brings_an_evaluation_or_a_loss(tmp_path: Path) -> None:
    """Also where a server asks for evaluations at every step, and says that the run is over."""

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        actual = Order.from_json(message.header)
        asked = dataclasses.replace(actual, evaluate=True, last=actual.step == "mask")
        return [carrier.answered(dataclasses.replace(message, header=asked.to_json()))]

    made = make_secure_experiment("scaffold", rounds=1)
    carrier, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert not result.rounds[1].lost
    answers = [
        Answer.from_json(text) for folder in carrier.folders.values() for text in read_sent_orders(folder)
    ]
    assert len(answers) == 3 * 6
    assert all((a.steps, a.flops, a.losses, a.evaluation) == (0, 0, {}, None) for a in answers)


def test_a_server_that_sends_models_of_its_own_gets_no_total(tmp_path: Path) -> None:
    """All but client 0 get a model of zeros, whose updates the server can compute."""
    made = make_secure_experiment("fedavg", clients=4, rounds=1, network={"min_replies": 0})

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        if Order.from_json(message.header).step != "mask" or not client:
            return None
        zeros = tree.encode(tree.zeros_like(tree.decode(message.payload)))
        return [carrier.answered(dataclasses.replace(message, payload=zeros))]

    _, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert set(result.rounds[1].lost) == set("0123")
    assert "was sent another model than the others" in result.rounds[1].lost["0"]


def test_a_method_that_sends_each_client_another_model_is_refused(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg")
    carrier, keys = make_secure_sites(made, tmp_path)
    method = type(made.build_method("fedavg"))

    def download(self: Any, server: Any, client: Any) -> Any:
        return tree.map_leaves(lambda t: t + client.id, server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "download", download)
        with pytest.raises(ConfigError, match="sends client 1 another model than client 0"):
            serve_run(carrier, made, tmp_path / "run", member_keys=keys)


TEXTS = ["", "zz", "00", "00" * 20, "00.00.00.00", ".".join(["00" * 32] * 4), "é", "0" * 20000]
NAMES = ["0", "1", "3", "7", "999", "9" * 30, "-1", "", "x", "٣", "²"]


class TestMalformed:
    """A parcel of any form ends the client's part in the round, or the sender's, and nothing else."""

    @pytest.mark.parametrize("step", STEPS[1:])
    def test_of_a_server(self, step: str, tmp_path: Path) -> None:
        server = Server(tmp_path)
        lists = ["0"], ["0", "1", "7"], ["1", "2", "3"], NAMES
        parcels = [dict.fromkeys(names, text) for names in lists for text in TEXTS]
        parcels += [{name: "00"} for name in NAMES]
        for i, parcel in enumerate(parcels[:: 4 if step in ("agree", "reveal") else 1]):
            server.sites = {c: server.started(c) for c in range(4)}
            where: dict[str, Any] = {"round": i}
            if step in ("agree", "reveal"):
                _, vectors = server.masked(range(4), **where)
                if step == "reveal":
                    server.ask(0, "agree", dict.fromkeys(vectors, ""), **where)
            else:
                actual = {c: server.ask(c, "announce", **where)[c] for c in range(4)}
                if step == "mask":
                    server.ask(0, "share", actual, **where)
            asked = dataclasses.replace(order(step, **where), parcel=parcel)
            with pytest.raises(RefusedOrderError):
                server.send(0, asked)

    @pytest.mark.parametrize(
        "key", [bytes(32), b"\x01" + bytes(31), bytes(31), b""], ids=["0", "1", "short", "none"]
    )
    @pytest.mark.parametrize("place", [0, 1])
    def test_a_key_of_another_client_that_gives_no_secret(
        self, key: bytes, place: int, tmp_path: Path
    ) -> None:
        """Client 3 is the server's, and signs a key with which the shared secret is known to all."""
        server = Server(tmp_path)
        actual = {c: server.ask(c, "announce")[c] for c in range(4)}
        content = text_to_bytes(actual[3])[:3]
        content[place] = key
        signature = MemberSigner(KEYS[3]).sign(Session(RUN, 0, 1).message("keys", 3, *content))
        actual[3] = bytes_to_text((*content, signature))
        with pytest.raises(RefusedOrderError, match="the keys of client 3"):
            server.ask(0, "share", actual)

    @pytest.mark.parametrize("content", [b"", b"\xff", bytes(39), bytes(300)], ids=len)
    def test_shares_of_another_size_name_their_client(self, content: bytes, tmp_path: Path) -> None:
        """They are encrypted, so that the server cannot refuse them."""
        member = {c: SumMember(c, 4, Session(RUN, 0, 1), ROSTER, MemberSigner(KEYS[c])) for c in range(4)}
        announced = {c: m.announce() for c, m in member.items()}
        boxes = {c: m.share(announced) for c, m in member.items()}
        box = member[3]._make_cipher(3, 0).encrypt(bytes(12), content, member[3]._associated_data(3, 0))
        actual = {1: boxes[1][0], 2: boxes[2][0], 3: box}
        with pytest.raises(SecureSumError, match="client 3 encrypted something else"):
            member[0].mask(np.zeros(3, np.uint64), actual)

    @pytest.mark.parametrize("step", ["announce", "share", "agree", "reveal"])
    def test_of_a_client(self, step: str, tmp_path: Path) -> None:
        """Client 3 sends anything in the steps of a round; the others have their total."""
        forms: list[Any] = [
            lambda p: {},
            lambda p: {"3": "zz"},
            lambda p: {**p, "9": "00"},
            lambda p: dict.fromkeys(p, ""),
            lambda p: {k: v[:-2] for k, v in p.items()},
            lambda p: {k: v * 40 for k, v in p.items()},
            lambda p: {"٣": "00"},
            lambda p: dict.fromkeys(p, "00" * 20),
        ]

        def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
            if Order.from_json(message.header).step != step or client != 3:
                return None
            actual = carrier.answered(message)
            answer = Answer.from_json(actual.header)
            changed = dataclasses.replace(answer, parcel=forms[t - 1](answer.parcel))
            return [dataclasses.replace(actual, header=changed.to_json())]

        made = make_secure_experiment("fedavg", clients=4, rounds=len(forms))
        _, result = run_secure(made, tmp_path, fault_on_orders(act))
        masked = step in ("agree", "reveal")
        lost = [{} if masked else {"3": "gone"} for _ in forms]
        # a client that lies about a share, in the right form, is not noticed: the shares of three are enough
        assert [set(r.lost) for r in result.rounds[1:]] == [set(x) for x in lost]
        assert is_close(result.run.state.server, run_in_clear(made, lost).state.server, 1e-4)


@pytest.mark.parametrize("liars", [[0], [0, 1, 19]])
def test_some_of_twenty_lie_about_all_their_shares(liars: list[int]) -> None:
    least, tried = min_participants(20), list[int]()
    leader = SumLeader(20, Session(RUN, 0, 1), ROSTER)
    seeds = {owner: bytes([owner]) * 15 for owner in range(20)}
    shares = {o: MaskingClient(o, seed, seed, least).share(20, least) for o, seed in seeds.items()}
    for holder in range(20):
        actual = {owner: shares[owner][holder][0] for owner in seeds}
        lies = {owner: share[:4] + bytes(16) for owner, share in actual.items()}
        leader._shares[holder] = lies if holder in liars else actual

    def is_right(client: int, seed: bytes) -> bool:
        tried.append(client)
        return seed == seeds[client]

    for owner, seed in seeds.items():
        assert leader._rebuild(owner, is_right) == seed
    # who lies is known after the first secret
    assert tried.count(19) == 1


@pytest.mark.parametrize("change", [-(2**32), 2**62, 2**63])
def test_a_weight_that_cannot_be_costs_the_round_and_not_the_run(change: int, tmp_path: Path) -> None:
    """A client's vector is masked, so that its weight shows in the total alone."""
    made = make_secure_experiment("fedavg", clients=4, rounds=2)

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        if (t, client) != (1, 3) or Order.from_json(message.header).step != "mask":
            return None
        actual = carrier.answered(message)
        vector = vector_from_bytes(actual.payload).copy()
        vector[:1] += np.uint64(change % 2**64)
        return [dataclasses.replace(actual, payload=vector.astype("<u8").tobytes())]

    _, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert [set(r.lost) for r in result.rounds[1:]] == [set("0123"), set()]
    assert "a client sent what it may not" in result.rounds[1].lost["0"]
    everyone = dict.fromkeys("0123", "gone")
    assert is_close(result.run.state.server, run_in_clear(made, [everyone, {}]).state.server, 1e-4)
