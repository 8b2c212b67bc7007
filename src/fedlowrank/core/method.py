"""What a federated method is: pure functions of explicit state, and what they are given to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from .choices import check_choices
from .errors import ConfigError
from .key import Key
from .model import Model
from .optimizer import SGD, Optimizer, is_optimizer
from .task import Batch, ClientInfo, Pass, Task
from .tree import Params

__all__ = [
    "Batch",
    "ClientInfo",
    "ClientView",
    "Lengths",
    "Method",
    "OneOf",
    "Pass",
    "Predictor",
    "Reply",
    "Request",
    "ServerView",
    "Task",
    "Trainer",
    "by_examples",
]

S = TypeVar("S")  # server state
C = TypeVar("C")  # state that a client keeps
D = TypeVar("D")  # download: what the server sends to one client
U = TypeVar("U")  # upload: what one client sends back
T = TypeVar("T")


@dataclass(frozen=True)
class Pull:
    """A quadratic added to a loss: strength/2 ‖p - towards‖² - ⟨along, p⟩.

    It enters by its derivative, strength (p - towards) - along, which an engine can make part of a step without ever
    writing a gradient down.

    Attributes:
        strength: at least 0.
        towards: a tree like the one that is trained; None where the strength is 0.
        along: a tree like it, or None for none.
    """

    strength: float = 0.0
    towards: Any = None
    along: Any = None


@dataclass(frozen=True)
class Ragged:
    """Dimensions in which clients differ, and which zeros may fill up: the loss is the same and no gradient reaches them.

    Zero rows of A beside zero columns of B are such: they add nothing to B A, and plain SGD, momentum and Adam leave them 0.

    Attributes:
        start: the dimension, by the path (JSON pointer) of a part of the tree that is trained; all tensors in it have it.
        given: likewise of ``given``, whose first part is ``/0``.
    """

    start: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One call of :meth:`ClientView.train`, whose arguments these are."""

    loss: Callable[..., Tensor]
    start: Any
    name: str
    optimizer: Optimizer
    given: tuple[Any, ...]
    precondition: Callable[..., Any] | None
    prox: Callable[..., Any] | None
    pull: Pull | None = None
    ragged: Ragged = Ragged()


class Trainer(Protocol):
    """How an engine executes what a method asks of a client's data; see :class:`ClientView`."""

    def train(self, request: Request) -> Any:
        """Execute a training pass; returns a tree like its start."""
        ...

    def total(self, statistic: Callable[..., T], params: Any, given: tuple[Any, ...]) -> T:
        """Sum a statistic over the training data."""
        ...

    def steps(self, name: str) -> int:
        """Number of steps in a pass."""
        ...


@dataclass(frozen=True)
class ClientView:
    """What a client may use besides its state: its model's code, its data through verbs, and its randomness.

    Attributes:
        info: what the server knows of it, too.
        task: what is to be learnt.
        model: the code of its model.
        round: counted from 0.
        key: randomness of this client in this round.
        trainer: the engine's way to execute training; use the verbs below.
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
        given: tuple[Any, ...] = (),
        precondition: Callable[..., T] | None = None,
        prox: Callable[..., T] | None = None,
        pull: Pull | None = None,
        ragged: Ragged = Ragged(),
    ) -> T:
        """Train a tree of parameters by one pass over the local training data.

        An engine may execute this for many clients at once. It does so only where the functions are the same code with
        the same captured values; what differs between clients belongs in ``given``.

        Args:
            loss: ``loss(params, batch, *given)``, a scalar; pure; averages by :meth:`Batch.mean`.
            start: where to begin, a tree of floating-point tensors; left untouched.
            name: which of the method's :meth:`Method.passes`.
            optimizer: what to do with the gradient; its schedule is applied by the engine.
            given: further trees for the functions; no gradient is taken for them.
            precondition: ``precondition(grads, params, *given)``, the gradient to use instead, before clipping, weight
                decay and momentum.
            prox: ``prox(params, lr, *given)``, applied after every step with the round's learning rate.
            pull: a quadratic whose derivative is added to the gradient, after ``precondition`` and before the rest.
            ragged: dimensions in which clients differ, so that an engine can train them together all the same.

        Returns:
            The trained tree, detached and contiguous.

        Raises:
            NonFiniteError: if a loss or a parameter becomes NaN or infinite.
        """
        end: T = self.trainer.train(Request(loss, start, name, optimizer, given, precondition, prox, pull, ragged))
        return end

    def total(self, statistic: Callable[..., T], params: Any, *, given: tuple[Any, ...] = ()) -> T:
        """Sum ``statistic(params, batch, *given)``, a tree of tensors, over the local training data, without gradients.

        The statistic must itself sum over the batch by :meth:`Batch.total`.
        """
        return self.trainer.total(statistic, params, given)

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
    """

    task: Task
    round: int
    key: Key


@dataclass(frozen=True)
class Reply(Generic[U]):
    """What one client sent back."""

    client: ClientInfo
    upload: U


class OneOf:
    """In the form of an upload, a part for which a client chooses one of a few forms.

    Args:
        forms: trees, which may hold further choices.
    """

    def __init__(self, *forms: Any) -> None:
        self.forms = forms


@dataclass(frozen=True)
class Lengths:
    """In the form of an upload, a part whose tensors have a common length that is the client's to choose.

    Attributes:
        form: a tree; every dimension of 0 in it stands for that length.
        most: the largest; the smallest is 1.
    """

    form: Any
    most: int


Predictor = Callable[[Any], Tensor]
"""From inputs ``[b, ...]`` to scores ``[b, classes]``."""


