"""Secure sums: totals up to quantization, lost clients, and what the server sees."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedlowrank.core import tree
from fedlowrank.core.contract import Each, Mean, Sum
from fedlowrank.core.contract.contribution import Aggregator, map_contributions
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key, generator_states
from fedlowrank.core.tree import TreeError
from fedlowrank.trust.secure_sums import FixedPoint, MaskedSum, MaskingPlan, SecureAggregator, _load, expand
from fedlowrank.trust.trust_settings import SecureSums

KEY = Key((0, "round", 3))
CLIENTS = (3, 5, 8, 9, 11)
BASIS = SecureSums(on=True)
LEAST = 4  # of five, for a threshold of 0.66


def contribution(client: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(client)
    x = torch.randn(3, 4, generator=g, dtype=torch.float64)
    return {
        "model": Mean({"w": x, "b": (x[0].float(), None, "words", x[0, 0])}, client),
        "clusters": [Mean(x, float(client == 5)), Mean(x, 0.0)],
        "sum": Sum({"x": 4.0 * x, "count": torch.tensor([client, -client, 1 << 40])}),
        "small": Sum(torch.tensor([200, client], dtype=torch.uint8)),
    }


def secure(
    clients: Sequence[int] = CLIENTS,
    options: SecureSums = BASIS,
    largest: float = 16,
) -> SecureAggregator:
    return SecureAggregator(clients, options, KEY, largest)


def total_of(aggregator: Aggregator, replies: Sequence[int], lost: Collection[int] = ()) -> Any:
    for client in replies:
        aggregator.add(client, contribution(client))
    for client in lost:
        aggregator.skip(client)
    return aggregator.finish()


def assert_close(found: Any, expected: Any, like: Any, bound_of_mean: float, bound_of_sum: float) -> None:
    """Every float is within the bound of its leaf and the precision of its type; integers are equal."""
    for (_, leaf), a, b in zip(
        leaves_of(like), values_of(found, like), values_of(expected, like), strict=True
    ):
        assert (a is None) == (b is None)
        bound = bound_of_mean if isinstance(leaf, Mean) else bound_of_sum
        for x, y in zip(tree.tensors(a), tree.tensors(b), strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            if x.is_floating_point():
                slack = 2 * torch.finfo(x.dtype).eps * float(y.abs().max()) if y.numel() else 0.0
                assert float((x - y).abs().max() if y.numel() else 0) <= bound * (1 + 1e-9) + slack
            else:
                assert torch.equal(x, y)


def leaves_of(like: Any) -> list[tuple[str, Any]]:
    actual: list[tuple[str, Any]] = []
    map_contributions(lambda path, leaf: actual.append((path, leaf)), like)
    return actual


def values_of(total: Any, like: Any) -> list[Any]:
    """The parts of a total where the contribution has its leaves."""
    if isinstance(like, dict):
        return [v for key in like for v in values_of(total[key], like[key])]
    if isinstance(like, list):
        return [v for a, b in zip(total, like, strict=True) for v in values_of(a, b)]
    return [total]


def plain_total(replies: Sequence[int]) -> Any:
    aggregator = Aggregator(list(CLIENTS))
    return total_of(aggregator, replies, set(CLIENTS) - set(replies))


GRID = FixedPoint(BASIS, len(CLIENTS), 16)
PATTERNS = [p for n in range(6) for p in itertools.combinations(CLIENTS, n)]


@pytest.mark.few(10)
@pytest.mark.parametrize("replies", PATTERNS, ids=str)
def test_every_pattern_of_lost_clients_gives_the_plain_total_or_a_reason(replies: tuple[int, ...]) -> None:
    aggregator = secure()
    actual = total_of(aggregator, replies, set(CLIENTS) - set(replies))
    if len(replies) < LEAST:
        assert actual is None
        assert aggregator.contributed == []
        assert f"{len(replies)} clients replied, and 4 must" in aggregator.reason
        return
    assert aggregator.contributed == list(replies)
    assert aggregator.reason == ""
    assert aggregator.clipped == 0
    # weights are whole numbers, hence exact
    assert_close(
        actual, plain_total(replies), contribution(3), GRID.step / 2, len(replies) * GRID.step * GRID.unit / 2
    )
    assert actual["clusters"][1] is None
    assert tree.equal(actual, aggregator.finish())


def test_a_client_adds_once_and_no_other_client_adds() -> None:
    aggregator = secure()
    aggregator.add(CLIENTS[0], contribution(CLIENTS[0]))
    for client in (CLIENTS[0], 77):
        with pytest.raises(ValueError, match=f"client {client} takes no part"):
            aggregator.add(client, contribution(CLIENTS[0]))


def test_no_order_of_arrival_changes_a_bit() -> None:
    totals = []
    for order in itertools.islice(itertools.permutations(CLIENTS), 0, None, 7):
        aggregator = secure()
        if order[0] == 8:
            aggregator.skip(9)
            aggregator.add(3, contribution(3))
        lost = {9} if order[0] == 8 else ()
        for client in order:
            if client not in lost and not (lost and client == 3):
                aggregator.add(client, contribution(client))
        totals.append((bool(lost), aggregator.finish()))
        assert aggregator.contributed == [c for c in CLIENTS if c not in lost]
    for kind in (False, True):
        first, *others = [total for lost, total in totals if lost is kind]
        assert all(tree.equal(first, other) for other in others)


def test_no_global_generator_is_read_or_changed() -> None:
    before = generator_states()
    first = total_of(secure(), CLIENTS[:4], CLIENTS[4:])
    assert generator_states() == before
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    assert tree.equal(first, total_of(secure(), CLIENTS[:4], CLIENTS[4:]))


@pytest.mark.full
def test_twenty_three_of_seventy_clients_may_be_lost() -> None:
    clients = list(range(70))
    lost = set(np.random.default_rng(0).choice(70, 23, replace=False).tolist())
    aggregator = secure(clients)
    assert max(map(len, aggregator._plan.holders.values())) < 70
    for client in clients:
        if client in lost:
            aggregator.skip(client)
        else:
            aggregator.add(client, Sum(torch.tensor([1, client])))
    kept = [c for c in clients if c not in lost]
    assert aggregator.finish().tolist() == [len(kept), sum(kept)], aggregator.reason


# ---- the bound of the error


@st.composite
def rounds(draw: st.DrawFn) -> tuple[SecureSums, float, list[Any]]:
    """Settings, the largest weight, and the contributions of a round of random structure."""
    options = SecureSums(
        on=True, bits=draw(st.integers(2, 32)), bound=draw(st.sampled_from([0.1, 1.0, 8.0])), threshold=0.51
    )
    largest = draw(st.sampled_from([0.3, 1.0, 37.0, 1e6]))
    shapes = draw(st.lists(st.sampled_from([(), (0,), (3,), (2, 3)]), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    g = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = draw(
        st.lists(st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 1.0)), min_size=2, max_size=6)
    )

    def values(scale: float) -> list[torch.Tensor]:
        # some lie beyond the bound
        return [torch.tensor(g.normal(0, 0.5 * options.bound * scale, s)).to(dtype) for s in shapes]

    return options, largest, [
        {"mean": Mean(values(1), w * largest), "list": [Mean({"x": values(1)[0]}, 0), Sum(values(largest))]}
        for w in weights
    ]  # fmt: skip


@given(rounds())
def test_the_error_keeps_to_the_stated_bound(drawn: tuple[SecureSums, float, list[Any]]) -> None:
    options, largest, replies = drawn
    n, clipped = len(replies), 0
    aggregator, plain = secure(range(n), options, largest=largest), Aggregator(range(n))
    rounded = 0.0
    grid = FixedPoint(options, n, largest)
    for client, reply in enumerate(replies):
        aggregator.add(client, reply)

        def clip(_: str, leaf: Mean[Any] | Sum[Any]) -> Any:
            nonlocal clipped
            weight = leaf.weight if isinstance(leaf, Mean) else 1.0
            limit = options.bound * (1 if isinstance(leaf, Mean) else largest)
            parts = tree.tensors(leaf.value)
            clipped += sum(int((t.double().abs() > limit).sum()) for t in parts) if weight else 0
            value = tree.map_leaves(lambda t: t.double().clip(-limit, limit), leaf.value)
            return Mean(value, leaf.weight) if isinstance(leaf, Mean) else Sum(value)

        ready = map_contributions(clip, reply)
        plain.add(client, ready)
        rounded += round(ready["mean"].weight / grid.unit) * grid.unit
    actual, expected = aggregator.finish(), plain.finish()
    assert aggregator.clipped == clipped
    if rounded == 0:
        assert actual["mean"] is None
        return
    kept = [r for r in replies if r["mean"].weight]
    mean = options.bound / (2 ** (options.bits - 1) - 1) / 2 + len(kept) * options.bound * grid.unit / rounded
    actual = tree.map_leaves(lambda t: t.double(), actual)
    slack = 1e-6 if replies[0]["mean"].value[0].dtype == torch.float32 else 1e-13
    limit = options.bound * largest * n
    assert_close(
        actual,
        expected,
        replies[0],
        mean + slack * options.bound,
        n * grid.step * grid.unit / 2 + slack * limit,
    )


def test_the_bound_is_met_closely_and_by_nothing_smaller() -> None:
    options = SecureSums(on=True, bits=3, bound=3.0)  # values -3, -2, ..., 3
    aggregator = secure((0, 1), options)
    for client in (0, 1):
        aggregator.add(client, Mean(torch.tensor([0.49, -1.51, 9.0, -3.0]), client + 1))
    assert aggregator.finish().tolist() == [0.0, -2.0, 3.0, -3.0]
    assert aggregator.clipped == 2


@pytest.mark.parametrize("bits", [2, 8, 22, 31, 32])
@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 1000, 100_000])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_wrap_and_no_bits_are_wasted(bits: int, n: int, sign: int) -> None:
    grid = FixedPoint(SecureSums(on=True, bits=bits), n, 100.0)
    like = [Mean(torch.tensor(sign * 8.0), 100.0), Sum(torch.tensor(sign * 800.0))]
    vector, clipped, coarse_weights = grid.encode([(leaf, [leaf.value]) for leaf in like])
    mean, total = grid.decode(vector * np.uint64(n), like)
    assert (clipped, coarse_weights) == (0, [])
    assert float(mean) == sign * 8.0
    assert float(total) == pytest.approx(sign * 800.0 * n, rel=1e-6)
    # bits of values, of weights and of the number of clients fill the modulus, but for powers of two
    used = bits + math.log2(200 / grid.unit) + math.log2(n)
    assert used > 62 or grid.unit <= 200 / 2**32


def test_whole_numbers_of_examples_are_exact_weights() -> None:
    assert FixedPoint(BASIS, 1000, 1e6).unit <= 2**-10


def test_weights_that_are_no_multiples_of_the_unit_are_rounded() -> None:
    options = SecureSums(on=True, bits=32, bound=1.0)
    grid = FixedPoint(options, 2, 1.0)
    aggregator = secure((0, 1), options, largest=1.0)
    w = (1000.5 * grid.unit, 1.0)
    aggregator.add(0, Mean(torch.tensor(1.0, dtype=torch.float64), w[0]))
    aggregator.add(1, Mean(torch.tensor(-1.0, dtype=torch.float64), w[1]))
    error = abs(float(aggregator.finish()) - (w[0] - w[1]) / sum(w))
    assert grid.unit / 2 < error <= grid.step / 2 + 2 * grid.unit / 2 * 2


def test_a_weight_above_the_largest_is_refused_and_not_clipped() -> None:
    aggregator = secure((0, 1))
    with pytest.raises(
        TaskError, match=r"client 0: its weight in a mean is 160, and .* up to 16 .*one number"
    ):
        aggregator.add(0, Mean(torch.ones(2), 160.0))
    # shares that sum to 1 up to rounding are no error
    aggregator.add(0, Mean(torch.ones(2), 16 * (1 + 1e-6)))
    aggregator.add(1, Mean(torch.zeros(2), 16))
    assert aggregator.finish().tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert aggregator.clipped == 0


@pytest.mark.parametrize("steps", [1e-3, 0.4, 5.4, 300.4])
def test_a_weight_that_the_grid_rounds_coarsely_is_refused(steps: float) -> None:
    """It was rounded without a word, below half a step to 0."""
    aggregator = secure((0, 1))
    unit = aggregator.grid.unit
    with pytest.raises(
        TaskError, match=r"its largest weight .* to multiples of .* by their numbers of examples"
    ):
        aggregator.add(0, {"a": Mean(torch.ones(2), steps * unit), "empty": Mean({}, 16)})
    aggregator.add(0, {"a": Mean(torch.ones(2), 3 * unit), "empty": Mean({}, 16)})
    assert aggregator.coarse_weights == []


def test_a_share_close_to_zero_is_named_and_not_refused() -> None:
    aggregator = secure((0, 1))
    share = 0.4 * aggregator.grid.unit
    for client in (0, 1):
        aggregator.add(client, [Mean(torch.ones(1), 16 - share), Mean(torch.ones(1), share)])
    assert aggregator.coarse_weights == [share, share]
    first, second = aggregator.finish()
    assert (float(first), second) == (pytest.approx(1.0, abs=1e-6), None)


def test_sums_of_integers_wrap_as_torch_adds_them() -> None:
    big = torch.tensor([2**62, -(2**62), 2**63 - 1])
    aggregator, plain = secure((0, 1, 2)), Aggregator((0, 1, 2))
    for client in (0, 1, 2):
        aggregator.add(client, Sum(big))
        plain.add(client, Sum(big))
    assert torch.equal(aggregator.finish(), plain.finish())


# ---- what the server sees


def uniform(vector: np.ndarray) -> float:
    """p-value of the chi-square test of uniform bytes, the least over the 8 places."""
    columns = vector.view(np.uint8).reshape(-1, 8)
    return min(chisquare(np.bincount(columns[:, i], minlength=256)).pvalue for i in range(8))


SIZE = 20_000


class Seen(MaskedSum):
    """A server that keeps what it gets."""

    vectors: dict[int, np.ndarray]

    def add(self, client: int, masked: np.ndarray) -> None:
        self.__dict__.setdefault("vectors", {})[client] = masked
        super().add(client, masked)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SecureAggregator:
    """A round after all have replied with one and the same value."""
    monkeypatch.setattr("fedlowrank.trust.secure_sums.MaskedSum", Seen)
    aggregator = secure()
    for client in CLIENTS:
        aggregator.add(client, Mean(torch.full((SIZE,), 0.5), 1.0))
    return aggregator


def server_of(aggregator: SecureAggregator) -> Seen:
    actual = aggregator._server
    assert isinstance(actual, Seen)
    return actual


def test_a_masked_vector_is_uniform(seen: SecureAggregator) -> None:
    for vector in server_of(seen).vectors.values():
        assert vector.dtype == np.uint64
        assert uniform(vector) > 1e-4
    a, b, *_ = server_of(seen).vectors.values()
    assert uniform(a - b) > 1e-4
    assert uniform(np.full(SIZE, 77, np.uint64)) == 0


def test_without_the_pair_masks_the_own_mask_hides_a_vector(seen: SecureAggregator) -> None:
    """As for a client that the server took for lost, and whose vector comes late."""
    for client, vector in server_of(seen).vectors.items():
        keys = seen._clients[client].keys
        pairs = [keys.mask(o, k, vector.size) for o, k in seen._public_keys.items() if o != client]
        assert uniform(vector - sum(pairs[1:], pairs[0])) > 1e-4


def test_the_sum_of_all_but_one_is_useless_even_without_own_masks(seen: SecureAggregator) -> None:
    vectors, own = server_of(seen).vectors, {c: expand(seen._clients[c]._seed, SIZE + 1) for c in CLIENTS}
    for left_out in CLIENTS:
        rest = [c for c in CLIENTS if c != left_out]
        partial = np.sum([vectors[c] for c in rest], axis=0)
        assert uniform(partial) > 1e-4
        assert uniform(partial - np.sum([own[c] for c in rest], axis=0)) > 1e-4
    everything = np.sum([vectors[c] - own[c] for c in CLIENTS], axis=0)
    assert len(set(everything[1:].tolist())) == 1


def test_nobody_reveals_both_secrets_of_a_client_nor_any_to_too_few(seen: SecureAggregator) -> None:
    for client in seen._clients.values():
        replied = {3, 5, 8, 9}
        revealed = client.reveal(replied)
        assert set(revealed) == set(CLIENTS)
        for owner, share in revealed.items():
            assert share == client.shares[owner][0 if owner in replied else 1]
        assert client.reveal({3, 5, 8}) == {}


def test_too_few_shares_give_no_secret() -> None:
    aggregator = secure()
    for client in CLIENTS[:4]:
        aggregator.add(client, Sum(torch.tensor([client])))
    aggregator.skip(11)
    # a holder that does not answer in the last round
    aggregator._clients[5].shares.clear()
    assert aggregator.finish() is None
    assert "3 holders of shares of client" in aggregator.reason
    assert "secure.threshold" in aggregator.reason
    assert aggregator.contributed == []


def test_masks_of_another_round_and_another_client_differ() -> None:
    a, b = secure(), SecureAggregator(CLIENTS, BASIS, KEY / "next", 16)
    seeds = {s for x in (a, b) for c in x._clients.values() for s in (c._seed, c._secret)}
    assert len(seeds) == 4 * len(CLIENTS)


# ---- the plan


@pytest.mark.parametrize("n", [1, 2, 5, 17, 20, 21, 33, 100, 1000])
def test_neighbors_are_mutual_few_and_connected(n: int) -> None:
    plan = MaskingPlan(list(range(n)), 0.66, KEY)
    near = {c: set(h) for c, h in plan.holders.items()}
    assert all(c in h and all(c in near[o] for o in h) for c, h in near.items())
    expected = min(n, 4 * math.ceil(math.log2(n)) + 1)
    assert {len(h) for h in near.values()} == {expected}
    reached, actual = {0}, [0]
    while actual:
        actual = sorted(set().union(*(near[c] for c in actual)) - reached)
        reached |= set(actual)
    assert len(reached) == n
    assert plan.threshold <= expected


def test_a_hundred_clients_need_ten_of_twenty_nine_holders() -> None:
    plan = MaskingPlan(list(range(100)), 0.66, KEY)
    assert (plan.min_replies, plan.threshold) == (66, 10)
    assert MaskingPlan(list(range(20)), 0.66, KEY).threshold == 14
    # 0.7 * 10 and 0.55 * 100 are a little more than 7 and 55 in binary
    assert MaskingPlan(list(range(10)), 0.7, KEY).min_replies == 7
    assert MaskingPlan(list(range(100)), 0.55, KEY).min_replies == 55


def test_a_sum_of_one_is_no_sum() -> None:
    aggregator = secure((4,), SecureSums(on=True, threshold=0.51))
    aggregator.add(4, contribution(4))
    assert aggregator.finish() is None
    assert "1 clients replied, and 2 must" in aggregator.reason
    assert secure(()).finish() is None


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"a": Mean(torch.ones(2, 3)), "e": Each(1)}, TaskError, "the Each at '/e'"),
        ({"a": Mean(torch.ones(3, 3))}, TreeError, "at '/a' it has torch.float32 [3, 3]"),
        ({"a": Mean(torch.ones(2, 3).double())}, TreeError, "torch.float64"),
        ({"a": Sum(torch.ones(2, 3))}, TreeError, "leaves"),
        ({"b": Mean(torch.ones(2, 3))}, TreeError, "leaves"),
        ({"a": Mean({"w": torch.ones(2, 3)})}, TreeError, "trees differ"),
        ({"a": Mean(torch.full((2, 3), math.nan))}, TreeError, "a NaN"),
        ({"a": Mean(torch.full((2, 3), -math.inf))}, TreeError, "an infinity"),
        ({"a": Mean(torch.ones(2, 3), -1.0)}, TreeError, "weight"),
        ({"a": "what"}, TreeError, "str"),
    ],
)
def test_a_contribution_of_another_form_is_refused_and_its_client_named(
    wrong: Any, error: type[Exception], says: str
) -> None:
    aggregator = secure()
    aggregator.add(3, {"a": Mean(torch.ones(2, 3))})
    with pytest.raises(error, match="client 5") as actual:
        aggregator.add(5, wrong)
    assert says in str(actual.value)
    # nothing of it was added
    for client in (8, 9, 11):
        aggregator.add(client, {"a": Mean(torch.ones(2, 3))})
    aggregator.skip(5)
    assert float((aggregator.finish()["a"] - 1).abs().max()) <= GRID.step / 2 + 1e-7


@pytest.mark.parametrize(
    "value", [Sum(torch.tensor([True])), Mean(torch.tensor([1])), Sum(torch.ones(1) * 1j)]
)
def test_what_has_no_fixed_point_is_refused_from_the_first_client_on(value: Any) -> None:
    with pytest.raises(TreeError, match=r"client 3.*means take floats"):
        secure().add(3, {"x": value})


def test_each_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(TaskError, match=r"client 3.*must see the Each at '/1' by itself.*secure.on = false"):
        secure().add(3, [Mean(torch.ones(1)), Each(torch.ones(1))])


def test_keys_of_a_dict_may_come_in_another_order() -> None:
    aggregator = secure((0, 1))
    aggregator.add(
        0, {"a": Sum({"x": torch.tensor([1]), "y": torch.tensor([2])}), "b": Sum(torch.tensor([3]))}
    )
    aggregator.add(
        1, {"b": Sum(torch.tensor([30])), "a": Sum({"y": torch.tensor([20]), "x": torch.tensor([10])})}
    )
    assert tree.map_leaves(int, aggregator.finish()) == {"a": {"x": 11, "y": 22}, "b": 33}


def test_each_client_replies_once_and_none_is_forgotten() -> None:
    aggregator = secure()
    aggregator.add(3, contribution(3))
    with pytest.raises(ValueError, match="client 3"):
        aggregator.add(3, contribution(3))
    with pytest.raises(ValueError, match="client 4"):
        aggregator.add(4, contribution(4))
    with pytest.raises(ValueError, match=r"\[5, 8, 9, 11\]"):
        aggregator.finish()


@pytest.mark.parametrize("largest", [0.0, -1.0, math.inf, math.nan])
def test_the_largest_weight_is_a_number_above_zero(largest: float) -> None:
    with pytest.raises(ConfigError, match="largest weight"):
        secure(largest=largest)


@pytest.mark.parametrize(
    "module",
    ["flwr.common.secure_aggregation.crypto.shamir", "cryptography.hazmat.primitives.asymmetric.x25519"],
)
def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    _load.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"fedlowrank\[network\]"):
        secure()


def test_a_contribution_without_tensors() -> None:
    aggregator = secure((0, 1))
    for client in (0, 1):
        aggregator.add(client, {})
    assert aggregator.finish() == {}


@pytest.mark.full
def test_a_hundred_clients_with_a_hundred_thousand_numbers_take_seconds() -> None:
    clients, x = list(range(100)), torch.linspace(-1, 1, 100_000)
    start = time.process_time()
    aggregator = secure(clients)
    for client in clients:
        if client % 10:
            aggregator.add(client, Mean(x, 2.0))
        else:
            aggregator.skip(client)
    actual = aggregator.finish()
    assert time.process_time() - start < 20
    assert float((actual - x).abs().max()) <= aggregator.grid.step / 2 + 1e-7
