"""One experiment on Split Adaptation from a config: accuracy, ablations, attacks, costs, accuracy at a real epsilon.

The config is an `ml_collections.ConfigDict` as in `configs/split/digits.py`, whose comments say what each field means.
Tables and figures are those of Wang et al. (CVPR 2025, arXiv:2503.00441), with what they lack beside them. Every number
is the mean over draws of the client's images, with the standard error.
"""

import contextlib
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxdp.files import read_json, read_npz, write_durably, write_json
from jaxdp.privacy import Account, Ledger
from jaxdp.release import alone, bind, finished_result
from jaxdp.report import format_table, plot_curves, plot_images
from jaxdp.split.study import ONCE, PUBLISHED, Study, Variant
from jaxdp.split.tasks import Labelled, Task

BASELINES = {
    "Linear probing": "lp",
    "Fine-tuning": "ft",
    "LN-tune": "ln",
    "Split learning": "sl",
    "Offsite tuning": "ot",
}
SA, SA_ONCE = "Split Adaptation", "SA, noise once"
STOLEN = {
    "Quantised frontend": "quantised frontend",
    "Original frontend": "original frontend",
    "Quantised frontend, all of it tuned": "tuned frontend",
    "Auxiliary backend": "auxiliary backend",
}
SA_CLEAN, PRIVATE = "SA without noise", "SA, private"
_SPLIT = {SA: PUBLISHED, SA_ONCE: ONCE, SA_CLEAN: PUBLISHED._replace(laplace=0.0, alpha=0.0)}
# Table 4. The paper's names of the rows on tuning seem swapped; it has none of the last five.
ABLATIONS: Mapping[str, Variant] = {
    SA: PUBLISHED,
    "without Hilbert augmentation": PUBLISHED._replace(server="without Hilbert"),
    "backend tuned with F_0 only": PUBLISHED._replace(server="F_0 only"),
    "backend not tuned": PUBLISHED._replace(server="untuned"),
    "one noisy copy (no patch retrieval)": PUBLISHED._replace(copies=0.0, patches=False),
    "fresh noise on all copies, no retrieval": PUBLISHED._replace(patches=False),
    "noise once, then retrieval": ONCE,
    "no Laplace noise": PUBLISHED._replace(laplace=0.0),
    "no noise": PUBLISHED._replace(laplace=0.0, alpha=0.0),
    "no noise, no retrieval": PUBLISHED._replace(laplace=0.0, alpha=0.0, copies=0.0, patches=False),
}
# Tables 5 and 6: what is uploaded, and who attacks it.
UPLOADS: Mapping[str, Variant | None] = {
    "Split learning": None,
    SA: PUBLISHED,
    "SA without Laplace noise": PUBLISHED._replace(laplace=0.0),
    "SA without model noise": PUBLISHED._replace(alpha=0.0),
    SA_ONCE: ONCE,
}
_SCORES = {"ssim_gaussian11": "SSIM (11, Gaussian)", "ssim_uniform7": "SSIM (7, uniform)", "psnr": "PSNR"}
_SHOWN = 10
PUBLISHED_CLIENT = "client, as published"
ATTACKERS = ("noise-unaware", "noise-aware", "aggregating", "oracle")


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the experiment, or what is left of it, and returns its result.

    Every run is kept as soon as it is done; an interrupted experiment goes on with the next, and pays nothing twice.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          result.json, tables.md   Tables 1 to 6 in the paper's layout, ablations, accuracy at a real epsilon
          noise.png, attack_noise.png   accuracy, and reconstruction, against the noise (Fig. 4)
          private.png              accuracy against epsilon
          reconstructions.png      what attackers make of the uploads
          ledger.sqlite            what every client's images paid (`python -m launch.ledger`)
          tuning/, runs/           learning rates tried on the server's task; every run
          backbone.safetensors     the server's model, if it was trained here

    Raises:
      ValueError: the workdir belongs to an experiment with another config or is in use by another process, the config
        is inconsistent, or the client's images are not declared a public benchmark.
      FileNotFoundError: data or a checkpoint is not there; the message says how to get it.
    """
    root = pathlib.Path(workdir)
    if not config.public_benchmark:
        raise ValueError(
            "config.public_benchmark must be True: accuracies and reconstructions are functions of the client's images "
            "that no ledger pays for. A client with private images uses launch/split_client.py."
        )
    _check(config)
    with alone(root), contextlib.ExitStack() as bound:
        if (result := finished_result(config, root, _summary)) is not None:
            return result
        bound.enter_context(bind(config, root))
        with Ledger(root / "ledger.sqlite") as ledger:
            result = _results(_Runs(Study(config, root), root, ledger))
        (root / "tables.md").write_text(_tables(config, result))
        _figures(config, result, root)
        write_json(root / "result.json", result)
        print(f"\n{_summary(result)}\n\nIn {root}: tables.md, figures, ledger.sqlite.")
        return result


def _results(runs: "_Runs") -> dict[str, Any]:
    """All runs, or what is left of them."""
    study, config = runs.study, runs.study.config
    published = _client(runs.ledger, PUBLISHED_CLIENT, config.private.delta)
    table_1 = list(itertools.product(config.methods, config.shots))
    accuracy: dict[str, Any] = {}
    for name, shots in tqdm(table_1, desc="accuracy", unit="cell"):
        accuracy.setdefault(name, {})[str(shots)] = runs.method(name, shots)
    return {
        "classes": study.setting.client.num_classes,
        "learning_rates": runs.rates,
        "accuracy": accuracy,
        "stealing": {
            name: runs.method(name, config.ablation.shots)
            for name in tqdm(config.stolen, desc="stolen models", unit="model")
        },
        "ablation": _ablations(runs),
        "attacks": {
            # The ledger shows what it costs to be the client whose upload is attacked.
            name: runs.attack(
                f"attack, {name}", UPLOADS[name], config.attack.attackers, account=published if name == SA else None
            )
            for name in tqdm(config.attack.uploads, desc="attacks", unit="upload")
        },
        "attacks_private": {
            f"{epsilon:g}": runs.attack_private(epsilon)
            for epsilon in tqdm(config.attack.epsilons, desc="attacks on private uploads", unit="epsilon")
        },
        "noise": _noise(runs),
        "private": _private(runs),
        "costs": _kept(runs.root / "runs" / "costs.json", study.costs),
    }


def _check(config: Any) -> None:
    for name in ("seeds", "shots", "learning_rates"):
        if not len(config[name]):
            raise ValueError(f"config.{name} must have at least one entry, got none.")
    chosen = {
        "methods": (config.methods, (*BASELINES, SA, SA_ONCE), {"Linear probing", SA}),
        "stolen": (config.stolen, STOLEN, set()),
        "ablation.rows": (config.ablation.rows, ABLATIONS, {SA}),
        "attack.uploads": (config.attack.uploads, UPLOADS, {SA}),
        "attack.attackers": (config.attack.attackers, ATTACKERS, {"noise-aware", "aggregating"}),
    }
    for name, (given, known, needed) in chosen.items():
        if not needed <= set(given) <= set(known):
            raise ValueError(
                f"config.{name} must be some of {', '.join(known)}"
                f"{' with ' + ' and '.join(sorted(needed)) if needed else ''}, got {tuple(given)}."
            )
    if config.ablation.shots not in config.shots:
        raise ValueError(f"config.ablation.shots must be one of config.shots {tuple(config.shots)}.")


# --- Runs -------------------------------------------------------------------------------------------------------------


def _kept(path: pathlib.Path, make: Callable[[], Any]) -> Any:
    """What `path` holds, made first if it is not there yet."""
    if not path.exists():
        write_json(path, make())
    return read_json(path, kind=object)


class _Runs:
    """Runs by name, kept in a folder.

    Attributes:
      study: what is run.
      root: the workdir.
      ledger: what clients pay from.
      rates: learning rates by method.
    """

    def __init__(self, study: Study, root: pathlib.Path, ledger: Ledger):
        self.study, self.root, self.ledger = study, root, ledger
        self.rates = self._learning_rates()

    def method(self, name: str, shots: int) -> dict[str, Any]:
        """A method of Table 1 or 3 on the client's task: moments over the seeds."""
        task = self.study.setting.client
        make = lambda seed: _method(self.study, name, task, shots, seed, self.rates[name])  # noqa: E731
        return _mean(self._repeat(f"{name}, {shots} shots", make, self.study.config.seeds))

    def variant(self, label: str, variant: Variant, seeds: Sequence[int]) -> list[dict[str, float]]:
        """A variant of Split Adaptation with the shots of the ablations: one result per seed."""
        study, rate = self.study, self.rates[_tuned_as(variant)]
        task, shots = study.setting.client, study.config.ablation.shots

        def make(seed: int) -> dict[str, float]:
            return study.split_adaptation(variant, task, task.few(shots, seed), learning_rate=rate, seed=seed)

        return self._repeat(label, make, seeds)

    def attack(
        self, label: str, variant: Variant | None, names: Sequence[str], *, account: Account | None = None
    ) -> dict[str, Any]:
        """Reconstructions from one client's uploads: moments over images by attacker and score."""

        def reconstruct(few: Labelled, seed: int) -> Any:
            return self.study.reconstruct(few, variant, names=tuple(names), seed=seed, account=account)

        return self._attack(label, reconstruct)

    def attack_private(self, epsilon: float) -> dict[str, Any]:
        """The same from a private upload."""
        dimensions = self.study.config.private.dimensions[0]
        return self._attack(
            f"attack, private, epsilon {epsilon:g}",
            lambda few, seed: self.study.reconstruct_private(few, epsilon=epsilon, dimensions=dimensions, seed=seed),
        )

    def _attack(self, label: str, reconstruct: Callable[[Labelled, int], Any]) -> dict[str, Any]:
        study, path = self.study, self.root / "runs" / f"{label}.npz"

        def make() -> dict[str, Any]:
            seed = study.config.seeds[0]
            few = study.setting.client.few(study.config.ablation.shots, seed)
            most = min(study.config.attack.client_images, len(few.images))
            chosen = np.linspace(0, len(few.images) - 1, most).astype(int)
            few = Labelled(few.images[chosen], few.labels[chosen])
            found = reconstruct(few, seed)
            shown = np.linspace(0, len(few.images) - 1, _SHOWN).astype(int)
            path.parent.mkdir(parents=True, exist_ok=True)
            arrays = {"truth": few.images[shown], **{name: r.images[shown] for name, r in found.items()}}
            write_durably(path, lambda file: np.savez(file, **arrays))
            return {
                name: {score: estimate._asdict() for score, estimate in r.summary().items()}
                for name, r in found.items()
            }

        return _kept(self.root / "runs" / f"{label}.json", make)

    def private(self, shots: int, dimensions: int, epsilon: float) -> dict[str, Any]:
        """The private mode on the client's task: moments over the seeds, and what a client's ledger shows."""
        study, task = self.study, self.study.setting.client

        def make(seed: int) -> dict[str, float]:
            name = f"client {seed}, {shots} shots, {dimensions} dimensions, epsilon {epsilon:g}"
            return study.private(
                _client(self.ledger, name, study.config.private.delta),
                task,
                task.few(shots, seed),
                epsilon=epsilon,
                dimensions=dimensions,
                learning_rate=self.rates[PRIVATE],
                seed=seed,
            )

        label = f"private, {shots} shots, {dimensions} dimensions, epsilon {epsilon:g}"
        runs = self._repeat(label, make, study.config.seeds)
        spent = max(run["epsilon"] for run in runs)
        return {"shots": shots, "dimensions": dimensions, "epsilon": spent, **_mean(runs)}

    def _repeat(
        self, label: str, make: Callable[[int], dict[str, float]], seeds: Sequence[int]
    ) -> list[dict[str, float]]:
        folder = self.root / "runs"
        return [_kept(folder / f"{label}, seed {seed}.json", functools.partial(make, seed)) for seed in seeds]

    def _learning_rates(self) -> dict[str, float]:
        """For every method the rate that is best on the server's own task; the client's images have no say."""
        config, best = self.study.config, {}
        names = [*dict.fromkeys([*config.methods, SA, SA_ONCE, SA_CLEAN]), *config.stolen, PRIVATE]
        for name in tqdm(names, desc="learning rates", unit="method"):
            found = {}
            for rate in config.learning_rates:
                make = functools.partial(self._tuned, name, rate)
                found[rate] = _kept(self.root / "tuning" / f"{name}, {rate:g}.json", make)["accuracy"]
            best[name] = max(found, key=found.__getitem__)
        return best

    def _tuned(self, name: str, rate: float) -> dict[str, float]:
        study, task, options = self.study, self.study.setting.tuning, self.study.config.private
        accuracies = []
        for seed in study.config.tuning.seeds:
            if name != PRIVATE:
                run = _method(study, name, task, study.config.ablation.shots, seed, rate)
            else:
                # At the largest epsilon, where rates can be told apart.
                few = task.few(min(max(options.shots), task.most_shots), seed)
                chosen: Any = {"epsilon": max(options.epsilons), "dimensions": options.dimensions[0]}
                with Ledger.in_memory() as ledger:  # the images are the server's own
                    account = _client(ledger, "tuning", options.delta)
                    run = study.private(account, task, few, **chosen, learning_rate=rate, seed=seed)
            accuracies.append(run["accuracy"])
        return {"accuracy": float(np.mean(accuracies))}


