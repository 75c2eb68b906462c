"""Sources of users: what the check finds, and that trainers and evaluations take any source that
passes it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import finetune
from jaxdp.data import (
    Examples,
    PoissonSampler,
    Source,
    bundled,
    check_source,
    from_arrays,
    take,
)
from jaxdp.privacy import Ledger

LABEL = np.arange(6, dtype=np.int32) % 2


class Own:
    """A source of a user: tokens, a mask and a volume, without a base class, a name or classes."""

    fingerprint = "version 1"

    def __len__(self):
        return 6

    def gather(self, indices):
        tokens = np.arange(18, dtype=np.uint16).reshape(6, 3)[indices]
        return {
            "tokens": tokens,
            "mask": tokens > 4,
            "scan": (np.ones((len(indices), 2, 2, 2)),),
            "label": LABEL[indices],
        }


def without(*names):
    return type(
        "Own", (), {name: value for name, value in vars(Own).items() if name not in names}
    )()


def returning(batch, **members):
    return type("Own", (Own,), {"gather": lambda self, indices: batch, **members})()


def test_any_class_with_the_three_members_is_a_source():
    assert isinstance(Own(), Source) and isinstance(bundled("blobs"), Source)
    found = check_source(Own(), "tokens", "label")
    assert found["tokens"] == jax.ShapeDtypeStruct((3,), np.uint16) and found["mask"].dtype == bool
    assert found["scan"][0].shape == (2, 2, 2)


IS_NO_SOURCE = "source must be a jaxdp.data.Source, but dict has no gather, fingerprint"
MISTAKES = [
    ({"image": np.zeros(3)}, TypeError, IS_NO_SOURCE),
    (without("__len__"), TypeError, "Own has no __len__"),
    (returning({}, fingerprint=lambda self: "v"), TypeError, "Own has a method"),
    (returning({}), TypeError, "returned no array"),
    (returning({"x": [1.0, 2.0]}), TypeError, "returned at 'x/0' a float. Return arrays"),
    (
        returning({"x": np.zeros(6)}),
        ValueError,
        r"at 'x' the shape \(6,\). The first axis must be 2",
    ),
    (returning({"x": np.float32(1)}), TypeError, "at 'x' a float32"),
    (
        returning(np.array([[1], [1, 2]], object)),
        TypeError,
        "at 'its root' the dtype object. Encode",
    ),
    (
        returning({"a": {"b": np.array(["x", "y"])}}),
        TypeError,
        "at 'a/b' the dtype <U1. Encode text",
    ),
    (returning((np.zeros(2),)), ValueError, "source has no column 'label'. It has tuple"),
]


@pytest.mark.parametrize(("source", "error", "message"), MISTAKES)
def test_what_is_wrong_with_a_source_is_said(source, error, message):
    with pytest.raises(error, match=message):
        check_source(source, *(["label"] if "label" in message else []))


def test_a_wrong_source_costs_nothing():
    """Broken twin: without the check in `fit`, the batch of the first chunk fails after its
    charge."""
    ledger = Ledger.in_memory()
    ledger.register("own", adjacency="add_remove", unit="example", delta=1e-5)
    sampler = PoissonSampler(6, 0.5)
    optimizer, options = (
        optax.sgd(0.1),
        {"clip_norm": 1.0, "noise_multiplier": 1.0, "physical_batch_size": 4},
    )
    trainer = finetune.dp_sgd(lambda p, x: p @ x["x"], optimizer, sampler=sampler, **options)
    bad = returning({"x": np.zeros((3, 2))})
    with pytest.raises(ValueError, match="The first axis must be 2"):
        finetune.fit(
            trainer, jnp.zeros(2), bad, steps=1, account=ledger.account("own"), progress=False
        )
    with pytest.raises(ValueError, match="source has no column 'label'"):
        finetune.charged_accuracy(
            lambda p, x: x,
            (),
            returning({"x": np.zeros((2, 2))}),
            account=ledger.account("own"),
            noise_multiplier=1,
        )
    assert ledger.events("own") == {}


@pytest.mark.slow
def test_a_source_of_a_user_is_trained_on_and_judged():
    """Tokens stay integers on the way to the loss: as floats they could not index the table."""
    ledger = Ledger.in_memory()
    ledger.register("own", adjacency="add_remove", unit="example", delta=1e-5)

    def logits(params, batch):
        return (params[batch["tokens"]] * batch["mask"][..., None]).sum(-2)

    def loss(params, example):
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(params, example), example["label"]
        )

    options = {
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "physical_batch_size": 4,
        "sampler": PoissonSampler(6, 0.5),
    }
    trainer = finetune.dp_sgd(loss, optax.sgd(0.1), **options)
    state = finetune.fit(
        trainer, jnp.zeros((18, 2)), Own(), steps=2, account=ledger.account("own"), progress=False
    )
    assert np.abs(state.params).max() > 0
    perfect = (
        jnp.zeros((18, 2))
        .at[:, 0]
        .set(1.0)
        .at[jnp.arange(18) // 3 % 2 == 1]
        .set(jnp.array([0.0, 1.0]))
    )
    right = (np.asarray(logits(perfect, Own().gather(np.arange(6)))).argmax(-1) == LABEL).mean()
    assert (
        finetune.accuracy(logits, perfect, Own(), batch_size=4) == pytest.approx(right)
        and right > 0.5
    )


def test_columns_keep_their_dtype():
    """Broken twin: the first releases stored token ids as float32, and gathered every uint8 as
    pixels."""
    columns = {
        "tokens": np.arange(6, dtype=np.uint16)[:, None],
        "mask": np.ones((6, 3), np.uint8),
        "target": np.linspace(0, 1, 6),
        "scan": np.zeros((6, 2, 2, 2), np.float16),
        "several": {"label": np.eye(6, dtype=bool)},
        "label": np.arange(6, dtype=np.int64),
        "features": np.arange(6)[:, None],
    }
    found = from_arrays(**columns).gather(np.arange(6))
    for (path, stored), read in zip(
        jax.tree_util.tree_leaves_with_path(columns), jax.tree.leaves(found), strict=True
    ):
        assert stored.dtype == read.dtype, path
        np.testing.assert_array_equal(stored, read)
    pixels = from_arrays(image=np.full((6, 2, 2), 255, np.uint8)).gather(np.arange(6))["image"]
    assert pixels.dtype == np.float32 and (pixels == 1).all()


UNEQUAL = {"x": np.zeros(3), "y": np.zeros(2)}
OF_ARRAYS = "of source 'arrays' must"


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({}, ValueError, "needs at least one column"),
        (
            {"text": np.array(["a", "b"])},
            TypeError,
            f"text {OF_ARRAYS} not be all: a source needs an array",
        ),
        (UNEQUAL, ValueError, f"x and y {OF_ARRAYS} have one length, got 3 and 2"),
        ({"x": 3.0}, TypeError, rf"x {OF_ARRAYS} be an array .* shape \(\)"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, error, message):
    with pytest.raises(error, match=message):
        from_arrays(**columns)


def test_a_declared_fingerprint_reads_nothing_and_follows_every_change():
    class Unread:
        dtype, shape = np.dtype(np.uint8), (6, 8, 8, 3)

        def __len__(self):
            return 6

        def __getitem__(self, rows):
            raise AssertionError("read")

    whole = Examples({"image": Unread(), "label": LABEL}, 2, declared="scans, version 1")
    parts = [*whole.split([0.5, 0.5], seed=0), whole.of_classes([1, 0]), whole.take([0, 1, 2])]
    others = [
        Examples(whole.arrays, 2, declared="scans, version 2"),
        Examples(whole.arrays, 3, declared=whole.declared),
    ]
    assert len({source.fingerprint for source in (whole, *parts, *others)}) == 7
    assert whole.take(np.arange(6)).fingerprint == whole.fingerprint
    with pytest.raises(AssertionError, match="read"):
        _ = Examples(whole.arrays, 2).fingerprint


def test_a_part_of_a_users_source_keeps_its_name_and_classes():
    class Named(Own):
        name = "mine"
        num_classes = 2

    part = take(Named(), np.array([1, 3]))
    assert (part.name, part.num_classes) == ("mine", 2)
    assert take(Own(), np.array([1])).num_classes == 0
