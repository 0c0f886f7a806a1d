"""What the library says by itself, on stderr, and that it says each thing once."""

import os
import sys
import threading

from ..spec import settings

_said: set[str] = set()
_lock = threading.Lock()


def _in_a_forked_child() -> None:
    """Another thread may have held it at the fork."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)


def first_time(text: str) -> bool:
    """True once per text and process."""
    with _lock:
        fresh = text not in _said
        _said.add(text)
    return fresh


def forget() -> None:
    """For tests: every sentence is new again."""
    with _lock:
        _said.clear()


def write(topic: str, text: str) -> None:
    lines = [f"cute_flash {topic}: {line}" for line in text.splitlines()]
    print("\n".join(lines), file=sys.stderr, flush=True)


def say(topic: str, text: str) -> None:
    """For CUTE_FLASH_LOG; the same text once."""
    if topic in settings.current.log and first_time(f"{topic}: {text}"):
        write(topic, text)


def once(text: str) -> None:
    """Said whatever the log settings: the user's folder, host or install asks for attention."""
    if first_time(f"notice: {text}"):
        write("notice", text)
