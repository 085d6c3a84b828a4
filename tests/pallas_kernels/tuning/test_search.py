"""What the tuner finds, measures, keeps, and what operations make of it."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels import Blocks, conv2d, launch, matmul, selection
from pallas_kernels.calls import (
    Attention,
    Conv2d,
    CrossEntropy,
    LayerNorm,
    LocalResponseNorm,
    Matmul,
    MaxPool,
)
from pallas_kernels.inspect.lowering import _kernels
from pallas_kernels.selection import Choice
from pallas_kernels.tuning import command, search, tables, timing
from pallas_kernels.tuning.candidates import candidates
from pallas_kernels.tuning.search import autotune, tune, tune_all
from tests.pallas_kernels.arrays import assert_close, float64, normal

CONV = Conv2d((2, 8, 8, 4), (3, 3, 4, 8), padding=((1, 1), (1, 1)), dtype="float32")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder for tables, with none in it."""
    monkeypatch.setenv("CONVJAX_TUNING", str(tmp_path))
    selection.table.cache_clear()
    yield tmp_path
    selection.table.cache_clear()
    jax.clear_caches()


@pytest.fixture
def race(monkeypatch):
    """Replaces the clock: seconds by algorithm, 1 for those not named."""
    seconds = {}

    def run(contenders, **_):
        for contender in contenders:
            contender.seconds = [seconds.get(contender.choice.algorithm, 1.0)]

    monkeypatch.setattr(search, "race", run)
    return seconds


def remember(call, which, choice, device_kind=None):
    entry = selection.entry(choice, seconds=1.0)
    kind = device_kind or launch.device_kind()
    assert selection.remember(kind, {selection.key(call, which): entry})
    jax.clear_caches()


def on_h200():
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    return use_abstract_mesh(
        AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)
    )


def operands(call):
    return [normal(seed, x.shape, x.dtype) for seed, x in enumerate(call.operands().values())]


def uses_convolution(function, *arrays):
    return "conv_general_dilated" in str(jax.make_jaxpr(function)(*arrays))


def test_every_operation_of_a_training_step_is_found_once():
    images, w1, w2, dense = (
        normal(0, (2, 8, 8, 3)),
        *map(jnp.ones, [(3, 3, 3, 4), (3, 3, 4, 4), (4, 5)]),
    )

    def loss(weights, images):
        w1, w2, dense = weights
        x = conv2d(images, w1, activation="relu")
        for _ in range(3):
            x = conv2d(x, w2, activation="relu")
        return jnp.sum(matmul(x.mean((1, 2)), dense))

    report = tune(jax.jit(jax.value_and_grad(loss)), (w1, w2, dense), images, budget=0.0)
    asked = {}
    for row in report.rows:
        kernel = row.call.operands()["w" if row.call.operation == "conv2d" else "b"]
        asked[row.call.operation, kernel.shape, row.which] = row.count
    assert asked == {
        ("conv2d", (3, 3, 3, 4), "forward"): 1,
        ("conv2d", (3, 3, 3, 4), "kernel_gradient"): 1,  # and no gradient of the images
        ("conv2d", (3, 3, 4, 4), "forward"): 3,
        ("conv2d", (3, 3, 4, 4), "input_gradient"): 3,
        ("conv2d", (3, 3, 4, 4), "kernel_gradient"): 3,
        ("matmul", (4, 5), "forward"): 1,
        ("matmul", (4, 5), "input_gradient"): 1,
        ("matmul", (4, 5), "kernel_gradient"): 1,
    }
    assert "0 of 8 measured" in str(report)


def test_a_function_that_jax_has_traced_before_is_found_too():
    x, w = operands(CONV)
    step = jax.jit(lambda x, w: conv2d(x, w))
    step(x, w)
    assert len(tune(step, x, w, budget=0.0).rows) == 1


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"im2col": 0.5, "shifted": 0.7}, "im2col"),
        ({"im2col": 0.5, "shifted": 0.4}, "shifted"),
        ({"im2col": 2.0}, "direct"),
        ({"im2col": 0.98}, "direct"),  # no more than noise
    ],
)
def test_the_fastest_wins_if_by_more_than_noise(race, seconds, winner):
    race |= seconds
    (row,) = tune_all({(CONV, "forward"): 1}, budget=30.0).rows
    assert (row.winner.algorithm, row.default.algorithm) == (winner, "direct")
    assert [way.algorithm for way, _ in row.measured] == ["direct", "shifted", "im2col"]
    assert row.default_seconds == 1.0
    assert row.seconds == seconds.get(winner, 1.0)
    assert selection.known(CONV, "forward") == row.winner


