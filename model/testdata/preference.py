"""Reference values for the tests of objectives, from PyTorch in float64, over the model of reference.py.

One batch of preference pairs in two micro-batches; for each objective the loss as a sum over pairs (KTO: over sequences),
plus the balance loss with a weight of its own for each sequence, and the gradient of both by autograd. Writes
preference.json and preference.bin.

    python3 preference.py
"""
import json
import os

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from reference import HERE, Net, shapes, variant

CONFIG = variant(layers=2, moe=dict(experts=4, top_k=2, groups=2, top_groups=2, inter=8), mtp=dict(depth=0))
SETTINGS = dict(beta=0.7, smoothing=0.1, simpo_beta=2.0, gamma=1.0, lam=0.4, desirable=1.3, undesirable=0.8, z=0.2)
T, SHARE = 12, [0.5, 0.25]  # length of a row; balance weights of a chosen and of a rejected sequence


def batch(rng, c):
    """Two micro-batches of one and two pairs, padded; prompts of equal tokens, then answers, which alone have weights."""
    out = []
    for pairs in (1, 2):
        m = dict(seqs=2 * pairs, len=T, tokens=[], targets=[], weight=[], valid=[], labels=[], ref=[], seqWeight=[])
        for _ in range(pairs):
            n = int(rng.integers(2, 5))
            prompt = rng.integers(0, c["vocab"], n).tolist()
            for label in (1, -1):
                length = int(rng.integers(n + 2, T + 1))  # tokens that are read
                text = prompt + rng.integers(0, c["vocab"], length + 1 - n).tolist()
                pad = [0] * (T - length)
                m["tokens"] += text[:-1] + pad
                m["targets"] += text[1:] + pad
                m["weight"] += [0.0] * (n - 1) + [1.0] * (length - n + 1) + [0.0] * len(pad)
                m["valid"].append(length)
                m["labels"].append(label)
                m["seqWeight"].append(SHARE[label < 0])
        out.append(m)
    return out


def read(net, m):
    """Per sequence: log-probabilities of the answer's tokens (or scores, of a head with one row), and balance losses."""
    said, aux = [], 0.0
    scores = net.W["lm_head.weight"].shape[0] == 1
    for s in range(m["seqs"]):
        r = slice(s * T, (s + 1) * T)
        weight, targets = m["weight"][r], [0] * T if scores else m["targets"][r]
        _, _, a, logits = net.sequence(m["tokens"][r], targets, weight, [0], m["valid"][s])
        aux = aux + a / sum(weight) * m["seqWeight"][s]
        rows = [t for t, w in enumerate(weight) if w]
        said.append(logits[rows, 0] if scores else torch.stack([torch.log_softmax(logits[t], 0)[targets[t]] for t in rows]))
    return said, aux


def dpo(said, m):
    loss, eps = 0.0, SETTINGS["smoothing"]
    for i in range(0, m["seqs"], 2):
        delta = SETTINGS["beta"] * ((said[i].sum() - m["ref"][i]) - (said[i + 1].sum() - m["ref"][i + 1]))
        loss = loss - (1 - eps) * logsigmoid(delta) - eps * logsigmoid(-delta)
    return loss


def simpo(said, m):
    return sum(-logsigmoid(SETTINGS["simpo_beta"] * (said[i].mean() - said[i + 1].mean()) - SETTINGS["gamma"])
               for i in range(0, m["seqs"], 2))


def orpo(said, m):
    loss = 0.0
    for i in range(0, m["seqs"], 2):
        w, l = said[i].mean(), said[i + 1].mean()
        odds = (w - l) - (torch.log(1 - torch.exp(w)) - torch.log(1 - torch.exp(l)))
        loss = loss - w - SETTINGS["lam"] * logsigmoid(odds)
    return loss


def kto(said, m):
    loss, b, z = 0.0, SETTINGS["beta"], SETTINGS["z"]
    for s, label in enumerate(m["labels"]):
        r = said[s].sum() - m["ref"][s]
        if label > 0:
            loss = loss + SETTINGS["desirable"] * (1 - torch.sigmoid(b * (r - z)))
        else:
            loss = loss + SETTINGS["undesirable"] * (1 - torch.sigmoid(b * (z - r)))
    return loss


def reward(said, m):
    return sum(-logsigmoid(said[i][-1] - said[i + 1][-1]) for i in range(0, m["seqs"], 2))


def main():
    c = CONFIG
    rng = np.random.default_rng(11)
    values = {}
    for n, shape in (shapes(c) | {"score.weight": (1, c["dim"])}).items():
        v = rng.normal(0, c["init_std"], shape) if len(shape) > 1 else 1 + rng.normal(0, 0.1, shape)
        values[n] = v.astype(np.float32)
    bias = {l: rng.normal(0, 0.1, c["moe"]["experts"]).astype(np.float32).astype(float).tolist()
            for l in range(c["dense_layers"], c["layers"])}
    index, blob = {}, []

    def put(key, array):
        a = np.ascontiguousarray(array, dtype="<f4")
        index[key] = dict(at=sum(len(b) for b in blob) // 4, len=int(a.size))
        blob.append(a.tobytes())

    for n, v in values.items():
        put("weight " + n, v)
    micros = batch(rng, c)
    results = {}
    for name, objective in dict(dpo=dpo, simpo=simpo, orpo=orpo, kto=kto, reward=reward).items():
        W = {n: torch.tensor(v.astype(np.float64), requires_grad=True) for n, v in values.items()}
        unused, net = "score.weight", W
        if objective is reward:  # the score takes the head's place
            unused, net = "lm_head.weight", W | {"lm_head.weight": W["score.weight"]}
        net = Net(c, net, bias)
        losses, total, said = [], 0.0, []
        for m in micros:
            x, aux = read(net, m)
            if not m["ref"]:
                m["ref"] = [(v.sum().item() + rng.normal(0, 1)) for v in x]
            loss = objective(x, m)
            said.append([(v[-1] if objective is reward else v.sum()).item() for v in x])
            losses.append([loss.item(), aux.item()])
            total = total + loss + aux
        total.backward()
        results[name] = dict(losses=losses, said=said)
        for n, w in W.items():
            if n != unused:
                put(f"{name} {n}", (w.grad if w.grad is not None else torch.zeros_like(w)).numpy())
        print(name, "loss", losses)
    with open(os.path.join(HERE, "preference.bin"), "wb") as f:
        f.write(b"".join(blob))
    with open(os.path.join(HERE, "preference.json"), "w") as f:
        json.dump(dict(config=c, settings=SETTINGS, bias={str(l): b for l, b in bias.items()}, micros=micros, results=results,
                       index=index), f, separators=(",", ":"))


if __name__ == "__main__":
    main()
