"""The serving loop: charges, resets, reports, and data that it never writes."""

import builtins
import functools
import logging
import math
import os
import sys
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.data import from_arrays
from jaxdp.privacy import BudgetExceeded, GaussianDpEvent, Ledger, NonPrivateDpEvent
from jaxdp.tta.accounts import StreamAccount
from jaxdp.tta.adapter import Adapter
from jaxdp.tta.monitor import CollapseMonitor
from jaxdp.tta.private import private
from jaxdp.tta.serving import serve
from jaxdp.tta.streams import Stream
from jaxdp.tta.tent import Tent

CLASSES = 4


class State(typing.NamedTuple):
    step: int
    params: dict
    key: jax.Array


class Recorder:
    """An adapter that predicts the class written in the first pixel, writes down its calls and
    counts batches."""

    def __init__(self, event=None, accumulate=1):
        self.method = typing.NamedTuple("M", [("event", object)])(event) if event else object()
        self.accumulate, self.calls, self.before_step, self.seed = accumulate, [], lambda: None, 0

    def init(self):
        self.seed += 1
        return State(0, {"steps": 0}, jax.random.key(self.seed))

    def reset(self, state):
        self.calls.append("reset")
        return state._replace(params={"steps": 0})

    def step(self, state, images, key=None, mask=None):
        self.before_step()
        self.calls.append("step")
        logits = (np.round(images[:, :1, 0, 0] * 10) == np.arange(CLASSES)).astype(np.float32)
        return State(state.step + 1, {"steps": state.params["steps"] + 1}, state.key), logits


