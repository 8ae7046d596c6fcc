"""python -m squeezer: the `squeezer` command."""

from squeezer.cli import main

raise SystemExit(main())
