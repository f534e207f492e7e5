"""The parts of scripts/study_hpd.py."""
