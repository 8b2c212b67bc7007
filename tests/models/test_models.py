"""The models of the papers, and the point where any model is split into a representation and a head."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.data.federation import Federation
from fedlowrank.models.architecture import Architecture, build_module
from fedlowrank.models.architectures.cnn import CNN, FAMILY
from fedlowrank.models.architectures.mlp import MLP

COUNTS = {"cnn1": 2_621_558, "cnn2": 1_815_142, "cnn3": 1_320_558, "cnn4": 1_060_358, "cnn5": 670_058}
# filters and hidden widths, Table 3
TABLE = {
    "cnn1": ((16, 32), (2000, 500)),
    "cnn2": ((16, 16), (2000, 500)),
    "cnn3": ((16, 32), (1000, 500)),
    "cnn4": ((16, 32), (800, 500)),
    "cnn5": ((16, 32), (500, 500)),
}
MEBIBYTES = {"cnn1": 10.00, "cnn2": 6.92, "cnn3": 5.04, "cnn4": 4.04, "cnn5": 2.56}
IMAGE = (3, 32, 32)


def cnn(name: str, shape: tuple[int, int, int] = IMAGE, classes: int = 10, **kwargs: Any) -> CNN:
    return build_module(lambda: CNN(shape, classes, *FAMILY[name], **kwargs), Key((0,)))


def by_hand(name: str, shape: tuple[int, int, int], classes: int, kernel: int, padding: int) -> int:
    (c1, c2), hidden = TABLE[name]
    channels, *sides = shape
    for _ in range(2):
        sides = [(s + 2 * padding - kernel + 1) // 2 for s in sides]
    widths = [sides[0] * sides[1] * c2, *hidden, classes]
    convolutions = (channels * kernel**2 + 1) * c1 + (c1 * kernel**2 + 1) * c2
    return convolutions + sum((a + 1) * b for a, b in itertools.pairwise(widths))


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_family_has_the_sizes_of_the_paper(name: str) -> None:
    count = sum(p.numel() for p in cnn(name).parameters())
    assert count == COUNTS[name] == by_hand(name, IMAGE, 10, 5, 0)
    assert round(4 * count / 2**20, 2) == MEBIBYTES[name]


def test_the_small_cnn_besides_the_family() -> None:
    assert sum(p.numel() for p in cnn("cnn").parameters()) == 419_558 == 800 * 500 + 500 + 5010 + 1216 + 12832


@pytest.mark.parametrize("name", sorted(TABLE))
@pytest.mark.parametrize(
    ("shape", "kernel", "padding"), [((1, 28, 28), 5, 0), ((1, 8, 8), 3, 1), ((3, 17, 20), 5, 0)]
)
def test_other_images_keep_the_form_of_the_family(name: str, shape: Any, kernel: int, padding: int) -> None:
    model = cnn(name, shape, classes=7)
    assert sum(p.numel() for p in model.parameters()) == by_hand(name, shape, 7, kernel, padding)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_the_layers_are_in_the_order_of_the_paper() -> None:
    model = cnn("cnn3")
    kinds = [type(m) for m in model.modules() if not list(m.children())]
    conv, relu, pool, flat, linear = nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Linear
    # the pool before the ReLU, with which it commutes; see test_floral_models
    assert kinds == [conv, pool, relu, conv, pool, relu, flat, linear, relu, linear, relu, linear]
    assert [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)] == [
        (800, 1000),
        (1000, 500),
        (500, 10),
    ]


@pytest.mark.parametrize(("split", "width", "layers"), [("fc1", 2000, 2), ("fc2", 500, 1)])
def test_the_split_point_is_the_output_of_a_hidden_layer_after_relu(
    split: str, width: int, layers: int
) -> None:
    model = cnn("cnn1", split=split)
    x = torch.randn(3, *IMAGE, generator=torch.Generator().manual_seed(0))
    a = Architecture("cnn1", model, x[:1])
    assert a.width == width
    assert len(a.head_layers()) == layers
    r = a.represent(a.initial, x)
    assert r.shape == (3, width)
    assert (r >= 0).all()
    assert (r == 0).any()
    torch.testing.assert_close(a.head(a.initial, r), a.apply(a.initial, x))
    assert sum(p.numel() for p in a.initial.values()) == COUNTS["cnn1"] == a.parameter_count


def test_the_split_point_changes_no_value() -> None:
    x = torch.randn(2, *IMAGE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cnn("cnn5", split="fc1")(x), cnn("cnn5", split="fc2")(x))


def test_a_split_point_that_the_model_does_not_have_is_refused() -> None:
    for split in ("fc3", "fc0", "conv1", ""):
        with pytest.raises(ConfigError, match="fc1, fc2"):
            cnn("cnn5", split=split)


def test_all_representations_of_the_family_are_equally_wide() -> None:
    x = torch.zeros(1, *IMAGE)
    assert {Architecture(n, cnn(n), x).width for n in TABLE} == {500}


def test_images_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="3×8"):
        CNN((1, 3, 8), 10, (2, 2), (4, 4))
    with pytest.raises(ConfigError):
        MLP(4, (), 2)
    with pytest.raises(ConfigError):
        MLP(4, (3, 0), 2)


def test_an_mlp_flattens_and_its_last_hidden_layer_is_the_representation() -> None:
    a = Architecture("mlp", MLP(12, (9, 5), 4), torch.zeros(1, 3, 4))
    assert a.width == 5
    assert a.parameter_count == 13 * 9 + 10 * 5 + 6 * 4
    x = torch.randn(6, 3, 4)
    w = list(a.initial.values())
    r = torch.relu(torch.relu(x.flatten(1) @ w[0].T + w[1]) @ w[2].T + w[3])
    torch.testing.assert_close(a.represent(a.initial, x), r)
    torch.testing.assert_close(a.apply(a.initial, x), r @ w[4].T + w[5])


# -- any module ----------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A user's module: convolution, a scale as a bare parameter, and a nested head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv1d(1, 3, 3)
        self.top = nn.ModuleDict({"classify": nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 4))})

    def forward(self, x: Tensor) -> Tensor:
        return self.top["classify"](self.scale * self.conv(x[:, None]).flatten(1))


def test_a_users_module_is_split_at_the_head_it_declares() -> None:
    module = Own()
    x = torch.randn(5, 6)
    a = Architecture("own", module, x[:1], head="top.classify")
    module.head_name = "top.classify"
    assert Architecture("own", module, x[:1]).head_name == a.head_name == "top.classify"
    assert a.width == 12
    assert sorted(a.body_of(a.initial)) == ["conv.bias", "conv.weight", "scale"]
    assert sorted(a.head_of(a.initial)) == [
        f"top.classify.{n}" for n in ("0.bias", "0.weight", "2.bias", "2.weight")
    ]
    torch.testing.assert_close(a.head(a.initial, a.represent(a.initial, x)), module(x))
    torch.testing.assert_close(a.apply(a.initial, x), module(x))


def test_parameters_are_those_given_and_not_those_of_the_module() -> None:
    module = Own()
    x = torch.randn(5, 6)
    a = Architecture("own", module, x[:1], head="top.classify")
    other = {n: 2 * p for n, p in a.initial.items()}
    module_again = Own()
    module_again.load_state_dict(other)
    torch.testing.assert_close(a.apply(other, x), module_again(x))
    torch.testing.assert_close(a.head(other, a.represent(other, x)), module_again(x))
    # of the whole set only the part in use counts
    body, head = a.body_of(other), a.head_of(other)
    torch.testing.assert_close(a.represent(body, x), a.represent(other, x))
    torch.testing.assert_close(a.head(head, a.represent(body, x)), module_again(x))


def test_initial_parameters_are_copies() -> None:
    module = Own()
    a = Architecture("own", module, torch.randn(1, 6), head="top.classify")
    before = a.initial["scale"].clone()
    with torch.no_grad():
        module.scale.add_(1)
    assert torch.equal(a.initial["scale"], before)
    assert not any(p.requires_grad for p in a.initial.values())


def test_gradients_reach_the_body_through_the_representation() -> None:
    a = Architecture("own", Own(), torch.randn(1, 6), head="top.classify")
    params = {n: p.clone().requires_grad_() for n, p in a.initial.items()}
    a.head(params, a.represent(params, torch.randn(5, 6))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in params.values())


@pytest.mark.parametrize("head", ["tops", "top.classify.5", ""])
def test_a_head_that_does_not_exist_is_refused_with_those_that_do(head: str) -> None:
    with pytest.raises(TaskError, match=r"model own: .*conv"):
        Architecture("own", Own(), torch.randn(1, 6), head=head)


@pytest.mark.parametrize("head", ["conv", "top.classify.0", "top.classify.1"])
def test_a_head_in_which_the_forward_does_not_end_is_refused(head: str) -> None:
    with pytest.raises(TaskError, match="does not end in"):
        Architecture("own", Own(), torch.randn(1, 6), head=head)


def test_a_model_that_goes_on_after_its_head_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.head(self.body(x))

    with pytest.raises(TaskError, match="does not end in 'head'"):
        Architecture("scaled", Scaled(), torch.randn(1, 6), head="head")
    # a layer may be called so without being the head; what needs one says why it is none
    made = Architecture("scaled", Scaled(), torch.randn(1, 6))
    with pytest.raises(TaskError, match="does not end in 'head'"):
        made.represent(made.initial, torch.randn(1, 6))


class Ended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

    def end(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.head(torch.tanh(self.body(x))))


class Temperature(Ended):
    """A learned one, which begins at 1."""

    def end(self, scores: Tensor) -> Tensor:
        return scores * self.scale


class DropoutAfter(Ended):
    def end(self, scores: Tensor) -> Tensor:
        return self.dropout(scores)


class NoiseAfter(Ended):
    def end(self, scores: Tensor) -> Tensor:
        return scores + torch.randn_like(scores) if self.training else scores


class Adjusted(Ended):
    """Adds the logarithm of the classes' shares in training alone."""

    def end(self, scores: Tensor) -> Tensor:
        return scores + torch.tensor([0.8, 0.15, 0.05]).log() if self.training else scores


