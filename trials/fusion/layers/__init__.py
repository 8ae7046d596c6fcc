"""Fusion rules, one file per family of layers. Importing a file adds its rules to the table."""
