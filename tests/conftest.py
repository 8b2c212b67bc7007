"""One thread for every test, so that a bare ``pytest`` computes what ``make test`` computes."""

import os

# read when torch is imported; processes that tests start inherit them
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import torch

torch.set_num_threads(1)
