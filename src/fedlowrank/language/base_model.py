"""Loads the frozen base of a language model and its tokenizer, finds its new weights, and hashes its files."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.arguments.field_checks import CheckedFields
from ..core.errors import ConfigError, DataError, warn_user
from ..core.key import Key
from ..data.text.chat.chat_template import find_turn_end
from ..models.architecture import build_module
from ..models.stateless import keep_parameters_for_recomputation
from ..storage.base_files import combine_file_digests, digest_base_files
from .device_map import (
    check_device_map,
    check_embedding,
    check_module_names,
    make_placement,
    quantized_placement_error,
    remove_offload_folder_with,
)
from .lora.new_tokens import add_tokens, check_new_tokens
from .objectives.text_embeddings import return_hidden_states
from .optional_packages import import_library, silence_library
from .quantized_layers import (
    StoredQuantization,
    find_stored_quantization,
    keep_gradients,
    keep_training_arithmetic,
    make_quantization,
    prepare_bitsandbytes,
    refuse_quantized_parts,
)

HEAD_NAMES = ("classifier", "score")
"""Names of modules that PEFT treats as the head of a classification model (``peft.PeftModelForSequenceClassification``)."""

HEAD_NOTE = "The head ("
"""Beginning of the note on where the weights of the head are from."""


@dataclass(frozen=True)
class LanguageBase(CheckedFields):
    """Settings of the base: which language model is adapted, and in which precision.

    Code that comes with a model is never run.

    Needs ``pip install 'fedlowrank[language]'``.

    Attributes:
        path: folder as ``save_pretrained`` writes it or, if no such path exists, a name on the hub.
        task: kind of the model. causal: a model that continues a text; classification: an encoder or decoder with a
            classification head; token_classification: an encoder or decoder with a classification head for each token;
            embedding: a model without a head, whose last hidden states are averaged over the tokens of a text.
        dtype: dtype of the weights in memory; auto takes the dtype of the files.
        quantize: quantization of the weights by bitsandbytes: 4bit (NF4), 8bit, or None. Needs ``pip install
            'fedlowrank[quantize]'``. 4-bit layers compute in ``dtype``; for auto in the dtype that the model's
            ``config.json`` names, float32 if it names none. Files that are quantized already keep their quantization.
        attention: implementation of attention. auto: the default of transformers; or eager, sdpa, flash_attention_2. For
            short texts on a CPU, training by eager is several times faster than by sdpa, whose fused backward pass
            works in long blocks.
        gradient_checkpointing: whether activations are recomputed in the backward pass and not stored, with the
            parameters of the forward pass (:mod:`fedlowrank.models.stateless`).
        revision: branch, tag or commit of a model on the hub; None for its main branch.
        offline: whether the hub is never contacted; models that were downloaded before are loaded from the cache.
        new_tokens: special tokens to add to the tokenizer, such as ``["<|im_start|>", "<|im_end|>"]``. Their rows of the
            embedding and of the output layer are trained beside the factors, also those of tokens that the
            tokenizer already has.
        device_map: device of each layer, for a base that one device does not hold: auto, balanced, balanced_low_0 or
            sequential, by which accelerate chooses, or a table by the names of modules, with the number of a GPU, cpu
            or disk. Weights in the CPU's memory beside a GPU, and weights on the disk, are loaded for each call.
            None for ``run.device``, on which data and factors are in any case.
        max_memory: memory that a chosen device map may use of each device, such as ``{0 = "20GiB", cpu = "60GiB"}``.
        offload_folder: folder for weights that a device map puts on the disk.
    """

    path: str
    task: Literal["causal", "classification", "token_classification", "embedding"] = "causal"
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    quantize: Literal["4bit", "8bit"] | None = None
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    revision: str | None = None
    offline: bool = False
    new_tokens: tuple[str, ...] = ()
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[str, Any] | None = None
    offload_folder: str | None = None

    def __post_init__(self) -> None:
        check_device_map(
            self.device_map,
            self.max_memory,
            self.offload_folder,
            self.new_tokens,
            is_quantized=self.quantize is not None,
        )
        check_new_tokens(self.new_tokens)

    @property
    def has_head(self) -> bool:
        """Whether the model has a classification head."""
        return self.task in ("classification", "token_classification")


@dataclass(frozen=True)
class LoadedBase:
    """A loaded base with its tokenizer.

    Attributes:
        model: model (``transformers.PreTrainedModel``) in evaluation mode; no parameter requires a gradient.
        tokenizer: tokenizer of ``transformers`` that has a padding token.
        name: name of the base, as the user gave it.
        folder: folder of the base's files; for a model on the hub the downloaded snapshot.
        head: names of the modules that are trained whole: the classification head, and modules of the body whose
            weights are missing in the files. Empty for a causal model.
        notes: warnings about changes that the settings do not request, each a sentence.
        saved_modules: names of further modules that are trained whole, from ``lora.modules_to_save``.
        token_ids: ids of ``language.new_tokens``.
        use_cache: field of the base's configuration in the files, None if it has none; in memory it is False, for
            training.
        turn_end: id of the token by which the chat template ends an answer, if the base in the files does not stop
            there, see :func:`stop_at_turn_end`; otherwise None.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path
    head: tuple[str, ...]
    notes: tuple[str, ...]
    saved_modules: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    use_cache: bool | None = None
    turn_end: int | None = None

    @cached_property
    def files(self) -> dict[str, str]:
        """Digest of each file, computed at first use because a client can train without it."""
        return digest_base_files(self.folder)

    @property
    def digest(self) -> str:
        """One digest of all files; the same in every dtype and quantization."""
        return combine_file_digests(self.files)


