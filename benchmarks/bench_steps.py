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

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jaxdp
from benchmarks import problems, timing
from jaxdp import finetune
from jaxdp.data import PoissonSampler
from jaxdp.data.physical import FIRST_STEPS
from jaxdp.finetune.batches import MOST_AHEAD
from jaxdp.finetune.step import apart
from jaxdp.memory import keep_freed_memory
from jaxdp.transforms import noise

CLIP, NOISE, MOST_STEPS = 1.0, 1.0, 10_000
# What a case is, and its aims: over plain, over the best mode of Opacus, and seconds of the first
# step.
AIMS = {
    "mlp": ("MLP 784-512-512-10, batch 256", 1.5, 0.8, 2),
    "cnn": ("CNN of the MNIST examples, batch 256", 1.3, 0.8, 3),
    "resnet20": ("ResNet-20 with GroupNorm, batch 64", 1.2, 1.0, 8),
    "vit": ("ViT, width 192, 6 layers, batch 32", 1.2, 1.0, 10),
    "lm": ("tied transformer LM, 128 tokens, batch 16", 1.15, 0.9, 10),
}


def typical(trainer, state, source, steps: Sequence[int]):
    """Returns the state with the first key for which the batches of these steps are typical.

    Their mean size, and the mean cost of their physical batches, are within 1 % of what is
    expected. A few batches of 16 examples are often a tenth off, and so would be the time."""
    sizes, mean = trainer.physical(state, source), trainer.sampler.expected_batch_size

    def cost(batch_size):
        counts = sizes.counts(batch_size)
        return sum(count * (size + sizes.overhead) for size, count in counts.items())

    def means(rows):
        return np.array([np.mean(rows), np.mean([cost(int(n)) for n in rows])])

    expected = means(
        np.random.default_rng(0).binomial(problems.RECORDS, mean / problems.RECORDS, 10_000)
    )
    for number in range(1000 if steps else 0):
        key = noise.stream(number.to_bytes(16, "big"), "benchmark")
        candidate = state._replace(noise=state.noise._replace(key=key))
        rows = [len(trainer.drawn(candidate._replace(step=np.int32(step)))) for step in steps]
        if np.abs(means(rows) / expected - 1).max() < 0.01:
            return candidate
    return state


@contextlib.contextmanager
def read_ahead(read: Callable) -> Iterator[Iterator]:
    """Yields batches that a thread reads during the steps before."""
    with concurrent.futures.ThreadPoolExecutor(1) as reader:

        def batches():
            coming = collections.deque[Any]()
            while True:
                if len(coming) < 2:  # as many at once as `fit` reads of small batches
                    coming.extend(reader.submit(read) for _ in range(MOST_AHEAD))
                yield coming.popleft().result()

        yield batches()


def our_steps(
    case: problems.Case, peers: bool, running: contextlib.ExitStack, timed: Sequence[int] = ()
) -> dict[str, Callable]:
    """Returns steps that keep their own state. `running` stops what reads ahead for them.

    The private batches of the steps of the numbers `timed` have the expected size on average.
    """
    source, params, size = case.source(), case.init(), case.batch_size
    optimizer = optax.sgd(0.01, momentum=0.9)
    sampler = PoissonSampler(len(source), size / len(source))
    options = {"clip_norm": CLIP, "noise_multiplier": NOISE}
    new_trainer = functools.partial(
        finetune.dp_sgd, case.loss, optimizer, sampler=sampler, **options
    )
    generator = np.random.default_rng(1)

    def read():
        return jax.device_put(source.gather(generator.choice(len(source), size, replace=False)))

    def read_batches(update, *state):
        batches = running.enter_context(read_ahead(read))
        return problems.stateful(lambda *state: update(*state, next(batches)), *state)

    @jax.jit
    def plain(params, state, batch):
        return problems.updated(optimizer, jax.grad(case.mean_loss)(params, batch), state, params)

    def empty():
        trainer = new_trainer()
        now = [trainer.init(params)]

        def step():
            now[0], _ = trainer.update_in_place(*apart(now[0]), trainer.zeros(now[0].params))
            return now

        return step

    def private():
        trainer = new_trainer()
        now = [typical(trainer, trainer.init(params), source, timed)]
        programs = running.enter_context(trainer.compile(source))
        numbers = itertools.count()

        @functools.cache
        def batches():
            return running.enter_context(trainer.batches(now[0], source, MOST_STEPS))

        def step():
            if (number := next(numbers)) <= FIRST_STEPS:  # compiles as `fit` does
                programs.start(now[0], range(MOST_STEPS))
                programs.wait(number)
            now[0], _ = trainer.step(now[0], source, next(batches()), meanwhile=lambda: None)
            return now

        return step

    clipped = jax.jit(lambda p, b: jaxdp.clipped_grad(case.loss, clip_norm=CLIP)(p, b).grads)
    batch = read()
    steps = {
        "plain": read_batches(plain, params, optimizer.init(params)),
        "clipped": lambda: clipped(params, batch),
        "noise": empty(),
        "private": private(),
    }
    if peers:
        steps["jax_privacy"] = read_batches(*jax_privacy_step(case.loss, params, optimizer, size))
    return steps


