"""
Looks into trained runs.

    python analyze.py curves out/a [out/b ...] [--out=curves.png]          # loss and rate over the steps

Plots need matplotlib (pip install matplotlib).
"""
import json
import os
import sys
from dataclasses import dataclass

from prepare import die, start, write_atomic
from train import opt, parse_args


def pyplot():
    """matplotlib's pyplot, for files. Exits (2) if it is missing."""
    try:
        import matplotlib
    except ImportError:
        die("plots need the package matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def save_figure(figure, path):
    with write_atomic(path) as f:
        figure.savefig(f, format="png", dpi=120, bbox_inches="tight")
    print(f"wrote {path}")


def read_metrics(folder):
    """The rows of a run's metrics.jsonl. Exits (2) if it has none."""
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.endswith("\n")]
        if not all(isinstance(row["step"], int) for row in rows) or not rows:
            raise ValueError("it holds no steps")
        return rows
    except FileNotFoundError:
        die(f"no {path}: name the out_dir of a run of train.py")
    except (OSError, ValueError, KeyError, TypeError) as e:
        die(f"{path} is not a log of train.py ({e}): name the out_dir of a run")


@dataclass
class CurvesConfig:
    out: str = opt("curves.png", "the figure")


def curves(folders, cfg):
    """Loss curves of several runs, and below them the schedule of their rates, to one PNG."""
    plt = pyplot()
    runs = {folder: read_metrics(folder) for folder in folders}
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained")
    for i, (folder, rows) in enumerate(runs.items()):
        train, val = ([(row["step"], row[key]) for row in rows if row.get(key) is not None]
                      for key in ("train_loss", "val_loss"))
        name = os.path.basename(os.path.normpath(folder))
        best = f", best {min(loss for _, loss in val):.4f}" if val else ""
        top.plot(*zip(*train), color=f"C{i % 10}", alpha=0.35, linewidth=1) if train else None
        top.plot(*zip(*val), "o-", color=f"C{i % 10}", markersize=3, label=f"{name}{best}") if val else None
        rates = {}                                              # group: [(step, rate)]
        for row in rows:
            for group, rate in row.get("lr", {}).items():
                rates.setdefault(group, []).append((row["step"], rate))
        for group, style in zip(rates, ("-", "--", ":", "-.")):
            bottom.plot(*zip(*rates[group]), style, color=f"C{i % 10}", linewidth=1, label=group if i == 0 else None)
    top.set(ylabel="loss, nats per token")
    top.legend(title="validation (train: pale)")
    bottom.set(xlabel="step", ylabel="rate", yscale="log")
    bottom.legend(ncols=4, fontsize="small")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    save_figure(figure, cfg.out)


PROBES = {"curves": (curves, CurvesConfig)}


def main():
    argv = sys.argv[1:]
    if not argv or argv[0] not in PROBES:
        if argv and argv[0] in ("-h", "--help"):
            print(__doc__)
            raise SystemExit(0)
        die(f"{f'unknown probe {argv[0]}' if argv else 'no probe'}: name one of {', '.join(PROBES)}")
    probe, config = PROBES[argv[0]]
    folders = [arg for arg in argv[1:] if not arg.startswith("--")]
    cfg = parse_args(config, [arg for arg in argv[1:] if arg.startswith("--")])
    if not folders:
        die(f"no run: python analyze.py {argv[0]} OUT_DIR ...")
    probe(folders, cfg)


if __name__ == "__main__":
    start(main)
