"""The client runtime, which answers the orders of a server from a folder of its own.

FOLDER/client.json    the identifier of the client, and the experiment
FOLDER/data.tree      the client's examples, as the experiment prepares them
FOLDER/RUN/           the client's states in a run, see :mod:`.persistence.client_memory`
FOLDER/RUN/model/     the client's model at the end of the run
FOLDER/site.json      the server's requests, see :mod:`.site.allowance`
FOLDER/rejected.txt   the server's reason for rejecting the client, if it gave one
FOLDER/audit.jsonl    replies that left, and refusals, see :mod:`.site.audit_log`
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from filelock import FileLock

from ..config.assembly import Shares, assemble
from ..config.experiment import ExperimentConfig
from ..core import tree
from ..core.contract import AnyMethod
from ..core.errors import CheckpointError, ConfigError, DataError
from ..core.io.atomic_files import as_checkpoint_error, write_atomically, write_json
from ..core.io.private_files import make_private_folder, refuse_readable
from ..core.io.text import list_first
from ..data.dataset import ClientData, Examples
from ..data.datasets.csv_table import Csv
from ..data.federation import Federation, hash_examples
from ..data.overlap import sketch_examples
from ..data.partitioning.split import TooFewExamplesError
from ..engines.engine import ClientJob
from ..engines.sequential import Sequential
from ..results.client_metrics import choose_metrics
from ..results.client_numbers import COUNTED_LABELS, SPLITS
from ..results.evaluation.local_model import LocalModel, make_local_model
from ..results.evaluation.model_evaluation import evaluate_client
from ..results.evaluation.scoring import count_labels_by_split
from ..results.measurements import ClientTable, Column
from ..rounds.participation.participants import Participants
from ..rounds.setup.averaged_statistics import average_statistics
from ..rounds.setup.preparation import check_parts, move_to_device
from ..storage.digest import check_seal, digest_of, seal
from ..storage.run_files import CLIENT_FILE, LEDGER
from ..storage.run_folder import versions
from ..training.hook_calls import init_client_state
from ..trust.privacy.budget import Budget
from ..trust.privacy.site_ledger import SiteLedger, SiteRun
from ..trust.protection import protect
from ..trust.secure_sums import FixedPoint
from .messages import (
    Answer,
    Order,
    RefusedOrderError,
    Registration,
    RegistrationRequest,
    digest_sections,
    to_one_line,
)
from .operation.client_count import count_clients
from .persistence.client_memory import ClientMemory, ForgottenError
from .persistence.input_columns import digest_columns, shorten_columns
from .secure.contributions import compute_contribution, encode_contribution, make_grid
from .secure.distributed_noise import DistributedNoise, describe_collusion
from .secure.participation import Participation
from .secure.signing import MemberKeys, MemberSigner
from .site.allowance import Allowance, RunRequests, max_trainings
from .site.audit_log import AUDIT_FILE, SiteAudit, explain_error
from .site.evaluations import coarsen, coarsen_losses
from .site.signatures import check_signature, payload_digest
from .site.site_settings import SiteSettings

logger = logging.getLogger(__name__)

MODEL_FILE = "model.safetensors"
"""Name of the file with the parameters of a client's model, in the folder ``model`` of a run."""

PARTIAL_MODEL = {"inference": "more than this model"}
"""Metadata of a model file that does not give the client's scores alone."""

REJECTION_FILE = "rejected.txt"
"""Name of the file in a client's folder with the server's reason for rejecting the client."""

FOLDER_PROBLEM = "its folder cannot be read or written"
"""Start of the reason for which a client does not execute an order, and of a line of its node's log."""

MODEL_ADVICE = (
    "The run is over, and this client has not written its model. Free space or mend the folder, keep `fedlowrank join` "
    "running, and ask the server's operator for `fedlowrank serve ... --resume`: this client then writes its model."
)
"""Advice for a client whose folder fails at the end of the run."""

MAX_RELEASES_OF_ROUND = 100
"""Largest number of releases of one round that a client believes, because each takes a line of its privacy ledger."""

BASE_DOWNLOAD_BYTES = 64 << 20
"""Bytes that a download may have in addition to four times the model."""


