"""One tiny ViT on real digits, whole and cut in two, in JAX and in NumPy."""

import contextlib
import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxdp.data import bundled
from jaxdp.models import Preprocessing, ViT
from jaxdp.split.backbone import Backbone
from jaxdp.split.quantization import QuantizedFrontend, Scales, quantize_frontend
from tests.split import reference_vit as _reference

_quantize_frontend = jax.jit(quantize_frontend, static_argnames="bits")


class TinyViT(NamedTuple):
    """A ViT with random parameters, cut after two of its three blocks; classes 0, 1 and 2 of the
    digits.

    Attributes:
      backbone: model and cut.
      params: all, float32.
      front, back: the same, divided.
      images: float32 [9, 8, 8, 1], and labels int32 [9], three of each class.
      reference: `reference_vit.py`.
      exact: `params` in float64.
    """

    backbone: Backbone
    params: Any
    front: Any
    back: Any
    images: np.ndarray
    labels: np.ndarray
    reference: Any
    exact: Any

    def cut_after(self, blocks: int) -> "TinyViT":
        """Returns the same model with another cut."""
        backbone = dataclasses.replace(self.backbone, cut=blocks)
        front, back = backbone.divide(self.params)
        return self._replace(backbone=backbone, front=front, back=back)

    def represent(self, images: np.ndarray) -> np.ndarray:
        """Representations in float64, of the original frontend."""
        return self.reference.front(self.exact, images, self.backbone.cut)

    def logits(self, representations: np.ndarray, params: Any = None) -> np.ndarray:
        """Logits in float64, with other parameters of the backend if they are given."""
        params = (
            self.exact
            if params is None
            else jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        )
        return self.reference.back(
            params, representations, self.backbone.cut, self.backbone.model.num_blocks
        )

    def represent_quantized(
        self, frontend: QuantizedFrontend, params: Any, images: np.ndarray
    ) -> np.ndarray:
        """Representations in float64 of a frontend with these parameters, whose activations alone
        are rounded."""
        scales, exact = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64), (frontend.scales, params)
        )
        pairs = {"output": (scales.output,)}
        for path in set(scales.first) - {"embed"}:
            product = path.endswith(self.reference.PRODUCTS)
            pairs[path] = (scales.first[path], scales.second[path] if product else None)
        return self.reference.front(
            exact, images, self.backbone.cut, self.reference.quantising(pairs, frontend.bits)
        )

    def quantized(self, bits: int = 8, factor: float = 1.0) -> QuantizedFrontend:
        """Returns a frontend without a scale search: scales are `factor` times the scales of the
        largest entries."""
        first, second = {}, {}
        seen = self.reference.observe(self.exact, self.images, self.backbone.cut)
        (output,) = seen.pop("output")
        for path, operands in seen.items():
            scales = [np.float32(factor * self.reference.largest(path, x, bits)) for x in operands]
            first[path], second[path] = scales
        scale = np.float32(factor * self.reference.largest("output", output, bits))
        return _quantize_frontend(self.front, Scales(first, second, scale), bits=bits)


@pytest.fixture(scope="session")
def reference() -> Any:
    return _reference


@pytest.fixture(scope="session")
def vit() -> TinyViT:
    model = ViT(
        num_classes=3, patch_size=2, width=8, depth=3, num_heads=_reference.HEADS, mlp_width=12
    )
    backbone = Backbone(
        model, Preprocessing(size=8, mean=(_reference.MEAN,), std=(_reference.STD,)), 2
    )
    rng = np.random.default_rng(1)

    def leaf(path: Any, shape: Any) -> jax.Array:
        name = path[-1].key
        std = 1.2 / np.sqrt(np.prod(shape.shape[:-1])) if name == "kernel" else 0.3
        return jax.device_put(np.float32((name == "scale") + rng.normal(0, std, shape.shape)))

    shapes = jax.eval_shape(model.init, jax.random.key(0), backbone.images)["params"]
    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    source = bundled("digits").of_classes([0, 1, 2])
    batch = source.gather(np.arange(9))
    front, back = backbone.divide(params)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    return TinyViT(backbone, params, front, back, batch["image"], batch["label"], _reference, exact)


@pytest.fixture
def nothing_compiles(caplog):
    """Returns a context manager that fails if JAX compiles a program in it."""

    @contextlib.contextmanager
    def watch():
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            yield
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]

    return watch
