"""A method that jaxdp does not have: its own file (this one), one row in METHODS, and it passes
what others pass."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxdp import tta
from tests.tta import test_methods as methods


def pseudo_label_loss(logits):
    """Computes the cross entropy to the predicted label."""
    return -jax.nn.log_softmax(logits.astype(jnp.float32)).max()


@dataclasses.dataclass(frozen=True, eq=False)
class PseudoLabel(tta.Method):
    """Cross entropy to the predicted label, weighted by the confidence of the prediction.

    Attributes:
      num_classes: C.
      least: confidence below which an image is left out.
    """

    num_classes: int
    least: float = 0.3
    uncertainty: tta.method.Uncertainty = dataclasses.field(default=pseudo_label_loss, kw_only=True)

    def weight(self, sample):
        """Weighs images by the confidence p_max."""
        return jnp.exp(-sample.uncertainty)

    def reliable(self, sample):
        """Keeps images with confidence p_max > least."""
        return jnp.exp(-sample.uncertainty) > self.least


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(tta.METHODS, "PseudoLabel", PseudoLabel)


@pytest.mark.slow
def test_a_sixth_method_conforms(registered):
    methods.conforms("PseudoLabel")


def test_a_sixth_method_is_described_when_it_is_made_private():
    text = tta.private(PseudoLabel(10), clip_norm=1.0, noise_multiplier=1.0).describe()
    for line in (
        "private PseudoLabel, clip norm 1, noise 1 x clip norm",
        "  Computes the cross entropy to the predicted label: absorbed",
        "  Weighs images by the confidence p_max: absorbed",
        "  Keeps images with confidence p_max > least: removed",
    ):
        assert line in text


class RowOfWeights(PseudoLabel):
    def weight(self, sample):
        return jax.nn.softmax(sample.logits)  # [C], which would broadcast


class RowOfFlags(PseudoLabel):
    def reliable(self, sample):
        return sample.logits > 0


@pytest.mark.parametrize(
    ("method", "form"),
    [
        (RowOfWeights(4), lambda method: method),
        (RowOfFlags(4), lambda method: method),
        (RowOfFlags(4), lambda method: tta.clipped(method, 1.0)),
        (
            RowOfWeights(4),
            lambda method: tta.private(method, clip_norm=1.0, noise_multiplier=1.0),
        ),
    ],
    ids=["weights", "flags", "clipped", "private"],
)
def test_hooks_on_one_image_return_one_number(method, form):
    """Without the assertion, the loss of an image would be a sum over classes."""
    tiny = methods.tiny
    adapter = tta.Adapter(tiny.apply_fn, tiny.PARAMS, form(method), optax.sgd(0.1))
    with pytest.raises(AssertionError, match=r"hooks of RowOf.* on one image must return scalars"):
        adapter.step(adapter.init(jax.random.key(0)), tiny.stream(0, 1)[0])


@pytest.mark.slow
def test_a_method_whose_memory_changes_its_form_does_not_conform(monkeypatch):
    class Raw(PseudoLabel):
        def remember(self, memory, samples, kept):
            return samples.logits

    monkeypatch.setitem(tta.METHODS, "Raw", Raw)
    with pytest.raises((AssertionError, ValueError)):
        methods.conforms("Raw")
