"""What a side task asks before every unit of device work, by kind of device."""
