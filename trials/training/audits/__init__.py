"""Audits: a trial of a group is compared with the same trial alone."""
