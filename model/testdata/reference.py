"""Reference values for the model tests, from PyTorch in float64.

The model is written again here from its formulas (DeepSeek-V3 report, equations 1 to 25), token by token and without any
of the engine's organisation: one weight dictionary, one sequence at a time, gradients by autograd. Run with no argument
beside the Go tests; it writes NAME.json (configuration, batches, losses, index) and NAME.bin (float32, little endian).

    python3 reference.py
"""
import json
import math
import os

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
HERE = os.path.dirname(os.path.abspath(__file__))
F64 = torch.float64

BASE = dict(vocab=37, dim=24, layers=3, dense_layers=1, dense_inter=32, tie_embeddings=False, init_std=0.2,
            norm_eps=1e-6, context=16,
            attention=dict(kind="mla", heads=2, q_lora=12, kv_lora=10, nope=6, rope=4, v=5, rope_theta=100.0),
            moe=dict(experts=8, top_k=3, shared=2, inter=10, groups=4, top_groups=2, score="sigmoid", normalize=True,
                     scale=2.5, seq_aux=0.01),
            mtp=dict(depth=1))


def variant(**changes):
    c = json.loads(json.dumps(BASE))
    for k, v in changes.items():
        if isinstance(v, dict):
            c[k].update(v)
        else:
            c[k] = v
    return c


VARIANTS = {
    "full": variant(),
    "softmax_tied_mtp2": variant(layers=2, dense_layers=0, tie_embeddings=True, attention=dict(q_lora=0),
                                 moe=dict(score="softmax", normalize=False, scale=1.7, shared=1, top_k=2, seq_aux=0.02),
                                 mtp=dict(depth=2)),
    "plain_tied": variant(layers=2, tie_embeddings=True,
                          moe=dict(shared=0, groups=1, top_groups=1, scale=1.0, seq_aux=0.0), mtp=dict(depth=0)),
}
LAMBDA, LR, B1, B2, EPS, DECAY, CLIP, BIAS_SPEED, STEPS = 0.3, 3e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, 0.01, 10


def shapes(c):
    a, m, d = c["attention"], c["moe"], c["dim"]
    H, qk = a["heads"], a["nope"] + a["rope"]
    out = {"model.embed_tokens.weight": (c["vocab"], d), "model.norm.weight": (d,)}
    if not c["tie_embeddings"]:
        out["lm_head.weight"] = (c["vocab"], d)
    for l in range(c["layers"] + c["mtp"]["depth"]):
        p = f"model.layers.{l}."
        if l >= c["layers"]:
            out |= {p + "enorm.weight": (d,), p + "hnorm.weight": (d,), p + "eh_proj.weight": (d, 2 * d),
                    p + "shared_head.norm.weight": (d,)}
        out |= {p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)}
        s = p + "self_attn."
        if a["q_lora"]:
            out |= {s + "q_a_proj.weight": (a["q_lora"], d), s + "q_a_layernorm.weight": (a["q_lora"],),
                    s + "q_b_proj.weight": (H * qk, a["q_lora"])}
        else:
            out |= {s + "q_proj.weight": (H * qk, d)}
        out |= {s + "kv_a_proj_with_mqa.weight": (a["kv_lora"] + a["rope"], d),
                s + "kv_a_layernorm.weight": (a["kv_lora"],),
                s + "kv_b_proj.weight": (H * (a["nope"] + a["v"]), a["kv_lora"]),
                s + "o_proj.weight": (d, H * a["v"])}

        def ffn(q, w):
            return {q + "gate_proj.weight": (w, d), q + "up_proj.weight": (w, d), q + "down_proj.weight": (d, w)}
        if l < c["dense_layers"]:
            out |= ffn(p + "mlp.", c["dense_inter"])
            continue
        out |= {p + "mlp.gate.weight": (m["experts"], d)}
        for e in range(m["experts"]):
            out |= ffn(p + f"mlp.experts.{e}.", m["inter"])
        if m["shared"]:
            out |= ffn(p + "mlp.shared_experts.", m["shared"] * m["inter"])
    return out