def load_base(base: LanguageBase, classes: tuple[str, ...], key: Key) -> LoadedBase:
    """Load a model and its tokenizer.

    Weights that are missing in the files, such as a new classification head, are initialized from the key by the
    model's own code. torch's global generator does not change.

    Args:
        base: settings of the base.
        classes: class names; empty for a causal model.
        key: source of randomness for new weights.

    Raises:
        ConfigError: if the classes do not fit the task, bitsandbytes is missing or its layers pass no gradient, the files are
            quantized in another way, a part that is trained whole is quantized, quantized layers would be loaded for
            each call, a token of a causal model attends to later tokens, or the model is an encoder with a decoder.
        DataError: if transformers is missing, no model can be loaded from the path, weights of a causal model are
            missing in the files, or its tokenizer has no token for padding.
    """
    if base.has_head != bool(classes):
        raise ConfigError(
            "a classification task needs the names of its classes"
            if not classes
            else f"a model for the task {base.task!r} has no classes, yet {len(classes)} are given; set task = "
            "'classification', or 'token_classification' for labels of words"
        )
    library = import_library("transformers", "a language model")
    source, local_files_only = _find_source(base)
    settings: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local_files_only}
    if base.revision is not None:
        settings["revision"] = base.revision
    model_settings: dict[str, Any] = {"dtype": base.dtype}
    if base.device_map is not None:
        model_settings |= make_placement(base.device_map, base.max_memory, base.offload_folder)
    if base.attention != "auto":
        model_settings["attn_implementation"] = base.attention
    class_settings: dict[str, Any] = {}
    if classes:
        class_settings = {
            "num_labels": len(classes),
            "id2label": dict(enumerate(classes)),
            "label2id": {name: i for i, name in enumerate(classes)},
        }
        # a head with another number of classes is replaced; a note says so
        model_settings["ignore_mismatched_sizes"] = True
    auto_class = {
        "causal": library.AutoModelForCausalLM,
        "classification": library.AutoModelForSequenceClassification,
        "token_classification": library.AutoModelForTokenClassification,
        "embedding": library.AutoModel,
    }[base.task]
    loading_info: dict[str, Any] = {}

    def load_model() -> nn.Module:
        module: nn.Module
        module, info = auto_class.from_pretrained(
            source, config=config, output_loading_info=True, **model_settings, **settings
        )
        loading_info.update(info)
        return module

    try:
        with silence_library(library):
            config = library.AutoConfig.from_pretrained(source, **class_settings, **settings)
            _refuse_encoder_decoder(config, base)
            stored = find_stored_quantization(config)
            model_settings |= _choose_quantization(library, auto_class, config, base, stored)
            tokenizer = library.AutoTokenizer.from_pretrained(source, **settings)
            model: Any = build_module(load_model, key)
    except ConfigError:
        raise
    # The folder may hold files of any kind, and the parsers of many libraries raise exceptions of any class.
    except Exception as error:
        # an option of transformers, named where it refuses quantized layers that it would load for each call
        if "llm_int8_enable_fp32_cpu_offload" in str(error):
            raise quantized_placement_error() from error
        raise DataError(
            f"transformers cannot load a {base.task} model from {base.path!r}: {type(error).__name__}: "
            f"{error}"
        ) from error
    new_weights = sorted(
        {*loading_info["missing_keys"], *(str(row[0]) for row in loading_info["mismatched_keys"])}
    )
    head, notes = _find_new_parts(model, base, new_weights)
    refuse_quantized_parts(model, head)
    if stored is not None:
        notes.append(stored.describe())
    token_ids = add_tokens(model, tokenizer, base.new_tokens) if base.new_tokens else ()
    notes += _ensure_padding_token(model, tokenizer, base)
    model.requires_grad_(False)
    model.eval()
    # before the model computes anything
    keep_training_arithmetic(model)
    keep_gradients(model)
    check_embedding(model)
    check_module_names(model, base.device_map)
    remove_offload_folder_with(model, model_settings)
    if base.task == "causal":
        notes += _compare_end_tokens(model, tokenizer, base)
        if getattr(model.config, "output_router_logits", False):
            notes.append(
                "config.json sets output_router_logits, by which transformers adds a loss that balances the experts. It is "
                "no part of the loss here."
            )
        _check_causal(model, base, is_quantized=base.quantize is not None or stored is not None)
    if base.task == "embedding":
        return_hidden_states(model)
    if base.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(
                f"{type(model).__name__} has no gradient checkpointing; set gradient_checkpointing = false"
            )
        # newer and older name of the method
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False, "context_fn": keep_parameters_for_recomputation(model)})
    use_cache = getattr(model.config, "use_cache", None)
    if use_cache is not None:
        model.config.use_cache = False
    keep_in_float32(model, head)
    folder = _find_folder(source, settings)
    return LoadedBase(
        model, tokenizer, base.path, folder, head, tuple(notes), token_ids=token_ids, use_cache=use_cache
    )