@dataclass(frozen=True)
class Method(ABC, Generic[S, C, D, U]):
    """A federated method. Its fields are hyper-parameters; its functions are pure.

    A method is final: it calls shared verbs and inherits from no other method.

    Attributes:
        epochs: E, passes of a client over its own data in a round.
        batch_size: B, examples a local step.
        optimizer: of local training.
    """

    epochs: int = 1
    batch_size: int = 64
    optimizer: Optimizer = SGD(lr=0.01)

    title: ClassVar[str]
    citation: ClassVar[str]
    heterogeneous: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    """Whether ``server_update`` goes over the replies once, so that each can be let go before the next is there."""
    needs_classes: ClassVar[bool] = False
    """Whether it works on class labels or scores, so that it cannot learn a regression."""
    uses_rounds: ClassVar[bool] = False
    """Whether a round depends on the number of all rounds (``task.rounds``), so that a run cannot be extended."""
    at_rest: ClassVar[Mapping[str, Any]] = {}
    """Settings under which a learning rate of 0 changes no model, where the chosen ones would go on shrinking it."""

    def __post_init__(self) -> None:
        check_choices(self)
        for f in fields(self):
            value, optional = getattr(self, f.name), "None" in str(f.type)
            if f.name.endswith("optimizer") and not is_optimizer(value) and not (optional and value is None):
                cls, kind = (value, "the class") if isinstance(value, type) else (type(value), "a")
                raise ConfigError(
                    f"{self.title}: {f.name} is {kind} {cls.__module__}.{cls.__qualname__}; it must be fedlowrank.SGD(lr=...) or "
                    "fedlowrank.AdamW(lr=...), which say how every client steps. An optimizer of torch belongs to one model."
                )
        if self.epochs < 1 or self.batch_size < 1:
            raise ConfigError(
                f"{self.title}: epochs and batch_size must be >= 1; they are {self.epochs} and {self.batch_size}"
            )

    def remarks(self, task: Task) -> list[str]:
        """What a user should know of how the settings fit the task, such as a rank that is not the one asked for."""
        del task
        return []

    def passes(self) -> dict[str, Pass]:
        """Named passes over the local data in one round."""
        return {"local": Pass(self.epochs, self.batch_size)}

    def participants(self, sampled: list[int], everyone: list[int]) -> list[int]:
        """Which clients train in a round, given those that the protocol sampled."""
        del everyone
        return sampled

    @abstractmethod
    def server_init(self, task: Task) -> S:
        """State of the server before the first round; raises TaskError if the method does not fit the task."""

    @abstractmethod
    def client_init(self, task: Task, client: ClientInfo) -> C:
        """State of a client before its first round."""

    @abstractmethod
    def download(self, server: S, client: ClientInfo) -> D:
        """What is sent to this client. Selects; computes nothing costly."""

    @abstractmethod
    def local_update(self, state: C, down: D, view: ClientView) -> tuple[C, U]:
        """The client's box: its next state, and what it sends back."""

    def upload_form(self, expected: U, task: Task) -> Any:
        """The form of an upload: ``expected``, or with :class:`OneOf` and :class:`Lengths` in it where clients may differ.

        A server holds what comes over a network to it (:mod:`fedlowrank.network.validation.uploads`). It may depend on a client's
        architecture, rank and cluster and on the form of what it was sent, and on nothing else, the round included.

        Args:
            expected: what ``local_update`` returns where training changes whatever it is given; only its structure, plain
                values, types and shapes mean something.
            task: what is to be learnt.
        """
        del task
        return expected

    @abstractmethod
    def server_update(self, server: S, replies: Sequence[Reply[U]], view: ServerView) -> S:
        """The server's box, given the replies in the order of client ids.

        A method that :attr:`streams` is given them one by one, as an iterable that can be gone over once, and must go to its end.
        """

    @abstractmethod
    def personal(self, state: C, down: D, view: ClientView) -> Params:
        """Parameters of the whole model this client would use now, for inference and export."""

    def predictor(self, state: C, down: D, view: ClientView) -> Predictor | dict[str, Predictor]:
        """How this client infers: a function of inputs, or several by name, the first being the headline.

        Anything costly is done here once, not in the function, which is called for every chunk of examples.
        """
        params = self.personal(state, down, view)
        return lambda x: view.model.apply(params, x)

    def parts(self, state: C, down: D, view: ClientView) -> dict[str, tuple[dict[str, Any], ...]]:
        """Of each series whose model can be held in fewer numbers than its weights: the parts it is the sum of.

        A part holds each weight as factors, as the entries that are not zero (:class:`fedlowrank.linalg.matricize.Sparse`), or
        dense, and then all its entries count. Measured by :func:`fedlowrank.linalg.matricize.numbers`, exported by
        :mod:`fedlowrank.adapters.deployment`. A series that is not named is a dense model.
        """
        del state, down, view
        return {}

    def routes(self, state: C, down: D, view: ClientView) -> Tensor | None:
        """This client's share of each cluster ``[C]``, adding up to 1, for the record; None if the method has no clusters."""
        del state, down, view
        return None

    def server_model(self, server: S, state: C, view: ClientView) -> Params | None:
        """Parameters of the server's own model, where it is not what clients are sent; None where it is.

        Evaluated on every client's data as the series ``server``; ``state`` is for what only the client has, such as a personal
        head.
        """
        del server, state, view
        return None

    def observed(self, server: S) -> dict[str, dict[str, float]]:
        """Numbers by name to record of the server after a round, such as the weight of each reply; keys are strings."""
        del server
        return {}

    def ranks(self, server: S) -> dict[str, int]:
        """Ranks of the server's low-rank weights by name, for the record; empty if the method has none."""
        del server
        return {}


def by_examples(replies: Sequence[Reply[Any]]) -> list[float]:
    """The weights n_k of FedAvg."""
    return [float(r.client.examples) for r in replies]
