# usage: python3 read_checkpoint.py FOLDER/NAME.NUMBER.json | FILE.pt
import json, pathlib, sys, torch

path = pathlib.Path(sys.argv[1])
if path.suffix == ".pt":
    files = {path.name: torch.load(path, weights_only=True)}
else:
    from safetensors.torch import load_file
    parts = json.loads(path.read_text())["parts"].values()
    files = {each["file"]: load_file(path.parent / each["file"]) for part in parts for each in part["files"]}
for file, tensors in files.items():
    for name, tensor in tensors.items():
        print(file, name, tensor.dtype, list(tensor.shape), tensor.sum().item())
