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
from jaxdp.prediction import agt
from jaxdp.recalibration import protocol
from jaxdp.transforms import chacha, noise
from jaxdp.tta.step import compiled_step

CLIP, NOISE = 1.0, 1.0
Shape = jax.ShapeDtypeStruct


class Program(NamedTuple):
    """A program to compile.

    Attributes:
      function, args: The function and its abstract arguments.
      donate: The places of the arguments whose memory it may take over.
      open_turns: The turns of a loop that its compiler does not know.
    """

    function: Callable
    args: tuple
    donate: tuple[int, ...] = ()
    open_turns: int = 1


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


def key_of(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=chacha.CHACHA12)


KEY = Shape((8,), jnp.uint32)


def training(case: problems.Training) -> Steps:
    """Returns the gradients and the updates of a training step."""
    args = (case.params, case.batch)
    examples = case.examples
    steps = {
        "plain": lambda: Program(case.plain, args),
        "clipped": lambda: Program(case.clipped, args),
        **updates(case.trained(case.params), optax.sgd(0.01, momentum=0.9), examples),
    }
    if importlib.util.find_spec("jax_privacy"):
        turns = math.ceil(examples / case.microbatch)
        steps["jax_privacy"] = lambda: Program(case.jax_privacy(), args, (), turns)
    return steps


def updates(params, optimizer, divisor: int) -> Steps:
    """Returns an update by the sum of gradients, and a private one."""
    state = jax.eval_shape(optimizer.init, params)

    def update(params, state, grads):
        return problems.updated(optimizer, grads, state, params)

    def private(kind=None):
        correlation = None if kind is None else correlation_of(kind)

        def step(params, state, buffers, grads, words, number):
            key = key_of(words)
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
    for kind in CORRELATED:
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


def without_correlated_noise(build: Callable) -> Callable:
    """Returns a case without its updates with correlated noise, which take long to compile."""

    def steps():
        left_out = {f"private update of {kind}" for kind in CORRELATED}
        return {name: step for name, step in build().items() if name not in left_out}

    return steps


def params_of(model, shape: tuple[int, ...]):
    """Returns the abstract parameters of a classifier of images."""
    one_image = Shape((1, *shape), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), one_image)["params"]


def images(model, batch: int, shape: tuple[int, ...], microbatch: int) -> Steps:
    """Returns the steps of a classifier of images."""
    params, loss = params_of(model, shape), problems.named_classifier_loss(model)
    data = {"x": Shape((batch, *shape), jnp.float32), "label": Shape((batch,), jnp.int32)}
    return training(problems.Training(loss, params, data, (), microbatch))


def texts(name: str, mode: str, batch: int, length: int, microbatch: int, **attributes) -> Steps:
    """Returns the steps of a language model, in full or by LoRA."""
    tokens, model = Shape((batch, length + 1), jnp.int32), models.create(name, **attributes)
    return training(bench_lm.training(model, mode, tokens, microbatch=microbatch))


def adaptation(model, method: tta.Method, batch: int, side: int) -> Steps:
    """Returns a step of a method of test-time adaptation, and a private one."""
    return {
        "plain": lambda: adaptation_of(model, method, batch, side, private=False),
        "private": lambda: adaptation_of(model, method, batch, side, private=True),
    }


def adaptation_of(model, method: tta.Method, batch: int, side: int, *, private: bool) -> Program:
    """Returns one step of a method of test-time adaptation."""
    pictures = Shape((batch, side, side, 3), jnp.float32)
    params = params_of(model, (side, side, 3))
    if private:
        method = tta.private(method, clip_norm=CLIP, noise_multiplier=0.6186)
    static = []  # the adapter's program, which is no array that `eval_shape` could return

    def apply_fn(params, images):
        return model.apply({"params": params}, images)

    def start(params, words):
        optimizer = optax.sgd(1e-3, momentum=0.9)
        adapting = tta.Adapter(apply_fn, params, method, optimizer)
        static.append(adapting._program)
        state = adapting._moving(adapting.init(key_of(words)))
        return adapting.constants, state._replace(key=words)

    constants, state = jax.eval_shape(start, params, KEY)

    def step(constants, state, images, mask):
        key = key_of(state.key)
        state, logits = compiled_step(
            static[0], batch, constants, state._replace(key=key), images, mask, key
        )
        return state._replace(key=()), logits

    return Program(step, (constants, state, pictures, Shape((batch,), bool)))


