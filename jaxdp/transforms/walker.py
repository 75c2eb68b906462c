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
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.ref
from jax import lax

from jaxdp.transforms import forms, layouts, sites
from jaxdp.transforms.jaxprs import (
    CALLS,
    REMATS,
    bind_equation,
    has_custom_vjp,
    is_complex,
    scan_layout,
)
from jaxdp.transforms.taps import tapped

# Cotangents of data of at least so many features have the layout of the kernels of convolutions. By
# the estimate for v5e, with 256 images, a clipped gradient of a WRN-10-4 takes 13.2 M cycles in
# place of 16.2 M. With fewer features too it takes 13.0 M, but one of a ResNet-20 takes 7.3 M in
# place of 6.5 M.
_FEATURES_OF_LAID = 64

# Primitives that only move entries. Their J is a permutation and keeps norms.
MOVES = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "copy", "rev", "broadcast_in_dim"}
)
# Primitives by which scales and biases meet data. They broadcast scalars and axes of length one.
_BROADCASTING = {"add": lax.add, "mul": lax.mul}

# Platforms where loops form gradients of at most 1 / `_SMALLER` of the entries of their factors.
_FORMING = ("cuda", "tpu")
_SMALLER = 8


@dataclasses.dataclass(frozen=True)
class Value:
    """The facts that the walker knows about a variable.

    Attributes:
      data: Whether it depends on the example.
      leaves: The trainable leaves that it depends on. Only known while `data` is False.
      source: For one leaf with moved entries, the leaf's axis of each dimension, or () after a
        reshape has mixed the axes. None if any other operation was applied to the leaf.
      sliced: For each enclosing scan, outermost first, whether it changes between iterations.
    """

    data: bool
    leaves: frozenset[int] = frozenset()
    source: tuple[int, ...] | None = None
    sliced: tuple[bool, ...] = ()

    @property
    def is_weight(self) -> bool:
        """Whether it depends on trainable leaves and not on the example."""
        return not self.data and bool(self.leaves)


