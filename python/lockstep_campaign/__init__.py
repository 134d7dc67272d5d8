"""Campaigns: fuzz runs spread over processes or a Ray cluster (`lockstep campaign`)."""