def certificates(sizes: tuple[int, ...], records: int, ks: int) -> Steps:
    """Returns a training step by clipped gradients, and steps that bound it for `ks` distances.

    The plan of the training looks at its records, so these are arrays. They are small.
    """
    case = bench_prediction.Case(sizes, records, 2, 0.1, 0.1, 0.0)
    params, data = bench_prediction.problem(case)
    settings = {"clip": 0.1, "learning_rate": 0.1, "batch_size": records, "epochs": 2}
    settings |= {"trainable": bench_prediction.trained}

    def bounds(steps_before):
        plan, arrays = bench_prediction.plan_of(params, data, settings, ks, "add_remove")
        moving, frozen, rows, order, rates = arrays
        state = agt._State(moving, [], None)

        def step(frozen, rows, state, order, rate):
            return agt._batch_step(
                bench_prediction.loss, plan, frozen, rows, state, order, rate, None
            )

        # The batches after the first one have as many boxes as distances.
        for _ in range(steps_before):
            state = jax.eval_shape(step, frozen, rows, state, order[0], rates[0])
        return Program(step, (frozen, rows, state, order[0], rates[0]))

    plain = bench_prediction.baselines(case._replace(steps=1), params)["vmap"]
    return {
        "plain": lambda: Program(plain, ({"dense": params["dense"]}, data)),
        "first step": lambda: bounds(0),
        "later step": lambda: bounds(1),
    }


def recalibrated(method, records: int, classes: int) -> Steps:
    """Returns the answer of one source in one round, exact and with noise."""
    data = recalibration.Records(
        Shape((records, classes), jnp.float32), Shape((records,), jnp.int32)
    )
    scale = protocol.noise_scale(method, epsilon=1.0, adjacency="add_remove", num_classes=classes)

    def exact(records, temperature, source):
        return protocol._exact(method, 1, records, temperature, scale, source)

    def noisy(records, temperature, source, words):
        return protocol.with_noise(key_of(words), exact(records, temperature, source), scale)

    args = (data, Shape((), jnp.float32), Shape((records,), jnp.int32))
    return {"plain": lambda: Program(exact, args), "private": lambda: Program(noisy, (*args, KEY))}


def drawn(draw: Callable, size: int) -> Steps:
    """Returns noise for one array, beside JAX's normal numbers by Threefry."""
    like = Shape((size,), jnp.float32)

    def usual(words):
        return jax.random.normal(jax.random.wrap_key_data(words, impl="threefry2x32"), (size,))

    return {
        "plain": lambda: Program(usual, (Shape((2,), jnp.uint32),)),
        "private": lambda: Program(lambda words: draw(key_of(words), like, 1.0), (KEY,)),
    }


VIT_B16_VALUES = 86_567_656
BF16, TINY_VIT, TINY_TEXT = problems.BF16, problems.TINY_VIT, problems.TINY_TEXT


class Sizes:
    """Builds cases at their own sizes, or at tiny ones to check the programs."""

    def __init__(self, tiny: bool):
        self.tiny = tiny

    def classifier(
        self,
        name: str,
        batch: int,
        microbatch: int,
        side: int = 32,
        classes: int = 10,
        **attributes,
    ) -> Callable:
        if self.tiny:
            batch, microbatch, classes = 2, 1, 4
            # Patches of a ViT and the strides of a ResNet-50 need a side of 32.
            side = 32 if name.startswith(("vit", "resnet50")) else 8
            attributes |= TINY_VIT if name.startswith("vit") else {}

        def build():
            model = models.create(name, num_classes=classes, **attributes)
            return images(model, batch, (side, side, 3), microbatch)

        return build

    def digits(self, model: Callable, batch: int) -> Callable:
        microbatch = 64
        if self.tiny:
            batch, microbatch = 2, 1
        return lambda: images(model(), batch, (28, 28, 1), microbatch)

    def language(
        self,
        name: str,
        mode: str,
        batch: int,
        length: int,
        microbatch: int,
        **attributes,
    ) -> Callable:
        if self.tiny:
            batch, length, microbatch = 2, 8, 1
            attributes = TINY_TEXT | ({"kv_heads": 1} if name != "gpt2" else {})
        return lambda: texts(name, mode, batch, length, microbatch, **BF16, **attributes)

    def adapted(self, name: str, method: str, batch: int) -> Callable:
        side, classes = 224, 1000
        attributes = {}
        if self.tiny:
            batch, side, classes = 2, 32, 4
            tiny_convnext = {"widths": (8,) * 4, "depths": (1,) * 4}
            attributes = TINY_VIT if name.startswith("vit") else tiny_convnext

        def build():
            model = models.create(name, num_classes=classes, **attributes)
            return adaptation(model, bench_adaptation.METHODS[method](classes), batch, side)

        return build

    def noise(self, draw: Callable, size: int) -> Callable:
        return lambda: drawn(draw, 64 if self.tiny else size)

    def certificates(self) -> Callable:
        if self.tiny:
            return lambda: certificates((4, 3, 2), 24, 20)
        return lambda: certificates((784, 128, 10), 1000, 20)


