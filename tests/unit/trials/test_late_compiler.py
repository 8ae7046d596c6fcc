"""A process that never compiles never loads the compiler; one that does finds it as always."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

BEFORE = """
import sys
import torch
from trials.late_compiler import is_compiler_loaded, load_compiler_late

load_compiler_late()
weight = torch.nn.Parameter(torch.ones(3))


def train(optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad):
    train(kind([weight], lr=0.1))
assert not is_compiler_loaded() and not any(name.startswith("torch._dynamo.") for name in sys.modules)
"""

USES = {
    "a submodule": """
import torch._dynamo.config
from torch._dynamo import config
assert torch._dynamo.config is config is sys.modules["torch._dynamo.config"]
assert config.__spec__.origin == config.__file__
""",
    "what is in a submodule": """
from torch._dynamo.utils import counters
import torch._dynamo
assert torch._dynamo.utils.counters is counters
""",
    "an attribute": """
torch._dynamo.reset()
""",
    "a held stand-in": """
held = torch._dynamo
import torch._dynamo.utils
assert held.utils is torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and held is not torch._dynamo
assert held.disable(train, wrapping=False) is not train
""",
    "a function that is not to be compiled": """
assert torch.compiler.disable(train) is not train
""",
    "compilation": """
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
""",
}


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("use", USES)
def test_whoever_asks_for_it_gets_it_once(use: str) -> None:
    run(f"""{BEFORE}
{USES[use]}
assert is_compiler_loaded() and type(torch._dynamo) is type(sys)
own = vars(torch.optim.Optimizer).values()
wrapped = [function.__wrapped__ for function in own if hasattr(function, "__wrapped__")]
assert len(wrapped) >= 3 and not any("__dynamo_disable" in vars(function) for function in wrapped)
train(torch.optim.AdamW([weight]))
""")


def test_one_that_is_loaded_already_stays() -> None:
    run(
        "import torch._dynamo as own\nfrom trials.late_compiler import *\nload_compiler_late()\nimport torch._dynamo\n"
        "assert torch._dynamo is own and is_compiler_loaded()"
    )