def source(n, seed=0, wrong=0.0):
    """Images whose first pixel is a tenth of the label, but for a fraction `wrong`."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    shown = np.where(rng.random(n) < wrong, (labels + 1) % CLASSES, labels)
    image = rng.uniform(size=(n, 3, 3, 1)).astype(np.float32)
    image[:, 0, 0, 0] = shown / 10
    return from_arrays(image=image, label=labels, num_classes=CLASSES)


def domains(*sizes, wrong=0.3):
    return {f"d{k}": source(n, k, wrong) for k, n in enumerate(sizes)}


def new_ledger(path=None, unit="photograph", **budget):
    ledger = Ledger(path) if path else Ledger.in_memory()
    ledger.register("stream", adjacency="replace_one", unit=unit, **budget)
    return ledger


def new_account(event, ledger=None, **terms):
    return StreamAccount((ledger or new_ledger()).account("stream"), event=event, **terms)


@pytest.mark.parametrize(
    "terms", [{}, {"order": "mixed"}, {"batch_size": 1}, {"order": "label_shifted"}]
)
def test_accuracy_is_counted_over_real_records(terms):
    stream = Stream(domains(23, 10), **{"batch_size": 8, "seed": 0, "remainder": "pad"} | terms)
    served = serve(Recorder(), stream, account=None)
    for name, data in stream.domains.items():
        examples = data.gather(np.arange(len(data)))
        right = np.round(examples["image"][:, 0, 0, 0] * 10) == examples["label"]
        assert 0 < right.mean() < 1
        assert served.accuracy[name] == pytest.approx(right.mean())
    assert list(served.accuracy) == ["d0", "d1"] or terms.get("order") == "mixed"
    assert served.count.sum() == 33 and len(served.count) == len(stream)
    total = sum(served.accuracy[name] * len(data) for name, data in stream.domains.items())
    assert served.correct.sum() == pytest.approx(total)


@pytest.mark.parametrize(
    ("reset", "calls"),
    [("never", "ssssss"), ("domain", "rssssrss"), ("batch", "rsrsrsrsrsrs")],
)
def test_resets_come_before_the_batches_that_ask_for_them(reset, calls):
    adapter = Recorder()
    served = serve(
        adapter, Stream(domains(20, 10), batch_size=5, seed=0, reset=reset), account=None
    )
    assert "".join(call[0] for call in adapter.calls) == calls
    assert len(served.resets) == calls.count("r")
    assert served.state.params["steps"] == {"never": 6, "domain": 2, "batch": 1}[reset]


def test_condition_8_a_photograph_in_every_domain_is_that_many_visits():
    event = GaussianDpEvent(0.619)
    stream = Stream(domains(*[12] * 15), batch_size=4, seed=0, reset="domain")
    photographs = new_account(event)
    samples = new_account(event, new_ledger(unit="sample"), unit="sample")
    # A set of photographs that pays for samples would owe a fifteenth of the visits.
    with pytest.raises(ValueError, match="unit must be 'photograph', got 'sample', because"):
        new_account(event, unit="sample")
    serve(Recorder(event), stream, account=photographs)
    serve(Recorder(event), stream, account=samples)
    assert (photographs.worst, samples.worst) == (15, 1)
    sample, photograph = photographs.epsilons(delta=1e-6)
    assert sample == pytest.approx(19.9656, rel=1e-4)
    assert photograph == pytest.approx(136.93, rel=1e-4)


def test_condition_8_every_run_over_a_stream_is_another_visit():
    event = GaussianDpEvent(2.0)
    account, adapter = new_account(event), Recorder(event)
    stream = Stream(domains(8), batch_size=4, seed=0)
    for _ in range(5):
        serve(adapter, stream, account=account)
    assert account.worst == 5


def test_accumulated_batches_share_one_release():
    event = GaussianDpEvent(2.0)
    units = ["a", "b", "a", "c", "a", "d"]
    stream = Stream(domains(6), batch_size=1, seed=0)
    order = [int(batch.positions[0]) for batch in stream]
    named = Stream(
        domains(6), batch_size=1, seed=0, units=[units[order.index(i)] for i in range(6)]
    )
    assert [batch.units[0] for batch in named] == units
    for accumulate, worst in [(1, 3), (2, 3), (3, 5), (6, 9)]:
        ledger, whole = new_ledger(), new_account(event)
        serve(Recorder(event, accumulate), named, account=whole)
        assert whole.worst == worst
        # Going on in the middle of an update is the same release, with the account carried over.
        adapter, state, parts = Recorder(event, accumulate), None, new_account(event, ledger)
        for index in range(6):
            parts = StreamAccount(ledger.account("stream"), event=event, visits=parts.visits)
            state = serve(adapter, [named.batch(index)], account=parts, state=state).state
        assert parts.worst == worst


@pytest.mark.parametrize("accumulate", [1, 2])
def test_condition_7_a_state_is_used_once(accumulate):
    event = GaussianDpEvent(2.0)
    account, adapter = new_account(event), Recorder(event, accumulate)
    one, other = (Stream(domains(8), batch_size=4, seed=seed) for seed in (0, 1))
    start = adapter.init()
    state = serve(adapter, one, account=account, state=start).state
    with pytest.raises(ValueError, match="state has been served before"):
        serve(adapter, other, account=account, state=start)
    assert len(adapter.calls) == 2 and account.worst == 1
    serve(adapter, other, account=account, state=state)
    serve(adapter, other, account=account, state=start._replace(key=adapter.init().key))
    assert account.worst == 3


def test_the_ledger_is_charged_before_the_batch_is_touched():
    event = GaussianDpEvent(1.0)
    ledger, adapter = new_ledger(), Recorder(event)
    charged = []
    adapter.before_step = lambda: charged.append(ledger.epsilon("stream", delta=1e-6) > 0)
    serve(adapter, Stream(domains(8), batch_size=4, seed=0), account=new_account(event, ledger))
    assert charged == [True, True]


def test_an_overspend_stops_before_its_batch():
    event = GaussianDpEvent(1.084)
    account = new_account(event, new_ledger(epsilon=10.0, delta=1e-6))
    adapter = Recorder(event)
    with pytest.raises(BudgetExceeded) as refused:
        serve(adapter, Stream(domains(8, 8), batch_size=4, seed=0), account=account)
    assert adapter.calls == ["step", "step"]
    assert refused.value.served.state.step == 2 and list(refused.value.served.accuracy) == ["d0"]


def test_each_record_s_row_is_delivered_with_its_batch():
    stream, got = Stream(domains(8, 6), batch_size=4, remainder="pad", seed=0), []
    serve(
        Recorder(), stream, account=None, deliver=lambda batch, logits: got.append((batch, logits))
    )
    assert len(got) == len(stream) == 4
    for batch, logits in got:
        shown = np.round(batch.images[:, 0, 0, 0] * 10)
        np.testing.assert_array_equal(logits.argmax(-1), shown)


def test_the_account_must_be_named_and_must_fit_the_method():
    stream = Stream(domains(8), batch_size=4, seed=0)
    with pytest.raises(TypeError, match="account"):
        serve(Recorder(), stream)
    for event, other in [
        (GaussianDpEvent(1.0), GaussianDpEvent(2.0)),
        (None, GaussianDpEvent(2.0)),
    ]:
        adapter = Recorder(event)
        with pytest.raises(ValueError, match="account charges GaussianDpEvent"):
            serve(adapter, stream, account=new_account(other))
        assert adapter.calls == []
    ledger = new_ledger()
    serve(Recorder(), stream, account=new_account(NonPrivateDpEvent(), ledger))
    assert ledger.epsilon("stream", delta=1e-6) == math.inf
    with pytest.raises(ValueError, match="unit must be 'photograph' or 'sample', got 'patient'"):
        new_account(GaussianDpEvent(1.0), unit="patient")


# --- With real models ---------------------------------------------------------------------------

TRACES = []


def apply_fn(params, images):
    TRACES.append(images.shape)
    x = images.reshape(len(images), -1)
    x = (x - x.mean(axis=-1, keepdims=True)) / (x.std(axis=-1, keepdims=True) + 1e-3)
    x = x * params["norm"]["scale"][None, :] + params["norm"]["bias"][None, :]
    return x @ params["head"]["kernel"]


logits_of = jax.jit(apply_fn)


def model():
    kernel = np.random.default_rng(0).normal(size=(9, CLASSES)).astype(np.float32)
    return {
        # So that an image of zeros, which is what padding holds, has a gradient too.
        "norm": {
            "scale": jnp.ones(9, jnp.float32),
            "bias": jnp.linspace(-0.3, 0.3, 9, dtype=jnp.float32),
        },
        "head": {"kernel": jnp.asarray(kernel)},
    }


TENT = Tent()  # adapters share a compiled step only with one method and one optimizer


@functools.cache
def sgd(learning_rate):
    return optax.sgd(learning_rate, momentum=0.9)


def new_adapter(noise_multiplier=1.0, learning_rate=1e-2, **terms):
    method = private(TENT, clip_norm=1.0, noise_multiplier=noise_multiplier)
    return Adapter(apply_fn, model(), method, sgd(learning_rate), **terms)


class Watched:
    """An adapter that keeps what it was given and what it returned."""

    def __init__(self, adapter):
        self.adapter, self.seen = adapter, []

    def __getattr__(self, name):
        return getattr(self.adapter, name)

    def step(self, state, images, key=None, mask=None):
        new, logits = self.adapter.step(state, images, key=key, mask=mask)
        self.seen.append((state.params, new.params, images, logits))
        return new, logits


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_nothing_recompiles_over_a_stream(accumulate, caplog):
    sizes = (62, 62, 62, 62)
    terms = {"batch_size": 8, "seed": 0, "reset": "domain", "remainder": "pad"}
    adapter = new_adapter(accumulate=accumulate)
    monitor = CollapseMonitor(
        apply_fn, adapter.params, np.ones((3, 3, 3, 1), np.float32), min_entropy=0, every=2
    )
    account = new_account(adapter.method.event)
    warm = Stream(domains(62), **terms)
    state = serve(adapter, warm, account=account, monitor=monitor).state
    stream = Stream(domains(*sizes), **terms)
    assert len(stream) == 32 and any(not batch.mask.all() for batch in stream)
    traces = len(TRACES)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        serve(adapter, stream, account=account, state=state, monitor=monitor)
    assert len(TRACES) == traces
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.slow
def test_condition_9_padding_leaves_the_divisor_public():
    data = source(5)
    stream = Stream({"d": data}, batch_size=8, seed=0, remainder="pad")
    (batch,) = stream
    adapter = new_adapter(noise_multiplier=0.0, learning_rate=1.0)
    new = serve(adapter, stream, account=None).state.params["norm"]

    @jax.jit
    def clipped(image):
        def entropy(norm):
            return -jnp.sum(
                jax.nn.softmax(z := apply_fn({**model(), "norm": norm}, image[None])[0])
                * jax.nn.log_softmax(z)
            )

        grads = jax.grad(entropy)(model()["norm"])
        return jax.tree.map(lambda g: g / jnp.maximum(1.0, optax.tree.norm(grads)), grads)

    total = [clipped(image) for image in batch.images[batch.mask]]
    assert len(total) == 5
    for name in ("scale", "bias"):
        expected = model()["norm"][name] - sum(g[name] for g in total) / 8
        np.testing.assert_allclose(new[name], expected, rtol=1e-4, atol=1e-6)


def with_other_record(stream, index, row):
    """Returns the same batches, but one record holds another image."""
    batches = list(stream)
    batches[index].images[row] = 1 - batches[index].images[row] ** 2
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("predict", ["before", "after"])
def test_condition_12_other_predictions_see_a_record_through_the_released_parameters_only(predict):
    stream = Stream(domains(40, wrong=0.0), batch_size=8, seed=0)
    runs = []
    for batches in (list(stream), with_other_record(stream, 2, 5)):
        adapter = Watched(new_adapter(predict=predict, learning_rate=0.5))
        serve(adapter, batches, account=None, seed=bytes(range(16)))
        runs.append(adapter.seen)
    others = np.arange(8) != 5
    for index, ((_, _, _, old), (start, end, images, new)) in enumerate(zip(*runs, strict=True)):
        released = start if predict == "before" else end
        np.testing.assert_allclose(new, logits_of(released, images), rtol=1e-4, atol=1e-5)
        changed = not np.allclose(old, new, rtol=1e-4, atol=1e-5)
        changed_for_others = not np.allclose(old[others], new[others], rtol=1e-4, atol=1e-5)
        assert changed == (index >= 2)
        assert changed_for_others == (index >= (3 if predict == "before" else 2))


@pytest.mark.slow
def test_condition_11_nothing_private_is_written_or_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain_open = builtins.open

    def no_writing(file, mode="r", *args, **kwargs):
        cache = os.environ["JAX_COMPILATION_CACHE_DIR"]  # compiled programs hold no values
        assert str(file).startswith(cache) or not set(mode) & set("wax+"), (
            f"{file} opened for writing"
        )
        return plain_open(file, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", no_writing)
    stream = Stream(
        domains(16, 16), batch_size=8, seed=0, units=[f"patient-{i}" for i in range(16)]
    )
    adapter = new_adapter()
    with new_ledger("ledger.sqlite") as ledger:
        account = StreamAccount(ledger.account("stream"), event=adapter.method.event)
        served = serve(adapter, stream, account=account)
        report = ledger.report_text()
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {
        "ledger.sqlite",
        "ledger.sqlite.head",
        ".ledger.sqlite.anchor",
    }
    assert b"patient" not in (tmp_path / "ledger.sqlite").read_bytes()
    shown = repr(served) + report + repr(next(iter(stream)))
    assert all(word not in shown for word in ("patient", "accuracy", "correct", "key"))


@pytest.mark.slow
def test_a_collapsed_model_goes_back_to_its_source():
    probe = np.random.default_rng(3).uniform(size=(30, 3, 3, 1)).astype(np.float32)
    adapter = new_adapter(learning_rate=1e3)  # Noise alone destroys the model in one step.
    settings = {"min_agreement": 0.9, "min_entropy": 0.0, "every": 2}
    monitor = CollapseMonitor(apply_fn, adapter.params, probe, **settings)
    stream = Stream(domains(40), batch_size=8, seed=0)
    left = serve(adapter, stream, account=None, monitor=monitor)
    assert left.resets == () and [number for number, _ in left.reports] == [1, 3]
    assert all(report.collapsed for _, report in left.reports)
    watched = Watched(adapter)
    resetting = CollapseMonitor(apply_fn, adapter.params, probe, reset=True, **settings)
    healed = serve(watched, stream, account=None, monitor=resetting)
    assert healed.resets == (2, 4)
    assert [monitor(start).drift == 0 for start, *_ in watched.seen] == [
        True,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.slow
def test_the_bar_shows_numbers_of_batches_only(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    wait = {"deliver": lambda batch, logits: time.sleep(0.3)}  # a bar is shown after a second
    serve(Recorder(), Stream(domains(20), batch_size=5, seed=0), account=None, **wait)
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    assert shown.out == ""
