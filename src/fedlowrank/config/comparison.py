"""What ``compare`` runs: every combination of method, seed and varied values."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from ..simulation.records import RunRecord
from ..simulation.run_folder import changes_of
from . import experiment
from . import tables as config
from .experiment import Experiment


@dataclass(frozen=True)
class Planned:
    """One run of a comparison.

    Attributes:
        experiment: with the seed and the varied values of this run.
        name: of the method or variant.
        vary: the varied fields and their values here.
        folder: of the run.
    """

    experiment: Experiment
    name: str
    vary: dict[str, Any]
    folder: Path


def plan(
    tables: dict[str, Any], methods: Sequence[str], seeds: Sequence[int], vary: Sequence[str], out: Path
) -> list[Planned]:
    """All runs of a comparison, every setting checked; those of one experiment follow each other.

    Args:
        tables: of the experiment.
        methods: names of methods or variants.
        seeds: of the runs.
        vary: each ``section.field=v1,v2,...``; of several, every combination is run.
        out: folder of the run folders.

    Raises:
        ConfigError: if a value or a name is wrong.
    """
    found = []
    for varied in combinations(vary):
        label = "".join(f"-{f.rpartition('.')[2]}={text}" for f, text in varied.items())
        values = {f: config.literal(text) for f, text in varied.items()}
        for seed in seeds:
            changed = copy.deepcopy(tables)
            for text in (*(f"{f}={text}" for f, text in varied.items()), f"run.seed={seed}"):
                config.merge(changed, config.override(text))
            made = experiment.load(changed)
            for name in methods:
                made.method(name)
                found.append(Planned(made, name, values, out / f"{name}{label}-s{seed}"))
    return found


def combinations(vary: Sequence[str]) -> list[dict[str, str]]:
    """The grid over all varied fields: one entry a combination, the text of a value by the name of its field.

    Raises:
        ConfigError: if a text has another form than ``section.field=v1,v2,...``, or two name the same field.
    """
    fields = [config.varied(text)[0] for text in vary]
    if twice := [f for f in fields if fields.count(f) > 1]:
        raise ConfigError(f"--vary names {twice[0]} twice; put all its values into one, separated by commas")
    values = [[v.strip() for v in text.partition("=")[2].split(",")] for text in vary]
    return [dict(zip(fields, chosen, strict=True)) for chosen in itertools.product(*values)]


def refuse_conflicts(runs: Sequence[Planned]) -> None:
    """Refuse to compare where a folder holds a run of another configuration, before hours of training and not after.

    Raises:
        CheckpointError: naming the folder, what differs and the ways out.
    """
    for one in runs:
        if not (one.folder / "checkpoint" / "manifest.json").exists():
            continue
        stored, made = RunRecord.load(one.folder).config, one.experiment
        method = made.method(one.name)
        # what can be known without data and models; the rest is compared when the run goes on
        sections = {**made.describe(one.name), "vary": one.vary, "run": dataclasses.asdict(made.run)}
        del sections["variant"]
        now = json.loads(json.dumps({**sections, "method": {"fields": dataclasses.asdict(method)}}))
        before = {name: stored.get(name) for name in now} | {"method": {"fields": stored["method"]["fields"]}}
        if changes := changes_of(before, now, method):
            raise CheckpointError(
                f"{one.folder} holds a run of another configuration: {'; '.join(changes)}. Choose another folder for the "
                "comparison with -o, or pass --force to move such runs aside and train them anew."
            )
