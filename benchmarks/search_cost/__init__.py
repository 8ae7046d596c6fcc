"""What the search itself costs: time per trial, and statements per second."""
