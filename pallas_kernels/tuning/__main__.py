"""Times every way to do every layer of a network on the device at hand, and keeps the fastest.

    python -m pallas_kernels.tuning --model=resnet50 --batch=128
    python -m pallas_kernels.tuning --model=alexnet --batch=16 --dtype=float32 --budget=300

Forward and backward, each distinct shape once, the ones with the most work first. The choices are
kept for this kind of device in the user's cache folder, or in $CONVJAX_TUNING, and every operation
with backend="auto" has them from then on. `pallas_kernels.tune` does the same for any function.
"""

import sys

from pallas_kernels.tuning.command import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
