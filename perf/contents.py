"""The list of entries at the top of perf/NOTES.md, by subject.

python -m perf.contents      # after an entry was added
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from .report import put_between_marks

NOTES = Path(__file__).parent / "NOTES.md"
# An entry is listed under the first subject of whose words its heading has one.
SUBJECTS = {
    "Where it stands": ("where it stands", "where hopper", "where the hopper", "where the foundation"),
    "Packed sequences": ("packed",),
    "Key-value caches": ("cache",),
    "Hopper forward": ("hopper forward",),
    "Hopper backward": ("hopper backward",),
    "Blackwell": ("blackwell",),
    "Everything else": ("",),
}


def entries(text: str) -> list[str]:
    """The headings of a text's entries, without their marks; what stands in a fenced block is none."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^## (.*)$", outside, flags=re.MULTILINE)


def anchors(headings: list[str]) -> list[str]:
    """As GitHub makes them: lower case, no punctuation but - and _, a hyphen for each space, a number if met before."""
    met: Counter[str] = Counter()
    found = []
    for heading in headings:
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{name}-{met[name]}" if met[name] else name)
        met[name] += 1
    return found


def contents(text: str) -> str:
    """A list of links for each subject, in the text's order."""
    lists: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    headings = entries(text)
    for heading, anchor in zip(headings, anchors(headings), strict=True):
        title = re.sub(r"^\d{4}-\d\d-\d\d\s+", "", heading)
        subject = next(name for name, words in SUBJECTS.items() if any(word in title.lower() for word in words))
        lists[subject].append(f"- [{title}](#{anchor})")
    return "\n\n".join("\n".join([f"**{subject}**", "", *links]) for subject, links in lists.items() if links)


def main() -> None:
    put_between_marks(NOTES, "contents", contents(NOTES.read_text()))


if __name__ == "__main__":
    main()
