"""Times the whole private step against the plain step: sample, read, clip, noise and update.

    python -m benchmarks run steps --cases mlp,cnn,resnet20,vit,lm --rounds 15 --peers

"private" is a step as `fit` takes it, with the sizes of physical batches that the library chooses.
Its batches vary in size, as Poisson sampling demands, and its ratios compare sums over all rounds.
"clipped" is the clipped gradient of one batch alone, and "noise" the step of an empty batch.
"plain" takes an ordinary step on a batch of the expected size. A thread draws and reads the next
batches during these steps, as `fit` does. "first" is the time from a new trainer to the end of its
first step, without a cache. For "private" it has the programs of this step alone, and "ready" is
the time to the end of the first step that may use all of them.

With --peers, jax_privacy clips, adds noise and updates on a batch of the expected size. Opacus does
so with hooks, ghost clipping and functorch. Its ratios are over a plain step in PyTorch. Neither
samples here. Install torch and opacus for this. A step of more than ten seconds is timed once."""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

import jaxdp
from benchmarks import problems, timing
from jaxdp import finetune, models
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.data.physical import FIRST_STEPS
from jaxdp.finetune.batches import MOST_AHEAD
from jaxdp.finetune.step import apart
from jaxdp.memory import keep_freed_memory
from jaxdp.report import format_table
from jaxdp.transforms import noise

RECORDS, CLIP, NOISE, CLASSES, MOST_STEPS = 1024, 1.0, 1.0, 10, 10_000
VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS = 4096, 128, 256, 4, 4
# What a case is, and its aims: over plain, over the best mode of Opacus, and seconds of the first
# step.
AIMS = {
    "mlp": ("MLP 784-512-512-10, batch 256", 1.5, 0.8, 2),
    "cnn": ("CNN of the MNIST examples, batch 256", 1.3, 0.8, 3),
    "resnet20": ("ResNet-20 with GroupNorm, batch 64", 1.2, 1.0, 8),
    "vit": ("ViT, width 192, 6 layers, batch 32", 1.2, 1.0, 10),
    "lm": ("tied transformer LM, 128 tokens, batch 16", 1.15, 0.9, 10),
}


