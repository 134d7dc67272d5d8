"""Lockstep in pytest: a test for each saved case, recording, seed and layout, and a fixture that
records and audits the vLLM scheduler which a test drives. docs/ci.md says how to use it.

The plugin is loaded by itself where the wheel is installed (entry point `pytest11`); from a folder,
`-p lockstep_pytest.plugin`. The command is $LOCKSTEP, or the `lockstep` of this environment, or
that of the PATH.
"""
