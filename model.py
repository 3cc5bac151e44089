"""
Transformers whose residual stream is an optimizer.

A pre-norm transformer adds to each token x what a layer O says: x <- x + O(x). Read O(x) as minus the gradient of an
energy of the tokens and depth as time: that is one step of gradient descent, and any other first-order method makes
another transformer. A template below is one such method. It is applied twice a block, O being first attention, then
the MLP; what the method carries along (momentum, second moments) rides through depth beside x as auxiliary streams.

    x, s = attn_step(O, x, s)   with O(u) = attn(ln_1(u))
    x, s = mlp_step(O, x, s)    with O(u) = mlp(ln_2(u))

An integrator (SympFormer) takes more from attention than a step O(x): tokens are particles with positions X and momenta
Y, attention gives a velocity F(Y) and a force G(Y) at X, and a layer is one time step h of

    dX/dt = F(Y),   dY/dt = G(Y) - alpha(t) Y

after which the MLP moves X alone.

Letters
    B T C    batch, tokens, channels (n_embd)        x     residual stream (B, T, C)
    H D      heads, C / H                            g     O(x), the step that the oracle proposes (B, T, C)
    O        oracle: attention or MLP, after its ln  v m   velocity, momentum (B, T, C)
    t h      time of a layer, step size (0-dim)      Y     momenta of an integrator (B, T, C)
    N        a substep's LayerNorm                   r     second moment (B, T, C)
    G M      g, m with each token as an H x D matrix R     each token's D x D second moment (B, T, D, D)

Initial values (GPT._init_weights and the tables below); those of a tensor follow from the seed and its name alone
    matrices, embeddings          N(0, 0.02)
    c_proj.weight                 N(0, 0.02 / sqrt(2 n_layer))
    LayerNorm gains, biases       1, 0
    scalars                       0-dim `<name>_raw`, stored before their sigmoid or softplus; 0 there, but
                                  nu: softplus^-1(1), lam: -5, h of linear attention: softplus^-1(1);
                                  an integrator's in INTEGRATORS and ParticleBlock, by their values
    c_b                           identity
    streams                       embed: aux_wte[idx] + aux_wpe[pos], learned, apart from wte and wpe; ones; eye; zero

Sources: [TMM] Gai, Huang, Wu, "Momentum Streams for Optimizer-Inspired Transformers", arXiv 2605.24425;
[SYMP] Stein, Li, Steidl, "SympFormer", arXiv 2603.16535; [YURII] Zimin, Polyanskiy, Rigollet, arXiv 2601.23236.
The backbone is GPT-2 with nanoGPT's names.
"""
import functools
import math
import zlib
from collections import ChainMap
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Callable, NamedTuple, Optional, get_args

import torch
import torch.nn as nn
from numpy.polynomial.legendre import leggauss
from torch.nn import functional as F

# ---------------------------------------------------------------------------------------------------------------------
# Pieces that templates share


def ema(b, old, new):
    """b old + (1 - b) new, in the dtype of old."""
    return torch.lerp(new.to(old.dtype), old, b)


def full_precision(f):
    """Decorator: f runs outside autocast, its first argument in float32 or wider."""
    @functools.wraps(f)
    def wrapped(u, *args):
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        if not autocasting(u):
            return f(u, *args)
        with torch.autocast(u.device.type, enabled=False):
            return f(u, *args)
    return wrapped


def autocasting(u):
    """Whether products on u's device are autocast; never on one, such as meta, that knows no autocast."""
    device = u.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@full_precision
def newton_schulz(m, H):
    """Each token of m (B, T, C), as an H x D matrix, with its singular values sent to about 1 ([TMM] app. B, muon).
    Five steps Y <- Q Y with Q = a I + b A + c A^2 and A = Y Y^T, from Y = M / f, f the Frobenius norm. Each Q is a
    polynomial in the first A: so the steps run on A <- Q A Q, and M meets the product P of all Q once, at the end."""
    M = m.unflatten(-1, (H, -1)).flatten(0, 1)                  # (B*T, H, D)
    tall = H > M.size(-1)
    M = M.mT if tall else M                                     # rows on the smaller side
    A = torch.bmm(M, M.mT)                                      # (B*T, H, H)
    f = A.diagonal(dim1=1, dim2=2).sum(-1).clamp_min(1e-24).sqrt()[:, None, None]
    A, P, aI = A / f ** 2, None, 3.4445 * torch.eye(A.size(1), dtype=A.dtype, device=A.device)
    for k in range(5):
        Q = torch.baddbmm(aI - 4.7750 * A, A, A, alpha=2.0315)
        P = torch.bmm(Q, P) if k else Q
        A = torch.bmm(torch.bmm(Q, A), Q) if k < 4 else None
    Y = torch.bmm(P / f, M)
    return (Y.mT if tall else Y).reshape(m.shape)


@full_precision
def gram(g, H):
    """G^T G of each token: (B, T, C) -> (B, T, D, D)."""
    G = g.unflatten(-1, (H, -1))
    return G.mT @ G


@full_precision
def whiten(m, R, H):
    """M R^{-1/2} of each token, R symmetric: (B, T, C), (B, T, D, D) -> (B, T, C) ([TMM] app. B, soap and shampoo)."""
    M, R = m.unflatten(-1, (H, -1)).flatten(0, 1), R.flatten(0, 1)      # (B*T, H, D), (B*T, D, D)
    tokens = 128 if m.device.type == "cpu" else len(M)          # on a CPU: so few at a time that they stay in cache
    return torch.cat([inverse_sqrt(*u) for u in zip(M.split(tokens), R.split(tokens))]).view(m.shape)


