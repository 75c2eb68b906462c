"""Its study, and its stages of a lifecycle."""

from typing import NamedTuple

import numpy as np

from jaxdp.audit import multi_run
from jaxdp.data.selection import everything
from jaxdp.privacy import Ledger
from launch import data as images
from launch import frame
from launch.lifecycle.stage import AUDITS, Stage, audited, terms
from tests.extension.means import event, noisy_mean

TERMS = {"adjacency": "replace_one", "unit": "image"}


def brightness(source):
    return np.clip(everything(source)["image"].mean((1, 2, 3)), 0, 1)


# --- The study ----------------------------------------------------------------------------------


class Cell(NamedTuple):
    epsilon: float


def run_one(cell, work):
    values = brightness(work.shared["private"])
    terms = {**TERMS, "records": len(values)}
    with frame.account(work.root / "ledger.sqlite", f"digits {cell.epsilon:g}", **terms) as account:
        mean = noisy_mean(
            values, epsilon=cell.epsilon, account=account, workdir=work.folder(cell) / "scratch"
        )
    return {"error": abs(mean - float(values.mean()))}


STUDY = frame.Study(
    name="means",
    open=lambda config, root: images.parts(config.data, "private"),
    cells=lambda config: map(Cell, config.epsilons),
    run=run_one,
    result=lambda rows, work: {f"{row['epsilon']:g}": row["error"] for row in rows},
    summary=str,
    tables=lambda result, work: {"Errors": [{"epsilon": k, "error": v} for k, v in result.items()]},
    report=frame.Report(title="noisy means"),
    life="tests.extension.study",
)


# --- The lifecycle ------------------------------------------------------------------------------


def release(job):
    client = job.data.client
    mean = noisy_mean(
        brightness(client),
        epsilon=job.config.means.epsilon,
        account=job.account(client.name),
        workdir=job.folder,
    )
    return {"images": len(client), "mean": mean}


def attack(job):
    def means(values, first):
        outputs = []
        for trial in range(first, first + 50):
            with Ledger.in_memory() as ledger:
                ledger.register("x", **TERMS)
                mean = noisy_mean(
                    values,
                    epsilon=job.config.means.epsilon,
                    account=ledger.account("x"),
                    seed=trial.to_bytes(16, "little"),
                )
                outputs.append(mean)
        return np.array(outputs)

    audit = multi_run(
        means(np.ones(1), 0),
        means(np.zeros(1), 50),
        upper=job.config.means.epsilon,
        delta=0.0,
        confidence=0.999,
    )
    return audited([(audit, "a mean")], ["clinic"])


STAGES = (
    Stage(
        "means",
        release,
        data=("client",),
        config=("means",),
        charges=lambda config, data: {"clinic": event(config.means.epsilon)},
        accounts=lambda config: {"clinic": terms(config, "replace_one", config.budgets.client)},
        shape={"images": int, "mean": float},
        title="A noisy mean",
    ),
    Stage("audit_means", attack, after=("means",), config=("means",), shape=AUDITS),
)

if __name__ == "__main__":
    frame.main(STUDY)