def _client(ledger: Ledger, name: str, delta: float) -> Account:
    """A client of the experiment's: its images pay for what it uploads."""
    ledger.register(name, adjacency="replace_one", unit="image", delta=delta)
    return ledger.account(name)


def _method(study: Study, name: str, task: Task, shots: int, seed: int, rate: float) -> dict[str, float]:
    few = task.few(shots, seed)
    if name in _SPLIT:
        return study.split_adaptation(_SPLIT[name], task, few, learning_rate=rate, seed=seed)
    return study.baseline({**BASELINES, **STOLEN}[name], task, few, learning_rate=rate, seed=seed)


def _tuned_as(variant: Variant) -> str:
    """The method whose learning rate a variant has."""
    if variant.laplace == 0:
        return SA_CLEAN
    return SA_ONCE if variant.order == "once" else SA


def _ablations(runs: _Runs) -> dict[str, Any]:
    rows, accuracies = {}, {}
    for label in tqdm(runs.study.config.ablation.rows, desc="ablations", unit="row"):
        found = runs.variant(f"ablation, {label}", ABLATIONS[label], runs.study.config.seeds)
        accuracies[label] = np.array([run["accuracy"] for run in found])
        # On the same images: differences are far more certain than the means.
        rows[label] = {**_mean(found), "loss": _moments(accuracies[SA] - accuracies[label])}
    return rows


