"""A federated round here and in other simulators: the same model, examples, order, clients, seeds; final weights compared.

    pip install pfl fedjax                       # fedjax wants an environment of its own
    python benchmarks/simulators.py [--models mlp25k,mlp99k,mlp200k,cnn] [--arms bare,sequential,vectorised,pfl,flower,fedjax]
        [--clients 100] [--rounds 30] [--jax-python PATH] [--out FILE.md]

Every arm runs in a process of its own, on one thread. They take turns round by round, in an order that rotates, and a ratio is
that of an arm's CPU time to the bare loop's in the same turn; shown are medians with quartiles. Other simulators get their
examples already in the order in which a client sees them, and evaluate nothing. Flower runs its clients in processes of Ray,
whose CPU time is counted with its own. Memory is the peak of the arm's process (of Flower: of the server's alone) less what it
has once torch or JAX is imported and the examples are read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WARM = 6
"""Rounds that are not counted."""

LR, BATCH, EXAMPLES = 0.01, 32, 64
"""Two whole batches a client, for FedJAX would fill a short one up with examples that the others do not see again."""

TOKENS, WIDTH = 1000, 128
"""Of the transformer: its vocabulary, and the length of its vectors."""

Plan = dict[str, np.ndarray[Any, Any]]


# -- what is to be computed --------------------------------------------------------------------------------------------


def transformer() -> Any:
    """A small frozen transformer with LoRA of rank 4 on queries and values, and a head that is trained."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from fedlowrank.low_rank.lora_layers import lora

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x)
            q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(-3, -2) for f in (self.q, self.k, self.v))
            mixed = torch.softmax(q @ k.mT / (WIDTH / 4) ** 0.5, -1) @ v
            x = x + self.o(mixed.transpose(-3, -2).flatten(-2))
            out: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
            return out

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.blocks(self.embedding(x.long())).mean(-2))
            return out

    return lora(Transformer(), 4, 8, target_modules=["q", "v"], trainable=["head"])


def subject(name: str) -> Any:
    """A model to time."""
    from fedlowrank.bench import SUBJECTS, Subject

    more = {"lora": Subject("LoRA on a transformer, 2 × 128", (32,), transformer, transformer)}
    return {**SUBJECTS, **more}[name]


def federation_of(name: str, clients: int) -> Any:
    """Clients with random examples."""
    import torch

    from fedlowrank import bench
    from fedlowrank.data.federation import Federation

    if name != "lora":
        return bench.federation(subject(name), clients, EXAMPLES)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(TOKENS, (clients, EXAMPLES, 32), generator=generator)
    y = torch.randint(10, (clients, EXAMPLES), generator=generator)
    data = [{"train": pair} for pair in zip(x.unbind(), y.unbind(), strict=True)]
    return Federation.from_arrays(data, transformer, classes=10)


def make_plan(name: str, clients: int, rounds: int) -> Plan:
    """Examples, initial weights, and who trains in which order."""
    import torch

    from fedlowrank.engine import ENGINES
    from fedlowrank.engine.run import Run, RunSettings
    from fedlowrank.methods import METHODS
    from fedlowrank.optimiser import SGD

    fed = federation_of(name, clients)
    settings = RunSettings(rounds=rounds, participation=10 / clients)
    run = Run(METHODS["fedavg"](batch_size=BATCH, optimiser=SGD(lr=LR)), fed, settings, ENGINES["sequential"]())
    cohorts, orders = [], []
    for t in range(rounds):
        infos = run.participants(t)
        cohorts.append([i.id for i in infos])
        orders.append([torch.cat(run.engine.trainer(run.method, fed, t, i).data.order("local")).numpy() for i in infos])
    plan = {
        "x": np.stack([np.asarray(c.train.x) for c in fed.clients]),
        "y": np.stack([np.asarray(c.train.y) for c in fed.clients]),
        "cohorts": np.array(cohorts),
        "orders": np.array(orders),
    }
    module = next(iter(fed.architectures.values())).module
    frozen = [p.numpy() for p in module.parameters() if not p.requires_grad]
    plan |= {f"f{i}": w for i, w in enumerate(frozen)}
    return {**plan, **{f"p{i}": t.numpy() for i, t in enumerate(run.state.server.values())}}


def weights(plan: Plan, kind: str = "p") -> list[np.ndarray[Any, Any]]:
    """The initial ones; those that stay as they are if the kind is f."""
    return [plan[f"{kind}{i}"] for i in range(sum(k[0] == kind for k in plan))]


MARK = "##round "
"""Begins the lines by which an arm tells what a round took; libraries print others."""


