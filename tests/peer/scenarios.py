"""Runs scenarios.txt with PyTorch's distributed autograd and prints the gradients, one line each:

    scenario worker leaf number...          or, without a gradient:          scenario worker leaf none

Exits with 77 when torch for Python, or its distributed part, is missing (Debian: python3-torch).
Usage: scenarios.py SCENARIOS
"""
import os
import sys
import tempfile

try:
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    import torch.multiprocessing as multiprocessing
except (ImportError, OSError) as error:
    print(f"torch for Python is not usable: {error}", file=sys.stderr)
    sys.exit(77)

WORKERS = 4
RANK = -1
LEAVES = {}


def make_leaves(rank):
    global RANK
    RANK = rank
    scale = rank + 1

    def leaf(values):
        return torch.tensor(values, dtype=torch.double, requires_grad=True)

    LEAVES["p"] = leaf([scale * 0.1, scale * 0.2, scale * 0.3])
    LEAVES["table"] = leaf([[scale * 0.1 * (3 * i + j) for j in range(3)] for i in range(4)])
    if rank == 0:
        LEAVES["x"] = leaf([1.0, 2.0, 3.0])
        LEAVES["y"] = leaf([0.5, -1.0, 2.0])


def parse(text):
    stack = [[]]
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            stack.append([])
        elif word == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    return stack[0][0]


def run_body(body, arguments):
    return evaluate(body, arguments)


def evaluate(tree, arguments):
    """The tensors that an expression stands for."""
    if isinstance(tree, str):
        return [arguments[int(tree[1:])]]
    name, rest = tree[0], tree[1:]
    if name in ("call", "remote"):
        sent = [tensor for each in rest[2:] for tensor in evaluate(each, arguments)]
        to = f"worker{rest[0]}"
        if name == "call":
            return rpc.rpc_sync(to, run_body, args=(rest[1], sent))
        return rpc.remote(to, run_body, args=(rest[1], sent)).to_here()
    if name == "rows":
        rows = torch.tensor([int(row) for row in rest])
        return [torch.nn.functional.embedding(rows, LEAVES["table"], sparse=True)]
    if name == "nth":
        return [evaluate(rest[1], arguments)[int(rest[0])]]
    if not rest:
        return [LEAVES[name]]
    values = [tensor for each in rest for tensor in evaluate(each, arguments)]
    if name == "list":
        return values
    operations = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "sin": torch.sin,
        "exp": torch.exp,
        "sum": torch.sum,
        "float": torch.Tensor.float,
        "double": torch.Tensor.double,
        "const": torch.Tensor.detach,
    }
    return [operations[name](*values)]


def gradients(context_id):
    try:
        found = dist_autograd.get_gradients(context_id)
    except RuntimeError:  # this worker takes no part in the context
        found = {}
    lines = []
    for name, leaf in LEAVES.items():
        text = "none"
        for key, gradient in found.items():
            if key is leaf:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                text = " ".join(f"{number:.17g}" for number in dense.flatten().tolist())
        lines.append(f"{RANK} {name} {text}")
    return lines


def run(rank, store, path, output):
    make_leaves(rank)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", num_worker_threads=8, _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    if rank == 0:
        with open(path) as scenarios, open(output, "w") as out:
            for line in scenarios:
                if line.startswith("#") or not line.strip():
                    continue
                name, rest = line.split(":", 1)
                passes, expression = rest.split(maxsplit=1)
                with dist_autograd.context() as context_id:
                    loss = evaluate(parse(expression), [])[0]
                    for _ in range(int(passes)):
                        dist_autograd.backward(context_id, [loss], retain_graph=True)
                    for worker in range(WORKERS):
                        for text in rpc.rpc_sync(f"worker{worker}", gradients, args=(context_id,)):
                            out.write(f"{name} {text}\n")
    rpc.shutdown()


if __name__ == "__main__":
    if not torch.distributed.is_available() or not rpc.is_available():
        print("torch for Python was built without its distributed part", file=sys.stderr)
        sys.exit(77)
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "output")
        multiprocessing.spawn(
            run, args=(os.path.join(folder, "store"), sys.argv[1], output), nprocs=WORKERS)
        with open(output) as lines:
            sys.stdout.write(lines.read())
