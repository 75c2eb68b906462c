"""What the server does: merged data, frontends for parts of it, tuning between frontends,
adaptation."""

import dataclasses
import itertools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.data import bundled
from jaxdp.split import server
from jaxdp.split.augment import amplitude_exchange, hilbert_augment
from jaxdp.split.quantization import quantize_frontend, search_scales
from jaxdp.split.server import (
    adapt,
    calibrate_frontends,
    merge_amplitude_exchange,
    merge_hilbert,
    mixup_representations,
    tune_backend,
)

KEY = jax.random.key(0)

# --- Data and frontends --------------------------------------------------------------------------


@pytest.mark.slow
def test_merged_data_are_the_originals_and_then_their_transforms(vit, monkeypatch):
    images, labels = merge_hilbert(vit.images, vit.labels)
    assert images.shape == (18, 8, 8, 1) and images.dtype == jnp.float32
    assert np.array_equal(images[:9], vit.images) and np.array_equal(
        images[9:], hilbert_augment(vit.images)
    )
    assert labels.tolist() == [*vit.labels.tolist(), *vit.labels.tolist()]
    # Larger data in parts, in order.
    monkeypatch.setattr(server, "hilbert_augment", lambda x: -x)
    many = np.arange(1, 601, dtype=np.float32).reshape(-1, 1, 1, 1)
    assert np.array_equal(merge_hilbert(many, np.zeros(600, int))[0], np.concatenate([many, -many]))


@pytest.mark.slow
def test_amplitudes_come_from_other_images_of_the_server(vit):
    images, labels = merge_amplitude_exchange(KEY, vit.images, vit.labels)
    again, _ = merge_amplitude_exchange(KEY, vit.images, vit.labels)
    other, _ = merge_amplitude_exchange(jax.random.key(1), vit.images, vit.labels)
    assert np.array_equal(images, again) and not np.array_equal(images, other)
    assert np.array_equal(images[:9], vit.images)
    assert labels.tolist() == [*vit.labels.tolist(), *vit.labels.tolist()]
    # A permutation: the frequency 0, that is the mean, of each image goes to exactly one.
    donors = jax.random.permutation(KEY, vit.images)
    assert np.array_equal(images[9:], amplitude_exchange(vit.images, donors))
    assert not np.array_equal(donors, vit.images)


@pytest.fixture
def searched(vit, monkeypatch):
    """Records images, labels and options of every scale search. The results are numbered."""
    calls = []

    def search(backbone, params, images, labels, **options):
        assert backbone is vit.backbone and params is vit.params
        calls.append(
            (np.asarray(images).ravel().astype(int).tolist(), np.asarray(labels).tolist(), options)
        )
        return len(calls)

    def quantize(front, scales, *, bits):
        assert set(front) == set(vit.front)
        return scales, bits

    for real, fake in ((search_scales, search), (quantize_frontend, quantize)):
        monkeypatch.setattr(
            server, real.__name__, unittest.mock.create_autospec(real, side_effect=fake)
        )
    return calls


# Images that are their own number, whose labels are in another order.
NUMBERED = np.arange(12.0).reshape(12, 1, 1, 1)
LABELS = np.array([2, 0, 1] * 4)


def calibrate(vit, **options):
    return calibrate_frontends(
        options.pop("key", KEY), vit.backbone, vit.params, NUMBERED, LABELS, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["random", "domain", "class"])
def test_every_part_of_the_data_has_a_frontend(vit, searched, partition):
    frontends = calibrate(vit, partition=partition, bits=5, metric="mse")
    assert frontends == ((1, 5), (2, 5), (3, 5), (4, 5))
    everything, *parts = [rows for rows, _, _ in searched]
    assert sorted(everything) == list(range(12))  # F_0
    assert [len(part) for part in parts] == [4, 4, 4]
    assert sorted(itertools.chain(*parts)) == list(range(12))
    labels = np.asarray(LABELS)
    assert all(given == labels[rows].tolist() for rows, given, _ in searched)
    assert all(options == {"bits": 5, "metric": "mse"} for _, _, options in searched)
    groups = {
        "domain": [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}],
        "class": [set(np.flatnonzero(labels == c).tolist()) for c in range(3)],
    }
    found = [set(part) for part in parts]
    if partition == "random":
        assert found not in groups.values()
        calibrate(vit, key=jax.random.key(1))
        assert found != [set(rows) for rows, _, _ in searched[5:]]
    else:
        assert found == groups[partition]


@pytest.mark.slow
def test_scales_are_searched_on_a_sample_of_each_part(vit, searched):
    drawn = set()
    for k in range(15):
        searched.clear()
        calibrate(vit, key=jax.random.key(k), samples=3, partition="domain")
        samples = [set(rows) for rows, _, _ in searched]
        assert [len(sample) for sample in samples] == [3, 3, 3, 3]
        assert all(sample < set(range(4 * m, 4 * m + 4)) for m, sample in enumerate(samples[1:]))
        drawn.add(frozenset(samples[1]))
    assert len(drawn) > 2  # any of the four images may be left out
    searched.clear()
    assert len(calibrate(vit, frontends=0)) == len(searched) == 1


