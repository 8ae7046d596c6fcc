"""What the processes agree on: messages, the page, and how a device is asked. Standard library only, and no pyzmq."""
