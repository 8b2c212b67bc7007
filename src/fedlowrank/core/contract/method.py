"""The contract of a federated method: pure functions of explicit state, and the views they work with."""

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
from .contribution import Mean
from .hook_results import check_function, check_passes, check_start
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
        epochs: E, epochs of local training in a round.
        batch_size: B, examples a local step.
        optimizer: of local training.
        drop_last: whether an epoch of local training leaves out an incomplete last batch, as PyTorch's
            ``DataLoader`` does; other examples each time. A client with fewer examples than a batch trains on
            them as one batch. The weight of a client stays its number of examples n_k.
        steps: local steps of a round instead of epochs, as many at every client; None for epochs. A client with few
            examples sees them several times, in a new order each time.
    """

    epochs: int = 1
    batch_size: int = 64
    optimizer: Optimizer = SGD(lr=0.01)
    drop_last: bool = False
    steps: int | None = None

    title: ClassVar[str]
    """Its name, as its paper writes it. A class outside this package that states none is called after its base and itself,
    such as ``FedAvg (mine:Own)``."""
    citation: ClassVar[str] = ""
    """Authors, venue and year, and the arXiv number."""
    bounds: ClassVar[Mapping[str, str]] = {}
    """Of numeric fields, such as ``{"lam": ">= 0"}``; see :func:`fedlowrank.core.arguments.bounds.check_bounds`."""
    heterogeneous: ClassVar[bool] = False
    """Whether clients may have models of different architectures."""
    needs_classes: ClassVar[bool] = False
    """Whether it works on class labels or scores, so that it cannot learn a regression."""
    uses_rounds: ClassVar[bool] = False
    """Whether rounds depend on their total number (``task.rounds``), so that a run cannot be extended."""
    couples_examples: ClassVar[bool] = False
    """Whether the loss of a batch is no mean over its examples, so that a batch cannot be taken in parts."""
    one_model: ClassVar[bool] = False
    """Whether all clients train and infer by one model, the server's, as they are sent it. A server can then average
    the running statistics of its batch normalizations, and one model is evaluated for all clients."""
    keep_refusal: ClassVar[str] = ""
    """Why the state of an optimizer means nothing in the next round, so that ``optimizer.keep`` is refused; empty where
    it does."""
    zero_step_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings under which a learning rate of 0 changes no model, where penalties act without training."""

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
        """What a user should know of the settings on this task, such as a rank other than the one set."""
        return []

    @property
    def main_pass(self) -> Pass:
        """The pass that ``epochs`` or ``steps``, and ``batch_size`` describe."""
        return Pass(self.epochs if self.steps is None else None, self.batch_size, self.steps)

    def passes(self) -> dict[str, Pass]:
        """Named passes over the local data in one round."""
        return {"local": self.main_pass}

    def local_passes(self) -> dict[str, Pass]:
        """:meth:`passes` with ``drop_last`` applied; what engines execute. Override :meth:`passes`."""
        passes = check_passes(self, self.passes())
        if self.steps is not None and all(p.epochs is not None for p in passes.values()):
            raise ConfigError(
                f"{self.title}.steps = {self.steps} does nothing: none of its passes() reads it. Return self.main_pass "
                "for the pass that it should describe"
            )
        return {n: replace(p, drop_last=p.drop_last or self.drop_last) for n, p in passes.items()}

    def participants(self, sampled: list[int], everyone: list[int]) -> list[int]:
        """Which clients train in a round, by default the clients that the protocol sampled."""
        return sampled

    @abstractmethod
    def server_init(self, task: Task) -> S:
        """State of the server before the first round; raises TaskError if the task does not suit."""

    def client_init(self, client: ClientInfo, task: Task) -> C:
        """State of a client before its first round; by default a client keeps nothing."""
        return cast(C, None)

    def download(self, server: S, client: ClientInfo) -> D:
        """What is sent to this client, by default the server's state. Selects; computes nothing costly."""
        return cast(D, server)

    @abstractmethod
    def local_update(self, state: C, down: D, view: ClientView) -> tuple[C, U]:
        """Local training of one client in one round: its next state, and what it sends back."""

    def contribution(self, server: S, upload: U, client: ClientInfo) -> Any:
        """What an upload adds to the round: dicts and lists of :mod:`fedlowrank.core.contract.contribution` leaves.

        By default the upload in a mean weighted by the client's number of training examples n_k.

        Args:
            server: its state, as the client's download was made from it.
            upload: of the client.
            client: who sent it.
        """
        return Mean(upload, client.example_count)

    def describe_update(self, down: D, client: ClientInfo, task: Task) -> Update:
        """What in an upload of this client is its update; by default the upload minus the download.

        Both sides call it, the server in rounds without replies, too: it depends on the client's architecture, rank
        and cluster and on what the client was sent, and on no upload.

        Args:
            down: what the client was sent.
            client: who it is.
            task: what is to be learnt.
        """
        return Update(down)

    @abstractmethod
    def server_update(self, server: S, total: Any, view: ServerView) -> S:
        """The server's next state.

        Args:
            server: its state.
            total: the contributions of the round reduced: a tree of the same structure, with the mean for
                each Mean (None if all weights are zero), the sum for each Sum, and ``{client id: value}`` for
                each Each. Without any reply this function is not called and the server keeps its state.
            view: the task, and who replied.
        """

    def client_model(self, state: C, down: D, view: ClientView) -> ClientModel:
        """The model that a client would use now; by default the download is its parameters.

        Costly work is done here once and not in a predictor, which is called for every chunk of examples.

        Args:
            state: of the client.
            down: what it was sent last.
            view: of the client; its training data may be used, as for a step of adaptation.
        """
        params: Any = down
        return ClientModel(params)

    def server_model(self, server: S, state: C, view: ClientView) -> Params | None:
        """Parameters of the server's own model, where it is not what clients are sent; None where it is.

        Evaluated on every client's data as the series ``server``; ``state`` is for what only the client has,
        such as a personal head.
        """
        return None

    def server_metrics(self, server: S) -> dict[str, dict[str, float]]:
        """Numbers to record of the server after a round, by name and key; ``ranks`` holds its ranks."""
        return {}


