"""The update of a client: its upload minus the reference that ``Method.describe_update`` names.

A reference has the form of the upload, with :data:`~fedlowrank.core.contract.update.NO_UPDATE` or
:data:`~fedlowrank.core.contract.update.ZERO_REFERENCE` in the place of some parts.

Norms are those of the *effective* update. A factor pair (B, A) with a reference (B₀, A₀) stands for
s(B A - B₀ A₀) = s[B, -B₀][A; A₀], whose norm and inner products need only Gram matrices of its factors:
⟨X Y, X' Y'⟩ = Σ (Xᵀ X') ∘ (Y Y'ᵀ).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..adapters.mixtures.mixture import Pairs
from ..adapters.wire_format import Quantized, Rounded
from ..core import tree
from ..core.contract import ZERO_REFERENCE, AnyMethod, ClientInfo, Task, Update
from ..core.errors import TaskError
from ..core.tree import Params, TreeError
from ..linalg.factored import Factored
from ..linalg.matricize import dense_weights
from ..linalg.pair import Pair, zero_pad_pair

_BISECTION_STEPS = 60
"""Number of halvings of an interval in [0, 1] that reach the precision of float64."""


@dataclass(frozen=True)
class Product:
    """A matrix ``[d, k]`` as the product of ``left [d, r]`` and ``right [r, k]``, both float64."""

    left: Tensor
    right: Tensor


UpdatePart = Tensor | Product


def describe_dense_update(method: AnyMethod, down: Any, client: ClientInfo, task: Task) -> Update:
    """Describe the update in a client's upload; weights that were sent as factors are dense in its reference.

    Args:
        method: method of the run.
        down: download that the client received.
        client: client that sends the upload.
        task: task of the run.
    """
    update = method.describe_update(down, client, task)
    return replace(update, reference=dense_weights(update.reference, task.model(client).initial))


def pair_with_reference(upload: Any, reference: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Walk the parts of an upload that are updates: floating tensors, pairs and factored matrices.

    Yields:
        The path, the part (a pair of a smaller rank zero-padded to that of its reference), and its reference: of the same
        form, or :data:`~fedlowrank.core.contract.update.ZERO_REFERENCE`.

    Raises:
        TreeError: if the reference does not have the form of the upload.
    """
    if reference is None:
        return
    if isinstance(upload, (Quantized, Rounded)):
        raise TaskError(
            f"the factors at {path or 'its top'} are rounded by the method (training.wire), so that they have "
            "no update; set training.wire = 'float32' and run.compression.uplink = 'int8' or 'bfloat16'"
        )
    is_zero = type(reference) is float and not isinstance(upload, float)
    if isinstance(upload, Tensor):
        if not upload.is_floating_point():
            return
        if not is_zero and not (isinstance(reference, Tensor) and reference.shape == upload.shape):
            raise TreeError(f"the reference at {path or 'its top'} does not have the shape of the upload's")
        yield path, upload, reference
        return
    if isinstance(upload, Factored) or split_products(upload):
        if not is_zero and type(reference) is not type(upload):
            raise TreeError(f"the reference at {path or 'its top'} is no {type(upload).__name__}")
        if isinstance(upload, Pair) and isinstance(reference, Pair):
            # a pair of a pruned rank is zero-padded at the components that were left out
            upload = zero_pad_pair(upload, reference.rank)
        yield path, upload, reference
        return
    children = tree.children(upload, path)
    if children is None:
        return
    reference_parts = _parts_of(reference, upload, children)
    for key, child in children:
        yield from pair_with_reference(
            child,
            ZERO_REFERENCE if reference_parts is None else reference_parts[key],
            tree.join_path(path, key),
        )


