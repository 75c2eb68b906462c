"""The programs that `benchmarks.compiled` compiles, as functions of abstract arrays. Nothing is
allocated.

A case maps names of steps to programs. "plain" is its base. In a case of training "plain" and
"clipped" are gradients of a batch, and "update" and "private update" are what follows them:
momentum, and noise before it. That of "private update of ..." is correlated with the noise of
other steps. The trainer runs the gradient and the update as two programs too."""

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.matrix_factorization import buffered_toeplitz

import jaxdp
from benchmarks import bench_adaptation, bench_lm, bench_prediction, problems
from jaxdp import models, recalibration, tta
from jaxdp.compilers import hlo
from jaxdp.recalibration import protocol
from jaxdp.transforms import noise
from jaxdp.tta.step import compiled_step

CLIP, NOISE = 1.0, 1.0
Shape = jax.ShapeDtypeStruct


class Program(NamedTuple):
    """A program to compile.

    Attributes:
      function, args: The function and its abstract arguments.
      donate: The places of the arguments whose memory it may take over.
      assumed: What its compiler does not know.
    """

    function: Callable
    args: tuple
    donate: tuple[int, ...] = ()
    assumed: hlo.Assumed = hlo.ASSUMED


Steps = Mapping[str, Callable[[], Program]]

# The noise of updates whose steps have correlated noise.
CORRELATED = ("4 bands", "16 bands", "a BLT")
STEPS = 64  # of a run

# What each derived step consists of. Its cycles, bytes and kernels are sums, its memory is the
# largest.
WHOLE = {
    "plain step": ("plain", "update"),
    "private step": ("clipped", "private update"),
    **{f"private step of {kind}": ("clipped", f"private update of {kind}") for kind in CORRELATED},
}


KEY = jax.eval_shape(lambda: noise.stream(bytes(16), "noise"))


def training(case: problems.Training, *, correlated: bool = False) -> Steps:
    """Returns the gradients and the updates of a training step.

    Updates with correlated noise take long to compile, so a case has them only if it says so.
    """
    args = (case.params, case.batch)
    examples = case.examples
    steps = {
        "plain": lambda: Program(case.plain, args),
        "clipped": lambda: Program(case.clipped, args),
        **updates(case.trained(case.params), optax.sgd(0.01, momentum=0.9), examples, correlated),
    }
    if importlib.util.find_spec("jax_privacy"):
        microbatches = hlo.Assumed(open_turns=math.ceil(examples / case.microbatch))
        steps["jax_privacy"] = lambda: Program(case.jax_privacy(), args, (), microbatches)
    return steps


def updates(params, optimizer, divisor: int, correlated: bool) -> Steps:
    """Returns an update by the sum of gradients, and private ones."""
    state = jax.eval_shape(optimizer.init, params)

    def update(params, state, grads):
        return problems.updated(optimizer, grads, state, params)

    def private(kind=None):
        correlation = None if kind is None else correlation_of(kind)

        def step(params, state, buffers, grads, key, number):
            privatizer = jaxdp.privatize(
                CLIP, noise_multiplier=NOISE, divisor=divisor, key=key, noise=correlation
            )
            before = noise.PrivatizeState(key, number, buffers)
            noisy, after = privatizer.update(grads, before)
            return update(params, state, noisy), after.buffers

        buffers = None
        if correlation is not None:
            buffers = jax.eval_shape(correlation.zeros, params)
        arrays = (params, state, buffers, params, KEY, Shape((), jnp.int32))
        return Program(step, arrays, (0, 1, 2))

    steps = {
        "update": lambda: Program(update, (params, state, params), (0, 1)),
        "private update": private,
    }
    for kind in CORRELATED if correlated else ():
        steps[f"private update of {kind}"] = functools.partial(private, kind)
    return steps


def correlation_of(kind: str):
    """Returns correlated noise of a run in which each example takes part once."""
    if kind.endswith("bands"):
        bands = int(kind.split()[0])
        places = np.arange(1, bands)
        # Those of the square root of prefix sums (Fichtenberger et al. 2023, arXiv:2202.11205).
        coefficients = np.cumprod([1.0, *(1 - 1 / (2 * places))])
        return jaxdp.correlated(coefficients, steps=STEPS)
    build = buffered_toeplitz.BufferedToeplitz.build
    return jaxdp.correlated(build([0.9, 0.5], [0.3, 0.1], jnp.float32), steps=STEPS)