def _noise(runs: _Runs) -> dict[str, Any]:
    """Accuracy and reconstruction against the scale of the Laplace noise (Fig. 4)."""
    config, found = runs.study.config, {}
    seeds = config.seeds[: config.noise.seeds]
    for scale in tqdm(config.noise.scales, desc="noise", unit="scale"):
        published, once = (v._replace(laplace=scale / config.client.laplace) for v in (PUBLISHED, ONCE))
        found[f"{scale:g}"] = {
            SA: _mean(runs.variant(f"noise {scale:g}, published", published, seeds)),
            SA_ONCE: _mean(runs.variant(f"noise {scale:g}, once", once, seeds)),
            "attacks": runs.attack(f"noise {scale:g}, attacks", published, ("noise-aware", "aggregating")),
        }
    return found


def _private(runs: _Runs) -> list[dict[str, Any]]:
    options = runs.study.config.private
    cells = list(itertools.product(options.shots, options.dimensions, options.epsilons))
    return [runs.private(*cell) for cell in tqdm(cells, desc="private", unit="cell")]


def _mean(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {key: _moments([run[key] for run in runs]) for key in ("accuracy", "noisy") if key in runs[0]}


def _moments(values: Any) -> dict[str, Any]:
    """Mean and standard error, which one run does not have."""
    values = np.asarray(values, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return {"mean": float(values.mean()), "error": error}


# --- Tables and figures -----------------------------------------------------------------------------------------------


def _tables(config: Any, result: Mapping[str, Any]) -> str:
    shots, seeds = config.ablation.shots, len(config.seeds)
    accuracy = result["accuracy"]
    table_1 = [
        {
            "Method": name,
            **{f"{k} shots": _percent(row[k]["accuracy"]) for k in row},
            "rate": result["learning_rates"][name],
        }
        for name, row in accuracy.items()
    ]
    reference = {name: {"accuracy": accuracy[name][str(shots)]["accuracy"]} for name in ("Linear probing", SA)}
    table_3 = [
        {"Model": k, "accuracy": _percent(v["accuracy"])} for k, v in {**result["stealing"], **reference}.items()
    ]
    table_4 = [
        {
            "Variation": name,
            "accuracy": _percent(row["accuracy"]),
            "noisy test images": _percent(row["noisy"]),
            "SA minus this": _percent(row["loss"]) if name != SA else None,
        }
        for name, row in result["ablation"].items()
    ]
    scores = list(next(iter(result["attacks"][SA].values())))
    tables_5_6 = [
        {"Upload": upload, "Attacker": attacker, **{_SCORES[s]: _plain(by[s]) for s in scores}}
        for upload, attackers in [
            *result["attacks"].items(),
            *((f"SA, private, epsilon {epsilon}", by) for epsilon, by in result["attacks_private"].items()),
        ]
        for attacker, by in attackers.items()
    ]
    private = [
        {
            "images": f"{row['shots']} per class",
            "dimensions": row["dimensions"],
            "epsilon": row["epsilon"],
            "accuracy": _percent(row["accuracy"]),
        }
        for row in result["private"]
    ]
    noise = [
        {
            "scale": scale,
            SA: _percent(row[SA]["accuracy"]),
            SA_ONCE: _percent(row[SA_ONCE]["accuracy"]),
            **{f"PSNR, {name}": _plain(row["attacks"][name]["psnr"]) for name in ("noise-aware", "aggregating")},
        }
        for scale, row in result["noise"].items()
    ]
    unit = "standard deviations of public representations" if config.client.laplace_unit == "std" else "representation"
    parts = [
        ("Table 1: accuracy on the client's task, in percent", table_1),
        ("Table 2: what the client has to do, have and send", result["costs"]),
        (f"Table 3: what a client can make of the frontend, {shots} shots", table_3),
        (f"Table 4: ablations, {shots} shots", table_4),
        (f"Tables 5 and 6: reconstruction of {shots} images per class", tables_5_6),
        (f"Figure 4: noise, in units of: {unit}", noise),
        (
            f"A real epsilon, at delta = {config.private.delta:g}: one image replaced by another, with its label",
            private,
        ),
    ]
    head = (
        f"Accuracies are means over {seeds} draws of the client's images (Figure 4: {config.noise.seeds}) with their "
        "standard errors, reconstructions means over the images of one draw; learning rates were chosen on a task of "
        f"the server's{_at_the_edge(config, result['learning_rates'])}. Chance is {100 / result['classes']:.0f} %. "
        "SSIM and PSNR: a higher value is a better attack; LPIPS needs pretrained networks and is left out. Split "
        "Adaptation as published has no epsilon: inf (empirical only).\n"
    )
    tables = [f"## {title}\n\n{format_table(rows, style='markdown', digits=4)}\n" for title, rows in parts]
    return "\n".join([head, *tables])


def _at_the_edge(config: Any, rates: Mapping[str, float]) -> str:
    """Which methods might do better with a rate that was not tried."""
    ends = min(config.learning_rates), max(config.learning_rates)
    names = [name for name, rate in rates.items() if rate in ends]
    return f" (at an end of what was tried: {', '.join(names)})" if names else ""


def _figures(config: Any, result: Mapping[str, Any], root: pathlib.Path) -> None:
    classes, shots = result["classes"], config.ablation.shots
    scales = {float(scale): row for scale, row in result["noise"].items()}
    chance = {"chance": 1 / classes}
    plot_curves(
        root / "noise.png",
        {name: [(x, row[name]["accuracy"]["mean"]) for x, row in scales.items()] for name in (SA, SA_ONCE)},
        title="Accuracy against Laplace noise",
        subtitle=f"{shots} images of each of {classes} classes, {config.noise.seeds} draws of them",
        xlabel="scale b of the noise",
        ylabel="accuracy",
        references=chance,
    )
    floor = result["attacks"][SA]["mean image"]["psnr"]["mean"]
    plot_curves(
        root / "attack_noise.png",
        {
            name: [(x, row["attacks"][name]["psnr"]["mean"]) for x, row in scales.items()]
            for name in ("aggregating", "noise-aware")
        },
        title="Reconstruction against Laplace noise",
        subtitle=f"from the uploads of {shots * classes} images: the median of all copies, or one copy",
        xlabel="scale b of the noise",
        ylabel="PSNR in dB",
        percent=False,
        references={"mean image": floor},
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in result["private"]:
        name = f"{row['shots']} per class, {row['dimensions']} dimensions"
        curves.setdefault(name, []).append((row["epsilon"], row["accuracy"]["mean"]))
    plot_curves(
        root / "private.png",
        curves,
        title="Accuracy at a real ε",
        subtitle=f"replacing one image and its label, δ = {config.private.delta:g}, {len(config.seeds)} draws",
        xlabel="ε of features and label together",
        ylabel="accuracy",
        xscale="log",
        references=chance,
    )
    rows: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for upload, attackers in result["attacks"].items():
        shown = [name for name in ("noise-aware", "aggregating") if name in attackers]
        images = read_npz(root / "runs" / f"attack, {upload}.npz", ["truth", *shown])
        rows.setdefault("truth", images["truth"])
        for name in shown:
            label = f"{upload}: {name}"
            rows[label] = images[name]
            ssim = next(score for score in attackers[name] if score.startswith("ssim"))
            notes[label] = f"SSIM {attackers[name][ssim]['mean']:.2f}, PSNR {attackers[name]['psnr']['mean']:.1f}"
    plot_images(
        root / "reconstructions.png",
        rows,
        notes=notes,
        title="What the server can see",
        subtitle="Public images trained the decoders; scores are means over all images of the client",
    )


def _summary(result: Mapping[str, Any]) -> str:
    shots = list(next(iter(result["accuracy"].values())))
    rows = [
        {"method": name, **{f"{k} shots": _percent(row[k]["accuracy"]) for k in shots}}
        for name, row in result["accuracy"].items()
    ]
    seen = {name: result["attacks"][SA][name]["psnr"]["mean"] for name in ("mean image", "noise-aware", "aggregating")}
    psnr = ", ".join(f"{name} {value:.1f} dB" for name, value in seen.items())
    shown = min(result["private"], key=lambda row: (abs(np.log(row["epsilon"] / 8)), -row["shots"]))
    return (
        f"{format_table(rows)}\n\nReconstruction from Split Adaptation's uploads: {psnr}. Its epsilon: inf (empirical "
        f"only).\nPrivate mode: {_percent(shown['accuracy'])} at epsilon {shown['epsilon']:.3g} with {shown['shots']} "
        "images per class."
    )


def _percent(moments: Mapping[str, Any]) -> str:
    error = moments["error"]
    return f"{100 * moments['mean']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _plain(moments: Mapping[str, Any]) -> str:
    error = moments["error"]
    return f"{moments['mean']:.3g}" + ("" if error is None or np.isnan(error) else f" ± {error:.2g}")
