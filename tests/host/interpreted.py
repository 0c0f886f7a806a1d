"""Triton's interpreter in a process of its own: it must be chosen before triton is imported, and stays."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def interpreter(module: str) -> Iterator[subprocess.Popen]:
    """`python -m module`, which answers a line of JSON with a line of JSON."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    yield process
    process.stdin.close()
    process.wait(timeout=60)


def check_answer(process: subprocess.Popen, question: list | dict, dtype: str) -> None:
    """Every error in the answer: of `lse` in units of what is allowed, of float32 by the order of sums, else by a
    rounding of the output to 16 bits."""
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the interpreter process ended: its error is on stderr"
    for name, error in json.loads(answer).items():
        assert error <= (1.0 if name == "lse" else 1e-5 if dtype == "float32" else 1e-3), (name, error)
