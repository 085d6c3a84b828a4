"""`python -m pallas_kernels.inspect`, from its arguments to what it prints."""

import json
import runpy
import subprocess
import sys

import pytest

from pallas_kernels.inspect import command, compiler, sweep
from pallas_kernels.workloads import workloads

KEYS = {
    "operation", "workload", "pass", "dtype", "arch", "algorithm", "blocks", "registers",
    "spill_bytes", "shared_bytes", "occupancy", "tensor_core_instructions", "loop_instructions",
    "loop_tensor_core_instructions", "issue_slots_per_matrix_cycle", "flops", "bytes",
}  # fmt: skip

needs_triton = pytest.mark.skipif(
    compiler.missing() is not None, reason="Triton's compiler is not installed: convjax[inspect]"
)


@pytest.fixture
def run(capsys):
    """Runs the command; its exit status, what it printed and what it complained of."""

    def run(*arguments):
        try:
            status = command.main(arguments)
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


PRODUCT = ("matmul", "--a=64,2048", "--b=2048,64", "--arch=sm_90")
CONVOLUTION = ("conv2d", "--input=1,8,8,16", "--kernel=3,3,16,16", "--arch=sm_90")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give one of conv2d, matmul, attention, layer_norm, local_response_norm, "),
        (
            ("matmul", "--all", "--arch=sm_90"),
            "give one of conv2d, matmul, attention, layer_norm, local_response_norm, ",
        ),
        (("dense",), "invalid choice: 'dense' (choose from 'conv2d', 'matmul', 'attention', "),
        (("conv2d", "--input=1,8,8,16", "--arch=sm_90"), "conv2d needs --kernel"),
        (("matmul", "--a=64,64", "--b=64,64"), "--arch must be given: sm_80, sm_89, sm_90, sm_100"),
        (("matmul", "--a=64,64", "--b=64,64", "--arch=sm_70"), "invalid choice: 'sm_70'"),
        ((*PRODUCT, "--gpu=V100"), "gpu='V100' must be one of A100, RTX4090, H200, H100, B200"),
        ((*PRODUCT, "--gpu=A100"), "gpu=A100 is sm_80, not sm_90"),
        ((*PRODUCT, "--dtype=int8"), "dtype='int8' must be one of bfloat16, float16, float32"),
        ((*PRODUCT, "--dtype=float16,float32"), "must be one dtype, except with --all"),
        ((*PRODUCT, "--precison=high"), "unknown argument --precison; the nearest is --precision"),
        ((*PRODUCT, "--strides=2,2"), "--strides is not an option of matmul"),
        ((*PRODUCT, "--jobs=2"), "--jobs is not an option of matmul"),
        (("--all", "--arch=sm_90", "--jobs=0"), "jobs=0 must be at least 1"),
        (("--all=lenet/*", "--arch=sm_90"), "--all=lenet/*: no workload has such a name"),
        (("--all=", "--arch=sm_90"), "--all=: no workload has such a name"),
        ((*PRODUCT, "--blocks=m=100,n=64,k=64"), "blocks of m=100 must be a power of two"),
        ((*PRODUCT, "--blocks=m=64,k=64"), "m=64,k=64 must have n"),
        ((*PRODUCT, "--blocks=m=64,n=64,k=64,w=4"), "'w=4' must be a field of m=128,n=128,k=64"),
        (
            (*PRODUCT, "--blocks=m=64,n=64,k=64", "--pass=input_gradient"),
            "--blocks are the forward kernel's: a gradient takes its own",
        ),
        ((*PRODUCT, "--dump=sass", "--json"), "--dump prints text: give it or --json"),
        (("matmul", "--a=4,4", "--b=4,-4", "--arch=sm_90"), "4,-4 must be whole numbers from 1 on"),
        (("matmul", "--a=4,4", "--b=5,4", "--arch=sm_90"), "a has k=4 columns but b has k=5 rows"),
        ((*CONVOLUTION, "--input=8,8,16"), "input=8,8,16 must be 4 numbers"),
        ((*CONVOLUTION, "--padding=same"), "same must be SAME, VALID, ROWS,COLUMNS or TOP"),
        ((*CONVOLUTION, "--padding=1,2,3"), "1,2,3 must be SAME, VALID, ROWS,COLUMNS or TOP"),
        ((*CONVOLUTION, "--pass=backward"), "must be one of conv2d's: forward, input_gradient, "),
        (("max_pool", "--input=8,8,16", "--arch=sm_90"), "input=8,8,16 must be 4 numbers"),
        (
            ("layer_norm", "--input=8,16", "--causal", "--arch=sm_90"),
            "--causal is not an option of",
        ),
        (
            ("conv2d_transpose", *CONVOLUTION[1:], "--output-size=9,9"),
            "size=(9, 9) has (9, 9) windows, but y of shape (1, 8, 8, 16) has (8, 8) pixels",
        ),
        (("matmul_fp8", *PRODUCT[1:], "--precision=high"), "--precision is not an option of"),
        (("matmul_fp8", "--a=64,64", "--arch=sm_90"), "matmul_fp8 needs --b"),
        ((*CONVOLUTION, "--groups=3"), "groups=3 must divide c_in=16"),
        ((*CONVOLUTION, "--dilation=4,4", "--padding=VALID"), "does not fit 8 pixels"),
        ((*CONVOLUTION, "--algorithm=winograd"), "algorithm='winograd' must be one of"),
    ],
)
def test_a_mistake_is_answered_with_one_line(run, unchecked, arguments, complaint):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_without_triton_the_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    status, out, err = run(*PRODUCT)
    assert (status, out) == (2, "")
    assert err == ("error: machine code needs Triton's compiler: pip install 'convjax[inspect]'\n")


