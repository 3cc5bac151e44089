"""
Trains any variant of model.py, on one device or under torchrun.

    python train.py                                            # config/demo.py: a few minutes on two CPU cores
    python train.py config/ts.py --template=muon               # a recipe, with one setting changed
    torchrun --nproc_per_node=8 train.py config/owt.py         # one node, eight GPUs
    python train.py --init_from=resume --out_dir=out/ts-muon   # goes on with an interrupted run

Arguments are config files (plain assignments) and --key=value or --key value; a later one wins. Without a config file
config/demo.py is read first. Writes best.pt, last.pt and metrics.jsonl into out_dir.
"""
import signal

if __name__ == "__main__":                                      # during the imports Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import functools
import json
import math
import os
import pickle
import re
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import ClassVar, NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, INTEGRATORS, TEMPLATES, GPTConfig, setting
from prepare import (DATASETS, OFFLINE, SIZES, cli, die, id_dtype, load_tokenizer, make_settings, need, or_die,
                     own_folder, padded, parse_args, prepare, read_settings, split_args, write_atomic)

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass
class TrainConfig(GPTConfig):
    """A model's settings (GPTConfig), of which the dataset gives the vocabulary's, and those of its training."""
    vocab_size: ClassVar[None]
    tokenizer_size: ClassVar[None]
    h0: Optional[float] = setting(None, "integrators: where the learned step sizes start; None: one of the next two",
                                  low=1e-6, high=100, fixed=True)
    h0_first_order: float = setting(0.1, "that of the Euler integrators", low=1e-6, high=100, fixed=True)
    h0_second_order: float = setting(0.1, "that of presymp_ab2 and presymp_etd_ab2", low=1e-6, high=100, fixed=True)
    # data
    dataset: str = setting("tinystories", "folder of train.bin, val.bin and meta.json below data_dir", fixed=True)
    data_dir: str = setting("data", "where the datasets are")
    out_dir: Optional[str] = setting(None, "where best.pt, last.pt and metrics.jsonl go; None: out/RECIPE-TEMPLATE, "
                                           "followed by what else the command line says of the model")
    overwrite: bool = setting(False, "start anew in an out_dir that already holds a run, which is lost")
    init_from: str = setting("scratch", "'scratch'; 'resume': go on with out_dir's last.pt; or weights to begin "
                                        "with: a checkpoint of this project, of nanoGPT or of Momentum Streams' "
                                        "authors (a path, or hub:OWNER/REPO/FILE), or 'gpt2', 'gpt2-medium', ...")
    strict: bool = setting(True, "weights to begin with must fit the model exactly; false: what fits is taken")
    # batches
    step_sequences: int = setting(480, "sequences in a step, shared by all processes", low=1, fixed=True)
    batch_size: int = setting(8, "sequences that a process takes at once, at most; what does not fit is accumulated",
                              low=1)
    max_steps: int = setting(10_000, "optimizer steps", low=0, high=10 ** 9)
    seed: int = setting(42, "of the weights, the data order and dropout", low=0, high=2 ** 63, fixed=True)
    # optimizer
    optimizer: str = setting("muon", "'muon' (matrices in blocks; AdamW for the rest) or 'adamw'", ("muon", "adamw"),
                             fixed=True)
    muon_lr: float = setting(0.02, "peak rate of Muon; a matrix of A x B moves by it times sqrt(max(1, A/B)), that is "
                                   "torch's adjust_lr_fn='original'", low=0)
    learning_rate: float = setting(6e-4, "peak rate of AdamW", low=0)
    scalar_lr: float = setting(3e-3, "peak rate of AdamW for the learned scalars", low=0)
    weight_decay: float = setting(0.1, "of AdamW on embeddings and matrices", low=0)
    beta1: float = setting(0.9, "of AdamW", low=0, high=0.9999)
    beta2: float = setting(0.95, "of AdamW", low=0, high=0.9999)
    grad_clip: float = setting(1.0, "global gradient norm; 0: off", low=0)
    max_bad_steps: int = setting(10, "stop after so many steps in a row with a loss or gradient that is not finite",
                                 low=1)
    schedule: str = setting("cosine", "of the rates after a linear warmup: 'cosine', or 'wsd': flat, then linear",
                            ("cosine", "wsd"))
    warmup_steps: int = setting(1000, "linear warmup", low=0)
    decay_start: Optional[int] = setting(None, "wsd: where the decay begins; None: with the last sixth of the run",
                                         low=0)
    min_lr_ratio: float = setting(0.1, "rate at the end of the schedule, relative to the peak", low=0, high=1)
    sam: str = setting("off", "sharpness-aware minimization: 'on', or 'decay': in the decay of wsd only (SAWD)",
                       ("off", "on", "decay"))
    sam_rho: float = setting(0.05, "length of its ascent step", low=0)
    # evaluation and logging
    eval_interval: int = setting(100, "steps between evaluations", low=1)
    eval_sequences: int = setting(1280, "validation sequences, the same ones each time and for every seed", low=1)
    log_interval: int = setting(10, "steps between log lines", low=1)
    sample_tokens: int = setting(0, "length of the text sampled at the end", low=0)
    # system
    device: str = setting("auto", "'cpu', 'cuda', 'mps'; auto: cuda, else mps, else cpu")
    dtype: str = setting("auto", "'bfloat16' (autocast, and Muon's iteration) or 'float32'; auto: bfloat16 where the "
                                 "hardware has it", ("auto", "bfloat16", "float32"))
    compile: Optional[bool] = setting(None, "torch.compile; None: on cuda only")
    wandb_log: bool = setting(False, "also log to Weights & Biases (needs the package wandb)")
    wandb_project: str = setting("momentum-streams", "its project there; the run is named after out_dir")

    def __post_init__(self):
        for name, owner in self.idle().items():                 # no error, so that --template can be swept
            warn(f"{name} is {getattr(self, name)!r}: {owner} has no use for it")
            setattr(self, name, getattr(type(self), name))
        super().__post_init__()


