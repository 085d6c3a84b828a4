"""What is run from the root of a checkout, each with --help: `train`, `evaluate`.

`python -m experiments.train` trains a network as a file in `configs/` says; `python -m
experiments.evaluate` measures its checkpoints.
"""
