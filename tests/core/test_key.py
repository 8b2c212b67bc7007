"""Named randomness: equal names give equal draws, and torch's, NumPy's and Python's own generators are left
alone."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlowrank.core import tree
from fedlowrank.core.key import Key, generator_states
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.methods import METHODS
from fedlowrank.models.architecture import build_module
from tests.methods.setting import federate_one_model, federate_two_models, run_rounds

NAMES = st.one_of(st.integers(-5, 5), st.sampled_from(["", "0", "1", "-1", "a", "b", '"', "[", ",", "1, 2"]))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(tuple)


@settings(derandomize=True, deadline=None)
@given(PATHS, PATHS)
def test_seeds_are_equal_exactly_for_equal_paths(a: tuple[str | int, ...], b: tuple[str | int, ...]) -> None:
    same = [type(x) for x in a] == [type(x) for x in b] and a == b
    assert (Key(a).seed() == Key(b).seed()) == same


def test_a_number_is_not_its_spelling() -> None:
    root = Key((0,))
    assert (root / 1).seed() != (root / "1").seed()
    assert Key((0,)).seed() != Key(("0",)).seed()
    assert (root / "a" / "b").seed() != (root / "ab").seed() != (root / "b" / "a").seed()


def test_seeds_fit_every_generator() -> None:
    seeds = [(Key((0,)) / i).seed() for i in range(2000)]
    assert all(0 <= s < 2**63 for s in seeds)
    assert len(set(seeds)) == 2000
    # both halves of the bits are in use
    assert max(seeds) > 2**62
    assert len({s % 1024 for s in seeds}) > 700


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    root = Key((7,))
    straight = [torch.rand(3, generator=(root / i).generator()) for i in range(4)]
    for i in (3, 1, 0, 2, 1):
        torch.rand(100, generator=(root / "other").generator())
        assert torch.equal(torch.rand(3, generator=(root / i).generator()), straight[i])
    assert np.array_equal((root / "n").numpy().random(5), (root / "n").numpy().random(5))


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    # runs are to be repeatable from their configuration alone, so the derivation of seeds may not change;
    # blake2b of the JSON of the path, 8 bytes, little end first, without the last bit
    digest = hashlib.blake2b(b'[0, "client", 3]', digest_size=8).digest()
    assert (Key((0,)) / "client" / 3).seed() == int.from_bytes(digest, "little") >> 1


def global_state() -> tuple[object, ...]:
    numpy_state = np.random.get_state()  # noqa: NPY002 - this generator is the one that must not move
    return (torch.random.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2], random.getstate())


@pytest.mark.parametrize("name", ["standalone", "floral"])
def test_a_whole_run_moves_no_global_generator_and_heeds_none(name: str) -> None:
    def made() -> list[list[float]]:
        federation = federate_two_models() if METHODS[name].heterogeneous else federate_one_model()
        run = run_rounds(
            METHODS[name](optimizer=SGD(lr=0.1), batch_size=8), federation, rounds=2, participation=0.5
        )
        return [
            t.flatten().tolist()
            for s in run.state.clients.values()
            if s is not None
            for _, t in tree.leaves(s)
        ]

    torch.manual_seed(1)
    random.seed(1)
    before = global_state()
    first = made()
    assert global_state() == before
    torch.manual_seed(2)
    random.seed(2)
    assert made() == first


def test_building_a_model_and_running_one_with_dropout_moves_no_global_generator() -> None:
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))

    torch.manual_seed(1)
    before = global_state()
    a = build_module(net, Key((0,)))
    b = build_module(net, Key((1,)))
    assert not torch.equal(a[0].weight, b[0].weight)
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 12)).astype(np.float32), rng.integers(0, 4, 20)) for _ in range(2)]
    run_rounds(
        METHODS["fedavg"](optimizer=SGD(lr=0.1), batch_size=8),
        Federation.from_arrays(clients, net, classes=4),
    )
    assert global_state() == before


def test_a_model_is_built_from_its_key_alone() -> None:
    torch.manual_seed(1)
    a = build_module(lambda: torch.nn.Linear(3, 2), Key((0,)))
    torch.manual_seed(99)
    b = build_module(lambda: torch.nn.Linear(3, 2), Key((0,)))
    assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), random.random, np.random.rand, np.random.randn],
    ids=["torch", "python", "numpy", "numpy, normal"],
)
def test_each_draw_changes_the_states_of_the_generators(draw: Callable[[], object]) -> None:
    with Key((0,)).global_generators():
        states = [generator_states()]
        assert generator_states() == states[0]
        for _ in range(3):  # numpy keeps every second normal number
            draw()
            states.append(generator_states())
    assert all(a != b for a, b in itertools.pairwise(states))


def test_seeded_generators_of_user_code_leave_a_kept_normal_number() -> None:
    np.random.seed(1)  # noqa: NPY002 - what a user writes
    expected = np.random.randn(3)[1:]  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002
    with Key((0,)).global_generators():
        np.random.randn()  # noqa: NPY002
    assert np.random.randn() == expected[0]  # noqa: NPY002
    assert np.random.randn() == expected[1]  # noqa: NPY002
