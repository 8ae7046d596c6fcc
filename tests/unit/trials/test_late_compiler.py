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
    "what others set in it": """
from unittest import mock
with mock.patch("torch._dynamo.reset", 7):
    assert torch._dynamo.reset == 7
assert callable(torch._dynamo.reset)
torch._dynamo.mine = 5
held = torch._dynamo
import torch._dynamo.config
assert torch._dynamo.mine == 5
""",
    "its name, pickled": """
import pickle
assert pickle.loads(pickle.dumps(torch._dynamo)).reset is torch._dynamo.reset
""",
    "where a part of it is": """
from importlib.util import find_spec
assert find_spec("torch._dynamo.config").origin == torch._dynamo.config.__file__
""",
    "compilation": """
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
""",
}


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


AFTER = """
assert is_compiler_loaded() and type(torch._dynamo) is type(sys)
own = vars(torch.optim.Optimizer).values()
wrapped = [function.__wrapped__ for function in own if hasattr(function, "__wrapped__")]
assert len(wrapped) >= 3 and not any("__dynamo_disable" in vars(function) for function in wrapped)
train(torch.optim.AdamW([weight]))
"""


@pytest.mark.slow
def test_whoever_asks_for_it_gets_it_once() -> None:
    """Each use in a process of its own, forked from one that has imported PyTorch."""
    run(f"""{BEFORE}
import os
uses = {USES}
for name, use in uses.items():
    child = os.fork()
    if not child:
        print(name, flush=True)
        exec(use + {AFTER!r}, globals())
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
""")


STAYS = """
import torch._dynamo as own
load_compiler_late()
import torch._dynamo
assert torch._dynamo is own and is_compiler_loaded()
"""
LOOKS = """
import inspect
from importlib.util import find_spec
found = inspect.getfile(torch._dynamo), find_spec("torch._dynamo").origin, torch._dynamo.__package__
assert not is_compiler_loaded()
"""
FOUND = """
assert found == (torch._dynamo.__file__, torch._dynamo.__spec__.origin, torch._dynamo.__package__)
"""
TRACES = """
from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import TwoLayers, assert_fused_is_alone, batches


def forward(m, x):
    return m.b(x if {asks} else m.a(x))


study = ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches())
assert assert_fused_is_alone(study, 1) == "rule FusedLinear" and is_compiler_loaded()
"""


def test_whoever_looks_does_not_load_it_a_forward_that_does_is_traced_and_then_it_stays() -> None:
    """Each by itself is a slow test."""
    run(BEFORE + LOOKS + TRACES.format(asks="torch._dynamo.is_compiling()") + FOUND + STAYS)


@pytest.mark.slow
def test_one_that_is_loaded_already_stays() -> None:
    run("from trials.late_compiler import *" + STAYS)


@pytest.mark.slow
def test_whoever_only_looks_finds_its_file_and_does_not_load_it() -> None:
    run(BEFORE + LOOKS + "torch._dynamo.reset()" + FOUND)


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["torch._dynamo.is_compiling()", "torch.compiler.disable(len)([])"])
def test_a_forward_that_loads_it_is_traced(asks: str) -> None:
    run(BEFORE + TRACES.format(asks=asks))


@pytest.mark.slow
def test_threads_that_load_parts_of_it_at_once_end() -> None:
    """Python itself then raises errors in some of them."""
    parts = ["config", "utils", "decorators", "eval_frame"]
    run(f"""{BEFORE}
import contextlib, importlib, threading
sys.setswitchinterval(1e-6)
together = threading.Barrier({len(parts)})


def load(part):
    together.wait()
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        importlib.import_module("torch._dynamo." + part)


threads = [threading.Thread(target=load, args=(part,), daemon=True) for part in {parts}]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(100)
assert not any(thread.is_alive() for thread in threads)
""")
