"""Simulated attacks of hostile clients: on their training data, their updates or their example counts.

An update is the change of a client's parameters, a dict of floating-point tensors by name. Hostile
clients collude; if an attack needs the updates of others, it knows them (an omniscient adversary). Clients
may differ in architecture or rank, so statistics are taken over updates of one form: the same names, shapes
and dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ..core.arguments.shares import multiply_share
from ..core.errors import ConfigError, DataError
from ..core.key import Key
from ..core.learning.losses import IGNORE_INDEX
from ..core.tree import Params, TreeError
from ..data.dataset import ClientData, Examples
from .trust_settings import Attack

STRENGTHS: dict[str, float] = {
    # factor of -Δ; Karimireddy et al. 2021 call it bit flipping
    "sign_flip": 1.0,
    # factor of Δ; Bagdasaryan et al. 2020 scale up to the number of clients
    "scaled": 10.0,
    # standard deviation divided by the root mean square of the honest mean; Blanchard et al. 2017 use noise far
    # above the updates, and a factor of 1 would be below the differences between honest clients
    "gaussian": 10.0,
    # ε of -ε · honest mean (Xie et al. 2020); below 1 the norm does not reveal it; 0.5 is the default of Blades
    "inner_product": 0.5,
    # factor of n_k
    "examples": 100.0,
}
"""Default strength of each attack that has one; z of "a little is enough" comes from :func:`alie_z`."""

TRIGGER_SIZE = 3
"""Side k of the k x k trigger of a backdoor; Gu et al. 2017 (BadNets) use a few pixels in a corner of an image."""


def hostile_clients(client_ids: Sequence[int], share: float, key: Key) -> frozenset[int]:
    """Draw a random subset of some clients, the same for equal keys.

    Args:
        client_ids: clients of which some are hostile, at least one: those that may train.
        share: share of hostile clients; the subset has round(share·count) clients, at least 1.
        key: key of the draw.
    """
    count = len(client_ids)
    selected = torch.randperm(count, generator=key.generator())[: max(1, round(multiply_share(share, count)))]
    return frozenset(client_ids[i] for i in selected.tolist())


def poison(
    data: ClientData,
    attack: Attack,
    classes: int,
    key: Key,
    size: int = TRIGGER_SIZE,
    value: float | None = None,
    ignored: int = IGNORE_INDEX,
) -> ClientData:
    """Poison the training data of a hostile client; validation and test examples stay as they are.

    ``label_flip`` maps each training label y to classes - 1 - y (Fang et al. 2020). ``backdoor`` puts the
    trigger on half of the training images, drawn at random and rounded up, and labels them ``attack.target``
    (Gu et al. 2017). Other attacks leave the data unchanged. Augmentation moves or mirrors the trigger, too.

    Args:
        data: data of one client.
        attack: settings of the attack.
        classes: number of classes.
        key: key of the draw of the images, one for each client.
        size: side k of the trigger in pixels, see :func:`add_trigger`.
        value: pixel value of the trigger; None for the largest value of the training images. Pass
            :func:`trigger_value`, so that all clients use one trigger.
        ignored: label that does not count (``loss.ignore_index``), which ``label_flip`` leaves as it is.

    Raises:
        DataError: if the examples have no class labels, or no trigger fits on them.
        ConfigError: if ``attack.target`` is not a class.
    """
    if attack.kind not in ("label_flip", "backdoor"):
        return data
    train = data.train
    _check_labels(train, attack)
    if attack.kind == "label_flip":
        flipped = torch.where(train.y == ignored, train.y, classes - 1 - train.y)
        return dataclasses.replace(data, train=Examples(train.x, flipped))
    if attack.target >= classes:
        raise ConfigError(f"attack.target = {attack.target} is no class; classes are 0..{classes - 1}")
    selected_rows = torch.randperm(len(train), generator=key.generator())[: (len(train) + 1) // 2].to(
        train.y.device
    )
    x, y = _images(train), train.y.index_fill(0, selected_rows, attack.target)
    if len(selected_rows):
        x = x.index_copy(
            0, selected_rows, add_trigger(x[selected_rows], size, x.max().item() if value is None else value)
        )
    return dataclasses.replace(data, train=Examples(x, y))


def with_trigger(
    examples: Examples,
    attack: Attack,
    size: int = TRIGGER_SIZE,
    value: float | None = None,
    ignored: int = IGNORE_INDEX,
) -> Examples:
    """Build test examples that measure the success of a backdoor: accuracy on them is the attack success rate.

    These examples have a label that counts, are of classes other than ``attack.target``, have the trigger and are
    labeled as the target, so accuracy is the share of them that a model classifies as the target.

    Args:
        examples: n examples without trigger.
        attack: settings of the attack, with the target.
        size: side k of the trigger in pixels, as in :func:`poison`.
        value: pixel value of the trigger, as in :func:`poison`; None for the largest value of these images.
        ignored: label that does not count (``loss.ignore_index``).

    Returns:
        At most n examples, and possibly none.

    Raises:
        DataError: if the examples have no class labels, or no trigger fits on them.
    """
    _check_labels(examples, attack)
    x = _images(examples)
    if value is None and len(x):
        value = x.max().item()
    x = x[(examples.y != attack.target) & (examples.y != ignored)]
    y = torch.full((len(x),), attack.target, dtype=torch.int64, device=examples.y.device)
    return Examples(add_trigger(x, size, value or 0.0), y)


def trigger_value(clients: Iterable[ClientData]) -> float | None:
    """Compute the pixel value of a backdoor's trigger: the largest of all clients' training images.

    Returns:
        The same value before and after :func:`poison` has put the trigger on images; None if there are no images.

    Raises:
        DataError: if the inputs have names, as those of texts have.
    """
    return max((_images(c.train).max().item() for c in clients if len(c.train)), default=None)


def add_trigger(x: Tensor, size: int, value: float) -> Tensor:
    """Copy images and set the size x size pixels in the lower right corner to one value in all channels.

    Args:
        x: images [n, ..., height, width], or flat vectors [n, d], whose last size² features are set instead.
        size: side of the trigger in pixels, at least 1.
        value: pixel value of the trigger.

    Raises:
        DataError: if the trigger would cover the whole image or vector, or does not fit on it.
    """
    margin = x.shape[1] - size**2 if x.ndim == 2 else min(x.shape[-2:]) - size if x.ndim > 2 else 0
    if size < 1 or margin < 1:
        raise DataError(
            f"a trigger of {size} x {size} values does not fit on inputs of shape {list(x.shape[1:])}"
        )
    x = x.clone()
    corner = x[:, -(size**2) :] if x.ndim == 2 else x[..., -size:, -size:]
    corner.fill_(value)
    return x


def attack_updates(
    updates: dict[int, Params], hostile_ids: frozenset[int], attack: Attack, key: Key
) -> dict[int, Params]:
    """Replace the updates of the hostile clients. Attacks that change no updates leave them as they are.

    - ``sign_flip``: -strength·Δ. ``scaled``: strength·Δ.
    - ``gaussian``: noise whose standard deviation is strength times the root mean square of the honest mean.
    - ``alie`` ("a little is enough", Baruch et al. 2019): mean - z·std by coordinate, over the updates that the hostile
      clients have trained; z is the strength, or :func:`alie_z`. Attackers with updates of one form send the same.
    - ``inner_product`` (Xie et al. 2020): -strength · the honest mean. Attackers with updates of one form send the same.

    The honest mean is the unweighted mean over the clients that are not in ``hostile_ids`` and have updates of the
    attacker's form; if there are none, it is the mean over the hostile clients with that form.

    Args:
        updates: updates of the clients of a round, by client.
        hostile_ids: identifiers of the clients that attack; those without an update do nothing.
        attack: settings of the attack.
        key: key of the noise, one for each round.

    Returns:
        Updates by client in the same order; those of honest clients are the same objects.

    Raises:
        TreeError: if an update holds a tensor that is not of a floating-point type.
    """
    if attack.kind not in ("sign_flip", "scaled", "gaussian", "alie", "inner_product"):
        return dict(updates)
    strength = _strength(attack)
    forms = {client_id: _form(client_id, update) for client_id, update in updates.items()}
    attacked_updates, shared_updates = dict(updates), dict[Any, Params]()
    for client_id in updates.keys() & hostile_ids:
        own_update, form = updates[client_id], forms[client_id]
        if attack.kind in ("sign_flip", "scaled"):
            factor = -strength if attack.kind == "sign_flip" else strength
            attacked_updates[client_id] = {name: factor * t for name, t in own_update.items()}
            continue
        if form not in shared_updates:
            matching_ids = [c for c in updates if forms[c] == form]
            hostile_updates = [updates[c] for c in matching_ids if c in hostile_ids]
            honest_updates = [updates[c] for c in matching_ids if c not in hostile_ids]
            if attack.kind == "alie":
                z = (
                    alie_z(len(matching_ids), len(hostile_updates))
                    if attack.strength is None
                    else attack.strength
                )
                shared_updates[form] = _shifted_mean(hostile_updates, z)
            else:
                shared_updates[form] = _shifted_mean(honest_updates or hostile_updates, 0.0)
        mean = shared_updates[form]
        if attack.kind == "gaussian":
            attacked_updates[client_id] = _noise(mean, strength * _root_mean_square(mean), key / client_id)
        else:
            factor = -strength if attack.kind == "inner_product" else 1.0
            attacked_updates[client_id] = {name: factor * mean[name] for name in own_update}
    return attacked_updates


def alie_z(client_count: int, hostile_count: int) -> float:
    """Compute z of "a little is enough": the largest shift beyond which enough honest clients still lie.

    With s = ⌊n/2 + 1⌋ - m honest clients needed for a majority, Φ(z) = (n - m - s) / (n - m) (Baruch et al.
    2019, Algorithm 3). If hostile clients are the majority, s is 1, the least for which the formula is
    finite. A negative z, which results from few hostile clients, is replaced by 0: they then send their mean.

    Args:
        client_count: n, number of clients.
        hostile_count: m, number of hostile clients.
    """
    honest_count = client_count - hostile_count
    supporter_count = max(1, client_count // 2 + 1 - hostile_count)
    return (
        max(0.0, NormalDist().inv_cdf((honest_count - supporter_count) / honest_count))
        if honest_count > supporter_count
        else 0.0
    )


def claimed_examples(examples: int, attack: Attack) -> int:
    """The number of examples n_k that a client claims: in the attack ``examples`` strength times its own, at least 1."""
    return max(1, round(_strength(attack) * examples)) if attack.kind == "examples" else examples


def _strength(attack: Attack) -> float:
    return STRENGTHS.get(attack.kind, 1.0) if attack.strength is None else attack.strength


def _check_labels(examples: Examples, attack: Attack) -> None:
    if examples.is_regression or examples.is_dense:
        raise DataError(
            f"attack.kind = {attack.kind!r} needs one class label for each example. Choose an attack on "
            "updates, such as 'sign_flip'."
        )


def _images(examples: Examples) -> Tensor:
    x = examples.inputs
    if isinstance(x, dict):
        raise DataError(f"a backdoor's trigger needs images or vectors, not the named inputs {sorted(x)}")
    return x


def _form(client_id: int, update: Params) -> Any:
    for name, t in update.items():
        if not t.is_floating_point():
            raise TreeError(
                f"client {client_id}: an attack needs floating-point tensors; {name!r} is {t.dtype}"
            )
    return tuple(sorted((name, t.shape, str(t.dtype)) for name, t in update.items()))


def _shifted_mean(updates: list[Params], z: float) -> Params:
    """Mean - z·std by coordinate, with the standard deviation of a population (divided by n)."""
    shifted_mean = {}
    for name, tensor in updates[0].items():
        values = torch.stack([u[name].detach() for u in updates]).double()
        shifted_mean[name] = (values.mean(0) - z * values.std(0, correction=0)).to(tensor.dtype)
    return shifted_mean


def _root_mean_square(update: Params) -> float:
    squares = sum(t.double().square().sum().item() for t in update.values())
    return math.sqrt(squares / max(1, sum(t.numel() for t in update.values())))


def _noise(update: Params, deviation: float, key: Key) -> Params:
    """Draw noise of a given standard deviation; each tensor's draw depends on its name, not on its position."""
    return {
        name: deviation * torch.randn(t.shape, generator=(key / name).generator()).to(t)
        for name, t in update.items()
    }