def test_times_are_of_the_clock_and_medians(monkeypatch):
    ticks = iter([0.0, 0.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 6.0, 6.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    contender = object.__new__(timing.Contender)
    contender.seconds, contender._next = [], 0
    contender._bench = type("bench", (), {"sets": [()]})
    contender._run = lambda: jnp.zeros(())
    timing.race([contender], seconds=5.0, rounds=3)
    assert contender.seconds == [3.0, 1.0, 2.0]
    assert contender.median == 2.0


def test_a_wrong_result_is_refused_before_it_is_timed(race, monkeypatch):
    from pallas_kernels import conv2d_algorithms

    right = conv2d_algorithms.ALGORITHMS["im2col"]
    monkeypatch.setitem(
        conv2d_algorithms.ALGORITHMS, "im2col", lambda *arguments: 1.01 * right(*arguments)
    )
    race["im2col"] = 0.1
    (row,) = tune_all({(CONV, "forward"): 1}, budget=30.0).rows
    assert row.winner.algorithm == "direct"
    assert row.refused == ("xla im2col: off by 1.0e-02 of its norm",)


@pytest.mark.parametrize("which", CONV.passes)
def test_all_candidates_of_a_pass_are_right(which):
    bench = timing.Bench(CONV, which)
    ways = candidates(CONV, which, "cpu")
    assert [way.algorithm for way in ways] == ["direct", "shifted", "im2col"]
    for choice in ways:
        timing.Contender(CONV, which, choice, bench)


def test_without_a_budget_nothing_changes(folder):
    (row,) = tune_all({(CONV, "forward"): 1}, budget=0.0).rows
    assert (row.choice.algorithm, row.winner, row.seconds) == ("direct", None, None)
    assert list(folder.iterdir()) == []


def test_each_pass_is_done_as_the_table_says():
    x, w = operands(CONV)
    dy = normal(7, (2, 8, 8, 8))

    def gradient(of):
        return jax.vjp(lambda *arrays: conv2d(*arrays), x, w)[1](dy)[of]

    before = conv2d(x, w), gradient(0), gradient(1)
    passes = [lambda: conv2d(x, w), lambda: gradient(0), lambda: gradient(1)]
    algorithms = ("im2col", "shifted", "im2col")
    for which, algorithm, run, expected in zip(
        CONV.passes, algorithms, passes, before, strict=True
    ):
        selection.table(launch.device_kind()).clear()
        jax.clear_caches()
        assert "dot_general" not in str(jax.make_jaxpr(run)())
        remember(CONV, which, Choice("xla", algorithm))
        assert "dot_general" in str(jax.make_jaxpr(run)())
        assert_close(run(), float64(expected), 1e-5)


def test_an_algorithm_that_was_asked_for_is_not_replaced():
    x, w = operands(CONV)
    remember(CONV, "forward", Choice("xla", "im2col"))
    assert not uses_convolution(lambda x, w: conv2d(x, w), x, w)
    assert uses_convolution(lambda x, w: conv2d(x, w, algorithm="direct"), x, w)
    assert uses_convolution(lambda x, w: conv2d(x, w, backend="xla"), x, w)


@pytest.mark.parametrize(
    "entry",
    [
        {"backend": "xla", "algorithm": "winograd", "blocks": None},
        {"backend": "xla", "algorithm": "patches", "blocks": None},
        {"backend": "triton", "algorithm": "implicit_gemm", "blocks": {"m": 17, "n": 16, "k": 16}},
        {"backend": "triton", "algorithm": "implicit_gemm", "blocks": None},
    ],
)
def test_an_answer_that_does_not_fit_is_not_followed(entry):
    x, w = operands(CONV)
    selection.table(launch.device_kind())[selection.key(CONV, "forward")] = entry
    assert uses_convolution(lambda x, w: conv2d(x, w), x, w)


def test_the_same_table_gives_the_same_program(folder):
    x, w = operands(CONV)
    remember(CONV, "forward", Choice("xla", "shifted"))
    texts = []
    for _ in range(2):
        selection.table.cache_clear()
        jax.clear_caches()
        texts.append(jax.jit(lambda x, w: conv2d(x, w)).lower(x, w).as_text())
    assert texts[0] == texts[1]
    (path,) = folder.glob("*.json")
    ((question, _),) = json.loads(path.read_text())["entries"].items()
    assert json.loads(question) == {
        "operation": "conv2d", "pass": "forward", "jax": jax.__version__, "dtype": "float32",
        "x": [2, 8, 8, 4], "w": [3, 3, 4, 8], "padding": [[1, 1], [1, 1]],
    }  # fmt: skip


def test_a_gradient_is_asked_without_its_epilogue_and_rows_are_folded():
    bare = selection.key(CONV, "kernel_gradient")
    fused = Conv2d(
        CONV.x, CONV.w, padding=CONV.padding, bias=True, activation="relu", dtype="float32"
    )
    assert selection.key(fused, "kernel_gradient") == bare
    assert selection.key(fused, "forward") != selection.key(CONV, "forward")
    keys = {selection.key(Matmul(a, (5, 7)), "forward") for a in ((6, 5), (2, 3, 5), (1, 6, 5))}
    assert len(keys) == 1
    assert selection.key(Matmul((2, 3, 5), (2, 5, 7)), "forward") not in keys


@pytest.mark.parametrize("call", [CONV, Matmul((6, 5), (5, 7), dtype="float32")])
def test_the_results_dtype_is_part_of_a_forward_question_only(call):
    wide, same = (replace(call, out_dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert selection.key(same, "forward") == selection.key(call, "forward")  # as tables have it
    assert json.loads(selection.key(wide, "forward")) == {
        **json.loads(selection.key(call, "forward")), "out_dtype": "bfloat16",
    }  # fmt: skip
    for which in call.passes[1:]:
        assert selection.key(wide, which) == selection.key(call, which)
    assert wide.work().bytes_moved == call.work().bytes_moved - 2 * math.prod(call.y)
    y = jax.eval_shape(wide.function(), **wide.operands())
    assert (y.shape, y.dtype) == (call.y, jnp.bfloat16)


def test_a_narrower_result_is_right_to_its_operands_tolerance():
    call = replace(CONV, out_dtype="bfloat16")
    timing.Contender(call, "forward", Choice("xla", "im2col"), timing.Bench(call, "forward"))


def test_autotune_measures_on_first_use_and_never_again(race, monkeypatch):
    race["im2col"] = 0.1
    x, w = operands(CONV)
    answered = []
    answer = search._answer
    monkeypatch.setattr(
        search, "_answer", lambda *args, **kw: answered.append(args[1]) or answer(*args, **kw)
    )
    with autotune():
        y = jax.jit(lambda x, w: conv2d(x, w))(x, w)
        jax.jit(lambda x, w: 2 * conv2d(x, w))(x, w)
    assert answered == ["forward"]
    assert not uses_convolution(lambda x, w: conv2d(x, w), x, w)
    np.testing.assert_allclose(y, conv2d(x, w, algorithm="direct"), rtol=1e-4, atol=1e-4)


def test_an_error_while_tuning_is_raised_where_it_was_asked_for(monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(search, "_answer", fail)
    with autotune(), pytest.raises(MemoryError, match="no more"):
        conv2d(*operands(CONV))


GPU_CONV = Conv2d((8, 14, 14, 32), (3, 3, 32, 64), padding=((1, 1), (1, 1)))
BLOCKS = Blocks(64, 64, 32, warps=4, stages=2)


def launches(call, which, **options):
    """With backend="auto" on an H200: the blocks of a pass's kernels, and whether cuDNN is used."""
    function, arrays = call.function(**options), call.operands()
    name = {"input_gradient": 0, "kernel_gradient": 1}.get(which)
    names = list(arrays)

    def run(arrays, dy):
        if which == "forward":
            return function(**arrays)
        of = names[name]
        rest = {other: array for other, array in arrays.items() if other != of}
        return jax.vjp(lambda x: function(**rest, **{of: x}), arrays[of])[1](dy)[0]

    with on_h200():
        jaxpr = jax.make_jaxpr(run)(arrays, jax.ShapeDtypeStruct(call.y, call.dtype))
        jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])
    blocks = [json.loads(e.params["metadata"]["blocks"]) for e in _kernels(jaxpr)]
    return [Blocks(**each) for each in blocks], "conv_general_dilated" in str(jaxpr)


def test_before_anything_is_measured_auto_on_a_gpu_is_a_guess():
    assert launches(GPU_CONV, "forward") == ([], True)
    last = Conv2d((32, 14, 14, 8), (3, 3, 32, 64), layout="CHWN")
    assert launches(last, "forward")[1] is False
    assert len(launches(Matmul((512, 256), (256, 512)), "forward")[0]) == 1
    assert launches(Matmul((512, 256), (256, 512), dtype="float32"), "forward")[0] == []


@pytest.mark.parametrize("tuned", GPU_CONV.passes)
def test_on_a_gpu_one_pass_can_be_a_kernel_and_the_others_cudnns(tuned):
    for which in GPU_CONV.passes:
        remember(GPU_CONV, which, Choice("xla", "direct"), "NVIDIA H200")
    remember(GPU_CONV, tuned, Choice("triton", "implicit_gemm", BLOCKS), "NVIDIA H200")
    for which in GPU_CONV.passes:
        expected = ([BLOCKS], False) if which == tuned else ([], True)
        assert launches(GPU_CONV, which) == expected


@pytest.mark.parametrize("tuned", Matmul.passes)
def test_on_a_gpu_one_product_can_be_a_kernel_and_the_others_cublass(tuned):
    call = Matmul((512, 256), (256, 512))
    for which in call.passes:
        remember(call, which, Choice("xla"), "NVIDIA H200")
    remember(call, tuned, Choice("triton", None, BLOCKS), "NVIDIA H200")
    for which in call.passes:
        assert launches(call, which)[0] == ([BLOCKS] if which == tuned else [])


@pytest.mark.parametrize("call", [GPU_CONV, Matmul((512, 256), (256, 512))])
def test_an_operation_asks_for_the_dtype_that_it_makes(call):
    wide = replace(call, out_dtype="float32")
    algorithm = "implicit_gemm" if call.operation == "conv2d" else None
    remember(call, "forward", Choice("xla", algorithm and "direct"), "NVIDIA H200")
    remember(wide, "forward", Choice("triton", algorithm, BLOCKS), "NVIDIA H200")
    assert launches(call, "forward")[0] == []
    assert launches(wide, "forward")[0] == [BLOCKS]


LAST = Conv2d((32, 14, 14, 8), (3, 3, 32, 64), padding=((1, 1), (1, 1)), layout="CHWN")
POINTWISE = Conv2d((8, 14, 14, 32), (1, 1, 32, 64), padding=((0, 0), (0, 0)))


@pytest.mark.parametrize(
    "call",
    [GPU_CONV, LAST, POINTWISE, Matmul((512, 256), (256, 512)), CONV],
    ids=["NHWC", "CHWN", "pointwise", "matmul", "float32"],
)
def test_candidates_on_a_gpu_begin_with_what_is_done_by_default(call):
    for which in call.passes:
        ways = candidates(call, which, "gpu")
        assert len(ways) == len(set(ways)) > 20
        assert {"xla", "triton"} == {way.backend for way in ways}
        untuned = launches(call, which)
        with selection.trying(call, which, ways[0]):
            assert launches(call, which) == untuned
        assert bool(untuned[0]) == (ways[0].backend == "triton")


@pytest.mark.parametrize("which", POINTWISE.passes)
def test_a_convolution_that_is_a_product_has_its_blocks(which):
    way = candidates(POINTWISE, which, "gpu")[-1]
    assert way.algorithm == "pointwise"
    remember(POINTWISE, which, way, "NVIDIA H200")
    assert launches(POINTWISE, which) == ([way.blocks], False)


WHOLE = [
    Attention((2, 64, 2, 32)),
    LayerNorm((64, 128)),
    CrossEntropy((64, 1000)),
    MaxPool((2, 8, 8, 16), padding=((1, 1), (1, 1))),
    LocalResponseNorm((2, 8, 8, 16)),
]


@pytest.mark.parametrize("call", WHOLE, ids=lambda call: call.operation)
def test_an_operation_whose_passes_go_together_is_asked_once_and_follows(call):
    def kernels():
        with on_h200():
            return list(_kernels(jax.make_jaxpr(call.function())(*call.operands().values()).jaxpr))

    heard = []
    with selection.listening(lambda *question: heard.append(selection.asked(*question))):
        assert len(kernels()) == 1  # 16-bit operands: a kernel where nothing was measured
    assert heard == [(call, "backward")]
    remember(call, "backward", Choice("xla"), "NVIDIA H200")
    assert kernels() == []
    ways = candidates(call, "backward", "gpu")
    assert ways[:2] == [Choice("triton"), Choice("xla")]
    remember(call, "backward", ways[-1 if ways[-1].backend == "triton" else 0], "NVIDIA H200")
    (kernel,) = kernels()
    if ways[-1].blocks is not None:
        assert Blocks(**json.loads(kernel.params["metadata"]["blocks"])) == ways[-1].blocks


@pytest.mark.parametrize("layout", ["NHWC", "CHWN", "NCHW"])
@pytest.mark.parametrize("operation", [MaxPool, LocalResponseNorm])
def test_blocks_of_a_pooling_or_a_response_norm_are_for_its_layout(operation, layout):
    def blocks(**options):
        with on_h200():
            jaxpr = jax.make_jaxpr(call.function(**options))(*call.operands().values())
        return [Blocks(**json.loads(e.params["metadata"]["blocks"])) for e in _kernels(jaxpr.jaxpr)]

    call = operation((48, 10, 12, 96), layout=layout)
    ways = candidates(call, "backward", "gpu")
    assert len(ways) == len(set(ways)) > 5
    assert [ways[2].blocks] == blocks(backend="triton")  # the default's
    assert blocks() == ([ways[2].blocks] if ways[0] == Choice("triton") else [])
    assert ways[0].backend == ("xla" if (operation, layout) == (MaxPool, "NCHW") else "triton")
    for way in ways[2:]:
        with selection.trying(call, "backward", way):
            assert blocks() == [way.blocks]
    assert candidates(call, "backward", "cpu") == [Choice("xla")]


def test_a_pooling_with_named_padding_is_the_one_with_these_pixels():
    named, padded = (
        MaxPool((2, 9, 9, 16), padding=padding) for padding in ("SAME", ((1, 1), (1, 1)))
    )
    assert selection.key(named, "forward") == selection.key(padded, "backward")
    assert selection.key(MaxPool(named.x), "backward") != selection.key(named, "backward")


@pytest.mark.parametrize("shape", [(0, 8, 8, 4), (2, 8, 8, 4)])
def test_what_has_no_size_is_not_asked_about(shape, unchecked):
    heard = []
    x, w = jnp.ones(shape), jnp.ones((3, 3, 4, 8))
    with selection.listening(lambda *question: heard.append(question)):
        conv2d(x, w)
        assert len(heard) == (shape[0] > 0)
        batch = jax.export.symbolic_shape("b, 8, 8, 4")
        jax.export.export(jax.jit(conv2d))(jax.ShapeDtypeStruct(batch, jnp.float32), w)
    assert len(heard) == (shape[0] > 0)


def test_a_dtype_without_a_tolerance_keeps_its_default():
    call = Conv2d(CONV.x, CONV.w, padding=CONV.padding, dtype="float64")
    (row,) = tune_all({(call, "forward"): 1}, budget=5.0).rows
    assert (row.winner, row.seconds) == (None, None)


def test_where_the_default_fails_the_best_of_the_others_wins(race, monkeypatch):
    contender = search.Contender

    def build(call, which, choice, bench):
        if choice.algorithm == "direct":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a page more")
        return contender(call, which, choice, bench)

    monkeypatch.setattr(search, "Contender", build)
    race["im2col"] = 0.5
    (row,) = tune_all({(CONV, "forward"): 1}, budget=30.0).rows
    assert (row.winner.algorithm, row.default_seconds, row.gain) == ("im2col", None, None)
    assert row.refused == ("xla direct: RESOURCE_EXHAUSTED: out of memory",)


def test_the_command_asks_what_a_training_step_asks(monkeypatch, capsys):
    asked = {}

    def tune_all(questions, **options):
        asked.update(questions)
        return search.tune_all({}, budget=1.0)

    monkeypatch.setattr(command, "tune_all", tune_all)
    assert command.main(["--model=resnet50", "--batch=4", "--dtype=float32"]) == 0
    passes = [(call.w, which) for call, which in asked if call.operation == "conv2d"]
    assert ((7, 7, 3, 64), "forward") in passes
    assert ((7, 7, 3, 64), "input_gradient") not in passes
    assert {call.dtype for call, _ in asked} == {"float32"}
    assert {call.batch for call, _ in asked if call.operation == "conv2d"} == {4}
    assert "0 of 0 measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: --model"),
        (["--model=lenet"], "invalid choice: 'lenet'"),
        (["--model=vgg16", "--batch=0"], "0 must be a whole number from 1 on"),
        (["--model=vgg16", "--budget=nan"], "nan must be a number of seconds above 0"),
        (["--model=vgg16", "--dtype=int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(capsys, arguments, complaint):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert complaint in err
    assert err.count("\n") == 1


def test_a_table_that_cannot_be_written_only_warns(folder, monkeypatch, race):
    (folder / "file").write_text("")
    monkeypatch.setenv("CONVJAX_TUNING", str(folder / "file" / "below"))
    with pytest.warns(tables.TuningWarning):
        tune_all({(CONV, "forward"): 1}, budget=30.0)
    assert selection.known(CONV, "forward").algorithm == "direct"
