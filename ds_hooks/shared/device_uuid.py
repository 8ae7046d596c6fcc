"""The UUID of the main job's CUDA device, by which the others find the same device.

It is a number of 128 bits, in the two words at `Field.DEVICE_UUID`, the high one first. 0: unknown.
"""

import struct

from ds_hooks.shared.page.layout import Field


def uuid_number(uuid: object) -> int:
    """The number of what PyTorch's device properties call `uuid`; 0 for None, which an older PyTorch gives."""
    return 0 if uuid is None else int(str(uuid).replace("-", ""), 16)


def write_device_uuid(words: "memoryview[int]", uuid: int) -> None:
    """Write the number on the page. Only the main job calls this."""
    words[Field.DEVICE_UUID], words[Field.DEVICE_UUID + 1] = struct.unpack(">qq", uuid.to_bytes(16, "big"))


def read_device_uuid(words: "memoryview[int]") -> int:
    """The number on the page; 0: unknown."""
    return int.from_bytes(struct.pack(">qq", words[Field.DEVICE_UUID], words[Field.DEVICE_UUID + 1]), "big")