def inverse_sqrt(M, R):
    """M R^{-1/2} for a batch of matrices. X <- X W, Z <- Z W^2 with W = (3I - Z)/2 from Z = R/f, X = I sends X to
    Z^{-1/2}, f the Frobenius norm. Only M X is wanted, so M takes the place of X: two D x D products a step."""
    I = torch.eye(R.size(-1), dtype=R.dtype, device=R.device)
    R = R + 1e-6 * I
    f = torch.linalg.vector_norm(R, dim=(1, 2), keepdim=True)
    Z = R * (-0.5 / f)                                          # minus half of the Z above: W then costs one addition
    for k in range(10):
        W = Z + 1.5 * I
        M = torch.bmm(M, W)
        Z = torch.bmm(Z, torch.bmm(W, W)) if k < 9 else None
    return M * f.rsqrt()


# ---------------------------------------------------------------------------------------------------------------------
# Templates [TMM, 4.1 and app. B]: one optimizer step each. To add one, write its function and its row in TEMPLATES.
# Called as f(O, N, H, x, *streams, **scalars) with the scalars already transformed; returns x and the new streams.

EPS = 1e-8


def vanilla(O, N, H, x):                                        # gradient descent
    return x + O(x),


def static(O, N, H, x, e, nu):                                  # a control: embeddings at every depth, no dynamics
    return x + O(x) + nu * e, e


def hb(O, N, H, x, v, beta, gamma):                             # heavy ball
    v = N(beta * v + gamma * O(x))
    return x + v, v


def yurii(O, N, H, x, v, mu, beta, gamma):                      # Nesterov: the oracle looks ahead [YURII]
    v = N(beta * v + gamma * O(x + mu * v))
    return x + v, v


def tmm(O, N, H, x, v, mu, beta, gamma, nu):                    # triple momentum
    v = N(beta * v + gamma * O(x + mu * v))
    return x + nu * v, v


def adam(O, N, H, x, m, r, beta1, beta2, gamma):
    g = O(x)
    m, r = ema(beta1, m, g), ema(beta2, r, g.square())
    return x + gamma * N(m / (r.sqrt() + EPS)), m, r


def adamw(O, N, H, x, m, r, beta1, beta2, gamma, lam):          # decay of the token itself, not of a weight
    g = O(x)
    m, r = ema(beta1, m, g), ema(beta2, r, g.square())
    return (1 - lam) * x + gamma * N(m / (r.sqrt() + EPS)), m, r


def rmsprop(O, N, H, x, r, beta2, gamma):
    g = O(x)
    r = ema(beta2, r, g.square())
    return x + gamma * N(g / (r.sqrt() + EPS)), r


def muon(O, N, H, x, m, beta, gamma):
    m = ema(beta, m, O(x))
    return x + gamma * N(newton_schulz(m, H)), m


def ortho(O, N, H, x, gamma):
    return x + gamma * N(newton_schulz(O(x), H)),


def soap(O, N, H, x, m, R, beta1, betaR, gamma):
    g = O(x)
    m, R = ema(beta1, m, g), ema(betaR, R, gram(g, H))
    return x + gamma * N(whiten(m, R, H)), m, R


def shampoo(O, N, H, x, R, betaR, gamma):
    g = O(x)
    R = ema(betaR, R, gram(g, H))
    return x + gamma * N(whiten(g, R, H)), R


class Template(NamedTuple):
    step: Callable
    streams: dict = {}                                          # name: what it holds before the first block
    scalars: dict = {}                                          # name: (transform, raw initial value, before it)
    scale_free: bool = False                                    # the step is the same for any multiple of O
    norm: bool = True                                           # whether the step has a LayerNorm N of its own


def raw(transform, value):
    """The raw scalar whose sigmoid or softplus is value."""
    return math.log(value / (1 - value)) if transform is torch.sigmoid else math.log(math.expm1(value))


# raw 0 is the value 1/2 of a sigmoid and log 2 of a softplus
sg, sp, sp1 = (torch.sigmoid, 0.0), (F.softplus, 0.0), (F.softplus, raw(F.softplus, 1.0))

TEMPLATES = {
    "vanilla": Template(vanilla, norm=False),
    "static": Template(static, dict(e="embed"), dict(nu=(F.softplus, raw(F.softplus, 0.01))), norm=False),
    "hb": Template(hb, dict(v="embed"), dict(beta=sg, gamma=sp)),
    "yurii": Template(yurii, dict(v="embed"), dict(mu=sg, beta=sg, gamma=sp)),
    "tmm": Template(tmm, dict(v="embed"), dict(mu=sg, beta=sg, gamma=sp, nu=sp1)),
    "adam": Template(adam, dict(m="embed", r="ones"), dict(beta1=sg, beta2=sg, gamma=sp)),
    "adamw": Template(adamw, dict(m="embed", r="ones"), dict(beta1=sg, beta2=sg, gamma=sp, lam=(torch.sigmoid, -5.0))),
    "rmsprop": Template(rmsprop, dict(r="ones"), dict(beta2=sg, gamma=sp)),
    "muon": Template(muon, dict(m="embed"), dict(beta=sg, gamma=sp)),
    "ortho": Template(ortho, {}, dict(gamma=sp), scale_free=True),
    "soap": Template(soap, dict(m="embed", R="eye"), dict(beta1=sg, betaR=sg, gamma=sp)),
    "shampoo": Template(shampoo, dict(R="eye"), dict(betaR=sg, gamma=sp)),
}

