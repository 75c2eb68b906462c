"""The jaxpr walker of the book-keeping engine, which finds where a trainable weight meets data.

It splits the jaxpr of the loss of ONE example into two programs:

* `Plan.weights(leaves)` computes the values that depend on trainable parameters and not on data
  (casts, transposes, weight standardisation, slices of stacked layers, ...). Its results V_1..V_J
  are the values that meet data.
* `Plan.forward(...)` is the original program with a zero "tap" added where V_j meets data, which
  only derivatives see. It also returns the other operand, the "record".

The cotangent of tap j and record j determine dV_j, the gradient of the loss with respect to V_j.
The gradient with respect to the parameters is J^T (dV_1..dV_J), where J is the Jacobian of
`weights` (the chain rule). Every weight is covered: where no rule fits, the tap is on the weight
itself, whose cotangent is dV_j. The tap is also there if the weight becomes complex, so that every
V_j is real, or if it enters a `jax.custom_vjp`. The backward pass of the latter need not be linear,
so J^T of a sum may differ from the sum of every example's J^T.

`jaxdp.transforms.sites` holds the rules for how a weight meets data.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.ref
from jax import lax
from jax.interpreters import ad, batching, mlir

from jaxdp.transforms import shards, sites
from jaxdp.transforms.precision import with_equations

# Primitives whose body replaces the call.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
# Primitives that only move entries. Their J is a permutation and keeps norms.
MOVES = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "copy", "rev", "broadcast_in_dim"}
)
_REMATS = frozenset({"remat", "remat2", "checkpoint"})
# Primitives that evaluate a body once, on all of their operands.
_ONCE = (
    _CALLS.keys()
    | _REMATS
    | {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "shard_map"}
)
# Primitives by which scales and biases meet data. They broadcast scalars and axes of length one.
_BROADCASTING = {"add": lax.add, "mul": lax.mul}


@dataclasses.dataclass(frozen=True)
class Value:
    """The facts that the walker knows about a variable."""

    data: bool  # whether it depends on the example
    leaves: frozenset[int] = (
        frozenset()
    )  # trainable leaves that it depends on, tracked only while `data` is False
    # For one leaf with moved entries: the leaf's axis of each dimension, or () after a reshape has
    # mixed the axes. None if any other operation was applied to the leaf.
    source: tuple[int, ...] | None = None
    sliced: tuple[
        bool, ...
    ] = ()  # for each enclosing scan, outermost first, whether it changes between iterations

    @property
    def is_weight(self) -> bool:
        return not self.data and bool(self.leaves)


_DATA = Value(data=True)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_complex(variable: Any) -> bool:
    """Returns whether a variable of a jaxpr is complex."""
    return jnp.issubdtype(variable.aval.dtype, jnp.complexfloating)


def inner_program(name: str, params: Mapping[str, Any]) -> jex.ClosedJaxpr | None:
    """Returns the program that a primitive calls once with all of its operands, or None."""
    return called_program(params) if name in _ONCE else None


def called_program(params: Mapping[str, Any]) -> jex.ClosedJaxpr:
    """Returns the program among the parameters of a primitive that calls one."""
    body = next(params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in params)
    return body if hasattr(body, "consts") else jex.ClosedJaxpr(body, ())


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from every_equation(inner)


def forward_bytes(jaxpr: Any) -> int:
    """Returns the bytes of all values that a jaxpr computes, those of a `scan` once for each
    iteration.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if inner := list(jex.jaxprs_in_params(eqn.params)):
            total += eqn.params.get("length", 1) * sum(map(forward_bytes, inner))
        else:
            total += sum(v.aval.size * getattr(v.aval.dtype, "itemsize", 0) for v in eqn.outvars)
    return total


