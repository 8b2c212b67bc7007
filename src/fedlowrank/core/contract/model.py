"""The parts of a client's model that a method may use: its code as functions of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from .. import tree
from ..errors import TaskError
from ..key import Key
from ..tree import Params


class Model(Protocol):
    """A model as a method may use it: functions of its parameters, and their split into a body and a head.

    Attributes:
        name: name of the architecture.
        module: the module whose code is used; its own parameters are never trained.
        initial: initial values of the trained parameters, the same for all clients; complex parameters as real
            numbers ``[..., 2]``.
        complex: names of the complex parameters.
        parameter_count: number of parameters, frozen ones included.
        head_name: dotted name of the submodule that is the head, or None without a head.
        cache: values derived from the module and shared by all clients.
    """

    name: str
    module: nn.Module
    initial: Params
    complex: frozenset[str]
    parameter_count: int
    head_name: str | None
    cache: dict[str, Any]

    @property
    def training(self) -> bool:
        """Whether the module is in training mode, as in the steps of a pass."""
        ...

    @property
    def width(self) -> int:
        """Width of the representation, its last dimension; raises TaskError without a head."""
        ...

    def apply(self, params: Params, x: Any) -> Tensor:
        """Scores ``[b, classes]`` of inputs ``[b, ...]``; parameters missing in ``params`` are taken from the module."""
        ...

    def represent(self, params: Params, x: Any) -> Tensor:
        """Representation ``[b, width]`` of inputs ``[b, ...]``."""
        ...

    def head(self, params: Params, r: Tensor) -> Tensor:
        """Scores ``[b, classes]`` of representations ``[b, width]``."""
        ...

    def head_of(self, params: Params) -> Params:
        """Parameters of the head."""
        ...

    def body_of(self, params: Params) -> Params:
        """Parameters of all layers before the head."""
        ...

    def head_layers(self) -> list[nn.Linear]:
        """Linear layers of the head, in order."""
        ...

    def reinitialize(self, key: Key) -> Params:
        """New initial parameters, drawn by the layers' own rules."""
        ...


class EngineModel(Model, Protocol):
    """A model as engines and evaluation use it: also its buffers, its statistics, and properties of its code.

    Implemented by :class:`fedlowrank.models.architecture.Architecture`.

    Attributes:
        example: one input example.
        couples: whether the scores of an example depend on the other examples of its batch.
        buffers: initial values of the buffers that ``forward`` may change.
        factory: the user's function that makes a new module; None if the user gave a module.
    """

    example: Any
    couples: bool
    buffers: Params
    factory: Callable[[], nn.Module] | None

    @property
    def is_standard(self) -> bool:
        """Whether all layers are standard torch layers without hooks."""
        ...

    @property
    def has_hooks(self) -> bool:
        """Whether a hook of a layer runs user code."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens in the vocabulary of a transformers model; None for other models."""
        ...

    def probe(self, x: Any) -> Tensor:
        """Scores of a few inputs with the initial parameters."""
        ...

    def inference_params(self, params: Params) -> Params:
        """Parameters in the module's form, with the client's own statistics and changed buffers."""
        ...

    def with_local_statistics(self, chunks: Callable[[], Iterator[Any]], owner: str = "") -> EngineModel:
        """Model of a client for inference, whose batch normalizations use the statistics of these inputs."""
        ...

    def with_buffers(self, client_buffers: Params) -> EngineModel:
        """Model of a client whose buffers differ from the initial values."""
        ...

    @property
    def running_statistics(self) -> Params:
        """Current running statistics of batch normalizations if they are exchanged; empty otherwise."""
        ...

    @property
    def changed_buffers(self) -> Params:
        """Buffers that ``forward`` has changed."""
        ...

    def set_buffers(self, values: Params) -> None:
        """Set the values of the client's own buffers."""
        ...


M = TypeVar("M", bound=EngineModel)


def without_data(model: M) -> M:
    """Copy a model for sending: its code and parameters, without any client's data.

    The example is usually a view of a client's data, and pickling a view pickles the whole tensor behind it.
    """
    bare_copy = copy.copy(model)
    bare_copy.example, bare_copy.cache = tree.map_leaves(Tensor.clone, model.example), {}
    if model.factory is not None:
        # the factory may hold anything
        bare_copy.factory = _refuse_to_draw
    return bare_copy


def _refuse_to_draw() -> nn.Module:
    raise TaskError(
        "a worker has no factory of the user's models. Call model.reinitialize in server_init or client_init, which the "
        "process of the simulation calls"
    )
