"""Reference values for the objectives, from PyTorch in float64 with gradients by autograd.

Each loss is written from its paper's formula over logits, answer by answer, with log_softmax, logsigmoid and log: none of
the rearrangements the engine uses. It writes beside itself reference.json (losses and slopes of random logits) and
model.json (losses and gradients of a small model, that of model/testdata/plain_tied.bin).

    python3 reference.py
"""
import importlib.util
import json
import os

import numpy as np
import torch
import torch.nn.functional as F

torch.manual_seed(20240731)
torch.set_default_dtype(torch.float64)
HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "..", "..", "..", "..", "model", "testdata")
SEQS, LEN, VOCAB = 6, 7, 11  # KTO: every sequence is an example; else every two


def logsigmoid(x):
    return -F.softplus(-x, threshold=1e9)


# Objective and settings; z is what SetKL gets.
CASES = [
    ("dpo", dict(beta=0.1)), ("dpo", dict(beta=0.7)), ("dpo", dict(beta=0.3, sft=0.5)),
    ("cdpo", dict(beta=0.4, smoothing=0.1)), ("cdpo", dict(beta=0.4, smoothing=0.3, sft=1.0)),
    ("robust", dict(beta=0.4, smoothing=0.1)), ("robust", dict(beta=0.2, smoothing=0.35, sft=0.25)),
    ("ipo", dict(beta=0.1)), ("ipo", dict(beta=0.3, average=True)), ("ipo", dict(beta=0.5, average=True, sft=2.0)),
    ("hinge", dict(beta=0.1)), ("hinge", dict(beta=2.0, sft=0.3)),
    ("kto", dict(beta=0.1, desirable=1.0, undesirable=1.0)), ("kto", dict(beta=0.5, desirable=1.33, undesirable=0.7, z=0.8)),
    ("kto", dict(beta=0.5, desirable=1.0, undesirable=1.0, z=-3.0, sft=0.6)),
    ("simpo", dict(beta=2.0, gamma=1.0)), ("simpo", dict(beta=2.5, gamma=0.4, sft=0.1)),
    ("orpo", dict()), ("orpo", {"lambda": 0.1}), ("orpo", {"lambda": 1.5, "sft": 0.5}),
    ("reward", dict()),
]


def batch(reward):
    """Logits, targets and a mask of trained rows; answers of different lengths, one of a single token."""
    logits = torch.randn(SEQS, LEN, 1 if reward else VOCAB) * 2
    logits.requires_grad_()
    targets = torch.randint(0, VOCAB, (SEQS, LEN))
    mask = torch.zeros(SEQS, LEN, dtype=torch.bool)
    for s in range(SEQS):
        start = int(torch.randint(0, 3, ()))
        mask[s, start:start + [4, 2, 1, 3, 4, 4][s]] = True
    labels = [1, -1, 1, -1, -1, 1]
    return logits, targets, mask, labels


def losses(name, c, logp, ref, mask, labels, score):
    """The list of losses: of each pair or, of KTO, each answer."""
    total = lambda s: logp[s][mask[s]].sum()
    mean = lambda s: logp[s][mask[s]].mean()
    ratio = lambda s: total(s) - ref[s]
    sft = c.get("sft", 0.0)
    out = []
    if name == "kto":
        z = max(0.0, c.get("z", 0.0))
        for s in range(SEQS):
            if labels[s] > 0:
                out.append(c["desirable"] * (1 - torch.sigmoid(c["beta"] * (ratio(s) - z))) - sft * mean(s))
            else:
                out.append(c["undesirable"] * (1 - torch.sigmoid(c["beta"] * (z - ratio(s)))))
        return out
    for w in range(0, SEQS, 2):
        l = w + 1
        if name == "reward":
            last = lambda s: score[s][mask[s]][-1]
            out.append(-logsigmoid(last(w) - last(l)))
            continue
        delta = ratio(w) - ratio(l)
        if name == "dpo":
            v = -logsigmoid(c["beta"] * delta)
        elif name == "cdpo":
            e = c["smoothing"]
            v = -(1 - e) * logsigmoid(c["beta"] * delta) - e * logsigmoid(-c["beta"] * delta)
        elif name == "robust":
            e = c["smoothing"]
            v = (-(1 - e) * logsigmoid(c["beta"] * delta) + e * logsigmoid(-c["beta"] * delta)) / (1 - 2 * e)
        elif name == "ipo":
            if c.get("average"):
                delta = ratio(w) / mask[w].sum() - ratio(l) / mask[l].sum()
            v = (delta - 1 / (2 * c["beta"])) ** 2
        elif name == "hinge":
            v = torch.relu(1 - c["beta"] * delta)
        elif name == "simpo":
            v = -logsigmoid(c["beta"] * (mean(w) - mean(l)) - c["gamma"])
        elif name == "orpo":
            odds = lambda s: torch.exp(mean(s)) / (1 - torch.exp(mean(s)))
            v = -mean(w) - c["lambda"] * torch.log(torch.sigmoid(torch.log(odds(w) / odds(l))))
        out.append(v - sft * mean(w))
    return out