class Clock:
    """Lets a round begin when it is this arm's turn, and tells CPU and wall time of it.

    Args:
        processes: count the time of child processes, too.
    """

    def __init__(self, processes: bool = False) -> None:
        self._processes = processes
        self._began = 0.0, 0.0

    def spent(self) -> float:
        """CPU seconds so far."""
        if not self._processes:
            return time.process_time()
        import psutil

        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(t.user + t.system for p in family if (t := p.cpu_times()) is not None)

    def begin(self) -> None:
        """Wait for the turn."""
        sys.stdin.readline()
        self._began = self.spent(), time.perf_counter()

    def end(self) -> None:
        """Tell what it took."""
        took = {"cpu": self.spent() - self._began[0], "wall": time.perf_counter() - self._began[1]}
        print("\n" + MARK + json.dumps(took), flush=True)

    def __call__(self, work: Callable[[], object]) -> None:
        """Time a round."""
        self.begin()
        work()
        self.end()


# -- arms --------------------------------------------------------------------------------------------------------------


def plain_module(name: str, plan: Plan) -> Any:
    """The model as torch's users write it, with the initial weights."""
    import torch

    module = subject(name).plain()
    with torch.no_grad():
        for p, w in zip(trained(module), weights(plan), strict=True):
            p.copy_(torch.from_numpy(w))
        for p, w in zip((p for p in module.parameters() if not p.requires_grad), weights(plan, "f"), strict=True):
            p.copy_(torch.from_numpy(w))
    return module


def trained(module: Any) -> list[Any]:
    """The parameters that are not frozen."""
    return [p for p in module.parameters() if p.requires_grad]


