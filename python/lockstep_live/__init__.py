"""Audits every decision of a vLLM that serves. docs/recorder.md.

Off unless $LOCKSTEP says `log` or `raise`. Importing this imports nothing of vLLM.
"""
