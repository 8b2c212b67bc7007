"""Updates: norms, clipping and inner products against dense numpy, and taking uploads apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.core import tree
from fedlowrank.core.contract import ZERO_REFERENCE
from fedlowrank.linalg.factored import compute_svd
from fedlowrank.linalg.pair import Pair
from fedlowrank.trust.updates import (
    clip_update,
    compute_gram_matrix,
    compute_inner_product,
    compute_norm,
    compute_update,
    compute_update_parts,
    remove_compared,
    replace_update,
    restore_compared,
)

SCALE = 2.5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def pair(seed: int, rank: int = 3) -> Pair:
    return Pair(draw(7, rank, seed=seed), draw(rank, 5, seed=seed + 100))


def lora_upload(seed: int, rank: int = 3) -> dict[str, Any]:
    return {"factors": {"layer": pair(seed, rank)}, "rest": {"head": draw(4, 2, seed=seed + 200)}}


def dense(upload: dict[str, Any], reference: dict[str, Any]) -> np.ndarray:
    """The effective update as one vector, products multiplied out."""
    p, q = upload["factors"]["layer"], reference["factors"]["layer"]
    product = SCALE * (p.b.numpy() @ p.a.numpy() - q.b.numpy() @ q.a.numpy())
    head = upload["rest"]["head"].numpy() - reference["rest"]["head"].numpy()
    return np.concatenate([product.ravel(), head.ravel()])


def test_the_norm_of_an_effective_update_is_that_of_its_products() -> None:
    upload, reference = lora_upload(1), lora_upload(2)
    assert compute_norm(upload, reference, SCALE) == pytest.approx(
        np.linalg.norm(dense(upload, reference)), rel=1e-12
    )


def test_ranks_of_upload_and_reference_may_differ_in_inner_products() -> None:
    """Clients of other ranks: inner products of effective updates are those of the dense matrices."""
    reference = {2: lora_upload(9, 2), 3: lora_upload(9, 3), 4: lora_upload(9, 4)}
    uploads = [(lora_upload(i, r), reference[r]) for i, r in enumerate((2, 3, 4))]
    vectors = np.stack([dense(u, r) for u, r in uploads])
    actual = compute_gram_matrix([compute_update_parts(u, r, SCALE) for u, r in uploads])
    assert np.allclose(actual.numpy(), vectors @ vectors.T, rtol=1e-10)


def test_the_adaptors_of_a_mixture_are_products_cluster_by_cluster() -> None:
    upload, reference = (Pairs(draw(3, 7, 2, seed=i), draw(3, 5, 2, seed=i + 50)) for i in (1, 2))
    dense = (upload.dense() - reference.dense()).numpy()
    assert compute_norm({"a": upload}, {"a": reference}) == pytest.approx(np.linalg.norm(dense), rel=1e-12)
    other = compute_update_parts({"a": reference}, ZERO_REFERENCE, 1.0)
    expected = float((dense * reference.dense().numpy()).sum())
    assert compute_inner_product(
        compute_update_parts({"a": upload}, {"a": reference}, 1.0), other
    ) == pytest.approx(expected, rel=1e-10)
    clipped, _ = clip_update({"a": upload}, {"a": reference}, 0.5)
    actual = (clipped["a"].dense() - reference.dense()).numpy()
    assert np.linalg.norm(actual) == pytest.approx(0.5, rel=1e-9)


def test_a_factored_matrix_and_a_dense_one_have_an_inner_product() -> None:
    one, other = draw(6, 4, seed=1), draw(6, 4, seed=2)
    mixed = compute_inner_product(
        compute_update_parts({"w": compute_svd(one)}, ZERO_REFERENCE, 1.0),
        compute_update_parts({"w": other}, ZERO_REFERENCE, 1.0),
    )
    assert mixed == pytest.approx(float((one * other).sum()), rel=1e-12)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.01])
def test_clipping_reaches_the_bound_on_the_line_to_the_reference(share: float) -> None:
    upload, reference = lora_upload(1), lora_upload(2)
    before = np.linalg.norm(dense(upload, reference))
    clipped, size = clip_update(upload, reference, share * before, SCALE)
    assert size == pytest.approx(before, rel=1e-12)
    assert np.linalg.norm(dense(clipped, reference)) == pytest.approx(share * before, rel=1e-9)
    # every number lies on one line: the same share of its way
    ways = [
        (new - old).numpy() / (far - old).numpy()
        for new, old, far in zip(
            tree.tensors(clipped), tree.tensors(reference), tree.tensors(upload), strict=True
        )
    ]
    flat = np.concatenate([w.ravel() for w in ways])
    assert np.allclose(flat, flat[0], rtol=1e-6)
    assert 0 < flat[0] < 1


@pytest.mark.parametrize("share", [2.0, 0.5, 0.01])
def test_an_upload_of_fewer_components_than_its_reference_is_clipped_as_one_without_the_others(
    share: float,
) -> None:
    upload, reference = lora_upload(1, 2), lora_upload(2, 4)
    before = np.linalg.norm(dense(upload, reference))
    assert compute_norm(upload, reference, SCALE) == pytest.approx(before, rel=1e-12)
    clipped, size = clip_update(upload, reference, share * before, SCALE)
    assert size == pytest.approx(before, rel=1e-12)
    assert np.linalg.norm(dense(clipped, reference)) == pytest.approx(min(share, 1.0) * before, rel=1e-9)
    # within the bound it is left as it is
    assert clipped["factors"]["layer"].rank == (2 if share > 1 else 4)


@pytest.mark.parametrize("size", [0.05, 1.0, 100.0])
def test_no_clipped_update_in_float32_is_longer_than_the_bound(size: float) -> None:
    """Rounding a clipped upload must not carry it beyond: noise is scaled to the bound."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        reference = {"w": torch.from_numpy((size * rng.normal(size=500)).astype("float32"))}
        upload = {"w": reference["w"] + torch.from_numpy(rng.normal(size=500).astype("float32"))}
        clipped, _ = clip_update(upload, reference, 1.0)
        way = clipped["w"].double().numpy() - reference["w"].double().numpy()
        assert 0.999 < np.linalg.norm(way) <= 1.0