def _parts_of(reference: Any, upload: Any, children: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """The reference of each part of an upload, by name; None if the reference has no part in common with it.

    A part that the reference lacks is itself the update, and one that the upload lacks is left out. The parts of a list have
    no names, so that lists of different lengths have none in common.
    """
    if type(reference) is float:
        return None
    parts, names = dict(tree.children(reference) or ()), dict(children).keys()
    if parts.keys() != names and (isinstance(upload, list | tuple) or not parts.keys() & names):
        return None
    return {name: parts.get(name, ZERO_REFERENCE) for name in names}


def compute_update(upload: Any, reference: Any, *, compared_only: bool = False) -> Params:
    """Compute the tensors of an update by path: those of the upload minus those of the reference.

    Differences of half-precision tensors are in float32, because they may need more digits than both tensors.

    Args:
        upload: upload of the client.
        reference: reference of the upload.
        compared_only: whether to leave out parts without a reference
            (:data:`~fedlowrank.core.contract.update.ZERO_REFERENCE`).
    """
    update: Params = {}
    for path, part, ref in pair_with_reference(upload, reference):
        if compared_only and type(ref) is float:
            continue
        refs = None if type(ref) is float else dict(tree.leaves(ref, path))
        for leaf_path, t in tree.leaves(part, path):
            number = tree.widen(t.detach())
            update[leaf_path] = number.clone() if refs is None else number - refs[leaf_path]
    return update


def list_fixed_factors(upload: Any, reference: Any) -> list[str]:
    """List the paths of all factors but one of each product that is itself the update, without a reference.

    A multiple of such an update is a multiple of the remaining factor alone: B of a pair, s of a factored matrix.
    """
    paths = []
    for path, part, ref in pair_with_reference(upload, reference):
        if type(ref) is float and (isinstance(part, Factored) or split_products(part)):
            scaled = "s" if isinstance(part, Factored) else "u" if isinstance(part, Pairs) else "b"
            paths += [p for p, _ in tree.leaves(part, path) if p != tree.join_path(path, scaled)]
    return paths


def read_reference(upload: Any, reference: Any) -> Params:
    """Tensors of a reference by path, zeros where a part of the upload is itself the update."""
    numbers: Params = {}
    for path, part, ref in pair_with_reference(upload, reference):
        refs = None if type(ref) is float else dict(tree.leaves(ref, path))
        for leaf_path, t in tree.leaves(part, path):
            numbers[leaf_path] = torch.zeros_like(t) if refs is None else refs[leaf_path]
    return numbers


def _read_upload(upload: Any, reference: Any) -> Params:
    """Tensors of an upload by path, those that are updates."""
    return {
        leaf_path: t
        for path, part, _ in pair_with_reference(upload, reference)
        for leaf_path, t in tree.leaves(part, path)
    }


def replace_parts(value: Any, parts: Mapping[str, Any], path: str = "") -> Any:
    """Return a tree with the parts at some paths, such as tensors, replaced."""
    if path in parts:
        return parts[path]
    children = tree.children(value, path)
    if children is None:
        return value
    return tree.rebuild(value, [(k, replace_parts(v, parts, tree.join_path(path, k))) for k, v in children])


def replace_update(upload: Any, reference: Any, update: Mapping[str, Tensor]) -> Any:
    """Return the upload with another update: the sum of the reference and that update."""
    base, uploaded = read_reference(upload, reference), _read_upload(upload, reference)
    numbers = {path: (base[path].double() + u.double()).to(uploaded[path]) for path, u in update.items()}
    return replace_parts(upload, numbers)


def compute_update_parts(
    upload: Any, reference: Any, scale: float, *, effective: bool = True
) -> dict[str, UpdatePart]:
    """Compute the effective update, in float64: a tensor or a product for each part, by path.

    Args:
        upload: upload of the client.
        reference: reference of the upload.
        scale: s, the scale of the products of its pairs.
        effective: whether pairs are taken as their products; otherwise as all numbers that are sent.
    """
    if not effective:
        return {path: u.double() for path, u in compute_update(upload, reference).items()}
    parts: dict[str, UpdatePart] = {}
    for path, part, ref in pair_with_reference(upload, reference):
        bases = split_products(ref)
        for k, pair in enumerate(split_products(part)):
            left, right = _factors(pair, scale)
            if bases:
                base_left, base_right = _factors(bases[k], -scale)
                left, right = torch.cat([left, base_left], 1), torch.cat([right, base_right])
            parts[f"{path}/{k}"] = Product(left, right)
        if split_products(part):
            continue
        if isinstance(part, Factored) and type(ref) is float:
            parts[path] = Product((part.u * part.s).double(), part.v.mT.double())
        elif isinstance(part, Tensor):
            parts[path] = part.detach().double() - (0.0 if type(ref) is float else ref.detach().double())
        else:
            raise TreeError(f"a factored matrix at {path} beside a reference")
    return parts


def split_products(part: Any) -> list[Pair]:
    """List the pairs of a part of an upload: one for a pair, one for each cluster of a mixture, none for others."""
    if isinstance(part, Pairs):
        return [Pair(u, v.mT) for u, v in zip(part.u, part.v, strict=True)]
    # the other factor is empty if a method shares only one
    return [part] if isinstance(part, Pair) and part.b.numel() and part.a.numel() else []


def _factors(pair: Pair, scale: float) -> tuple[Tensor, Tensor]:
    return pair.b.detach().double() * scale, pair.a.detach().double()


def compute_inner_product(x: Mapping[str, UpdatePart], y: Mapping[str, UpdatePart]) -> float:
    """Inner product of two effective updates.

    Raises:
        TreeError: if they do not have the same parts, or a part has another shape.
    """
    if x.keys() != y.keys():
        raise TreeError(f"updates with other parts: {sorted(x.keys() ^ y.keys())}")
    total = 0.0
    for path, part in x.items():
        other_part = y[path]
        if isinstance(part, Product) and isinstance(other_part, Product):
            if (
                part.left.shape[0] != other_part.left.shape[0]
                or part.right.shape[1] != other_part.right.shape[1]
            ):
                raise TreeError(f"products of other shapes at {path}")
            total += float(((part.left.mT @ other_part.left) * (part.right @ other_part.right.mT)).sum())
        elif isinstance(part, Tensor) and isinstance(other_part, Tensor) and part.shape == other_part.shape:
            total += float((part * other_part).sum())
        elif isinstance(part, Product) and isinstance(other_part, Tensor) and other_part.ndim >= 2:
            total += _inner_with_dense(part, other_part)
        elif isinstance(part, Tensor) and isinstance(other_part, Product) and part.ndim >= 2:
            total += _inner_with_dense(other_part, part)
        else:
            raise TreeError(f"updates of other forms at {path}")
    return total


def _inner_with_dense(product: Product, dense_tensor: Tensor) -> float:
    """Inner product of a product and a tensor, whose trailing dimensions are flattened."""
    return float(((product.left.mT @ dense_tensor.flatten(1)) * product.right).sum())


def compute_gram_matrix(updates: list[dict[str, UpdatePart]]) -> Tensor:
    """Gram matrix: the inner products of effective updates ``[n, n]``, float64."""
    n = len(updates)
    gram = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i, n):
            gram[i, j] = gram[j, i] = compute_inner_product(updates[i], updates[j])
    return gram


