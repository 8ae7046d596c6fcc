"""The real job under random faults, again and again: the losses keep their bits, and nothing stays behind."""
