"""Steps by one kernel for all parameters give each trial what PyTorch's kernels give it, in every bit."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy, assert_fused_is_solo, members, same_bits
from tests.support.optimizer_settings import SETTINGS
from tests.support.triton_interpreter import run_with_triton
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.optim import block, multi_tensor
from trials.optim.multi_tensor import MultiTensor
from trials.optim.registry import RULES
from trials.training.member import build_on

UNSHOWN = "the kernel of optimizers' steps"
EXACT = "tests/unit/trials/optim/test_optim.py", "tests/unit/trials/optim/test_memory_order.py"
ALIVE = "tests/unit/trials/training/test_alive.py"
OURS = "sgd or adam"
OTHERS = "nadam or radam or adamax or single_pass or updated_one_by_one or where_work or every_optimizer or own"


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3))


def test_random_groups_are_those_of_torch_and_of_the_rules() -> None:
    run_with_triton(UNSHOWN, "tests.support.multi_tensor_reference", "0", "6")


@pytest.mark.slow
def test_more_random_groups() -> None:
    run_with_triton(UNSHOWN, "tests.support.multi_tensor_reference", "6", "150")


def exact(*chosen: str) -> None:
    pytest_ = "pytest", "-q", "-p", "tests.support.interpreted", "-p", "no:cacheprovider", "-n0"
    run_with_triton(UNSHOWN, *pytest_, *chosen)


@pytest.mark.slow
def test_it_passes_the_tests_of_exactness() -> None:
    exact(*EXACT, "-k", f"({OURS} or test_any_order or test_rate or param_groups) and not ({OTHERS})")


@pytest.mark.slow
def test_trials_that_the_device_finds_lost() -> None:
    exact(ALIVE, "-m", "not gpu", "-k", f"not ({OTHERS} or rmsprop or adagrad or adadelta or asgd or rprop)")


def test_compiled_for_a_gpu_it_rounds_as_pytorchs_kernels_do(tmp_path: Path) -> None:
    settings = {"TRITON_CACHE_DIR": str(tmp_path)}
    run_with_triton(UNSHOWN, "tests.support.compiled_kernels", settings=settings)


Launch = Callable[..., None]


class Kernels(SimpleNamespace):
    """Stands for the kernels in Triton, with other ones."""

    def __init__(self, launch: Launch) -> None:
        kernel = {(chunks, size): launch for chunks in range(9) for size in range(9)}
        super().__init__(BLOCK=1024, LAUNCH={}, adam=kernel, sgd=kernel)


def does_nothing(*_: Any, **__: Any) -> None: ...


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(
    ("launch", "said"), [(does_nothing, "ours gives other bits"), (fails, "Triton fails.*C compiler")]
)
@pytest.mark.parametrize("name", ["adamw", "sgd with momentum"])
def test_a_kernel_that_does_not_do_what_pytorch_does_is_not_used(
    name: str, launch: Launch, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block, "SinglePass", type(None))
    monkeypatch.setattr(multi_tensor, "runs_on", lambda device: True)
    monkeypatch.setattr(multi_tensor, "_kernels", lambda: Kernels(launch))
    monkeypatch.setattr(multi_tensor, "_believed", {})
    with caplog.at_level(logging.INFO, multi_tensor.log.name):
        assert_fused_is_solo(lambda n: model(n).double(), [torch.randn(6, 4)], SETTINGS[name], steps=4)
    assert multi_tensor._believed and not any(multi_tensor._believed.values())
    assert re.search(f"by PyTorch's kernels: {said}", caplog.text)


def test_without_triton_pytorchs_kernels_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "SinglePass", type(None))
    monkeypatch.setattr(multi_tensor, "runs_on", lambda device: True)
    monkeypatch.setattr(multi_tensor, "_kernels", lambda: None)
    assert_fused_is_solo(lambda n: model(n).double(), [torch.randn(6, 4)], "adamw", steps=3)


def test_a_step_that_was_recorded_reads_the_addresses_of_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made, p = looking(monkeypatch)
    gradients = torch.zeros(2, 3), torch.zeros(2, 3)
    kept = []
    for gradient in gradients:
        assert made.look([p], [gradient])
        kept.append(made.addresses)
    assert [own.tolist() for own in kept] == [[[p.data_ptr(), own.data_ptr()]] for own in gradients]


def test_parameters_that_were_in_the_hosts_memory_are_found_where_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    made, p = looking(monkeypatch)
    gradient = torch.zeros(2, 3)
    made.look([p], [gradient])
    before = p.data_ptr()
    p.data = torch.ones(2, 3)
    made.look([p], [gradient])
    assert made.addresses.tolist() == [[p.data_ptr(), gradient.data_ptr()]] and p.data_ptr() != before


def test_gradients_in_another_order_or_type_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made, p = looking(monkeypatch)
    assert not made.look([p], [torch.zeros(3, 2).T]) and not made.look([p], [torch.zeros(2, 3).double()])


def looking(monkeypatch: pytest.MonkeyPatch) -> tuple[MultiTensor, Tensor]:
    monkeypatch.setattr(multi_tensor, "_kernels", lambda: Kernels(does_nothing))
    optimizer, p = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1), torch.zeros(2, 3)
    return MultiTensor(RULES[torch.optim.SGD](optimizer.param_groups[0], torch.optim.SGD), [p], {}), p


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", [name for name in SETTINGS if re.match("sgd|adamw?\\b", name)])
def test_on_a_gpu(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and state are those of PyTorch's kernels, also where a graph launches ours."""
    pytest.importorskip("triton")
    torch.cuda.set_stream(torch.cuda.Stream())
    launched: list[MultiTensor] = []
    launch = MultiTensor._launch
    monkeypatch.setattr(MultiTensor, "_launch", lambda self, *args: launched.append(self) or launch(self, *args))
    groups = []
    for ours in (True, False):
        study = Plain(model, SETTINGS[name])
        study.cuda_graphs = graphs
        build_on(study, torch.device("cuda", 0))
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(multi_tensor, "runs_on", lambda device: False)
            groups.append(TrialGroup(study, members(study, range(3)), OpenGate()))
            groups[-1].to("cuda")
    x, y = torch.randn(5, 4, device="cuda"), torch.randn(5, 3, device="cuda")
    for step in range(14):
        for group in groups:
            group.train_step(x + step, y)
        for row in range(3):
            assert same_bits(groups[0].extract(row), groups[1].extract(row)), step
    assert launched and all(multi_tensor._believed.values()), multi_tensor._believed


class Plain(ToyStudy):
    """Whose loss can be traced."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)