def bare(name: str, plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
    """Plain PyTorch, with the mean of the results."""
    import torch
    from torch.nn import functional

    module = plain_module(name, plan)
    x, y = torch.from_numpy(plan["x"]), torch.from_numpy(plan["y"])
    server = [p.detach().clone() for p in trained(module)]

    def round_(t: int) -> None:
        total = [torch.zeros_like(p) for p in server]
        for client, order in zip(plan["cohorts"][t], plan["orders"][t], strict=True):
            with torch.no_grad():
                for p, q in zip(trained(module), server, strict=True):
                    p.copy_(q)
            optimiser = torch.optim.SGD(trained(module), lr=LR)
            for index in torch.from_numpy(order).split(BATCH):
                optimiser.zero_grad()
                functional.cross_entropy(module(x[client][index]), y[client][index]).backward()
                optimiser.step()
            for a, p in zip(total, trained(module), strict=True):
                a.add_(p.detach(), alpha=1 / len(plan["cohorts"][t]))
        server[:] = total

    for t in range(len(plan["cohorts"])):
        clock(lambda t=t: round_(t))  # type: ignore[misc]
    return [p.numpy() for p in server]


def ours(engine: str) -> Callable[[str, Plan, Clock], list[np.ndarray[Any, Any]]]:
    """This package: whole rounds, with all that it counts and checks."""

    def arm(name: str, plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
        from fedlowrank.engine import ENGINES
        from fedlowrank.engine.run import Run, RunSettings
        from fedlowrank.methods import METHODS
        from fedlowrank.optimiser import SGD

        rounds, fed = len(plan["cohorts"]), federation_of(name, len(plan["x"]))
        settings = RunSettings(rounds=rounds + 1, participation=10 / len(plan["x"]), evaluate_every=10**6)
        run = Run(METHODS["fedavg"](batch_size=BATCH, optimiser=SGD(lr=LR)), fed, settings, ENGINES[engine]())
        # the first round is evaluated; not so here
        run.is_due = lambda: False  # type: ignore[method-assign]
        for _ in range(rounds):
            clock(run.step)
        run.engine.close()
        return [t.numpy() for t in run.state.server.values()]

    return arm


def pfl(name: str, plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
    """pfl-research by its own loop."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from torch import nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain_module(name, plan)

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            del eval
            return functional.cross_entropy(self.inner(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            del x, y
            return {}

    module = Model()
    x, y = torch.from_numpy(plan["x"]), torch.from_numpy(plan["y"])
    queue = [
        (int(c), torch.from_numpy(o))
        for t in range(len(plan["cohorts"]))
        for c, o in zip(plan["cohorts"][t], plan["orders"][t], strict=True)
    ]
    datasets = iter([Dataset(raw_data=[x[c][o], y[c][o]]) for c, o in queue])
    data = FederatedDataset(lambda _: next(datasets), lambda: 0)
    backend = SimulatedBackend(training_data=data, val_data=data)
    central = torch.optim.SGD(trained(module), 1.0)
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central)
    last = len(plan["cohorts"]) - 1

    class Mark(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Any:
            del model
            clock.begin()
            return super().on_train_begin(model=None)

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            del aggregate_metrics, model
            clock.end()
            if central_iteration < last:
                clock.begin()
            from pfl.metrics import Metrics

            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=len(plan["cohorts"]),
            evaluation_frequency=10**9,
            train_cohort_size=plan["cohorts"].shape[1],
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Mark()],
    )
    return [p.detach().numpy() for p in trained(module)]


def flower(name: str, plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
    """Flower's simulation: messages to clients in Ray's processes, the mean of what comes back."""
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    final: list[np.ndarray[Any, Any]] = []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        import torch
        from torch.nn import functional

        del context
        torch.set_num_threads(1)
        held: Any = globals().setdefault("_held", {})
        if not held:
            held["module"] = plain_module(name, plan)
            held["x"], held["y"] = torch.from_numpy(plan["x"]), torch.from_numpy(plan["y"])
        module, config = held["module"], message.content.config_records["config"]
        with torch.no_grad():
            given = message.content.array_records["arrays"].to_numpy_ndarrays()
            for p, w in zip(trained(module), given, strict=True):
                p.copy_(torch.from_numpy(w))
        client = int(config["client"])
        optimiser = torch.optim.SGD(trained(module), lr=LR)
        for index in torch.tensor(config["order"]).split(BATCH):
            optimiser.zero_grad()
            functional.cross_entropy(module(held["x"][client][index]), held["y"][client][index]).backward()
            optimiser.step()
        found = ArrayRecord([p.detach().numpy() for p in trained(module)])
        return Message(RecordDict({"arrays": found}), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        nodes = list(grid.get_node_ids())
        while len(nodes) < 10:
            time.sleep(0.1)
            nodes = list(grid.get_node_ids())
        server = weights(plan)

        def round_(t: int) -> None:
            messages = []
            for node, client, order in zip(nodes, plan["cohorts"][t], plan["orders"][t], strict=True):
                config = ConfigRecord({"client": int(client), "order": [int(i) for i in order]})
                content = RecordDict({"arrays": ArrayRecord(server), "config": config})
                messages.append(Message(content, node, "train"))
            replies = [r.content.array_records["arrays"].to_numpy_ndarrays() for r in grid.send_and_receive(messages)]
            server[:] = [np.mean(ws, axis=0, dtype=np.float32) for ws in zip(*replies, strict=True)]

        for t in range(len(plan["cohorts"])):
            clock(lambda t=t: round_(t))  # type: ignore[misc]
        final.extend(server)

    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, 10, backend_config=resources)
    return final


def fedjax(name: str, plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
    """FedJAX, compiled, one client after another."""
    import fedjax as fj
    import jax
    import jax.numpy as jnp
    from fedjax.algorithms import fed_avg

    def conv(x: Any, w: Any, b: Any) -> Any:
        out = jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return out + b[:, None, None]

    def pool(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    def scores(p: Any, x: Any) -> Any:
        p = list(p)
        if name == "cnn":
            for _ in range(2):
                w, b = p.pop(0), p.pop(0)
                x = pool(jax.nn.relu(conv(x, w, b)))
            x = x.reshape(len(x), -1)
        while p:
            w, b = p.pop(0), p.pop(0)
            x = x @ w.T + b
            x = jax.nn.relu(x) if p else x
        return x

    def loss(p: Any, batch: Any, rng: Any) -> Any:
        del rng
        logs = jax.nn.log_softmax(scores(p, batch["x"]))
        return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()

    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fj.optimizers.sgd(LR),
        fj.optimizers.sgd(1.0),
        fj.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, skip_shuffle=True),
    )
    state = algorithm.init([jnp.asarray(w) for w in weights(plan)])
    key = jax.random.PRNGKey(0)

    def round_(clients: Any) -> None:
        nonlocal state
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    for cohort, orders in zip(plan["cohorts"], plan["orders"], strict=True):
        sets = [
            fj.ClientDataset({"x": plan["x"][c][o], "y": plan["y"][c][o]}) for c, o in zip(cohort, orders, strict=True)
        ]
        clients = [(b"%d" % c, s, key) for c, s in zip(cohort, sets, strict=True)]
        clock(lambda clients=clients: round_(clients))  # type: ignore[misc]
    return [np.asarray(w) for w in state.params]


ARMS: dict[str, Callable[[str, Plan, Clock], list[np.ndarray[Any, Any]]]] = {
    "bare": bare,
    "sequential": ours("sequential"),
    "vectorised": ours("vectorised"),
    "pfl": pfl,
    "flower": flower,
    "fedjax": fedjax,
}

TITLES = {
    "bare": "bare PyTorch loop",
    "sequential": "**fedlowrank**, sequential",
    "vectorised": "**fedlowrank**, vectorised",
    "pfl": "pfl",
    "flower": "Flower, simulation",
    "fedjax": "FedJAX",
}


# -- one process an arm ------------------------------------------------------------------------------------------------


def peak() -> float:
    """MiB that this process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """MiB that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def run_arm(arm: str, name: str, folder: Path) -> None:
    """In a process of its own: run, and leave figures and weights in the folder."""
    warnings.simplefilter("ignore")
    if arm == "fedjax":
        pass
    else:
        import torch

        torch.set_num_threads(1)
    plan: Plan = dict(np.load(folder / "plan.npz"))
    before, clock = resident(), Clock(processes=arm == "flower")
    found = ARMS[arm](name, plan, clock)
    np.savez(folder / f"{arm}.npz", *found)
    (folder / f"{arm}.json").write_text(json.dumps({"memory": peak() - before}))


class Runner:
    """An arm in a process of its own, which waits for its turn before every round.

    Args:
        arm: which.
        name: of the model.
        folder: with the plan.
        python: interpreter.
    """

    def __init__(self, arm: str, name: str, folder: Path, python: str) -> None:
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
        one["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        command = [python, str(Path(__file__).resolve()), "--run", arm, "--models", name, "--folder", str(folder)]
        self.arm, self._errors = arm, (folder / f"{arm}.err").open("w+")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env={**os.environ, **one}, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )

    def round(self) -> dict[str, float]:
        """What the next round took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line[len(MARK) :])
                return found
        self._errors.seek(0)
        raise SystemExit(f"{self.arm} failed:\n{self._errors.read()[-3000:]}")

    def close(self) -> None:
        """Wait until it has left its weights."""
        self._process.communicate()


def difference(folder: Path, arm: str) -> float:
    """Largest difference of a final weight from the bare loop's, as a share of the largest weight."""
    a, b = (list(np.load(folder / f"{n}.npz").values()) for n in ("bare", arm))
    apart = max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))
    return apart / max(float(np.abs(x).max()) for x in a)


