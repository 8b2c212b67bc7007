"""The client registry: the client of each node, and whether it may take part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
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
from ...data.text.text_formats import TEXT_FORMATS
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
"""Largest size of a registration in bytes."""

MAX_EXAMPLES = 1 << 40
"""Largest number of examples in one part of a client's data; a method could not compute with more."""


class UnregisteredNodeError(FedlowrankError):
    """A node that wants to register as a client is rejected."""


class DuplicateClientError(UnregisteredNodeError):
    """Another node is already registered as the client."""


class MismatchedClientError(UnregisteredNodeError):
    """A client's examples or base model differ in form from those of the others.

    Attributes:
        notice: the reason as the client may read it, without the others' values.
    """

    def __init__(self, reason: str, notice: str) -> None:
        super().__init__(reason)
        self.notice = notice


@dataclass(frozen=True)
class ExampleForm:
    """Dtypes and shapes of a client's examples.

    Attributes:
        empty: zero examples with these dtypes and shapes.
        classes: names of the classes.
        columns: names of the inputs of a table, or their digest; empty if inputs have no names.
        prompt_format: format of the prompts of a language model; empty without prompts.
    """

    empty: Examples
    classes: tuple[str, ...]
    columns: tuple[str, ...] = ()
    prompt_format: str = ""

    @classmethod
    def read(cls, payload: bytes) -> ExampleForm:
        """Decode the payload of a registration; raises TreeError, DataError or MessageError."""
        table = tree.decode(payload)
        try:
            columns = tuple(table.get("columns", ()))
            prompt_format = table.get("format", "")
            if type(prompt_format) is not str or prompt_format not in ("", "chat", *TEXT_FORMATS):
                raise MessageError("the form of the examples holds an unknown format of prompts")
            form = cls(Examples(table["x"], table["y"]), tuple(table["classes"]), columns, prompt_format)
            form.describe()
        except (LookupError, TypeError, AttributeError) as error:
            raise MessageError(f"the form of the examples cannot be read: {error!r}") from error
        if len(form.empty) or any(type(c) is not str for c in form.classes):
            raise MessageError("the form of the examples holds examples, or classes without names")
        if any(type(c) is not str for c in form.columns):
            raise MessageError("the form of the examples holds inputs without names")
        return form

    def describe(self) -> str:
        """Describe the form as JSON, for comparison and for messages."""
        is_text = isinstance(self.empty.x, dict)
        inputs = self.empty.inputs

        def form(t: Tensor) -> str:
            # clients may have texts of different lengths, and pairs of such texts
            if is_text and t.ndim in (2, 3):
                return f"{t.dtype} {'pairs ' * (t.ndim == 3)}of tokens"
            return f"{t.dtype} {[*t.shape[1:]]}"

        x = {n: form(t) for n, t in sorted((inputs if isinstance(inputs, dict) else {"x": inputs}).items())}
        form_json: dict[str, Any] = {"inputs": x, "targets": form(self.empty.y), "classes": self.classes}
        if self.columns:
            form_json["columns"] = self.columns
        if self.prompt_format:
            form_json["format"] = self.prompt_format
        return json.dumps(form_json).replace("torch.", "")


@dataclass
class RegisteredClient:
    """The registration of a client.

    Attributes:
        node: identifier of the node of the client, or None if it is disconnected.
        examples: number of training examples.
        sizes: numbers of validation and test examples.
        form: form of the examples; None if the client has not registered since the server was restarted.
        base: digest of each file of the base model, by name; empty without one.
    """

    node: int | None
    examples: int
    sizes: tuple[int, int]
    form: ExampleForm | None = None
    base: Mapping[str, str] = field(default_factory=dict)


def describe_late_client(client_id: int) -> str:
    """The reason why a client that joins at the end of a run, or later, takes no part."""
    return f"the run was over before client {client_id} took part, so it gets no model"