def cases(tiny: bool = False) -> dict[str, Callable]:
    """Returns the cases by name, at tiny shapes to check the programs."""
    of = Sizes(tiny)
    mlp = functools.partial(models.create, "mlp", num_classes=10, hidden=(512, 512))
    gpt2 = {"num_classes": bench_lm.VOCABULARY}
    small_llama = {"num_classes": 49_152}
    llama = {"num_classes": 32_000}
    records = 8 if tiny else 2500
    every = {
        "noise of 86 M values": of.noise(noise.gaussian, VIT_B16_VALUES),
        "Laplace noise of 170 k values": of.noise(noise.laplace, 170_000),
        "MLP, 256": of.digits(mlp, 256),
        "CNN, 256": of.digits(problems.Digits, 256),
        "small ViT, float32, 64 of 32 x 32": of.classifier("vit_tiny", 64, 16),
        "ResNet-8, float32, 256": of.classifier("resnet20", 256, 64, depth=8),
        "ResNet-20, float32, 256": of.classifier("resnet20", 256, 64),
        "ResNet-20, bfloat16, 256": of.classifier("resnet20", 256, 64, **BF16),
        "WRN-16-4, float32, 256": of.classifier("wrn_16_4", 256, 64),
        "WRN-16-4, bfloat16, 256": of.classifier("wrn_16_4", 256, 64, **BF16),
        "ResNet-50-GN, float32, 64": of.classifier("resnet50", 64, 16, 224, 1000, norm="group"),
        "ResNet-50-GN, bfloat16, 64": of.classifier(
            "resnet50", 64, 16, 224, 1000, norm="group", **BF16
        ),
        "ViT-B/16, bfloat16, 64": of.classifier("vit_b16", 64, 16, 224, 1000, **BF16),
        "ViT-B/16, bfloat16, 256": of.classifier("vit_b16", 256, 16, 224, 1000, **BF16),
        "GPT-2 small, LoRA, bfloat16, 8 x 512": of.language("gpt2", "lora", 8, 512, 4, **gpt2),
        "GPT-2 small, LoRA, bfloat16, 4 x 1024": of.language("gpt2", "lora", 4, 1024, 2, **gpt2),
        "GPT-2 small, full, bfloat16, 8 x 512": of.language("gpt2", "full", 8, 512, 4, **gpt2),
        "GPT-2 small, full, bfloat16, 4 x 1024": of.language("gpt2", "full", 4, 1024, 2, **gpt2),
        "Llama-like 135 M, LoRA, bfloat16, 8 x 512": of.language(
            "smollm_135m", "lora", 8, 512, 4, **small_llama
        ),
        "Llama-like 1.1 B, LoRA, bfloat16, 4 x 512": of.language(
            "tinyllama_1b", "lora", 4, 512, 2, **llama
        ),
        "certificates of 20 distances": of.certificates(),
        "a round of Acc-T": lambda: recalibrated(recalibration.AccT(), records, 10),
    }
    for name, model, batch in (("ViT-B/16", "vit_b16", 64), ("ConvNeXt-T", "convnext_tiny", 64)):
        for method in ("tent", "sar", "eata", "deyo"):
            every[f"{method} on {name}, float32, {batch}"] = of.adapted(model, method, batch)
    with_correlated_noise = ("MLP, 256", "ViT-B/16, bfloat16, 64")
    return {
        name: build if name in with_correlated_noise else without_correlated_noise(build)
        for name, build in every.items()
    }