def prepare(
    folder: Path,
    experiment: ExperimentConfig,
    client_id: int,
    shares: Shares,
    site: SiteSettings | None = None,
    *,
    sketch: Sequence[str] | None = None,
    data_path: Path | None = None,
    test_path: Path | None = None,
) -> None:
    """Make a client's folder. States in an existing folder are kept, and the data may change only if there are none.

    Args:
        folder: folder of the client.
        experiment: experiment in which the client takes part.
        client_id: identifier of the client.
        shares: examples of all clients, of which those of this client are stored.
        site: permissions of the server at this client; None for the defaults.
        sketch: sketch of the client's data (:mod:`fedlowrank.data.overlap`), by which the site's ledger of privacy
            recognizes the data; None computes it from the training examples, and an empty one keeps no account
            at the site, for a simulation.
        data_path: path of the client's own data, or None; stored to prepare new rows in the same way.
        test_path: path of the client's own test data, or None.

    Raises:
        ConfigError: if the folder belongs to another client or experiment, or other users can read it.
        CheckpointError: if the folder cannot be written.
        DataError: if the client has trained, and its data have changed since; or if it has no training examples for
            secure sums.
    """
    if experiment.run.secure.on and not len(shares.data[client_id].train):
        raise DataError(
            f"client {client_id} has no training examples, and under run.secure every client trains: without its part the "
            "others' sums may be lost. Give it training examples, or leave it out of the federation."
        )
    data, tables = tree.encode(_pack_data(shares.data[client_id])), experiment.to_dict()
    contents = {
        "client": client_id,
        "tables": tables,
        "classes": list(shares.classes),
        "format": "" if shares.language is None else shares.language.prompt_format,
        "columns": list(shares.columns),
        "clients": count_clients(experiment),
        "data": digest_of(data),
        "site": _encode_site(site or SiteSettings(), experiment),
        "parts": [],
        "files": [None if path is None else str(path.resolve()) for path in (data_path, test_path)],
    }
    if experiment.run.privacy.kind != "none":
        contents["parts"] = sketch_examples(shares.data[client_id].train) if sketch is None else list(sketch)
    make_private_folder(folder)
    path = folder / CLIENT_FILE
    if path.exists():
        stored_contents = _read_client_file(path)
        if stored_contents["client"] != client_id or digest_sections(
            stored_contents["tables"]
        ) != digest_sections(tables):
            raise ConfigError(
                f"{folder} is the folder of client {stored_contents['client']} of another experiment or of one that "
                "was changed, such as in run.rounds. Choose another folder, or remove it with the client's "
                "states. What was spent of its privacy is counted by its data, whatever the folder."
            )
        # before the first round of training the data may change
        if any(folder.glob("*/*.tree")):
            _refuse_changed_data(folder, stored_contents, contents, shares.data[client_id])
    write_atomically(folder / "data.tree", data)
    write_json(path, seal(contents))


def _refuse_changed_data(
    folder: Path, stored_contents: dict[str, Any], contents: dict[str, Any], data: ClientData
) -> None:
    """Refuse data that differ from those in a client's folder: a new split turns old test examples into training ones."""
    # a folder that was made by an earlier release has no format
    compared_parts: list[str] = [n for n in ("classes", "format", "columns") if n in stored_contents]
    changed_parts = [n for n in compared_parts if stored_contents[n] != contents[n]]
    if stored_contents["data"] != contents["data"]:
        # the digest also covers notes, whose wording may change with the release
        try:
            stored_data = _unpack_data(tree.decode((folder / "data.tree").read_bytes()))
        except (OSError, tree.TreeError):
            stored_data = None
        if stored_data is None or hash_examples(stored_data) != hash_examples(data):
            changed_parts.insert(0, "examples")
    if changed_parts:
        raise DataError(
            f"client {contents['client']} has trained with the data in {folder}, and they have changed since: other "
            f"{', '.join(changed_parts)}. Files with other rows, or with the same rows in another order, are split anew, "
            "so that old test examples would become training examples. Start the client with the data of before. "
            "For other data choose another folder: in this run the client is then left out, or starts again if the "
            "server has network.forgotten = 'begin'."
        )