def test_clipping_only_b_would_do_another_thing() -> None:
    """The norm of all numbers that are sent is another one than that of the effective update."""
    upload, reference = lora_upload(1), lora_upload(2)
    numbers = np.sqrt(sum(float(t.square().sum()) for t in compute_update(upload, reference).values()))
    clipped, size = clip_update(upload, reference, 1.0, SCALE, effective=False)
    assert size == pytest.approx(numbers, rel=1e-12)
    actual = compute_update(clipped, reference)
    assert np.sqrt(sum(float(t.square().sum()) for t in actual.values())) == pytest.approx(1.0, rel=1e-9)


def test_an_update_within_the_bound_is_left_as_it_is() -> None:
    upload, reference = lora_upload(1), lora_upload(2)
    assert clip_update(upload, reference, 1e6, SCALE)[0] is upload
    assert clip_update(reference, reference, 1e-6, SCALE) == (reference, pytest.approx(0.0, abs=1e-6))


def test_an_update_that_is_not_finite_is_left_for_the_check_that_names_it() -> None:
    upload = {"w": torch.tensor([1.0, float("nan")])}
    clipped, size = clip_update(upload, {"w": torch.zeros(2)}, 1.0)
    assert clipped is upload
    assert np.isnan(size)


def test_a_part_without_reference_is_an_update_or_none() -> None:
    upload = {"update": torch.ones(3), "pi": torch.ones(2)}
    reference = {"update": ZERO_REFERENCE, "pi": None}
    assert compute_update(upload, reference).keys() == {"/update"}
    clipped, _ = clip_update(upload, reference, 0.5)
    assert torch.equal(clipped["pi"], torch.ones(2))
    assert float(clipped["update"].norm()) == pytest.approx(0.5)


