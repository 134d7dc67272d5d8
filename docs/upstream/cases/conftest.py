"""Settings that come before vLLM is used. Xfails are strict: a case that passes reports that its
finding is gone."""

import os
import sys

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, os.path.dirname(__file__))

from vllm.utils import torch_utils

torch_utils.PIN_MEMORY = False  # pinned memory needs a GPU's driver
