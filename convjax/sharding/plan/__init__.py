"""What a training step will need on GPUs that are not here: memory, traffic, and time on the wire.

    plan = make_plan(load_config("configs/alexnet_2012.py"), {"data": 4, "tower": 2})
    print(plan.memory.total, [each.bytes for each in plan.collectives])

The step is compiled for that many GPUs as `convjax.training` would compile it there, and the
compiled program is read. `python -m convjax.sharding.plan` prints it.
"""
