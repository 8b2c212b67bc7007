"""Reports the training data of a language model: rows, tokens and decoded samples of each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import DataError
from ...core.learning.losses import IGNORE_INDEX
from ...core.learning.preference_losses import RESPONSE_MASK
from ..dataset import ClientData, Dataset, Examples

OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
"""Brackets around the tokens that are learnt."""

_MAX_LISTED_CLIENTS = 30
"""Clients that have a line."""


def describe_rows(data: Dataset | Sequence[ClientData], tokenizer: Any, count: int = 2) -> str:
    """Describe token data as text: rows, tokens and learnt tokens by client, and samples.

    Args:
        data: tokens of :func:`.tokens.tokenize`: a data set, by its natural clients; or the data of clients.
            The training part is described.
        tokenizer: decodes the samples.
        count: number of samples to show, of the first clients in turn. Learnt tokens stand between ⟦ and ⟧;
            of words with labels, each label follows its token.

    Returns:
        A table with a line for each client, and the samples.

    Raises:
        DataError: if the data hold no tokens.
    """
    clients = _group_by_client(data)
    for examples in clients.values():
        if not isinstance(examples.x, dict) or "input_ids" not in examples.x:
            raise DataError("these data hold no tokens of a text, so there are no samples to decode.")
    table = [["client", "rows", "tokens", "learnt", "longest"]]
    table += [[name, *map(str, _count_tokens(examples))] for name, examples in clients.items()]
    table_rows = table[: _MAX_LISTED_CLIENTS + 1]
    if len(table) > len(table_rows):
        table_rows.append([f"and {len(table) - len(table_rows)} more", "", "", "", ""])
    totals = [_count_tokens(examples) for examples in clients.values()]
    sums = [sum(column) for column in zip(*(total[:3] for total in totals), strict=True)]
    table_rows.append(["all", *map(str, sums), str(max(total[3] for total in totals))])
    widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table_rows
    ]
    for name, examples, row in _choose_rows(clients, count):
        lines += ["", f"client {name}, row {row + 1}:", _decode_row(examples, row, tokenizer)]
    return "\n".join(lines)


def mark_learnt(ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> str:
    """Decode tokens, those with a label between ⟦ and ⟧.

    Args:
        ids: T token ids, without padding.
        labels: T labels, negative where nothing is learnt. The first token is never learnt, for nothing predicts
            it.
        tokenizer: tokenizer of ``transformers``.
    """
    spans: list[tuple[bool, list[int]]] = []
    for position, (token, label) in enumerate(zip(ids, labels, strict=True)):
        is_learnt = label >= 0 and position > 0
        if not spans or spans[-1][0] != is_learnt:
            spans.append((is_learnt, []))
        spans[-1][1].append(token)
    texts = [(is_learnt, tokenizer.decode(tokens, skip_special_tokens=False)) for is_learnt, tokens in spans]
    return "".join(f"{OPEN}{text}{CLOSE}" if is_learnt else text for is_learnt, text in texts)


def _group_by_client(data: Dataset | Sequence[ClientData]) -> dict[str, Examples]:
    if not isinstance(data, Dataset):
        return {str(i): _add_token_labels(client.train) for i, client in enumerate(data)}
    if data.natural is None:
        return {"all": data.train}
    client_ids = data.natural.unique().tolist()
    names = {n: data.natural_names[n] if data.natural_names else str(n) for n in client_ids if n >= 0}
    return {
        names.get(n, "none"): data.train.take((data.natural == n).nonzero().flatten()) for n in client_ids
    }


def _add_token_labels(examples: Examples) -> Examples:
    """Examples whose responses to learn are marked by a mask, with labels of tokens as they were read."""
    if not isinstance(examples.x, dict) or RESPONSE_MASK not in examples.x:
        return examples
    ids, mask = examples.x["input_ids"], examples.x[RESPONSE_MASK]
    return Examples(examples.x, ids.where(mask != 0, IGNORE_INDEX))


def _count_tokens(examples: Examples) -> tuple[int, int, int, int]:
    """Rows, tokens, tokens that are learnt, and tokens of the longest row."""
    assert isinstance(examples.x, dict)
    mask = examples.x["attention_mask"] != 0
    if not len(examples):
        return 0, 0, 0, 0
    learnt_count = len(examples) if examples.y.ndim == 1 else int(_find_learnt(examples).sum())
    return len(examples), int(mask.sum()), learnt_count, int(mask.sum(-1).max())


def _find_learnt(examples: Examples) -> Tensor:
    """Which tokens are learnt, [..., T]."""
    mask = examples.y >= 0
    if _predicts_own(examples):
        mask = mask.clone()
        # nothing predicts the first token
        mask[..., 0] = False
    return mask


def _predicts_own(examples: Examples) -> bool:
    """Whether the labels are the tokens themselves."""
    assert isinstance(examples.x, dict)
    ids, y = examples.x["input_ids"], examples.y
    return bool(ids.shape == y.shape and torch.equal(ids[y >= 0], y[y >= 0]))


def _choose_rows(clients: dict[str, Examples], count: int) -> list[tuple[str, Examples, int]]:
    """The first rows of the clients in turn."""
    max_rows = max(len(examples) for examples in clients.values())
    selected_rows: list[tuple[str, Examples, int]] = []
    for row in range(max_rows):
        for name, examples in clients.items():
            if len(selected_rows) == count:
                return selected_rows
            if row < len(examples):
                selected_rows.append((name, examples, row))
    return selected_rows


def _decode_row(examples: Examples, row: int, tokenizer: Any) -> str:
    assert isinstance(examples.x, dict)
    ids, mask = examples.x["input_ids"][row], examples.x["attention_mask"][row] != 0
    y = examples.y[row]
    if y.ndim == 0 and ids.ndim == 2:
        sides = zip(("anchor", "positive"), ids, mask, strict=True)
        return "\n".join(f"{name}: {tokenizer.decode(t[m].tolist())}" for name, t, m in sides)
    if y.ndim == 0:
        return f"{tokenizer.decode(ids[mask].tolist())}  -> class {int(y)}"
    if y.ndim == 2:
        responses = zip(("chosen", "rejected"), ids, mask, y, strict=True)
        return "\n".join(
            f"{name}: {mark_learnt(t[m].tolist(), labels[m].tolist(), tokenizer)}"
            for name, t, m, labels in responses
        )
    tokens, labels = ids[mask].tolist(), y[mask].tolist()
    if _predicts_own(examples):
        return mark_learnt(tokens, labels, tokenizer)
    return " ".join(
        f"{tokenizer.decode([token])}/{label}" if label >= 0 else tokenizer.decode([token])
        for token, label in zip(tokens, labels, strict=True)
    )
