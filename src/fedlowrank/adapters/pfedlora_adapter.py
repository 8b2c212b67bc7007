"""The adapter of pFedLoRA: two narrow linear layers beside a model's head (Yi et al., section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..core.contract import Model
from ..core.errors import TaskError
from ..core.key import Key
from ..core.tree import tree_dataclass, widen
from ..linalg.factored import compute_svd


@tree_dataclass
class PFedLoRAAdapter:
    """The adapter Linear(inputs → width) → [ReLU] → Linear(width → classes).

    Attributes:
        a: weight of the first layer, ``[width, inputs]``.
        a_bias: bias of the first layer, ``[width]``.
        b: weight of the second layer, ``[classes, width]``.
        b_bias: bias of the second layer, ``[classes]``.
    """

    a: Tensor
    a_bias: Tensor
    b: Tensor
    b_bias: Tensor

    def apply(self, r: Tensor, relu: bool) -> Tensor:
        """Compute scores ``[batch, classes]`` of representations ``[batch, inputs]``."""
        # the model's head may have another type than the adapter
        z = functional.linear(r.to(self.a.dtype), self.a, self.a_bias)
        return functional.linear(functional.relu(z) if relu else z, self.b, self.b_bias)


def initial_adapter(inputs: int, width: int, classes: int, key: Key) -> PFedLoRAAdapter:
    """Create initial values as ``nn.Linear`` does: uniform in ±1/√fan-in."""
    generator = key.generator()

    def sample(fan_in: int, *shape: int) -> Tensor:
        return torch.empty(*shape).uniform_(-1, 1, generator=generator).div_(fan_in**0.5)

    return PFedLoRAAdapter(
        sample(inputs, width, inputs),
        sample(inputs, width),
        sample(width, classes, width),
        sample(width, classes),
    )


def initial_adapter_from_head(model: Model, width: int, filler: PFedLoRAAdapter) -> PFedLoRAAdapter:
    """Create an adapter that begins at the rank-``width`` decomposition of a model's head.

    For a head of one linear layer, W ≈ U Σ Vᵀ gives a = √Σ Vᵀ and b = U √Σ. For a head of two, W3 ∘ ReLU ∘
    W2, the first is decomposed, W2 ≈ U Σ Vᵀ, and b = W3 U √Σ, so that without the ReLU the adapter is the best such
    head. If the rank of the weight is below ``width``, the other rows of ``a`` are random and the other columns of
    ``b`` zero, as in ``filler``: they do not change the output but can learn.

    Raises:
        TaskError: if the head is not one or two linear layers.
    """
    layers = model.head_layers()
    head = {n: widen(p.detach().cpu()) for n, p in model.head_of(model.initial).items()}
    params = [p for n, p in head.items() if n.endswith((".weight", ".bias"))]
    if len(layers) not in (1, 2) or not len(head) == len(params) == 2 * len(layers):
        raise TaskError(
            f"start = 'svd' needs a head of one or two linear layers with biases; {model.name} has "
            f"{len(layers)} and the parameters {', '.join(head)}. Use start = 'random'."
        )
    w, bias = params[0], params[1]
    f = compute_svd(w)
    # a singular value that is a rounding error gives components of zeros, which could not learn
    smallest = f.s.max() * max(w.shape) * torch.finfo(f.s.dtype).eps
    rank = min(width, int((f.s > smallest).sum()))
    root = f.s[:rank].sqrt()
    a, b = filler.a.clone(), torch.zeros_like(filler.b)
    a[:rank] = root[:, None] * f.v[:, :rank].mT
    scaled_u = f.u[:, :rank] * root
    if len(layers) == 2:
        w3, b3 = params[2], params[3]
        scaled_u, bias = w3 @ scaled_u, w3 @ bias + b3
    # the head may have more outputs than there are classes
    classes = len(b)
    b[:, :rank] = scaled_u[:classes]
    return PFedLoRAAdapter(a, torch.zeros_like(filler.a_bias), b, bias[:classes].clone())