_DATA = Value(data=True)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# --- Plans, and their evaluation ---


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One equation of a plan.

    Attributes:
      kind: "bind" evaluates it. "meet" applies a rule, since its one weight meets data. "tap"
        evaluates it with a tap on each weight operand. "call", "remat" and "scan" walk its body.
      eqn: The equation.
      without_data: Whether no operand depends on data.
      weights: The operands that have a tap, which are weights. For "scan" only those that start a
        carry.
      inner: The plan of the body.
    """

    kind: Literal["bind", "meet", "tap", "call", "remat", "scan"]
    eqn: jex.JaxprEqn
    without_data: bool = False
    weights: tuple[int, ...] = ()
    inner: "Plan | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The plan to evaluate a jaxpr with taps.

    Attributes:
      jaxpr: The program.
      consts: Its constants.
      steps: Its equations.
      sites: Every place where a weight meets data in order, with those of inner programs.
      closing: Outputs that are weights and get a tap of their own.
      outputs: What is known about the outputs.
      loops: The lengths of the enclosing scans, outermost first.
    """

    jaxpr: jex.Jaxpr
    consts: tuple[Any, ...]
    steps: tuple[_Step, ...]
    sites: tuple[sites.Site, ...]
    closing: tuple[int, ...]
    outputs: tuple[Value, ...]
    loops: tuple[int, ...]

    @property
    def multiplies_positions(self) -> bool:
        """Whether the gradient of a weight is a product over several positions, such as tokens."""
        return any(site.rule.positions > 1 for site in self.sites)

    def forward(
        self,
        args: Sequence[Any],
        taps: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Evaluates the program with `taps` added.

        Returns:
          The outputs, and one record per site.
        """
        values = self._bindings(args)
        pending = iter(taps)
        records: list[Any] = []
        for step in self.steps:
            operands = _read(values, step.eqn.invars)
            if step.kind == "meet":  # the tap is on the result
                # Sites and records have one order, so their number is that of the next site.
                site = self.sites[len(records)]
                records.append(site.rule.record(operands))
                operands = _laid_for(site, operands)
                (result,) = bind_equation(self.jaxpr, step.eqn, operands)
                results = [tapped(result, next(pending))]
            else:
                operands = _tap_operands(step, operands, pending)
                records += [()] * len(step.weights)  # the cotangent alone is the gradient
                results, inner_records = self._evaluate(step, operands, pending)
                records += inner_records
            values.update(zip(step.eqn.outvars, results, strict=True))
        outputs = _read(values, self.jaxpr.outvars)
        for index in self.closing:
            # The result itself has the tap, so its cotangent is the gradient of the weight.
            outputs[index] = tapped(outputs[index], next(pending))
            records.append(())
        return outputs, records

    def _evaluate(
        self,
        step: _Step,
        operands: list[Any],
        pending: Iterator[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Returns the results of a step, and the records of the sites inside of it."""
        if step.inner is not None:
            n_taps = len(step.inner.sites)
            # Taps have the order of the sites, so those of the body come next.
            inner_taps = list(itertools.islice(pending, n_taps))
            return _forward_inner(step, step.inner, operands, inner_taps)
        name = step.eqn.primitive.name
        if step.kind == "tap" and name in _BROADCASTING:
            # Bound as it is, the sum of its transpose would include axes of length one.
            shape = jnp.broadcast_shapes(*(x.shape for x in operands))
            operands = [_broadcast(x, shape) for x in operands]
            result = _BROADCASTING[name](*operands)
            # Where products read all tokens, they decide better how these lie: a fixed layout makes
            # the clipped gradient of a ViT-B/16 8 % slower, by the estimate for v5e.
            if self.multiplies_positions:
                return [result], []
            return [layouts.of_tokens(result)], []
        return bind_equation(self.jaxpr, step.eqn, operands), []

    def weights_program(self, leaves: Sequence[Any]) -> jex.ClosedJaxpr:
        """Returns the program from the trainable leaves to the values V_j of all sites.

        Args:
          leaves: The leaves, which are the first arguments of the program.
        """
        n_of_example = len(self.jaxpr.invars) - len(leaves)

        def weights(leaves: Sequence[Any]) -> list[Any]:
            # The values of data are never read here.
            no_example = [None] * n_of_example
            values, _ = self.weights([*leaves, *no_example])
            return values

        return jax.make_jaxpr(weights)(leaves)

    def weights(
        self,
        args: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Computes (values V_j of all sites, outputs) in float32 or wider.

        Casts of weights to low precision are skipped, so that J^T sums in float32 under bf16
        compute. Entries of `args` that are data are ignored, and outputs that are data are None.
        """
        values = self._bindings(args)
        weights: list[Any] = []
        for step in self.steps:
            operands = _read(values, step.eqn.invars)
            # In the order of the sites: a step's own weights, and then those of its body.
            weights += [operands[i] for i in step.weights]
            if step.without_data:
                results = _bind_wide(self.jaxpr, step.eqn, operands)
            elif step.inner is None:
                continue
            elif step.kind == "scan":  # all of its results are data
                weights += _weights_of_scan(step.eqn, step.inner, operands)
                continue
            else:
                inner_weights, results = step.inner.weights(operands)
                weights += inner_weights
            values.update(zip(step.eqn.outvars, results, strict=True))
        outputs = _read(values, self.jaxpr.outvars)
        weights += [outputs[i] for i in self.closing]
        return weights, outputs

    def _bindings(self, args: Sequence[Any]) -> dict[Any, Any]:
        variables = [*self.jaxpr.constvars, *self.jaxpr.invars]
        return dict(zip(variables, [*self.consts, *args], strict=True))


def _laid_for(site: sites.Site, operands: list[Any]) -> list[Any]:
    """Returns the operands, of which the data get the layout that kernels of a TPU read."""
    rule = site.rule
    if not isinstance(rule, sites.Conv) or site.lengths:
        return operands
    if not rule.of_pictures(site.tap.shape):
        return operands
    batch, feature, *spatial = rule.numbers.lhs_spec
    if operands[0].shape[feature] < _FEATURES_OF_LAID:
        return operands
    data = layouts.of_pictures(operands[0], (batch, *spatial, feature))
    return [data, *operands[1:]]


def _read(
    values: dict[Any, Any],
    variables: Sequence[Any],
) -> list[Any]:
    """Reads variables.

    While weights are evaluated, data have no value. Such a variable reads as None.
    """
    return [v.val if isinstance(v, jex.Literal) else values.get(v) for v in variables]


def _tap_operands(
    step: _Step,
    operands: list[Any],
    pending: Iterator[Any],
) -> list[Any]:
    """Returns the operands of a step, with the next taps on those that are weights."""
    result = list(operands)
    for i in step.weights:
        variable = step.eqn.invars[i]
        value = tapped(result[i], next(pending))
        result[i] = value
        if step.kind == "tap":
            # One tap serves all places of an operand that occurs twice.
            for j, other in enumerate(step.eqn.invars):
                if other is variable:
                    result[j] = value
    return result


def _broadcast(
    x: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """Broadcasts a scalar, or an array to a shape of the same rank.

    The transpose sums over no axis of length one. The loss of one example has such an axis in place
    of a model's batch. Under vmap, XLA on CPU is up to ten times slower if a sum includes it.
    """
    if x.shape == shape:
        return x
    long = [d for d, n in enumerate(shape) if n != 1]
    squeezed = x.reshape([x.shape[d] for d in long if x.ndim])
    long_shape = [shape[d] for d in long]
    return jnp.broadcast_to(squeezed, long_shape).reshape(shape)


def _widen(x: Any) -> Any:
    if _is_float(x):
        return x.astype(sites.wide_dtype(x))
    return x


def _bind_wide(
    jaxpr: jex.Jaxpr,
    eqn: Any,
    operands: Sequence[Any],
) -> list[Any]:
    """Evaluates an equation without data, with floats in float32 or wider."""
    # Literals may be scalars of Python, which have no dtype.
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    if eqn.primitive.name == "convert_element_type":
        (array,) = arrays
        to = eqn.outvars[0].aval
        # A cast to an integer is evaluated as it stands below, since it has no gradient.
        if _is_float(array) and _is_float(to):
            dtype = sites.wide_dtype(to)
            return [array.astype(dtype)]
    if eqn.primitive.name not in MOVES:
        # Other primitives may demand operands of equal dtype, so they get those of the program.
        pairs = zip(arrays, eqn.invars, strict=True)
        arrays = [x.astype(v.aval.dtype) if _is_float(x) else x for x, v in pairs]
    return [_widen(x) for x in bind_equation(jaxpr, eqn, arrays)]


def _forward_inner(
    step: _Step,
    inner: Plan,
    operands: list[Any],
    taps: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Evaluates the body of a step with taps. Returns (results, records)."""
    if step.kind == "call":
        return inner.forward(operands, taps)
    params = step.eqn.params
    if step.kind == "remat":  # the values of the body are computed again, as the loss asks
        body = jax.checkpoint(
            inner.forward, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        result: tuple[list[Any], list[Any]] = body(operands, taps)
        return result
    first_carry, first_x = scan_layout(step.eqn)
    constants = operands[:first_carry]

    def iterate(
        carry: list[Any],
        xs: tuple[list[Any], list[Any]],
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        slices, inner_taps = xs
        inputs = [*constants, *carry, *slices]
        outputs, records = inner.forward(inputs, inner_taps)
        new_carry = outputs[: len(carry)]
        results = outputs[len(carry) :]
        return new_carry, (results, records)

    # The same options as the user's loop. Records and cotangents are stacked along its iterations.
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    start = operands[first_carry:first_x]
    scanned = (operands[first_x:], taps)
    carry, (stacked, records) = lax.scan(iterate, start, scanned, **options)
    return [*carry, *stacked], records


def _weights_of_scan(
    eqn: jex.JaxprEqn,
    inner: Plan,
    operands: list[Any],
) -> list[Any]:
    """Returns the V_j inside a scan body.

    Loop-invariant ones are computed once. Sliced ones are stacked along a leading axis.
    """
    first_carry, first_x = scan_layout(eqn)
    # A carry changes after its initial value, so every carry is data inside the body.
    values: list[Any] = list(operands)
    values[first_carry:first_x] = [None] * (first_x - first_carry)
    # Data have no value, so only weights that the scan slices are mapped.
    in_axes: list[int | None] = [None] * len(values)
    for i in range(first_x, len(values)):
        if values[i] is not None:
            in_axes[i] = 0
    # `jax.vmap` refuses a call in which it maps nothing.
    if not inner.sites or all(axis is None for axis in in_axes):
        weights, _ = inner.weights(values)
        return weights
    # The body's own loop is the last of its enclosing ones.
    depth = len(inner.loops) - 1
    out_axes = [0 if site.sliced[depth] else None for site in inner.sites]

    def of_slices(values: list[Any]) -> list[Any]:
        weights, _ = inner.weights(values)
        return weights

    return jax.vmap(of_slices, in_axes=(in_axes,), out_axes=out_axes)(values)


# --- The analysis ---


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
    walk = _Walk(jaxpr, inputs, loops)
    for eqn in jaxpr.eqns:
        walk.add(eqn)
    closing = tuple(i for i in close if walk.value(jaxpr.outvars[i]).is_weight)
    # Their taps come last, as `Plan.forward` adds them.
    walk.sites += [walk.site_on_weight(jaxpr.outvars[i]) for i in closing]
    outputs = [walk.value(variable) for variable in jaxpr.outvars]
    for i in closing:
        outputs[i] = _DATA
    return Plan(
        jaxpr=jaxpr,
        consts=tuple(consts),
        steps=tuple(walk.steps),
        sites=tuple(walk.sites),
        closing=closing,
        outputs=tuple(outputs),
        loops=loops,
    )


class _Walk:
    """A walk over the equations of a program, which collects its steps and sites."""

    def __init__(
        self,
        jaxpr: jex.Jaxpr,
        inputs: Sequence[Value],
        loops: tuple[int, ...],
    ):
        self.steps: list[_Step] = []
        self.sites: list[sites.Site] = []
        self._loops = loops
        # A constant is the same in all iterations.
        self._constant = Value(data=False, sliced=(False,) * len(loops))
        self._known = dict.fromkeys(jaxpr.constvars, self._constant)
        self._known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value(self, variable: Any) -> Value:
        """Returns what is known about a variable."""
        if isinstance(variable, jex.Literal):
            return self._constant
        return self._known[variable]

    def add(self, eqn: jex.JaxprEqn) -> None:
        """Adds the step and the sites of the next equation."""
        # A reference is read and written by later equations, which no operand shows.
        if any(isinstance(v.aval, jax.ref.AbstractRef) for v in eqn.outvars):
            raise NotImplementedError(
                "loss_fn uses a mutable array (jax.new_ref), and the book-keeping engine cannot "
                "follow weights through it. Write the loss without it, or use engine='vmap'."
            )
        values = [self.value(v) for v in eqn.invars]
        weights = tuple(i for i, v in enumerate(values) if v.is_weight)
        step = self._step(eqn, values, weights)
        if step.kind in ("call", "remat"):
            assert step.inner is not None
            outputs = step.inner.outputs
        elif step.without_data:
            outputs = _outputs_without_data(eqn, values, len(self._loops))
        else:
            # An operand is data, or its tap is in front of this equation.
            outputs = (_DATA,) * len(eqn.outvars)
        if step.inner is not None:
            self.sites += step.inner.sites
        self.steps.append(step)
        self._known |= dict(zip(eqn.outvars, outputs, strict=True))

    def _step(
        self,
        eqn: jex.JaxprEqn,
        values: list[Value],
        weights: tuple[int, ...],
    ) -> _Step:
        """Decides how an equation is evaluated. Adds the sites of the equation itself."""
        name = eqn.primitive.name
        # A call without weights is one equation, so that custom rules inside of it are kept.
        if name in CALLS and weights:
            body = eqn.params[CALLS[name]]
            inner = make_plan(body.jaxpr, body.consts, values, loops=self._loops)
            return _Step("call", eqn, inner=inner)
        has_data = any(v.data for v in values)
        # Weights that become complex, or enter a custom_vjp, have their tap before that.
        needs_a_tap = bool(weights) and _needs_a_tap(eqn)
        # A function of weights alone belongs to `Plan.weights`, which differentiates it by itself.
        if not has_data and not needs_a_tap:
            return _Step("bind", eqn, without_data=True)
        if not weights:
            return _Step("bind", eqn)
        if name in REMATS:
            inner = make_plan(eqn.params["jaxpr"], (), values, loops=self._loops)
            return _Step("remat", eqn, inner=inner)
        if name == "scan":
            step = _plan_scan(eqn, values, self._loops)
            self.sites += [self.site_on_weight(eqn.invars[i]) for i in step.weights]
            return step
        rule = _rule(eqn, weights)
        if rule is not None and not self._is_formed(rule):
            (weight,) = weights
            (result,) = eqn.outvars
            self.sites.append(self._site(eqn.invars[weight], rule, tap_on=result))
            return _Step("meet", eqn, weights=weights)
        # A weight that occurs twice has one tap, at its first place.
        operands = eqn.invars
        first = tuple(i for i in weights if operands[i] not in operands[:i])
        self.sites += [self.site_on_weight(eqn.invars[i]) for i in first]
        return _Step("tap", eqn, weights=first)

    def _is_formed(self, rule: sites.Rule) -> bool:
        """Returns whether a loop forms the gradients of a layer, as a plain step would.

        A loop stacks what it returns. The gradient of an adapter of rank 8 is smaller than its
        factors, which XLA copies into another layout for the norm: 7 % of the step of GPT-2 on a
        TPU. So such a weight has its tap on itself.
        """
        if not self._loops or not rule.is_dense or forms.platform() not in _FORMING:
            return False
        # The entries of dV, and those of u and w, of one iteration.
        of_gradient = rule.rows * rule.cols
        of_factors = rule.positions * (rule.rows + rule.cols)
        return _SMALLER * of_gradient <= of_factors

    def site_on_weight(self, variable: Any) -> sites.Site:
        """Returns the site of a weight whose tap is on the weight itself."""
        shape = tuple(variable.aval.shape)
        rule = sites.OnWeight(weight_shape=shape, cols=math.prod(shape))
        return self._site(variable, rule, tap_on=variable)

    def _site(
        self,
        variable: Any,
        rule: sites.Rule,
        *,
        tap_on: Any,
    ) -> sites.Site:
        value = self.value(variable)
        shape = (*self._loops, *tap_on.aval.shape)
        # The cotangent of a value has its dtype, so the tap has it too.
        tap = jax.ShapeDtypeStruct(shape, tap_on.aval.dtype)
        return sites.Site(rule, value.leaves, value.source, self._loops, value.sliced, tap)


def _needs_a_tap(eqn: Any) -> bool:
    """Returns whether weights need a tap before an equation although it has no data."""
    return any(map(is_complex, eqn.outvars)) or has_custom_vjp(eqn)


def _plan_scan(
    eqn: jex.JaxprEqn,
    values: Sequence[Value],
    loops: tuple[int, ...],
) -> _Step:
    first_carry, first_x = scan_layout(eqn)
    inner_values = []
    for i, value in enumerate(values):
        is_carry = first_carry <= i < first_x
        # A carry that starts as a weight is data after the first iteration.
        if value.data or is_carry:
            inner_values.append(_DATA)
        else:
            inner_values.append(_enter_loop(value, is_slice=i >= first_x))
    body = eqn.params["jaxpr"]
    inner = make_plan(
        body.jaxpr,
        body.consts,
        inner_values,
        close=range(len(body.jaxpr.outvars)),  # so that carries and stacked results are data
        loops=(*loops, eqn.params["length"]),
    )
    # Inside of the body such a weight is data, so its tap is on the initial value.
    starts = tuple(i for i in range(first_carry, first_x) if values[i].is_weight)
    return _Step("scan", eqn, weights=starts, inner=inner)


def _enter_loop(value: Value, *, is_slice: bool) -> Value:
    source = value.source
    if is_slice and source is not None:
        # A slice of a stacked leaf lacks the leaf's leading axis, so () records only that entries
        # were moved.
        source = ()
    return dataclasses.replace(value, source=source, sliced=(*value.sliced, is_slice))


def _outputs_without_data(
    eqn: jex.JaxprEqn,
    values: Sequence[Value],
    n_loops: int,
) -> tuple[Value, ...]:
    """Returns what is known about the outputs of an equation without data."""

    def is_sliced(depth: int) -> bool:
        return any(value.sliced[depth] for value in values)

    sliced = tuple(map(is_sliced, range(n_loops)))
    leaves = frozenset[int]().union(*(v.leaves for v in values))
    constant = Value(data=False, sliced=sliced)
    # No gradient flows through a stopped gradient, or through integers and keys.
    if not leaves or eqn.primitive.name == "stop_gradient":
        return (constant,) * len(eqn.outvars)
    source = _moved_axes(eqn, values[0])
    weight = Value(data=False, leaves=leaves, source=source, sliced=sliced)
    return tuple(weight if _is_float(v.aval) else constant for v in eqn.outvars)


def _moved_axes(eqn: Any, value: Value) -> tuple[int, ...] | None:
    """Returns the `source` of the output of an equation without data.

    For example, it is (1, 0) for the transpose of a matrix that is a leaf, () for the matrix
    flattened, and None for its square.
    """
    # An equation of several operands, such as `concatenate`, does more than move one leaf.
    if value.source is None or len(eqn.invars) != 1:
        return None
    name = eqn.primitive.name
    # `Plan.weights` skips casts to few bits, so J only moves entries.
    if name == "convert_element_type":
        return value.source
    # After a reshape, source is () and stays so.
    if name == "transpose" and value.source:
        return tuple(value.source[i] for i in eqn.params["permutation"])
    size_before = math.prod(eqn.invars[0].aval.shape)
    size_after = math.prod(eqn.outvars[0].aval.shape)
    # A broadcast that repeats entries is no permutation, so it changes norms.
    if name in MOVES and size_before == size_after:
        return ()
    return None


def _rule(
    eqn: jex.JaxprEqn,
    weights: tuple[int, ...],
) -> sites.Rule | None:
    """Returns the rule by which the weight operand of `eqn` meets data, or None.

    Rules exist for real numbers only.
    """
    if any(map(is_complex, eqn.invars)):
        return None
    name = eqn.primitive.name
    if name == "dot_general" and len(weights) == 1:
        return sites.Dot.of(eqn, weights[0])
    # Operand 1 is the kernel. A weight in place of the data has no rule.
    if name == "conv_general_dilated" and weights == (1,):
        if eqn.params["batch_group_count"] == 1:
            return sites.Conv.of(eqn)
        return None
    # Operand 0 is the table. The others are indices.
    if name in ("gather", "dynamic_slice") and weights == (0,):
        return sites.Lookup.of(eqn)
    return None
