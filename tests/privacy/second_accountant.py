"""A second accountant for tests: privacy curves by inverting characteristic functions on a line.

It shares no code and no method with `jaxdp.privacy`: it has no grid of losses, no convolution and
no fast Fourier transform. For a composition with the moments M(z) = E exp(z L),

    delta(epsilon) = (1 / 2 pi) * integral over t of M(z) exp(-z epsilon) / (z (z + 1)), z = c + i
    t,

for every c > 0. c is the saddle point, so that nothing cancels and delta may be far below 1e-16.
"""

import math

import numpy as np
from scipy import optimize, stats

from jaxdp.privacy.events import (
    DiscreteLaplaceDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    composition,
)

_REMEMBERED = {}


def pairs(leaf, adjacency):
    """The output pair of a leaf as weighted losses: arrays (log masses under P, losses log P /
    Q)."""
    double = 2 if adjacency == "replace_one" else 1
    match leaf:
        case PureDpEvent(epsilon=loss):
            return _atoms([math.exp(loss), 1.0], [1.0, math.exp(loss)])
        case RandomizedResponseDpEvent(noise_parameter=p, num_buckets=k):
            true, other = 1 - p + p / k, p / k
            if adjacency == "zero_out":
                return _atoms([true, (k - 1) * other], [1 / k, (k - 1) / k])
            return _atoms(
                [true, other, (k - 2) * other + 1e-300], [other, true, (k - 2) * other + 1e-300]
            )
        case DiscreteLaplaceDpEvent(noise_parameter=a, sensitivity=shift):
            # All outputs below 0 have the loss of 0, and all above the shift have that of the
            # shift.
            outputs = np.arange(shift * double + 1)
            p, q = np.exp(-a * outputs[::-1]), np.exp(-a * outputs)
            ends = np.ones(len(outputs))
            ends[[0, -1]] = -1 / math.expm1(-a)
            return _atoms(p * ends, q * ends)
        case LaplaceDpEvent(noise_multiplier=b):
            return _laplace(double / b, 1.0)
        case PoissonSampledDpEvent(event=LaplaceDpEvent(noise_multiplier=b)):
            return _laplace(1 / b, leaf.sampling_probability)
        case GaussianDpEvent(noise_multiplier=sigma):
            return _gaussian(sigma / double, 1.0, "add_remove")
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=sigma)):
            return _gaussian(sigma, leaf.sampling_probability, adjacency)
        case TruncatedSubsampledGaussianDpEvent():
            n, most, q = leaf.dataset_size, leaf.truncated_batch_size, leaf.sampling_probability
            whole, *others = (
                stats.binom.pmf(np.arange(n), n - 1, q),
                stats.binom.pmf(np.arange(n + 1), n, q),
            )
            cut = whole[most:].sum()
            share = others[0][most + 1 :].sum() * most / cut / n
            kept = _gaussian(leaf.noise_multiplier, q, adjacency)
            swapped = _gaussian(leaf.noise_multiplier / 2, share, "replace_one")
            logs = kept[0] + math.log1p(-cut), swapped[0] + math.log(cut)
            return np.concatenate(logs), np.concatenate([kept[1], swapped[1]])
    raise ValueError(f"no pair for {leaf}")


def _atoms(p, q):
    p, q = np.asarray(p, float), np.asarray(q, float)
    return np.log(p / p.sum()), np.log(p / p.sum()) - np.log(q / q.sum())


def _laplace(loss, q):
    """Losses of Laplace noise by a Gauss-Legendre rule in tanh-graded panels, and its two atoms."""
    edges = loss * np.tanh(np.linspace(-12, 12, 37)) / np.tanh(12)
    nodes, weights = np.polynomial.legendre.leggauss(14)
    half = np.diff(edges)[:, None] / 2
    base = ((edges[1:] + edges[:-1])[:, None] / 2 + half * nodes).ravel()
    log_q = np.log((half * weights).ravel() / 4) - (loss + base) / 2  # the mass under Q
    base = np.concatenate([base, [loss, -loss]])
    log_q = np.concatenate([log_q, [-loss - math.log(2), -math.log(2)]])
    losses = np.logaddexp(math.log1p(-q), math.log(q) + base) if q < 1 else base
    return log_q + losses, losses


def _gaussian(sigma, q, adjacency):
    """Losses of a sampled Gaussian by the trapezoidal rule in the output, which errs exponentially
    little."""
    step = min(0.08, 0.3 * sigma)
    x = np.arange(-20 - 1 / sigma, 1 / sigma + 26, step) * sigma

    def log_density(mean):
        return -(((x - mean) / sigma) ** 2) / 2 + math.log(step / math.sqrt(2 * math.pi))

    def mixture(mean):
        if q == 1:
            return log_density(mean)
        return np.logaddexp(math.log1p(-q) + log_density(0), math.log(q) + log_density(mean))

    p = mixture(1)
    return p, p - (mixture(-1) if adjacency == "replace_one" else log_density(0))


