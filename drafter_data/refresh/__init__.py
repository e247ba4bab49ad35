"""The nightly refresh without Prefect: finding finished runs, what is new in a version, and the record of each night."""
