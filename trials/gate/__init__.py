"""Gates: what a side task asks before every unit of device work. One file per kind of device: `cpu`, `cuda`."""
