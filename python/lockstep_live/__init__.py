"""Audits every decision of a vLLM that serves. docs/live_check.md.

Off unless $LOCKSTEP says `log` or `raise`. Importing this imports nothing of vLLM.
"""
