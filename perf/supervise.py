"""Keeps a table going: the worker process may crash or hang in one contestant's kernel without losing the rest.

The worker leaves word of what it is doing in a status file. When it dies or stays silent too long, the contestant named
there gets a row that says so and a new worker goes on with the table, leaving that contestant out at that point.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import records

MAX_RESTARTS = 25
POLL_SECONDS = 0.2


class Status:
    """The worker's last word, in a file that is replaced whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, word: Mapping[str, str]) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(dict(word)))
        os.replace(draft, self.path)

    def finished(self) -> None:
        self.write({"finished": "yes"})

    def read(self) -> dict[str, str]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def age(self) -> float:
        """Seconds since the worker last spoke."""
        return time.time() - self.path.stat().st_mtime if self.path.exists() else 0.0


def _watch(worker: subprocess.Popen[bytes], status: Status, stall: float, until: float) -> str:
    """Why the worker is gone: "" = it ended by itself with 0."""
    started = time.time()
    while worker.poll() is None:
        time.sleep(POLL_SECONDS)
        silent = min(status.age(), time.time() - started) if status.path.exists() else time.time() - started
        if silent > stall or (until and time.time() > until + stall):
            worker.kill()
            worker.wait()
            return f"no progress for {silent:.0f} s"
    return "" if worker.returncode == 0 else f"the process ended with {worker.returncode}"


def run(command: Sequence[str], out: Path, stall: float, time_limit: float) -> str:
    """Run the worker until it ends by itself: "finished", "stopped" (time is up) or "gave up: ..."."""
    until = time.time() + time_limit if time_limit else 0.0
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(MAX_RESTARTS):
            status = Status(Path(folder) / f"status{attempt}.json")
            left = ["--time-limit", f"{max(1.0, until - time.time()):.0f}"] if until else []
            worker = subprocess.Popen([*command, *left, "--worker", str(status.path)])
            ended = _watch(worker, status, stall, until)
            word = status.read()
            if not ended:
                return "finished" if word.get("finished") else "stopped"
            print(f"{ended} in {word.get('contestant') or 'set-up'}", flush=True)
            blamed = word.get("contestant", "")
            if not blamed:
                return f"gave up: {ended} outside of any contestant"
            row = {name: value for name, value in word.items() if name in records.COLUMNS}
            records.append(out, [{**row, "note": records.BROKEN + ended}])
            if until and time.time() > until:
                return "stopped"
        return f"gave up: {MAX_RESTARTS} restarts"