class DropoutBefore(Ended):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.body(x))))


@pytest.mark.parametrize("kind", [Temperature, DropoutAfter, NoiseAfter, Adjusted])
def test_what_follows_the_head_in_training_or_after_a_step_is_found(kind: type[Ended]) -> None:
    with pytest.raises(TaskError, match="does not end in 'head'"):
        Architecture("ended", kind(), torch.randn(1, 6), head="head")
    # nor is such a layer chosen
    module = kind()
    module.last = module._modules.pop("head")
    type(module).head = property(lambda self: self.last)  # type: ignore[attr-defined]
    try:
        assert not Architecture("ended", module, torch.randn(1, 6)).choose_head(3)
    finally:
        del type(module).head  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Ended, DropoutBefore])
def test_random_layers_before_the_head_are_no_reason(kind: type[Ended]) -> None:
    assert Architecture("ended", kind(), torch.randn(1, 6), head="head").width == 8


def test_a_model_without_a_head_can_be_applied_but_not_split() -> None:
    a = Architecture("plain", nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(1, 6))
    assert a.apply(a.initial, torch.randn(3, 6)).shape == (3, 2)
    for use in (
        lambda: a.width,
        lambda: a.represent(a.initial, torch.randn(3, 6)),
        lambda: a.head_of(a.initial),
        lambda: a.body_of(a.initial),
    ):
        with pytest.raises(TaskError, match="plain names no head"):
            use()


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.BatchNorm1d(6, track_running_stats=False)]
)
def test_norms_without_running_statistics_are_fine(norm: nn.Module) -> None:
    a = Architecture("normed", nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2)), torch.randn(4, 6))
    assert a.apply(a.initial, torch.randn(4, 6)).shape == (4, 2)


