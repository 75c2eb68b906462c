"""Exact noise beside noise in floats: the time of a step, and accuracy at equal epsilon.

    python -m benchmarks run exact_noise --update

The steps are those of `benchmarks.gate`, interleaved and warm. Accuracies are those of
`launch.finetune` on the bundled digits. Noise and batches are fresh in every run."""

import functools

import jax

import jaxdp
from benchmarks import gate, label_dp, pages, timing
from jaxdp.transforms import noise

EPSILONS = (1.0, 2.0, 4.0, 8.0)
FORMS = ("floats", "integers")
PARTS = ("clipped sum", "noise", "both")
FLAGS = {
    "runs": (4, "of each form and epsilon"),
    "rounds": (30, "of the times of a step"),
}


def _call(problem, part: str, form: str):
    """Returns a compiled call of a part of a step, in floats or in integers."""
    loss, params, batch = problem
    gradient = jaxdp.clipped_grad(loss, clip_norm=1.0)
    privatizer = jaxdp.privatize(
        gradient,
        noise_multiplier=1.0,
        divisor=len(jax.tree.leaves(batch)[0]),
        key=noise.stream(bytes(16), "exact noise"),
        exact=form == "integers",
    )
    gradient = gradient.on_grid(privatizer.grid)
    state = privatizer.init(params)

    def summed(params, batch):
        return gradient(params, batch).grads

    def both(params, batch, state):
        return privatizer.update(summed(params, batch), state)

    if part == "clipped sum":
        return timing.compiled(summed, params, batch)
    if part == "noise":
        return timing.compiled(privatizer.update, summed(params, batch), state)
    return timing.compiled(both, params, batch, state)


def step_row(rounds: int, case: str, part: str) -> dict:
    """Returns the times of a part of a step, and their ratios."""
    problem = gate.problems()[case]
    calls = {form: _call(problem, part, form) for form in FORMS}
    wall, cpu = timing.interleaved(calls, rounds)
    row = {"case": case, "part": part}
    row |= {f"{form}_ms": timing.median_ms(wall[form]) for form in FORMS}
    return row | timing.ratios("integers", wall, cpu, {"floats": "floats"})


def accuracy_row(runs: int, epsilon: float, form: str) -> dict:
    config = label_dp.digits_config(epsilon)
    config.private.exact = form == "integers"
    accuracies = [float(label_dp.result_of(config)["accuracy"]) for _ in range(runs)]
    return {"epsilon": epsilon, "form": form, "accuracies": accuracies}


def tables(report) -> dict:
    columns = {
        "case": "{case}",
        "part": "{part}",
        "floats, ms": "{floats_ms:.2f}",
        "integers, ms": "{integers_ms:.2f}",
        "ratio": "{over_floats:.2f}",
        "ratio of processor time": "{cpu_over_floats:.2f}",
    }
    return {
        "steps": pages.lines(report["steps"], columns),
        "accuracy": pages.by_epsilon(report["accuracy"], "form", "sums and noise", pages.accuracy),
    }


def measure(flags) -> dict:
    step = functools.partial(step_row, flags.rounds)
    run = functools.partial(accuracy_row, flags.runs)
    return {
        "steps": timing.swept(step, gate.problems(), PARTS),
        "accuracy": timing.swept(run, EPSILONS, FORMS),
    }
