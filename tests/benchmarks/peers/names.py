"""What peers are called, and the words of command lines that stand for them."""

from tvm_fusion.bench.peers import COMPILED, DEPLOYED, EAGER, named

from ..record import REFERENCES

ALL_OF_TORCH = (EAGER, COMPILED, "torch.max-autotune")
SDPA, FLEX = "sdpa", "flex"  # torch's own attention
OWN_PEERS = (SDPA, FLEX)  # of the workloads that bring them
MATMUL = "torch.matmul"
WORDS = {
    "torch": ALL_OF_TORCH,
    "torch.eager": (EAGER,),
    **{
        name: (name,)
        for name in (*ALL_OF_TORCH[1:], MATMUL, *OWN_PEERS, "jax", "tvm", *DEPLOYED, *REFERENCES)
    },
}
DEFAULT_PEERS = "torch,sdpa,flex,jax,tvm"
CPU_PEERS = {  # of the suites for CPUs
    "cpu": "torch.eager,torch.compile",
    "cpu_products": "torch.eager,torch.matmul",
    "cpu_models": "torch.eager,torch.compile,onnxruntime,openvino",
}


def peers_of(text: str | None) -> tuple[str, ...]:
    """Return the peers that a list of words names; raises InputError for an unknown one."""
    return named(DEFAULT_PEERS if text is None else text, WORDS)
