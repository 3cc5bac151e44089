"""
Looks into trained runs: the probes of the papers, on any checkpoint of train.py.

    python analyze.py PROBE out/a [out/b ...] [--key=value ...]            # --help after PROBE lists its settings

    jacobian    what a block does to small changes of its input: singular values, stable rank [TMM, 5.3]
    sharpness   curvature of the loss in the weights: largest eigenvalue, trace, a slice [TMM, 6.1]
    entropy     how widely the heads of softmax attention look
    scalars     what each layer has learned for its step sizes, momenta, dampings
    balance     how far adam's, adamw's, rmsprop's preconditioner is from a multiple of the identity [TMM, 5.2]
    forgetting  fine-tunes on another corpus: what it gains there, loses here [TMM, 6.2]
    corpora     loss and perplexity on corpora that the run has not seen
    downstream  tasks of lm-evaluation-harness (needs lm_eval): --tasks=hellaswag,arc_easy
    curves      losses and rates over the steps, from metrics.jsonl

    python analyze.py compare [config/FILE.py] --cases=vanilla,tmm     # which is better, and by how much?
    python analyze.py speed [--templates=vanilla,tmm]      # time and memory of training and sampling
    python analyze.py dynamics                             # the theory: contraction of the templates, energies of the
                                                           # integrators, without any training

A run is a folder of train.py (its best.pt is read) or a checkpoint file. Several give one table and one figure. A probe
writes PROBE.json beside each checkpoint and, but for --plot=false, a PNG (with matplotlib; without it a line says that
there is none).
"""
import signal

if __name__ == "__main__":                                      # during the imports Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from numbers import Real
from typing import NamedTuple, Optional

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import train
from model import (EPS, GPT, INTEGRATORS, PARTICLES, TEMPLATES, GPTConfig, Scalars, Settings, SoftmaxAttention,
                   SoftmaxParticles, attention_weights, exp_scores, setting)
from prepare import (cli, die, load_tokenizer, lock, make_settings, need, or_die, own_folder, parse_args, read_settings,
                     split_args, write_atomic)
from train import reason

# ---------------------------------------------------------------------------------------------------------------------
# What probes share


@dataclass
class ProbeConfig(Settings):
    checkpoint: str = setting("best.pt", "which file of a run's folder")
    device: str = setting("auto", "'cpu', 'cuda', 'mps'; auto: cuda, else mps, else cpu")
    dtype: str = setting("float32", "'float32' or 'float64'", ("float32", "float64"))
    seed: int = setting(0, "of the batches and of random vectors, the same for every run", low=0, high=2 ** 63)
    plot: bool = setting(True, "draw a PNG")
    figure: Optional[str] = setting(None, "its path; None: PROBE.png beside the first run's checkpoint")


@dataclass
class DataConfig(ProbeConfig):
    dataset: Optional[str] = setting(None, "folder below data_dir whose val.bin is read; None: that of the training")
    data_dir: str = setting("data", "where the datasets are")
    block_size: Optional[int] = setting(None, "tokens in a sequence; None: the model's block_size", low=1)
    batch_size: int = setting(4, "sequences in a batch, which bounds the memory", low=1)


@dataclass
class BatchConfig(DataConfig):
    batches: int = setting(1, "how many batches", low=1)


class Run(NamedTuple):
    """A checkpoint that a probe looks at."""
    file: str
    model: GPT                                                  # in eval mode
    state: dict                                                 # what the file holds

    @property
    def device(self):
        return next(self.model.parameters()).device


def checkpoint_file(path, cfg):
    """The checkpoint that a run's folder or a file's path names. Exits (2) if it is not there."""
    file = path if os.path.isfile(path) else os.path.join(path, cfg.checkpoint)
    if not os.path.exists(file):
        die(f"no checkpoint {file}: train one first (python train.py), or name another (--checkpoint=last.pt)")
    return file


def load(file, cfg):
    """The Run of a checkpoint file, in cfg.dtype, with attention by its hand-written path."""
    model, state = train.load_checkpoint(file, train.pick_device(cfg.device))
    model.to(getattr(torch, cfg.dtype)).requires_grad_(False)
    model.fused_attention(False)
    return Run(file, model, state)


def open_val(run, cfg, dataset, seed=0):
    """The validation Split of a dataset that has the run's tokenizer, or exit (2)."""
    block_size, tokenizer = run.model.config.block_size, run.state["tokenizer"]
    T = cfg.block_size or block_size
    if T > block_size:
        die(f"block_size is {T}: the model's is {block_size}")
    val, meta = train.open_data(cfg.data_dir, dataset, T, val=seed)
    if meta["tokenizer"] != tokenizer:
        die(f"dataset {dataset} was prepared with the tokenizer {meta['tokenizer']}, the checkpoint's is {tokenizer}: "
            f"prepare it with --tokenizer={tokenizer} and another --out")
    return val


def read_batches(run, cfg, batches):
    """[(idx, targets)], each (batch_size, T): the same ones for every run with that tokenizer and seed."""
    val = open_val(run, cfg, cfg.dataset or run.state["config"]["dataset"], cfg.seed)
    count = cfg.batch_size * batches
    if count > val.blocks:
        die(f"batch_size x batches is {count}: {val.path} has {val.blocks} blocks of {val.T + 1} tokens")
    return [val.batch(i, cfg.batch_size, run.device) for i in range(0, count, cfg.batch_size)]


def inputs(model, modules, idx):
    """[args]: what the modules, given in the order in which they run, are called with when the model reads idx."""
    seen = []
    hooks = [module.register_forward_pre_hook(lambda module, args: seen.append(args)) for module in modules]
    with torch.no_grad():
        model.features(idx)
    for hook in hooks:
        hook.remove()
    return seen


def comma_separated(text):
    return [name.strip() for name in text.split(",")]


def progress(items, what):
    """The items, with a progress bar on a terminal."""
    return tqdm(items, desc=what, leave=False, disable=None)


def rademacher(like, generator):
    """Random signs in the shape of a tensor."""
    return torch.randint(2, like.shape, generator=generator).to(like) * 2 - 1


def mean_se(values):
    """(mean, standard error) of independent estimates."""
    values = torch.tensor(values, dtype=torch.float64)
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def print_table(rows, digits=4):
    """[{column: value}] as aligned text, in the order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cell = lambda v: f"{v:.{digits}g}" if isinstance(v, float) else "" if v is None else str(v)
    table = [columns] + [[cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    for first, *rest in table:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip())


@contextlib.contextmanager
def output(path):
    """write_atomic. Exits (2) if the file cannot be written."""
    errors = OSError, ValueError                                # ValueError: a path without a name
    with or_die(f"cannot write '{path}'", "name a place where it can be", errors), write_atomic(path) as f:
        yield f


def write_json(path, content):
    """content as strict JSON, numbers that are not finite as null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    with output(path) as f:
        f.write(json.dumps(finite, indent=1).encode())


def pyplot():
    """matplotlib's pyplot, for files. Exits (2) if it is missing."""
    os.environ["MPLBACKEND"] = "agg"                            # that of a notebook may not be there
    need("matplotlib", "a figure").use("Agg")
    from matplotlib import pyplot
    return pyplot


def can_draw(plot):
    """Whether to draw, given --plot: not without matplotlib, which a line then says."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        train.warn("no figure will be drawn: pip install matplotlib")
        return False
    return plot


STYLES = [dict(color=color, linestyle=line, marker=marker) for line, marker, color in zip(
    ("-", "--", "-.", ":") * 7, "os^vDP" * 5, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
                                               "#000000") * 4)]   # Okabe and Ito's, and told apart without them


def styled(items):
    """(item, its style) of what one figure compares."""
    return zip(items, itertools.cycle(STYLES))


def label_axes(ax, ylabel, xlabel="layer"):
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.3)
    if xlabel == "layer":
        ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def panels(*ylabels, xlabel="layer"):
    """A figure with an axes for each ylabel, side by side."""
    figure, axes = pyplot().subplots(1, len(ylabels), figsize=(1 + 3.6 * len(ylabels), 3.6), layout="constrained",
                                     squeeze=False)
    for ax, ylabel in zip(axes[0], ylabels):
        label_axes(ax, ylabel, xlabel)
    return figure, axes[0]


def draw_bars(ax, heights, errors=None):
    """For each name in {run: {name: height}} a bar of each run, with its error if {run: {name: error}} is given."""
    width, names = 0.8 / len(heights), list(dict.fromkeys(name for row in heights.values() for name in row))
    for i, ((run, row), style) in enumerate(styled(heights.items())):
        at = [names.index(name) + (i - (len(heights) - 1) / 2) * width for name in row]
        ax.bar(at, row.values(), width, yerr=errors and [errors[run].get(name, 0.0) for name in row], capsize=3,
               color=style["color"], hatch=("", "//", "..", "xx", "--", "oo")[i % 6], edgecolor="white", label=run)
    ax.set_xticks(range(len(names)), names)
    ax.axhline(0, color="black", linewidth=0.8)


def save_figure(figure, path):
    with output(path) as f:
        figure.savefig(f, format="png", dpi=100, bbox_inches="tight")
    print(f"wrote {path}")


# ---------------------------------------------------------------------------------------------------------------------
# jacobian


@dataclass
class JacobianConfig(DataConfig):
    batch_size: int = setting(1, "sequences in a batch; the Jacobian has batch_size x T x C rows", low=1)
    k: int = setting(64, "how many singular values", low=1)
    iterations: int = setting(4, "of the randomized block Krylov method", low=0)
    probes: int = setting(16, "random vectors for the Frobenius norm", low=1)
    exact: bool = setting(False, "form the whole Jacobian (small models)")


def products(f, x):
    """(V -> J V, V -> J^T V) for f's Jacobian J at x and the columns of V, float64 to float64, whatever the dtype in
    which f computes; several at a time where x is small, which adds little to the memory."""
    place, pullback = "cpu" if x.device.type == "mps" else x.device, vjp(f, x)[1]       # mps has no float64

    def columns(product):
        many = vmap(product, in_dims=1, out_dims=1, chunk_size=max(1, 2 ** 16 // x.numel()))
        return lambda V: many(V.to(x)).to(place, torch.float64)
    return (columns(lambda v: jvp(f, (x,), (v.view(x.shape),))[1].flatten()),
            columns(lambda v: pullback(v.view(x.shape))[0].flatten()))


def top_singular_values(f, x, k, iterations, generator, what=""):
    """(values, residuals, basis, images): the k largest singular values of f's Jacobian J at x, from below, by a
    randomized block Krylov method, which also separates clustered ones (Musco, Musco, arXiv 1504.05477); of each
    |J v - sigma u|, within which there is a singular value; its orthonormal basis (n, m) and J^T of that, in float64:
    float32 loses orthogonality where the spectrum is spread. Memory: 4 (iterations + 1) (k + 10) float64 vectors of
    x's size, and twice what a backward pass of f keeps."""
    J, Jt = products(f, x)
    Q = torch.randn(x.numel(), min(k + 10, x.numel()), dtype=torch.float64, generator=generator)
    basis = images = J(Q[:, :1])[:, :0]                         # orthonormal, and J^T of it; none as yet
    for _ in progress(range(iterations + 1), what):
        Q = J(Q)[:, :x.numel() - basis.size(1)]
        for _ in range(2):                                      # the second time against rounding
            Q = torch.linalg.qr(Q - basis @ (basis.T @ Q)).Q
        basis = torch.cat([basis, Q], dim=1)
        Q = Jt(Q)
        images = torch.cat([images, Q], dim=1)
        if basis.size(1) == x.numel():
            break
    v, S, W = torch.linalg.svd(images, full_matrices=False)     # J^T u = sigma v exactly, for u = basis W
    residuals = (J(v[:, :k]) - basis @ (W[:k].T * S[:k])).norm(dim=0)
    return S[:k], residuals, basis, images


