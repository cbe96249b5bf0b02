"""`python -m kvkeep.cli`: the command line without its script."""

from kvkeep.cli import main

main()