def compare(name: str, clients: int, rounds: int, arms: Sequence[str], jax_python: str) -> list[str]:
    """Rows of a table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.savez(folder / "plan.npz", **make_plan(name, clients, rounds + WARM))  # type: ignore[arg-type]
        # which has networks of its own, and not this one
        arms = [a for a in arms if (a, name) != ("fedjax", "lora")]
        runners = [Runner(a, name, folder, jax_python if a == "fedjax" else sys.executable) for a in arms]
        turns: list[dict[str, dict[str, float]]] = []
        for t in range(rounds + WARM):
            order = [*runners[t % len(runners) :], *runners[: t % len(runners)]]
            turns.append({r.arm: r.round() for r in order})
        for runner in runners:
            runner.close()
        rows, counted = [], turns[WARM:]
        for arm in arms:
            cpu, wall = (1e3 * statistics.median(t[arm][kind] for t in counted) for kind in ("cpu", "wall"))
            low, middle, high = statistics.quantiles([t[arm]["cpu"] / t["bare"]["cpu"] for t in counted], n=4)
            memory = json.loads((folder / f"{arm}.json").read_text())["memory"]
            cells = [name, str(clients), TITLES[arm], f"{cpu:.1f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
            cells += [f"{wall:.1f}", f"{memory:.0f}", f"{difference(folder, arm):.0e}"]
            rows.append("| " + " | ".join(cells) + " |")
            print(rows[-1], flush=True)
        return rows


HEAD = [
    "| model | clients | simulator | CPU ms a round | CPU / bare loop | wall ms | memory, MiB | weights differ by |",
    "| :--- | ---: | :--- | ---: | ---: | ---: | ---: | ---: |",
]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp25k,mlp99k,mlp200k,cnn,lora")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--clients", default="100")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jax-python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_arm(args.run, args.models, args.folder)
        return
    from fedlowrank.bench import machine

    print("\n".join(HEAD), flush=True)
    rows = [
        row
        for name in args.models.split(",")
        for clients in args.clients.split(",")
        for row in compare(name, int(clients), args.rounds, args.arms.split(","), args.jax_python)
    ]
    if args.out:
        args.out.write_text("\n".join([*HEAD, *rows, "", machine(), ""]))


if __name__ == "__main__":
    main()
