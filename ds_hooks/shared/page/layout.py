"""The layout of the shared page: where each word lies, what writes it, and the meaning of its values.

A page has one device. The main job, the daemon and the side task map it. Every field is an aligned 64-bit word with one
writer, so a reader never sees half a value. The main job's *bubble word* is the truth: `epoch << 1 | open`.

What writes the page:

    main job     bubbles: ds_hooks/clock/cpu.py or ds_hooks/clock/cuda.py
                 its presence and counters: ds_hooks/connection.py, ds_hooks/step_hooks.py
    daemon       whom it serves, and the plan: squeezer/daemon/loop.py, by ds_hooks/shared/page/plan.py
                 that another one is to leave: squeezer/daemon/former_daemon.py
                 the side task's process and memory: squeezer/daemon/side_task_supervisor.py,
                 squeezer/daemon/memory_limit.py, squeezer/daemon/side_processes/family.py
                 in place of a process that has died or must end: squeezer/device/cpu.py, squeezer/device/cuda.py
    side task    what it does: trials/side_task/main.py, trials/gate/cpu.py, trials/gate/cuda.py
                 what is left of a permit on a device: trials/gate/bubble_watch.py
                 its own processes: trials/gate/process.py
                 counters: trials/gate/unit_costs.py
                 its device memory: trials/gate/cuda_queue.py, trials/side_task/offload.py
                 the gate of a device whose daemon has died: trials/gate/parent_watch.py
    either       a gate that is forced open: ds_hooks/shared/forced_gate.py

`file` opens pages, `plan` encodes the words per slot, `device_uuid` the name of a CUDA device.
"""

from enum import IntEnum

PAGE_MAGIC = 0x315A515342  # "BSQZ1"
PAGE_VERSION = 7
PAGE_BYTES = 163840


class Field:
    """The index of each 64-bit word. Each writer has cache lines (8 words) of its own.

    The string under a word is its row in docs/protocol.md: writer, colon, meaning. Plain numbers, not an enum: hooks
    and units read them so often that the members' look-up would cost more than the words.
    """

    MAGIC = 0
    """creator: `0x315A515342`"""
    VERSION = 1
    """creator: the version of this layout"""
    BOOT_ID = 2
    """creator: the machine's boot id in two words, the high one first, 63 bits of each"""
    PID_NAMESPACE = 4
    """creator: its PID namespace, in which the page's process ids are valid"""
    TIME_NAMESPACE = 5
    """creator: its time namespace, whose `CLOCK_MONOTONIC` the page's times use"""

    MAIN_PID = 8
    """main job: its process; 0: there is none"""
    BUBBLE = 9
    """main job: **the bubble word**, `epoch << 1 | open`"""
    BUBBLE_START_NS = 10
    """main job: start of the last bubble that opened"""
    BUBBLE_END_NS = 11
    """main job: end of the last bubble that closed"""
    STEP = 12
    """main job: step of the last bubble that opened"""
    SLOT = 13
    """main job: slot of the last bubble that opened"""
    PERMIT_UNTIL_NS = 14
    """main job: until when the side task may run in this bubble; 0: not at all"""
    PERMIT_LENGTH_NS = 15
    """main job's device: the permit as a length, where the host does not know when a bubble begins"""
    HOOK_FAULTS = 16
    """main job: how often its hooks have switched themselves off"""
    DROPPED = 17
    """main job: messages dropped, as of the last step's end"""
    CLOCK_KIND = 18
    """main job: how it knows when bubbles begin and end, a `ClockKind`"""
    MAIN_PEAK_BYTES = 21
    """main job: the most device memory that it has reserved so far, every 10 steps"""
    FREE_BYTES = 22
    """main job: free device memory, every 10 steps"""
    PROBE = 23
    """main job and its device: at start, whether the device sees this memory"""

    DAEMON_PID = 24
    """daemon: its process; 0: there is none"""
    PLAN_FROM_STEP = 25
    """daemon: the first step for which the plan holds"""
    PLAN_UNTIL_STEP = 26
    """daemon: the first step for which it no longer holds"""
    FLUSH_SLOT = 27
    """daemon: the slot at whose bubbles the main job sends its messages"""
    SIDE_PROCESS = 28
    """daemon: the side task's process, from its start until the daemon has noticed its end; 0: there is none"""
    PREEMPTIVE = 29
    """daemon: a `Preemption`, what stops a side task that is awake. 1: the bubble's end; 0: that only if it does host \
work, else the end of the main job's next instruction; 2: the begin of an evaluation or of a step that is not planned. \
One with processes of its own is stopped by each bubble's end"""
    SIDE_LIMIT_BYTES = 30
    """daemon: the most device memory that the side task may hold; 0: no limit is known"""
    SERVES_ANY_JOB = 31
    """daemon: 1: it serves one job after another; 0: only the one that it was started with"""

    PLAN_BASE_NS = 32
    """main job: the time from which this bubble's permit and renewals count"""
    MAIN_START = 33
    """main job: when its process started, in ticks since boot, because process ids are reused"""

    SIDE_PID = 40
    """side task: its process, once it serves this page"""
    SIDE_ACTIVITY = 41
    """side task: what it is doing, a `SideActivity`"""
    UNITS_RUN = 42
    """side task: units that have ended"""
    UNITS_DECLINED = 43
    """side task: wake-ups at which no unit fit"""
    BUSY_NS = 44
    """side task: CPU time in units and host work"""
    WORK = 45
    """side task: trial-samples trained so far"""
    SIDE_BYTES = 46
    """side task: the device memory that it holds; at start, its probe"""
    SIDE_START = 47
    """side task: when its process started, in ticks since boot"""

    DEVICE_GATE = 48
    """main job's device; in an emergency the daemon or the side task: how many µs of the open bubble may be used, a \
`DeviceGate`"""
    DEVICE_UUID = 49
    """main job: the UUID of its CUDA device in two words, the high one first; 0: unknown"""

    DAEMON_START = 56
    """daemon: when its process started, in ticks since boot"""
    SIDE_PROCESS_START = 57
    """daemon: when the process of `SIDE_PROCESS` started, in ticks since boot; 0: unknown"""

    NEXT_DAEMON = 58
    """the next daemon: its process, while it waits until this page's daemon, whose job has begun again, has left"""

    PERMITS = 64
    """daemon: one word per slot, the permit of its bubbles: see `plan`"""
    RENEWALS = 4096
    """daemon: `RENEWALS_PER_SLOT` words per slot: see `plan`"""

    SIDE_CHILDREN = 20224
    """side task: 1: there may be threads, or processes of its own in its process group, that run on while it sleeps"""
    SIDE_FORKS = 20225
    """side task: how many processes it has forked"""
    SEARCH_PROCESS = 20226
    """side task: its search worker"""
    PERMIT_LEFT = 20227
    """side task; at a bubble's start the main job's device, in an emergency the daemon: how many µs of the open \
bubble's permit are left, on a CUDA device; between bubbles, `DeviceGate.ANY`"""

    FORKED_PROCESSES = 20232
    """side task's processes, each in a word of its own: `PROCESS_WORDS` words, the processes that it has forked last"""
    FOUND_PROCESSES = 20248
    """daemon: `PROCESS_WORDS` words, further processes of the side task"""
    STRAYS = 20264
    """daemon: `STRAY_WORDS` words, the side task's processes that have left its process group: \
`start << 22 | process`, the start in ticks since boot; 0 ends the list"""


