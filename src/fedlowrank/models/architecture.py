"""A model's code as functions of its parameters, split into a representation and a head."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import FedlowrankError, SingleValueError, TaskError
from ..core.key import Key
from ..core.tree import Params, map_leaves
from .complex_parameters import as_real, complex_names, with_complex
from .fingerprint import as_dense, describe_layers, digest_frozen
from .module_copy import copy_module
from .packed_weights import count_entries, is_packed
from .placement import is_placed
from .standard import (
    channels_last,
    count_hooks,
    find_other_layer,
    has_hooks,
    is_standard,
    remove_hooks,
    takes_any_layout,
)
from .stateless import SavedSlots, restore_slots, unchanged
from .statistics.local_statistics import LocalStatistics, current_statistics, is_training_pass
from .statistics.normalization import (
    FunctionalModule,
    batch_normalizations,
    frozen_normalizations,
    refuse_instance_statistics,
)
from .statistics.pooled_statistics import Chunks

logger = logging.getLogger(__name__)

_PROBE = Key(("probe",))

# Maximum number of combinations of types of named inputs that are tried.
_MAX_TRIED_TYPES = 64


class Architecture:
    """The code of a model; parameters are given at every call, as a dict by name.

    A parameter that requires no gradient belongs to the code: it is never trained, copied, stored or sent, and all
    clients share the one tensor.

    The model is ``head(represent(x))``: ``head`` is the submodule of that name and ``represent`` is everything before
    it. Any module whose forward ends in a named submodule can be split in this way; a module without a head can still
    be trained by methods that need none.

    Args:
        name: name of the architecture.
        module: code of the model; its present parameters become :attr:`initial`.
        example: one input ``[1, ...]``, or a dict of such inputs, to find the representation's width and to check the
            split.
        head: dotted name of the submodule that is the head. None: the attribute ``head_name`` of the module if it has
            one, else ``"head"`` if there is such a submodule, else no head; see also :meth:`choose_head`.

    Attributes:
        name: name of the architecture.
        module: code of the model. It is put into evaluation mode where it is called outside of training.
        initial: initial values of the parameters that can be trained; complex ones as real numbers ``[..., 2]``.
        complex: names of the complex parameters.
        parameter_count: number of all parameters, including frozen ones; a complex number counts as two.
        layers: description of each layer when the architecture was made, one line each; see :mod:`.fingerprint`.
        readout: function that computes scores from the model's outputs and inputs, ``readout(outputs_of, x)`` with a
            function ``outputs_of(x)``, or None if the outputs are the scores.
        autocast: type in which matrices are multiplied, such as ``torch.bfloat16``, or None for that of the tensors.
        factory: user's function that makes the module anew; None if the user gave a module.
        pass_trainer: trainer that takes the steps of a pass (:class:`fedlowrank.training.trainer.PassTrainer`), or
            None for this package's own.
        couples: whether a batch is normalized by itself, so that padding would change its examples' scores.
        running: whether batch normalizations use and change their running statistics as in PyTorch; see
            :meth:`with_running_statistics`.
        frozen: batch normalizations that the module keeps in evaluation mode.
        statistics: names of the running statistics of batch normalizations, which are local; see
            :mod:`.statistics.normalization`.
        buffers: initial values of all other buffers that ``forward`` may change; each client keeps its own.

    Raises:
        TaskError: if the head does not exist or the forward does not end in it, if an InstanceNorm keeps statistics,
            or if a parameter has a hook.
    """

    def __init__(self, name: str, module: nn.Module, example: Any, head: str | None = None) -> None:
        # whether a pass trains, once the mode is known; copies share the module and therefore this dict
        self._mode: dict[str, bool] = {}
        with unchanged(module):
            self._inspect(name, module, example, head)
        self._mode.clear()

    def _inspect(self, name: str, module: nn.Module, example: Any, head: str | None) -> None:
        """Analyze the module and check that it can be used."""
        self.name = name
        # described before the module runs, because a forward pass may leave something in attributes
        self.layers = describe_layers(module)
        self._frozen_versions = _versions_of_frozen(module)
        self.module = module.eval()
        modules = dict(module.named_modules())
        refuse_instance_statistics(name, module)
        self.frozen = frozen_normalizations(module)
        self._backward_slots: SavedSlots = []
        self.running = False
        self._code = self._function()
        self.statistics = self._code.names
        self.buffers = self._initial_buffers()
        self._current_buffers: Params | None = None
        self._local: LocalStatistics | None = None
        self.cache: dict[str, Any] = {}
        self._changes_arguments = not self.is_standard or any(
            getattr(m, "inplace", False) for m in modules.values()
        )
        self._takes_any_layout = takes_any_layout(module)
        self.couples = not self.frozen.issuperset(batch_normalizations(module).values())
        _refuse_parameter_hooks(name, module)
        trainable_parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not trainable_parameters and any(True for _ in module.parameters()):
            raise TaskError(
                f"model {name}: all its parameters are frozen (requires_grad=False), so nothing can be learnt"
            )
        self.initial: Params = {
            n: as_real(p.detach()).clone().contiguous() for n, p in trainable_parameters.items()
        }
        if is_placed(module):
            # on one device, to which a copy may be moved
            self.initial = {n: p.cpu() for n, p in self.initial.items()}
        self.complex = complex_names(module)
        self.parameter_count = sum(map(count_entries, module.parameters()))
        self.autocast: torch.dtype | None = None
        self.readout: Callable[[Callable[[Any], Tensor], Any], Tensor] | None = None
        self.pass_trainer: Any = None
        self.factory: Callable[[], nn.Module] | None = None
        self._library_hooks: int | None = None
        is_named = head is not None or hasattr(module, "head_name")
        if head is None:
            declared_head = getattr(module, "head_name", None)
            head = declared_head if declared_head is not None else "head" if "head" in modules else None
        if head is not None and (head not in modules or head == ""):
            raise TaskError(
                f"model {name}: there is no submodule {head!r} to be its head; it has {sorted(modules)[1:]}"
            )
        self.head_name = head
        self.example = map_leaves(torch.clone, example)
        self._width = 0
        self._no_head = ""
        if head is None:
            return
        try:
            self._use_head(head)
        except TaskError as error:
            if is_named:
                raise
            # a layer that is only called "head"; methods that need a head report this reason
            self.head_name, self._no_head = None, str(error)

    def _use_head(self, head: str) -> None:
        """Split the module before a submodule; raise TaskError if it cannot be split there."""
        modules = dict(self.module.named_modules())
        self.head_name = head
        self._head = modules[head]
        head_ids = {id(p) for p in self._head.parameters()}
        body_ids = {
            id(p)
            for n, m in modules.items()
            if n.split(".")[: head.count(".") + 1] != head.split(".")
            for p in m.parameters(recurse=False)
        }
        if head_ids & body_ids:
            raise TaskError(
                f"model {self.name}: its head {head!r} shares a parameter with the rest, so it cannot be "
                "split there"
            )
        self._split()
        self._check_split()

    def choose_head(self, output_count: int) -> bool:
        """Choose the ``nn.Linear`` in which the forward ends as the head, if the user names none.

        It must compute ``output_count`` values, be trained and have trained parameters before it. A module whose
        attribute ``head_name`` is None keeps having no head.

        Args:
            output_count: number of classes, or of target values.

        Returns:
            Whether a head was chosen.
        """
        if self.head_name is not None or hasattr(self.module, "head_name"):
            return False
        name, layer, _ = self._last_operation(self.example)
        if not name or type(layer) is not nn.Linear or layer.out_features != output_count:
            return False
        head_names = {n for n in self.initial if n.startswith(f"{name}.")}
        if not head_names or head_names == self.initial.keys():
            return False
        try:
            with unchanged(self.module):
                self._use_head(name)
        except (TaskError, RuntimeError, TypeError, ValueError, IndexError):
            # the layer is called twice or shares a weight; methods that need a head ask the user for one
            self.head_name = None
            return False
        return True

    def _function(
        self, skipped_name: str | None = None, submodule: nn.Module | None = None
    ) -> FunctionalModule:
        """Make a function of the module, or of a part of it."""
        module = self.module if submodule is None else submodule
        return FunctionalModule(module, skipped_name, self.frozen, self._backward_slots, self.running)

    def _split(self) -> None:
        """Make functions of the part before the head and of the head."""
        if self.head_name is not None:
            self._head = self.module.get_submodule(self.head_name)
            self._body = self._function(self.head_name)
            self._head_code = self._function(submodule=self._head)

    def _initial_buffers(self) -> Params:
        # standard layers change no buffers except the statistics of batch normalizations
        if self.is_standard:
            return {}
        counters = {n.removesuffix("running_mean") + "num_batches_tracked" for n in self.statistics}
        statistic_names = counters.union(self.statistics)
        return {n: b.detach().clone() for n, b in self.module.named_buffers() if n not in statistic_names}

    def digest_frozen(self) -> str:
        """Digest of the frozen parameters and initial buffers, which belong to the code."""
        return digest_frozen(self.module, self.buffers)

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU if there are none."""
        return next((p.device for p in self.initial.values()), torch.device("cpu"))

    @property
    def is_standard(self) -> bool:
        """Whether the shortcuts of engines are exact now; see :func:`fedlowrank.models.standard.is_standard`."""
        return not self.running and is_standard(self.module)

    @property
    def beyond_standard(self) -> str | None:
        """Reason why :attr:`is_standard` is False, for a message; None if it is True."""
        return (
            "batch normalizations keep running statistics" if self.running else find_other_layer(self.module)
        )

    @property
    def beyond_stacking(self) -> str | None:
        """Reason why the steps of clients cannot be batched, for a message; None if they can.

        They can be batched for standard models, and for transformer models without random numbers and hooks.
        """
        reason = self.beyond_standard
        if self.pass_trainer is not None:
            return "another library's trainer takes the steps"
        if is_placed(self.module):
            return "accelerate has placed the layers of the model"
        if reason is None or self.running or self._library_hooks is None:
            return reason
        if any(getattr(layer, "gradient_checkpointing", False) for layer in self.module.modules()):
            return "gradients are checkpointed, so memory matters more than time"
        if rope_type := self.padded_rope:
            return (
                f"with rope_type {rope_type!r} the scores of a text depend on the longest text of its batch"
            )
        return find_other_layer(self.module, allow_libraries=True)

    @property
    def padded_rope(self) -> str | None:
        """Kind of rotary positions that depend on the longest text of a batch; None for others."""
        types = (getattr(layer, "rope_type", None) for layer in self.module.modules())
        return next((rope_type for rope_type in types if rope_type in ("dynamic", "longrope")), None)

    @property
    def hidden_size(self) -> int | None:
        """Hidden size of each token in a transformer model; None for other models."""
        return self._config_number("hidden_size")

    @property
    def vocabulary(self) -> int | None:
        """Vocabulary size of a transformer model; None for other models."""
        return self._config_number("vocab_size")

    def _config_number(self, name: str) -> int | None:
        number = getattr(getattr(self.module, "config", None), name, None)
        return number if isinstance(number, int) else None

    def declare_repeatable(self) -> None:
        """Declare that a further forward pass changes nothing but torch's generators, as in transformer models.

        An engine may then find the cost of a step without taking it. Hooks that are registered now are the library's own.
        """
        self._library_hooks = count_hooks(self.module)
        self._changes_arguments = False

    @property
    def has_embedding(self) -> bool:
        """Whether a layer looks up rows of a table."""
        return _has_embedding(self.module)

    @property
    def may_run_again(self) -> bool:
        """Whether :meth:`declare_repeatable` was called and the user has registered no hook since."""
        return self._library_hooks is not None and self._library_hooks == count_hooks(self.module)

    @property
    def has_hooks(self) -> bool:
        """Whether user code runs in a hook of a layer."""
        return has_hooks(self.module)

    def with_buffers(self, client_buffers: Params) -> Architecture:
        """Copy the architecture for a client whose buffers differ from the initial ones; only the copy keeps changes."""
        if not self.buffers:
            return self
        model = copy.copy(self)
        # no inference tensors, which a forward pass outside of inference mode could not change
        with torch.inference_mode(False):
            model._current_buffers = {n: client_buffers.get(n, b).clone() for n, b in self.buffers.items()}
        return model

    @property
    def changed_buffers(self) -> Params:
        """Get the buffers that ``forward`` has changed since the beginning."""
        return {
            n: b.detach() for n, b in (self._current_buffers or {}).items() if not _equal(b, self.buffers[n])
        }

    def with_running_statistics(self) -> Architecture:
        """Copy the architecture with running statistics as in PyTorch: buffers that every step in training changes."""
        model = copy.copy(self)
        model.running, model.cache = True, {}
        model._code = model._function()
        model.statistics = model._code.names
        model.buffers = model._initial_buffers()
        model._split()
        return model

    @property
    def running_statistics(self) -> Params:
        """Get the current running statistics with their counters; empty if the architecture does not use them."""
        layers = batch_normalizations(self.module) if self.running else {}
        buffer_ids = {
            id(b) for m in layers.values() if m not in self.frozen for b in m.buffers(recurse=False)
        }
        names = [n for n, b in self.module.named_buffers() if id(b) in buffer_ids]
        return {n: (self._current_buffers or self.buffers)[n] for n in names}

    @property
    def neutral_statistics(self) -> Params:
        """Get statistics with which batch normalizations change nothing: mean 0 and variance 1."""
        return self._code.neutral()

    def set_buffers(self, values: Params) -> None:
        """Set values of a client's own buffers; a copy without a client (:meth:`with_buffers`) has none."""
        if self._current_buffers is None:
            return
        for n, value in values.items():
            dtype = self.buffers[n].dtype
            self._current_buffers[n] = (value if dtype.is_floating_point else value.round()).to(
                dtype, copy=True
            )

    def inference_params(self, params: Params) -> Params:
        """Get the parameters as saved for inference: in the module's form, with own statistics and buffers."""
        changed_buffers = self.changed_buffers
        state_names = self.module.state_dict().keys() if changed_buffers else ()
        state = {
            **self.add_statistics(params),
            **{n: b for n, b in changed_buffers.items() if n in state_names},
        }
        return with_complex(state, self.complex)

    def _check_split(self) -> None:
        def split_error() -> TaskError:
            return TaskError(
                f"model {self.name}: its forward does not end in {self.head_name!r}, so it cannot be split into "
                f"a representation and that head{self._describe_end()}"
            )

        with torch.inference_mode():
            params = self.initial | self._code.neutral()
            expected_scores, example = self.example_scores, self.example
            try:
                # the same draws as in the probe, because the module may also draw in evaluation mode
                with _PROBE.global_generators(self.device):
                    r = self.represent(params, example)
                other_head = {n: p + 1 for n, p in self.head_of(params).items() if p.is_floating_point()}
                with _PROBE.global_generators(self.device):
                    other_representation = self._run(self._body, params | other_head, example)
                split_scores = self.head(params, r)
            except (RuntimeError, TypeError) as error:
                raise split_error() from error
        if r.shape == other_representation.shape and not torch.equal(r, other_representation):
            raise TaskError(
                f"model {self.name}: its forward computes with the values of parameters of its head "
                f"{self.head_name!r} before the head, so it cannot be split into a representation and that head"
            )
        if (
            r.ndim < 2
            or split_scores.shape != expected_scores.shape
            or not torch.allclose(split_scores, expected_scores, rtol=1e-4, atol=1e-5)
            or (not self.is_standard and self._differs_when_split())
        ):
            raise split_error()
        self._width = int(r.shape[-1])

    def _differs_when_split(self) -> bool:
        """Whether the head makes other scores of the representation than the model, in training mode and with other parameters.

        Among the initial ones, a scale of 1 or a gate of 0 hides what follows the head; dropout, noise or a temperature may
        follow it in training alone. If the module cannot train on one example, evaluation mode is tried.
        """
        params = self.nearby_params() | self._code.neutral()
        with unchanged(self.module), torch.no_grad(), warnings.catch_warnings():
            # such as that of a checkpoint without gradients
            warnings.simplefilter("ignore")
            try:
                self.set_training(True)
                try:
                    with _PROBE.global_generators(self.device):
                        expected_scores = self.apply(params, self.example)
                except (RuntimeError, ValueError, TaskError):
                    self.set_training(False)
                    with _PROBE.global_generators(self.device):
                        expected_scores = self.apply(params, self.example)
                with _PROBE.global_generators(self.device):
                    split_scores = self.head(params, self.represent(params, self.example))
            except (RuntimeError, ValueError, TaskError):
                return True
            finally:
                self.set_training(False)
        return split_scores.shape != expected_scores.shape or not torch.allclose(
            split_scores, expected_scores, rtol=1e-4, atol=1e-5, equal_nan=True
        )

    def nearby_params(self) -> Params:
        """Parameters near the initial ones, as after a few steps: 1 % smaller, for loops that end by convergence, with noise."""
        generator = _PROBE.generator()
        return {
            n: 0.99 * p + 0.003 * torch.randn(p.shape, generator=generator).to(p)
            for n, p in self.initial.items()
        }

    def probe(self, x: Any) -> Tensor:
        """Compute scores of a few inputs by the initial parameters, with identity batch normalization.

        The module's buffers, attributes and modes are restored afterwards.
        """
        with unchanged(self.module), _PROBE.global_generators(self.device):
            return self.apply(self.initial | self._code.neutral(), x)

    @cached_property
    def example_scores(self) -> Tensor:
        """Compute scores of the example as in :meth:`probe`."""
        with torch.inference_mode():
            return self.probe(self.example)

    def last_layer(self, x: Any) -> tuple[str, str]:
        """Find the layer and operation that compute the scores of a few inputs, for messages. Hooks of the user do not run.

        Returns:
            The innermost layer, such as ``layer '2' (Softmax)``, or an empty text if ``forward`` itself computes the
            scores; and ``softmax`` or ``sigmoid``, if that is the last operation, or an empty text.
        """
        name, layer, operation = self._last_operation(x)
        location = f"layer {name!r} ({type(layer).__name__})" if name else ""
        return location, "" if operation == "log_softmax" else operation

    def _last_operation(self, x: Any) -> tuple[str, nn.Module | None, str]:
        """Find the name and layer that compute the scores, and the operation as in :meth:`last_layer` or ``log_softmax``."""
        outputs: list[tuple[str, nn.Module, Any]] = []

        def record(name: str) -> Callable[..., None]:
            return lambda layer, _, out: outputs.append((name, layer, out))

        leaves = {
            n: p.detach().requires_grad_(p.is_floating_point() or p.is_complex())
            for n, p in self.initial.items()
        }

        def call(keeps_hooks: bool) -> Tensor:
            with unchanged(self.module), _PROBE.global_generators(self.device), torch.enable_grad():
                if not keeps_hooks:
                    remove_hooks(self.module)
                for name, layer in self.module.named_modules():
                    if name:
                        layer.register_forward_hook(record(name))
                return self.apply(leaves | self._code.neutral(), x)

        try:
            # without the user's hooks, which may count their calls
            scores = call(keeps_hooks=False)
        except Exception:  # noqa: BLE001 - a forward of the user may need what its hooks keep, and fail by anything
            outputs.clear()
            scores = call(keeps_hooks=True)
        name, layer = next(((n, m) for n, m, out in outputs if out is scores), ("", None))
        grad_fn_name = "" if scores.grad_fn is None else scores.grad_fn.name()
        operations = (
            operation
            for operation in ("softmax", "sigmoid", "log_softmax")
            if grad_fn_name == f"{operation.title().replace('_', '')}Backward0"
        )
        return name, layer, next(operations, "")

    def probe_gradient(self, x: Any) -> tuple[Tensor, bool]:
        """Compute scores of a few inputs as in :meth:`probe`, and whether a gradient of them may reach a parameter.

        Training mode decides, because a module may make no graph in inference. A module that cannot train on these
        inputs (one example in a custom normalization, say) may have a gradient.
        """
        leaves = {
            n: p.detach().clone().requires_grad_() for n, p in self.initial.items()
        } | self._code.neutral()
        with torch.no_grad():
            scores = self.probe(x)
        with unchanged(self.module), torch.enable_grad(), _PROBE.global_generators(self.device):
            self.set_training(True)
            try:
                graph_scores = self.apply(leaves, x)
                is_trainable = not _leaves_of(graph_scores).isdisjoint(map(id, leaves.values()))
            except (RuntimeError, ValueError, SingleValueError):
                # the module runs in inference, as the probe has shown, and reads the same parameters
                self.set_training(False)
                graph_scores, is_trainable = self.apply(leaves, x), True
            finally:
                self.set_training(False)
            if any(node.name() == "CheckpointFunctionBackward" for node in _nodes_of(graph_scores)):
                raise TaskError(
                    f"model {self.name}: a checkpoint with use_reentrant=True in its forward hides the gradients of parameters. "
                    "Set use_reentrant=False, as torch.utils.checkpoint advises"
                )
            self._refuse_other_references(graph_scores)
            self._refuse_merged_parameters(leaves, graph_scores, x)
        return scores, is_trainable

    def _refuse_other_references(self, scores: Tensor) -> None:
        """Refuse a forward pass that reads a parameter of the module itself and not the trained one.

        Args:
            scores: scores of a forward pass with other tensors in place of all trained parameters.

        Raises:
            TaskError: if there are such parameters; the message names them.
        """
        leaf_ids = _leaves_of(scores)
        missed_names = {n for n, p in self.module.named_parameters() if id(p) in leaf_ids}
        if missed_names:
            raise TaskError(
                f"model {self.name}: its forward reads {', '.join(sorted(missed_names))} by another reference than the attribute "
                "of its module, such as a list, a closure or functools.partial, so that training would not change what "
                "it computes. Read the attribute in forward (self.weight), or keep such parameters in an nn.ParameterList"
            )

    def _refuse_merged_parameters(self, leaves: Params, training_scores: Tensor, x: Any) -> None:
        """Refuse a layer that reads its trained parameters in training alone.

        The ``Linear`` of loralib merges its factors into the frozen weight when ``train(False)`` is called. The module then
        holds its own parameters and not a client's, so that every evaluation would be that of the untrained model. Layers
        with a ``train`` of their own and a frozen parameter are checked.

        Args:
            leaves: parameters that require gradients.
            training_scores: scores of a forward pass with these parameters in training mode.
            x: inputs of that pass.

        Raises:
            TaskError: if there is such a layer; the message names it.
        """
        layers = {
            name: {id(leaves[n]) for p in layer._parameters if (n := f"{name}.{p}".lstrip(".")) in leaves}
            for name, layer in self.module.named_modules()
            if type(layer).train is not nn.Module.train
            and any(p is not None and not p.requires_grad for p in layer._parameters.values())
        }
        if not any(layers.values()):
            return
        unread_ids = _leaves_of(training_scores) - _leaves_of(self.apply(leaves, x))
        merged_names = [name for name, ids in layers.items() if ids & unread_ids]
        if merged_names:
            layer = self.module.get_submodule(merged_names[0])
            raise TaskError(
                f"model {self.name}: in evaluation mode the scores do not depend on trained parameters of layer "
                f"{merged_names[0]!r} ({type(layer).__name__}): its train method merges them into a frozen parameter, while the "
                "module does not hold a client's parameters. Make the layer without that, as by merge_weights=False in loralib"
            )

    def refuse_later_changes(self) -> None:
        """Raise TaskError if the user has frozen, thawed or loaded parameters of the module since this object was made.

        The trained parameters begin at the former values and the frozen ones are those of the module, a mixture that never was.
        """
        versions = _versions_of_frozen(self.module)
        remaining_names = {n for n, _ in self.module.named_parameters()}
        names = [
            *(n for n, v in self._frozen_versions.items() if n in remaining_names and versions.get(n) != v),
            *(versions.keys() & self.initial.keys()),
        ]
        if names:
            raise TaskError(
                f"model {self.name}: its module has changed since the federation was made: {names[0]} has been frozen, "
                "thawed, or loaded while it was frozen. Freeze and load parameters first, and then make the federation"
            )

    def layer_with_single_value(self) -> str | None:
        """Find the name of the first batch normalization for which one example is one value of each channel."""
        with unchanged(self.module), _PROBE.global_generators(self.device):
            return self._code.layer_with_single_value(*map_leaves(torch.clone, (self.initial, self.example)))

    def reinitialize(self, key: Key) -> Params:
        """Draw initial parameters from another key, by another call of the user's factory.

        In a module without a factory, such as a pretrained one, layers with ``reset_parameters`` draw their
        parameters by their own rules, and all other parameters stay unchanged.

        Raises:
            TaskError: if accelerate has placed the layers of the module, which cannot be copied then, or weights are
                quantized.
        """
        if any(map(is_packed, self.module.parameters())):
            raise TaskError(
                f"model {self.name}: the method draws several models, and the weights of this one are quantized, so that they "
                "cannot be drawn. Leave language.quantize out, or choose another method"
            )
        if is_placed(self.module):
            raise TaskError(
                f"model {self.name}: the method draws several models, and language.device_map has placed the layers of this one, "
                "so that it cannot be copied. Leave language.device_map out, or choose another method"
            )

        def again() -> nn.Module:
            # drawn on the CPU, so that all devices begin with the same numbers
            if self.factory is not None:
                return self.factory()
            module = copy_module(self.module, runs_hooks=False).cpu()
            # children first, as in a constructor, because a layer may have a rule of its own for them
            for layer in reversed(list(module.modules())):
                reset = getattr(layer, "reset_parameters", getattr(layer, "_reset_parameters", None))
                if callable(reset):
                    reset()
            return module

        return {
            n: as_real(p.detach()).contiguous().to(self.initial[n].device)
            for n, p in build_module(again, key).named_parameters()
            if n in self.initial
        }

    @property
    def width(self) -> int:
        """Width of the representation, its last dimension."""
        self._need_head()
        return self._width

    def _need_head(self) -> None:
        if self.head_name is None:
            if self._no_head:
                raise TaskError(self._no_head)
            linear_names = [n for n, m in self.module.named_modules() if n and isinstance(m, torch.nn.Linear)]
            name = linear_names[-1] if linear_names else "name.of.the.last.submodule"
            hint = f" ({name!r} is its last nn.Linear){self._describe_end()}" if linear_names else ""
            raise TaskError(
                f"model {self.name} names no head, so it has no representation. Give its module an attribute "
                f"head_name = {name!r}, or pass head={name!r} with the model{hint}."
            )

    def _describe_end(self) -> str:
        """What to do if the forward ends in a log_softmax, as PyTorch's own examples do; otherwise an empty text."""
        return (
            "; leave out its last operation, a log_softmax, which the cross-entropy applies itself"
            if self._last_operation(self.example)[2] == "log_softmax"
            else ""
        )

    def apply(self, params: Params, x: Any) -> Tensor:
        """Compute scores ``[b, classes]`` of inputs ``[b, ...]``; a dict of inputs is passed as keyword arguments.

        Parameters that are not given are the module's frozen ones.
        """
        params = self.add_statistics(params)
        if self.readout is None:
            return self._run(self._code, params, x)
        return self.readout(lambda inputs: self._run(self._code, params, inputs), x)

    def _run(self, code: FunctionalModule, params: Params, x: Any, prefix: str = "") -> Tensor:
        if self._changes_arguments and torch.is_inference_mode_enabled():
            with _no_grad():
                return self._run(code, params, x, prefix).detach()
        self._keep_mode()
        if self._takes_any_layout and type(x) is Tensor:
            x = channels_last(x)
        elif not self._takes_any_layout:
            x = map_leaves(Tensor.contiguous, x)
        if self._changes_arguments:
            # in-place changes of a module must not reach the data, another model of the method, or the server
            x = map_leaves(torch.clone, x)
            is_training = self.module.training
            params = {n: p if is_training and p.requires_grad else p.clone() for n, p in params.items()}
            if not is_training and not torch.is_grad_enabled():
                # a forward may differentiate by its parameters
                for name in params.keys() & self.initial.keys():
                    params[name].requires_grad_()
        # without buffers of a client, a call begins with the initial ones and drops its changes
        current_buffers = self._current_buffers
        if current_buffers is None and self.buffers:
            current_buffers = {n: b.clone() for n, b in self.buffers.items()}
        buffers = (
            None
            if current_buffers is None
            else {n[len(prefix) :]: b for n, b in current_buffers.items() if n.startswith(prefix)}
        )
        if self.autocast is None:
            scores = code(params, x, buffers)
        else:
            first_input = next(iter(x.values())) if isinstance(x, dict) else x
            with torch.autocast(first_input.device.type, self.autocast):
                scores = code(params, x, buffers).float()
        if scores.ndim == 4:
            # for losses and metrics of the user
            scores = scores.contiguous()
        if buffers and self._current_buffers is not None:
            self._current_buffers.update({f"{prefix}{n}": b for n, b in buffers.items()})
        if self.module.training:
            code.keep_for_backward(scores, params)
        return scores

    def add_statistics(self, params: Params) -> Params:
        """Add the statistics of the client's training data to the parameters, if the client is known and does not train."""
        local = self._local or current_statistics()
        if local is None or not self.statistics or self.statistics[0] in params or is_training_pass():
            return params
        self._keep_mode()
        buffers = self._current_buffers or {}
        if not self._changes_arguments:
            return local.complete(self._code, params, buffers)
        with _no_grad():
            normal_params = {n: p.clone() if p.is_inference() else p for n, p in params.items()}
            return local.complete(self._code, normal_params, buffers)

    def with_local_statistics(self, chunks: Chunks, owner: str = "") -> Architecture:
        """Copy the architecture for inference at a client: batch normalizations use the statistics of its training data.

        Args:
            chunks: inputs of the training data, a few at a time.
            owner: name of the client, for errors.
        """
        if not self.statistics:
            return self
        model = copy.copy(self)
        model._local = LocalStatistics(chunks, owner)
        return model

    def represent(self, params: Params, x: Any) -> Tensor:
        """Compute the representation ``[b, width]`` of inputs ``[b, ...]``; uses only the body's parameters."""
        self._need_head()
        return self._run(self._body, self.body_of(self.add_statistics(params)), x)

    def head(self, params: Params, r: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of representations ``[b, width]``; uses only the head's parameters."""
        prefix = f"{self.head_name}."
        head_params = self.head_of(self.add_statistics(params))
        return self._run(self._head_code, {n[len(prefix) :]: p for n, p in head_params.items()}, r, prefix)

    def head_of(self, params: Params) -> Params:
        """Select the parameters of the head."""
        self._need_head()
        return {n: p for n, p in params.items() if n.startswith(f"{self.head_name}.")}

    def body_of(self, params: Params) -> Params:
        """Select the parameters of everything before the head."""
        self._need_head()
        return {n: p for n, p in params.items() if not n.startswith(f"{self.head_name}.")}

    def head_layers(self) -> list[nn.Linear]:
        """List the linear layers of the head in order, for adapters that begin as its decomposition."""
        self._need_head()
        return [m for m in self._head.modules() if isinstance(m, nn.Linear)]

    def to(self, device: str, *, runs_hooks: bool = True) -> Architecture:
        """Copy the architecture to a device. A module that accelerate has placed stays where it is, and is shared.

        Args:
            device: name of the device.
            runs_hooks: whether the hooks of the copy will run, see :func:`.module_copy.copy_module`.
        """
        example = self.example
        moved_example = (
            {n: t.to(device) for n, t in example.items()} if isinstance(example, dict) else example.to(device)
        )
        model = copy.copy(self)
        is_shared = is_placed(self.module)
        module = self.module if is_shared else copy_module(self.module, runs_hooks=runs_hooks).to(device)
        model.module, model.cache, model._mode = module, {}, {}
        model._frozen_versions = _versions_of_frozen(module)
        model._backward_slots, model.frozen = [], frozen_normalizations(model.module)
        model._code = model._function()
        model.initial = {n: p.to(device) for n, p in self.initial.items()}
        model.buffers = {n: b.to(device) for n, b in self.buffers.items()}
        model.example = moved_example
        model.__dict__.pop("example_scores", None)
        model._split()
        return model

    @property
    def training(self) -> bool:
        """Whether the module is in training mode, as in the steps of a pass; otherwise it infers."""
        return self.module.training

    def set_training(self, mode: bool) -> None:
        """Set the module's training or evaluation mode; only engines call this, around a pass."""
        restore_slots(self._backward_slots)
        self.module.train(mode)
        self._mode["training"] = mode
        # a hook may have been registered
        self._takes_any_layout = takes_any_layout(self.module)

    @contextlib.contextmanager
    def restored_modes(self) -> Iterator[None]:
        """Restore the training or evaluation mode of each layer after a block."""
        modes = [(layer, layer.training) for layer in self.module.modules()]
        try:
            yield
        finally:
            for layer, mode in modes:
                layer.training = mode
            # the next call outside of training sets evaluation mode again
            self._mode.clear()

    def _keep_mode(self) -> None:
        """Keep evaluation mode outside of training passes, whatever mode the user has set."""
        if "training" not in self._mode or (self.module.training and not self._mode["training"]):
            self.set_training(False)


@contextlib.contextmanager
def _no_grad() -> Iterator[None]:
    """Compute without gradients, but outside of inference mode, in which no forward can differentiate by ``enable_grad``."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _versions_of_frozen(module: nn.Module) -> dict[str, int]:
    """How often each frozen parameter has been changed in place.

    Inference tensors have no such number, and an embedding with ``max_norm`` rescales the rows that it reads; they count as 0.
    Layers that accelerate has placed are left out, because it replaces their parameters.
    """
    if is_placed(module):
        return {}
    return {
        f"{path}.{n}".lstrip("."): 0 if p.is_inference() or getattr(layer, "max_norm", None) else p._version
        for path, layer in module.named_modules()
        for n, p in layer.named_parameters(recurse=False)
        if not p.requires_grad
    }


def _nodes_of(scores: Tensor) -> set[Any]:
    """Nodes of the graph of gradients of scores."""
    stack, nodes = [scores.grad_fn], set[Any]()
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return nodes


def _leaves_of(scores: Tensor) -> set[int]:
    """Identities of the tensors that require gradients and from which scores are computed."""
    return {id(node.variable) for node in _nodes_of(scores) if hasattr(node, "variable")}


def _refuse_parameter_hooks(name: str, module: nn.Module) -> None:
    """Raise TaskError if a parameter has a hook, because clients train copies, on which it would not run."""
    for parameter_name, p in module.named_parameters():
        if p.requires_grad and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)):
            raise TaskError(
                f"model {name}: the parameter {parameter_name} has a hook (Tensor.register_hook). Clients train "
                "copies of the parameters, so the hook would never run. Apply what it does in the module's "
                "forward, or give the method a precondition function."
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    # PyTorch does not compare sparse tensors
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_dense(a), as_dense(b))


def build_architecture(
    name: str, model: nn.Module | Callable[[], nn.Module], example: Any, head: str | None, key: Key
) -> Architecture:
    """Build an architecture from a user's module or factory.

    Args:
        name: name of the architecture.
        model: module, or factory to be initialized from ``key``.
        example: one input ``[1, ...]``, or a dict of such inputs.
        head: dotted name of the head, see :class:`Architecture`.
        key: key of the initial values.

    Raises:
        TaskError: if the factory fails or makes no module, or if the module does not take the example.
    """
    try:

        def make() -> nn.Module:
            network = model if isinstance(model, nn.Module) else model()
            if not isinstance(network, nn.Module):
                raise TypeError(f"its factory makes a {type(network).__name__}, not a torch.nn.Module")
            _refuse_scripted_layers(name, network)
            _initialize_lazy_layers(name, network, example)
            return network

        module = build_module(make, key)
        architecture = Architecture(name, module, example, head)
        architecture.factory = None if isinstance(model, nn.Module) else make
        if architecture.head_name is None:
            # if there is a head, the check of the split has made this forward pass
            _ = architecture.example_scores
        if invalid_names := [n for n, p in architecture.initial.items() if not bool(torch.isfinite(p).all())]:
            raise TaskError(
                f"model {name}: there is a NaN or an infinity among its initial parameters, in {invalid_names[0]}"
            )
    except FedlowrankError:
        raise
    except Exception as error:
        is_lookup = "'indices'" in str(error) or "used as indices" in str(error)
        is_dtype_mismatch = "same dtype" in str(error) or "should be the same" in str(error)
        hint = (
            " A model that looks up whole numbers converts them in its forward: x.long()."
            if is_lookup
            else " Models get their inputs as float32: call .float() on the module, or convert the inputs in its forward."
            if is_dtype_mismatch
            else ""
        )
        raise TaskError(
            f"model {name} cannot be used with this data: {type(error).__name__}: {error}. "
            f"{describe_example(example)}{hint}"
        ) from error
    return architecture


def _refuse_scripted_layers(name: str, module: nn.Module) -> None:
    """Raise TaskError if a layer is compiled by TorchScript, whose parameters cannot be replaced for a call."""
    scripted_layers = [n for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted_layers:
        subject = f"its layer {scripted_layers[0]!r}" if scripted_layers[0] else "the module"
        raise TaskError(
            f"model {name}: {subject} is compiled by torch.jit.script or torch.jit.trace, and each client calls the module with "
            "parameters of its own, which TorchScript does not allow. Give the nn.Module that it was compiled from."
        )


def choose_heads(architectures: Mapping[str, Architecture], output_count: int) -> list[str]:
    """Choose the heads that users left out, see :meth:`Architecture.choose_head`, and log each.

    Returns:
        A sentence for each chosen head.
    """
    sentences = [
        f"Model {name}: its head is {architecture.head_name!r}, the nn.Linear that its forward ends in."
        for name, architecture in architectures.items()
        if architecture.choose_head(output_count)
    ]
    for sentence in sentences:
        logger.info(sentence)
    return sentences


def describe_example(example: Any) -> str:
    """Describe the shape of one input ``[1, ...]``, or of a dict of such inputs, in a sentence for messages."""
    if isinstance(example, dict):
        shapes = ", ".join(f"{n!r} {list(t.shape[1:])}{_type(t)}" for n, t in example.items())
        names = ", ".join(map(str, example))
        return f"The inputs of one example have the shapes {shapes}, and are keyword arguments: forward(self, {names})."
    return f"One example has the shape {list(example.shape[1:])}{_type(example)}."


def _type(t: Tensor) -> str:
    """Name the type of a tensor, if it is not the usual one."""
    return "" if t.dtype == torch.float32 else f" of {t.dtype}".replace("torch.", "")


ModelSource = nn.Module | Callable[[], nn.Module]


def looks_up_ids(model: ModelSource, example: Tensor, key: Key) -> bool:
    """Whether a model looks up integers, such as the numbers of words.

    It does if it accepts integers and has an ``nn.Embedding`` or refuses the same numbers as float32.

    Args:
        model: module, which is not changed, or factory to be initialized from ``key``.
        example: one input ``[1, ...]``, int64.
        key: key of the initial values.
    """
    module = _module_to_try(model, key)
    if module is None:
        return False
    return _takes(module, example) and (_has_embedding(module) or not _takes(module, example.float()))


def choose_types(
    models: Mapping[str, ModelSource], example: Mapping[str, Tensor], key: Key
) -> dict[str, torch.dtype]:
    """Choose types of the named inputs that are no real numbers, such that all models accept one example.

    Integers stay integers, int64, by the rule of :func:`looks_up_ids`: if a model has an ``nn.Embedding`` or refuses
    them as float32. Booleans and bytes keep their type if the models accept them.

    Args:
        models: modules or factories by name.
        example: one example of each input ``[1, ...]``; real numbers in the type that the models get.
        key: key of the initial values of factories; ``key / name`` is the key of one model.
    """
    non_float_inputs = {name: t for name, t in example.items() if not t.is_floating_point()}
    if not non_float_inputs:
        return {}
    modules = [_module_to_try(model, key / name) for name, model in models.items()]
    usable_modules = [module for module in modules if module is not None]
    whole_types = [torch.int64, torch.float32]
    if not all(map(_has_embedding, usable_modules)):
        whole_types.reverse()
    type_choices = {
        torch.bool: [torch.bool, torch.float32],
        torch.uint8: [torch.uint8, torch.int64, torch.float32],
    }
    options = [type_choices.get(t.dtype, whole_types) for t in non_float_inputs.values()]
    # combinations with the fewest second choices first
    combinations = sorted(itertools.product(*(range(len(types)) for types in options)), key=sum)[
        :_MAX_TRIED_TYPES
    ]
    for type_indices in combinations:
        chosen_types = {
            n: types[i] for n, types, i in zip(non_float_inputs, options, type_indices, strict=True)
        }
        cast_example = {**example, **{name: t.to(chosen_types[name]) for name, t in non_float_inputs.items()}}
        if all(_takes(module, cast_example) for module in usable_modules):
            return chosen_types
    # build_architecture reports the failure
    return {n: types[0] for n, types in zip(non_float_inputs, options, strict=True)}


def _has_embedding(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in module.modules())


def _module_to_try(model: ModelSource, key: Key) -> nn.Module | None:
    """Copy the module for trial calls that change nothing of the user's; None if a factory makes none."""
    if not isinstance(model, nn.Module):
        try:
            model = build_module(model, key)
        except Exception:  # noqa: BLE001 - user code may fail by anything
            # build_architecture reports the failure
            return None
        if not hasattr(model, "modules"):
            return None
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        return None
    return copy.deepcopy(model) if _lazy_parameters(model) else model


def _takes(module: nn.Module, example: Tensor | Mapping[str, Tensor]) -> bool:
    inputs = example.values() if isinstance(example, Mapping) else [example]
    with unchanged(module), torch.no_grad(), _PROBE.global_generators():
        try:
            module.eval()
            example_copy = map_leaves(torch.clone, example)
            _ = module(**example_copy) if isinstance(example_copy, Mapping) else module(example_copy)
        except IndexError:
            # the table lacks the id, but the type is right
            return not all(t.is_floating_point() for t in inputs)
        except Exception:  # noqa: BLE001 - forward is the user's code and may fail by anything
            return False
    return True


def _initialize_lazy_layers(name: str, module: nn.Module, example: Any) -> None:
    """Initialize the shapes of layers such as ``nn.LazyLinear`` by a forward pass of one example.

    Raises:
        TaskError: if a lazy layer takes no part in the forward pass.
    """
    if not _lazy_parameters(module):
        return
    example_copy = map_leaves(torch.clone, example)
    with unchanged(module), torch.no_grad():
        _ = module.eval()(**example_copy) if isinstance(example_copy, dict) else module.eval()(example_copy)
    if lazy_names := _lazy_parameters(module):
        raise TaskError(
            f"model {name}: the parameter {lazy_names[0]} of a lazy layer has no shape, because forward does not use "
            "that layer. Use it, remove it, or give its size: nn.Linear(8, 3), not nn.LazyLinear(3)."
        )


def _lazy_parameters(module: nn.Module) -> list[str]:
    return [n for n, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]


def build_module(make: Callable[[], nn.Module], key: Key) -> nn.Module:
    """Call a factory of modules and initialize it from a key.

    The factory draws from torch's global generator, as every ``nn.Module`` does, or from Python's or numpy's; they
    are seeded for the call and restored.
    """
    with key.global_generators():
        return make()
