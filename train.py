"""
Trains any variant of model.py, on one device or under torchrun.

    python train.py                                            # config/demo.py: a few minutes on two CPU cores
    python train.py config/ts.py --template=muon               # a recipe, with one setting changed
    torchrun --nproc_per_node=8 train.py config/owt.py         # one node, eight GPUs

Arguments are config files (plain assignments) and --key=value or --key value; a later one wins. Without a config file
config/demo.py is read first. Writes best.pt, last.pt and metrics.jsonl into out_dir.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import os
import pickle
import sys
import time
import typing
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

from model import GPT, INTEGRATORS, GPTConfig
from prepare import DATASETS, OFFLINE, TOKENIZERS, die, load_tokenizer, prepare, start, write_atomic

# ---------------------------------------------------------------------------------------------------------------------
# Settings


def opt(default, help, choices=None, low=None, high=None):
    """A setting: its default, its one line of documentation, and what values it may have."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high))


@dataclass
class TrainConfig:
    # data
    dataset: str = opt("tinystories", "folder of train.bin, val.bin and meta.json below data_dir")
    data_dir: str = opt("data", "where the datasets are")
    out_dir: str = opt("out", "where best.pt, last.pt and metrics.jsonl go")
    overwrite: bool = opt(False, "start anew in an out_dir that already holds a run, which is lost")
    # model
    template: str = opt("tmm", "residual template or integrator, a key of model.TEMPLATES or model.INTEGRATORS")
    attention: str = opt("softmax", "'softmax' or 'linear'")
    aux_init: str = opt("auto", "start of the momentum stream: 'auto' (the template's own), 'embed' or 'zero'")
    h0: Optional[float] = opt(None, "integrators: where the learned step sizes start; None: one of the next two",
                                low=1e-6, high=100)
    h0_first_order: float = opt(0.1, "that of the Euler integrators", low=1e-6, high=100)
    h0_second_order: float = opt(0.1, "that of presymp_ab2 and presymp_etd_ab2", low=1e-6, high=100)
    t0: float = opt(1.0, "integrators: the time of the first layer", low=1e-6, high=100)
    lookahead: bool = opt(False, "integrators: attention reads X + mu Y")
    symp_force: str = opt("value", "softmax integrators: 'value' (c_proj of v) or 'hamiltonian' (A x, the theory's)")
    symp_b: str = opt("free", "softmax integrators' matrix B: 'free' (learned), 'identity' or 'derived' (from Q, K, V)")
    n_layer: int = opt(12, "blocks", low=1)
    n_head: int = opt(12, "attention heads, and rows of the matrix templates", low=1)
    n_embd: int = opt(768, "channels", low=1)
    block_size: int = opt(1024, "tokens in a sequence", low=1)
    dropout: float = opt(0.0, "dropout probability", low=0, high=1)
    bias: bool = opt(False, "biases in linear layers and LayerNorms")
    # batches
    batch_size: int = opt(8, "sequences in a micro-batch", low=1)
    gradient_accumulation_steps: int = opt(60, "micro-batches in a step, shared by all processes", low=1)
    max_steps: int = opt(10_000, "optimizer steps", low=0)
    seed: int = opt(42, "of the weights, the data order and dropout", low=0, high=2 ** 63)
    # optimizer
    optimizer: str = opt("muon", "'muon' (matrices in blocks; AdamW for the rest) or 'adamw'", ("muon", "adamw"))
    muon_lr: float = opt(0.02, "peak rate of Muon; a matrix of A x B moves by it times sqrt(max(1, A/B)), that is "
                               "torch's adjust_lr_fn='original'", low=0)
    learning_rate: float = opt(6e-4, "peak rate of AdamW", low=0)
    scalar_lr: float = opt(3e-3, "peak rate of AdamW for the learned scalars", low=0)
    weight_decay: float = opt(0.1, "of AdamW on embeddings and matrices", low=0)
    beta1: float = opt(0.9, "of AdamW", low=0, high=0.9999)
    beta2: float = opt(0.95, "of AdamW", low=0, high=0.9999)
    grad_clip: float = opt(1.0, "global gradient norm; 0: off", low=0)
    warmup_steps: int = opt(1000, "linear warmup", low=0)
    min_lr_ratio: float = opt(0.1, "rate at the end of the cosine, relative to the peak", low=0, high=1)
    # evaluation and logging
    eval_interval: int = opt(100, "steps between evaluations", low=1)
    eval_iters: int = opt(160, "validation batches, the same ones each time and for every seed", low=1)
    log_interval: int = opt(10, "steps between log lines", low=1)
    sample_tokens: int = opt(0, "length of the text sampled at the end", low=0)
    # system
    device: str = opt("auto", "'cpu', 'cuda', 'mps'; auto: cuda, else mps, else cpu")
    dtype: str = opt("auto", "'bfloat16' (autocast, and Muon's iteration) or 'float32'; auto: bfloat16 where the "
                             "hardware has it",
                     ("auto", "bfloat16", "float32"))
    compile: Optional[bool] = opt(None, "torch.compile; None: on cuda only")


