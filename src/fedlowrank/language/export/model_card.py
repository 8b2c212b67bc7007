"""Model cards: README.md of an exported model, with the metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from ...core.learning.losses import Loss
from ...results.client_numbers import ACCURACY, LOSS
from ...results.records import RoundRecord
from ...rounds.setup.client_ranks import find_client_rank
from ...rounds.stored_settings import unwrap
from ...storage.run_folder import versions

if TYPE_CHECKING:
    from ...rounds.run import Run

MAX_LISTED_CLIENTS = 20
"""Maximum number of clients that a card lists one by one."""

CARD_PACKAGES = ("transformers", "peft")
"""Optional packages whose versions a card lists, in addition to the packages of every run."""


_PIPELINES = {
    "causal": ("text-generation", "AutoModelForCausalLM"),
    "classification": ("text-classification", "AutoModelForSequenceClassification"),
    "token_classification": ("token-classification", "AutoModelForTokenClassification"),
    "embedding": ("feature-extraction", "AutoModel"),
}
"""Pipeline of transformers and class that loads the base, by task."""


_OBJECTIVES: dict[str, tuple[str, str]] = {
    "dpo": ("direct preference optimization (DPO)", "beta"),
    "orpo": ("odds ratio preference optimization (ORPO)", "odds_ratio_weight"),
    "contrastive": ("contrastive loss, the other pairs of a batch as negatives", "temperature"),
}
"""Title of the loss and the option that a card states, by kind of loss."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that the cards of all its models state.

    Attributes:
        method: title of the method.
        citation: citation of the method's paper; may be empty.
        rounds: number of completed rounds.
        clients: number of training examples and rank of each client, in the order of their indices.
        privacy: ε, δ and the kind of differential privacy, in words; None if the run was not private.
        metrics: rows of the table of metrics: name, after the last round, after the best round.
        best: best round by validation; None without validation.
        last: last evaluated round; None without evaluations.
        versions: versions of software packages, by name.
        objective: minimized loss, in words.
        tags: tags of the objective on the Hub.
    """

    method: str
    citation: str
    rounds: int
    clients: tuple[tuple[int, int], ...]
    privacy: str | None
    metrics: tuple[tuple[str, str, str], ...]
    best: int | None
    last: int | None
    versions: Mapping[str, str]
    objective: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardModel:
    """The model that a card describes.

    Attributes:
        base: name of the base model, or its folder.
        client: index of the client that owns the model; None for the server's model.
        is_adapter: whether the folder holds an adapter, and not a whole model.
        task: task of the base.
        prompt: training prompt, with the placeholder ``{instruction}``; None for the tokenizer's chat template or a
            model that writes no text.
        rank: rank of the adapter; None for a whole model.
        truncation: ``rank`` and relative ``error`` of the truncation, and ``layers`` with the error of each layer; None
            without truncation.
        whole_layers: names of the layers that an adapter stores whole.
        classes: class names in the order of their indices; empty for a model without a classification head.
        pad_token: id of the padding token, by which a decoder finds the last token of a text; None if unknown.
        has_new_tokens: whether an adapter has rows of tokens that the base may lack, and the folder their tokenizer.
        end_tokens: ids of the tokens at which generation stops, if those of the base lack one; otherwise empty.
    """

    base: str
    client: int | None
    is_adapter: bool
    task: Literal["causal", "classification", "token_classification", "embedding"] = "causal"
    prompt: str | None = None
    rank: int | None = None
    truncation: Mapping[str, Any] | None = None
    whole_layers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    pad_token: int | None = None
    has_new_tokens: bool = False
    end_tokens: tuple[int, ...] = ()


def list_lora_ranks(run: Run, max_rank: int, default_rank: int) -> list[int]:
    """List the LoRA rank of each client of a run.

    Args:
        run: run with language models.
        max_rank: maximum rank of a layer of the model.
        default_rank: rank of the model's own factors, for methods that set no rank.
    """
    return [
        min(find_client_rank(run.method, info) or default_rank, max_rank) for info in run.federation.infos
    ]


def gather_facts(run: Run, ranks: Sequence[int], records: Sequence[RoundRecord] = ()) -> RunFacts:
    """Gather the facts of a run for its model cards.

    Args:
        run: run in its current state.
        ranks: LoRA ranks of the clients.
        records: records of the run's rounds; without them a card has no metrics.
    """
    completed_records = [r for r in records if r.round <= run.round]
    evaluated_records = [r for r in completed_records if r.is_evaluated]
    best_record = max(evaluated_records, key=_compute_validation_order, default=None)
    if best_record is not None and best_record.validation() is None:
        best_record = None
    last_record = evaluated_records[-1] if evaluated_records else None
    software_versions = {**versions(), **{p: metadata.version(p) for p in CARD_PACKAGES}}
    return RunFacts(
        run.method.title,
        unwrap(run.method).citation,
        run.round,
        tuple((info.example_count, rank) for info, rank in zip(run.federation.infos, ranks, strict=True)),
        _describe_privacy(run, completed_records),
        tuple(_make_metric_rows(last_record, best_record)),
        None if best_record is None else best_record.round,
        None if last_record is None else last_record.round,
        software_versions,
        _describe_objective(run.federation.loss, run.federation.classes),
        (run.federation.loss.kind,) if run.federation.loss.is_preference else (),
    )


def format_card(model: CardModel, facts: RunFacts) -> str:
    """Format a model card: metadata in YAML between two lines of dashes, then Markdown.

    Args:
        model: model in the folder.
        facts: facts of the model's run.
    """
    owner = "the server" if model.client is None else f"client {model.client}"
    description = f"LoRA adapter of rank {model.rank}" if model.is_adapter else "Model"
    sections = [
        _format_front_matter(model, facts.tags),
        f"# {description} for {model.base}" if model.is_adapter else f"# {model.base}, fine-tuned",
        f"The model of {owner} after {facts.rounds} rounds of federated fine-tuning by {facts.method}"
        + (f" ({facts.citation})" if facts.citation else "")
        + ".",
        _format_use(model),
        *_format_prompt(model),
        "## Training\n\n" + "\n".join(_format_training(facts)),
    ]
    if facts.metrics:
        sections.append(_format_metrics(facts))
    sections.append(_format_truncation(model))
    rows = "\n".join(f"| {name} | {version} |" for name, version in facts.versions.items())
    sections.append(f"## Versions\n\n| software | version |\n| --- | --- |\n{rows}")
    return "\n\n".join(sections) + "\n"


def _compute_validation_order(record: RoundRecord) -> tuple[float, int]:
    """Compute the sort key of the best round: its validation value, and the earlier round of equal ones."""
    value = record.validation()
    return -math.inf if value is None else value, -record.round


def _describe_privacy(run: Run, records: Sequence[RoundRecord]) -> str | None:
    if run.budget is None:
        return None
    kind = run.settings.privacy.kind
    privacy = next(
        (r.server_metrics["privacy"] for r in reversed(records) if "privacy" in r.server_metrics), None
    )
    if privacy is None:
        # a run in memory has no records; a run opened from its folder has them
        privacy = run.budget.describe(run.round)
    return f"({kind} differential privacy) ε = {privacy['epsilon']:.4g} at δ = {privacy['delta']:g}"


def _make_metric_rows(
    last_record: RoundRecord | None, best_record: RoundRecord | None
) -> list[tuple[str, str, str]]:
    rows = []
    for name in (ACCURACY, LOSS):
        for split, title in (("test", "test"), ("val", "validation")):
            values = [None if r is None else r.mean(name, split=split) for r in (last_record, best_record)]
            if any(v is not None for v in values):
                last_value, best_value = ("-" if v is None else f"{v:.4g}" for v in values)
                rows.append((f"{title} {name}", last_value, best_value))
    return rows


def _describe_objective(loss: Loss, classes: Sequence[str]) -> str:
    """Describe the loss in words, with its most important option."""
    if loss.is_custom:
        return f"a loss of the user's own, `{loss.kind}`"
    if loss.kind in _OBJECTIVES:
        title, option = _OBJECTIVES[loss.kind]
        other_options = {n: v for n, v in loss.describe().items() if n not in ("kind", option)}
        options = {option: getattr(loss, option), **other_options}
        return ", ".join([title, *(f"{name} = {value:g}" for name, value in options.items())])
    if loss.kind in ("auto", "next_token"):
        return "cross-entropy of the class" if classes else "cross-entropy of the next token"
    return loss.kind.replace("_", "-")


def _format_front_matter(model: CardModel, tags: Sequence[str]) -> str:
    """Format the metadata in YAML; a JSON string is a YAML string."""
    library = "peft" if model.is_adapter else "transformers"
    lines = [f"base_model: {json.dumps(model.base, ensure_ascii=False)}"]
    lines += [f"base_model_relation: {'adapter' if model.is_adapter else 'finetune'}"]
    pipeline = _PIPELINES[model.task][0]
    lines += [f"library_name: {library}", f"pipeline_tag: {pipeline}"]
    lines += ["tags:", "- fedlowrank", "- federated-learning"]
    lines += ["- lora"] if model.is_adapter else []
    lines += [f"- {tag}" for tag in tags]
    return "\n".join(["---", *lines, "---"])


_RESIZE_CODE = (
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
    "if len(tokenizer) > base.get_input_embeddings().num_embeddings:  # the adapter has the rows of the new tokens\n"
    "    base.resize_token_embeddings(len(tokenizer))\n"
)
"""Code that gives a base the rows of new tokens, whose values PEFT reads from the adapter."""


def _format_use(model: CardModel) -> str:
    auto_class, name = _PIPELINES[model.task][1], json.dumps(model.base, ensure_ascii=False)
    if not model.is_adapter:
        code = f'from transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained("FOLDER")'
    elif not model.classes:
        code = (
            f"from peft import PeftModel\nfrom transformers import {auto_class}\n\n"
            f"base = {auto_class}.from_pretrained({name})\n"
            'model = PeftModel.from_pretrained(base, "FOLDER")'
        )
    else:
        pad_line = "" if model.pad_token is None else f"    pad_token_id={model.pad_token},\n"
        code = (
            f"from peft import PeftModel\nfrom transformers import {auto_class}\n\n"
            f"classes = {json.dumps(model.classes, ensure_ascii=False)}\n"
            f"base = {auto_class}.from_pretrained(\n    {name},\n    num_labels=len(classes),\n"
            "    id2label=dict(enumerate(classes)),\n"
            "    label2id={name: i for i, name in enumerate(classes)},\n"
            f"{pad_line}    ignore_mismatched_sizes=True,  # the adapter has the head\n)\n"
            'model = PeftModel.from_pretrained(base, "FOLDER")'
        )
    if model.is_adapter and model.has_new_tokens:
        code = code.replace("from transformers import ", "from transformers import AutoTokenizer, ").replace(
            "model = PeftModel", _RESIZE_CODE + "model = PeftModel"
        )
    if model.is_adapter and model.end_tokens:
        code += f"\nmodel.generation_config.eos_token_id = {list(model.end_tokens)}  # with the end of an answer in training"
    return f"```python\n{code}\n```"


def _format_prompt(model: CardModel) -> list[str]:
    if model.task != "causal":
        return []
    if model.prompt is None:
        return ["Ask it in the chat template of the tokenizer, as in training."]
    return [
        f"Ask it as in training, with your question for `{{instruction}}`:\n\n```text\n{model.prompt}\n```"
    ]


def _format_training(facts: RunFacts) -> list[str]:
    sizes, ranks = zip(*facts.clients, strict=True)
    lines = [f"- Method: {facts.method}", f"- Objective: {facts.objective}", f"- Rounds: {facts.rounds}"]
    lines += [f"- Clients: {len(sizes)}, with {sum(sizes):,} training examples together"]
    lines += [f"- Privacy: {facts.privacy}" if facts.privacy else "- Privacy: none (no differential privacy)"]
    if len(sizes) > MAX_LISTED_CLIENTS:
        lines += [f"- Training examples of a client: {min(sizes):,} to {max(sizes):,}"]
        return [*lines, f"- LoRA rank of a client: {min(ranks)} to {max(ranks)}"]
    table = ["", "| client | training examples | LoRA rank |", "| --- | --- | --- |"]
    return [*lines, *table, *(f"| {i} | {n:,} | {r} |" for i, (n, r) in enumerate(facts.clients))]


def _format_metrics(facts: RunFacts) -> str:
    best_title = "best round" if facts.best is None else f"best round by validation ({facts.best})"
    lines = ["## Metrics", "", "Means over the clients, of the models that the method evaluates first.", ""]
    lines += [f"| metric | last round ({facts.last}) | {best_title} |", "| --- | --- | --- |"]
    return "\n".join(
        [
            *lines,
            *(f"| {name} | {last_value} | {best_value} |" for name, last_value, best_value in facts.metrics),
        ]
    )


def _format_truncation(model: CardModel) -> str:
    title = "## Truncation\n\n"
    if model.truncation is None:
        layer_note = (
            f" These layers are stored whole: {', '.join(model.whole_layers)}." if model.whole_layers else ""
        )
        return (
            f"{title}Nothing is truncated: the folder holds the model of the run, up to rounding.{layer_note}"
        )
    error, rank = model.truncation["error"], model.truncation["rank"]
    if error == 0:
        return f"{title}Nothing is truncated: the model of the run is an adapter of rank {rank}. The relative error is 0."
    rows = "\n".join(f"| {name} | {e:.3g} |" for name, e in model.truncation["layers"].items())
    return (
        f"{title}The adapter is the truncated singular value decomposition of an update of higher rank. Its relative "
        f"error ‖W - W_r‖_F / ‖W‖_F is {error:.3g} over all layers, where W is what the run added to the base's "
        f"weights and W_r its best approximation of rank {rank}.\n\n"
        f"| layer | relative error |\n| --- | --- |\n{rows}"
    )