# ---------------------------------------------------------------------------------------------------------------------
# Integrators [SYMP, 4.3 and 5.2]: tokens as particles, positions X and momenta Y, under the damping alpha(t). To add
# one, write its function and its row in INTEGRATORS. Called as f(velocity, force, Y, t, past, **scalars), where
# velocity(Y) is F(Y), force(Y) or, sparing work, force(Y, F(Y)) is G(Y), both at X, and past is what the layer before
# left. Returns v, by which positions move, X' = X + h_x v; the new momenta, before their LayerNorm; and what the next
# layer will need.


def alpha(t, damping_r, damping_m):
    """The damping at time t."""
    return damping_r / t + damping_m


def sigma(t, h, damping_r, damping_m):
    """What the damping leaves of the momenta after a step h: exp(-integral of alpha over [t, t + h])."""
    return torch.exp(-damping_r * torch.log1p(h / t) - damping_m * h)


NODES, WEIGHTS = (row.tolist() for row in leggauss(6))          # Gauss-Legendre on [-1, 1]


def exp_weight(t, h, damping_r, damping_m):
    """What it leaves of a unit force that acts during the step: the integral over s in [0, h] of exp(-integral of alpha
    over [t + s, t + h]), by six nodes in h - s."""
    nodes, weights = (torch.stack([h.new_full((), u) for u in row]) for row in (NODES, WEIGHTS))
    rest = h * (nodes + 1) / 2                                  # new_full: constants without a copy from the host
    return h / 2 * (weights * torch.exp(damping_r * torch.log1p(-rest / (t + h)) - damping_m * rest)).sum()


def ab2(h, f, past):
    """Adams-Bashforth with steps h_prev, h: the right-hand side f extrapolated to the middle of the step."""
    if past is None:                                            # the first layer: Euler
        return f
    h_prev, f_prev = past
    return f + 0.5 * h / h_prev * (f - f_prev)


def plain_euler(velocity, force, Y, t, past, h_x, h_y, a):
    v = velocity(Y)
    return v, a * Y + h_y * force(Y, v), None


def presymp_euler(velocity, force, Y, t, past, h_x, h_y, **damping):
    v = velocity(Y)
    return v, sigma(t, h_y, **damping) * (Y + h_y * force(Y, v)), None


def conformal_euler(velocity, force, Y, t, past, h_x, h_y, **damping):
    Y = sigma(t, h_y, **damping) * (Y + h_y * force(Y))
    return velocity(Y), Y, None


def presymp_exp_euler(velocity, force, Y, t, past, h_x, h_y, **damping):
    v = velocity(Y)
    return v, sigma(t, h_y, **damping) * Y + exp_weight(t, h_y, **damping) * force(Y, v), None


def presymp_ab2(velocity, force, Y, t, past, h_x, h_y, **damping):
    v, (past_x, past_y) = velocity(Y), past or (None, None)
    f = force(Y, v) - alpha(t, **damping) * Y
    return ab2(h_x, v, past_x), Y + h_y * ab2(h_y, f, past_y), ((h_x, v), (h_y, f))


def presymp_etd_ab2(velocity, force, Y, t, past, h_x, h_y, **damping):
    v, (past_x, past_y) = velocity(Y), past or (None, None)
    g, decay = force(Y, v), sigma(t, h_y, **damping)
    return ab2(h_x, v, past_x), decay * (Y + h_y * ab2(h_y, g, past_y)), ((h_x, v), (h_y, decay * g))


def drift(velocity, force, Y, t, past, h_x):                    # the last layer: new momenta would reach nothing
    return velocity(Y), None, None


def drift_ab2(velocity, force, Y, t, past, h_x):
    return ab2(h_x, velocity(Y), past and past[0]), None, None


class Integrator(NamedTuple):
    step: Callable
    order: int                                                  # error ~ h^order, by the tests
    scalars: dict                                               # name: (transform, initial value after it; None: h0)
    last: Optional[Callable] = None                             # a step of h_x alone for the last layer; None: step


steps = dict(h_x=(F.softplus, None), h_y=(F.softplus, None))
damped = steps | dict(damping_r=(F.softplus, 3.0), damping_m=(F.softplus, 1e-4))

INTEGRATORS = {
    "plain_euler": Integrator(plain_euler, 1, steps | dict(a=(torch.sigmoid, 0.9)), drift),
    "presymp_euler": Integrator(presymp_euler, 1, damped, drift),
    "conformal_euler": Integrator(conformal_euler, 1, damped),
    "presymp_exp_euler": Integrator(presymp_exp_euler, 1, damped, drift),
    "presymp_ab2": Integrator(presymp_ab2, 2, damped, drift_ab2),
    "presymp_etd_ab2": Integrator(presymp_etd_ab2, 2, damped, drift_ab2),
}

# ---------------------------------------------------------------------------------------------------------------------
# Oracles


