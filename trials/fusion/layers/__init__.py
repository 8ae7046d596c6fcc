"""One file per family of layers: how K of them are computed as one. Importing it fills the table."""
