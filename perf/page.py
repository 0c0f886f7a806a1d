"""The report: one HTML page that needs no other file, from the CSVs in perf/results and the model of perf/traffic.py.

`python -m perf.report --page perf/report.html` writes it. A figure is a PNG inside the page; without matplotlib the
page has its tables alone, and says so. What was not measured is said to be so: no section is left out.
"""

from __future__ import annotations

import base64
import csv
import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import figures, records, report, traffic

HYPHEN = "\u2011"  # where no line breaks
PASSES = {"fwd": "forward", "fwd+bwd": "forward and backward"}
RESULTS = Path(__file__).resolve().parent / "results"
TABLES = {"hopper_forward.csv": "Hopper forward", "hopper_backward.csv": "Hopper backward"}  # with records.COLUMNS
NAMES = figures.NAMES | {
    "ours-page64": "pages of 64", "ours-page16": "pages of 16", "ours-invariant": "batch_invariant",
    "ours-no-hint": "without lengths on the host", "fa3-0-splits": "FlashAttention-3",
    "fa3-32-splits": "FlashAttention-3, 32 splits", "torch": "PyTorch's varlen_attn",
    "ours-compiled": "cute_flash, compiled", "fa2": "SDPA (FA2)", "fa2-compiled": "SDPA, compiled",
}  # fmt: skip
TRAFFIC_WORDS = (
    "A query tile reads Q once and every key tile that its rows may see, and memory sees little more than Q, K, V and "
    "O once: the rest is L2's. What SMs receive is what the model says. Where CTAs run abreast, as under a full mask, "
    "the L2 itself counts fewer reads: it serves several SMs with one. Under a causal mask CTAs drift apart, and it "
    "counts what SMs receive. What was written last may still lie in L2 at the end. Standard attention writes S and P "
    "to memory and reads both."
)
STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:#222;background:#fff;
max-width:1060px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:27px;margin:0 0 4px}h2{font-size:20px;margin:40px 0 6px;border-bottom:1px solid #ddd;padding-bottom:4px}
h3{font-size:15px;margin:22px 0 4px}p{margin:6px 0 10px;max-width:82ch}.quiet{color:#666;font-size:13px}
nav a{margin-right:14px}a{color:#0064a0}
img{max-width:100%;height:auto;display:block;margin:10px 0}
h3 span{color:#666;font-weight:400;font-size:13px;margin-left:8px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:12.5px;font-variant-numeric:tabular-nums;margin:8px 0 14px}
th,td{padding:2px 9px;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
th{color:#555;font-weight:600;border-bottom:1px solid #bbb;white-space:normal;vertical-align:bottom}
td.word,th.word{text-align:left}td.how{text-align:left;white-space:normal;min-width:200px}
tr:hover td{background:#f4f8fb}td.best{font-weight:700}td.under{color:#a33}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:4px 0 16px}
.tile{border:1px solid #ddd;border-radius:6px;padding:9px 14px;min-width:150px}
.tile b{display:block;font-size:23px;line-height:1.25}.tile span{color:#666;font-size:12.5px}
details{margin:8px 0}summary{cursor:pointer;color:#0064a0}
@media(max-width:720px){.tiles{display:grid;grid-template-columns:1fr 1fr}.tile{min-width:0}ul{padding-left:20px}
.wide img{max-width:none;width:860px}}
"""


def esc(text: object) -> str:
    return html.escape(str(text))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """The first `words` columns and one named "how" are words, the others numbers. A cell is text or (text, class)."""
    wordy = [i < words or name == "how" for i, name in enumerate(head)]
    lines = [
        "".join(
            f"<th{' class=word' if w else ''}>{esc(name).replace('-', HYPHEN)}</th>"
            for w, name in zip(wordy, head, strict=True)
        )
    ]
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            text, kind = cell if isinstance(cell, tuple) else (cell, "")
            kind = kind or ("word" if i < words else "")
            cells.append(f"<td{f' class={kind}' if kind else ''}>{esc(text)}</td>")
        lines.append("".join(cells))
    return "<div class=wide><table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def paragraph(text: str, quiet: bool = False) -> str:
    return f"<p{' class=quiet' if quiet else ''}>{esc(text)}</p>"


def folded(summary: str, inside: str) -> str:
    return f"<details><summary>{esc(summary)}</summary>{inside}</details>"


def image(draw: Callable[[], bytes], words: str) -> str:
    """A figure inside the page; where there is no matplotlib, the sentence that says so."""
    try:
        data = base64.b64encode(draw()).decode()
    except ImportError:
        return paragraph(figures.MISSING, quiet=True)
    return f'<div class=wide><img alt="{esc(words)}" src="data:image/png;base64,{data}"></div>'


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV of any columns; none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------------- sections


def _speed_table(found: report.Table) -> str:
    names = report.present(found)
    rows = []
    for key in sorted(found, key=report.sort_key):
        contestants = found[key]
        best = max(report.rate(row) for row in contestants.values())
        cells: list[object] = [report.label(key)]
        for name in names:
            value = report.rate(contestants[name]) if name in contestants else None
            cells.append("" if value is None else (f"{value:.0f}", "best" if value == best else ""))
        ratio = report.ratio_to_best_rival(contestants)
        cells.append("" if ratio is None else (f"{ratio:.3f}", "under" if ratio < 1 else ""))
        cells.append(next(iter(contestants.values()))["clock_mhz"])
        rows.append(cells)
    heads = [NAMES.get(name, name) for name in names]
    return table(["TFLOP/s at", *heads, "over the best rival", "MHz"], rows)


def _origin(found: report.Table) -> str:
    """Of what is shown: rows that were measured again are not."""
    return report.origin([row for contestants in found.values() for row in contestants.values()])


def _verdicts(found: report.Table) -> str:
    """Each line of report.verdict_lines, the contestants by their names."""
    lines = []
    for line in report.verdict_lines(found):
        pair, _, rest = line.partition(":")
        named = " over ".join(NAMES.get(name, f"the {name}") for name in pair.split(" / "))
        lines.append(f"<li>{esc(named)}:{esc(rest)}</li>")
    return f"<ul>{''.join(lines)}</ul>"


def throughput(results: Path) -> str:
    parts = []
    for name, title in TABLES.items():
        path = results / name
        if not path.exists():
            continue
        rows = records.read([path])
        found = {key: row for key, row in records.measured(rows).items() if row}
        if not found:
            continue
        parts.append(f"<h3>{esc(title)}<span>perf/results/{esc(name)}</span></h3>")
        parts.append(image(lambda rows=rows: figures.throughput(rows), f"TFLOP/s over sequence length, {title}"))
        parts.append(_verdicts(found))
        parts.append(folded(f"all {len(found)} points", _speed_table(found)))
        parts.append(paragraph(_origin(found), quiet=True))
    if not parts:
        return paragraph("Not measured yet.")
    words = (
        "Contestants of a point ran interleaved in one process on one GPU, replayed from CUDA graphs with a flushed "
        "L2, after every output had been compared with a dense reference. TFLOP/s count half the pairs under a causal "
        "mask. A ratio is of times within one point; above 1 cute_flash is faster."
    )
    return paragraph(words) + "".join(parts)


def _raced(rows: Sequence[records.Row], place: Callable[[records.Row], str], rate: Callable[[records.Row], float],
           unit: str) -> str:  # fmt: skip
    """A table of perf/serving.py's rows: a line a point, rates of all, ours over the best rival."""
    found = {key: row for key, row in records.measured(rows).items() if row}
    names = list(dict.fromkeys(name for contestants in found.values() for name in contestants))
    lines = []
    for contestants in found.values():
        ours = contestants.get("ours")
        rates = {name: rate(row) for name, row in contestants.items()}
        cells: list[object] = [place(next(iter(contestants.values())))]
        for name in names:
            best = rates.get(name) == max(rates.values())
            cells.append((f"{rates[name]:.0f}", "best" if best else "") if name in rates else "")
        ratio = report.ratio_to_best_rival(contestants)
        cells.append("" if ratio is None else (f"{ratio:.3f}", "under" if ratio < 1 else ""))
        lines.append([*cells, ours["median_us"] if ours else ""])
    heads = [NAMES.get(name, name) for name in names]
    raced = table([f"{unit} at", *heads, "over the best rival", "cute_flash, us"], lines)
    return raced + paragraph(_origin(found), quiet=True)


def _cache_rate(row: records.Row) -> float:
    """GB/s of K and V, read once, half precision."""
    keys = int(row["B"]) * int(row["Hkv"]) * int(row["Sk"])
    return keys * (int(row["d"]) + int(row["dv"])) * 2 / float(row["median_us"]) / 1e3


def serving(results: Path) -> str:
    parts = []
    if rows := read(results / "decode.csv"):
        words = (
            f"One query row over a key-value cache, {rows[0]['Hq']} query heads to {rows[0]['Hkv']} of keys, head_dim "
            f"{rows[0]['d']}, {rows[0]['dtype']}; L2 flushed before each run."
        )
        parts.append(f"<h3>Decoding<span>perf/results/decode.csv</span></h3>{paragraph(words)}")
        parts.append(_raced(rows, lambda row: f"{row['B']} x {row['Sk']} keys", _cache_rate, "GB/s"))
    if rows := read(results / "varlen.csv"):
        words = "Causal sequences of unequal lengths behind each other; pairs that the mask hides are not counted."
        parts.append(f"<h3>Packed sequences<span>perf/results/varlen.csv</span></h3>{paragraph(words)}")
        parts.append(_raced(rows, _packed_point, report.rate, "TFLOP/s"))
    return "".join(parts) or paragraph("Not measured yet.")


def _packed_point(row: records.Row) -> str:
    direction = figures.DIRECTIONS[row["pass"].removeprefix("varlen-")]
    return f"{direction}, {row['B']} sequences, longest {row['Sq']}"


def accuracy(results: Path) -> str:
    errors: dict[str, list[float]] = {}
    for name in TABLES:
        for contestants in records.measured(records.read([results / name])).values():
            for who, row in contestants.items():
                errors.setdefault(who, []).append(float(row["rel_err"]))
    if not errors:
        return paragraph("Not measured yet.")
    rows = [
        [NAMES.get(name, name), len(errors[name]), f"{records.geometric_mean(errors[name]):.3e}",
         f"{max(errors[name]):.3e}"]
        for name in figures.ORDER if name in errors
    ]  # fmt: skip
    first = paragraph(
        "Relative error ||out - exact|| / ||exact|| of the outputs that were timed, against a dense reference in "
        "float32 or float64. Rounding the exact result to bfloat16 alone costs about 1.7e-3."
    ) + table(["contestant", "points", "geometric mean", "largest"], rows)
    return first + _gradient_errors(read(results / "gradient_errors.csv"))


def _gradient_errors(rows: Sequence[dict[str, str]]) -> str:
    """Rows of tests/device/test_gradient_errors.py; `shape` begins with the head dim and the mask."""
    worst: dict[tuple[int, str, str], float] = {}
    for row in rows:
        dim, mask, *_ = row["shape"].split("-")
        key = int(dim.removeprefix("d")), row["yardstick"], mask
        shares = [float(row[name]) / float(row[f"{name}_yardstick"]) for name in ("dq", "dk", "dv")]
        worst[key] = max(worst.get(key, 0.0), *shares)
    if not worst:
        return ""
    cells = [
        [
            dim,
            who,
            *(f"{worst[dim, who, mask]:.3f}" if (dim, who, mask) in worst else "" for mask in ("full", "causal")),
        ]
        for dim, who in sorted({key[:2] for key in worst})
    ]
    return paragraph(
        "Largest error of dQ, dK or dV over that of FlashAttention-4, or of plain 16-bit attention with a float32 "
        "softmax, on the same inputs, both against float64."
    ) + folded("error ratios of gradients on a GPU", table(["head_dim", "beside", "full", "causal"], cells))


def memory(results: Path) -> str:
    rows = read(results / "memory.csv")
    if not rows:
        return paragraph("Not measured yet: python -m perf.memory --out perf/results/memory.csv, on a GPU.")
    lengths = sorted({int(row["S"]) for row in rows})
    used = {(row["contestant"], row["pass"], int(row["S"])): int(row["peak_bytes"]) for row in rows}
    kinds = sorted({key[:2] for key in used}, key=lambda kind: (figures.ORDER.index(kind[0]), kind[1]))
    cells = [
        [f"{NAMES.get(who, who)}, {PASSES[direction]}", *(_mib(used.get((who, direction, s))) for s in lengths)]
        for who, direction in kinds
    ]
    one = rows[0]
    words = (
        f"Peak memory that a call takes beyond its inputs, by torch's allocator: batch {one['B']}, {one['H']} heads, "
        f"head_dim {one['d']}, bfloat16. Short sequences leave the GPU idle, so that CTAs share keys and hold partial "
        "outputs. Standard attention holds the scores, and is measured until they are 8 GiB. The "
        "arithmetic stays quadratic in the length for both."
    )
    return (
        paragraph(words)
        + image(lambda: figures.memory(rows), "peak memory over sequence length")
        + table(["MiB at a sequence length of", *(f"{s // 1024}k" for s in lengths)], cells)
        + paragraph(f"{one['gpu']}, {one['date'][:10]}, commit {one['commit']}, torch {one['torch']}.", quiet=True)
    )


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}"


def bytes_moved(results: Path) -> str:
    counted = traffic.measured(results / "traffic.csv")
    received = any(row["sm_read_bytes"] for row in counted.values())  # where it is not, the L2's count stands for it
    rows: list[Sequence[object]] = []
    groups = []
    l2_bars: dict[str, list[float | None]] = {}
    hbm_bars: dict[str, list[float | None]] = {}

    def put(name: str, l2: int | None, hbm: int | None) -> None:
        l2_bars.setdefault(name, []).append(l2 and l2 / 1e6)
        hbm_bars.setdefault(name, []).append(hbm and hbm / 1e6)

    for point in traffic.POINTS:
        ours, standard, plan = traffic.modelled(point)
        groups.append(f"d={point.head_dim} {point.mask}\n{point.heads_q} x {point.seqlen_q}")
        put("ours, model", ours.sm_read, ours.hbm)
        tile = f"tile {plan.split(' tile ')[1]}"
        rows.append(_moved(str(point), "cute_flash, model", (ours.sm_read, None, ours.hbm), tile))
        for name in traffic.CONTESTANTS:
            if name == "standard":
                put("standard, model", *((None, None) if point.causal else (standard.sm_read, standard.hbm)))
            row = counted.get((name, str(point.head_dim), point.mask, str(point.seqlen_q)))
            l2 = int(row["l2_read_bytes"]) if row else None
            hbm = int(row["hbm_read_bytes"]) + int(row["hbm_written_bytes"]) if row else None
            put(name, int(row["sm_read_bytes"] or 0) or None if row and received else l2, hbm)
            if row and l2 and hbm:
                kernels = f"{row['kernels']} kernel" + ("s" if row["kernels"] != "1" else "")
                counts = (int(row["sm_read_bytes"] or 0), l2, hbm)
                rows.append(_moved("", f"{NAMES.get(name, name)}, counted", counts, kernels))
        if not point.causal:
            bytes_of = (standard.sm_read, None, standard.hbm)
            rows.append(_moved("", "standard attention, model", bytes_of, "S, P in memory"))
    origins = sorted({f"{row['gpu']}, {row['date'][:10]}, commit {row['commit']}" for row in counted.values()})
    said = (
        f"Counted by Nsight Compute with caches emptied first: {'; '.join(origins)}."
        if origins
        else "No profiler has counted these yet: the model stands alone."
    )
    titles = (
        "from L2 to the SMs" if received else "reads that L2 serves (a model's: all that SMs read)",
        "to and from memory",
    )
    charts = {
        title: {name: values for name, values in bars.items() if any(values)}
        for title, bars in zip(titles, (l2_bars, hbm_bars), strict=True)
    }
    return (
        paragraph(TRAFFIC_WORDS)
        + image(lambda: figures.bars(groups, charts, "MB a forward"), "bytes moved by a forward")
        + table(["point", "whose", "SMs read, MB", "L2 serves, MB", "HBM, MB", "how"], rows, words=2)
        + paragraph(said, quiet=True)
    )


def _moved(place: str, whose: str, counts: Sequence[int | None], how: str) -> Sequence[object]:
    return [place, whose, *(f"{count / 1e6:.1f}" if count else "" for count in counts), (how, "how")]


def host(results: Path) -> str:
    rows = read(results / "host_cost.csv")
    if not rows:
        return paragraph("Not measured yet.")
    newest = max(row["date"] for row in rows if row["what"] == "call")
    calls = [row for row in rows if row["date"] == newest and row["what"] == "call"]
    first = max(row["date"] for row in rows if row["what"] == "compile")
    kernels = [row for row in rows if row["date"] == first and row["what"] in ("compile", "load")]
    seconds = {(row["what"], row["case"]): float(row["median_us"]) for row in kernels}
    cells = [
        [case, f"{us / 1e6:.2f}", f"{seconds.get(('load', case), 0) / 1e3:.1f}"]
        for (what, case), us in seconds.items()
        if what == "compile" and not case.startswith("import")
    ]
    origin = f"{calls[0]['gpu']}, {newest[:10]}, commits {calls[0]['commit']} and {kernels[0]['commit']}."
    timed = [
        [gradients, shapes, NAMES.get(who, who), *(row[name] for name in ("median_us", "p20_us", "p80_us", "of_fa2"))]
        for row in calls
        for who, gradients, shapes in [_host_case(row["case"])]
    ]
    heads = ["gradients", "shapes", "call", "median, us", "20th percentile", "80th", "time over eager SDPA"]
    return (
        paragraph(
            "What a call costs the host, in microseconds, where the GPU does next to nothing: batch 1, 128 tokens, 8 "
            "heads, head_dim 64. A compiled function here is this one call: a graph's guards and wrapper, 80 us or "
            "so, are paid once a graph."
        )
        + table(heads, timed, words=3)
        + paragraph("The first call of a kind in a process: compiled where the disk has none, else loaded.")
        + table(["kernel", "compile, s", "load, ms"], cells)
        + paragraph(origin, quiet=True)
    )


def _host_case(case: str) -> tuple[str, str, str]:
    """(contestant, gradients, shapes) of perf/host_cost.py's words for a case."""
    who, rest = case.split(maxsplit=1)
    return who, "no" if rest.startswith("no grad") else "yes", "new each call" if "new shape" in rest else "one"


def blackwell(results: Path) -> str:
    rows = read(results / "blackwell_beside_fa4.csv")
    words = (
        "Not yet run on silicon. The kernels are compiled for sm_100a and sm_103a and run in the emulator against "
        "float64. The bound below is a model's: each pipe at its full rate, the slowest one counts."
    )
    if not rows:
        return paragraph(words)
    keep = ("kernel", "d", "mask", "ctas", "cycles_MMA", "cycles_ex2", "cycles_shared_memory", "cycles_issue", "bound",
            "bound_tflops")  # fmt: skip
    cells = [[NAMES.get(r["kernel"], r["kernel"]), *(r[c] for c in keep[1:])] for r in rows]
    heads = [name.replace("_", " ") for name in keep]
    return paragraph(words) + folded("the model, beside FlashAttention-4's kernels", table(heads, cells))


SECTIONS = (
    ("speed", "Throughput", throughput),
    ("serving", "Caches and packed sequences", serving),
    ("accuracy", "Accuracy", accuracy),
    ("memory", "Memory", memory),
    ("bytes", "Bytes moved", bytes_moved),
    ("host", "Host cost", host),
    ("blackwell", "Data-centre Blackwell", blackwell),
)


def tiles(results: Path) -> str:
    """The first figures to look at: a row of them a table."""
    return "".join(_tiles(results / name, title) for name, title in TABLES.items() if (results / name).exists())


def _tiles(path: Path, title: str) -> str:
    found, cells = records.measured(records.read([path])), []
    for rival in ("", "fa3", "fa4", "cudnn"):
        of = [report.ratio_to(row, rival) if rival else report.ratio_to_best_rival(row) for row in found.values()]
        ratios = [ratio for ratio in of if ratio]
        if ratios:
            name = NAMES[rival] if rival else "the best rival of each point"
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} points"
            mean = f"{records.geometric_mean(ratios):.3f}x"
            cells.append(f"<div class=tile><b>{mean}</b>{esc(name)}<br><span>{spread}</span></div>")
    return f"<h3>{esc(title)}, its speed as a multiple of</h3><div class=tiles>{''.join(cells)}</div>"


def page(results: Path = RESULTS) -> str:
    """The whole page. results: the folder of CSVs."""
    links = "".join(f'<a href="#{name}">{esc(title)}</a>' for name, title, _ in SECTIONS)
    body = "".join(f"<h2 id={name}>{esc(title)}</h2>{make(results)}" for name, title, make in SECTIONS)
    head = paragraph(
        "Exact attention in CuTe-DSL. First how fast it is beside each rival (geometric means), then everything that "
        "was measured, where it was slower too. Every number is from a CSV in perf/results."
    )
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>cute_flash: measurements</title><style>{STYLE}</style><h1>cute_flash: measurements</h1>"
        f"{head}{tiles(results)}<nav>{links}</nav>{body}</html>\n"
    )
