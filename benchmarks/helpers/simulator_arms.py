"""The simulators of ``benchmarks/peers/round_against_simulators.py``, each used as in its own documentation, and the bare loop.

All imports of simulators are within functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.simulator_task import LR, Clock, Plan, federation_of, subject, weights


def plain_module(name: str, plan: Plan) -> Any:
    """The model as torch's users write it, with the initial weights."""
    import torch

    module = subject(name).plain()
    with torch.no_grad():
        for p, w in zip(trained(module), weights(plan), strict=True):
            p.copy_(torch.from_numpy(w))
        for p, w in zip(
            (p for p in module.parameters() if not p.requires_grad), weights(plan, "f"), strict=True
        ):
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
            optimizer = torch.optim.SGD(trained(module), lr=LR)
            for index in torch.from_numpy(order).split(int(plan["batch"])):
                optimizer.zero_grad()
                functional.cross_entropy(module(x[client][index]), y[client][index]).backward()
                optimizer.step()
            for a, p in zip(total, trained(module), strict=True):
                a.add_(p.detach(), alpha=1 / len(plan["cohorts"][t]))
        server[:] = total

    for t in range(len(plan["cohorts"])):
        clock(lambda t=t: round_(t))  # type: ignore[misc]
    return [p.numpy() for p in server]


def ours(engine: str) -> Callable[[str, Plan, Clock], list[np.ndarray[Any, Any]]]:
    """This package: whole rounds, with all that it counts and checks."""

    def arm(name: str, plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
        from fedlowrank.core.learning.optimizer import SGD
        from fedlowrank.engines import ENGINES
        from fedlowrank.methods import METHODS
        from fedlowrank.rounds.run_settings import RunSettings
        from fedlowrank.testing.check import RunWithoutEvaluation

        rounds, fed = len(plan["cohorts"]), federation_of(name, *plan["x"].shape[:2])
        settings = RunSettings(
            rounds=rounds + 1, participation=plan["cohorts"].shape[1] / len(plan["x"]), evaluate_every=10**6
        )
        run = RunWithoutEvaluation(
            METHODS["fedavg"](batch_size=int(plan["batch"]), optimizer=SGD(lr=LR)),
            fed,
            settings,
            ENGINES[engine](),
        )
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

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
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
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=int(plan["batch"])
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=int(plan["batch"])),
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
        optimizer = torch.optim.SGD(trained(module), lr=LR)
        for index in torch.tensor(config["order"]).split(int(plan["batch"])):
            optimizer.zero_grad()
            functional.cross_entropy(module(held["x"][client][index]), held["y"][client][index]).backward()
            optimizer.step()
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
            replies = [
                r.content.array_records["arrays"].to_numpy_ndarrays() for r in grid.send_and_receive(messages)
            ]
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
        fj.ShuffleRepeatBatchHParams(batch_size=int(plan["batch"]), num_epochs=1, skip_shuffle=True),
    )
    state = algorithm.init([jnp.asarray(w) for w in weights(plan)])
    key = jax.random.PRNGKey(0)

    def round_(clients: Any) -> None:
        nonlocal state
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    for cohort, orders in zip(plan["cohorts"], plan["orders"], strict=True):
        sets = [
            fj.ClientDataset({"x": plan["x"][c][o], "y": plan["y"][c][o]})
            for c, o in zip(cohort, orders, strict=True)
        ]
        clients = [(b"%d" % c, s, key) for c, s in zip(cohort, sets, strict=True)]
        clock(lambda clients=clients: round_(clients))  # type: ignore[misc]
    return [np.asarray(w) for w in state.params]


ARMS: dict[str, Callable[[str, Plan, Clock], list[np.ndarray[Any, Any]]]] = {
    "bare": bare,
    "sequential": ours("sequential"),
    "vectorized": ours("vectorized"),
    "pfl": pfl,
    "flower": flower,
    "fedjax": fedjax,
}

TITLES = {
    "bare": "plain PyTorch loop",
    "sequential": "**fedlowrank**, sequential",
    "vectorized": "**fedlowrank**, vectorized",
    "pfl": "pfl",
    "flower": "Flower, simulation",
    "fedjax": "FedJAX",
}
