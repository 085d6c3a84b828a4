"""Show what the compiler makes of an operation's kernels, without a GPU.

    python -m pallas_kernels.inspect conv2d --input=256,56,56,64 --kernel=3,3,64,128 --arch=sm_90
    python -m pallas_kernels.inspect matmul --a=4096,4096 --b=4096,4096 --bias --activation=gelu \\
        --blocks=m=128,n=128,k=64,warps=4 --gpu=H100 --json
    python -m pallas_kernels.inspect --all 'resnet50/*' --arch=sm_80 --dtype=bfloat16,float32

Launch grid, blocks, registers, spills, shared memory, occupancy, matrix instructions, loads and the
hot loop are of the machine code; FLOPs and bytes are the launch's, and the floor is the least time
that they take at the rates of the GPU's datasheet.
"""

import sys

from pallas_kernels.inspect.command import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
