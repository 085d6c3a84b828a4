"""What a model costs: parameters, multiply-adds and activations of each layer, from its own calls.

    for layer in layer_costs(create_model("alexnet")):
        print(layer.name, layer.output, layer.parameters, layer.macs)

A model is traced on the shape of one image, and every operation of `pallas_kernels` that it asks
for says what it is. Nothing is computed. One MAC is a multiplication and an addition. Biases,
norms, pooling and activation functions are not counted, as usual.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import PyTree

from convjax.layers import Conv, Dense
from convjax.models.network import Network
from pallas_kernels import selection
from pallas_kernels.calls import Attention, Call, Conv2d, Matmul


@dataclass(frozen=True)
class LayerCost:
    """A layer, or as many equal ones under a scan, for one image.

    Attributes:
      name: modules from the outside in, as in checkpoints: "inception_3a/1x1/conv".
      copies: equal layers under this name; the numbers below are of all of them.
      operation: what it does, in words: "5×5 convolution, 2 groups".
      output: shape of one copy's output, without the image's axis.
      parameters: trainable numbers.
      macs: multiply-adds.
      activations: numbers that convolutions and dense layers put out.
      is_product: whether it is a matrix product as it stands: a dense layer, attention, or a
        convolution whose windows do not overlap (1×1, or patches).
    """

    name: str
    copies: int
    operation: str
    output: tuple[int, ...]
    parameters: int
    macs: int
    activations: int
    is_product: bool


@dataclass(frozen=True)
class ModelCost:
    """What one image costs.

    Attributes:
      layers: with parameters or products, that evaluation calls, in order.
      parameters: trainable numbers in each direct part, also of those that training alone calls.
    """

    layers: list[LayerCost]
    parameters: dict[str, int]


def layer_costs(
    model: Network, image_shape: tuple[int, int, int] = (224, 224, 3)
) -> list[LayerCost]:
    """The layers with parameters or products that evaluation calls, in order.

    Raises:
      ValueError: the model does not take images of this shape.
    """
    return model_cost(model, image_shape).layers


def model_cost(model: Network, image_shape: tuple[int, int, int] = (224, 224, 3)) -> ModelCost:
    """The layers, as `layer_costs` has them, and the parameters of each of the model's parts.

    Raises:
      ValueError: the model does not take images of this shape.
    """
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    variables = model.shapes(images)
    found: dict[str, _Found] = {}
    with _watching(variables, found):
        jax.eval_shape(model.clone(backend="auto").apply, variables, images)
    layers = [layer for name, item in found.items() if (layer := item.cost(name)) is not None]
    return ModelCost(layers, {name: _size(part) for name, part in variables["params"].items()})


@dataclass
class _Found:
    """What was seen of a module while the model was traced."""

    module: nn.Module
    copies: int
    parameters: int
    output: tuple[int, ...] = ()
    calls: dict[Call, None] | None = None

    def cost(self, name: str) -> LayerCost | None:
        calls = [call for call in self.calls or {} if isinstance(call, Conv2d | Matmul | Attention)]
        if not calls and not self.parameters:
            return None
        is_layer = isinstance(self.module, Conv | Dense)
        return LayerCost(
            name=name,
            copies=self.copies,
            operation=_words(calls[0]) if calls else type(self.module).__name__,
            output=self.output[1:],
            parameters=self.parameters,
            macs=self.copies * sum(call.work().flops // 2 for call in calls),
            activations=self.copies * math.prod(self.output) if is_layer else 0,
            is_product=bool(calls) and all(map(_is_product, calls)),
        )


@contextmanager
def _watching(variables: PyTree, found: dict[str, _Found]) -> Iterator[None]:
    """Every call of a module, and every operation that it asks for, goes to `found`."""
    inside: list[str] = []

    def module_called(
        method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        if context.method_name != "__call__":
            return method(*args, **kwargs)
        name = "/".join(context.module.path)
        found.setdefault(name, _found(context.module, variables))
        inside.append(name)
        output = method(*args, **kwargs)
        inside.pop()
        found[name].output = getattr(output, "shape", ())
        return output

    def asked(call: Call, _: Any) -> None:
        found[inside[-1]].calls = {**(found[inside[-1]].calls or {}), call: None}

    with nn.intercept_methods(module_called), selection.listening(asked):
        yield


def _found(module: nn.Module, variables: PyTree) -> _Found:
    """The module's own parameters, and how many copies of it a scan holds."""
    outside = variables["params"]
    for part in module.path:
        outside = outside.get(part, {})
    own = {name: leaf for name, leaf in outside.items() if hasattr(leaf, "shape")}
    inside = jax.tree.leaves(module.variables.get("params", {}))
    copies = _size(outside) // sum(leaf.size for leaf in inside) if inside else 1
    return _Found(module, copies, _size(own))


def _words(call: Conv2d | Matmul | Attention) -> str:
    if isinstance(call, Matmul):
        return "dense"
    if isinstance(call, Attention):
        return f"attention, {call.q[2]} heads"
    rows, columns, *_ = call.w
    stride = f"/{call.strides[0]}" if call.strides[0] > 1 else ""
    groups = f", {call.groups} groups" if call.groups > 1 else ""
    return f"{rows}×{columns}{stride} convolution{groups}"


def _is_product(call: Conv2d | Matmul | Attention) -> bool:
    if not isinstance(call, Conv2d):
        return True
    return call.w[:2] == tuple(call.strides) and call.groups == 1


def _size(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