class Cache:
    """What one block keeps of the tokens of a window of up to size tokens, so that the next one need not read them
    again. Its calls are told apart by their order: the i-th call of a pass finds what the i-th call of the passes
    before has left. first: how many tokens those passes had; GPT.features begins a pass by next_pass."""

    def __init__(self, size):
        self.size, self.first, self.T, self.slots, self.call = size, 0, 0, [], 0

    def next_pass(self, first, T):
        """T tokens after first others. Raises ValueError if T is not 1 then, or those before were not as many."""
        if first and T > 1:
            raise ValueError(f"{T} tokens after {first} others: it must be one at a time")
        if first and first != self.first + self.T:
            raise ValueError(f"{first} tokens before this pass: the cache has read {self.first + self.T}")
        self.first, self.T, self.call = first, T, 0
        if first == 0:
            self.slots = []

    def once(self, f):
        """In the first pass f(), which is kept; in a later one what this call, by its order, kept there."""
        if self.first == 0:
            self.slots.append(f())
        self.call += 1
        return self.slots[self.call - 1]

    def extend(self, u):
        """u (..., T, C) of this pass's tokens -> (..., first + T, C) of all tokens so far."""
        kept, T = self.once(lambda: u.new_empty(*u.shape[:-2], self.size, u.size(-1))), u.size(-2)
        kept.narrow(-2, self.first, T).copy_(u)
        return kept.narrow(-2, 0, self.first + T)

    def state(self, k, v):
        """sum_j k_j v_j^T over all tokens so far, (B, T, C) twice -> (B, C, C); float32 or wider, as sums must be."""
        wide = torch.promote_types(v.dtype, torch.float32)
        state = self.once(lambda: (k.mT @ v).to(wide))
        return state.addcmul_(k.mT.to(wide), v.to(wide)) if self.first else state       # later passes: T is 1


class Scalars(nn.Module):
    """{name: (transform, initial value)} -> learned 0-dim scalars, each stored before its transform, as <name>_raw."""

    def __init__(self, scalars):
        super().__init__()
        self.transforms = {name: transform for name, (transform, _) in scalars.items()}
        for name, (_, value) in scalars.items():
            self.register_parameter(name + "_raw", nn.Parameter(torch.tensor(value)))

    def scalars(self, cache=None):
        """{name: value}; with a cache those of its first pass."""
        if cache:
            return cache.once(self.scalars)
        return {name: f(getattr(self, name + "_raw")) for name, f in self.transforms.items()}