def read_own_share(
    experiment: ExperimentConfig,
    client_id: int,
    client_count: int,
    data_path: Path,
    test_path: Path | None = None,
) -> Shares:
    """Read the shares of an experiment in which one client has all examples of a file or folder.

    The experiment's section ``split`` divides them into training, validation and test examples; ``test_path`` is
    the path of the test examples, if the experiment's source takes one. The column ``data.client`` may be missing; it
    is no feature and does not divide the examples.

    Raises:
        ConfigError: if the split does not use the test examples, or ``data.normalize`` would be fitted only to the file
            of this client.
        DataError: if the files cannot be read or cannot be divided in this way.
    """
    tables = _make_own_tables(experiment, client_id, data_path, test_path)
    split_kind = tables["split"]["kind"]
    if test_path is not None and experiment.split.official_test == "unused":
        raise ConfigError(
            f"--test {test_path}: split.kind {split_kind!r} does not use test data of its own, so they would be ignored. "
            "Leave --test out, or set split.kind to 'whole_test' in the experiment of the server and all clients."
        )
    _check_own_scale(experiment, {**tables, "data": {**tables["data"], "normalize": "none"}})
    try:
        shares = ExperimentConfig.parse(tables).shares()
    except DataError as error:
        # a file with the column of the clients adds the name to the message
        cause = error if isinstance(error, TooFewExamplesError) else error.__cause__
        if isinstance(cause, TooFewExamplesError):
            raise DataError(
                f"client {client_id}: {data_path} has {cause.lack}. Add examples, or change the section split in the "
                "experiment of the server and all clients."
            ) from error
        if split_kind != "own_test":
            raise
        raise DataError(
            f"{error} With --data and --test, set split.kind to 'whole_test' in the experiment of the server and all "
            "clients: each client is then tested on its own test data."
        ) from error
    return place_share_of_client(shares, client_id, client_count)


def parse_own_experiment(
    experiment: ExperimentConfig, client_id: int, data_path: Path, test_path: Path | None = None
) -> ExperimentConfig:
    """Make the experiment of :func:`read_own_share`, in which one client has all examples of a file or folder."""
    return ExperimentConfig.parse(_make_own_tables(experiment, client_id, data_path, test_path))


def _make_own_tables(
    experiment: ExperimentConfig, client_id: int, data_path: Path, test_path: Path | None
) -> dict[str, Any]:
    tables = experiment.to_dict()
    data_table = {**tables["data"], "path": str(data_path.resolve())}
    data_table.pop("test", None)
    if test_path is not None:
        data_table["test"] = str(test_path.resolve())
    if "client" in data_table:
        _read_as_one_client(experiment, client_id, data_table)
    return {**tables, "data": data_table, "partition": {"kind": "iid", "clients": 1}, "concept": {}}


def _read_as_one_client(experiment: ExperimentConfig, client_id: int, data_table: dict[str, Any]) -> None:
    """Remove the column of the clients from the settings of a site's data, unless it would then be a feature."""
    source = experiment.data.source
    if isinstance(source, Csv):
        names = dataclasses.replace(source, path=data_table["path"]).read_client_names()
        if names is None:
            del data_table["client"]
        elif len(names) > 1:
            logger.warning(
                "the column %r of %s names %d clients (%s): all its rows belong to client %d",
                source.client,
                data_table["path"],
                len(names),
                list_first(list(names), 5),
                client_id,
            )
    elif experiment.language is not None or data_table.get("features"):
        del data_table["client"]


def _check_own_scale(experiment: ExperimentConfig, unscaled_tables: dict[str, Any]) -> None:
    """Refuse a ``data.normalize`` that every client would fit to its own file; ``unscaled_tables`` lacks it."""
    normalization, source = experiment.data.preparation.normalize, experiment.data.source
    if isinstance(source, Csv) and source.missing == "mean":
        logger.warning(
            "data.missing = 'mean': empty cells get the mean of this client's own file, not that of all clients"
        )
    if experiment.language is not None or normalization not in ("scale", "standard"):
        return
    x = ExperimentConfig.parse(unscaled_tables).data.load(experiment.run.seed).train.inputs
    if (
        normalization == "scale"
        and isinstance(x, torch.Tensor)
        and x.ndim > 2
        and x.amin() >= 0
        and x.amax() <= 1
    ):
        # image bytes were divided by 255, so nearly the same map fits all clients
        if x.amin() > 0 or x.amax() < 1:
            logger.warning(
                "data.normalize = 'scale': the images of this client are stretched from %.3g..%.3g to 0..1, and "
                "those of other clients from their own range; set data.normalize to 'none' to keep bytes / 255",
                x.amin(),
                x.amax(),
            )
        return
    raise ConfigError(
        f"data.normalize is {normalization!r} (the default is 'scale'), which join --data would fit to this client's own "
        "file: the same value would mean another input at each client. In the experiment of the server and all "
        "clients, set data.normalize to 'standard_per_client', if each client may have its own mean and standard "
        "deviation; or agree on constants, convert all files by them, and set it to 'none'."
    )


def place_share_of_client(shares: Shares, client_id: int, client_count: int) -> Shares:
    """Make shares in which one client has the first share's examples and all others have none."""
    own_data = shares.data[0]
    empty_data = ClientData(
        _empty_like(own_data.train), _empty_like(own_data.val), _empty_like(own_data.test)
    )
    data = tuple(own_data if i == client_id else empty_data for i in range(client_count))
    return dataclasses.replace(shares, data=data)