class Digits(nn.Module):
    """The network of the MNIST examples of Opacus and TensorFlow Privacy."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        pool = functools.partial(models.max_pool, size=2, stride=1)
        x = pool(nn.relu(nn.Conv(16, (8, 8), 2, padding=((2, 3), (2, 3)))(x)))
        x = pool(nn.relu(nn.Conv(32, (4, 4), 2, padding="VALID")(x)))
        x = nn.relu(nn.Dense(32)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(CLASSES)(x)


class Language(nn.Module):
    """A causal transformer whose input and output embeddings are one array."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(VOCABULARY, WIDTH)
        places = self.param("places", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x, mask = embedding(tokens) + places, nn.make_causal_mask(tokens)
        for _ in range(DEPTH):
            x += nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return embedding.attend(nn.LayerNorm()(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, the shape of its inputs, and the expected batch size."""

    network: Any
    shape: tuple[int, ...]
    batch_size: int
    tokens: bool = False


def cases() -> dict[str, Case]:
    vit = problems.VIT
    return {
        "mlp": Case(models.create("mlp", num_classes=CLASSES, hidden=(512, 512)), (28, 28, 1), 256),
        "cnn": Case(Digits(), (28, 28, 1), 256),
        "resnet20": Case(models.create("resnet20", num_classes=CLASSES), (32, 32, 3), 64),
        "vit": Case(models.create("vit_tiny", num_classes=CLASSES, **vit), (32, 32, 3), 32),
        "lm": Case(Language(), (LENGTH + 1,), 16, tokens=True),
    }


def source_of(case: Case) -> Any:
    generator = np.random.default_rng(0)
    if case.tokens:
        return from_arrays(
            tokens=generator.integers(VOCABULARY, size=(RECORDS, *case.shape), dtype=np.int32)
        )
    images = generator.random((RECORDS, *case.shape), np.float32)
    return from_arrays(x=images, label=np.arange(len(images)) % CLASSES)


def losses_of(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the loss of one example, and the mean loss of a batch in its usual form."""

    def batch_losses(params: Any, batch: Any) -> jax.Array:
        if case.tokens:
            logits = case.network.apply(params, batch["tokens"][..., :-1])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["tokens"][..., 1:]
            ).mean(-1)
        logits = case.network.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def loss(params: Any, example: Any) -> jax.Array:
        return batch_losses(params, jax.tree.map(lambda x: x[None], example))[0]

    return loss, lambda params, batch: batch_losses(params, batch).mean()


def typical(trainer: Any, state: Any, source: Any, steps: Sequence[int]) -> Any:
    """Returns the state with the first key for which the batches of these steps are typical.

    Their mean size, and the mean cost of their physical batches, are within 1 % of what is
    expected. A few batches of 16 examples are often a tenth off, and so would be the time."""
    sizes, mean = trainer.physical(state, source), trainer.sampler.expected_batch_size

    def cost(batch_size: int) -> float:
        counts = sizes.counts(batch_size)
        return sum(count * (size + sizes.overhead) for size, count in counts.items())

    def means(rows: Any) -> np.ndarray:
        return np.array([np.mean(rows), np.mean([cost(int(n)) for n in rows])])

    expected = means(np.random.default_rng(0).binomial(RECORDS, mean / RECORDS, 10_000))
    for number in range(1000 if steps else 0):
        key = noise.stream(number.to_bytes(16, "big"), "benchmark")
        candidate = state._replace(noise=state.noise._replace(key=key))
        rows = [len(trainer.drawn(candidate._replace(step=np.int32(step)))) for step in steps]
        if np.abs(means(rows) / expected - 1).max() < 0.01:
            return candidate
    return state


@contextlib.contextmanager
def read_ahead(read: Callable[[], Any]) -> Iterator[Iterator[Any]]:
    """Yields batches that a thread reads during the steps before."""
    with concurrent.futures.ThreadPoolExecutor(1) as reader:

        def batches() -> Iterator[Any]:
            coming = collections.deque[Any]()
            while True:
                if len(coming) < 2:  # as many at once as `fit` reads of small batches
                    coming.extend(reader.submit(read) for _ in range(MOST_AHEAD))
                yield coming.popleft().result()

        yield batches()


def our_steps(
    case: Case, peers: bool, running: contextlib.ExitStack, timed: Sequence[int] = ()
) -> dict[str, Callable[[], Any]]:
    """Returns steps that keep their own state. `running` stops what reads ahead for them.

    The private batches of the steps of the numbers `timed` have the expected size on average.
    """
    loss, mean_loss = losses_of(case)
    source, size = source_of(case), case.batch_size
    example = jax.tree.map(lambda x: x[:1], source.gather(np.arange(1)))
    inputs = example["tokens"][:, :-1] if case.tokens else example["x"]
    params = jax.jit(case.network.init)(jax.random.key(0), inputs)
    optimizer = optax.sgd(0.01, momentum=0.9)
    options: dict[str, Any] = {
        "sampler": PoissonSampler(len(source), size / len(source)),
        "clip_norm": CLIP,
        "noise_multiplier": NOISE,
    }
    generator = np.random.default_rng(1)

    def read() -> Any:
        return jax.device_put(source.gather(generator.choice(len(source), size, replace=False)))

    @jax.jit
    def updated(params: Any, state: Any, batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(mean_loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    def plain() -> Callable[[], Any]:
        batches = running.enter_context(read_ahead(read))
        return problems.stateful(
            lambda *state: updated(*state, next(batches)), params, optimizer.init(params)
        )

    def empty() -> Callable[[], Any]:
        trainer = finetune.dp_sgd(loss, optimizer, **options)
        now = [trainer.init(params)]

        def step() -> Any:
            now[0], _ = trainer.update_in_place(*apart(now[0]), trainer.zeros(now[0].params))
            return now

        return step

    def private() -> Callable[[], Any]:
        trainer = finetune.dp_sgd(loss, optimizer, **options)
        now = [typical(trainer, trainer.init(params), source, timed)]
        programs = running.enter_context(trainer.compile(source))
        numbers = itertools.count()

        @functools.cache
        def batches() -> Iterator[Any]:
            return running.enter_context(trainer.batches(now[0], source, MOST_STEPS))

        def step() -> Any:
            if (number := next(numbers)) <= FIRST_STEPS:  # compiles as `fit` does
                programs.start(now[0], range(MOST_STEPS))
                programs.wait(number)
            now[0], _ = trainer.step(now[0], source, next(batches()), meanwhile=lambda: None)
            return now

        return step

    clipped = jax.jit(lambda p, b: jaxdp.clipped_grad(loss, clip_norm=CLIP)(p, b).grads)
    batch = read()
    steps = {
        "plain": plain(),
        "clipped": lambda: clipped(params, batch),
        "noise": empty(),
        "private": private(),
    }
    if peers:
        batches_ahead = running.enter_context(read_ahead(read))
        steps["jax_privacy"] = jax_privacy_step(loss, params, optimizer, batches_ahead, size)
    return steps


def jax_privacy_step(
    loss: Any, params: Any, optimizer: Any, batches: Iterator[Any], size: int
) -> Callable[[], Any]:
    from jax_privacy import noise_addition

    clipped = problems.jax_privacy_grad(loss, CLIP, (1,))
    privatizer = noise_addition.gaussian_privatizer(stddev=NOISE * CLIP, prng_key=jax.random.key(2))

    @jax.jit
    def updated(params: Any, state: Any, noise: Any, batch: Any) -> Any:
        noisy, noise = privatizer.update(clipped(params, batch), noise)
        mean = jax.tree.map(lambda x: x / size, noisy)
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state, noise

    return problems.stateful(
        lambda *state: updated(*state, next(batches)),
        params,
        optimizer.init(params),
        privatizer.init(params),
    )


def first_of(steps: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], float]:
    """Returns the seconds of one call of every step, and of the private steps until all its
    programs are in use."""
    first, ready = {}, 0.0
    for name, step in steps.items():
        started = time.perf_counter()
        jax.block_until_ready(step())
        first[name] = time.perf_counter() - started
        if name == "private":
            for _ in range(FIRST_STEPS):
                jax.block_until_ready(step())
            ready = time.perf_counter() - started
    return first, ready


def row_of(name: str, base: str, wall: timing.Seconds, cpu: timing.Seconds) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(wall[name], wall[base], strict=True)]
    # Private batches vary in size, so that only sums over all rounds compare.
    over_plain = float(np.median(ratios))
    if name == "private":
        over_plain = sum(wall[name]) / sum(wall[base])
    return {
        "wall_ms": timing.median_ms(wall[name]),
        "cpu_ms": timing.median_ms(cpu[name]),
        "over_plain": over_plain,
        "cpu_over_plain": sum(cpu[name]) / sum(cpu[base]),
        "spread": [float(x) for x in np.quantile(ratios, (0.25, 0.75))],
    }


def measured(name: str, rounds: int, peers: bool, torch: bool) -> dict[str, dict[str, Any]]:
    """Returns the rows of a case."""
    with contextlib.ExitStack() as running:
        before = 2 * (1 + FIRST_STEPS)  # calls of `first_of`
        steps = our_steps(cases()[name], peers, running, range(before + 1, before + 2 * rounds, 2))
        if torch:
            from benchmarks import torch_steps

            steps |= torch_steps.steps(name, cases()[name].batch_size, CLIP, NOISE)
        first, ready = first_of(steps)
        again, _ = first_of(steps)
        wall, cpu = timing.interleaved(
            {step: call for step, call in steps.items() if again[step] < 10}, rounds
        )
    rows: dict[str, dict[str, Any]] = {}
    for step in steps:
        base = "torch plain" if step.startswith(("torch", "Opacus")) else "plain"
        if step in wall:
            rows[step] = row_of(step, base, wall, cpu)
        else:
            rows[step] = {
                "wall_ms": 1e3 * again[step],
                "over_plain": 1e3 * again[step] / timing.median_ms(wall[base]),
            }
        rows[step]["first_s"] = first[step]
    rows["private"]["ready_s"] = ready
    best = min((rows[step]["wall_ms"] for step in rows if step.startswith("Opacus")), default=None)
    if best is not None:
        rows["private"]["over_best_opacus"] = rows["private"]["wall_ms"] / best
    return rows


def table(report: Mapping[str, Any]) -> str:
    """Returns the steps of a report with their aims, in Markdown."""
    rows = []
    for name, steps in report["cases"].items():
        title, over_plain, over_opacus, first_s = AIMS[name]
        private = steps["private"]
        best = private.get("over_best_opacus")
        rows.append(
            {
                "": title,
                "private, ms": f"{private['wall_ms']:.3g}",
                "over plain (aim)": f"{private['over_plain']:.2f} ({over_plain})",
                "clipped alone": f"{steps['clipped']['over_plain']:.2f}",
                "noise alone": f"{steps['noise']['over_plain']:.2f}",
                "over Opacus' best mode (aim)": (
                    f"{best:.2f} ({over_opacus})" if best else "not measured"
                ),
                "first step, s (aim)": f"{private['first_s']:.1f} ({first_s})",
            }
        )
    return format_table(rows, style="markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(cases()))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", action="store_true")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    torch, note = timing.peers(flags.peers, "torch", "opacus")
    keep_freed_memory()
    columns = (
        "wall_ms",
        "cpu_ms",
        "over_plain",
        "cpu_over_plain",
        "over_best_opacus",
        "first_s",
        "ready_s",
    )
    report: dict[str, Any] = {"rounds": flags.rounds, "peers": note, "cases": {}}
    for name in flags.cases.split(","):
        rows = measured(name, flags.rounds, flags.peers, torch)
        report["cases"][name] = rows
        timing.show(f"{name}, batch {cases()[name].batch_size}", rows, columns)
    return report
