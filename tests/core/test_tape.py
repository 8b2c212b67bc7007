"""A step that is played from a tape is the step itself, bit for bit; what may differ another time has no tape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import fused, tape, tree
from fedlowrank.descent import Work
from fedlowrank.engine.stacked import Stack, joined
from fedlowrank.fused import Fusion
from fedlowrank.key import Key
from fedlowrank.method import Batch, Pull, Request
from fedlowrank.models.architecture import Architecture, build
from fedlowrank.optimiser import SGD, Schedule
from fedlowrank.tape import Tape, UnrepeatableError, captured
from fedlowrank.train import descend

from .test_fused import WIDE, Params, batches, loss, numbers, request

Descend = Callable[[Request, Fusion, list[Batch]], Params]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tapes in the order in which they are played; a step is recorded when its form comes for the second time."""
    monkeypatch.setattr(fused, "OFTEN", 2)
    return heard(monkeypatch)


def heard(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    found: list[Tape] = []
    play = Tape.play

    def listening(self: Tape, work: Work, batch: Batch) -> Tensor:
        found.append(self)
        return play(self, work, batch)

    monkeypatch.setattr(Tape, "play", listening)
    return found


def end(r: Request, steps: list[Batch], fusion: Fusion | None = None, round: int = 0) -> tuple[Params, Tensor]:
    fusion = Fusion(Work(r, round), steps[0]) if fusion is None else fusion
    found: tuple[Params, Tensor] = descend(r, iter(steps), round, None, fusion)
    return found


def without_tapes(r: Request, steps: list[Batch], round: int = 0) -> tuple[Params, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "OFTEN", 10**9)
        return end(r, steps, None, round)


def check(r: Request, steps: list[Batch], fusion: Fusion | None = None, round: int = 0) -> None:
    assert tree.equal(list(end(r, steps, fusion, round)), list(without_tapes(r, steps, round)))


# -- the same bits -----------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.4]), st.booleans(), st.integers(0, 2**16))
def test_a_pass_is_the_same_bit_for_bit(decay: float, strength: float, along: bool, seed: int) -> None:
    pull = Pull(strength, numbers(seed + 1, **WIDE), numbers(seed + 2, **WIDE) if along else None)
    r = request(start=numbers(seed, **WIDE), optimiser=SGD(lr=0.3, weight_decay=decay), pull=pull)
    steps = batches(6, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "OFTEN", 2)
        found = heard(patch)
        fusion = Fusion(Work(r, 0), steps[0])
        check(r, steps, fusion)
        # the first step reads the start itself, and has a tape of its own from the second pass on
        check(r, steps, fusion)
        check(r, steps, fusion)
        assert len(set(found)) == 2
        assert len(found) == 2 + 4 + 5 + 6 - 1
        # another client's: all that is not its form may differ
        other = dataclasses.replace(r, start=numbers(seed + 3, **WIDE), pull=dataclasses.replace(pull, towards=r.start))
        check(other, batches(3, seed + 4), fusion)
        assert len(set(found)) == 2


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([0.0, 0.4]), st.integers(0, 2**16))
def test_clients_at_once_are_the_same_bit_for_bit(strength: float, seed: int) -> None:
    each = [
        request(masked, numbers(seed + c, **WIDE), pull=Pull(strength, numbers(seed + 9, **WIDE))) for c in range(3)
    ]
    feeds = [batches(6, seed + c) for c in range(3)]

    def trained(often: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "OFTEN", often)
            found = heard(patch)
            fusion, work = Fusion(Work(each[0], 0), feeds[0][0]), Stack(each, 0)
            take = fusion.begin(work)
            values = []
            for step in range(6):
                if step == 4:
                    work.narrow(2)
                values.append(take(joined([f[step] for f in feeds[: work.clients]])))
            return [work.ends, torch.cat(values)], len(found)

    (a, played), (b, unplayed) = trained(3), trained(10**9)
    # each tape is played once more to see whether it is right; of three clients from the first step on, of two from the second
    assert (played, unplayed) == (1 + 3 + 1, 0)
    assert tree.equal(a, b)


def masked(p: Params, batch: Batch) -> Tensor:
    return batch.mean(functional.cross_entropy(torch.tanh(batch.x @ p["a"].T) @ p["c"].T, batch.y, reduction="none"))


