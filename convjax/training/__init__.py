"""Training: from a typed config to a result, continued to the bit wherever it was stopped.

    from convjax.training.config import load_config
    from convjax.training.loop import train
    result = train(load_config("configs/quickstart.py"), "runs/quickstart")

For a loop of your own: `state.create_state`, `optimiser.make_optimiser`, `step.make_train_step` and
`step.make_eval_step` are pure functions, and `checkpoint.Checkpoints` saves what they return.
Nothing is imported here, so that a command can answer a typing error before Orbax has loaded.
"""
