"""The frozen base of a language model: how it is loaded, which parts are new, and digests of its files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.arguments.field_checks import CheckedFields
from ..core.errors import ConfigError, DataError, warn_user
from ..core.key import Key
from ..models.architecture import build_module
from ..models.stateless import keep_parameters_for_recomputation
from ..storage.base_files import combine_file_digests, digest_base_files
from .objectives.text_embeddings import return_hidden_states
from .optional import import_library, quiet

HEAD_NAMES = ("classifier", "score")
"""What PEFT takes for the head of a classification model (``peft.PeftModelForSequenceClassification``)."""


@dataclass(frozen=True)
class LanguageBase(CheckedFields):
    """Which language model is adapted, and in which precision. Code that comes with a model is never run.

    Needs ``pip install 'fedlowrank[language]'``.

    Attributes:
        path: a folder as ``save_pretrained`` writes it or, if no such path exists, a name on the hub.
        task: causal, a model that continues a text; classification, an encoder or decoder with a head of
            classes; token_classification, one with a head of classes for each token; or embedding, one
            without a head, whose last hidden states are averaged over the tokens of a text.
        dtype: of the weights in memory; auto takes that of the files.
        quantize: 4bit (NF4) or 8bit weights by bitsandbytes, or None. Needs ``pip install
            'fedlowrank[quantize]'``.
        attention: auto, what transformers takes; or eager, sdpa, flash_attention_2. For short texts on a CPU
            eager is several times faster to train than torch's fused kernel, whose backward pass works in
            long blocks.
        gradient_checkpointing: activations are computed again in the backward pass instead of being stored,
            with the parameters that were given to the forward pass (:mod:`fedlowrank.models.stateless`).
        revision: branch, tag or commit of a name on the hub, or None for its main branch.
        offline: do not ask the hub, even for a name; what was downloaded before is found.
    """

    path: str
    task: Literal["causal", "classification", "token_classification", "embedding"] = "causal"
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    quantize: Literal["4bit", "8bit"] | None = None
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.quantize not in (None, "4bit", "8bit"):
            raise ConfigError(f"Base.quantize: {self.quantize!r} is no choice; it is '4bit', '8bit' or None")

    @property
    def has_head(self) -> bool:
        """Whether the model has a head of classes."""
        return self.task in ("classification", "token_classification")


@dataclass(frozen=True)
class LoadedBase:
    """A base as it was loaded.

    Attributes:
        model: a ``transformers.PreTrainedModel`` in evaluation mode, no parameter of which requires a
            gradient.
        tokenizer: a ``transformers`` tokenizer that has a padding token.
        name: of the base, as the user gave it.
        folder: of its files; of a name on the hub the downloaded snapshot.
        head: names of the modules to be trained as a whole: the classification head, and modules of the body
            that the files do not hold. Empty for a causal model.
        notes: warnings on what was done beyond the settings, each a sentence.
        saved: names of further modules to be trained as a whole, which ``lora.modules_to_save`` means.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path
    head: tuple[str, ...]
    notes: tuple[str, ...]
    saved: tuple[str, ...] = ()

    @cached_property
    def files(self) -> dict[str, str]:
        """Digest of each file, read when it is first asked for: a client needs none to answer an order."""
        return digest_base_files(self.folder)

    @property
    def digest(self) -> str:
        """One digest of all its files; the same in every dtype and quantization."""
        return combine_file_digests(self.files)


