"""Runs DP-SGD across silos under the SecAgg+ of Flower, in its simulation engine, which needs Ray.

    pip install "flwr[simulation]>=1.41,<1.42"
    python -m benchmarks run secure_aggregation

Silos, steps and ledgers are those of docs/howto/dp_sgd_across_silos.md, with three silos. Each silo
keeps what it would have sent, and the server keeps all answers. So the secure average is compared
with the plain one, and the parameters of every silo are searched for in the answers. In the last
run one silo leaves when it is asked for its masked parameters."""

import contextlib
import os
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import optax

import jaxdp
from jaxdp.files import optional

SILOS, ROUNDS, STEPS, TARGET = 3, 2, 15, {"epsilon": 3.0, "delta": 1e-4}
# Without a maximal weight there is no secure aggregation: the search for parameters must find them
# then.
RUNS = (
    {"max_weight": None},
    {"max_weight": 1000.0},
    {"max_weight": 1.0},
    {"max_weight": 1.0, "leaves": 2},
)
_Leaves = list[np.ndarray]


def setting() -> tuple[list, Any, Any, Any]:
    """Returns the silos, the test split, the model and its first parameters."""
    *silos, test = jaxdp.data.bundled("breast_cancer").split([0.27, 0.27, 0.27, 0.19], seed=0)
    model = jaxdp.models.create("mlp", num_classes=2, hidden=(16,))
    return (
        silos,
        test,
        model,
        jax.jit(model.init)(jax.random.key(0), test[0]["features"][None])["params"],
    )


def train(folder: pathlib.Path, i: int, leaves: _Leaves, k: int) -> _Leaves:
    """Trains silo i in round k, and pays from its ledger. Its folder keeps what it sends."""
    silos, _, model, params = setting()

    def loss_fn(params, example):
        logits = model.apply({"params": params}, example["features"][None])[0]
        return jaxdp.losses.softmax_cross_entropy(logits, example["label"])

    count = len(silos[i])
    sampler = jaxdp.data.PoissonSampler(count, 64 / count)
    how = {
        "sampler": sampler,
        "clip_norm": 1.0,
        "unit": "patient",
        "steps": ROUNDS * STEPS,
    }
    trainer = jaxdp.finetune.dp_sgd(loss_fn, optax.sgd(0.5), **TARGET, **how)
    root, start = folder / f"silo-{i}", jax.tree.unflatten(jax.tree.structure(params), leaves)
    root.mkdir(exist_ok=True)
    with jaxdp.Ledger(root / "ledger.sqlite") as ledger:
        if not ledger.report()["datasets"]:
            ledger.register("patients", adjacency="add_remove", unit="patient", **TARGET)
        where = {
            "account": ledger.account("patients"),
            "workdir": root / f"round-{k}",
        }
        found = jaxdp.finetune.fit(
            trainer, start, silos[i], steps=STEPS, progress=False, **where
        ).params
    made = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    np.savez(root / f"sent-{k}.npz", *made)
    return made


def sent(folder: pathlib.Path, k: int, silos: list[int]) -> list[_Leaves]:
    files = [np.load(folder / f"silo-{i}" / f"sent-{k}.npz") for i in silos]
    return [[file[name] for name in file.files] for file in files]


def told(content) -> list[bytes]:
    """Returns all bytes in an answer to the server."""
    records = content.config_records.values()
    values = [
        value if isinstance(value, list) else [value]
        for record in records
        for value in record.values()
    ]
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    return [one for value in values for one in value if isinstance(one, bytes)] + arrays


