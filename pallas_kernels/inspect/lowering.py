"""From a call of an operation to Triton IR: what jax hands to XLA for each launch of a kernel.

The call is traced with abstract arrays for a GPU that need not be there. Each kernel in the trace
is then lowered alone, so that there is no doubt which Triton IR is whose.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import partial_eval
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from pallas_kernels import selection
from pallas_kernels.calls import Call, Pass
from pallas_kernels.inspect.roofline import GPU
from pallas_kernels.selection import Choice


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    algorithm: str
    grid: tuple[int, ...]
    blocks: dict[str, int]
    """The fields of its `Blocks`."""
    warps: int
    stages: int
    flops: int
    bytes_moved: int
    """Its operands and outputs, each once."""
    ttir: str


@dataclass(frozen=True)
class Trace:
    """A pass as a jaxpr, and the kernels that it launches, in order."""

    jaxpr: str
    launches: tuple[Launch, ...]


def lower(call: Call, which: Pass, gpu: GPU, **options: Any) -> Trace:
    """What the Triton backend makes of one pass of `call`.

    Args:
      call: the operation and the shapes of its operands.
      which: the pass. A gradient is traced without the forward pass, whose results it is given.
      gpu: the GPU to trace for; none need be there.
      **options: more arguments of the operation, such as `precision` and `blocks`.

    Raises:
      ValueError, TypeError, NotImplementedError: the operation refuses the call.
    """
    with _tracing_for(gpu):
        function, operands = call.function(backend="triton", **options), call.operands()
        if which == "forward":
            jaxpr = _trace(lambda operands: function(**operands), operands)
        else:
            jaxpr = _gradient(call, which, function)
        return Trace(str(jaxpr), tuple(map(_launch, _kernels(jaxpr))))


def lower_choice(call: Call, which: Pass, choice: Choice, gpu: GPU) -> Trace:
    """What a pass of `call` is where the tuner has found `choice` to be the fastest.

    As the tuner times it: `backward` has the forward pass in it. Errors as in `lower`.
    """
    with selection.trying(call, which, choice), _tracing_for(gpu):
        function, operands = call.function(), call.operands()
        if which == "forward":
            jaxpr = _trace(lambda operands: function(**operands), operands)
        elif which == "backward":
            differentiate = _differentiated(call, which, function)

            def both(operands: dict[str, Any], dy: Any) -> Any:
                y, pull = differentiate(operands)
                return y, pull(dy)

            jaxpr = _trace(both, operands, jax.eval_shape(differentiate, operands)[0])
        else:
            jaxpr = _gradient(call, which, function)
        return Trace(str(jaxpr), tuple(map(_launch, _kernels(jaxpr))))


@contextlib.contextmanager
def _tracing_for(gpu: GPU) -> Iterator[None]:
    device = AbstractDevice(gpu.device_kind, gpu.multiprocessors, "cuda")
    mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def _differentiated(call: Call, which: Pass, function: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the operands to y and a function of dy."""
    names = call.differentiated(which)

    def differentiate(operands: dict[str, Any]) -> Any:
        rest = {name: array for name, array in operands.items() if name not in names}
        of = {name: operands[name] for name in names}
        return jax.vjp(lambda of: function(**rest, **of), of)

    return differentiate


def _gradient(call: Call, which: Pass, function: Callable[..., Any]) -> Any:
    y, pull = jax.eval_shape(_differentiated(call, which, function), call.operands())
    return _trace(lambda pull, dy: pull(dy), pull, y)


def _trace(function: Callable[..., Any], *arguments: Any) -> Any:
    traced = jax.make_jaxpr(function)(*arguments)
    # An operation's backward pass has both gradients in it: what is not asked for goes here.
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return jaxpr


def _kernels(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr that launch a kernel, in order, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)  # of a closed jaxpr
                if hasattr(inner, "eqns"):
                    yield from _kernels(inner)


def _launch(equation: Any) -> Launch:
    parameters = equation.params
    compiler, cost = parameters["compiler_params"], parameters["cost_estimate"]
    return Launch(
        algorithm=parameters["name"],
        grid=tuple(parameters["grid_mapping"].grid),
        blocks=json.loads(parameters["metadata"]["blocks"]),
        warps=compiler.num_warps,
        stages=compiler.num_stages,
        flops=cost.flops,
        bytes_moved=cost.bytes_accessed,
        ttir=_ttir(equation),
    )


def _ttir(equation: Any) -> str:
    """The Triton IR of a kernel's equation, as text without source locations."""
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]

    def kernel(*arrays):
        return equation.primitive.bind(*arrays, **equation.params)

    with warnings.catch_warnings():
        # jax 0.12 warns that a later one will drop this lowering; `launch` knows.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        lowered = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    config = _custom_call(module.operation)
    context = ir.Context()
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context:
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
        return str(module.operation.get_asm(enable_debug_info=False))


def _custom_call(operation: Any) -> dict[str, Any]:
    """The attributes of the one Triton call below `operation`."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                inner = inner.operation
                if inner.name == "stablehlo.custom_call":
                    return {a.name: a.attr for a in inner.attributes["mhlo.backend_config"]}
                if found := _custom_call(inner):
                    return found
    return {}
