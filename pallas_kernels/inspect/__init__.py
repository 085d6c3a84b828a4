"""What the compiler makes of a kernel, seen on a machine without a GPU.

    query = Query(Matmul((4096, 4096), (4096, 4096)), GPUS["H200"], "input_gradient")
    for answer in inspect(query):
        print(answer.code.registers, answer.code.issue_slots_per_matrix_cycle)

A kernel on its way: `lowering` (from jax to Triton IR), `compiler` (to PTX and SASS), `sass` (the
machine code's instructions and loops) and `machine_code` (what they say of speed), with
`architectures` (what a multiprocessor has) and `roofline` (what a GPU can do) beside it. `query`
asks one question, `sweep` many at once, `report` prints the answers, and `command` takes the
arguments of

    python -m pallas_kernels.inspect conv2d --input=256,56,56,64 --kernel=3,3,64,128 --arch=sm_90
"""

from pallas_kernels.inspect.query import Answer, Query, inspect
from pallas_kernels.inspect.roofline import GPUS
from pallas_kernels.inspect.sweep import inspect_all

__all__ = ["GPUS", "Answer", "Query", "inspect", "inspect_all"]
