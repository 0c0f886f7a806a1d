"""Figures of the report and the README, with matplotlib (`pip install matplotlib`); nothing else in perf/ needs it.

Each function returns the bytes of a PNG, in a palette of few colours so that a page of them stays small.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from . import records

MISSING = "no figures: matplotlib is not installed here (pip install matplotlib)"
INK, FAINT = "#222222", "#d9d9d9"
# Okabe and Ito's colours, told apart with any colour vision; ours is the one heavy line.
COLOURS = {
    "ours": "#0072B2", "ours-triton": "#56B4E9", "ours-deterministic": "#004B75", "fa3": "#D55E00", "fa4": "#009E73",
    "cudnn": "#CC79A7", "flex": "#E69F00", "fa2": "#999999", "standard": "#999999",
}  # fmt: skip
ORDER = tuple(COLOURS)
NAMES = {
    "ours": "cute_flash", "ours-triton": "cute_flash, Triton", "fa2": "FlashAttention-2 (SDPA)",
    "fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN", "flex": "FlexAttention",
    "standard": "standard attention", "ours-deterministic": "cute_flash, deterministic",
}  # fmt: skip
ACROSS = 4
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
Panel = Mapping[str, Mapping[int, float]]  # contestant -> seqlen -> value


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 9, "axes.edgecolor": "#888888", "axes.labelcolor": INK, "text.color": INK, "axes.linewidth": 0.6,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT,
        "grid.linewidth": 0.5, "axes.axisbelow": True, "legend.frameon": False, "svg.hashsalt": "cute_flash",
    })  # fmt: skip
    return plt


def _png(figure: Any) -> bytes:
    """Without a date or a version inside, so that equal figures are equal files."""
    from PIL import Image

    raw, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=110, metadata={"Software": None})
    _pyplot().close(figure)
    Image.open(raw).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(packed, format="png", optimize=True)
    return packed.getvalue()


def _length(seqlen: float, _: object = None) -> str:
    return f"{seqlen / 1024:.0f}k" if seqlen >= 1024 else f"{seqlen:.0f}"


def _lengths_axis(axis: Any, lengths: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(lengths)[:: 1 if len(lengths) < 6 else 2])
    axis.xaxis.set_major_formatter(FuncFormatter(_length))
    axis.xaxis.set_minor_locator(NullLocator())


def _sorted(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def panels(rows: Sequence[records.Row]) -> dict[tuple[str, ...], dict[str, dict[int, float]]]:
    """(pass, dtype, d, dv, mask) -> contestant -> seqlen -> TFLOP/s; equal lengths and ungrouped heads only, and of a
    length measured at several batch sizes the largest."""
    found: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
    points = [
        (dict(zip(records.POINT_COLUMNS, key, strict=True)), each) for key, each in records.measured(rows).items()
    ]
    for point, contestants in sorted(points, key=lambda pair: int(pair[0]["B"])):
        if point["Hq"] != point["Hkv"] or point["Sq"] != point["Sk"]:
            continue
        lines = found.setdefault(tuple(point[name] for name in ("pass", "dtype", "d", "dv", "mask")), {})
        for name, row in contestants.items():
            lines.setdefault(name, {})[int(point["Sq"])] = float(row["tflops"])
    return {key: lines for key, lines in found.items() if max(map(len, lines.values())) > 1}  # one length is no line


def _panel_key(key: tuple[str, ...]) -> tuple[object, ...]:
    direction, dtype, d, dv, mask = key
    return (direction != "fwd", dtype, int(d), -int(dv), mask != "full", mask)


def throughput(rows: Sequence[records.Row], dims: Sequence[str] = ()) -> bytes:
    """One panel per (pass, dtype, head_dim, mask): TFLOP/s over sequence length, a line per contestant."""
    found = {key: lines for key, lines in panels(rows).items() if not dims or key[2] in dims}
    if not found:
        raise ValueError("no point with numbers at two lengths or more: nothing to plot")
    plt = _pyplot()
    mixed = len({key[0] for key in found}) > 1
    across = min(ACROSS, len(found))
    down = -(-len(found) // across)
    figure, axes = plt.subplots(down, across, figsize=(2.75 * across, 2.15 * down + 0.45), squeeze=False, sharey=True)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, key in zip(axes.flat, sorted(found, key=_panel_key), strict=False):
        direction, dtype, d, dv, mask = key
        _draw(axis, found[key])
        dims_here = f"head_dim {d}" if d == dv else f"head_dim {d}, head_dim_v {dv}"
        words = [dims_here, mask] + (["backward"] if mixed and direction != "fwd" else [])
        words += [dtype] if dtype != "bf16" else []
        axis.set_title(", ".join(words), fontsize=8.5, loc="left")
    axes[0][0].set_ylim(bottom=0)  # shared; once all are drawn, or the top of the first would be everyone's
    for row in axes:
        row[0].set_ylabel("TFLOP/s" if mixed else f"TFLOP/s, {DIRECTIONS[next(iter(found))[0]]}")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    _legend(figure, {name for lines in found.values() for name in lines})
    return _png(figure)


def _draw(axis: Any, lines: Panel) -> None:
    for name in reversed(_sorted(list(lines))):  # ours last, on top
        lengths = sorted(lines[name])
        heavy = name == "ours"
        axis.plot(
            lengths, [lines[name][s] for s in lengths], color=COLOURS.get(name, INK), marker="o", label=name,
            linewidth=2.2 if heavy else 1.1, markersize=3.6 if heavy else 2.4,
        )  # fmt: skip
    _lengths_axis(axis, sorted({s for line in lines.values() for s in line}))


def _legend(figure: Any, names: set[str]) -> None:
    from matplotlib.lines import Line2D

    height = figure.get_size_inches()[1]
    handles = [
        Line2D([], [], color=COLOURS.get(name, INK), linewidth=2.2 if name == "ours" else 1.1, marker="o", markersize=3)
        for name in _sorted(list(names))
    ]
    labels = [NAMES.get(name, name) for name in _sorted(list(names))]
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.32 / height))
    figure.legend(handles, labels, loc="upper left", ncol=len(labels), fontsize=8.5, bbox_to_anchor=(0.01, 1.0))


def memory(rows: Sequence[Mapping[str, str]]) -> bytes:
    """Peak bytes beyond the inputs over sequence length, both axes logarithmic: a slope of 1 is linear."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.1), squeeze=False, sharey=True)
    for axis, direction in zip(axes[0], ("fwd", "fwd+bwd"), strict=True):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["pass"] == direction:
                lines.setdefault(row["contestant"], {})[int(row["S"])] = int(row["peak_bytes"]) / 2**20
        for name in _sorted(list(lines)):
            lengths = sorted(lines[name])
            width = 2.2 if name == "ours" else 1.2
            axis.plot(lengths, [lines[name][s] for s in lengths], color=COLOURS.get(name, INK), marker="o",
                      linewidth=width, markersize=3.5, label=NAMES.get(name, name))  # fmt: skip
        if "ours" in lines:
            first, last = min(lines["ours"]), max(lines["ours"])
            top = lines["ours"][last]
            axis.plot([first, last], [top * first / last, top], color=INK, linewidth=0.8, linestyle=":", label="linear",
                      zorder=9)  # fmt: skip
        axis.set_yscale("log")
        _lengths_axis(axis, sorted({s for line in lines.values() for s in line}))
        axis.set_title("forward" if direction == "fwd" else "forward and backward", fontsize=9, loc="left")
        axis.set_xlabel("sequence length")
    axes[0][0].set_ylabel("peak memory beyond the inputs, MiB")
    axes[0][1].legend(fontsize=8)
    figure.tight_layout()
    return _png(figure)


