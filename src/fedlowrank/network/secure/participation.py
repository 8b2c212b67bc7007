"""A client's part in the secure sums of a run: one vector for each round, and no round twice.

A server that goes back to an earlier checkpoint, or that repeats a round without one client, would get two totals whose
difference is that client's contribution; the same holds for a server that starts another run. So a client masks only one
vector for each round number, whatever became of it, and only in one run: a round that is repeated is lost. The records
are on disk before the vector leaves. The record of rounds is beside the site's ledger of privacy
(:mod:`fedlowrank.trust.privacy.site_ledger`), because the client's folder may be removed or replaced:

STATE/masked/RUN-CLIENT.json    the last round, counted from 1, in which the client masked a vector
FOLDER/masked.json              the run in which this folder masks; it stays when the folder is forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from ...core.errors import CheckpointError
from ...storage.digest import read_sealed, write_sealed
from ...trust.privacy.site_ledger import open_state
from ...trust.secure_sums import Vector
from ..messages import Order, RefusedOrderError
from .leader import vector_to_bytes
from .member import Announcement, SecureSumError, SumMember
from .signing import MemberKeys, MemberSigner, Session

RECORD_FILE = "masked.json"
"""Name of the file in a client's folder."""


def bytes_to_text(values: Any) -> str:
    """Encode bytes, or several of them, as text."""
    return values.hex() if isinstance(values, bytes) else ".".join(v.hex() for v in values)


def text_to_bytes(text: str) -> list[bytes]:
    """Inverse of :func:`bytes_to_text`; raises SecureSumError for any other text."""
    try:
        return [bytes.fromhex(hex_digits) for hex_digits in text.split(".")]
    except ValueError as error:
        raise SecureSumError("a part of a secure sum's message cannot be read") from error


def unpack_announcement(text: str) -> Announcement:
    """Keys, commitment and signature of an announcement; raises SecureSumError if there are not four parts."""
    fields = text_to_bytes(text)
    if len(fields) != 4:
        raise SecureSumError("an announcement does not have four parts")
    return fields[0], fields[1], fields[2], fields[3]


def parcel_by_client(parcel: dict[str, str]) -> dict[int, str]:
    """A parcel by clients' identifiers; raises SecureSumError if a key is no identifier."""
    if not all(key.isdecimal() and len(key) < 4 for key in parcel):
        raise SecureSumError("a part of a secure sum's message names no client")
    return {int(key): text for key, text in parcel.items()}


def to_parcel(values: Mapping[int, Any]) -> dict[str, str]:
    """Encode bytes by client, or several of them for each, as they are sent."""
    return {str(client_id): bytes_to_text(value) for client_id, value in sorted(values.items())}


def from_parcel(parcel: dict[str, str]) -> dict[int, bytes]:
    """Decode the bytes by client in a parcel; raises SecureSumError if it cannot be read."""
    return {client_id: text_to_bytes(text)[0] for client_id, text in parcel_by_client(parcel).items()}


class Participation:
    """One client in the secure sums of its runs.

    Args:
        client_id: identifier of the client.
        client_count: number of all clients.
        folder: folder of the client.
        keys: public keys of all clients.
        signer: signer with the client's private key.
    """

    def __init__(
        self,
        client_id: int,
        client_count: int,
        folder: Path,
        keys: MemberKeys,
        signer: MemberSigner,
    ) -> None:
        self._client, self._clients, self._folder = client_id, client_count, folder
        self._keys, self._signer = keys, signer
        self._member: SumMember | None = None

    def step(self, order: Order) -> dict[str, str]:
        """Take a step other than masking; returns the parcel to send.

        Raises:
            RefusedOrderError: if the client does not take the step.
        """
        try:
            return self._step(order)
        except SecureSumError as error:
            self._member = None
            raise RefusedOrderError(f"secure sum of round {order.round + 1}: {error}") from error

    def require(self, order: Order) -> None:
        """Refuse to train for a sum in which this client takes no part; raises RefusedOrderError."""
        try:
            self._find_member(order)
            self._refuse_twice(order)
        except SecureSumError as error:
            raise RefusedOrderError(f"secure sum of round {order.round + 1}: {error}") from error

    def mask(self, order: Order, make_vector: Callable[[], Vector], download_digest: str = "") -> bytes:
        """Mask the client's contribution to the round.

        Args:
            order: order with the encrypted shares of the others.
            make_vector: function that makes the vector of the contribution.
            download_digest: digest of the download; clients with another digest are in no sum with this one.

        Raises:
            RefusedOrderError: if the client masks no vector in this round.
            CheckpointError: if the disk is full; nothing was masked then.
        """
        try:
            boxes = from_parcel(order.parcel)
            member, record, contribution = (
                self._find_member(order),
                self._record_path(order.run),
                make_vector(),
            )
            # another node of this client may be asked at the same time
            with FileLock(f"{record}.lock"):
                self._refuse_twice(order)
                write_sealed(self._folder / RECORD_FILE, {"run": order.run})
                write_sealed(record, {"round": order.round + 1})
            return vector_to_bytes(member.mask(contribution, boxes, download_digest.encode()))
        except SecureSumError as error:
            self._member = None
            raise RefusedOrderError(f"secure sum of round {order.round + 1}: {error}") from error

    def _step(self, order: Order) -> dict[str, str]:
        if order.step == "announce":
            self._refuse_twice(order)
            session = Session(order.run, order.branch, order.round)
            self._member = SumMember(self._client, self._clients, session, self._keys, self._signer)
            return to_parcel({self._client: self._member.announce()})
        member = self._find_member(order)
        if order.step == "share":
            announcements = {
                c: unpack_announcement(text) for c, text in parcel_by_client(order.parcel).items()
            }
            return to_parcel(member.share(announcements))
        if order.step == "agree":
            return to_parcel({self._client: member.agree(list(parcel_by_client(order.parcel)))})
        return to_parcel(member.reveal(from_parcel(order.parcel)))

    def _find_member(self, order: Order) -> SumMember:
        """The client in this round's sum; raises SecureSumError if its secrets are gone, as after a restart."""
        session = Session(order.run, order.branch, order.round)
        if self._member is None or self._member.session != session:
            raise SecureSumError("this client takes no part: it was started again, or left out before")
        return self._member

    def _record_path(self, run: str) -> Path:
        return open_state("masked") / f"{run}-{self._client}.json"

    def _refuse_twice(self, order: Order) -> None:
        run_record, round_record = self._folder / RECORD_FILE, self._record_path(order.run)
        if run_record.exists() and (run := read_sealed(run_record).get("run")) != order.run:
            raise SecureSumError(
                f"this client has masked vectors in the run {run}, and masks none in another one: the totals of two "
                "runs may differ by what one client sent. Start it by `fedlowrank join` with another --folder"
            )
        if not round_record.exists():
            return
        last_round = read_sealed(round_record).get("round")
        if type(last_round) is not int:
            raise CheckpointError(f"{round_record} is damaged: it has no round")
        if order.round + 1 <= last_round:
            raise SecureSumError(
                f"this client has masked a vector in round {last_round}, and masks none of that round or an earlier one again"
            )
