"""What local ranks have from the start: imported by the process that they are forked from, and by nothing else."""

import atexit
import os
import shutil
import signal

import torch._dynamo  # noqa: F401  # which PyTorch's optimisers import when the first is made

import weft.engine  # noqa: F401
from weft.core.forkserver import FOLDER

if FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
# A signal to all processes of a run is for its ranks, whose end this one reports.
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