def test_impossible_parts_are_refused(vit, searched):
    with pytest.raises(
        ValueError, match="partition must be 'random', 'domain' or 'class', got 'label'"
    ):
        calibrate(vit, partition="label")
    for frontends in (-1, 13):
        with pytest.raises(
            ValueError,
            match=rf"frontends must be in \[0, 12\], the number of images, got {frontends}",
        ):
            calibrate(vit, frontends=frontends)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        calibrate(vit, samples=0)
    for labels, message in [
        # those of the originals only
        (
            LABELS[:6],
            r"labels must be \[n\], one class .* got shape \[n\] of another n",
        ),
        (LABELS + 1, r"labels must be in \[0, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            calibrate_frontends(KEY, vit.backbone, vit.params, NUMBERED, labels)
    assert not searched


# --- Tuning between frontends -------------------------------------------------------------------


@pytest.mark.slow
def test_mixing_shares_are_beta_distributed():
    """Checks Eq. 10: one share per image, mean 1/2, variance 1 / (4 (2 beta + 1)). One key in a
    million fails."""
    size, ones = 4000, jnp.ones((4000, 2, 3))
    mix = jax.jit(
        lambda key, quantized, exact: mixup_representations(key, quantized, exact, beta=0.75)
    )
    mixed = np.asarray(mix(KEY, 3 * ones, ones), np.float64)
    share = (mixed[:, 0, 0] - 1) / 2
    np.testing.assert_allclose(
        (mixed - 1) / 2, np.broadcast_to(share[:, None, None], mixed.shape), atol=1e-6
    )
    assert scipy.stats.kstest(share, scipy.stats.beta(0.75, 0.75).cdf).pvalue > 1e-6
    # Other laws on [0, 1], such as the uniform one, are told apart.
    assert scipy.stats.kstest(share, "uniform").pvalue < 1e-6
    assert abs(share.mean() - 0.5) < 5 * np.sqrt(share.var() / size)
    assert abs(share.var() * 4 * (2 * 0.75 + 1) - 1) < 5 * np.sqrt(1 / size)
    # The end points: of equal representations, nothing changes.
    np.testing.assert_allclose(mix(KEY, ones, ones), ones, rtol=1e-6)
    assert share.min() < 0.01 and share.max() > 0.99
    other = (np.asarray(mix(jax.random.key(1), 3 * ones, ones))[:, 0, 0] - 1) / 2
    assert abs(np.corrcoef(share, other)[0, 1]) < 6 / np.sqrt(size)
    with pytest.raises(ValueError, match="beta must be positive, got 0"):
        mixup_representations(KEY, ones, ones, beta=0)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_frontends_of_mixed_representations(vit, monkeypatch):
    """Checks Eq. 11 for fixed shares, with representations mixed and classified in float64."""

    def mix(key, quantized, exact, *, beta):
        """Mixes with another share for every key, image and beta."""
        share = beta * jax.random.uniform(key, (9, 1, 1))
        return share * quantized + (1 - share) * exact

    monkeypatch.setattr(server, "mixup_representations", mix)
    vit = vit.cut_after(1)
    frontends = vit.quantized(8, factor=0.5), vit.quantized(8, factor=0.1)
    loss = jax.jit(server.mixup_loss(vit.backbone, 0.8))
    found = loss(
        vit.back, (vit.front, frontends), (jnp.asarray(vit.images), jnp.asarray(vit.labels)), KEY
    )
    exact, expected = vit.represent(vit.images), 0
    for key, frontend in zip(jax.random.split(KEY, 2), frontends, strict=True):
        quantized = vit.represent_quantized(frontend, frontend.params, vit.images)
        mixed = np.asarray(mix(key, quantized, exact, beta=0.8), np.float64)
        expected += vit.reference.cross_entropy(vit.logits(mixed), vit.labels) / 2
    assert found.shape == (9,)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    plain = vit.reference.cross_entropy(vit.logits(exact), vit.labels)
    assert np.median(abs(plain - expected)) > 0.01


@pytest.mark.slow
def test_tuning_lowers_the_loss_and_returns_the_backend_alone(vit):
    frontends = (vit.quantized(8),)
    before = jax.tree.map(np.array, (vit.params, frontends))
    options = {"learning_rate": 1e-2, "epochs": 30, "batch_size": 4}
    back = tune_backend(KEY, vit.backbone, vit.params, frontends, vit.images, vit.labels, **options)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, vit.back)
    moved = jax.tree.map(
        lambda a, b: float(np.max(abs(np.asarray(a) - np.asarray(b)))), back, vit.back
    )
    assert min(jax.tree.leaves(moved)) > 1e-4
    quantized = vit.represent_quantized(frontends[0], frontends[0].params, vit.images)
    for x in (vit.represent(vit.images), quantized):
        old, new = (
            vit.reference.cross_entropy(vit.logits(x, params), vit.labels).mean()
            for params in (None, back)
        )
        assert new < 0.6 * old
    after = jax.tree.map(np.array, (vit.params, frontends))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


def test_impossible_tuning_is_refused(vit):
    with pytest.raises(ValueError, match=r"labels must be in \[0, 3\)"):
        tune_backend(KEY, vit.backbone, vit.params, (vit.quantized(8),), vit.images, vit.labels + 1)
    with pytest.raises(ValueError, match="frontends must not be empty"):
        tune_backend(KEY, vit.backbone, vit.params, (), vit.images, vit.labels)


# --- Adaptation ---------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shifted:
    """Uploads: copy c of every representation is shifted by c / 10."""

    representations: jax.Array

    def index(self):
        images, numbers = np.divmod(np.arange(2 * len(self.representations)), 2)
        return jnp.asarray(images[::-1].copy()), jnp.asarray(numbers)

    def batch(self, images, numbers):
        return self.representations[images] + numbers[:, None, None] / 10


@pytest.mark.slow
def test_few_images_teach_the_task(vit):
    """Zeros and ones, ten images of each, by a frontend that has learnt nothing; chance is one
    half."""
    batch = bundled("digits").of_classes([0, 1]).gather(np.arange(120))
    order = np.argsort(batch["label"], kind="stable")
    few, rest = np.concatenate([order[:10], order[-10:]]), order[10:-10]
    x = vit.represent(batch["image"]).astype(np.float32)
    copies = Shifted(jnp.asarray(x[few]))
    options = {"num_classes": 2, "learning_rate": 1e-2, "epochs": 20, "batch_size": 10}
    accuracy = []
    for labels in (batch["label"], 1 - batch["label"]):
        adapted = adapt(KEY, vit.backbone, vit.back, copies, labels[few], **options)
        logits = np.asarray(adapted.logits(x[rest]))
        assert adapted.backbone.num_classes == 2 and logits.shape == (100, 2)
        accuracy.append(np.mean(logits.argmax(1) == batch["label"][rest]))
        assert adapted.epochs == 20
    # With the labels exchanged, it learns that.
    assert accuracy[0] > 0.75 and accuracy[1] < 0.25, accuracy
    np.testing.assert_allclose(logits, vit.logits(x[rest], adapted.back), atol=1e-3)
    # A step that is lost in rounding: the loss does not decrease.
    options |= {"learning_rate": 1e-30, "patience": 1}
    assert adapt(KEY, vit.backbone, vit.back, copies, labels[few], **options).epochs < 20


@pytest.mark.slow
def test_noisy_labels_are_corrected_by_their_probabilities(vit):
    """Checks -log sum_k p_k P(observed | k), with the label of each row's image."""
    x = vit.represent(vit.images[:4])
    copies = Shifted(jnp.asarray(x, jnp.float32))
    observed = np.array([2, 0, 1, 1])
    # rows are true labels; not symmetric
    noise = np.array([[0.7, 0.2, 0.1], [0.0, 0.9, 0.1], [0.3, 0.3, 0.4]])
    images, numbers = copies.index()
    given = x[np.asarray(images)] + np.asarray(numbers)[:, None, None] / 10
    p = scipy.special.softmax(vit.logits(given), axis=-1)

    @jax.jit
    def losses_and_gradient(matrix):
        frozen = (copies, jnp.asarray(observed), matrix)
        loss = lambda back: server.copies_loss(vit.backbone)(back, frozen, (images, numbers), KEY)  # noqa: E731
        return loss(vit.back), jax.grad(lambda back: loss(back).sum())(vit.back)

    for matrix in (noise, np.eye(3)):
        found, gradient = losses_and_gradient(jnp.asarray(matrix, jnp.float32))
        expected = -np.log((p @ matrix)[np.arange(8), observed[np.asarray(images)]])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        # Where a label is impossible for some class, too.
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_impossible_adaptation_is_refused(vit):
    copies = Shifted(jnp.asarray(vit.represent(vit.images[:4]), jnp.float32))
    for labels, classes, message in [
        ([0, 1, 2, 0], 2, r"labels must be in \[0, 2\), the classes. Some labels are outside"),
        ([0, 1, -1, 0], 2, r"labels must be in \[0, 2\)"),
        ([0, 1, 1], 2, r"labels must be \[n\], one class .* got shape \[n\] of another n"),
        ([0, 0, 0, 0], 1, "num_classes must be at least 2, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            adapt(KEY, vit.backbone, vit.back, copies, np.array(labels), num_classes=classes)
    with pytest.raises(ValueError, match=r"label_noise must be \[2, 2\], got \[3, 3\]"):
        adapt(
            KEY,
            vit.backbone,
            vit.back,
            copies,
            np.array([0, 1, 1, 0]),
            num_classes=2,
            label_noise=jnp.eye(3),
        )