PLANNED_SLOTS = Field.RENEWALS - Field.PERMITS
"""Bubbles of later slots are never opened."""
RENEWALS_PER_SLOT = 4
PROCESS_WORDS = 16
STRAY_WORDS = 4
"""Each costs the main job some 20 µs in a bubble, so there are few."""


class SideActivity:
    """Values of `SIDE_ACTIVITY`; plain numbers for the same reason as in `Field`."""

    ASLEEP = 0
    """It sleeps until a signal comes."""
    UNIT = 1
    """It runs device work that ends by itself and was forecast to fit."""
    HOST = 2
    """It does host work of unknown length, and may be stopped anywhere."""


class Preemption:
    """Values of `PREEMPTIVE`: whether a side task that is awake when the bubble ends is stopped.

    One that has processes of its own always is, and at once.
    """

    NONE = 0
    """Once the main job's next instruction has ended, if it is in a unit, else at once. The plan leaves it time."""
    STOP = 1
    """At once."""
    IDLE_CLASS = 2
    """When an evaluation begins, or a step that is not planned, and at the ends of that one's bubbles. Until then the
    kernel's idle class keeps it off a core that is wanted."""


class DeviceGate:
    """Values of `DEVICE_GATE`: for how many µs the open bubble may be used.

    Each unit in a side task's stream waits on the device until the word is large enough for it.
    """

    CLOSED = 0
    """Holds every unit back."""
    FORCED = 2**31 - 1
    """Lets every waiting unit through, because its process must end. Devices compare signed numbers."""
    ANY = FORCED - 1
    """Of `PERMIT_LEFT`: holds no unit back."""

    @staticmethod
    def open_for(permit_ns: int) -> int:
        """The value for a bubble with this permit."""
        return max(1, min(permit_ns // 1000, DeviceGate.FORCED - 1))


class ClockKind:
    """Values of `CLOCK_KIND`: how the main job knows when bubbles begin and end."""

    CPU = 0
    """By the host's clock, which is exact for a CPU. On a CUDA device: no clock is there, so no bubble counts."""
    CUDA = 1
    """The device writes the words itself, in stream order."""
    CUDA_POLLED = 2
    """A thread polls events and writes the words a little late."""


class Role(IntEnum):
    """The three writers of a page, each by the word with its process. A role has one holder at a time."""

    MAIN = Field.MAIN_PID
    DAEMON = Field.DAEMON_PID
    SIDE = Field.SIDE_PID

    @property
    def start(self) -> int:
        """The word with the start time of that process."""
        return {Role.MAIN: Field.MAIN_START, Role.DAEMON: Field.DAEMON_START, Role.SIDE: Field.SIDE_START}[self]