def simulated(folder: pathlib.Path, *, max_weight: float | None, leaves: int | None = None) -> dict:
    """Returns the figures of one run. The silo `leaves` leaves in the second round."""
    optional("ray", "simulation of flwr")
    from flwr import client as clients
    from flwr import common
    from flwr import server as servers
    from flwr.client.mod import secaggplus_mod
    from flwr.clientapp import ClientApp
    from flwr.server import workflow as workflows
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    # for the processes of Ray
    os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).resolve().parents[1])
    _, test, model, params = setting()
    averages, found, weights = list[_Leaves](), list[bytes](), list[int]()

    def client(context):
        i = int(context.node_config["partition-id"])

        class Silo(clients.NumPyClient):
            def fit(self, parameters, config):
                made = train(folder, i, parameters, config["round"])
                if i == leaves and config["round"] == 2:
                    raise RuntimeError("this silo leaves")
                return made, 1, {}  # all silos weigh the same

        return Silo().to_client()

    app = ClientApp(client, mods=[secaggplus_mod] if max_weight else [])
    server = ServerApp()

    class Average(servers.strategy.FedAvg):
        def aggregate_fit(self, *arguments):
            average = super().aggregate_fit(*arguments)
            averages.append(common.parameters_to_ndarrays(average[0]))
            return average

    strategy = Average(
        fraction_evaluate=0.0,
        min_fit_clients=SILOS,
        min_available_clients=SILOS,
        on_fit_config_fn=lambda k: {"round": k},
        initial_parameters=common.ndarrays_to_parameters(
            [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        ),
    )

    @server.main()
    def main(grid, context):
        real = grid.send_and_receive

        def send_and_receive(*arguments, **options):
            answers = list(real(*arguments, **options))
            # the workflow empties them
            for content in (answer.content for answer in answers if answer.has_content()):
                found.extend(told(content))
                records = content.metric_records.values()
                weights.extend(
                    record["num_examples"] for record in records if "num_examples" in record
                )
            return answers

        grid.send_and_receive = send_and_receive
        config = servers.ServerConfig(num_rounds=ROUNDS)
        shares = {
            "num_shares": SILOS,
            "reconstruction_threshold": SILOS - 1,
            "timeout": 300.0,
        }
        secure = (
            workflows.SecAggPlusWorkflow(max_weight=max_weight, **shares) if max_weight else None
        )
        legacy = servers.LegacyContext(context=context, config=config, strategy=strategy)
        workflows.DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    with contextlib.redirect_stdout(sys.stderr):
        run_simulation(server, app, SILOS, backend_config=resources)
    errors, everyone = list[float](), list(range(SILOS))
    for k, secure in enumerate(averages, 1):
        there = [i for i in everyone if not (i == leaves and k == 2)]
        plain = [np.mean(one, 0) for one in zip(*sent(folder, k, there), strict=True)]
        errors.append(max(float(np.abs(a - b).max()) for a, b in zip(secure, plain, strict=True)))
    alone = [
        leaf
        for k in range(1, ROUNDS + 1)
        for one in sent(folder, k, everyone)
        for leaf in one
        if leaf.size > 2
    ]
    epsilons = []
    for i in everyone:
        with jaxdp.Ledger(folder / f"silo-{i}" / "ledger.sqlite", read_only=True) as ledger:
            epsilons.append(round(ledger.epsilon("patients"), 3))
    last = jax.tree.unflatten(jax.tree.structure(params), averages[-1])
    accuracy = jaxdp.finetune.accuracy(
        lambda params, x: model.apply({"params": params}, x), last, test
    )
    return {
        "max_weight": max_weight,
        "leaves": leaves,
        "rounds": len(averages),
        "largest_error": [float(f"{error:.2g}") for error in errors],
        "largest_parameter": round(max(float(np.abs(leaf).max()) for leaf in alone), 2),
        "parameters_in_answers": any(
            leaf.astype(kind).tobytes() in one for leaf in alone for one in found for kind in "fd"
        ),
        "weights_in_answers": len(weights),
        "accuracy": round(accuracy, 3),
        "epsilon": epsilons,
    }


def measure(flags) -> dict:
    runs = []
    for options in RUNS:
        with tempfile.TemporaryDirectory() as name:
            runs.append(simulated(pathlib.Path(name), **options))
    report = {"silos": SILOS, "rounds": ROUNDS, "steps": STEPS, **TARGET, "runs": runs}
    print(report)
    return report