def warn_slow_precision(dtype: str, autocast: str, device: str) -> None:
    """Warn if bfloat16 is set on a CPU without instructions for it.

    Args:
        dtype: dtype of the weights.
        autocast: dtype of matrix products.
        device: device that computes the matrix products.
    """
    bfloat16_settings = [
        name for name, value in (("dtype", dtype), ("autocast", autocast)) if value == "bfloat16"
    ]
    if bfloat16_settings and device == "cpu" and not has_bfloat16_instructions():
        setting_names = " and ".join(f"local.{name}" for name in bfloat16_settings)
        values = " ".join(
            f"local.{name}={'float32' if name == 'dtype' else 'none'}" for name in bfloat16_settings
        )
        warn_user(
            f"{' and '.join(bfloat16_settings)} bfloat16: this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16), so "
            f"training can be many times slower than in float32. Set {setting_names} for this machine: {values}",
            RuntimeWarning,
        )


def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for products of bfloat16 matrices; True if the system does not say.

    Args:
        cpuinfo: file with the system's description of its processors.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return True
    # "Features" on ARM
    lines = [line.partition(":")[2] for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return not lines or bool({"avx512_bf16", "amx_bf16", "bf16"} & set(lines[0].split()))


def _find_folder(source: str, settings: Mapping[str, Any]) -> Path:
    """Find the folder of a model's files; for a model on the hub its downloaded snapshot."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils.hub import cached_file

    config_path = cached_file(
        source,
        "config.json",
        revision=settings.get("revision"),
        local_files_only=settings["local_files_only"],
    )
    return Path(str(config_path)).parent


def keep_in_float32(model: Any, head: Sequence[str]) -> None:
    """Convert modules that are trained whole to float32; their inputs and outputs keep the dtype of the base.

    PEFT does the same for factors. Uploads of all clients then have one dtype, for a base of any dtype.
    """
    dtype = model.dtype
    if dtype == torch.float32:
        return
    for module in map(model.get_submodule, head):
        module.to(torch.float32)
        module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        module.register_forward_hook(partial(_cast_output, dtype))


def _cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _cast_floats(args, torch.float32), _cast_floats(kwargs, torch.float32)


def _cast_output(dtype: torch.dtype, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return _cast_floats(output, dtype)


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in a value, also in tuples, lists, dicts and the outputs of transformers."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict) and (type(value) is dict or is_dataclass(value)):
        items = {name: _cast_floats(item, dtype) for name, item in value.items()}
        # transformers' ModelOutput is a dataclass and a dict of its fields
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast_floats(item, dtype) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_cast_floats(item, dtype) for item in value)
    # other objects, such as a cache of keys and values, may be changed in place or have constructors of their own
    return value


def _find_source(base: LanguageBase) -> tuple[str, bool]:
    """Find the folder or hub name to load from, and whether only local files may be used."""
    folder = Path(base.path).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise DataError(
                f"{base.path!r} holds no config.json, so it is no model folder of transformers "
                "(save_pretrained)."
            )
        return str(folder), True
    # Do not look up a misspelt path on the hub: names on the hub are NAME or OWNER/NAME.
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base.path)
    if not is_name or base.path.startswith("."):
        raise DataError(f"{base.path!r} does not exist: there is no folder {str(folder.absolute())!r}.")
    return base.path, base.offline


def _choose_quantization(
    library: Any, auto_class: Any, config: Any, base: LanguageBase, stored: StoredQuantization | None
) -> dict[str, Any]:
    """Choose the arguments of ``from_pretrained`` for quantization, and keep the parts that are trained whole out of it.

    Raises:
        ConfigError: if the files are quantized in another way than the settings ask for, or bitsandbytes is missing.
    """
    if stored is not None and base.quantize not in (None, stored.kind):
        raise ConfigError(
            f"language.quantize is {base.quantize!r}, but the files of {base.path!r} hold weights that are quantized already "
            f"({stored.kind}), which cannot be quantized anew. Leave quantize out, or name the model in float32 or bfloat16"
        )
    skipped = None
    if base.has_head and (stored is not None or base.quantize is not None):
        skipped = _find_head(build_module(lambda: _build_without_weights(auto_class, config), Key((0,))))
    if stored is not None and stored.is_of_bitsandbytes:
        prepare_bitsandbytes(f"the base {base.path!r}, whose files hold {stored.kind} weights,")
        if skipped is not None:
            stored.skip(skipped)
    if stored is not None or base.quantize is None:
        return {}
    if base.task == "embedding":
        # the files may lack it, and hidden states do not depend on it
        skipped = ["pooler"]
    dtype = getattr(config, "dtype", None) or torch.float32 if base.dtype == "auto" else base.dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return {"quantization_config": make_quantization(library, base.quantize, dtype, skipped)}


def _build_without_weights(auto_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = auto_class.from_config(copy.deepcopy(config))
    return module


def _find_head(model: Any) -> list[str]:
    """Find the modules with weights outside of the body, which are the head of a classification model."""
    children = [name for name, child in model.named_children() if list(child.parameters())]
    return [name for name in children if name != model.base_model_prefix]


def _find_new_parts(
    model: Any, base: LanguageBase, new_weights: list[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Find the modules to train whole, and write notes on weights that are missing in the files."""
    head = _find_head(model) if base.has_head else []
    head_weights = [n for n in new_weights if n.split(".")[0] in head]
    body_weights = [n for n in new_weights if n not in head_weights]
    if base.task == "embedding":
        # last hidden states do not depend on a pooler
        body_weights = [n for n in body_weights if n.split(".")[0] != "pooler"]
    notes = []
    weight_count = len(model.state_dict())
    if len(body_weights) > (weight_count // 2 if base.has_head else 0):
        raise DataError(
            f"{base.path!r} lacks {len(body_weights)} of the {weight_count} weights of a {type(model).__name__}, "
            f"such as {body_weights[0]!r}; it is the folder of another kind of model."
        )
    if head_weights:
        notes.append(
            f"{HEAD_NOTE}{', '.join(head)}) is new: {', '.join(head_weights)} drawn from the run's key."
        )
    elif head:
        notes.append(
            f"{HEAD_NOTE}{', '.join(head)}) is the one of the files; check that its classes are in your order."
        )
    if body_weights:
        notes.append(
            f"The files lack {', '.join(body_weights)}: drawn from the run's key, and trained and kept with the "
            "head."
        )
    modules = dict.fromkeys(n.rpartition(".")[0] for n in body_weights)
    return (*head, *modules), notes


def find_end_tokens(config: Any) -> set[int]:
    """Find the end tokens in a configuration of transformers, which names none, one or several."""
    eos_token_id = getattr(config, "eos_token_id", None)
    return {
        i
        for i in (eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id])
        if i is not None
    }


def stop_at_turn_end(loaded: LoadedBase) -> LoadedBase:
    """Let a model stop at the token by which its chat template ends an answer, because it learns to write that token.

    The token is added to the end tokens of ``generation_config``, which is written with a whole model. The base may lack
    it: a template of ChatML ends an answer by ``<|im_end|>``, also where the tokenizer's end token is another one.

    Args:
        loaded: causal base; its ``generation_config`` is changed.

    Returns:
        The base, with the token and a note if the token was added.
    """
    turn_end = find_turn_end(loaded.tokenizer)
    config = getattr(loaded.model, "generation_config", None)
    end_tokens = find_end_tokens(config)
    if turn_end is None or turn_end in end_tokens or config is None:
        return loaded
    config.eos_token_id = sorted({*end_tokens, turn_end})
    note = (
        f"The chat template ends an answer by {loaded.tokenizer.convert_ids_to_tokens(turn_end)!r} ({turn_end}), which is no "
        f"end token of {loaded.name!r}: it is added to the end tokens of generation."
    )
    return replace(loaded, notes=(*loaded.notes, note), turn_end=turn_end)


def _compare_end_tokens(model: Any, tokenizer: Any, base: LanguageBase) -> list[str]:
    """Compare the tokenizer's end token, which the model learns to write, with the end tokens of generation.

    Returns:
        A note if the model does not stop at the tokenizer's end token, otherwise none.
    """
    model_end_tokens = find_end_tokens(model.config) | find_end_tokens(
        getattr(model, "generation_config", None)
    )
    tokenizer_end_token = tokenizer.eos_token_id
    if tokenizer_end_token is None or not model_end_tokens or tokenizer_end_token in model_end_tokens:
        return []
    stop_list = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in sorted(model_end_tokens))
    return [
        f"The tokenizer of {base.path!r} ends a text by {tokenizer.eos_token!r} ({tokenizer_end_token}), but the model "
        f"stops at {stop_list}: trained texts end in a token that is not the model's. Set eos_token in tokenizer_config.json."
    ]