class Curve:
    """The privacy curve of a composition in one direction."""

    def __init__(self, counts, adjacency, *, reverse):
        self._parts = []
        for leaf, count in counts.items():
            key = leaf, adjacency
            if key not in _REMEMBERED:
                _REMEMBERED[key] = pairs(leaf, adjacency)
            logs, losses = _REMEMBERED[key]
            kept = (logs > -700) | (logs - losses > -700)
            logs, losses = logs[kept], losses[kept]
            self._parts.append(
                (logs - losses, -losses, count) if reverse else (logs, losses, count)
            )

    def log_moment(self, z):
        """log E exp(z L), exact up to multiples of 2 pi i."""
        z = np.atleast_1d(np.asarray(z, complex))
        total = np.zeros(z.shape, complex)
        for logs, losses, count in self._parts:
            real = logs + z[0].real * losses
            kept = real > real.max() - 60
            weights, losses = np.exp(real[kept] - real.max()), losses[kept]
            moments = _waves(z.imag, losses, weights)
            total += count * (np.log(moments + 1e-300) + real.max())
        return total

    def saddle(self, epsilon):
        """The order of the least bound on delta."""

        def cost(log_order):
            order = math.exp(log_order)
            moment = float(self.log_moment(order)[0].real)
            return moment - order * epsilon - math.log(order * (1 + order))

        grid = np.arange(-8.0, 14.0, 1.0)
        start = min(grid, key=cost)
        found = optimize.minimize_scalar(cost, bounds=(start - 1, start + 1), method="bounded")
        return math.exp(found.x)

    def line(self, epsilon, rel=1e-5):
        """Values on the line through the saddle point, enough for delta near `epsilon` up to
        `rel`."""
        c = self.saddle(epsilon)
        step = 1e-3 * c
        slope = self.log_moment(np.array([c, c + 1j * step]))
        # The tilted standard deviation, from the curvature along the line.
        deviation = math.sqrt(max(2 * (slope[0].real - slope[1].real), 1e-12)) / step
        period = 40 * deviation + 60 / c
        dt = 2 * math.pi / period
        peak = float(slope[0].real)
        lines, sums = [], 0.0
        first, size = 0, 64
        while first < 400_000:
            t = dt * np.arange(first, first + size)
            z = c + 1j * t
            values = np.exp(self.log_moment(z) - peak) / (z * (z + 1))
            lines.append((z, values))
            sums += float((values * np.exp(-1j * t * epsilon)).real.sum())
            modulus = float(np.abs(values[-size // 2 :] * (z * (z + 1))[-size // 2 :]).max())
            # Moduli stay below their latest values for losses with a density. Atoms need the decay
            # of 1 / t^2.
            last = float(t[-1])
            if modulus / max(last, c) < rel * abs(sums) * dt:
                break
            first += size
            size = min(2 * size, 8192)
        z, values = (np.concatenate(part) for part in zip(*lines, strict=True))
        values[0] /= 2
        return c, dt, peak, z, values

    def epsilon(self, near, delta):
        """The exact epsilon at `delta`, close to `near`."""
        line = self.line(near)

        def error(epsilon):
            return self.log_delta(epsilon, line) - math.log(delta)

        low, high = near * 0.97 - 1e-9, near * 1.01 + 1e-9
        while error(low) < 0:
            if low < 0:
                return 0.0
            low = near - 2 * (near - low)
        while error(high) > 0:
            high = near + 2 * (high - near)
        return max(0.0, optimize.brentq(error, low, high, xtol=1e-9 * near + 1e-300))

    def log_delta(self, epsilon, line=None):
        """The logarithm of delta at an epsilon."""
        c, dt, peak, z, values = line or self.line(epsilon)
        total = float((values * np.exp(-1j * z.imag * epsilon)).real.sum())
        return math.log(max(total * dt / math.pi, 1e-300)) + peak - c * epsilon


def _waves(times, losses, weights):
    """Sums of weights times exp(i t loss) for one t, or for 2^k >= 64 t of equal distances.

    Runs of t share a first factor in exp(i (t_0 + t) loss), and a product of matrices has all sums.
    """
    if len(times) < 64:
        return np.exp(1j * np.outer(times, losses)) @ weights
    run = 2 ** (int(math.log2(len(times))) // 2)
    first = np.exp(1j * np.outer(times[::run], losses)) * weights
    later = np.exp(1j * np.outer(losses, times[:run] - times[0]))
    return (first @ later).ravel()


def exact_epsilon(event, delta, adjacency, near):
    """The exact epsilon of an event near a value, by the worse direction."""
    counts = composition(event)
    both = (Curve(counts, adjacency, reverse=reverse) for reverse in (False, True))
    return max(curve.epsilon(near, delta) for curve in both)


def lattice_epsilon(counts, adjacency, delta, unit):
    """The exact epsilon of finite releases whose losses are multiples of `unit`, by direct
    convolution.

    All terms are positive, so that every probability keeps its digits.
    """
    total = np.ones(1)
    for leaf, count in counts.items():
        logs, losses = pairs(leaf, adjacency)
        steps = np.rint(losses / unit).astype(int)
        assert np.abs(steps * unit - losses)[logs > -600].max() < 1e-9
        half = int(np.abs(steps[logs > -600]).max())
        masses = np.bincount(np.clip(steps, -half, half) + half, np.exp(logs), 2 * half + 1)
        total = np.convolve(total, _power(masses, count))
    places = np.arange(len(total)) - len(total) // 2

    def error(epsilon):
        rest = np.minimum(epsilon - places * unit, 0.0)
        return float((total * -np.expm1(rest)).sum()) - delta

    high = places[-1] * unit
    return 0.0 if error(0.0) <= 0 else optimize.brentq(error, 0.0, high, xtol=1e-13, rtol=1e-12)


def _power(masses, count):
    """The masses of a sum of `count` equal losses."""
    if count == 1:
        return masses
    half = _power(masses, count // 2)
    square = np.convolve(half, half)
    return np.convolve(square, masses) if count % 2 else square