def squared_norm(f, x, basis, images, probes, generator):
    """(|J|_F^2, its standard error): exactly within the basis, by Hutchinson's estimate outside of it."""
    Z = torch.stack([rademacher(x, generator).flatten() for _ in range(probes)], dim=1)
    JZ = products(f, x)[0](Z)
    mean, se = mean_se(((JZ - basis @ (basis.T @ JZ)) ** 2).sum(0).tolist())
    return (images ** 2).sum().item() + mean, se


def jacobian(run, cfg):
    """For each block J = dX_{l+1}/dX_l, auxiliary streams held fixed [TMM, 5.3]. Two things are called sigma_min^eff:
    sigma_k of the authors' code (k = 64), a direction that is amplified, and the paper's smallest singular value above
    a cutoff, sigma_min, the weakest gain, which is only there if exact. A persistence is the sum over layers of its
    log, persistence_k_residual that of the residuals relative to sigma_k. The singular values are exact if exact."""
    (idx, _), = read_batches(run, cfg, 1)
    blocks, generator = run.model.transformer.h, torch.Generator().manual_seed(cfg.seed)
    layers, spectra = [], []
    for i, (block, (x, s)) in enumerate(zip(blocks, inputs(run.model, blocks, idx))):
        if cfg.k > x.numel():
            die(f"k is {cfg.k}: a Jacobian of {x.numel()} rows has no more singular values than that")
        f = lambda x: block(x, s)[0]
        if cfg.exact:
            S = torch.linalg.svdvals(jacrev(f)(x).view(x.numel(), x.numel()).double())
            weakest, square, se = S[S > 1e-6 * S[0]][-1].item(), (S ** 2).sum().item(), 0.0
            S, residuals = S[:cfg.k], torch.zeros(cfg.k)
        else:
            S, residuals, basis, images = top_singular_values(f, x, cfg.k, cfg.iterations, generator, f"layer {i}")
            square, se = squared_norm(f, x, basis, images, cfg.probes, generator)
        S = S.tolist()
        layers.append(dict(layer=i, sigma_max=S[0], sigma_max_residual=residuals[0].item(), sigma_k=S[-1],
                           sigma_k_residual=residuals[-1].item(), spread=S[0] / S[-1],
                           stable_rank=square / S[0] ** 2, stable_rank_se=se / S[0] ** 2)
                      | (dict(sigma_min=weakest) if cfg.exact else {}))
        spectra.append(S)
    persistence = {f"persistence_{name}": sum(math.log(layer[f"sigma_{name}"]) for layer in layers)
                   for name in ("k", "min") if f"sigma_{name}" in layers[0]}
    persistence["persistence_k_residual"] = sum(layer["sigma_k_residual"] / layer["sigma_k"] for layer in layers)
    return dict(exact=cfg.exact, **persistence, best_val_loss=run.state.get("best_val_loss"), layers=layers,
                singular_values=spectra)


def draw_jacobian(results):
    k = len(next(iter(results.values()))["singular_values"][0])
    figure, axes = panels("largest singular value", f"singular value {k}", "stable rank", "spread",
                          "best validation loss")
    for (name, r), style in styled(results.items()):
        for ax, key in zip(axes, ("sigma_max", "sigma_k", "stable_rank", "spread")):
            ax.plot([layer[key] for layer in r["layers"]], markersize=4, label=name, **style)
            ax.set_yscale("log")
        axes[4].plot(r["persistence_k"], r["best_val_loss"], **style)
    axes[4].set_xlabel(f"persistence, the sum of log singular value {k}")
    axes[0].legend()
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# sharpness


@dataclass
class SharpnessConfig(BatchConfig):
    iterations: int = setting(50, "of Lanczos' method at most; each keeps a copy of the parameters", low=1)
    tolerance: float = setting(1e-2, "residual, relative to the eigenvalue, that ends it", low=0)
    probes: int = setting(10, "random vectors for the trace", low=1)
    points: int = setting(11, "losses along the slice", low=2)
    radius: float = setting(0.5, "its ends, in units of each tensor's norm", low=0)


def make_hvp(loss, params, batches):
    """v -> H v for the Hessian of the mean of loss(params, *batch) over the batches, forward over reverse; params and v
    are dicts. Memory: five times the parameters, and twice what a backward pass of one batch keeps."""
    def hvp(v):
        total = None
        for batch in batches:
            Hv = jvp(grad(lambda p: loss(p, *batch)), (params,), (v,))[1]
            total = Hv if total is None else {name: total[name] + Hv[name] for name in Hv}
        return {name: t / len(batches) for name, t in total.items()}
    return hvp


def dot(u, v):
    return sum((u[name] * v[name]).sum() for name in u)


def top_eigenvalue(hvp, v, iterations, tolerance):
    """(the eigenvalue of largest magnitude with its sign, |H y - lambda y| for its unit vector y, iterations), by
    Lanczos' method from v, with every new vector orthogonalised to all before, twice. Memory: a copy of the parameters
    for each iteration."""
    flat = lambda u: torch.cat([t.flatten() for t in u.values()])
    shaped = lambda u: {name: t.view(v[name].shape) for name, t in zip(v, u.split([t.numel() for t in v.values()]))}
    basis, T = [flat(v) / flat(v).norm()], torch.zeros(iterations + 1, iterations + 1, dtype=torch.float64)
    for i in progress(range(iterations), "Lanczos"):
        w = flat(hvp(shaped(basis[i]))).to(basis[0])            # torch makes 0-dim tangents float64
        T[i, i] = w @ basis[i]
        for _ in range(2):
            for q in basis:
                w = w - (w @ q) * q
        T[i, i + 1] = T[i + 1, i] = w.norm()
        values, vectors = torch.linalg.eigh(T[:i + 1, :i + 1])
        k = values.abs().argmax()
        value, residual = values[k].item(), (T[i, i + 1] * vectors[-1, k].abs()).item()
        if residual <= tolerance * abs(value) or i + 1 == w.numel():
            break
        basis.append(w / w.norm())
    else:
        print(f"Lanczos: lambda_max is {value:.4g} with a residual of {residual:.2g} after {iterations} iterations, "
              "more by --iterations", file=sys.stderr)
    return value, residual, i + 1


def trace(hvp, params, probes, generator):
    """(estimate, standard error) of tr H by Hutchinson's Rademacher vectors."""
    values = []
    for _ in progress(range(probes), "trace"):
        z = {name: rademacher(t, generator) for name, t in params.items()}
        values.append(dot(z, hvp(z)).item())
    return mean_se(values)


def random_like(params, generator):
    return {name: torch.randn(t.shape, generator=generator).to(t) for name, t in params.items()}


def losses_along(direction, steps, loss, params, batches):
    """The mean loss at params + step x direction, whose tensors are scaled to the norms of the params."""
    direction = {name: t * params[name].norm() / t.norm() for name, t in direction.items()}
    losses = []
    for step in progress(steps, "slice"):
        moved = {name: t + step * direction[name] for name, t in params.items()}
        losses.append(sum(loss(moved, *batch).item() for batch in batches) / len(batches))
    return losses


def sharpness(run, cfg):
    """Curvature of the loss at the weights [TMM, 6.1 and app. G]; lambda_max is the eigenvalue largest in magnitude."""
    batches = read_batches(run, cfg, cfg.batches)
    params = dict(run.model.named_parameters())                 # lists the tied head once
    loss = lambda p, idx, targets: functional_call(run.model, p, (idx, targets))[1]
    hvp, generator = make_hvp(loss, params, batches), torch.Generator().manual_seed(cfg.seed)
    value, residual, iterations = top_eigenvalue(hvp, random_like(params, generator), cfg.iterations, cfg.tolerance)
    tr, se = trace(hvp, params, cfg.probes, generator)
    steps = torch.linspace(-cfg.radius, cfg.radius, cfg.points, dtype=torch.float64).tolist()
    losses = losses_along(random_like(params, generator), steps, loss, params, batches)
    N = run.model.num_params()
    return dict(lambda_max=value, residual=residual, iterations=iterations, trace=tr, trace_se=se,
                trace_per_parameter=tr / N, trace_per_parameter_se=se / N, parameters=N,
                slice=dict(steps=steps, losses=losses))


def draw_sharpness(results):
    figure, (left, right) = panels("loss along a normalized direction", "trace / parameters",
                                   xlabel="step, in units of each tensor's norm")
    for (name, r), style in styled(results.items()):
        left.plot(r["slice"]["steps"], r["slice"]["losses"], markersize=4, **style,
                  label=f"{name}: eigenvalue {r['lambda_max']:.3g}")
    left.legend(fontsize="small")
    draw_bars(right, *({name: {"": r[key]} for name, r in results.items()}
                       for key in ("trace_per_parameter", "trace_per_parameter_se")))
    right.set_xlabel("")
    right.legend(fontsize="small")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# entropy, scalars


def attention_rows(attn, x):
    """The rows of softmax attention's weights, (B, H, T, T); of an integrator, those of its one averaged head."""
    if isinstance(attn, SoftmaxAttention):
        q, k, _ = attn.qkv(x)
        return attention_weights(q, k)
    q, k = attn.c_attn(x).split(x.size(-1), dim=-1)[:2]
    M = exp_scores(attn.scale * q @ k.mT, attn.causal)
    return (M / M.sum(-1, keepdim=True)).unsqueeze(1)


@torch.no_grad()
def entropy(run, cfg):
    """Mean entropy in nats of the rows of each head's attention, over batches and tokens; standard errors are those
    over sequences. None without such rows."""
    attns = [block.attn for block in run.model.transformer.h]
    if not isinstance(attns[0], (SoftmaxAttention, SoftmaxParticles)):
        return None
    found, batches = [], read_batches(run, cfg, cfg.batches)
    for idx, _ in batches:
        rows = (attention_rows(attn, args[0]) for attn, args in zip(attns, inputs(run.model, attns, idx)))
        found.append(torch.stack([torch.special.entr(P).sum(-1, dtype=torch.float64).mean(-1) for P in rows]))
    found, T = torch.cat(found, dim=1), batches[0][0].size(1)   # (layers, sequences, heads)
    layers = []
    for i, layer in enumerate(found):
        mean, se = mean_se(layer.mean(-1).tolist())
        heads = {f"head_{h}{end}": u for h, values in enumerate(layer.T.tolist())
                 for end, u in zip(("", "_se"), mean_se(values))}
        layers.append(dict(layer=i, entropy=mean, entropy_se=se, **heads))
    mean, se = mean_se(found.mean(dim=(0, 2)).tolist())
    uniform = math.lgamma(T + 1) / T                            # the mean of log 1 ... log T
    return dict(entropy=mean, entropy_se=se, uniform=uniform, layers=layers)