def _refuse_encoder_decoder(config: Any, base: LanguageBase) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"language.path: {base.path!r} is an encoder with a decoder ({config.model_type}), which is not supported. Name a "
            "causal model (Llama, Qwen, ...), or for classes and embeddings an encoder (BERT, RoBERTa, ...)"
        )


def _check_causal(model: Any, base: LanguageBase, *, is_quantized: bool) -> None:
    """Raise ConfigError if a model's logits depend on later tokens, such as those of a BERT encoder."""
    embedding = model.get_input_embeddings()
    ids = (torch.arange(1, 9, device=embedding.weight.device) % embedding.num_embeddings)[None]
    changed_ids = torch.cat([ids[:, :-1], ids[:, :1]], 1)
    with torch.no_grad():
        scores, changed_scores = (
            model(input_ids=x, attention_mask=torch.ones_like(x)).logits[:, :-1].float()
            for x in (ids, changed_ids)
        )
    # only rounding may differ: a batch of an expert, or the outlier columns of 8-bit weights, depend on all tokens
    tolerance = 0.05 if is_quantized else 1e-5 if model.dtype == torch.float32 else 0.01
    if (scores - changed_scores).abs().max() > tolerance * scores.abs().max():
        raise ConfigError(
            f"language.path: in the {type(model).__name__} of {base.path!r} a token sees those that follow it, so it would "
            "learn to predict what it is shown. Name a causal model; or set language.task to 'classification', "
            "'token_classification' or 'embedding', for which encoders are made"
        )