def bars(groups: Sequence[str], charts: Mapping[str, Mapping[str, Sequence[float | None]]], ylabel: str) -> bytes:
    """One chart a title, grouped bars on a logarithmic axis. A series is a contestant, or "contestant, model": hatched.

    None leaves a gap.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(charts), figsize=(11.0, 3.2), squeeze=False, sharey=True)
    for axis, (title, series) in zip(axes[0], charts.items(), strict=True):
        width = 0.84 / max(1, len(series))
        for i, (name, values) in enumerate(series.items()):
            places = [g - 0.42 + width * (i + 0.5) for g in range(len(groups))]
            shown = [(place, value) for place, value in zip(places, values, strict=True) if value]
            look = {"alpha": 0.5, "hatch": "/////"} if name.endswith("model") else {}
            axis.bar([x for x, _ in shown], [y for _, y in shown], width * 0.92, label=_bar_name(name),
                     color=COLOURS.get(name.split(",")[0], INK), edgecolor="white", linewidth=0, **look)  # fmt: skip
        axis.set_yscale("log")
        axis.set_xticks(range(len(groups)), groups, fontsize=8)
        axis.grid(False, axis="x")
        axis.set_title(title, fontsize=9, loc="left")
    axes[0][0].set_ylabel(ylabel)
    found = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.legend(found.values(), found.keys(), loc="upper left", ncol=len(found), fontsize=8, bbox_to_anchor=(0, 1.01))
    return _png(figure)


def _bar_name(name: str) -> str:
    contestant, _, rest = name.partition(",")
    return ",".join(filter(None, (NAMES.get(contestant, contestant), rest)))
