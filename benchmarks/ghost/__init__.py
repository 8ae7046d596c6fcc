"""One process as one true stage of a simulated pipeline."""