def convert(value, kind, where):
    """A config file's value or a command line's string as a `kind`: bool, int, float, str or Optional of one."""
    if type(None) in typing.get_args(kind):
        if value is None or str(value).lower() == "none":
            return None
        kind = typing.get_args(kind)[0]
    try:
        if kind is str and isinstance(value, str):
            return value
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind in (int, float) and not isinstance(value, bool):
            number = value if isinstance(value, int) else float(value)
            if kind is float and math.isfinite(number):
                return float(number)
            if kind is int and number == int(number):
                return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    die(f"{where} is {value!r}: it must be {'true or false' if kind is bool else f'of type {kind.__name__}'}")


def read_config(path):
    """The assignments of a config file, {key: value}. It is run without builtins: it can compute, not import."""
    values = {}
    try:
        with open(path, encoding="utf-8-sig") as f:
            exec(compile(f.read(), path, "exec"), {"__builtins__": {}}, values)
    except Exception as e:
        die(f"cannot read config {path}: {e}")
    return {k: v for k, v in values.items() if k != "__doc__"}


def parse_args(cls, argv, default_config=None):
    """An instance of the dataclass cls from config files and --key=value; later wins. Exits (2) on a wrong one."""
    if "-h" in argv or "--help" in argv:
        print_help(cls)
    kinds, settings = typing.get_type_hints(cls), []            # settings: (key, value, where it was read)
    args, configs = list(argv), []
    while args:
        arg = args.pop(0)
        key, equals, value = arg[2:].partition("=")
        if not arg.startswith("--"):
            configs.append(arg)
            settings += [(k, v, f"{k} in {arg}") for k, v in read_config(arg).items()]
            continue
        if not equals and (not args or args[0].startswith("--")):
            die(f"{arg} has no value: write {arg}=VALUE")
        settings.append((key, value if equals else args.pop(0), f"--{key}"))
    if default_config and not configs:
        settings = [(k, v, f"{k} in {default_config}") for k, v in read_config(default_config).items()] + settings
    values = {}
    for key, value, where in settings:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            die(f"unknown setting {where}{f': did you mean {near[0]}?' if near else ''} (see --help)")
        values[key] = convert(value, kinds[key], where)
    check(cls, values)
    return cls(**values)


def check(cls, values):
    for field in fields(cls):
        value, choices, low, high = values.get(field.name), *(field.metadata[k] for k in ("choices", "low", "high"))
        if value is None:
            continue
        if choices and value not in choices:
            die(f"{field.name} is {value!r}: it must be one of {', '.join(choices)}")
        if low is not None and value < low:
            die(f"{field.name} is {value}: it must be at least {low}")
        if high is not None and value > high:
            die(f"{field.name} is {value}: it must be at most {high}")


