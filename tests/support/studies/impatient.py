"""Small trials that a worker whose device is idle loses after seconds."""

from many import Many

from trials.search import worker_process

worker_process.IDLE_LEASES = 0.05


class Impatient(Many):
    trials = 12
