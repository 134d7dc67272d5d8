"""Engines under test: an engine's own scheduler decides in a run of Lockstep.

    python -m lockstep_engines vllm [DIR]

speaks docs/protocols.md on standard input and output. docs/engines.md lists what is driven and what
is refused.
"""
