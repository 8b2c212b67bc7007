"""The command line; ``fedlowrank --help`` lists its commands."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .. import __version__
from ..core.errors import FedlowrankError, did_you_mean

OVERRIDES = (
    "section.field=value, laid over the file: run.rounds=20, defaults.optimizer.lr=0.05, methods.pfedlora.mu=0.7"
)
METHOD = "a built-in name, a variant of the file or package.module:Class, instead of the file's"


class _Once(argparse.Action):
    """Store an option's value; a second one would else replace the first without a word."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Refuse an option that was given before."""
        del parser, option
        given: frozenset[str] = getattr(namespace, "given", frozenset())
        if self.option_strings and self.dest in given:
            raise argparse.ArgumentError(self, "is given twice")
        namespace.given = given | {self.dest}
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Refuses an option that is given twice, and names the word that was meant instead of an unknown one."""

    explains_fields = False
    """Whether the help ends with the fields of an experiment file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        for action in (None, "store"):
            self.register("action", action, _Once)

    def format_help(self) -> str:
        """Format the help; what it says of fields is gathered only here, for that takes long."""
        if self.explains_fields:
            from ..config.field_help import format_field_help

            self.epilog = format_field_help()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"there is no {value!r}. {did_you_mean(str(value), action.choices)}")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Make the parser of the commands. Each names its function, whose parameters are the names of its options."""
    top = _Parser(prog="fedlowrank", description="Federated learning with low-rank parts: run, compare, report.")
    top.add_argument("--version", action="version", version=f"fedlowrank {__version__}")
    # a global option is accepted after the command too, where people type it
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # of commands that open a run folder, which may be somebody else's
    trusting = _Parser(add_help=False, parents=[common])
    trusting.add_argument("folder", type=Path, help="run folder")
    trusting.add_argument(
        "--allow-code", action="store_true", help="import the Python code (module:name) that the run folder names"
    )
    best = _Parser(add_help=False, parents=[trusting])
    best.add_argument("--best", action="store_true", help="of the best round by validation (run.keep_best = true)")
    several = _Parser(add_help=False, parents=[common])
    several.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of run folders")
    experiment = _Parser(add_help=False, parents=[common])
    experiment.add_argument("file", type=Path, help="experiment file (TOML)")
    experiment.add_argument("overrides", nargs="*", help=OVERRIDES)
    network = _Parser(add_help=False, parents=[common])
    network.add_argument("file", type=Path, help="experiment file (TOML), the same for server and clients")
    network.add_argument("overrides", nargs="*", help=OVERRIDES)
    network.add_argument("--method", help=METHOD)
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: str, parent: _Parser, about: str) -> _Parser:
        made = sub.add_parser(name, help=about, parents=[parent])
        made.set_defaults(function=function)
        made.explains_fields = parent is experiment
        return made

    p = command("list", "catalog:show_list", common, "methods, models, data; or the fields of one method")
    p.add_argument("method", nargs="?", help="show this method's paper and fields")

    p = command("bench", "bench:bench", common, "time rounds on this machine against a bare PyTorch loop")
    p.add_argument("--models", type=_split, help="comma-separated (default: all)")
    p.add_argument("--engines", type=_split, default="sequential,vectorized,processes", help="comma-separated")
    p.add_argument("--method", choices=["fedavg", "fedprox", "scaffold", "feddyn"], default="fedavg")
    p.add_argument("--rounds", type=int, default=15, help="that are timed for each model")
    p.add_argument("-o", "--out", type=Path, help="write the table to this file too, as Markdown")

    p = command("run", "commands:run", experiment, "run one method")
    p.add_argument("--method", help=METHOD)
    p.add_argument(
        "--engine", help="instead of the file's run.engine: sequential, vectorized, processes, auto, wire or flower"
    )
    p.add_argument("-o", "--out", type=Path, help="run folder (default: runs/NAME/METHOD-sSEED)")
    p.add_argument("--force", action="store_true", help="move an existing run folder aside")

    p = command("compare", "commands:compare", experiment, "run several methods, seeds and settings, and report")
    p.add_argument("--methods", type=_split, help="comma-separated (default: the file's compare = [...])")
    p.add_argument("--seeds", help="comma-separated (default: the file's seeds = [...], else run.seed)")
    p.add_argument("--vary", action="append", default=[],
                   help="section.field=v1,v2,...: run everything for each value (default: the file's vary); of several, "
                   "every combination")  # fmt: skip
    p.add_argument("-o", "--out", type=Path, help="folder of the runs and of report.html (default: runs/NAME)")
    p.add_argument("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    p.add_argument("--force", action="store_true", help="move existing run folders aside instead of going on with them")

    p = command("resume", "commands:resume", trusting, "go on with a stopped run, or give a finished one more rounds")
    p.add_argument("overrides", nargs="*", help="run.rounds=N for more rounds, and settings that do not change the "
                   "result; others are refused")  # fmt: skip
    p.add_argument("--round", type=int, metavar="N", help="go back to the checkpoint after round N, if it is kept")
    p.add_argument("--without", type=int, action="append", default=[], metavar="CLIENT",
                   help="exclude this client from now on, in a run over a network; may be repeated")  # fmt: skip

    command("status", "status:show", several, "how runs stand, and which process writes them")

    p = command("report", "commands:report", several, "tables and pictures of finished runs")
    p.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="HTML page; .md and .csv go beside it")
    p.add_argument("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    p.add_argument("--tensorboard", type=Path, help="also write TensorBoard event files to this folder")
    p.add_argument("--figures", type=Path, help="also write every figure to this folder, as .svg and .pdf")

    p = command(
        "export", "commands:export", trusting, "a client's model from a run's last checkpoint, as a file of thin layers"
    )  # fmt: skip
    p.add_argument("--client", type=int, default=0, help="whose model (default: client 0)")
    p.add_argument("--series", help="which model of the method, such as gkr (default: its headline)")
    p.add_argument("--layout", choices=["small", "fast"], default="small", help="least bytes, or least work")
    p.add_argument("-o", "--out", type=Path, default=Path("model.safetensors"), help="file; default: %(default)s")

    p = command("adapters", "language:adapters", best, "PEFT adapter folders of server and clients from a checkpoint")
    p.add_argument("-o", "--out", type=Path, default=Path("adapters"), help="folder; default: %(default)s")
    p.add_argument("--merged", action="store_true", help="also write the server's whole model")
    p.add_argument(
        "--rank", type=int, help="write the best adapters of this rank, and how far they are from the models"
    )

    p = command("score", "language:score", best, "score what a run's language models write: GSM8K, Rouge-L, ...")
    p.add_argument("overrides", nargs="*", help="settings of the task: path=FILE limit=100 decoding.max_new_tokens=64")
    p.add_argument("--task", required=True, help="gsm8k, dolly, humaneval or perplexity")
    p.add_argument("--model", action="append", default=[], dest="models",
                   help="server, base or a client's number; may be repeated")  # fmt: skip
    p.add_argument("-o", "--out", type=Path, help="also write the scores to this JSON file")

    p = command("serve", "network:serve", network, "run a method on clients that join over the network")
    p.add_argument("-o", "--out", type=Path, help="run folder (default: runs/NAME/METHOD-sSEED)")
    p.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    p.add_argument("--keys", type=Path, help="folder of the server's keys, made by `fedlowrank keys`")
    p.add_argument("--insecure", action="store_true", help="no keys and no encryption: for a trial on one machine")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)")
    p.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")

    p = command("join", "network:join", network, "take part in a run as one of its clients")
    p.add_argument("--client", type=int, required=True, help="which one, counted from 0")
    p.add_argument("--data", type=Path, help="data of one's own, in the form of the experiment's source")
    p.add_argument("--test", type=Path, help="test data of one's own, if the source takes such a path")
    p.add_argument("--server", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: %(default)s")
    p.add_argument("--keys", type=Path, help="folder of this client's keys, which the server's operator made")
    p.add_argument("--insecure", action="store_true", help="no keys and no encryption: for a trial on one machine")
    p.add_argument("--folder", type=Path, help="where it keeps its state (default: clients/NAME/CLIENT)")
    p.add_argument("--stay", action="store_true", help="do not end with the run, but wait for the next")

    p = command("keys", "network:keys", common, "certificates and keys of a server and its clients, for a trial")
    p.add_argument("folder", type=Path, help="to be made")
    p.add_argument("--clients", type=int, default=2, help="how many (default: %(default)s)")
    p.add_argument("--host", action="append", default=[], dest="hosts",
                   help="name or address of the server; may be repeated")  # fmt: skip
    p.add_argument("--add", type=int, metavar="CLIENT", help="only keys for one more client, of that number")
    p.add_argument("--revoke", type=int, metavar="CLIENT", help="take this client's key away from the server")
    p.add_argument(
        "--renew", action="store_true", help="a new certificate of the server, for the same hosts or for --host"
    )
    p.add_argument("--days", type=int, default=365, help="how long the certificate is good for (default: %(default)s)")

    p = command("app", "network:app", network, "a Flower app of an experiment, for `flwr run`")
    p.add_argument("-o", "--out", type=Path, default=Path("flower-app"), help="folder; default: %(default)s")

    p = command("check", "catalog:check", common, "test a method of one's own against the contract")
    p.add_argument("name", metavar="method", help="a built-in name, or package.module:Class")

    p = command("data", "commands:data", experiment, "show how an experiment shares out its data")
    p.add_argument("-o", "--out", type=Path, help="also draw it (.svg, .png or .pdf)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all went well, 1 after an error of the user's, 130 after Ctrl-C.
    """
    made = parser()
    args, rest = made.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all("=" in r and not r.startswith("-") for r in rest)):
        made.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no positional argument after an option
        args.overrides = [*args.overrides, *rest]
    path, before = list(sys.path), None
    if threading.current_thread() is threading.main_thread():
        # a polite kill ends as Ctrl-C does: the last finished round is kept
        before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _call(**vars(args))
    except FedlowrankError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        from .terminal import hint

        print(f"interrupted. {hint()}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read the output has enough; the interpreter must not fail on flushing the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        # an import of the user's own code adds the working folder
        sys.path[:] = path
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _call(function: str, command: str, debug: bool, given: object = (), **options: Any) -> int:
    """Import the function of a command, which may take long, and call it with its options."""
    del command, debug, given
    module, _, name = function.partition(":")
    found: int = getattr(importlib.import_module(f".{module}", __package__), name)(**options)
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
