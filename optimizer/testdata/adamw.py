"""Makes adamw.json: ten AdamW steps with global-norm clipping by PyTorch, on gradients given by a formula.

  python3 adamw.py > adamw.json      (made with PyTorch 1.13)

The matrix decays, the vector does not. Learning rates differ from step to step. Gradient i of step t is
3 * sin(0.7*i + 1.3*t) * (1 + i % 5) / t, so that some steps are clipped and some are not.
"""
import json, math, torch

torch.set_default_dtype(torch.float32)
value = lambda i: math.cos(0.3 * i)
grad = lambda i, t: 3 * math.sin(0.7 * i + 1.3 * t) * (1 + i % 5) / t
rates = [1e-3 * (t + 1) for t in range(10)]
matrix = torch.nn.Parameter(torch.tensor([value(i) for i in range(24)]).view(4, 6))
vector = torch.nn.Parameter(torch.tensor([value(i) for i in range(24, 31)]))
opt = torch.optim.AdamW([dict(params=[matrix], weight_decay=0.1), dict(params=[vector], weight_decay=0.0)],
                        betas=(0.9, 0.95), eps=1e-8)
norms, steps = [], []
for t in range(1, 11):
    matrix.grad = torch.tensor([grad(i, t) for i in range(24)]).view(4, 6)
    vector.grad = torch.tensor([grad(i, t) for i in range(24, 31)])
    norms.append(torch.nn.utils.clip_grad_norm_([matrix, vector], 8.0).item())
    for g in opt.param_groups:
        g["lr"] = rates[t - 1]
    opt.step()
    steps.append(matrix.detach().flatten().tolist() + vector.detach().tolist())
print(json.dumps(dict(rates=rates, clip=8.0, norms=norms, steps=steps)))
