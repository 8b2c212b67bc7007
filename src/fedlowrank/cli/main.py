"""The command line; ``fedlowrank --help`` lists its commands."""

from __future__ import annotations

import argparse
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
from ..testing import bench
from . import bench as benching
from . import commands, status

OVERRIDES = (
    "section.field=value, laid over the file: run.rounds=20, defaults.optimizer.lr=0.05, methods.pfedlora.mu=0.7"
)


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in (None, "store"):
            self.register("action", action, _Once)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"there is no {value!r}. {did_you_mean(str(value), action.choices)}")


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = _Parser(prog="fedlowrank", description="Federated learning with low-rank parts: run, compare, report.")
    top.add_argument("--version", action="version", version=f"fedlowrank {__version__}")
    # a global option is accepted after the command too, where people type it
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # of commands that open a run folder, which may be somebody else's
    trusting = _Parser(add_help=False, parents=[common])
    trusting.add_argument(
        "--allow-code", action="store_true", help="import the Python code (module:factory) that the run folder names"
    )
    fields: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "parents": [common]}
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    p = sub.add_parser("list", help="methods, models, data; or the fields of one method", parents=[common])
    p.add_argument("method", nargs="?", help="show this method's paper and fields")
    p.set_defaults(run=lambda a: commands.list_(a.method))

    p = sub.add_parser("bench", help="time rounds on this machine against a bare PyTorch loop", parents=[common])
    p.add_argument(
        "--models", default=",".join(bench.SUBJECTS), help=f"comma-separated; known: {', '.join(bench.SUBJECTS)}"
    )
    p.add_argument("--engines", default="sequential,vectorized,processes", help="comma-separated")
    p.add_argument("--method", choices=["fedavg", "fedprox", "scaffold", "feddyn"], default="fedavg")
    p.add_argument("--rounds", type=int, default=15, help="that are timed for each model")
    p.add_argument("-o", "--out", type=Path, help="write the table to this file too, as Markdown")
    p.set_defaults(run=lambda a: benching.bench(a.models.split(","), a.engines.split(","), a.method, a.rounds, a.out))

    p = sub.add_parser("run", help="run one method", epilog=commands.field_help(), **fields)
    p.add_argument("file", type=Path, help="experiment file (TOML)")
    p.add_argument("overrides", nargs="*", help=OVERRIDES)
    p.add_argument("--method", help="instead of the file's")
    p.add_argument(
        "--engine", help="instead of the file's run.engine: sequential, vectorized, processes, auto, wire or flower"
    )
    p.add_argument("-o", "--out", type=Path, help="run folder (default: runs/NAME/METHOD-sSEED)")
    p.add_argument("--force", action="store_true", help="move an existing run folder aside")
    p.set_defaults(run=lambda a: commands.run(a.file, a.overrides, a.method, a.engine, a.out, a.force))

    p = sub.add_parser(
        "compare", help="run several methods, seeds and settings, and report", epilog=commands.field_help(), **fields
    )  # fmt: skip
    p.add_argument("file", type=Path, help="experiment file (TOML)")
    p.add_argument("overrides", nargs="*", help=OVERRIDES)
    p.add_argument("--methods", help="comma-separated (default: the file's compare = [...])")
    p.add_argument("--seeds", default=None, help="comma-separated (default: the file's seeds = [...], else run.seed)")
    p.add_argument(
        "--vary",
        action="append",
        default=[],
        help="section.field=v1,v2,...: run everything for each value (default: the file's vary); of several, every combination",
    )
    p.add_argument("-o", "--out", type=Path, help="folder of the runs and of report.html (default: runs/NAME)")
    p.add_argument("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    p.add_argument("--force", action="store_true", help="move existing run folders aside instead of going on with them")
    p.set_defaults(
        run=lambda a: commands.compare(a.file, a.overrides, a.methods, a.seeds, a.vary, a.out, a.target, a.force)
    )

    p = sub.add_parser(
        "resume", help="go on with a stopped run, or give a finished one more rounds", parents=[trusting]
    )  # fmt: skip
    p.add_argument("folder", type=Path, help="run folder")
    p.add_argument(
        "overrides", nargs="*",
        help="run.rounds=N for more rounds, and settings that do not change the result; others are refused",
    )  # fmt: skip
    p.add_argument("--round", type=int, metavar="N", help="go back to the checkpoint after round N, if it is kept")
    p.add_argument("--without", type=int, action="append", default=[], metavar="CLIENT",
                   help="exclude this client from now on, in a run over a network; may be repeated")  # fmt: skip
    p.set_defaults(run=lambda a: commands.resume(a.folder, a.overrides, a.round, a.without, a.allow_code))

    p = sub.add_parser("status", help="how runs stand, and which process writes them", parents=[common])
    p.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of run folders")
    p.set_defaults(run=lambda a: status.show(a.folders, commands.OUT))

    p = sub.add_parser("report", help="tables and pictures of finished runs", parents=[common])
    p.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of run folders")
    p.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="HTML page; .md and .csv go beside it")
    p.add_argument("--target", type=float, help="accuracy whose cost is reported, in (0, 1]")
    p.add_argument("--tensorboard", type=Path, help="also write TensorBoard event files to this folder")
    p.add_argument("--figures", type=Path, help="also write every figure to this folder, as .svg and .pdf")
    p.set_defaults(run=lambda a: commands.report(a.folders, a.out, a.target, a.tensorboard, a.figures))

    p = sub.add_parser(
        "export", help="a client's model from a run's last checkpoint, as a file of thin layers", parents=[trusting]
    )  # fmt: skip
    p.add_argument("folder", type=Path, help="run folder")
    p.add_argument("--client", type=int, default=0, help="whose model (default: client 0)")
    p.add_argument("--series", help="which model of the method, such as gkr (default: its headline)")
    p.add_argument("--layout", choices=["small", "fast"], default="small", help="least bytes, or least work")
    p.add_argument("-o", "--out", type=Path, default=Path("model.safetensors"), help="file; default: %(default)s")
    p.set_defaults(run=lambda a: commands.export_(a.folder, a.client, a.series, a.layout, a.out, a.allow_code))

    p = sub.add_parser(
        "adapters", help="PEFT adapter folders of server and clients from a run's last checkpoint", parents=[trusting]
    )  # fmt: skip
    p.add_argument("folder", type=Path, help="run folder of an experiment with a section [language]")
    p.add_argument("-o", "--out", type=Path, default=Path("adapters"), help="folder; default: %(default)s")
    p.add_argument("--merged", action="store_true", help="also write the server's whole model")
    p.add_argument("--best", action="store_true", help="of the best round by validation (run.keep_best = true)")
    p.add_argument(
        "--rank", type=int, help="write the best adapters of this rank, and how far they are from the models"
    )
    p.set_defaults(run=_adapters)

    p = sub.add_parser(
        "score", help="score what a run's language models write: GSM8K, Rouge-L, ...", parents=[trusting]
    )  # fmt: skip
    p.add_argument("folder", type=Path, help="run folder of an experiment with a section [language]")
    p.add_argument("overrides", nargs="*", help="settings of the task: path=FILE limit=100 decoding.max_new_tokens=64")
    p.add_argument("--task", required=True, help="gsm8k, dolly, humaneval or perplexity")
    p.add_argument("--model", action="append", default=[], help="server, base or a client's number; may be repeated")
    p.add_argument("-o", "--out", type=Path, help="also write the scores to this JSON file")
    p.add_argument("--best", action="store_true", help="of the best round by validation (run.keep_best = true)")
    p.set_defaults(run=_score)

    network = _Parser(add_help=False, parents=[common])
    network.add_argument("file", type=Path, help="experiment file (TOML), the same for server and clients")
    network.add_argument("overrides", nargs="*", help=OVERRIDES)
    network.add_argument("--method", help="instead of the file's")

    p = sub.add_parser("serve", help="run a method on clients that join over the network", parents=[network])
    p.add_argument("-o", "--out", type=Path, help="run folder (default: runs/NAME/METHOD-sSEED)")
    p.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    p.add_argument("--keys", type=Path, help="folder of the server's keys, made by `fedlowrank keys`")
    p.add_argument("--insecure", action="store_true", help="no keys and no encryption: for a trial on one machine")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)")
    p.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    p.set_defaults(run=_serve)

    p = sub.add_parser("join", help="take part in a run as one of its clients", parents=[network])
    p.add_argument("--client", type=int, required=True, help="which one, counted from 0")
    p.add_argument("--data", type=Path, help="data of one's own, in the form of the experiment's source")
    p.add_argument("--test", type=Path, help="test data of one's own, if the source takes such a path")
    p.add_argument("--server", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: %(default)s")
    p.add_argument("--keys", type=Path, help="folder of this client's keys, which the server's operator made")
    p.add_argument("--insecure", action="store_true", help="no keys and no encryption: for a trial on one machine")
    p.add_argument("--folder", type=Path, help="where it keeps its state (default: clients/NAME/CLIENT)")
    p.add_argument("--stay", action="store_true", help="do not end with the run, but wait for the next")
    p.set_defaults(run=_join)

    p = sub.add_parser("keys", help="certificates and keys of a server and its clients, for a trial", parents=[common])
    p.add_argument("folder", type=Path, help="to be made")
    p.add_argument("--clients", type=int, default=2, help="how many (default: %(default)s)")
    p.add_argument("--host", action="append", default=[], help="name or address of the server; may be repeated")
    p.add_argument("--add", type=int, metavar="CLIENT", help="only keys for one more client, of that number")
    p.add_argument("--revoke", type=int, metavar="CLIENT", help="take this client's key away from the server")
    p.add_argument(
        "--renew", action="store_true", help="a new certificate of the server, for the same hosts or for --host"
    )
    p.add_argument("--days", type=int, default=365, help="how long the certificate is good for (default: %(default)s)")
    p.set_defaults(run=_keys)

    p = sub.add_parser("app", help="a Flower app of an experiment, for `flwr run`", parents=[network])
    p.add_argument("-o", "--out", type=Path, default=Path("flower-app"), help="folder; default: %(default)s")
    p.set_defaults(run=_app)

    p = sub.add_parser("check", help="test a method of one's own against the contract", parents=[common])
    p.add_argument("method", help="a built-in name, or package.module:Class")
    p.set_defaults(run=lambda a: commands.check(a.method))

    p = sub.add_parser(
        "data", help="show how an experiment shares out its data", epilog=commands.field_help(), **fields
    )  # fmt: skip
    p.add_argument("file", type=Path, help="experiment file (TOML)")
    p.add_argument("overrides", nargs="*", help=OVERRIDES)
    p.add_argument("-o", "--out", type=Path, help="also draw it (.svg, .png or .pdf)")
    p.set_defaults(run=lambda a: commands.data(a.file, a.overrides, a.out))
    return top


def _adapters(a: argparse.Namespace) -> int:
    from .language import adapters

    return adapters(a.folder, a.out, a.merged, a.best, a.rank, a.allow_code)


def _score(a: argparse.Namespace) -> int:
    from .language import score

    return score(a.folder, a.task, a.overrides, a.model, a.out, a.best, a.allow_code)


def _serve(a: argparse.Namespace) -> int:
    from .network import serve

    return commands.show_run(
        serve(a.file, a.overrides, a.method, a.out, a.resume, a.keys, a.insecure, a.host, a.port, commands.say)
    )


def _join(a: argparse.Namespace) -> int:
    from .network import join

    own = (a.client, a.data, a.test, a.server, a.keys, a.insecure, a.folder, a.stay)
    join(a.file, a.overrides, a.method, *own, commands.say)
    return 0


def _keys(a: argparse.Namespace) -> int:
    from .network import keys_

    keys_(a.folder, a.clients, a.host, a.days, a.add, a.revoke, a.renew, commands.say)
    return 0


def _app(a: argparse.Namespace) -> int:
    from .network import app

    app(a.file, a.overrides, a.method, a.out)
    commands.say(f"Flower app: {a.out}. Run it by `flwr run {a.out} CONNECTION`.")
    return 0


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
        done: int = args.run(args)
    except FedlowrankError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted. {commands.hint()}", file=sys.stderr)
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
    return done


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
