"""Instructions that a processor lists and a virtual machine does not run.

oneDNN multiplies bfloat16 matrices with AMX wherever the processor lists it. Some virtual machines list AMX without
running it: the first such product ends the process with SIGILL, whoever asked for it. Tests keep oneDNN from AMX there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# The most that oneDNN has below AMX.
_WITHOUT_AMX = "AVX512_CORE_BF16"
_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def avoid_instructions_that_do_not_run() -> None:
    """Call it before the first matrix product: oneDNN reads the variable once. Processes started later inherit it."""
    information = Path("/proc/cpuinfo")
    if _VARIABLE in os.environ or not information.exists() or "amx_bf16" not in information.read_text():
        return
    if subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True).returncode:
        os.environ[_VARIABLE] = _WITHOUT_AMX