class SoftmaxAttention(nn.Module):
    """Causal multi-head attention, (B, T, C) -> (B, T, C). fused=False takes the hand-written path: the same numbers,
    and differentiable twice and in forward mode on every device, as the probes need."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout, self.fused = config.n_head, config.dropout, True
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def qkv(self, x):
        """Each (B, H, T, D)."""
        return self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x)
        if cache:
            k, v = cache.extend(k), cache.extend(v)
        dropout = self.dropout if self.training else 0.0
        if self.fused:                                          # one token after others sees all of them
            causal = q.size(-2) == k.size(-2)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        else:
            y = F.dropout(attention_weights(q, k), dropout) @ v
        y = y.transpose(1, 2).flatten(2)                        # (B, H, T, D) -> (B, T, C)
        return F.dropout(self.c_proj(y), dropout)


def attention_weights(q, k):
    """Rows of causal softmax attention, of the last T of n tokens: (B, H, T, D), (B, H, n, D) -> (B, H, T, n)."""
    T, n = q.size(-2), k.size(-2)
    hidden = torch.ones(T, n, dtype=torch.bool, device=q.device).triu(1 + n - T)
    return (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, -math.inf).softmax(dim=-1)


class LinearAttention(Scalars):
    """O(x)_i = h/i sum_{j<=i} (x_j^T A x_i) V x_j, with A = c_a, V = c_v; no heads ([SYMP, section 3]). h is 1
    where the template takes no notice of it."""

    def __init__(self, config):
        super().__init__({} if TEMPLATES[config.template].scale_free else dict(h=sp1))
        self.dropout = config.dropout
        self.c_a = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_v = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cache=None):
        q = self.c_a(x) * (self.scalars(cache).get("h", 1.0) / visible(x, cache=cache))
        y = linear_attention(q, x, self.c_v(x), cache=cache)
        return F.dropout(y, self.dropout, self.training)


def visible(x, causal=True, cache=None):
    """n_i, how many tokens token i of x (B, T, C) sees, itself included: (T, 1)."""
    if not causal:
        return x.size(1)
    dtype = torch.promote_types(x.dtype, torch.float32)         # bfloat16 counts to 256
    first = cache.first if cache else 0
    return torch.arange(first + 1, first + x.size(1) + 1, dtype=dtype, device=x.device).unsqueeze(-1)


def linear_attention(q, k, v, causal=True, cache=None):
    """sum_{j<=i} (q_i . k_j) v_j for each token i, or the sum over all j; all (B, T, C). Cost linear in T: within a
    chunk the masked scores, between chunks the C x C state sum_j k_j v_j^T."""
    if not causal:
        return q @ (k.mT @ v)
    if cache:
        state = cache.state(k, v)
        if cache.first:                                         # one token after others
            return q @ state
    B, T, C = q.shape
    n = -(-T // max(C, 64))                                     # chunks of about C: scores and states then cost alike
    K = -(-T // n)
    q, k, v = (F.pad(u, (0, 0, 0, n * K - T)).view(B, n, K, C) for u in (q, k, v))
    y = (q @ k.mT).tril() @ v                                   # (B, n, K, C)
    if n > 1:
        state = (k[:, :-1].mT @ v[:, :-1]).cumsum(1)            # (B, n-1, C, C), what the chunks before have left
        y = y + q @ F.pad(state, (0, 0, 0, 0, 1, 0))
    return y.view(B, n * K, C)[:, :T]


ATTENTION = {"softmax": SoftmaxAttention, "linear": LinearAttention}


@full_precision
def exp_scores(s, causal):
    """Scores (B, T, n) of the last T of n tokens -> exp(s) where token i sees token j, else 0; clamped, so that z^2 can
    neither over- nor underflow."""
    M = s.clamp(-10, 10).exp()
    return M.tril(s.size(2) - s.size(1)) if causal else M


@full_precision
def derived_b(W_Q, W_K, W_V, scale):
    """Sym(W_V (A + 1e-6 I)^{-1}) with A = scale W_Q^T W_K, (C, C)."""
    A = scale * W_Q.T @ W_K + 1e-6 * torch.eye(len(W_V), dtype=W_V.dtype, device=W_V.device)
    X, _ = torch.linalg.solve_ex(A, W_V, left=False)            # _ex: without host synchronisation
    return (X + X.T) / 2


class SoftmaxParticles(nn.Module):
    """Positions x (B, T, C) -> velocity, force of momenta Y (B, T, C), under the kernel M_ij = exp(s_ij), j <= i, where
    s_ij = q_i . k_j / (H sqrt(D)) = x_i^T A x_j, the mean of the heads' scores, is one head of width C. With n_i = i,
    z_i = (1/n_i) sum_j M_ij and r_i = Y_i^T B Y_i / z_i^2 ([SYMP, 4.3 and 6.1])

        velocity(Y)_i = B Y_i / z_i         force(Y)_i = c_proj((1 / 2 n_i) sum_j M_ij (r_i + r_j + 2) v_j)

    These come from an energy of n particles, kinetic and of interaction. Without the mask, for symmetric A and B, and
    with A x_j in the place of v_j and of c_proj, they are n dH/dY and -n dH/dX of

        H(X, Y) = (1/2n) sum_i Y_i^T B Y_i / z_i - (1/2n^2) sum_ij M_ij

    With the mask token i has the empirical measure of its own prefix, hence n_i: what a key would feel of the queries
    that see it, which come later, is left out.

    symp_b: B = c_b, I or Sym(W_V A^{-1}). symp_force 'hamiltonian': A x_j for v_j, and no c_proj. M, z, r and what they
    multiply are float32 or wider under autocast. Dropout acts on what c_proj gives. causal = False on an existing model
    lets every token see all."""

    def __init__(self, config, with_force):
        super().__init__()
        C, self.dropout, self.causal = config.n_embd, config.dropout, True
        self.scale = 1 / math.sqrt(config.n_head * C)           # 1 / (H sqrt(D))
        self.b, self.hamiltonian = config.symp_b, config.symp_force == "hamiltonian"
        value = with_force and not self.hamiltonian
        self.c_attn = nn.Linear(C, (3 if value or self.b == "derived" else 2) * C, bias=config.bias)
        self.c_b = nn.Linear(C, C, bias=False) if self.b == "free" else None
        self.c_proj = nn.Linear(C, C, bias=config.bias) if value else None

    def forward(self, x, cache=None):
        q, k, *v = self.c_attn(x).split(x.size(-1), dim=-1)
        keep = cache.extend if cache else lambda u: u
        M, n = exp_scores(torch.bmm(self.scale * q, keep(k).mT), self.causal), visible(x, self.causal, cache)
        z = M.sum(-1, keepdim=True) / n                         # (B, T, 1); of M (B, T, T), with a cache also wider
        B = self.c_b.weight if self.b == "free" else None
        if self.b == "derived":
            derive = lambda: derived_b(*self.c_attn.weight.chunk(3), self.scale)
            B = cache.once(derive) if cache else derive()

        @full_precision
        def velocity(Y):
            return (Y if self.b == "identity" else F.linear(Y, B)) / z

        @full_precision
        def mean_force(Y, f):
            u = self.scale * k.to(Y.dtype) @ self.c_attn.weight[:x.size(-1)] if self.hamiltonian else v[0]
            r = (Y * f).sum(-1, keepdim=True) / z
            Mu, Mru = torch.bmm(M, keep(torch.cat([u, r * u], dim=-1))).chunk(2, dim=-1)
            return ((r + 2) * Mu + Mru) / (2 * n)

        def force(Y, f=None):                                   # f: velocity(Y), if it is known
            G = mean_force(Y, velocity(Y) if f is None else f)
            return G if self.hamiltonian else F.dropout(self.c_proj(G), self.dropout, self.training)

        return velocity, force


class LinearParticles(nn.Module):
    """The same for the linear kernel x_i^T A x_j, with A = c_a, V = c_v ([SYMP, section 3]):

        velocity(Y)_i = (1/n_i) sum_j (x_j^T A x_i) Y_j         force(Y)_i = V x_i - (1/n_i) sum_j (Y_i . Y_j) A x_j"""

    def __init__(self, config, with_force):
        super().__init__()
        self.dropout, self.causal = config.dropout, True
        self.c_a = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_v = nn.Linear(config.n_embd, config.n_embd, bias=False) if with_force else None

    def forward(self, x, cache=None):
        n, a = visible(x, self.causal, cache), self.c_a(x)

        def velocity(Y):
            return linear_attention(a / n, x, Y, self.causal, cache)

        def force(Y, f=None):
            G = self.c_v(x) - linear_attention(Y / n, Y, a, self.causal, cache)
            return F.dropout(G, self.dropout, self.training)

        return velocity, force


PARTICLES = {"softmax": SoftmaxParticles, "linear": LinearParticles}


def layer_norm(config):
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x):
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


# ---------------------------------------------------------------------------------------------------------------------
# The network


class Substep(Scalars):
    """One optimizer step: a template with its scalars and its auxiliary LayerNorm."""

    def __init__(self, config):
        self.template = TEMPLATES[config.template]
        super().__init__(self.template.scalars)
        self.n_head, self.ln = config.n_head, layer_norm(config) if self.template.norm else None

    def forward(self, O, x, s, cache=None):
        x, *s = self.template.step(O, self.ln, self.n_head, x, *s, **self.scalars(cache))
        return x, s


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = layer_norm(config), ATTENTION[config.attention](config)
        self.ln_2, self.mlp = layer_norm(config), MLP(config)
        self.attn_step, self.mlp_step = Substep(config), Substep(config)

    def forward(self, x, s, cache=None):
        x, s = self.attn_step(lambda u: self.attn(self.ln_1(u), cache), x, s, cache)
        x, s = self.mlp_step(lambda u: self.mlp(self.ln_2(u)), x, s, cache)
        return x, s


class ParticleBlock(nn.Module):
    """One layer of an integrator ([SYMP, 5.2]): attention moves the positions x and the momenta Y, then the MLP moves
    the positions alone, looking ahead along their velocity v. s: Y (B, T, C), the time t (0-dim), what the step before
    has left. In the last layer what only new momenta would need is not there. t moves by h_x without gradient: a step
    size does not learn through the damping of later layers."""

    def __init__(self, config, last):
        super().__init__()
        self.step, _, scalars, short = INTEGRATORS[config.template]
        with_force = not (last and short)
        if not with_force:
            self.step, scalars = short, dict(h_x=scalars["h_x"])
        if config.lookahead:
            scalars = scalars | dict(mu=(torch.sigmoid, 0.001))
        self.ln_1, self.attn = layer_norm(config), PARTICLES[config.attention](config, with_force)
        self.ln_2, self.mlp = layer_norm(config), MLP(config)
        self.attn_step = Scalars({name: (f, raw(f, config.h0 if value is None else value))
                                  for name, (f, value) in scalars.items()})
        self.attn_step.ln = None if last else layer_norm(config)
        self.mlp_step = Scalars(dict(mu=(torch.sigmoid, raw(torch.sigmoid, 0.9)), gamma=sp1))

    def forward(self, x, s, cache=None):
        (Y, t, past), c, c_mlp = s, dict(self.attn_step.scalars(cache)), self.mlp_step.scalars(cache)
        mu = c.pop("mu", None)                                  # of the look-ahead, if there is one
        velocity, force = self.attn(self.ln_1(x if mu is None else x + mu * Y), cache)
        v, Y, past = self.step(velocity, force, Y, t, past, **c)
        Y = self.attn_step.ln(Y) if self.attn_step.ln else None
        x = x + c["h_x"] * v
        x = x + c_mlp["gamma"] * self.mlp(self.ln_2(x + c_mlp["mu"] * v))
        return x, (Y, t + c["h_x"].detach(), past)


def setting(default, help, choices=None, low=None, high=None, fixed=False):
    """A field of a dataclass: its default, its line of documentation, the values it may have, and whether a resumed run
    must keep it."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high, fixed=fixed))


