"""The parts of scripts/study_staleness.py."""
