"""A class-balanced part of Fashion-MNIST: 10,000 training and 2,000 test images of 28×28.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms", 2017 (https://arxiv.org/abs/1708.07747). The four files have the names and the format
of the original's; `make.py` made them from it, and LICENSE (MIT) covers them.
"""