def compute_norm(upload: Any, reference: Any, scale: float = 1.0, *, effective: bool = True) -> float:
    """Norm of an update; NaN if a number is not finite.

    Args:
        upload: upload of the client.
        reference: reference of the upload.
        scale: s, the scale of the products of its pairs.
        effective: whether to take the norm of products; otherwise that of all numbers that are sent.
    """
    return _Squares.of(upload, reference, scale, effective=effective).norm(1.0)


def clip_update(
    upload: Any, reference: Any, bound: float, scale: float = 1.0, *, effective: bool = True
) -> tuple[Any, float]:
    """Clip an update: move the upload towards its reference until the norm of its update is at most a bound.

    All tensors move on the line from the reference, x₀ + t(x - x₀). For a pair, the update is
    s[(B₀ + tD)(A₀ + tE) - B₀A₀] = t·s(DA₀ + B₀E) + t²·sDE, so the squared norm is a polynomial in t, and t is
    found by bisection.

    Args:
        upload: upload of the client.
        reference: reference of the upload.
        bound: C, the largest norm.
        scale: s, the scale of the products of its pairs.
        effective: whether to take the norm of products; otherwise that of all numbers that are sent.

    Returns:
        The upload (the same object if its norm is within the bound), and the norm before clipping.
    """
    squares = _Squares.of(upload, reference, scale, effective=effective)
    norm = squares.norm(1.0)
    if math.isnan(norm) or norm <= bound:
        return upload, norm
    t = squares.way_to(bound)
    clipped_upload = move_along(upload, reference, t)
    margin = 1e-15
    while (rounded_norm := compute_norm(clipped_upload, reference, scale, effective=effective)) > bound:
        # rounding to the dtype of the upload exceeded the bound slightly
        t, margin = t * bound / rounded_norm * (1 - margin), 10 * margin
        clipped_upload = move_along(upload, reference, t)
    return clipped_upload, norm


