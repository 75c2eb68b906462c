"""The figures of Split Adaptation, drawn from the result of `launch.split`."""

import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxdp import split
from jaxdp.files import read_npz
from jaxdp.report import plot_curves, plot_images, plot_panels

from . import frame
from .split_attackers import SCORES, STRONGEST
from .split_runs import SA, SA_ONCE
from .study import Fields, Result, Row

Curves = dict[str, list[tuple[float, float]]]


def draw_tradeoff(result: Result, work: frame.Work) -> None:
    """Draws Figure 4."""
    rows = result["noise"].values()
    scores = result["attacks"][SA]["noise-aware"]
    ssim = "ssim_gaussian11" if "ssim_gaussian11" in scores else "ssim_uniform7"
    panels = {}
    for score, name in (("psnr", "PSNR in dB"), (ssim, SCORES[ssim])):
        curves: Curves = {}
        for attacker in reversed(STRONGEST):
            x = [row["attacks"][attacker][score]["mean"] for row in rows]
            y = [row[SA]["accuracy"]["mean"] for row in rows]
            curves[attacker] = list(zip(x, y, strict=True))
        panels[name] = (name, curves)
    plot_panels(
        work.root / "tradeoff.png",
        panels,
        title="Accuracy against reconstruction",
        subtitle=f"Laplace noise of {len(rows)} scales, {_images(result, work)}",
        ylabel="accuracy",
        percent=True,
    )


def _images(result: Result, work: frame.Work) -> str:
    """Returns "5 images of each of 10 classes", what a client has."""
    return f"{work.config.ablation.shots} images of each of {result['classes']} classes"


def draw_noise(result: Result, work: frame.Work) -> None:
    """Draws accuracy and reconstruction against the scale of the noise."""
    accuracies: Curves = {}
    errors: Curves = {}
    for text, row in result["noise"].items():
        scale = float(text)
        for method in (SA, SA_ONCE):
            accuracy = row[method]["accuracy"]
            accuracies.setdefault(method, []).append((scale, accuracy["mean"]))
        for attacker in reversed(STRONGEST):
            psnr = row["attacks"][attacker]["psnr"]
            errors.setdefault(attacker, []).append((scale, psnr["mean"]))
    classes = result["classes"]
    draws = work.config.noise.seeds
    plot_curves(
        work.root / "noise.png",
        accuracies,
        title="Accuracy against Laplace noise",
        subtitle=f"{_images(result, work)}, {draws} draws of them",
        xlabel="scale b of the noise",
        ylabel="accuracy",
        references={"chance": 1 / classes},
    )
    count = work.config.ablation.shots * classes
    mean_image = result["attacks"][SA]["mean image"]["psnr"]
    plot_curves(
        work.root / "attack_noise.png",
        errors,
        title="Reconstruction against Laplace noise",
        subtitle=f"from the uploads of {count} images: the median of all copies, or one copy",
        xlabel="scale b of the noise",
        ylabel="PSNR in dB",
        percent=False,
        references={"mean image": mean_image["mean"]},
    )


def draw_private(result: Result, work: frame.Work) -> None:
    """Draws the accuracy of the private mode over epsilon."""
    curves: Curves = {}
    for row in result["private"]:
        name = f"{row['shots']} per class, {row['dimensions']} dimensions"
        points = curves.setdefault(name, [])
        points.append((row["epsilon"], row["accuracy"]["mean"]))
    delta = f"{work.config.private.delta:g}"
    draws = len(work.config.seeds)
    chance = 1 / result["classes"]
    plot_curves(
        work.root / "private.png",
        curves,
        title="Accuracy at a real ε",
        subtitle=f"replacing one image and its label, δ = {delta}, {draws} draws",
        xlabel="ε of features and label together",
        ylabel="accuracy",
        xscale="log",
        references={"chance": chance},
    )


def draw_reconstructions(result: Result, work: frame.Work) -> None:
    """Draws what the strongest attackers see of every upload, and all attackers of one."""
    images: Fields = {}
    notes = {}
    for upload, scores in result["attacks"].items():
        strongest = [name for name in STRONGEST if name in scores]
        truth, by_attacker = _seen(work, upload, strongest)
        images.setdefault("truth", truth)
        for attacker, reconstructed in by_attacker.items():
            name = f"{upload}: {attacker}"
            images[name] = reconstructed
            notes[name] = _note(scores[attacker])
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
    notes = {attacker: _note(scores[attacker]) for attacker in by_attacker}
    subtitle = '"aggregating" reads the median of all copies, the others one copy. Scores are means'
    plot_images(
        work.root / "attackers.png",
        {"original": truth, **by_attacker},
        notes=notes,
        title="What each attacker sees of Split Adaptation",
        subtitle=subtitle,
    )


def _seen(
    work: frame.Work, upload: str, attackers: Iterable[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns a client's images, and their reconstructions from an upload by attacker."""
    path = work.folder(("attacks", upload, 1.0)) / "images.npz"
    arrays = read_npz(path, ["truth", *attackers])
    by_attacker = {name: arrays[name] for name in attackers}
    return arrays["truth"], by_attacker


def _note(scores: Row) -> str:
    means = {name: score["mean"] for name, score in scores.items()}
    ssim = next(name for name in means if name.startswith("ssim"))
    note = f"SSIM {means[ssim]:.2f}, PSNR {means['psnr']:.1f}"
    if "lpips" in means:
        note += f", LPIPS {means['lpips']:.2f}"
    return note


def draw_hilbert(images: Any, path: pathlib.Path) -> None:
    """Draws what the Hilbert augmentation makes of images, float [n, S, S, C] in [0, 1]."""
    pixels = jax.device_put(images)
    augmented = {
        "original": pixels,
        "Hilbert augmentation": split.hilbert_augment(pixels),
        "Eq. 5 read literally": split.hilbert_augment(pixels, mode="eq5"),
    }
    plot_images(
        path,
        augmented,
        title="Hilbert augmentation",
        subtitle="The first form is that of the paper's Fig. 3",
    )
