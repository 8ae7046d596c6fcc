"""What the processes share: messages, the page, records, signals, a device's driver. Standard library only."""
