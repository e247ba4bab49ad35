"""`python -m drafter_data` is `drafter-data`."""

from drafter_data.cli.main import main

main()