class Small(nn.Module):
    """Of all that small models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(functional.gelu(functional.max_pool2d(self.norm(self.conv(x)), 2)).flatten(1))
        return out


def architecture(module: Callable[[], nn.Module] = Small) -> Architecture:
    return Architecture("small", build(module, Key(1)), torch.zeros(2, 1, 8, 8))


def images(count: int, size: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, size, 1, 8, 8, generator=generator)
    y = torch.randint(0, 3, (count, size), generator=generator)
    return [Batch(x[i], y[i], step=i) for i in range(count)]


def test_a_model_is_the_same_bit_for_bit(played: list[Tape]) -> None:
    model = architecture()

    def own(p: Params, batch: Batch, other: Params) -> Tensor:
        return batch.mean(functional.cross_entropy(model.apply(p, batch.x), batch.y, reduction="none")) + (
            0.1 * tree.square_distance(p, other)
        )

    r = Request(own, model.initial, "local", SGD(lr=0.1), (model.initial,), None, None)
    check(r, images(6))
    # no matrix is large enough to be fused, so the first step is as the others
    assert len(played) == 1 + 4


def test_what_is_one_tensor_when_it_is_recorded_may_be_two_later(played: list[Tape]) -> None:
    start = numbers(1, **WIDE)
    same = request(given=(start,), start=start, f=to_another)
    fusion = Fusion(Work(same, 0), batches(1)[0])
    check(same, batches(6), fusion)
    check(dataclasses.replace(same, given=(numbers(2, **WIDE),)), batches(6), fusion)
    assert len(set(played)) == 1


def to_another(p: Params, batch: Batch, other: Params) -> Tensor:
    return loss(p, batch) + 0.1 * tree.square_distance(p, other)


def test_what_a_model_has_that_is_not_trained_belongs_to_the_tape(played: list[Tape]) -> None:
    model = architecture()
    some = {n: t for n, t in model.initial.items() if n.startswith("conv")}

    def own(p: Params, batch: Batch) -> Tensor:
        return batch.mean(functional.cross_entropy(model.apply(p, batch.x), batch.y, reduction="none"))

    r = Request(own, some, "local", SGD(lr=0.1), (), None, None)
    check(r, images(6))
    assert len(played) == 1 + 4
    assert all(torch.equal(p, model.initial[n]) for n, p in model.module.named_parameters())


# -- what a tape depends on --------------------------------------------------------------------------------------------


def test_rates_forms_and_pulls_have_tapes_of_their_own(played: list[Tape]) -> None:
    schedule = Schedule(kind="exponential", factor=0.5)
    r = request(optimiser=SGD(lr=0.3, schedule=schedule))
    fusion = Fusion(Work(r, 0), batches(1)[0])
    for t in (0, 1, 0):
        check(r, batches(4), fusion, t)
    check(r, batches(4, size=3), fusion)
    check(dataclasses.replace(r, pull=Pull(0.3, numbers(4, **WIDE))), batches(4), fusion)
    check(dataclasses.replace(r, optimiser=SGD(lr=0.3, weight_decay=0.1)), batches(4), fusion)
    turned = {n: t.T.contiguous().T if t.ndim == 2 else t for n, t in numbers(5, **WIDE).items()}
    check(dataclasses.replace(r, start=turned), batches(4), fusion)
    assert len(set(played)) >= 6


def test_there_are_not_more_of_them_than_that(played: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TAPES", 2)
    fusion = Fusion(Work(request(), 0), batches(1)[0])
    for size in range(1, 7):
        check(request(), batches(4, size=size), fusion)
    assert len(set(played)) == 2


CALLS: dict[str, int] = {"loss": 0}


def called(p: Params, batch: Batch) -> Tensor:
    count()
    return loss(p, batch)


def count() -> None:
    CALLS["loss"] += 1


def test_the_loss_is_not_asked_any_more(played: list[Tape]) -> None:
    CALLS["loss"] = 0
    end(request(called), batches(50))
    # to see its linear maps, the first step, and one that is recorded before it is taken
    assert CALLS["loss"] == 1 + 2 + 2
    assert len(played) == 1 + 47


# -- what has none -----------------------------------------------------------------------------------------------------

SOMEWHERE = numbers(7, **WIDE)


def with_constants(p: Params, batch: Batch) -> Tensor:
    some = torch.arange(5.0) / torch.full((5,), 4.0) + torch.ones_like(batch.y[:1])
    return loss(p, batch) * some.sum()


def changed_in_place(p: Params, batch: Batch) -> Tensor:
    sums = torch.zeros(3)
    whole = sums.view(3, 1)
    for _ in range(2):
        # through a view, and from what differs from step to step
        whole.add_(loss(p, batch))
    return sums.sum() * torch.ones(()) + loss(p, batch)


def filled_in_place(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) + torch.zeros(2).add_(torch.ones(2)).mul_(3.0).sum()


@pytest.mark.parametrize("f", [with_constants, changed_in_place, filled_in_place])
def test_what_is_the_same_in_every_step_stays_so(f: Any, played: list[Tape]) -> None:
    r = request(f)
    fusion = Fusion(Work(r, 0), batches(1)[0])
    for seed in range(3):
        check(r, batches(6, seed), fusion)
    assert len(played) > 10


def test_what_is_the_same_in_every_step_is_computed_once(played: list[Tape]) -> None:
    end(request(with_constants), batches(6))
    code = played[-1]._play.__self__.code  # type: ignore[attr-defined]
    assert "arange" not in code
    assert "ones_like" not in code
    assert "same_" in code


def numbered(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * (1 + batch.step)


def named_by_number(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * {0: 1.0, 1: 2.0}.get(batch.step, 3.0)


def indexed_by_number(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * batch.x[batch.step % 2 if isinstance(batch.step, int) else batch.step, 0]


def first_only(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * (2.0 if batch.step == 0 else 1.0)


def looking(p: Params, batch: Batch) -> Tensor:
    value = loss(p, batch)
    return value if bool(value > 1.6) else 2 * value


def listing(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * (1 + max(batch.y.tolist()))


def by_numpy(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * float(batch.y.numpy().mean())


def by_one_item(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) * batch.y[0].item()


def random(p: Params, batch: Batch) -> Tensor:
    return loss(p, Batch(functional.dropout(batch.x, 0.5), batch.y))


def from_elsewhere(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) + tree.square_distance(p, SOMEWHERE)


@pytest.mark.parametrize(
    "f",
    [
        numbered,
        named_by_number,
        indexed_by_number,
        first_only,
        looking,
        listing,
        by_numpy,
        by_one_item,
        from_elsewhere,
    ],
)
def test_a_step_that_may_differ_another_time_is_taken_anew(f: Any, played: list[Tape]) -> None:
    check(request(f), batches(8))
    assert played == []


def test_a_step_with_chance_is_taken_anew(played: list[Tape]) -> None:
    def drawn() -> tuple[Params, Tensor]:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(5)
            return end(request(random), batches(8))

    assert tree.equal(list(drawn()), list(drawn()))
    assert played == []


def test_what_a_loss_captured_may_not_change(played: list[Tape]) -> None:
    factors, weights = [1.0], torch.ones(())
    counted = 0

    def by_list(p: Params, batch: Batch) -> Tensor:
        return loss(p, batch) * factors[0]

    def by_tensor(p: Params, batch: Batch) -> Tensor:
        return loss(p, batch) * weights

    def by_counter(p: Params, batch: Batch) -> Tensor:
        nonlocal counted
        counted += 1
        return loss(p, batch) * counted

    end(request(by_tensor), batches(8))
    with pytest.raises(UnrepeatableError, match="captures a "):
        captured(by_tensor)
    assert played == []
    # a number counts by its value: another number is another loss
    fusion = Fusion(Work(request(), 0), batches(1)[0])
    for factor in (1.0, 2.0, 1.0):
        factors[0] = factor
        check(request(by_list), batches(8), fusion)
    # the very first step of a pass has a tape of its own, once it has come twice
    assert len(set(played)) == 2 + 1
    played.clear()
    before = captured(by_counter)
    end(request(by_counter), batches(8))
    assert captured(by_counter) != before
    assert played == []


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Settings."""

    scale: float
    parts: Any = ()

    def scaled(self, p: Params, batch: Batch) -> Tensor:
        """A loss."""
        return loss(p, batch) * self.scale


