# usage: python3 saved_by_torch.py FILE.pt
#
# Writes what tensor_file_test.cc reads: a state dict of a module with its metadata, a view, a parameter, the state of an optimizer.
import sys
import torch

model = torch.nn.Linear(3, 2)
state = model.state_dict()
state["weight"] = torch.full((2, 3), 0.5)
state["bias"] = torch.tensor([1.0, 2.0], dtype=torch.float64)
table = torch.arange(12, dtype=torch.float32).reshape(3, 4)
betas = (0.9, 0.999)
torch.save({
    "model": state,
    "table": table,
    "column": table[:, 1],
    "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    "optimizer": {
        "state": {0: {"exp_avg": torch.tensor(2 ** 40), "step": 3}},
        "param_groups": [
            {"lr": 1e-3, "betas": betas, "foreach": None, "params": [0], "extra": torch.ones(1, dtype=torch.bool)},
            {"lr": 1e-4, "betas": betas, "amsgrad": False, "params": [1, 2]},
        ],
    },
    "epoch": 2 ** 70,
    "name": "résumé",
}, sys.argv[1])