def kept(f):
    """Whether a resumed run must keep this field of TrainConfig: what the model is, and what is marked."""
    return f.name in GPTConfig.__dataclass_fields__ or f.metadata.get("fixed")


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Split:
    """The token file of one split, cut into blocks of block_size + 1 tokens. Block number i of the training run is a
    pure function of (seed, i): an epoch visits each block once in a seeded order, and starts at a seeded offset, by
    which the blocks may be one less. With seed None they are all that the file has, from its first token on."""

    def __init__(self, path, meta, block_size, seed):
        self.path, self.dtype, self.tokenizer_size = path, meta["dtype"], meta["tokenizer_size"]
        self.T, self.seed = block_size, seed
        with or_die(f"cannot read {path}", "is it there, and readable for you?"):
            self.file = open(path, "rb")                        # stays the same if the dataset is prepared anew
        self.bytes = os.fstat(self.file.fileno()).st_size
        self.size = self.bytes // np.dtype(self.dtype).itemsize
        room = 0 if seed is None else block_size                # as many blocks for every offset
        self.blocks = max(1, (self.size - room) // (block_size + 1))
        self.order = functools.lru_cache(maxsize=2)(self._order)

    def _order(self, epoch):
        rng = np.random.default_rng([self.seed or 0, epoch])
        offset = 0 if self.seed is None else rng.integers(min(self.T, self.size - self.blocks * (self.T + 1)) + 1)
        return offset + rng.permutation(self.blocks) * (self.T + 1)

    def offsets(self, first, count):
        """Where blocks first ... first + count - 1 of the run begin in the file."""
        return [int(self.order(i // self.blocks)[i % self.blocks]) for i in range(first, first + count)]

    def batch(self, first, count, device):
        """Blocks first ... first + count - 1 as inputs and targets, each (count, T) int64 on the device."""
        if os.fstat(self.file.fileno()).st_size != self.bytes:
            die(f"{self.path} has been overwritten while it was read: prepare it again, and resume")
        data = np.memmap(self.file, self.dtype, "r")            # mapped anew: a kept map grows as its pages are read
        block = np.stack([data[i:i + self.T + 1] for i in self.offsets(first, count)]).astype(np.int64)
        if block.max() >= self.tokenizer_size:
            die(f"{self.path} holds id {block.max()}, meta.json says tokenizer_size {self.tokenizer_size}: prepare it "
                "again")
        block = torch.from_numpy(block)
        if device.type == "cuda":
            block = block.pin_memory().to(device, non_blocking=True)
        else:
            block = block.to(device)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def micro_batches(step, cfg, rank, world):
    """([the first block of each micro-batch that a process takes of a step], blocks in each): the largest divisor of
    its share up to batch_size. All of them together are the step_sequences blocks of the step."""
    share = cfg.step_sequences // world
    size = max(n for n in range(1, min(cfg.batch_size, share) + 1) if share % n == 0)
    begin = step * cfg.step_sequences + rank * share
    return list(range(begin, begin + share, size)), size


def load_meta(folder):
    """meta.json of a prepared dataset, checked against its token files. Exits (2) if it is missing or torn."""
    name = os.path.basename(folder)
    remedy = f"python prepare.py {name if name in DATASETS and name != 'text' else 'text FILE...'} --out={folder}"
    try:
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        size = SIZES[meta["tokenizer"]]
        if (meta["dtype"], meta["tokenizer_size"], meta["vocab_size"]) != (id_dtype(size), size, padded(size)):
            raise ValueError("dtype, tokenizer, tokenizer_size or vocab_size in meta.json is wrong")
        for split in ("train", "val"):
            size, item = os.path.getsize(os.path.join(folder, f"{split}.bin")), np.dtype(meta["dtype"]).itemsize
            if size != meta[f"{split}_tokens"] * item:
                raise ValueError(f"{split}.bin has {size} bytes, not {meta[f'{split}_tokens']} x {item}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        die(f"no usable dataset in {folder} ({reason(e)}): make it with {remedy}")
    return meta


def open_data(data_dir, dataset, block_size, **seeds):
    """(a Split for each name and seed in seeds, such as train=42, ..., meta). A dataset that needs no network is made
    where it is missing. Exits (2) where it cannot be used."""
    folder = os.path.join(data_dir, dataset)
    if dataset in OFFLINE and not os.path.exists(os.path.join(folder, "meta.json")) and local_rank() == 0:
        prepare(dataset, out=folder)
    barrier()
    meta = load_meta(folder)
    for split in seeds:
        if meta[f"{split}_tokens"] < block_size + 1:
            die(f"{folder}/{split}.bin has {meta[f'{split}_tokens']} tokens: block_size {block_size} needs at least "
                f"{block_size + 1}, name a smaller block_size or prepare more text")
    return *(Split(os.path.join(folder, f"{split}.bin"), meta, block_size, seed) for split, seed in seeds.items()), meta


# ---------------------------------------------------------------------------------------------------------------------
# Processes and devices


def reason(e):
    """An exception in about 200 characters of one line."""
    return f"{type(e).__name__}: {textwrap.shorten(str(e), 200, placeholder=' ...')}" if str(e) else type(e).__name__


def warn(message):
    """One line on stderr, once a node, for what may be meant."""
    if local_rank() == 0:
        print(f"warning: {message}", file=sys.stderr)


def local_rank():
    rank = os.environ.get("LOCAL_RANK", "0")
    return int(rank) if rank.isdecimal() else die(f"LOCAL_RANK is '{rank}': unset it, or start with torchrun")


def barrier():
    if dist.is_initialized():
        dist.barrier()


def all_sum(t):
    """The sum of a tensor over all processes."""
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


def pick_device(name):
    """A torch.device; 'auto' is cuda, else mps, else cpu. Exits (2) if there is no such device here."""
    torch.set_flush_denormal(True)                              # soap makes some: an Intel CPU's step 2.4 s -> 1.5 s
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        die(f"device is '{name}': it must be auto, cpu, cuda or mps")
    if name == "cuda" and 0 < torch.cuda.device_count() <= local_rank():
        die(f"this process is number {local_rank()} of its node, which has {torch.cuda.device_count()} GPUs: start as "
            "many with --nproc_per_node")
    try:
        device = torch.device(f"cuda:{local_rank()}" if name == "cuda" else name)
        torch.zeros(1, device=device)
        return torch.device("cpu") if device.type == "cpu" else device      # 'cpu:3' is the same
    except (RuntimeError, AssertionError) as e:
        die(f"device is '{name}': it cannot be used here ({reason(e)}), try --device=auto")


def init_processes(cfg):
    """(device, rank, world): this process's. Exits (2) if the processes cannot share a step evenly."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if any(name in os.environ for name in TORCHRUN[:3]) and missing:
        die(f"the environment has {' and '.join(name for name in TORCHRUN if name not in missing)} but not "
            f"{', '.join(missing)}: start with torchrun, which sets them, or unset them all")
    device = pick_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not missing:
        wait = timedelta(hours=3)                               # rank 0 may be busy with data or a disk for long
        with or_die("cannot join the other processes", "start all of them with torchrun", (ValueError, RuntimeError)):
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=wait)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if cfg.step_sequences % world:
        die(f"step_sequences is {cfg.step_sequences}: it must be a multiple of the number of processes, {world}")
    return device, rank, world


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")       # the variables that it sets


def pick_dtype(name, device):
    """'bfloat16' or 'float32'; 'auto' is bfloat16 where the device has matrix units for it."""
    if name != "auto":
        return name
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # with avx512_bf16 alone a product takes 1.6 times as long as in float32
        fast = device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False)
    return "bfloat16" if fast else "float32"


def autocast(device, dtype):
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def compile_model(model, x, y, amp, asked):
    """The model compiled and run once on a batch. Where that does not work its error, if it was asked for, else the
    model itself, with a warning."""
    try:
        compiled = torch.compile(model, fullgraph=True)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), amp:
            compiled(x, y, return_logits=False)[1].backward()
    except Exception as e:
        if asked:
            raise
        print(f"warning: torch.compile does not work here, running without it ({reason(e)})", file=sys.stderr)
        compiled = model
    model.zero_grad(set_to_none=True)
    return compiled


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


def freeze_unused(model):
    """[names] of the parameters on which no loss depends, such as a scalar of the last layer that only a later layer
    would feel. They require no gradient from here on: of all others optimizers, DDP and checkpoints expect one."""
    idx = torch.zeros(1, min(2, model.config.block_size), dtype=torch.long, device=model.lm_head.weight.device)
    model(idx, idx, return_logits=False)[1].backward()
    unused = {name: p for name, p in model.named_parameters() if p.grad is None}
    for p in unused.values():
        p.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    return list(unused)


def param_groups(model):
    """{name: parameters}: matrices (2-D, inside the blocks), embeddings (the tied head among them), norms (gains and
    biases), scalars (*_raw). Each parameter that is not frozen is in exactly one."""
    groups = dict(matrices=[], embeddings=[], norms=[], scalars=[])
    for name, p in model.named_parameters():                    # lists the tied head once, as wte
        kind = ("scalars" if name.endswith("_raw") else "norms" if p.ndim == 1 else
                "matrices" if name.startswith("transformer.h.") else "embeddings")
        if p.requires_grad:
            groups[kind].append((name, p))
    return groups


def make_optimizers(model, cfg, device):
    """[AdamW] or [Muon, AdamW] as in [TMM, D.3]. Every group keeps its peak rate as base_lr."""
    groups = param_groups(model)
    rates = dict(matrices=(cfg.learning_rate, cfg.weight_decay), embeddings=(cfg.learning_rate, cfg.weight_decay),
                 norms=(cfg.learning_rate, 0.0), scalars=(cfg.scalar_lr, 0.0))
    optimizers = []
    if cfg.optimizer == "muon" and groups["matrices"]:
        matrices = [dict(params=groups.pop("matrices"), name="matrices", base_lr=cfg.muon_lr)]
        optimizers.append(torch.optim.Muon(matrices, lr=cfg.muon_lr, weight_decay=0.0, momentum=0.95, nesterov=True,
                                           adjust_lr_fn="original"))
    optimizers.append(torch.optim.AdamW(
        [dict(params=params, name=name, base_lr=rates[name][0], weight_decay=rates[name][1])
         for name, params in groups.items() if params],
        lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=device.type in ("cpu", "cuda")))
    return optimizers


class Float32Muon(TorchFunctionMode):
    """Inside it Tensor.bfloat16() is a float32 copy, so torch's Muon, which iterates in bfloat16, iterates in float32:
    exact to the order of summation, and much faster on a CPU that lacks bfloat16."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


def decay_start(cfg):
    """The step at which the decay of wsd begins."""
    return cfg.max_steps - cfg.max_steps // 6 if cfg.decay_start is None else cfg.decay_start


def schedule(step, cfg):
    """The multiplier of every rate at a step: linear warmup, then to min_lr_ratio at max_steps by a cosine, or (wsd)
    flat until decay_start and linear from there ([TMM, D.3])."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.schedule == "wsd":
        begin = decay_start(cfg)
        return 1 - (1 - cfg.min_lr_ratio) * max(0, step - begin) / max(1, cfg.max_steps - begin)
    progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def ascend(params, rho):
    """SAM's ascent: theta <- theta + rho g / |g|, the norm over all parameters. Drops the gradients and returns the
    values before, which undo it exactly. (Foret et al., arXiv 2010.01412; [TMM, 6.1])"""
    before = [p.clone() for p in params]
    scale = rho / (torch.nn.utils.get_total_norm([p.grad for p in params]) + 1e-12)
    for p in params:
        p += scale * p.grad
        p.grad = None
    return before


@torch.no_grad()
def restore(params, before):
    for p, old in zip(params, before):
        p.copy_(old)


def flops_per_token(config):
    """FLOPs of one training token, forward and backward, as torch counts them: matrix products, nothing masked."""
    with torch.device("meta"):
        model, idx = GPT(config), torch.zeros(1, config.block_size, dtype=torch.long)
    model.fused_attention(False)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    return counter.get_total_flops() / config.block_size


def peak_flops(device, dtype):
    """The device's dense peak in FLOPs a second, or None where we do not know it."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
              "A40": 150e12, "A10G": 70e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}     # vendors' bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and checkpoints


@torch.no_grad()
def batch_losses(model, split, sequences, batch_size, amp, rank=0, world=1):
    """[(mean loss in nats per token, number of sequences)] of the batches of a process, over the first sequences of the
    split, at most all. The model is in eval mode meanwhile."""
    training, device = model.training, next(model.parameters()).device
    n = min(sequences, split.blocks)
    size, losses = min(batch_size, n), []
    model.eval()
    for first in range(rank * size, n, world * size):
        x, y = split.batch(first, size, device)
        y[n - first:] = -1                                      # a last batch of the same shape, in part not counted
        with amp:
            losses.append((model(x, y, return_logits=False)[1], min(size, n - first)))
    model.train(training)
    return [(loss.item(), count) for loss, count in losses]


def evaluate(model, split, sequences, batch_size, amp, rank=0, world=1):
    """Mean loss in nats per token over the first sequences of the split, at most all, shared by all processes."""
    losses = batch_losses(model, split, sequences, batch_size, amp, rank, world)
    device = next(model.parameters()).device
    place = "cpu" if device.type == "mps" else device           # which has no float64
    total = torch.tensor(math.fsum(loss * count for loss, count in losses), dtype=torch.float64, device=place)
    return all_sum(total).item() / min(sequences, split.blocks)


def named_state(optimizer):
    """[(name, parameter)] of an optimizer, in the order of its state_dict."""
    return [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"])]


def optimizer_state(optimizers):
    """{parameter's name: its state}, over all optimizers."""
    return {name: o.state[p] for o in optimizers for name, p in named_state(o) if p in o.state}


def load_optimizer_state(optimizers, saved):
    """The reverse. Raises ValueError if the parameters' names, or what is kept of one, are not the same."""
    names = [name for o in optimizers for name, _ in named_state(o)]
    if saved and set(names) != set(saved):
        raise ValueError(f"optimizer state is missing or unknown for {brief(set(names) ^ set(saved))}")
    for o in optimizers:
        state = o.state_dict()
        for i, (name, p) in enumerate(named_state(o)):
            if name in saved:
                if not saved[name] or any(t.shape not in (p.shape, ()) for t in saved[name].values()):
                    raise ValueError(f"the optimizer state of {name} is empty or has another shape")
                state["state"][i] = saved[name]
        o.load_state_dict(state)


def save(path, state):
    remedy = "free the disk or name another out_dir; the file before is intact"
    with or_die(f"cannot save {path}", remedy, (OSError, RuntimeError)), write_atomic(path) as f:
        torch.save(state, f)


def refuse(path, detail):
    die(f"{path} is not a checkpoint of this project ({detail}): name another file")


@contextlib.contextmanager
def reading(path):
    """Exits (2) if what a file holds is not what the block looks for. No model is built within: whoever has broken
    model.py is to see the traceback."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        refuse(path, reason(e))


def read_file(path):
    """What torch.save has put into a file. Exits (2) if that is not a dict of tensors and plain values."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        die(f"no checkpoint {path}: train one first (python train.py) or name its folder with --out_dir")
    except OSError as e:
        die(f"cannot read {path} ({e}): name a file that can be read")
    except Exception as e:                                      # whatever a bad file provokes
        refuse(path, "no tensors and plain values" if isinstance(e, pickle.UnpicklingError) else reason(e))
    with reading(path):
        return dict(state)


def load_checkpoint(path, device):
    """(model in eval mode on the device, the checkpoint's dict). Exits (2) if the file is not one of ours."""
    state = read_file(path)
    with reading(path):
        config, weights = GPTConfig(**state["model_config"]), check_tensors(state["model"])
        if load_tokenizer(state["tokenizer"]).size != config.tokenizer_size:
            raise ValueError(f"tokenizer_size {config.tokenizer_size} is not that of {state['tokenizer']}")
        if not isinstance(state["step"], int) or not isinstance(state["config"]["dataset"], str):
            raise ValueError("step or dataset is wrong")
    model = GPT(config)
    load_weights(model, weights, path, strict=True)
    model = model.to(device).eval()
    with torch.no_grad():
        logits, _ = model(torch.zeros(1, 1, dtype=torch.long, device=device))
    if not logits.isfinite().all():
        die(f"{path}: its logits are not finite, the run has diverged: name an earlier checkpoint")
    return model, state


def brief(names):
    """Parameters' names in a line, one for all layers."""
    names = sorted({re.sub(r"\.h\.\d+\.", ".h.*.", name) for name in names})
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# ---------------------------------------------------------------------------------------------------------------------
# What a run begins with


class Origin(NamedTuple):
    """The name of weights, they, their tokenizer and vocabulary size, the checkpoint of a run that goes on, and which
    file that was; None where there is none."""
    source: Optional[str] = None
    weights: Optional[dict] = None
    tokenizer: Optional[str] = None
    vocab_size: Optional[int] = None
    state: Optional[dict] = None
    file: Optional[tuple] = None


def file_id(path):
    """What is another for another file of the same name."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_run(argv):
    """(settings, Origin) of the run that argv asks for. Exits (2) if they do not go together."""
    demo = os.path.join(os.path.dirname(__file__), "config", "demo.py")
    asked = read_settings(TrainConfig, argv, default_config=demo)
    init_from, out_dir = (asked.get(name, getattr(TrainConfig, name)) for name in ("init_from", "out_dir"))
    if init_from == "resume":
        cfg, origin = resume(out_dir or default_out_dir(argv, asked.get("template", TrainConfig.template)), argv)
    elif init_from == "scratch":
        cfg, origin = make_settings(TrainConfig, asked), Origin()
    else:
        weights, shape, tokenizer = read_weights(init_from)
        origin = Origin(init_from, weights, tokenizer, shape["vocab_size"])
        known = {f.name for f in fields(TrainConfig)} - {"h0"}  # the step sizes that began at h0 are loaded
        shape = {k: v for k, v in shape.items() if k in known}
        cfg = parse_args(TrainConfig, argv, default_config=demo, base=shape)
        for key, old in shape.items() if local_rank() == 0 else ():
            if getattr(cfg, key) != old:
                print(f"{key}: {getattr(cfg, key)!r} here, {old!r} in {init_from}")
    cfg.out_dir = cfg.out_dir or default_out_dir(argv, cfg.template)
    check_schedule(cfg)
    return cfg, origin


def default_out_dir(argv, template):
    """out/RECIPE-TEMPLATE, and -KEY=VALUE for each other argument that makes it another run: two runs collide only if
    they would do the same, or differ in what a resumed run may change."""
    args = list(split_args(argv))
    recipe = [os.path.splitext(os.path.basename(word))[0] for key, word in args if key is None] or ["demo"]
    given = {key: value for key, value in args if key != "template" and (key, value) != ("init_from", "resume")}
    case = [f"{f.name}={given[f.name]}" for f in fields(TrainConfig)
            if f.name in given and (kept(f) or f.name == "init_from")]
    return os.path.join("out", re.sub(r"[^\w.=+-]", "_", "-".join([*recipe, template, *case])))


def check_schedule(cfg):
    """Exits (2) for a schedule that cannot be, and warns of one that is hardly meant."""
    steps, begin, wsd = cfg.max_steps, decay_start(cfg), cfg.schedule == "wsd"
    if cfg.sam == "decay" and not wsd:
        die(f"sam is 'decay': schedule is {cfg.schedule!r}, which has no decay phase; use --schedule=wsd or --sam=on")
    if wsd and (begin > steps or begin < cfg.warmup_steps < steps):
        die(f"decay_start is {begin}: schedule wsd needs warmup_steps, {cfg.warmup_steps}, <= decay_start <= "
            f"max_steps, {steps}; --decay_start=none is the last sixth")
    if 0 < steps <= cfg.warmup_steps:
        warn(f"warmup_steps is {cfg.warmup_steps}: the run ends at step {steps}, before its rates are at their peak")
    elif wsd and begin == steps > 0:
        warn(f"decay_start is {begin}: the run ends there, so its rates never decay")


def resume(out_dir, argv):
    """(settings, Origin) of the run in out_dir: those it was saved with, where argv does not change them. Exits (2)
    if argv changes one that makes it another run."""
    path = os.path.join(out_dir, "last.pt")
    file = file_id(path) if os.path.exists(path) else None
    state = read_file(path)
    with reading(path):
        saved = {f.name: state["config"][f.name] for f in fields(TrainConfig) if f.name in state["config"]}
        if missing := [f.name for f in fields(TrainConfig) if kept(f) and f.name not in saved]:
            die(f"{path} does not say {', '.join(missing)}, which a run must keep: it is of another version of "
                f"train.py, go on with that, or begin a new run with --init_from={path} and another --out_dir")
        kinds = dict(model=dict, model_config=dict, optimizer=dict, tokenizer=str, data=dict, step=int, evaluated=bool,
                     best_val_loss=float, val_loss=float, seconds=float, bad_steps=int, skipped=int)
        for name, kind in kinds.items():
            if not isinstance(state.get(name), kind):
                raise ValueError(f"its {name} is no {kind.__name__}")
        GPTConfig(**state["model_config"])
        weights, vocab_size = check_tensors(state.pop("model")), state["model_config"]["vocab_size"]
        if state["step"] < 0 or (not state["optimizer"] and state["step"] > state["skipped"]):
            raise ValueError("it has no optimizer state")
    saved.update(out_dir=out_dir, init_from="resume", overwrite=False)
    cfg = parse_args(TrainConfig, argv, base=saved)
    changed = [f for f in fields(TrainConfig) if f.name in saved and getattr(cfg, f.name) != saved[f.name]]
    for f in changed:
        if kept(f):
            die(f"{f.name} is {getattr(cfg, f.name)!r}: the run in {out_dir} has {saved[f.name]!r} and goes on with "
                "that, leave it out or begin another run")
    if state["step"] > cfg.max_steps:
        die(f"max_steps is {cfg.max_steps}: the run in {out_dir} is at step {state['step']}")
    for f in changed if local_rank() == 0 else ():
        print(f"{f.name}: {getattr(cfg, f.name)!r} from here on, {saved[f.name]!r} so far"
              + "; best.pt begins anew, for the losses do not compare" * (f.name == "eval_sequences"))
    if cfg.eval_sequences != saved.get("eval_sequences"):
        state.update(best_val_loss=math.inf, evaluated=False)
    return cfg, Origin(path, weights, state["tokenizer"], vocab_size, state, file)


def check_tensors(weights):
    """The weights. Raises ValueError if they are not all tensors."""
    if not all(isinstance(t, torch.Tensor) for t in weights.values()):
        raise ValueError("its weights are no tensors")
    return weights


def read_weights(source):
    """(state_dict, settings of its model, tokenizer or None) of a checkpoint of ours, of nanoGPT or of [TMM]'s authors,
    a path or hub:OWNER/REPO/FILE, or of Hugging Face's gpt2*. Exits (2) if there is none."""
    if source.startswith("gpt2") and not os.path.exists(source):
        gpt2 = need("transformers", f"init_from={source}").GPT2LMHeadModel
        with or_die(f"init_from is {source}: cannot load it", "connect to the network, or name a path",
                    (OSError, ValueError)):
            model = gpt2.from_pretrained(source)
        c, weights = model.config, model.state_dict()
        for name in weights:                                    # its matrices are stored for x W, not for W x
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                weights[name] = weights[name].T
        settings = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.n_positions, bias=True)
        return weights, dict(settings, template="vanilla", vocab_size=c.vocab_size), "gpt2"
    path = hub_file(source) if source.startswith("hub:") else source
    path = os.path.join(path, "best.pt") if os.path.isdir(path) else path
    if not os.path.exists(path):
        die(f"init_from is {source}: there is no such checkpoint; it can be 'scratch', 'resume', a path, 'gpt2' or "
            "hub:OWNER/REPO/FILE")
    state = read_file(path)
    with reading(source):
        weights = state.get("model", state)                     # a bare state_dict, too
        weights = {re.sub(r"^(_orig_mod\.|module\.)+", "", name): t for name, t in check_tensors(weights).items()}
        if "model_args" in state:                               # nanoGPT's
            settings, tokenizer = dict(state["model_args"], template="vanilla"), None
        elif "model_config" in state:
            settings, tokenizer = state["model_config"], state["tokenizer"]
        else:
            weights, settings = published(weights)
            return weights, settings, "gpt2" if settings["vocab_size"] >= SIZES["gpt2"] else None
        GPTConfig(**settings)
        return weights, settings, tokenizer


def hub_file(source):
    """Where hub:OWNER/REPO/FILE of the Hugging Face hub lies in the cache, downloaded if need be."""
    import huggingface_hub as hub
    owner, _, rest = source.removeprefix("hub:").partition("/")
    repo, _, file = rest.partition("/")
    if not file:
        die(f"init_from is {source}: it must be hub:OWNER/REPO/FILE")
    repo = f"{owner}/{repo}"
    try:
        hub.model_info(repo, timeout=10)                        # fails at once, where a download tries for long
        return hub.hf_hub_download(repo, file)
    except Exception as e:                                      # its type depends on the HTTP library underneath
        path = None
        with contextlib.suppress(ValueError):                   # no such name can be
            path = hub.try_to_load_from_cache(repo, file)
        return path if isinstance(path, str) else die(f"cannot download {file} of {repo} ({reason(e)}): connect to "
                                                      "the network, mend the name, or name a path")


# the names of [TMM]'s published checkpoints, and ours
PUBLISHED = [(re.compile(theirs), ours) for theirs, ours in (
    (r"^tok_emb", "transformer.wte"), (r"^pos_emb", "transformer.wpe"), (r"^final_ln", "transformer.ln_f"),
    (r"^(vel|m)_tok_emb", "transformer.aux_wte"), (r"^(vel|m)_pos_emb", "transformer.aux_wpe"),
    (r"^layers\.", "transformer.h."), (r"\.ln_attn\.", ".ln_1."), (r"\.ln_mlp\.", ".ln_2."),
    (r"\.attn\.qkv_proj\.", ".attn.c_attn."), (r"\.attn\.out_proj\.", ".attn.c_proj."),
    (r"\.mlp\.w1\.", ".mlp.c_fc."), (r"\.mlp\.w2\.", ".mlp.c_proj."),
    (r"\.ln_(v|update)_(attn|mlp)\.", r".\2_step.ln."), (r"\.lambda_", ".lam_"),
    (r"\.(\w+)_(attn|mlp)_raw$", r".\2_step.\1_raw"))]


def published(theirs):
    """(weights by our names, settings) of a state_dict of [TMM]'s authors. The template is the one that has its
    scalars, and a velocity if its LayerNorms say so. Raises ValueError for other names."""
    weights, foreign = {}, []
    for name, t in theirs.items():
        ours = functools.reduce(lambda name, pair: pair[0].sub(pair[1], name), PUBLISHED, name)
        weights[ours] = t.view(()) if ours.endswith("_raw") and t.numel() == 1 else t
        foreign += [name] if ours == name else []
    if foreign or not weights:
        raise ValueError(f"names that are not ours, nanoGPT's or the authors': {', '.join(foreign[:4])}")
    V, C = weights["transformer.wte.weight"].shape
    weights["lm_head.weight"] = weights["transformer.wte.weight"]       # tied, without a name there
    scalars = {m[1] for m in map(re.compile(r"transformer\.h\.0\.attn_step\.(\w+)_raw$").match, weights) if m}
    velocity = any(".ln_v_" in name for name in theirs)
    fits = [name for name, row in TEMPLATES.items() if {*row.scalars} == scalars and ("v" in row.streams) == velocity]
    if not fits:
        raise ValueError(f"no template has the scalars {', '.join(sorted(scalars))}")
    zero = "embed" in TEMPLATES[fits[0]].streams.values() and "transformer.aux_wte.weight" not in weights
    if local_rank() == 0:
        print(f"{fits[0]}, by the names of its tensors; that it has 12 heads no tensor tells: --n_head names others")
    return weights, dict(
        template=fits[0], aux_init="zero" if zero else "auto", n_head=12, n_embd=C, vocab_size=V,
        n_layer=len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")}),
        block_size=len(weights["transformer.wpe.weight"]), bias=any(name.endswith(".bias") for name in weights))


def make_model(cfg, meta, vocab_size=None):
    """The model that the settings name, for the dataset's vocabulary, padded as its weights to begin with are. Exits
    (2) where GPTConfig raises ValueError."""
    settings = {f.name: getattr(cfg, f.name) for f in fields(GPTConfig)}
    settings.update(vocab_size=vocab_size or meta["vocab_size"], tokenizer_size=meta["tokenizer_size"])
    if cfg.h0 is None:
        row = INTEGRATORS.get(cfg.template)                     # a residual template has no use for it
        settings["h0"] = GPTConfig.h0 if row is None else cfg.h0_first_order if row.order == 1 else cfg.h0_second_order
    return GPT(make_settings(GPTConfig, settings))


def load_weights(model, weights, source, strict, remedy="name a checkpoint of this model"):
    """Puts weights into the model, position tables cut to its block_size, and says what differs; exits (2) if anything
    does, unless strict is false: then the rest stays at its start."""
    weights = {name: t[:model.config.block_size] if name.endswith("wpe.weight") else t for name, t in weights.items()
               if not name.endswith((".attn.bias", ".attn.masked_bias"))}      # masks, in older GPT-2s
    own = model.state_dict()
    fit = {name: t for name, t in weights.items() if name in own and t.shape == own[name].shape}
    differences = "; ".join(f"{what}: {brief(names)}" for what, names in (
        ("not there", own.keys() - weights.keys()), ("of another shape", (own.keys() & weights.keys()) - fit.keys()),
        ("not in this model", weights.keys() - own.keys())) if names)
    if not fit:
        die(f"no tensor of {source} fits this model ({differences}): name a checkpoint of such a model")
    if differences and strict:
        die(f"the weights of {source} do not fit this model ({differences}): {remedy}")
    if not all(t.isfinite().all() for t in fit.values()):
        die(f"the weights of {source} are not finite, their run has diverged: name an earlier checkpoint")
    if differences and local_rank() == 0:
        print(f"took {len(fit)} of {len(own)} tensors from {source}, the others are at their start; {differences}")
    model.load_state_dict(fit, strict=False)


def check_data(cfg, meta, origin):
    """Exits (2) if the weights are of another tokenizer, or a run that goes on had other data."""
    if origin.tokenizer not in (None, meta["tokenizer"]) or (origin.vocab_size or math.inf) < meta["tokenizer_size"]:
        die(f"dataset {cfg.dataset} has the tokenizer {meta['tokenizer']} of {meta['tokenizer_size']} ids, the weights "
            f"({origin.source}) have {origin.tokenizer or 'one'} of at most {origin.vocab_size}: "
            "prepare it with theirs and another --out")
    if origin.tokenizer is None and (origin.vocab_size or 0) > meta["vocab_size"]:
        warn(f"the weights ({origin.source}) have {origin.vocab_size:,} rows, the tokenizer {meta['tokenizer']} of "
             f"dataset {cfg.dataset} has {meta['tokenizer_size']:,} ids: they are hardly of that tokenizer")
    for key in sorted(meta) if origin.state else ():
        old = origin.state["data"].get(key)
        if old != meta[key]:
            die(f"dataset {cfg.dataset} has {key} {meta[key]!r}: it was {old!r} when the run in {cfg.out_dir} was "
                "saved; prepare it as it was")


def print_text(tokenizer, tokens):
    """Prints ids as they come; a character of several bytes appears with its last one."""
    import codecs
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        print(decoder.decode(tokenizer.decode([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))


# ---------------------------------------------------------------------------------------------------------------------
# The folder of a run


RUN_FILES = ("last.pt", "best.pt", "metrics.jsonl")             # last.pt first: without it nothing resumes


@contextlib.contextmanager
def own_out_dir(cfg):
    """out_dir is this process's alone meanwhile. Exits (2) if it cannot be written, another process writes there, or
    it holds a run that --overwrite=true has not given up."""
    with own_folder(cfg.out_dir, "out_dir"):
        files = {name: os.path.join(cfg.out_dir, name) for name in RUN_FILES}
        for path in files.values():
            if os.path.isdir(path):
                die(f"{path} is a folder: name another --out_dir")
        old = [name for name, path in files.items() if os.path.exists(path)]
        if old == ["metrics.jsonl"] and os.path.getsize(files["metrics.jsonl"]) < 100:
            old = []                                            # of a run killed between its first row and checkpoint
        if old and not cfg.overwrite and cfg.init_from != "resume":
            die(f"out_dir {cfg.out_dir} already holds a run ({', '.join(old)}): go on with it by --init_from=resume, "
                "name another --out_dir, or lose it with --overwrite=true")
        yield


def log(cfg, **row):
    """Appends an object to metrics.jsonl."""
    path = os.path.join(cfg.out_dir, "metrics.jsonl")
    with or_die(f"cannot write to {path}", "free the disk"), open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")


def read_log(out_dir):
    """[(row, its line)] of metrics.jsonl, if there is one, without what a kill has torn."""
    rows = []
    with contextlib.suppress(FileNotFoundError), open(os.path.join(out_dir, "metrics.jsonl"), "rb") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append((row, line.rstrip(b"\n") + b"\n"))
    return rows


def cut_log(cfg, step, evaluated):
    """Drops from metrics.jsonl what is later than a checkpoint of this step, and lines that are torn."""
    path = os.path.join(cfg.out_dir, "metrics.jsonl")
    with or_die(f"cannot write {path}", "free the disk; the file before is intact"):
        lines = [line for row, line in read_log(cfg.out_dir)
                 if row["step"] < step or row["step"] == step and (evaluated or "val_loss" not in row)]
        with write_atomic(path) as f:
            f.write(b"".join(lines))


def remove_old_run(cfg):
    """Gives up what a former run has left in out_dir."""
    for name in RUN_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(cfg.out_dir, name))


def finite(x):
    """x for a log: null where it is no number."""
    return x if math.isfinite(x) else None


def start_wandb(wandb, cfg):
    """A Weights & Biases run, offline where it cannot be reached."""
    settings = dict(project=cfg.wandb_project, name=cfg.out_dir, config=asdict(cfg), dir=cfg.out_dir)
    try:
        return wandb.init(**settings)
    except Exception as e:                                      # no key, no network
        print(f"warning: wandb logs offline ({reason(e)})", file=sys.stderr)
        return wandb.init(**settings, mode="offline")


def check_replicas(model):
    """Raises RuntimeError unless all processes have the same weights, bit by bit (by the sum of their bits)."""
    if dist.is_initialized():
        total = sum(p.detach().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters())
        highest = torch.stack([total, -total])
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        if highest[0] != -highest[1]:
            raise RuntimeError("the processes' weights differ")


# ---------------------------------------------------------------------------------------------------------------------
# The run


class Trainer:
    """What one process has of a run: data, model, optimizers, and how far it is. busy: seconds of training; skipped,
    bad_steps: how many steps were not finite, in all and in a row; evaluated: whether the weights of this step have
    been."""

    def __init__(self, cfg, train, val, meta, model, device, rank, world):
        self.cfg, self.train, self.val, self.meta = cfg, train, val, meta
        self.device, self.rank, self.world, self.master = device, rank, world, rank == 0
        self.model = model.to(device)                           # the GPT itself, for checkpoints
        self.dtype = pick_dtype(cfg.dtype, device)
        self.amp = autocast(device, self.dtype)
        self.compiled = model                                   # for evaluation
        self.frozen = freeze_unused(model)
        self.micro = micro_batches(0, cfg, rank, world)[1]      # sequences
        if cfg.compile or (cfg.compile is None and device.type == "cuda"):
            self.compiled = compile_model(model, *train.batch(0, self.micro, device), self.amp, asked=cfg.compile)
        self.parallel = self.compiled                           # for training
        if dist.is_initialized():
            self.parallel = DDP(self.compiled, device_ids=[device.index] if device.type == "cuda" else None)
        self.optimizers = make_optimizers(model, cfg, device)
        self.best, self.step, self.busy, self.evaluated = math.inf, 0, 0.0, False
        self.bad_steps, self.skipped = 0, 0
        self.val_loss, self.resumed, self.wandb = math.nan, False, None
        self.logged = self.step, self.busy                      # at the last log line
        peak = peak_flops(device, self.dtype)
        self.mfu_per_speed = flops_per_token(model.config) / (peak * world) if peak else None

    def resume(self, state):
        """Goes on from a checkpoint, but for its weights. Exits (2) if it does not fit."""
        self.best, self.step, self.busy, self.evaluated, self.val_loss, self.skipped = (
            state[k] for k in ("best_val_loss", "step", "seconds", "evaluated", "val_loss", "skipped"))
        stopped = state["bad_steps"] >= self.cfg.max_bad_steps  # for them: a new allowance
        self.bad_steps = 0 if stopped else state["bad_steps"]
        self.logged, self.resumed = (self.step, self.busy), True
        with reading(f"{self.cfg.out_dir}/last.pt"):
            load_optimizer_state(self.optimizers, state["optimizer"])
        if self.master:
            cut_log(self.cfg, self.step, self.evaluated)

    def announce(self):
        cfg, device, share = self.cfg, self.device, self.cfg.step_sequences // self.world
        print(f"a step: {cfg.step_sequences} sequences = {self.world} (processes) x {share // self.micro} "
              f"(micro-batches) x {self.micro}; out_dir {cfg.out_dir}")
        print(f"{cfg.template}, {cfg.attention} attention: {self.model.num_params():,} parameters; {cfg.dataset}: "
              f"{self.meta['train_tokens']:,} tokens, {self.meta['tokenizer']}")
        if self.frozen:
            print(f"no loss depends on {', '.join(self.frozen)}: frozen")
        print(f"{cfg.max_steps:,} steps of {cfg.step_sequences * cfg.block_size:,} tokens; learning_rate "
              f"{cfg.learning_rate:g}" + (f", muon_lr {cfg.muon_lr:g}" if cfg.optimizer == "muon" else ""))
        threads = f" of {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        print(f"{self.world} x {device.type}{threads}, {self.dtype}, "
              f"{'not compiled' if self.compiled is self.model else 'compiled'}"
              + (f"; from step {self.step}" if self.resumed else ""))

    def record(self, **row):
        log(self.cfg, step=self.step, **row)
        if self.wandb:
            self.wandb.log(row, step=self.step)

    def save(self, *names):
        """All that a run is, as plain types and tensors: torch.load(path, weights_only=True) reads it. Data order and
        dropout are functions of (seed, step), so the step stands for the state of the random numbers too."""
        state = dict(model=self.model.state_dict(), model_config=asdict(self.model.config),
                     tokenizer=self.meta["tokenizer"], data=self.meta, optimizer=optimizer_state(self.optimizers),
                     config=asdict(self.cfg), step=self.step, best_val_loss=self.best, seconds=self.busy,
                     bad_steps=self.bad_steps, skipped=self.skipped, evaluated=self.evaluated, val_loss=self.val_loss)
        for name in names:
            save(os.path.join(self.cfg.out_dir, name), state)

    def evaluate(self):
        """The validation loss, to the log and into checkpoints."""
        cfg = self.cfg
        check_replicas(self.model)
        self.val_loss = evaluate(self.compiled, self.val, cfg.eval_sequences, self.micro, self.amp, self.rank,
                                 self.world)
        improved = math.isfinite(self.val_loss) and self.val_loss < self.best
        self.best, self.evaluated = self.val_loss if improved else self.best, True
        if self.master:
            print(f"step {self.step:6d}  val loss {self.val_loss:.4f}{'  (best)' if improved else ''}")
            if self.step == 0 and not self.resumed:
                remove_old_run(cfg)
            self.record(val_loss=finite(self.val_loss))
            self.save(*["best.pt"] * improved, "last.pt")
        barrier()

    def backward(self):
        """Adds the gradients of this process's share of the step; returns its mean loss."""
        losses, (firsts, size) = [], micro_batches(self.step, self.cfg, self.rank, self.world)
        for first in firsts:
            x, y = self.train.batch(first, size, self.device)
            seed = np.random.SeedSequence([self.cfg.seed, first]).generate_state(1)[0]
            torch.manual_seed(int(seed))                        # of dropout
            more = self.world > 1 and first != firsts[-1]
            with self.parallel.no_sync() if more else contextlib.nullcontext():
                with self.amp:
                    loss = self.parallel(x, y, return_logits=False)[1]
                (loss / len(firsts)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def take_step(self, stop):
        """One step on the global batch, of which each process has its share. Returns (loss, gradient norm, whether any
        process has a reason to stop)."""
        cfg, began = self.cfg, time.perf_counter()
        rate = schedule(self.step, cfg)
        for group in self.groups():
            group["lr"] = rate * group["base_lr"]
        loss, params = self.backward(), [p for p in self.model.parameters() if p.requires_grad]
        if cfg.sam == "on" or cfg.sam == "decay" and self.step >= decay_start(cfg):
            before = ascend(params, cfg.sam_rho)
            self.backward()                                     # the same minibatches, with the same dropout
            restore(params, before)
        norm = torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip or math.inf)
        # the step's one wait for the device: is all finite, does anyone want to stop? All processes agree on it
        loss, norm, stop = all_sum(torch.stack([loss, norm, loss.new_tensor(float(bool(stop)))])).tolist()
        good = math.isfinite(loss) and math.isfinite(norm)
        for optimizer in self.optimizers:
            if good:
                with contextlib.nullcontext() if self.dtype == "bfloat16" else Float32Muon():
                    optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.bad_steps, self.skipped = 0 if good else self.bad_steps + 1, self.skipped + (not good)
        self.step, self.evaluated = self.step + 1, False
        self.busy += time.perf_counter() - began
        return loss / self.world, norm / self.world, bool(stop)     # of the sums, in which norm is the same everywhere

    def groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def report(self, loss, norm):
        """What a step came to. Exits (2) after max_bad_steps in a row."""
        if self.bad_steps and self.master:
            print(f"step {self.step:6d}  skipped: loss {loss}, gradient norm {norm} ({self.bad_steps} in a row)")
            self.record(skipped=True)
        elif self.master and (self.step % self.cfg.log_interval == 0 or self.step == self.cfg.max_steps):
            self.report_speed(loss)
        if self.bad_steps >= self.cfg.max_bad_steps:
            if self.master:
                self.save("last.pt")
            barrier()
            best = os.path.join(self.cfg.out_dir, "best.pt")
            back = f"if they are the cause, begin a run from {best} (--init_from={best} and another --out_dir)"
            die(f"loss or gradient was not finite for {self.bad_steps} steps in a row, to step {self.step}: lower the "
                f"rates; {self.cfg.out_dir}/last.pt has the weights before them"
                + f", {back}" * os.path.exists(best))

    def report_speed(self, loss):
        steps, seconds = self.step - self.logged[0], self.busy - self.logged[1]
        self.logged = self.step, self.busy
        tokens = self.cfg.step_sequences * self.cfg.block_size  # of a step
        speed, left = steps * tokens / seconds, seconds / steps * (self.cfg.max_steps - self.step)
        mfu = f"{speed * self.mfu_per_speed:.1%} MFU  " if self.mfu_per_speed else ""
        print(f"step {self.step:6d}  loss {loss:.4f}  rate x{schedule(self.step - 1, self.cfg):.3f}  "
              f"{speed:,.0f} tokens/s  {mfu}{timedelta(seconds=int(left))} left")
        self.record(train_loss=loss, tokens=self.step * tokens, seconds=round(self.busy, 3),
                    tokens_per_second=round(speed, 1), lr={g["name"]: g["lr"] for g in self.groups()})

    def finish(self, stopped):
        """The last lines, with a sample."""
        cfg = self.cfg
        if stopped:
            print(f"stopped at step {self.step}; go on with the same command and --init_from=resume "
                  f"--out_dir={cfg.out_dir}")
            return
        print(f"best val loss {self.best:.4f} nats per token; checkpoints in {cfg.out_dir}")
        if cfg.sample_tokens and math.isfinite(self.val_loss):
            tokenizer = load_tokenizer(self.meta["tokenizer"])
            prompt = torch.tensor([[tokenizer.eot]], device=self.device)
            self.model.eval()
            torch.manual_seed(cfg.seed)
            print_text(tokenizer, (t.item() for t in self.model.next_tokens(prompt, cfg.sample_tokens, 0.8, 200)))


@contextlib.contextmanager
def stop_signals(world):
    """A list that is filled by SIGTERM and Ctrl-C meanwhile: they ask for an end after the step."""
    stop = []

    def on_signal(number, frame):
        if stop and number == signal.SIGINT and world == 1:
            raise KeyboardInterrupt                             # a second Ctrl-C does not wait for the step
        stop.append(number)                                     # (torchrun itself sends several)
    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
                if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv=None):
    # settings
    cfg, origin = read_run(sys.argv[1:] if argv is None else argv)
    wandb = need("wandb", "wandb_log") if cfg.wandb_log else None

    # processes: one, or one of many under torchrun
    device, rank, world = init_processes(cfg)

    # data
    train, val, meta = open_data(cfg.data_dir, cfg.dataset, cfg.block_size, train=cfg.seed, val=0)
    check_data(cfg, meta, origin)

    with own_out_dir(cfg) if rank == 0 else contextlib.nullcontext():
        # model
        torch.manual_seed(cfg.seed)
        model = make_model(cfg, meta, origin.vocab_size)
        if origin.state is not None:
            if rank == 0 and file_id(origin.source) != origin.file:
                die(f"{origin.source} has changed since it was read: another process has trained there, begin again")
            load_weights(model, origin.weights, origin.source, strict=True, remedy="go on with the code that wrote it, "
                         f"or begin a new run with --init_from={origin.source} --strict=false and another --out_dir")
        elif origin.weights is not None:
            load_weights(model, origin.weights, origin.source, cfg.strict, remedy="--strict=false takes what fits")
        trainer = Trainer(cfg, train, val, meta, model, device, rank, world)
        if origin.state is not None:
            trainer.resume(origin.state)
        del origin                                              # a loaded checkpoint is not held for the whole run
        if trainer.master:
            trainer.wandb = start_wandb(wandb, cfg) if wandb else None
            trainer.announce()

        # loop: evaluate and save, step, log
        stopped = False
        with stop_signals(world) as stop:
            while True:
                if (trainer.step % cfg.eval_interval == 0 or trainer.step == cfg.max_steps) and not trainer.evaluated:
                    trainer.evaluate()
                if trainer.step == cfg.max_steps:
                    break
                loss, norm, stopped = trainer.take_step(stop)
                trainer.report(loss, norm)
                if stopped:
                    if trainer.master:
                        trainer.save("last.pt")
                    break

        # end
        if trainer.wandb:
            trainer.wandb.finish()
        if trainer.master:
            trainer.finish(stopped)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    cli(main)