def scan_starts(body: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
    """Returns the positions of the first carry and of the first scanned array among the operands of
    a `scan`.

    The parameters that say so differ between releases of JAX. In every release, constants come
    first, and only scanned and stacked arrays have one axis more outside of the body than inside.

    Args:
      body: The closed jaxpr of one iteration.
      operands, results: Arrays or shapes, those of the scan.
    """

    def unscanned(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(len(x.shape) == len(v.aval.shape) for x, v in zip(outside, inside, strict=True))

    first_x = unscanned(operands, body.jaxpr.invars)
    return first_x - unscanned(results, body.jaxpr.outvars), first_x


def _starts(scan: jex.JaxprEqn) -> tuple[int, int]:
    operands, results = ([v.aval for v in variables] for variables in (scan.invars, scan.outvars))
    return scan_starts(scan.params["jaxpr"], operands, results)


def scan_parts(
    scan: jex.JaxprEqn, operands: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the operands of a `scan` as constants, initial carry, and scanned arrays."""
    first_carry, first_x = _starts(scan)
    return (
        list(operands[:first_carry]),
        list(operands[first_carry:first_x]),
        list(operands[first_x:]),
    )


def _ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes `lax.ragged_dot` as one product of masked rows. JAX cannot batch the primitive."""
    ends, sizes, row = jnp.cumsum(sizes)[None], sizes[None], jnp.arange(len(x))[:, None]
    inside = (row >= ends - sizes) & (row < ends)
    rows = jnp.where(inside[:, :, None], x[:, None], jnp.zeros((), x.dtype)).reshape(len(x), -1)
    return rows @ w.reshape(-1, w.shape[-1])


# Primitives that are replaced before a program is batched.
_REPLACED = frozenset({"ragged_dot_general", "custom_vmap_call"})


def batchable(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """Returns the program that JAX itself batches, so that no example can see another one.

    Each `lax.ragged_dot` becomes a product that JAX can batch. Each
    `jax.custom_batching.custom_vmap` becomes its function of one example, because its own rule is a
    function of the whole batch.
    """

    def called(function: Any, eqn: Any) -> Any:
        (call,) = jax.make_jaxpr(jax.jit(function))(*(v.aval for v in eqn.invars)).jaxpr.eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars)

    def changed(eqn: Any) -> Any:
        if eqn.primitive.name == "custom_vmap_call":
            return called(jex.jaxpr_as_fun(eqn.params["call"]), eqn)
        if eqn.primitive.name != "ragged_dot_general":
            return eqn
        numbers, offset = eqn.params["ragged_dot_dimension_numbers"], eqn.params["group_offset"]
        plain = (numbers.dot_dimension_numbers, tuple(numbers.lhs_ragged_dimensions), offset)
        if plain != (
            (((1,), (1,)), ((), ())),
            (0,),
            None,
        ):  # another product of `lax.ragged_dot_general`
            return eqn
        return called(_ragged_dot, eqn)

    if not any(eqn.primitive.name in _REPLACED for eqn in every_equation(jaxpr)):
        return jaxpr
    return with_equations(jaxpr, changed)


def has_custom_vjp(eqn: Any) -> bool:
    """Returns whether an equation is or contains a `jax.custom_vjp`."""
    inner = (e for body in jex.jaxprs_in_params(eqn.params) for e in every_equation(body))
    return any("custom_vjp" in e.primitive.name for e in (eqn, *inner))


def _needs_a_tap(eqn: Any) -> bool:
    """Returns whether weights need a tap before an equation although it has no data."""
    return any(map(is_complex, eqn.outvars)) or has_custom_vjp(eqn)


def _moved_axes(eqn: Any, value: Value) -> tuple[int, ...] | None:
    """Returns the `source` of the output of a weight-only equation with one weight operand, or
    None.
    """
    name, aval, out = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
    if value.source is None or len(eqn.invars) != 1:
        return None
    if name == "convert_element_type":
        return value.source
    if name == "transpose" and value.source:
        return tuple(value.source[i] for i in eqn.params["permutation"])
    if name in MOVES and math.prod(out.shape) == math.prod(aval.shape):
        return ()
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One equation of a plan.

    kind: "bind" evaluates it. "meet" applies a rule, since its one weight meets data. "tap"
    evaluates it with a tap on each weight operand. "call", "remat" and "scan" walk its body.
    """

    kind: str
    eqn: jex.JaxprEqn
    without_data: bool = False
    weights: tuple[
        int, ...
    ] = ()  # operands that are weights, for "scan" only weights that start a carry
    inner: "Plan | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The plan to evaluate a jaxpr with taps. `sites` lists every meeting point in order, with
    inner programs.
    """

    jaxpr: jex.Jaxpr
    consts: tuple[Any, ...]
    steps: tuple[_Step, ...]
    sites: tuple[sites.Site, ...]
    closing: tuple[int, ...]  # outputs that are weights and get a separate tap
    outputs: tuple[Value, ...]
    loops: tuple[int, ...]  # lengths of the enclosing scans

    def forward(self, args: Sequence[Any], taps: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Evaluates the program with `taps` added. Returns (outputs, records) with one record per
        site.
        """
        env, pending, records = self._bindings(args), iter(taps), list[Any]()
        for step in self.steps:
            operands = _read(env, step.eqn.invars)
            if step.kind == "meet":
                records.append(self.sites[len(records)].rule.record(operands))
                env[step.eqn.outvars[0]] = _tapped(
                    bind_equation(self.jaxpr, step.eqn, operands)[0], next(pending)
                )
                continue
            for i in step.weights:
                value, variable = _tapped(operands[i], next(pending)), step.eqn.invars[i]
                for j, v in enumerate(
                    step.eqn.invars
                ):  # one tap serves both places of an operand that occurs twice
                    if j == i or (step.kind == "tap" and v is variable):
                        operands[j] = value
                records.append(())
            if step.inner is not None:
                inner_taps = list(itertools.islice(pending, len(step.inner.sites)))
                outs, inner_records = _forward_inner(step, step.inner, operands, inner_taps)
                records += inner_records
            elif step.kind == "tap" and step.eqn.primitive.name in _BROADCASTING:
                shape = jnp.broadcast_shapes(*(x.shape for x in operands))
                operands = [_broadcast(x, shape) for x in operands]
                outs = [_BROADCASTING[step.eqn.primitive.name](*operands)]
            else:
                outs = bind_equation(self.jaxpr, step.eqn, operands)
            env.update(zip(step.eqn.outvars, outs, strict=True))
        outputs = _read(env, self.jaxpr.outvars)
        for index in self.closing:
            outputs[index] = _tapped(outputs[index], next(pending))
            records.append(())
        return outputs, records

    def weights_program(self, leaves: Sequence[Any]) -> jex.ClosedJaxpr:
        """Returns the program from the trainable leaves, the first arguments, to the values V_j of
        all sites.
        """
        rest = [None] * (len(self.jaxpr.invars) - len(leaves))
        return jax.make_jaxpr(lambda leaves: self.weights([*leaves, *rest])[0])(leaves)

    def weights(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Computes (values V_j of all sites, outputs) in float32 or wider. Entries of `args` that
        are data are ignored.

        Casts of weights to low precision are skipped, so that J^T sums in float32 under bf16
        compute.
        """
        env, found = self._bindings(args), list[Any]()
        for step in self.steps:
            operands = _read(env, step.eqn.invars)
            found += [operands[i] for i in step.weights]
            if step.without_data:
                env.update(
                    zip(step.eqn.outvars, _bind_wide(self.jaxpr, step.eqn, operands), strict=True)
                )
            elif step.inner is not None and step.kind == "scan":
                found += _weights_of_scan(step.eqn, step.inner, operands)
            elif step.inner is not None:
                inner_found, outs = step.inner.weights(operands)
                found += inner_found
                env.update(zip(step.eqn.outvars, outs, strict=True))
        outputs = _read(env, self.jaxpr.outvars)
        return found + [outputs[i] for i in self.closing], outputs

    def _bindings(self, args: Sequence[Any]) -> dict[Any, Any]:
        return dict(
            zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*self.consts, *args], strict=True)
        )


_tap = jex.Primitive("jaxdp_tap")
_tap.def_impl(lambda x, tap: x)
_tap.def_abstract_eval(lambda x, tap: x)
mlir.register_lowering(_tap, mlir.lower_fun(lambda x, tap: x, multiple_results=False))


def _tapped(x: Any, tap: jax.Array) -> jax.Array:
    """Returns x + tap for a tap of zeros [1, ...]. It reads no tap, so none takes memory."""
    tapped: jax.Array = _tap.bind(x, tap)
    return tapped


def _tap_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, _ = primals
    of_x, of_tap = tangents
    if isinstance(of_tap, ad.Zero):
        return x, of_x
    of_tap = shards.vary(of_tap.reshape(x.shape), shards.varying_axes(x))
    return x, of_tap if isinstance(of_x, ad.Zero) else of_x + of_tap


ad.primitive_jvps[_tap] = _tap_tangents
batching.primitive_batchers[_tap] = lambda args, axes: (args[0], axes[0])


def _read(env: dict[Any, Any], variables: Sequence[Any]) -> list[Any]:
    """Reads variables. An unbound variable reads as None, which means data while weights are
    evaluated.
    """
    return [v.val if isinstance(v, jex.Literal) else env.get(v) for v in variables]


def restricted(program: jex.ClosedJaxpr, results: Sequence[int]) -> jex.ClosedJaxpr:
    """Returns the program of some results, without the equations that they do not need."""
    outvars, eqns = [program.jaxpr.outvars[j] for j in results], list[Any]()
    needed = set(map(id, outvars))
    for eqn in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(map(id, eqn.outvars)):
            eqns.append(eqn)
            needed.update(map(id, eqn.invars))
    return jex.ClosedJaxpr(program.jaxpr.replace(outvars=outvars, eqns=eqns[::-1]), program.consts)


def bind_equation(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates one equation as a separate program, because JAX has no public interface to bind its
    primitive.
    """
    given = {
        v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, jex.Literal)
    }
    program = jaxpr.replace(
        constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
    )
    results: list[Any] = jex.jaxpr_as_fun(jex.ClosedJaxpr(program, ()))(*given.values())
    return results


def _broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a scalar, or an array to a shape of the same rank. The transpose sums over no axis
    of length one.

    The loss of one example has such an axis in place of a model's batch. Under vmap, XLA on CPU is
    up to ten times slower if a sum includes this axis.
    """
    if x.shape == shape:
        return x
    long = [d for d, n in enumerate(shape) if n != 1]
    squeezed = x.reshape([x.shape[d] for d in long if x.ndim])
    return jnp.broadcast_to(squeezed, [shape[d] for d in long]).reshape(shape)


def _widen(x: Any) -> Any:
    return x.astype(sites.wide_dtype(x)) if _is_float(x) else x


def _bind_wide(jaxpr: jex.Jaxpr, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation without data, with floats in float32 or wider."""
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    if (
        eqn.primitive.name == "convert_element_type"
        and _is_float(operands[0])
        and _is_float(eqn.outvars[0].aval)
    ):
        return [operands[0].astype(sites.wide_dtype(eqn.outvars[0].aval))]
    if eqn.primitive.name in MOVES:
        return [_widen(x) for x in bind_equation(jaxpr, eqn, operands)]
    declared = [
        x.astype(v.aval.dtype) if _is_float(x) else x
        for x, v in zip(operands, eqn.invars, strict=True)
    ]
    return [_widen(x) for x in bind_equation(jaxpr, eqn, declared)]


def _forward_inner(
    step: _Step, inner: Plan, operands: list[Any], taps: list[Any]
) -> tuple[list[Any], list[Any]]:
    params = step.eqn.params
    if step.kind == "call":
        return inner.forward(operands, taps)
    if step.kind == "remat":
        body = jax.checkpoint(
            inner.forward, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        result: tuple[list[Any], list[Any]] = body(operands, taps)
        return result
    first_carry, first_x = _starts(step.eqn)

    def iterate(
        carry: list[Any], xs: tuple[list[Any], list[Any]]
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        outs, records = inner.forward([*operands[:first_carry], *carry, *xs[0]], xs[1])
        return outs[: len(carry)], (outs[len(carry) :], records)

    loop = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, records) = lax.scan(
        iterate, operands[first_carry:first_x], (operands[first_x:], taps), **loop
    )
    return [*carry, *ys], records


def _weights_of_scan(eqn: jex.JaxprEqn, inner: Plan, operands: list[Any]) -> list[Any]:
    """Returns the V_j inside a scan body: loop-invariant ones once, sliced ones stacked along a
    leading axis.
    """
    first_carry, first_x = _starts(eqn)
    # A carry changes after its initial value, so every carry is data inside the body.
    operands = [None if first_carry <= i < first_x else x for i, x in enumerate(operands)]
    in_axes = [0 if i >= first_x and x is not None else None for i, x in enumerate(operands)]
    if not inner.sites or all(axis is None for axis in in_axes):
        return inner.weights(operands)[0]
    depth = len(inner.loops) - 1
    out_axes = [0 if site.sliced[depth] else None for site in inner.sites]
    return jax.vmap(lambda xs: inner.weights(xs)[0], in_axes=(in_axes,), out_axes=out_axes)(
        operands
    )


def make_plan(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Value],
    *,
    close: Sequence[int] = (),
    loops: Any = (),
) -> Plan:
    """Finds where weights meet data.

    Args:
      jaxpr, consts, inputs: The program, and the known facts about its inputs.
      close: Outputs that must not be weights. An output that is a weight gets a tap.
      loops: Lengths of the enclosing scans, outermost first.
    """
    constant = Value(data=False, sliced=(False,) * len(loops))
    known = dict.fromkeys(jaxpr.constvars, constant) | dict(zip(jaxpr.invars, inputs, strict=True))
    steps: list[_Step] = []
    found: list[sites.Site] = []

    def look(variable: Any) -> Value:
        return constant if isinstance(variable, jex.Literal) else known[variable]

    def site(variable: Any, rule: Any = None, out: Any = None) -> sites.Site:
        """Returns the site of the weight `variable`, with its tap at `out` if there is a rule, else
        at the weight.
        """
        value, place, shape = look(variable), (out or variable).aval, tuple(variable.aval.shape)
        rule = rule or sites.OnWeight(weight_shape=shape, cols=math.prod(shape))
        tap = jax.ShapeDtypeStruct((*loops, *place.shape), place.dtype)
        return sites.Site(rule, value.leaves, value.source, loops, value.sliced, tap)

    for eqn in jaxpr.eqns:
        if any(isinstance(v.aval, jax.ref.AbstractRef) for v in eqn.outvars):
            raise NotImplementedError(
                "loss_fn uses a mutable array (jax.new_ref), and the book-keeping engine cannot "
                "follow weights through it. Write the loss without it, or use engine='vmap'."
            )
        values = [look(v) for v in eqn.invars]
        weights = tuple(i for i, v in enumerate(values) if v.is_weight)
        outs = (_DATA,) * len(eqn.outvars)
        if eqn.primitive.name in _CALLS and weights:
            body = eqn.params[_CALLS[eqn.primitive.name]]
            inner = make_plan(body.jaxpr, body.consts, values, loops=loops)
            step, outs = _Step("call", eqn, inner=inner), inner.outputs
        elif not any(v.data for v in values) and not (weights and _needs_a_tap(eqn)):
            step, outs = (
                _Step("bind", eqn, without_data=True),
                _outputs_without_data(eqn, values, loops),
            )
        elif not weights:
            step = _Step("bind", eqn)
        elif eqn.primitive.name in _REMATS:
            inner = make_plan(eqn.params["jaxpr"], (), values, loops=loops)
            step, outs = _Step("remat", eqn, inner=inner), inner.outputs
        elif eqn.primitive.name == "scan":
            step = _plan_scan(eqn, values, loops)
            found += [site(eqn.invars[i]) for i in step.weights]
        elif rule := _rule(eqn, weights):
            step = _Step("meet", eqn, weights=weights)
            found.append(site(eqn.invars[weights[0]], rule, eqn.outvars[0]))
        else:
            first = tuple(i for i in weights if eqn.invars[i] not in eqn.invars[:i])
            step = _Step("tap", eqn, weights=first)
            found += [site(eqn.invars[i]) for i in first]
        if step.inner is not None:
            found += step.inner.sites
        steps.append(step)
        known |= dict(zip(eqn.outvars, outs, strict=True))

    closing = tuple(i for i in close if look(jaxpr.outvars[i]).is_weight)
    found += [site(jaxpr.outvars[i]) for i in closing]
    outputs = tuple(_DATA if i in closing else look(v) for i, v in enumerate(jaxpr.outvars))
    return Plan(jaxpr, tuple(consts), tuple(steps), tuple(found), closing, outputs, loops)


def _plan_scan(eqn: jex.JaxprEqn, values: Sequence[Value], loops: tuple[int, ...]) -> _Step:
    first_carry, first_x = _starts(eqn)
    inner_values = [
        _DATA if v.data or first_carry <= i < first_x else _enter_loop(v, is_slice=i >= first_x)
        for i, v in enumerate(values)
    ]
    body = eqn.params["jaxpr"]
    every = range(len(body.jaxpr.outvars))
    inner = make_plan(
        body.jaxpr, body.consts, inner_values, close=every, loops=(*loops, eqn.params["length"])
    )
    tapped = tuple(i for i in range(first_carry, first_x) if values[i].is_weight)
    return _Step("scan", eqn, weights=tapped, inner=inner)


def _enter_loop(value: Value, *, is_slice: bool) -> Value:
    # A slice of a stacked leaf lacks the leaf's leading axis, so () records only that entries were
    # moved.
    source = value.source if not is_slice or value.source is None else ()
    return dataclasses.replace(value, source=source, sliced=(*value.sliced, is_slice))


def _outputs_without_data(
    eqn: jex.JaxprEqn, values: Sequence[Value], loops: tuple[int, ...]
) -> tuple[Value, ...]:
    sliced = tuple(any(v.sliced[d] for v in values) for d in range(len(loops)))
    leaves = frozenset[int]().union(*(v.leaves for v in values))
    constant = Value(data=False, sliced=sliced)
    if not leaves or eqn.primitive.name == "stop_gradient":
        return (constant,) * len(eqn.outvars)
    weight = Value(data=False, leaves=leaves, source=_moved_axes(eqn, values[0]), sliced=sliced)
    return tuple(weight if _is_float(v.aval) else constant for v in eqn.outvars)


def _rule(eqn: jex.JaxprEqn, weights: tuple[int, ...]) -> Any:
    """Returns the rule by which the weight operand of `eqn` meets data, or None. Rules exist for
    real numbers only.
    """
    if any(map(is_complex, eqn.invars)):
        return None
    if eqn.primitive.name == "dot_general" and len(weights) == 1:
        return sites.Dot.of(eqn, weights[0])
    if (
        eqn.primitive.name == "conv_general_dilated"
        and weights == (1,)
        and eqn.params["batch_group_count"] == 1
    ):
        return sites.Conv.of(eqn)
    if eqn.primitive.name in ("gather", "dynamic_slice") and weights == (0,):
        return sites.Lookup.of(eqn)
    return None
