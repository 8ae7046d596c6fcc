"""Code that runs as the user wrote it: under one vmap, or once per trial."""