class Net:
    def __init__(self, c, W, bias):
        self.c, self.W, self.bias = c, W, bias
        self.counts = {l: [0] * c["moe"]["experts"] for l in bias}

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["norm_eps"]) * self.W[name]

    def rope(self, x, pos):
        n, out = x.shape[-1], []
        for j in range(n // 2):
            t = pos * self.c["attention"]["rope_theta"] ** (-2 * j / n)
            a, b = x[2 * j], x[2 * j + 1]
            out += [a * math.cos(t) - b * math.sin(t), a * math.sin(t) + b * math.cos(t)]
        return torch.stack(out)

    def attention(self, x, p):
        """x: the rows of one segment."""
        a, W, T = self.c["attention"], self.W, x.shape[0]
        nope, rp, dv, H = a["nope"], a["rope"], a["v"], a["heads"]
        if a["q_lora"]:
            q = self.norm(x @ W[p + "q_a_proj.weight"].T, p + "q_a_layernorm.weight") @ W[p + "q_b_proj.weight"].T
        else:
            q = x @ W[p + "q_proj.weight"].T
        down = x @ W[p + "kv_a_proj_with_mqa.weight"].T
        c = self.norm(down[:, :a["kv_lora"]], p + "kv_a_layernorm.weight")
        kr = torch.stack([self.rope(down[t, a["kv_lora"]:], t) for t in range(T)])
        kv = c @ W[p + "kv_b_proj.weight"].T
        heads = []
        for h in range(H):
            qh = q[:, h * (nope + rp):(h + 1) * (nope + rp)]
            qh = torch.cat([qh[:, :nope], torch.stack([self.rope(qh[t, nope:], t) for t in range(T)])], 1)
            kvh = kv[:, h * (nope + dv):(h + 1) * (nope + dv)]
            kh, vh = torch.cat([kvh[:, :nope], kr], 1), kvh[:, nope:]
            rows = []
            for t in range(T):
                w = torch.softmax((kh[:t + 1] @ qh[t]) / math.sqrt(nope + rp), 0)
                rows.append(w @ vh[:t + 1])
            heads.append(torch.stack(rows))
        return torch.cat(heads, 1) @ W[p + "o_proj.weight"].T

    def ffn(self, x, p):
        g = x @ self.W[p + "gate_proj.weight"].T
        return (g * torch.sigmoid(g) * (x @ self.W[p + "up_proj.weight"].T)) @ self.W[p + "down_proj.weight"].T

    def moe(self, x, l, real):
        """x: rows of one sequence; real: which of them are routed. Returns outputs and the balance loss."""
        m, p = self.c["moe"], f"model.layers.{l}.mlp."
        E, k = m["experts"], m["top_k"]
        z = x @ self.W[p + "gate.weight"].T
        s = torch.sigmoid(z) if m["score"] == "sigmoid" else torch.softmax(z, -1)
        out, f, P, n = [], [0.0] * E, torch.zeros(E), sum(real)
        for t in range(x.shape[0]):
            y = self.ffn(x[t], p + "shared_experts.") if m["shared"] else torch.zeros_like(x[t])
            if real[t]:
                v = [s[t, i].item() + self.bias[l][i] for i in range(E)]
                if m["top_groups"] < m["groups"]:
                    size = E // m["groups"]
                    val = []
                    for g in range(m["groups"]):
                        b = sorted(v[g * size:(g + 1) * size], reverse=True)
                        val.append(b[0] + b[1] if m["score"] == "sigmoid" else b[0])
                    keep = sorted(range(m["groups"]), key=lambda g: -val[g])[:m["top_groups"]]
                    v = [v[i] if i // size in keep else -math.inf for i in range(E)]
                sel = sorted(range(E), key=lambda i: -v[i])[:k]
                total = sum(s[t, i] for i in sel) + 1e-20 if m["normalize"] else 1.0
                for i in sel:
                    self.counts[l][i] += 1
                    y = y + m["scale"] * s[t, i] / total * self.ffn(x[t], p + f"experts.{i}.")
                for i in sorted(range(E), key=lambda i: -s[t, i].item())[:k]:
                    f[i] += E / (k * n)
                P = P + s[t] / s[t].sum() / n
            out.append(y)
        return torch.stack(out), m["seq_aux"] * (torch.tensor(f) * P).sum()

    def block(self, x, l, spans, real):
        p = f"model.layers.{l}."
        n = self.norm(x, p + "input_layernorm.weight")
        x = x + torch.cat([self.attention(n[a:b], p + "self_attn.") for a, b in spans])
        n = self.norm(x, p + "post_attention_layernorm.weight")
        if l < self.c["dense_layers"]:
            return x + self.ffn(n, p + "mlp."), 0.0
        y, aux = self.moe(n, l, real)
        return x + y, aux

    def sequence(self, tokens, targets, weight, bounds, valid):
        """Loss terms of one sequence (sums), and its logits."""
        c, W, T = self.c, self.W, len(tokens)
        E = W["model.embed_tokens.weight"]
        head = E if c["tie_embeddings"] else W["lm_head.weight"]
        spans = list(zip(bounds, bounds[1:] + [T]))
        x, aux = torch.stack([E[t] for t in tokens]), 0.0
        for l in range(c["layers"]):
            x, a = self.block(x, l, spans, [t < valid for t in range(T)])
            aux = aux + a
        h = self.norm(x, "model.norm.weight")
        logits = h @ head.T
        loss = sum(w * -torch.log_softmax(logits[t], 0)[targets[t]] for t, w in enumerate(weight) if w)
        mtp, D = torch.zeros(()), c["mtp"]["depth"]
        where = [list(range(a, min(b, valid))) for a, b in spans]  # positions that are left, by segment
        state = {t: h[t] for t in range(T)}
        for k in range(1, D + 1):
            l = c["layers"] + k - 1
            p = f"model.layers.{l}."
            where = [w[:-1] for w in where]
            flat = [t for w in where for t in w]
            if not flat:
                break
            z = torch.stack([W[p + "eh_proj.weight"] @ torch.cat([
                self.norm(E[tokens[t + k]], p + "enorm.weight"), self.norm(state[t], p + "hnorm.weight")]) for t in flat])
            cuts, at = [], 0
            for w in where:
                if w:
                    cuts.append((at, at + len(w)))
                at += len(w)
            z, a = self.block(z, l, cuts, [True] * len(flat))
            aux = aux + a
            z = self.norm(z, p + "shared_head.norm.weight")
            state = {t: z[i] for i, t in enumerate(flat)}
            for t in flat:
                if weight[t + k]:
                    mtp = mtp - weight[t + k] * torch.log_softmax(head @ state[t], 0)[targets[t + k]] / D
        return loss, mtp, aux * sum(weight), logits


def batch(rng, c):
    """Two micro-batches of two sequences, with packed documents, weights and a padded tail."""
    out, T = [], 12
    for _ in range(2):
        text = rng.integers(0, c["vocab"], (2, T + 1))
        weight = rng.choice([0.0, 0.5, 1.0, 1.0, 1.0], (2, T))
        starts, valid = [0, 5, T], [T, 9]
        weight[1, 9:] = 0
        out.append(dict(seqs=2, len=T, tokens=text[:, :-1].flatten().tolist(), targets=text[:, 1:].flatten().tolist(),
                        weight=weight.flatten().tolist(), starts=starts, valid=valid))
    return out


def run(net, micros):
    """The global batch: sums of the loss terms per micro-batch, and logits of all rows."""
    terms, logits = [], []
    for m in micros:
        t = [torch.zeros(()) for _ in range(3)]
        for s in range(m["seqs"]):
            r = slice(s * m["len"], (s + 1) * m["len"])
            bounds = [x - r.start for x in m["starts"] if r.start <= x < r.stop]
            *parts, lg = net.sequence(m["tokens"][r], m["targets"][r], m["weight"][r], bounds, m["valid"][s])
            t = [a + b for a, b in zip(t, parts)]
            logits.append(lg)
        terms.append(t)
    return terms, torch.cat(logits)


def main():
    for name, c in VARIANTS.items():
        rng = np.random.default_rng(7)
        values = {}
        for n, shape in shapes(c).items():
            v = rng.normal(0, c["init_std"], shape) if len(shape) > 1 else 1 + rng.normal(0, 0.1, shape)
            values[n] = v.astype(np.float32)
        moe_layers = [l for l in range(c["layers"] + c["mtp"]["depth"]) if l >= c["dense_layers"]]
        sigmoid = c["moe"]["score"] == "sigmoid"
        bias = {l: (rng.normal(0, 0.1, c["moe"]["experts"]).astype(np.float32).astype(float).tolist() if sigmoid
                    else [0.0] * c["moe"]["experts"]) for l in moe_layers}
        index, blob = {}, []

        def put(key, array):
            a = np.ascontiguousarray(array, dtype="<f4")
            index[key] = dict(at=sum(len(b) for b in blob) // 4, len=int(a.size))
            blob.append(a.tobytes())

        W = {n: torch.tensor(v.astype(np.float64), requires_grad=True) for n, v in values.items()}
        for n, v in values.items():
            put("weight " + n, v)
        first_bias = {str(l): list(b) for l, b in bias.items()}
        M = {n: torch.zeros_like(w) for n, w in W.items()}
        V = {n: torch.zeros_like(w) for n, w in W.items()}
        steps = []
        for step in range(1, STEPS + 1):
            micros = batch(rng, c)
            net = Net(c, W, bias)
            terms, logits = run(net, micros)
            total = sum(sum(m["weight"]) for m in micros)
            loss = sum(t[0] + LAMBDA * t[1] + t[2] for t in terms) / total
            for w in W.values():
                w.grad = None
            loss.backward()
            grads = {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in W.items()}
            norm = math.sqrt(sum((g * g).sum().item() for g in grads.values()))
            steps.append(dict(micros=micros, terms=[[x.item() for x in t] for t in terms], loss=loss.item(), norm=norm,
                              counts={str(l): n for l, n in net.counts.items()}))
            if step == 1:
                put("logits", logits.detach().numpy())
                for n, g in grads.items():
                    put("grad " + n, g.numpy())
            with torch.no_grad():
                scale = min(1.0, CLIP / norm)
                for n, w in W.items():
                    g = grads[n] * scale
                    M[n] = B1 * M[n] + (1 - B1) * g
                    V[n] = B2 * V[n] + (1 - B2) * g * g
                    up = (M[n] / (1 - B1 ** step)) / (torch.sqrt(V[n] / (1 - B2 ** step)) + EPS)
                    w -= LR * (up + (DECAY * w if w.dim() > 1 else 0))
            for l in moe_layers:
                n = net.counts[l]
                if sigmoid:
                    bias[l] = [b + BIAS_SPEED * np.sign(sum(n) / len(n) - x) for b, x in zip(bias[l], n)]
        for n, w in W.items():
            put("final " + n, w.detach().numpy())
        with open(os.path.join(HERE, name + ".bin"), "wb") as f:
            f.write(b"".join(blob))
        with open(os.path.join(HERE, name + ".json"), "w") as f:
            json.dump(dict(config=c, settings=dict(mtp_weight=LAMBDA, lr=LR, beta1=B1, beta2=B2, eps=EPS, decay=DECAY,
                                                   clip=CLIP, bias_speed=BIAS_SPEED),
                           bias=first_bias, final_bias={str(l): b for l, b in bias.items()}, steps=steps, index=index), f,
                      separators=(",", ":"), default=float)
        print(name, "loss", [round(s["loss"], 4) for s in steps], "norm", round(steps[0]["norm"], 3), sum(map(len, blob)), "bytes")


if __name__ == "__main__":
    main()