def load_base(base: LanguageBase, classes: tuple[str, ...], key: Key) -> LoadedBase:
    """Load a model and its tokenizer.

    Weights that the files do not hold, such as a new classification head, are initialized from the key by the
    rules of the model's own code; torch's global generator is as before.

    Args:
        base: settings.
        classes: names of the classes; empty for a causal model.
        key: of new weights.

    Raises:
        ConfigError: if the classes do not go with the task, bitsandbytes is missing, a token of a causal model sees
            those that follow it, or the model is an encoder with a decoder.
        DataError: if transformers is missing, nothing can be loaded from the path, weights of a causal model
            are missing in the files, or its tokenizer has nothing to pad with.
    """
    if base.has_head != bool(classes):
        raise ConfigError(
            "a classification task needs the names of its classes"
            if not classes
            else f"a model for the task {base.task!r} has no classes, yet {len(classes)} are given; set task = "
            "'classification', or 'token_classification' for labels of words"
        )
    library = import_library("transformers", "a language model")
    where, local = _where(base)
    settings: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    if base.revision is not None:
        settings["revision"] = base.revision
    of_model: dict[str, Any] = {"dtype": base.dtype}
    if base.quantize is not None:
        of_model["quantization_config"] = _quantization(library, base)
    if base.attention != "auto":
        of_model["attn_implementation"] = base.attention
    if classes:
        of_model |= {
            "num_labels": len(classes),
            "id2label": dict(enumerate(classes)),
            "label2id": {name: i for i, name in enumerate(classes)},
            # a head of another number of classes is replaced, and noted below
            "ignore_mismatched_sizes": True,
        }
    auto = {
        "causal": library.AutoModelForCausalLM,
        "classification": library.AutoModelForSequenceClassification,
        "token_classification": library.AutoModelForTokenClassification,
        "embedding": library.AutoModel,
    }[base.task]
    found: dict[str, Any] = {}

    def make() -> nn.Module:
        made: nn.Module
        made, info = auto.from_pretrained(where, output_loading_info=True, **of_model, **settings)
        found.update(info)
        return made

    try:
        with quiet(library):
            _refuse_encoder_decoder(library.AutoConfig.from_pretrained(where, **settings), base)
            tokenizer = library.AutoTokenizer.from_pretrained(where, **settings)
            model: Any = build_module(make, key)
    except ConfigError:
        raise
    # Files of any kind may lie in a folder, and the parsers of a dozen libraries raise what they like.
    except Exception as error:
        raise DataError(
            f"transformers cannot load a {base.task} model from {base.path!r}: {type(error).__name__}: "
            f"{error}"
        ) from error
    new = sorted({*found["missing_keys"], *(str(row[0]) for row in found["mismatched_keys"])})
    head, notes = _new_parts(model, base, new)
    notes += _pad(model, tokenizer, base)
    model.requires_grad_(False)
    model.eval()
    if base.task == "causal":
        notes += _compare_ends(model, tokenizer, base)
        _check_causal(model, base)
    if base.task == "embedding":
        return_hidden_states(model)
    if base.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(
                f"{type(model).__name__} has no gradient checkpointing; set gradient_checkpointing = false"
            )
        # its newer name, and the one before
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False, "context_fn": keep_parameters_for_recomputation(model)})
        model.config.use_cache = False
    keep_in_float32(model, head)
    return LoadedBase(model, tokenizer, base.path, _folder(where, settings), head, tuple(notes))


def warn_slow_precision(dtype: str, autocast: str, device: str) -> None:
    """Warn where bfloat16 is asked for on a CPU without instructions for it.

    Args:
        dtype: of the weights.
        autocast: type in which matrices are multiplied.
        device: where they are multiplied.
    """
    asked = [name for name, value in (("dtype", dtype), ("autocast", autocast)) if value == "bfloat16"]
    if asked and device == "cpu" and not has_bfloat16_instructions():
        fields = " and ".join(f"local.{name}" for name in asked)
        values = " ".join(f"local.{name}={'float32' if name == 'dtype' else 'none'}" for name in asked)
        warn_user(
            f"{' and '.join(asked)} bfloat16: this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16), so "
            f"training can be many times slower than in float32. Set {fields} for this machine: {values}",
            RuntimeWarning,
        )


def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies matrices of bfloat16; True where the system does not tell.

    Args:
        cpuinfo: the system's description of its processors.
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return True
    # "Features" on ARM
    lines = [line.partition(":")[2] for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return not lines or bool({"avx512_bf16", "amx_bf16", "bf16"} & set(lines[0].split()))


def _folder(where: str, settings: Mapping[str, Any]) -> Path:
    """The folder of a model's files; of a name on the hub its downloaded snapshot."""
    if Path(where).is_dir():
        return Path(where)
    from transformers.utils.hub import cached_file

    found = cached_file(
        where, "config.json", revision=settings.get("revision"), local_files_only=settings["local_files_only"]
    )
    return Path(str(found)).parent


def keep_in_float32(model: Any, head: Sequence[str]) -> None:
    """Hold modules that are trained whole in float32; what they get and give stays in the base's dtype.

    PEFT does so with factors. What clients send is then of one type, whatever the dtype of their base.
    """
    dtype = model.dtype
    if dtype == torch.float32:
        return
    for module in map(model.get_submodule, head):
        module.to(torch.float32)
        module.register_forward_pre_hook(_cast_inputs)
        module.register_forward_hook(partial(_cast_output, dtype))


def _cast_inputs(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_cast(value, torch.float32) for value in args)


def _cast_output(dtype: torch.dtype, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _where(base: LanguageBase) -> tuple[str, bool]:
    """What to load from, and whether only files of this machine are to be used."""
    where = Path(base.path).expanduser()
    if where.exists():
        if not (where / "config.json").is_file():
            raise DataError(
                f"{base.path!r} holds no config.json, so it is no model folder of transformers "
                "(save_pretrained)."
            )
        return str(where), True
    # A misspelt path should not be asked for on the hub, whose names are NAME or OWNER/NAME.
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base.path)
    if not is_name or base.path.startswith("."):
        raise DataError(f"{base.path!r} does not exist: there is no folder {str(where.absolute())!r}.")
    return base.path, base.offline


def _quantization(library: Any, base: LanguageBase) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"quantize = {base.quantize!r} needs bitsandbytes: pip install 'fedlowrank[quantize]'"
        )
    if base.quantize == "8bit":
        return library.BitsAndBytesConfig(load_in_8bit=True)
    compute = torch.bfloat16 if base.dtype == "auto" else getattr(torch, base.dtype)
    return library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def _new_parts(model: Any, base: LanguageBase, new: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Modules to train as a whole, and notes on weights that the files do not hold."""
    # of a classification model: all modules with weights beside the body
    children = [name for name, child in model.named_children() if list(child.parameters())]
    head = [n for n in children if n != model.base_model_prefix] if base.has_head else []
    in_head = [n for n in new if n.split(".")[0] in head]
    in_body = [n for n in new if n not in in_head]
    if base.task == "embedding":
        # last hidden states do not depend on a pooler
        in_body = [n for n in in_body if n.split(".")[0] != "pooler"]
    notes = []
    count = len(model.state_dict())
    if len(in_body) > (count // 2 if base.has_head else 0):
        raise DataError(
            f"{base.path!r} lacks {len(in_body)} of the {count} weights of a {type(model).__name__}, "
            f"such as {in_body[0]!r}; it is the folder of another kind of model."
        )
    if in_head:
        notes.append(f"The head ({', '.join(head)}) is new: {', '.join(in_head)} drawn from the run's key.")
    elif head:
        notes.append(
            f"The head ({', '.join(head)}) is the one of the files; check that its classes are in your order."
        )
    if in_body:
        notes.append(
            f"The files lack {', '.join(in_body)}: drawn from the run's key, and trained and kept with the "
            "head."
        )
    modules = dict.fromkeys(n.rpartition(".")[0] for n in in_body)
    return (*head, *modules), notes


def end_tokens(config: Any) -> set[int]:
    """The tokens at which a model stops by a configuration of transformers, which names none, one or several."""
    given = getattr(config, "eos_token_id", None)
    return {i for i in (given if isinstance(given, (list, tuple)) else [given]) if i is not None}


def _compare_ends(model: Any, tokenizer: Any, base: LanguageBase) -> list[str]:
    """Compare the tokenizer's end of text, which training teaches, with the tokens at which the model stops."""
    ends = end_tokens(model.config) | end_tokens(getattr(model, "generation_config", None))
    end = tokenizer.eos_token_id
    if end is None or not ends or end in ends:
        return []
    stops = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in sorted(ends))
    return [
        f"The tokenizer of {base.path!r} ends a text by {tokenizer.eos_token!r} ({end}), but the model stops at {stops}: "
        "trained texts end in a token that is not the model's. Set eos_token in tokenizer_config.json."
    ]