def draw_entropy(results):
    figure, (ax,) = panels("entropy of attention's rows, nats")
    for (name, r), style in styled(results.items()):
        ax.plot([layer["entropy"] for layer in r["layers"]], markersize=4, label=name, **style)
        for layer in r["layers"]:
            heads = [value for key, value in layer.items() if re.fullmatch(r"head_\d+", key)]
            ax.plot([layer["layer"]] * len(heads), heads, **style | dict(linestyle="", markersize=3, alpha=0.35))
    for uniform in {r["uniform"] for r in results.values()}:
        ax.axhline(uniform, color="grey", linestyle=":", label="uniform")
    ax.ticklabel_format(useOffset=False)
    ax.legend(fontsize="small")
    return figure


def scalars(run, cfg):
    """The learned scalars of every layer, after their transforms; None if there are none."""
    layers = []
    for i, block in enumerate(run.model.transformer.h):
        row = dict(layer=i)
        for kind, module in (("attn", block.attn_step), ("mlp", block.mlp_step), ("attn", block.attn)):
            if isinstance(module, Scalars):
                row.update({f"{kind}.{name}": value.item() for name, value in module.scalars().items()})
        layers.append(row)
    return dict(exact=True, layers=layers) if len(layers[0]) > 1 else None


def draw_grid(results):
    """An axes for each quantity of the layers' rows {layer, SUBSTEP.QUANTITY}, with errors where there is a
    SUBSTEP.QUANTITY_se; in each the style of a run, with filled markers for attention, hollow ones for the MLP."""
    rows = [row for r in results.values() for row in r["layers"]]
    names = sorted({key.split(".")[1] for row in rows for key in row if key != "layer" and not key.endswith("_se")})
    columns = min(4, len(names))
    figure, axes = pyplot().subplots(-(-len(names) // columns), columns, layout="constrained", squeeze=False,
                                     figsize=(max(6, 3.2 * columns), 0.5 + 2.8 * -(-len(names) // columns)))
    for ax in axes.flat[len(names):]:
        ax.axis("off")
    handles = {}
    for ax, name in zip(axes.flat, names):
        label_axes(ax, name)
        for (run, r), style in styled(results.items()):
            for step, fill in (("attn", {}), ("mlp", dict(markerfacecolor="white"))):
                key = f"{step}.{name}"
                points = [(row["layer"], row[key], row.get(f"{key}_se")) for row in r["layers"] if key in row]
                if points:
                    x, y, se = zip(*points)
                    handles[f"{run}, {step}"] = ax.errorbar(x, y, yerr=None if None in se else se, markersize=5,
                                                            capsize=2, **style | fill)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, fontsize="small")
    return figure


@torch.no_grad()
def balance(run, cfg):
    """How far the diagonal preconditioner P = 1 / (sqrt r + eps) of adam, adamw, rmsprop is from a multiple of the
    identity, in each layer's two substeps [TMM, 5.2 and app. E]: cv, its coefficient of variation over channels, and
    cosine, that between N(P u) and N(u), where u is m, in rmsprop g. Means over tokens; standard errors are those over
    sequences. None for other templates."""
    template = TEMPLATES.get(run.model.config.template)
    if template is None or "r" not in template.streams:
        return None
    blocks, found = run.model.transformer.h, []
    steps = [step for block in blocks for step in (block.attn_step, block.mlp_step)]
    for idx, _ in read_batches(run, cfg, cfg.batches):
        batch = []
        for step, (O, x, s, *_) in zip(steps, inputs(run.model, steps, idx)):
            *m, r = step(O, x, s)[1]
            P, u = 1 / (r.sqrt() + EPS), m[0] if m else O(x)    # (B, T, C)
            cosine = F.cosine_similarity(step.ln(P * u), step.ln(u), dim=-1)
            batch.append(torch.stack([P.std(-1, correction=0) / P.mean(-1), cosine]).double().mean(-1))
        found.append(torch.stack(batch))
    found, layers = torch.cat(found, dim=2), []                 # (substeps, 2, sequences)
    for i in range(len(blocks)):
        row = dict(layer=i)
        for kind, values in zip(("attn", "mlp"), found[2 * i:2 * i + 2].tolist()):
            for name, value in zip(("cv", "cosine"), map(mean_se, values)):
                row[f"{kind}.{name}"], row[f"{kind}.{name}_se"] = value
        layers.append(row)
    (cv, cv_se), (cosine, cosine_se) = map(mean_se, found.mean(0).tolist())
    return dict(cv=cv, cv_se=cv_se, cosine=cosine, cosine_se=cosine_se, layers=layers)


# ---------------------------------------------------------------------------------------------------------------------
# forgetting, corpora


@dataclass
class CorporaConfig(DataConfig):
    datasets: str = setting("wikitext103,lambada,c4", "folders below data_dir, by commas")
    batch_size: int = setting(8, "sequences in a batch, which bounds the memory", low=1)
    sequences: int = setting(10 ** 9, "at most how many of each; the default is all", low=1)


def losses_on(run, cfg, dataset):
    """([loss in nats per token], [number of sequences]) of the batches, over the first cfg.sequences of a dataset's
    val.bin, and whether these are all, by train.py's evaluation."""
    val = open_val(run, cfg, dataset, seed=None)
    run.model.fused_attention(True)                             # no derivatives here
    found = train.batch_losses(run.model, val, cfg.sequences, cfg.batch_size, train.autocast(run.device, "float32"))
    losses, counts = np.array(found, dtype=np.float64).T
    return losses, counts, cfg.sequences >= val.blocks


def batch_mean(losses, counts, whole):
    """(mean, its standard error by the spread of the batches: 0 if they are the whole)."""
    mean = np.average(losses, weights=counts)
    if whole or len(losses) < 2:
        return float(mean), 0.0 if whole else math.nan
    variance = counts @ (losses - mean) ** 2 / (len(losses) - 1) / counts.sum()
    return float(mean), math.sqrt(variance)


def corpora(run, cfg):
    """Zero-shot loss and perplexity on other corpora [TMM, 6.2], over every whole block of their val.bin: exact for
    the file, with standard errors (perplexity's to first order) if fewer sequences are read."""
    names = [name for name in comma_separated(cfg.datasets) if name]
    if not names:
        die(f"datasets is '{cfg.datasets}': name at least one")
    losses = {name: batch_mean(*losses_on(run, cfg, name)) for name in names}
    ppl = {name: math.exp(loss) if loss < 709 else math.inf for name, (loss, _) in losses.items()}
    found = losses | {f"{name} ppl": (ppl[name], ppl[name] * se if se else 0.0) for name, (_, se) in losses.items()}
    for mean, of in (("mean", list(losses.values())), ("mean ppl", [found[f"{name} ppl"] for name in losses])):
        found[mean] = statistics.fmean(u for u, _ in of), math.hypot(*(se for _, se in of)) / len(of)
    return {name + end: u for name, pair in found.items() for end, u in zip(("", " se"), pair)}


def draw_corpora(results):
    figure, (ax,) = panels("loss, nats per token", xlabel="")
    found = next(iter(results.values()))
    names = [name for name in found if f"{name} ppl" in found and name != "mean"]
    draw_bars(ax, *({run: {name: r[name + end] for name in names} for run, r in results.items()}
                    for end in ("", " se")))
    ax.legend(fontsize="small", loc="lower right")
    return figure


@dataclass
class ForgettingConfig(DataConfig):
    source: Optional[str] = setting(None, "dataset that may be forgotten; None: that of the training")
    target: str = setting("wikitext103", "dataset to fine-tune on")
    max_steps: int = setting(1000, "fine-tuning steps", low=1)
    step_sequences: int = setting(480, "sequences in a step", low=1)
    batch_size: int = setting(8, "sequences at once, at most", low=1)
    sequences: int = setting(1280, "validation sequences", low=1)


def forgetting(run, cfg):
    """Fine-tunes by train.py on the target: forgetting = source loss after - before, plasticity = target loss before -
    after [TMM, 6.2 and app. H], over the same sequences. The fine-tuned run is left in forgetting-TARGET beside the
    checkpoint."""
    datasets = cfg.source or run.state["config"]["dataset"], cfg.target
    out = os.path.join(os.path.dirname(run.file) or ".", f"forgetting-{cfg.target}")
    before = [losses_on(run, cfg, name) for name in datasets]
    settings = dict(
        init_from=run.file, out_dir=out, overwrite=True, dataset=cfg.target, data_dir=cfg.data_dir, optimizer="adamw",
        learning_rate=1e-4, scalar_lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.01, warmup_steps=50,
        schedule="cosine", min_lr_ratio=0.1, grad_clip=1, sam="off", max_steps=cfg.max_steps,
        step_sequences=cfg.step_sequences, batch_size=cfg.batch_size, eval_interval=cfg.max_steps,
        eval_sequences=cfg.sequences, seed=cfg.seed, device=cfg.device, sample_tokens=0)
    if cfg.block_size:
        settings["block_size"] = cfg.block_size
    train.main([f"--{key}={value}" for key, value in settings.items()])
    tuned = load(os.path.join(out, "last.pt"), cfg)
    if tuned.state["step"] < cfg.max_steps:
        die(f"fine-tuning stopped at step {tuned.state['step']} of {cfg.max_steps}: no result")
    result = {}
    for name, old, sign, gain in zip(("source", "target"), before, (1, -1), ("forgetting", "plasticity")):
        losses, counts, whole = losses_on(tuned, cfg, datasets[name == "target"])
        result[gain], result[f"{gain}_se"] = batch_mean(sign * (losses - old[0]), counts, whole)
        for when, of in (("before", old), ("after", (losses, counts, whole))):
            result[f"{name}_{when}"], result[f"{name}_{when}_se"] = batch_mean(*of)
    return result


def draw_forgetting(results):
    figure, axes = panels("forgetting (source loss gained), nats", xlabel="plasticity (target loss lost), nats")
    for (name, r), style in styled(results.items()):
        axes[0].errorbar(r["plasticity"], r["forgetting"], xerr=r["plasticity_se"], yerr=r["forgetting_se"], label=name,
                         **style | dict(linestyle=""))
    axes[0].legend()
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# downstream

FEWSHOT = {"hellaswag": 10, "arc_easy": 25}                     # [TMM]'s numbers; it reports acc_norm


@dataclass
class DownstreamConfig(ProbeConfig):
    tasks: str = setting("hellaswag,arc_easy", "names of tasks or groups of lm_eval, with commas")
    num_fewshot: Optional[int] = setting(None, "solved examples before each question; None: 10 in hellaswag, 25 in "
                                           "arc_easy, elsewhere the task's own number", low=0)
    limit: Optional[int] = setting(None, "only the first so many questions of a task; None: all", low=1)
    include_path: Optional[str] = setting(None, "a folder with YAML files of more tasks")
    batch_size: int = setting(16, "sequences in a batch", low=1)


def import_harness():
    """The package lm_eval, whole. Exits (2) if it is missing."""
    for part in ("api.model", "evaluator", "models.utils", "tasks"):
        need(f"lm_eval.{part}", "downstream")
    return need("lm_eval", "downstream")


@functools.cache
def task_manager(include_path):
    """lm_eval's index of its tasks and of those in the folder; its thousands of files take a while, so once."""
    return import_harness().tasks.TaskManager(include_path=include_path)


def windows(context, continuation, size):
    """[(context ids, continuation ids)], each of at most size + 1 ids, that score every id of the continuation once. Of
    a context, which is not empty, the last ids are read. A continuation above the size is cut as lm_eval cuts a rolling
    text, and reads the last id of the context only."""
    if 0 < len(continuation) <= size:
        return [(context[-(size + 1 - len(continuation)):], continuation)]
    utils = import_harness().utils
    return [utils.make_disjoint_window(w)
            for w in utils.get_rolling_token_windows(continuation, context[-1], size, context_len=1)]


@torch.no_grad()
def score(model, pairs, batch_size):
    """[(context ids, continuation ids)] -> [(log-likelihood in nats, whether greedy decoding says the same)]."""
    config, device = model.config, next(model.parameters()).device
    sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
    rows = [(i, *w) for i, pair in enumerate(pairs) for w in windows(*pair, config.block_size)]
    rows.sort(key=lambda row: -len(row[1] + row[2]))            # batches of like lengths, the largest first
    for k in progress(range(0, len(rows), batch_size), "likelihoods"):
        batch = rows[k:k + batch_size]                          # padded on the right: a causal model looks to the left
        idx = pad_sequence([torch.tensor((before + after)[:-1]) for _, before, after in batch], batch_first=True)
        for x, (i, before, after) in zip(model.features(idx.to(device)), batch):
            x, targets = x[len(before) - 1:][:len(after)], torch.tensor(after, device=device)
            logits = model.lm_head(x)[:, :config.tokenizer_size].float()
            sums[i] -= F.cross_entropy(logits, targets, reduction="sum").item()
            greedy[i] &= (logits.argmax(-1) == targets).all().item()
    return list(zip(sums, greedy))


def write(model, tokenizer, idx, settings):
    """Prompts (B, T) -> B texts, each of which ends before a string of until, before end-of-text or at max_gen_toks
    tokens. do_sample alone means a temperature of 1."""
    utils = import_harness().models.utils
    given = {key: value for key, value in settings.items() if value is not None}
    given = utils.normalize_gen_kwargs(dict(temperature=float(given.get("do_sample", False))) | given)
    known = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
    if unknown := [key for key in given if key not in known]:
        die(f"generation with {', '.join(unknown)}: a task can set {', '.join(known)} here")
    until, n, _, temperature, top_k, top_p = (given.get(key) for key in known)
    stops = [tokenizer.decode([tokenizer.eot]).decode()] + [stop for stop in until if stop]
    texts, ended = [b""] * len(idx), [False] * len(idx)         # bytes: a token may end within a character
    for token in model.next_tokens(idx, n, temperature, top_k, top_p):
        for b, t in enumerate(token[:, 0].tolist()):
            if not ended[b]:
                texts[b] += tokenizer.decode([t])
                ended[b] = any(stop.encode() in texts[b] for stop in stops)
        if all(ended):
            break
    return [utils.postprocess_generated_text(text.decode(errors="replace"), stops, None) for text in texts]


def generate(model, tokenizer, prompts, batch_size):
    """[(prompt ids, settings)] -> the text after each, in batches of one length and one settings: padding would be seen
    here. A text that outgrows the window goes on as in GPT.generate."""
    size, device = model.config.block_size, next(model.parameters()).device
    order = import_harness().models.utils.Collator(
        [(ids[-size:], settings) for ids, settings in prompts], group_by="gen_kwargs",
        group_fn=lambda prompt: (len(prompt[0]), repr(prompt[1])), sort_fn=lambda prompt: 0)    # no order within
    texts = []
    for batch in progress(list(order.get_batched(n=batch_size)), "texts"):
        idx = torch.tensor([ids for ids, _ in batch], device=device)
        texts += write(model, tokenizer, idx, batch[0][1])
    return order.get_original(texts)


def harness_model(model, tokenizer, batch_size):
    """A GPT as a model of lm_eval, in eval mode. Exits (2) if lm_eval is missing."""
    encode, eot = lambda text: tokenizer.encode(text).tolist(), tokenizer.eot
    model.eval()

    class Harness(import_harness().api.model.TemplateLM):
        """End-of-text stands before a text that nothing is before."""
        eot_token_id = eot

        def tok_encode(self, string, **_):
            return encode(string) or [eot]

        def _encode_pair(self, context, continuation):
            """lm_eval's cut, which gives the continuation the spaces that end the context. Where it leaves nothing to
            score, because the continuation merged into the context's last token ("Hello wor" + "ld"), all that differs
            from the context's own ids counts."""
            if not context.strip():
                return [eot], encode(context + continuation)
            before, after = super()._encode_pair(context, continuation)
            if not after:
                whole = encode(context + continuation)
                before = os.path.commonprefix([before, whole])
                after = whole[len(before):]
            return before or [eot], after

        def _loglikelihood_tokens(self, requests, **_):
            return score(model, [pair for _, *pair in requests], batch_size)

        def loglikelihood_rolling(self, requests, **_):
            pairs = [([eot], encode(*r.args)) for r in requests]
            return [total for total, _ in score(model, pairs, batch_size)]

        def generate_until(self, requests, **_):
            prompts = [(self.tok_encode(context), settings) for context, settings in (r.args for r in requests)]
            return generate(model, tokenizer, prompts, batch_size)

    return Harness()


def downstream(run, cfg):
    """{task: {metric: value, metric_stderr: its standard error, where lm_eval has one}}; metrics of a filter of lm_eval
    have its name after a comma. lm_eval sets the seeds of python, numpy and torch. Exits (2) for an unknown task, for
    data that cannot be had and for settings of generation that are not known here."""
    evaluate = import_harness().evaluator.simple_evaluate
    names = comma_separated(cfg.tasks)
    if cfg.include_path and not os.path.isdir(cfg.include_path):
        die(f"include_path is {cfg.include_path}: there is no such folder")
    manager = task_manager(cfg.include_path and os.path.abspath(cfg.include_path))
    for name in names:
        if name not in manager.all_tasks:
            die(f"unknown task '{name}': tasks takes names that lm_eval has, or a YAML file in include_path")
    harness, results = harness_model(run.model, load_tokenizer(run.state["tokenizer"]), cfg.batch_size), {}
    for name in names:
        fewshot = FEWSHOT.get(name) if cfg.num_fewshot is None else cfg.num_fewshot
        try:
            found = evaluate(harness, tasks=[name], num_fewshot=fewshot, limit=cfg.limit, task_manager=manager,
                             log_samples=False)
        except OSError as e:                                    # what datasets raises without a network or a file
            die(f"cannot read the data of {name} ({reason(e)}): connect to the network, or look at its YAML file")
        for task, row in found["results"].items():
            results[task] = {key.removesuffix(",none"): float(value) for key, value in row.items()
                             if "," in key and isinstance(value, Real)}
    return results


def draw_downstream(results):
    """An axes for the accuracies, acc_norm where a task has it, and one for each metric of the other tasks."""
    heights, errors = {}, {}                                    # {metric: {run: {task: value}}}
    for run, r in results.items():
        for task, row in r.items():
            metric = next((name for name in ("acc_norm", "acc", *row) if name in row), None)
            kind = "accuracy" if metric in ("acc_norm", "acc") else metric
            if metric:
                heights.setdefault(kind, {}).setdefault(run, {})[f"{task} {metric}"] = row[metric]
                errors.setdefault(kind, {}).setdefault(run, {})[f"{task} {metric}"] = row.get(f"{metric}_stderr", 0.0)
    figure, axes = panels(*heights or ["no metric"], xlabel="")
    for ax, kind in zip(axes, heights):
        draw_bars(ax, heights[kind], errors[kind])
        ax.legend(fontsize="small")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# curves


@dataclass
class CurvesConfig(Settings):
    out: str = setting("curves.png", "the figure")


def read_metrics(folder):
    """A run's metrics.jsonl as a table, steps by train_loss, val_loss and lr.GROUP. Exits (2) if it has none."""
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.exists(path):
        die(f"no {path}: name the out_dir of a run of train.py")
    errors = OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError      # of json and pandas
    with or_die(f"{path} is not a log of train.py", "name the out_dir of a run", errors):
        with open(path, encoding="utf-8") as f:
            table = pandas.json_normalize([json.loads(line) for line in f if line.endswith("\n")])
        table = table.astype(dict(step=int)).set_index("step")
        if "lr" in table:
            raise ValueError("lr is not {group: rate}")
        rates = [key for key in table if key.startswith("lr.")]
        return table.reindex(columns=["train_loss", "val_loss", *rates]).astype(float)


def curves(folders, cfg):
    """Loss curves of several runs, and below them the schedule of their rates, to one PNG; a table of the ends."""
    tables, rows = {folder: read_metrics(folder) for folder in folders}, []
    for folder, table in tables.items():
        val = table["val_loss"].dropna()
        rows.append(dict(run=os.path.basename(os.path.normpath(folder)), steps=int(table.index.max()),
                         **dict(best=val.min(), best_step=int(val.idxmin()), last=val.iloc[-1]) if len(val) else {}))
    print_table(rows, 5)
    if not can_draw(True):
        return
    figure, (top, bottom) = pyplot().subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1),
                                              layout="constrained")
    label_axes(top, "loss, nats per token", xlabel="")
    label_axes(bottom, "rate", xlabel="step")
    lines, groups, scale = dict(matrices="-", embeddings="--", norms=":", scalars="-."), {}, []
    for (row, table), style in styled(zip(rows, tables.values())):
        top.plot(table["train_loss"].dropna(), alpha=0.35, linewidth=1, color=style["color"])
        val = table["val_loss"].dropna()
        top.plot(val, markersize=4, markevery=max(1, len(val) // 15), **style,
                 label=row["run"] + (f", best {row['best']:.4f}" if "best" in row else ""))
        scale += val[val.index > val.index.min()].tolist()      # not the loss before the first step
        for key, rates in table.filter(like="lr.").items():
            group = key.removeprefix("lr.")
            line, = bottom.plot(rates.dropna(), linestyle=lines.get(group, "-"), color=style["color"], linewidth=1)
            groups.setdefault(group, line)
    if scale:
        margin = 0.05 * (max(scale) - min(scale)) or 0.1
        top.set_ylim(min(scale) - margin, max(scale) + margin)
    top.legend(title="validation (train: pale)")
    bottom.set_yscale("log")
    bottom.legend(groups.values(), groups, ncols=4, fontsize="small")
    save_figure(figure, cfg.out)


# ---------------------------------------------------------------------------------------------------------------------
# speed


@dataclass
class SpeedConfig(Settings):
    templates: str = setting("vanilla,tmm,adam,muon,soap", "templates or integrators, by commas; ratios are to the "
                                                           "first")
    attention: str = setting("softmax", "'softmax' or 'linear'")
    n_layer: int = setting(4, "blocks", low=1)
    n_head: int = setting(8, "heads", low=1)
    n_embd: int = setting(256, "channels", low=1)
    block_size: int = setting(256, "tokens in a sequence", low=1)
    vocab_size: int = setting(512, "vocabulary", low=1)
    batch_size: int = setting(8, "sequences in a batch", low=1)
    repeats: int = setting(9, "of each measurement", low=1)
    prompt: int = setting(1, "sampling: tokens to begin with", low=1)
    sample_tokens: int = setting(0, "sampling: new tokens; 0: training only", low=0)
    sample_batch: int = setting(1, "sampling: texts at once", low=1)
    device: str = setting("auto", "'cpu', 'cuda', 'mps'; auto: cuda, else mps, else cpu")
    dtype: str = setting("float32", "'float32' or 'bfloat16' (autocast)", ("float32", "bfloat16"))
    compile: bool = setting(False, "torch.compile")
    memory: bool = setting(True, "measure the peak memory of a training step too")
    out: str = setting("speed.json", "where the figures go")


def timed_model(template, cfg):
    """The model of one template at the shape of a SpeedConfig."""
    shape = dict(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, block_size=cfg.block_size)
    shape.update(vocab_size=cfg.vocab_size, template=template, attention=cfg.attention)
    return GPT(make_settings(GPTConfig, shape))


class Stepper:
    """A model, and what is timed of it: with batch_size, device, dtype and compile of cfg, a SpeedConfig or alike."""

    def __init__(self, model, cfg):
        self.cfg, self.device = cfg, train.pick_device(cfg.device)
        self.model, config = model.to(self.device), model.config
        self.run = torch.compile(self.model) if cfg.compile else self.model
        self.idx = torch.randint(config.vocab_size, (cfg.batch_size, config.block_size), device=self.device)

    def timed(self, kind):
        """Seconds of self.train() or self.sample()."""
        wait = lambda: self.device.type == "cpu" or torch.accelerator.synchronize(self.device)
        wait()
        began = time.perf_counter()
        getattr(self, kind)()
        wait()
        return time.perf_counter() - began

    def train(self):
        """Forward and backward, without the optimizer, which is the same for all."""
        with train.autocast(self.device, self.cfg.dtype):
            loss = self.run(self.idx, self.idx, return_logits=False)[1]
        loss.backward()
        self.model.zero_grad(set_to_none=True)

    def sample(self):
        prompt = self.idx[:1, :self.cfg.prompt].expand(self.cfg.sample_batch, -1)
        with train.autocast(self.device, self.cfg.dtype):
            self.model.generate(prompt, self.cfg.sample_tokens, temperature=0)


def resident(key):
    """MiB of memory that Linux counts for this process: VmRSS now, VmHWM at most so far."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(key))


def peak_memory(template, cfg):
    """MiB that a training step adds to a fresh process (CPU: its resident memory, CUDA: its allocations)."""
    stepper = Stepper(timed_model(template, cfg), cfg)
    if stepper.device.type == "cuda":
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        stepper.train()
        return (torch.cuda.max_memory_allocated() - base) / 2 ** 20
    whole, stepper.idx = stepper.idx, stepper.idx[:1, :8]
    stepper.train()                                             # what libraries allocate once
    base, stepper.idx = resident("VmRSS"), whole
    stepper.train()
    return resident("VmHWM") - base


def interleaved(steppers, kind, repeats):
    """(seconds, ratios) of each: the first one runs before and after every other, ratios are to the mean of the two."""
    for stepper in steppers:
        stepper.timed(kind)                                     # compiles, allocates
    found, before = [([], []) for _ in steppers], steppers[0].timed(kind)
    for _ in progress(range(repeats), kind):
        for stepper, (times, ratios) in zip(steppers, found):
            times.append(stepper.timed(kind))
            after = steppers[0].timed(kind)
            ratios.append(2 * times[-1] / (before + after))
            before = after
    return found


def speed(cfg):
    """Time of training and sampling, memory of training, for each template: medians over the repeats."""
    if os.path.isdir(cfg.out or "."):
        die(f"out is '{cfg.out}', a folder: name a file")
    if cfg.prompt > cfg.block_size:
        die(f"prompt is {cfg.prompt}: it must be at most block_size, {cfg.block_size}")
    rows = [dict(template=name) for name in comma_separated(cfg.templates)]
    if cfg.memory and (torch.cuda.is_available() or os.path.exists("/proc/self/status")):
        context = multiprocessing.get_context("forkserver")     # processes of their own, which begin with these:
        context.set_forkserver_preload(["torch", "pandas"])
        for row in rows:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                row["memory_MiB"] = round(pool.submit(peak_memory, row["template"], cfg).result(), 1)
    steppers = [Stepper(timed_model(row["template"], cfg), cfg) for row in rows]
    for kind, tokens in (("train", cfg.batch_size * cfg.block_size), ("sample", cfg.sample_batch * cfg.sample_tokens)):
        for row, (times, ratios) in zip(rows, interleaved(steppers, kind, cfg.repeats) if tokens else ()):
            seconds = statistics.median(times)
            row.update({f"{kind}_ms": round(1e3 * seconds, 3), f"{kind}_tokens_per_second": round(tokens / seconds, 1),
                        f"{kind}_ratio": round(statistics.median(ratios), 3),
                        f"{kind}_ratio_se": round(1.25 * mean_se(ratios)[1], 3)})      # a median's, about
    print(f"{steppers[0].device}, {torch.get_num_threads()} threads, {cfg.dtype}, "
          f"{'compiled' if cfg.compile else 'eager'}; {cfg.attention} attention, {cfg.n_layer} layers, "
          f"{cfg.n_head} heads, {cfg.n_embd} channels, {cfg.batch_size} x {cfg.block_size} tokens"
          + (f"; sampled {cfg.sample_batch} x {cfg.sample_tokens} after {cfg.prompt}" if cfg.sample_tokens else ""))
    print_table(rows)
    write_json(cfg.out, dict(probe="speed", settings=asdict(cfg), torch=torch.__version__,
                             threads=torch.get_num_threads(), rows=rows))


# ---------------------------------------------------------------------------------------------------------------------
# compare: which template is better, and by how much?


@dataclass
class CompareConfig(train.TrainConfig):
    """What is compared, and how; all other settings are those of train.py, for every run."""
    cases: str = setting("vanilla,tmm", "TEMPLATE or TEMPLATE:SETTING=VALUE:..., by commas; the first is the reference")
    seeds: int = setting(3, "runs of each case, at the seeds 1, 2, ...", low=1, high=1000)
    jobs: Optional[int] = setting(None, "runs at once; None: one a GPU, else one a core, with one thread each", low=1)
    repeats: int = setting(9, "of the measurement of a step's time", low=1)
    out: str = setting("out/compare", "folder of the runs and of compare.json, compare.md, compare.png")
    dry_run: bool = setting(False, "print the runs and an estimate of their time")
    plot: bool = setting(True, "draw compare.png")


RATES = ("learning_rate", "muon_lr", "scalar_lr")               # what tuning scales
OWN = (*GPTConfig.__dataclass_fields__, "h0_first_order", "h0_second_order", *RATES)     # what a case may set
GRID, TUNING_SEED = (0.5, 1.0, 2.0), 0                          # by these factors, at a seed that no result uses
GIVEN = ("template", "seed", "out_dir", "init_from", "overwrite", "strict")     # what a comparison sets for each run
FREE = (*GIVEN, "data_dir", "log_interval", "sample_tokens", "device", "wandb_log", "wandb_project")
                                                                # what a comparison that goes on may change


class Job(NamedTuple):
    """A run of train.py: a case at a seed, all peak rates times a factor."""
    case: str
    seed: int
    factor: float

    def __str__(self):
        return f"{self.case} " + (f"seed {self.seed}" if self.seed != TUNING_SEED else f"rates x{self.factor:g}")


def choose(tuning):
    """(the best factor, or None while there are more to try; these) of {factor: outcome of a tuning run}. The grid is
    extended while the best is at its edge, at most twice."""
    losses = {factor: math.inf if r["loss"] is None else r["loss"] for factor, r in tuning.items()}
    if missing := [factor for factor in GRID if factor not in losses]:
        return None, missing
    best = min(sorted(losses), key=losses.get)                  # the lowest, if all have diverged
    if len(losses) < len(GRID) + 2 and best in (min(losses), max(losses)):
        return None, [best * (2.0 if best > 1 else 0.5)]
    return best, []


def check_run(folder, settings):
    """Whether a folder has a run to go on with. Exits (2) if that is of other settings than these."""
    path = os.path.join(folder, "last.pt")
    if not os.path.exists(path):
        return False
    state, asked = train.read_file(path), asdict(make_settings(train.TrainConfig, settings))
    with train.reading(path):
        for name in asked:
            if (name not in FREE or name in ("template", "seed")) and state["config"][name] != asked[name]:
                die(f"{path} is of a run with {name} {state['config'][name]!r}, this comparison's has {asked[name]!r}: "
                    "name another --out, or move that folder away")
    return True


def outcome(folder, steps, max_bad_steps):
    """dict(loss, None if it has diverged, curve [[step, val_loss]], seconds) of a run that has ended, else None."""
    rows = []
    with contextlib.suppress(OSError):
        rows = [row for row, _ in train.read_log(folder)]
    curve = [[row["step"], row["val_loss"]] for row in rows if "val_loss" in row]
    diverged = len(rows) >= max_bad_steps and all("skipped" in row for row in rows[-max_bad_steps:])
    if not diverged and (not curve or curve[-1][0] < steps):
        return None
    seconds = max((row["seconds"] for row in rows if "seconds" in row), default=0.0)
    return dict(loss=None if diverged else curve[-1][1], curve=curve, seconds=seconds)


class Runs:
    """The runs of a comparison: which there are, what has come of them, which are still to be done. base: {setting:
    value} of train.py; seeds: {case: how many}; former: the cases of a compare.json, whose runs count as done."""

    def __init__(self, out, base, seeds, former):
        self.out, self.base, self.seeds = out, base, seeds
        self.configs = {case: make_settings(train.TrainConfig, self.settings(Job(case, 1, 1.0))) for case in seeds}
        self.running, self.failed = {}, {}                      # {job: (process, slot)}, {job: reason}
        self.results = {Job(case, TUNING_SEED, float(factor)): r for case, row in former.items()    # {job: outcome}
                        for factor, r in row["tuning"].items()}
        self.results |= {Job(case, int(seed), row["factor"]): r for case, row in former.items()
                         for seed, r in row["runs"].items()}

    def settings(self, job):
        """{setting: value} of train.py for a job. Tuning runs are a third as long, with their own whole schedule."""
        values = self.base | case_settings(job.case) | dict(seed=job.seed, out_dir=self.folder(job))
        for name in ("max_steps", "warmup_steps", "decay_start") if job.seed == TUNING_SEED else ():
            values[name] = values[name] and max(1, values[name] // 3)
        return values | {name: job.factor * values[name] for name in RATES}

    def folder(self, job):
        run = f"seed-{job.seed}" if job.seed != TUNING_SEED else f"rates-x{job.factor:g}"
        return os.path.join(self.out, re.sub(r"[^\w.=+-]", "-", job.case), run)

    def result(self, job):
        """A job's outcome, or None."""
        if job not in self.results:
            found = outcome(self.folder(job), self.settings(job)["max_steps"], self.base["max_bad_steps"])
            if found is None or not check_run(self.folder(job), self.settings(job)):
                return None
            self.results[job] = found
        return self.results[job]

    def tuning(self, case):
        """{factor: outcome} of a case's tuning runs that have ended."""
        found = {2.0 ** k: self.result(Job(case, TUNING_SEED, 2.0 ** k)) for k in range(-3, 4)}
        return {factor: r for factor, r in found.items() if r}

    def missing(self):
        """[(job, whether it can be begun)] of what has not ended: first the tuning, then the results seed by seed."""
        jobs = []
        for case, seeds in self.seeds.items():
            factor, more = choose(self.tuning(case))
            jobs += [(Job(case, TUNING_SEED, f), True) for f in more]
            results = [Job(case, seed, factor or 1.0) for seed in range(1, seeds + 1)]
            jobs += [(job, factor is not None) for job in results if factor is None or self.result(job) is None]
        return sorted(jobs, key=lambda item: item[0].seed)      # stable: within a seed in the order of the cases

    def begin(self, job, gpus):
        """A job in a process of its own, from its last checkpoint if it has one. Raises OSError."""
        folder, values = self.folder(job), self.settings(job)
        os.makedirs(folder, exist_ok=True)
        goes_on = check_run(folder, values)
        values.update(init_from="resume" if goes_on else "scratch", overwrite=not goes_on)
        slot = min(set(range(len(self.running) + 1)) - {slot for _, slot in self.running.values()})
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        env = dict(CUDA_VISIBLE_DEVICES=visible.split(",")[slot % gpus]) if gpus else dict(OMP_NUM_THREADS="1")
        env["PYTHONUNBUFFERED"] = "1"                           # for who looks into log.txt
        with open(os.path.join(folder, "log.txt"), "ab") as log:
            command = [sys.executable, train.__file__, *(f"--{key}={value}" for key, value in values.items())]
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | env)
        self.running[job] = process, slot

    def collect(self):
        """Takes in the runs that have ended; returns how many."""
        codes = {job: process.poll() for job, (process, _) in self.running.items()}
        ended = {job: code for job, code in codes.items() if code is not None}
        for job, code in ended.items():
            del self.running[job]
            if self.result(job) is None:
                with open(os.path.join(self.folder(job), "log.txt"), errors="replace") as f:
                    last = f.read().strip().rpartition("\n")[2]
                self.fail(job, f"killed by {signal.Signals(-code).name}" if code < 0 else last or f"exit code {code}")
        return len(ended)

    def fail(self, job, reason):
        self.failed[job] = reason
        tqdm.write(f"{job} failed: {reason}", file=sys.stderr)

    def run(self, jobs, gpus, report):
        """Does what is missing, so many jobs at once; calls report() when one has ended. One that fails does not end
        the others."""
        with tqdm(disable=None, bar_format="{desc}") as bar:
            try:
                while True:
                    if self.collect():
                        report()
                        if bar.disable:                         # no terminal
                            print(self.progress(self.missing(), jobs), file=sys.stderr, flush=True)
                    missing = self.missing()
                    todo = [job for job, ready in missing if ready and job not in self.running | self.failed]
                    free = (job for job in todo if not busy(self.folder(job)))      # not run by another command
                    for job in itertools.islice(free, jobs - len(self.running)):
                        try:
                            self.begin(job, gpus)
                        except OSError as e:                    # no place for its folder or log
                            self.fail(job, str(e))
                    if not self.running and not todo:
                        return
                    bar.set_description_str(self.progress(missing, jobs))
                    time.sleep(0.5)
            finally:                                            # what was begun goes on from its checkpoint next time
                for process, _ in self.running.values():
                    process.terminate()
                for process, _ in self.running.values():
                    process.wait()

    def progress(self, missing, jobs):
        steps = lambda which: sum(self.settings(job)["max_steps"] for job in which)
        pace = sum(r["seconds"] for r in self.results.values()) / max(1, steps(self.results))
        seconds = pace * steps(job for job, _ in missing) / jobs
        left = f"{timedelta(seconds=int(seconds))} left" if pace else "no estimate yet"
        return f"{len(self.results)} runs done, {len(missing)} to do, {left}; now {', '.join(map(str, self.running))}"


@functools.cache                                                # runs are asked for theirs twice a second
def case_settings(case):
    """{setting: value} of train.py that TEMPLATE:SETTING=VALUE:... names. Exits (2) for an unknown setting."""
    template, *rest = case.split(":")
    names = [word.partition("=")[0] for word in rest]
    if not template or not all("=" in word for word in rest) or len({"template", *names}) <= len(names):
        die(f"cases: {case!r} is not of the form TEMPLATE or TEMPLATE:SETTING=VALUE:..., each setting once")
    for name in names:
        if name in train.TrainConfig.__dataclass_fields__ and (name not in OWN or name == "block_size"):
            die(f"cases: {case!r} sets {name}, which must be the same for all cases"
                + f": give it as --{name}" * (name not in GIVEN))
    return read_settings(train.TrainConfig, [f"--template={template}", *(f"--{word}" for word in rest)])


def busy(folder):
    """Whether a process trains in a folder."""
    with contextlib.suppress(OSError), open(os.path.join(folder, ".lock"), "r+") as f:
        return lock(f) is False
    return False


def interval(values):
    """dict(n, mean, sd, half: of the 95% t interval, p: two-sided, of the mean being 0) of independent values."""
    stats, n = need("scipy.stats", "compare"), len(values)
    found = dict(n=n, mean=statistics.fmean(values) if n else None, sd=None, half=None, p=None)
    if n > 1:
        sd = statistics.stdev(values)
        found.update(sd=sd, half=stats.t.ppf(0.975, n - 1) * sd / math.sqrt(n))
        found["p"] = float(stats.ttest_1samp(values, 0.0).pvalue) if sd else float(found["mean"] == 0)
    return found


def holm(p):
    """{name: p} -> {name: p after Holm's correction for their number}."""
    adjusted, highest = {}, 0.0
    for k, name in enumerate(sorted(p, key=p.get)):
        adjusted[name] = highest = max(highest, min(1.0, (len(p) - k) * p[name]))
    return adjusted


def loss_at(curve, step):
    """The validation loss at a step, linear between evaluations; the first or last one outside of them."""
    steps, losses = zip(*((s, loss) for s, loss in curve if loss is not None))
    return float(np.interp(step, steps, losses))


def reached(curve, loss):
    """The step at which a curve is first at most loss, linear between evaluations; None if it never is."""
    for (a, before), (b, after) in itertools.pairwise(curve[:1] + curve):
        if after <= loss:
            return a + (b - a) * (before - loss) / (before - after) if before > loss else a
    return None


def statistics_of(cases, steps):
    """Adds to each case {"runs": {seed: outcome}, "ratio": of step times or None}, of which the first is the reference,
    what its runs come to: loss, diverged (how many), and against the reference, seed by seed, difference (with p and
    p_holm), equal_time (where the time of the reference's run is used up) and curve [[step, mean, half]]; share, of the
    tokens at which its mean loss is as low as the reference's at the end."""
    first, reference = next(iter(cases)), {}
    for case, row in cases.items():
        runs = {seed: r for seed, r in row["runs"].items() if r["loss"] is not None}
        reference = runs if case == first else reference
        pairs = [(runs[seed], reference[seed]) for seed in runs if seed in reference]
        at = lambda step: interval([loss_at(a["curve"], step) - loss_at(b["curve"], step) for a, b in pairs])
        evaluated = [step for step, _ in next(iter(runs.values()))["curve"]] if runs else []
        mean = [[step, statistics.fmean(loss_at(r["curve"], step) for r in runs.values())] for step in evaluated]
        goal = cases[first]["loss"]["mean"] if case != first else mean and mean[-1][1]
        step = reached(mean, goal) if mean and goal is not None else None
        row.update(
            loss=interval([r["loss"] for r in runs.values()]), diverged=len(row["runs"]) - len(runs),
            difference=interval([a["loss"] - b["loss"] for a, b in pairs]),
            share=None if step is None else step / steps,
            curve=[[step, *map(at(step).get, ("mean", "half"))] for step in evaluated if pairs],
            equal_time=interval([loss_at(a["curve"], steps / row["ratio"]) - b["loss"] for a, b in pairs]
                                if row["ratio"] else []))
    p = holm({case: row["difference"]["p"] for case, row in cases.items() if row["difference"]["n"] > 1
              and case != first})
    for case, row in cases.items():
        row["difference"]["p_holm"] = p.get(case)
    return cases


def compared(runs, ratios, meta):
    """{case: what its runs have come to, as compare.json holds it}, the reference first."""
    cases = {}
    for case, seeds in runs.seeds.items():
        with torch.device("meta"):
            model = train.make_model(runs.configs[case], meta)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        tuning = runs.tuning(case)
        factor = choose(tuning)[0]
        found = {seed: factor and runs.result(Job(case, seed, factor)) for seed in range(1, seeds + 1)}
        cases[case] = dict(
            seeds=seeds, parameters=sum(sizes.values()), ratio=ratios.get(case), tuning=tuning, factor=factor,
            parameters_outside=sum(n for name, n in sizes.items() if not name.endswith(("wte.weight", "wpe.weight"))),
            runs={seed: r for seed, r in found.items() if r})
    return statistics_of(cases, runs.base["max_steps"])


def step_ratios(runs, cases, meta, repeats):
    """{case: seconds of a training step without the optimizer}, {case: their ratio to the reference's}, by the method
    of `speed`. cases: the reference and what it is compared to."""
    steppers = []
    for cfg in map(runs.configs.get, cases):
        device = train.pick_device(cfg.device)
        cfg = replace(cfg, dtype=train.pick_dtype(cfg.dtype, device), batch_size=train.micro_batches(0, cfg, 0, 1)[1],
                      compile=device.type == "cuda" if cfg.compile is None else cfg.compile)
        steppers.append(Stepper(train.make_model(cfg, meta), cfg))
    found = interleaved(steppers, "train", repeats)
    micro = [cfg.step_sequences // stepper.cfg.batch_size for stepper in steppers]
    seconds = [n * statistics.median(times) for n, (times, _) in zip(micro, found)]
    ratios = [1.0] + [statistics.median(ratios) for _, ratios in found[1:]]
    return dict(zip(cases, seconds)), dict(zip(cases, ratios))


def pm(r, spread="half"):
    """An interval's mean and half width (or sd) as text."""
    if r["mean"] is None:
        return ""
    return f"{r['mean']:.4f}" + (f" +- {r[spread]:.4f}" if r[spread] is not None else "")


def comparison_rows(cases):
    """compare.md's table as [{column: text}]."""
    rows = []
    for case, row in cases.items():
        loss, difference, p = row["loss"], row["difference"], row["difference"]["p_holm"]
        rows.append({
            "case": case, "parameters": f"{row['parameters']:,}",
            "without embeddings": f"{row['parameters_outside']:,}",
            "rates": row["factor"] and f"x{row['factor']:g}",
            "loss, mean +- sd": pm(loss, "sd"), "runs": str(loss["n"]),
            "diverged": str(row["diverged"]), "difference": pm(difference),
            "pairs": str(difference["n"]), "p (Holm)": p is not None and f"{p:.2g}",
            "step time": row["ratio"] and f"{row['ratio']:.2f}", "at equal time": pm(row["equal_time"]),
            "share of tokens": row["share"] is not None and f"{row['share']:.0%}"})
    return [{name: text or "" for name, text in row.items()} for row in rows]


def compare_md(cases, base, failed):
    rows, reference = comparison_rows(cases), next(iter(cases))
    text = (f"Validation loss in nats per token after {base['max_steps']:,} steps of {base['step_sequences']} x "
            f"{base['block_size']} tokens of {base['dataset']}. Differences are to {reference}, seed by seed, with "
            "95% t intervals; p by paired t-tests, after Holm's correction. At equal time: when the time of the "
            "reference's run is used up, or at the end if that is earlier. Share of tokens: at which the reference's "
            "final loss is reached.\n\n")
    if all(row["loss"]["n"] < 2 for row in cases.values()):
        text += "One seed: there are no intervals.\n\n"
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0]), *(" | ".join(row.values()) for row in rows)]
    text += "".join(f"| {line} |\n" for line in lines)
    return text + "".join(f"\nFailed: {job}: {why}\n" for job, why in failed.items())


