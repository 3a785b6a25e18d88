"""What `ci/run` does on a machine of any vendor: the device, the environment, the tests, the figures, the report.

The standard library is all it needs, for it runs before anything is installed. `cli` reads the options, `pipeline`
runs the steps in order, each step gives a `Result`, and `report` writes what they gave.
"""
