"""The client registry: which node is which client, and whether it may take part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from torch import Tensor

from ...config.assembly import Shares, assemble
from ...config.experiment import ExperimentConfig
from ...core import tree
from ...core.errors import FedlowrankError
from ...data.dataset import ClientData, Examples
from ...data.federation import Federation
from ...storage.base_files import combine_file_digests, compare_base_files
from ..messages import (
    PROTOCOL_VERSION,
    MessageError,
    Registration,
    RegistrationRequest,
    digest_sections,
    to_one_line,
)
from ..transport import NodeMessage, Response
from .input_columns import describe_other_columns

MAX_REGISTRATION_BYTES = 1 << 20
"""Bytes of a registration."""

MAX_EXAMPLES = 1 << 40
"""Examples of one part of a client's data; a method could not compute with more."""


class UnregisteredNodeError(FedlowrankError):
    """A node that wants to register as a client is rejected."""


class DuplicateClientError(UnregisteredNodeError):
    """Another node is registered as that client."""


class MismatchedClientError(UnregisteredNodeError):
    """A client's examples or base model are of another form than those of the others.

    Attributes:
        notice: the reason for the client, without what the others have.
    """

    def __init__(self, why: str, notice: str) -> None:
        super().__init__(why)
        self.notice = notice


@dataclass(frozen=True)
class ExampleForm:
    """Types and shapes of a client's examples.

    Attributes:
        empty: zero examples.
        classes: names of the classes.
        columns: names of the inputs of a table, or their digest; empty where inputs have no names.
    """

    empty: Examples
    classes: tuple[str, ...]
    columns: tuple[str, ...] = ()

    @classmethod
    def read(cls, payload: bytes) -> ExampleForm:
        """Decode the payload of a registration; raises TreeError, DataError or MessageError."""
        stored = tree.decode(payload)
        try:
            columns = tuple(stored.get("columns", ()))
            form = cls(Examples(stored["x"], stored["y"]), tuple(stored["classes"]), columns)
            form.describe()
        except (LookupError, TypeError, AttributeError) as error:
            raise MessageError(f"the form of the examples cannot be read: {error!r}") from error
        if len(form.empty) or any(type(c) is not str for c in form.classes):
            raise MessageError("the form of the examples holds examples, or classes without names")
        if any(type(c) is not str for c in form.columns):
            raise MessageError("the form of the examples holds inputs without names")
        return form

    def describe(self) -> str:
        """The form as JSON, for comparison and for messages."""
        texts = isinstance(self.empty.x, dict)
        inputs = self.empty.inputs

        def form(t: Tensor) -> str:
            # clients may have texts of different lengths, and pairs of such texts
            if texts and t.ndim in (2, 3):
                return f"{t.dtype} {'pairs ' * (t.ndim == 3)}of tokens"
            return f"{t.dtype} {[*t.shape[1:]]}"

        x = {n: form(t) for n, t in sorted((inputs if isinstance(inputs, dict) else {"x": inputs}).items())}
        form_json: dict[str, Any] = {"inputs": x, "targets": form(self.empty.y), "classes": self.classes}
        if self.columns:
            form_json["columns"] = self.columns
        return json.dumps(form_json).replace("torch.", "")


@dataclass
class RegisteredClient:
    """What a client registered.

    Attributes:
        node: by which it is reached, or None if it is disconnected.
        examples: for training.
        sizes: of its validation and test parts.
        form: of its examples; None if it has not registered since the server was restarted.
        base: digest of each file of its base model; empty without one.
    """

    node: int | None
    examples: int
    sizes: tuple[int, int]
    form: ExampleForm | None = None
    base: Mapping[str, str] = field(default_factory=dict)


