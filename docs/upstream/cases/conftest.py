"""Settings that come before vLLM is used. Xfails are strict: a case that passes reports that its
finding is gone."""

import os
import sys

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, os.path.dirname(__file__))

import triton
import triton.language
from vllm import triton_utils

triton_utils.triton, triton_utils.tl = triton, triton.language  # left out where there is no GPU

from vllm.utils import torch_utils

torch_utils.PIN_MEMORY = False  # pinned memory needs a GPU's driver