class ClientRuntime:
    """One client of an experiment.

    Args:
        folder: folder made by :func:`prepare`.

    Raises:
        CheckpointError: if the folder is missing or damaged.
        ConfigError: if other users of the machine can read it.
    """

    def __init__(self, folder: Path) -> None:
        refuse_readable(folder)
        self.folder = folder
        contents = _read_client_file(folder / CLIENT_FILE)
        self.client: int = contents["client"]
        self.client_count: int = contents["clients"]
        self.experiment, self.engine = _load_shared(json.dumps(contents["tables"], sort_keys=True))
        self.classes = tuple(contents["classes"])
        self.prompt_format = str(contents.get("format", ""))
        self.columns = tuple(contents["columns"])
        self.is_private = self.experiment.run.privacy.kind != "none"
        self.is_secure = self.experiment.run.secure.on
        self.is_confidential = self.is_private or self.is_secure
        """Whether sizes, losses and evaluations stay with the client."""
        self.signer: MemberSigner | None = None
        """Signer of the client's part of secure sums; set by the node."""
        self.site = SiteSettings(**contents["site"])
        self.audit = SiteAudit(folder / AUDIT_FILE)
        self._parts: list[str] | None = contents["parts"]
        self.data_path, self.test_path = (
            None if path is None else Path(path) for path in contents.get("files", (None, None))
        )
        """Paths of the client's own data and test data, or None."""
        try:
            data = (folder / "data.tree").read_bytes()
            if digest_of(data) != contents["data"]:
                raise CheckpointError(
                    f"{folder / 'data.tree'} is damaged: its digest is not the one in client.json. Run "
                    "`fedlowrank join` again with the same --data and --folder to write it again."
                )
            self.data = _unpack_data(tree.decode(data))
        except OSError as error:
            raise CheckpointError(f"{folder / 'data.tree'} is missing or damaged: {error}") from error

    @cached_property
    def language(self) -> Any:
        """The base model, or None."""
        return self.experiment.load_language(self.classes, self.prompt_format)

    @cached_property
    def _draws(self) -> Participants:
        """The server's draw of participants."""
        return Participants(self.client_count, self.experiment.run, self.federation.key)

    @cached_property
    def budget(self) -> Budget | None:
        """The client's own account of its privacy, in a file of its folder; None without privacy."""
        if not self.is_private:
            return None
        run, draws = self.experiment.run, self._draws
        budget = Budget(run.privacy, draws.sampling, run.rounds, run.participation, seeded=False)
        budget.open(self.folder / LEDGER)
        return budget

    def _site_ledger(self, run: str) -> SiteLedger | None:
        """The site's ledger of privacy in a run; None without privacy, or if the run is a simulation."""
        privacy = self.experiment.run.privacy
        sketch = sketch_examples(self.data.train) if self._parts is None else self._parts
        if privacy.kind == "none" or not sketch:
            return None
        site_run = SiteRun(
            privacy.kind,
            tuple(sketch),
            float(privacy.delta or 0),
            privacy.accountant,
            self.experiment.default_method,
            str(self.folder.absolute()),
        )
        # several clients on one machine may take part in a run
        return SiteLedger(f"{run}-{digest_of(*map(str.encode, sketch))[:8]}", site_run)

    def _spend(self, order: Order, last_round: int) -> str:
        """Charge the privacy that an order costs the client, before anything is sent.

        Args:
            order: order of the server.
            last_round: number of the last round whose state was kept, from 1; 0 for none.

        Returns:
            The reason why the client does not train (its budget is spent), or "".

        Raises:
            CheckpointError: if it is unknown what was spent.
        """
        if (budget := self.budget) is None:
            return ""
        site, clip = self._site_ledger(order.run), float(self.experiment.run.clipping.norm or 0.0)
        if not budget.is_local:
            reason = "" if site is None else self._charge_server_noise(site, budget, order, clip)
        else:
            reason = self._charge_own_noise(site, budget, order, clip, last_round) if order.train else ""
        if not reason:
            return ""
        # the server must not learn what other runs have spent
        logger.info("round %d is refused: %s", order.round + 1, reason)
        return f"its privacy budget, privacy.epsilon = {budget.privacy.epsilon}, is spent"

    def _charge_own_noise(
        self, site: SiteLedger | None, budget: Budget, order: Order, clip: float, last_round: int
    ) -> str:
        """Charge an update with the client's own noise; returns the reason if that exceeds the budget, or ""."""
        if site is not None and (message := budget.count_site(site)):
            logger.info(message)
        with budget.exclusive():
            if not budget.allowed([self.client], order.round):
                return budget.reason()
            if last_round:
                budget.require(last_round - 1)
            budget.charge(order.round, clip, [self.client])
        return ""

    def _charge_server_noise(self, site: SiteLedger, budget: Budget, order: Order, clip: float) -> str:
        """Charge the rounds of a server that adds the noise; returns the reason if they exceed the budget, or ""."""
        if not (order.train or (order.last and order.round)):
            return ""
        # the last order only reports how many rounds there were
        limit, rounds = budget.privacy.epsilon if order.train else None, order.round + order.train
        epsilon = site.follow(
            *(rounds, budget.noise, clip, budget.sampling, self.client, limit),
            trains=order.train,
            repeats=order.repeats,
        )
        if limit is None or epsilon <= limit:
            return ""
        return f"with earlier runs of this site on the same data, the round costs ε = {epsilon:.4g}"

    @cached_property
    def method(self) -> AnyMethod:
        """The experiment's method, with its updates protected as the experiment says."""
        run, draws = self.experiment.run, self._draws
        method, task = (
            self.experiment.build_method(self.experiment.default_method),
            self.federation.task(run.rounds),
        )
        check_parts(method, self.federation, self.experiment.run_here.micro_batch)
        method = average_statistics(method, task, run)
        return protect(method, task, run.trust, self.budget, expected_count=draws.expected, is_deployed=True)

    @cached_property
    def max_download(self) -> int:
        """Largest size of a download in bytes: four times the model and the method's first download, plus 64 MiB.

        ``join --max-download`` sets another number.
        """
        if self.site.max_download:
            return self.site.max_download
        task, info = self.federation.task(self.experiment.run.rounds), self.federation.infos[self.client]
        module = task.model(info).module
        model_bytes = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        first_download = self.method.download(self.method.server_init(task), info)
        return BASE_DOWNLOAD_BYTES + 4 * (model_bytes + tree.encoded_size(first_download))

    def make_registration(self) -> tuple[Registration, bytes]:
        """Make the header and payload of the client's registration.

        Under privacy and secure sums it omits the sizes of the data, and has a digest in place of the names of the inputs.
        """
        sizes = 1, 0, 0
        if not self.is_confidential:
            sizes = len(self.data.train), len(self.data.val), len(self.data.test)
        header = Registration(
            self.client,
            sizes[0],
            sizes[1:],
            digest_sections(self.experiment.to_dict()),
            {} if self.language is None else self.language.files,
            versions(),
            self.client_count,
        )
        form: dict[str, Any] = {
            "x": _empty_like(self.data.train).inputs,
            "y": _empty_like(self.data.train).y,
            "classes": list(self.classes),
            "format": self.prompt_format,
        }
        if self.columns:
            # names of inputs may be values of a text column
            columns = (
                [digest_columns(self.columns)] if self.is_confidential else shorten_columns(self.columns)
            )
            form["columns"] = [*columns]
        return header, tree.encode(form)

    def reply(self, kind: str, header: str, payload: bytes, signature: str = "") -> tuple[str, bytes]:
        """Check a message of the server and answer it; the reply is in the site's audit log before it leaves.

        Args:
            kind: kind of the message: registration or order.
            header: header of the message.
            payload: payload of the message.
            signature: signature of the message, see :mod:`.site.signatures`.

        Returns:
            Header and payload of the reply.

        Raises:
            RefusedOrderError: if the message is not from the server, or belongs to another run.
            FedlowrankError: if the message cannot be read, or the folder is damaged.
        """
        sent_header: Registration | Answer
        try:
            if self.site.order_key:
                check_signature(self.site.order_key, kind, self.client, header, payload, signature)
            if kind == "registration":
                # a server without keys does not name its run to a node that has not registered
                request = RegistrationRequest.from_json(header)
                if request.run:
                    Allowance(self.folder, self.site.runs).check_run(request.run)
                if request.rejection:
                    reason = to_one_line(request.rejection, 1000)
                    write_atomically(self.folder / REJECTION_FILE, reason.encode())
                    raise RefusedOrderError(f"the server does not let this client take part: {reason}")
                sent_header, upload = self.make_registration()
            else:
                sent_header, upload = self.answer(Order.from_json(header), payload)
        except RefusedOrderError as error:
            self.audit.log_refusal(kind, str(error))
            raise
        text = sent_header.to_json()
        self.audit.log_reply(kind, text, upload)
        return text, upload

    def answer(self, order: Order, payload: bytes) -> tuple[Answer, bytes]:
        """Execute an order on a download; returns header and payload of the reply.

        The client's new state is on disk by then, but takes effect only when a later order acknowledges it.
        """
        reply = Answer(self.client, order.run, order.round)
        try:
            # after a restart, an earlier process may still train; the system releases the lock however that process ends
            with as_checkpoint_error(f"cannot lock {self.folder}"):
                lock = FileLock(self.folder / "lock").acquire()
            with lock:
                return self._answer(order, payload, reply)
        except RefusedOrderError as error:
            self.audit.log_refusal("order", str(error))
            return dataclasses.replace(reply, problem=str(error), kind="other"), b""
        except ForgottenError as error:
            expected = (
                f"the server expects the state after round {order.stamp}, which this client does not have"
            )
            return dataclasses.replace(reply, problem=f"{expected}: {self.explain(error)}", kind="state"), b""
        except CheckpointError as error:
            # `join` prints this line of the node's log, because the audit log may be on the same full disk
            logger.error("%s: %s%s", FOLDER_PROBLEM, error, f" {MODEL_ADVICE}" if order.last else "")
            reason = f"{FOLDER_PROBLEM}: {self.explain(error)}"
            return dataclasses.replace(reply, problem=reason, kind="disk"), b""

    def explain(self, error: BaseException) -> str:
        """Describe an error for the server: its text stays in the audit log unless the site sends error texts."""
        return explain_error(error, self.audit, self.site)

    def _answer(self, order: Order, payload: bytes, reply: Answer) -> tuple[Answer, bytes]:
        digest = hashlib.blake2b(order.to_json().encode() + payload, digest_size=16).hexdigest()
        run, rounds = _check_run_name(order.run), self.experiment.run.rounds
        allowance = Allowance(self.folder, self.site.runs)
        # checked before any file of the run is written
        allowance.check_run(run)
        if not 0 <= order.round <= (rounds - 1 if order.train else rounds):
            raise RefusedOrderError(
                f"an order of round {order.round + 1} came, but the run has {rounds} rounds"
            )
        if any(
            not (0 <= t < rounds and 1 <= count <= MAX_RELEASES_OF_ROUND)
            for t, count in order.repeats.items()
        ):
            raise RefusedOrderError(
                f"an order came with impossible numbers of releases of rounds: the run has {rounds} rounds, and each is "
                f"released at most {MAX_RELEASES_OF_ROUND} times"
            )
        if order.step not in ("", "mask"):
            return dataclasses.replace(reply, parcel=self._participation.step(order)), b""
        if order.train and (order.step == "mask") is not self.is_secure:
            raise RefusedOrderError(
                "an order to train without masking came, and the experiment has secure sums"
                if self.is_secure
                else "an order to mask an update came, and the experiment has no secure sums"
            )
        memory = ClientMemory(self.folder / run, self.experiment.run.keep_checkpoints)
        stored_answer = memory.find_answer(digest)
        if stored_answer is not None:
            return Answer.from_json(stored_answer[0]), stored_answer[1]
        if order.step:
            self._participation.require(order)
        last_round, branch = max(memory.stamps, default=0), memory.branch
        # a missing state is reported below
        is_old = order.round + 1 < last_round and order.stamp in (0, *memory.stamps)
        if order.branch < branch or (order.branch == branch and is_old):
            raise RefusedOrderError(
                f"an order of round {order.round + 1} came when one of round {last_round} had been answered. If the server's "
                f"folder was restored from a copy, its operator continues by `fedlowrank resume RUN --round {order.round}`"
            )
        run_requests = allowance.of(run)
        adds_training = order.train or order.last
        if adds_training and self.site.runs and run_requests.trainings >= max_trainings(rounds):
            raise RefusedOrderError(
                f"this client has trained {run_requests.trainings} times for a run of {rounds} rounds; it trains no more"
            )
        if len(payload) > self.max_download:
            raise RefusedOrderError(
                f"a download of {len(payload)} bytes came; at most {self.max_download} are taken (fedlowrank join "
                "--max-download)"
            )
        # booleans and small values take more memory than they take bytes in a message
        down = tree.move(tree.decode(payload, memory=2 * self.max_download), self.experiment.run_here.device)
        state, method = (
            tree.move(memory.read_state(order.stamp), self.experiment.run_here.device),
            self.method,
        )
        federation = self.federation
        task, info = federation.task(rounds), federation.infos[self.client]
        if state is None:
            state = self.engine.boundary(init_client_state(method, task, info))
        # counted on disk before the computation, because its failure also reveals something about the examples
        run_requests = dataclasses.replace(run_requests, trainings=run_requests.trainings + adds_training)
        if may_evaluate := self._may_evaluate(order, run_requests, digest):
            run_requests = dataclasses.replace(run_requests, round=order.round, order=digest)
        allowance.count(run, run_requests)
        if may_evaluate or order.last:
            previous_round = max(order.round - 1, 0)
            try:
                local_model = make_local_model(
                    method, federation, task, self.engine, state, info, previous_round, download=down
                )
                if may_evaluate:
                    reply = dataclasses.replace(reply, evaluation=self._evaluate(local_model))
                if order.last:
                    self._write_model(memory.folder / "model", local_model, order.round)
            except Exception as error:
                # a disk error reveals nothing about the examples
                if not self.is_private or isinstance(error, CheckpointError):
                    raise
                logger.warning(
                    "client %d has no model of its own in %s (%s: %s). Under privacy.kind = %r the server does not learn "
                    "of the error.",
                    self.client,
                    memory.folder / "model",
                    type(error).__name__,
                    error,
                    self.experiment.run.privacy.kind,
                )
        if not order.train:
            if order.last:
                self._spend(order, last_round)
            return reply, b""
        if problem := self._spend(order, last_round):
            return dataclasses.replace(reply, problem=problem, kind="other"), b""
        result = next(
            iter(self.engine.run(method, federation, task, order.round, [ClientJob(state, down, info)]))
        )
        if result.error is not None:
            reason = f"its training failed: {self.explain(result.error)}"
            return dataclasses.replace(reply, problem=reason, kind="training"), b""
        if not self.is_confidential:
            # steps, operations and losses depend on the client's data
            meter = result.meter
            losses = dict(meter.losses) if self.site.evaluation != "none" else {}
            if self.site.evaluation == "rounded":
                losses = coarsen_losses(losses, len(self.data.train))
            reply = dataclasses.replace(reply, steps=meter.steps, flops=int(meter.flops), losses=losses)
        # a client replies even if its method sends nothing
        upload = (
            self._mask_upload(order, result.upload, down, payload_digest(payload))
            if self.is_secure
            else tree.encode(result.upload)
        )
        memory.propose(
            order.stamp, order.round + 1, result.state, upload, digest, reply.to_json(), order.branch
        )
        return reply, upload

    @cached_property
    def _participation(self) -> Participation:
        """The client's part in secure sums; raises RefusedOrderError if the experiment has none, or keys are missing."""
        if not self.is_secure:
            raise RefusedOrderError("a step of a secure sum came, and the experiment has no secure sums")
        if self.signer is None or not self.site.roster:
            raise RefusedOrderError(
                "secure sums need the keys of all clients, and this client has none: start it with --keys"
            )
        keys = MemberKeys.read({int(client_id): key for client_id, key in self.site.roster.items()})
        return Participation(self.client, self.client_count, self.folder, keys, self.signer)

    @cached_property
    def _own_noise(self) -> DistributedNoise | None:
        """The client's part of the noise on a secure sum; None without central privacy."""
        if self.budget is None or self.budget.is_local:
            return None
        logger.info(describe_collusion(self.budget, self.client_count))
        norm = float(self.experiment.run.clipping.norm or 0.0)
        return DistributedNoise(norm, self.budget.noise, self.client_count, self._grid)

    @cached_property
    def _grid(self) -> FixedPoint:
        return make_grid(self.experiment.run.secure, self.client_count)

    def _mask_upload(self, order: Order, upload: Any, down: Any, digest: str) -> bytes:
        """Compute the masked contribution of an upload that was made from the download with a digest."""
        task, info = self.federation.task(self.experiment.run.rounds), self.federation.infos[self.client]
        # on the CPU, where the server computes, too
        server, upload, down = (tree.move(v, "cpu") for v in (self.method.server_init(task), upload, down))
        contribution = compute_contribution(self.method, server, down, upload, info)
        return self._participation.mask(
            order, lambda: encode_contribution(contribution, self._grid, self._own_noise), digest
        )

    def _may_evaluate(self, order: Order, run_requests: RunRequests, digest: str) -> bool:
        """Whether an order gets an evaluation: one for each round, in ascending rounds; a repeated order gets it again."""
        if not order.evaluate or self.is_confidential or self.site.evaluation == "none":
            return False
        if not self.site.runs or order.round > run_requests.round or digest == run_requests.order:
            return True
        reason = (
            f"models of round {order.round} were to be evaluated when those of {run_requests.round} had been"
        )
        self.audit.log_refusal("evaluation", reason)
        return False

    def _evaluate(self, local_model: LocalModel) -> ClientTable:
        """Evaluate the client's models and round the results as the site's settings say."""
        run, task = self.experiment.run, self.federation.task(self.experiment.run.rounds)
        metrics = choose_metrics(
            run.metrics, self.data.train, task.classes, task.loss, models=task.architectures.values()
        )
        # on the device of the models
        info, data = self.federation.infos[self.client], self.federation.clients[self.client]
        evaluation = evaluate_client(local_model, info, data, metrics, task.loss, task.classes)
        if (label_counts := count_labels_by_split(data, task.loss)) is not None:
            label_columns = [
                Column(COUNTED_LABELS, "", split, [n]) for split, n in zip(SPLITS, label_counts, strict=True)
            ]
            evaluation = ClientTable(evaluation.client_ids, evaluation.columns + label_columns)
        return coarsen(evaluation, self.data) if self.site.evaluation == "rounded" else evaluation

    @cached_property
    def federation(self) -> Federation:
        """The federation as the client knows it: its own examples, and only the number of other clients."""
        shares = place_share_of_client(
            Shares((self.data,), self.classes, (), self.language), self.client, self.client_count
        )
        return move_to_device(
            assemble(self.experiment, shares, local_ids=frozenset({self.client})), self.experiment.run_here
        )

    def _write_model(self, folder: Path, local_model: LocalModel, round: int) -> None:
        params = {n: t.detach().cpu().contiguous() for n, t in local_model.personal().items()}
        x = self.federation.clients[self.client].train.x
        is_whole = local_model.is_one_model(
            {n: t[:4] for n, t in x.items()} if isinstance(x, dict) else x[:4]
        )
        if not is_whole:
            logger.warning(
                "client %d infers by more than the scores of one model, such as a mixture of several: %s holds only "
                "the weights of one, from which predict --rows makes no predictions, and there is no adapter",
                self.client,
                folder / MODEL_FILE,
            )
        with as_checkpoint_error(f"cannot make {folder}"):
            folder.mkdir(exist_ok=True)
        write_atomically(
            folder / MODEL_FILE, safetensors.torch.save(params, None if is_whole else PARTIAL_MODEL)
        )
        if (folder / "adapter").exists():
            # of an earlier round
            shutil.rmtree(folder / "adapter")
        if self.language is not None and is_whole:
            self.language.write_one(folder / "adapter", local_model.personal(), round, self.client)