@dataclass
class _Squares:
    """Squared norm of an update on the line from the reference, a polynomial: c2 t² + c3 t³ + c4 t⁴."""

    c2: float = 0.0
    c3: float = 0.0
    c4: float = 0.0

    @classmethod
    def of(cls, upload: Any, reference: Any, scale: float, *, effective: bool) -> _Squares:
        """The polynomial of a whole upload."""
        squares = cls()
        for _, part, ref in pair_with_reference(upload, reference):
            squares.add(part, ref, scale, effective=effective)
        return squares

    def add(self, part: Any, ref: Any, scale: float, *, effective: bool) -> None:
        """Add the terms of a part of the upload."""
        pairs, bases = split_products(part), split_products(ref)
        if effective and pairs:
            for k, pair in enumerate(pairs):
                base = bases[k] if bases else Pair(pair.b * 0, pair.a * 0)
                b0, a0 = _factors(base, scale)
                b, a = _factors(pair, scale)
                linear_term = {"": Product(torch.cat([b - b0, b0], 1), torch.cat([a0, a - a0]))}
                quadratic_term = {"": Product(b - b0, a - a0)}
                self.c2 += compute_inner_product(linear_term, linear_term)
                self.c3 += 2 * compute_inner_product(linear_term, quadratic_term)
                self.c4 += compute_inner_product(quadratic_term, quadratic_term)
        elif effective and isinstance(part, Factored):
            product = {"": Product((part.u * part.s).double(), part.v.mT.double())}
            self.c4 += compute_inner_product(product, product)
        else:
            self.c2 += sum(float(t.double().square().sum()) for t in compute_update(part, ref).values())

    def norm(self, t: float) -> float:
        """Norm at x₀ + t(x - x₀); NaN if a number is not finite."""
        square = t * t * (self.c2 + t * (self.c3 + t * self.c4))
        return math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.nan

    def way_to(self, bound: float) -> float:
        """The t in (0, 1) at which the norm reaches the bound, from below."""
        if self.c3 == self.c4 == 0:
            return bound / self.norm(1.0)
        low, high = 0.0, 1.0
        for _ in range(_BISECTION_STEPS):
            t = (low + high) / 2
            low, high = (t, high) if self.norm(t) <= bound else (low, t)
        return low


def move_along(upload: Any, reference: Any, t: float) -> Any:
    """The upload at x₀ + t(x - x₀); in a factored matrix, u and v stay and s becomes t²s."""
    numbers: Params = {}
    for path, part, ref in pair_with_reference(upload, reference):
        if isinstance(part, Factored):
            numbers[tree.join_path(path, "s")] = part.s * t * t
            continue
        base, uploaded = read_reference(part, ref), _read_upload(part, ref)
        numbers |= {
            path + leaf_path: (base[leaf_path] + t * u).to(uploaded[leaf_path])
            for leaf_path, u in compute_update(part, ref).items()
        }
    return replace_parts(upload, numbers)


def remove_compared(upload: Any, reference: Any) -> Any:
    """Return the parts of an upload outside its update, with None in the place of numbers that have a reference.

    :func:`restore_compared` puts them back.
    """
    if isinstance(upload, Tensor):
        return None if isinstance(reference, Tensor) and upload.is_floating_point() else upload
    children = tree.children(upload)
    if children is None:
        return None if repr(upload) == repr(reference) else upload
    if reference is None or (reference_parts := _parts_of(reference, upload, children)) is None:
        return upload
    remaining_children = [(key, remove_compared(child, reference_parts[key])) for key, child in children]
    has_same_parts = len(tree.children(reference) or ()) == len(children)
    if has_same_parts and all(child is None for _, child in remaining_children):
        return None
    return tree.rebuild(upload, remaining_children)


def restore_compared(remainder: Any, reference: Any, update: Mapping[str, Tensor], path: str = "") -> Any:
    """Inverse of :func:`remove_compared`: restore the upload as the sum of the reference and an update.

    Raises:
        TreeError: if the update lacks tensors.
    """
    if remainder is None:
        base = dict(tree.leaves(reference, path))
        if base.keys() - update.keys():
            raise TreeError(f"the update lacks {sorted(base.keys() - update.keys())}")
        numbers = {leaf_path: t + update[leaf_path].to(t) for leaf_path, t in base.items()}
        return replace_parts(reference, numbers, path)
    children = tree.children(remainder, path)
    if children is None or reference is None or type(reference) is float:
        return remainder
    reference_parts = _parts_of(reference, remainder, children)
    if reference_parts is None:
        raise TreeError(
            f"what lies beside the update at {path or 'its top'} has other parts than the reference"
        )
    restored_children = [
        (k, restore_compared(v, reference_parts[k], update, tree.join_path(path, k))) for k, v in children
    ]
    return tree.rebuild(remainder, restored_children)
