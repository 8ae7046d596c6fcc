"""The graph of a forward: traced once, and run as a list of steps for K trials."""