def print_help(cls):
    print(sys.modules[cls.__module__].__doc__)
    for field in fields(cls):
        print(f"  --{field.name}={field.default}\n        {field.metadata['help']}")
    raise SystemExit(0)


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Split:
    """The token file of one split, cut into blocks of block_size + 1 tokens. Block number i of the training run is a
    pure function of (seed, i): an epoch visits each block once in a seeded order, and starts at a seeded offset."""

    def __init__(self, path, meta, block_size, seed):
        self.path, self.dtype, self.vocab_size = path, meta["dtype"], meta["vocab_size"]
        self.T, self.seed = block_size, seed
        self.size = os.path.getsize(path) // np.dtype(self.dtype).itemsize
        self.blocks = max(1, (self.size - block_size) // (block_size + 1))      # as many for every offset
        self.order = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch):
        rng = np.random.default_rng([self.seed, epoch])
        offset = rng.integers(min(self.T, self.size - self.blocks * (self.T + 1)) + 1)
        return offset + rng.permutation(self.blocks) * (self.T + 1)

    def starts(self, first, count):
        """Where blocks first ... first + count - 1 of the run begin in the file."""
        return [int(self.order(i // self.blocks)[i % self.blocks]) for i in range(first, first + count)]

    def batch(self, first, count, device):
        """Blocks first ... first + count - 1 as inputs and targets, each (count, T) int64 on the device."""
        data = np.memmap(self.path, self.dtype, "r")            # opened anew: a kept one grows as its pages are read
        block = np.stack([data[i:i + self.T + 1] for i in self.starts(first, count)]).astype(np.int64)
        if block.max() >= self.vocab_size:
            die(f"{self.path} holds id {block.max()}, meta.json says vocab_size {self.vocab_size}: prepare it again")
        block = torch.from_numpy(block)
        if device.type == "cuda":
            block = block.pin_memory().to(device, non_blocking=True)
        else:
            block = block.to(device)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def micro_batches(step, cfg, rank, world):
    """The first block of each micro-batch that a process takes of a step: all of them together are the global batch."""
    return [(step * cfg.gradient_accumulation_steps + i) * cfg.batch_size
            for i in range(rank, cfg.gradient_accumulation_steps, world)]


def load_meta(folder):
    """meta.json of a prepared dataset, checked against its token files. Exits (2) if it is missing or torn."""
    name = os.path.basename(folder)
    remedy = f"python prepare.py {name if name in DATASETS and name != 'text' else 'text FILE...'} --out={folder}"
    try:
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        if (meta["dtype"] not in ("uint16", "uint32") or meta["tokenizer"] not in TOKENIZERS
                or not 0 < meta["tokenizer_size"] <= meta["vocab_size"]):
            raise ValueError("dtype, tokenizer, tokenizer_size or vocab_size in meta.json is wrong")
        for split in ("train", "val"):
            size, item = os.path.getsize(os.path.join(folder, f"{split}.bin")), np.dtype(meta["dtype"]).itemsize
            if size != meta[f"{split}_tokens"] * item:
                raise ValueError(f"{split}.bin has {size} bytes, not {meta[f'{split}_tokens']} x {item}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        die(f"no usable dataset in {folder} ({reason(e)}): make it with {remedy}")
    return meta


def open_data(cfg):
    """(train Split, val Split, meta). A dataset that needs no network is made where it is missing."""
    folder = os.path.join(cfg.data_dir, cfg.dataset)
    if cfg.dataset in OFFLINE and not os.path.exists(os.path.join(folder, "meta.json")) and local_rank() == 0:
        prepare(cfg.dataset, out=folder)
    barrier()
    meta = load_meta(folder)
    for split in ("train", "val"):
        if meta[f"{split}_tokens"] < cfg.block_size + 1:
            die(f"{folder}/{split}.bin has {meta[f'{split}_tokens']} tokens: block_size {cfg.block_size} needs at "
                f"least {cfg.block_size + 1}, name a smaller block_size or prepare more text")
    train, val = (Split(os.path.join(folder, f"{split}.bin"), meta, cfg.block_size, seed)
                  for split, seed in (("train", cfg.seed), ("val", 0)))
    return train, val, meta


# ---------------------------------------------------------------------------------------------------------------------
# Processes and devices


def reason(e):
    """An exception in at most 200 characters of one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}" if str(e) else type(e).__name__


def local_rank():
    return int(os.environ.get("LOCAL_RANK", 0))


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
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        die(f"device is '{name}': it must be auto, cpu, cuda or mps")
    try:
        device = torch.device(f"cuda:{local_rank()}" if name == "cuda" else name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:
        die(f"device is '{name}': it cannot be used here ({reason(e)}), try --device=auto")
    return device


def pick_dtype(name, device):
    """'bfloat16' or 'float32'; 'auto' is bfloat16 where the device computes with it in hardware."""
    if name != "auto":
        return name
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = torch.cpu.get_capabilities().get
        fast = device.type == "cpu" and bool(has("avx512_bf16") or has("amx_bf16") or has("bf16"))
    return "bfloat16" if fast else "float32"


def autocast(device, dtype):
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def compile_model(model, x, y, amp):
    """The model compiled and run once on a batch; the model itself, with a warning, where that does not work."""
    try:
        compiled = torch.compile(model, fullgraph=True)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), amp:
            compiled(x, y)[1].backward()
    except Exception as e:
        print(f"warning: torch.compile does not work here, running without it ({reason(e)})", file=sys.stderr)
        compiled = model
    model.zero_grad(set_to_none=True)
    return compiled


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


def param_groups(model):
    """{name: parameters}: matrices (2-D, inside the blocks), embeddings (the tied head among them), norms (gains and
    biases), scalars (*_raw). Each parameter is in exactly one."""
    groups = dict(matrices=[], embeddings=[], norms=[], scalars=[])
    for name, p in model.named_parameters():                    # lists the tied head once, as wte
        kind = ("scalars" if name.endswith("_raw") else "norms" if p.ndim == 1 else
                "matrices" if name.startswith("transformer.h.") else "embeddings")
        groups[kind].append((name, p))
    ids = [id(p) for group in groups.values() for _, p in group]
    assert sorted(ids) == sorted(id(p) for p in set(model.parameters())), "groups must partition the parameters"
    return groups


def make_optimizers(model, cfg, device):
    """[AdamW] or [Muon, AdamW] as in [TMM, D.3]. Every group keeps its peak rate as base_lr."""
    groups = param_groups(model)
    rates = dict(matrices=(cfg.learning_rate, cfg.weight_decay), embeddings=(cfg.learning_rate, cfg.weight_decay),
                 norms=(cfg.learning_rate, 0.0), scalars=(cfg.scalar_lr, 0.0))
    optimizers = []
    if cfg.optimizer == "muon":
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


def schedule(step, cfg):
    """The multiplier of every rate at a step: linear warmup, then a cosine to min_lr_ratio at max_steps."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and checkpoints


@torch.no_grad()
def evaluate(model, split, cfg, device, amp, rank=0, world=1):
    """Mean loss in nats per token over the first eval_iters batches of the split, shared by all processes."""
    size = min(cfg.batch_size, split.blocks)
    count = min(cfg.eval_iters, split.blocks // size)
    total = torch.zeros(2, device=device)                       # sum of losses, batches
    model.eval()
    for i in range(rank, count, world):
        with amp:
            total += torch.stack([model(*split.batch(i * size, size, device))[1], torch.ones((), device=device)])
    model.train()
    loss, n = all_sum(total).tolist()
    return loss / n


def checkpoint(model, optimizers, cfg, meta, step, best, val_loss):
    """All that a run is, as plain types and tensors: torch.load(path, weights_only=True) reads it."""
    return dict(model=model.state_dict(), model_config=asdict(model.config), tokenizer=meta["tokenizer"],
                optimizers=[o.state_dict() for o in optimizers], config=asdict(cfg), step=step,
                val_loss=val_loss, best_val_loss=best)


def save(path, state):
    try:
        with write_atomic(path) as f:
            torch.save(state, f)
    except (OSError, RuntimeError) as e:
        die(f"cannot save {path} ({e}): free the disk or name another out_dir; the file before is intact")


def load_checkpoint(path, device):
    """(model in eval mode on the device, the checkpoint's dict). Exits (2) if the file is not one of ours."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        model = GPT(GPTConfig(**state["model_config"]))
        model.load_state_dict(state["model"])
        if load_tokenizer(state["tokenizer"]).size != model.config.tokenizer_size:
            raise ValueError(f"tokenizer_size {model.config.tokenizer_size} is not that of {state['tokenizer']}")
        return model.to(device).eval(), state
    except FileNotFoundError:
        die(f"no checkpoint {path}: train one first (python train.py) or name its folder with --out_dir")
    except Exception as e:                                      # torch.load raises whatever a bad file provokes
        detail = "no tensors and plain values" if isinstance(e, pickle.UnpicklingError) else reason(e)
        die(f"{path} is not a checkpoint of this project ({detail}): name another file")


def print_text(tokenizer, tokens):
    """Prints ids as they come; a character of several bytes appears with its last one."""
    import codecs
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        print(decoder.decode(tokenizer.decode([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))


# ---------------------------------------------------------------------------------------------------------------------
# The run


def make_model(cfg, meta):
    """The model that the settings name, for the dataset's vocabulary. Exits (2) where GPTConfig raises ValueError."""
    shared = {f.name for f in fields(GPTConfig)} & {f.name for f in fields(TrainConfig)}
    settings = {name: getattr(cfg, name) for name in shared}
    if cfg.h0 is None:
        order = INTEGRATORS[cfg.template].order if cfg.template in INTEGRATORS else 0
        settings["h0"] = {0: GPTConfig.h0, 1: cfg.h0_first_order, 2: cfg.h0_second_order}[order]
    try:
        return GPT(GPTConfig(vocab_size=meta["vocab_size"], tokenizer_size=meta["tokenizer_size"], **settings))
    except ValueError as e:
        die(str(e))


def check_out(cfg):
    """Exits (2) if out_dir cannot be written, or holds a run that --overwrite=true has not given up."""
    old = [name for name in ("metrics.jsonl", "last.pt", "best.pt") if os.path.exists(os.path.join(cfg.out_dir, name))]
    if old and not cfg.overwrite:
        die(f"out_dir {cfg.out_dir} already holds a run ({', '.join(old)}): name another --out_dir, or lose it with "
            "--overwrite=true")
    try:
        os.makedirs(cfg.out_dir, exist_ok=True)
    except OSError as e:
        die(f"cannot write to out_dir {cfg.out_dir} ({e}): name another --out_dir")


def log(cfg, **row):
    """Appends an object to metrics.jsonl, or begins it at step 0."""
    try:
        with open(os.path.join(cfg.out_dir, "metrics.jsonl"), "w" if row["step"] == 0 else "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
    except OSError as e:
        die(f"cannot write to {cfg.out_dir}/metrics.jsonl ({e}): free the disk")


def check_finite(loss, step, kind):
    if not math.isfinite(loss):
        die(f"{kind} loss is {loss} at step {step}: "
            "training diverged, lower the rates; the checkpoints are of earlier steps")


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def main():
    cfg = parse_args(TrainConfig, sys.argv[1:], os.path.join(os.path.dirname(__file__), "config", "demo.py"))

    # one process, or one of many under torchrun
    device = pick_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    master = rank == 0
    if cfg.gradient_accumulation_steps % world:
        die(f"gradient_accumulation_steps is {cfg.gradient_accumulation_steps}: it must be a multiple of the number of "
            f"processes, {world}")

    # data, model, optimizers
    train, val, meta = open_data(cfg)
    torch.manual_seed(cfg.seed)
    raw_model = model = make_model(cfg, meta).to(device)
    if master:
        check_out(cfg)
    torch.manual_seed(cfg.seed + rank)                          # each process its own dropout
    dtype = pick_dtype(cfg.dtype, device)
    amp = autocast(device, dtype)
    if cfg.compile or (cfg.compile is None and device.type == "cuda"):
        model = compile_model(raw_model, *train.batch(0, cfg.batch_size, device), amp)
    forward = model                                             # for evaluation: without DDP
    if dist.is_initialized():
        model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizers = make_optimizers(raw_model, cfg, device)
    sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    if master:
        print(f"{cfg.template}, {cfg.attention} attention: {raw_model.num_params():,} parameters; {cfg.dataset}: "
              f"{meta['train_tokens']:,} tokens, {meta['tokenizer']}; {sequences * cfg.block_size:,} tokens a step")
        print(f"{world} x {device.type}, {dtype}, {'compiled' if forward is not raw_model else 'not compiled'}")

    best, step, busy = math.inf, 0, 0.0
    while True:
        last = step == cfg.max_steps

        # evaluate and save
        if last or step % cfg.eval_interval == 0:
            val_loss = evaluate(forward, val, cfg, device, amp, rank, world)
            check_finite(val_loss, step, "validation")
            improved, best = val_loss < best, min(best, val_loss)
            if master:
                print(f"step {step:6d}  val loss {val_loss:.4f}{'  (best)' if improved else ''}")
                state = checkpoint(raw_model, optimizers, cfg, meta, step, best, val_loss)
                for name in ["best.pt"] * improved + ["last.pt"]:
                    save(os.path.join(cfg.out_dir, name), state)
                log(cfg, step=step, val_loss=val_loss)
            barrier()
        if last:
            break

        # one step on the global batch, of which each process has its share
        began = time.perf_counter()
        rate = schedule(step, cfg)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["base_lr"]
        loss = torch.zeros((), device=device)
        firsts = micro_batches(step, cfg, rank, world)
        for first in firsts:
            x, y = train.batch(first, cfg.batch_size, device)
            with model.no_sync() if world > 1 and first != firsts[-1] else contextlib.nullcontext():
                with amp:
                    micro_loss = model(x, y)[1] / len(firsts)
                micro_loss.backward()
            loss += micro_loss.detach()
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), cfg.grad_clip)
        for optimizer in optimizers:
            with contextlib.nullcontext() if dtype == "bfloat16" else Float32Muon():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1

        # log: the only place where the host waits for the device
        logs = step % cfg.log_interval == 0 or step == cfg.max_steps
        if logs:
            train_loss = all_sum(loss).item() / world
            check_finite(train_loss, step, "training")
        busy += time.perf_counter() - began
        if logs and master:
            speed = step * sequences * cfg.block_size / busy
            left = busy / step * (cfg.max_steps - step)
            print(f"step {step:6d}  loss {train_loss:.4f}  rate x{rate:.3f}  {speed:,.0f} tokens/s  "
                  f"{clock(left)} left")
            log(cfg, step=step, train_loss=train_loss, tokens=step * sequences * cfg.block_size,
                seconds=round(busy, 3), tokens_per_second=round(speed, 1),
                lr={g["name"]: g["lr"] for o in optimizers for g in o.param_groups})

    if master:
        print(f"best val loss {best:.4f} nats per token; checkpoints in {cfg.out_dir}")
        if cfg.sample_tokens:
            tokenizer = load_tokenizer(meta["tokenizer"])
            prompt = torch.tensor([[tokenizer.eot]], device=device)
            raw_model.eval()
            print_text(tokenizer, (t.item() for t in raw_model.next_tokens(prompt, cfg.sample_tokens, 0.8, 200)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    start(main)
