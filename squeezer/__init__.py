"""The daemon of one device, and the `squeezer` command.

Decisions are in `policy`, whatever touches the world in `daemon`, what a run leaves behind in `records`, figures in
`reports`.
"""

from ds_hooks.shared.renamed_commands import refuse_moved_module

refuse_moved_module()
