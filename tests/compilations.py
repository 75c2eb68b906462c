"""Counts compilations, for tests that a second call compiles nothing, and identifies programs."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
    """Yields a list that grows with every program that XLA compiles, or loads from its cache."""

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(kwargs)

    seen = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def text_of(trainer, state, source):
    """Returns what identifies the programs of a private trainer. Compiles nothing."""
    with trainer.compile(source) as programs:
        programs.start(state, range(0))
        return programs.text
