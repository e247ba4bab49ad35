"""A Prefect server and worker of this checkout on this machine: for `make demo`, `make up`, `make down` and the tests."""