def jax_privacy_step(loss, params, optimizer, size: int) -> tuple:
    """Returns the peer's update of a state by a batch, and its first state."""
    from jax_privacy import noise_addition

    clipped = problems.jax_privacy_grad(loss, CLIP, (1,))
    privatizer = noise_addition.gaussian_privatizer(stddev=NOISE * CLIP, prng_key=jax.random.key(2))

    @jax.jit
    def update(params, state, noise, batch):
        noisy, noise = privatizer.update(clipped(params, batch), noise)
        mean = jax.tree.map(lambda x: x / size, noisy)
        return *problems.updated(optimizer, mean, state, params), noise

    return update, params, optimizer.init(params), privatizer.init(params)


def first_of(steps: dict[str, Callable]) -> tuple[dict[str, float], float]:
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


def row_of(name: str, base: str, wall: timing.Seconds, cpu: timing.Seconds) -> dict:
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


def measured(name: str, rounds: int, peers: bool, torch: bool) -> dict[str, dict]:
    """Returns the rows of a case."""
    case = problems.cases()[name]
    with contextlib.ExitStack() as running:
        before = 2 * (1 + FIRST_STEPS)  # calls of `first_of`
        steps = our_steps(case, peers, running, range(before + 1, before + 2 * rounds, 2))
        if torch:
            from benchmarks import torch_steps

            steps |= torch_steps.steps(name, case.batch_size, CLIP, NOISE)
        first, ready = first_of(steps)
        again, _ = first_of(steps)
        fast = {step: call for step, call in steps.items() if again[step] < 10}
        wall, cpu = timing.interleaved(fast, rounds)
    rows = {}
    for step in steps:
        base = timing.base_of(step)
        if step in wall:
            rows[step] = row_of(step, base, wall, cpu)
        else:
            milliseconds = 1e3 * again[step]
            over_plain = milliseconds / timing.median_ms(wall[base])
            rows[step] = {"wall_ms": milliseconds, "over_plain": over_plain}
        rows[step]["first_s"] = first[step]
    rows["private"]["ready_s"] = ready
    opacus = [row["wall_ms"] for step, row in rows.items() if step.startswith("Opacus")]
    if opacus:
        rows["private"]["over_best_opacus"] = rows["private"]["wall_ms"] / min(opacus)
    return rows


def tables(report, elsewhere) -> dict:
    """Returns the steps of two reports with their aims."""
    return {"steps": _table(report), "steps elsewhere": _table(elsewhere)}


def _table(report) -> list[dict]:
    rows = []
    for name, steps in report["cases"].items():
        title, over_plain, over_opacus, first_s = AIMS[name]
        private = steps["private"]
        best = private.get("over_best_opacus")
        opacus = f"{best:.2f} ({over_opacus})" if best else "not measured"
        rows.append(
            {
                "": title,
                "private, ms": f"{private['wall_ms']:.3g}",
                "over plain (aim)": f"{private['over_plain']:.2f} ({over_plain})",
                "clipped alone": f"{steps['clipped']['over_plain']:.2f}",
                "noise alone": f"{steps['noise']['over_plain']:.2f}",
                "over Opacus' best mode (aim)": opacus,
                "first step, s (aim)": f"{private['first_s']:.1f} ({first_s})",
            }
        )
    return rows


FLAGS = {"cases": ",".join(AIMS), "rounds": 15, "peers": False}


def measure(flags) -> dict:
    torch, note = timing.peers(flags.peers, "torch", "opacus")
    keep_freed_memory()

    def rows_of(name):
        return measured(name, flags.rounds, flags.peers, torch)

    cases = timing.each(flags.cases.split(","), rows_of)
    return {"rounds": flags.rounds, "peers": note, "cases": cases}
