"""Abstract Gradient Training: bounds that contain what retraining on changed data gives, and
certificates.

Comparisons of bounds have no tolerance unless two implementations of the same equations are
compared."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.prediction import (
    Training,
    agt,
    certify,
    partition_by_hash,
    plan,
    sums,
    train_with_bounds,
    training_programs,
)
from tests.compilations import compilations
from tests.prediction import reference_agt as published
from tests.prediction import retraining

# --- problems -----------------------------------------------------------------------------------


def logits(params, x):
    """Computes a multilayer perceptron of params weight, bias, weight, ..."""
    for weight, bias in zip(params[:-2:2], params[1:-2:2], strict=True):
        x = jax.nn.relu(x @ weight + bias)
    return x @ params[-2] + params[-1]


def bce(params, example):
    return jaxdp.losses.sigmoid_cross_entropy(logits(params, example[0]), example[1])


def ce(params, example):
    return jaxdp.losses.softmax_cross_entropy(logits(params, example[0]), example[1])


def mse(params, example):
    return jaxdp.losses.squared_error(logits(params, example[0]), example[1])


LOSSES = {"bce": bce, "ce": ce, "mse": mse}


def network(rng, sizes, dtype=np.float32):
    leaves = []
    for a, b in itertools.pairwise(sizes):
        leaves += [rng.normal(size=(a, b)) / np.sqrt(a), 0.1 * rng.normal(size=b)]
    return [leaf.astype(dtype) for leaf in leaves]


def records(rng, n, sizes, loss, dtype=np.float32):
    """Features [n, in], and labels that a linear model can learn in part."""
    x = rng.normal(size=(n, sizes[0]))
    if loss == "ce":
        y = np.argmax(x[:, : sizes[-1]] + 0.5 * rng.normal(size=(n, sizes[-1])), axis=1).astype(
            np.int32
        )
    elif loss == "bce":
        y = (x[:, 0] + 0.5 * rng.normal(size=n) > 0).astype(dtype)
    else:
        y = (x[:, : sizes[-1]] + 0.5 * rng.normal(size=(n, sizes[-1]))).astype(dtype)
    return x.astype(dtype), y


def shuffled(rng, n, batch_size, epochs):
    """Returns [steps, batch]: a permutation of the records for each epoch, an incomplete last batch
    filled with -1."""
    steps = -(-n // batch_size)
    rows = np.full((epochs, steps * batch_size), -1)
    for epoch in rows:
        epoch[:n] = rng.permutation(n)
    return rows.reshape(epochs * steps, batch_size)


def by_contents(x, y, batches, epochs):
    """Returns [steps, batch], as `shuffled`: the rows of "add_remove", where a hash of a record
    gives its batch."""
    part = (
        np.zeros(len(x), int)
        if batches == 1
        else partition_by_hash((x, y), batches, salt=b"jaxdp batches")
    )
    rows = np.full((batches, len(x)), -1)
    for number, batch in enumerate(rows):
        members = np.flatnonzero(part == number)
        batch[: len(members)] = members
    return np.tile(rows, (epochs, 1))


def leaves64(*trees):
    return [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in trees]


def outside(params, lower, upper):
    """Returns the number of coordinates of `params` outside of [lower, upper]."""
    return sum(
        int(((p < a) | (p > b)).sum())
        for p, a, b in zip(*leaves64(params, lower, upper), strict=True)
    )


def row(tree, i):
    return [np.asarray(leaf)[i] for leaf in jax.tree.leaves(tree)]


def assert_nested(bounds):
    """Checks that nominal parameters lie inside row 0, and each row inside the next, exactly."""
    assert outside(bounds.params, row(bounds.lower, 0), row(bounds.upper, 0)) == 0
    for low, high in zip(*leaves64(bounds.lower, bounds.upper), strict=True):
        assert len(low) == len(high) == len(bounds.ks)
        assert (low[1:] <= low[:-1]).all() and (high[1:] >= high[:-1]).all()


def within(inner, outer):
    """Returns whether each box of `inner` at distance k - 1 lies inside the box of `outer` at k,
    exactly."""
    ends = leaves64(inner.lower, outer.lower, outer.upper, inner.upper)
    return all(
        (c[1:] <= a[:-1]).all() and (b[:-1] <= d[1:]).all()
        for a, c, d, b in zip(*ends, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of a training with bounds on a small random problem."""

    loss: str
    sizes: tuple[int, ...]
    threat: str
    batch_size: int
    epochs: int
    clip: float
    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    dampening: float = 0.0
    l1: float = 0.0
    n: int = 24
    ks: int = 4

    def problem(self, seed=0):
        """Returns parameters, features, labels, order."""
        rng = np.random.default_rng(seed)
        params = network(rng, self.sizes)
        x, y = records(rng, self.n, self.sizes, self.loss)
        if self.threat == "add_remove":
            return params, x, y, by_contents(x, y, self.batches, self.epochs)
        return params, x, y, shuffled(rng, self.n, self.batch_size, self.epochs)

    @property
    def batches(self):
        return -(-self.n // self.batch_size)

    @property
    def optimizer(self):
        names = ["clip", "learning_rate", "momentum", "nesterov", "weight_decay", "lr_decay"]
        names += ["dampening"] + ["l1"] * (self.l1 > 0)  # the published algorithm has no l1
        return {name: getattr(self, name) for name in names}

    def bounds(self, params, x, y, order, **options):
        if self.threat == "add_remove":  # which assigns records to batches as `order` does
            order, options = None, {"batches": self.batches} | options
        result = train_with_bounds(
            LOSSES[self.loss],
            params,
            (x, y),
            order=order,
            ks=self.ks,
            batch_size=self.batch_size,
            epochs=self.epochs,
            threat=self.threat,
            **self.optimizer,
            **options,
        )
        assert_nested(result)
        return result

    def retrain(self, params, x, y, batches, **options):
        divisor = None if self.threat == "replace_per_batch" else self.batch_size
        return retraining.train(
            params, x, y, batches, loss=self.loss, divisor=divisor, **self.optimizer, **options
        )


# Layers, losses and what later epochs start from do not depend on the threat, nor the other way
# round. So one case has a hidden layer, and one threat several batches in several epochs.
CASES = {
    "full": Case(
        "ce", (3, 5, 3), "add_remove", 24, 3, 0.2, 0.5, momentum=0.5, dampening=0.3, l1=0.02
    ),
    "batches": Case("bce", (3, 1), "add_remove", 8, 2, 0.2, 0.3, momentum=0.5, nesterov=True),
    "replace, batches": Case(
        "bce", (3, 1), "replace_one", 8, 1, 0.2, 0.3, weight_decay=0.1, l1=0.02
    ),
    "reference": Case(
        "mse",
        (3, 1),
        "replace_per_batch",
        8,
        2,
        0.4,
        0.2,
        weight_decay=0.2,
        momentum=0.5,
        lr_decay=0.5,
    ),
}

# Variants of it with other records, rates and numbers of epochs share its programs.
SMALL = Case("bce", (3, 1), "add_remove", 8, 2, 0.2, 0.3, ks=2)

SEEDS = range(3)


@functools.cache
def solved(name, seed):
    """Returns the problem of a case and its bounds. Seeds share a compiled program."""
    problem = CASES[name].problem(seed)
    return problem, CASES[name].bounds(*problem)


# --- parity -------------------------------------------------------------------------------------

PARITY = {
    "one layer": (
        Case(
            "mse",
            (4, 2),
            "replace_per_batch",
            8,
            2,
            0.1,
            0.4,
            momentum=0.5,
            dampening=0.3,
            weight_decay=0.1,
            lr_decay=0.7,
        ),
        {"lr_min": 0.2},
    ),
    "two layers": (
        Case(
            "ce",
            (3, 5, 3),
            "replace_per_batch",
            8,
            2,
            0.1,
            0.3,
            momentum=0.9,
            nesterov=True,
            weight_decay=0.05,
            n=19,
        ),
        {},
    ),
}


def assert_as_published(case, options, order, gaps=()):
    """`gaps` are columns of `order` before which all batches have a place without a record."""
    rng = np.random.default_rng(2)
    params = network(rng, case.sizes, np.float64)
    x, y = records(rng, case.n, case.sizes, case.loss, np.float64)
    case = dataclasses.replace(case, ks=(0, 1, 2, 5))
    with jax.enable_x64(True):
        rows = order if order is None else np.insert(order, gaps, -1, axis=1)
        bounds = case.bounds(params, x, y, rows, product="rump", **options)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(bounds))
    if order is None:  # consecutive batches, without an incomplete last one
        whole = case.n // case.batch_size * case.batch_size
        order = np.tile(np.arange(whole).reshape(-1, case.batch_size), (case.epochs, 1))
    layers = list(zip(params[::2], params[1::2], strict=True))
    for i, k in enumerate(case.ks):
        expected = published.train(
            layers, x, y, loss=case.loss, k=k, order=order, **case.optimizer, **options
        )
        for ours, theirs in zip(
            (bounds.params, row(bounds.lower, i), row(bounds.upper, i)), expected, strict=True
        ):
            for a, b in zip(ours, itertools.chain(*theirs), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    widths = [
        (high - low).max() for low, high in zip(*leaves64(bounds.lower, bounds.upper), strict=True)
    ]
    assert min(widths) > 1e-3  # the boxes that agree are not points


@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
def test_published_algorithm(name, monkeypatch):
    case, options = PARITY[name]
    batches = -(-case.n // case.batch_size)
    drops = name == "two layers"
    order = (
        None
        if drops
        else np.concatenate(
            [np.random.default_rng(t).permutation(case.n) for t in range(case.epochs)]
        )
    )
    gaps = ()
    if name == "one layer":  # nothing depends on fragments, nor on places without a record
        cut(monkeypatch, (2, 2, 3))
        gaps = (0, 3, 3)
    assert_as_published(
        case, options, order if drops else order.reshape(batches * case.epochs, -1), gaps
    )


def cut(monkeypatch, blocks):
    """Cuts batches into (outer blocks, fragments in each, records in a fragment)."""
    monkeypatch.setattr(plan, "cut_batch", lambda batch, parameters: blocks)


ONE_STEP = Case("bce", (6, 1), "add_remove", 24, 1, 0.15, 0.4, ks=8)


@pytest.mark.slow
@pytest.mark.parametrize("threat", ["add_remove", "replace_one", "replace_per_batch"])
def test_one_step(threat):
    """The rules for sums, from gradients computed here in float64."""
    case = dataclasses.replace(ONE_STEP, threat=threat)
    params, x, y, order = case.problem()
    x[:, 0] = abs(x[:, 0]) + 1
    y[:] = 0  # all derivatives with respect to the first weight have one sign
    x[2:, 1] = 0
    bounds = case.bounds(params, x, y, order)
    grads = retraining.clipped(
        [leaf.astype(np.float64) for leaf in params], x.astype(np.float64), y, "bce", case.clip
    )
    theta = np.concatenate([leaf.reshape(-1) for leaf in params]).astype(np.float64)
    for k in range(case.ks + 1):
        sums_low, sums_high = grads.sum(axis=0) - k * case.clip, grads.sum(axis=0) + k * case.clip
        if threat != "add_remove":
            ranked = np.sort(grads, axis=0)
            sums_low -= ranked[case.n - k :].sum(axis=0)
            sums_high -= ranked[:k].sum(axis=0)
        low, high = (theta - case.learning_rate / case.n * end for end in (sums_high, sums_low))
        ours = [
            np.concatenate([leaf.reshape(-1) for leaf in row(t, k)])
            for t in (bounds.lower, bounds.upper)
        ]
        assert (ours[0] <= low).all() and (ours[1] >= high).all()
        # Without a sort, the k largest are found up to 1/128 of the clip each.
        room = (
            case.learning_rate
            / case.n
            * case.clip
            * (0.002 + (k / 128 if threat == "replace_one" else 0))
        )
        assert (low - ours[0]).max() <= room and (ours[1] - high).max() <= room


@pytest.mark.slow
def test_sums_do_not_depend_on_fragments(monkeypatch):
    """This threat adds up what all others do, and the excesses over a threshold."""
    case = dataclasses.replace(ONE_STEP, threat="replace_one")
    params, x, y, order = case.problem()
    whole = case.bounds(params, x, y, order)
    cut(monkeypatch, (3, 5, 2))
    order = np.insert(order, (0, 7, 20), -1, axis=1)
    for a, b in zip(
        jax.tree.leaves(whole), jax.tree.leaves(case.bounds(params, x, y, order)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_gradients_are_quantised_outward():
    rng = np.random.default_rng(0)
    for clip in (0.04, 0.1, 0.3, 1.0, 1.7, 1e-20, 1e20):
        grid = sums.Grid.of(jnp.float32, clip, 1)
        bias = int(grid.bias())
        near = clip * (1 - 1e-3 * rng.random(20000))
        x = np.concatenate(
            [rng.uniform(-clip, clip, 20000), near, -near, rng.normal(size=1000) * 1e3]
        ).astype(np.float32)
        exact = np.clip(x.astype(np.float64), -clip, clip) / grid.unit
        low, high = (
            -sign * (np.asarray(grid.bits(-sign * x), np.int64) - bias) for sign in (-1, 1)
        )
        assert (low <= exact).all() and (exact <= high).all()
        assert (exact - low).max() < 2 and (high - exact).max() < 2
        # What one record moves a sum by, also from or to a place without a record (one unit).
        assert max(abs(low).max(), abs(high).max()) + 1 <= grid.charge
        assert 2**20 <= clip / grid.unit <= grid.one <= 2**21
        assert np.asarray(grid.bits(jnp.full(1, jnp.nan)), np.int64)[0] - bias <= -grid.one


# --- containment --------------------------------------------------------------------------------


@functools.cache
def witnesses(name, seed):
    """Returns [(k, parameters)]: trained in float64 and float32 on data sets at distance k, chosen
    to be extreme.

    For many directions (single parameters, random ones, the loss of queries) the k changes that
    move the result furthest, found to first order along the training and once more along the
    training that they give."""
    case = CASES[name]
    (params, x, y, order), _ = solved(name, seed)
    rng = np.random.default_rng(100 + seed)
    extra, labels = records(rng, 24, case.sizes, case.loss)
    pool = (
        np.concatenate([x, extra, 10 * extra, 1000 * extra]),
        np.concatenate([y, *[rng.permutation(labels)] * 3]),
    )
    batches = [rows[rows >= 0] for rows in order]
    size = sum(leaf.size for leaf in params)
    queries = retraining.flatten(retraining.gradients(params, extra[:6], labels[:6], case.loss))
    bias = np.eye(size)[-case.sizes[-1] :]
    directions = np.concatenate(
        [
            rng.choice([-1, 1], size=(6, size)),
            np.eye(size)[rng.permutation(size)[:6]],
            bias,
            queries,
        ]
    )
    found = []
    _, unchanged = case.retrain(params, *pool, batches, trace=True)
    for direction, k in itertools.product([*directions, *-directions], (1, 3, 4)):
        worst = functools.partial(
            retraining.worst_change, order=order, n=case.n, k=k, direction=direction
        )
        worst = functools.partial(worst, threat=case.threat, epochs=case.epochs)
        _, seen = case.retrain(params, *pool, worst(unchanged), trace=True)
        changed = worst(seen)
        found += [
            (k, case.retrain(params, *pool, changed, dtype=dtype))
            for dtype in (np.float64, np.float32)
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_retrained_parameters_are_inside(name):
    beyond = 0
    for seed in SEEDS:
        _, bounds = solved(name, seed)
        for k, theta in witnesses(name, seed):
            assert outside(theta, row(bounds.lower, k), row(bounds.upper, k)) == 0
            beyond += (
                k > 1 and outside(theta, row(bounds.lower, k - 1), row(bounds.upper, k - 1)) > 0
            )
    assert beyond > 0  # the bounds for one change less do not contain them all


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_weight_decay_that_takes_almost_everything(momentum):
    """What is left of the parameters is small beside the rounding of what was taken."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(500, 1)).astype(np.float32)]
    data = np.zeros((4, 500), np.float32), np.zeros(4, np.float32)

    def loss(params, example):
        return jaxdp.losses.sigmoid_cross_entropy(example[0] @ params[0], example[1])

    decay = 1.3
    for taken in (0.9, 0.97, 0.999):
        rate = taken / decay / (1 + momentum)
        settings = {
            "clip": 1e-9,
            "learning_rate": rate,
            "momentum": momentum,
            "nesterov": momentum > 0,
        }
        bounds = train_with_bounds(
            loss, params, data, ks=0, batch_size=4, epochs=1, weight_decay=decay, **settings
        )
        exact = [params[0].astype(np.float64) * (1 - rate * decay * (1 + momentum))]
        assert outside(exact, row(bounds.lower, 0), row(bounds.upper, 0)) == 0
        assert_nested(bounds)


# --- stable distance ----------------------------------------------------------------------------


def neighbours(name, seed):
    """Problems at distance one of that of `solved(name, seed)`, and whose record changed."""
    case = CASES[name]
    (params, x, y, order), _ = solved(name, seed)
    rng = np.random.default_rng(200 + seed)
    if case.threat == "add_remove":
        i = int(rng.integers(case.n))
        yield params, np.delete(x, i, axis=0), np.delete(y, i), None
        return
    extra, labels = records(rng, 1, case.sizes, case.loss)
    for scale in (0, 1, 1e3):
        i = int(rng.integers(case.n))
        features, targets = x.copy(), y.copy()
        features[i], targets[i] = scale * extra[0], labels[0]
        yield params, features, targets, order


@functools.cache
def answers(name, seed):
    """Returns queries, some of them near a change of label, and their certificates."""
    rng = np.random.default_rng(300 + seed)
    _, bounds = solved(name, seed)
    x = rng.normal(size=(40, CASES[name].sizes[0])).astype(np.float32)
    x[20:] = x[:20] + rng.normal(size=(20, 1)).astype(np.float32) * 0.1
    return x, certify(bounds, logits, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_neighbours(name):
    """The boxes of a neighbour lie inside of those of one distance more; so k' differs by at most
    1."""
    case, differ = CASES[name], 0
    for seed in SEEDS:
        _, bounds = solved(name, seed)
        queries, ours = answers(name, seed)
        for problem in neighbours(name, seed):
            other = case.bounds(*problem)
            assert within(other, bounds) and within(bounds, other)
            theirs = certify(other, logits, queries)
            assert np.abs(np.asarray(ours.distance) - np.asarray(theirs.distance)).max() <= 1
            changed = np.asarray(ours.label != theirs.label)
            assert (
                not np.asarray(ours.distance)[changed].any()
                and not np.asarray(theirs.distance)[changed].any()
            )
            differ += int((ours.distance != theirs.distance).sum())
    assert differ > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_labels_of_retrained_models(name):
    flips = 0
    for seed in SEEDS:
        queries, answer = answers(name, seed)
        label, distance = np.asarray(answer.label), np.asarray(answer.distance)
        low, high = (
            np.asarray(end, np.float64) for end in (answer.logits.lower, answer.logits.upper)
        )
        for k, theta in witnesses(name, seed):
            z = retraining.forward(theta, queries.astype(theta[0].dtype))[1]
            now = (z[:, 0] > 0) if z.shape[1] == 1 else np.argmax(z, axis=1)
            assert ((z >= low[k]) & (z <= high[k])).all()
            flipped = now != label
            assert not (flipped & (distance >= k)).any()
            flips += flipped.sum()
    assert flips > 0 and (distance > 0).any()


def saturated(rng, n, wide=1000):
    """Returns a linear problem, and a record whose clipped gradient is +-clip in nearly all of its
    coordinates."""
    params = network(rng, (wide, 1))
    x, y = records(rng, n, (wide, 1), "bce")
    extreme = rng.choice([-1e3, 1e3], size=wide).astype(np.float32)
    return params, x, y, extreme, np.float32((extreme @ params[0]).item() < 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "batch_size", "options"),
    [(40, 11, {"momentum": 0.5, "nesterov": True}), (256, 256, {})],
    ids=["shared budget", "one more block"],
)
def test_neighbours_by_a_saturated_record(n, batch_size, options):
    """A record that moves the sum by as much as any can: the boxes must have room for all of it."""
    case = Case("bce", (1000, 1), "add_remove", batch_size, 1, 20.0, 0.01, n=n, ks=3, **options)
    for seed in range(2):
        params, x, y, extreme, label = saturated(np.random.default_rng(seed), n)
        without = case.bounds(params, x, y, None)
        place = seed * n // 2
        more = case.bounds(
            params, np.insert(x, place, extreme, axis=0), np.insert(y, place, label), None
        )
        assert within(without, more) and within(more, without)


@pytest.mark.slow
def test_neighbours_where_a_gradient_overflows():
    """0 * inf, in the places without a record of a batch, is nothing; a NaN of a record is any
    gradient."""
    case = dataclasses.replace(SMALL, epochs=1, n=12)
    params, x, y, _ = case.problem()
    params[0] = np.full((3, 1), 2, np.float32)
    step = case.learning_rate * 2 * case.clip / case.batch_size  # one record that may be anything
    overflowed = set()
    for last in range(4):
        x[0] = 3e38, -3e38, last
        overflowed.add(by_contents(x, y, case.batches, 1)[1].tolist().count(0))
        ours, other = case.bounds(params, x, y, None), case.bounds(params, x[1:], y[1:], None)
        assert within(ours, other) and within(other, ours)
        ends = zip(row(ours.lower, 0), row(ours.upper, 0), strict=True)
        radius = max(np.max(high - low) for low, high in ends)
        assert step < radius < 2 * step
    assert overflowed == {0, 1}  # it was in either batch: over a point and over a box


@pytest.fixture
def arrays(no_work):
    """Returns `arrays(data, **options)`: the features and the rows [steps, places] that the
    compiled program gets."""

    def arrays(data, **options):
        with pytest.raises(AssertionError, match="work was done"):
            attempt(data=data, **options)
        _, _, (features, *_), order, _ = no_work[-1]
        return np.asarray(features), np.asarray(order)

    return arrays


def members(features, order):
    """Returns the contents of each batch: how often it has each record."""
    return [collections.Counter(tuple(features[i]) for i in rows if i >= 0) for rows in order]


def moved(before, after):
    """Returns how many records are in a batch before and not after, or the other way round."""
    return sum(
        (one - two).total() + (two - one).total() for one, two in zip(before, after, strict=True)
    )


def by_position(data, batches, **_):
    """The broken twin: removing a record moves all records behind it."""
    return np.arange(len(data[0])) % batches


@pytest.mark.parametrize("twin", [False, True])
def test_the_batches_of_all_others_stay_whichever_record_leaves(arrays, monkeypatch, twin):
    x, y = records(np.random.default_rng(5), 17, (2, 1), "bce")
    x[[3, 11]], y[[3, 11]] = x[6], y[6]  # three equal records
    how = {"batches": 3, "batch_size": 10, "epochs": 2}
    if twin:
        monkeypatch.setattr("jaxdp.prediction.batches.partition_by_hash", by_position)
    whole = members(*arrays((x, y), **how))
    assert len(whole) == 6 and sum(batch.total() for batch in whole) == 2 * 17
    apart = [
        moved(whole, members(*arrays((np.delete(x, i, 0), np.delete(y, i)), **how)))
        for i in range(17)
    ]
    assert (max(apart) > 2) if twin else (apart == [2] * 17)  # it leaves its batch of both epochs


def test_the_batches_of_all_others_stay_whichever_record_is_replaced(arrays):
    x, y = records(np.random.default_rng(5), 17, (2, 1), "bce")
    how = {"threat": "replace_one", "batch_size": 6, "epochs": 2}
    whole = members(*arrays((x, y), **how))
    assert len(whole) == 6
    for i in range(17):
        other = x.copy()
        other[i] *= -100
        assert moved(whole, members(*arrays((other, y), **how))) == 4


def test_an_id_spreads_equal_records_over_batches(arrays):
    """The batch may depend on a column that the loss does not read."""
    x, y = np.ones((40, 2), np.float32), np.ones(40, np.float32)
    for extra, filled in (((), 1), ((np.arange(40) ** 2,), 4)):
        _, order = arrays((x, y, *extra), batches=4)
        assert sum((rows >= 0).any() for rows in order) == filled


@pytest.mark.slow
@pytest.mark.parametrize("twin", [False, True])
def test_every_removed_record_stays_within_the_bounds(monkeypatch, twin):
    """The last weight of a batch decides where the next one goes, so a moved record shows."""
    case = dataclasses.replace(SMALL, epochs=1, learning_rate=25.0, n=12)
    if twin:
        monkeypatch.setattr("jaxdp.prediction.batches.partition_by_hash", by_position)
    outsiders = 0
    for seed in range(2):
        params, x, y, _ = case.problem(seed)
        x[::2], y[::2], y[1::2] = abs(x[::2]), 1, 0
        ours = case.bounds(params, x, y, None)
        for i in range(case.n):
            other = case.bounds(params, np.delete(x, i, axis=0), np.delete(y, i), None)
            outsiders += outside(other.params, row(ours.lower, 1), row(ours.upper, 1)) > 0
            outsiders += not (within(ours, other) and within(other, ours))
    assert (outsiders > 0) == twin


@pytest.mark.slow
@pytest.mark.parametrize("batches", [None, 3])
def test_the_number_of_batches_does_not_depend_on_the_records(arrays, batches):
    for n in (0, 1, 149, 150, 151, 450):
        _, order = arrays(
            records(np.random.default_rng(n), n, (2, 1), "bce"),
            batches=batches,
            batch_size=100,
            epochs=2,
        )
        assert len(order) == 2 * (batches or 1) and (order >= 0).sum() == 2 * n


def test_the_number_of_batches_where_that_of_records_is_public(arrays):
    for n, batches in ((149, 1), (151, 2)):
        _, order = arrays(
            records(np.random.default_rng(n), n, (2, 1), "bce"),
            threat="replace_one",
            batch_size=100,
        )
        assert len(order) == batches
    seven = records(np.random.default_rng(0), 7, (2, 1), "bce")
    _, order = arrays(seven, threat="replace_per_batch", batch_size=2, batches=2, ks=0)
    np.testing.assert_array_equal(order[:, :4], [[0, 2, 4, 6], [1, 3, 5, -1]])


@pytest.mark.slow
def test_no_records():
    """The neighbour of a single record; a part of an ensemble may be empty, too."""
    case = dataclasses.replace(SMALL, n=1)
    params, x, y, _ = case.problem()
    case = dataclasses.replace(case, epochs=1)
    for batches in (None, 2):
        one, none = (case.bounds(params, x[:n], y[:n], None, batches=batches) for n in (1, 0))
        assert within(one, none) and within(none, one)
        for start, end in zip(params, none.params, strict=True):
            np.testing.assert_array_equal(start, end)


@pytest.mark.slow
@pytest.mark.parametrize(("most", "batches"), [(None, 2), (128, 1)])
def test_a_batch_far_larger_than_declared(monkeypatch, most, batches):
    """Whether there is an error may not depend on the number of records: their sum is clipped
    instead."""
    if most:
        of = sums.Grid.of
        monkeypatch.setattr(
            sums.Grid, "of", lambda *args, **options: of(*args, **options)._replace(most=most)
        )
    clip = 0.25 if most else 0.5  # another program
    case = Case("bce", (1, 1), "add_remove", 8, 1, clip, 0.5**10, n=1400, ks=2)
    rng = np.random.default_rng(0)
    params = network(rng, (1, 1))
    # each gradient is the clip
    x, y = (
        np.float32(100 + rng.random((case.n, 1))),
        np.zeros(case.n, np.float32),
    )
    ours, other = (
        case.bounds(params, x[:n], y[:n], None, batches=batches) for n in (case.n, case.n - 1)
    )
    room = (most or 256) * case.clip / case.batch_size * case.learning_rate * batches
    np.testing.assert_allclose(params[0] - ours.params[0], room, rtol=1e-5)
    for a, b in ((ours, other), (other, ours)):
        assert within(a, b) and outside(a.params, row(b.lower, 1), row(b.upper, 1)) == 0
    charge = case.clip / case.batch_size * case.learning_rate
    width = np.asarray(ours.upper[0] - ours.lower[0]).reshape(-1)
    np.testing.assert_allclose(width[1:], 2 * charge * np.arange(1, 3), rtol=0.01)


@pytest.mark.slow
def test_budget_when_batches_are_empty(monkeypatch):
    """Added records may sit in the empty first batch of every epoch."""
    empty = np.array([[-1, -1, -1], [0, 1, 2], [3, 4, 5]] * 2)
    monkeypatch.setattr(
        "jaxdp.prediction.batches.partition_by_hash",
        lambda *args, **kwargs: np.array([1, 1, 1, 2, 2, 2]),
    )
    case = dataclasses.replace(SMALL, learning_rate=0.02, lr_decay=1.0, n=6)
    params, x, y, _ = case.problem()
    bounds = case.bounds(params, x, y, None, batches=3)
    for sign in (-1, 1):
        extreme = sign * 1e3 * np.sign(params[0].T)
        pool = np.vstack([x, extreme]), np.append(y, sign < 0)
        theta = case.retrain(
            params, *pool, [np.array([r for r in rows if r >= 0] or [6, 6]) for rows in empty]
        )
        assert outside(theta, row(bounds.lower, 2), row(bounds.upper, 2)) == 0


@pytest.mark.slow
def test_a_change_in_the_first_batch_is_not_dampened():
    """The momentum keeps it, so half of the shift would be too little."""
    case = dataclasses.replace(SMALL, epochs=1, momentum=0.5, dampening=0.5, n=12)
    params, x, y, order = case.problem()
    bounds = case.bounds(params, x, y, order)
    for sign in (-1, 1):
        extreme = sign * 1e3 * np.sign(params[0].T)
        pool = np.vstack([x, extreme]), np.append(y, sign < 0)
        batches = [rows[rows >= 0] for rows in order]
        batches[0] = np.append(batches[0], case.n)
        theta = case.retrain(params, *pool, batches)
        assert outside(theta, row(bounds.lower, 1), row(bounds.upper, 1)) == 0
        assert outside(theta, row(bounds.lower, 0), row(bounds.upper, 0)) > 0


# --- certify ------------------------------------------------------------------------------------


def hand_made(lower, upper, ks):
    """Bounds as `train_with_bounds` returns them, of given boxes."""
    params = [(low[0] + high[0]) / 2 for low, high in zip(lower, upper, strict=True)]
    trainable = (True,) * len(params)
    return agt.Bounds(
        params, lower, upper, tuple(ks), threat="add_remove", trainable=trainable, product="tight"
    )


def first_leaf(params, x):
    return params[0]


def boxes(rng, sizes, radii):
    centre = network(rng, sizes)
    widths = [rng.uniform(0.2, 1, size=leaf.shape).astype(np.float32) for leaf in centre]
    ends = [
        np.stack([c + sign * r * w for r in radii])
        for sign in (-1, 1)
        for c, w in zip(centre, widths, strict=True)
    ]
    return [end.astype(np.float32) for end in ends[: len(centre)]], [
        end.astype(np.float32) for end in ends[len(centre) :]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1, 4])
def test_certify_linear_models_exactly(classes):
    rng = np.random.default_rng(0)
    lower, upper = boxes(rng, (3, classes), 0.03 * np.arange(12))
    bounds = hand_made(lower, upper, range(12))
    queries = rng.normal(size=(60, 3)).astype(np.float32)
    answer = certify(bounds, logits, queries)
    low, high = leaves64(lower, upper)
    x = queries.astype(np.float64)
    plus, minus = np.maximum(x, 0), np.maximum(-x, 0)

    def least(w_low, w_high):  # of x w, [K, Q, C]
        return plus @ w_low - minus @ w_high

    z_low, z_high = (
        least(low[0], high[0]) + low[1][:, None],
        -least(-high[0], -low[0]) + high[1][:, None],
    )
    nominal = x @ ((low[0] + high[0]) / 2)[0] + ((low[1] + high[1]) / 2)[0]
    label = (nominal[:, 0] > 0).astype(int) if classes == 1 else np.argmax(nominal, axis=1)
    if classes == 1:
        certain = np.where(label == 1, z_low[..., 0] > 0, z_high[..., 0] <= 0)
    else:
        # the least of z_label - z_j over all parameters in the box, rows of differences of weights
        gaps = []
        for j in range(classes):
            w_low, w_high = (
                low[0][..., label] - high[0][..., [j]],
                high[0][..., label] - low[0][..., [j]],
            )
            gap = np.einsum("qi,kiq->kq", plus, w_low) - np.einsum("qi,kiq->kq", minus, w_high)
            gaps.append(np.where(label == j, np.inf, gap + low[1][:, label] - high[1][:, [j]]))
        certain = np.min(gaps, axis=0) > 0
    expected = np.cumprod(certain, axis=0)[1:].sum(axis=0)
    np.testing.assert_array_equal(answer.label, label)
    np.testing.assert_array_equal(answer.distance, expected)
    assert len(set(expected)) > 5
    np.testing.assert_allclose(answer.logits.lower, z_low, atol=1e-5)
    np.testing.assert_allclose(answer.logits.upper, z_high, atol=1e-5)
    assert (np.asarray(answer.logits.lower) <= z_low).all() and (
        np.asarray(answer.logits.upper) >= z_high
    ).all()


@pytest.mark.slow
def test_certify_networks():
    """No parameters in the box change a certified label; comparing logits one by one certifies
    less."""
    rng = np.random.default_rng(1)
    lower, upper = boxes(rng, (3, 5, 3), 0.02 * np.arange(8))
    bounds = hand_made(lower, upper, range(8))
    queries = rng.normal(size=(50, 3)).astype(np.float32)
    answer = certify(bounds, logits, queries)
    label, distance = np.asarray(answer.label), np.asarray(answer.distance)
    flips = 0
    for k in range(1, 8):
        for _ in range(50):
            theta = [
                rng.choice([0, 1], size=a[k].shape) * (b[k] - a[k]) + a[k]
                for a, b in zip(lower, upper, strict=True)
            ]
            flipped = np.argmax(retraining.forward(theta, queries)[1], axis=1) != label
            assert not (flipped & (distance >= k)).any()
            flips += flipped.sum()
    assert flips > 0
    low, high = np.asarray(answer.logits.lower), np.asarray(answer.logits.upper)
    rivals = np.where(np.arange(3) == label[:, None], -np.inf, high).max(axis=2)
    one_by_one = np.cumprod(low[:, np.arange(50), label] > rivals, axis=0)[1:].sum(axis=0)
    assert (distance >= one_by_one).all() and distance.sum() > one_by_one.sum()


@pytest.mark.slow
def test_certify_counts_certified_distances():
    """Of a sparse grid the index, never k; nothing beyond a distance that is not certified."""
    for ks, ends, expected in (
        ((0, 10, 100), ([1, 1, 0.5], [1.5, 2, 3]), 2),
        ((0, 10, 100), ([1, 1, -1], [1.5, 2, 3]), 1),
        ((0, 10, 100), ([1, -1, 1], [1, 2, 1]), 0),
        ((1, 10, 100), ([1, 0.5, 0.1], [1, 2, 3]), 3),
        ((1, 10, 100), ([1, -0.5, -1], [1, 2, 3]), 1),
        ((0, 1, 2), ([0, 0, 0], [0, 0, 0]), 2),  # one logit of exactly zero is label 0
        ((0, 1, 2), ([0, -1, -1], [0, 1, 1]), 0),
        ((0, 1, 2), ([-1, -2, -3], [-1, 0, 0.1]), 1),
    ):
        lower, upper = (np.asarray(end, np.float32)[:, None] for end in ends)
        bounds = hand_made([lower], [upper], ks)
        answer = certify(bounds, first_leaf, np.zeros((1, 1), np.float32))
        assert answer.distance.dtype == jnp.int32
        assert answer.distance.tolist() == [expected], (ks, ends)


def test_certify_ties():
    point = np.array([[1, 1, 0]] * 3, np.float32)
    bounds = hand_made([point], [point], (0, 1, 2))
    answer = certify(bounds, first_leaf, np.zeros((2, 1), np.float32))
    assert answer.distance.tolist() == [0, 0]


def test_certify_refuses():
    bounds = hand_made([np.zeros((2, 3), np.float32)], [np.ones((2, 3), np.float32)], (0, 1))
    x = np.zeros((4, 2), np.float32)
    for apply_fn, queries, error, match in (
        (lambda params, x: params[0][None], x, ValueError, "apply_fn"),
        (lambda params, x: {"logits": params[0]}, x, ValueError, "apply_fn"),
        (first_leaf, x[:0], ValueError, "no records"),
        (first_leaf, np.full_like(x, np.nan), ValueError, "NaN"),
    ):
        with pytest.raises(error, match=match):
            certify(bounds, apply_fn, queries)
    with pytest.raises(TypeError, match="bounds"):
        certify(bounds.params, first_leaf, x)


# --- bad input ----------------------------------------------------------------------------------


def _stochastic(params, example):
    return bce(params, example) * jax.random.uniform(jax.random.key(0))


BAD = {
    "ks negative": ({"ks": -1}, ValueError, "ks"),
    "a negative k": ({"ks": (-1, 0)}, ValueError, "ks"),
    "ks float": ({"ks": (0, 1.5)}, TypeError, "ks"),
    "ks one float": ({"ks": 2.0}, TypeError, "ks"),
    "ks bool": ({"ks": True}, TypeError, "ks"),
    "ks empty": ({"ks": ()}, ValueError, "ks"),
    "ks not increasing": ({"ks": (0, 2, 1)}, ValueError, "ks"),
    "k above batch_size": ({"ks": 9}, ValueError, "batch_size=8"),
    "k above a batch": (
        {"ks": 3, "threat": "replace_one", "order": [[0, 1], [2, 3]]},
        ValueError,
        "ks",
    ),
    "clip None": ({"clip": None}, ValueError, "clip"),
    "clip zero": ({"clip": 0.0}, ValueError, "clip"),
    "clip negative": ({"clip": -1.0}, ValueError, "clip"),
    "clip infinite": ({"clip": np.inf}, ValueError, "clip"),
    "clip NaN": ({"clip": np.nan}, ValueError, "clip"),
    "clip below the grid": ({"clip": 1e-31}, ValueError, "clip must be in"),
    "learning_rate": ({"learning_rate": 0.0}, ValueError, "learning_rate"),
    "batch_size": ({"batch_size": 0}, ValueError, "batch_size"),
    "epochs": ({"epochs": 0}, ValueError, "epochs"),
    "batches zero": ({"batches": 0}, ValueError, "batches must be an integer >= 1, got 0"),
    "batches bool": ({"batches": True}, ValueError, "batches must be an integer >= 1, got True"),
    "batches float": ({"batches": 2.0}, ValueError, "batches must be an integer >= 1, got 2.0"),
    "batches and order": (
        {"batches": 1, "order": [[0, 1, 2, 3, 4, 5, 6, 7]]},
        ValueError,
        "batches=1 and order",
    ),
    "more batches than records": (
        {"batches": 9, "threat": "replace_one"},
        ValueError,
        "batches=9 must be at most 8",
    ),
    "more changes than room": (
        {"ks": (0, 2**18 + 1), "batch_size": 2**20},
        ValueError,
        "ks reaches 262145",
    ),
    "threat": ({"threat": "delete"}, ValueError, "threat must be one of"),
    "product": ({"product": "exact"}, ValueError, "product"),
    "momentum": ({"momentum": 1.0}, ValueError, "momentum"),
    "nesterov": ({"nesterov": True}, ValueError, "nesterov"),
    "weight_decay": ({"weight_decay": -0.1}, ValueError, "weight_decay"),
    "lr_decay": ({"lr_decay": np.inf}, ValueError, "lr_decay"),
    "lr_min": ({"lr_min": -1.0}, ValueError, "lr_min"),
    "influence": (
        {"momentum": 0.9, "learning_rate": 0.5, "weight_decay": 2.0, "epochs": 4},
        ValueError,
        "weight_decay",
    ),
    "weight_decay that overshoots": (
        {"learning_rate": 1.0, "weight_decay": 1.1},
        ValueError,
        "weight_decay",
    ),
    "order outside": ({"threat": "replace_one", "order": [[0, 8]]}, ValueError, "order"),
    "order below": ({"threat": "replace_one", "order": [[0, -2]]}, ValueError, "order"),
    "order twice": (
        {"threat": "replace_one", "order": [[0, 1, 1, 2, 3, 4, 5, 6, 7]]},
        ValueError,
        "order",
    ),
    "order of floats": ({"threat": "replace_one", "order": [[0.0, 1.0]]}, TypeError, "order"),
    "order of one batch": ({"threat": "replace_one", "order": [0, 1]}, ValueError, "order"),
    "order with an empty batch": (
        {"threat": "replace_one", "order": [[0, 1], [-1, -1]]},
        ValueError,
        "order",
    ),
    "order of positions": (
        {"threat": "add_remove", "order": [[0, 2, 4, 6], [1, 3, 5, 7]]},
        ValueError,
        "order must be None under threat='add_remove'",
    ),
    "order by the number of records": (
        {
            "threat": "add_remove",
            "order": lambda n: np.append(np.arange(n), [-1] * (n % 2)).reshape(-1, 2).T,
        },
        ValueError,
        "order must be None under threat='add_remove', got function",
    ),
    "dampening": ({"momentum": 0.5, "dampening": 1.0}, ValueError, "dampening must be in"),
    "dampening alone": ({"dampening": 0.3}, ValueError, "dampening=0.3 needs momentum > 0"),
    "l1": ({"l1": -0.1}, ValueError, "l1 must be finite and >= 0"),
    "l1 with both": (
        {"l1": 0.1, "momentum": 0.1, "weight_decay": 0.1},
        ValueError,
        "l1=0.1 with momentum=0.1 and weight_decay=0.1",
    ),
    "public of another length": (
        {"public": np.zeros(7, bool)},
        ValueError,
        r"public must be booleans \[8\], one for each record, got bool \[7\]",
    ),
    "public of integers": ({"public": np.zeros(8, int)}, ValueError, "public must be booleans"),
    "poison of nothing": ({"threat": "poison"}, ValueError, "poisoning=None does not fit"),
    "mesh": ({"mesh": 8}, TypeError, "mesh must be a jax.sharding.Mesh"),
    "data_axes": (
        {"mesh": jax.make_mesh((1,), ("data",)), "data_axes": ("rows",)},
        ValueError,
        "data_axes must be a tuple of names of mesh axes",
    ),
    "not trainable": ({"trainable": lambda path, leaf: False}, ValueError, "trainable"),
}


@pytest.fixture
def no_work(monkeypatch):
    """Stops before the compiled program. Returns a list of its arguments."""

    def refuse(*args):
        planned.append(plan.make_plan(*args)[1])
        raise AssertionError("work was done after the arguments were checked")

    planned = []
    monkeypatch.setattr(agt, "make_plan", refuse)
    return planned


def attempt(loss=bce, params=None, data=None, **options):
    rng = np.random.default_rng(0)
    settings = {"ks": 2, "clip": 0.1, "learning_rate": 0.1, "batch_size": 8, "epochs": 1} | options
    if isinstance(settings.get("order"), list):
        settings["order"] = np.array(settings["order"])
    return train_with_bounds(
        loss,
        network(rng, (2, 1)) if params is None else params,
        records(rng, 8, (2, 1), "bce") if data is None else data,
        **settings,
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(name, no_work):
    options, error, match = BAD[name]
    with pytest.raises(error, match=match):
        attempt(**options)


def test_good_settings_reach_the_work(no_work):
    with pytest.raises(AssertionError, match="work was done"):
        attempt()
    with pytest.raises(AssertionError, match="work was done"):
        attempt(threat="replace_one", order=np.arange(8).reshape(4, 2).T)


def test_settings_are_checked_before_there_are_records(no_work):
    settings = {"clip": 0.1, "learning_rate": 0.1, "batch_size": 8, "epochs": 1}
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1.5"):
        Training(**settings, momentum=1.5)
    with pytest.raises(AssertionError, match="work was done"):
        attempt(**vars(Training(**settings, threat="replace_one")))


def test_options_are_keywords_or_one_training(no_work):
    rng = np.random.default_rng(0)
    args = bce, network(rng, (2, 1)), records(rng, 8, (2, 1), "bce")
    settings = {"clip": 0.1, "learning_rate": 0.1, "batch_size": 8, "epochs": 1}
    training = Training(**settings, threat="replace_one", momentum=0.5)
    for options in ({"training": training}, vars(training)):
        with pytest.raises(AssertionError, match="work was done"):
            train_with_bounds(*args, ks=2, **options)
    by_object, by_keywords = no_work
    jax.tree.map(np.testing.assert_array_equal, by_object, by_keywords)
    with pytest.raises(TypeError, match=r"training and clip, epochs exclude each other"):
        train_with_bounds(*args, ks=2, training=training, epochs=2, clip=0.2)
    with pytest.raises(TypeError, match=r"no argument 'clips'. Did you mean clip="):
        train_with_bounds(*args, ks=2, **settings, clips=1.0)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'epochs'"):
        train_with_bounds(*args, ks=2, clip=0.1, learning_rate=0.1, batch_size=8)


def test_bad_data_loss_and_parameters(no_work):
    x, y = records(np.random.default_rng(0), 8, (2, 1), "bce")
    spoiled = x.copy()
    spoiled[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"data leaf 0 has NaN"):
        attempt(data=(spoiled, y))
    with pytest.raises(ValueError, match=r"data .* one first axis"):
        attempt(data=(x, y[:-1]))
    with pytest.raises(ValueError, match=r"data has no records"):
        attempt(data=(x[:0], y[:0]), threat="replace_one")
    with pytest.raises(TypeError, match=r"data leaf 1 must be an array of numbers") as caught:
        attempt(data=(x, np.array(["secret"] * len(x))))
    assert "secret" not in str(caught.value)
    with pytest.raises(TypeError, match=r"got Examples\..* Give source.gather\("):
        attempt(data=jaxdp.data.from_arrays(x=x))
    with pytest.raises(ValueError, match=r"loss_fn is stochastic"):
        attempt(loss=_stochastic)
    with pytest.raises(ValueError, match=r"loss_fn must return one floating-point number"):
        attempt(loss=lambda params, example: logits(params, example[0]))
    with pytest.raises(TypeError, match=r"params leaf 1 is int32"):
        attempt(params=[np.zeros((2, 1), np.float32), np.zeros(1, np.int32)])
    with pytest.raises(ValueError, match=r"params leaf 0 has NaN"):
        attempt(params=[np.full((2, 1), np.nan, np.float32), np.zeros(1, np.float32)])
    many = np.zeros((2**18, 2), np.float32), np.zeros(2**18, np.float32)
    with pytest.raises(ValueError, match=r"a batch of 262144 records"):
        attempt(data=many, batch_size=2**18, threat="replace_one")
    with pytest.raises(ValueError, match=r"a batch has 300 records"):
        attempt(
            data=(many[0][:600], many[1][:600]),
            threat="replace_one",
            order=np.arange(600).reshape(2, 300),
        )
    with pytest.raises(ValueError, match="lower must be at most upper"):
        jaxdp.Interval(jnp.ones(2), jnp.zeros(2))


def test_messages_hold_no_private_values():
    secret = np.full((8, 2), 1234.5, np.float32)
    secret[2, 1] = np.inf
    with pytest.raises(ValueError, match="data leaf 0") as error:
        attempt(data=(secret, np.zeros(8, np.float32)))
    assert "1234" not in str(error.value)


# --- frozen leaves, programs --------------------------------------------------------------------


def convolved(kernel, image):
    window = jax.lax.conv_general_dilated(
        image[None], kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(window).reshape(-1)


def behind_convolution(params, image):
    return logits([params["head"]["w"], params["head"]["b"]], convolved(params["conv"], image))


@pytest.mark.slow
def test_frozen_convolution():
    """As if trained on features computed outside, up to the rounding of the features."""
    rng = np.random.default_rng(0)
    images, y = (
        rng.normal(size=(24, 2, 6, 1)).astype(np.float32),
        rng.integers(2, size=24).astype(np.float32),
    )
    w, b = network(rng, (3, 1))
    params = {"conv": rng.normal(size=(2, 2, 1, 1)).astype(np.float32), "head": {"b": b, "w": w}}
    settings = {"ks": SMALL.ks, "batch_size": SMALL.batch_size, "epochs": 2, **SMALL.optimizer}
    bounds = train_with_bounds(
        lambda params, example: jaxdp.losses.sigmoid_cross_entropy(
            behind_convolution(params, example[0]), example[1]
        ),
        params,
        (images, y),
        trainable=lambda path, leaf: path in ("head/w", "head/b") and leaf.ndim < 4,
        **settings,
    )
    assert bounds.trainable == (False, True, True)
    assert_nested(bounds)
    features = np.asarray(jax.jit(jax.vmap(convolved, (None, 0)))(params["conv"], images))
    outer = train_with_bounds(bce, [w, b], (features, y), **settings)
    for ours, theirs in (
        (bounds.params, outer.params),
        (bounds.lower, outer.lower),
        (bounds.upper, outer.upper),
    ):
        for name, leaf in zip(("w", "b"), theirs, strict=True):
            np.testing.assert_allclose(ours["head"][name], leaf, rtol=1e-5, atol=1e-5)
        assert ours["conv"].shape[-4:] == (2, 2, 1, 1) and (ours["conv"] == params["conv"]).all()
    assert bounds.lower["conv"].shape == (3, 2, 2, 1, 1)
    ours, theirs = certify(bounds, behind_convolution, images), certify(outer, logits, features)
    np.testing.assert_array_equal(ours.label, theirs.label)
    np.testing.assert_array_equal(ours.distance, theirs.distance)
    np.testing.assert_allclose(ours.logits.lower, theirs.logits.lower, atol=1e-4)


@pytest.mark.slow
def test_one_program():
    """Equal shapes and settings share a program, for all ks; values do not matter."""
    case, (queries, _) = CASES["batches"], answers("batches", 0)
    params, x, y, order = case.problem(seed=9)
    certify(case.bounds(*case.problem(seed=0)), logits, queries)
    with compilations() as seen:
        certify(case.bounds(params, x, y, order), logits, queries)
        dataclasses.replace(case, learning_rate=0.1, lr_decay=0.3).bounds(params, x, y, order)
    assert not seen


@pytest.mark.parametrize(
    ("settings", "number"),
    [({"epochs": 1}, 2), ({"epochs": 3}, 3), ({"epochs": 2, "threat": "replace_per_batch"}, 2)],
)
def test_the_programs_of_a_training_are_those_that_it_calls(monkeypatch, settings, number):
    """A plan counts later epochs with their boxes, and computes nothing."""
    rng = np.random.default_rng(0)
    params, data = network(rng, (2, 1)), records(rng, 12, (2, 1), "bce")
    settings = {"ks": (0, 2), "batch_size": 6, "clip": 0.1, "learning_rate": 0.1} | settings
    if "threat" not in settings:
        settings["batches"] = 2
    seen = []

    def shapes(inputs):
        return str(jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype).kind), inputs[2:]))

    def batch_step(*inputs):
        seen.append(shapes(inputs))
        results = compiled.eval_shape(*inputs)
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), results)

    programs = training_programs(bce, params, data, **settings)
    compiled = agt._batch_step
    monkeypatch.setattr(agt, "_batch_step", batch_step)
    train_with_bounds(bce, params, data, **settings)
    planned = [shapes(inputs) for _, inputs, count in programs.values() for _ in range(count)]
    assert planned == seen and len(programs) == number


# --- meshes -------------------------------------------------------------------------------------


def mesh_of(count):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))


@pytest.mark.slow
def test_devices_share_the_distances_and_change_no_bound():
    # Five distances and up to fifteen lines on three devices: the last device has padding.
    problem, alone = solved("batches", 0)
    with compilations() as seen:
        many = CASES["batches"].bounds(*problem, mesh=mesh_of(3))
    assert seen
    with compilations() as seen:
        CASES["batches"].bounds(*CASES["batches"].problem(1), mesh=mesh_of(3))
    assert not seen
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    queries, _ = answers("batches", 0)
    np.testing.assert_array_equal(
        *(certify(bounds, logits, queries).distance for bounds in (many, alone))
    )


@pytest.mark.slow
def test_devices_share_the_searches_for_the_largest_entries():
    case = dataclasses.replace(ONE_STEP, threat="replace_one")
    problem = case.problem()
    many, alone = case.bounds(*problem, mesh=mesh_of(2)), case.bounds(*problem)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_device_computes_its_lines_only(monkeypatch):
    counts, lines = [], jax.lax.map

    def counted(function, xs, **options):
        counts.append(len(jax.tree.leaves(xs)[0]))
        return lines(function, xs, **options)

    class Traced(Exception):
        pass

    def traced(*args):
        step.trace(*args)
        raise Traced

    step = agt._batch_step
    monkeypatch.setattr(jax.lax, "map", counted)
    monkeypatch.setattr(agt, "_batch_step", traced)
    case = dataclasses.replace(ONE_STEP, ks=14)
    with pytest.raises(Traced):
        case.bounds(*case.problem(), mesh=mesh_of(8))
    assert 2 in counts and 15 not in counts


# --- models -------------------------------------------------------------------------------------


@functools.cache
def digits():
    source = jaxdp.data.bundled("digits")
    return source[np.arange(len(source))]


@pytest.mark.slow
def test_convolutional_network():
    model = jaxdp.models.CNN(num_classes=10, widths=(4,), dense=0)
    data = jax.tree.map(lambda v: v[:24], digits())
    params = jax.jit(model.init)(jax.random.key(0), data["image"][:1])["params"]

    def apply_fn(params, example):
        return model.apply({"params": params}, example["image"][None])[0]

    def loss(params, example):
        return jaxdp.losses.softmax_cross_entropy(apply_fn(params, example), example["label"])

    settings = {"clip": 0.02, "learning_rate": 0.5}
    bounds = train_with_bounds(loss, params, data, ks=3, batch_size=24, epochs=2, **settings)
    assert_nested(bounds)
    gradient = jax.jit(lambda params: jax.vmap(jax.grad(loss), (None, 0))(params, data))
    gone = 0
    for seed in range(8):
        members = np.ones(24, np.float32)
        members[np.random.default_rng(seed).permutation(24)[:3]] = 0
        theta = jax.tree.map(np.asarray, params)
        for _ in range(2):
            clipped = jax.tree.map(
                lambda g: np.clip(g, -settings["clip"], settings["clip"]), gradient(theta)
            )
            sums = jax.tree.map(lambda g, m=members: np.einsum("b,b...->...", m, g), clipped)
            theta = jax.tree.map(
                lambda p, g: p - np.float32(settings["learning_rate"] / 24) * g, theta, sums
            )
        assert outside(theta, row(bounds.lower, 3), row(bounds.upper, 3)) == 0
        gone += outside(theta, row(bounds.lower, 2), row(bounds.upper, 2)) > 0
    assert gone > 0
    answer = certify(bounds, apply_fn, data)
    assert answer.logits.shape == (4, 24, 10)


@pytest.mark.slow
def test_ten_classes():
    """Digits by softmax regression: most predictions are right, and do not hinge on one record of
    1500."""
    data = digits()
    x, y = data["image"].reshape(len(data["label"]), -1).astype(np.float32), data["label"]
    params = [np.zeros((64, 10), np.float32), np.zeros(10, np.float32)]
    settings = {"clip": 1.0, "learning_rate": 0.3, "batch_size": 1500, "epochs": 1}
    bounds = train_with_bounds(ce, params, (x[:1500], y[:1500]), ks=10, **settings)
    answer = certify(bounds, logits, x[1500:])
    accuracy, distance = float((answer.label == y[1500:]).mean()), np.asarray(answer.distance)
    assert accuracy > 0.75
    assert (distance >= 1).mean() > 0.6 and distance.mean() > 2


# --- owners of records --------------------------------------------------------------------------


def retrained(x, y, rows, present, users, *, clip, learning_rate, divisor, epochs):
    """Trains a linear model in float64 on the owners `users`: [P] of weights [d, C]. Their mean
    gradient is clipped."""
    w = np.zeros((x.shape[1], y.max() + 1))
    for _ in range(epochs):
        z = x @ w
        p = np.exp(z - z.max(1, keepdims=True))
        each = x[:, :, None] * (p / p.sum(1, keepdims=True) - np.eye(w.shape[1])[y])[:, None, :]
        mean = [each[rows[u][present[u]]].mean(0) for u in users]
        w = w - learning_rate / divisor * sum(np.clip(g, -clip, clip) for g in mean)
    return w


@pytest.mark.slow
def test_bounds_of_owners_contain_training_without_some_of_them():
    """The broken twin bounds a change of k records. Without k owners, who have four each, training
    leaves its box."""
    rng = np.random.default_rng(5)
    owner = np.repeat(np.arange(24), rng.integers(2, 5, 24))
    x = (rng.normal(size=(24, 5))[owner] + 0.3 * rng.normal(size=(len(owner), 5))).astype(
        np.float32
    )
    y = rng.integers(0, 3, 24)[owner]
    source = jaxdp.data.from_arrays(x=x, y=y)
    patients = jaxdp.data.by_group(source, owner, max_records=4)
    owned, how = patients.gather(np.arange(24)), {"clip": 0.2, "learning_rate": 1.0, "epochs": 2}

    def loss_fn(w, record):
        return jaxdp.losses.softmax_cross_entropy(w.T @ record["x"], record["y"])

    start = jnp.zeros((5, 3))
    bounds = train_with_bounds(loss_fn, start, owned, ks=3, batch_size=24, group=True, **how)
    everything = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    once = how | {"epochs": 1}
    twin = train_with_bounds(loss_fn, start, everything, ks=3, batch_size=len(x), **once)
    train = functools.partial(
        retrained, x.astype(np.float64), y, patients.rows, owned.present, divisor=24, **how
    )
    np.testing.assert_allclose(bounds.params, train(range(24)), atol=1e-5)
    assert_nested(bounds)
    escaped = 0
    for k in range(1, 4):
        for _ in range(5):
            without = rng.choice(24, k, replace=False)
            rest = [u for u in range(24) if u not in without]
            assert outside([train(rest)], row(bounds.lower, k), row(bounds.upper, k)) == 0
            stay = np.isin(owner, rest)
            single = np.arange(len(x))[:, None], np.ones((len(x), 1), bool)
            # what the twin trains, without the same owners
            changed = retrained(
                x.astype(np.float64), y, *single, np.flatnonzero(stay), divisor=len(x), **once
            )
            escaped += outside([changed], row(twin.lower, k), row(twin.upper, k)) > 0
    assert escaped > 0
    part = jaxdp.prediction.partition_by_hash(owned, 4, salt=b"owners")
    fewer = patients.gather(np.arange(1, 24))
    np.testing.assert_array_equal(
        jaxdp.prediction.partition_by_hash(fewer, 4, salt=b"owners"), part[1:]
    )
    with pytest.raises(
        TypeError, match=r"data must be jaxdp.data.Records with group=True, got dict"
    ):
        train_with_bounds(loss_fn, start, everything, ks=3, batch_size=24, group=True, **how)