def test_the_first_stages_need_no_triton(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "tt.func public @matmul" in run(*PRODUCT, "--dump=ttir")[1]
    assert "pallas_call" in run(*PRODUCT, "--dump=jaxpr")[1]


def test_the_module_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["inspect", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("pallas_kernels.inspect", run_name="__main__")
    assert end.value.code == 0
    assert "usage: python -m pallas_kernels.inspect" in capsys.readouterr().out


def test_importing_touches_no_device_and_no_triton():
    code = (
        "import sys, pallas_kernels.inspect, pallas_kernels.inspect.command; "
        "from jax._src import xla_bridge; "
        "raise SystemExit(xla_bridge.backends_are_initialized() or 'triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_triton
def test_one_kernel_is_one_object(run):
    status, out, err = run(*PRODUCT, "--json", "--blocks=m=64,n=64,k=64,warps=4,stages=3,splits=1")
    assert (status, err) == (0, "")
    entry = json.loads(out)
    assert set(entry) >= KEYS
    assert (entry["operation"], entry["workload"], entry["pass"]) == ("matmul", None, "forward")
    assert (entry["dtype"], entry["arch"], entry["gpu"]) == ("bfloat16", "sm_90", "H200")
    assert entry["flops"] == 2 * 64 * 64 * 2048
    assert entry["bytes"] == 2 * (64 * 2048 + 2048 * 64 + 64 * 64)
    assert entry["tensor_core_instructions"] == sum(entry["matrix_instructions"].values()) > 0
    assert entry["shared_bytes"] == 3 * (64 * 64 + 64 * 64) * 2
    assert entry["spill_bytes"] == 0
    assert entry["reason"] is None


@needs_triton
def test_a_report_names_everything_in_a_few_lines(run):
    status, out, _ = run(*PRODUCT, "--pass=input_gradient", "--gpu=h100")
    assert status == 0
    assert out.startswith("matmul a 64×2048, b 2048×64, input gradient, bfloat16, sm_90\n")
    for fact in (
        "matmul, grid", "blocks", "registers", "shared memory", "occupancy", "HGMMA",
        "128-bit", "hot loop", "GFLOP", "on H100 (989 TFLOP/s, 3.35 TB/s), bound by memory",
    ):  # fmt: skip
        assert fact in out


@needs_triton
@pytest.mark.parametrize(
    ("arguments", "algorithm", "instruction"),
    [
        (("matmul_fp8", "--a=64,256", "--b=256,64", "--bias"), "matmul_fp8", "QGMMA"),
        (
            ("conv2d_transpose", "--input=1,8,8,64", "--kernel=3,3,64,64", "--strides=2,2",
             "--output-size=15,16", "--pass=input_gradient"), "implicit_gemm", "HGMMA",
        ),
    ],
)  # fmt: skip
def test_the_other_products_are_operations_too(run, arguments, algorithm, instruction):
    status, out, err = run(*arguments, "--arch=sm_90", "--json")
    assert (status, err) == (0, "")
    entry = json.loads(out)
    assert (entry["operation"], entry["algorithm"]) == (arguments[0], algorithm)
    assert list(entry["matrix_instructions"]) == [instruction]


@needs_triton
def test_machine_code_is_printed_as_it_is(run):
    status, out, _ = run(*PRODUCT, "--dump=sass")
    assert status == 0
    assert ".text.matmul" in out
    assert "HGMMA.64x64x16.F32.BF16" in out


@needs_triton
def test_a_call_without_a_kernel_says_so(run):
    arguments = ("conv2d", "--input=2,8,8,32", "--kernel=3,3,1,32", "--groups=32", "--arch=sm_90")
    status, out, _ = run(*arguments, "--json")
    assert status == 0
    entry = json.loads(out)
    assert entry["reason"] == "XLA computes it, without a kernel"
    assert entry["algorithm"] is entry["registers"] is entry["loop_instructions"] is None
    assert entry["flops"] == 2 * 2 * 8 * 8 * 32 * 9
    assert "XLA computes it" in run(*arguments)[1]


@needs_triton
def test_all_is_a_list_and_compiles_the_same_kernel_once(run, monkeypatch):
    compiled = []

    def compile_kernel(ttir, **options):
        compiled.append(ttir)
        raise compiler.CompilerError("not today")

    monkeypatch.setattr(sweep, "compile_kernel", compile_kernel)
    names = ["vgg16/fc7", "alexnet/fc7"]
    twice = [workload for name in names for workload in workloads(name)] * 2
    monkeypatch.setattr(command, "workloads", lambda pattern: twice)
    status, out, err = run("--all", "--arch=sm_90", "--jobs=1", "--json")
    entries = json.loads(out)
    assert status == 1
    assert len(entries) == 2 * 2 * 3
    assert len(compiled) == len(set(compiled)) == 2 * 3
    assert {entry["reason"] for entry in entries} == {"not today"}
    assert [entry["pass"] for entry in entries[:3]] == [
        "forward", "input_gradient", "kernel_gradient",
    ]  # fmt: skip
    assert "lowering 12 of 12, 0 min 0 s left\n" in err
    assert "compiling 6 of 6, 0 min 0 s left\n" in err


@needs_triton
def test_all_runs_in_several_processes_and_prints_a_table(run):
    status, out, err = run("--all", "alexnet/fc8", "--arch=sm_80", "--jobs=2")
    assert status == 0
    heading, *rows = out.splitlines()
    assert heading.split()[:4] == ["workload", "pass", "dtype", "algorithm"]
    assert [row.split()[:4] for row in rows] == [
        ["alexnet/fc8", which, "bfloat16", "matmul"]
        for which in ("forward", "input_gradient", "kernel_gradient")
    ]
    assert all("HMMA" in row for row in rows)
    assert "compiling 3 of 3" in err
