"""Writes the paragraph of a report on the setting of an experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.io.text import format_count, on_one_line
from ..results.records import SECTIONS
from .number_formats import format_percent
from .statistics.groups import RunGroup
from .statistics.low_rank import format_ranks
from .statistics.setting_names import value_text
from .trust import describe_trust

_SAMPLING = {
    "poisson": ", each drawn by itself (Poisson sampling)",
    "size": ", drawn in proportion to their numbers of training examples",
    "loss": ", those with the highest training loss of some drawn by size (Power-of-Choice)",
}
"""Descriptions of the draw of clients, by ``run.sampling``."""


def describe_setting(groups: Sequence[RunGroup]) -> str:
    """Describe data, clients, partition, model, rounds and seeds of one experiment in a paragraph."""
    run = groups[0].first
    sections = {name: run.section(name) for name in SECTIONS}
    sizes = groups[0].runs[0].examples
    sentences = [
        f"Data: {_describe(sections['data'], ('name', 'kind')) or 'not named'}.",
        f"{format_count(len(run.clients), 'client')} with {sizes[0]} training, {sizes[1]} validation and {sizes[2]} "
        "test examples in all.",
    ]
    if unseen_count := len(run.measurements.flagged_ids("unseen")):
        sentences.append(
            f"{unseen_count} of the clients never train and stand apart in all results: means are over the other "
            f"{len(run.clients) - unseen_count}."
        )
    sentences += [
        f"{name.capitalize()}: {_describe(sections[name], ('kind', 'name'))}."
        for name in ("partition", "split", "concept")
        if sections[name]
    ]
    if sections["augment"]:
        sentences.append(f"Training images are changed at random: {_describe(sections['augment'])}.")
    models = Counter(on_one_line(row.get("architecture", "unnamed")) for row in run.clients)
    names = ", ".join(f"{name}\u00a0×\u00a0{n}" if n > 1 else name for name, n in models.items())
    sentences.append(f"Models: {names or 'not named'}.")
    if language := run.section("language"):
        sentences.append(f"Language model: {_describe(language, ('path',))}.")
    # The ranks of the clients follow in words.
    if lora := {key: value for key, value in run.section("lora").items() if key != "ranks"}:
        sentences.append(f"LoRA: {_describe(lora)}.")
    if ranks := format_ranks(run):
        sentences.append(f"Ranks of the clients: {ranks}.")
        for group in groups:
            if rank := group.first.section("method", "fields", "training").get("common_rank"):
                sentences.append(f"{group.label} gives all clients rank {value_text(rank)}.")
    share = sections["run"].get("participation")
    participation_text = (
        f", {format_percent(share, 0)} % of clients in each" if isinstance(share, (int, float)) else ""
    )
    sampling_text = _SAMPLING.get(str(sections["run"].get("sampling")), "")
    sentences.append(
        f"{sections['run'].get('rounds', len(run.rounds))} rounds{participation_text}{sampling_text}."
    )
    sentences += describe_trust(run)
    seeds = list(dict.fromkeys(seed_run.record.seed for group in groups for seed_run in group.runs))
    number = format_count(len(seeds), "seed") if len(seeds) > 1 else "One seed"
    sentences.append(f"{number}: {', '.join(seeds)}.")
    variations = []
    for key in dict.fromkeys(key for group in groups for key, _ in group.vary):
        values = dict.fromkeys(value_text(dict(group.vary).get(key)) for group in groups)
        variations.append(f"{key} over {', '.join(values)}")
    if variations:
        sentences.append(f"Varied: {'; '.join(variations)}; settings above are those of the first.")
    return " ".join(sentences)


def _describe(values: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """Describe a section of the configuration: its name, then its settings in brackets."""
    name = next((key for key in names if values.get(key)), None)
    settings = [f"{on_one_line(k)} {value_text(v)}" for k, v in values.items() if k != name and v is not None]
    settings_text = on_one_line(", ".join(settings), 200)
    if name is None:
        return settings_text
    return f"{value_text(values[name])} ({settings_text})" if settings_text else value_text(values[name])
