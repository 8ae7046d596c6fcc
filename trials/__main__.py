"""python -m trials: the `trials` command."""

from trials.cli import main

raise SystemExit(main())