class Settings:
    """What a dataclass of settings inherits. Raises ValueError for a value that its setting(...) does not allow."""

    def __post_init__(self):
        for f in fields(self):
            value, choices, low, high = getattr(self, f.name), *map(f.metadata.get, ("choices", "low", "high"))
            if value is None and type(None) in get_args(f.type):
                continue
            if int in (f.type, *get_args(f.type)) and not isinstance(value, Integral):
                raise ValueError(f"{f.name} is {value!r}: it must be of type int")
            if choices and value not in [*choices]:
                raise ValueError(f"{f.name} is {value!r}: it must be one of {', '.join(choices)}")
            if low is not None and not value >= low:            # not: NaN too
                raise ValueError(f"{f.name} is {value}: it must be at least {low}")
            if high is not None and not value <= high:
                raise ValueError(f"{f.name} is {value}: it must be at most {high}")


@dataclass
class GPTConfig(Settings):
    """The shape of a model. Raises ValueError for one that cannot be."""
    template: str = setting("tmm", "residual template or integrator, a key of model.TEMPLATES or model.INTEGRATORS",
                            ChainMap(INTEGRATORS, TEMPLATES))      # which lists TEMPLATES first
    attention: str = setting("softmax", "'softmax' or 'linear'", ATTENTION)
    aux_init: str = setting("auto", "start of the momentum stream: 'auto' (the template's own), 'embed' or 'zero'",
                            ("auto", "embed", "zero"))
    h0: float = setting(0.1, "integrators: where the learned step sizes start", low=1e-6, high=100)
    t0: float = setting(1.0, "integrators: the time of the first layer", low=1e-6, high=100)
    lookahead: bool = setting(False, "integrators: attention reads X + mu Y")
    symp_force: str = setting("value", "softmax integrators' force: 'value' (c_proj of v) or 'hamiltonian' (the "
                                       "theory's A x)", ("value", "hamiltonian"))
    symp_b: str = setting("free", "softmax integrators' matrix B: 'free' (learned), 'identity' or 'derived' (from Q, "
                                  "K, V)", ("free", "identity", "derived"))
    n_layer: int = setting(12, "blocks", low=1)
    n_head: int = setting(12, "attention heads, and rows of the matrix templates", low=1)
    n_embd: int = setting(768, "channels", low=1)
    block_size: int = setting(1024, "tokens in a sequence", low=1)
    dropout: float = setting(0.0, "dropout probability", low=0, high=1)
    bias: bool = setting(False, "biases in linear layers and LayerNorms")
    vocab_size: int = setting(50304, "rows of the embedding: the tokenizer's size padded to a multiple of 64", low=1)
    tokenizer_size: Optional[int] = setting(None, "ids from here on are padding, never sampled", low=1)

    def __post_init__(self):
        super().__post_init__()
        if self.tokenizer_size is not None and self.tokenizer_size > self.vocab_size:
            raise ValueError(f"tokenizer_size is {self.tokenizer_size}: it must be at most vocab_size, "
                             f"{self.vocab_size}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd is {self.n_embd}: it must be a multiple of n_head, {self.n_head}")
        for name, owner in self.idle().items():
            raise ValueError(f"{name} is {getattr(self, name)!r}: {owner} has no use for it, set "
                             f"{getattr(GPTConfig, name)!r}")

    def idle(self):
        """{setting that is not at its default: what has no use for it}"""
        idle = {}
        if self.attention == "linear":
            idle.update(dict.fromkeys(("symp_force", "symp_b"), "linear attention"))
        if self.template in [*TEMPLATES]:
            idle.update(dict.fromkeys(("h0", "t0", "lookahead", "symp_force", "symp_b"), self.template))
            if "embed" not in TEMPLATES[self.template].streams.values():
                idle["aux_init"] = self.template
        defaults = lambda name: (getattr(GPTConfig, name), getattr(type(self), name))   # a subclass's may be None
        return {name: owner for name, owner in idle.items() if getattr(self, name) not in defaults(name)}


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits x W^T, for x (N, C), W (V, C), targets (N,), -1 not counted. The logits exist
    for a chunk of tokens at a time; their gradient is taken at once, nothing is computed twice. Differentiable once.

    What F.linear_cross_entropy of torch 2.13 lacks for it: it knows no autocast, and cast to bfloat16 it sums the loss
    and dW over its chunks in bfloat16 (the loss 6% off with 128 chunks); second derivatives that a caller asks for are
    wrong without an error; and targets of -1 alone give NaN gradients."""

    @staticmethod
    def forward(ctx, x, W, targets):
        n, total = (targets != -1).sum(), x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        dx, dW = torch.empty_like(x), torch.zeros_like(W) if ctx.needs_input_grad[1] else None
        tokens = max(1, 2 ** 23 // len(W))
        for x_c, dx_c, t in zip(x.split(tokens), dx.split(tokens), targets.split(tokens)):
            counted, t = (t != -1).unsqueeze(1), t.where(t != -1, 0).unsqueeze(1)
            z = F.linear(x_c, W).to(total.dtype)
            z -= z.logsumexp(-1, keepdim=True)
            total -= (z.gather(1, t) * counted).sum()
            if any(ctx.needs_input_grad):
                z = z.exp_().scatter_add_(1, t, -torch.ones_like(z[:, :1]))
                z *= counted.to(z.dtype) / n.clamp_min(1)       # the gradient in the logits
                z = z.to(x.dtype)
                dx_c.copy_(z @ W)
                if dW is not None and autocasting(x):
                    dW += z.T @ x_c
                elif dW is not None:
                    dW.addmm_(z.T, x_c)                         # without a V x C product beside dW
        ctx.save_for_backward(dx, dW)
        return total / n

    @staticmethod
    def backward(ctx, g):
        # not once_differentiable, which lets a constant g through
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("ChunkedLoss is differentiable once: take model(idx, targets), whose logits are whole")
        dx, dW = ctx.saved_tensors                              # in place: here memory is at its peak. A second
        return dx.mul_(g), None if dW is None else dW.mul_(g), None     # backward is refused for it


class GPT(nn.Module):
    """model(idx, targets=None) -> (logits, loss or None). Its random tensors follow from torch's generator: from the
    seed alone, right after torch.manual_seed(seed)."""

    def __init__(self, config):
        super().__init__()
        self.config, seed = config, torch.randint(2 ** 31, (), device="cpu").item()
        V, T, C = config.vocab_size, config.block_size, config.n_embd
        if config.template in TEMPLATES:
            aux = "zero" if config.aux_init == "zero" else "embed"
            self.streams = [aux if kind == "embed" else kind for kind in TEMPLATES[config.template].streams.values()]
            blocks = [Block(config) for _ in range(config.n_layer)]
        else:
            self.streams = ["embed" if config.aux_init == "embed" else "zero", "t0", "none"]    # Y, t, past
            blocks = [ParticleBlock(config, last=i == config.n_layer - 1) for i in range(config.n_layer)]
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(V, C),
            wpe=nn.Embedding(T, C),
            h=nn.ModuleList(blocks),
            ln_f=layer_norm(config)))
        if "embed" in self.streams:
            self.transformer.update(dict(aux_wte=nn.Embedding(V, C), aux_wpe=nn.Embedding(T, C)))
        self.lm_head = nn.Linear(C, V, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self._init_weights(seed)

    def _init_weights(self, seed):
        """Each tensor is drawn by a generator of its own, from (seed, name): variants that share a tensor share its
        values. LayerNorms and scalars are made with theirs; the table is at the top of this file."""
        for name, p in self.named_parameters():
            if name.endswith("c_b.weight"):
                nn.init.eye_(p)
            elif p.ndim == 2 and not p.is_meta:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                p.data.copy_(std * torch.randn(p.shape, generator=generator, device="cpu"))     # for any device
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def num_params(self):
        """The number of parameters, embeddings included, the tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def fused_attention(self, on):
        """Softmax attention by F.scaled_dot_product_attention (True, as made) or by the hand-written path (False)."""
        for block in self.transformer.h:
            block.attn.fused = on

    def init_stream(self, kind, idx, pos, x):
        """What an auxiliary stream holds before the first block; (B, T, C) or, for R, (B, T, D, D), by broadcasting."""
        if kind == "embed":
            return self.transformer.aux_wte(idx) + self.transformer.aux_wpe(pos)
        if kind == "eye":
            return torch.eye(self.config.n_embd // self.config.n_head, dtype=x.dtype, device=x.device)[None, None]
        if kind == "zero":
            return torch.zeros_like(x)
        return {"ones": x.new_ones(1, 1, 1), "t0": x.new_full((), self.config.t0), "none": None}[kind]

    def features(self, idx, caches=None, first=0):
        """Ids (B, T) -> what the head reads, (B, T, C). Raises ValueError if T is 0 or above block_size. caches: one
        Cache a block, to be filled by the first tokens (first = 0), then read and extended by one token (T = 1) at a
        time, before which there were first others in all; another first or T is a ValueError. Without gradients."""
        T = idx.size(1)
        if first and not caches:
            raise ValueError(f"first is {first}: it must be 0, or with caches how many tokens they have read")
        if not 0 < T <= self.config.block_size - first:
            raise ValueError(f"{first + T} tokens in a sequence: it must be 1 to block_size, {self.config.block_size}")
        pos = torch.arange(first, first + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for cache in caches or ():                              # after wte, which may refuse an id
            cache.next_pass(first, T)
        s = [self.init_stream(kind, idx, pos, x) for kind in self.streams]
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            x, s = block(x, s, cache=caches and caches[i])
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, return_logits=True):
        """Ids (B, T) -> logits (B, T, V) for every position, and the mean loss in nats if targets (B, T) are given
        (-1: not counted). return_logits=False: the same loss from a chunk of tokens at a time, and None for them."""
        x = self.features(idx)
        if not return_logits:
            return None, ChunkedLoss.apply(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def next_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None):
        """Yields the next tokens (B, 1) of the prompts idx (B, T), one at a time; see generate."""
        size, begin = self.config.block_size, None
        new = idx[:, -size:]
        text = [new]
        for n in range(new.size(1), new.size(1) + max_new_tokens):
            if begin != window_start(n, size):                  # read the whole window, else the new token alone
                begin, caches = window_start(n, size), [Cache(size) for _ in self.transformer.h]
                new = torch.cat(text, dim=1)[:, begin:]
            x = self.features(new, caches, first=n - begin - new.size(1))
            logits = self.lm_head(x[:, -1]).float()
            new = sample(logits[:, :self.config.tokenizer_size], temperature, top_k, top_p)
            yield new
            text.append(new)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None):
        """Prompts (B, T) -> (B, T + max_new_tokens).

        temperature 0 takes the likeliest token and draws no random number; top_k keeps the k likeliest tokens, top_p
        the likeliest ones that together hold that probability. Of a long prompt the last block_size tokens are read,
        and when these and the new ones outgrow block_size, the first quarter is dropped and the rest read again, at
        positions from 0 on (window_start). Ids at or above config.tokenizer_size are never sampled. Dropout is off
        meanwhile. Raises ValueError for temperature < 0, top_k < 1, top_p outside (0, 1] and an empty prompt.
        """
        training = self.training
        self.eval()
        try:
            return torch.cat([idx, *self.next_tokens(idx, max_new_tokens, temperature, top_k, top_p)], dim=1)
        finally:
            self.train(training)


def window_start(n, block_size):
    """Where the window begins that predicts what follows n tokens: 0, and once they outgrow block_size, the first
    multiple of a quarter of block_size from where they fit. A window that moved would have to be read again, for its
    positions are learned: so it moves by a quarter at a time, and a new token costs at most four on average."""
    step = -(-block_size // 4)
    return max(0, -(-(n - block_size) // step) * step)


def sample(logits, temperature, top_k, top_p):
    """Logits (B, V) -> token ids (B, 1)."""
    if not temperature >= 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature}, top_k {top_k}, top_p {top_p}: they must be >= 0, >= 1, in (0, 1]")
    if temperature < 1e-6:                                      # 0, or so small that the division would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    p = logits.softmax(dim=-1)
    if top_p is not None:
        ordered, order = p.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= max(top_p, 1e-6)   # the likelier ones already hold top_p
        p = p.scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(p, 1)