@dataclasses.dataclass
class Loose:
    """What may change."""

    scale: float


def test_identity_of_what_is_captured() -> None:
    assert captured(Frozen(2.0).scaled) == captured(Frozen(2.0).scaled) != captured(Frozen(3.0).scaled)
    assert captured(1) != captured(1.0) != captured(True)
    assert captured(Frozen(1.0, (torch.float32, "a"))) == captured(Frozen(1.0, (torch.float32, "a")))
    assert (
        captured(Frozen(1.0, [1, {"a": 2}]))
        == captured(Frozen(1.0, [1, {"a": 2}]))
        != captured(Frozen(1.0, [1, {"a": 3}]))
    )
    assert captured([1]) != captured((1,))
    for loose in (
        Loose(1.0),
        Frozen(1.0, [torch.zeros(1)]),
        {"a": object()},
        torch.zeros(1),
        nn.Linear(2, 2),
        object(),
    ):
        with pytest.raises(UnrepeatableError, match="the loss captures a"):
            captured(loose)

    def itself(n: int) -> int:
        return 0 if n == 0 else itself(n - 1)

    assert captured(itself) == captured(itself)
    model = architecture()
    assert captured(model) == captured(model) != captured(architecture())
    with pytest.raises(UnrepeatableError):
        captured(architecture(lambda: nn.Sequential(nn.Dropout(), Small())))


def test_a_tape_that_gives_other_bits_is_thrown_away(played: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    r, steps = request(), batches(8)
    found = end(r, steps)
    monkeypatch.undo()
    assert tree.equal(list(found), list(without_tapes(r, steps)))
    # once, to see that it is wrong
    assert len(played) == 1


def test_a_large_step_has_none(played: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "LARGEST", 1000)
    check(request(), batches(8))
    assert played == []


def test_recording_leaves_the_work_as_it_was() -> None:
    r, steps = request(pull=Pull(0.3, numbers(2, **WIDE))), batches(2)
    fusion, work = Fusion(Work(r, 0), steps[0]), Work(r, 0)
    before = [t.clone() for t in (*work.params, *work.constants)]
    Tape(fusion.take, work, steps[0])
    assert all(torch.equal(a, b) for a, b in zip(before, [*work.params, *work.constants], strict=True))
    assert all(p.requires_grad and p.is_leaf for p in work.params)