def params_of(model, side: int):
    """Returns the abstract parameters of a classifier of images."""
    one_image = Shape((1, side, side, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), one_image)["params"]


def adaptation(model, method: tta.Method, batch: int, side: int) -> Steps:
    """Returns a step of a method of test-time adaptation, and a private one."""
    return {
        "plain": lambda: adaptation_of(model, method, batch, side, private=False),
        "private": lambda: adaptation_of(model, method, batch, side, private=True),
    }


def adaptation_of(model, method: tta.Method, batch: int, side: int, *, private: bool) -> Program:
    """Returns one step of a method of test-time adaptation."""
    pictures = Shape((batch, side, side, 3), jnp.float32)
    params = params_of(model, side)
    if private:
        method = tta.private(method, clip_norm=CLIP, noise_multiplier=0.6186)
    static = []  # the adapter's program, which is no array that `eval_shape` could return

    def apply_fn(params, images):
        return model.apply({"params": params}, images)

    def start(params, key):
        adapter = tta.Adapter(apply_fn, params, method, optax.sgd(1e-3, momentum=0.9))
        static.append(adapter._program)
        return adapter.constants, adapter._moving(adapter.init(key))._replace(key=key)

    constants, state = jax.eval_shape(start, params, KEY)

    def step(constants, state, images, mask):
        after, logits = compiled_step(*static, batch, constants, state, images, mask, state.key)
        return after._replace(key=()), logits

    args = (constants, state, pictures, Shape((batch,), bool))
    # A plain step computes a batch again only where a record has no finite loss.
    return Program(step, args, (), hlo.Assumed(cheapest_branches=not private))


def certificates(sizes: tuple[int, ...], records: int, ks: int) -> Steps:
    """Returns a training step by clipped gradients, and steps that bound it for `ks` distances.

    The plan of the training looks at its records, so these are arrays. They are small.
    """
    case = bench_prediction.Case(sizes, records, 2, 0.1, 0.1, 0.0)
    params, data = bench_prediction.problem(case)

    def bounds(later):
        step, arguments = bench_prediction.step_of(case, params, data, ks)
        args = arguments()
        # The batches after the first one have as many boxes as distances.
        return Program(step, arguments(jax.eval_shape(step, *args)) if later else args)

    plain = bench_prediction.baselines(case._replace(steps=1), params)["vmap"]
    return {
        "plain": lambda: Program(plain, ({"dense": params["dense"]}, data)),
        "first step": lambda: bounds(False),
        "later step": lambda: bounds(True),
    }


def recalibrated(method, records: int, classes: int) -> Steps:
    """Returns the answer of one source in one round, exact and with noise."""
    data = recalibration.Records(
        Shape((records, classes), jnp.float32), Shape((records,), jnp.int32)
    )
    scale = protocol.noise_scale(method, epsilon=1.0, adjacency="add_remove", num_classes=classes)

    def exact(records, temperature, source):
        return protocol._exact(method, 1, records, temperature, scale, source)

    def noisy(records, temperature, source, key):
        return protocol.with_noise(key, exact(records, temperature, source), scale)

    args = (data, Shape((), jnp.float32), Shape((records,), jnp.int32))
    return {"plain": lambda: Program(exact, args), "private": lambda: Program(noisy, (*args, KEY))}


def drawn(draw: Callable, size: int) -> Steps:
    """Returns noise for one array, beside JAX's normal numbers by Threefry."""
    like = Shape((size,), jnp.float32)

    def usual(key):
        return jax.random.normal(key, (size,))

    return {
        "plain": lambda: Program(usual, (jax.eval_shape(jax.random.key, 0),)),
        "private": lambda: Program(lambda key: draw(key, like, 1.0), (KEY,)),
    }


VIT_B16_VALUES = 86_567_656
BF16, TINY_VIT, TINY_TEXT = problems.BF16, problems.TINY_VIT, problems.TINY_TEXT


