"""Private fine-tuning: python -m launch.finetune --config configs/digits_dpsgd.py --workdir
workdir/digits.

A config with `grids`, such as configs/dpadapter_table1.py, is a whole table of cells with their
upstream models. One with `curve`, such as configs/finetune/cifar10_squeezenet.py, is the accuracy
over epsilon. One with `tune`, such as configs/finetune/tune.py, is a private search.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from jaxdp import finetune
from jaxdp.data import Owners, augmentation
from jaxdp.files import read_json
from jaxdp.models import save_params
from jaxdp.privacy import Account, ComposedDpEvent
from jaxdp.release import Hosts, notes
from jaxdp.report import Callback, format_table, plot_training
from jaxdp.report.runs import FILE

from . import curve, dpadapter, frame, label_dp, models, plans, results, tasks, trainers, tune

Params = Any

_CHANGES = {
    "add_remove": "adding or removing",
    "replace_one": "replacing",
    "zero_out": "zeroing out",
}
_REFERENCES = "references/ledger.sqlite"
_REFERENCE_EPSILON = "epsilon of no pre-training"
SCALER = "scaler.json"  # of the columns of a table
REFERENCES = {"no privacy": "no_privacy", "no pre-training": "no_pretraining"}


class Model(NamedTuple):
    """A cell: the private model, or a reference model."""

    model: str


class _Opened(NamedTuple):
    task: tasks.Task
    trainer: Any


def _open(config: Any, root: pathlib.Path, *, mesh: Any = None) -> _Opened:
    if not Hosts(mesh).leads and config.model.features.keep:
        config = config.copy_and_resolve_references()
        config.model.features.keep = "memory"  # Process 0 alone writes into the workdir.
    task = tasks.open_task(config, root)
    return _Opened(task, task.trainer(config.private, mesh))


def _cells(config: Any) -> Iterator[Model]:
    yield Model("private")
    if config.references:
        yield Model("no_privacy")
        trained_here = config.data.parts.get("public") and not models.has_backbone(config.model)
        if trained_here or config.pretrain.weights:
            yield Model("no_pretraining")


def _run(cell: Model, work: frame.Work) -> dict[str, Any]:
    config = work.config
    opened = _scaled(work)
    task = opened.task
    if cell.model == "no_pretraining":
        start = models.fresh(task.network, config.init_seed)
    else:
        start = tasks.start(config, task, work)
    if cell.model == "no_privacy":
        augment = augmentation(task.spec)
        return work.hosts.first(
            lambda: {"accuracy": tasks.without_privacy(config, task, start, augment=augment)}
        )
    return _private(cell, work, opened, start)


def _scaled(work: frame.Work) -> _Opened:
    """Returns task and trainer with the scaler of the private rows, if the config has one.

    The first cell pays for it, unless the budget has no room for the training behind it. The others
    read its file.
    """
    task, trainer = work.shared
    event = trainers.scaler_event(work.config.private)
    if event is None:
        return work.shared
    path = work.root / SCALER
    folder = work.root / "scaler"

    def release() -> None:
        with _account(Model("private"), work) as account:
            if not notes(folder):  # after a crash the scaler is paid already
                whole = trainer.event(0, trainers.steps(work.config.private))
                account.check(ComposedDpEvent([event, whole]))
            scaler = finetune.charged_scaler(
                task.units,
                tasks.scaler_ranges(task.spec),
                account=account,
                noise_multiplier=event.noise_multiplier,
                unit=task.spec.unit,
                workdir=folder,
            )
        scaler.save(path)

    work.hosts.first(lambda: frame.make_once(path, release))
    task = task.scaled(finetune.Scaler.load(path))
    return _Opened(task, task.trainer(work.config.private, trainer.mesh))


def _private(cell: Model, work: frame.Work, opened_task: _Opened, start: Params) -> dict[str, Any]:
    """Trains a private model. Process 0 alone has the account and writes files."""
    private = work.config.private
    task, trainer = opened_task
    folder = work.folder(cell)

    def evaluate(params: Params) -> dict[str, float]:
        params = jax.device_get(params)
        return {"accuracy": finetune.accuracy(task.network.apply_fn, params, task.test)}

    with contextlib.ExitStack() as opened:
        account: Any = None
        writers: list[Callback] = []

        def open_files() -> None:
            nonlocal account
            account = opened.enter_context(_account(cell, work))
            writers.extend(opened.enter_context(frame.watching(work.config, folder)))

        work.hosts.first(open_files)
        state = finetune.fit(
            trainer,
            start,
            task.units,
            account=account,
            workdir=folder,
            evaluate=evaluate,
            callbacks=writers,
            **trainers.fit_options(private),
        )
        params = jax.device_get(trainers.released(state))

        def judged() -> dict[str, Any]:
            if cell.model == "private":
                save_params(work.root / "params.safetensors", task.serving(params))
            before = models.right(task.network, start, task.test)
            after = models.right(task.network, params, task.test)
            row = results.changes(before, after)
            row["accuracy"] = row["after"]
            row["epsilon"] = account.epsilon(delta=private.delta)
            return row

        return work.hosts.first(judged)


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    private, *references = rows
    task, trainer = work.shared
    options = work.config.private
    result = {"private": private["accuracy"]}
    result |= results.only(private, "before", "after", "gained", "lost")
    result["tested"] = len(task.test)
    result["curves"] = trainers.curves(work.folder(Model("private")))
    names = {model: name for name, model in REFERENCES.items()}
    for row in references:
        result[names[row["model"]]] = row["accuracy"]
        if "epsilon" in row:
            # Its own ledger. That of the private model may also count other runs.
            result[_REFERENCE_EPSILON] = row["epsilon"]
    return {
        **result,
        "epsilon": private["epsilon"],
        "delta": options.delta,
        "method": options.method,
        "noise_multiplier": float(trainer.privatizer.multiplier_at(0)),
        "steps": trainers.steps(options),
        **task.spec.terms,
        **_owners(work),
        "dataset": task.private.name,
    }


def _owners(work: frame.Work) -> dict[str, Any]:
    """Returns what the run says of owners with fewer records than the most. Who owns what is
    public.
    """
    if not isinstance(work.shared.task.units, Owners):
        return {}
    settings = read_json(work.folder(Model("private")) / FILE)["settings"]
    rows = [
        (name, text) for name, text in settings.items() if "records that count" in f"{name} {text}"
    ]
    return {"owners": rows}


def _figures(result: Mapping[str, Any], work: frame.Work) -> None:
    private = work.config.private
    curves = result["curves"]
    references = {name: result[name] for name in REFERENCES if name in result}
    plot_training(
        work.root / "training.png",
        accuracy=[(0, result["before"]), *curves["accuracy"]],
        epsilon=[(0, 0.0), *curves["epsilon"]],
        budget=private.epsilon,
        delta=private.delta,
        dataset=result["dataset"],
        references=references,
    )


def _summary(result: Mapping[str, Any]) -> str:
    spent = f"{result['epsilon']:.3f}"
    tested = {**result, "before fine-tuning": result["before"]}
    epsilons = {
        "before fine-tuning": "0",
        "private": spent,
        "no privacy": "inf",
        "no pre-training": f"{result.get(_REFERENCE_EPSILON, result['epsilon']):.3f}",
    }
    rows = []
    for name, epsilon in epsilons.items():
        if name in tested:
            rows.append({"model": name, "test accuracy": tested[name], "epsilon": epsilon})
    change = f"{_CHANGES[result['adjacency']]} one {result['unit']}"
    text = (
        f"{format_table(rows)}\n\nThe ledger recomputes epsilon = {spent} at delta = "
        f"{result['delta']:g} for {result['dataset']} ({change})."
    )
    if any(name in result for name in REFERENCES):
        return text + (
            "\nThe models with no privacy or no pre-training are references. They used the private "
            "examples too. Publishing"
            "\nthem would cost their own epsilon on top. Set --config.references=False if the data "
            "is really private."
        )
    return text + (
        "\nIf the records are public, --config.references=True shows what the model reaches "
        "without privacy, and without\npre-training."
    )


def _plan(config: Any, opened: Callable[[], _Opened]) -> Iterator[plans.Item]:
    task, trainer = opened()
    private = config.private
    loss = models.loss(task.network)
    start = models.fresh(task.network, config.init_seed)
    records, units = task.blank()
    yield from tasks.plan_of_start(config, task)
    if scaler := trainers.scaler_event(private):
        terms = task.terms(private)
        yield plans.Item("scaler", task.private.name, scaler, terms, folder="scaler")
    for cell in _cells(config):
        if cell.model == "no_privacy":
            yield plans.public_training(
                "reference without privacy", loss, start, records, config.no_privacy
            )
            continue
        item = plans.training(
            cell.model.replace("_", " "),
            trainer,
            units,
            start,
            steps=trainers.steps(private),
            every=private.checkpoint_every,
            terms=task.terms(private),
            folder=f"cells/{cell.model}",
        )
        if cell.model != "private":
            item = item._replace(ledger=_REFERENCES)
        yield item


def _account(cell: Model, work: frame.Work) -> AbstractContextManager[Account]:
    """Returns the account that pays for a cell. References have a ledger of their own."""
    task = work.shared.task
    terms = task.terms(work.config.private)
    if cell.model == "private":
        return work.account(task.private.name, label="private", **terms)
    label = cell.model.replace("_", " ")
    return frame.account(work.root / _REFERENCES, task.private.name, label=label, **terms)


_SHAPE = {
    **dict.fromkeys(("before", "after", "epsilon", "delta", "noise_multiplier"), float),
    **dict.fromkeys(("gained", "lost", "tested", "steps"), int),
    "method": str,
    "dataset": str,
    "curves": {"accuracy": [[float]], "epsilon": [[float]]},
}

STUDY = frame.Study(
    name="finetune",
    life=".lifecycle.finetune",
    open=_open,
    private=lambda opened: [opened.task.private_set],
    account=_account,
    cells=_cells,
    run=_run,
    result=_result,
    summary=_summary,
    figures=_figures,
    plan=_plan,
    report=frame.Report(
        title="private fine-tuning",
        page="finetune.html.jinja",
        shape=_SHAPE,
        released={
            "params.safetensors": "fine-tuned model",
            "pretrained.safetensors": "public backbone",
            SCALER: "scaler of the columns",
        },
        references=True,
    ),
)


def experiment(
    config: Any,
    workdir: str | None,
    *,
    dry_run: bool = False,
    target: str = "",
    mesh: Any = None,
    **choice: Any,
) -> Any:
    """Runs the experiment, or the table or curve of them. The devices of a mesh share the batches
    of an experiment. The arguments are those of `launch.frame.run`.
    """
    study = STUDY
    if "grids" in config:
        study = dpadapter.STUDY
    elif "curve" in config:
        study = curve.STUDY
    elif "labels" in config:
        study = label_dp.STUDY
    elif "tune" in config:
        study = tune.STUDY
    if mesh is None:
        return frame.run(study, config, workdir, dry_run=dry_run, target=target, **choice)
    if study is not STUDY:
        raise ValueError(
            "--devices must be one for a table or a curve. Start several processes in its workdir "
            "instead: each takes cells that no other process holds."
        )
    divided = dataclasses.replace(STUDY, open=functools.partial(_open, mesh=mesh))
    return frame.run(divided, config, workdir, hosts=Hosts(mesh), **choice)


if __name__ == "__main__":
    frame.main(
        experiment, divides=True, trains=True, pays=True, has_cells=True, tunes=tune.with_grid
    )