@dataclass(frozen=True)
class ClientView:
    """What a client may use besides its state: the code of its model, its data, and its randomness.

    It reaches its data through :meth:`train` and :meth:`sum_over_data`.

    Attributes:
        info: what the server knows of it, too.
        task: what is to be learnt.
        model: the code of its model.
        round: counted from 0.
        key: randomness of this client in this round.
        trainer: the engine's way to execute training; call the functions below.
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

        An engine may execute this for many clients at once; what differs between clients belongs in ``constants``.

        Args:
            loss: ``loss(params, batch, *constants)``, a scalar; pure; averages by :meth:`Batch.mean`.
            start: where to begin, a tree of floating-point tensors; left untouched.
            name: which of the method's :meth:`Method.passes`.
            optimizer: what to do with the gradient; its schedule is applied by the engine.
            constants: further trees for the functions; no gradient is taken for them.
            precondition: ``precondition(grads, params, *constants)``, the gradient to use instead, before
                clipping, weight decay and momentum.
            prox: ``prox(params, lr, *constants)``, applied after every step with its learning rate, that of
                parameters outside ``optimizer.groups``. With momentum β, a penalty keeps its weight λ if the
                threshold is lr λ / (1 - β). Of half precision all of it is in float32, and a step with its prox
                is rounded once.
            proximal_term: a quadratic whose derivative is added to the gradient, after ``precondition`` and
                before the rest.
            padded: dimensions in which clients differ, such as the LoRA rank, and are trained together all the same.

        Returns:
            The trained tree, detached and contiguous.

        Raises:
            NonFiniteError: if a loss or a parameter becomes NaN or infinite.
            TaskError: if one of the functions takes other arguments, or a number in ``start`` is no tensor.
        """
        check_start(start)
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

        The statistic must itself sum over the batch by :meth:`Batch.sum`. Sums of half precision come in
        float32.
        """
        check_function("statistic", statistic, ("params", "batch"), constants)
        return self.trainer.sum_over_data(statistic, params, constants)

    def steps(self, name: str) -> int:
        """Number of optimizer steps that :meth:`train` takes in the pass of that name."""
        return self.trainer.steps(name)


@dataclass(frozen=True)
class ServerView:
    """What a server may use besides its state.

    Attributes:
        task: what is to be learnt.
        round: counted from 0.
        key: randomness of the server in this round.
        replied: clients whose replies contributed to the total, in the order of their identifiers.
        planned: number of clients in a round as it is planned, where the number of replies is private.
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
        """The clients that can train, absentees of the round included: those that a mean over all clients counts."""
        return [c for c in self.task.clients if c.id not in self.unseen]

    @property
    def share(self) -> float:
        """Share of the clients that can train whose replies contributed."""
        count = len(self.replied) if self.planned is None else self.planned
        return count / (len(self.task.clients) - len(self.unseen))


AnyMethod: TypeAlias = Method[Any, Any, Any, Any]
"""A method, whatever its states and messages are."""
