"""A ViT in NumPy float64, every product of which goes through a hook, and what quantisation does to
its operands.

Axes in front of those of a batch are allowed: perturbations [P, 1, ...] of an output give losses
[P, B]."""

import numpy as np
from scipy import special

MEAN, STD, HEADS = 0.3, 0.4, 2
PRODUCTS = ("scores", "mixture")


def plain(path, product, *operands):
    """Returns the output unchanged."""
    return product(*operands)


def tapped(taps):
    """Returns a hook that adds taps to outputs, by path."""

    def hook(path, product, *operands):
        y = product(*operands)
        return y + taps[path] if path in taps else y

    return hook


def layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def patches(images, side):
    """Images [B, S, S, C] as [B, T, side * side * C], row by row."""
    rows = range(0, images.shape[1], side)
    cut = [
        images[:, i : i + side, j : j + side].reshape(len(images), -1) for i in rows for j in rows
    ]
    return np.stack(cut, axis=1)


def front(params, images, cut, hook=plain):
    """Representations [B, T, D] at the cut."""
    kernel, bias = params["embed"]["kernel"], params["embed"]["bias"]
    pixels = (np.asarray(images, np.float64) - MEAN) / STD
    x = (
        hook("embed", np.matmul, patches(pixels, len(kernel)), kernel.reshape(-1, kernel.shape[-1]))
        + bias
    )
    x = np.concatenate(
        [np.broadcast_to(params["class_token"][0], (*x.shape[:-2], 1, x.shape[-1])), x], axis=-2
    )
    x = x + params["positions"]
    for k in range(cut):
        x = block(params[f"block_{k}"], f"block_{k}", x, hook)
    return hook("output", lambda y: y, x)


def back(params, x, cut, depth):
    """Logits of representations."""
    for k in range(cut, depth):
        x = block(params[f"block_{k}"], f"block_{k}", x)
    return (
        layer_norm(x[..., 0, :], params["norm"]) @ params["head"]["kernel"] + params["head"]["bias"]
    )


def block(params, name, x, hook=plain):
    def dense(site, x, p):
        return hook(f"{name}/{site}", np.matmul, x, p["kernel"]) + p["bias"]

    def heads(x):
        return x.reshape(*x.shape[:-1], HEADS, -1).swapaxes(-2, -3)

    p, y = params["attention"], layer_norm(x, params["norm_0"])
    query, key, value = (
        heads(dense(f"attention/{site}", y, p[site])) for site in ("query", "key", "value")
    )
    scores = hook(f"{name}/attention/scores", lambda q, k: q @ k.swapaxes(-1, -2), query, key)
    weights = special.softmax(scores / np.sqrt(query.shape[-1]), axis=-1)
    y = hook(f"{name}/attention/mixture", np.matmul, weights, value).swapaxes(-2, -3)
    x = x + dense("attention/out", y.reshape(*y.shape[:-2], -1), p["out"])
    y = dense("mlp_0", layer_norm(x, params["norm_1"]), params["mlp_0"])
    return x + dense("mlp_1", y * special.ndtr(y), params["mlp_1"])


def cross_entropy(logits, labels):
    """Returns the loss of every image, [..., B]."""
    log_p = special.log_softmax(logits, axis=-1)
    return -np.take_along_axis(
        log_p, np.broadcast_to(labels[:, None], (*log_p.shape[:-1], 1)), axis=-1
    )[..., 0]


def observe(params, images, cut):
    """Operands of every site, in the order of the computation, and the representations under
    "output"."""
    seen = {}

    def hook(path, product, *operands):
        seen[path] = operands
        return product(*operands)

    seen["output"] = (front(params, images, cut, hook),)
    return seen


# --- Quantisation -------------------------------------------------------------------------------


def rounded(x, scale, bits):
    return np.clip(np.rint(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def largest(path, x, bits):
    """Returns max|x| / (2^(k-1) - 1/2) of the tensor, of every head, or of every channel of the
    patch kernel."""
    if path.endswith(PRODUCTS):
        peak = abs(x).max((0, 2, 3))
    else:
        peak = abs(x).max(0) if path == "embed" and x.ndim == 2 else abs(x).max()
    return peak / (2 ** (bits - 1) - 0.5)


def spread(path, scale):
    """Shapes a scale to broadcast against an operand. Scales of heads fit [B, heads, T, d]."""
    return scale[:, None, None] if path.endswith(PRODUCTS) else scale


def quantising(scales, bits):
    """Returns a hook that rounds operands. `scales` has one per operand by path, or None for no
    rounding."""

    def hook(path, product, *operands):
        given = scales.get(path, (None, None))
        both = zip(operands, given, strict=True)
        return product(*(x if s is None else rounded(x, spread(path, s), bits) for x, s in both))

    return hook


def search(error, rounds, candidates):
    """Returns all results of the alternating search that ties within 1e-6 allow: pairs (first,
    second).

    Args:
      error: of two candidates, the first operand's and the second's; the first's is 1 before it is
          searched.
      rounds: turns; none is left out.
      candidates: in order.
    """

    def near(errors):
        return [c for c, e in zip(candidates, errors, strict=True) if e <= min(errors) * (1 + 1e-6)]

    found = set()

    def turn(first, count):
        for second in near([error(first, c) for c in candidates]):
            for new in near([error(c, second) for c in candidates]):
                if count == rounds:
                    found.add((new, second))
                else:
                    turn(new, count + 1)

    turn(1.0, 1)
    return found
