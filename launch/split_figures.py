"""The figures of Split Adaptation, drawn from the result of `launch.split`."""

import pathlib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp import split
from jaxdp.files import read_npz
from jaxdp.report import plot_curves, plot_images, plot_panels

from . import frame
from .split_attackers import SCORES, STRONGEST
from .split_runs import SA, SA_ONCE
from .study import Fields, Result, Row

Points = list[tuple[float, float]]  # of a curve


def draw_tradeoff(result: Result, work: frame.Work) -> None:
    """Draws Figure 4."""
    rows, classes = result["noise"].values(), result["classes"]
    known = result["attacks"][SA]["noise-aware"]
    ssim = "ssim_gaussian11" if "ssim_gaussian11" in known else "ssim_uniform7"
    panels = {}
    for score, name in (("psnr", "PSNR in dB"), (ssim, SCORES[ssim])):
        curves = dict[str, Points]()
        for attacker in reversed(STRONGEST):
            curves[attacker] = [
                (row["attacks"][attacker][score]["mean"], row[SA]["accuracy"]["mean"])
                for row in rows
            ]
        panels[name] = (name, curves)
    shots = work.config.ablation.shots
    plot_panels(
        work.root / "tradeoff.png",
        panels,
        title="Accuracy against reconstruction",
        subtitle=f"Laplace noise of {len(rows)} scales, {shots} images of each of {classes} "
        "classes",
        ylabel="accuracy",
        percent=True,
    )


def draw_noise(result: Result, work: frame.Work) -> None:
    """Draws accuracy and reconstruction against the scale of the noise."""
    config, classes, shots = work.config, result["classes"], work.config.ablation.shots
    scales = {float(scale): row for scale, row in result["noise"].items()}
    plot_curves(
        work.root / "noise.png",
        {
            name: [(x, row[name]["accuracy"]["mean"]) for x, row in scales.items()]
            for name in (SA, SA_ONCE)
        },
        title="Accuracy against Laplace noise",
        subtitle=f"{shots} images of each of {classes} classes, {config.noise.seeds} draws of them",
        xlabel="scale b of the noise",
        ylabel="accuracy",
        references={"chance": 1 / classes},
    )
    plot_curves(
        work.root / "attack_noise.png",
        {
            name: [(x, row["attacks"][name]["psnr"]["mean"]) for x, row in scales.items()]
            for name in reversed(STRONGEST)
        },
        title="Reconstruction against Laplace noise",
        subtitle=f"from the uploads of {shots * classes} images: the median of all copies, or one "
        "copy",
        xlabel="scale b of the noise",
        ylabel="PSNR in dB",
        percent=False,
        references={"mean image": result["attacks"][SA]["mean image"]["psnr"]["mean"]},
    )


def draw_private(result: Result, work: frame.Work) -> None:
    """Draws the accuracy of the private mode over epsilon."""
    config = work.config
    curves = dict[str, Points]()
    for row in result["private"]:
        name = f"{row['shots']} per class, {row['dimensions']} dimensions"
        curves.setdefault(name, []).append((row["epsilon"], row["accuracy"]["mean"]))
    plot_curves(
        work.root / "private.png",
        curves,
        title="Accuracy at a real ε",
        subtitle=f"replacing one image and its label, δ = {config.private.delta:g}, "
        f"{len(config.seeds)} draws",
        xlabel="ε of features and label together",
        ylabel="accuracy",
        xscale="log",
        references={"chance": 1 / result["classes"]},
    )


def draw_reconstructions(result: Result, work: frame.Work) -> None:
    """Draws what the strongest attackers see of every upload, and all attackers of one."""
    images, notes = Fields(), dict[str, str]()
    for upload, scores in result["attacks"].items():
        truth, by_attacker = _seen(work, upload, [name for name in STRONGEST if name in scores])
        images.setdefault("truth", truth)
        for name, reconstructed in by_attacker.items():
            images[f"{upload}: {name}"] = reconstructed
            notes[f"{upload}: {name}"] = _note(scores[name])
    subtitle = "Public images trained the decoders. Scores are means over all images of the client"
    plot_images(
        work.root / "reconstructions.png",
        images,
        notes=notes,
        title="What the server can see",
        subtitle=subtitle,
    )
    scores = result["attacks"][SA]
    truth, by_attacker = _seen(work, SA, scores)
    plot_images(
        work.root / "attackers.png",
        {"original": truth, **by_attacker},
        notes={name: _note(scores[name]) for name in by_attacker},
        title="What each attacker sees of Split Adaptation",
        subtitle='"aggregating" reads the median of all copies, the others one copy. Scores are '
        "means",
    )


def _seen(
    work: frame.Work, upload: str, attackers: Iterable[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns a client's images, and their reconstructions from an upload by attacker."""
    path = work.folder(("attacks", upload, 1.0)) / "images.npz"
    arrays = read_npz(path, ["truth", *attackers])
    return arrays["truth"], {name: arrays[name] for name in attackers}


def _note(scores: Row) -> str:
    ssim = next(score for score in scores if score.startswith("ssim"))
    note = f"SSIM {scores[ssim]['mean']:.2f}, PSNR {scores['psnr']['mean']:.1f}"
    if "lpips" in scores:
        note += f", LPIPS {scores['lpips']['mean']:.2f}"
    return note


def draw_hilbert(images: Any, path: pathlib.Path) -> None:
    """Draws what the Hilbert augmentation makes of images, float [n, S, S, C] in [0, 1]."""
    pixels = jnp.asarray(images)
    plot_images(
        path,
        {
            "original": pixels,
            "Hilbert augmentation": split.hilbert_augment(pixels),
            "Eq. 5 read literally": split.hilbert_augment(pixels, mode="eq5"),
        },
        title="Hilbert augmentation",
        subtitle="The first form is that of the paper's Fig. 3",
    )
