"""Conv and Dense: parameters, what reaches the operation, and an init that computes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax.layers import Conv, Dense


def test_conv_holds_hwio_float32_and_computes_in_its_dtype():
    conv = Conv(8, (3, 5), groups=2, padding=1, dtype=jnp.bfloat16)
    x = jnp.ones((2, 9, 9, 4))
    variables = conv.init(jax.random.key(0), x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    assert kernel.shape == (3, 5, 2, 8)
    assert bias.shape == (8,)
    assert kernel.dtype == bias.dtype == jnp.float32
    assert conv.apply(variables, x).shape == (2, 9, 7, 8)
    assert conv.apply(variables, x).dtype == jnp.bfloat16


def test_integer_padding_is_symmetric_not_xlas_same():
    x = jnp.arange(4.0).reshape(1, 1, 4, 1) * jnp.ones((1, 4, 1, 1))
    middle_row = jnp.zeros((3, 3, 1, 1)).at[1].set(1.0)
    fields = {"features": 1, "kernel_size": (3, 3), "strides": (2, 2), "use_bias": False}
    kernel = {"params": {"kernel": middle_row}}
    symmetric = Conv(padding=1, **fields).apply(kernel, x)
    same = Conv(padding="SAME", **fields).apply(kernel, x)
    np.testing.assert_array_equal(symmetric[0, 0, :, 0], [1, 6])
    np.testing.assert_array_equal(same[0, 0, :, 0], [3, 5])  # XLA pads right and bottom only


def test_residual_and_bias_come_before_the_activation():
    x = jnp.array([[[[1.0]], [[-4.0]]]])
    params = {"params": {"kernel": jnp.full((1, 1, 1, 1), 2.0), "bias": jnp.array([1.0])}}
    y = Conv(1, (1, 1), activation="relu").apply(params, x, residual=jnp.full_like(x, 3.0))
    np.testing.assert_array_equal(y.ravel(), [6.0, 0.0])


def test_dense_over_the_last_axis_of_any_rank():
    x = jax.random.normal(jax.random.key(0), (2, 3, 5))
    dense = Dense(7)
    variables = dense.init(jax.random.key(1), x)
    params = variables["params"]
    want = np.einsum("abc,cd->abd", x, params["kernel"]) + np.asarray(params["bias"])
    np.testing.assert_allclose(dense.apply(variables, x), want, rtol=1e-5, atol=1e-6)
    assert jnp.abs(params["kernel"]).max() <= 1 / np.sqrt(5)


@pytest.mark.parametrize("layer", [Conv(4, (3, 3)), Dense(4)])
def test_init_traces_no_product(layer):
    x = jnp.ones((2, 8, 8, 3))
    jaxpr = str(jax.make_jaxpr(layer.init)(jax.random.key(0), x))
    assert "conv_general_dilated" not in jaxpr
    assert "dot_general" not in jaxpr


@pytest.mark.parametrize("groups", [3, 0])
def test_groups_that_do_not_divide_the_channels(groups):
    with pytest.raises(ValueError, match=f"groups={groups} must divide c_in=64"):
        Conv(6, (1, 1), groups=groups).init(jax.random.key(0), jnp.ones((1, 4, 4, 64)))
