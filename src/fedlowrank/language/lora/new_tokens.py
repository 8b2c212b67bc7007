"""Adds tokens to a base; their rows of the embedding are trained beside the factors (PEFT's ``trainable_token_indices``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.lora.adapted_layers import PEFT_PREFIX
from ...core.errors import ConfigError, DataError
from ...models.stateless import is_within

_ROWS = ".token_adapter.trainable_tokens_delta"
"""Suffix that PEFT appends to the name of a layer for the rows of trained tokens."""


def add_tokens(model: Any, tokenizer: Any, tokens: Sequence[str]) -> tuple[int, ...]:
    """Add special tokens to a tokenizer, and rows for them to the embedding and the output layer, in place.

    A new row is the mean of the rows of the former tokens, so it is the same on all machines. A token that the
    tokenizer already has keeps its row. Rows that the base has beyond its vocabulary are used first.

    Args:
        model: base without adapters.
        tokenizer: tokenizer of the base.
        tokens: texts of the tokens.

    Returns:
        The ids of the tokens, in their order.

    Raises:
        DataError: if the embedding is quantized.

    Source:
        Hewitt 2021, "Initializing new word embeddings for pretrained language models", for the mean.
    """
    former_count = len(tokenizer)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    ids = [int(i) for i in tokenizer.convert_tokens_to_ids(list(tokens))]
    layers = [m for m in (model.get_input_embeddings(), find_output_layer(model)) if m is not None]
    if not all(layer.weight.is_floating_point() for layer in layers):
        raise DataError(
            "language.new_tokens: the embedding of the base is quantized, so no row can be trained. Load it without quantize"
        )
    if len(tokenizer) > layers[0].weight.shape[0]:
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    new_ids = [i for i in ids if i >= former_count]
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), find_output_layer(model)):
            if layer is not None and new_ids:
                weight: Tensor = layer.weight
                weight[new_ids] = weight[:former_count].double().mean(0).to(weight.dtype)
    return tuple(ids)


def check_new_tokens(tokens: Sequence[str]) -> None:
    """Raise ConfigError for an empty or repeated token."""
    for i, token in enumerate(tokens):
        if not token.strip():
            raise ConfigError(f"language.new_tokens: token {i} is {token!r}. Give it a text without spaces")
        if token in tokens[:i]:
            raise ConfigError(f"language.new_tokens names {token!r} twice")


def find_token_layers(
    model: Any, ids: Sequence[int], saved_modules: Sequence[str] = (), targets: Sequence[str] = ()
) -> dict[str, list[int]]:
    """Find the layers whose rows of some tokens are trained: ``trainable_token_indices`` of PEFT.

    These are the embedding and, unless both are one tensor, the output layer. PEFT ties the rows of tied layers itself.

    Args:
        model: base without adapters.
        ids: ids of the tokens.
        saved_modules: modules that are trained whole, so their rows are already trained.
        targets: layers that get factors.

    Raises:
        ConfigError: if such a layer also gets factors, or PEFT cannot train its rows.
    """
    if not ids:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    embedding, output = model.get_input_embeddings(), find_output_layer(model)
    is_tied = output is not None and output.weight is embedding.weight
    layers: dict[str, list[int]] = {}
    for layer in (embedding, output):
        name = "" if layer is None else names[id(layer)]
        if layer is None or any(is_within(name, module) for module in saved_modules):
            continue
        if name in targets:
            raise ConfigError(
                f"language.new_tokens trains rows of {name}, which lora.target_modules adapts, too. Leave {name} out of "
                "target_modules, or train it whole: lora.modules_to_save"
            )
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            raise ConfigError(
                f"language.new_tokens: {name} has a bias, which PEFT leaves out where it trains rows. Train the layer whole: "
                f"lora.modules_to_save = [{name.rpartition('.')[2]!r}]"
            )
        if layer is embedding or not is_tied:
            layers[name] = [*ids]
    return layers


def name_rows(token_layers: Mapping[str, Any] | None) -> dict[str, str]:
    """Name the rows of tokens as a file of PEFT does, by layer; ``token_layers`` is of :func:`find_token_layers`."""
    return {name: f"{PEFT_PREFIX}{name}{_ROWS}" for name in token_layers or {}}


def find_output_layer(model: Any) -> Any:
    """Find the output layer of a model; None if it has none."""
    return getattr(model, "get_output_embeddings", lambda: None)()
