"""A client's examples are split into parts of the shares that were set, and each example is in one part."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.clients import make_clients, subsample_training
from fedlowrank.data.partitioning.partition import (
    Dirichlet,
    EqualDirichlet,
    Iid,
    LabelGroups,
    Natural,
    Pathological,
)
from fedlowrank.data.partitioning.split import SPLITS, LocalSplit, Matched, OwnTest, TestShare, WholeTest
from tests.data.made_datasets import numbered

KEY = Key((3,))


def ids(examples) -> list[int]:
    return examples.x[:, 0].long().tolist()


def everything(client) -> list[int]:
    return ids(client.train) + ids(client.val) + ids(client.test)


class FixedPartition:
    """A partition by hand."""

    def __init__(self, *parts):
        self.parts = [np.array(part, dtype=np.int64) for part in parts]

    def assign(self, labels, classes, key, natural=None):
        return self.parts


@pytest.mark.full
@given(st.integers(3, 60), st.integers(0, 1000))
def test_local_gives_each_part_its_share_and_at_least_one(n, seed):
    (client,) = make_clients(numbered(n, 0), Iid(1), LocalSplit(), Key((seed,)))
    assert sorted(everything(client)) == list(range(n))
    assert abs(len(client.train) - 0.8 * n) < 2
    for part in (client.val, client.test):
        assert len(part) >= 1
        assert abs(len(part) - 0.1 * n) < 1
    for part in (client.train, client.val, client.test):
        assert (part.y == torch.tensor(ids(part)) % 4).all()
        assert part.x.is_contiguous()


@pytest.mark.parametrize(
    ("n", "shares", "sizes"), [(5, (0.8, 0.1, 0.1), (3, 1, 1)), (2, (0.9, 0.0, 0.1), (1, 0, 1))]
)
def test_local_takes_from_the_largest_part_for_an_empty_one(n, shares, sizes):
    (c,) = make_clients(numbered(n, 0), Iid(1), LocalSplit(*shares), KEY)
    assert (len(c.train), len(c.val), len(c.test)) == sizes


def test_pool_all_shares_out_the_official_test_part_too():
    alone = make_clients(numbered(), Iid(4), LocalSplit(), KEY)
    both = make_clients(numbered(), Iid(4), LocalSplit(pool="all"), KEY)
    assert sorted(i for c in alone for i in everything(c)) == list(range(400))
    assert sorted(i for c in both for i in everything(c)) == [*range(400), *range(10_000, 10_200)]
    for c in both:
        for part in (c.train, c.val, c.test):
            assert (part.y == torch.tensor(ids(part)) % 4).all()


def test_equal_keys_give_equal_clients_and_others_do_not():
    for name, kind in SPLITS.items():
        natural = torch.arange(400) % 4, torch.arange(200) % 4
        partition = Iid(4) if name == "test_share" else Natural()
        first, again, other = (
            make_clients(numbered(400, 200, 4, *natural), partition, kind(), k)
            for k in (KEY, Key((3,)), Key((4,)))
        )
        assert [everything(c) for c in first] == [everything(c) for c in again], name
        assert [everything(c) for c in first] != [everything(c) for c in other], name


def test_matched_has_the_mixture_of_the_client():
    own = [*range(0, 120, 4), *range(1, 40, 4)]  # 30 of class a, 10 of class b
    (client,) = make_clients(numbered(), FixedPartition(own), Matched(val=0.25, test_per_client=40), KEY)
    assert len(client.train) == 30
    assert len(client.val) == 10
    assert sorted(ids(client.train) + ids(client.val)) == sorted(own)
    assert torch.bincount(client.test.y, minlength=4).tolist() == [30, 10, 0, 0]
    assert len(set(ids(client.test))) == 40
    assert min(ids(client.test)) >= 10_000
    assert all("belong to no client" in note for note in client.notes)
    own = [0, 4, 8, 1, 5, 2, 6]  # 3 a, 2 b, 2 c: of 10 test examples 4.29, 2.86, 2.86
    (client,) = make_clients(numbered(), FixedPartition(own), Matched(test_per_client=10), KEY)
    assert torch.bincount(client.test.y, minlength=4).tolist() == [4, 3, 3, 0]


def test_matched_says_when_the_test_part_runs_out():
    (client,) = make_clients(numbered(400, 8), FixedPartition([0, 4, 1]), Matched(test_per_client=9), KEY)
    assert torch.bincount(client.test.y).tolist() == [2, 2]
    assert len(client.notes) == 3
    assert "client 0: 2 test examples of class 'a' instead of 6" in client.notes[1]
    with pytest.raises(DataError, match="client 1 gets no test example"):
        make_clients(numbered(400, 1), FixedPartition([0, 4], [1, 5]), Matched(), KEY)


def test_whole_test_is_shared_and_complete():
    data = numbered()
    clients = make_clients(data, Iid(4), WholeTest(), KEY)
    for c in clients:
        assert ids(c.test) == list(range(10_000, 10_200))
        assert c.test.x.data_ptr() == data.test.x.data_ptr()
        assert (len(c.train), len(c.val)) == (90, 10)
    assert sorted(i for c in clients for i in ids(c.train) + ids(c.val)) == list(range(400))


def test_own_test_follows_the_natural_client():
    natural = torch.arange(400) % 5
    data = numbered(natural=natural, natural_test=torch.arange(200) % 5)
    for i, c in enumerate(make_clients(data, Natural(), OwnTest(), KEY)):
        assert {n % 5 for n in everything(c)} == {i}
        assert len(c.test) == 40
    with pytest.raises(DataError, match="client 0 mixes"):
        make_clients(data, Iid(2), OwnTest(), KEY)
    with pytest.raises(DataError, match="both"):
        make_clients(numbered(natural=natural), Natural(), OwnTest(), KEY)
    ones = numbered(natural=natural, natural_test=torch.ones(200, dtype=torch.int64))
    with pytest.raises(DataError, match=r"client 0 \(natural client 0\) has no example"):
        make_clients(ones, Natural(), OwnTest(), KEY)


@pytest.mark.full
@given(st.integers(1, 30), st.integers(30, 90), st.sampled_from([0.0, 0.2]), st.integers(0, 1000))
def test_test_share_gives_every_test_example_to_one_client(clients, n_test, val, seed):
    data = numbered(120, n_test)
    shared = make_clients(data, Iid(clients), TestShare(val), Key((seed,)))
    assert sorted(i for c in shared for i in ids(c.test)) == list(range(10_000, 10_000 + n_test))
    assert sorted(i for c in shared for i in ids(c.train) + ids(c.val)) == list(range(120))
    sizes = [len(c.test) for c in shared]
    assert max(sizes) - min(sizes) <= 1
    assert all((len(c.val) > 0) == (val > 0) for c in shared)
    # the training part is shared out as with any other split
    whole = make_clients(data, Iid(clients), WholeTest(val), Key((seed,)))
    assert [ids(c.train) for c in shared] == [ids(c.train) for c in whole]


def test_test_share_follows_the_groups_of_labels():
    for c in make_clients(numbered(200, 200), Iid(4), TestShare(), KEY):
        assert ids(c.test) != [10_000 + i for i in ids(c.train)]
    clients = make_clients(numbered(), LabelGroups(2, 6), TestShare(), KEY)
    assert sorted(i for c in clients for i in ids(c.test)) == list(range(10_000, 10_200))
    for k, c in enumerate(clients):
        assert set(c.test.y.tolist()) | set(c.train.y.tolist()) <= ({0, 1} if k % 2 == 0 else {2, 3})
        assert len(c.test) in (33, 34)


def test_test_share_refuses_partitions_that_draw_mixtures():
    natural = {"natural": torch.arange(400) % 5, "natural_test": torch.arange(200) % 5}
    for partition in (Dirichlet(5), EqualDirichlet(5), Pathological(5), Natural()):
        with pytest.raises(
            DataError, match=rf"{type(partition).__name__} cannot.*'iid' or 'label_groups'.*own_test"
        ):
            make_clients(numbered(**natural), partition, TestShare(), KEY)
    with pytest.raises(DataError, match="no official test part"):
        make_clients(numbered(400, 0), Iid(5), TestShare(), KEY)
    with pytest.raises(DataError, match="official test part: 11 clients cannot share 10 examples"):
        make_clients(numbered(400, 10), Iid(11), TestShare(), KEY)


@pytest.mark.full
@given(st.floats(0.01, 1), st.integers(1, 30), st.integers(1, 9), st.integers(0, 1000))
def test_subsampling_keeps_a_share_of_the_training_examples_and_all_others(share, least, clients, seed):
    before = make_clients(numbered(), Iid(clients), LocalSplit(), Key((seed,)))
    after = subsample_training(before, share, least, Key((seed,)))
    for old, new in zip(before, after, strict=True):
        n = len(old.train)
        assert len(new.train) == min(n, max(least, round(share * n)))
        assert set(ids(new.train)) <= set(ids(old.train))
        assert ids(new.train) == sorted(set(ids(new.train)))
        assert (new.train.y == torch.tensor(ids(new.train)) % 4).all()
        assert new.val is old.val
        assert new.test is old.test
    assert [ids(c.train) for c in subsample_training(before, share, least, Key((seed,)))] == [
        ids(c.train) for c in after
    ]


def test_each_client_is_subsampled_with_a_key_of_its_own():
    (one,) = make_clients(numbered(), Iid(1), LocalSplit(), KEY)
    kept = [ids(c.train) for c in subsample_training([one] * 3, 0.1, 1, KEY)]
    assert len({tuple(k) for k in kept}) == 3
    # a client more or less changes nothing for the others
    assert [ids(c.train) for c in subsample_training([one] * 2, 0.1, 1, KEY)] == kept[:2]


def test_natural_clients_with_the_parts_together():
    data = numbered(natural=torch.arange(400) % 5, natural_test=torch.arange(200) % 5)
    for i, c in enumerate(make_clients(data, Natural(), LocalSplit(pool="all"), KEY)):
        assert {n % 5 for n in everything(c)} == {i}
        assert len(everything(c)) == 120
    with pytest.raises(DataError, match="no natural clients"):
        make_clients(numbered(natural=torch.arange(400) % 5), Natural(), LocalSplit(pool="all"), KEY)


def test_clients_with_too_little_are_named():
    first, second = make_clients(numbered(), FixedPartition(range(0, 40, 4), range(1, 41)), LocalSplit(), KEY)
    assert first.notes == (
        "359 of 400 training examples belong to no client",
        "client 0: a single class, 'a'",
    )
    assert second.notes == ()
    with pytest.raises(DataError, match="client 1 has 2 examples, too few for one in each of 3 parts"):
        make_clients(numbered(), FixedPartition(range(10), [11, 12]), LocalSplit(), KEY)
    with pytest.raises(DataError, match="client 1 has no examples"):
        make_clients(numbered(), FixedPartition(range(10), []), LocalSplit(), KEY)
    for split in (Matched(), WholeTest()):
        with pytest.raises(DataError, match="client 0 has 1 example, too few for two parts"):
            make_clients(numbered(), FixedPartition([0]), split, KEY)
    (client,) = make_clients(numbered(), FixedPartition([0]), WholeTest(val=0.0), KEY)
    assert (len(client.train), len(client.val)) == (1, 0)


def test_splits_that_need_a_test_part_say_so():
    for split in (Matched(), WholeTest(), OwnTest()):
        with pytest.raises(DataError, match=r"'numbers' has no official test part.*'local'"):
            make_clients(numbered(n_test=0), Iid(2), split, KEY)


def test_settings_are_checked():
    for wrong in ((0.9, 0.1, 0.1), (0.0, 0.9, 0.1), (1.1, -0.2, 0.1), (0.9, 0.1, 0.0)):
        with pytest.raises(ConfigError, match="train, val, test"):
            LocalSplit(*wrong)
    with pytest.raises(ConfigError, match="pool"):
        LocalSplit(pool="test")
    for kind in (Matched, WholeTest, OwnTest, TestShare):
        for val in (-0.1, 1.0, float("nan")):
            with pytest.raises(ConfigError, match=r"split\.val"):
                kind(val=val)
    with pytest.raises(ConfigError, match="test_per_client"):
        Matched(test_per_client=0)
