"""The daemon's policy, as tests of its decisions want it."""

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.state import Policy


def policy(*, alone_share: float = 0.1, budget: float = 0.01, enabled: bool = True, retry_steps: int = 200) -> Policy:
    """The defaults, but for what is named."""
    guard = GuardTable(slowdown_budget=budget, enabled=enabled, retry_steps=retry_steps)
    return SqueezeTable(alone_share=alone_share).policy(guard)
