"""Compiles the kernels of optimizers' steps for an H100, without one, and looks at their instructions.

An interpreter does not round as a device does. What a device does with each number is in the instructions: a fused
product and sum rounds once, an approximate root is not the rounded one.
"""

import re
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trials.optim import multi_tensor_kernel as kernels

THREADS = 128
"""Of a program: four warps, Triton's default."""
MIXED = 2
"""So many of Adam's moments are mixed by `torch.lerp`, in which PyTorch's compiler fuses."""
ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("new1", "new2", "keep", "decay", "root", "eps", "rate")
SGD = ("momentum_buffer",), ("minus_rate", "decay", "momentum", "old", "new")


def compiled(kernel: Any, kind: str, state: tuple[str, ...], coefficients: tuple[str, ...]) -> Counter[str]:
    """The arithmetic of a kernel with all that it can do, by instruction."""
    fixed = {"block": kernels.BLOCK, "maximize": True, "nesterov": True}
    fixed |= {name: row for row, name in enumerate(coefficients)}
    given = {"chunks": "*i64", "addresses": "*i64", "columns": "i32", "first": "i32", "table": f"*{kind}"}
    given |= {"factor": "*fp64", "limit": "*fp64", "alive": "*u8", **{name: f"*{kind}" for name in state}}
    names = kernel.arg_names
    signature = {name: given.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in fixed.items() if n in names})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(kernels.LAUNCH))
    return Counter(re.findall(r"^\s*((?:fma|mul|add|sub|div|sqrt|rcp|rsqrt)\.\S*f(?:32|64))\s", made.asm["ptx"], re.M))


def main() -> None:
    """Look at both kernels, in both types."""
    each = kernels.BLOCK // THREADS
    for kind, width in (("fp32", "f32"), ("fp64", "f64")):
        for kernel, (state, coefficients) in ((kernels.adam, ADAM), (kernels.sgd, SGD)):
            found = compiled(kernel, kind, state, coefficients)
            is_adam = kernel is kernels.adam
            assert found[f"fma.rn.{width}"] == (MIXED * each if is_adam else 0), found
            assert found[f"sqrt.rn.{width}"] == found[f"div.rn.{width}"] == (each if is_adam else 0), found
            rounded = {f"{name}.rn.{width}" for name in ("fma", "mul", "add", "sub", "div", "sqrt")}
            assert found.keys() <= rounded, f"not rounded to the nearest, or without subnormal numbers: {found}"


if __name__ == "__main__":
    main()
