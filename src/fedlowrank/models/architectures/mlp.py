"""Multi-layer perceptrons."""

from __future__ import annotations

from torch import Tensor, nn

from ...core.errors import ConfigError


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        inputs: number of input features; inputs of more dimensions are flattened.
        hidden: widths of the hidden layers, at least one; the output of the last one is the representation.
        classes: number of classes, or width of a regression's target.
        bias: whether every layer adds a bias.
    """

    head_name = "head"

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int, bias: bool = True) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ConfigError(
                f"an MLP needs at least one hidden layer of width >= 1; its widths are {list(hidden)}"
            )
        layers: list[nn.Module] = [nn.Flatten()]
        for a, b in zip((inputs, *hidden), hidden, strict=False):
            layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1], classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of inputs ``[b, ...]``."""
        scores: Tensor = self.head(self.body(x))
        return scores


class LinearModel(nn.Module):
    """One linear layer. It has no representation before it, so methods that split a model refuse it.

    Args:
        inputs: number of input features; inputs of more dimensions are flattened.
        classes: number of classes, or width of a regression's target.
        bias: whether the layer adds a bias.
    """

    head_name = None

    def __init__(self, inputs: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of inputs ``[b, ...]``."""
        scores: Tensor = self.linear(x.flatten(1))
        return scores