class ClientRegistry:
    """The clients of a run.

    Args:
        experiment: the experiment.
        clients: number of clients.
        max_examples: see :class:`fedlowrank.config.sections.network_section.Limits`.
        keys: the client of each node's key; None if keys are not checked.
        examples_ratio: see ``Limits``.
        promised: training examples that each client promised to have; empty if none did.

    Attributes:
        registered: registered clients by number, reachable or not.
        form: of the examples, once :meth:`fix_form` has set it.
        rejections: why a node was rejected.
        permanently_rejected: those of them that are not asked again.
        notices: by node, why its client does not take part, as it is still to be told.
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        clients: int,
        max_examples: int | None = None,
        keys: Mapping[int, int] | None = None,
        examples_ratio: float = 0.0,
        promised: Sequence[int] = (),
    ) -> None:
        self.experiment, self.clients, self.max_examples, self.keys = experiment, clients, max_examples, keys
        self.examples_ratio, self.promised = examples_ratio, promised
        self.form: ExampleForm | None = None
        self.registered: dict[int, RegisteredClient] = {}
        self.rejections: dict[int, str] = {}
        self.permanently_rejected: set[int] = set()
        self.notices: dict[int, str] = {}
        self._sections = digest_sections(experiment.to_dict())
        self._base: Mapping[str, str] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples by which each client is weighted: those it registered, up to :attr:`cap`; else 0."""
        cap, registered = self.cap, self.registered
        return tuple(min(registered[i].examples, cap) if i in registered else 0 for i in range(self.clients))

    @property
    def cap(self) -> int:
        """The most examples by which a client is weighted."""
        if self.promised or not self.examples_ratio or not self.registered:
            return MAX_EXAMPLES
        # the lower median, so that one of two clients cannot raise it
        return max(1, int(self.examples_ratio * median_low(c.examples for c in self.registered.values())))

    def describe_capped_clients(self) -> dict[int, str]:
        """The clients that are weighted by fewer examples than they registered, with the reason."""
        cap = self.cap
        return {
            i: f"client {i} registered {c.examples} examples and is weighted by {cap}, "
            f"{self.examples_ratio:g} times the median (network.limits.examples_ratio); list the promised "
            "counts in network.examples if it really has so many"
            for i, c in sorted(self.registered.items())
            if c.examples > cap
        }

    def find_reachable(self, present: set[int]) -> set[int]:
        """The clients whose node is present."""
        return {i for i, c in self.registered.items() if c.node in present}

    def find_client(self, node: int) -> int | None:
        """The client of a node's key; None if keys are not checked."""
        return None if self.keys is None else self.keys.get(node)

    def describe_node(self, node: int) -> str:
        """How logs call a node: by its client, for whoever knows a node's number can try to speak for it."""
        client = self.find_client(node)
        return f"node {node}" if client is None else f"client {client}"

    def find_majority(self, present: set[int]) -> list[int]:
        """The largest group of reachable clients that share the form of examples and the base model."""
        groups: dict[tuple[str, str], list[int]] = {}
        for client in sorted(self.find_reachable(present)):
            registered = self.registered[client]
            if registered.form is not None:
                groups.setdefault(
                    (registered.form.describe(), combine_file_digests(registered.base)), []
                ).append(client)
        return max(groups.values(), key=len, default=[])

    def fix_form(self, present: set[int]) -> dict[int, str]:
        """Require the majority's form and base model from now on; reject the clients that differ.

        Returns:
            The rejected clients, with the reason.
        """
        majority, rejected = self.find_majority(present), dict[int, str]()
        if not majority:
            return rejected
        first = self.registered[majority[0]]
        self.form, self._base = first.form, first.base
        for i, client in list(self.registered.items()):
            mismatch = None if client.form is None else self._find_mismatch(i, client.form, client.base)
            if mismatch is not None:
                del self.registered[i]
                rejected[i] = to_one_line(str(mismatch), 1000)
                if client.node is not None:
                    self.rejections[client.node] = rejected[i]
                    self.permanently_rejected.add(client.node)
                    self.notices[client.node] = to_one_line(mismatch.notice, 1000)
        return rejected

    def take_notices(self, present: set[int]) -> list[NodeMessage]:
        """Messages to present nodes that say why their clients do not take part; each is given once."""
        notices = {node: why for node, why in self.notices.items() if node in present}
        self.notices = {}
        return [
            NodeMessage(node, "registration", RegistrationRequest(rejection=why).to_json())
            for node, why in sorted(notices.items())
        ]

    def restore(self, rows: Mapping[int, Mapping[str, int]]) -> None:
        """Inverse of :meth:`count_examples`, after a restart of the server; no client has a node yet."""
        for client, row in rows.items():
            self.registered[client] = RegisteredClient(None, row["train"], (row["val"], row["test"]))

    def make_requests(self, present: set[int]) -> list[NodeMessage]:
        """Requests to all present nodes that are not registered or permanently rejected."""
        # a node that left and came back may be another process, or fixed
        self.permanently_rejected &= present
        self.rejections = {n: why for n, why in self.rejections.items() if n in present}
        known = {c.node for c in self.registered.values()}
        return [
            NodeMessage(n, "registration", "{}") for n in sorted(present - self.permanently_rejected - known)
        ]

    def register(self, response: Response, present: set[int]) -> int:
        """Register a node, by its response, as the client whose number is returned.

        Raises:
            UnregisteredNodeError: if the node is rejected; the message says why and what to do.
        """
        try:
            client = self._check_registration(response, present)
        except FedlowrankError as error:
            # lost messages and duplicate clients may be resolved by the next time
            if not response.problem and not isinstance(error, DuplicateClientError):
                self.permanently_rejected.add(response.node)
                notice = error.notice if isinstance(error, MismatchedClientError) else str(error)
                self.notices[response.node] = to_one_line(notice, 1000)
            why = self.rejections[response.node] = to_one_line(str(error), 1000)
            raise UnregisteredNodeError(f"a node was rejected: {why}") from error
        self.rejections.pop(response.node, None)
        return client

    def _check_registration(self, response: Response, present: set[int]) -> int:
        node = response.node
        if response.problem or response.too_large:
            raise UnregisteredNodeError(f"it did not register: {response.problem or response.too_large}")
        if len(response.header) + len(response.payload) > MAX_REGISTRATION_BYTES:
            raise UnregisteredNodeError(f"its registration takes more than {MAX_REGISTRATION_BYTES} bytes")
        registration = Registration.from_json(response.header)
        if wrong := self._find_header_fault(registration, node):
            raise UnregisteredNodeError(wrong)
        form, client = ExampleForm.read(response.payload), registration.client
        if mismatch := self._find_mismatch(client, form, registration.base):
            raise mismatch
        known = self.registered.get(client)
        if known is not None and known.node != node and known.node in present:
            raise DuplicateClientError(
                f"client {client} is connected already; stop the other one, or give this one its own number"
            )
        examples, sizes = registration.examples, registration.sizes
        self.registered[client] = RegisteredClient(node, examples, sizes, form, registration.base)
        return client

    def _find_mismatch(
        self, client: int, form: ExampleForm, base: Mapping[str, str]
    ) -> MismatchedClientError | None:
        """How a client differs from the form and base model that are required, or None."""
        if self.form is None:
            return None
        nameless, expected = (dataclasses.replace(f, columns=()).describe() for f in (form, self.form))
        why, notice = (
            describe_other_columns(form.columns, self.form.columns, names_expected=named)
            for named in (True, False)
        )
        # a table with other columns has often other shapes, too
        if why and (nameless == expected or (form.columns and self.form.columns)):
            return MismatchedClientError(f"client {client} {why}.", f"client {client} {notice}.")
        if form.describe() != self.form.describe():
            described, cure = (
                form.describe()[:300],
                "All must name the same classes and prepare their data alike.",
            )
            return MismatchedClientError(
                f"client {client} has examples of another form: {described}, but the others' are "
                f"{self.form.describe()[:300]}. {cure}",
                f"client {client} has examples of another form than the other clients: {described}. {cure}",
            )
        if different := compare_base_files(base, self._base):
            text = (
                f"client {client} has another base model than the others: {different}. Copy the files of one "
                "machine to all, or load the same revision."
            )
            return MismatchedClientError(text, text)
        return None

    def _find_header_fault(self, registration: Registration, node: int) -> str | None:
        """What is wrong with the header of a registration, or None."""
        client, examples, sizes = registration.client, registration.examples, registration.sizes
        if registration.protocol != PROTOCOL_VERSION:
            return (
                f"client {client} speaks version {registration.protocol} of the messages, this server "
                f"{PROTOCOL_VERSION}: install the same version of fedlowrank on both"
            )
        if not 0 <= client < self.clients:
            return f"it says it is client {client}, but clients go from 0 to {self.clients - 1}"
        if self.keys is not None and (owner := self.find_client(node)) != client:
            whose = "not registered" if owner is None else f"that of client {owner}"
            return f"it says it is client {client}, but its key is {whose}"
        has = f"client {client} says it has {examples} examples"
        if examples < 1 or min(sizes) < 0 or max(examples, *sizes) > MAX_EXAMPLES:
            return f"{has}, and {sizes} to validate and test by"
        if self.max_examples is not None and examples > self.max_examples:
            return f"{has}, above limits.max_examples = {self.max_examples}"
        if self.promised and examples > self.promised[client]:
            return f"{has}, but it promised {self.promised[client]} (network.examples)"
        theirs = registration.sections
        different = sorted(s for s in {*self._sections, *theirs} if self._sections.get(s) != theirs.get(s))
        if different:
            names = (
                s if len(s) < 40 and s.isprintable() else "one with an invalid name" for s in different[:10]
            )
            return (
                f"client {client} has another experiment: section(s) {', '.join(names)} differ from the "
                "server's. Give both the same file and the same overrides; what may differ between machines "
                "belongs in the section [local]."
            )
        return None

    def build_federation(self) -> Federation:
        """The federation as the server sees it: sizes and models of all clients, and no examples.

        Raises:
            FedlowrankError: if no client has registered, or the models do not fit the examples.
        """
        if self.form is None:
            raise UnregisteredNodeError("no client has registered, so the form of the examples is unknown")
        empty = ClientData(self.form.empty, self.form.empty, self.form.empty)
        language = self.experiment.load_language(self.form.classes)
        if language is not None and (different := compare_base_files(language.files, self._base)):
            raise UnregisteredNodeError(
                f"the server has another base model than the clients: {different}. Copy the files of one machine "
                "to all, or load the same revision."
            )
        shares = Shares((empty,) * self.clients, self.form.classes, (), language)
        return assemble(self.experiment, shares, sizes=self.sizes, here=frozenset())

    def update_federation(self, federation: Federation) -> Federation:
        """The federation with the current sizes; the same object if they have not changed."""
        sizes = self.sizes
        if tuple(i.examples for i in federation.infos) == sizes:
            return federation
        infos = [dataclasses.replace(i, examples=n) for i, n in zip(federation.infos, sizes, strict=True)]
        return dataclasses.replace(federation, infos=infos)

    def count_examples(self) -> dict[int, dict[str, int]]:
        """Sizes of the parts of each registered client."""
        return {
            i: {"train": c.examples, "val": c.sizes[0], "test": c.sizes[1]}
            for i, c in self.registered.items()
        }
