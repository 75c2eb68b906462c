"""Times sharpness-aware pre-training against plain training, and the DP-SGD family against DP-SGD,
in one run.

    python -m benchmarks run training --models cnn,resnet20 --rounds 5 --peers

Steps are interleaved. Each is timed after an untimed call of it, and medians are reported. Ratios
are medians of the ratios within a round. "plain" is a gradient and an SGD update in one compiled
function. "memory" is what XLA allocates for a gradient, or for the clipped sum of a batch, beyond
its arguments.

Pre-training, m2 = 50: "limit" counts gradients only, (m1 + m2) / m2. If the ascent comes only every
ten steps, or GEP keeps its basis for ten, the time of a step is computed from the parts measured in
the same round.

Fine-tuning: a full physical batch goes through the trainer's compiled functions. Sampling and data
are not timed. "GEP basis" is the new basis alone, "GEP" a step with a new basis. Their "limit" over
DP-SGD, 1 + anchors / (steps per basis
* batch), again counts gradients only.

With --peers, optax's SAM runs beside ours. On the CNN the same steps run in PyTorch: Opacus' DP-SGD
and adaptive clipping, and GEP as Yu et al. 2021 describe it, by `torch.func`. Install torch and
opacus for this."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from benchmarks import problems, timing
from benchmarks.timing import Step
from jaxdp import finetune, models, pretrain
from jaxdp.data import PoissonSampler
from jaxdp.memory import keep_freed_memory

# configs/dpadapter_table1.py:cpu
CNN = {"widths": (16, 32, 64), "dense": 0, "norm": "group", "activation": jax.nn.relu}
CLASSES, RECORDS = 10, 5000
CASES = {
    "cnn": problems.Case(models.create("cnn", num_classes=CLASSES, **CNN), (16, 16, 3), 256),
    "resnet20": problems.Case(models.create("resnet20", num_classes=CLASSES), (32, 32, 3), 64),
}
UPDATE, ASCENTS = 50, (50, 500)  # m2 and m1
EVERY = 10  # steps between ascents, and between bases
ANCHORS, BASIS, GROUPS = 256, 60, 3
CLIP, RESIDUAL_CLIP, NOISE = 1.0, 0.4, 1.0


def mean_of(losses: Callable) -> Callable:
    return lambda params, batch: losses(params, batch).mean()


def whole_step(loss: Callable, optimizer, params, batch) -> Step:
    """Returns gradient and update in one compiled function. The optimizer may ask for further
    gradients."""

    def step(params, opt_state, batch):
        def gradient(point, _=0):
            return jax.grad(loss)(point, batch)

        extended = optax.with_extra_args_support(optimizer)
        updates, opt_state = extended.update(gradient(params), opt_state, params, grad_fn=gradient)
        return optax.apply_updates(params, updates), opt_state

    args = (params, optimizer.init(params), batch)
    call = timing.compiled(step, *args)
    return Step(call, {"memory_mb": call.memory_mb})


# --- Pre-training -------------------------------------------------------------------------------


def pretraining_steps(case: problems.Case, *, peers: bool) -> dict[str, Step]:
    params, _, losses = problems.image_problem(case)
    mean_loss = mean_of(losses)
    optimizer = optax.sgd(0.1, momentum=0.9)
    batch = case.images(UPDATE)

    def step_of(trainer, ascent, limit):
        state = trainer.init(params)
        gradient = trainer.gradient.lower(
            state.params, state.perturbation, None, batch, np.int32(0), parts=1
        )
        row = {"limit": limit, "memory_mb": timing.allocated_mb(gradient.compile())}
        return Step(lambda: trainer.step(state, ascent, batch), row)

    dpadapter = pretrain.dpadapter(mean_loss, optimizer, microbatch_size=UPDATE)
    steps = {
        "plain": whole_step(mean_loss, optimizer, params, batch),
        "no ascent": step_of(dpadapter, None, 1.0),
    }
    for size in ASCENTS:
        steps[f"DPAdapter, m1={size}"] = step_of(dpadapter, case.images(size), 1 + size / UPDATE)
    steps["SAM"] = step_of(pretrain.sam(mean_loss, optimizer), batch, 2.0)
    if peers:
        ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
        peer = optax.contrib.sam(optimizer, ascent, sync_period=2, opaque_mode=True)
        step = whole_step(mean_loss, peer, params, batch)
        steps["optax SAM"] = step._replace(row=step.row | {"limit": 2.0})
    return steps


def add_rare_ascents(rows: dict[str, dict], seconds: tuple[timing.Seconds, ...]):
    """Adds steps with an ascent every tenth step. Their times are computed from the measured
    ones."""
    for size in ASCENTS:
        name = f"DPAdapter, m1={size}, every {EVERY}"
        rows[name] = {"limit": 1 + size / UPDATE / EVERY}
        for times in seconds:
            pairs = zip(times[f"DPAdapter, m1={size}"], times["no ascent"], strict=True)
            times[name] = [(ascent + (EVERY - 1) * rest) / EVERY for ascent, rest in pairs]


# --- Fine-tuning --------------------------------------------------------------------------------


def private_step(trainer: finetune.PrivateTrainer, params, batch) -> tuple[Step, Any]:
    """Returns the device's work of `trainer.step` on a full physical batch, and its initial
    state."""
    state = trainer.init(params)
    if trainer.query.refresh_every:
        state = state._replace(carried=refreshed(trainer, state))
    rows = jax.device_put((batch, np.ones(len(batch[1]), bool), np.uint32(0)))
    compiled = trainer.part_sum.lower(state, *rows).compile()

    def call():
        return trainer.update(state, trainer.part_sum(state, *rows).total)

    return Step(call, {"memory_mb": timing.allocated_mb(compiled)}), state


def refreshed(trainer: finetune.PrivateTrainer, state: finetune.TrainState):
    return trainer.query.refresh(state.params, state.carried, state.step, trainer.query.public)


def finetuning_steps(case: problems.Case) -> dict[str, Step]:
    params, loss, losses = problems.image_problem(case)
    optimizer = optax.sgd(0.1, momentum=0.9)
    batch, size = case.images(case.batch_size), case.batch_size
    options = {
        "sampler": PoissonSampler(RECORDS, size / RECORDS),
        "physical_batch_size": size,
        "clip_norm": CLIP,
        "noise_multiplier": NOISE,
    }
    gep = finetune.gep(
        loss,
        optimizer,
        **options,
        residual_clip_norm=RESIDUAL_CLIP,
        anchors=case.images(ANCHORS),
        basis_size=BASIS,
        groups=GROUPS,
        basis_every=EVERY,
    )
    trainers = {
        "DP-SGD": finetune.dp_sgd(loss, optimizer, **options),
        "AdpClip": finetune.adp_clip(loss, optimizer, **options),
        "AdpAlloc": finetune.adp_alloc(
            loss, optimizer, **options, schedule=finetune.exponential_noise(0.01)
        ),
        "DP-SAT": finetune.dp_sgd(loss, optimizer, **options, ascent_radius=0.05),
    }
    steps = {"plain": whole_step(mean_of(losses), optimizer, params, batch)}
    steps |= {name: private_step(trainer, params, batch)[0] for name, trainer in trainers.items()}
    steps["GEP"], state = private_step(gep, params, batch)
    steps["GEP basis"] = Step(lambda: refreshed(gep, state), {})
    return steps


def add_basis(rows: dict[str, dict], seconds: tuple[timing.Seconds, ...], batch_size: int):
    """Adds GEP with its new bases. Its times are computed from the measured ones."""
    for every in (1, EVERY):
        name = f"GEP, new basis every {every}"
        rows[name] = {"limit": 1 + ANCHORS / every / batch_size}
        for times in seconds:
            pairs = zip(times["GEP"], times["GEP basis"], strict=True)
            times[name] = [step + basis / every for step, basis in pairs]


# --- PyTorch ------------------------------------------------------------------------------------


def torch_steps(case: problems.Case) -> dict[str, Step]:
    """Returns steps of the CNN in PyTorch: plain, Opacus' DP-SGD and AdpClip, and GEP with a
    separate basis."""
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
    from torch import nn

    from benchmarks.torch_steps import stepped

    size = case.batch_size
    images, labels = torch.rand(size, 3, *case.shape[:2]), torch.arange(size) % CLASSES
    widths = (3, *CNN["widths"])
    loss_fn = nn.functional.cross_entropy

    def new_model():
        layers = []
        for before, width in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(8, width)]
            layers += [nn.ReLU(), nn.AvgPool2d(2)]
        side = case.shape[0] // 2 ** (len(widths) - 1)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * side**2, CLASSES))

    def new_sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def trained(model, optimizer):
        return stepped(optimizer, lambda: loss_fn(model(images), labels))

    def private(of, **options):
        model = GradSampleModule(new_model())
        noise = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": size}
        return trained(model, of(new_sgd(model), **noise, **options))

    plain = new_model()
    calls = {
        "torch plain": trained(plain, new_sgd(plain)),
        "Opacus DP-SGD": private(DPOptimizer),
        "Opacus AdpClip": private(
            AdaClipDPOptimizer,
            target_unclipped_quantile=0.5,
            clipbound_learning_rate=0.2,
            max_clipbound=1e8,
            min_clipbound=1e-8,
            unclipped_num_std=size / 20,
        ),
    }

    model = new_model()
    moving = dict(model.named_parameters())
    sgd = new_sgd(model)
    groups = np.array_split(np.array(list(moving)), GROUPS)  # consecutive, as ours
    sizes = [sum(moving[name].numel() for name in names) for names in groups]
    roots = np.sqrt(sizes)
    directions = (BASIS * roots / roots.sum()).astype(int)

    def loss(params, image, label):
        logits = torch.func.functional_call(model, params, (image[None],))
        return loss_fn(logits, label[None])

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def rows(images, labels):
        grads = per_example({name: p.detach() for name, p in moving.items()}, images, labels)
        return [torch.cat([grads[name].flatten(1) for name in names], 1) for names in groups]

    def new_basis():
        anchors = rows(images[:ANCHORS], labels[:ANCHORS])
        basis = []
        for a, p, k in zip(anchors, sizes, directions, strict=True):
            basis.append(torch.linalg.qr(a.T @ (a @ torch.randn(p, int(k))))[0])
        return basis

    def noisy_mean(groups_of_gradients, clip_norm):
        norms = torch.stack([part.norm(dim=1) for part in groups_of_gradients]).norm(dim=0)
        factors = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
        sums = [factors @ part for part in groups_of_gradients]
        scale = 2**0.5 * NOISE * clip_norm  # both are released from one sample
        return [(total + scale * torch.randn_like(total)) / size for total in sums]

    basis = new_basis()

    def gep():
        gradients = rows(images, labels)
        embeddings = [g @ b for g, b in zip(gradients, basis, strict=True)]
        residuals = [g - w @ b.T for g, w, b in zip(gradients, embeddings, basis, strict=True)]
        means = noisy_mean(embeddings, CLIP), noisy_mean(residuals, RESIDUAL_CLIP)
        for b, w, r, names in zip(basis, *means, groups, strict=True):
            flat = (b @ w + r).split([moving[name].numel() for name in names])
            for name, part in zip(names, flat, strict=True):
                moving[name].grad = part.view_as(moving[name])
        sgd.step()

    calls |= {"torch.func GEP": gep, "torch.func GEP basis": new_basis}
    return {name: Step(call, {}) for name, call in calls.items()}


# --- Side by side -------------------------------------------------------------------------------


def bases(name: str) -> dict[str, str]:
    if name.startswith(("torch", "Opacus")):
        return {"plain": "torch plain", "dp_sgd": "Opacus DP-SGD"}
    return {"plain": "plain", "dp_sgd": "DP-SGD"}


SHOWN = ("DPAdapter", "SAM", "optax", "Adp", "DP-SAT", "GEP")


def tables(report) -> dict:
    markdown = {}
    for kind, ratio in (("pre-training", "over_plain"), ("fine-tuning", "over_dp_sgd")):
        cases = {title: rows for title, rows in report["cases"].items() if kind in title}
        rows = []
        for step in filter(lambda step: step.startswith(SHOWN), next(iter(cases.values()))):
            row = {kind: step}
            for title, steps in cases.items():
                limit = steps[step].get("limit")
                in_parentheses = f" ({limit:.3g})" if limit else ""
                column = title.replace(f", {kind}", "")
                row[column] = f"{steps[step][ratio]:.2f}{in_parentheses}"
            rows.append(row)
        markdown[kind] = rows
    return markdown


FLAGS = {"models": ("cnn,resnet20", f"of {', '.join(CASES)}"), "rounds": 5, "peers": False}


def measure(flags) -> dict:
    keep_freed_memory()
    torch, note = timing.peers(flags.peers, "torch", "opacus")
    cases = {}
    for name in flags.models.split(","):
        case = CASES[name]
        size = case.batch_size
        steps = pretraining_steps(case, peers=flags.peers)
        rows = timing.step_rows(steps, flags.rounds, lambda _: {"plain": "plain"}, add_rare_ascents)
        cases[f"{name}, pre-training, m2={UPDATE}"] = rows
        timing.show(name, rows)
        steps = finetuning_steps(case)
        if torch and name == "cnn":
            steps |= torch_steps(case)
        with_basis = functools.partial(add_basis, batch_size=size)
        rows = timing.step_rows(steps, flags.rounds, bases, with_basis)
        cases[f"{name}, fine-tuning, B={size}"] = rows
        timing.show(name, rows)
    return {"rounds": flags.rounds, "peers": note, "cases": cases}
