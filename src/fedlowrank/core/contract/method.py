"""The contract of a federated method: pure functions of explicit state, and the views passed to them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from torch import Tensor

from ..arguments.bounds import check_bounds
from ..arguments.field_checks import CheckedFields
from ..arguments.switch import refuse_unread_field
from ..errors import ConfigError
from ..key import Key
from ..learning.optimizer import SGD, Optimizer, refuse_keep
from ..tree import Params
from .class_title import inherit_title
from .client_model import ClientModel
from .contribution import Contribution, Mean
from .hook_results import check_function, check_optimizer, check_passes, check_start
from .hook_signatures import check_class
from .model import Model
from .task import ClientInfo, Pass, Task
from .training_request import NO_PADDING, PaddedDimensions, ProximalTerm, Request, Trainer
from .update import Update

S = TypeVar("S")  # server state
C = TypeVar("C")  # state that a client keeps
D = TypeVar("D")  # download: what the server sends to one client
U = TypeVar("U")  # upload: what one client sends back
T = TypeVar("T")


@dataclass(frozen=True)
class Method(CheckedFields, Generic[S, C, D, U]):
    """A federated method. Its fields are hyper-parameters; its functions, the hooks, are pure.

    A method is written for one client and the server; engines execute it for many clients. ``server_init``,
    ``local_update`` and ``server_update`` have no default. Hooks take a state first, then a message (the download, the upload
    or the total), the client, and last the task or a view. The methods of this package call shared functions and inherit
    from no other method; a user's method may.

    Attributes:
        epochs: E, number of epochs of local training in a round.
        batch_size: B, number of examples in a local step.
        optimizer: optimizer of local training.
        drop_last: whether an epoch of local training leaves out an incomplete last batch, as PyTorch's ``DataLoader``
            does; each epoch leaves out other examples. A client with fewer examples than a batch trains on them as
            one batch. The weight of a client stays its number of examples n_k.
        steps: number of local steps in a round, equal for all clients and used instead of epochs; None for epochs. A
            client with few examples sees them several times, in a new order each time.
    """

    epochs: int = 1
    batch_size: int = 64
    optimizer: Optimizer = SGD(lr=0.01)
    drop_last: bool = False
    steps: int | None = None

    title: ClassVar[str]
    """Name of the method, as its paper writes it. A class outside this package that states none is named after its base and
    itself, such as ``FedAvg (mine:Own)``."""
    citation: ClassVar[str] = ""
    """Authors, venue and year, and the arXiv number."""
    bounds: ClassVar[Mapping[str, str]] = {}
    """Bounds of numeric fields, such as ``{"lam": ">= 0"}``; see :func:`fedlowrank.core.arguments.bounds.check_bounds`."""
    heterogeneous: ClassVar[bool] = False
    """Whether clients may have models of different architectures."""
    needs_classes: ClassVar[bool] = False
    """Whether the method needs class labels or their scores, so that it cannot learn a regression."""
    uses_rounds: ClassVar[bool] = False
    """Whether rounds depend on their total number (``task.rounds``), so that a run cannot be extended."""
    couples_examples: ClassVar[bool] = False
    """Whether the loss of a batch is no mean over its examples, so that a batch cannot be split into parts."""
    one_model: ClassVar[bool] = False
    """Whether all clients train and infer with one model, the server's, as they receive it. A server can then average
    the running statistics of its batch normalizations, and one model is evaluated for all clients."""
    keep_refusal: ClassVar[str] = ""
    """Why the state of an optimizer cannot be used in the next round, so that ``optimizer.keep`` is refused; empty if
    it can be used."""
    zero_step_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings with which a learning rate of 0 changes no model, for methods whose penalties act without training."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        inherit_title(cls)

    def __post_init__(self) -> None:
        check_bounds(self, {"epochs": ">= 1", "batch_size": ">= 1", "steps": ">= 1"}, self.title)
        if self.steps is not None:
            refuse_unread_field(
                self, "epochs", self.title, f"with {self.title}.steps = {self.steps}", "leave steps out"
            )
        check_bounds(self, self.bounds, self.title)
        for setting in fields(self) if self.keep_refusal else ():
            refuse_keep(setting.name, getattr(self, setting.name), self.title, self.keep_refusal)

    @classmethod
    def check_class(cls) -> None:
        """Refuse a class with misspelt hooks, hooks that take other arguments, or fields that are no settings."""
        check_class(cls, Method)

    def remarks(self, task: Task) -> list[str]:
        """List what a user should know about the settings on this task, such as a rank other than the one set."""
        return []

    @property
    def main_pass(self) -> Pass:
        """The pass that ``batch_size`` and ``epochs`` or ``steps`` describe."""
        return Pass(self.epochs if self.steps is None else None, self.batch_size, self.steps)

    def passes(self) -> dict[str, Pass]:
        """Passes over the local data in one round, by name."""
        return {"local": self.main_pass}

    def local_passes(self) -> dict[str, Pass]:
        """Return :meth:`passes` with ``drop_last`` applied, as engines execute them. Override :meth:`passes` instead."""
        passes = check_passes(self, self.passes())
        if self.steps is not None and all(p.epochs is not None for p in passes.values()):
            raise ConfigError(
                f"{self.title}.steps = {self.steps} does nothing: none of its passes() reads it. Return self.main_pass "
                "for the pass that it should describe"
            )
        return {n: replace(p, drop_last=p.drop_last or self.drop_last) for n, p in passes.items()}

    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        """Choose the clients that train in a round, by default those that the protocol sampled.

        With central privacy exactly the sampled clients train, because ε is computed for this sampling.

        Args:
            sampled: identifiers of the clients that the protocol sampled.
            available: identifiers of all clients that may train.

        Returns:
            Different identifiers from ``available``.
        """
        return sampled

    @abstractmethod
    def server_init(self, task: Task) -> S:
        """State of the server before the first round; raises TaskError if the method cannot learn the task."""

    def client_init(self, client: ClientInfo, task: Task) -> C:
        """State of a client before its first round; by default a client keeps nothing."""
        return cast(C, None)

    def download(self, server: S, client: ClientInfo) -> D:
        """Message to this client, by default the server's state. It selects and computes nothing costly."""
        return cast(D, server)

    @abstractmethod
    def local_update(self, state: C, down: D, view: ClientView) -> tuple[C, U]:
        """Train one client in one round; returns its next state and its upload."""

    def contribution(self, server: S, upload: U, client: ClientInfo) -> Contribution:
        """Contribution of an upload to the round: dicts and lists of :mod:`fedlowrank.core.contract.contribution` leaves.

        By default it is the upload in a mean weighted by the client's number of training examples n_k.

        Args:
            server: state of the server from which the client's download was made.
            upload: upload of the client.
            client: client that sent the upload.
        """
        return Mean(upload, client.example_count)

    def describe_update(self, down: D, client: ClientInfo, task: Task) -> Update:
        """Describe which part of this client's upload is its update; by default the upload minus the download.

        Both sides call it, the server also in rounds without replies. The result depends on the client's
        architecture, rank and cluster and on its download, but on no upload.

        Args:
            down: download that the client received.
            client: the client.
            task: the task to learn.
        """
        return Update(down)

    @abstractmethod
    def server_update(self, server: S, total: Any, view: ServerView) -> S:
        """Compute the server's next state.

        Args:
            server: current state of the server.
            total: contributions of the round, reduced: a tree of the same structure, with the mean for each Mean
                (None if all weights are zero), the sum for each Sum, and ``{client id: value}`` for each Each. In a
                round without replies this function is not called and the server keeps its state.
            view: the task, and the clients that replied.
        """

    def client_model(self, state: C, down: D, view: ClientView) -> ClientModel:
        """Model that a client would use now; by default its parameters are the download.

        Its parameters are those of the whole model: all that are trained, by name and in their shapes. Costly work belongs
        here and not in a predictor, which is called for every chunk of examples.

        Args:
            state: state of the client.
            down: last download that the client received.
            view: view of the client; its training data may be used, for example for a step of adaptation.
        """
        params: Any = down
        return ClientModel(params)

    def server_model(self, server: S, state: C, view: ClientView) -> Params | None:
        """Parameters of the server's own model if it differs from what clients receive, else None.

        The model is evaluated on every client's data as the series ``server``; ``state`` provides what only the
        client has, such as a personal head.
        """
        return None

    def server_metrics(self, server: S) -> dict[str, dict[str, float]]:
        """Numbers to record about the server after a round, by name and key; ``ranks`` holds its ranks."""
        return {}


