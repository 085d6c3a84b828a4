"""The tuner: every way to do an operation is timed on its very shape, and the fastest is kept.

    report = pallas_kernels.tune(training_step, state, batch)
    python -m pallas_kernels.tuning --model=resnet50 --batch=128

`candidates` lists the ways, `screening` drops kernels that the compiler speaks against, `timing`
checks and times the others, `search` spends a budget on all that, `tables` keeps the answers.
Operations read these through `pallas_kernels.selection`, which is below them; `search` and what it
needs stand above.
"""
