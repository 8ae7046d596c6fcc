"""Trains a small pipeline in unusual ways, one after another: `unusual_train.py --losses FILE`, an ordinary script.

Nothing here is forbidden to a training, and none of it may change a loss: a storm of signals with handlers, steps in
threads and under asyncio, tracing, profiling, a frozen collector, forked children, copies of the engine, loaders with
processes of all kinds, other sizes of the step, evaluations in between, an environment that is emptied, an abrupt end
with status 7.
"""

import argparse
import asyncio
import copy
import cProfile
import ctypes
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH, MICRO_BATCHES = 128, 32, 4
PATIENT_STEPS, STEPS_EACH = 22, 4
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH, signal.SIGHUP)
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_TIMERSLACK, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 15, 29, 36, 38
PRCTLS = (
    (PR_SET_DUMPABLE, 0),
    (PR_SET_NAME, b") Z ("),
    (PR_SET_TIMERSLACK, 1),
    (PR_SET_CHILD_SUBREAPER, 1),
    (PR_SET_NO_NEW_PRIVS, 1),
)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(BATCH, WIDTH, generator=generator)
        yield x, x.flip(1)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The first ones, for loaders whose processes make them."""

    def __len__(self) -> int:
        return STEPS_EACH * MICRO_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(1)


class Script:
    """The engine, its data, and the losses so far."""

    def __init__(self) -> None:
        torch.manual_seed(torch.distributed.get_rank())
        model = PipelineModule(
            [nn.Linear(WIDTH, WIDTH) for _ in range(8)], num_stages=2, loss_fn=nn.functional.mse_loss
        )
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]
        self.data = batches()
        self.losses: list[str] = []

    def step(self, data: Iterator[tuple[Tensor, Tensor]] | None = None) -> None:
        self.losses.append(float(self.engine.train_batch(data or self.data)).hex())

    def in_a_storm_of_signals(self) -> None:
        for number in (*SIGNALS, signal.SIGALRM):
            signal.signal(number, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        is_over = threading.Event()

        def storm() -> None:
            while not is_over.wait(0.003):
                for number in SIGNALS:
                    os.kill(os.getpid(), number)

        thread = threading.Thread(target=storm)
        thread.start()
        for _ in range(2 * STEPS_EACH):
            self.step()
        is_over.set()
        thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def in_threads(self) -> None:
        for _ in range(STEPS_EACH):
            thread = threading.Thread(target=self.step)
            thread.start()
            thread.join()

    def under_asyncio(self) -> None:
        async def steps() -> None:
            for _ in range(STEPS_EACH):
                self.step()
                await asyncio.get_running_loop().run_in_executor(None, self.step)

        asyncio.run(steps())

    def traced_and_profiled(self) -> None:
        sys.settrace(lambda *_: None)
        sys.setprofile(lambda *_: None)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            for _ in range(STEPS_EACH):
                self.step()
        sys.settrace(None)
        sys.setprofile(None)
        profile = cProfile.Profile()
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(0.01, repeat=True, file=nowhere)
            for _ in range(STEPS_EACH):
                profile.runcall(self.step)
            faulthandler.cancel_dump_traceback_later()

    def with_a_frozen_collector_and_another_clock(self) -> None:
        gc.freeze()
        gc.disable()
        before = time.monotonic_ns
        time.monotonic_ns = lambda: 0
        for _ in range(STEPS_EACH):
            self.step()
        time.monotonic_ns = before
        gc.enable()

    def beside_forked_children(self) -> None:
        for _ in range(STEPS_EACH):
            child = os.fork()
            if child == 0:
                os._exit(0)
            self.step()
            os.waitpid(child, 0)

    def beside_children_that_are_forked_in_a_step_and_leave_it(self) -> None:
        parent = os.getpid()

        def forks() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in self.data:
                child = os.fork()
                if child == 0:
                    raise SystemExit
                os.waitpid(child, 0)
                yield batch

        for _ in range(STEPS_EACH):
            try:
                self.step(forks())
            finally:
                if os.getpid() != parent:
                    os._exit(0)

    def with_copies_of_the_engine(self) -> None:
        for _ in range(STEPS_EACH):
            copy.copy(self.engine)
            with suppress(Exception):  # no process group can be copied
                copy.deepcopy(self.engine)
            with suppress(Exception):
                pickle.dumps(self.engine)
            self.step()

    def with_loaders_of_all_kinds(self) -> None:
        for context in ("fork", "spawn", "forkserver"):
            loader = DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context=context)
            loaded = iter(loader)
            for _ in range(STEPS_EACH):
                self.step(loaded)

    def with_other_micro_batches_and_evaluations(self) -> None:
        for micro_batches in (2, 8, 1, MICRO_BATCHES):
            self.engine.set_train_batch_size(BATCH * micro_batches)
            for _ in range(STEPS_EACH):
                self.step()
            self.engine.eval_batch(self.data)

    def with_another_priority_other_cores_and_blocked_signals(self) -> None:
        cores = os.sched_getaffinity(0)
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        faulthandler.register(signal.SIGUSR2)
        for chosen in (range(os.cpu_count() or 1), {min(cores)}, {max(cores)}, cores):
            os.sched_setaffinity(0, chosen)
            torch.set_num_threads(3 - torch.get_num_threads())
            os.kill(os.getpid(), signal.SIGUSR1)
            self.step()
        torch.set_num_threads(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        faulthandler.unregister(signal.SIGUSR2)
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)

    def with_what_a_process_may_ask_of_the_kernel_for_itself(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT)
        for number, value in PRCTLS:
            libc.prctl(number, value, 0, 0, 0)
        for _ in range(STEPS_EACH):
            self.step()
        libc.munlockall()

    def beside_threads_that_fork(self) -> None:
        is_over = threading.Event()

        def fork() -> None:
            while not is_over.wait(0.01):
                child = os.fork()
                if child == 0:
                    os.closerange(3, 4096)
                    os._exit(0)
                os.waitpid(child, 0)
                subprocess.run(["true"], preexec_fn=os.setsid, close_fds=False, check=True)

        thread = threading.Thread(target=fork)
        thread.start()
        for _ in range(2 * STEPS_EACH):
            self.step()
        is_over.set()
        thread.join()

    def with_compiled_layers(self) -> None:
        for layer in self.engine.module.modules():
            if isinstance(layer, nn.Linear):
                layer.compile(backend="eager")
        for _ in range(STEPS_EACH):
            self.step()

    def with_checkpoints_that_are_loaded(self) -> None:
        named: list[str | None] = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(named)
        self.engine.save_checkpoint(named[0])
        for _ in range(STEPS_EACH):
            self.step()
            self.engine.load_checkpoint(named[0])
            self.step()
        torch.distributed.barrier()
        shutil.rmtree(str(named[0]), ignore_errors=True)

    def with_no_environment(self) -> None:
        os.chdir("/")
        for name in {*os.environ} - {"SQUEEZER_DIR"}:  # of which `patient.py` asks
            del os.environ[name]
        for _ in range(STEPS_EACH):
            self.step()


WAYS: tuple[Callable[[Script], None], ...] = (
    Script.in_a_storm_of_signals,
    Script.in_threads,
    Script.under_asyncio,
    Script.traced_and_profiled,
    Script.with_a_frozen_collector_and_another_clock,
    Script.beside_forked_children,
    Script.beside_children_that_are_forked_in_a_step_and_leave_it,
    Script.with_copies_of_the_engine,
    Script.with_loaders_of_all_kinds,
    Script.with_other_micro_batches_and_evaluations,
    Script.with_another_priority_other_cores_and_blocked_signals,
    Script.with_what_a_process_may_ask_of_the_kernel_for_itself,
    Script.beside_threads_that_fork,
    Script.with_compiled_layers,
    Script.with_checkpoints_that_are_loaded,
    Script.with_no_environment,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--losses", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    script = Script()
    for _ in range(PATIENT_STEPS):
        script.step()
    for way in WAYS:
        way(script)
    if torch.distributed.get_rank() == 0:
        options.losses.write_text("\n".join(script.losses))
    torch.distributed.barrier()
    os._exit(7)


if __name__ == "__main__":
    main()