def _encode_site(site: SiteSettings, experiment: ExperimentConfig) -> dict[str, Any]:
    """Encode a site's settings for the client's folder; under differential privacy no error text may leave the site."""
    is_private = experiment.run.privacy.kind != "none"
    return dataclasses.asdict(dataclasses.replace(site, send_errors=site.send_errors and not is_private))


def explain_error_at(folder: Path, error: BaseException) -> str:
    """Describe an error for the server if the client's folder may be damaged; see :meth:`ClientRuntime.explain`."""
    try:
        site = SiteSettings(**_read_client_file(folder / CLIENT_FILE).get("site", {}))
    except (CheckpointError, TypeError):
        site = SiteSettings()
    return explain_error(error, SiteAudit(folder / AUDIT_FILE), site)


def _check_run_name(run: str) -> str:
    """The name of a run's folder; a path is refused, because the server chooses the name."""
    if not (run.isalnum() and run.isascii() and len(run) <= 64):
        raise ConfigError(f"the server calls its run {run[:80]!r}, which is not a valid name")
    return run


@functools.lru_cache(maxsize=16)
def _load_shared(tables: str) -> tuple[ExperimentConfig, Sequential]:
    """The experiment and the engine, which the clients of one process share."""
    experiment = ExperimentConfig.parse(json.loads(tables))
    return experiment, Sequential(micro_batch=experiment.run_here.micro_batch)


def _read_client_file(path: Path) -> dict[str, Any]:
    try:
        contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check_seal(contents, path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a client's folder: it holds no client.json") from error
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return contents


def _pack_data(data: ClientData) -> dict[str, Any]:
    splits = {
        s: {"x": e.inputs, "y": e.y}
        for s, e in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    return {**splits, "notes": list(data.notes), "quarter_turns": data.quarter_turns}


def _unpack_data(table: dict[str, Any]) -> ClientData:
    train, val, test = (Examples(table[s]["x"], table[s]["y"]) for s in ("train", "val", "test"))
    return ClientData(train, val, test, tuple(table["notes"]), table["quarter_turns"])


def _empty_like(examples: Examples) -> Examples:
    """Return zero examples with the dtypes and shapes of the given ones."""
    return examples.take(torch.arange(0))
