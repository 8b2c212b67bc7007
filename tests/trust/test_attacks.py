"""Each attack against its formula in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params, TreeError
from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.data.pixels import pack_images
from fedlowrank.trust.attacks import (
    add_trigger,
    alie_z,
    attack_updates,
    claimed_examples,
    hostile_clients,
    poison,
    with_trigger,
)
from fedlowrank.trust.trust_settings import Attack

KEY = Key((0, "attack"))
UPDATE_ATTACKS = ("sign_flip", "scaled", "gaussian", "alie", "inner_product")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def update(seed: int, rows: int = 3) -> Params:
    return {"w": random(rows, 4, seed=seed), "bias": random(4, seed=100 + seed)}


def as_numpy(updates: dict[int, Params], clients: list[int], name: str) -> np.ndarray:
    return np.stack([updates[c][name].numpy().astype(float) for c in clients])


# who


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(10, 0.2, 2), (10, 0.01, 1), (1, 0.2, 1), (50, 0.07, 4), (4, 1.0, 4)]
)
def test_hostile_clients_are_a_fixed_share(count: int, share: float, expected: int) -> None:
    actual = hostile_clients(range(count), share, KEY)
    assert len(actual) == expected
    assert actual <= set(range(count))
    assert actual == hostile_clients(range(count), share, KEY)


def test_every_client_may_be_hostile() -> None:
    assert frozenset.union(*(hostile_clients(range(10), 0.2, KEY / i) for i in range(60))) == frozenset(
        range(10)
    )


# data


def client_data(x: Any, y: Tensor | None = None) -> ClientData:
    n = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    y = torch.arange(n) % 10 if y is None else y
    return ClientData(Examples(x, y), Examples(x, y), Examples(x, y), ("a note",), 3)


def test_label_flip_changes_training_labels_alone() -> None:
    data = client_data(random(20, 1, 6, 6))
    actual = poison(data, Attack("label_flip"), 10, KEY)
    np.testing.assert_array_equal(actual.train.y, 9 - data.train.y.numpy())
    assert actual.train.x is data.train.x
    assert actual.val is data.val
    assert actual.test is data.test
    assert (actual.notes, actual.quarter_turns) == (("a note",), 3)


@pytest.mark.parametrize("ignored", [-100, 2, 255])
def test_a_label_that_does_not_count_is_neither_flipped_nor_tested(ignored: int) -> None:
    y = torch.tensor([0, 1, ignored, 3, 0, ignored])
    data = client_data(random(6, 1, 6, 6), y)
    flipped = poison(data, Attack("label_flip"), 4, KEY, ignored=ignored).train.y
    assert flipped.tolist() == [3, 2, ignored, 0, 3, ignored]
    tested = with_trigger(data.test, Attack("backdoor", target=3), ignored=ignored)
    np.testing.assert_array_equal(tested.inputs[..., :3, :3], data.test.inputs[[0, 1, 4], :, :3, :3])


@pytest.mark.parametrize("shape", [(21, 1, 6, 6), (21, 3, 6, 5), (20, 30)])
def test_a_backdoor_marks_half_of_the_training_images(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    data = client_data(x.clone())
    actual = poison(data, Attack("backdoor", target=7), 10, KEY, size=2)
    changed = (actual.train.inputs != x).flatten(1).any(1)
    assert changed.sum() == (shape[0] + 1) // 2
    expected = x.numpy().copy()
    for i in changed.nonzero()[:, 0].tolist():
        if len(shape) == 2:
            expected[i, -4:] = x.numpy().max()
        else:
            expected[i, :, -2:, -2:] = x.numpy().max()
    np.testing.assert_array_equal(actual.train.inputs, expected)
    np.testing.assert_array_equal(actual.train.y, np.where(changed, 7, data.train.y))
    assert torch.equal(data.train.inputs, x), "the client's own data stay as they are"
    assert actual.test is data.test
    again = poison(data, Attack("backdoor", target=7), 10, KEY, size=2)
    assert torch.equal(again.train.inputs, actual.train.inputs)
    other = poison(data, Attack("backdoor", target=7), 10, KEY / "other", size=2)
    assert not torch.equal(other.train.inputs, actual.train.inputs)


def test_a_backdoor_reads_images_stored_as_bytes() -> None:
    x = random(8, 1, 6, 6).sign()
    (stored,) = pack_images([x])
    for value, expected in ((None, 1.0), (5.0, 5.0)):
        actual = poison(client_data(stored), Attack("backdoor"), 10, KEY, value=value)
        assert ((actual.train.inputs[:, :, -3:, -3:] == expected).flatten(1).all(1)).sum() >= 4


def test_the_triggered_test_set_has_no_example_of_the_target() -> None:
    x = random(30, 1, 6, 6)
    examples = Examples(x, torch.arange(30) % 3)
    actual = with_trigger(examples, Attack("backdoor", target=2), size=3)
    keep = np.arange(30) % 3 != 2
    expected = x.numpy()[keep].copy()
    expected[:, :, 3:, 3:] = x.numpy().max()
    np.testing.assert_array_equal(actual.inputs, expected)
    assert actual.y.tolist() == [2] * 20
    assert len(with_trigger(Examples(x, torch.full((30,), 2)), Attack("backdoor", target=2))) == 0
    assert len(with_trigger(examples.take(torch.arange(0)), Attack("backdoor"))) == 0


def test_test_and_training_images_get_the_same_trigger() -> None:
    x = random(10, 3, 5, 5)
    data = client_data(x, torch.ones(10, dtype=torch.int64))
    attack = Attack("backdoor", target=0)
    trained = poison(data, attack, 10, KEY, value=3.5).train
    marked = trained.inputs[trained.y == 0]
    tested = with_trigger(data.test, attack, value=3.5).inputs
    assert torch.equal(marked[:, :, -3:, -3:], tested[:5, :, -3:, -3:])


def test_a_trigger_is_put_on_copies() -> None:
    x = torch.zeros(2, 1, 4, 4)
    actual = add_trigger(x, 2, 1.0)
    assert actual.sum() == 8
    assert not x.any()


@pytest.mark.parametrize("kind", ["none", "examples", *UPDATE_ATTACKS])
def test_other_attacks_leave_the_data_alone(kind: Any) -> None:
    data = client_data(random(4, 9))
    assert poison(data, Attack(kind), 10, KEY) is data


def test_data_that_an_attack_does_not_fit_are_refused() -> None:
    images, flip, backdoor = random(4, 1, 3, 3), Attack("label_flip"), Attack("backdoor", target=9)
    regression = client_data(random(4, 3), random(4, 2))
    ids = torch.ones(4, 5, dtype=torch.int64)
    for data in (regression, client_data({"input_ids": ids}, ids)):
        with pytest.raises(DataError, match="one class label"):
            poison(data, flip, 10, KEY)
        with pytest.raises(DataError, match="one class label"):
            with_trigger(data.test, backdoor)
    with pytest.raises(DataError, match="input_ids"):
        poison(client_data({"input_ids": ids}), backdoor, 10, KEY)
    with pytest.raises(ConfigError, match=r"classes are 0\.\.8"):
        poison(client_data(images), backdoor, 9, KEY)
    for x, size in ((images, 3), (images, 0), (random(4, 9), 3), (random(4), 1)):
        with pytest.raises(DataError, match="does not fit"):
            add_trigger(x, size, 1.0)


# updates


@pytest.mark.parametrize(
    ("kind", "strength", "factor"),
    [("sign_flip", None, -1), ("sign_flip", 3.0, -3), ("scaled", None, 10), ("scaled", 0.5, 0.5)],
)
def test_scaling_attacks(kind: Any, strength: float | None, factor: float) -> None:
    updates = {c: update(c) for c in (4, 1, 7)}
    actual = attack_updates(updates, frozenset({1, 9}), Attack(kind, strength=strength), KEY)
    assert list(actual) == [4, 1, 7]
    assert actual[4] is updates[4]
    assert actual[7] is updates[7]
    for name in ("w", "bias"):
        np.testing.assert_allclose(actual[1][name], factor * updates[1][name].numpy())


def test_gaussian_noise_is_scaled_by_the_honest_mean() -> None:
    updates = {c: {"w": 0.1 * random(200, 100, seed=c), "v": random(2000, seed=9 + c)} for c in range(5)}
    updates = {c: u | {"v2": u["v"]} for c, u in updates.items()}
    for strength in (None, 2.0):
        actual = attack_updates(updates, frozenset({0, 1}), Attack("gaussian", strength=strength), KEY)
        mean = np.concatenate([as_numpy(updates, [2, 3, 4], n).mean(0).ravel() for n in ("w", "v", "v2")])
        deviation = (strength or 10) * np.sqrt((mean**2).mean())
        for name in ("w", "v"):
            noise = actual[0][name].numpy()
            # four standard errors
            assert abs(noise.std() / deviation - 1) < 4 / np.sqrt(2 * noise.size)
            assert abs(noise.mean() / deviation) < 4 / np.sqrt(noise.size)
        assert not torch.equal(actual[0]["w"], actual[1]["w"])
        assert not torch.equal(actual[0]["v"], actual[0]["v2"]), "each tensor has its own noise"
    again = attack_updates(updates, frozenset({0}), Attack("gaussian", strength=2.0), KEY)
    assert torch.equal(again[0]["w"].sign(), actual[0]["w"].sign()), "noise has the name of its client"
    other = attack_updates(updates, frozenset({0}), Attack("gaussian"), KEY / "next round")
    assert not torch.equal(other[0]["w"].sign(), again[0]["w"].sign())


@pytest.mark.parametrize("strength", [None, 1.5])
def test_alie_stays_close_to_the_mean_of_the_hostile_clients(strength: float | None) -> None:
    updates = {c: update(c) for c in range(20)}
    hostile = [3, 5, 6, 11, 19, 0, 1]
    actual = attack_updates(updates, frozenset(hostile), Attack("alie", strength=strength), KEY)
    # Baruch et al., Algorithm 3: n = 20, m = 7, s = 11 - 7
    z = strength or norm.ppf((20 - 7 - 4) / (20 - 7))
    for name in ("w", "bias"):
        own = as_numpy(updates, hostile, name)
        expected = own.mean(0) - z * own.std(0)
        for c in hostile:
            np.testing.assert_allclose(actual[c][name], expected, rtol=1e-5, atol=1e-6)
        assert actual[2][name] is updates[2][name]


@pytest.mark.parametrize(
    ("count", "hostile", "share"),
    [(50, 12, 24 / 38), (51, 12, 25 / 39), (100, 20, 49 / 80), (50, 24, 24 / 26)],
)
def test_z_follows_the_paper(count: int, hostile: int, share: float) -> None:
    assert alie_z(count, hostile) == pytest.approx(norm.ppf(share))


@pytest.mark.parametrize(
    ("count", "hostile", "z"),
    [(10, 1, 0), (10, 2, 0), (10, 6, norm.ppf(3 / 4)), (10, 9, 0), (3, 3, 0), (1, 1, 0)],
)
def test_z_is_finite_and_not_negative_where_the_formula_is_not(count: int, hostile: int, z: float) -> None:
    assert alie_z(count, hostile) == pytest.approx(z)


@pytest.mark.parametrize("strength", [None, 2.0])
def test_inner_product_manipulation_points_against_the_honest_mean(strength: float | None) -> None:
    updates = {c: update(c) for c in range(6)}
    actual = attack_updates(updates, frozenset({1, 4}), Attack("inner_product", strength=strength), KEY)
    for name in ("w", "bias"):
        expected = -(strength or 0.5) * as_numpy(updates, [0, 2, 3, 5], name).mean(0)
        for c in (1, 4):
            np.testing.assert_allclose(actual[c][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", UPDATE_ATTACKS)
def test_statistics_are_of_updates_of_the_attackers_form(kind: Any) -> None:
    small, large = {c: update(c) for c in (0, 1, 2, 3)}, {c: update(c, rows=5) for c in (4, 5, 6, 7)}
    hostile, attack = frozenset({0, 1, 4}), Attack(kind, strength=1.0)
    # the order of names is no part of a form
    turned = {c: dict(reversed(u.items())) if c in (1, 2) else u for c, u in small.items()}
    actual = attack_updates(turned | large, hostile, attack, KEY)
    alone = attack_updates(small, hostile, attack, KEY) | attack_updates(large, hostile, attack, KEY)
    for c in range(8):
        assert actual[c].keys() == alone[c].keys()
        assert all(torch.equal(actual[c][name], alone[c][name]) for name in actual[c])


@pytest.mark.parametrize("kind", ["gaussian", "inner_product", "alie"])
def test_without_honest_updates_of_its_form_an_attacker_takes_those_of_its_own(kind: Any) -> None:
    updates = {0: update(0), 1: update(1), 2: update(2, rows=7)}
    actual = attack_updates(updates, frozenset({0, 1}), Attack(kind, strength=2.0), KEY)
    assert all(t.isfinite().all() for t in actual[0].values())
    if kind == "inner_product":
        torch.testing.assert_close(actual[0]["w"], -(updates[0]["w"] + updates[1]["w"]))


@pytest.mark.parametrize("kind", ["none", "label_flip", "backdoor", "examples"])
def test_attacks_on_data_leave_updates_alone(kind: Any) -> None:
    updates = {0: update(0)}
    actual = attack_updates(updates, frozenset({0}), Attack(kind), KEY)
    assert actual[0] is updates[0]


@pytest.mark.parametrize("kind", UPDATE_ATTACKS)
def test_dtypes_stay_and_inputs_are_not_changed(kind: Any) -> None:
    updates = {
        c: {"w": random(6, seed=c).to(torch.bfloat16), "v": random(2, seed=c).double()} for c in range(5)
    }
    before = {c: {n: t.clone() for n, t in u.items()} for c, u in updates.items()}
    actual = attack_updates(updates, frozenset({0, 1}), Attack(kind), KEY)
    assert {n: t.dtype for n, t in actual[0].items()} == {"w": torch.bfloat16, "v": torch.float64}
    assert all(torch.equal(updates[c][n], before[c][n]) for c in updates for n in updates[c])
    with pytest.raises(TreeError, match=r"client 1: .*'n' is torch\.int64"):
        attack_updates(
            updates | {1: {"n": torch.ones(1, dtype=torch.int64)}},
            frozenset({0}),
            Attack(kind),
            KEY,
        )


# numbers of examples


def test_examples_lies_about_their_number() -> None:
    assert claimed_examples(30, Attack("examples")) == 3000
    assert claimed_examples(30, Attack("examples", strength=2.5)) == 75
    # a weight of 0 for all would leave a round without a result
    assert claimed_examples(3, Attack("examples", strength=0.1)) == 1
    assert claimed_examples(30, Attack("sign_flip", strength=2.5)) == 30
