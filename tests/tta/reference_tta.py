"""Test-time adaptation as published and in its private form, in NumPy float64: what tests compare
`jaxdp.tta` with.

An independent reading of the algorithms, one branch and one loop after the other as in the public
implementations of Tent, EATA, SAR, DeYO and COME, with gradients written by hand. Mended as in
jaxdp: SAR's reset clears its average and the momentum, COME's exponentials are shifted and its K is
the number of classes.

The model is x -> embed -> LayerNorm -> tanh -> LayerNorm -> head. Its adapted parameters are one
array theta [4, D]: scale and bias of the first LayerNorm, scale and bias of the second."""

import dataclasses
from collections.abc import Callable

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]
EPSILON = 1e-6  # of LayerNorm


@dataclasses.dataclass
class Model:
    """What is frozen: embed [pixels, D] and head [D, C]."""

    embed: np.ndarray
    head: np.ndarray

    def logits(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Logits [B, C] of images [B, ...]."""
        return self._forward(theta, x)[0]

    def gradients(self, theta: np.ndarray, x: np.ndarray, cotangents: np.ndarray) -> np.ndarray:
        """Gradients [B, 4, D] of sum_c cotangents[i, c] logits[i, c] for each image i."""
        _, n0, a, n1, r1 = self._forward(theta, x)
        d1 = cotangents @ self.head.T
        dn = d1 * theta[2]
        da = r1 * (dn - dn.mean(1, keepdims=True) - n1 * (dn * n1).mean(1, keepdims=True))
        d0 = da * (1 - a**2)
        return np.stack([d0 * n0, d0, d1 * n1, d1], axis=1)

    def _forward(self, theta: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, ...]:
        n0, _ = _normalise(x.reshape(len(x), len(self.embed)).astype(np.float64) @ self.embed)
        a = np.tanh(theta[0] * n0 + theta[1])
        n1, r1 = _normalise(a)
        return (theta[2] * n1 + theta[3]) @ self.head, n0, a, n1, r1


def _normalise(h: np.ndarray) -> Pair:
    inverse = 1 / np.sqrt(h.var(1, keepdims=True) + EPSILON)
    return (h - h.mean(1, keepdims=True)) * inverse, inverse


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def entropy(z: np.ndarray) -> Pair:
    """Returns H = -sum p log p of each row, and dH/dz = -p (log p + H)."""
    p = softmax(z)
    h = -(p * np.log(p)).sum(-1)
    return h, -p * (np.log(p) + h[:, None])


def opinion(z: np.ndarray) -> Pair:
    """Returns COME's loss of each row and its gradient: the gradient in l without its component
    along z."""
    num_classes = z.shape[1]
    e = np.exp(z)
    s = e.sum(1, keepdims=True) + num_classes
    b, u = e / s, num_classes / s
    value = -((b + 1e-7) * np.log(b + 1e-7)).sum(1) - ((u + 1e-7) * np.log(u + 1e-7))[:, 0]
    db, du = -(np.log(b + 1e-7) + 1), -(np.log(u + 1e-7) + 1)
    dl = b * (db - (db * b).sum(1, keepdims=True) - du * u)
    return value, dl - z * (z * dl).sum(1, keepdims=True) / (z * z).sum(1, keepdims=True)


def plpd(z: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Returns the fall of the predicted class's probability from logits z to the logits of the
    second view."""
    p, after = softmax(z), softmax(view)
    rows, y = np.arange(len(z)), p.argmax(1)
    return p[rows, y] - after[rows, y]


class Adaptation:
    """Parameters and SGD with momentum: v <- momentum v + g, theta <- theta - lr v.

    Attributes:
        closest: smallest distance of any quantity from the threshold it was compared with: a
            float32 implementation selects alike if it is far above rounding.
        selected: how many images took part in each step.
        clips: for each gradient that was followed, whether it was clipped.
    """

    def __init__(
        self,
        model: Model,
        theta: np.ndarray,
        *,
        rows: tuple[int, ...] = (0, 1, 2, 3),
        uncertainty: Callable[[np.ndarray], Pair] = entropy,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        clip_norm: float = np.inf,
    ):
        self.clip_norm = clip_norm
        self.model, self.theta, self.source = model, theta.copy(), theta.copy()
        self.adapts = np.isin(np.arange(4), rows)[:, None]
        self.uncertainty, self.learning_rate, self.momentum = uncertainty, learning_rate, momentum
        self.velocity = np.zeros_like(theta)
        self.closest, self.selected, self.clips = np.inf, [], []

    def gradients(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns each image's gradient of its uncertainty, [B, 4, D], zero where nothing
        adapts."""
        _, slope = self.uncertainty(self.model.logits(theta, x))
        return self.model.gradients(theta, x, slope) * self.adapts

    def clipped_mean(self, gradients: np.ndarray) -> np.ndarray:
        """Returns the mean over images of their gradients [B, 4, D], each clipped."""
        total = np.zeros_like(self.theta)
        for one in gradients:
            norm = np.linalg.norm(one)
            self.clips.append(norm > self.clip_norm)
            total += one * min(1.0, self.clip_norm / max(norm, 1e-30))
        return total / len(gradients)

    def descend(self, gradient: np.ndarray) -> None:
        self.velocity = self.momentum * self.velocity + gradient
        self.theta = self.theta - self.learning_rate * self.velocity

    def below(self, values: np.ndarray, threshold: float) -> np.ndarray:
        if len(values):
            self.closest = min(self.closest, np.abs(values - threshold).min())
        return np.flatnonzero(values < threshold)


class Tent(Adaptation):
    def step(self, x: np.ndarray) -> np.ndarray:
        logits = self.model.logits(self.theta, x)
        self.descend(self.clipped_mean(self.gradients(self.theta, x)))
        return logits


class EATA(Adaptation):
    """Attributes: mean, the moving average of predictions or None before the first."""

    def __init__(self, *args, threshold, diversity, fisher=None, strength=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.threshold, self.diversity, self.fisher, self.strength = (
            threshold,
            diversity,
            fisher,
            strength,
        )
        self.mean = None

    def step(self, x: np.ndarray) -> np.ndarray:
        logits = self.model.logits(self.theta, x)
        value, _ = self.uncertainty(logits)
        p = softmax(logits)
        kept = self.below(value, self.threshold)
        if self.mean is not None:
            cosine = (
                p[kept] @ self.mean / (np.linalg.norm(p[kept], axis=1) * np.linalg.norm(self.mean))
            )
            kept = kept[self.below(np.abs(cosine), self.diversity)]
        self.selected.append(len(kept))
        if len(kept) == 0:
            return logits
        new = p[kept].mean(0)
        self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new
        weights = np.exp(self.threshold - value[kept])
        gradient = self.clipped_mean(weights[:, None, None] * self.gradients(self.theta, x[kept]))
        if self.fisher is not None:
            gradient = gradient + self.strength * 2 * self.fisher * (self.theta - self.source)
        self.descend(gradient)
        return logits


class SAR(Adaptation):
    """Attributes: average, the moving average of the loss or None. resets, the steps (from 0) that
    end in a reset."""

    def __init__(self, *args, threshold, rho, reset_below, **kwargs):
        super().__init__(*args, **kwargs)
        self.threshold, self.rho, self.reset_below = threshold, rho, reset_below
        self.average, self.resets = None, []

    def step(self, x: np.ndarray) -> np.ndarray:
        logits = self.model.logits(self.theta, x)
        first = self.below(self.uncertainty(logits)[0], self.threshold)
        ascent = self.gradients(self.theta, x[first]).sum(0) / max(len(first), 1)
        ahead = self.theta + self.rho * ascent / (np.linalg.norm(ascent) + 1e-12)
        value, _ = self.uncertainty(self.model.logits(ahead, x[first]))
        second = self.below(value, self.threshold)
        gradient = np.zeros_like(self.theta)
        if len(second):
            loss = value[second].mean()
            self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
            gradient = self.clipped_mean(self.gradients(ahead, x[first][second]))
        self.selected.append(len(second))
        self.descend(gradient)  # also with a zero gradient: momentum goes on
        if self.average is not None:
            self.closest = min(self.closest, abs(self.average - self.reset_below))
            if self.average < self.reset_below:
                self.resets.append(len(self.selected) - 1)
                self.theta, self.velocity, self.average = (
                    self.source.copy(),
                    np.zeros_like(self.theta),
                    None,
                )
        return logits


class DeYO(Adaptation):
    def __init__(self, *args, entropy_threshold, threshold, plpd_margin, **kwargs):
        super().__init__(*args, **kwargs)
        self.entropy_threshold, self.threshold, self.plpd_margin = (
            entropy_threshold,
            threshold,
            plpd_margin,
        )

    def step(self, x: np.ndarray, views: np.ndarray) -> np.ndarray:
        logits = self.model.logits(self.theta, x)
        value, _ = self.uncertainty(logits)
        first = self.below(value, self.entropy_threshold)
        self.selected.append(0)
        if len(first) == 0:
            return logits
        drop = plpd(logits[first], self.model.logits(self.theta, views[first]))
        second = self.below(-drop, -self.plpd_margin)
        if len(second) == 0:
            return logits
        kept, drop = first[second], drop[second]
        self.selected[-1] = len(kept)
        weights = np.exp(self.threshold - value[kept]) + np.exp(drop)
        self.descend(
            self.clipped_mean(weights[:, None, None] * self.gradients(self.theta, x[kept]))
        )
        return logits


class Private(Adaptation):
    """The private form: weights and kept filters inside the clip, then noise, then pull and
    momentum.

    Attributes:
        previous: G_{t-1}.
    """

    def __init__(
        self,
        *args,
        clip_norm,
        weight=None,
        passes=None,
        rho=0.0,
        fisher=None,
        strength=0.0,
        kept=1.0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.clip_norm, self.weight, self.passes, self.rho = clip_norm, weight, passes, rho
        self.fisher, self.strength, self.kept = fisher, strength, kept
        self.previous = np.zeros_like(self.theta)

    def clipped_sum(
        self, x: np.ndarray, views: np.ndarray | None = None, mask: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns sum_i clip(g_i), image by image."""
        ahead = self.theta + self.rho * self.previous / (np.linalg.norm(self.previous) + 1e-12)
        total = np.zeros_like(self.theta)
        for i in range(len(x)):
            if mask is not None and not mask[i]:
                continue
            one = x[i : i + 1]
            logits = self.model.logits(ahead, one)
            value, _ = self.uncertainty(logits)
            drop = (
                np.zeros(1)
                if views is None
                else plpd(logits, self.model.logits(ahead, views[i : i + 1]))
            )
            gradient = self.gradients(ahead, one)[0]
            if self.weight is not None:
                gradient = gradient * self.weight(value, drop)[0]
            if self.passes is not None and not self.passes(value, drop)[0]:
                continue
            norm = np.linalg.norm(gradient)
            total += gradient * min(1.0, self.clip_norm / norm) if norm > 0 else 0
        return total

    def step(self, x, views=None, mask=None, noise=0.0) -> np.ndarray:
        """Makes one step with `noise` [4, D], sigma C Z, added to the sum."""
        logits = self.model.logits(self.theta, x)
        gradient = (self.clipped_sum(x, views, mask) + noise * self.adapts) / (self.kept * len(x))
        self.previous = gradient
        if self.fisher is not None:
            gradient = gradient + self.strength * 2 * self.fisher * (self.theta - self.source)
        self.descend(gradient)
        return logits


def fisher(model: Model, theta: np.ndarray, batches: list[np.ndarray], kind: str) -> np.ndarray:
    """Returns squared gradients of the cross entropy to predicted labels, of batch means ("batch")
    or images."""
    total = np.zeros_like(theta)
    for x in batches:
        p = softmax(model.logits(theta, x))
        gradients = model.gradients(theta, x, p - np.eye(p.shape[1])[p.argmax(1)])
        total += gradients.mean(0) ** 2 if kind == "batch" else (gradients**2).mean(0)
    return total / len(batches)
