"""Which machine a number comes from, and what its clock and power were while it was taken."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import statistics
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import torch

SAMPLE_SECONDS = 0.02


def version_of(distribution: str) -> str:
    """Installed version of a distribution, "" when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit_here() -> str:
    """Short commit of the working directory, with "+" when tracked files differ; "unknown" without git."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def _smi(fields: str, index: int) -> list[str]:
    """nvidia-smi's answer, one string a field; empty without nvidia-smi."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in answer.strip().splitlines()[0].split(",")] if answer.strip() else []


def now() -> str:
    """UTC to the second: with the GPU's uuid it names one interleaved run."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def facts(device: torch.device, commit: str) -> dict[str, str]:
    """The columns of a CSV row that name the machine and the software."""
    row = {
        "gpu": platform.processor() or platform.machine(),
        "uuid": platform.node(),
        "date": now(),
        "commit": commit,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": "",
        "dsl": version_of("nvidia-cutlass-dsl"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row["gpu"] = properties.name
        row["uuid"] = str(getattr(properties, "uuid", platform.node()))
        row["driver"] = next(iter(_smi("driver_version", device.index or 0)), "")
    return row


def matmul_rate(device: torch.device, size: int = 8192, runs: int = 5) -> float:
    """TFLOP/s of the vendor library's bf16 matrix product: how fast this GPU is today, to judge absolute numbers by."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(runs + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.matmul(a, b)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * size**3 / statistics.median(times[2:]) * 1e-9


class Meter:
    """SM clock (MHz) and power (W) sampled in a thread, through NVML where its bindings are there, else nvidia-smi."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._on = device.type == "cuda"
        self._nvml: Any = None
        self._handle: Any = None
        if self._on:
            self._nvml, self._handle = self._open()

    def _open(self) -> tuple[Any, Any]:
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(self._index).uuid)
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except Exception:  # any failure of an optional meter: nvidia-smi answers instead
            return None, None

    def read(self) -> tuple[float, float] | None:
        """(MHz, W) now, or None where nothing can say."""
        if not self._on:
            return None
        try:
            if self._nvml is not None:
                clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
                return float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0
            clock_power = _smi("clocks.sm,power.draw", self._index)
            return (float(clock_power[0]), float(clock_power[1])) if len(clock_power) == 2 else None
        except Exception:  # "[N/A]" or a lost handle must not end a series
            return None

    @contextlib.contextmanager
    def series(self) -> Iterator[dict[str, str]]:
        """Sample while the block runs; the yielded dict has the medians once it is left."""
        samples: list[tuple[float, float]] = []
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(SAMPLE_SECONDS):
                if (reading := self.read()) is not None:
                    samples.append(reading)

        medians = {"clock_mhz": "", "power_w": ""}
        worker = threading.Thread(target=sample, daemon=True)
        if self._on:
            worker.start()
        try:
            yield medians
        finally:
            stop.set()
            if self._on:
                worker.join()
            if samples:
                medians["clock_mhz"] = f"{statistics.median(s[0] for s in samples):.0f}"
                medians["power_w"] = f"{statistics.median(s[1] for s in samples):.0f}"
