"""What a method may use of a client's model: its code as functions of parameters."""

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
    """What a method may use of a model: functions of its parameters, and their split into a body and a head.

    Attributes:
        name: of the architecture.
        module: its code; its own parameters are never trained.
        initial: initial values of the trained parameters, the same for all clients; complex ones as real
            numbers ``[..., 2]``.
        complex: names of the complex parameters.
        parameter_count: number of parameters, frozen ones included.
        head_name: dotted name of the submodule that is the head, or None.
        cache: values derived from the module, kept for all clients.
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
        """Scores ``[b, classes]`` of inputs ``[b, ...]``; missing parameters are the module's own."""
        ...

    def represent(self, params: Params, x: Any) -> Tensor:
        """Representation ``[b, width]`` of inputs ``[b, ...]``."""
        ...

    def head(self, params: Params, r: Tensor) -> Tensor:
        """Scores ``[b, classes]`` of representations ``[b, width]``."""
        ...

    def head_of(self, params: Params) -> Params:
        """The parameters of the head."""
        ...

    def body_of(self, params: Params) -> Params:
        """The parameters of everything before the head."""
        ...

    def head_layers(self) -> list[nn.Linear]:
        """The linear layers of the head, in order."""
        ...

    def reinitialize(self, key: Key) -> Params:
        """Other initial parameters, drawn by the layers' own rules."""
        ...


class EngineModel(Model, Protocol):
    """What engines and evaluation use of a model beside that: its buffers, its statistics, and how it is coded.

    Implemented by :class:`fedlowrank.models.architecture.Architecture`.

    Attributes:
        example: one input.
        couples: whether the scores of an example depend on the batch that it is in.
        buffers: initial values of the buffers that ``forward`` may change.
        factory: makes the module anew, of the user; None if the user gave a module.
    """

    example: Any
    couples: bool
    buffers: Params
    factory: Callable[[], nn.Module] | None

    @property
    def is_standard(self) -> bool:
        """Whether all layers are standard ones of torch without hooks."""
        ...

    @property
    def has_hooks(self) -> bool:
        """Whether user code runs in a hook of a layer."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Tokens that a model of transformers knows; None for others."""
        ...

    def probe(self, x: Any) -> Tensor:
        """Scores of a few inputs by the initial parameters."""
        ...

    def inference_params(self, params: Params) -> Params:
        """The parameters as the module holds them, with the client's own statistics and changed buffers."""
        ...

    def with_local_statistics(self, chunks: Callable[[], Iterator[Any]], owner: str = "") -> EngineModel:
        """The model of a client that infers: batch normalizations use statistics of these inputs."""
        ...

    def with_buffers(self, client_buffers: Params) -> EngineModel:
        """The model of a client whose buffers have other values than the initial ones."""
        ...

    @property
    def running_statistics(self) -> Params:
        """Running statistics of batch normalizations as they are now, where they travel; else none."""
        ...

    @property
    def changed_buffers(self) -> Params:
        """Buffers that ``forward`` has changed."""
        ...

    def set_buffers(self, values: Params) -> None:
        """Exchange values of the client's own buffers."""
        ...


M = TypeVar("M", bound=EngineModel)


def without_data(model: M) -> M:
    """A copy of the model that can be sent elsewhere: its code and parameters, and no client's data.

    The example is mostly a view of a client's data, and a view is pickled with all that it is a view of.
    """
    bare_copy = copy.copy(model)
    bare_copy.example, bare_copy.cache = tree.map_leaves(Tensor.clone, model.example), {}
    if model.factory is not None:
        # it may hold anything
        bare_copy.factory = _refuse_to_draw
    return bare_copy


def _refuse_to_draw() -> nn.Module:
    raise TaskError(
        "a worker has no factory of the user's models. Call model.reinitialize in server_init or client_init, which the "
        "process of the simulation calls"
    )