def random_cases():
    cases = []
    for name, c in CASES:
        if name == "orpo" and not c:
            c = {"lambda": 0.4}
        reward = name == "reward"
        logits, targets, mask, labels = batch(reward)
        if reward:
            y = logits.squeeze(-1)
            logp = None
        else:
            y = -torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            logp = -y
        y.retain_grad()
        ref = None
        if not reward:
            ref = [float(logp[s][mask[s]].sum().detach() + torch.randn(()) * 2) for s in range(SEQS)]
        each = losses(name, c, -y if not reward else None, ref, mask, labels, y)
        sum(each).backward()
        cases.append(dict(name=name, config=c, seqs=SEQS, len=LEN,
                          weight=mask.double().flatten().tolist(), labels=labels, ref=ref, y=(y.detach() * mask).flatten().tolist(),
                          loss=float(sum(each)), each=[float(v) for v in each], slope=y.grad.flatten().tolist()))
    return cases


def model_cases():
    """Every objective on one micro-batch of a model. Of each gradient the norm and a fixed projection are kept."""
    spec = importlib.util.spec_from_file_location("model_reference", os.path.join(MODEL, "reference.py"))
    ref = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ref)
    with open(os.path.join(MODEL, "plain_tied.json")) as f:
        stored = json.load(f)
    blob = np.fromfile(os.path.join(MODEL, "plain_tied.bin"), dtype="<f4").astype(np.float64)
    c = stored["config"]
    rng = np.random.default_rng(11)
    T, lengths, begin = 12, [12, 9, 8, 12, 10, 11], [4, 4, 6, 3, 5, 2]  # real tokens; first row that is trained
    text = rng.integers(0, c["vocab"], (SEQS, T + 1))
    mask = torch.zeros(SEQS, T, dtype=torch.bool)
    for s in range(SEQS):
        mask[s, begin[s]:lengths[s] - 1] = True
    labels, offset = [1, -1, 1, -1, -1, 1], [-0.7, 0.4, 0.0, 1.3, -0.2, 0.9]
    batch = dict(seqs=SEQS, len=T, tokens=text[:, :-1].flatten().tolist(), targets=text[:, 1:].flatten().tolist(),
                 weight=mask.double().flatten().tolist(), valid=lengths, labels=labels)
    seen, out, want = set(), [], None
    for name, cfg in CASES[2:]:
        cfg = cfg or ({} if name == "reward" else {"lambda": 0.4})
        if name in seen:
            continue
        seen.add(name)
        W = {}
        for key, at in stored["index"].items():
            if key.startswith("weight "):
                n = key[len("weight "):]
                W[n] = torch.tensor(blob[at["at"]:at["at"] + at["len"]].reshape(ref.shapes(c)[n]), requires_grad=True)
        if name == "reward":
            w = np.sin(np.arange(c["dim"]) + 1.0).astype(np.float32).astype(np.float64)
            W["score.weight"] = torch.tensor(w.reshape(1, -1), requires_grad=True)
        net = ref.Net(c, W, {int(l): b for l, b in stored["bias"].items()})
        logp, score = torch.zeros(SEQS, T), torch.zeros(SEQS, T)
        for s in range(SEQS):
            if name == "reward":  # Net.sequence with the score in the place of the tied head
                x = torch.stack([W["model.embed_tokens.weight"][t] for t in text[s, :-1]])
                for l in range(c["layers"]):
                    x, _ = net.block(x, l, [(0, T)], [t < lengths[s] for t in range(T)])
                score[s] = (net.norm(x, "model.norm.weight") @ W["score.weight"].T).squeeze(-1)
            else:
                *_, logits = net.sequence(text[s, :-1].tolist(), text[s, 1:].tolist(), [0.0] * T, [0], lengths[s])
                logp[s] = torch.log_softmax(logits, -1)[range(T), text[s, 1:]]
        if want is None:
            want = [float(logp[s][mask[s]].sum()) + offset[s] for s in range(SEQS)]
        each = losses(name, cfg, logp, want, mask, labels, score)
        sum(each).backward()
        grads = {}
        for n, w in W.items():
            if name == "reward" and w.grad is None:
                continue
            g = (w.grad if w.grad is not None else torch.zeros_like(w)).flatten().numpy()
            grads[n] = [float(np.sqrt((g * g).sum())), float(g @ np.cos(0.7 * np.arange(len(g)) + 0.1))]
        out.append(dict(name=name, config=cfg, loss=float(sum(each)), grads=grads))
    return dict(batch=batch, ref=want, cases=out)


def main():
    for name, content in ("reference", random_cases()), ("model", model_cases()):
        with open(os.path.join(HERE, name + ".json"), "w") as f:
            json.dump(content, f, separators=(",", ":"))
            f.write("\n")


if __name__ == "__main__":
    main()
