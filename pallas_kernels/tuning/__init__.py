"""The tuner: every way to do an operation is timed on its very shape, and the fastest is kept.

    report = pallas_kernels.tune(training_step, state, batch)
    python -m pallas_kernels.tuning --model=resnet50 --batch=128

`candidates` lists the ways, `timing` checks and times them, `search` spends a budget on them,
`tables` keeps the answers. Operations read these through `pallas_kernels.selection`, which is below
them; `search` and what it needs stand above.
"""