def test_a_reference_of_another_form_is_refused() -> None:
    with pytest.raises(tree.TreeError, match="/w"):
        compute_update({"w": torch.ones(3)}, {"w": torch.ones(2)})
    # other parts are no reference of these, so that they are the update themselves
    assert torch.equal(compute_update({"w": torch.ones(3)}, {"v": torch.ones(3)})["/w"], torch.ones(3))
    assert compute_update({"w": torch.ones(3)}, {"v": torch.ones(3)}, compared_only=True) == {}


@pytest.mark.parametrize("beside", ["in the upload", "in the reference"])
def test_a_part_without_a_partner_leaves_the_others_their_reference(beside: str) -> None:
    w, other = draw(3, 2, seed=1), draw(2, seed=2)
    upload, reference = {"w": w + 1}, {"w": w}
    longer = upload if beside == "in the upload" else reference
    longer["other"] = other
    expected = {"/w": torch.ones(3, 2).double()} | ({"/other": other} if longer is upload else {})
    update = compute_update(upload, reference)
    assert update.keys() == expected.keys()
    for path, t in expected.items():
        torch.testing.assert_close(update[path], t)
    compared = compute_update(upload, reference, compared_only=True)
    assert compared.keys() == {"/w"}
    rest = tree.decode(tree.encode(remove_compared(upload, reference)))
    restored = restore_compared(rest, reference, compared)
    assert restored.keys() == upload.keys()
    for name, t in upload.items():
        torch.testing.assert_close(restored[name], t)


def test_the_parts_of_lists_of_other_lengths_have_no_partners() -> None:
    upload, reference = [torch.ones(2), torch.ones(2)], [torch.ones(2)]
    assert {p: t.tolist() for p, t in compute_update(upload, reference).items()} == {
        "/0": [1.0] * 2,
        "/1": [1.0] * 2,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_changed_update_keeps_the_type_in_which_it_is_sent(dtype: torch.dtype) -> None:
    reference = {"w": draw(3, 2, seed=1).float()}
    upload = {"w": (reference["w"] + 1).to(dtype)}
    clipped, _ = clip_update(upload, reference, 0.5)
    replaced = replace_update(upload, reference, {"/w": torch.full((3, 2), 0.25)})
    assert clipped["w"].dtype == replaced["w"].dtype == dtype
    torch.testing.assert_close(replaced["w"].float(), reference["w"] + 0.25, rtol=0, atol=0.02)
    assert float((clipped["w"].float() - reference["w"]).norm()) == pytest.approx(0.5, abs=0.03)


def test_another_update_gives_another_upload() -> None:
    upload, reference = lora_upload(1), lora_upload(2)
    same = replace_update(upload, reference, compute_update(upload, reference))
    for a, b in zip(tree.tensors(same), tree.tensors(upload), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@given(beside=st.booleans(), itself=st.booleans())
def test_an_upload_is_put_together_from_what_was_taken_out(beside: bool, itself: bool) -> None:
    upload: dict[str, Any] = {"w": draw(3, 2, seed=1), "b": draw(2, seed=2), "kind": "x"}
    reference: dict[str, Any] = {
        "w": draw(3, 2, seed=3),
        "b": ZERO_REFERENCE if itself else draw(2, seed=4),
        "kind": "x",
    }
    if beside:
        upload["labels"], reference["labels"] = torch.tensor([1, 2]), None
    rest = remove_compared(upload, reference)
    update = compute_update(upload, reference, compared_only=True)
    assert (rest is None) == (not beside and not itself)
    assert tree.nbytes(rest) == (16 if beside else 0) + (16 if itself else 0)
    actual = restore_compared(tree.decode(tree.encode(rest)), reference, update)
    assert actual.keys() == upload.keys()
    for a, b in zip(tree.tensors(actual), tree.tensors(upload), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_an_update_that_lacks_numbers_is_refused() -> None:
    with pytest.raises(tree.TreeError, match="lacks"):
        restore_compared(None, {"w": torch.zeros(3)}, {})
