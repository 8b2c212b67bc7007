"""Who is there: the nodes that said which client they are, and were believed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config.assembly import Shares, assemble
from ..config.experiment import ExperimentConfig
from ..core import tree
from ..core.errors import FedlowrankError
from ..data.dataset import ClientData, Examples
from ..data.federation import Federation
from .messages import PROTOCOL, Hello, MessageError, plain, sections
from .transport import Delivery, Parcel
from .validation.norms import low_median

MOST_BYTES = 1 << 20
"""Of an introduction."""

MOST_EXAMPLES = 1 << 40
"""Of one part of a client's data; a number beyond it is none that a method could calculate with."""


class StrangerError(FedlowrankError):
    """A node that says it is a client is not admitted."""


class TakenError(StrangerError):
    """Another node is that client."""


@dataclass(frozen=True)
class Form:
    """What examples look like, without any.

    Attributes:
        none: no examples.
        classes: names of the classes.
    """

    none: Examples
    classes: tuple[str, ...]

    @classmethod
    def read(cls, body: bytes) -> Form:
        """From the bytes of an introduction; raises TreeError, DataError or MessageError."""
        stored = tree.decode(body)
        try:
            found = cls(Examples(stored["x"], stored["y"]), tuple(stored["classes"]))
            found.describe()
        except (LookupError, TypeError, AttributeError) as error:
            raise MessageError(f"the form of the examples is none: {error!r}") from error
        if len(found.none) or any(type(c) is not str for c in found.classes):
            raise MessageError("the form of the examples holds examples, or classes without names")
        return found

    def describe(self) -> str:
        """For comparison and for messages."""
        texts = isinstance(self.none.x, dict)
        none = self.none.inputs
        x = none if isinstance(none, dict) else {"x": none}

        def form(t: Tensor) -> str:
            # the longest text of a client is its own affair
            return f"{t.dtype} {[*t.shape[1:]] if not texts or t.ndim != 2 else 'of tokens'}"

        inputs, y = {n: form(t) for n, t in sorted(x.items())}, form(self.none.y)
        return json.dumps({"inputs": inputs, "targets": y, "classes": self.classes}).replace("torch.", "")


@dataclass
class Member:
    """A client that was admitted.

    Attributes:
        node: by which it is reached, or None if it has gone.
        examples: for training.
        sizes: of its validation and test parts.
        form: of its examples; None of one that has not introduced itself to this server's process.
        base: digest of its base model, or "".
    """

    node: int | None
    examples: int
    sizes: tuple[int, int]
    form: Form | None = None
    base: str = ""