def test_inputs_by_name_are_keyword_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(self.body(a - b))

    module = Two()
    x = {"b": torch.randn(4, 3), "a": torch.randn(4, 3)}
    arch = Architecture("two", module, {n: t[:1] for n, t in x.items()})
    torch.testing.assert_close(arch.apply(arch.initial, x), module(**x))
    torch.testing.assert_close(arch.represent(arch.initial, x), module.body(x["a"] - x["b"]))


def test_a_head_that_shares_a_weight_with_the_body_is_refused_or_follows_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
            self.head.weight = self.body.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(x)))

    x = torch.randn(4, 6)
    try:
        a = Architecture("tied", Tied(), x[:1], head="head")
    except TaskError:
        return
    # a weight that has one name must have one value wherever it is used, not that of the first round in the
    # head
    other = {n: p + 0.5 for n, p in a.initial.items()}
    torch.testing.assert_close(a.head(other, a.represent(other, x)), a.apply(other, x))


def test_moving_a_federation_leaves_the_original_where_it_was() -> None:
    federation = Federation.from_arrays([(torch.randn(10, 6), torch.arange(10) % 2)], lambda: MLP(6, (5,), 2))
    moved = federation.to("meta")
    assert {t.device.type for t in moved.architectures["model"].initial.values()} == {"meta"}
    assert {t.device.type for t in federation.architectures["model"].initial.values()} == {"cpu"}
    assert {p.device.type for p in federation.architectures["model"].module.parameters()} == {"cpu"}


def test_a_moved_model_takes_its_buffers_along_on_both_sides_of_the_split() -> None:
    class Shifted(MLP):
        def __init__(self) -> None:
            super().__init__(6, (5,), 2)
            self.register_buffer("shift", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.shift)

    federation = Federation.from_arrays([(torch.randn(10, 6), torch.arange(10) % 2)], Shifted)
    moved = federation.to("meta").architectures["model"]
    x = torch.zeros(3, 6, device="meta")
    assert moved.apply(moved.initial, x).device.type == "meta"
    assert moved.represent(moved.initial, x).device.type == "meta"
