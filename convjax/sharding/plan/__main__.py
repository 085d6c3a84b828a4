"""Plan a training run on GPUs that are not here.

    python -m convjax.sharding.plan --config=configs/alexnet_2012.py --mesh=tower=2 --memory=3GB
    python -m convjax.sharding.plan --config=configs/vit.py --mesh=data=4,model=2 --json \\
        --config.data.batch_size=512

The step is compiled by XLA's own compiler for the GPUs of --device, with jax's CUDA plug-in
(`pip install 'convjax[plan]'`: no GPU, no CUDA libraries); without it the program is the CPU's, for
simulated devices, and the plan says so. Any field of the config can be given another value; axes
that --mesh does not name are 1.

Memory is what XLA allocates on each device. On a GPU cuDNN's workspaces come on top, which are
chosen there, and the driver's own share. `sent` is what each device sends, and receives, in a step
by ring algorithms; times are those of the bytes alone, at the link's full rate in each direction,
one collective after the other.
"""

import sys

from convjax.sharding.plan.command import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
