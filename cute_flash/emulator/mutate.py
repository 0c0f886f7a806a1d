"""Mutation testing of synchronisation: drop one site of a kernel at a time and see whether anything notices.

    sites = find_sites(ptx)
    report = score(sites, attempt)        # attempt(edit) runs the kernel and returns whether its result is right

A mutant is noticed when the emulator raises or the result is wrong under at least one of the schedules tried.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .errors import EmulatorError

# kind -> (what a line of it looks like, what to put in its place)
_KINDS = {
    "mbarrier wait": (re.compile(r"mbarrier\.(?:try|test)_wait\S*\s+(?P<p>[%\w]+)\s*,[^;]*;"), "mov.pred {p}, 1;"),
    "mbarrier arrive": (re.compile(r"mbarrier\.arrive\.(?!expect_tx)[^;]*;"), ""),
    "arrive.expect_tx": (re.compile(r"mbarrier\.arrive\.expect_tx[^;]*;"), ""),
    "named barrier": (re.compile(r"\b(?:bar|barrier)\.(?:cta\.)?(?:sync|arrive)\b[^;]*;"), ""),
    "cluster barrier": (re.compile(r"barrier\.cluster\.[^;]*;"), ""),
    "proxy fence": (re.compile(r"fence\.proxy\.async[^;]*;"), ""),
    "mbarrier init fence": (re.compile(r"fence\.mbarrier_init[^;]*;"), ""),
    "wgmma fence": (re.compile(r"wgmma\.fence[^;]*;"), ""),
    "wgmma commit": (re.compile(r"wgmma\.commit_group[^;]*;"), ""),
    "wgmma wait": (re.compile(r"wgmma\.wait_group[^;]*;"), ""),
    "tcgen05 commit": (re.compile(r"tcgen05\.commit[^;]*;"), ""),
    "tcgen05 wait": (re.compile(r"tcgen05\.wait::(?:ld|st)[^;]*;"), ""),
    "bulk commit": (re.compile(r"cp\.async\.bulk\.commit_group[^;]*;"), ""),
    "bulk wait": (re.compile(r"cp\.async\.bulk\.wait_group[^;]*;"), ""),
    "cp.async wait": (re.compile(r"cp\.async\.wait_(?:group|all)[^;]*;"), ""),
    "warp barrier": (re.compile(r"bar\.warp\.sync[^;]*;"), ""),
    "release": (re.compile(r"\b(?:red|st)\.release[^;]*;"), ""),
    "poll": (re.compile(r"@!?[%\w]+\s+bra\s+[^;]*;"), ""),  # those that go back to a load that acquires
}
POLL_LINES = 20  # of PTX at most, comments and line info included, that a loop around a poll has


@dataclass(frozen=True)
class Site:
    """One synchronisation in a PTX text. Lines count from 1."""

    kind: str
    line: int
    text: str

    def drop(self, ptx: str) -> str:
        lines = ptx.split("\n")
        pattern, replacement = _KINDS[self.kind]
        match = pattern.search(lines[self.line - 1])
        if match is None or match.group() != self.text:
            return ptx  # another kernel of the same launch
        guard = r"@!?[%\w]+\s+$" if not replacement else None
        before = lines[self.line - 1][: match.start()]
        if guard:
            before = re.sub(guard, "", before)
        lines[self.line - 1] = before + replacement.format(**match.groupdict()) + lines[self.line - 1][match.end() :]
        return "\n".join(lines)


def find_sites(ptx: str, kinds: Iterable[str] | None = None) -> list[Site]:
    chosen = list(kinds or _KINDS)
    found = []
    lines = [line.split("//")[0] for line in ptx.split("\n")]
    for number, code in enumerate(lines, 1):
        for kind in chosen:
            match = _KINDS[kind][0].search(code)
            if match and (kind != "poll" or _looks_again(lines[:number])):
                found.append(Site(kind, number, match.group()))
                break
    return found


def _looks_again(lines: list[str]) -> bool:
    """Does the branch in the last line close a loop around a load that acquires?"""
    label = lines[-1].split()[-1].rstrip(";") + ":"
    for line in lines[:-POLL_LINES:-1]:
        if "ld.acquire" in line:
            return any(other.startswith(label) for other in lines[-POLL_LINES:])
        if line.startswith(label):
            return False
    return False


@dataclass
class Outcome:
    site: Site
    noticed: bool
    how: str  # the error's type, "wrong result", or why it survived: "not executed", "redundant" or "unexplained"


@dataclass
class Report:
    outcomes: list = field(default_factory=list)

    def by_kind(self) -> dict:
        """kind -> (noticed, total)"""
        total = Counter(o.site.kind for o in self.outcomes)
        noticed = Counter(o.site.kind for o in self.outcomes if o.noticed)
        return {kind: (noticed[kind], count) for kind, count in total.items()}

    def survivors(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.noticed]

    def __str__(self) -> str:
        lines = [f"{kind}: {noticed}/{total}" for kind, (noticed, total) in self.by_kind().items()]
        lines += [f"  survived ({o.how}): {o.site.kind} at line {o.site.line}: {o.site.text}" for o in self.survivors()]
        return "\n".join(lines)


def score(sites: Iterable[Site], attempt: Callable[[Callable[[str], str]], bool], counters: Iterable = ()) -> Report:
    """Try every site dropped. `attempt` may raise an EmulatorError (noticed) or return whether the result was right.

    `counters` of unharmed runs explain survivors: a site never executed, or a wait after which no warp ever knew more
    than before it (the first pass over an empty ring, a second look at a phase already seen), cannot be noticed.
    """
    executed = set().union(*(c.lines for c in counters))
    taught = set().union(*(c.taught for c in counters))
    report = Report()
    for site in sites:
        try:
            right = attempt(site.drop)
        except EmulatorError as error:
            report.outcomes.append(Outcome(site, True, type(error).__name__))
            continue
        how = "wrong result" if not right else _why(site, executed, taught)
        report.outcomes.append(Outcome(site, not right, how))
    return report


def _why(site: Site, executed: set, taught: set) -> str:
    if not executed:
        return "unexplained"
    if site.line not in executed:
        return "not executed"
    waits = ("mbarrier wait", "named barrier", "cluster barrier")
    return "redundant" if site.kind in waits and site.line not in taught else "unexplained"
