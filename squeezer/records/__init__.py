"""What a run leaves behind on disk: its layout, its writer and its reader."""
