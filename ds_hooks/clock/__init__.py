"""When a bubble begins and ends: `base` has the protocol, `cpu` and `cuda` the clocks, `registry` chooses."""