class Roster:
    """The clients of a run by identifier.

    Args:
        made: the experiment.
        clients: how many it has.
        max_examples: that a client may claim to have, or None for any number.
        keys: which client a node's key belongs to, where nodes are known by their keys; None where nobody checks.
        examples_ratio: see :class:`.trust.Limits`.
        promised: training examples that each client promised to have; none if nobody did.

    Attributes:
        members: those that were admitted, reachable or not.
        form: of the examples, once that is settled.
        strangers: why a node was turned away.
        settled: those of them that are not asked again, for what was wrong stays wrong.
    """

    def __init__(
        self,
        made: ExperimentConfig,
        clients: int,
        max_examples: int | None = None,
        keys: Mapping[int, int] | None = None,
        examples_ratio: float = 0.0,
        promised: Sequence[int] = (),
    ) -> None:
        self.made, self.clients, self.max_examples, self.keys = made, clients, max_examples, keys
        self.examples_ratio, self.promised = examples_ratio, promised
        self.form: Form | None = None
        self.members: dict[int, Member] = {}
        self.strangers: dict[int, str] = {}
        self.settled: set[int] = set()
        self._sections = sections(made.to_dict())
        self._base = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """By how many examples each client is weighted: those it registered up to :attr:`cap`, 0 if it did not register."""
        cap = self.cap
        return tuple(
            min(self.members[i].examples, cap) if i in self.members else 0 for i in range(self.clients)
        )

    @property
    def cap(self) -> int:
        """The most examples by which a client is weighted."""
        if self.promised or not self.examples_ratio or not self.members:
            return MOST_EXAMPLES
        # the lower median, so that one of two clients cannot raise it
        return max(1, int(self.examples_ratio * low_median(m.examples for m in self.members.values())))

    def capped(self) -> dict[int, str]:
        """The clients that are weighted by fewer examples than they registered, with the reason."""
        cap = self.cap
        return {
            i: f"client {i} registered {m.examples} examples and is weighted by {cap}, {self.examples_ratio:g} times the median "
            "(network.limits.examples_ratio); list the promised counts in network.examples if it really has so many"
            for i, m in sorted(self.members.items())
            if m.examples > cap
        }

    def reachable(self, present: set[int]) -> set[int]:
        """The clients whose node is there."""
        return {i for i, m in self.members.items() if m.node in present}

    def usual(self, present: set[int]) -> list[int]:
        """The clients that are there and have examples of the form, and the base model, that most of them have."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for client in sorted(self.reachable(present)):
            member = self.members[client]
            if member.form is not None:
                kinds.setdefault((member.form.describe(), member.base), []).append(client)
        return max(kinds.values(), key=len, default=[])

    def settle(self, present: set[int]) -> None:
        """From now on all must be like most of those that are there; who is not is turned away."""
        usual = self.usual(present)
        if not usual:
            return
        self.form, self._base = self.members[usual[0]].form, self.members[usual[0]].base
        for client, member in list(self.members.items()):
            wrong = None if member.form is None else self._misfit(client, member.form, member.base)
            if wrong is not None:
                del self.members[client]
                if member.node is not None:
                    self.strangers[member.node] = plain(wrong, 1000)
                    self.settled.add(member.node)

    def leave(self, client: int) -> None:
        """A client's node is gone. What it said of itself stays known, and a node that is found there is asked again."""
        self.members[client].node = None

    def remember(self, rows: Mapping[str, Mapping[str, int]]) -> None:
        """Take in what :meth:`rows` knew before the server was restarted; none of them has a node yet."""
        for client, row in rows.items():
            self.members[int(client)] = Member(None, int(row["train"]), (int(row["val"]), int(row["test"])))

    def questions(self, present: set[int]) -> list[Parcel]:
        """Who are you, to every reachable node of which nobody knows."""
        # a node that went away and came back may be another process, or have mended what was wrong
        self.settled &= present
        self.strangers = {n: why for n, why in self.strangers.items() if n in present}
        known = {m.node for m in self.members.values()}
        return [Parcel(node, "hello", "{}") for node in sorted(present - self.settled - known)]

    def admit(self, delivery: Delivery, present: set[int]) -> int:
        """Take in a client by what it says of itself.

        Args:
            delivery: its introduction.
            present: the nodes that can be reached now.

        Returns:
            Its identifier.

        Raises:
            StrangerError: if it does not belong here; the message says why and what to do.
        """
        try:
            client = self._admitted(delivery, present)
        except FedlowrankError as error:
            # what the carrier lost, and a place that is taken, may be otherwise the next time
            if not delivery.problem and not isinstance(error, TakenError):
                self.settled.add(delivery.node)
            why = plain(str(error), 1000)
            self.strangers[delivery.node] = why
            raise StrangerError(f"a node was turned away: {why}") from error
        self.strangers.pop(delivery.node, None)
        return client

    def _admitted(self, delivery: Delivery, present: set[int]) -> int:
        if delivery.problem or delivery.too_large:
            raise StrangerError(f"it did not say who it is: {delivery.problem or delivery.too_large}")
        if len(delivery.words) + len(delivery.body) > MOST_BYTES:
            raise StrangerError(f"its introduction takes more than {MOST_BYTES} bytes")
        hello = Hello.from_json(delivery.words)
        self._check_words(hello, delivery.node)
        form = Form.read(delivery.body)
        wrong = self._misfit(hello.client, form, hello.base)
        if wrong is not None:
            raise StrangerError(wrong)
        known = self.members.get(hello.client)
        if known is not None and known.node != delivery.node and known.node in present:
            raise TakenError(
                f"client {hello.client} is here already; stop the other one, or give this one its own number"
            )
        self.members[hello.client] = Member(delivery.node, hello.examples, hello.sizes, form, hello.base)
        return hello.client

    def _misfit(self, client: int, form: Form, base: str) -> str | None:
        """What sets a client apart from the others, once that is settled."""
        if self.form is None:
            return None
        if form.describe() != self.form.describe():
            return (
                f"client {client} has examples of another form: {form.describe()[:300]}, but the others' are "
                f"{self.form.describe()[:300]}. All must name the same classes and prepare their data alike."
            )
        if base != self._base:
            return (
                f"client {client} has another base model: its weights have the digest {base[:64] or 'none'}, the others' "
                f"{self._base[:64] or 'none'}. Give it the same files."
            )
        return None

    def _check_words(self, hello: Hello, node: int) -> None:
        if hello.protocol != PROTOCOL:
            raise StrangerError(
                f"client {hello.client} speaks version {hello.protocol} of the messages, this server {PROTOCOL}: install "
                "the same version of fedlowrank on both"
            )
        if not 0 <= hello.client < self.clients:
            raise StrangerError(
                f"it says it is client {hello.client}, but clients go from 0 to {self.clients - 1}"
            )
        if self.keys is not None and self.keys.get(node) != hello.client:
            owner = self.keys.get(node)
            whose = "nobody's" if owner is None else f"that of client {owner}"
            raise StrangerError(f"it says it is client {hello.client}, but its key is {whose}")
        counts = (hello.examples, *hello.sizes)
        if hello.examples < 1 or min(counts) < 0 or max(counts) > MOST_EXAMPLES:
            raise StrangerError(
                f"client {hello.client} says it has {hello.examples} examples, and {hello.sizes} to validate and test by"
            )
        if self.max_examples is not None and hello.examples > self.max_examples:
            raise StrangerError(
                f"client {hello.client} says it has {hello.examples} examples, above limits.max_examples = {self.max_examples}"
            )
        if self.promised and hello.examples > self.promised[hello.client]:
            raise StrangerError(
                f"client {hello.client} says it has {hello.examples} examples, but it promised "
                f"{self.promised[hello.client]} (network.examples)"
            )
        wrong = sorted(
            s for s in {*self._sections, *hello.sections} if self._sections.get(s) != hello.sections.get(s)
        )
        if wrong:
            named = ", ".join(
                s if len(s) < 40 and s.isprintable() else "one without a decent name" for s in wrong[:10]
            )
            raise StrangerError(
                f"client {hello.client} has another experiment: section(s) {named} differ from the server's. Give both the "
                "same file and the same overrides."
            )

    def federation(self) -> Federation:
        """The federation as the server sees it: everybody's size and model, nobody's examples.

        Raises:
            FedlowrankError: if nobody is there, or the models do not fit the examples.
        """
        if self.form is None:
            raise StrangerError(
                "no client has introduced itself, so nobody knows what the examples look like"
            )
        none = ClientData(self.form.none, self.form.none, self.form.none)
        language = self.made.load_language(self.form.classes)
        if language is not None and language.loaded.digest != self._base:
            raise StrangerError(
                f"the clients' base model has the digest {self._base}, the server's {language.loaded.digest}: they are "
                "different weights. Give all the same files."
            )
        shares = Shares((none,) * self.clients, self.form.classes, (), language)
        return assemble(self.made, shares, sizes=self.sizes, here=frozenset())

    def updated(self, federation: Federation) -> Federation:
        """The federation with what has been learnt of the clients' sizes since."""
        if tuple(i.examples for i in federation.infos) == self.sizes:
            return federation
        infos = [
            dataclasses.replace(i, examples=n) for i, n in zip(federation.infos, self.sizes, strict=True)
        ]
        return dataclasses.replace(federation, infos=infos)

    def rows(self) -> dict[int, dict[str, Any]]:
        """Sizes of the parts of each client that is here."""
        return {
            i: {"train": m.examples, "val": m.sizes[0], "test": m.sizes[1]} for i, m in self.members.items()
        }