def check_positions(model: Any, context: int) -> None:
    """Raise ConfigError if texts exceed a model's learnt position embeddings; rotary embeddings have no limit.

    Args:
        model: model of transformers, or one wrapped by PEFT.
        context: largest number of tokens of a text.

    Raises:
        ConfigError: if the context is longer than the table of position embeddings.
    """
    position_count = min(_count_positions(model), default=context)
    if context > position_count:
        raise ConfigError(
            f"texts may have {context} tokens here, but the model has {position_count} positions. Set context to "
            f"{position_count} or less"
        )


def _count_positions(model: Any) -> Iterator[int]:
    """The numbers of positions in the tables of a model."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            # some models reserve the first positions for padding
            reserved_count = 0 if layer.padding_idx is None else layer.padding_idx + 1
            yield layer.num_embeddings - max(reserved_count, getattr(layer, "offset", 0))
        # GPT-J, CodeGen and CTRL keep sines and cosines
        for table_name in ("embed_positions", "pos_encoding"):
            if isinstance(table := vars(layer).get(table_name, layer._buffers.get(table_name)), Tensor):
                yield len(table)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) == "mpt":
        yield config.max_seq_len


_POSITION_TABLES = "wpe", "embed_positions", "position_embeddings", "positions_embed"
"""Names of learnt tables of positions in models of transformers."""


def _ensure_padding_token(model: Any, tokenizer: Any, base: LanguageBase) -> list[str]:
    """Set a padding token in tokenizer and model.

    Returns:
        A note if the tokenizer had no padding token, otherwise none.
    """
    notes = []
    if tokenizer.pad_token_id is None:
        substitute = tokenizer.eos_token or tokenizer.unk_token
        if substitute is None:
            raise DataError(
                f"the tokenizer of {base.path!r} has no token for padding, end of text or unknown words; set "
                "its pad_token and save it."
            )
        tokenizer.pad_token = substitute
        notes.append(f"The tokenizer has no padding token: {substitute!r} pads.")
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        # a model of characters has no such table
        weight = None
    if isinstance(weight, Tensor) and tokenizer.pad_token_id >= len(weight):
        raise DataError(
            f"the padding token {tokenizer.pad_token!r} of {base.path!r} has the id {tokenizer.pad_token_id}, but the model has "
            f"{len(weight)} embeddings; set another pad_token and save it."
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    return notes
