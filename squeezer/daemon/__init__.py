"""The daemon of one device: everything of it that touches the world."""
