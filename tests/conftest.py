"""Eight CPU devices, rank promotion as an error, and hypothesis without deadlines."""

import os

# Tests know no tables of the tuner's but those that they make.
os.environ["CONVJAX_TUNING"] = "off"
# Under LLVM's highest level, XLA:CPU of jax 0.10 takes seconds to compile one threefry draw, and
# tests compile thousands of small programs: one level lower, they take a twentieth of the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=2"

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def unchecked():
    """Leave wrong types to the library's own errors: users run without the tests' type checker."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
