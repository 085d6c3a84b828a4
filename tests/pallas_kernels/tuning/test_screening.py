"""What the compiler has against kernels of GPUs that are not there, and that they are not timed."""

import sys
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels import Blocks, selection
from pallas_kernels.calls import Attention, Conv2d, LayerNorm, Matmul, MaxPool
from pallas_kernels.inspect import compiler
from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.selection import Choice
from pallas_kernels.tuning import screening, search
from pallas_kernels.tuning.candidates import candidates
from pallas_kernels.tuning.report import as_json
from pallas_kernels.tuning.screening import Objection, UnknownError, architecture_of, objection
from pallas_kernels.tuning.search import tune_all

needs_triton = pytest.mark.skipif(
    compiler.missing() is not None, reason="Triton's compiler is not installed: convjax[inspect]"
)

SM_90 = ARCHITECTURES["sm_90"]
PRODUCT = Matmul((512, 512), (512, 512))
VALID = Choice("triton", None, Blocks(32, 32, 32, warps=4, stages=2))
# 256 sums of float32 for each thread of two warps.
SPILLS = Choice("triton", None, Blocks(64, 256, 16, warps=2, stages=2))
# 4 stages of 256 KiB / 4; sm_90 has 227 KiB.
TOO_LARGE = Choice("triton", None, Blocks(64, 64, 256, warps=4, stages=4))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder for tables, with none in it."""
    monkeypatch.setenv("CONVJAX_TUNING", str(tmp_path))
    selection.table.cache_clear()
    yield tmp_path
    selection.table.cache_clear()
    jax.clear_caches()


@pytest.fixture
def on_gpu(monkeypatch):
    """The machine has the given GPU, as far as anybody asks."""

    def on(device_kind, capability):
        device = SimpleNamespace(device_kind=device_kind, compute_capability=capability)
        monkeypatch.setattr(screening.jax, "devices", lambda *_: [device])
        abstract = AbstractDevice(device_kind, 132, "cuda")
        axes = (AxisType.Auto,)
        return use_abstract_mesh(AbstractMesh((1,), ("device",), axes, abstract_device=abstract))

    return on


@pytest.fixture
def timed(monkeypatch):
    """The ways that are timed, in order, in place of timing them: the last is the fastest."""
    ways = []

    def build(self, call, which, choice, bench):
        ways.append(choice)
        self.choice, self.seconds = choice, [1.0 / len(ways)]

    monkeypatch.setattr(search, "Bench", lambda *_: None)
    monkeypatch.setattr(search.Contender, "__init__", build)
    monkeypatch.setattr(search, "race", lambda *_, **__: None)
    return ways


@needs_triton
@pytest.mark.parametrize(
    ("choice", "kind", "detail"),
    [
        (SPILLS, "spills", "bytes a thread"),
        (TOO_LARGE, "shared memory", "262,144 bytes a block are more than sm_90 has"),
    ],
)
def test_what_spills_or_is_too_large_is_objected_to(choice, kind, detail):
    found = objection(PRODUCT, "forward", choice, SM_90)
    assert found is not None
    assert found.kind == kind
    assert found.detail.endswith(detail)


@needs_triton
def test_what_is_too_large_for_one_gpu_is_not_for_another():
    choice = Choice("triton", None, Blocks(64, 64, 128, warps=4, stages=5))  # 128 or 160 KiB
    assert objection(PRODUCT, "forward", choice, SM_90) is None
    ada = objection(PRODUCT, "forward", choice, ARCHITECTURES["sm_89"])
    assert ada == Objection("shared memory", "131,072 bytes a block are more than sm_89 has")


@needs_triton
@pytest.mark.parametrize(
    ("call", "which", "choice"),
    [
        (PRODUCT, "forward", VALID),
        (Conv2d((8, 8, 8, 32), (3, 3, 32, 64)), "kernel_gradient",
         Choice("triton", "implicit_gemm", Blocks(64, 64, 32))),
        (MaxPool((2, 8, 8, 16)), "backward", Choice("triton", None, Blocks(16, 512, 16, 2, 1))),
    ],
    ids=lambda value: getattr(value, "operation", None),
)  # fmt: skip
def test_there_is_nothing_against_what_fits(call, which, choice):
    assert objection(call, which, choice, SM_90) is None


@pytest.mark.parametrize(
    ("call", "compiled"),
    [
        (MaxPool((2, 8, 8, 16)), ["max_pool"]),
        (Attention((2, 64, 2, 32)), ["attention"]),
        # Their blocks are both kernels'.
        (LayerNorm((64, 128)), ["layer_norm", "layer_norm_gradients"]),
    ],
    ids=lambda value: getattr(value, "operation", None),
)
def test_only_kernels_that_have_the_blocks_are_compiled(monkeypatch, call, compiled):
    found = []

    def note(launch, architecture):
        found.append((launch.algorithm, Blocks(**launch.blocks)))

    monkeypatch.setattr(screening, "_against", note)
    *_, way = candidates(call, "backward", "gpu")
    assert objection(call, "backward", way, SM_90) is None
    assert found == [(name, way.blocks) for name in compiled]


def test_a_kernel_that_is_none_and_one_that_the_compiler_refuses_are_objected_to(monkeypatch):
    def refuse(*_, **__):
        raise compiler.CompilerError("no machine code for sm_90: not today\nnor tomorrow")

    monkeypatch.setattr(compiler, "compile_kernel", refuse)
    found = objection(PRODUCT, "forward", VALID, SM_90)
    assert found == Objection("no machine code", "no machine code for sm_90: not today")
    none = objection(PRODUCT, "forward", Choice("xla"), SM_90)
    assert none == Objection("no machine code", "XLA computes it, without a kernel")
    large = objection(Matmul((2**16, 2**15), (2**15, 64)), "forward", VALID, SM_90)
    assert large is not None
    assert "elements, but kernels count in 32 bits" in large.detail


@needs_triton
def test_an_architecture_is_that_of_the_devices_compute_capability(on_gpu):
    for capability, name in (("9.0", "sm_90"), ("8.0", "sm_80"), ("10.0", "sm_100")):
        with on_gpu("NVIDIA X", capability):
            assert architecture_of("NVIDIA X") is ARCHITECTURES[name]
    with on_gpu("NVIDIA X", "12.0"), pytest.raises(UnknownError, match="NVIDIA X is sm_120; the"):
        architecture_of("NVIDIA X")
    with on_gpu("NVIDIA X", "9.0"), pytest.raises(UnknownError, match="NVIDIA Y is not here"):
        architecture_of("NVIDIA Y")


def test_where_no_gpu_is_there_is_no_architecture(monkeypatch):
    monkeypatch.setattr(compiler, "missing", lambda: None)
    with pytest.raises(UnknownError, match="NVIDIA H200 is not here"):
        architecture_of("NVIDIA H200")


@needs_triton
def test_what_spills_is_never_timed(on_gpu, timed, monkeypatch):
    ways = [Choice("triton"), Choice("xla"), SPILLS, TOO_LARGE, VALID]
    monkeypatch.setattr(search, "candidates", lambda *_: ways)
    with on_gpu("NVIDIA H200", "9.0"):
        report = tune_all({(PRODUCT, "forward"): 1}, budget=600.0)
    assert timed == [Choice("triton"), Choice("xla"), VALID]
    (row,) = report.rows
    assert row.winner == VALID
    assert [(way, why.kind) for way, why in row.dropped] == [
        (SPILLS, "spills"), (TOO_LARGE, "shared memory"),
    ]  # fmt: skip
    assert "\n2 kernels dropped before they were timed: 1 for spills, 1 for shared" in str(report)
    assert "tried" not in str(report)
    dropped = as_json(row)["dropped"]
    assert [way["blocks"]["k"] for way in dropped] == [16, 256]
    assert dropped[1]["reason"].startswith("shared memory: 262,144 bytes")


@needs_triton
def test_a_candidate_is_compiled_when_its_turn_comes_and_that_is_counted(
    on_gpu, timed, monkeypatch
):
    now = 0.0
    asked = []

    def slow(call, which, choice, architecture):
        nonlocal now
        now += 10.0
        asked.append((choice, architecture.name))
        return Objection("spills", "8 bytes a thread") if len(asked) == 1 else None

    monkeypatch.setattr(search.time, "monotonic", lambda: now)
    monkeypatch.setattr(screening, "objection", slow)
    # 0.7 · 40 s are to build in: the third one is begun before that, and no other.
    with on_gpu("NVIDIA H200", "9.0"):
        (row,) = tune_all({(PRODUCT, "forward"): 1}, budget=40.0).rows
    ways = candidates(PRODUCT, "forward", "gpu")
    assert [way.backend for way in ways[:5]] == ["triton", "xla", "triton", "triton", "triton"]
    assert asked == [(way, "sm_90") for way in ways[2:5]]
    assert timed == [ways[0], ways[1], ways[3], ways[4]]
    assert (len(row.dropped), row.ways) == (1, len(ways))


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        ("9.0", None, "machine code needs Triton's compiler: pip install 'convjax[inspect]'"),
        ("12.0", SimpleNamespace(), "NVIDIA X is sm_120; the inspector knows sm_80, sm_89, "),
    ],
)
def test_without_a_compiler_all_are_timed_and_the_report_says_so_once(
    on_gpu, timed, monkeypatch, capability, triton, reason
):
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(search, "candidates", lambda *_: [Choice("triton"), SPILLS, VALID])
    questions = {(PRODUCT, "forward"): 1, (PRODUCT, "input_gradient"): 1}
    with on_gpu("NVIDIA X", capability):
        report = tune_all(questions, budget=600.0)
    assert timed == [Choice("triton"), SPILLS, VALID] * 2
    assert str(report).count(reason) == 1
    assert "no kernel was dropped before it was timed: " in str(report)
