"""Strict: a case that passes says that its finding is gone, which is news."""

import os
import sys

os.environ.setdefault("PYTHONHASHSEED", "0")
sys.path.insert(0, os.path.dirname(__file__))