@dataclass(frozen=True)
class ClientView:
    """A client's view in one round: the code of its model, its data, and its randomness.

    Methods reach the data through :meth:`train` and :meth:`sum_over_data`.

    Attributes:
        info: record of the client that the server has, too.
        task: the task to learn.
        model: code of the client's model.
        round: index of the round, from 0.
        key: key of this client's randomness in this round.
        trainer: object by which the engine executes training; call the functions below instead.
    """

    info: ClientInfo
    task: Task
    model: Model
    round: int
    key: Key
    trainer: Trainer

    def train(
        self,
        loss: Callable[..., Tensor],
        start: T,
        name: str,
        optimizer: Optimizer,
        *,
        constants: tuple[Any, ...] = (),
        precondition: Callable[..., T] | None = None,
        prox: Callable[..., T] | None = None,
        proximal_term: ProximalTerm | None = None,
        padded: PaddedDimensions = NO_PADDING,
    ) -> T:
        """Train a tree of parameters by one pass over the local training data.

        An engine may execute this for many clients at once; values that differ between clients belong in
        ``constants``.

        Args:
            loss: pure loss function ``loss(params, batch, *constants)`` that returns a scalar and averages by
                :meth:`.task.Batch.mean`.
            start: initial values, a tree of floating-point tensors; left unchanged.
            name: name of the pass in the method's :meth:`Method.passes`.
            optimizer: optimizer that applies the gradients; the engine applies its schedule.
            constants: further trees passed to the functions; no gradient is taken for them.
            precondition: function ``precondition(grads, params, *constants)`` that returns the gradient to use
                instead, before clipping, weight decay and momentum.
            prox: function ``prox(params, lr, *constants)`` applied after every step with the step's learning rate for
                parameters outside ``optimizer.groups``. With momentum β, a penalty keeps its weight λ if the
                threshold is lr λ / (1 - β). Half-precision parameters are passed in float32, and a step with its prox
                is rounded once.
            proximal_term: quadratic whose derivative is added to the gradient, after ``precondition`` and before
                clipping, weight decay and momentum.
            padded: dimensions in which clients may differ and still train together, such as the LoRA rank.

        Returns:
            The trained tree, detached and contiguous.

        Raises:
            NonFiniteError: if a loss or a parameter becomes NaN or infinite.
            TaskError: if one of the functions takes other arguments or returns other shapes, if ``start`` holds a number
                or a tensor without a gradient, or if the optimizer is none of this package.
        """
        check_start(start)
        check_optimizer(optimizer)
        check_function("loss", loss, ("params", "batch"), constants)
        if precondition is not None:
            check_function("precondition", precondition, ("grads", "params"), constants)
        if prox is not None:
            check_function("prox", prox, ("params", "lr"), constants)
        end: T = self.trainer.train(
            Request(loss, start, name, optimizer, constants, precondition, prox, proximal_term, padded)
        )
        return end

    def sum_over_data(
        self, statistic: Callable[..., T], params: Any, *, constants: tuple[Any, ...] = ()
    ) -> T:
        """Sum ``statistic(params, batch, *constants)``, a tree, over the training data, without gradients.

        The statistic must itself sum over the batch by :meth:`.task.Batch.sum`. Half-precision sums are returned in
        float32.
        """
        check_function("statistic", statistic, ("params", "batch"), constants)
        return self.trainer.sum_over_data(statistic, params, constants)

    def steps(self, name: str) -> int:
        """Number of optimizer steps that :meth:`train` takes in the named pass."""
        return self.trainer.steps(name)


@dataclass(frozen=True)
class ServerView:
    """The server's view in one round: the task, the clients that replied, and its randomness.

    Attributes:
        task: the task to learn.
        round: index of the round, from 0.
        key: key of the server's randomness in this round.
        replied: clients whose replies contributed to the total, in the order of their identifiers.
        planned: planned number of clients in a round, given where the number of replies is private.
        unseen: identifiers of clients that never train.
    """

    task: Task
    round: int
    key: Key
    replied: Sequence[ClientInfo] = ()
    planned: float | None = None
    unseen: frozenset[int] = frozenset()

    @property
    def trainable(self) -> list[ClientInfo]:
        """Clients that can train, including those absent from the round: those that a mean over all clients counts."""
        return [c for c in self.task.clients if c.id not in self.unseen]

    @property
    def share(self) -> float:
        """Share of the clients that can train whose replies contributed to the round."""
        count = len(self.replied) if self.planned is None else self.planned
        return count / (len(self.task.clients) - len(self.unseen))


AnyMethod: TypeAlias = Method[Any, Any, Any, Any]
"""A method with any types of states and messages."""