def draw_compare(cases, tokens):
    """Left the differences to the reference at the end, sorted; right over the tokens. tokens: of a step."""
    reference, *others = cases
    others = sorted((case for case in others if cases[case]["difference"]["n"]),
                    key=lambda case: -cases[case]["difference"]["mean"])
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(13, 1.6 + 0.28 * max(10, len(others))),
                                              layout="constrained")
    label_axes(left, "", xlabel=f"loss minus that of {reference} at the end, nats per token")
    label_axes(right, f"loss minus that of {reference}", xlabel="tokens")
    left.axvline(0, color="black", linewidth=1)
    right.axhline(0, color="black", linewidth=1)
    for i, (case, style) in enumerate(styled(others)):
        d, curve = cases[case]["difference"], cases[case]["curve"]
        left.errorbar(d["mean"], i, xerr=d["half"], capsize=3, color=style["color"], marker=style["marker"])
        x, mean = [step * tokens for step, *_ in curve], [m for _, m, _ in curve]
        right.plot(x, mean, label=case, markersize=3, markevery=max(1, len(x) // 10), linewidth=1, **style)
        if curve[0][2] is not None:
            right.fill_between(x, [m - h for _, m, h in curve], [m + h for _, m, h in curve], alpha=0.12,
                               color=style["color"], linewidth=0)
    left.set_yticks(range(len(others)), others)
    late = [abs(m) + (h or 0.0) for case in others for step, m, h in cases[case]["curve"] if m is not None
            and step >= 0.2 * cases[case]["curve"][-1][0]]
    right.set_ylim(*(1.1 * max(late, default=1.0) * sign for sign in (-1, 1)))
    if others:
        right.legend(fontsize="x-small", ncols=2)
    return figure


def read_former(path, base):
    """What compare.json holds of a comparison that goes on; exits (2) if a setting is another one now."""
    if not os.path.exists(path):
        return dict(cases={})
    errors = OSError, ValueError, KeyError, TypeError, AttributeError
    with or_die(f"{path} is not of a comparison", "name another --out", errors):
        with open(path, encoding="utf-8") as f:
            former = json.load(f)
        old = dict(former["settings"])
        for row in former["cases"].values():
            int(row["seeds"]), float(row["ratio"] or 1), float(row["factor"] or 1)
            for key, r in (row["tuning"] | row["runs"]).items():
                float(key), float(r["loss"] or 0), float(r["seconds"])
                if not all(int(step) >= 0 and float(loss or 0) >= 0 for step, loss in r["curve"]):
                    raise ValueError(f"a curve of {key}")
    if former["torch"] != torch.__version__:
        train.warn(f"{path} is of torch {former['torch']}, this is {torch.__version__}")
    for name, value in base.items():
        if name not in FREE and old.get(name, value) != value:
            die(f"{name} is {value!r}: the comparison in {os.path.dirname(path)} has {old[name]!r}, leave it out or "
                "name another --out")
    return former


def compare(argv):
    """Trains every case at several seeds, after tuning its rates, and says how the losses differ from the first one's.
    Goes on with what is in cfg.out: runs that have ended stay, others are resumed, cases and seeds may be added. Exits
    (1) if a run has failed."""
    default = os.path.join(os.path.dirname(__file__), "config", "compare.py")
    values = read_settings(CompareConfig, argv, default_config=default)
    base = {f.name: values.pop(f.name, f.default) for f in fields(train.TrainConfig)}
    cfg = make_settings(CompareConfig, values)
    for name in sorted(dict(split_args(argv)).keys() & set(GIVEN)):
        die(f"{name}: a comparison sets it for each run; leave it out (see --cases, --seeds, --out)")
    if base["wandb_log"]:
        need("wandb", "wandb_log")
    meta = train.open_data(base["data_dir"], base["dataset"], base["block_size"], train=0, val=0)[-1]
    with contextlib.nullcontext() if cfg.dry_run else own_folder(cfg.out, "out"):
        go_on(cfg, base, meta)


def go_on(cfg, base, meta):
    """The comparison in cfg.out."""
    path, plot = os.path.join(cfg.out, "compare.json"), can_draw(cfg.plot)
    former = read_former(path, base)
    seeds = dict.fromkeys(comma_separated(cfg.cases), cfg.seeds)
    seeds |= {case: max(row["seeds"], seeds.get(case, 0)) for case, row in former["cases"].items()
              if case in seeds or row["tuning"]}                # not one that could never be begun
    runs = Runs(cfg.out, base, seeds, former["cases"])
    gpus = torch.cuda.device_count() if train.pick_device(base["device"]).type == "cuda" else 0
    jobs = cfg.jobs or gpus or os.cpu_count()
    if not gpus:
        torch.set_num_threads(1)                                # for the times
    if cfg.dry_run:
        return dry_run(runs, jobs, meta)
    ratios = {case: row["ratio"] for case, row in former["cases"].items()}
    if ratios.get(next(iter(seeds))) != 1:                      # they are to another reference
        ratios = {}

    def report():
        cases = compared(runs, ratios, meta)
        write_json(path, dict(probe="compare", settings=base, torch=torch.__version__, cases=cases,
                              failed={str(job): why for job, why in runs.failed.items()}))
        with output(path.replace(".json", ".md")) as f:
            f.write(compare_md(cases, base, runs.failed).encode())
        return cases

    cases = report()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # runs its finally
    done = len(runs.results)
    runs.run(jobs, gpus, report)
    timed = [case for case in seeds if runs.tuning(case)]       # those that could be begun
    if next(iter(seeds)) in timed and (len(runs.results) > done or not all(map(ratios.get, timed))):
        ratios.update(step_ratios(runs, timed, meta, cfg.repeats)[1])
        cases = report()
    print_table(comparison_rows(cases))
    print(f"wrote {path} and .md")
    if plot:
        save_figure(draw_compare(cases, base["step_sequences"] * base["block_size"]), path.replace(".json", ".png"))
    if runs.failed:
        sys.exit(1)


def dry_run(runs, jobs, meta):
    """Prints what is still to be run, and about how long that takes."""
    seconds, jobs_left = step_ratios(runs, runs.seeds, meta, 1)[0], [job for job, _ in runs.missing()]
    steps = [runs.settings(job)["max_steps"] for job in jobs_left]
    times = [n * seconds[job.case] for n, job in zip(steps, jobs_left)]
    for job, n, time_ in zip(jobs_left, steps, times):
        print(f"{job}: {n:,} steps, {timedelta(seconds=int(time_))}")
    total = timedelta(seconds=int(sum(times) / jobs))
    print(f"{len(times)} runs or more, if a grid of rates has to grow: about {total} with {jobs} at once, and what "
          "starts, optimizer and evaluations take")


# ---------------------------------------------------------------------------------------------------------------------
# dynamics


@dataclass
class DynamicsConfig(Settings):
    kappa: float = setting(100.0, "condition number of the quadratic token energy", low=1.0001)
    kernel: str = setting("softmax", "of the particles: 'softmax' or 'linear'", ("softmax", "linear"))
    particles: int = setting(64, "how many", low=1)
    dim: int = setting(8, "their dimension", low=2)
    h: float = setting(0.1, "step size", low=1e-6)
    steps: int = setting(250, "steps", low=1)
    r: float = setting(3.0, "damping r/t + m: --m=0 for r/t alone", low=0)
    m: float = setting(0.1, "damping r/t + m: --r=0 for a constant one", low=0)
    seed: int = setting(0, "of the particles", low=0, high=2 ** 63)
    plot: bool = setting(True, "draw a PNG")
    out: str = setting("dynamics", "files: .json and .png")


def contraction(template, kappa, scalars):
    """The factor by which a layer of a template without LayerNorm shrinks its state (the spectral radius of its
    Jacobian) for the energy sum_i lambda_i x_i^2 / 2 with lambda from 1 to kappa. The oracle is -gradient, for vanilla
    times its best step 2 / (kappa + 1)."""
    size = 2 / (kappa + 1) if template == "vanilla" else 1.0
    values = torch.logspace(0, math.log10(kappa), 9, dtype=torch.float64)
    scalars = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    row, oracle, norm = TEMPLATES[template], lambda u: -size * values * u, lambda u: u
    layer = lambda state: torch.cat(row.step(oracle, norm, 1, *state.split(1), **scalars))
    state = torch.zeros(1 + len(row.streams), 9, dtype=torch.float64)   # rows: x, the streams
    J = jacrev(layer)(state).reshape(state.numel(), state.numel())
    return torch.linalg.eigvals(J).abs().max().item()


def contraction_rates(kappa):
    """[row]: the measured contraction of a template and the known rate. Scalars are the best ones; yurii's and tmm's
    best look-ahead mu on a quadratic is none, which makes them heavy ball."""
    k, c = math.sqrt(kappa), math.sqrt(3 * kappa + 1)
    momentum, gamma = ((k - 1) / (k + 1)) ** 2, 4 / (k + 1) ** 2
    fast, nesterov = (k - 1) / (k + 1), (c - 2) / (c + 2)
    cases = [  # template, scalars, rate
        ("vanilla", {}, (kappa - 1) / (kappa + 1), "(kappa - 1) / (kappa + 1)"),
        ("hb", dict(beta=momentum, gamma=gamma), fast, "(sqrt kappa - 1) / (sqrt kappa + 1)"),
        ("yurii", dict(beta=momentum, gamma=gamma, mu=0.0), fast, "(sqrt kappa - 1) / (sqrt kappa + 1), mu = 0"),
        ("yurii", dict(beta=nesterov, gamma=4 / c ** 2, mu=nesterov), 1 - 2 / c,
         "1 - 2 / sqrt(3 kappa + 1), Nesterov's mu = beta"),
        ("tmm", dict(beta=momentum, gamma=gamma / 2, mu=0.0, nu=2.0), fast,
         "(sqrt kappa - 1) / (sqrt kappa + 1), mu = 0")]
    return [dict(template=template, measured=contraction(template, kappa, scalars), rate=rate, formula=formula)
            for template, scalars, rate, formula in cases]


def sphere(X):
    return X * math.sqrt(X.size(-1)) / X.norm(dim=-1, keepdim=True)


@torch.no_grad()
def particles(kernel, V):
    """(attention without a mask, the energy of positions X (1, n, C)): with softmax -(1/2n^2) sum_ij exp(x_i^T A x_j),
    A = I / C; with linear -(1/2n) sum_i x_i^T V x_i, A = I / C."""
    C = len(V)
    options = dict(symp_force="hamiltonian", symp_b="identity") if kernel == "softmax" else {}
    config = GPTConfig(template="presymp_euler", attention=kernel, n_embd=C, n_head=1, **options)
    attn, I = PARTICLES[kernel](config, with_force=True).double(), torch.eye(C, dtype=torch.float64)
    attn.causal = False
    if kernel == "softmax":
        attn.c_attn.weight.copy_(torch.cat([I / math.sqrt(C), I]))      # times the scale 1 / sqrt(C)
        return attn, lambda X: -torch.exp(X @ X.mT / C).mean().item() / 2
    attn.c_a.weight.copy_(I / C)
    attn.c_v.weight.copy_(V)
    return attn, lambda X: -(X @ V * X).sum(-1).mean().item() / 2


@torch.no_grad()
def flow(name, attn, X, cfg, on_sphere=True):
    """The positions, one more than steps, of particles from rest at X under an integrator; "first order" is attention
    itself, X' = X + h F(G) with the force G of particles at rest. On the sphere positions return to it after each step,
    and momenta to its tangents."""
    h, r, m, t = (torch.tensor(value, dtype=torch.float64) for value in (cfg.h, cfg.r, cfg.m, 1.0))
    Y, past = torch.zeros_like(X), None
    yield X
    for _ in range(cfg.steps):
        velocity, force = attn(X)
        if name == "first order":
            v = velocity(force(Y))                              # at Y = 0
        else:
            damping = dict(a=1 - h * (r / t + m), damping_r=r, damping_m=m)
            damping = {key: value for key, value in damping.items() if key in INTEGRATORS[name].scalars}
            v, Y, past = INTEGRATORS[name].step(velocity, force, Y, t, past, h, h, **damping)
        X, t = X + h * v, t + h
        if on_sphere:
            X = sphere(X)
            Y = Y - X * (X * Y).mean(-1, keepdim=True)
        yield X


def particle_energies(cfg):
    """{integrator or 'first order': energies} of particles that begin at random on the sphere of radius sqrt(dim), with
    V = diag(1 .. dim) / dim."""
    generator = torch.Generator().manual_seed(cfg.seed)
    attn, energy = particles(cfg.kernel, torch.diag(torch.arange(1, cfg.dim + 1, dtype=torch.float64) / cfg.dim))
    X = sphere(torch.randn(1, cfg.particles, cfg.dim, dtype=torch.float64, generator=generator))
    return {name: [energy(X) for X in flow(name, attn, X, cfg)] for name in ("first order", *INTEGRATORS)}


def gaussians(cfg):
    """{flow: [(time, positions (n, 2), their covariance, affine)]} of linear attention's particles in the plane, from a
    Gaussian, under V = -diag(1, 1/4): positions stay an affine image of the first ones [SYMP, 4.2], here a linear one
    as their mean is 0; affine is the largest distance to it, rounding."""
    generator = torch.Generator().manual_seed(cfg.seed)
    attn, _ = particles("linear", -torch.diag(torch.tensor([1.0, 0.25], dtype=torch.float64)))
    first = torch.randn(cfg.particles, 2, dtype=torch.float64, generator=generator)
    first = (first - first.mean(0)) @ first.new_tensor([[0.6, 0.8], [-0.8 / 3, 0.6 / 3]])   # deviations 1, 1/3, turned
    found = {}
    for name in ("first order", "conformal_euler"):
        path = itertools.islice(flow(name, attn, first[None], cfg, on_sphere=False), 0, None, max(1, cfg.steps // 4))
        path = list(path)
        if not all(X.isfinite().all() for X in path):
            die(f"h is {cfg.h:g}: the particles of {name} diverge, name a smaller one")
        images = [(X, first @ torch.linalg.lstsq(first, X).solution) for X, in path]
        found[name] = [(i * max(1, cfg.steps // 4) * cfg.h, X, X.T @ X / len(X), (X - image).abs().max().item())
                       for i, (X, image) in enumerate(images)]
    return found


def draw_dynamics(rates, energies, pictures, cfg):
    figure, axes = panels(f"rate ^ layer, kappa = {cfg.kappa:g}",
                          f"mean energy, {cfg.kernel} kernel", *["x2"] * len(pictures))
    axes[0].set_yscale("log")
    for i, (row, style) in enumerate(styled(rates)):            # lines may coincide, so their markers do not
        label = f"{row['template']}: {row['measured']:.4f} = {row['formula']}"
        axes[0].plot([row["measured"] ** k for k in range(100)], label=label, markevery=(4 * i, 20), **style)
    axes[1].set_xlabel(f"evaluations of the kernel, one a step of {cfg.h:g}")
    for (name, e), style in styled(energies.items()):
        axes[1].plot(e, label=name, markevery=max(1, len(e) // 8), **style)
    turns = torch.linspace(0, 2 * math.pi, 100, dtype=torch.float64)
    circle = 2 * torch.stack([turns.cos(), turns.sin()])        # two standard deviations
    for ax, (name, picture) in zip(axes[2:], pictures.items()):
        ax.set(xlabel="x1", title=f"{name}, linear kernel", aspect="equal")
        for (time_, X, covariance, _), style in styled(picture):
            values, vectors = torch.linalg.eigh(covariance)
            ax.plot(*(vectors * values.clamp(min=0).sqrt() @ circle), label=f"t = {time_:.3g}",
                    **style | dict(marker=""))
            ax.plot(*X.T, **style | dict(linestyle="", markersize=2))
    axes[0].legend(fontsize="x-small", loc="lower left", bbox_to_anchor=(0, 1))
    axes[1].legend(fontsize="x-small")
    for ax in axes[2:]:
        ax.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def dynamics(cfg):
    """The theory without training: contraction of the templates on a quadratic energy, energies of the integrators,
    Gaussians under linear attention."""
    rates, energies, pictures = contraction_rates(cfg.kappa), particle_energies(cfg), gaussians(cfg)
    print_table(rates)
    print()
    marks = sorted({0, cfg.steps // 10, cfg.steps // 2, cfg.steps})
    print_table([dict(dynamics=name, **{f"energy after {n}": e[n] for n in marks}) for name, e in energies.items()])
    print()
    rows = [dict(gaussian=name, time=time_, var_1=C[0, 0].item(), var_2=C[1, 1].item(), cov=C[0, 1].item(),
                 not_affine=affine) for name, picture in pictures.items() for time_, _, C, affine in picture]
    print_table(rows)
    write_json(f"{cfg.out}.json", dict(probe="dynamics", settings=asdict(cfg), rates=rates, energies=energies,
                                       gaussians=rows))
    if can_draw(cfg.plot):
        save_figure(draw_dynamics(rates, energies, pictures, cfg), f"{cfg.out}.png")


# ---------------------------------------------------------------------------------------------------------------------
# The command


class Probe(NamedTuple):
    """What `python analyze.py NAME` runs. If it reads checkpoints, run(Run, cfg) gives the result for one of them, None
    if it says nothing about it, and draw({label: result}) the figure of all. Others print and write by themselves: what
    reads nothing is run(cfg), what reads folders run(words of the command line, cfg), what reads the settings of
    train.py run(command line)."""
    run: Callable
    config: type
    draw: Optional[Callable] = None
    reads: str = "checkpoints"
    digits: int = 4                                             # of its tables


PROBES = {
    "jacobian": Probe(jacobian, JacobianConfig, draw_jacobian),
    "sharpness": Probe(sharpness, SharpnessConfig, draw_sharpness),
    "entropy": Probe(entropy, BatchConfig, draw_entropy, digits=7),
    "scalars": Probe(scalars, ProbeConfig, draw_grid),
    "balance": Probe(balance, BatchConfig, draw_grid),
    "forgetting": Probe(forgetting, ForgettingConfig, draw_forgetting),
    "corpora": Probe(corpora, CorporaConfig, draw_corpora),
    "downstream": Probe(downstream, DownstreamConfig, draw_downstream),
    "curves": Probe(curves, CurvesConfig, reads="folders"),
    "compare": Probe(compare, CompareConfig, reads="settings"),
    "speed": Probe(speed, SpeedConfig, reads="nothing"),
    "dynamics": Probe(dynamics, DynamicsConfig, reads="nothing"),
}


def numbers(result):
    """A row of the numbers in a probe's result, those of downstream's {task: {metric: value}} included."""
    row = {}
    for key, value in result.items():
        inner = value if isinstance(value, dict) else {"": value}
        row.update({f"{key} {name}".rstrip(): v for name, v in inner.items() if isinstance(v, (int, float))})
    return row


def print_results(results, digits):
    """{label: result} as tables: the layers of each, then a row for each."""
    for label, result in results.items():
        if "layers" in result:
            print(label)
            print_table(result["layers"], digits)
            print()
    rows = [dict(run=label, **numbers(result)) for label, result in results.items()]
    if len(rows[0]) > 1:
        print_table(rows, digits)


def read_checkpoints(name, paths, cfg):
    """A probe on each checkpoint: PROBE.json beside it, a table, a figure of all."""
    probe, results, plot = PROBES[name], {}, can_draw(cfg.plot)
    files = [checkpoint_file(path, cfg) for path in paths]
    labels = [os.path.basename(os.path.dirname(os.path.abspath(file))) for file in files]
    labels = labels if len(set(labels)) == len(labels) else files
    for file, label in zip(files, labels):
        run = load(file, cfg)
        result = probe.run(run, cfg)
        if result is None:
            config = run.model.config
            train.warn(f"{name} says nothing about {file}, of template {config.template} with {config.attention} "
                       "attention")
            continue
        results[label] = result
        folder, base = os.path.split(file)
        stem = os.path.splitext(base)[0]
        write_json(os.path.join(folder, f"{name}.json" if stem == "best" else f"{name}-{stem}.json"), dict(
            probe=name, checkpoint=file, step=run.state["step"], model=run.state["model_config"], settings=asdict(cfg),
            results=result))
    if not results:
        die(f"{name} applies to none of these runs: name others")
    print_results(results, probe.digits)
    if plot:
        save_figure(probe.draw(results), cfg.figure or os.path.join(os.path.dirname(files[0]), f"{name}.png"))


def main():
    name, *argv = sys.argv[1:] or [None]
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name not in PROBES:
        die(f"{f'unknown probe {name}' if name else 'no probe'}: name one of {', '.join(PROBES)}")
    probe = PROBES[name]
    if probe.reads == "settings":
        return probe.run(argv)
    cfg = parse_args(probe.config, argv, configs=False)
    words = [word for key, word in split_args(argv) if key is None]
    if words and probe.reads == "nothing":
        die(f"{name} reads no run: leave out {words[0]}")
    if not words and probe.reads != "nothing":
        die(f"no run: python analyze.py {name} OUT_DIR ...")
    if probe.reads == "checkpoints":
        read_checkpoints(name, words, cfg)
    elif probe.reads == "nothing":
        probe.run(cfg)
    else:
        probe.run(words, cfg)


if __name__ == "__main__":
    cli(main)