def cases(tiny: bool = False) -> dict[str, Callable]:
    """Returns the cases by name, at tiny shapes to check the programs."""

    def image(name, batch, microbatch, side=32, classes=10, correlated=False, **attributes):
        if tiny:
            # Patches of a ViT and the strides of a ResNet-50 need a side of 32.
            side = 32 if name.startswith(("vit", "resnet50")) else 8
            attributes |= TINY_VIT if name.startswith("vit") else {}
            classes = 4
        model = lambda: models.create(name, num_classes=classes, **attributes)  # noqa: E731
        return images(model, batch, microbatch, (side, side, 3), correlated)

    def images(model, batch, microbatch=64, shape=(28, 28, 1), correlated=False):
        sizes = (2, shape, 1) if tiny else (batch, shape, microbatch)

        def steps():
            return training(problems.image_training(model(), *sizes), correlated=correlated)

        return steps

    def text(name, mode, batch, length, microbatch, **attributes):
        sizes = (2, 8, 1) if tiny else (batch, length, microbatch)
        if tiny:
            attributes = TINY_TEXT | ({"kv_heads": 1} if name != "gpt2" else {})
        model = lambda: models.create(name, **BF16, **attributes)  # noqa: E731
        return lambda: training(bench_lm.training(model(), mode, *sizes))

    def adapted(name, method):
        batch, side, classes = (2, 32, 4) if tiny else (64, 224, 1000)
        small = TINY_VIT if name.startswith("vit") else {"widths": (8,) * 4, "depths": (1,) * 4}
        attributes = small if tiny else {}
        model = lambda: models.create(name, num_classes=classes, **attributes)  # noqa: E731
        return lambda: adaptation(model(), bench_adaptation.METHODS[method](classes), batch, side)

    def draws(draw, size):
        return lambda: drawn(draw, 64 if tiny else size)

    mlp = functools.partial(models.create, "mlp", num_classes=10, hidden=(512, 512))
    gpt2, wide = functools.partial(text, "gpt2", num_classes=50_257), (256, 64)
    large = functools.partial(image, "resnet50", 64, 16, 224, 1000, norm="group")
    vit = functools.partial(image, "vit_b16", side=224, classes=1000, **BF16)
    every = {
        "noise of 86 M values": draws(noise.gaussian, VIT_B16_VALUES),
        "Laplace noise of 170 k values": draws(noise.laplace, 170_000),
        "MLP, 256": images(mlp, 256, correlated=True),
        "CNN, 256": images(problems.Digits, 256),
        "small ViT, float32, 64 of 32 x 32": image("vit_tiny", 64, 16),
        "ResNet-8, float32, 256": image("resnet20", *wide, depth=8),
        "ResNet-20, float32, 256": image("resnet20", *wide),
        "ResNet-20, bfloat16, 256": image("resnet20", *wide, **BF16),
        "WRN-16-4, float32, 256": image("wrn_16_4", *wide),
        "WRN-16-4, bfloat16, 256": image("wrn_16_4", *wide, **BF16),
        "ResNet-50-GN, float32, 64": large(),
        "ResNet-50-GN, bfloat16, 64": large(**BF16),
        "ViT-B/16, bfloat16, 64": vit(64, 16, correlated=True),
        "ViT-B/16, bfloat16, 256": vit(256, 16),
        "GPT-2 small, LoRA, bfloat16, 8 x 512": gpt2("lora", 8, 512, 4),
        "GPT-2 small, LoRA, bfloat16, 4 x 1024": gpt2("lora", 4, 1024, 2),
        "GPT-2 small, full, bfloat16, 8 x 512": gpt2("full", 8, 512, 4),
        "GPT-2 small, full, bfloat16, 4 x 1024": gpt2("full", 4, 1024, 2),
        "Llama-like 135 M, LoRA, bfloat16, 8 x 512": text(
            "smollm_135m", "lora", 8, 512, 4, num_classes=49_152
        ),
        "Llama-like 1.1 B, LoRA, bfloat16, 4 x 512": text(
            "tinyllama_1b", "lora", 4, 512, 2, num_classes=32_000
        ),
        "certificates of 20 distances": functools.partial(
            certificates, *(((4, 3, 2), 24) if tiny else ((784, 128, 10), 1000)), 20
        ),
        "a round of Acc-T": lambda: recalibrated(recalibration.AccT(), 8 if tiny else 2500, 10),
    }
    every["tent on ViT-S/16, float32, 64"] = adapted("vit_s16", "tent")
    for name, model in (("ViT-B/16", "vit_b16"), ("ConvNeXt-T", "convnext_tiny")):
        for method in ("tent", "sar", "eata", "deyo"):
            every[f"{method} on {name}, float32, 64"] = adapted(model, method)
    return every