class ClientRegistry:
    """The clients of a run.

    Args:
        experiment: experiment of the run.
        client_count: number of clients.
        max_examples: largest number of training examples; see :class:`fedlowrank.config.sections.network_section.Limits`.
        keys: client of each node's key, by node; None if keys are not checked.
        examples_ratio: bound on the weight of a client relative to the median; see ``Limits``.
        promised_examples: numbers of training examples that the clients promised to have; empty if none did.
        excluded: round after which the run went on without an excluded client, by client; None for none.
        members: clients that took part in a run that is over; None for a run that is not.

    Attributes:
        registered: registered clients by identifier, reachable or not.
        form: form of the examples, once :meth:`fix_form` has set it.
        rejections: the reason why a node was rejected, by node.
        permanently_rejected: rejected nodes that are not asked again.
        notices: the reason why a client does not take part, by node, if the client has not been told yet.
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        client_count: int,
        max_examples: int | None = None,
        keys: Mapping[int, int] | None = None,
        examples_ratio: float = 0.0,
        promised_examples: Sequence[int] = (),
        excluded: Mapping[int, int] | None = None,
        members: Collection[int] | None = None,
    ) -> None:
        self.experiment, self.clients, self.max_examples, self.keys = (
            experiment,
            client_count,
            max_examples,
            keys,
        )
        self.examples_ratio, self.promised = examples_ratio, promised_examples
        self.excluded: Mapping[int, int] = excluded or {}
        self.members = members
        self.form: ExampleForm | None = None
        self.registered: dict[int, RegisteredClient] = {}
        self.rejections: dict[int, str] = {}
        self.permanently_rejected: set[int] = set()
        self.notices: dict[int, str] = {}
        self._sections = digest_sections(experiment.to_dict())
        self._base: Mapping[str, str] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples by which each client is weighted: those it registered, up to :attr:`cap`; 0 if it did not."""
        cap, registered_clients = self.cap, self.registered
        return tuple(
            min(registered_clients[i].examples, cap) if i in registered_clients else 0
            for i in range(self.clients)
        )

    @property
    def cap(self) -> int:
        """Largest number of examples by which a client is weighted."""
        if self.promised or not self.examples_ratio or not self.registered:
            return MAX_EXAMPLES
        # the lower median, so that one of two clients cannot raise it
        return max(1, int(self.examples_ratio * median_low(c.examples for c in self.registered.values())))

    def describe_capped_clients(self) -> dict[int, str]:
        """Clients whose weight is less than the number of examples that they registered, with the reason."""
        cap = self.cap
        return {
            i: f"client {i} registered {c.examples} examples and is weighted by {cap}, "
            f"{self.examples_ratio:g} times the median (network.limits.examples_ratio); list the promised "
            "counts in network.examples if it really has so many"
            for i, c in sorted(self.registered.items())
            if c.examples > cap
        }

    def describe_exclusion(self, client_id: int) -> str | None:
        """The reason why an operator's exclusion keeps a client out; None if it is not excluded."""
        if (t := self.excluded.get(client_id)) is None:
            return None
        return f"client {client_id} is excluded: the run went on without it after round {t}"

    def find_reachable(self, node_ids: set[int]) -> set[int]:
        """Clients whose nodes are among the given ones."""
        return {i for i, c in self.registered.items() if c.node in node_ids}

    def find_client(self, node_id: int) -> int | None:
        """Client of a node's key; None if keys are not checked."""
        return None if self.keys is None else self.keys.get(node_id)

    def describe_node(self, node_id: int) -> str:
        """Name a node in logs by its client, because anyone who knows a node's number can try to act for it."""
        client_id = self.find_client(node_id)
        return f"node {node_id}" if client_id is None else f"client {client_id}"

    def find_majority(self, node_ids: set[int]) -> list[int]:
        """Find the largest group of reachable clients that share the form of examples and the base model."""
        groups: dict[tuple[str, str], list[int]] = {}
        for client_id in sorted(self.find_reachable(node_ids)):
            registered_client = self.registered[client_id]
            if registered_client.form is not None:
                groups.setdefault(
                    (registered_client.form.describe(), combine_file_digests(registered_client.base)), []
                ).append(client_id)
        return max(groups.values(), key=len, default=[])

    def fix_form(self, node_ids: set[int]) -> dict[int, str]:
        """Require the majority's form and base model from now on; reject the clients that differ.

        Returns:
            The reason for each rejected client, by client.
        """
        majority_ids, reasons = self.find_majority(node_ids), dict[int, str]()
        if not majority_ids:
            return reasons
        first_client = self.registered[majority_ids[0]]
        self.form, self._base = first_client.form, first_client.base
        for client_id, client in list(self.registered.items()):
            mismatch = (
                None if client.form is None else self._find_mismatch(client_id, client.form, client.base)
            )
            if mismatch is not None:
                del self.registered[client_id]
                reasons[client_id] = to_one_line(str(mismatch), 1000)
                if client.node is not None:
                    self.rejections[client.node] = reasons[client_id]
                    self.permanently_rejected.add(client.node)
                    self.notices[client.node] = to_one_line(mismatch.notice, 1000)
        return reasons

    def take_notices(self, node_ids: set[int]) -> list[NodeMessage]:
        """Make messages to present nodes with the reason why their clients do not take part; each is returned once."""
        notices = {node: reason for node, reason in self.notices.items() if node in node_ids}
        self.notices = {}
        return [
            NodeMessage(node, "registration", RegistrationRequest(rejection=reason).to_json())
            for node, reason in sorted(notices.items())
        ]

    def restore(self, rows: Mapping[int, Mapping[str, int]]) -> None:
        """Inverse of :meth:`count_examples`, after a restart of the server; no client has a node yet."""
        for client_id, row in rows.items():
            self.registered[client_id] = RegisteredClient(None, row["train"], (row["val"], row["test"]))

    def make_requests(self, node_ids: set[int]) -> list[NodeMessage]:
        """Make requests to all present nodes that are neither registered nor permanently rejected."""
        # a node that left and came back may be another process, or may be fixed
        self.permanently_rejected &= node_ids
        self.rejections = {n: reason for n, reason in self.rejections.items() if n in node_ids}
        registered_nodes = {c.node for c in self.registered.values()}
        return [
            NodeMessage(n, "registration", "{}")
            for n in sorted(node_ids - self.permanently_rejected - registered_nodes)
        ]

    def register(self, response: Response, node_ids: set[int]) -> int:
        """Register the client of a node from its response, and return the client's identifier.

        Raises:
            UnregisteredNodeError: if the node is rejected; the message gives the reason and what to do.
        """
        try:
            client_id = self._check_registration(response, node_ids)
        except FedlowrankError as error:
            # lost messages and duplicate clients may be resolved by the next time
            if not response.problem and not isinstance(error, DuplicateClientError):
                self.permanently_rejected.add(response.node)
                notice = error.notice if isinstance(error, MismatchedClientError) else str(error)
                self.notices[response.node] = to_one_line(notice, 1000)
            reason = self.rejections[response.node] = to_one_line(str(error), 1000)
            raise UnregisteredNodeError(f"a node was rejected: {reason}") from error
        self.rejections.pop(response.node, None)
        return client_id

    def _check_registration(self, response: Response, node_ids: set[int]) -> int:
        node_id = response.node
        if response.problem or response.too_large:
            raise UnregisteredNodeError(f"it did not register: {response.problem or response.too_large}")
        if len(response.header) + len(response.payload) > MAX_REGISTRATION_BYTES:
            raise UnregisteredNodeError(f"its registration takes more than {MAX_REGISTRATION_BYTES} bytes")
        registration = Registration.from_json(response.header)
        if fault := self._find_header_fault(registration, node_id):
            raise UnregisteredNodeError(fault)
        form, client_id = ExampleForm.read(response.payload), registration.client
        if mismatch := self._find_mismatch(client_id, form, registration.base):
            raise mismatch
        registered_client = self.registered.get(client_id)
        if (
            registered_client is not None
            and registered_client.node != node_id
            and registered_client.node in node_ids
        ):
            raise DuplicateClientError(
                f"client {client_id} is connected already; stop the other one, or give this one its own number"
            )
        examples, sizes = registration.examples, registration.sizes
        self.registered[client_id] = RegisteredClient(node_id, examples, sizes, form, registration.base)
        return client_id

    def _find_mismatch(
        self, client_id: int, form: ExampleForm, base: Mapping[str, str]
    ) -> MismatchedClientError | None:
        """Describe how a client differs from the required form and base model; None if it does not."""
        if self.form is None:
            return None
        if "" in (form.prompt_format, self.form.prompt_format):
            # the folder of a client that was made by an earlier release has no format
            form = dataclasses.replace(form, prompt_format=self.form.prompt_format)
        nameless_form, expected_form = (
            dataclasses.replace(f, columns=()).describe() for f in (form, self.form)
        )
        reason, notice = (
            describe_other_columns(form.columns, self.form.columns, names_expected=is_named)
            for is_named in (True, False)
        )
        # a table with other columns often has other shapes, too
        if reason and (nameless_form == expected_form or (form.columns and self.form.columns)):
            return MismatchedClientError(f"client {client_id} {reason}.", f"client {client_id} {notice}.")
        if form.prompt_format != self.form.prompt_format:
            text = (
                f"client {client_id} writes prompts in the format {form.prompt_format!r} and the other clients in "
                f"{self.form.prompt_format!r}, for which their rows call under language.format = 'auto'. Set language.format "
                "in the experiment of the server and all clients, or give all clients rows of one form."
            )
            return MismatchedClientError(text, text)
        if form.describe() != self.form.describe():
            description, advice = (
                form.describe()[:300],
                "All must name the same classes and prepare their data alike.",
            )
            return MismatchedClientError(
                f"client {client_id} has examples of another form: {description}, but the others' are "
                f"{self.form.describe()[:300]}. {advice}",
                f"client {client_id} has examples of another form than the other clients: {description}. {advice}",
            )
        if differing_files := compare_base_files(base, self._base):
            text = (
                f"client {client_id} has another base model than the others: {differing_files}. Copy the files of one "
                "machine to all, or load the same revision."
            )
            return MismatchedClientError(text, text)
        return None

    def _find_header_fault(self, registration: Registration, node_id: int) -> str | None:
        """Describe what is wrong with the header of a registration; None if it is valid."""
        client_id, examples, sizes = registration.client, registration.examples, registration.sizes
        if registration.protocol != PROTOCOL_VERSION:
            return (
                f"client {client_id} speaks version {registration.protocol} of the messages, this server "
                f"{PROTOCOL_VERSION}: install the same version of fedlowrank on both"
            )
        if registration.client_count != self.clients:
            return (
                f"client {client_id} computes with {registration.client_count} clients, the server with {self.clients}: noise "
                "and secure sums depend on the number. Set network.clients (or partition.clients) alike on the server "
                "and on all clients."
            )
        if not 0 <= client_id < self.clients:
            return f"it says it is client {client_id}, but clients go from 0 to {self.clients - 1}"
        if self.keys is not None and (owner := self.find_client(node_id)) != client_id:
            owner_text = "not registered" if owner is None else f"that of client {owner}"
            return f"it says it is client {client_id}, but its key is {owner_text}"
        if (exclusion := self.describe_exclusion(client_id)) is not None:
            return exclusion
        if self.members is not None and client_id not in self.members:
            return describe_late_client(client_id)
        claim = f"client {client_id} says it has {examples} examples"
        if examples < 1 or min(sizes) < 0 or max(examples, *sizes) > MAX_EXAMPLES:
            return f"{claim}, and {sizes} to validate and test by"
        if self.max_examples is not None and examples > self.max_examples:
            return f"{claim}, above limits.max_examples = {self.max_examples}"
        if self.promised and examples > self.promised[client_id]:
            return f"{claim}, but it promised {self.promised[client_id]} (network.examples)"
        client_sections = registration.sections
        differing_sections = sorted(
            s for s in {*self._sections, *client_sections} if self._sections.get(s) != client_sections.get(s)
        )
        if differing_sections:
            names = (
                s if len(s) < 40 and s.isprintable() else "one with an invalid name"
                for s in differing_sections[:10]
            )
            return (
                f"client {client_id} has another experiment: section(s) {', '.join(names)} differ from the "
                "server's. Give both the same file and the same overrides; what may differ between machines "
                "belongs in the section [local]."
            )
        return None

    def build_federation(self) -> Federation:
        """Build the federation as the server knows it: sizes and models of all clients, and no examples.

        Raises:
            FedlowrankError: if no client has registered, or the models do not fit the examples.
        """
        if self.form is None:
            raise UnregisteredNodeError("no client has registered, so the form of the examples is unknown")
        empty_data = ClientData(self.form.empty, self.form.empty, self.form.empty)
        language = self.experiment.load_language(self.form.classes, self.form.prompt_format)
        if language is not None and (differing_files := compare_base_files(language.files, self._base)):
            raise UnregisteredNodeError(
                f"the server has another base model than the clients: {differing_files}. Copy the files of one machine "
                "to all, or load the same revision."
            )
        shares = Shares((empty_data,) * self.clients, self.form.classes, (), language)
        return assemble(self.experiment, shares, sizes=self.sizes, local_ids=frozenset())

    def update_federation(self, federation: Federation) -> Federation:
        """Return the federation with the current sizes; the same object if they have not changed."""
        sizes = self.sizes
        if tuple(i.example_count for i in federation.infos) == sizes:
            return federation
        infos = [
            dataclasses.replace(i, example_count=n) for i, n in zip(federation.infos, sizes, strict=True)
        ]
        return dataclasses.replace(federation, infos=infos)

    def count_examples(self) -> dict[int, dict[str, int]]:
        """Numbers of examples in the parts of each registered client's data."""
        return {
            i: {"train": c.examples, "val": c.sizes[0], "test": c.sizes[1]}
            for i, c in self.registered.items()
        }
