"""Pages of the API reference: a curated list of public names by room, rendered by mkdocstrings.

A listed name without a docstring stops the build, as does a public method or property of a listed class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import fedlowrank
from fedlowrank.config.experiment import TAGGED
from fedlowrank.data.sources import SOURCES
from fedlowrank.data.text.text_sources import TEXT_SOURCES
from fedlowrank.methods import METHODS


def _names(module: str, names: str) -> list[str]:
    return [f"fedlowrank.{module}.{name}" for name in names.split()]


def _classes(registry: Mapping[str, Any]) -> list[str]:
    """The classes of a registry, each once."""
    return list(dict.fromkeys(f"{cls.__module__}.{cls.__qualname__}" for cls in registry.values()))


# File name, title, introduction, and the names on the page.
ROOMS: list[tuple[str, str, str, list[str]]] = [
    (
        "run",
        "Run",
        "Run a method on clients, and look at what came out.",
        [
            *_names("data.federation", "Federation"),
            *_names("rounds.simulate", "simulate"),
            *_names("rounds.outcome.result", "Result"),
            *_names("rounds.run_settings", "RunSettings"),
            *_names("results.records", "RoundRecord RunRecord"),
            *_names("core.learning.losses", "Loss"),
            *_names("core.learning.optimizer", "SGD AdamW Group LocalSchedule Schedule"),
            *_names("data.augment", "Augment"),
        ],
    ),
    (
        "observe",
        "Metrics, tables, callbacks and loggers",
        "What is measured of a run, read as a table, or done after each round. "
        "[Measure what you need](../how-to/metrics.md) and [stop early](../how-to/callbacks.md) show the use.",
        [
            *_names("rounds.callbacks", "Callback EarlyStopping"),
            *_names("results.frames", "load_runs load_rounds average_by_examples client_frame rounds_frame"),
            *_names("results.client_metrics", "Metric choose_metrics compute_metric"),
            *_names("rounds.outcome.predictions", "predict predictions confusion"),
            *_names("rounds.logs.loggers", "Logger TensorBoardLogger WandbLogger MlflowLogger"),
        ],
    ),
    (
        "method",
        "Write a method",
        "The contract of a method and what it may use. [Your own method](../tutorials/your-own-method.md) is the tutorial.",
        [
            *_names("core.contract.method", "Method ClientView ServerView"),
            *_names("core.contract.training_request", "ProximalTerm PaddedDimensions"),
            *_names("core.contract.task", "Task ClientInfo Pass Batch"),
            *_names("core.contract.contribution", "Mean Sum Each"),
            *_names("core.contract.client_model", "ClientModel"),
            *_names("core.contract.update", "Update OneOf Lengths"),
            *_names("core.key", "Key"),
            *_names(
                "core.learning.batch_losses",
                "supervised_loss task_loss example_losses mean_loss cross_entropy kl_divergence",
            ),
            *_names(
                "core.tree",
                "tree_dataclass map_leaves add sub zeros_like dot square_distance numel nbytes encode decode",
            ),
            *_names("testing.check", "check_method CheckFinding"),
        ],
    ),
    (
        "methods",
        "Methods",
        "Every method as a class; `METHODS` maps names to them. [All methods](../methods/index.md) has their pages.",
        [
            *_classes(METHODS),
            *_names("methods.shared.lora_family", "LoRATraining"),
            *_names("methods.shared.effective_delta", "Weighing"),
            *_names("adapters.mixtures.router", "Router"),
        ],
    ),
    (
        "adapters",
        "Low-rank parts of modules",
        "Adaptors, LoRA layers and thin modules for any `torch.nn.Module`, without a federation.",
        [
            *_names("adapters.mixtures.floral_module", "Floral"),
            *_names("adapters.lora.lora_layers", "add_lora merge_lora LoRALayer"),
            *_names(
                "adapters.deployment",
                "deploy save_deployed load_deployed measure_size Size compare_latency Latency",
            ),
        ],
    ),
    (
        "linalg",
        "Low-rank matrices",
        "Matrices as factors. Nothing here is federated.",
        [
            *_names("linalg.pair", "Pair zero_pad_pair keep_first_components"),
            *_names("linalg.factored", "Factored truncate_svd compress_update decompress_update"),
            *_names(
                "linalg.delta",
                "Delta DeltaForm initial_deltas update_deltas truncate_delta measure_product_norm",
            ),
            *_names("linalg.truncation", "truncate_update relative_error"),
            *_names("linalg.svt", "soft_threshold threshold_singular_values"),
            *_names("linalg.randomized_svd", "leading_triplets"),
            *_names("linalg.low_rank_sum", "orthogonalize add_low_rank"),
            *_names("linalg.matricize", "matricize unmatricize pack_low_rank pack_sparse unpack_weights"),
        ],
    ),
    (
        "data",
        "Data",
        "Sources of data, how they are dealt to clients, and concepts by group. Each class is a section of an experiment file.",
        [
            *_names("data.dataset", "Dataset Examples ClientData"),
            *_classes(SOURCES),
            *_classes(TEXT_SOURCES),
            *_names("data.text.tokens", "tokenize TextSettings"),
            *_names(
                "data.text.text_records", "Texts Instruction Conversation Preference Labeled TokenLabeled"
            ),
            *_names("data.text.row_report", "describe_rows"),
            *(name for kinds, _ in TAGGED.values() for name in _classes(kinds)),
            *_names("data.partitioning.own_partition", "OwnPartition"),
            *_names("data.download.downloads", "DataDownload download_dataset"),
        ],
    ),
    (
        "trust",
        "Compression, privacy and robustness",
        "Settings of what happens to updates between clients and server, as fields of `RunSettings`. "
        "[Privacy and robustness](../tutorials/privacy-and-robustness.md) explains them.",
        _names("trust.trust_settings", "Compression Clipping Privacy Robust Attack SecureSums"),
    ),
    (
        "devices",
        "Simulated devices",
        "Speed, bandwidth and availability of the clients, as the field `devices` of `RunSettings`. "
        "[System heterogeneity](../how-to/system-heterogeneity.md) explains them.",
        _names("rounds.participation.devices", "Devices"),
    ),
    (
        "experiment",
        "Experiment files and reports",
        "What the command line does, from Python.",
        [
            *_names("config.experiment", "ExperimentConfig"),
            *_names("config.comparison", "plan_runs PlannedRun"),
            *_names("config.sections.tune_section", "TuneSettings"),
            *_names(
                "config.tuning",
                "Setting ValidationScore plan_tuning score_run choose_setting tuned_experiment",
            ),
            *_names("report.formats.page", "write_report"),
            *_names("report.figures.gallery", "save_figures"),
            *_names("report.run_comparison", "compare_runs Comparison"),
            *_names("report.formats.tensorboard", "export_tensorboard"),
            *_names("core.errors", "FedlowrankError ConfigError DataError TaskError CheckpointError"),
        ],
    ),
]


def make_pages() -> dict[str, str]:
    """The pages by path.

    Raises:
        ValueError: if a listed name does not exist or has no docstring.
    """
    rooms = [*ROOMS]
    listed = {_resolve(name) for *_, names in ROOMS for name in names if callable(_resolve(name))}
    others = [
        f"{value.__module__}.{value.__qualname__}"
        for value in (getattr(fedlowrank, name) for name in fedlowrank.__all__)
        if callable(value) and value not in listed
    ]
    if others:
        rooms.append(("further", "Further names", "Also importable from `fedlowrank`.", others))
    check_docstrings(name for *_, names in rooms for name in names)
    pages = {}
    for file, title, introduction, names in rooms:
        blocks = "\n\n".join(f"::: {name}" for name in names)
        pages[f"reference/{file}.md"] = f"# {title}\n\n{introduction}\n\n{blocks}\n"
    links = "\n".join(f"- [{title}]({file}.md): {text}" for file, title, text, _ in rooms)
    plain = [name for name in fedlowrank.__all__ if not hasattr(getattr(fedlowrank, name), "__qualname__")]
    top = ", ".join(f"[`{name}`][{_path(name)}]" for name in fedlowrank.__all__ if name not in plain)
    pages["reference/index.md"] = (
        "# API reference\n\n"
        f"{links}\n\n"
        f"`fedlowrank` itself exports {', '.join(f'`{name}`' for name in plain)}, {top}.\n\n"
        "The command line: [commands](commands.md) and [fields of an experiment file](fields.md).\n\n"
        "What a run counts and how: [measured quantities](../how-to/measured.md).\n"
    )
    return pages


def _path(name: str) -> str:
    value = getattr(fedlowrank, name)
    return f"{value.__module__}.{value.__qualname__}"


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"docs/site/reference.py lists {name}, which does not exist") from error


def check_docstrings(names: Iterable[str]) -> None:
    """Check that public names, and public methods and properties of public classes, have docstrings.

    Raises:
        ValueError: naming all that have none.
    """
    missing = []
    for name in names:
        value = _resolve(name)
        if isinstance(value, ModuleType) or not callable(value):
            continue
        if not vars(value).get("__doc__", getattr(value, "__doc__", None)):
            missing.append(name)
        if inspect.isclass(value):
            missing += [
                f"{name}.{part}"
                for part, member in vars(value).items()
                if not part.startswith("_") and _is_code(member) and not inspect.getdoc(getattr(value, part))
            ]
    if missing:
        raise ValueError("public names without a docstring: " + ", ".join(missing))


def _is_code(member: object) -> bool:
    return isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