def _refuse_encoder_decoder(config: Any, base: LanguageBase) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"language.path: {base.path!r} is an encoder with a decoder ({config.model_type}), which is not supported. Name a "
            "causal model (Llama, Qwen, ...), or for classes and embeddings an encoder (BERT, RoBERTa, ...)"
        )


def _check_causal(model: Any, base: LanguageBase) -> None:
    """Refuse a model whose scores of a token depend on later ones, such as the encoder of a BERT."""
    embedding = model.get_input_embeddings()
    ids = (torch.arange(1, 9, device=embedding.weight.device) % embedding.num_embeddings)[None]
    other = torch.cat([ids[:, :-1], ids[:, :1]], 1)
    with torch.no_grad():
        first, second = (
            model(input_ids=x, attention_mask=torch.ones_like(x)).logits[:, :-1].float() for x in (ids, other)
        )
    # only rounding may differ: of experts' batches, and of 8-bit columns that are chosen over all tokens
    near = 0.05 if base.quantize else 1e-5 if model.dtype == torch.float32 else 0.01
    if (first - second).abs().max() > near * first.abs().max():
        raise ConfigError(
            f"language.path: in the {type(model).__name__} of {base.path!r} a token sees those that follow it, so it would "
            "learn to predict what it is shown. Name a causal model; or set language.task to 'classification', "
            "'token_classification' or 'embedding', for which encoders are made"
        )


def check_positions(model: Any, context: int) -> None:
    """Refuse a context above the positions that a model has learnt; rotations know none.

    Raises:
        ConfigError: if it is longer.
    """
    for name, layer in model.named_modules():
        own = name.rpartition(".")[2]
        if own not in ("wpe", "embed_positions", "position_embeddings") or not isinstance(
            layer, nn.Embedding
        ):
            continue
        # the first ones of some models are those of padding
        first = 0 if layer.padding_idx is None else layer.padding_idx + 1
        most = layer.num_embeddings - max(first, getattr(layer, "offset", 0))
        if context > most:
            raise ConfigError(f"context is {context}, but the model has {most} positions. Lower context")


def _pad(model: Any, tokenizer: Any, base: LanguageBase) -> list[str]:
    """Make sure that there is a padding token, known to the model too."""
    notes = []
    if tokenizer.pad_token_id is None:
        other = tokenizer.eos_token or tokenizer.unk_token
        if other is None:
            raise DataError(
                f"the tokenizer of {base.path!r} has no token for padding, end of text or unknown words; set "
                "its pad_token and save it."
            )
        tokenizer.pad_token = other
        notes.append(f"The tokenizer has no padding token: {other!r} pads.")
    if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
        raise DataError(
            f"the padding token {tokenizer.pad_token!r} of {base.path!r} has the id "
            f"{tokenizer.pad_token_id}, but the model has {model.get_input_embeddings().num_embeddings} "
            "embeddings; set another pad_token and save it."
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    return notes
