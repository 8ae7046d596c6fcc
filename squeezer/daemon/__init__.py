"""The daemon of one device: all its parts that touch the world. It starts in `loop`."""
